"""Run many random programs, and report those that go wrong.

    python -m tests.support.random.programs 0 1000                            as threads, on hosts of several shapes
    python -m tests.support.random.programs 0 1000 --as processes             forked; programs fork in their middle
    python -m tests.support.random.programs 0 1000 --as tcp                   connected by TCP; hosts of several sizes
    python -m tests.support.random.programs 0 300 --as openmpi --ranks 2,3,4  under mpirun; also mpich
    python -m tests.support.random.programs 0 1000 --as devices               threads with emulated GPUs, whose seeds
                                                                              also say how many

Programs run in a process, or a job, that ends when one of them hangs or goes wrong, and starts again behind it. The
last line has the number of programs, and the seeds that went wrong; the exit code is 1 if there are any. ``--within``
ends the run after so many seconds.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from random import Random
from typing import Any

from collectives.base.config import TRANSPORTS, Config
from collectives.base.errors import in_words
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World
from tests.support.launching import processes
from tests.support.launching.mpirun import IMPLEMENTATIONS, run_ranks
from tests.support.random import device_programs
from tests.support.random.programs import SETS, Menu, draw, make_sets, run

WAYS = ("threads", "processes", "tcp", "devices", *IMPLEMENTATIONS)
HOSTS: dict[int, tuple[tuple[tuple[int, ...], ...], ...]] = {
    2: (((0,), (1,)),),
    3: (((0, 2), (1,)),),
    4: (((0, 1), (2, 3)), ((0, 1, 2), (3,))),
}
_NO_MESSAGES = Menu(transports=tuple(name for name in TRANSPORTS if name != "mpi"))
_BATCH = 25
"""Programs of one world under mpirun; the worlds' settings take turns."""
_SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"local_size": 2, "network": "mpi"},
    {"transport": "mpi"},
    {"local_size": 1},
)
_TCP_SETTINGS: tuple[dict[str, Any], ...] = ({}, {"local_size": 2}, {"transport": "tcp"}, {"local_size": 1, "lanes": 3})


def run_on_threads(seed: int, size: int) -> None:
    """One program; every third on several hosts, or without direct reads, or of blocking calls."""
    random = Random(f"setting {seed}")
    drawn = random.random()
    thread_groups.run(
        size,
        lambda world: run(world, draw(seed, size, Menu(asynchronous=0.0 if drawn > 0.9 else 0.8))),
        hosts=random.choice(HOSTS[size]) if drawn < 0.2 else None,
        reads_private=not 0.2 < drawn < 0.3,
        timeout=30,
        make_world=World,
    )


def run_on_processes(
    seeds: Sequence[int], size: int, *, seconds: float = 60.0, forks: bool = True, tcp: bool = False
) -> None:
    """Programs one after the other in one world, whose ranks fork in between; ``tcp``: on hosts of several sizes, as
    the first seed has it."""

    def programs(world: World) -> None:
        sets = make_sets(world, SETS[size])
        for seed in seeds:
            run(world, draw(seed, size, Menu() if tcp else _NO_MESSAGES), sets, forks=forks)

    settings = Random(f"setting {seeds[0]}").choice(_TCP_SETTINGS) if tcp else {}
    processes.run(
        size,
        programs,
        config=Config(timeout=30, **settings),
        timeout=seconds,
        connect=processes.by_tcp if tcp else processes.by_pipes,
    )


def run_under_mpi(first: int, count: int, seconds: float, forks: bool, deadline: float) -> None:
    """This rank's part in programs under mpirun: a world for every `_BATCH` of them."""
    from mpi4py import MPI

    from collectives.transport.mpi import mpi_groups

    comm = MPI.COMM_WORLD
    for start in range(first, first + count, _BATCH):
        if comm.bcast(time.monotonic() > deadline):
            break
        config = Config(timeout=30, **Random(f"setting {start // _BATCH}").choice(_SETTINGS))
        world = World(mpi_groups.connect(comm, config), config)
        sets = make_sets(world, SETS[comm.size])
        for seed in range(start, min(start + _BATCH, first + count)):
            if comm.rank == 0:
                print(f"seed {seed}", flush=True)
            faulthandler.dump_traceback_later(seconds, exit=True)
            try:
                run(world, draw(seed, comm.size), sets, forks=forks)
            except BaseException as error:
                world._control.fail(in_words(comm.rank, error))
                raise
        world.shutdown()
    faulthandler.cancel_dump_traceback_later()


def main() -> None:
    """Run programs in processes of their own, until the last one or until time is up."""
    flags = argparse.ArgumentParser(
        prog="tests.support.random.programs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("first", type=int)
    flags.add_argument("count", type=int)
    flags.add_argument("--as", dest="way", choices=WAYS, default="threads", help="what the ranks are; %(default)s")
    flags.add_argument("--ranks", default="2,3,4", help="numbers of ranks, which take turns; %(default)s by default")
    flags.add_argument("--seconds", type=float, default=60.0, help="after which a program counts as hanging")
    flags.add_argument("--within", type=float, default=float("inf"), help="seconds after which no more are started")
    flags.add_argument("--no-forks", dest="forks", action="store_false", help="processes do not fork")
    flags.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = flags.parse_args()
    sizes = [0] if given.way == "devices" else [int(size) for size in given.ranks.split(",")]
    if given.inside:
        _inside(given, sizes)
        return
    done, failed, begun = 0, [], time.monotonic()
    for part, size in enumerate(sizes):
        seed, last = given.first, given.first + given.count
        until = begun + given.within * (part + 1) / len(sizes)
        while seed < last and time.monotonic() < until:
            code, reached, text = _start(given, seed, last, size, until)
            done += reached + 1 - seed - bool(code)
            if code:
                failed.append(f"{reached} of {size or 'its'} ranks")
                print(f"---- seed {reached}, {size or 'its'} ranks: exit {code}\n{text[-6000:]}", flush=True)
            seed = reached + 1
    wrong = f"{len(failed)} wrong: {', '.join(failed)}" if failed else "0 wrong"
    print(f"{done + len(failed)} programs as {given.way} in {time.monotonic() - begun:.0f} s; {wrong}")
    sys.exit(bool(failed))


def _start(given: argparse.Namespace, seed: int, last: int, size: int, until: float) -> tuple[int, int, str]:
    """Run programs from ``seed`` on, up to the first that goes wrong; returns exit code, the last seed begun, and what
    was said."""
    command = [
        "-m",
        "tests.support.random.programs",
        str(seed),
        str(last - seed),
        "--as",
        given.way,
        "--ranks",
        str(size),
        "--inside",
    ]
    command += ["--seconds", str(given.seconds), "--within", str(max(0.1, until - time.monotonic()))]
    if not given.forks:
        command.append("--no-forks")
    if given.way in IMPLEMENTATIONS:
        budget = min(given.seconds * (last - seed), until - time.monotonic() + given.seconds)
        try:
            result = run_ranks(size, command, mpi=given.way, expect=None, timeout=60 + budget)
            code, said, text = result.returncode, result.ranks[0], str(result)
        except AssertionError as error:
            code, text = 1, str(error)
            said = text
    else:
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        code, said, text = done.returncode, done.stdout, done.stdout + done.stderr
    reached = [int(number) for number in re.findall(r"^seed (\d+)$", said, re.MULTILINE)]
    return code or (0 if reached else 1), max(reached, default=seed), text


def _inside(given: argparse.Namespace, sizes: Sequence[int]) -> None:
    seeds = range(given.first, given.first + given.count)
    deadline = time.monotonic() + given.within
    if given.way in IMPLEMENTATIONS:
        run_under_mpi(given.first, given.count, given.seconds, given.forks, deadline)
        return
    for seed in seeds:
        if time.monotonic() > deadline:
            break
        print(f"seed {seed}", flush=True)
        if given.way in ("threads", "devices"):
            faulthandler.dump_traceback_later(given.seconds, exit=True)
            run_on_threads(seed, sizes[0]) if given.way == "threads" else device_programs.run_seed(seed)
        else:
            # Each rank watches itself: a watchdog does not survive a fork, and may not be armed in one.
            run_on_processes([seed], sizes[0], seconds=given.seconds, forks=given.forks, tcp=given.way == "tcp")
    os._exit(0)


if __name__ == "__main__":
    main()
