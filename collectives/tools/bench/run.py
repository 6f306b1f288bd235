"""One benchmark from the command line to the exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product

import numpy as np

import collectives
from collectives.tools.bench import cli, report, table
from collectives.tools.bench.collective import IN_PLACE, OUT_OF_PLACE, Collective
from collectives.tools.bench.contest import Contest, Peer
from collectives.tools.bench.device import Memory, check_memory, memories
from collectives.tools.bench.measure import OURS, Record
from collectives.tools.bench.progress import Progress
from collectives.tools.bench.ranks import Ranks, launchers_variable, session

Row = tuple[np.dtype, str, int, int]
"""(dtype, operation, count, size in bytes)"""


Connect = Callable[[cli.Settings, Ranks, Memory], AbstractContextManager[Mapping[str, Peer]]]
"""Starts the peers that the settings name, on all ranks; those that could be started, by name."""


def main(
    program: str,
    collective: Collective,
    arguments: Sequence[str] | None = None,
    peers: cli.Peers = cli.NO_PEERS,
    connect: Connect = lambda *_: nullcontext({}),
    size: int | None = None,
) -> int:
    """Be a rank of a benchmark, and return its exit status: 1 after wrong values, 2 after wrong arguments.

    Args:
        program: its name in messages.
        peers, connect: the other libraries that can take part, and how they are started.
        size: the number of ranks that was asked for.
    """
    settings = cli.settings(cli.parser(program, collective, peers), arguments)
    with session() as ranks:
        if size not in (None, ranks.size):
            if ranks.rank == 0:
                variable = launchers_variable(os.environ)
                print(
                    f"{program}: error: expected -np {ranks.size}, got -np {size}: a launcher has already started the "
                    f"ranks ({variable} is set); leave out -np [U5]",
                    file=sys.stderr,
                    flush=True,
                )
            return 2
        return run(program, collective, settings, ranks, connect)


def run(program: str, collective: Collective, settings: cli.Settings, ranks: Ranks, connect: Connect) -> int:
    """Measure and print; returns the exit status, the same on every rank."""
    rows = rows_of(collective, settings, ranks.size)
    largest = max(size for *_, size in rows)
    places = memories(settings.device, collectives.local_rank(), settings.memories)
    place = places[settings.memories[0]]
    problem = ranks.agree(problem_with(settings, ranks, largest, place.available()))
    if problem:
        if ranks.rank == 0:
            print(f"{program}: error: {problem} [U6]", file=sys.stderr, flush=True)
        return 2
    records: list[Record] = []
    with connect(settings, ranks, place) as peers:
        ranks.say(_preamble(collective, ranks, settings))
        ranks.say(table.header(collective, settings.iterations, settings.warmup))
        contest = Contest(collective, settings, ranks, peers, largest, places)
        rounds = len(rows) * len(collective.modes) * (settings.warmup + settings.iterations)
        with Progress(rounds, ranks) as progress:
            for dtype, op, count, _ in rows:
                case = contest.case(dtype, op, count)
                ours: dict[str, Record] = {}
                for mode in collective.modes:
                    row = contest.row(case, mode, progress.tick)
                    records += row
                    ours |= {record.mode: record for record in row if record.contestant == OURS}
                progress.clear()
                ranks.say(table.row(ours.get(OUT_OF_PLACE), ours.get(IN_PLACE)))
    if ranks.rank == 0:
        _finish(collective, settings, ranks, records)
    return 1 if any(record.wrong for record in records) else 0


def rows_of(collective: Collective, settings: cli.Settings, ranks: int) -> list[Row]:
    """The rows of the table. Sizes that round to the same number of elements make one row."""
    rows: dict[tuple[np.dtype, str, int], int] = {}
    for name, op, asked in product(settings.dtypes, settings.ops, settings.sizes):
        dtype = cli.find_dtype(name)
        count = collective.count(asked, dtype.itemsize, ranks)
        rows[dtype, op, count] = count * collective.parts(ranks) * dtype.itemsize
    return [(*key, size) for key, size in rows.items()]


def problem_with(settings: cli.Settings, ranks: Ranks, largest: int, available: int | None) -> str | None:
    """What only a started run can find out: too few ranks for the root, too little memory."""
    if settings.root >= ranks.size:
        return f"argument -r/--root: {settings.root} is not a rank; there are {ranks.size}, numbered from 0"
    return check_memory(
        largest, bool(settings.peers), ranks.local_size, available, len({"private", *settings.memories})
    )


def _finish(collective: Collective, settings: cli.Settings, ranks: Ranks, records: list[Record]) -> None:
    """What follows the rows: who could not take part, the comparison, the closing lines, and the files."""
    for reason in dict.fromkeys(record.unavailable for record in records if record.unavailable):
        ranks.say(f"# n/a: {reason}")
    if len({record.contestant for record in records}) > 2:
        ranks.say(table.comparison(records))
    ranks.say(table.closing(records))
    content = report.document(collective, ranks.size, settings, records)
    if settings.json:
        report.write(settings.json, content)
        ranks.say(f"# written: {settings.json}")
    if settings.plot:
        from collectives.tools.bench.plot import plot

        ranks.say(f"# written: {', '.join(str(path) for path in plot(content, settings.plot))}")


def _preamble(collective: Collective, ranks: Ranks, settings: cli.Settings) -> str:
    machine = report.machine()
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items() if name != "collectives")
    return (
        f"# collectives {machine['packages'].get('collectives', '(not installed)')}, {collective.name}, {ranks.size} "
        f"ranks, "
        f"{ranks.local_size} on this host with {machine['usable_cores']} cores of {machine['processor']}\n"
        f"# {machine['mpi'] or 'no MPI'}, python {machine['python']}, {versions}\n"
        f"# minbytes {settings.sizes[0]} maxbytes {settings.sizes[-1]} warmup iters {settings.warmup} iters "
        f"{settings.iterations} "
        f"validation {int(settings.check)} device {settings.device} memory {','.join(settings.memories)}"
        + (f"; {settings.evict} bytes written before each call" if settings.evict else "")
    )
