"""Kill a rank in every way, at every place, and look at what becomes of the job.

    python -m tests.trials.deaths                      # 208: every way at every place, twice, both MPIs and launchers
    python -m tests.trials.deaths --count 40 --seed 7  # fewer, others
    python -m tests.trials.deaths --where synchronize --how SIGKILL --mpi mpich

One rank of two or three arms itself at a place, and after a pseudo-random moment a signal makes it die in the chosen
way. Each injection is right if the job ends within the bound with an exit code that tells of it (under collectivesrun:
the victim's own, and the victim named), and leaves no process and no file behind. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.launching.mpirun import IMPLEMENTATIONS, environment, run_command

BOUND = 20.0
"""Seconds after the death in which the job has to end."""
LAUNCHERS = ("mpirun", "collectivesrun")
HOWS = {
    "SIGKILL": (signal.SIGKILL, "", 137),
    "SIGTERM": (signal.SIGTERM, "", 143),
    "SIGTERM, sys.exit(7)": (signal.SIGTERM, "sys.exit(7)", 7),
    "KeyboardInterrupt": (signal.SIGINT, "raise KeyboardInterrupt", 130),
    "exception": (signal.SIGUSR1, "raise ValueError('the model exploded')", 1),
    "MemoryError": (signal.SIGUSR1, "raise MemoryError", 1),
    "sys.exit(3)": (signal.SIGUSR1, "sys.exit(3)", 3),
    "os._exit(3)": (signal.SIGUSR1, "os._exit(3)", 3),
}
"""By name: the signal, what the victim's handler does (nothing: there is none), and the exit code."""
WHERES = {
    "before init": 0.3,
    "init, peers late": 1.0,
    "init, together": 0.4,
    "before the first call": 0.2,
    "all-reduce, window": 0.3,
    "all-reduce, direct-read": 0.3,
    "all-reduce, mpi": 0.3,
    "all-reduce, hosts": 0.3,
    "asynchronous": 0.3,
    "synchronize": 0.3,
    "join": 0.3,
    "shutdown and init again": 0.3,
    "after shutdown": 0.3,
}
"""By name: the seconds after the victim has armed itself within which the signal comes."""
_LEFT = {
    "mpirun": re.compile("collectives-|sm_segment|vader_segment"),
    "collectivesrun": re.compile("collectives-|mpich_shm_|sm_segment|vader_segment"),
}
"""What must not stay in /dev/shm."""

PROGRAM = """
import os, sys, time
from pathlib import Path
folder, where, number, how, victim = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
variables = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
rank = int(next(os.environ[name] for name in variables if name in os.environ))

import signal
import numpy as np

def die(signal_number, frame):
    (folder / "died").write_text(str(time.time()))
    exec(how)

def arm():
    if rank == victim:
        if how:
            signal.signal(number, die)
        (folder / "armed.part").write_text(str(os.getpid()))
        (folder / "armed.part").rename(folder / "armed")

transports = {f"all-reduce, {transport}": transport for transport in ("window", "direct-read", "mpi")}

def forever():
    while True:
        time.sleep(0.01)

if where == "before init":
    arm()
    if rank == victim:
        forever()
import collectives as hvd
hvd.init  # whose first use imports the package
if where.startswith("init"):
    import mpi4py.MPI  # what ends a rank while MPI starts is the launcher's business
    arm()
    if rank != victim and "late" in where:
        time.sleep(1.5)
hvd.init()
rank, size = hvd.rank(), hvd.size()
small, large = np.full(1000, float(rank), np.float32), np.full(1_500_000, float(rank), np.float32)
if where == "before the first call":
    arm()
    if rank == victim:
        forever()
for _ in range(2):
    assert hvd.allreduce(small, op=hvd.Sum)[0] == sum(range(size))
if where == "after shutdown":
    hvd.shutdown()
    arm()
    if rank == victim:
        forever()
    time.sleep(1)
    sys.exit(0)
arm()
step = 0
while True:
    step += 1
    if where.startswith("all-reduce"):
        hvd.allreduce_(large if step % 2 else small, op=hvd.Average, transport=transports.get(where))
    elif where == "asynchronous":
        for k in range(5):
            hvd.allreduce_async(small if k else large, name=f"{step} {k}").add_done_callback(lambda handle: None)
        time.sleep(0.001)
        hvd.barrier()
    elif where == "synchronize":
        tensors = {"large": large, "small": small}
        handles = [hvd.allreduce_async_(tensor, op=hvd.Average, name=name) for name, tensor in tensors.items()]
        if rank != victim:
            time.sleep(0.02)
        for handle in handles:
            hvd.synchronize(handle)
    elif where == "join":
        if rank == victim:
            hvd.join()
        hvd.allreduce(large, name="large")
    elif where == "shutdown and init again":
        hvd.shutdown()
        hvd.init()
        hvd.allreduce(small)
    else:
        hvd.allreduce(small)
"""


@dataclass(frozen=True)
class Injection:
    """One death to come."""

    where: str
    how: str
    mpi: str
    launcher: str
    ranks: int
    victim: int
    delay: float

    def __str__(self) -> str:
        return f"{self.where:24} {self.how:21} {self.mpi:8} {self.launcher:15} {self.victim} of {self.ranks}"


@dataclass(frozen=True)
class Outcome:
    """What became of it. ``seconds``: from the death to the end of the job; NaN if it never came to a death."""

    injection: Injection
    code: int | None
    seconds: float
    problems: tuple[str, ...]
    text: str


def inject(injection: Injection) -> Outcome:
    """Run a job in which one rank dies, and judge what became of it."""
    prefix = environment(injection.mpi)
    assert prefix is not None, f"{injection.mpi} is not installed"
    number, how, expected = HOWS[injection.how]
    with tempfile.TemporaryDirectory(prefix="deaths-") as name:
        folder = Path(name)
        (folder / "program.py").write_text(PROGRAM)
        (folder / "tmp").mkdir()
        python = str(prefix / "bin" / "python")
        start = (
            [str(prefix / "bin" / "mpirun"), "-n"]
            if injection.launcher == "mpirun"
            else [python, "-m", "collectives.launch", "-np"]
        )
        command = [*start, str(injection.ranks), python, str(folder / "program.py")]
        command += [name, injection.where, str(int(number)), how, str(injection.victim)]
        env = {"TMPDIR": str(folder / "tmp"), "COLLECTIVES_LOCAL_SIZE": "1" if "hosts" in injection.where else "0"}
        before = set(os.listdir("/dev/shm"))
        over = threading.Event()
        killer = threading.Thread(target=_kill, args=(folder, number, injection.delay, bool(how), over))
        killer.start()
        problems, code, text = [], None, ""
        try:
            result = run_command(command, timeout=BOUND + 10, env=env, expect=None)
            code, text = result.returncode, result.output
        except AssertionError as error:
            text = str(error)
            problems.append("hangs" if text.startswith("not finished") else text.partition("\n")[0])
        ended = time.time()
        over.set()
        killer.join()
        died = folder / "died"
        seconds = ended - float(died.read_text()) if died.exists() else float("nan")
        new = {
            name for name in os.listdir("/dev/shm") if injection.mpi == "mpich" or not name.startswith("mpich_")
        } - before
        # MPICH leaves its own memory behind when a job dies; collectivesrun sweeps it up, mpirun does not.
        left = [*os.listdir(folder / "tmp"), *_unused(filter(_LEFT[injection.launcher].match, new))]
    if left:
        problems.append(f"files left: {' '.join(left)}")
    if seconds != seconds:
        problems.append("nobody died")
    elif seconds > BOUND:
        problems.append("late")
    if code is not None:
        problems += _judge_code(injection, code, expected, text)
    return Outcome(injection, code, seconds, tuple(problems), text)


def _unused(names: Iterable[str]) -> list[str]:
    """Those files of /dev/shm that no process has mapped: others may run jobs at the same time."""
    found = [*names]
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps") if found else ():
        with contextlib.suppress(OSError):
            mapped += maps.read_text()
    return [name for name in found if f"/dev/shm/{name}" not in mapped and Path("/dev/shm", name).exists()]


def _judge_code(injection: Injection, code: int, expected: int, text: str) -> list[str]:
    if injection.launcher == "mpirun":
        return [] if code else ["exit code 0"]
    problems = [] if code == expected else [f"exit code {code}, expected {expected}"]
    named = re.findall(r"^collectivesrun: rank (\d+) on \S+ (?:failed|was killed)", text, re.MULTILINE)
    if named != [str(injection.victim)]:
        problems.append(f"names {', '.join(named) or 'nobody'}")
    return problems


def _kill(folder: Path, number: signal.Signals, delay: float, notes_itself: bool, over: threading.Event) -> None:
    """Send the signal to the victim, ``delay`` seconds after it has armed itself."""
    armed = folder / "armed"
    while not armed.exists():
        if over.wait(0.002):
            return
    if over.wait(delay):
        return
    if not notes_itself:
        (folder / "died").write_text(str(time.time()))
    try:
        os.kill(int(armed.read_text()), number)
    except ProcessLookupError:
        (folder / "died").unlink(missing_ok=True)


def possible(where: str, mpi: str, launcher: str) -> bool:
    """Whether the launcher is able to notice.

    MPICH's mpirun never ends a job one of whose processes ends before it has called MPI_Init: the others wait in
    MPI_Init for ever, in any program.
    """
    return (where, mpi, launcher) != ("before init", "mpich", "mpirun")


def draw(
    seed: int, wheres: Sequence[str], hows: Sequence[str], mpis: Sequence[str], launchers: Sequence[str]
) -> Iterator[Injection]:
    """Injections without end: every way at every place in turn, over all MPIs, launchers, and numbers of ranks."""
    rng = random.Random(seed)
    settings = {where: [s for s in itertools.product(mpis, launchers) if possible(where, *s)] for where in wheres}
    wheres = [where for where in wheres if settings[where]]
    while True:
        pairs = list(itertools.product(wheres, hows))
        rng.shuffle(pairs)
        for where, how in pairs:
            mpi, launcher = rng.choice(settings[where])
            ranks = rng.choice((2, 3))
            yield Injection(where, how, mpi, launcher, ranks, rng.randrange(ranks), rng.uniform(0, WHERES[where]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Inject, and print a line for each; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.trials.deaths",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--count", type=int, default=2 * len(WHERES) * len(HOWS), help="number of injections; %(default)s by default"
    )
    parser.add_argument("--seed", type=int, default=13, help="of what is drawn; %(default)s by default")
    parser.add_argument("--where", action="append", choices=WHERES, help="only there; may be repeated")
    parser.add_argument("--how", action="append", choices=HOWS, help="only so; may be repeated")
    parser.add_argument("--mpi", action="append", choices=IMPLEMENTATIONS, help="only this one")
    parser.add_argument("--launcher", action="append", choices=LAUNCHERS, help="only this one")
    asked = parser.parse_args(arguments)
    endless = draw(
        asked.seed,
        asked.where or [*WHERES],
        asked.how or [*HOWS],
        asked.mpi or IMPLEMENTATIONS,
        asked.launcher or LAUNCHERS,
    )
    wrong = 0
    for injection in itertools.islice(endless, asked.count):
        outcome = inject(injection)
        wrong += bool(outcome.problems)
        print(
            f"{injection}  {outcome.seconds:6.2f} s  rc {outcome.code}  {'; '.join(outcome.problems) or 'ok'}",
            flush=True,
        )
        if outcome.problems:
            print(outcome.text, flush=True)
    print(f"{asked.count} deaths, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
