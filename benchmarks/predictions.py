"""Measure runs between hosts that this machine makes, and predict them: ``python -m benchmarks.predictions``.

    python -m benchmarks.predictions --cluster TOOL --setup 2x10gbit,4x10gbit --json runs.json     measure, and keep
    python -m benchmarks.predictions --json runs.json                                              predict what is kept

TOOL is that of `benchmarks.cluster`. Each set-up is measured by itself, so that it fits into a quiet minute; those in
the file are kept.

The hosts share the cores of one machine, so that a collective takes as long as the fuller of two resources:

    link     the bytes of the fullest link (`collectives.simulation.rounds`), at the rate less the headers of TCP
    cores    agreement * its messages + message * the schedule's messages + byte * bytes, of a rank, times the ranks of
             the fullest core: a round waits for all of them

``agreement``, ``message`` and ``byte`` are seconds of a core, fitted to `FITTED_SIZES` of `FITTED`, and linear in the
ranks per core in between. All other times are predicted: of the other sizes, rates and numbers of hosts, and of every
step. A step computes as long as all ranks at once without communication, which is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster import VARIABLE
from benchmarks.hosts import rate
from collectives.plan.planner import Planner
from collectives.simulation import rounds
from collectives.simulation.prediction import Prediction
from collectives.simulation.steps import Settings, Workload, simulate_step
from collectives.simulation.topology import Cluster

FITTED, FITTED_SIZES = ("2x10gbit", "8x10gbit"), (4096, 1 << 18, 64 << 20)
"""The smallest, the middle and the largest, where each rank has a core of its own, and where four share one."""
_GOODPUT = 1448 / 1514
"""Bytes of data in a full TCP segment with timestamps, over those of its Ethernet frame."""
SIZES = tuple(4096 << shift for shift in range(0, 15, 2))
"""4 KiB to 64 MiB."""
MODELS = {"tiny": (256, 3), "small": (512, 6), "medium": (1024, 6), "large": (2048, 6)}
"""Perceptrons by name: width, layers; 0.8, 6, 25 and 101 MB of gradients."""
BATCH = 64
_MARK = "predictions: "
_ROOT = Path(__file__).resolve().parent.parent
_WITHIN = 140.0
_BUDGET = 0.7
"""Seconds for which a size or a model is repeated."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the set-ups that are asked for, and print all predictions; returns the exit status."""
    flags = argparse.ArgumentParser("benchmarks.predictions", description=__doc__.partition("\n")[0])
    flags.add_argument("--cluster", default=os.environ.get(VARIABLE), metavar="TOOL", help="makes the hosts")
    flags.add_argument("--setup", default="", help="hosts x rate, such as 2x10gbit,8x1gbit: measure these")
    flags.add_argument("--json", type=Path, help="where measurements are kept")
    flags.add_argument("--rank", choices=("collectives", "steps"), help=argparse.SUPPRESS)
    asked = flags.parse_args(arguments)
    if asked.rank:
        (collective_times if asked.rank == "collectives" else step_times)()
        return 0
    runs = json.loads(asked.json.read_text()) if asked.json and asked.json.exists() else {}
    for setup in filter(None, asked.setup.split(",")):
        hosts, rate = setup.split("x")
        runs[setup] = measure(asked.cluster, int(hosts), rate)
        if asked.json:
            asked.json.write_text(json.dumps(runs, indent=1))
    if set(FITTED) <= set(runs):
        report(runs)
    return 0


def measure(tool: str, hosts: int, rate: str) -> dict[str, Any]:
    """Times on so many hosts of one rank: seconds of an all-reduce by bytes, and of a step by model."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment |= {"OMP_NUM_THREADS": "1", "COLLECTIVES_LOG_LEVEL": "error"}

    def run(*command: str) -> str:
        done = subprocess.run(
            command, env=environment, cwd=_ROOT, stdin=subprocess.DEVNULL, timeout=_WITHIN, check=True,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        return done.stdout

    run(tool, "up", str(hosts), rate)
    try:
        where = ",".join(f"host{number}:1" for number in range(1, hosts + 1))
        launch = [sys.executable, "-m", "collectives.launch", "--no-tag", "--launcher", "ssh", "-np", str(hosts)]
        result: dict[str, Any] = {"cores": os.cpu_count() or 1}
        for kind in ("collectives", "steps"):
            program = [sys.executable, "-m", "benchmarks.predictions", "--rank", kind]
            shown = run(tool, "on", "host1", *launch, "-H", where, *program)
            line = next(line for line in shown.splitlines() if line.startswith(_MARK))
            result |= json.loads(line.removeprefix(_MARK))
        return result
    finally:
        run(tool, "down")


def _repeat(call: Any, agreed: Any) -> list[float]:
    """Seconds of calls for about `_BUDGET`, at least 5, the same number on all ranks."""
    call()
    began = time.perf_counter()
    call()
    count = agreed(max(5, min(300, int(_BUDGET / (time.perf_counter() - began)))))
    samples = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        samples.append(time.perf_counter() - began)
    return samples


def collective_times() -> None:
    """On each rank: time in-place all-reduces of float32; rank 0 prints."""
    import collectives

    collectives.init()
    times = {}
    for nbytes in SIZES:
        work = np.ones(nbytes // 4, np.float32)
        samples = _repeat(lambda work=work: collectives.allreduce_(work, average=True), _from_rank_0)
        times[nbytes] = float(np.median(samples))
    if collectives.rank() == 0:
        print(_MARK + json.dumps({"collectives": times}), flush=True)
    collectives.shutdown()


def _from_rank_0(value: int) -> int:
    import collectives

    return int(collectives.broadcast(np.array([value]), root_rank=0)[0])


def step_times() -> None:
    """On each rank: time steps of torch models; rank 0 prints. ``compute``: all ranks at once, no communication."""
    import torch

    import collectives.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    steps, compute = {}, {}
    for name, (width, depth) in MODELS.items():
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        inputs = torch.ones(BATCH, width)

        def step(model: Any = model, inputs: Any = inputs, by: Any = optimizer) -> None:
            by.zero_grad()
            model(inputs).square().mean().backward()
            by.step()

        hvd.barrier()
        alone = _repeat(step, _from_rank_0)
        every = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        samples = _repeat(partial(step, by=every), _from_rank_0)
        steps[name], compute[name] = float(np.median(samples)), float(np.median(alone))
    if hvd.rank() == 0:
        print(_MARK + json.dumps({"steps": steps, "compute": compute}), flush=True)
    hvd.shutdown()


class Machine:
    """Predicts collectives of one set-up: a `collectives.simulation.prediction.Predictor` whose ranks share cores.

    Args:
        setup: as 4x10gbit; ``cores``: of the machine.
        constants: seconds of a core: of a message of the agreement, of one of the schedule, of a byte.
    """

    def __init__(self, setup: str, cores: int, constants: np.ndarray) -> None:
        hosts, bits = setup.split("x")
        self.cluster = Cluster(int(hosts), 1, 0.0, rate(bits) / 8 * _GOODPUT)
        self._planner = Planner(self.cluster.placement())
        self._ranks, self._constants = -(-int(hosts) // cores), constants

    def work(self, nbytes: int) -> tuple[np.ndarray, float]:
        """What the fullest core does by constant: messages of the agreement, of the schedule, bytes; and seconds of the
        link."""
        size = self.cluster.ranks
        choice = self._planner.choose("allreduce", nbytes)
        network = self.cluster.network()
        moved = rounds.estimate("allreduce", choice.algorithm, nbytes, network, choice.block_bytes or None)
        messages = 0 if choice.inline else moved.messages / size
        return self._ranks * np.array([(size - 1).bit_length(), messages, moved.bytes_out]), moved.transfer

    def predict(self, collective: str, nbytes: int, algorithm: str | None = None) -> Prediction:
        """As `collectives.simulation.prediction.Predictor.predict`, of an all-reduce."""
        work, seconds_of_link = self.work(nbytes)
        seconds = max(seconds_of_link, float(work @ self._constants))
        return Prediction(collective, algorithm or "", nbytes, seconds, 0.0)

    def step(self, gradients: tuple[int, ...], compute: float) -> float:
        """Seconds of a step: no core is free to communicate while all compute, so that nothing overlaps. Tensors of
        256 KiB and more are reduced one by one between hosts."""
        settings = Settings(fusion=1 << 18, overlap=False)
        return simulate_step(Workload(gradients, compute), self, settings).step  # type: ignore[arg-type]


def fit(runs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The constants of each set-up: least squares of relative errors at the fitted points, linear in ranks per core."""
    known = {}
    for setup in FITTED:
        run, machine = runs[setup], Machine(setup, runs[setup]["cores"], np.zeros(3))
        hosts = machine.cluster.ranks
        times = np.array([run["collectives"][str(size)] for size in FITTED_SIZES])
        rows = np.array([machine.work(size)[0] for size in FITTED_SIZES]) / times[:, None]
        known[hosts] = np.maximum(np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)[0], 0)
    few, many = sorted(known)
    shares = {setup: (int(setup.split("x")[0]) - few) / (many - few) for setup in runs}
    return {setup: known[few] + share * (known[many] - known[few]) for setup, share in shares.items()}


def report(runs: Mapping[str, Any]) -> None:
    """Print every measured time, what is predicted, and by how much the prediction differs."""
    constants = fit(runs)
    errors: dict[str, list[float]] = {"collectives": [], "steps": []}
    print(f"{'set-up':10}{'what':>12}{'measured ms':>14}{'predicted ms':>14}{'error':>9}")
    for setup, run in runs.items():
        machine = Machine(setup, run["cores"], constants[setup])
        agreement, message, byte = constants[setup]
        print(
            f"# {setup}: {agreement * 1e6:.1f} us agreement, {message * 1e6:.1f} us message, {byte * 1e9:.2f} ns byte"
        )
        rows = [
            ("collectives", str(size), run["collectives"][str(size)], machine.predict("allreduce", size).seconds)
            for size in SIZES
        ]
        for name, (width, depth) in MODELS.items():
            gradients = tuple(nbytes for _ in range(depth) for nbytes in (4 * width, 4 * width * width))
            rows.append(("steps", name, run["steps"][name], machine.step(gradients, run["compute"][name])))
        for kind, what, measured, predicted in rows:
            fitted = kind == "collectives" and setup in FITTED and int(what) in FITTED_SIZES
            error = predicted / measured - 1
            if not fitted:
                errors[kind].append(abs(error))
            print(
                f"{setup:10}{what:>12}{1e3 * measured:14.3f}{1e3 * predicted:14.3f}{error:+9.1%}"
                + (" fitted" if fitted else "")
            )
    for kind, values in errors.items():
        within = sum(error <= 0.1 for error in values)
        print(f"# {kind}: {len(values)} predicted, {within} within 10 %, median error {np.median(values):.1%}")


if __name__ == "__main__":
    sys.exit(main())
