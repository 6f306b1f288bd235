"""Times sums in the order of the fixed tree beside the ordinary ones, in turns::

    collectivesrun -np 4 python -m benchmarks.reproducible

Prints, for each size, the medians in microseconds and their ratio, of float32 sums in place.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

import collectives

SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
ROUNDS = 15


def main() -> None:
    collectives.init()
    for nbytes in SIZES:
        tensor = np.ones(nbytes // 4, np.float32)
        times: dict[str | None, list[float]] = {None: [], "reproducible": []}
        calls = max(1, min(50, (1 << 20) // nbytes))
        for number in range(ROUNDS + 1):
            for algorithm, measured in times.items():
                collectives.barrier()
                begun = time.perf_counter()
                for _ in range(calls):
                    collectives.allreduce_(tensor, op=collectives.Average, algorithm=algorithm)
                if number:  # the first one makes the plan
                    measured.append((time.perf_counter() - begun) / calls * 1e6)
        if collectives.rank() == 0:
            ordinary, reproducible = (statistics.median(each) for each in times.values())
            print(f"{nbytes:>10} B {ordinary:10.1f} {reproducible:10.1f} {reproducible / ordinary:6.2f}", flush=True)
    collectives.shutdown()


if __name__ == "__main__":
    main()
