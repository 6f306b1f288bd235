"""Whether `collectives status` names who is late, how soon, and what it costs.

    python -m benchmarks.status_stalls --count 50 --jobs 3      # jobs in each of which one rank stalls
    python -m benchmarks.status_stalls --cost 20                # pairs of 2 s with the status and the page, and without

In each job one rank, chosen at random, stalls at a step chosen at random, in one of the ways of ``WAYS``. Seconds from
the stall until the launcher's answer names the rank, and the line where it stalls. A rank that is stopped, or keeps
the interpreter's lock, cannot say its line; of those the rank counts.

The cost: one job, in turns of 2 s without the threads that say where a rank is and without a reader of the page, and
with both. The ratio of the steps' mean times, for each pair of turns; and, which a busy machine blurs less, the
processor time of the thread, of which there is one in each rank, and of the launcher with all that is between.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from collectives.launch import status_server

WAYS = {
    "sleep": "time.sleep(60)",
    "compute": "while True: pass",
    "wait for a message": "collectives.recv(numpy.ones(1), src=(rank + 1) % size)",
    "wait for a thread": "queue.Queue().get()",
    "stop": "os.kill(os.getpid(), signal.SIGSTOP)",
    "compute in C": "re.match('(a+)+$', 'a' * 60 + 'b')",
}
"""How a rank stalls."""
_SILENT = ("stop", "compute in C")
_STALLS = """
import os, queue, re, signal, sys, time
from pathlib import Path
import numpy
import collectives
late, at = int(sys.argv[1]), int(sys.argv[2])
def stall():
    Path("stalled").write_text(str(time.time()))
    {way}
collectives.init()
rank, size = collectives.rank(), collectives.size()
for step in range(10_000):
    collectives.allreduce(numpy.ones(1000), name="gradient")
    time.sleep(0.01)
    if (rank, step) == (late, at):
        stall()
"""
_STEPS = """
import os, sys, time
from pathlib import Path
import numpy
import collectives
from collectives.worlds import runtime, status
def used(thread):
    return 1e-9 * int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0])
pairs, pipe = int(sys.argv[1]), os.environ.pop(status.VARIABLE)
collectives.init()
path, matrix, gradient = Path(f"to-{collectives.rank()}"), numpy.ones((300, 300)), numpy.ones(1 << 18)
share = 0.0
for turn in range(2 * pairs + 1):  # the first is not counted
    if turn % 2:
        path.symlink_to(pipe)
        thread = status.start(str(path), runtime._present)
    collectives.barrier()
    begun, steps, go_on = time.perf_counter(), 0, numpy.ones(1)
    if collectives.rank() == 0 and turn % 2:
        Path("read").touch()
    while go_on[0]:
        matrix @ matrix
        collectives.allreduce_(gradient, average=True, name="gradient")
        steps += 1
        if steps % 20 == 0:
            go_on = collectives.broadcast(numpy.array([float(time.perf_counter() - begun < 2.0)]), 0)
    mean = (time.perf_counter() - begun) / steps
    if turn % 2:
        share = used(thread) / (time.perf_counter() - begun)
        Path("read").unlink(missing_ok=True)
        path.unlink()
        thread.join()
    if collectives.rank() == 0:
        print("turn", mean, share, flush=True)
"""
_BOUND = 120.0


@contextmanager
def job(folder: str, program: str, *arguments: str, options: tuple[str, ...]) -> Iterator[subprocess.Popen[str]]:
    """Run a program on ranks under ``collectivesrun`` during the body."""
    Path(folder, "program.py").write_text(program)
    command = [sys.executable, "-m", "collectives.launch", *options, sys.executable, "program.py", *arguments]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
    }
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        try:
            yield launcher
        finally:
            launcher.send_signal(signal.SIGTERM)
            try:
                launcher.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                launcher.kill()


def stalled(number: int, seed: int) -> tuple[str, float, float]:
    """Run one job; return the way in which a rank stalled, and the seconds until rank and line were named."""
    choices = random.Random(f"{seed} {number}")
    way, size = list(WAYS)[number % len(WAYS)], choices.randint(2, 4)
    late, launcher = choices.randrange(size), choices.choice(["mpi", "ssh"])
    program = _STALLS.format(way=WAYS[way])
    line = program[: program.index(WAYS[way])].count("\n") + 1
    named: dict[str, float] = {}
    begun = time.time()
    with tempfile.TemporaryDirectory() as folder:
        options = ("-np", str(size), "--launcher", launcher)
        with job(folder, program, str(late), str(choices.randrange(5, 60)), options=options) as process:
            stall = Path(folder, "stalled")
            while len(named) < 2 - (way in _SILENT) and time.time() < begun + _BOUND:
                time.sleep(0.02)  # status is asked again and again, as a user would
                with suppress(OSError):
                    sentences = status_server.ask(process.pid)["late"] if stall.exists() else []
                    # Where the late rank waits itself, as for a message, it and the other one wait for each other.
                    for sentence in sentences if way == "wait for a message" else sentences[:1]:
                        if re.match(rf"rank {late} ", sentence):
                            named.setdefault("rank", time.time())
                            if re.search(rf"program\.py:{line} in stall", sentence.partition("; it ")[2]):
                                named.setdefault("line", time.time())
            since = float(stall.read_text()) if stall.exists() else begun
    seconds = [named.get(what, float("inf")) - since for what in ("rank", "line")]
    print(f"{number:3} {way:26} {launcher} rank {late} of {size}: {seconds[0]:.2f}, {seconds[1]:.2f} s", flush=True)
    return way, seconds[0], seconds[1]


def between(pid: int) -> float:
    """Return the processor seconds that a launcher, mpirun and what stands before each rank have used so far."""
    launcher = psutil.Process(pid)
    processes = [launcher, *launcher.children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes if process.cmdline()[-2:-1] != ["program.py"])


def cost(pairs: int) -> None:
    """Measure and print what the status costs."""
    means, shares, launchers = [], [], []
    options = ("-np", "2", "--no-tag", "--status-port", "0")
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(1) as readers,
        job(folder, _STEPS, str(pairs), options=options) as process,
    ):
        assert process.stdout is not None
        address = ""

        def read() -> None:
            while process.poll() is None:
                if Path(folder, "read").exists():
                    with suppress(OSError), urllib.request.urlopen(f"{address}status.json", timeout=5) as answer:
                        answer.read()
                time.sleep(1.0)  # as the page does

        for text in process.stdout:
            if "status at " in text:
                address = text.split()[-1]
                readers.submit(read)
            elif text.startswith("turn "):
                means.append(float(text.split()[1]))
                shares.append(float(text.split()[2]))
                with suppress(psutil.Error):  # the job is ending
                    launchers.append((time.perf_counter(), between(process.pid)))
            else:
                print(text, end="")
    _, *counted = means
    ratios = [mean / before for mean, before in zip(counted[::2], means[0::2], strict=False)]
    ratios += [mean / after for mean, after in zip(counted[::2], counted[1::2], strict=False)]
    quartiles = statistics.quantiles(ratios, n=4)
    used = [(now - before) / (end - begun) for (begun, before), (end, now) in itertools.pairwise(launchers)]
    extra = statistics.mean(used[::2]) - statistics.mean(used[1::2])
    print(
        f"{len(ratios)} ratios of a step of {1e3 * statistics.median(means):.2f} ms with the status to without: median "
        f"{quartiles[1]:.4f}, quartiles {quartiles[0]:.4f} and {quartiles[2]:.4f}; the thread of a rank uses "
        f"{100 * statistics.mean(shares[1::2]):.3f} % of a core, launcher and mpirun {100 * extra:.3f} % more"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.status_stalls", description=__doc__)
    parser.add_argument("--count", type=int, default=0, help="jobs with a rank that stalls")
    parser.add_argument("--jobs", type=int, default=1, help="of these at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cost", type=int, default=0, help="pairs of turns")
    options = parser.parse_args()
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if options.cost:
        cost(options.cost)
    if options.count:
        with ThreadPoolExecutor(options.jobs) as workers:
            results = list(workers.map(lambda number: stalled(number, options.seed), range(options.count)))
        of_ranks = [rank for _, rank, _ in results]
        of_lines = [line for way, _, line in results if way not in _SILENT]
        for what, seconds in (("rank", sorted(of_ranks)), ("line", sorted(of_lines))):
            soon = sum(second <= 2.0 for second in seconds)
            print(
                f"the {what} within 2 s: {soon} of {len(seconds)}; median {statistics.median(seconds):.2f} s, "
                f"worst {seconds[-1]:.2f} s"
            )
        print(f"load of the machine: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
