"""A rank that closes its connections does not take its last messages back."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from collectives.transport.tcp.tcp_channel import close_all


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection over loopback; the first end is non-blocking."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = socket.create_connection(server.getsockname())
        theirs = server.accept()[0]
    mine.setblocking(False)
    theirs.settimeout(20)
    yield mine, theirs
    mine.close()
    theirs.close()


def fill(sock: socket.socket) -> int:
    """Send as much as the system takes."""
    sent = 0
    while True:
        try:
            sent += sock.send(bytes(1 << 16))
        except BlockingIOError:
            return sent


def test_a_slow_reader_gets_everything_although_it_is_a_call_ahead(pair: tuple[socket.socket, socket.socket]) -> None:
    mine, theirs = pair
    sent = fill(mine)
    theirs.sendall(b"a record of the next call")
    closing = threading.Thread(target=close_all, args=([mine], 20.0))
    closing.start()
    theirs.sendall(b"another one")
    received = 0
    while data := theirs.recv(1 << 16):
        received += len(data)
    closing.join(20)
    assert received == sent and not closing.is_alive() and mine.fileno() == -1


def test_a_reader_that_never_reads_is_waited_for_only_so_long(pair: tuple[socket.socket, socket.socket]) -> None:
    mine, _ = pair
    fill(mine)
    begun = time.monotonic()
    close_all([mine], 0.05)
    assert mine.fileno() == -1 and time.monotonic() - begun > 0.05


def test_connections_that_have_ended_are_closed_at_once(pair: tuple[socket.socket, socket.socket]) -> None:
    mine, theirs = pair
    theirs.close()
    gone = socket.socket()
    close_all([mine, gone], 20.0)
    close_all([mine], 20.0)
    assert mine.fileno() == gone.fileno() == -1


def test_a_peer_that_goes_on_sending_is_not_listened_to(pair: tuple[socket.socket, socket.socket]) -> None:
    class Endless(socket.socket):
        heard = 0

        def recv(self, nbytes: int, flags: int = 0) -> bytes:
            self.heard += nbytes
            assert self.heard < 1 << 24
            return bytes(nbytes)

    mine = Endless(fileno=pair[0].detach())
    close_all([mine], 20.0)
    assert mine.fileno() == -1
