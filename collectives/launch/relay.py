"""A child of the launcher that stands for an agent that another system starts, and connects the launcher's pipes to it.

Its argument is a file with ``ADDRESS PORT KEY SECONDS``: it listens there, and waits so long for the agent's two
connections, each of which begins with a line ``KEY orders`` (stdin and stdout) or ``KEY words`` (stderr). Like
``agent.py`` it is a plain script that imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import sys
import time

_READ = 64 << 10
_LINE = 256
_HELLO_WITHIN = 5.0


def main(path: str) -> int:
    """Relay until the agent's connections end."""
    with open(path, encoding="ascii") as file:
        address, port, key, seconds = file.read().split()
    connections = _accept(address, int(port), key, float(seconds))
    if connections is None:
        os.write(2, f"no process has been started on that host within {seconds} s\n".encode())
        return 1
    orders, words = connections["orders"], connections["words"]
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


def _accept(address: str, port: int, key: str, seconds: float) -> dict[str, socket.socket] | None:
    """The two connections; None if they have not come in time."""
    connections: dict[str, socket.socket] = {}
    end = time.monotonic() + seconds
    with socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
        while len(connections) < 2:
            server.settimeout(max(0.01, end - time.monotonic()))
            try:
                connection, _ = server.accept()
                connection.settimeout(_HELLO_WITHIN)
                said, _, name = _line(connection).partition(" ")
            except OSError:  # in time nobody has come, or what has come says nothing, or hangs up: no agent of ours
                if time.monotonic() >= end:
                    return None
                continue
            if hmac.compare_digest(said.encode(), key.encode()) and name in ("orders", "words"):
                connection.settimeout(None)
                connections[name] = connection
            else:
                connection.close()
    return connections


def _line(connection: socket.socket) -> str:
    """A line, read byte by byte: what follows belongs to the agent."""
    line = b""
    while len(line) < _LINE and not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            break
        line += byte
    return line.decode("ascii", "replace").strip()


def _write(sink: int, data: bytes) -> None:
    while data:
        data = data[os.write(sink, data) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
