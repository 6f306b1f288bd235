"""Words of all ranks by Bruck's allgather over TCP."""

from __future__ import annotations

from collections.abc import Sequence

from collectives.transport.backoff import yield_core
from collectives.transport.tcp.bruck import HEADER, Memory
from collectives.transport.tcp.tcp_channel import TcpChannel

_FIRST = HEADER // 8


class TcpWords:
    """`network_control.Words` over the channel's connections.

    Args:
        channel: of the group.
    """

    carries = True

    def __init__(self, channel: TcpChannel) -> None:
        self.same = True
        self._channel = channel
        self._bruck = channel.bruck
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
                into[_FIRST : _FIRST + count] = words
            else:
                at = _FIRST
                for word in words:
                    into[at] = word
                    at += 1
        self._bruck.begin(memory, token, nbytes, data)

    def test(self, spin: bool) -> bool:
        step = self._bruck.step
        arrived = step()
        if spin and not arrived:
            for _ in self._spins:
                yield_core()
                if step():
                    arrived = True
                    break
        self.same = self._bruck.same
        return arrived

    def wait(self) -> None:
        self._channel.until(self._bruck.step, self._bruck.wait, "every rank to enter the call")

    def of(self, peer: int) -> memoryview:
        start = self._memory.starts[(peer - self._bruck.rank) % self._bruck.size] // 8 + _FIRST
        return self._memory.words[start : start + self._own // 8]
