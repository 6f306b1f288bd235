"""What the death of a rank costs: elastic jobs beside torchelastic, which starts all ranks again, and torchft.

    python -m benchmarks.elastic_peers                                     # 3 ranks, 5 deaths of each
    python -m benchmarks.elastic_peers --torchft .venv-torchft/bin/python  # a Python that can import torchft 0.2.0

One training (a model of 2 MB with Adam, 20 ms of other work in a step, a commit or checkpoint each 10 steps) as its
users write it for each (`benchmarks/elastic_programs`), on one machine, torch's over gloo. A rank, chosen at random, is
killed at a step chosen at random. Seconds from its death until

- the first new step: one that no rank had done before, so that repeated steps count as lost;
- the full size: the first step of all ranks again.

Lines are those of code in the program. torchft leaves it to its user to start a dead replica again, here at once.
"""

from __future__ import annotations

import argparse
import ast
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

PROGRAMS = Path(__file__).parent / "elastic_programs"
EVERY = 10
BOUND = 120.0
"""Seconds that a run may take to reach its full size, and again after the death."""

Watch = Callable[[], None]
"""Called again and again while the job runs."""


@dataclass(frozen=True)
class Step:
    """A step as a rank has written it: when it was done, its number, and how many ranks took it together."""

    time: float
    number: int
    size: int


def steps(files: Iterable[Path]) -> list[Step]:
    """All steps so far, by time."""
    words = [line.split() for file in files for line in file.read_text().splitlines()]
    return sorted((Step(float(line[0]), int(line[1]), int(line[2])) for line in words), key=lambda step: step.time)


def code_lines(program: Path) -> int:
    """Lines of a program without blank ones, comments and its docstring."""
    text = program.read_text()
    docstring = ast.parse(text).body[0]
    lines = [line.strip() for line in text.splitlines()[docstring.end_lineno :]]
    return sum(bool(line) and not line.startswith(("#", '"""')) for line in lines)


@contextmanager
def started(command: list[str], folder: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process and its descendants, which are ended together."""
    root = str(PROGRAMS.parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    settings = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    with (folder / "output").open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=settings)
    try:
        yield process
    finally:
        family = [process, *psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []
        for member in family:
            member.kill()
        process.wait()


def arguments_of(program: str, folder: Path) -> list[str]:
    return [str(PROGRAMS / f"{program}.py"), str(folder), "1000000", str(EVERY)]


@contextmanager
def elastic_job(program: str, ranks: int, folder: Path, python: str) -> Iterator[Watch]:
    command = [python, "-m", "collectives.launch", "-np", str(ranks), "--min-np", "1", python]
    with started([*command, *arguments_of(program, folder)], folder):
        yield lambda: None


@contextmanager
def torchelastic(program: str, ranks: int, folder: Path, python: str) -> Iterator[Watch]:
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    # Else ranks that are started again find the addresses of the dead in the store of the first ones.
    settings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with started([*command, "--max-restarts", "3", *arguments_of(program, folder)], folder, **settings):
        yield lambda: None


@contextmanager
def torchft(program: str, ranks: int, folder: Path, python: str) -> Iterator[Watch]:
    serve = (
        "import sys, time; from torchft.coordination import LighthouseServer as Server; server = Server('[::]:0', 1)"
    )
    serve += "; open(sys.argv[1], 'w').write(server.address() + '\\n'); time.sleep(1e6)"
    address = folder / "lighthouse"
    with ExitStack() as stack:
        stack.enter_context(started([python, "-c", serve, str(address)], folder))
        until(lambda: address.exists() and address.read_text().endswith("\n"), "torchft's lighthouse")
        replicas: list[subprocess.Popen[bytes]] = []

        def start(number: int) -> subprocess.Popen[bytes]:
            settings = {"REPLICA": str(number), "TORCHFT_LIGHTHOUSE": address.read_text().strip()}
            return stack.enter_context(started([python, *arguments_of(program, folder)], folder, **settings))

        def watch() -> None:
            for number, replica in enumerate(replicas):
                if replica.poll() is not None:
                    replicas[number] = start(number)

        replicas.extend(map(start, range(ranks)))
        yield watch


CONTESTANTS = {
    "collectives": (elastic_job, "with_collectives"),
    "collectives, retry": (elastic_job, "with_collectives_retry"),
    "torchelastic": (torchelastic, "with_torchelastic"),
    "torchft": (torchft, "with_torchft"),
}


def until(reached: Callable[[], bool], what: str, watch: Watch = lambda: None) -> None:
    """Look again and again. RuntimeError: it has not come in time."""
    end = time.monotonic() + BOUND
    while not reached():
        if time.monotonic() > end:
            raise RuntimeError(f"no {what} within {BOUND:g} s")
        watch()
        time.sleep(0.02)


def measure(name: str, ranks: int, python: str, seed: int) -> tuple[float, float]:
    """Run a training until it has survived a death; returns the seconds until the first new step, and the full size."""
    run, program = CONTESTANTS[name]
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)

        def processes() -> set[Path]:
            return set(folder.glob("steps-*"))

        with run(program, ranks, folder, python) as watch:
            until(lambda: any(step.size == ranks for step in steps(processes())), "step of all ranks", watch)
            due = max(step.number for step in steps(processes())) + draw.randrange(20, 20 + 2 * EVERY)
            until(lambda: any(step.number >= due for step in steps(processes())), f"step {due}", watch)
            before = processes()
            victim = draw.choice(sorted(pid for pid in map(process_of, before) if psutil.pid_exists(pid)))
            os.kill(victim, signal.SIGKILL)
            death = time.monotonic()
            # The step after the last may have been on its way already.
            new = 2 + max(step.number for step in steps(before) if step.time <= death)

            def full_size() -> float | None:
                """When all ranks, among them one that was started since, have done a new step together."""
                begun = next((step.time for step in steps(processes() - before)), math.inf)
                together = (step for step in steps(processes()) if step.number >= new and step.size == ranks)
                return next((step.time for step in together if step.time >= max(begun, death)), None)

            until(lambda: full_size() is not None, "step of all ranks after the death", watch)
            first = next(step.time for step in steps(processes()) if step.number >= new and step.time > death)
            return first - death, (full_size() or math.inf) - death


def process_of(file: Path) -> int:
    return int(file.name.partition("-")[2])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic_peers", description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=3, metavar="N", help="ranks (default: 3)")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="deaths of each (default: 5)")
    parser.add_argument("--torchft", metavar="PYTHON", default=sys.executable, help="a Python that can import torchft")
    parser.add_argument("--only", choices=CONTESTANTS, action="append", help="this one; may be repeated")
    args = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; medians (least to most), seconds\n")
    print("| | first new step | full size | lines |\n|---|---:|---:|---:|")
    for name in args.only or CONTESTANTS:
        python = args.torchft if name == "torchft" else sys.executable
        if subprocess.run([python, "-c", "import torchft"], capture_output=True).returncode and name == "torchft":
            print(f"| {name} | not installed | | |")
            continue
        results = [measure(name, args.ranks, python, seed) for seed in range(args.repeat)]
        cells = [
            f"{statistics.median(column):.2f} ({min(column):.2f} to {max(column):.2f})"
            for column in zip(*results, strict=True)
        ]
        count = code_lines(PROGRAMS / f"{CONTESTANTS[name][1]}.py")
        print(f"| {name} | {' | '.join(cells)} | {count} |", flush=True)


if __name__ == "__main__":
    main()
