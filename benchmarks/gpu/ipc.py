"""All-reduces of ranks that are processes on one GPU, beside its memory's limit: ``collectivesrun -np 2 python -m
benchmarks.gpu.ipc``.

The limit: every rank's tensor is read once and written once, and all of it in one memory: ranks * 2 * bytes / the
bandwidth of a copy within the device, which one rank measures while the others are quiet. Processes on one GPU take
turns: what a turn costs is told too.

``--device cpu`` measures all-reduces of ranks on the cores of the CPU in the same way, beside MPI's with ``--peers
mpi``.
"""

from __future__ import annotations

import argparse
import importlib
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

import collectives
from benchmarks.allreduce import ALLREDUCE
from benchmarks.gpu.figures import Figure, attempt, publish, skip
from benchmarks.peers import prepared
from collectives.tools.bench.cli import Settings, size
from collectives.tools.bench.collective import IN_PLACE
from collectives.tools.bench.contest import Contest
from collectives.tools.bench.device import Cuda, Memory, memory, why_not
from collectives.tools.bench.measure import OURS
from collectives.tools.bench.ranks import Ranks, session

_BAR_FROM = 1 << 30
"""Bytes from which the bar of 60 % holds."""
_TURNS = 200
SHARED = "ranks take turns on one GPU"
"""Why bars that ranks reach on GPUs of their own are not judged."""


def main() -> None:
    flags = argparse.ArgumentParser(prog="benchmarks.gpu.ipc")
    flags.add_argument("--sizes", default="64M,256M,1G")
    flags.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    flags.add_argument("--transport", default=None)
    flags.add_argument("--peers", default="")
    flags.add_argument("--algorithm", default=None)
    flags.add_argument("--iterations", type=int, default=9)
    options = flags.parse_args()
    sizes = tuple(size(word) for word in options.sizes.split(","))
    with session() as ranks:
        problem = ranks.agree(why_not(options.device))
        if problem:
            skip(problem, ranks.rank)
        place = memory(options.device, collectives.local_rank())
        settings = Settings(
            sizes=sizes,
            iterations=options.iterations,
            warmup=2,
            algorithms=(options.algorithm,) if options.algorithm else (),
            transports=(options.transport,) if options.transport else (),
            peers=tuple(filter(None, options.peers.split(","))),
            device=options.device,
        )
        forced = "/".join(filter(None, (options.algorithm, options.transport)))
        with prepared(ALLREDUCE, settings, ranks, place) as peers:
            contest = Contest(ALLREDUCE, settings, ranks, peers, max(sizes), {"private": place})
            # Only what is asked for, in place of ours: the planner's own choice may be the very transport whose hang
            # must cost no other figures.
            contest.contestants = {
                OURS: contest.contestants[forced or OURS],
                **{name: contest.contestants[name] for name in peers},
            }
            attempt(contest.contestants[OURS](contest.case(np.dtype(np.float32), "sum", 1), IN_PLACE), ranks.rank)
            figures, records, wrong = measure(contest, forced or "the planner's choice", ranks, place)
            if ranks.rank == 0:
                publish(figures, records=records)
        if wrong:
            raise SystemExit(f"{wrong} wrong values")


def measure(
    contest: Contest, forced: str, ranks: Ranks, place: Memory
) -> tuple[list[Figure], list[dict[str, Any]], int]:
    """The figures, the records of every row, and how many values were wrong."""
    cuda = place if isinstance(place, Cuda) else None
    rate = copy_rate(cuda, ranks) if cuda else 0.0
    figures = [Figure("copy within the device, one rank alone, 512 MiB", rate / 1e9, "GB/s")] if cuda else []
    records: list[dict[str, Any]] = []
    wrong = 0
    for nbytes in contest.settings.sizes:
        ours, *others = contest.row(contest.case(np.dtype(np.float32), "sum", nbytes // 4), IN_PLACE, _nothing)
        assert ours.time is not None, ours.unavailable
        limit = ranks.size * 2 * nbytes / rate * 1e6 if cuda else None
        size_in_words = f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
        name = f"{forced}, {ranks.size} ranks, {size_in_words}"
        figures.append(Figure(f"{name}: time", ours.time.median, "us"))
        figures.append(Figure(f"{name}: busbw", ours.busbw, "GB/s"))
        if cuda and limit:
            bar = 60.0 if nbytes >= _BAR_FROM and "cuda-ipc" in forced else None
            shared = SHARED if bar and cuda.gpus < ranks.local_size else ""
            share = 100 * limit / ours.time.median
            figures.append(Figure(f"{name}: of the limit, {limit:.0f} us", share, "%", least=bar, record=shared))
        for other in others:
            if other.time is not None:
                figures.append(
                    Figure(f"{other.contestant}, {ranks.size} ranks, {size_in_words}: busbw", other.busbw, "GB/s")
                )
        records += [{**record.as_dict(), "limit": limit} for record in (ours, *others)]
        wrong += sum(record.wrong or 0 for record in (ours, *others))
    if cuda:
        figures += turns(cuda, ranks)
    return figures, records, wrong


def copy_rate(memory: Cuda, ranks: Ranks) -> float:
    """Bytes a second, read and written, of a copy within the device by rank 0 alone; the same on every rank."""
    nbytes = 512 << 20
    seconds = np.zeros(1)
    if ranks.rank == 0:
        source, target = (memory.zeros(nbytes, np.uint8) for _ in range(2))
        source.fill(1)
        copy = memory.finished(lambda: memory.copy(target, source))
        seconds[0] = np.median([_seconds(copy) for _ in range(20)][5:])
    ranks.barrier()
    return float(2 * nbytes / ranks.maximum(seconds)[0])


def turns(memory: Cuda, ranks: Ranks) -> list[Figure]:
    """What it costs that the GPU turns from one process to another, by an empty kernel here and there in turn."""
    cupy: Any = importlib.import_module("cupy")
    nothing = cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing")
    launch = memory.finished(lambda: nothing((1,), (1,), ()))
    for _ in range(20):
        launch()
    alone = np.zeros(1)
    if ranks.rank == 0:
        alone[0] = np.median([_seconds(launch) for _ in range(_TURNS)])
    ranks.barrier()
    there_and_back, message = (
        np.median([_seconds(partial(_ball, ranks, work)) for _ in range(_TURNS)]) for work in (launch, _nothing)
    )
    ranks.barrier()
    return [
        Figure("an empty kernel and the wait for it, one process alone", alone[0] * 1e6, "us"),
        Figure("the same by two processes in turn, each", (there_and_back - message) / 2 * 1e6, "us"),
        Figure("what a turn costs", ((there_and_back - message) / 2 - alone[0]) * 1e6, "us"),
    ]


def _ball(ranks: Ranks, work: Any) -> None:
    """Ranks 0 and 1 work one after the other; the others leave them alone."""
    if ranks.comm is None or ranks.rank > 1:
        return
    if ranks.rank == 0:
        work()
        ranks.comm.send(None, 1)
        ranks.comm.recv(source=1)
    else:
        ranks.comm.recv(source=0)
        work()
        ranks.comm.send(None, 0)


def _nothing() -> None:
    """A turn without work; and no progress bar."""


def _seconds(call: Any) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


if __name__ == "__main__":
    main()
