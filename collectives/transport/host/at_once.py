"""Messages of the ranks of one host that are sent and received within one call, without the objects of a transfer.

Most messages are such: the receiver is already in its call, or comes to it soon. Each method does the whole work or
leaves everything as it was, and the caller takes the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized

import numpy as np

from collectives.base.dtypes import SUPPORTED
from collectives.base.errors import CollectivesError
from collectives.transport.base import Array
from collectives.transport.host.rings import DONE, EAGER, READY, Reader, Writer
from collectives.transport.point_to_point import DTYPE_CODE, Outgoing

_LONGEST_COPY = 512
"""Bytes of a payload up to which a bytes object is quicker than a view."""


class RingsAtOnce:
    """`point_to_point.AtOnce` through rings. Not thread-safe.

    Args:
        writers, readers: by peer.
        waiting: is empty if nothing waits for room in a ring.
        begin: begins to send a large message.
        fetch: copies a payload from where its sender has it: source, place, memory of uint8, bytes.
        tell: tells a source that its message with this number was fetched.
        end: ends the message that a DONE record is about: its source, the reader, the record's header.
    """

    def __init__(
        self,
        writers: Mapping[int, Writer],
        readers: Mapping[int, Reader],
        waiting: Sized,
        begin: Callable[[Outgoing], None],
        fetch: Callable[[int, int, Array, int], None],
        tell: Callable[[int, int], None],
        end: Callable[[int, Reader, tuple[int, ...]], None],
    ) -> None:
        self._writers, self._readers = writers, readers
        self._waiting, self._begin = waiting, begin
        self._fetch, self._tell, self._end = fetch, tell, end

    def send(self, peer: int, tag: int, array: Array) -> Outgoing | bool:
        writer = self._writers.get(peer)
        if writer is None or self._waiting:
            return False
        shape, nbytes = array.shape, array.nbytes
        flat = array if len(shape) == 1 else array.reshape(-1)
        if nbytes > writer.most_payload:
            message = Outgoing(peer, tag, flat, shape)
            self._begin(message)
            return message
        numbers = (tag, 0, nbytes, DTYPE_CODE[SUPPORTED[array.dtype]], len(shape), 0)
        payload = array.tobytes() if nbytes <= _LONGEST_COPY else flat.view(np.uint8)
        return writer.push(EAGER, numbers, shape, payload)

    def receive(self, source: int, tag: int, into: Array, looks: int) -> bool:
        reader = self._readers.get(source)
        if reader is None:
            return False
        while reader.spin(looks):
            header = reader.next()
            if header is None:
                return False
            if header[0] == DONE:
                self._end(source, reader, header)
            elif not self._received(source, reader, header, tag, into):
                return False
            reader.take()
            if header[0] != DONE:
                return True
        return False

    def _received(self, source: int, reader: Reader, header: tuple[int, ...], tag: int, into: Array) -> bool:
        """Receive the payload of the first record, if that is the message that is expected."""
        kind, _, sent_tag, number, nbytes, code, count, where = header
        dtype = into.dtype
        if sent_tag != tag or nbytes > into.nbytes or code != DTYPE_CODE[SUPPORTED[dtype]]:
            return False
        if into.ndim != 1:
            into = into.reshape(-1)
        if kind == EAGER and not where:
            values = reader.payload(count, nbytes).view(dtype)
            if nbytes == into.nbytes:
                into[...] = values
            else:
                into[: values.size] = values
            return True
        if kind != READY or self._waiting or not self._writers[source].has_room():
            return False  # a source that cannot be told now might never be told
        try:
            self._fetch(source, where, into.view(np.uint8), nbytes)
        except CollectivesError:  # the ordinary way meets it again, and tells both sides
            return False
        self._tell(source, number)
        return True

    def confirm(self, message: Outgoing, looks: int) -> bool:
        reader = self._readers.get(message.peer)
        while reader is not None and not message.done and reader.spin(looks):
            header = reader.next()
            if header is None or header[0] != DONE:
                break
            self._end(message.peer, reader, header)
            reader.take()
        return message.done
