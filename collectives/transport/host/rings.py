"""Rings: records from one process to another through shared memory, without locks.

Each rank owns a *post*: for every rank of its host two counters and a ring. Only the owner writes there:

    written    bytes of records that the owner has put into its ring for that peer
    read       bytes of records that the owner has taken from that peer's ring for itself
    ring       the last `ring_bytes` bytes of the records; a record does not wrap around

So each word and each byte has one writer. A record is published by advancing ``written``, and its place is free again
when the peer has advanced its ``read``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from collectives.transport.base import Array
from collectives.transport.host import board

_LINE = 64
_MOST_FURTHER = 64
"""As many as NumPy's arrays have dimensions."""
_MOST_RING_BYTES, _LEAST_RING_BYTES = 128 << 10, 8 << 10
_POST_BYTES = 4 << 20
"""All rings of a rank, where there are so many ranks that each ring is smaller than the largest."""

HEADER = struct.Struct("<8q")
"""Of a record: its kind, its length in the ring, and six numbers for the record's own use."""
_NUMBERS = [struct.Struct(f"<{8 + count}q") for count in range(_MOST_FURTHER + 1)]
"""Of a record with so many further numbers."""
SKIP, EAGER, READY, PART, DONE = range(5)
"""The kinds of records: what fills the ring up to its end; a payload, or its first part; where a payload lies; a
further part; the end of a READY one."""


def ring_bytes(ranks: int) -> int:
    """Bytes of each ring where so many ranks share a host: a power of two."""
    room = max(_LEAST_RING_BYTES, min(_MOST_RING_BYTES, _POST_BYTES // max(1, ranks)))
    return 1 << room.bit_length() - 1


def post_bytes(ranks: int) -> int:
    """Bytes of a rank's post, a multiple of 4,096."""
    return -(-ranks * (2 * _LINE + ring_bytes(ranks)) // 4096) * 4096


class Post:
    """The post of one rank of a host, as that rank or a peer sees it; ``memory`` has `post_bytes`, zeros at first."""

    def __init__(self, memory: memoryview, ranks: int) -> None:
        self.words = memory[: ranks * 2 * _LINE].cast("q")
        self._rings = memory[ranks * 2 * _LINE :]
        self._bytes = ring_bytes(ranks)

    def ring(self, place: int) -> memoryview:
        """The ring for the peer with this place among the ranks of the host."""
        return self._rings[place * self._bytes : (place + 1) * self._bytes]

    @staticmethod
    def written(place: int) -> int:
        """The index in ``words`` of what was written for a peer."""
        return place * 2 * _LINE // 8

    @staticmethod
    def read(place: int) -> int:
        """The index in ``words`` of what was read from a peer."""
        return (place * 2 + 1) * _LINE // 8

    def release(self) -> None:
        """Release the views, so that the memory can be unmapped."""
        self.words.release()
        self._rings.release()


class Writer:
    """Puts records into this rank's ring for one peer; ``place`` and ``peer`` are the places of this rank and the peer
    among the ranks of the host."""

    def __init__(self, own_post: Post, peer_post: Post, place: int, peer: int) -> None:
        self._ring = own_post.ring(peer)
        self._bytes = len(self._ring)
        self._words, self._written = own_post.words, Post.written(peer)
        self._peer_words, self._read = peer_post.words, Post.read(place)
        self._count = self._words[self._written]
        self._seen = self._peer_words[self._read]
        """What the peer had read at the last look."""
        self.most_payload = self._bytes // 4
        """Bytes of payload that fit into one record beside its numbers, with room for other records."""

    def push(
        self,
        kind: int,
        numbers: Sequence[int],
        further: Sequence[int] = (),
        payload: bytes | Array = b"",
    ) -> bool:
        """Publish a record; returns False if there is no room for it at present.

        Args:
            numbers: six of them.
            further: more of them, for the reader to know how many.
            payload: bytes, or an array of uint8; behind the numbers.
        """
        start = HEADER.size + 8 * len(further)
        size = len(payload)
        length = start + size + _LINE - 1 & -_LINE
        written = self._count
        at = written % self._bytes
        left = self._bytes - at
        need = length if length <= left else left + length
        if written + need - self._seen > self._bytes:
            self._seen = self._peer_words[self._read]
            if written + need - self._seen > self._bytes:
                return False
        ring = self._ring
        if length > left:
            HEADER.pack_into(ring, at, SKIP, left, 0, 0, 0, 0, 0, 0)
            at = 0
        _NUMBERS[len(further)].pack_into(ring, at, kind, length, *numbers, *further)
        if size:
            ring[at + start : at + start + size] = payload  # type: ignore[assignment]  # any contiguous buffer of bytes
        if board.fence is not None:
            board.fence()
        self._count = self._words[self._written] = written + need
        return True

    def has_room(self) -> bool:
        """Whether a record without further numbers and payload, which never wraps around, can be published now."""
        most = self._bytes - HEADER.size
        if self._count - self._seen > most:
            self._seen = self._peer_words[self._read]
        return self._count - self._seen <= most

    def release(self) -> None:
        self._ring.release()


class Reader:
    """Takes records from a peer's ring for this rank; arguments as for `Writer`."""

    def __init__(self, own_post: Post, peer_post: Post, place: int, peer: int) -> None:
        self._ring = peer_post.ring(place)
        self._array: Array = np.frombuffer(self._ring, np.uint8)
        self._bytes = len(self._ring)
        self._words, self._read = own_post.words, Post.read(peer)
        self._peer_words, self._written = peer_post.words, Post.written(place)
        self.count = self._words[self._read]
        """Bytes of records that were taken."""
        self._start = self._length = 0

    def written(self) -> int:
        """Bytes of records that the peer has put in so far; of them `count` were taken."""
        return int(self._peer_words[self._written])

    def spin(self, looks: int) -> bool:
        """Whether there is anything that was not taken, at one of so many looks."""
        words, at, count = self._peer_words, self._written, self.count
        for _ in range(looks):  # noqa: SIM110  # a generator takes three times as long
            if words[at] != count:
                return True
        return False

    def next(self) -> tuple[int, ...] | None:
        """The header of the first record that was not taken; None if there is none."""
        read = self.count
        while self._peer_words[self._written] != read:
            start = read % self._bytes
            header = HEADER.unpack_from(self._ring, start)
            self._length = header[1]
            if header[0] != SKIP:
                self._start = start + HEADER.size
                return header
            self.count = self._words[self._read] = read = read + self._length
        return None

    def further(self, count: int) -> tuple[int, ...]:
        """The further numbers of the record that `next` has returned."""
        return struct.unpack_from(f"<{count}q", self._ring, self._start)

    def payload(self, count: int, nbytes: int) -> Array:
        """Its payload behind ``count`` further numbers, in place: valid until `take`."""
        start = self._start + 8 * count
        return self._array[start : start + nbytes]

    def take(self) -> None:
        self.count = self._words[self._read] = self.count + self._length

    def release(self) -> None:
        del self._array
        self._ring.release()
