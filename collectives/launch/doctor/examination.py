"""Examine this host and others: a probe on each, their findings, and what lies between them."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from itertools import repeat
from typing import Any

from collectives.base.errors import TransportError
from collectives.launch import agent
from collectives.launch.doctor import launches
from collectives.launch.doctor.findings import FINE, SLOW, WRONG, Finding, as_text
from collectives.launch.ssh import Ssh, is_here

_BEGIN = """
import json, os, sys
line = b""
while not line.endswith(b"\\n"):
    line += os.read(0, 1) or sys.exit("the launcher is gone")
environment, folder = json.loads(line)
os.chdir(folder)
os.execve(sys.executable, [sys.executable, "-m", "collectives.launch.doctor.probe"], {**os.environ, **environment})
"""
"""Becomes the probe, in the environment and folder that the first line of stdin tells, as ranks have them."""
_LOOK_WITHIN, _ANSWER_WITHIN = 60.0, 20.0
_PARTNERS = 8
"""The most others that each host connects to."""
_SEND_FOR = 0.25
_CLOCKS_DIFFER = 1.0
_OPEN_PORTS = (
    "let firewalls pass TCP between the hosts on all ports from 1024 up (ranks listen where the system has one free)"
)
_SLOW_BANDWIDTH, _SLOW_LATENCY = 100e6, 1e-3
_GRADIENTS = 100e6
"""Bytes, as an example of what a training step may have to move."""


class Probe:
    """One host's probe, as the launcher sees it. ``host`` is empty for this one."""

    def __init__(self, host: str, environment: Mapping[str, str], remote: Ssh) -> None:
        self.host = host or os.uname().nodename
        program = [sys.executable, "-c", _BEGIN]
        self._process = subprocess.Popen(
            remote.command(host, program) if host else program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=agent.die_with_parent(),
        )
        assert self._process.stdin and self._process.stdout
        self._orders, self._answers = self._process.stdin.fileno(), self._process.stdout
        self._remote = remote
        self._send([remote.travelling(host, environment) if host else dict(environment), os.getcwd()])

    def ask(self, order: str, *arguments: Any, within: float = _ANSWER_WITHIN) -> Any:
        """Return the answer to an order (`probe.py`). TransportError: there is none within some seconds."""
        self._send([order, *arguments])
        said = f"no answer within {within:g} s"
        timer = threading.Timer(within, self._process.kill)
        timer.start()
        try:
            for line in self._answers:
                before, mark, answer = line.partition(agent.MARK)
                if mark:
                    return json.loads(answer)
                said = before.decode(errors="replace").strip() or said
        finally:
            timer.cancel()
        raise TransportError(f"{self.host}: {said}")

    def advice(self) -> str:
        """Return what must hold for the probe to start, after it has not."""
        return self._remote.advice(self.host, self._process.wait())

    def close(self) -> None:
        """End the probe."""
        with self._process:  # closes the pipes, and waits
            self._process.kill()

    def _send(self, value: Any) -> None:
        with suppress(BrokenPipeError):  # the answer, which does not come, says why
            os.write(self._orders, json.dumps(value).encode() + b"\n")


def run(hosts: Sequence[str], interface: str, environment: Mapping[str, str], remote: Ssh, as_json: bool) -> int:
    """Examine this host and others, print the findings, and return the exit code: 1 if something is wrong.

    Args:
        hosts: by name or address; names of this host are left out.
        interface: the setting ``network_interface``.
        environment: the ranks'.
    """
    others = [host for host in hosts if not is_here(host)]
    with ExitStack() as stack, ThreadPoolExecutor(len(others) + 1) as threads:
        probes = [Probe(host, environment, remote) for host in ("", *others)]
        for probe in probes:
            stack.callback(probe.close)
        findings = _examine(probes, interface, threads)
        if others and all(finding.state != WRONG for finding in findings):
            findings += _across(probes, hosts, remote, any(one.check == "job by mpirun" for one in findings))
        findings += [replace(finding, host=probes[0].host) for finding in launches.by_srun()]
    print(json.dumps([asdict(finding) for finding in findings], indent=1) if as_json else as_text(findings))
    return 1 if any(finding.state == WRONG for finding in findings) else 0


def _examine(probes: Sequence[Probe], interface: str, threads: ThreadPoolExecutor) -> list[Finding]:
    """Ask every host for what it finds, and then, without load, for its clock and its connections."""
    findings, answers = [], {}
    for probe, answer in zip(probes, threads.map(_look, probes), strict=True):
        if isinstance(answer, TransportError):
            cost = "no rank can be started there"
            said = str(answer).removeprefix(f"{probe.host}: ")
            findings.append(Finding("host", WRONG, said, cost, probe.advice(), probe.host))
        else:
            answers[probe] = answer
            findings += [Finding(**{**finding, "host": probe.host}) for finding in answer["findings"]]
    present = list(answers)
    for probe in present[1:]:
        findings += [*_versions(answers[present[0]]["version"], answers[probe]["version"], probe), _clock(probe)]
    return [*findings, *_connections(present, list(answers.values()), interface, threads)]


def _look(probe: Probe) -> Any:
    try:
        return probe.ask("look", within=_LOOK_WITHIN)
    except TransportError as error:
        return error


def _versions(here: str, there: str, probe: Probe) -> list[Finding]:
    if here == there:
        return []
    found, cost = f"collectives {there}, and {here} where the job is started", "ranks may not understand each other"
    return [Finding("version", WRONG, found, cost, "install the same version on all hosts", probe.host)]


def _clock(probe: Probe) -> Finding:
    """Compare a host's clock with this one's."""
    began = time.time()
    there, ended = probe.ask("clock"), time.time()
    difference = there - (began + ended) / 2
    found = f"{difference:+.3f} s (within {(ended - began) / 2:.3f} s) from {os.uname().nodename}'s"
    if abs(difference) < _CLOCKS_DIFFER:
        return Finding("clock", FINE, found, host=probe.host)
    cost = "what happened first is told wrongly where events, timelines and logs of hosts are compared"
    return Finding("clock", SLOW, found, cost, "run chrony or another NTP client on all hosts", probe.host)


def _connections(
    probes: Sequence[Probe], answers: Sequence[Mapping[str, Any]], interface: str, threads: ThreadPoolExecutor
) -> list[Finding]:
    """Measure the connections between hosts, each host with one other at a time."""
    token = secrets.token_hex(32)
    stacks, offers = ([answer[key] for answer in answers] for key in ("stack", "addresses"))
    ranks = range(len(probes))
    listening = list(
        threads.map(lambda rank: probes[rank].ask("listen", interface, stacks, offers, rank, token), ranks)
    )
    findings = [
        Finding(**{**listener["finding"], "host": probe.host})
        for probe, listener in zip(probes, listening, strict=True)
    ]
    reachable = [rank for rank in ranks if listening[rank]["port"]]
    for distance in range(1, min(len(reachable), _PARTNERS + 1)):
        pairs = [(rank, reachable[(place + distance) % len(reachable)]) for place, rank in enumerate(reachable)]

        def dial(pair: tuple[int, int], send_for: float) -> Any:
            one, other = pair
            return probes[one].ask("dial", listening[other]["address"], listening[other]["port"], token, send_for)

        # First the latencies, which what others send would add to.
        latencies = dict(zip(pairs, list(threads.map(dial, pairs, repeat(0.0))), strict=True))
        connected = [pair for pair in pairs if "error" not in latencies[pair]]
        sent = dict(zip(connected, threads.map(dial, connected, repeat(_SEND_FOR)), strict=True))
        for one, other in pairs:
            latency = latencies[one, other]
            link = sent.get((one, other), latency)
            way = f"to {probes[other].host} ({listening[other]['address']})"
            if "error" in link:
                better = listening[other]["better"]
                cure = f"leave out --network-interface: {better} leads to the others" if better else _OPEN_PORTS
                found, cost = f"{way} port {listening[other]['port']}: {link['error']}", "jobs on both do not start"
                finding = Finding("connection", WRONG, found, cost, cure)
            else:
                finding = _judge(way, latency["latency"], link["bandwidth"])
            findings.append(replace(finding, host=probes[one].host))
    return findings


def _judge(way: str, latency: float, bandwidth: float) -> Finding:
    """Judge the latency of a connection in seconds, and its bandwidth in bytes per second."""
    found = f"{way}: {latency * 1e3:.3f} ms, {bandwidth / 1e6:.0f} MB/s"
    costs = []
    if latency > _SLOW_LATENCY:
        costs.append(f"each small operation takes {latency * 1e3:.1f} ms or more")
    if bandwidth < _SLOW_BANDWIDTH:
        costs.append(f"100 MB of gradients take {_GRADIENTS / bandwidth:.1f} s or more")
    if not costs:
        return Finding("connection", FINE, found)
    cure = "choose a faster network by --network-interface; or send less: compression, larger batches, fewer hosts"
    return Finding("connection", SLOW, found, ", ".join(costs), cure)


def _across(probes: Sequence[Probe], hosts: Sequence[str], remote: Ssh, by_mpi: bool) -> list[Finding]:
    """Start a job with one rank on each host by each launcher."""
    named = ",".join(hosts)
    words = ["-np", str(len(hosts)), "-H", named]
    launcher = "ssh" if all(remote.starter(host) == "ssh" for host in hosts) else "batch"
    findings = [launches.by_collectivesrun(launcher, *remote.options(), *words)[0]]
    if by_mpi:
        findings.append(launches.by_collectivesrun("mpi", *words)[0])
    return [replace(finding, host=f"{probes[0].host} to {named}") for finding in findings]
