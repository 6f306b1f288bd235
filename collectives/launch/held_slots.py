"""``python -m collectives.launch.held_slots FOLDER``: the launcher of an elastic job whose slots Spark's tasks hold.

Each task connects to this process, each proves the job's key to the other, and the task keeps the connection as long
as its slot is there; its hello is a name of its own for the executor. It is asked to start an agent, for all slots of
its executor, by a line with the port of a relay. The end of the connection is the job's end, or the slot's.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from collectives.base.config import Config
from collectives.launch import job
from collectives.launch import rank as before_rank
from collectives.launch.api import EVENTS
from collectives.launch.discovery import Found
from collectives.launch.elastic_terms import Rules
from collectives.launch.hosts import Host
from collectives.launch.output import Output
from collectives.launch.relayed import Relayed, RelayedAgents
from collectives.transport.tcp.authentication import Connection
from collectives.transport.tcp.listener import Listener
from collectives.transport.tcp.service import Service

JOB = "job"
_WIDTH = 4


@dataclass(frozen=True)
class Job:
    """What the launcher is to run.

    Attributes:
        rules: of the elastic job.
        python: the interpreter of the ranks.
        environment: variables of the ranks.
        server: file descriptor of the listening socket for the tasks; its address is this host's for relays too.
        key: of the tasks and relays, in hexadecimal.
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

    def __init__(self, server: socket.socket, key: bytes) -> None:
        self._by_host: dict[str, list[Connection]] = {}
        self._arrived: deque[tuple[str, Connection]] = deque()
        self._service = Service()
        self._listener = Listener(self._service, "", 0, key, self._greet, server=server)

    def __call__(self) -> Found:
        while self._arrived:
            name, connection = self._arrived.popleft()
            self._by_host.setdefault(name, []).append(connection)
        for host, connections in self._by_host.items():
            self._by_host[host] = [connection for connection in connections if _is_open(connection)]
        return tuple(Host(host, len(connections)) for host, connections in self._by_host.items() if connections)

    def _greet(self, hello: bytes, connection: Connection) -> None:
        """In the service's thread: a task has connected."""
        with suppress(OSError):  # it has ended
            self._arrived.append((f"{connection.getpeername()[0]}/{hello.decode()}", connection))

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()
        self._service.close()

    def ask(self, host: str, line: str) -> None:
        """Ask one of a host's tasks for something. If none is there any more, the agent is missed in time."""
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
class Remote(Relayed):
    """Reaches hosts by the tasks there. ``at``: where relays listen."""

    at: str = ""
    holders: Holders | None = None

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        """Have the agent started on a host, and return the command that connects this process with it."""
        port, command = self.make_relay(self.at)
        assert self.holders is not None
        self.holders.ask(host, f"{port}\n")
        return command


def main(folder: Path) -> int:
    """Run the job that is described in the folder, which is this process's; return its exit code."""
    task = Job.read(folder)
    server = socket.socket(fileno=task.server)
    holders = Holders(server, bytes.fromhex(task.key))
    at: str = server.getsockname()[0]
    members = RelayedAgents(
        task.rules,
        holders,
        before_rank.pack(["", str(_WIDTH), "", "", task.python, "-m", "collectives.launch.run_function", str(folder)]),
        task.environment,
        Config.from_environment(task.environment),
        Remote(timeout=task.timeout, folder=str(folder), key=task.key, at=at, holders=holders),
        event_files=[str(folder / EVENTS)],
        as_horovod=True,
    )
    os.chdir(folder)  # the folder in which ranks start, on all hosts
    with closing(holders):
        return job.run(members, Output(max(task.rules.largest or 2, 2), verbose=True))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
