"""What the engine's benchmarks share: a started engine with its ranks, one voice, and the engine's counters as plain
numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import collectives
from benchmarks.ranks import Ranks


@contextmanager
def session() -> Iterator[Ranks]:
    """The ranks of a run; the engine is started and shut down, unless the caller had started it."""
    started = not collectives.is_initialized()
    if started:
        collectives.init()
    try:
        yield Ranks()
    finally:
        if started:
            collectives.shutdown()


def say(ranks: Ranks, text: str) -> None:
    """Print on rank 0."""
    if ranks.rank == 0:
        print(text, flush=True)


def counters(statistics: object) -> dict[str, int]:
    """An object's whole-numbered attributes by name: a copy, so that a later one can be compared with it."""
    names = [name for name in dir(statistics) if not name.startswith("_")]
    values = {name: getattr(statistics, name) for name in names}
    return {name: value for name, value in values.items() if isinstance(value, int)}


def per_step(before: Mapping[str, int], after: Mapping[str, int], steps: int) -> dict[str, float]:
    """How far each counter rose in a step, on average over ``steps``; a counter that is new rose from 0."""
    return {name: (value - before.get(name, 0)) / steps for name, value in after.items()}
