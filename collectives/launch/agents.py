"""Ranks that ``collectivesrun`` starts itself: by one `agent` on each host, here as a child, elsewhere by ssh.

Nothing is started before every host has answered. Then the launcher serves the store at which the ranks meet, and sends
each agent its task over stdin, with the job's key.

Names are looked up, and processes started, in threads (`beside`): whatever that takes or raises, the loop goes on.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from collectives.base.config import Config
from collectives.base.errors import CollectivesError
from collectives.launch import agent, ssh
from collectives.launch.agent import ALIVE_EVERY
from collectives.launch.beside import Mailbox, Workers
from collectives.launch.host_agent import HostAgent, HostRanks
from collectives.launch.job import Ranks
from collectives.launch.open_files import OpenFiles
from collectives.launch.output import Output
from collectives.launch.records import Record
from collectives.transport.tcp import network

if TYPE_CHECKING:
    from collectives.transport.stores.store import StoreServer

_AFTER_DEATH = 2.0
"""Seconds in which ranks end by themselves after one has ended with a failure: they notice, and say where they were."""
_AFTER_FAILURE = 6.0
"""The same after one has said that it fails, and waits for the others' end."""
_AFTER_DONE = 2.0
_AFTER_KILL = 1.0
_AT_ONCE = 8
"""Hosts that are started at the same time."""
_PATIENT_LAUNCHER = 2
"""Silence after which a host counts as lost, in multiples of ``peer_timeout``: the ranks notice first, and say more."""
_LATE = 4 * ALIVE_EVERY
_SAY_ALIVE = """
import os, sys, time
while True:
    for sink in map(int, sys.argv[2:]):
        try:
            os.write(sink, b"alive\\n")
        except OSError:
            continue
    time.sleep(float(sys.argv[1]))
"""
"""A program that gives agents signs of life: its arguments are seconds, and file descriptors."""


class Agents(Ranks):
    """The ranks of a job without MPI.

    Args:
        command: the words for ``rank.py``, packed.
        config: the ranks' settings: how the launcher is reached, and how long a host may be silent.
        remote: how other hosts are reached. Its timeout bounds the start.

    The arguments but for ``config`` are attributes.
    """

    ends_within = 4.0

    def __init__(
        self,
        places: Sequence[HostRanks],
        command: Sequence[str],
        environment: Mapping[str, str],
        config: Config,
        remote: ssh.Ssh,
    ) -> None:
        super().__init__()
        self._agents = [HostAgent(place, environment, remote, with_input=0 in place.ranks) for place in places]
        self.places, self.command, self.environment = places, list(command), dict(environment)
        self.remote, self._config = remote, config
        self._size = sum(len(place.ranks) for place in places)
        self._files = OpenFiles()
        self._files.allow(len(places), self._size)
        self._sent = self._serving = self._ending = False
        self._mail = Mailbox()
        self._workers = Workers(self._mail, _AT_ONCE)
        self._failed_at = self._spoken = 0.0
        self._lost: list[Record] = []
        self._close_store: Callable[[], None] = lambda: None

    def start(self, output: Output) -> None:
        self._output = output
        for one in self._agents:
            self._start(one)

    def _start(self, one: HostAgent) -> None:
        """Begin to start an agent."""
        self._workers.do(partial(self._reach, one), partial(self._started, one))

    def _reach(self, one: HostAgent) -> subprocess.Popen[bytes]:
        """In a thread: start an agent."""
        if one.lost:
            raise ChildProcessError(f"{one.place} were given up before")
        one.start_by = time.monotonic() + self.remote.timeout
        return one.start(self._files.restore)

    def _started(self, one: HostAgent, outcome: subprocess.Popen[bytes] | Exception) -> None:
        if isinstance(outcome, Exception):
            if not one.lost and not self._ending:
                self._lose(one, f"cannot start {one.place}: {_in_words(outcome)}")
            return
        one.attach(outcome)
        self.processes.append(outcome)
        if one.lost:
            outcome.kill()
            one.close()
            return
        self._output.attach(one.words.fileno(), name=one.place.host)
        if self._ending and not self._sent:
            outcome.terminate()

    def running(self) -> bool:
        starting = not self._ending and any(one.process is None and not one.lost for one in self._agents)
        return starting or super().running()

    def waiting(self) -> tuple[list[int], list[int]]:
        open_ones = [one for one in self._agents if not one.closed]
        sources = [self._mail.fileno(), *(one.answers.fileno() for one in open_ones)]
        return sources, [one.orders.fileno() for one in open_ones if one.pending]

    def turn(self, readable: Collection[int], writable: Collection[int]) -> None:
        now = time.monotonic()
        self._exchange(readable, writable, now)
        self._mail.deliver()
        if not self._serving and not self._ending and not self._lost and all(one.ready for one in self._agents):
            self._serving = True
            self._workers.do(self._serve if self._size > 1 else dict[str, str], self._send_tasks)
        self._look_after_all(now)
        if not self._failed_at and (self._lost or self._output.records or self._died_at() < float("inf")):
            self._failed_at = now

    def _exchange(self, readable: Collection[int], writable: Collection[int], now: float) -> None:
        """Read and write what can be read and written."""
        for one in self._agents:
            if not one.closed and one.answers.fileno() in readable:
                one.read(now)
            if not one.closed and one.orders.fileno() in writable:
                one.write()

    def _look_after_all(self, now: float) -> None:
        """Give signs of life, and find out which hosts are lost."""
        if self._sent and now - self._spoken >= ALIVE_EVERY:
            self._order("alive")
            self._spoken = now
        for one in list(self._agents):
            if not one.lost and not one.done:
                self._look_after(one, now)
            elif one.done and now - one.heard > _AFTER_DONE:
                one.signal(signal.SIGKILL)  # something on that host keeps the connection open

    def failures(self) -> list[Record]:
        return self._lost + [record for one in self._agents for record in one.died]

    def end_at(self) -> float:
        if not self._failed_at:
            return float("inf")
        if not self._sent:
            return self._failed_at
        left = {rank for one in self._agents for rank in one.left}
        if left <= self._output.records.ranks():
            return self._failed_at  # all have said how they failed
        died_at = self._failed_at if self._lost else self._died_at()
        return min(self._failed_at + _AFTER_FAILURE, died_at + _AFTER_DEATH)

    def forward(self, number: int) -> None:
        if self._sent:
            self._order(f"signal {int(number)}")

    def send_signal(self, number: int) -> None:
        if self._sent:
            self.forward(number)
        else:
            self.end()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Have a child give the signs of life: it ends with this host, when the agents must end their ranks."""
        for one in self._agents:
            one.write()
        sinks = [one.orders.fileno() for one in self._agents if not one.closed and not one.pending]
        try:
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _SAY_ALIVE, str(ALIVE_EVERY), *map(str, sinks)],
                pass_fds=sinks,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=agent.die_with_parent(),
            )
        except OSError as error:
            self._output.say(
                f"cannot tell the hosts that this program is stopped and not dead: {error}; they may end their ranks "
                "[L134]"
            )
            yield
            return
        try:
            yield
        finally:
            child.kill()
            child.wait()

    def end(self) -> None:
        self._ending = True
        if self._sent:
            self._order("end")
        else:
            for one in self._agents:
                one.signal(signal.SIGTERM)

    def kill(self) -> None:
        self._ending = True
        self._order("kill")
        for one in self._agents:
            one.write()
        end = time.monotonic() + _AFTER_KILL
        while self.running() and time.monotonic() < end:
            time.sleep(0.01)  # several processes cannot be waited for at once

    def close(self) -> None:
        self._close_store()
        for one in self._agents:
            one.close()
        self._workers.close()

    def _died_at(self) -> float:
        return min((one.died_at for one in self._agents), default=float("inf"))

    def _order(self, order: str) -> None:
        for one in self._agents:
            one.order(order)

    def _send_tasks(self, variables: dict[str, str] | Exception) -> None:
        """Have all agents start their ranks, now that the store is served."""
        if isinstance(variables, Exception):
            raise variables  # nothing runs yet that this could end
        if self._ending or self._lost:
            return
        for one in self._agents:
            one.send(self.command, {**self.environment, **variables}, self._size, self._config.peer_timeout)
        self._sent, self._spoken = True, time.monotonic()

    def _serve(self) -> dict[str, str]:
        """In a thread: serve the store at which the ranks meet; return the variables that lead there, and to where rank
        0 serves torch's, if a program makes torch's process groups."""
        others = [one.place.host for one in self._agents if one.place.host]
        address = ssh.address_for(others, self._config.network_interface, self.remote)
        server, key = self._open_store(address)
        first = next(one for one in self._agents if 0 in one.place.ranks)
        torchs_host = (first.address or self.remote.address(first.place.host)) if first.place.host else address
        return {
            "MASTER_ADDR": self.environment.get("MASTER_ADDR", torchs_host),
            "MASTER_PORT": self.environment.get("MASTER_PORT", first.free_port),
            "COLLECTIVES_RENDEZVOUS": f"tcp://{network.joined(*server.address)}",
            "COLLECTIVES_KEY": key,
        }

    def _open_store(
        self, address: str, heard: Callable[[str, bytes], object] = lambda key, value: None
    ) -> tuple[StoreServer, str]:
        """Serve a store at an address until `close`; returns it, and the job's key in hexadecimal."""
        from collectives.transport.stores.store import StoreServer
        from collectives.transport.tcp.authentication import make_key  # imports asyncio, as do the others
        from collectives.transport.tcp.service import Service

        service, key = Service(), make_key()
        self._close_store = service.close
        return StoreServer(service, address, 0, key, heard), key.hex()

    def _look_after(self, one: HostAgent, now: float) -> None:
        """Find out whether a host is lost."""
        if one.has_ended():
            one.read(now)
            if not one.done and not self._ending:
                self._lose(one, self._reason(one))
        elif not one.ready and now > one.start_by:
            self._lose(
                one,
                f"cannot start {one.place}: the host did not answer within {self.remote.timeout:g} s; check it, "
                "or raise --start-timeout [L62]",
            )
        elif self._sent and one.ready and one.place.host and now - one.heard > self._patience():
            self._lose(one, f"lost {one.place}: no sign of life for {now - one.heard:.0f} s [L63]")

    def _patience(self) -> float:
        """Return the seconds for which a host may be silent: few once ranks have failed, because of it perhaps."""
        return _LATE if self._failed_at else _PATIENT_LAUNCHER * self._config.peer_timeout

    def _reason(self, one: HostAgent) -> str:
        assert one.process is not None
        code = one.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if not one.place.host:
            return f"lost {one.place}: the process that watches them {how} [L64]"
        if one.ready:
            return f"lost {one.place}: the {self.remote.starter(one.place.host)} connection {how} [L65]"
        starter, advice = self.remote.starter(one.place.host), self.remote.advice(one.place.host, code)
        return f"cannot start {one.place}: {starter} {how}; {advice} [L66]"

    def _lose(self, one: HostAgent, reason: str) -> None:
        words = self._output.take_words(one.words.fileno()) if one.process is not None else ""
        one.lost = True
        one.left.clear()
        one.signal(signal.SIGKILL)
        self._note_lost(one, reason + (f":\n{words}" if words else ""))

    def _note_lost(self, one: HostAgent, text: str) -> None:
        """Take note that a host is lost."""
        self._lost.append(Record(one.place.ranks[0], 1, text, time.time(), one.place.host, lost=True))


def _in_words(error: Exception) -> str:
    """Why a host cannot be used, as an exception says it."""
    return str(error) if isinstance(error, CollectivesError) else f"{type(error).__name__}: {error} [L133]"
