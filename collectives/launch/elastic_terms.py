"""The terms of an elastic job's driver: its rules, the members and their states, and the actions that it decides on."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass(frozen=True, slots=True)
class Rules:
    """What the user wants.

    Attributes:
        smallest, largest: numbers of ranks; ``largest`` None: as many as the hosts take.
        elastic_timeout: seconds that the job waits for what it lacks.
        grace: seconds that members have to end a generation, after the first has.
        reset_limit: the largest number of generations after the first; None: any.
        cooldown: see `HostTable`.
        blacklist_host: whether the failure of a member blacklists its host.
        spares: members that are kept ready beyond the largest number of ranks.
        fixed: whether no further hosts can come.
        majority: whether a generation needs more than half of the members of the one before, or half of them and a
            newcomer: for drivers that do not see whether the others have ended.
    """

    smallest: int = 1
    largest: int | None = None
    elastic_timeout: float = 600.0
    grace: float = 10.0
    reset_limit: int | None = None
    cooldown: tuple[float, float] | None = None
    blacklist_host: bool = False
    spares: int = 0
    fixed: bool = False
    majority: bool = False

    @property
    def most(self) -> int:
        return sys.maxsize if self.largest is None else self.largest


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process."""

    member: int
    host: str
    slot: int


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill a process, with its children."""

    member: int


@dataclass(frozen=True, slots=True)
class Set:
    """Set a key of the store."""

    key: str
    value: Mapping[str, Any] | str


@dataclass(frozen=True, slots=True)
class Drop:
    """Remove the keys of the store that begin so."""

    prefix: str


@dataclass(frozen=True, slots=True)
class Event:
    """What has happened, for people (``text``) and for programs."""

    kind: str
    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def line(self, time: float) -> str:
        """Return it as a line of JSON."""
        return json.dumps({"time": time, "event": self.kind, **self.fields, "text": self.text})


Action = Start | Kill | Set | Drop | Event


@dataclass(frozen=True, slots=True)
class End:
    """The end of the job: its exit code, and why, if no member's failure says it."""

    code: int
    text: str = ""


class State(Enum):
    """How far a member is."""

    STARTED = "has not called init()"
    HERE = "waits for the first generation"
    ALONE = "warms up"
    READY = "waits to be admitted"
    IN = "is in the generation"
    WAITING = "waits for the next generation"
    FINISHED = "has finished"
    FAILED = "is about to end"
    GONE = "is being ended"


@dataclass(slots=True)
class Member:
    """A process.

    Attributes:
        question: the number of what it has said last; if it waits, that is answered.
        born: the generation in which it was admitted; 0: none yet.
        alone: whether it wants the next generation to have no newcomers.
        lives_after: the newest generation of whose end it has been told; it lives, and may compute.
        since: when it got into its state.
        runs: whether it has begun to train; a newcomer, whether it has committed.
        why: what it has said of its failure.
    """

    number: int
    host: str
    slot: int
    since: float
    state: State = State.STARTED
    question: int = 0
    born: int = 0
    alone: bool = False
    lives_after: int = 0
    runs: bool = False
    why: str = ""

    def __str__(self) -> str:
        return f"member {self.number} on {self.host}"

    @property
    def place(self) -> tuple[str, int]:
        return self.host, self.slot
