"""Process sets."""

from typing import Any

from collectives import ProcessSet, global_process_set, remove_process_set
from collectives.worlds import runtime


def add_process_set(process_set: Any) -> ProcessSet:
    """`collectives.add_process_set`, but a ValueError if a set, or the world, has these ranks already."""
    return runtime.add_process_set(process_set, unlike=True)


__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
