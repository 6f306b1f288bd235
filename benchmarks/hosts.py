"""All-reduces between hosts: ``collectivesrun -np 2 -H node1:1,node2:1 python -m benchmarks.hosts --rate 10gbit``.

A table of medians: the engine as it comes and over each network, mpi4py's own Allreduce, gloo, and plain sockets, in
turn. One sample is a batch of in-place calls after a barrier, as in `benchmarks.latency`: many calls of a small tensor,
one of a large one. `benchmarks.cluster` runs it on hosts that it makes on one machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np

from benchmarks import common
from benchmarks.allreduce import ALLREDUCE
from benchmarks.peers import prepared
from collectives.base.config import NETWORKS, Config
from collectives.base.reduce_op import Op
from collectives.tools.bench import cli, report
from collectives.tools.bench.collective import Case, Result
from collectives.tools.bench.contest import Contest, Prepare
from collectives.tools.bench.measure import OURS, Summary, alternate
from collectives.tools.bench.ranks import session
from collectives.worlds import connect
from collectives.worlds.world import World

SIZES = "4,64K,1M,4M,16M,64M"
PEERS = ("mpi", "gloo", "sockets")

_BATCH_BYTES = 1 << 20
_MOST_CALLS = 100
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_WIDTH = 30


def sizes(text: str) -> tuple[int, ...]:
    """Comma-separated numbers of bytes, of float32 each."""
    return tuple(max(1, cli.size(word) // 4) * 4 for word in text.split(","))


def rate(text: str) -> float:
    """Bits a second of a link, as tc writes it: 10gbit, 100mbit; raises ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", text.lower())
    if match is None:
        raise ValueError(f"expected a rate such as 10gbit, got {text!r}")
    return float(match[1]) * _UNITS[match[2]]


def line_rate(nbytes: int, hosts: int, bits: float) -> float:
    """Microseconds that an all-reduce's bytes take on each host's link: 2(H-1)/H * S / rate, both ways at once."""
    return 2 * (hosts - 1) / hosts * nbytes * 8 / bits * 1e6


def calls_of(nbytes: int) -> int:
    """Calls in a batch."""
    return max(1, min(_MOST_CALLS, _BATCH_BYTES // nbytes))


def add_contestants(flags: cli.Parser) -> None:
    """The flags that `benchmarks.cluster` hands on."""
    flags.add_count("-n", "--batches", default=11, help="timed batches")
    flags.add_names("--peers", "peer", PEERS, default=",".join(PEERS), help="also time these")
    flags.add_names(
        "--network", "network", NETWORKS, default=(), help=f"also time ours over these: {', '.join(NETWORKS)}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, on rank 0."""
    flags = cli.Parser("benchmarks.hosts", "Microseconds per in-place float32 all-reduce between hosts.")
    flags.add_argument("-b", "--bytes", type=sizes, default=SIZES, metavar="LIST", help="sizes of the tensor")
    flags.add_argument("--rate", type=rate, metavar="RATE", help="of each host's link, such as 10gbit")
    add_contestants(flags)
    options = flags.parse_args(arguments)
    settings = cli.Settings(
        sizes=options.bytes,
        iterations=options.batches,
        warmup=1,
        peers=options.peers,
    )
    with session() as ranks, ExitStack() as stack:
        if ranks.size == 1:
            ranks.say("# one rank alone has nobody to send to")
            return
        ours: dict[str, Prepare] = {
            f"ours, {network}": stack.enter_context(_over(network)) for network in options.network
        }
        peers = stack.enter_context(prepared(ALLREDUCE, settings, ranks))
        contest = Contest(ALLREDUCE, settings, ranks, peers, max(options.bytes))
        contest.contestants = {
            OURS: contest.contestants[OURS],
            **ours,
            **{name: contest.contestants[name] for name in peers},
        }
        measure(contest, options.rate)


@contextmanager
def _over(network: str) -> Iterator[Prepare]:
    """A contestant: ours in a world of the same ranks whose messages go over ``network``."""
    config = replace(Config.from_environment(), network=network)
    world = World(connect.connect(None, config, lambda: None), config)

    def prepare(case: Case, mode: str) -> Result:
        return lambda: world.allreduce_(case.work, op=Op.SUM)

    try:
        yield prepare
    finally:
        world.shutdown()


def measure(contest: Contest, bits: float | None) -> None:
    """Time every size; rank 0 prints a line for each. ``bits``: what each host's link carries in a second."""
    ranks, settings, names = contest.ranks, contest.settings, list(contest.contestants)
    hosts = len(set(ranks.gather(common.address(ranks))))
    ranks.say(
        f"# {hosts} hosts, {ranks.size} ranks; {report.mpi_library() or 'no MPI'}; in-place float32 sum, microseconds "
        f"per call: median of {settings.iterations} batches in turn\n"
        f"# (x: the median of a contestant's time divided by ours in the same round; above 1: ours is quicker)\n"
        + header(names)
    )
    reasons: dict[str, None] = {}
    for size in settings.sizes:
        case = contest.case(np.dtype(np.float32), "sum", size // 4)
        batches, missing = common.batches(contest, names, case, calls_of(size))
        reasons |= dict.fromkeys(missing.values())
        samples = alternate(ranks, list(batches.values()), settings.warmup, settings.iterations)
        times = dict(zip(batches, samples * 1e6 / calls_of(size), strict=True))
        limit = line_rate(size, hosts, bits) if bits else None
        ranks.say(row(size, names, times, limit))
    for reason in reasons:
        ranks.say(f"# n/a: {reason}")


def header(names: Sequence[str]) -> str:
    """The line above the rows."""
    return f"#{'bytes':>11}" + "".join(f"{name:>{_WIDTH}}" for name in names) + f"{'line rate':>12}"


def row(size: int, names: Sequence[str], times: Mapping[str, np.ndarray], limit: float | None) -> str:
    """A line: each contestant's median with its quartiles, and how often ours it takes; microseconds."""
    cells = []
    for name in names:
        if name not in times:
            cells.append("N/A")
            continue
        summary = Summary.of(times[name])
        text = f"{summary.median:.0f} ({summary.p25:.0f}-{summary.p75:.0f})"
        if OURS in times and name != OURS:
            text += f" {Summary.of(times[name] / times[OURS]).median:.2f}x"
        cells.append(text)
    shown = "N/A" if limit is None else f"{limit:.0f}"
    return f" {size:>11}" + "".join(f"{cell:>{_WIDTH}}" for cell in cells) + f"{shown:>12}"


if __name__ == "__main__":
    main()
