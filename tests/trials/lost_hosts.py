"""Let ranks and hosts die in the middle of operations between hosts, and look at the others.

    python -m tests.trials.lost_hosts 0 60               the deaths of seeds 0 to 59, over TCP
    python -m tests.trials.lost_hosts 0 10 --mpi         under Open MPI's mpirun; --mpi mpich: under MPICH's
    python -m tests.trials.lost_hosts 0 10 --how cut     only hosts whose cable is pulled

The hosts are made on this machine (`tests.support.launching.clusters`). Without MPI nobody ends the survivors. Each of
them must raise RankFailedError in time, name a rank that was lost, and end; on the hosts that are left no process and
no memory may stay. A network that is down for less than the timeout, or a process that is stopped for so long, must do
no harm.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import collectives
from collectives.base.errors import RankFailedError
from collectives.transport import backoff
from collectives.worlds import runtime
from tests.support.launching.clusters import Cluster, cluster
from tests.support.launching.mpirun import IMPLEMENTATIONS, ROOT, python_for, rank_environment
from tests.trials.killed_ranks import OPERATIONS, calls, try_all

HOWS = ("killed", "off", "cut", "stopped", "cut for a moment", "stopped for a moment")
"""A rank is killed; a host is switched off, or its cable is pulled; a rank is stopped; the last two end in time."""
_UNDER_MPIRUN = ("off", "cut", "stopped", "cut for a moment")
"""mpirun itself ends the job when a rank is killed."""
_TIMEOUT = 3.0
"""COLLECTIVES_PEER_TIMEOUT."""
_MOMENT, _LONGER_TIMEOUT = 4.0, 6.0
"""What is survived, and the timeout then."""
_AT_ONCE, _SILENT = 3.0, 1.5 * _TIMEOUT + 3.0
"""Seconds from the event to the last survivor's error: after a closed connection, and after silence."""
_END_WITHIN = 20.0
_START_WITHIN = 60.0
_COUNTS = (1000, 20_000, 300_000, 1_000_000)
_PORT = 29411
_MARK = "tests.trials.lost_hosts"
_PASSED = ("PATH", "PYTHONPATH", "PYTHONFAULTHANDLER", "OMPI_MCA_btl")
"""Variables that Open MPI's mpirun passes on to other hosts; MPICH's passes all of them."""


@dataclass(frozen=True)
class Plan:
    """One death to come."""

    seed: int
    how: str
    per_host: tuple[int, ...]
    """Ranks of each host."""
    victim: int
    """The rank; of a host that is lost, one of its ranks."""
    operation: str
    count: int
    delay: float
    mpi: str = ""
    """Whose mpirun starts the ranks; empty: they meet by TCP."""

    @property
    def hosts(self) -> list[str]:
        """Each rank's host."""
        return [f"host{number + 1}" for number, ranks in enumerate(self.per_host) for _ in range(ranks)]

    @property
    def survives(self) -> bool:
        return self.how.endswith("for a moment")

    @property
    def timeout(self) -> float:
        return _LONGER_TIMEOUT if self.survives else _TIMEOUT

    def __str__(self) -> str:
        return (
            f"seed {self.seed}, {self.mpi or 'TCP'}, ranks {self.per_host}, {self.operation} of "
            f"{self.count} elements, rank {self.victim} on {self.hosts[self.victim]} {self.how}"
        )


def draw(seed: int, how: str | None = None, mpi: str = "") -> Plan:
    """The death of a seed."""
    random = Random(f"lost {seed}")
    per_host = tuple(random.choice((1, 1, 2)) for _ in range(random.choice((2, 2, 3, 4))))
    size = sum(per_host)
    drawn = random.choice(_UNDER_MPIRUN if mpi else HOWS)
    # Rank 0 serves the store, and mpirun runs on its host; the loss of both is drawn as well, but not under mpirun.
    victim = random.randrange(per_host[0] if mpi else 0, size)
    return Plan(
        seed, how or drawn, per_host, victim, random.choice(OPERATIONS), random.choice(_COUNTS), random.random(), mpi
    )


def lose(plan: Plan) -> list[str]:
    """One death; returns what was wrong."""
    with tempfile.TemporaryDirectory(prefix="lost-") as name:
        folder = Path(name)
        with cluster(len(plan.per_host), shared=folder) as hosts, _started(plan, hosts, folder) as started:
            problems = _observe(plan, hosts, folder, started)
        if problems:
            problems += [f"output:\n{(folder / 'output').read_text(errors='replace')[-3000:]}"]
    return [f"{plan}: {problem}" for problem in problems]


@contextmanager
def _started(plan: Plan, hosts: Cluster, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The ranks: a process of each, or mpirun's."""
    python = python_for(plan.mpi) if plan.mpi else Path(sys.executable)
    program = [str(python), "-m", _MARK, "0", "0", "--rank", str(folder)]
    program += ["--operation", plan.operation, "--count", str(plan.count)]
    if plan.survives:
        program += ["--until-stopped"]
    variables = {"COLLECTIVES_PEER_TIMEOUT": str(plan.timeout), "COLLECTIVES_TIMEOUT": "60"}
    common = rank_environment(variables)
    if plan.mpi:
        del common["PRTE_MCA_rmaps_default_mapping_policy"]  # it would place all ranks on the first host
        common["PATH"] = f"{python.parent}{os.pathsep}{common['PATH']}"
        passed = [part for name in (*variables, *_PASSED) for part in ("-x", name)]
        places = ",".join(f"host{number + 1}:{ranks}" for number, ranks in enumerate(plan.per_host))
        # Open MPI binds the first rank of each host to the first core, which all of these hosts have in common: ranks
        # that spin in MPI keep each other from running.
        own = ["--bind-to", "none", *passed, "-H"] if plan.mpi == "openmpi" else ["-hosts"]
        mpirun = [str(python.parent / "mpirun"), *own, places]
        commands = [(common, ["host1", *mpirun, "-n", str(len(plan.hosts)), *program])]
    else:
        meeting = {"COLLECTIVES_RENDEZVOUS": f"tcp://host1:{_PORT}", "COLLECTIVES_SIZE": str(len(plan.hosts))}
        meeting["COLLECTIVES_KEY"] = secrets.token_hex(32)
        commands = [
            ({**common, **meeting, "COLLECTIVES_RANK": str(rank)}, [host, *program])
            for rank, host in enumerate(plan.hosts)
        ]
    processes: list[subprocess.Popen[bytes]] = []
    with (folder / "output").open("wb") as output:
        try:
            for variables, (host, *command) in commands:
                processes.append(
                    subprocess.Popen(
                        hosts.on(host, *command),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        env=variables,
                        cwd=ROOT,
                    )
                )
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.wait(10)


def _observe(plan: Plan, hosts: Cluster, folder: Path, started: Sequence[subprocess.Popen[bytes]]) -> list[str]:
    ranks = range(len(plan.hosts))
    if not backoff.poll(lambda: len([*folder.glob("ready-*")]) == len(ranks), _START_WITHIN, 0.01):
        return ["the ranks have not begun"]
    found = [(folder / f"ready-{rank}").read_text().split()[1] for rank in ranks]
    if found != plan.hosts:
        return [f"the ranks are on {found}"]
    time.sleep(plan.delay)  # a random moment of the operations, and nothing that is waited for
    begun = time.time()
    back = _strike(plan, hosts, folder)
    if plan.survives:
        time.sleep(_MOMENT)  # how long the network is down, or the process stopped
        back()
        (folder / "stop").touch()
    lost = [rank for rank in ranks if rank == plan.victim or plan.hosts[rank] == plan.hosts[plan.victim]]
    lost = lost if plan.how in ("off", "cut") else [plan.victim]
    silenced = [] if plan.survives else lost if plan.how == "off" else [plan.victim] if plan.how == "killed" else []
    telling = [rank for rank in ranks if rank not in silenced]
    first = [rank for rank in telling if rank not in lost] if plan.how == "stopped" else telling
    patience = _END_WITHIN if plan.survives else (_AT_ONCE if plan.how == "killed" else _SILENT) + 5
    backoff.poll(lambda: all((folder / f"outcome-{rank}").exists() for rank in first), patience, 0.01)
    if plan.how == "stopped" and not plan.mpi:
        back()  # it must find out what has become of it
        backoff.poll(lambda: all((folder / f"outcome-{rank}").exists() for rank in telling), patience, 0.01)
    elif plan.how == "stopped":
        telling = first
    problems = []
    for rank in telling:
        file = folder / f"outcome-{rank}"
        if file.exists():
            problem = _judge(plan, rank, lost, begun, json.loads(file.read_text()))
        else:
            problem = "says nothing"
            # The fault handler writes its stacks into the output.
            process = _process(folder, rank)
            subprocess.run(hosts.on(plan.hosts[rank], "kill", "-ABRT", process), check=False, timeout=20)
        problems += [f"rank {rank} on {plan.hosts[rank]} {problem}"] if problem else []
    return problems + _left(plan, hosts, started)


def _strike(plan: Plan, hosts: Cluster, folder: Path) -> Callable[[], object]:
    """Do it; returns what undoes it."""
    host = plan.hosts[plan.victim]

    def signal(name: str) -> None:
        process = _process(folder, plan.victim)
        subprocess.run(hosts.on(host, "kill", f"-{name}", process), check=True, timeout=20)

    if plan.how == "killed":
        signal("KILL")
    elif plan.how == "off":
        hosts.power_off(host)
    elif plan.how.startswith("cut"):
        hosts.cut(host)
    else:
        signal("STOP")
        return lambda: signal("CONT")
    return lambda: hosts.heal(host)


def _judge(plan: Plan, rank: int, lost: Sequence[int], begun: float, told: dict[str, Any]) -> str:
    """What is wrong with a rank's outcome; empty if nothing is."""
    error, text, late = told["error"], told["text"], told["time"] - begun
    if plan.survives:
        return f"raised {error}: {text}" if error else ""
    if error != RankFailedError.__name__:
        return f"ended with {error}: {text}"
    named = re.search(r"^rank \d+: rank (\d+)\b", text)
    # A rank that was stopped, or is cut off, finds that it has lost the others.
    right = lost if rank not in lost else [other for other in range(len(plan.hosts)) if other not in lost]
    if named is None or int(named[1]) not in right:
        return f"names none of {right}: {text}"
    bound = _AT_ONCE if plan.how == "killed" else _SILENT
    return f"raised after {late:.1f} s" if late > bound and rank not in lost else ""


def _left(plan: Plan, hosts: Cluster, started: Sequence[subprocess.Popen[bytes]]) -> list[str]:
    """What has stayed on the hosts that are up."""
    up = sorted(set(plan.hosts) - ({plan.hosts[plan.victim]} if plan.how == "off" else set()))
    if plan.mpi and plan.how == "stopped":
        return []  # mpirun kills what is stopped
    shown: dict[str, list[str]] = {}

    def ended() -> bool:
        shown.clear()
        for host in up:
            lines = _on(hosts, host, "ps", "-eo", "stat,args").splitlines()
            # mpirun and its daemons wait for the host that is gone: they are no business of the ranks.
            shown[host] = [line for line in lines if re.match(rf"[^Z]\S*\s+\S*python\S* -m {re.escape(_MARK)}", line)]
        return not any(shown.values())

    problems = []
    if not backoff.poll(ended, _END_WITHIN, 0.1):
        problems += [f"processes stay on {host}: {lines}" for host, lines in shown.items() if lines]
    for host in up:
        files = [name for name in _on(hosts, host, "ls", "/dev/shm").split() if name.startswith("collectives")]
        problems += [f"{files} stay in /dev/shm of {host}"] if files else []
    return problems


def _process(folder: Path, rank: int) -> str:
    """A rank's process, as its host numbers it."""
    return (folder / f"ready-{rank}").read_text().split()[0]


def _on(hosts: Cluster, host: str, *command: str) -> str:
    return subprocess.run(hosts.on(host, *command), capture_output=True, text=True, check=True, timeout=20).stdout


def _be_a_rank(folder: Path, operation: str, count: int, until_stopped: bool) -> None:
    """A rank's part: operations without end, or until it is told to stop, and a report of what ended them."""
    collectives.init()
    world = runtime.world()
    rank = world.rank
    error: Exception | None = None
    try:
        each = calls(world, operation, count)
        next(each)
        _write(folder / f"ready-{rank}", f"{os.getpid()} {socket.gethostname()}")
        for _ in each:
            if until_stopped and world.broadcast_object((folder / "stop").exists(), 0):
                break
    except Exception as caught:
        error = caught
    told = {"error": type(error).__name__ if error else "", "text": str(error or ""), "time": time.time()}
    _write(folder / f"outcome-{rank}", json.dumps(told))


def _write(path: Path, text: str) -> None:
    """Write a file that is never seen half."""
    part = path.with_name(f".{path.name}")
    part.write_text(text)
    part.rename(path)


def main() -> None:
    flags = argparse.ArgumentParser(prog=f"python -m {_MARK}", description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("first", type=int)
    flags.add_argument("number", type=int)
    flags.add_argument("--how", choices=HOWS, help="only so")
    flags.add_argument("--mpi", nargs="?", const="openmpi", default="", choices=IMPLEMENTATIONS, help="under mpirun")
    flags.add_argument("--within", type=float, default=float("inf"), help="seconds after which no more are started")
    flags.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    flags.add_argument("--operation", help=argparse.SUPPRESS)
    flags.add_argument("--count", type=int, help=argparse.SUPPRESS)
    flags.add_argument("--until-stopped", action="store_true", help=argparse.SUPPRESS)
    given = flags.parse_args()
    if given.rank:
        _be_a_rank(given.rank, given.operation, given.count, given.until_stopped)
        return

    def one(seed: int) -> list[str]:
        plan, at = draw(seed, given.how, given.mpi), time.monotonic()
        problems = lose(plan)
        print(f"{plan}: {'WRONG' if problems else 'ok'}, {time.monotonic() - at:.0f} s", flush=True)
        return problems

    sys.exit(try_all(range(given.first, given.first + given.number), given.within, one))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
