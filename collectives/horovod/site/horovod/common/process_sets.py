"""Process sets."""

from typing import Any

from collectives import ProcessSet, global_process_set, remove_process_set
from collectives.worlds import runtime


def add_process_set(process_set: Any) -> ProcessSet:
    """`collectives.add_process_set` with Horovod's restriction: the ranks must differ from those of known sets.

    Raises:
        ValueError: a set has these ranks already, or all ranks do.
    """
    return runtime.add_process_set(process_set, unlike=True)


__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
