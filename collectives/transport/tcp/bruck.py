"""Bruck's allgather over connections, driven step by step: every rank's record for every rank, in few messages.

In round k rank r sends to rank r - 2^k all that it has, and receives as much from rank r + 2^k. Of 5 ranks, rank 0:

    round 0    sends to 4: 0          receives from 1: 1           has 0 1
    round 1    sends to 3: 0 1        receives from 2: 2 3         has 0 1 2 3
    round 2    sends to 1: 0          receives from 4: 4           has 0 1 2 3 4

ceil(log2 n) rounds, one message each way in a round, (n - 1) records sent and received by every rank. Of two ranks, a
call is one send and one receive.

Behind the records of a message is their seal (see `authentication`). A record that carries a tensor is not sealed, as
no tensor is, and says so with its length; a message of such records alone has no seal. An attacker who changes one
gives ranks other numbers, or makes them differ, and no more: nothing else that a record says is read where the tokens
differ.

A record is a *token*, the number of bytes that follow, and these bytes. Ranks whose records differ in token and length
still finish the call, and see that they differ. A peer may be one call ahead, never two: what it has sent for the next
call stays in the connection, or is kept.

Source: J. Bruck et al., "Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems",
IEEE Transactions on Parallel and Distributed Systems 8(11), 1997.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping
from hmac import compare_digest
from typing import NamedTuple, NoReturn

from collectives.base.errors import TransportError
from collectives.transport.tcp.authentication import SEAL_BYTES, Connection, Seal

HEADER = 16
"""Bytes of a record's token and length."""
_LENGTH = HEADER // 8 - 1
_FIRST_BYTES = 4096
_MOST_BYTES = 1 << 31
_DATA = 1 << 32
"""Marks the length of a record that carries a tensor."""
_SEND_JOINED = 1 << 10
"""Bytes up to which copying a message is quicker than sending it in two parts."""


def partners(rank: int, size: int) -> list[int]:
    """The peers that a rank has connections with."""
    hops = [1 << k for k in range((size - 1).bit_length())]
    return sorted({(rank + hop) % size for hop in hops} | {(rank - hop) % size for hop in hops})


def padded(nbytes: int) -> int:
    """Bytes that a record's payload takes: so that all tokens are aligned."""
    return -(-nbytes // 8) * 8


class Memory:
    """Memory for the records of one call, in the order of Bruck's rounds: rank r, r + 1, and so on."""

    __slots__ = ("bytes", "starts", "words")

    def __init__(self, nbytes: int = _FIRST_BYTES) -> None:
        self.bytes = memoryview(bytearray(padded(nbytes)))
        self.words = self.bytes.cast("q")
        self.starts: list[int] = []
        """Where the records begin, and where the last one ends."""

    def grow(self, nbytes: int, used: int) -> None:
        """Make room for ``nbytes``, keeping the first ``used``."""
        old = self.bytes[:used]
        self.bytes = memoryview(bytearray(max(padded(nbytes), 2 * len(self.bytes))))
        self.bytes[:used] = old
        self.words = self.bytes.cast("q")


class _Round(NamedTuple):
    to: int
    send: Callable[[bytes | memoryview], int]
    sent: Seal
    source: int
    receive: Callable[[memoryview], int]
    received: Seal
    records: int


class Bruck:
    """One rank's end. Not thread-safe.

    Args:
        connections: non-blocking, with each of the `partners`.
        lost: raises for a peer whose connection has ended.

    Attributes:
        same: whether all ranks' records of the call have the same token and length; valid once `step` has returned
            True.
    """

    def __init__(
        self, rank: int, size: int, connections: Mapping[int, Connection], lost: Callable[[int], NoReturn]
    ) -> None:
        self.rank, self.size = rank, size
        self.same = True
        self._lost, self._connections = lost, connections
        self._rounds: list[_Round] = []
        for k in range((size - 1).bit_length()):
            to, source = (rank - (1 << k)) % size, (rank + (1 << k)) % size
            self._rounds.append(
                _Round(
                    to,
                    connections[to].send,
                    connections[to].sent,
                    source,
                    connections[source].recv_into,
                    connections[source].received,
                    min(1 << k, size - (1 << k)),
                )
            )
        self._early: dict[int, bytes] = {}
        """What has been read of a peer's next call, by peer: only after records of unequal lengths."""
        self._memory = Memory()
        self._token = self._own = self._nbytes = self._have = self._parsed = self._number = self._missing = 0
        self._leaving: bytes | memoryview = b""
        """What is left to send of the round's message, but for what comes behind it."""
        self._behind = b""
        self._whole = True
        """Whether all of the round's message has arrived, and is what was sent."""
        self._seal_bytes = 0
        """Of the round's message, as far as its records are known."""

    def begin(self, memory: Memory, token: int, nbytes: int, data: bool = False) -> None:
        """Begin a call; the call before must have ended, and all ranks begin the same calls. ``memory`` has ``nbytes``
        of payload behind `HEADER` bytes; ``token`` is not 0; ``data``: the payload is a tensor, which is not sealed."""
        own = nbytes | _DATA if data else nbytes
        words = memory.words
        words[0], words[_LENGTH] = token, own
        self._memory, self._token, self._own = memory, token, own
        self._have = self._parsed = self._nbytes = HEADER + (nbytes + 7 & -8)
        memory.starts.clear()
        memory.starts.append(0)
        memory.starts.append(self._have)
        self.same = True
        self._number = 0
        if self._rounds:
            self._begin_round()

    def _begin_round(self) -> None:
        current = self._rounds[self._number]
        self._missing = records = current.records
        self._whole = False
        self._leaving = leaving = self._memory.bytes[: self._memory.starts[records]]
        if self.same and self._own & _DATA:
            self._seal_bytes = 0
        else:
            self._seal_bytes = SEAL_BYTES
            sealed = self._sealed_part(0, records)
            if sealed:
                self._behind = current.sent.next(sealed)
                if len(leaving) <= _SEND_JOINED:
                    self._leaving, self._behind = leaving.tobytes() + self._behind, b""
        self._send()
        if self._early:
            self._take_early()

    def step(self) -> bool:
        """Move what can be moved. Returns whether all records have arrived, and nothing remains to be sent.

        Raises:
            RankFailedError: from ``lost``.
            TransportError: a peer sends what is no record, or something has changed what it has sent.
        """
        while self._number < len(self._rounds):
            if self._leaving:
                self._send()
            if not self._whole and not self._receive():
                return False
            if self._leaving:
                return False
            self._number += 1
            if self._number < len(self._rounds):
                self._begin_round()
        return True

    def wait(self, milliseconds: float) -> None:
        """Sleep until `step` has something to do, at most so long."""
        if self._number == len(self._rounds):
            return
        current, poll = self._rounds[self._number], select.poll()
        peer, event = (current.to, select.POLLOUT) if self._whole else (current.source, select.POLLIN)
        poll.register(self._connections[peer], event)
        poll.poll(milliseconds)

    def record(self, peer: int) -> tuple[int, int, int]:
        """A rank's record of the call: its token, and where its payload begins and ends in the memory."""
        start = self._memory.starts[(peer - self.rank) % self.size]
        words, at = self._memory.words, start >> 3
        return words[at], start + HEADER, start + HEADER + (words[at + _LENGTH] & ~_DATA)

    def _sealed_part(self, first: int, end: int) -> bytes | memoryview:
        """What is sealed of some of the records that this rank has: those that carry no tensor."""
        memory, starts = self._memory, self._memory.starts
        if self.same:
            return memory.bytes[starts[first] : starts[end]]
        words, records = memory.words, zip(starts[first:end], starts[first + 1 : end + 1], strict=True)
        return b"".join(memory.bytes[at:after] for at, after in records if not words[(at >> 3) + _LENGTH] & _DATA)

    def _send(self) -> None:
        current = self._rounds[self._number]
        while self._leaving:
            try:
                sent = current.send(self._leaving)
            except BlockingIOError:
                return
            except OSError:
                self._lost(current.to)
            if sent < len(self._leaving):
                self._leaving = self._leaving[sent:]
            else:
                self._leaving, self._behind = self._behind, b""

    def _receive(self) -> bool:
        """Receive what has arrived of the round's message. Returns whether that is all of it."""
        memory, current = self._memory, self._rounds[self._number]
        while not self._whole:
            # Where the message ends, if the records that are not known yet are as long as this rank's.
            at, end = self._parsed, self._parsed + self._missing * self._nbytes + self._seal_bytes
            if self._missing and self._have - at >= HEADER:
                end += HEADER + padded(memory.words[(at >> 3) + _LENGTH] & ~_DATA) - self._nbytes
            if end > len(memory.bytes):
                memory.grow(end, self._have)
            try:
                received = current.receive(memory.bytes[self._have : end])
            except BlockingIOError:
                return False
            except OSError:
                self._lost(current.source)
            if received == 0:
                self._lost(current.source)
            self._have += received
            self._parse()
            if not self._whole and self._have < end:
                return False
        return True

    def _parse(self) -> None:
        """Find the records that have arrived."""
        memory, at, have = self._memory, self._parsed, self._have
        words, starts = memory.words, memory.starts
        while self._missing and have - at >= HEADER:
            word = at >> 3
            length = words[word + _LENGTH]
            if words[word] != self._token or length != self._own:
                self.same = False
                if not length & _DATA:
                    self._seal_bytes = SEAL_BYTES
                if words[word] == self._token and (length ^ self._own) & _DATA:
                    self._raise_changed()
                if not 0 <= length & ~_DATA < _MOST_BYTES:
                    raise TransportError(
                        f"rank {self.rank} of its group: rank {self._rounds[self._number].source} sent a record of "
                        f"{length} bytes, which is not valid: something else writes to the connection, or alters its "
                        "data [N7]"
                    )
            end = at + HEADER + ((length & ~_DATA) + 7 & -8)
            if have < end:
                break
            starts.append(end)
            at = end
            self._missing -= 1
        self._parsed = at
        if self._missing:
            return
        current, end = self._rounds[self._number], at
        last = len(starts) - 1
        if self._seal_bytes and (sealed := self._sealed_part(last - current.records, last)):
            end += SEAL_BYTES
            if have < end:
                return
            if not compare_digest(memory.bytes[at:end], current.received.next(sealed)):
                self._raise_changed()
        self._whole = True
        if have > end:
            # A record was shorter than this rank's, and the peer is a call ahead.
            self._early[current.source] = bytes(memory.bytes[end:have])
        self._have = at

    def _raise_changed(self) -> NoReturn:
        raise TransportError(
            f"rank {self.rank} of its group: the signature of data from rank {self._rounds[self._number].source} is "
            "wrong: something between the hosts alters the data of the ranks [N8]"
        )

    def _take_early(self) -> None:
        """Take over what has been read of the peer's message with the message before."""
        early = self._early.pop(self._rounds[self._number].source, b"")
        if early:
            memory, have = self._memory, self._have
            if have + len(early) > len(memory.bytes):
                memory.grow(have + len(early), have)
            memory.bytes[have : have + len(early)] = early
            self._have += len(early)
            self._parse()
