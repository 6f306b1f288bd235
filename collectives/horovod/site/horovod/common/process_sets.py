"""Process sets."""

from typing import Any

from collectives import ProcessSet, global_process_set, remove_process_set, runtime


def add_process_set(process_set: Any) -> ProcessSet:
    """`collectives.add_process_set`, which refuses here what it takes elsewhere: the ranks of a set that is known.

    Raises:
        ValueError: a set has these ranks already, or all ranks do.
    """
    return runtime.add_process_set(process_set, unlike=True)


__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
