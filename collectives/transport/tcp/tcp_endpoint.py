"""Point-to-point messages over TCP.

A rank dials a connection to each peer that it sends to, with its first message. Envelopes, small payloads, and those
large ones that the peer has accepted go that way; what the peer accepts or refuses comes back on the same connection.
Connections are made and accepted by the network's thread; the thread that advances the endpoint reads and writes, and
never waits.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice

import numpy as np

from collectives.base.dtypes import SUPPORTED
from collectives.base.errors import CollectivesError, RankFailedError, TransportError
from collectives.transport.base import Array
from collectives.transport.point_to_point import DTYPE_CODE, DTYPE_NAMES, AtOnce, Incoming, Outgoing, Transfer
from collectives.transport.tcp.authentication import Connection
from collectives.transport.tcp.mesh import Links
from collectives.transport.tcp.service import Running
from collectives.transport.tcp.tcp_channel import CAUSE_SHOWS_WITHIN

EAGER, READY, DATA, ACCEPT, REFUSE = 1, 2, 3, 4, 5
"""The kinds of frames: an envelope with its payload; an envelope of a payload that waits; such a payload; and what the
receiver says of one, the last with its reason as the payload."""
EAGER_BYTES = 32 << 10
"""Payloads up to this size travel with their envelope."""
_HEADER = struct.Struct("<6q")
"""Kind, tag, number, bytes of the payload, dtype, dimensions."""
_MOST_DIMENSIONS = 64
_BUFFER_BYTES = 4 * EAGER_BYTES
_REFUSAL_BYTES = 1000
_SENT_AT_ONCE = 16
"""Frames that one system call sends."""
_CHANNEL = "p2p"


class _Connection:
    """One connection, which carries envelopes in one direction.

    Attributes:
        sock: None before it is connected, and after it was closed.
        dialling: of a connection that this rank dials, and sends its envelopes by.
        outgoing: bytes to send, each with the message that is done when they are sent.
        announced: by number: messages of this rank that the peer has not accepted yet.
        accepted: by number: messages of the peer that this rank has accepted, and where they go.
        buffer, start, end: what was read and has not been handled.
        arriving, rest: the message whose payload comes next, and the memory that it fills.
        interest: the events that are polled for.
    """

    def __init__(self, peer: int, dialling: Running[Connection] | None = None) -> None:
        self.peer, self.dialling = peer, dialling
        self.sock: socket.socket | None = None
        self.outgoing: deque[tuple[memoryview, Outgoing | None]] = deque()
        self.announced: dict[int, Outgoing] = {}
        self.accepted: dict[int, tuple[Incoming, memoryview]] = {}
        self.buffer = memoryview(bytearray(_BUFFER_BYTES))
        self.start = self.end = 0
        self.arriving: Incoming | None = None
        self.rest = memoryview(b"")
        self.interest = 0
        self.closed = False


class TcpEndpoint:
    """`point_to_point.Endpoint` over TCP; ``names`` are the ranks' numbers in messages."""

    def __init__(self, links: Links, names: Sequence[int]) -> None:
        self.arrived: Callable[[Incoming], object] = lambda message: None
        self.at_once: AtOnce | None = None
        self._links, self._names = links, names
        self._dialled: dict[int, _Connection] = {}
        """By peer."""
        self._dialling: list[_Connection] = []
        self._accepted: deque[tuple[int, socket.socket]] = deque()
        """Connections that the network's thread has accepted."""
        self._by_descriptor: dict[int, _Connection] = {}
        self._poll = select.poll()
        self._lost: deque[tuple[float, int, list[Transfer]]] = deque()
        """What connections that have ended were to carry: until when whoever waits may end it with the cause, and the
        peer."""
        self._numbers = 0
        links.serve(_CHANNEL, lambda peer, sock: self._accepted.append((peer, sock)))

    # ---- sending

    def send(self, message: Outgoing) -> None:
        connection = self._dialled.get(message.peer)
        if connection is None:
            connection = _Connection(message.peer, self._links.begin_dial(message.peer, _CHANNEL))
            self._dialled[message.peer] = connection
            self._dialling.append(connection)
        if connection.closed:
            self._lose_transfers(message.peer, [message])
            return
        array, shape = message.array, message.shape
        self._numbers += 1
        eager = array.nbytes <= EAGER_BYTES
        code = DTYPE_CODE[SUPPORTED[array.dtype]]
        header = _HEADER.pack(
            EAGER if eager else READY, message.tag, self._numbers, array.nbytes, code, len(shape)
        ) + struct.pack(f"<{len(shape)}q", *shape)
        if eager:
            connection.outgoing.append((memoryview(header + array.view(np.uint8).tobytes()), message))
        else:
            connection.announced[self._numbers] = message
            connection.outgoing.append((memoryview(header), None))
        self._write(connection)

    def _write(self, connection: _Connection) -> None:
        sock, outgoing = connection.sock, connection.outgoing
        if sock is None:
            return
        try:
            while outgoing:
                sent = sock.sendmsg([data for data, _ in islice(outgoing, _SENT_AT_ONCE)])
                while outgoing and sent >= len(outgoing[0][0]):
                    data, message = outgoing.popleft()
                    sent -= len(data)
                    if message is not None:
                        message.end()
                if sent:
                    data, message = outgoing[0]
                    outgoing[0] = data[sent:], message
        except BlockingIOError:
            pass
        except OSError:
            self._lose(connection)
            return
        self._watch(connection)

    def _say(self, connection: _Connection, kind: int, number: int, text: bytes = b"") -> None:
        connection.outgoing.append((memoryview(_HEADER.pack(kind, 0, number, len(text), 0, 0) + text), None))
        self._write(connection)

    # ---- receiving

    def poll(self) -> None:
        while self._accepted:
            peer, sock = self._accepted.popleft()
            self._open(_Connection(peer), sock)
        if self._dialling:
            self._dialling = [connection for connection in self._dialling if not self._has_dialled(connection)]
        for descriptor, events in self._poll.poll(0):
            connection = self._by_descriptor.get(descriptor)
            if connection is not None and events & ~select.POLLOUT:
                self._read(connection)
            if connection is not None and events & select.POLLOUT:
                self._write(connection)
        while self._lost and time.monotonic() > self._lost[0][0]:
            _, peer, transfers = self._lost.popleft()
            me, lost = f"rank {self._names[self._links.rank]}", f"rank {self._names[peer]}"
            _end(transfers, RankFailedError(f"{me}: {lost} has closed its connection: it has ended or shut down [R11]"))

    def _has_dialled(self, connection: _Connection) -> bool:
        assert connection.dialling is not None
        if not connection.dialling.done():
            return False
        try:
            sock = connection.dialling.result()
        except (CollectivesError, OSError) as error:
            self._lose(connection, error)
        else:
            self._open(connection, sock)
            self._write(connection)
        return True

    def _open(self, connection: _Connection, sock: socket.socket) -> None:
        sock.setblocking(False)
        connection.sock = sock
        self._by_descriptor[sock.fileno()] = connection
        self._poll.register(sock, select.POLLIN)
        connection.interest = select.POLLIN

    def _watch(self, connection: _Connection) -> None:
        interest = select.POLLIN | (select.POLLOUT if connection.outgoing else 0)
        if interest != connection.interest and connection.sock is not None:
            self._poll.modify(connection.sock, interest)
            connection.interest = interest

    def _read(self, connection: _Connection) -> None:
        """Read what has come, up to a few buffers full, and handle it."""
        sock = connection.sock
        assert sock is not None
        try:
            for _ in range(16):
                if connection.arriving is not None:
                    count = sock.recv_into(connection.rest)
                    connection.rest = connection.rest[count:]
                    if count:
                        self._end_payload(connection)
                else:
                    buffer, start, end = connection.buffer, connection.start, connection.end
                    if start:
                        buffer[: end - start] = bytes(buffer[start:end])
                        connection.start, connection.end = 0, end - start
                    count = sock.recv_into(buffer[connection.end :])
                    connection.end += count
                    while self._handle(connection):
                        pass
                if not count:
                    raise ConnectionResetError
        except BlockingIOError:
            pass
        except OSError:
            self._lose(connection)
        except TransportError as error:
            self._lose(connection, error)

    def _handle(self, connection: _Connection) -> bool:
        buffer, start, end = connection.buffer, connection.start, connection.end
        if connection.arriving is not None or end - start < _HEADER.size:
            return False
        kind, tag, number, nbytes, code, dimensions = _HEADER.unpack_from(buffer, start)
        inside = nbytes if kind in (EAGER, REFUSE) else 0
        valid = 0 <= dimensions <= _MOST_DIMENSIONS and 0 <= code < len(DTYPE_NAMES) and nbytes >= 0
        if not valid or inside > EAGER_BYTES:
            raise TransportError(f"rank {self._names[connection.peer]} sent data that is not a valid message [N9]")
        start += _HEADER.size
        after = start + 8 * dimensions
        if end < after + inside:
            return False
        connection.start = after + inside
        if kind in (EAGER, READY):
            shape = struct.unpack_from(f"<{dimensions}q", buffer, start)
            payload = (connection, number) if kind == READY else np.array(buffer[after : after + inside], np.uint8)
            self.arrived(Incoming(connection.peer, tag, DTYPE_NAMES[code], shape, nbytes, payload))
        elif kind == DATA:
            if number in connection.accepted:  # else the connection has just been lost
                self._begin_payload(connection, number)
        elif number in connection.announced:
            message = connection.announced.pop(number)
            if kind == ACCEPT:
                whole = message.array.view(np.uint8).data
                connection.outgoing.append((memoryview(_HEADER.pack(DATA, 0, number, 0, 0, 0)), None))
                connection.outgoing.append((whole, message))
                self._write(connection)
            else:
                message.refused = bytes(buffer[after : after + inside]).decode("utf-8", "replace")
                message.end()
        return True

    def _begin_payload(self, connection: _Connection, number: int) -> None:
        """A payload follows: what of it is in the buffer, and then the rest from the socket."""
        connection.arriving, into = connection.accepted.pop(number)
        count = min(connection.end - connection.start, len(into))
        into[:count] = connection.buffer[connection.start : connection.start + count]
        connection.start += count
        connection.rest = into[count:]
        self._end_payload(connection)

    def _end_payload(self, connection: _Connection) -> None:
        """End the message that arrives, if all of it is there."""
        message = connection.arriving
        if message is not None and not connection.rest:
            connection.arriving = None
            message.end()

    def receive(self, message: Incoming, into: Array) -> None:
        payload = message.payload
        message.payload = None
        if isinstance(payload, tuple):
            connection, number = payload
            if connection.closed:
                self._lose_transfers(connection.peer, [message])
                return
            connection.accepted[number] = message, into[: message.nbytes].data
            self._say(connection, ACCEPT, number)
        else:
            into[: message.nbytes] = payload
            message.end()

    def refuse(self, message: Incoming, why: str) -> None:
        if isinstance(message.payload, tuple):
            connection, number = message.payload
            if not connection.closed:
                self._say(connection, REFUSE, number, why.encode()[:_REFUSAL_BYTES])
        message.payload = None
        message.end()

    # ---- the end

    def _lose(self, connection: _Connection, error: Exception | None = None) -> None:
        """The connection has ended: all that it was to carry fails, with the error if there is one."""
        if connection.closed:
            return
        self._release(connection)
        transfers: list[Transfer] = [message for _, message in connection.outgoing if message is not None]
        transfers += connection.announced.values()
        transfers += [message for message, _ in connection.accepted.values()]
        if connection.arriving is not None:
            transfers.append(connection.arriving)
        connection.outgoing.clear()
        connection.announced.clear()
        connection.accepted.clear()
        connection.arriving = None
        if error is None:
            self._lose_transfers(connection.peer, transfers)
        else:
            _end(transfers, error)

    def _lose_transfers(self, peer: int, transfers: list[Transfer]) -> None:
        """Leave transfers to those who wait for them, and learn from the other ranks' notices what has become of the
        peer."""
        self._lost.append((time.monotonic() + CAUSE_SHOWS_WITHIN, peer, transfers))

    def _release(self, connection: _Connection) -> None:
        connection.closed = True
        sock, connection.sock = connection.sock, None
        if sock is not None:
            self._by_descriptor.pop(sock.fileno(), None)
            with suppress(KeyError, OSError):
                self._poll.unregister(sock)
            sock.close()

    @property
    def busy(self) -> bool:
        if self._dialling or self._accepted or self._lost:
            return True
        for connections in (self._dialled, self._by_descriptor):
            for connection in connections.values():
                if connection.outgoing or connection.announced or connection.accepted or connection.arriving:
                    return True
        return False

    def close(self) -> None:
        self._links.end_serving(_CHANNEL)
        for connection in [*self._dialled.values(), *list(self._by_descriptor.values())]:
            if connection.dialling is not None:
                connection.dialling.cancel()
            self._release(connection)
        while self._accepted:
            self._accepted.popleft()[1].close()


def _end(transfers: Iterable[Transfer], error: BaseException) -> None:
    for transfer in transfers:
        transfer.end(error)
