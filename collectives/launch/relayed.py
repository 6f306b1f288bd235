"""Agents on hosts where another system starts processes: its process connects to a relay, which the launcher starts.

launcher -> relay.py = sockets = agent.py, a child of a process that Ray or Spark has started -> rank.py -> python
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from collectives.launch import agent, relay, ssh
from collectives.launch.elastic_agents import ElasticAgents
from collectives.transport.tcp import listener

_RELAY = """
import sys
sys.path.insert(0, sys.argv[1])
from collectives.launch.relay import main
sys.exit(main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
"""
"""A program that is the relay, with the package from the folder that is its first argument, without site-packages."""
_PACKAGES = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class Relayed(ssh.Ssh):
    """Reaches hosts by processes of another system there, in place of ssh. A host is named ``ADDRESS/...``.

    Attributes:
        folder: of the user alone, for the relays' files.
        key: of the job's relays, in hexadecimal; who asks for an agent brings it to the process there.
    """

    folder: str = ""
    key: str = ""

    def make_relay(self, address: str) -> tuple[int, list[str]]:
        """Listen at an address of this host, for the agent of another one.

        Returns:
            The port, and the command of the relay, which needs what `passed` returns.
        """
        server = listener.listening(address)
        port: int = server.getsockname()[1]
        path = Path(self.folder, f"relay-{port}")
        path.touch(mode=0o600, exist_ok=False)
        path.write_text(f"{self.key} {self.timeout:g}", encoding="ascii")
        words = [str(server.detach()), str(port), str(path)]
        return port, [sys.executable, "-I", "-S", "-c", _RELAY, _PACKAGES, *words]

    def passed(self, command: Sequence[str]) -> Sequence[int]:
        return [int(command[-3])]

    def address(self, host: str) -> str:
        return host.partition("/")[0]


def start_agent(
    address: str, port: int, key: str, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start an agent whose standard streams are connections to a relay.

    Args:
        environment: more variables of the agent, and of its ranks.

    Raises:
        ConnectionError: the relay has ended.
        TransportError: what listens there is no relay of this job.
    """
    with (
        listener.dialled(address, port, bytes.fromhex(key), relay.hello(port, "orders")) as orders,
        listener.dialled(address, port, bytes.fromhex(key), relay.hello(port, "words")) as words,
    ):
        return subprocess.Popen(
            [sys.executable, "-I", "-S", agent.__file__],
            stdin=orders.fileno(),
            stdout=orders.fileno(),
            stderr=words.fileno(),
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )


class RelayedAgents(ElasticAgents):
    """The members of a job; an agent on the launcher's own host is reached as all others are."""

    def _name_elsewhere(self, host: str) -> str:
        return host
