"""What the engine's benchmarks share beyond `collectives.tools.bench`."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import collectives
from collectives.tools.bench import report
from collectives.tools.bench.collective import IN_PLACE, Case, Result
from collectives.tools.bench.contest import Contest
from collectives.tools.bench.device import HOST, Memory
from collectives.tools.bench.measure import Call, alternate
from collectives.tools.bench.progress import Progress
from collectives.tools.bench.ranks import Ranks

Batch = Callable[[], None]


def time_in_turn(
    ranks: Ranks, calls: Mapping[str, Call], warmup: int, rounds: int, memory: Memory = HOST
) -> dict[str, np.ndarray]:
    """Seconds of every call in every round, by name; see `alternate`."""
    with Progress(warmup + rounds, ranks) as progress:
        seconds = alternate(ranks, list(calls.values()), warmup, rounds, progress.tick, memory=memory)
    return dict(zip(calls, seconds, strict=True))


def counters_per_step(ranks: Ranks, step: Call, steps: int = 5) -> dict[str, float]:
    """How far each counter of this rank's engine rises in a step, the mean over ``steps``."""
    ranks.barrier()
    before = asdict(collectives.world().statistics)
    for _ in range(steps):
        step()
        ranks.barrier()
    return {name: (value - before[name]) / steps for name, value in asdict(collectives.world().statistics).items()}


def batches(contest: Contest, names: Iterable[str], case: Case, calls: int) -> tuple[dict[str, Batch], dict[str, str]]:
    """Return ``calls`` in-place calls by each contestant, of a tensor of zeros, and why others cannot take part."""
    batches: dict[str, Batch] = {}
    reasons: dict[str, str] = {}
    for name in names:
        outcome = contest.attempt(name, case, IN_PLACE)
        if isinstance(outcome, str):
            reasons[name] = outcome
        elif outcome[1]:
            reasons[name] = f"{name}: {outcome[1]} wrong values at {case.nbytes} bytes"
        else:
            batches[name] = _batch(contest.memory.finished(outcome[0]), calls)
    for name in batches:
        # Sums of zeros stay what they are.
        contest.case(case.dtype, case.op, case.count, name).work.fill(0)
    return batches, reasons


def _batch(call: Result, calls: int) -> Batch:
    def batch() -> None:
        for _ in range(calls):
            call()

    return batch


def address(ranks: Ranks) -> str:
    """An address of this host at which all ranks reach it."""
    return "127.0.0.1" if ranks.local_size == ranks.size else socket.gethostbyname(socket.gethostname())


def quartiles(summary: Mapping[str, float] | None, digits: int = 3, first: int = 10, others: int = 10) -> str:
    """Three cells of a table, ``first`` and ``others`` wide: a summary's median, and its quartiles; dashes for None."""
    cells = ["-"] * 3 if summary is None else [f"{summary[key]:.{digits}f}" for key in ("median", "p25", "p75")]
    return f"{cells[0]:>{first}}{cells[1]:>{others}}{cells[2]:>{others}}"


def write_results(path: Path | None, ranks: Ranks, benchmark: str, unit: str, content: dict[str, Any]) -> None:
    """Write what an engine's benchmark has measured, on rank 0; None: no file is asked for."""
    if path is not None and ranks.rank == 0:
        head = {"benchmark": benchmark, "ranks": ranks.size, "machine": report.machine(), "unit": unit}
        report.write(path, {**head, **content})


def place_of(ranks: Ranks) -> str:
    """How many ranks there are, and how many cores each may use."""
    here = report.machine()
    return f"{ranks.size} ranks, each on {here['usable_cores']} of {here['cores']} cores"
