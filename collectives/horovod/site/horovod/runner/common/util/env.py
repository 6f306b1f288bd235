"""This rank's place, from the environment."""

from __future__ import annotations

import os

_PLACES = (("HOROVOD_RANK", "HOROVOD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))


def get_env_rank_and_size() -> tuple[int, int]:
    """Return rank and size from the launcher's variables, before ``init()``; (0, 1) without a launcher.

    A RuntimeError if only one of the two is set.
    """
    for names in _PLACES:
        rank, size = (os.environ.get(name) for name in names)
        if rank is not None and size is not None:
            return int(rank), int(size)
        if rank is not None or size is not None:
            raise RuntimeError(
                f"rank and size: expected both {names[0]} and {names[1]} in the environment, or neither; only one is "
                "set [F114]"
            )
    return 0, 1
