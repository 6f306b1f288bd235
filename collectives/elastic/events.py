"""What happens to an elastic job, told to functions of the program."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from collectives.base.errors import first_line
from collectives.worlds import generations

_listeners: list[Callable[[Event], object]] = []


class Event(NamedTuple):
    """Something that has happened to the job, as this rank has seen it.

    Attributes:
        kind: "ended" (a generation, because of a failure or a notice), "renewed" (the next one is there), "joined"
            (this rank, as a newcomer), "gave up".
        why: one line; empty where there is nothing to say.
        seconds: what a renewal has taken.
        generation: its number; 0 in a job that is not elastic.
        members: of the generation, in the order of ranks.
    """

    kind: str
    why: str = ""
    seconds: float = 0.0
    generation: int = 0
    members: tuple[int, ...] = ()

    def __str__(self) -> str:
        said = [self.kind, f"generation {self.generation} of members {', '.join(map(str, self.members)) or 'unknown'}"]
        said += [f"after {self.seconds:.3f} s"] if self.seconds else []
        return f"elastic: {', '.join(said)}{self.why and f': {self.why}'}"


def on_event(listener: Callable[[Event], object]) -> Callable[[Event], object]:
    """Have a function called with every `Event`, in the thread that meets with it; usable as a decorator.

    Example:
        collectives.elastic.on_event(print)
    """
    _listeners.append(listener)
    return listener


def tell(kind: str, why: str = "", seconds: float = 0.0) -> None:
    """Call the listeners."""
    if _listeners:
        job = generations.job()
        event = Event(kind, why, seconds, *((job.generation, job.members) if job is not None else ()))
        for listener in _listeners:
            listener(event)


def renew(cause: Exception | str, record: Any = None) -> list[Any]:
    """End the generation for the next one, as `generations.renew` does, and tell of both."""
    why = first_line(cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}")
    tell("ended", why)
    start = time.monotonic()
    records = generations.renew(cause, record)
    tell("renewed", why, time.monotonic() - start)
    return records
