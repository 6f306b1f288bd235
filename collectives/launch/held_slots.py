"""``python -m collectives.launch.held_slots FOLDER``: the launcher of an elastic job whose slots Spark's tasks hold.

Each task connects to this process, and keeps the connection as long as its slot is there; its first line is ``KEY
HOST``, with a name of its own for the executor. It is asked to start an agent, for all slots of its executor, by a line
``PORT KEY`` of a relay. The end of the connection is the job's end, or the slot's.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from collectives.base.config import Config
from collectives.launch import job, ssh
from collectives.launch import rank as before_rank
from collectives.launch.api import EVENTS
from collectives.launch.discovery import Found
from collectives.launch.elastic_terms import Rules
from collectives.launch.hosts import Host
from collectives.launch.output import Output
from collectives.launch.relayed import RelayedAgents, make_relay

JOB = "job"
_WIDTH = 4
_HELLO_WITHIN = 5.0
_MOST_HELLO = 256


@dataclass(frozen=True)
class Job:
    """What the launcher is to run.

    Attributes:
        rules: of the elastic job.
        python: the interpreter of the ranks.
        environment: variables of the ranks.
        server: file descriptor of the listening socket for the tasks; its address is this host's for relays too.
        key: of the tasks.
        timeout: seconds within which a task has to start an agent.
    """

    rules: Rules
    python: str
    environment: Mapping[str, str]
    server: int
    key: str
    timeout: float

    def write(self, folder: Path) -> None:
        """Write it for `main`."""
        path = folder / JOB
        path.touch(mode=0o600)
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(folder: Path) -> Job:
        values: dict[str, Any] = json.loads((folder / JOB).read_text())
        return Job(**{**values, "rules": Rules(**values["rules"])})


class Holders:
    """The tasks that are connected; callable as a discovery of `ElasticAgents`."""

    def __init__(self, server: socket.socket, key: str) -> None:
        self._server, self._key = server, key
        self._by_host: dict[str, list[socket.socket]] = {}
        server.setblocking(False)

    def __call__(self) -> Found:
        with suppress(BlockingIOError):
            while True:
                self._greet(*self._server.accept())
        for host, connections in self._by_host.items():
            self._by_host[host] = [connection for connection in connections if _is_open(connection)]
        return tuple(Host(host, len(connections)) for host, connections in self._by_host.items() if connections)

    def _greet(self, connection: socket.socket, peer: Sequence[Any]) -> None:
        connection.settimeout(_HELLO_WITHIN)
        with suppress(OSError):
            key, _, name = connection.makefile("rb").readline(_MOST_HELLO).strip().partition(b" ")
            if hmac.compare_digest(key, self._key.encode()):
                connection.setblocking(False)
                self._by_host.setdefault(f"{peer[0]}/{name.decode('ascii', 'replace')}", []).append(connection)
                return
        connection.close()

    def ask(self, host: str, line: str) -> None:
        """Ask one of a host's tasks to start an agent. If none is there any more, the agent is missed in time."""
        for connection in self._by_host.get(host, ()):
            with suppress(OSError):
                connection.sendall(line.encode())
                return


def _is_open(connection: socket.socket) -> bool:
    """Whether the task, which says nothing more, is there."""
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


@dataclass(frozen=True)
class Remote(ssh.Ssh):
    """Reaches hosts by the tasks there, in place of ssh.

    Attributes:
        folder: for the relays' files.
        at: where relays listen.
    """

    folder: str = ""
    at: str = ""
    holders: Holders | None = None

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        """Have the agent started on a host, and return the command that connects this process with it."""
        port, key, command = make_relay(self.folder, self.at, self.timeout)
        assert self.holders is not None
        self.holders.ask(host, f"{port} {key}\n")
        return command

    def address(self, host: str) -> str:
        """The address from which the tasks of a host have connected."""
        return host.partition("/")[0]


def main(folder: Path) -> int:
    """Run the job that is described in the folder, which is this process's; return its exit code."""
    task = Job.read(folder)
    server = socket.socket(fileno=task.server)
    holders = Holders(server, task.key)
    members = RelayedAgents(
        task.rules,
        holders,
        before_rank.pack(["", str(_WIDTH), "", "", task.python, "-m", "collectives.launch.run_function", str(folder)]),
        task.environment,
        Config.from_environment(task.environment),
        Remote(timeout=task.timeout, folder=str(folder), at=server.getsockname()[0], holders=holders),
        event_files=[str(folder / EVENTS)],
        as_horovod=True,
    )
    os.chdir(folder)  # the folder in which ranks start, on all hosts
    return job.run(members, Output(max(task.rules.largest or 2, 2), verbose=True))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
