"""A group's control connections over TCP: exchanges of values and the words of a call, by Bruck's allgather.

The records of exchanges and of the group's calls travel over the same connections, one behind the other. Notices come
by the heart's connections (`collectives.transport.tcp.heart`). So do the values of exchanges until the group has
connections of its own: parts of the job whose ranks are all on one host never need any.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from collectives.base import interrupts
from collectives.base.config import setting_of
from collectives.base.errors import CollectiveTimeoutError, RankFailedError
from collectives.base.interchange import from_json, to_json
from collectives.transport import backoff
from collectives.transport.tcp.authentication import Connection
from collectives.transport.tcp.bruck import HEADER, Bruck, Memory, padded, partners
from collectives.transport.tcp.mesh import Links
from collectives.transport.tcp.notices import Notices

SPINS = 60
"""Looks at a connection, between which the core is yielded, before this rank sleeps until something arrives."""
_FIRST_DOZE, _LONGEST_DOZE = 1.0, 50.0
"""Milliseconds of a sleep that an arrival ends; afterwards the peers are looked at."""
CAUSE_SHOWS_WITHIN = 5.0
"""Seconds that it may take until it is known why a connection has ended."""
CLOSE_WITHIN = 1.0
"""Seconds for which a connection that is closed may wait until the peer's system has everything."""
_EXCHANGE = -1
"""The token of exchanges; those of calls are positive."""
_FIRST_WORD = HEADER // 8
_UNSENT = 0x5411
"""SIOCOUTQ, equal to TIOCOUTQ: bytes that the peer's system has not acknowledged."""
_SCRAP = 1 << 16


class TcpChannel:
    """`network_control.ControlChannel` over TCP. Not thread-safe.

    Args:
        spins: looks at a connection before this rank sleeps; few where ranks outnumber cores.

    Attributes:
        check: called now and then during a wait; an exception from it ends the wait.
    """

    def __init__(
        self,
        links: Links,
        timeout: float,
        names: Sequence[int],
        notices: Notices,
        spins: int = SPINS,
    ) -> None:
        self.rank, self.size = links.rank, links.size
        self.names, self.timeout = names, timeout
        self.spins = spins
        self._notices = notices
        self.failed, self.left, self.here, self.departed = notices.failed, notices.left, notices.here, notices.departed
        self.tell, self.leave, self.quiet = notices.tell, notices.leave, notices.quiet
        self.look_for_failures = notices.look_for_failures
        self.check: Callable[[], object] = self.look_for_failures
        self._links = links
        self._connections: dict[int, Connection] = {}
        self._bruck: Bruck | None = None

    def connect(self) -> Bruck:
        """Connect the ranks, unless they are connected; called by all of them, at the same place. Raises as
        `Links.open`."""
        if self._bruck is None:
            try:
                for peer in partners(self.rank, self.size):  # in ascending order: those that this rank dials come first
                    self._connections[peer] = self._links.open(peer, "words")
            except BaseException:
                self.disconnect()
                raise
            self._bruck = Bruck(self.rank, self.size, self._connections, self.lost)
        return self._bruck

    def exchange(self, value: Any) -> list[Any]:
        data, bruck = to_json(value), self._bruck
        if bruck is None:
            notices = self._notices
            notices.offer(data.decode())
            self.until(lambda: not notices.silent(), self._await_value, self._silent, spins=0)
            return [from_json(text.encode()) for text in notices.take_values()]
        memory = Memory((HEADER + padded(len(data))) * self.size)
        memory.bytes[HEADER : HEADER + len(data)] = data
        bruck.begin(memory, _EXCHANGE, len(data))
        self.until(bruck.step, bruck.wait, lambda: "every rank to send its value")
        values = []
        for peer in range(self.size):
            token, start, end = bruck.record(peer)
            if token != _EXCHANGE:
                raise RankFailedError(
                    f"rank {self.names[self.rank]}: rank {self.names[peer]} made another call while this rank "
                    "exchanges a value: the ranks make different calls, or something between the hosts alters their "
                    "data [R17]"
                )
            values.append(from_json(bytes(memory.bytes[start:end])))
        return values

    def _await_value(self, milliseconds: float) -> None:
        self._notices.await_value(milliseconds)
        departed = self._notices.departed()  # first: a value comes before the word that its rank leaves
        for peer in departed & self._notices.silent():
            self.lost(peer)

    def _silent(self) -> str:
        silent = [str(self.names[peer]) for peer in sorted(self._notices.silent())]
        who = f"rank {silent[0]} to send its" if len(silent) == 1 else f"ranks {', '.join(silent)} to send their"
        return f"{who} value in the group of ranks {list(self.names)}"

    def until(
        self,
        done: Callable[[], bool],
        doze: Callable[[float], object],
        what: Callable[[], str],
        spins: int | None = None,
    ) -> None:
        """Wait until ``done()``, which moves what can be moved. ``doze`` sleeps until there is something to move, at
        most so many milliseconds; ``what()`` names the event in errors; ``spins``: other than the channel's.

        Raises:
            CollectiveTimeoutError: it did not come about in time.
            RankFailedError: from `check`, or because a connection has ended.
        """
        for _ in range((self.spins if spins is None else spins) + 1):
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
                    f"rank {self.names[self.rank]}: waited {self.timeout:g} s for {what()}; see what the other ranks "
                    f"are doing, or raise {setting_of(self.timeout)} [R24]"
                )
            nap = min(2 * nap, _LONGEST_DOZE)

    def lost(self, peer: int) -> NoReturn:
        """Raise the cause for which a connection with ``peer`` has ended."""
        backoff.poll(self.check, CAUSE_SHOWS_WITHIN)
        raise RankFailedError(
            f"rank {self.names[self.rank]}: rank {self.names[peer]} has failed (its connection closed without an "
            "error message: it died, or left while this rank waited for it) [R10]"
        )

    def close(self) -> None:
        """Close the connections, and give the notices up."""
        self.disconnect()
        self._notices.close()

    def disconnect(self) -> None:
        """Close the connections; the notices stay open, for others still use them."""
        close_all(self._connections.values(), CLOSE_WITHIN)
        self._connections.clear()


class TcpWords:
    """`network_control.Words` over the channel's connections."""

    carries = True

    def __init__(self, channel: TcpChannel) -> None:
        self.same = True
        self._channel = channel
        self._bruck = channel.connect()
        self._spins = range(channel.spins)
        self._own = 0
        """Bytes of this rank's words."""
        self._memories = Memory(), Memory()
        """Of the present call and the one before, which take turns: words are read until the next call but one."""
        self._memory, self._other = self._memories

    def post(self, token: int, words: Sequence[int] | memoryview) -> None:
        memory = self._other
        self._other, self._memory = self._memory, memory
        count = len(words)
        data = type(words) is memoryview and words.format == "B"
        self._own = nbytes = count if data else 8 * count
        if count:
            needed = (HEADER + nbytes) * self._channel.size
            if needed > len(memory.bytes):
                memory.grow(needed, 0)
            into = memory.words
            if data:
                memory.bytes[HEADER : HEADER + nbytes] = words  # type: ignore[assignment]
            elif type(words) is memoryview:
                into[_FIRST_WORD : _FIRST_WORD + count] = words
            else:
                at = _FIRST_WORD
                for word in words:
                    into[at] = word
                    at += 1
        self._bruck.begin(memory, token, nbytes, data)

    def test(self, spin: bool) -> bool:
        step = self._bruck.step
        arrived = step()
        if spin and not arrived:
            for _ in self._spins:
                backoff.yield_core()
                if step():
                    arrived = True
                    break
        self.same = self._bruck.same
        return arrived

    def wait(self) -> None:
        self._channel.until(self._bruck.step, self._bruck.wait, lambda: "every rank to enter the call")

    def of(self, peer: int) -> memoryview:
        start = self._memory.starts[(peer - self._bruck.rank) % self._bruck.size] // 8 + _FIRST_WORD
        return self._memory.words[start : start + self._own // 8]


def close_all(sockets: Iterable[socket.socket], within: float) -> None:
    """Close connections once the peers' systems have all that was sent on them, or after some seconds; what arrives
    meanwhile is dropped.

    The system answers data for a closed socket with a reset, and then drops what it has not sent yet: the last message
    of a rank that leaves would be lost because a peer is a call ahead. What has arrived can be read even after a reset.
    """
    left: list[socket.socket] = []
    for sock in sockets:
        try:
            sock.shutdown(socket.SHUT_WR)
            left.append(sock)
        except OSError:  # it is closed, or has been reset
            sock.close()

    def all_done() -> bool:
        for sock in list(left):
            if _is_done(sock):
                left.remove(sock)
                sock.close()
        return not left

    backoff.poll(all_done, within)
    for sock in left:
        sock.close()


def _is_done(sock: socket.socket) -> bool:
    """Drop some of what has arrived: a peer that goes on sending must not keep this rank here. Returns whether the
    peer's system has everything, or the connection has ended."""
    try:
        with suppress(BlockingIOError):
            sock.recv(_SCRAP)
        unsent: int = struct.unpack("i", fcntl.ioctl(sock, _UNSENT, bytes(4)))[0]
    except OSError:
        return True
    return unsent == 0
