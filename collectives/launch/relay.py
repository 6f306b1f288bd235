"""A child of the launcher that stands for an agent that another system starts, and connects the launcher's pipes to it.

Its arguments are the descriptor of a socket at which it listens, the socket's port, and a file with ``KEY SECONDS``,
which it removes. It waits so long for the agent's two connections, which prove the key to it, as it does to them. Their
hello is ``PORT orders`` (stdin and stdout) or ``PORT words`` (stderr).
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import time

from collectives.transport.tcp.authentication import Connection
from collectives.transport.tcp.listener import Listener
from collectives.transport.tcp.service import Service

_READ = 64 << 10
_STREAMS = ("orders", "words")


def hello(port: int, stream: str) -> bytes:
    """What a connection to the relay at a port is for."""
    return f"{port} {stream}".encode()


def main(server: int, port: int, path: str) -> int:
    """Relay until the agent's connections end."""
    with open(path, encoding="ascii") as file:
        key, seconds = file.read().split()
    os.unlink(path)
    connections = accept(socket.socket(fileno=server), port, bytes.fromhex(key), float(seconds))
    if connections is None:
        os.write(2, f"no process has been started on that host within {seconds} s\n".encode())
        return 1
    orders, words = (connections[stream] for stream in _STREAMS)
    sinks = {orders.fileno(): 1, words.fileno(): 2}
    sources = [0, *sinks]
    while orders.fileno() in sources:
        for source in select.select(sources, [], [])[0]:
            try:
                data = os.read(source, _READ)
                _write(sinks.get(source, orders.fileno()), data)
            except OSError:
                data = b""  # one of the two sides is gone
            if not data:
                sources.remove(source)
                if source == 0:
                    with contextlib.suppress(OSError):  # the agent's end is gone, too
                        orders.shutdown(socket.SHUT_WR)
    return 0


def accept(server: socket.socket, port: int, key: bytes, seconds: float) -> dict[str, Connection] | None:
    """The two connections, blocking; None if they have not come in time. Closes the socket that listens."""
    service, arrived = Service(), queue.SimpleQueue[tuple[bytes, Connection]]()
    listener = Listener(service, "", 0, key, lambda said, sock: arrived.put((said, sock)), server=server)
    connections: dict[str, Connection] = {}
    end = time.monotonic() + seconds
    try:
        while len(connections) < len(_STREAMS):
            said, connection = arrived.get(timeout=max(0.01, end - time.monotonic()))
            for stream in _STREAMS:
                if said == hello(port, stream):
                    connection.setblocking(True)
                    connections[stream] = connection
        return connections
    except queue.Empty:
        return None
    finally:
        listener.close()
        service.close()


def _write(sink: int, data: bytes) -> None:
    while data:
        data = data[os.write(sink, data) :]
