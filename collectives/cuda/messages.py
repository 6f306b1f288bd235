"""Messages between device memories: through NCCL, or through page-locked host memory and MPI.

Staged messages are cut into pieces, so that while one piece is on the network the next is copied from the device and
the one before to it. A round's pieces travel in order, piece k of all its messages at once; both sides of each message
have the same pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from collectives.cuda.completion import Completion, Events, Wait
from collectives.cuda.launches import Letter
from collectives.device.protocol import Array, Device
from collectives.transport.base import MessageTransport
from collectives.transport.nccl import Communicator, NcclGroup

_PIECE = 4 << 20
"""Bytes of a piece: some hundred microseconds of a fast network or of the bus."""
_BANKS = 2


class NcclMessages:
    """Grouped sends and receives of one communicator."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def exchange(
        self,
        receives: Sequence[Letter],
        sends: Sequence[Letter],
        table: Array,
        dtype: np.dtype[np.generic],
        stream: int,
    ) -> None:
        """See `executor.DeviceMessages`."""
        communicator, addresses = self._communicator, table.tolist()
        with NcclGroup(communicator):
            for letter in receives:
                entry, offset = letter.where
                communicator.receive(addresses[entry] + offset, letter.count, dtype, letter.peer, stream)
            for letter in sends:
                entry, offset = letter.where
                communicator.send(addresses[entry] + offset, letter.count, dtype, letter.peer, stream)


class StagedMessages:
    """Messages through page-locked host memory.

    Args:
        device: of this rank.
        messages: between hosts.
        wait: blocks until the device is done with something.
    """

    def __init__(self, device: Device, messages: MessageTransport, wait: Wait) -> None:
        self._device = device
        self._messages = messages
        self._staging: Array = np.empty(0, np.uint8)
        self._wait = wait
        self._events = Events(device)
        self._copied: list[Completion | None] = [None] * _BANKS
        self._emptied: list[Completion | None] = [None] * _BANKS

    def exchange(
        self,
        receives: Sequence[Letter],
        sends: Sequence[Letter],
        table: Array,
        dtype: np.dtype[np.generic],
        stream: int,
    ) -> None:
        """See `executor.DeviceMessages`; returns when everything has arrived in host memory and is on its way to the
        device."""
        device, messages, itemsize = self._device, self._messages, dtype.itemsize
        letters = [*receives, *sends]
        most = max(letter.count for letter in letters) * itemsize
        piece = min(_PIECE // itemsize * itemsize, most)
        banks = self._banks(len(letters), piece)
        pieces = -(-most // piece)
        here = [int(table[letter.where[0]]) + letter.where[1] for letter in letters]

        def part(number: int, letter: int) -> tuple[int, Array]:
            """A letter's piece: its device address, and its place in host memory."""
            at = number * piece
            length = min(piece, letters[letter].count * itemsize - at)
            return here[letter] + at, banks[number % _BANKS][letter][: max(0, length)]

        def fetch(number: int) -> None:
            bank = number % _BANKS
            self._finish(self._emptied[bank])  # what was received into this bank has reached the device
            for letter in range(len(receives), len(letters)):
                at, host = part(number, letter)
                if host.size:
                    device.copy(host.ctypes.data, at, host.size, stream)
            self._copied[bank] = Completion(self._events, stream)

        fetch(0)
        for number in range(pieces):
            bank = number % _BANKS
            if number + 1 < pieces:
                fetch(number + 1)
            for letter in range(len(receives)):
                host = part(number, letter)[1]
                if host.size:
                    messages.post_receive(letters[letter].peer, host)
            self._finish(self._copied[bank])
            for letter in range(len(receives), len(letters)):
                host = part(number, letter)[1]
                if host.size:
                    messages.post_send(letters[letter].peer, host)
            messages.drain()
            for letter in range(len(receives)):
                at, host = part(number, letter)
                if host.size:
                    device.copy(at, host.ctypes.data, host.size, stream)
            self._emptied[bank] = Completion(self._events, stream)

    def _banks(self, letters: int, piece: int) -> list[list[Array]]:
        """Two banks of one piece for each letter."""
        step = -(-piece // 256) * 256
        if self._staging.nbytes < _BANKS * letters * step:
            for emptied in self._emptied:
                self._finish(emptied)
            self._staging = self._device.pinned(_BANKS * letters * step)
        at = iter(range(0, _BANKS * letters * step, step))
        return [
            [self._staging[begin : begin + piece] for _, begin in zip(range(letters), at, strict=False)]
            for _ in range(_BANKS)
        ]

    def _finish(self, completion: Completion | None) -> None:
        if completion is not None:
            self._wait(completion)

    def close(self) -> None:
        """Give back events; the device must be done."""
        self._copied.clear()
        self._emptied.clear()
        self._events.close()
