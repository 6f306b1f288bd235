"""Dial a process that others flood with connections, and measure how long it takes to get in.

    python -m tests.trials.flood                              # 2 attackers, 8 dials
    python -m tests.trials.flood --attackers 4 --from others  # attackers that have addresses of their own

The attackers connect as quickly as the system lets them, say nothing, a part of a handshake or a false one, and keep
some hundred connections open. Exit code 1 if a dial fails.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from random import Random
from statistics import median

from collectives.base.errors import CollectivesError
from collectives.transport.tcp import network
from collectives.transport.tcp.authentication import make_key
from collectives.transport.tcp.listener import Listener
from collectives.transport.tcp.mesh import Inbox, Mesh
from collectives.transport.tcp.network import LOOPBACK
from collectives.transport.tcp.service import Service

Address = tuple[str, int]

_KEPT = 400
_BETWEEN = 1.0
"""Seconds between two dials."""
_WITHIN = 60.0
_JOB = "flooded"


def attack(address: Address, source: str, seed: int) -> None:
    """Connect, until this process is killed."""
    random, kept = Random(seed), [socket.socket() for _ in range(_KEPT)]
    while True:
        sock = socket.socket()
        sock.setblocking(False)
        with suppress(OSError):
            sock.bind((source, 0))
            sock.connect_ex(address)
            sock.send(random.randbytes(random.choice((0, 10, 40))))
        kept.append(sock)
        kept.pop(0).close()


def dial_under_flood(attackers: int, dials: int, sources: Sequence[str]) -> list[float]:
    """The seconds that each dial took.

    Args:
        sources: the addresses of the attackers, which they use in turn.

    Raises:
        CollectivesError: a dial failed.
    """
    key, ends = make_key(), socket.socketpair()
    pids = [os.fork()]
    if pids[0] == 0:
        flooded = Listener(Service(), LOOPBACK, 0, key, Inbox(_JOB, 0).put)
        ends[1].sendall(str(flooded.address[1]).encode())
        signal.pause()
    port = int(ends[0].recv(100))
    for number in range(attackers):
        pids.append(os.fork())
        if pids[-1] == 0:
            attack((LOOPBACK, port), sources[number % len(sources)], number)
    flooded_rank = iter([["flooded", network.stack(), {}, "", _JOB, True], (LOOPBACK, port)])
    mesh = Mesh(lambda value: [next(flooded_rank), value], 1, key)
    try:
        taken = []
        for number in range(dials):
            time.sleep(_BETWEEN)
            begun = time.monotonic()
            mesh.dial(0, str(number), _WITHIN).close()
            taken.append(time.monotonic() - begun)
        return taken
    finally:
        mesh.close()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print what came of it; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.trials.flood",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--attackers", type=int, default=2, help="processes; %(default)s by default")
    parser.add_argument("--dials", type=int, default=8, help="%(default)s by default")
    parser.add_argument("--from", dest="origin", choices=("here", "others"), default="here", help="their addresses")
    asked = parser.parse_args(arguments)
    others = [f"127.0.0.{host}" for host in range(2, 2 + asked.attackers)]
    try:
        taken = dial_under_flood(asked.attackers, asked.dials, [LOOPBACK] if asked.origin == "here" else others)
    except CollectivesError as error:
        print(error)
        return 1
    print(
        f"{len(taken)} of {asked.dials} dials got in, after {median(taken):.2f} s (median), {max(taken):.2f} s (worst)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
