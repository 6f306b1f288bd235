"""What a job's driver tells, at its store: ``elastic/event/1``, ``elastic/event/2``, ...; ``elastic/events`` is the
number of the last one. The oldest ones are forgotten, since a job may go on for months.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collectives.transport.stores.store import StoreServer

KEPT = 1000


class EventLog:
    """The events of a driver, at the store that it serves."""

    def __init__(self, server: StoreServer) -> None:
        self._server, self._number = server, 0
        server.set("elastic/events", b"0")

    def append(self, event: bytes) -> None:
        """Add an event; from the thread that decides."""
        self._number += 1
        self._server.set(f"elastic/event/{self._number}", event)
        self._server.set("elastic/events", b"%d" % self._number)
        self._server.forget(f"elastic/event/{self._number - KEPT}")
