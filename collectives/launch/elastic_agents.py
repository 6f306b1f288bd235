"""The members of an elastic job: agents that start and end processes as the `Driver` decides.

The launcher serves the store at which members say how far they are. What they say wakes this process, and the answer is
set at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from collectives.base.config import Config
from collectives.base.errors import InvalidArgumentError
from collectives.launch import ssh
from collectives.launch.agents import Agents
from collectives.launch.discovery import Discovery, Found
from collectives.launch.elastic_driver import Driver
from collectives.launch.elastic_terms import Action, Drop, Event, Kill, Rules, Set, Start
from collectives.launch.host_agent import HostAgent, HostRanks
from collectives.launch.output import Output
from collectives.launch.records import Record
from collectives.transport.tcp import network

_AFTER_FAILURE = 2.0
"""Seconds in which members end by themselves after the job has failed."""
_SAID = "elastic/said/"


class ElasticAgents(Agents):
    """The members of a job.

    Args:
        look: finds the hosts, again and again; or the hosts, if they are fixed.
        event_files: paths of files to which events are appended as lines of JSON.
        as_horovod: whether members get Horovod's variables.
    """

    def __init__(
        self,
        rules: Rules,
        look: Callable[[], Found] | Found,
        command: Sequence[str],
        environment: Mapping[str, str],
        config: Config,
        remote: ssh.Ssh,
        *,
        event_files: Sequence[str] = (),
        as_horovod: bool = False,
    ) -> None:
        super().__init__([], command, environment, config, remote)
        self._driver = Driver(rules, time.monotonic(), random.random)
        self._look, self._as_horovod, self._timeout = look, as_horovod, rules.elastic_timeout
        self._discovery: Discovery | None = None
        self._has_hosts = self._interrupted = False
        self._found: deque[Found] = deque()
        self._said: deque[tuple[str, bytes]] = deque()
        self._by_host: dict[str, HostAgent] = {}
        self._hosts: dict[int, str] = {}
        """Of the living members."""
        self._addresses: dict[str, str] = {}
        """Where hosts reach the store."""
        self._events = 0
        try:
            self._event_files = [open(path, "a", buffering=1, encoding="utf-8") for path in event_files]  # noqa: SIM115
        except OSError as error:
            raise InvalidArgumentError(
                f"--elastic-events: cannot write {error.filename!r}: {error.strerror} [E38]"
            ) from None
        self._ended_at, self._ended_time = float("inf"), 0.0
        self._sent = True  # each agent gets its task as it starts

    @property
    def code(self) -> int:
        return self._driver.end.code if self._driver.end else 1

    def start(self, output: Output) -> None:
        super().start(output)
        self._wake, self._waker = os.pipe()
        for end in (self._wake, self._waker):
            os.set_blocking(end, False)
        self._server, key = self._open_store(network.LOOPBACK, self._hear)
        self._addresses[""] = network.joined(*self._server.address)
        self.environment = {
            **self.environment,
            "COLLECTIVES_KEY": key,
            "COLLECTIVES_ELASTIC_TIMEOUT": f"{self._timeout:g}",
        }
        if callable(self._look):
            self._discovery = Discovery(self._look, self._find)
        else:
            self._find(self._look)

    def _hear(self, key: str, value: bytes) -> None:
        """In the store's thread: a key was set."""
        if key.startswith(_SAID):
            self._said.append((key, value))
            self._wake_up()

    def _find(self, found: Found) -> None:
        """In discovery's thread: hosts were found."""
        self._found.append(found)
        self._wake_up()

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes, too
            os.write(self._waker, b"\0")

    def running(self) -> bool:
        return (self._driver.end is None and not self._ending) or super().running()

    def waiting(self) -> tuple[list[int], list[int]]:
        sources, sinks = super().waiting()
        return [self._wake, *sources], sinks

    def turn(self, readable: Collection[int], writable: Collection[int]) -> None:
        now = time.monotonic()
        self._exchange(readable, writable, now)
        if self._wake in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
        while self._said:
            self._take(*self._said.popleft(), now)
        for one in self._agents:
            while one.ended:
                member, code = one.ended.pop(0)
                self._hosts.pop(member, None)
                self._carry_out(self._driver.exited(member, code, now))
        while self._found:
            self._take_hosts(self._found.popleft(), now)
        self._look_after_all(now)
        self._carry_out(self._driver.tick(now))
        self._release_agents(now)
        if self._driver.end is not None and self._ended_at == float("inf"):
            self._ended_at, self._ended_time = now, time.time()

    def _take(self, key: str, value: bytes, now: float) -> None:
        with contextlib.suppress(ValueError):
            member, question = map(int, key.removeprefix(_SAID).split("/"))
            thing = json.loads(value)
            if isinstance(thing, dict):
                self._carry_out(self._driver.said(member, question, thing, now))

    def _take_hosts(self, found: Found, now: float) -> None:
        if not isinstance(found, str):
            self._has_hosts = True
            self._carry_out(self._driver.discovered(found, now))
        elif self._has_hosts:
            self._carry_out([Event("discovery", f"--host-discovery-script: {found}; the hosts stay as they were [E2]")])
        else:
            self._carry_out(self._driver.give_up(f"--host-discovery-script: {found} [E3]", now))

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                self._begin(action)
            elif isinstance(action, Kill):
                self._by_host[self._hosts[action.member]].order(f"kill {action.member}")
            elif isinstance(action, Set):
                self._server.set(action.key, json.dumps(action.value).encode())
            elif isinstance(action, Drop):
                self._server.drop(action.prefix)
            else:
                self._tell(action)
        for one in self._agents:
            one.write()

    def _tell(self, event: Event) -> None:
        line = event.line(time.time())
        self._output.say(event.text)
        self._events += 1
        self._server.set(f"elastic/event/{self._events}", line.encode())
        self._server.set("elastic/events", b"%d" % self._events)
        for file in self._event_files:
            file.write(f"{line}\n")

    def _begin(self, start: Start) -> None:
        """Start a member, and an agent on its host if there is none; a host from which this one cannot be reached is
        lost."""
        remote = self._name_elsewhere(start.host)
        try:
            variables = self._variables(start, remote)
        except (InvalidArgumentError, OSError) as error:
            self._carry_out(self._driver.host_lost(start.host, f"cannot use {start.host}: {error}", time.monotonic()))
            return
        one = self._by_host.get(start.host)
        if one is None:
            one = HostAgent(HostRanks(remote, ()), self.environment, self.remote, with_input=start.member == 0)
            self._agents.append(one)
            self._by_host[start.host] = one
            self._files.allow(len(self._agents), len(self._driver.members))
            self._start(one)
            one.send(self.command, self.environment, 0, self._config.peer_timeout)
        self._hosts[start.member] = start.host
        one.begin(start.member, variables)

    def _name_elsewhere(self, host: str) -> str:
        """The name by which `remote` reaches a host; empty: it is this one."""
        return "" if ssh.is_here(host) else host

    def _variables(self, start: Start, remote: str) -> dict[str, str]:
        """Return a member's own variables, which name it and its place as of now."""
        places = [member.place for member in self._driver.members.values()]
        peers = [host for host in self._driver.hosts.slots if (host, start.slot) in places]
        place = {
            "RANK": start.member,
            "SIZE": len(places),
            "LOCAL_RANK": start.slot,
            "LOCAL_SIZE": sum(host == start.host for host, _ in places),
        }
        variables = {
            "COLLECTIVES_MEMBER": str(start.member),
            "COLLECTIVES_RANK": str(start.member),
            "COLLECTIVES_SIZE": str(len(places)),
            "COLLECTIVES_LOCAL_RANK": str(start.slot),
            "LOCAL_RANK": str(start.slot),
            "LOCAL_WORLD_SIZE": str(place["LOCAL_SIZE"]),
            "COLLECTIVES_RENDEZVOUS": f"tcp://{self._address(remote)}",
        }
        if self._as_horovod:
            place |= {"CROSS_RANK": peers.index(start.host), "CROSS_SIZE": len(peers)}
            variables |= {f"HOROVOD_{word}": str(number) for word, number in place.items()}
            variables |= {"HOROVOD_HOSTNAME": start.host, "HOROVOD_ELASTIC": "1"}
        return variables

    def _address(self, host: str) -> str:
        """Return where a host reaches the store; empty: this one."""
        if host not in self._addresses:
            address = ssh.address_for([host], self._config.network_interface, self.remote)
            listening = [known for known in self._addresses.values() if known.rpartition(":")[0] == address]
            self._addresses[host] = listening[0] if listening else network.joined(*self._server.listen(address))
        return self._addresses[host]

    def _release_agents(self, now: float) -> None:
        """End agents on hosts that are not used any more."""
        for host in set(self._by_host) - set(self._hosts.values()):
            if not self._driver.hosts.usable(host, now):
                self._by_host.pop(host).order("end")
        for one in set(self._agents) - set(self._by_host.values()):
            if one.process.poll() is not None and not one.ended and (one.done or one.lost):
                self._output.detach(one.words.fileno())
                one.close()
                self._agents.remove(one)
                self.processes.remove(one.process)

    def _note_lost(self, one: HostAgent, text: str) -> None:
        host = next((name for name, known in self._by_host.items() if known is one), None)
        if host is None:
            return
        del self._by_host[host]
        self._hosts = {member: place for member, place in self._hosts.items() if place != host}
        self._carry_out(self._driver.host_lost(host, text, time.monotonic()))

    def _patience(self) -> float:
        # Members notice the silence of others after peer_timeout; the silence of their agents has begun with it.
        return self._config.peer_timeout if self._driver.waits() else super()._patience()

    def counts(self, rank: int) -> bool:
        return rank in self._driver.failed

    def failures(self) -> list[Record]:
        records = [record for record in super().failures() if self.counts(record.rank)]
        end = self._driver.end
        if end is not None and end.code and end.text:
            records.append(Record(-1, end.code, end.text, self._ended_time, "", lost=True))
        return records

    def end_at(self) -> float:
        if self._interrupted and self._driver.reports():
            return float("inf")  # the signal's own bound holds
        done = self._driver.end is not None and not self._driver.end.code
        return self._ended_at + (0.0 if done or not self._driver.reports() else _AFTER_FAILURE)

    def send_signal(self, number: int) -> None:
        self._interrupted = True
        self._driver.interrupted(128 + number)
        super().send_signal(number)

    def close(self) -> None:
        if self._discovery is not None:
            self._discovery.close()
        super().close()
        for file in self._event_files:
            file.close()
