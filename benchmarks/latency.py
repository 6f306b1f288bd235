"""Blocking small all-reduces in a tight loop: ``collectivesrun -np 2 python -m benchmarks.latency --peers mpi,gloo``.

One sample is a batch: a barrier, then the same in-place call many times over, as a training loop would make it; its
time divided by the number of calls, and the slowest rank counts. Batches of the contestants alternate. The tensor is
zero, so that a sum repeated a million times stays what it is. On a GPU each call is followed by the wait for its
stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import collectives
from benchmarks import common
from benchmarks.allreduce import ALLREDUCE
from benchmarks.peers import PEERS, prepared
from collectives.tools.bench import cli, report
from collectives.tools.bench.collective import FLOOR
from collectives.tools.bench.contest import Contest, Peer
from collectives.tools.bench.device import Memory, memories
from collectives.tools.bench.measure import Summary, alternate
from collectives.tools.bench.progress import Progress
from collectives.tools.bench.ranks import Ranks, session


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, on rank 0."""
    flags = cli.Parser(
        prog="benchmarks.latency", description="Microseconds per blocking in-place all-reduce in a tight loop."
    )
    flags.add_argument("-b", "--minbytes", type=cli.size, default="4", metavar="SIZE", help="smallest size")
    flags.add_argument("-e", "--maxbytes", type=cli.size, default="64K", metavar="SIZE", help="largest size")
    flags.add_argument(
        "-f", "--stepfactor", type=cli.whole_number(2), default=4, metavar="FACTOR", help="next size = size * FACTOR"
    )
    flags.add_count("-n", "--batches", default=21, help="timed batches per contestant")
    flags.add_count("-m", "--calls", default=200, help="calls per batch")
    cli.add_contestants(flags, PEERS)
    flags.add_json()
    options = flags.parse_args(arguments)
    cli.check_device(flags, options)
    settings = cli.Settings(
        sizes=cli.sweep(max(4, options.minbytes), max(4, options.minbytes, options.maxbytes), options.stepfactor, 0),
        iterations=options.batches,
        warmup=1,
        peers=options.peers,
        algorithms=options.algorithm,
        transports=options.transport,
        device=options.device,
        memories=options.memory,
        persistent=options.persistent,
    )
    with session() as ranks:
        places = memories(options.device, collectives.local_rank(), options.memory)
        with prepared(ALLREDUCE, settings, ranks, places[options.memory[0]]) as peers:
            results = measure(settings, options.calls, ranks, peers, places)
        content = {"batches": options.batches, "calls": options.calls, "records": results}
        common.write_results(options.json, ranks, "latency", "microseconds per call", content)


def measure(
    settings: cli.Settings, calls: int, ranks: Ranks, peers: Mapping[str, Peer], places: Mapping[str, Memory]
) -> list[dict[str, Any]]:
    """Time batches of ``calls`` calls for every size; rank 0 prints a line for each."""
    contest = Contest(ALLREDUCE, settings, ranks, peers, max(settings.sizes), places)
    names = [name for name in contest.contestants if name != FLOOR]
    ranks.say(f"# in-place float32 sum, {ranks.size} ranks; {report.mpi_library() or 'no MPI'}")
    ranks.say(
        f"# microseconds per call: median (p25 - p75) of {settings.iterations} batches of {calls} calls, the "
        f"contestants' batches in turn"
    )
    ranks.say(f"#{'size':>11}" + "".join(f"{name:>32}" for name in names))
    results: list[dict[str, Any]] = []
    with Progress(len(settings.sizes) * (settings.warmup + settings.iterations), ranks) as progress:
        for size in settings.sizes:
            case = contest.case(np.dtype(np.float32), "sum", size // 4)
            batches, reasons = common.batches(contest, names, case, calls)
            samples = (
                alternate(ranks, list(batches.values()), settings.warmup, settings.iterations, progress.tick)
                / calls
                * 1e6
            )
            summaries = {name: Summary.of(row) for name, row in zip(batches, samples, strict=True)}
            results.append(
                {
                    "size": size,
                    "unavailable": reasons,
                    "contestants": {name: times.as_dict() for name, times in summaries.items()},
                }
            )
            progress.clear()
            ranks.say(f" {size:>11}" + "".join(f"{_cell(summaries.get(name)):>32}" for name in names))
    for reason in dict.fromkeys(reason for result in results for reason in result["unavailable"].values()):
        ranks.say(f"# n/a: {reason}")
    return results


def _cell(times: Summary | None) -> str:
    return "N/A" if times is None else f"{times.median:.2f} ({times.p25:.2f} - {times.p75:.2f})"


if __name__ == "__main__":
    main()
