"""`init` and `shutdown` that wait for compiled programs which are still running."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from typing import Any

from collectives.jax.eager import wait_for_effects
from collectives.worlds import runtime
from collectives.worlds.process_sets import ProcessSet


def init(
    comm: Any = None,
    process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None,
    *,
    rendezvous: str | None = None,
    store: Any = None,
    rank: int | None = None,
    size: int | None = None,
) -> None:
    """Join the other ranks: see `collectives.init`."""
    runtime.init(comm, process_sets, rendezvous=rendezvous, store=store, rank=rank, size=size)
    # Exit handlers run in reverse order: registered after the world's own, this one carries out what the program has
    # dispatched before the world ends.
    atexit.unregister(_finish_programs)
    atexit.register(_finish_programs)


def shutdown() -> None:
    """Leave the other ranks once compiled programs have made their ordered calls: see `collectives.shutdown`."""
    _finish_programs()
    runtime.shutdown()


def _finish_programs() -> None:
    if runtime.is_initialized():
        wait_for_effects()
