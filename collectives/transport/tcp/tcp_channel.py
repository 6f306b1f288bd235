"""A group's control connections over TCP: exchanges of values, and the notices that ranks give about themselves.

The records of exchanges and of the group's calls travel over the same connections, one behind the other, by Bruck's
allgather. Notices come by the heart's connections (`collectives.transport.tcp.heart`), which a thread of their own
serves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from collectives.base import interrupts
from collectives.base.errors import CollectiveTimeoutError, RankFailedError
from collectives.base.interchange import from_json, to_json
from collectives.transport import backoff
from collectives.transport.tcp.authentication import Connection
from collectives.transport.tcp.bruck import HEADER, Bruck, Memory, padded, partners
from collectives.transport.tcp.closing import close_all
from collectives.transport.tcp.notices import Notice, Notices

if TYPE_CHECKING:
    from collectives.transport.tcp.mesh import Links

SPINS = 60
"""Looks at a connection, between which the core is yielded, before this rank sleeps until something arrives."""
_FIRST_DOZE, _LONGEST_DOZE = 1.0, 50.0
"""Milliseconds of a sleep that an arrival ends; afterwards the peers are looked at."""
CAUSE_SHOWS_WITHIN = 5.0
"""Seconds that it may take until it is known why a connection has ended."""
_SAY_GOODBYE_WITHIN = 1.0
CLOSE_WITHIN = 1.0
"""Seconds for which a connection that is closed may wait until the peer's system has everything."""
_EXCHANGE = -1
"""The token of exchanges; those of calls are positive."""
_KEPT_BYTES = 1 << 20
"""Memory of exchanges that is kept for the next one."""


class TcpChannel:
    """One rank's end of the group's control connections. Not thread-safe.

    Made by all ranks of the group at the same time.

    Args:
        timeout: seconds that a wait may last.
        names: the ranks' numbers in messages.
        spins: looks at a connection before this rank sleeps; few where ranks outnumber cores.

    Attributes:
        check: called now and then during a wait; an exception from it ends the wait.
        failed, left, here, gone: as of `network_control.ControlChannel`.
    """

    def __init__(
        self,
        links: Links,
        timeout: float,
        names: Sequence[int],
        notices: Notices,
        spins: int = SPINS,
    ) -> None:
        self.rank, self.size = rank, size = links.rank, links.size
        self.names, self.timeout = names, timeout
        self.spins = spins
        self._notices = notices
        self.failed, self.left, self.here, self.gone = notices.failed, notices.left, notices.here, notices.gone
        self.check: Callable[[], object] = notices.look_for_failures
        self._connections: dict[int, Connection] = {}
        self._has_left = False
        self._memory = Memory()
        try:
            for peer in partners(rank, size):  # in ascending order: those that this rank dials come first
                self._connections[peer] = links.open(peer, "words")
        except BaseException:
            self.close()
            raise
        self.bruck = Bruck(rank, size, self._connections, self.lost)

    def exchange(self, value: Any) -> list[Any]:
        """Gather every rank's small value (see `interchange`) on every rank, in rank order; raises as `until`."""
        data, memory, bruck = to_json(value), self._memory, self.bruck
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
                    "exchanges a value: the ranks are at different places, or something between the hosts changes what "
                    "ranks say"
                )
            values.append(from_json(bytes(memory.bytes[start:end])))
        if len(memory.bytes) > _KEPT_BYTES:
            self._memory = Memory()
        return values

    def tell(self, notice: Notice, text: str) -> None:
        """Send a notice to every other rank. Does not wait."""
        self._notices.tell(notice, text)

    def leave(self, calls: int) -> None:
        """Notify every other rank that this one has left after ``calls`` calls."""
        if not self._has_left:
            self._has_left = True
            self.tell(Notice.LEFT, str(calls))

    def read_notices(self) -> None:
        """Notices are taken in by the heart's thread."""

    def look_for_failures(self) -> None:
        """Raise RankFailedError if a rank has failed."""
        self._notices.look_for_failures()

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
            backoff.yield_core()
        begun, nap = time.monotonic(), _FIRST_DOZE
        while True:
            doze(nap)
            if done():
                return
            interrupts.check()
            self.check()
            if time.monotonic() - begun > self.timeout:
                raise CollectiveTimeoutError(
                    f"rank {self.names[self.rank]}: waited {self.timeout:g} s for {what}; see what the other ranks are "
                    f"doing, or raise COLLECTIVES_TIMEOUT"
                )
            nap = min(2 * nap, _LONGEST_DOZE)

    def lost(self, peer: int) -> NoReturn:
        """Raise the cause for which a connection with ``peer`` has ended."""
        backoff.poll(self.check, CAUSE_SHOWS_WITHIN)
        raise RankFailedError(
            f"rank {self.names[self.rank]}: rank {self.names[peer]} has failed (its connection was closed without a "
            f"word: it died, or left while it was waited for)"
        )

    def quiet(self) -> bool:
        """Wait for a bounded time until the system has taken all notices. Returns whether it has."""
        return self._notices.flush(_SAY_GOODBYE_WITHIN)

    def close(self) -> None:
        """Close the connections, and give the notices up."""
        self.disconnect()
        self._notices.close()

    def disconnect(self) -> None:
        """Close the connections; the notices stay open, for others still use them."""
        close_all(self._connections.values(), CLOSE_WITHIN)
        self._connections.clear()
