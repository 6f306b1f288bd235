"""A gate in an emulated stream: shows reliably whether other work waits for that stream."""

from __future__ import annotations

import threading
import time

from tests.support.emulated.cuda import EmulatedDevice


class Gate:
    """Blocks all later work of a stream until it is opened."""

    def __init__(self, device: EmulatedDevice, stream: int) -> None:
        self._device = device
        self._opened = threading.Event()
        device.enqueue(stream, self._pass)

    def _pass(self) -> None:
        assert self._opened.wait(20), "nobody opened the gate"

    def holds(self, stream: int) -> bool:
        """Whether the present work of a stream stays blocked, for at least a tenth of a second."""
        event = self._device.create_event()
        self._device.record(event, stream)
        patience = time.monotonic() + 0.1
        while time.monotonic() < patience and not self._device.passed(event):
            pass
        held = not self._device.passed(event)
        self._device.destroy_event(event)
        return held

    def open(self) -> None:
        self._opened.set()
