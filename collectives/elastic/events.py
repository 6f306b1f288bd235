"""What happens to an elastic job, told to functions of the program."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from collectives.base.errors import first_line
from collectives.base.logging import logger
from collectives.worlds import generations

_listeners: list[Callable[[Event], object]] = []


class Event(NamedTuple):
    """An event of the job: of this rank, as the rank saw it; or, with ``facts``, of any rank or host, as the job's
    driver saw it.

    Attributes:
        kind: of this rank: "ended" (a generation, because of a failure or a notice), "renewed" (the next generation has
            formed), "joined" (this rank, as a newcomer), "gave up". The driver's kinds are in a table of
            docs/elastic.md.
        why: the reason, in one line; may be empty.
        seconds: how long a renewal took.
        generation: its number; 0 in a job that is not elastic.
        members: of the generation, in the order of ranks.
        facts: the driver's line in the file of ``--elastic-events``; empty: this rank saw the event itself.
    """

    kind: str
    why: str = ""
    seconds: float = 0.0
    generation: int = 0
    members: tuple[int, ...] = ()
    facts: Mapping[str, Any] = {}

    def __hash__(self) -> int:
        return hash(self[:-1])  # `facts` cannot be hashed

    def __str__(self) -> str:
        if self.facts:
            return f"elastic: {self.kind}: {self.why}"
        said = [self.kind, f"generation {self.generation} of members {', '.join(map(str, self.members)) or 'unknown'}"]
        said += [f"after {self.seconds:.3f} s"] if self.seconds else []
        return f"elastic: {', '.join(said)}{self.why and f': {self.why}'}"


def on_event(listener: Callable[[Event], object]) -> Callable[[Event], object]:
    """Call a function with every `Event` from now on; usable as a decorator.

    For events of this rank, the function runs in the thread that meets the event, and its exceptions propagate there.
    For events of the job's driver, it runs in a thread of its own, in the driver's order, and its exceptions are
    logged.

    Example:
        collectives.elastic.on_event(print)
    """
    _listeners.append(listener)
    generations.hear_events(_tell_of_driver)
    return listener


def tell(kind: str, why: str = "", seconds: float = 0.0) -> None:
    """Call the listeners."""
    if _listeners:
        event = Event(kind, why, seconds, *_generation())
        for listener in _listeners:
            listener(event)


def _tell_of_driver(facts: Mapping[str, Any]) -> None:
    number, members = _generation()
    members = tuple(facts.get("members", members))
    event = Event(
        facts["event"], facts["text"], facts.get("seconds", 0.0), facts.get("generation", number), members, facts
    )
    for listener in _listeners:
        try:
            listener(event)
        except Exception:
            logger.exception("a listener of on_event() failed on %s [E37]", event)


def _generation() -> tuple[int, tuple[int, ...]]:
    job = generations.job()
    return (job.generation, job.members) if job is not None else (0, ())


def renew(cause: Exception | str, record: Any = None) -> list[Any]:
    """End the generation for the next one, as `generations.renew` does, and tell of both."""
    why = first_line(cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}")
    tell("ended", why)
    start = time.monotonic()
    records = generations.renew(cause, record)
    tell("renewed", why, time.monotonic() - start)
    return records
