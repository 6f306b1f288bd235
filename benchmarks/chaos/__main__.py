"""``python -m benchmarks.chaos``: ranks of elastic jobs die, in every way at every place, and everything is checked.

    python -m benchmarks.chaos --count 300                    # about ten minutes on two cores
    python -m benchmarks.chaos --only kill/transfer,stop/ --seed 3
    python -m benchmarks.chaos --framework torch --retry
    python -m benchmarks.chaos --without-launcher             # the processes of COLLECTIVES_ELASTIC=1
    python -m benchmarks.chaos --hosts 4 --cluster TOOL       # on hosts that TOOL makes, as of benchmarks.cluster
    python -m benchmarks.chaos --scale                        # 1, 4, 2, 3 ranks by a discovery file
    python -m benchmarks.chaos --remakes 1000                 # worlds one after the other in the same processes

Every job has several deaths. After each of them the others must go on from the newest commit that one of them holds;
each element of their states must be what a run without failures has. Exit status: 0 if nothing is wrong.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.chaos import hosts as made_hosts
from benchmarks.chaos import judge
from benchmarks.chaos.deaths import COLUMNS, ENDS, GRADIENTS, HOST_ENDS, ROWS, TRIGGERED, Plan, draw
from benchmarks.chaos.frameworks import FRAMEWORKS
from benchmarks.chaos.job import ROOT, Outcome
from benchmarks.chaos.report import Result, plot, table
from benchmarks.chaos.run import run, scale
from benchmarks.chaos.training import NUMPY
from benchmarks.cluster import VARIABLE
from collectives.tools.bench import cli, report

_SIZES = (1, 4, 2, 3)
_REMAKES_PER_SECOND = 0.5
"""At the least, with two ranks."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; returns the exit status."""
    flags = cli.Parser("benchmarks.chaos", "Kill ranks of elastic jobs, and check the others.")
    flags.add_count("--count", default=300, help="deaths")
    flags.add_count("--deaths", default=10, help="deaths of a job")
    flags.add_count("--seed", default=1, least=0, help="of what is drawn")
    flags.add_count("--first", default=0, least=0, help="number of the first job; with the seed it says what is drawn")
    flags.add_count("--jobs", default=1, help="jobs at a time")
    only = f"as ROW/COLUMN, ROW/ or /COLUMN, comma-separated; rows: {', '.join((*ROWS, *ENDS, *HOST_ENDS))}"
    flags.add_argument(
        "--only", default="", metavar="LIST", help=f"{only}; columns: {', '.join((*COLUMNS, GRADIENTS))}"
    )
    flags.add_count("--hosts", default=0, least=0, help="run on so many hosts that the tool makes; 0: on this one")
    tool = f"makes hosts (default: ${VARIABLE})"
    flags.add_argument("--cluster", default=os.environ.get(VARIABLE), metavar="TOOL", help=tool)
    flags.add_argument(
        "--output", type=Path, metavar="DIR", help="for the plot, the JSON file, and output of wrong jobs"
    )
    flags.add_argument("--retry", action="store_true", help="retry steps, so that none is lost; else return to commits")
    frameworks = (NUMPY, *FRAMEWORKS)
    flags.add_argument("--framework", default=NUMPY, choices=frameworks, help="whose optimizer combines the gradients")
    flags.add_argument("--without-launcher", action="store_true", help="start the processes by hand")
    flags.add_argument("--scale", action="store_true", help=f"run one job with {', '.join(map(str, _SIZES))} ranks")
    flags.add_count("--remakes", default=0, least=0, help="make and end so many worlds in the same two processes")
    chosen = flags.parse_args(arguments)
    if chosen.hosts and not chosen.cluster:
        flags.error(f"argument --cluster: name the tool that makes hosts, or set {VARIABLE}")
    if chosen.hosts and chosen.without_launcher:
        flags.error("argument --without-launcher: the processes are on this host; leave out --hosts")
    if chosen.remakes:
        return remake(chosen.remakes)
    try:
        cells = _cells(chosen.only)
    except ValueError as error:
        flags.error(f"argument --only: {error}")
    if chosen.output:
        chosen.output.mkdir(parents=True, exist_ok=True)
    if chosen.scale:
        return _tell(Result(), scale(_SIZES), chosen.output)
    kind = dict(hosts=chosen.hosts, retry=chosen.retry, framework=chosen.framework, by_hand=chosen.without_launcher)
    plans = _plans(chosen.count, chosen.deaths, chosen.seed, chosen.first, cells, kind)
    result = Result()
    begun, lock = time.monotonic(), threading.Lock()

    def one(plan: Plan) -> None:
        with made_hosts.up(chosen.cluster, chosen.hosts) if chosen.hosts else nullcontext() as hosts:
            outcome = run(plan, hosts)
        with lock:
            _tell(result, outcome, chosen.output)

    with ThreadPoolExecutor(chosen.jobs) as pool:
        try:
            for done in [pool.submit(one, plan) for plan in plans]:
                done.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    result.seconds = time.monotonic() - begun
    print(table(result))
    if chosen.output:
        report.write(chosen.output / "chaos.json", result.document())
        print(f"# {', '.join(map(str, plot(result, chosen.output / 'chaos.png')))}")
    return int(any(result.problems.values()))


def _plans(
    count: int, per_job: int, seed: int, first: int, only: Sequence[tuple[str, str]], kind: Mapping[str, Any]
) -> Iterator[Plan]:
    """The plans of jobs that have so many deaths together."""
    number = first
    while count > 0:
        plan = draw(number, seed, min(per_job, count), only, **kind)
        yield plan
        count -= len(plan.deaths) + bool(plan.end)
        number += 1


def _tell(result: Result, outcome: Outcome, output: Path | None) -> int:
    """Add a job to the result, and print how it was; returns whether it was wrong."""
    plan = outcome.plan
    problems = judge.problems(outcome)
    times = judge.times(outcome)
    result.jobs += 1
    result.deaths += len(outcome.strikes)
    result.triggers += sum(strike.death.column in TRIGGERED for strike in outcome.strikes)
    result.times += times
    result.admissions += judge.admissions(outcome)
    result.problems[str(plan)] = problems
    deaths = ", ".join(str(strike.death) for strike in outcome.strikes)
    print(f"{plan}: {deaths or 'no deaths'}: {'WRONG' if problems else 'ok'}", flush=True)
    for problem in problems:
        print(f"  {problem}", flush=True)
    if problems and output:
        report.write(output / f"wrong-{plan.seed}-{plan.number}.json", outcome.document())
    return int(bool(problems))


def _cells(text: str) -> list[tuple[str, str]]:
    """The cells that a list names."""
    cells = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        row, _, column = word.partition("/")
        if (row and row not in (*ROWS, *ENDS, *HOST_ENDS)) or (column and column not in (*COLUMNS, GRADIENTS)):
            raise ValueError(f"expected ROW/COLUMN, got {word!r}")
        cells.append((row, column))
    return cells


def remake(number: int) -> int:
    """End and make worlds of two processes, one after the other, each by a failure under load; returns the status."""
    program = [sys.executable, "-m", "tests.trials.failed_worlds", str(number)]
    command = [sys.executable, "-m", "collectives.launch", "--no-tag", "--min-np", "2", "--max-np", "2", *program]
    begun = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, timeout=60 + number / _REMAKES_PER_SECOND, check=False)
    print(
        f"# {number} worlds in {time.monotonic() - begun:.0f} s: {'WRONG' if done.returncode else 'nothing has grown'}"
    )
    return done.returncode


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # jobs and hosts must go all the same
    sys.exit(main())
