"""Notices that the members of a group have sent through the heart, as one member has received them."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from collectives.base.errors import RankFailedError
from collectives.base.wake_up import WakeUp
from collectives.transport import backoff

if TYPE_CHECKING:
    from collectives.transport.tcp.heart import Heart

_TAKEN_WITHIN = 1.0
"""Seconds that the system may take for what is told."""
OUTERMOST = "0"
"""The name of the group of all ranks."""
VALUE = 5
"""The kind of a frame of the heart whose text is this rank's value in the group's next exchange."""
AFTER_EVERY_CALL = 1 << 62
"""The number of the last call of a rank that leaves after a failure: it must not look as if it had left early."""


class Notice(enum.IntEnum):
    """What a rank may say of itself, with a text. The number is the tag of a message of MPI and the kind of a frame of
    the heart, of which there are lower ones besides."""

    FAILED = 2
    """The text is the reason."""
    LEFT = 3
    """The text is the number of its last call, after which nothing more is told."""
    HERE = 4
    """It waits; the text is the number of its present call."""


class Notices:
    """What the other members of one group have said about themselves, or what is known of their ends; methods that
    `network_control.ControlChannel` has too do the same here.

    The service's thread fills the attributes, whose keys are ranks of the group; any thread may read them.

    Attributes:
        failed: reason by failed rank; a rank that has died has failed.
        died: of these, those that ended without a word, with a sentence that names rank and host.
        left: last call by rank that has left.
        here: present call by waiting rank.
        gone: the ranks whose connection has ended, for whatever reason.
    """

    def __init__(self, heart: Heart, group: str, members: Sequence[int]) -> None:
        self.group, self.members = group, tuple(members)
        self.failed: dict[int, str] = {}
        self.died: dict[int, str] = {}
        self.left: dict[int, int] = {}
        self.here: dict[int, int] = {}
        self.gone: set[int] = set()
        self.closed = False
        self._has_left = False
        self._heart = heart
        self._places = {member: place for place, member in enumerate(self.members)}
        self._values: list[deque[str]] = [deque() for _ in self.members]
        """By rank: what it has offered in exchanges that this rank has not finished; a peer may be one ahead."""
        self._arrival = WakeUp()

    def tell(self, notice: Notice, text: str) -> None:
        if not self._has_left:
            self._has_left = notice is Notice.LEFT
            self._heart.tell(self, notice, text)

    def leave(self, calls: int) -> None:
        self.tell(Notice.LEFT, str(calls))

    def offer(self, text: str) -> None:
        """Begin an exchange: give the other members this rank's value."""
        self._values[self._places[self._heart.rank]].append(text)
        self._heart.offer(self, text)

    def silent(self) -> set[int]:
        """The members whose values of the present exchange have not arrived."""
        return {place for place, values in enumerate(self._values) if not values}

    def await_value(self, milliseconds: float) -> None:
        """Sleep until a value arrives, at most so long; the system is given what it has not taken yet."""
        self._heart.has_told(self)
        self._arrival.wait(milliseconds / 1000)

    def take_values(self) -> list[str]:
        """End the exchange: every member's value, in rank order."""
        return [values.popleft() for values in self._values]

    def quiet(self) -> bool:
        return backoff.poll(lambda: self._heart.has_told(self), _TAKEN_WITHIN)

    def look_for_failures(self) -> None:
        """Raise RankFailedError if a member has failed: a death before a failure, and a failure that has a cause of its
        own before one that another rank's has caused."""
        if not self.failed:
            return
        me = f"rank {self._heart.rank}"
        for sentence in list(self.died.values()):
            raise RankFailedError(f"{me}: {sentence}")
        place, text = min(list(self.failed.items()), key=lambda item: RankFailedError.__name__ in item[1])
        raise RankFailedError(f"{me}: rank {self.members[place]} has failed [R3]:\n{text}")

    def departed(self) -> set[int]:
        return self.left.keys() | self.gone

    def all_left(self) -> bool:
        """Whether every other member has left or died."""
        return len(self.departed()) >= len(self.members) - 1

    def close(self) -> None:
        """Note that this rank uses the group no more, and tell the others unless they know."""
        self.closed = True
        self.leave(AFTER_EVERY_CALL)
        self._heart.forget(self)

    def deliver(self, rank: int, kind: int, text: str) -> None:
        """Take in a `Notice` or a `VALUE`."""
        place = self._places.get(rank)
        if place is None:
            return
        if kind == VALUE:
            self._values[place].append(text)
            self._arrival.set()
        elif kind == Notice.FAILED:
            self.failed.setdefault(place, text)
        else:
            (self.left if kind == Notice.LEFT else self.here)[place] = int(text)

    def misses(self, rank: int, silent: bool) -> bool:
        """Whether the end of a rank of the job is a death: it belongs to the group, has not said that it failed, and
        not that it leaves; of a ``silent`` rank, what it sent before it left may never arrive."""
        place = self._places.get(rank)
        return place is not None and place not in self.failed and (silent or place not in self.left)

    def lose(self, rank: int, sentence: str, silent: bool) -> None:
        if self.misses(rank, silent):
            self.died[self._places[rank]] = sentence
            self.failed[self._places[rank]] = sentence
        if rank in self._places:
            self.gone.add(self._places[rank])
