"""Point-to-point messages through MPI, on the group's own communicator.

Envelopes are messages of one tag, with small payloads in them; a large payload is a message of a tag of its own, which
is received when its envelope has been matched. The program's tags travel in the envelope, so that MPI's own bounds on
tags do not matter, and a mismatch is found before anything is written.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.base.dtypes import SUPPORTED
from collectives.base.errors import TransportError
from collectives.transport.base import Array
from collectives.transport.point_to_point import DTYPE_CODE, DTYPE_NAMES, AtOnce, Incoming, Outgoing, Transfer

if TYPE_CHECKING:
    from mpi4py import MPI

    from collectives.transport.mpi.channel import Channel

ENVELOPE_TAG = 5
"""The channel uses smaller ones."""
_FIRST_PAYLOAD_TAG = 16
EAGER_BYTES = 8 << 10
"""Payloads up to this size travel with their envelope; every MPI sends so much at once."""
_HEADER = struct.Struct("<5q")
"""Tag, payload tag or 0, bytes, dtype, dimensions."""


class MpiEndpoint:
    """`point_to_point.Endpoint` through the communicator of a channel."""

    def __init__(self, channel: Channel) -> None:
        from mpi4py import MPI

        self.arrived: Callable[[Incoming], object] = lambda message: None
        self.at_once: AtOnce | None = None
        self._channel = channel
        channel.users.append(self)
        self._comm = channel.comm
        self._status = MPI.Status()
        self._any, self._byte = MPI.ANY_SOURCE, MPI.BYTE
        self._failure = MPI.Exception
        most: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        self._payload_tags = int(most) - _FIRST_PAYLOAD_TAG
        self._numbers = 0
        self._sending: list[tuple[MPI.Request, Any, Outgoing | None]] = []
        """Requests with their memory, and the messages that are done when they are."""
        self._envelopes: deque[tuple[MPI.Request, bytearray, int]] = deque()
        """Envelopes that are being received, in order, with their sources."""
        self._receiving: list[tuple[MPI.Request, Array, Incoming]] = []

    def send(self, message: Outgoing) -> None:
        array, shape = message.array, message.shape
        eager = array.nbytes <= EAGER_BYTES
        payload_tag = 0
        if not eager:
            self._numbers += 1
            payload_tag = _FIRST_PAYLOAD_TAG + self._numbers % self._payload_tags
        payload = array.view(np.uint8)
        header = _HEADER.pack(message.tag, payload_tag, array.nbytes, DTYPE_CODE[SUPPORTED[array.dtype]], len(shape))
        envelope = header + struct.pack(f"<{len(shape)}q", *shape) + (payload.tobytes() if eager else b"")
        self._post(envelope, message.peer, ENVELOPE_TAG, message if eager else None)
        if not eager:
            self._post(payload, message.peer, payload_tag, message)

    def _post(self, memory: Any, peer: int, tag: int, message: Outgoing | None) -> None:
        request = self._called(lambda: self._comm.Isend((memory, self._byte), peer, tag))
        self._sending.append((request, memory, message))
        if message is not None:
            self._finish_sends()

    def poll(self) -> None:
        if self._sending:
            self._finish_sends()
        self._called(self._take_envelopes)
        if self._receiving:
            self._receiving = [entry for entry in self._receiving if not self._ended(entry)]

    def _finish_sends(self) -> None:
        self._sending = [entry for entry in self._sending if not self._ended(entry)]

    def _ended(self, entry: tuple[MPI.Request, Any, Transfer | None]) -> bool:
        request, _, message = entry
        if not self._called(request.Test):
            return False
        if message is not None:
            message.end()
        return True

    def _take_envelopes(self) -> None:
        status = self._status
        while (message := self._comm.Improbe(self._any, ENVELOPE_TAG, status)) is not None:
            memory = bytearray(status.Get_count(self._byte))
            self._envelopes.append((message.Irecv((memory, self._byte)), memory, status.Get_source()))
        while self._envelopes and self._envelopes[0][0].Test():
            _, memory, source = self._envelopes.popleft()
            self._open(source, memory)

    def _open(self, source: int, envelope: bytearray) -> None:
        tag, payload_tag, nbytes, code, dimensions = _HEADER.unpack_from(envelope)
        shape = struct.unpack_from(f"<{dimensions}q", envelope, _HEADER.size)
        start = _HEADER.size + 8 * dimensions
        payload = payload_tag or np.frombuffer(envelope, np.uint8, nbytes, start)
        self.arrived(Incoming(source, tag, DTYPE_NAMES[code], shape, nbytes, payload))

    def receive(self, message: Incoming, into: Array) -> None:
        payload = message.payload
        message.payload = None
        if isinstance(payload, int):
            into = into[: message.nbytes]
            request = self._called(lambda: self._comm.Irecv((into, self._byte), message.source, payload))
            self._receiving.append((request, into, message))
        else:
            into[: message.nbytes] = payload
            message.end()

    def refuse(self, message: Incoming, why: str) -> None:
        if isinstance(message.payload, int):  # MPI has no way to refuse it, and the sender waits
            self.receive(message, np.empty(message.nbytes, np.uint8))
        else:
            message.end()

    def _called(self, call: Callable[[], Any]) -> Any:
        """Call MPI, whose errors are not those of this package."""
        try:
            return call()
        except self._failure as error:
            raise TransportError(
                f"rank {self._channel.names[self._channel.rank]}: MPI failed: {error} [N15]"
            ) from error

    @property
    def busy(self) -> bool:
        return bool(self._sending or self._envelopes or self._receiving)

    def close(self) -> None:
        """Keep the memory of what is under way: MPI may still use it."""
        self._channel.kept += [self._sending, self._envelopes, self._receiving]
