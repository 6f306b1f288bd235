"""Agents on hosts where another system starts processes: its process connects to a relay, which the launcher starts.

launcher -> relay.py = sockets = agent.py, a child of a process that Ray or Spark has started -> rank.py -> python
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from collectives.launch import agent, relay
from collectives.launch.elastic_agents import ElasticAgents

_CONNECT_WITHIN = 10.0
_LOOK = 0.02


def make_relay(folder: str, address: str, timeout: float) -> tuple[int, str, list[str]]:
    """Prepare a relay that listens at an address of this host.

    Returns:
        Its port, its key, and the command that runs it.
    """
    port, key = agent.free_port(), secrets.token_hex(32)
    path = Path(folder, f"relay-{port}")
    path.touch(mode=0o600)
    path.write_text(f"{address} {port} {key} {timeout:g}", encoding="ascii")
    return port, key, [sys.executable, "-I", "-S", relay.__file__, str(path)]


def start_agent(
    address: str, port: int, key: str, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start an agent whose standard streams are connections to a relay; ConnectionRefusedError: there is none.

    Args:
        environment: more variables of the agent, and of its ranks.
    """
    streams = {}
    for name in ("orders", "words"):
        streams[name] = _connect(address, port)
        streams[name].settimeout(None)
        streams[name].sendall(f"{key} {name}\n".encode())
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", agent.__file__],
        stdin=streams["orders"].fileno(),
        stdout=streams["orders"].fileno(),
        stderr=streams["words"].fileno(),
        start_new_session=True,
        env={**os.environ, **(environment or {})},
    )
    for stream in streams.values():
        stream.close()
    return process


def _connect(address: str, port: int) -> socket.socket:
    """Connect with a relay, which starts at the same time."""
    end = time.monotonic() + _CONNECT_WITHIN
    while True:
        try:
            return socket.create_connection((address, port), _CONNECT_WITHIN)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
        time.sleep(_LOOK)  # nothing tells when a port is listened at


class RelayedAgents(ElasticAgents):
    """The members of a job; an agent on the launcher's own host is reached as all others are."""

    def _name_elsewhere(self, host: str) -> str:
        return host
