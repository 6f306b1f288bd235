"""The relay between a launcher's pipes and an agent elsewhere."""

import socket
import struct
import threading
from pathlib import Path

from collectives.launch import relayed
from collectives.launch.relay import _accept

WITHIN = 20.0


def test_connections_of_others_do_not_end_it(tmp_path: Path) -> None:
    port, key, command = relayed.make_relay(str(tmp_path), "127.0.0.1", WITHIN)
    assert key not in " ".join(command)
    accepted: list[dict[str, socket.socket] | None] = []
    relay = threading.Thread(target=lambda: accepted.append(_accept("127.0.0.1", port, key, WITHIN)), daemon=True)
    relay.start()

    def connect() -> socket.socket:
        return relayed._connect("127.0.0.1", port)

    with connect() as rude:  # hangs up by a reset
        rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with connect() as wrong:
        wrong.sendall(b"wrong orders\n")
    own = {name: connect() for name in ("words", "orders")}
    for name, connection in own.items():
        connection.sendall(f"{key} {name}\n".encode())
    relay.join(WITHIN)
    (connections,) = accepted
    assert connections is not None and connections.keys() == own.keys()
    for name, connection in own.items():
        connection.sendall(name.encode())
        assert connections[name].recv(16) == name.encode()


def test_it_waits_no_longer_than_it_is_told(tmp_path: Path) -> None:
    port, key, _ = relayed.make_relay(str(tmp_path), "127.0.0.1", WITHIN)
    assert _accept("127.0.0.1", port, key, 0.05) is None
