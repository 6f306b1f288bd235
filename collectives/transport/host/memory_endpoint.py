"""Point-to-point messages of the ranks of one host, through shared memory.

Envelopes and small payloads travel through rings (`collectives.transport.host.rings`). Of a large payload the envelope
says where it lies: the receiver copies it from there, once, and tells the sender, who need not be in a call meanwhile.
It is copied as an array where it lies in the sender's arena, which the receiver maps, and by system calls otherwise.
Where the system allows no rank to read another's memory, large payloads pass through the ring in parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from collectives.base.dtypes import SUPPORTED
from collectives.base.errors import RankFailedError
from collectives.tensors.arrays import address
from collectives.transport.base import Array
from collectives.transport.host.at_once import RingsAtOnce
from collectives.transport.host.board import ALIVE, Board
from collectives.transport.host.direct_read import DirectRead
from collectives.transport.host.mapped_memory import MappedMemory
from collectives.transport.host.rings import DONE, EAGER, PART, READY, Post, Reader, Writer
from collectives.transport.point_to_point import DTYPE_CODE, DTYPE_NAMES, AtOnce, Incoming, Outgoing

_BLOCK_BYTES = 1 << 20
"""Bytes that one system call copies: it keeps the interpreter lock."""
_REFUSAL_BYTES = 1000
_BYTE = np.dtype(np.uint8)


class _Parts:
    """The payload of a message that arrives in parts: ``array``, of which ``filled`` bytes have arrived, gathers them
    until they go ``into`` the receiver's memory."""

    __slots__ = ("array", "filled", "into")

    def __init__(self, nbytes: int) -> None:
        self.array: Array = np.empty(nbytes, np.uint8)
        self.filled = 0
        self.into: Array | None = None


class MemoryEndpoint:
    """`point_to_point.Endpoint` among the ranks of a host.

    Args:
        posts: the post of each rank of the group; None for ranks on other hosts.
        reader, mapped: None where the system does not allow direct reads, or mapping the ranks' arenas.
    """

    def __init__(
        self, board: Board, posts: Sequence[Post | None], reader: DirectRead | None, mapped: MappedMemory | None
    ) -> None:
        self.arrived: Callable[[Incoming], object] = lambda message: None
        self._board = board
        self._reader, self._mapped = reader, mapped
        self._posts = [post for post in posts if post is not None]
        rank = board.rank
        own_post = posts[rank]
        assert own_post is not None
        local = [peer for peer, post in enumerate(posts) if post is not None]
        place = local.index(rank)
        self._writers: dict[int, Writer] = {}
        self._readers: dict[int, Reader] = {}
        for at, (peer, peer_post) in enumerate(zip(local, self._posts, strict=True)):
            if peer != rank:
                self._writers[peer] = Writer(own_post, peer_post, place, at)
                self._readers[peer] = Reader(own_post, peer_post, place, at)
        self._waiting: dict[int, deque[Callable[[], bool]]] = {}
        """By peer: what is put into its ring when there is room."""
        self._ready: dict[int, Outgoing] = {}
        """By number: the messages whose payload a peer has not copied yet."""
        self._numbers = 0
        self._partial: dict[int, Incoming] = {}
        """By source: the message whose further parts are to come."""
        self.at_once: AtOnce | None = RingsAtOnce(
            self._writers, self._readers, self._waiting, self.send, self._fetch, self._tell, self._read
        )

    def send(self, message: Outgoing) -> None:
        array, peer = message.array, message.peer
        nbytes = array.nbytes
        writer = self._writers[peer]
        self._numbers = number = self._numbers + 1
        code = DTYPE_CODE[SUPPORTED[array.dtype]]
        if nbytes <= writer.most_payload:
            numbers = (message.tag, number, nbytes, code, len(message.shape), 0)
            self._push(peer, EAGER, numbers, message.shape, array.view(np.uint8), message.end)
        elif self._reader is None:
            numbers = (message.tag, number, nbytes, code, len(message.shape), writer.most_payload)
            self._put(peer, _in_parts(writer, message, numbers))
        else:
            self._ready[number] = message
            at = address(array)
            where = at if self._mapped is None else self._mapped.word_of(at, nbytes)
            self._push(peer, READY, (message.tag, number, nbytes, code, len(message.shape), where), message.shape)

    def _push(
        self,
        peer: int,
        kind: int,
        numbers: Sequence[int],
        further: Sequence[int] = (),
        payload: bytes | Array = b"",
        then: Callable[[], object] | None = None,
    ) -> None:
        """Put a record into the ring of a peer, behind what waits, and then call ``then``."""
        push_record = self._writers[peer].push

        def push() -> bool:
            if not push_record(kind, numbers, further, payload):
                return False
            if then is not None:
                then()
            return True

        self._put(peer, push)

    def _put(self, peer: int, attempt: Callable[[], bool]) -> None:
        """Have ``attempt`` called, behind what waits for that peer, until it returns True."""
        waiting = self._waiting.get(peer)
        if waiting is not None:
            waiting.append(attempt)
        elif not attempt():
            self._waiting[peer] = deque((attempt,))

    def poll(self) -> None:
        if self._waiting:
            for peer, waiting in list(self._waiting.items()):
                while waiting and waiting[0]():
                    waiting.popleft()
                if not waiting:
                    del self._waiting[peer]
        for peer, reader in self._readers.items():
            there = reader.written()  # what comes meanwhile is left for the next time
            while reader.count < there and (header := reader.next()) is not None:
                self._read(peer, reader, header)
                reader.take()

    def _read(self, peer: int, reader: Reader, header: tuple[int, ...]) -> None:
        kind, _, tag, number, nbytes, code, count, where = header
        if kind == DONE:
            message = self._ready.pop(number)
            message.refused = bytes(reader.payload(0, nbytes)).decode("utf-8", "replace")
            message.end()
        elif kind == PART:
            self._add_part(self._partial[peer], reader.payload(0, nbytes))
        else:
            shape = reader.further(count)
            envelope = Incoming(peer, tag, DTYPE_NAMES[code], shape, nbytes, None)
            if kind == READY:
                envelope.payload = number, where
                self.arrived(envelope)
            elif where:
                envelope.payload = _Parts(nbytes)
                self._partial[peer] = envelope
                self._add_part(envelope, reader.payload(count, where))
                self.arrived(envelope)
            else:
                envelope.payload = payload = reader.payload(count, nbytes)
                self.arrived(envelope)
                if not envelope.done:
                    envelope.payload = payload.copy()

    def _add_part(self, message: Incoming, part: Array) -> None:
        parts: _Parts = message.payload
        parts.array[parts.filled : parts.filled + part.size] = part
        parts.filled += part.size
        if parts.filled == message.nbytes:
            del self._partial[message.source]
            if parts.into is not None:
                self._finish_parts(message, parts.into)

    def _finish_parts(self, message: Incoming, into: Array) -> None:
        into[: message.nbytes] = message.payload.array
        message.payload = None
        message.end()

    def receive(self, message: Incoming, into: Array) -> None:
        payload = message.payload
        if type(payload) is tuple:
            number, where = payload
            self._fetch(message.source, where, into, message.nbytes)
            self._tell(message.source, number)
        elif type(payload) is _Parts:
            if payload.filled < message.nbytes:
                payload.into = into
            else:
                self._finish_parts(message, into)
            return
        else:
            into[: message.nbytes] = payload
        message.payload = None
        message.end()

    def refuse(self, message: Incoming, why: str) -> None:
        payload = message.payload
        if type(payload) is tuple:
            self._tell(message.source, payload[0], why)
        elif type(payload) is _Parts and payload.filled < message.nbytes:
            return  # the parts to come are gathered, and dropped
        message.payload = None
        message.end()

    def _fetch(self, peer: int, where: int, into: Array, nbytes: int) -> None:
        """Copy from the peer's memory, which is its message's as long as the peer has neither failed nor left."""
        mapped = self._mapped
        view = None if mapped is None else mapped.view_of(peer, where, _BYTE)
        if view is not None:
            into[:nbytes] = view[:nbytes]
        else:
            assert self._reader is not None
            to, at = address(into), where if mapped is None else mapped.address_of(peer, where)
            for start in range(0, nbytes, _BLOCK_BYTES):
                self._reader.fetch(peer, at + start, to + start, min(_BLOCK_BYTES, nbytes - start))
        if self._board.marked(peer) != ALIVE:
            self._board.check(peer)
            names = self._board.names
            raise RankFailedError(
                f"rank {names[self._board.rank]}: rank {names[peer]} has left while this rank read its message [R6]"
            )

    def _tell(self, peer: int, number: int, refused: str = "") -> None:
        text = refused.encode()[:_REFUSAL_BYTES]
        self._push(peer, DONE, (0, number, len(text), 0, 0, 0), (), text)

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._ready or self._partial)

    def close(self) -> None:
        self._waiting.clear()
        self._ready.clear()
        self._partial.clear()
        views: list[Writer | Reader | Post] = [*self._writers.values(), *self._readers.values(), *self._posts]
        for each in views:
            each.release()
        self.at_once = None
        self._writers.clear()
        self._readers.clear()


def _in_parts(writer: Writer, message: Outgoing, numbers: Sequence[int]) -> Callable[[], bool]:
    """What sends a payload in parts: a function that returns whether all have been sent."""
    payload = message.array.view(np.uint8)
    sent = 0
    first = writer.most_payload

    def push() -> bool:
        nonlocal sent
        if not sent:
            if not writer.push(EAGER, numbers, message.shape, payload[:first]):
                return False
            sent = first
        while sent < payload.size:
            part = payload[sent : sent + first]
            if not writer.push(PART, (0, 0, part.size, 0, 0, 0), (), part):
                return False
            sent += part.size
        message.end()
        return True

    return push
