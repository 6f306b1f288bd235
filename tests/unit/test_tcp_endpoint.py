"""What an endpoint of messages over TCP does when its peer ends."""

from __future__ import annotations

import concurrent.futures
import select
import socket
import struct
import time
from collections.abc import Callable

import numpy as np
import pytest

from collectives.base.errors import RankFailedError
from collectives.transport.point_to_point import Outgoing
from collectives.transport.tcp import tcp_endpoint
from collectives.transport.tcp.tcp_endpoint import TcpEndpoint

NBYTES = 40 << 20
"""More than the system keeps for a connection."""


class Links:
    rank = 0

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def begin_dial(self, peer: int, channel: str) -> concurrent.futures.Future[socket.socket]:
        future: concurrent.futures.Future[socket.socket] = concurrent.futures.Future()
        future.set_result(self._sock)
        return future

    def serve(self, channel: str, served: Callable[[int, socket.socket], None]) -> None:
        pass

    def end_serving(self, channel: str) -> None:
        pass


def test_a_peer_that_is_killed_while_it_is_sent_a_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is then ready for writing, and has an error."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = socket.create_connection(server.getsockname())
        theirs = server.accept()[0]
    endpoint, message = TcpEndpoint(Links(mine), (0, 1)), Outgoing(1, 0, np.zeros(NBYTES, np.uint8), (NBYTES,))
    endpoint.send(message)
    endpoint.poll()
    theirs.sendall(tcp_endpoint._HEADER.pack(tcp_endpoint.ACCEPT, 0, 1, 0, 0, 0))
    select.select([mine], [], [], 10)
    endpoint.poll()
    assert not message.done
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed by a reset
    theirs.close()
    select.select([mine], [], [], 10)
    endpoint.poll()
    late = Outgoing(1, 0, np.zeros(3, np.uint8), (3,))
    endpoint.send(late)
    assert not message.done and not late.done and endpoint.busy, "whoever waits may know why the peer has ended"
    monkeypatch.setattr(time, "monotonic", lambda: float("inf"))
    endpoint.poll()
    assert isinstance(message.error, RankFailedError) and isinstance(late.error, RankFailedError)
    assert not endpoint.busy
    endpoint.close()
