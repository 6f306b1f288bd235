"""Making process groups of torch.distributed, ours and gloo's in turns:
``torchrun --nproc-per-node 2 -m benchmarks.torch_groups``.

The time is that of ``new_group`` over a default group of ours, of all ranks; memory is this process's share of all that
it has touched.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch.distributed as dist

from collectives.tools.bench import cli


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, on rank 0."""
    flags = cli.Parser(prog="benchmarks.torch_groups", description="Process groups of torch.distributed.")
    flags.add_count("-n", "--rounds", default=5, help="rounds, each with groups of both")
    flags.add_count("-g", "--groups", default=50, help="groups that are made in a row")
    options = flags.parse_args(arguments)
    dist.init_process_group("collectives")
    for turn in range(options.rounds + 1):  # the first one is not timed: it imports
        for backend in ("gloo", "collectives"):
            text = measure(backend, options.groups if turn else 1)
            if turn and dist.get_rank() == 0:
                print(f"{backend:<12}{text}", flush=True)
    dist.destroy_process_group()


def measure(backend: str, count: int) -> str:
    """Make so many groups, and end them."""
    dist.barrier()
    before, cpu, times, groups = resident(), time.process_time(), [time.perf_counter()], []
    for _ in range(count):
        groups.append(dist.new_group(backend=backend))
        times.append(time.perf_counter())
    cpu = time.process_time() - cpu
    grown = resident() - before
    each = np.diff(times) * 1e3
    dist.barrier()
    for group in groups:
        dist.destroy_process_group(group)
    return (
        f"{count} groups: ms each: mean {each.mean():.2f}, median {np.median(each):.2f}, lowest tenth "
        f"{np.quantile(each, 0.1):.2f}, CPU {cpu / count * 1e3:.2f}; {grown / 1e6:.1f} MB"
    )


def resident() -> float:
    """Bytes of memory, of shared pages a share."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


if __name__ == "__main__":
    main()
