"""The loop of an elastic job's launcher, over agents that programs of a few words stand for."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from collectives.base.config import Config
from collectives.launch import job, ssh
from collectives.launch.elastic_agents import ElasticAgents
from collectives.launch.elastic_terms import Rules
from collectives.launch.hosts import Host
from collectives.launch.output import Output

_WITHIN = 30.0
_READY = r"printf '\020ready 1 127.0.0.1\n'; exec cat > /dev/null"


@dataclass(frozen=True)
class Remote(ssh.Ssh):
    """Reaches hosts that are programs on this one, as their names say."""

    slow: queue.Queue[None] = field(default_factory=queue.Queue)
    """Has an entry once the host ``slow`` is known."""

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        if host == "slow":
            self.slow.get(timeout=_WITHIN)
        if host == "broken":
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return ["/no/such/program"] if host == "missing" else ["sh", "-c", _READY]

    def address(self, host: str) -> str:
        return "127.0.0.1"


@contextlib.contextmanager
def launched(hosts: str, events: Sequence[str] = (), **options: Any) -> Iterator[ElasticAgents]:
    """A job on hosts, of one member each."""
    found = tuple(Host(name) for name in hosts.split())
    remote = Remote(**options)
    agents = ElasticAgents(Rules(smallest=1, largest=9), found, ["true"], {}, Config(), remote, event_files=events)
    agents.start(Output(2, verbose=True))
    try:
        yield agents
    finally:
        remote.slow.put(None)
        agents.kill()
        for process in agents.processes:
            process.kill()
            process.wait()
        agents.close()


def until(agents: ElasticAgents, done: Callable[[], bool]) -> None:
    """Have the loop turn until something is so."""
    end = time.monotonic() + _WITHIN
    while not done():
        assert time.monotonic() < end
        agents.turn(*job._ready(*agents.waiting(), 0.05))


def is_ready(agents: ElasticAgents, host: str) -> bool:
    return host in agents._by_host and agents._by_host[host].ready


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all hosts be other ones than this."""
    monkeypatch.setattr(ssh, "is_here", lambda host: False)


def test_a_host_that_is_not_known_yet_holds_up_no_other() -> None:
    """As where its name is looked up for 10 seconds."""
    with launched("slow quick") as agents:
        until(agents, lambda: is_ready(agents, "quick"))
        slow = agents._by_host["slow"]
        assert slow.process is None and slow.start_by > time.monotonic() and agents.running()
        agents.remote.slow.put(None)  # type: ignore[attr-defined]
        until(agents, lambda: slow.ready)


def test_a_host_that_is_not_known_in_time_is_lost() -> None:
    with launched("slow quick", timeout=0.1) as agents:
        until(agents, lambda: "slow" not in agents._by_host)
        agents.remote.slow.put(None)  # type: ignore[attr-defined]
        until(agents, lambda: "slow" not in {one.place.host for one in agents._agents})


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("broken", "BlockingIOError: [Errno 11] Resource temporarily unavailable [L133]"),
        ("missing", "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/program' [L133]"),
    ],
)
def test_a_host_whose_agent_cannot_be_started_is_lost(host: str, why: str, tmp_path: Path) -> None:
    """And the job goes on, which has said before that its member starts."""
    path = tmp_path / "events"
    with launched(f"{host} quick", [str(path)]) as agents:
        until(agents, lambda: is_ready(agents, "quick") and host not in agents._by_host)
        assert agents._driver.end is None
    events = [json.loads(line) for line in path.read_text().splitlines()]
    of_host = [event for event in events if event.get("host") == host]
    assert [event["event"] for event in of_host] == ["host_added", "started", "host_lost", "died", "blacklisted"]
    assert of_host[2]["text"] == f"cannot start the members on {host}: {why}"


def test_a_file_of_events_that_is_full_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others get their events, and the job goes on."""
    said, path = list[str](), tmp_path / "events"
    monkeypatch.setattr(Output, "say", lambda output, text: said.append(text))
    with launched("quick", ["/dev/full", str(path)]) as agents:
        until(agents, lambda: len(agents._event_files) == 1 and is_ready(agents, "quick"))
    full = f"[Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}"
    assert f"--elastic-events: stopped writing events to '/dev/full': {full} [E39]" in said
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["host_added", "started"]


def test_what_a_member_says_ends_no_job() -> None:
    with launched("quick") as agents:
        for value in (b"7", b"{", b'{"what": "alive", "generation": []}', b'{"what": ["here"]}', b"\xff"):
            agents._hear("elastic/said/0/1", value)
        for key in ("elastic/said/", "elastic/said/x/1", "elastic/said/1/2/3"):
            agents._hear(key, b'{"what": "here"}')
        until(agents, lambda: is_ready(agents, "quick"))
        assert agents._driver.end is None
