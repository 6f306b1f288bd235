"""The members of an elastic job: agents that start and end processes as the `Driver` decides.

The launcher serves the store at which members say how far they are. What they say wakes this process, and the answer is
set at once.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from io import FileIO

from collectives.base.config import Config
from collectives.base.errors import InvalidArgumentError
from collectives.launch import ssh
from collectives.launch.agents import Agents
from collectives.launch.beside import Workers
from collectives.launch.discovery import Discovery, Found
from collectives.launch.elastic_driver import Driver
from collectives.launch.elastic_terms import Action, Drop, Event, Kill, Rules, Set, Start
from collectives.launch.host_agent import HostAgent, HostRanks
from collectives.launch.output import Output
from collectives.launch.records import Record
from collectives.transport.stores.event_log import EventLog
from collectives.transport.tcp import network

_AFTER_FAILURE = 2.0
"""Seconds in which members end by themselves after the job has failed."""
_WRITTEN_WITHIN = 5.0
"""Seconds in which events are written that have happened when the job ends."""
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
        self._by_host: dict[str, HostAgent] = {}
        self._hosts: dict[int, str] = {}
        """Of the living members."""
        self._addresses: dict[str, str] = {}
        """Where hosts reach the store."""
        try:
            self._event_files = [FileIO(path, "a") for path in event_files]
        except OSError as error:
            raise InvalidArgumentError(
                f"--elastic-events: cannot write {error.filename!r}: {error.strerror} [E38]"
            ) from None
        self._writer = Workers(self._mail, 1)
        self._ended_at, self._ended_time = float("inf"), 0.0
        self._sent = True  # each agent gets its task as it starts

    @property
    def code(self) -> int:
        return self._driver.end.code if self._driver.end else 1

    def start(self, output: Output) -> None:
        super().start(output)
        self._server, key = self._open_store(network.LOOPBACK, self._hear)
        self._events = EventLog(self._server)
        self._addresses[""] = network.joined(*self._server.address)
        self.environment = {
            **self.environment,
            "COLLECTIVES_KEY": key,
            "COLLECTIVES_ELASTIC_TIMEOUT": f"{self._timeout:g}",
        }
        if callable(self._look):
            self._discovery = Discovery(self._look, partial(self._mail.post, self._take_hosts))
        else:
            self._mail.post(self._take_hosts, self._look)

    def _hear(self, key: str, value: bytes) -> None:
        """In the store's thread: a key was set."""
        if key.startswith(_SAID):
            self._mail.post(self._take, key, value)

    def running(self) -> bool:
        return (self._driver.end is None and not self._ending) or super().running()

    def turn(self, readable: Collection[int], writable: Collection[int]) -> None:
        now = time.monotonic()
        self._exchange(readable, writable, now)
        self._mail.deliver()
        for one in self._agents:
            while one.ended:
                member, code = one.ended.pop(0)
                self._hosts.pop(member, None)
                self._carry_out(self._driver.exited(member, code, now))
        self._look_after_all(now)
        self._carry_out(self._driver.tick(now))
        self._release_agents(now)
        if self._driver.end is not None and self._ended_at == float("inf"):
            self._ended_at, self._ended_time = now, time.time()

    def _take(self, key: str, value: bytes) -> None:
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            member, question = map(int, key.removeprefix(_SAID).split("/"))
            thing = json.loads(value)
            if isinstance(thing, dict):
                self._carry_out(self._driver.said(member, question, thing, time.monotonic()))

    def _take_hosts(self, found: Found) -> None:
        now = time.monotonic()
        if not isinstance(found, str):
            self._has_hosts = True
            self._carry_out(self._driver.discovered(found, now))
        elif self._has_hosts:
            self._carry_out([Event("discovery", f"host discovery: {found}; the job keeps its hosts [E2]")])
        else:
            self._carry_out(self._driver.give_up(f"host discovery: {found} [E3]", now))

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
        self._events.append(line.encode())
        for file in self._event_files:
            self._writer.do(partial(_append, file, f"{line}\n".encode()), partial(self._written, file))

    def _written(self, file: FileIO, outcome: Exception | None) -> None:
        if outcome is not None and file in self._event_files:
            self._event_files.remove(file)
            self._output.say(f"--elastic-events: stopped writing events to {file.name!r}: {outcome} [E39]")

    def _begin(self, start: Start) -> None:
        """Start a member, and an agent on its host if there is none."""
        one = self._by_host.get(start.host)
        if one is None:
            one = HostAgent(HostRanks(start.host, ()), self.environment, self.remote, with_input=start.member == 0)
            self._agents.append(one)
            self._by_host[start.host] = one
            self._start(one)
        self._hosts[start.member] = start.host
        one.begin(start.member, self._variables(start))

    def _reach(self, one: HostAgent) -> subprocess.Popen[bytes]:
        """In a thread: find out how a host is reached, and how it reaches this one, and start its agent."""
        one.start_by = time.monotonic() + self.remote.timeout
        host = self._name_elsewhere(one.place.host)
        self._address(host)
        self._files.allow(len(self._agents), len(self._driver.members))
        one.place = HostRanks(host, ())
        return super()._reach(one)

    def _started(self, one: HostAgent, outcome: subprocess.Popen[bytes] | Exception) -> None:
        super()._started(one, outcome)
        if not one.lost:
            store = {"COLLECTIVES_RENDEZVOUS": f"tcp://{self._addresses[one.place.host]}"}
            one.send(self.command, {**self.environment, **store}, 0, self._config.peer_timeout)

    def _name_elsewhere(self, host: str) -> str:
        """The name by which `remote` reaches a host; empty: it is this one."""
        return "" if ssh.is_here(host) else host

    def _variables(self, start: Start) -> dict[str, str]:
        """Return a member's own variables, which name it and its place as of now."""
        places = [member.place for member in self._driver.members.values()]
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
        }
        if self._as_horovod:
            taken = set(places)
            peers = [host for host in self._driver.hosts.slots if (host, start.slot) in taken]
            place |= {"CROSS_RANK": peers.index(start.host), "CROSS_SIZE": len(peers)}
            variables |= {f"HOROVOD_{word}": str(number) for word, number in place.items()}
            variables |= {"HOROVOD_HOSTNAME": start.host, "HOROVOD_ELASTIC": "1"}
        return variables

    def _address(self, host: str) -> None:
        """Find out where a host reaches the store; empty: this one."""
        if host not in self._addresses:
            address = ssh.address_for([host], self._config.network_interface, self.remote)
            listening = [known for known in list(self._addresses.values()) if known.rpartition(":")[0] == address]
            self._addresses[host] = listening[0] if listening else network.joined(*self._server.listen(address))

    def _release_agents(self, now: float) -> None:
        """End agents on hosts that are not used any more."""
        for host in set(self._by_host) - set(self._hosts.values()):
            if not self._driver.hosts.usable(host, now):
                self._by_host.pop(host).order("end")
        for one in set(self._agents) - set(self._by_host.values()):
            if one.process is None and one.lost:
                self._agents.remove(one)
            elif one.process is not None and one.has_ended() and not one.ended and (one.done or one.lost):
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
        self._writer.close(_WRITTEN_WITHIN)


def _append(file: FileIO, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]
