"""Scaling of any command that prints a throughput: more ranks with fixed work (strong), with fixed work per rank
(weak), or a sweep.

    python -m benchmarks.scaling strong -np 1,2,4 --total 64 --gradient-bytes 100M -- python train.py --batch-size
    {batch} python -m benchmarks.scaling weak -np 1,2,4 --batch 32 --pattern 'images/sec: ([\\d.]+)' -- python train.py
    python -m benchmarks.scaling sweep -np 1,2 --values 8,16,32 --batch value -- python train.py --batch-size {value}

Starts the ranks by itself, with ``collectivesrun``. The configurations take turns, run by run. What is behind the
figures stands in `benchmarks.scaling_model`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import scaling_communication
from benchmarks.scaling_launch import Interruption, launcher, names_hosts, run
from benchmarks.scaling_model import Point
from benchmarks.scaling_options import Settings, parser, settings_of
from benchmarks.scaling_plan import Case, doubts, order
from benchmarks.scaling_report import analyse, document, text
from benchmarks.scaling_throughput import read
from collectives.launch.cli import cores
from collectives.launch.mpirun import find
from collectives.tools.bench import report

ROOT = Path(__file__).resolve().parent.parent


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a study; ends with status 1 if a run has failed, and with 2 if it cannot be what is meant."""
    settings, plan = settings_of(parser(), list(sys.argv[1:] if arguments is None else arguments))
    for doubt in (
        *doubts(settings.mode, settings.command),
        *shared_cores(settings, plan, cores()),
        *others(load(), cores()),
    ):
        print(f"benchmarks.scaling: warning: {doubt}", file=sys.stderr, flush=True)
    # A batch system that takes the machine back leaves time for the table of what there is.
    study = Runs(settings, plan, Interruption())
    try:
        study.run()
    except KeyboardInterrupt:
        print("benchmarks.scaling: interrupted; what follows is of the runs until then", file=sys.stderr)
        study.failed = True
    sys.exit(study.finish())


def shared_cores(settings: Settings, plan: Sequence[Case], have: int) -> list[str]:
    """A warning where ranks must share this host's cores, of which there are ``have``."""
    most = max(case.ranks for case in plan)
    if names_hosts(settings.launch) or most <= have:
        return []
    return [
        f"{most} ranks on {have} cores: the machine is oversubscribed; what is found there is not what {most} cores "
        f"would do"
    ]


def load() -> float:
    """How many processes have wanted a core of this host during the last minute; 0 where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def others(wanted: float, have: int) -> list[str]:
    """A warning where other programs run on this host already."""
    if wanted < max(0.5, 0.25 * have):
        return []
    return [
        f"something else is running: {wanted:.1f} of {have} cores are wanted already; expect unsteady figures, or wait"
    ]


class Runs:
    """The runs, one after the other, and what they found."""

    def __init__(self, settings: Settings, plan: Sequence[Case], interruption: Interruption) -> None:
        self.settings, self.plan, self.interruption = settings, plan, interruption
        self.logs = settings.output / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.rates: list[list[float]] = [[] for _ in plan]
        self.costs: dict[tuple[int, int], list[float]] = {}
        self.unit = settings.unit
        self.records: list[dict[str, Any]] = []
        self.broken: set[object] = set()
        """Configurations of which a run has failed: they are not tried again."""
        self.failed = False

    def run(self) -> None:
        """Every configuration once per repeat, and its communication where it is known how much there is."""
        for repeat, indices in enumerate(order(len(self.plan), self.settings.repeats), 1):
            for index in indices:
                if index not in self.broken:
                    self._throughput(index, repeat)
            wanted = [self._cost_of(index) for index in indices]
            for key in dict.fromkeys(key for key in wanted if key and key not in self.broken):
                self._communication(key, repeat)

    def _throughput(self, index: int, repeat: int) -> None:
        case, settings = self.plan[index], self.settings

        def rate_in(output: str, record: dict[str, Any]) -> float:
            reading = read(output, settings.patterns)
            rate = reading.rate(settings.take, case.ranks, case.work)
            self.unit = self.unit or reading.unit
            record["figures_are"] = "seconds per step" if reading.times else "items per second"
            record |= {"figures": reading.figures, "per_rank": reading.per_rank, "pattern": reading.pattern}
            record["rate"] = rate
            return rate

        label = f"{case.label}, run {repeat}"
        log = f"{settings.mode}-{index + 1}-{case.slug}-run-{repeat}.txt"
        command = launcher(case.ranks, settings.launch, case.command)
        told = {"kind": "throughput", "repeat": repeat, "ranks": case.ranks, "value": case.value, "work": case.work}
        outcome = self._run(index, label, log, command, rate_in, {**told, "load": load()})
        if outcome is not None:
            rate, seconds = outcome
            self.rates[index].append(rate)
            print(f"# {label}: {rate:,.1f} {self.unit or 'items'}/s ({seconds:.1f} s)", flush=True)

    def _cost_of(self, index: int) -> tuple[int, int] | None:
        """(ranks, bytes) of a configuration's all-reduce; None where there is none, or no throughput to go with it."""
        case = self.plan[index]
        if case.ranks > 1 and case.gradients is not None and self.rates[index]:
            return case.ranks, case.gradients
        return None

    def _communication(self, key: tuple[int, int], repeat: int) -> None:
        (ranks, nbytes), settings = key, self.settings
        model = settings.gradient_model
        what = ["--model", model] if model else ["--bytes", str(nbytes), "--tensors", str(settings.gradient_tensors)]
        program = [sys.executable, "-m", scaling_communication.__name__, *what, "--device", settings.gradient_device]

        def cost_in(output: str, record: dict[str, Any]) -> float:
            record["seconds_per_step"] = cost = scaling_communication.milliseconds(output) / 1e3
            return cost

        # The ranks import the benchmarks from where this process has, whatever folder they are started in.
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        label = f"communication of {nbytes} bytes, {ranks} ranks, run {repeat}"
        log = f"communication-{nbytes}-bytes-{ranks}-ranks-run-{repeat}.txt"
        command = launcher(ranks, settings.launch, program)
        told = {"kind": "communication", "repeat": repeat, "ranks": ranks, "bytes": nbytes}
        outcome = self._run(key, label, log, command, cost_in, told, {"PYTHONPATH": path})
        if outcome is not None:
            cost, seconds = outcome
            self.costs.setdefault(key, []).append(cost)
            print(f"# {label}: {cost * 1e3:.3f} ms a step ({seconds:.1f} s)", flush=True)

    def _run(
        self,
        key: object,
        label: str,
        log: str,
        command: Sequence[str],
        figure_in: Callable[[str, dict[str, Any]], float],
        told: dict[str, Any],
        environment: dict[str, str] | None = None,
    ) -> tuple[float, float] | None:
        """Run a command; its figure and its seconds, or None where it has failed, which is shown and not tried again.

        ``figure_in`` finds the figure in the output, and adds to the record that the JSON file has of the run.
        """
        outcome = run(command, self.logs / log, self.settings.timeout, environment, self.interruption)
        ended = {"status": outcome.status, "wall_seconds": outcome.seconds, "log": str(outcome.log)}
        record = {**told, "command": list(outcome.command), **ended}
        self.records.append(record)
        problem = outcome.problem
        if not problem:
            try:
                return figure_in(outcome.output, record), outcome.seconds
            except ValueError as error:
                problem = str(error)
        record["problem"] = problem
        self.failed = True
        self.broken.add(key)
        print(f"benchmarks.scaling: error: {label}: {problem}\n{outcome.tail()}\n", file=sys.stderr, flush=True)
        return None

    def points(self) -> list[Point]:
        """What is known of the configurations of which any run has succeeded."""
        here = not names_hosts(self.settings.launch)
        return [
            Point(
                ranks=case.ranks,
                rates=tuple(rates),
                work=case.work,
                value=case.value,
                communications=tuple(self.costs.get((case.ranks, case.gradients or 0), ())),
                best=self.settings.best,
                oversubscribed=here and case.ranks > cores(),
            )
            for case, rates in zip(self.plan, self.rates, strict=True)
            if rates
        ]

    def finish(self) -> int:
        """The table and the files, of whatever could be measured; returns the exit status."""
        settings, points = self.settings, self.points()
        if not points:
            print("benchmarks.scaling: error: no run has given a throughput", file=sys.stderr)
            return 1
        study = analyse(
            settings.mode, settings.command, self.unit or "items", settings.work.divided, points, settings.predict
        )
        print(text(study, settings.repeats))
        content = document(study, settings.as_dict(), self.records)
        mpi = find()
        content["machine"]["mpi"] = f"{mpi.vendor.value} {mpi.version}" if mpi else ""
        written = [settings.output / "scaling.json"]
        report.write(written[0], content)
        try:
            from benchmarks.scaling_plot import plot

            written += plot(content, settings.output / "scaling.png")
        except ImportError as error:
            print(f"benchmarks.scaling: no plot: {error}; pip install matplotlib", file=sys.stderr)
        print(f"# written: {', '.join(map(str, written))}; the runs' output: {self.logs}")
        return 1 if self.failed else 0


if __name__ == "__main__":
    main()
