"""Joining and leaving, where compiled programs may still be at work."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from typing import Any

from collectives import runtime
from collectives.jax.eager import settle
from collectives.process_sets import ProcessSet


def init(comm: Any = None, process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None) -> None:
    """Join the other ranks: see `collectives.init`."""
    runtime.init(comm, process_sets)
    # What a program has dispatched before it ends is carried out first; registered later than the world's own end, it
    # comes before that.
    atexit.unregister(_finish)
    atexit.register(_finish)


def shutdown() -> None:
    """Leave the other ranks, when compiled programs have made their ordered calls: see `collectives.shutdown`."""
    _finish()
    runtime.shutdown()


def _finish() -> None:
    if runtime.is_initialized():
        settle()
