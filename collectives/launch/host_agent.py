"""One agent, as the launcher sees it: a child of this process, or of ssh or a batch system's command."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from collectives.launch import agent, ssh
from collectives.launch.agent import MARK
from collectives.launch.records import Record
from collectives.launch.status import listed

_PATIENT_AGENT = 3
"""Silence of the launcher after which an agent elsewhere ends its ranks, in multiples of ``peer_timeout``."""
_READ = 64 << 10


@dataclass(frozen=True, slots=True)
class HostRanks:
    """The ranks of one host; ``host`` is empty for this one."""

    host: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        host = self.host or os.uname().nodename
        return f"{listed(self.ranks)} on {host}" if self.ranks else f"the members on {host}"


class HostAgent:
    """One agent; ``with_input``: whether the first rank that it starts gets this process's stdin, if it is here.

    Attributes:
        process: what runs it; None: it has not been started yet.
        ready, done, lost: how far it is: it has answered; its ranks have ended; it is given up.
        left: the ranks that run.
        ended: ranks that have ended, each with its exit code.
        died: records of ranks that have ended with a failure; ``died_at``: when the first has, on the monotonic clock.
        heard: when it last said anything; ``start_by``: by when it has to.
        pending: orders that are not written yet.
        closed: whether it cannot be read from or written to: not yet, or no more.
        free_port, address: of its host, once it is ready; the address is empty where ssh does not tell it.
    """

    def __init__(self, place: HostRanks, environment: Mapping[str, str], remote: ssh.Ssh, *, with_input: bool) -> None:
        self.place = place
        self.process: subprocess.Popen[bytes] | None = None
        self.ready = self.done = self.lost = self._ending = False
        self.closed = True
        self.left = set(place.ranks)
        self.ended: list[tuple[int, int]] = []
        self.died: list[Record] = []
        self.died_at = float("inf")
        self.heard = 0.0
        self.pending = bytearray()
        self.free_port = self.address = ""
        self._received = b""
        self.start_by, self._remote = float("inf"), remote
        self._environment = environment
        self._with_input = with_input
        self._stdin: int | None = None

    def start(self, prepare: Callable[[], object]) -> subprocess.Popen[bytes]:
        """Start the agent, or the command that starts it on another host; in any thread. `attach` follows, in the loop.

        Args:
            prepare: is called in the child.

        Raises:
            Exception: whatever prevents that.
        """
        command = [sys.executable, "-I", "-S", agent.__file__]
        if self.place.host:
            command = self._remote.command(self.place.host, command)
        elif self._with_input:
            self._stdin = os.dup(0)
        die_with_parent = agent.die_with_parent()

        def in_child() -> None:
            die_with_parent()
            prepare()

        passed = self._remote.passed(command) if self.place.host else ()
        try:
            process = subprocess.Popen(
                command,
                env=dict(self._environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=passed if self._stdin is None else (self._stdin, *passed),
                start_new_session=True,
                preexec_fn=in_child,
            )
        finally:
            for descriptor in passed:
                os.close(descriptor)
        if self.lost:
            process.kill()  # nothing may be there any more that would end it
        return process

    def attach(self, process: subprocess.Popen[bytes]) -> None:
        """Take over what `start` has returned."""
        assert process.stdin and process.stdout and process.stderr
        self.process = process
        self.orders: IO[bytes] = process.stdin
        self.answers: IO[bytes] = process.stdout
        self.words: IO[bytes] = process.stderr
        for file in (self.orders, self.answers):
            os.set_blocking(file.fileno(), False)
        self.closed = False

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self.process is not None and self.process.poll() is not None

    def signal(self, number: int) -> None:
        """Send the process a signal, if there is one."""
        if self.process is not None:
            self.process.send_signal(number)

    def send(self, command: Sequence[str], environment: Mapping[str, str], size: int, peer_timeout: float) -> None:
        """Send the task, before all orders. An agent without ranks stays, and starts those that `begin` sends."""
        host = self.place.host
        task = {
            "command": list(command),
            "environment": self._remote.travelling(host, environment) if host else dict(environment),
            "folder": os.getcwd(),
            "patience": _PATIENT_AGENT * peer_timeout if host else 0,
            "ranks": [
                {
                    "COLLECTIVES_RANK": str(rank),
                    "COLLECTIVES_SIZE": str(size),
                    "COLLECTIVES_LOCAL_RANK": str(local_rank),
                    "LOCAL_WORLD_SIZE": str(len(self.place.ranks)),
                }
                for local_rank, rank in enumerate(self.place.ranks)
            ],
            "stdin": self._stdin,
            "stays": not self.place.ranks,
            "most_stopped": peer_timeout,
        }
        self.pending[:0] = json.dumps(task).encode() + b"\n"
        self.heard = time.monotonic()

    def begin(self, rank: int, variables: Mapping[str, str]) -> None:
        """Have a rank started, of an agent that stays."""
        self.left.add(rank)
        self.order(f"start {json.dumps(dict(variables))}")

    def order(self, order: str) -> None:
        """Send an order."""
        self._ending = self._ending or order in ("end", "kill")
        if not self.closed or self.process is None:
            self.pending += f"{order}\n".encode()

    def write(self) -> None:
        """Write orders, as many as can be written."""
        if self.closed:
            return
        try:
            with contextlib.suppress(BlockingIOError):
                while self.pending:
                    del self.pending[: os.write(self.orders.fileno(), self.pending)]
        except OSError:
            self.pending.clear()  # it has ended, as will be noticed

    def read(self, now: float) -> None:
        """Read what it has to say."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.answers.fileno(), _READ):
                self.heard = now
                *lines, self._received = (self._received + data).split(b"\n")
                for line in lines:
                    _, mark, said = line.rpartition(MARK)
                    if mark:
                        self._take(said.decode(errors="replace").split(), now)
            self.closed = True

    def _take(self, words: Sequence[str], now: float) -> None:
        if words[:1] == ["ready"]:
            self.ready = True
            self.free_port, self.address = (*words[1:], "")[:2]
        elif words == ["done"]:
            self.done = True
        elif len(words) == 3 and words[0] == "ended":
            rank, code = int(words[1]), int(words[2])
            self.left.discard(rank)
            self.ended.append((rank, code))
            if code:
                host = self.place.host or os.uname().nodename
                self.died.append(Record(rank, code, "", time.time(), host, consequence=self._ending))
                self.died_at = min(self.died_at, now)

    def close(self) -> None:
        """Close the streams; what has not been started is not started any more."""
        self.lost = True
        for file in (self.orders, self.answers, self.words) if self.process is not None else ():
            with contextlib.suppress(OSError):
                file.close()
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None
