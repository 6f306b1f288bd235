"""Messages between device memories: through NCCL, or through page-locked host memory and MPI.

Staged messages are cut into pieces: while one piece is on the network, the next is copied from the device and the one
before it to the device. The pieces of a stage travel in order, piece k of all messages at once; sender and receiver cut
a message alike.
"""

from __future__ import annotations

import numpy as np

from collectives.cuda.completion import Completion, Events, Wait
from collectives.cuda.launches import Stage
from collectives.device.protocol import Array, Device
from collectives.transport.base import MessageTransport
from collectives.transport.cuda import nccl
from collectives.transport.cuda.nccl_library import NcclCommunicator

_PIECE = 4 << 20
"""Bytes of a piece: some hundred microseconds of a fast network or of the bus."""
_BANKS = 2


class NcclMessages:
    """Sends and receives of one communicator, each stage in one NCCL group."""

    def __init__(self, communicator: NcclCommunicator) -> None:
        self._communicator = communicator

    def exchange(self, stage: Stage, table: Array, dtype: np.dtype[np.generic], stream: int) -> None:
        """Receive and send all messages of a stage at once, ordered on ``stream`` like any other work; ``table``: of
        addresses, see `launches`."""
        communicator, addresses = self._communicator, table.tolist()
        with nccl.group(communicator):
            for message in stage.receives:
                entry, offset = message.location
                communicator.receive(addresses[entry] + offset, message.count, dtype, message.peer, stream)
            for message in stage.sends:
                entry, offset = message.location
                communicator.send(addresses[entry] + offset, message.count, dtype, message.peer, stream)


class StagedMessages:
    """Messages through page-locked host memory.

    Args:
        wait: blocks until the device is done with something.
    """

    def __init__(self, device: Device, messages: MessageTransport, wait: Wait) -> None:
        self._device = device
        self._messages = messages
        self._staging: Array = np.empty(0, np.uint8)
        self._wait = wait
        self._events = Events(device)
        self._fetched: list[Completion | None] = [None] * _BANKS
        self._stored: list[Completion | None] = [None] * _BANKS

    def exchange(self, stage: Stage, table: Array, dtype: np.dtype[np.generic], stream: int) -> None:
        """As `NcclMessages.exchange`; returns when everything has arrived in host memory and its copy to the device is
        enqueued."""
        device, transport, itemsize = self._device, self._messages, dtype.itemsize
        messages = [*stage.receives, *stage.sends]
        received, sent = range(len(stage.receives)), range(len(stage.receives), len(messages))
        most = max(message.count for message in messages) * itemsize
        piece = min(_PIECE // itemsize * itemsize, most)
        banks = self._banks(len(messages), piece)
        pieces = -(-most // piece)
        begins = [int(table[message.location[0]]) + message.location[1] for message in messages]

        def part(number: int, index: int) -> tuple[int, Array]:
            """Piece ``number`` of a message: its device address and its host memory, which is empty beyond the end."""
            at = number * piece
            length = min(piece, messages[index].count * itemsize - at)
            return begins[index] + at, banks[number % _BANKS, index, : max(0, length)]

        def fetch(number: int) -> None:
            bank = number % _BANKS
            self._finish(self._stored[bank])  # until the device has what was received into this bank
            for index in sent:
                at, host = part(number, index)
                if host.size:
                    device.copy(host.ctypes.data, at, host.size, stream)
            self._fetched[bank] = Completion(self._events, stream)

        fetch(0)
        for number in range(pieces):
            bank = number % _BANKS
            if number + 1 < pieces:
                fetch(number + 1)
            for index in received:
                host = part(number, index)[1]
                if host.size:
                    transport.post_receive(messages[index].peer, host)
            self._finish(self._fetched[bank])
            for index in sent:
                host = part(number, index)[1]
                if host.size:
                    transport.post_send(messages[index].peer, host)
            transport.drain()
            for index in received:
                at, host = part(number, index)
                if host.size:
                    device.copy(at, host.ctypes.data, host.size, stream)
            self._stored[bank] = Completion(self._events, stream)

    def _banks(self, messages: int, piece: int) -> Array:
        """Two banks, each with memory for one piece of every message: bytes, of shape (banks, messages, piece)."""
        step = -(-piece // 256) * 256
        if self._staging.nbytes < _BANKS * messages * step:
            for stored in self._stored:
                self._finish(stored)
            self._staging = self._device.pinned(_BANKS * messages * step)
        return self._staging[: _BANKS * messages * step].reshape(_BANKS, messages, step)[:, :, :piece]

    def _finish(self, completion: Completion | None) -> None:
        if completion is not None:
            self._wait(completion)

    def close(self) -> None:
        """Release the events; the device is idle."""
        self._fetched.clear()
        self._stored.clear()
        self._events.close()
