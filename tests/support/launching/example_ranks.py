"""One rank that runs examples one after the other: ``mpirun -n 2 python -m tests.support.launching.example_ranks
FOLDER JOBS``.

Starting a framework takes longer than most examples, so that they share one process. JOBS is a list in JSON of lists of
commands, each a script and its flags: the first one is run by all ranks together, and then the second one, if there is
one, by rank 0 alone. What a script's ``main()`` has trained is kept in FOLDER: ``NAME-SIZE-RANK.npz`` holds the
parameters in their order.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np

import collectives


def parameters(trained: Any) -> list[np.ndarray]:
    """Those of a Keras model, of a PyTorch module, or arrays as they are."""
    if hasattr(trained, "get_weights"):
        return trained.get_weights()
    if hasattr(trained, "state_dict"):
        return [tensor.numpy() for tensor in trained.state_dict().values()]
    return [np.asarray(array) for array in trained]


def run(command: list[str], rank: int, folder: Path) -> None:
    name, size = Path(command[0]).stem, collectives.size()
    if rank == 0:
        print(f"### {name} {size}", flush=True)
    sys.argv = command
    trained = runpy.run_path(command[0])["main"]()
    if trained is not None:
        np.savez(folder / f"{name}-{size}-{rank}.npz", *parameters(trained))


def main() -> None:
    collectives.init()
    from mpi4py import MPI

    folder, rank = Path(sys.argv[1]), collectives.rank()
    for together, *alone in json.loads(sys.argv[2]):
        run(together, rank, folder)
        for command in alone:
            collectives.shutdown()
            if rank == 0:
                collectives.init(comm=MPI.COMM_SELF)
                run(command, rank, folder)
                collectives.shutdown()
            collectives.init()  # where the other ranks wait, and use no core


if __name__ == "__main__":
    main()
