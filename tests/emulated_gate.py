"""A gate in an emulated stream: makes a test see whether something waits for it, whatever the machine's mood."""

from __future__ import annotations

import threading
import time

from tests.emulated_cuda import EmulatedDevice


class Gate:
    """Holds back what a stream is given from now on, until it is opened."""

    def __init__(self, device: EmulatedDevice, stream: int) -> None:
        self._device = device
        self._opened = threading.Event()
        device.enqueue(stream, self._pass)

    def _pass(self) -> None:
        assert self._opened.wait(20), "nobody opened the gate"

    def holds(self, stream: int) -> bool:
        """Whether a stream stands still because of it, with all that it has been given: for a tenth of a second at
        least."""
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
