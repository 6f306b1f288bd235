"""The doctor's process on each host: reads orders as lines of JSON, and answers each with a line that begins with DLE.

    look                               what is wrong on this host; its interfaces and version
    clock                              the time
    listen SETTING STACKS OFFERS RANK TOKEN
                                       the address for ranks, the port at which this process listens there (0: it does
                                       not), and the interface without the setting, if that is a better one
    dial ADDRESS PORT TOKEN SECONDS    latency and bandwidth, or the error

It runs in the environment and folder that a job's ranks would have.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from collectives import __version__
from collectives.launch import rank_environment
from collectives.launch.agent import MARK
from collectives.launch.doctor import host, launches, links, packages
from collectives.launch.doctor.findings import WRONG, Finding
from collectives.transport.tcp import network

_LIVES = 120
"""Seconds after which this process ends, whatever has become of the launcher."""


def look() -> dict[str, Any]:
    """Check this host alone."""
    return {
        "findings": [asdict(finding) for finding in _findings()],
        "stack": network.stack(),
        "addresses": network.addresses(),
        "version": __version__,
    }


def _findings() -> Iterator[Finding]:
    with ThreadPoolExecutor() as threads:
        without_mpi = threads.submit(launches.by_collectivesrun, "ssh", "-np", "2")
        mpis, by_mpi = packages.mpis()
        with_mpi = threads.submit(launches.by_collectivesrun, "mpi", "-np", "2") if by_mpi else None
        yield from packages.installed()
        yield from mpis
        yield from packages.gpus()
        yield from host.memory()
        yield from host.limits()
        yield host.cpus()
        finding, world = without_mpi.result()
        if world:
            yield from host.sharing(world)
        yield finding
        if with_mpi is not None:
            yield with_mpi.result()[0]


def listen(setting: str, stacks: list[str], offers: links.Offers, rank: int, token: str) -> dict[str, Any]:
    """Listen where ranks of this host would."""
    address, finding = links.choose(setting, stacks, offers, rank)
    port = links.listen(address, token) if finding.state != WRONG else 0
    usual, of_usual = links.choose("", stacks, offers, rank)
    better = of_usual.found if usual not in ("", address) else ""
    return {"address": address, "port": port, "finding": asdict(finding), "better": better}


ORDERS: dict[str, Callable[..., Any]] = {
    "look": look,
    "clock": time.time,
    "listen": listen,
    "dial": links.dial,
}


def main() -> None:
    """Obey orders until stdin ends."""
    signal.alarm(_LIVES)
    answers = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)  # what libraries print is no answer
    environment = rank_environment.of_no_process(os.environ)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for line in sys.stdin:
        order, *arguments = json.loads(line)
        answers.write(MARK + json.dumps(ORDERS[order](*arguments)).encode() + b"\n")


if __name__ == "__main__":
    main()
