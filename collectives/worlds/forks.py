"""Worlds in forked children, which share their parent's memory and MPI and may not communicate."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """A world, as `remember` needs it."""

    def after_fork(self) -> None:
        """In a forked child: refuse all calls."""


_worlds: list[weakref.ref[Forked]] = []
"""References without callbacks: an interrupt that is handled in one, when a world ends, would be lost."""


def remember(world: Forked) -> None:
    """Have ``world.after_fork`` called in every child that is forked while the world exists."""
    for ended in [reference for reference in _worlds if reference() is None]:
        with contextlib.suppress(ValueError):  # another thread has removed it
            _worlds.remove(ended)
    _worlds.append(weakref.ref(world))


def _after_fork_in_child() -> None:
    for world in filter(None, [reference() for reference in _worlds]):
        world.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
