"""A group's control connections over TCP: exchanges of values, and the notices that ranks give about themselves.

The records of exchanges and of the group's calls travel over the same connections, one behind the other, by Bruck's
allgather. Notices come by the heart's connections (`collectives.transport.heart`), which a thread of their own serves.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, Protocol

from collectives.base.errors import CollectiveTimeoutError, RankFailedError
from collectives.transport import backoff
from collectives.transport.bruck import HEADER, Bruck, Memory, padded, partners
from collectives.transport.channel import LEAVE_TAG

SPINS = 60
"""Looks at a connection before this rank sleeps until something arrives."""
_FIRST_DOZE, _LONGEST_DOZE = 1.0, 50.0
"""Milliseconds of a sleep that an arrival ends; afterwards the peers are looked at."""
_DEATH_SHOWS_WITHIN = 1.0
"""Seconds that it may take until it is known why a connection has ended."""
_EXCHANGE = -1
"""The token of exchanges; those of calls are positive."""
_KEPT_BYTES = 1 << 20
"""Memory of exchanges that is kept for the next one."""


class Notices(Protocol):
    """One group's notices, as the heart keeps them; filled by a thread of its own.

    Attributes:
        failed, left, here, gone: as of `network_control.Notices`.
    """

    failed: dict[int, str]
    left: dict[int, int]
    here: dict[int, int]
    gone: set[int]

    def tell(self, tag: int, text: str) -> None: ...

    def look_for_failures(self) -> None: ...

    def close(self) -> None: ...


class Mesh(Protocol):
    """What is needed of `mesh.Mesh`."""

    @property
    def rank(self) -> int: ...

    def open(self, peer: int, channel: str, timeout: float, check: Callable[[], object] = ...) -> socket.socket: ...


class TcpChannel:
    """One rank's end of the group's control connections. Not thread-safe.

    Made by all ranks of the group at the same time.

    Args:
        mesh: of this process.
        group: the group's name; used once in a job, the same on its ranks.
        members: the ranks' numbers in the mesh.
        timeout: seconds that a wait may last.
        names: the ranks' numbers in messages.
        notices: of the group.
        spins: looks at a connection before this rank sleeps; few where ranks outnumber cores.

    Attributes:
        rank, size: in the group.
        check: called now and then during a wait; an exception from it ends the wait.
        failed, left, here, gone: as of `network_control.Notices`.
        bruck: the connections.
    """

    def __init__(
        self,
        mesh: Mesh,
        group: str,
        members: Sequence[int],
        timeout: float,
        names: Sequence[int],
        notices: Notices,
        spins: int = SPINS,
    ) -> None:
        self.rank = rank = list(members).index(mesh.rank)
        self.size = size = len(members)
        self.group, self.members, self.names = group, tuple(members), names
        self.timeout = timeout
        self.spins = spins
        self.notices = notices
        self.failed, self.left, self.here, self.gone = notices.failed, notices.left, notices.here, notices.gone
        self.check: Callable[[], object] = notices.look_for_failures
        self._connections: dict[int, socket.socket] = {}
        self._has_left = False
        self._memory = Memory()
        try:
            # Those that this rank dials come first, because they need nobody to wait.
            for peer in sorted(partners(rank, size), key=lambda peer: members[peer]):
                self._connections[peer] = mesh.open(members[peer], f"{group}/words", timeout, notices.look_for_failures)
        except BaseException:
            self.close()
            raise
        self.bruck = Bruck(rank, size, self._connections, self.lost)

    def exchange(self, value: Any) -> list[Any]:
        """Gather every rank's (small, picklable) value on every rank, in rank order; raises as `until`."""
        data, memory, bruck = pickle.dumps(value), self._memory, self.bruck
        needed = HEADER + padded(len(data))
        if needed > len(memory.bytes):
            memory.grow(needed, 0)
        memory.bytes[HEADER : HEADER + len(data)] = data
        bruck.begin(memory, _EXCHANGE, len(data))
        self.until(bruck.step, bruck.wait, "every rank to say what it has")
        values = []
        for peer in range(self.size):
            token, start, end = bruck.record(peer)
            if token != _EXCHANGE:
                raise RankFailedError(
                    f"rank {self.names[self.rank]}: rank {self.names[peer]} has entered a call where this rank "
                    f"exchanges a value: the ranks are at different places"
                )
            values.append(pickle.loads(memory.bytes[start:end]))
        if len(memory.bytes) > _KEPT_BYTES:
            self._memory = Memory()
        return values

    def tell(self, tag: int, text: str) -> None:
        """Send a notice to every other rank. Does not wait."""
        self.notices.tell(tag, text)

    def leave(self, calls: int) -> None:
        """Notify every other rank that this one has left after ``calls`` calls."""
        if not self._has_left:
            self._has_left = True
            self.notices.tell(LEAVE_TAG, str(calls))

    def read_notices(self) -> None:
        """Notices are taken in by the heart's thread."""

    def look_for_failures(self) -> None:
        """Raise RankFailedError if a rank has failed."""
        self.notices.look_for_failures()

    def until(self, done: Callable[[], bool], doze: Callable[[float], object], what: str) -> None:
        """Wait until ``done()``, which moves what can be moved.

        Args:
            doze: sleeps until there is something to move, at most so many milliseconds.
            what: names the event in errors.

        Raises:
            CollectiveTimeoutError: it did not come about in time.
            RankFailedError: from `check`, or because a connection has ended.
        """
        for _ in range(self.spins + 1):
            if done():
                return
        begun, nap = time.monotonic(), _FIRST_DOZE
        while True:
            doze(nap)
            if done():
                return
            self.check()
            if time.monotonic() - begun > self.timeout:
                raise CollectiveTimeoutError(
                    f"rank {self.names[self.rank]}: waited {self.timeout:g} s for {what}; see what the other ranks are "
                    f"doing, or raise COLLECTIVES_TIMEOUT"
                )
            nap = min(2 * nap, _LONGEST_DOZE)

    def lost(self, peer: int) -> NoReturn:
        """Raise the cause for which a connection with ``peer`` has ended."""
        backoff.poll(self.check, _DEATH_SHOWS_WITHIN)
        raise RankFailedError(
            f"rank {self.names[self.rank]}: rank {self.names[peer]} has failed (its connection was closed without a "
            f"word: it died, or left while it was waited for)"
        )

    def quiet(self) -> bool:
        """Notices are with the system when they have been told: nothing need be waited for."""
        return True

    def close(self) -> None:
        """Close the connections, and give the notices up."""
        for sock in self._connections.values():
            with suppress(OSError):
                sock.close()
        self.notices.close()


def spins_for(local: int) -> int:
    """The looks before a rank sleeps, by the number of ranks on its host."""
    return SPINS if local <= (os.cpu_count() or 1) else 1
