"""What waiting costs: ``collectivesrun -np 3 python -m benchmarks.waiting``.

Rank 0 is late, as a rank is that computes longer than the others. What do its peers' processors do meanwhile? Does
``synchronize(timeout=...)`` come back in time? What does the background thread cost when there is nothing to do? And,
with three ranks and more, do the others get on with their own process set?

Shares are of one core, of all threads of the process together.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from time import perf_counter, sleep
from typing import Any

import numpy as np

import collectives
from benchmarks import common
from collectives.base.errors import CollectiveTimeoutError
from collectives.tools.bench import cli, report
from collectives.tools.bench.ranks import Ranks, session

_GRACE = 0.2
"""Seconds by which rank 0 is later than a wait that is meant to time out."""
_PERIODS = 5
"""Into how many periods the time of a process set is divided."""


@dataclass(frozen=True)
class Usage:
    """What a process has used so far: the clock, its processor time in seconds, and how often it went to sleep."""

    clock: float
    processor: float
    switches: int

    @classmethod
    def now(cls) -> Usage:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return cls(perf_counter(), used.ru_utime + used.ru_stime, used.ru_nvcsw)

    def share(self, later: Usage) -> float:
        """The part of a core that was used between here and ``later``."""
        return (later.processor - self.processor) / (later.clock - self.clock)

    def wakes(self, later: Usage) -> float:
        """How often a second some thread went to sleep, and so woke, between here and ``later``."""
        return (later.switches - self.switches) / (later.clock - self.clock)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, on rank 0."""
    flags = cli.Parser(
        prog="benchmarks.waiting", description="Processor time of ranks that wait, timeouts, and idleness."
    )
    flags.add_argument(
        "-s",
        "--seconds",
        type=float,
        default=3.0,
        metavar="S",
        help="how long rank 0 is late, and how long all are idle",
    )
    flags.add_argument(
        "-t", "--timeout", type=float, default=0.5, metavar="S", help="the bound of the wait that is meant to time out"
    )
    flags.add_json()
    options = flags.parse_args(arguments)
    with session() as ranks:
        content = measure(options, ranks)
        common.write_results(options.json, ranks, "waiting", "seconds; shares of a core", content)


def measure(options: Any, ranks: Ranks) -> dict[str, Any]:
    """All measurements, one after another; rank 0 prints them."""
    tensor = np.zeros(1 << 20, np.float32)
    collectives.allreduce_(tensor, average=False, name="warm")
    content: dict[str, Any] = {}
    ranks.say(f"# {ranks.size} ranks; {report.mpi_library() or 'no MPI'}; the largest of all ranks")

    share, wakes = idle(options.seconds, ranks)
    content |= {"idle_share": share, "idle_wakes": wakes}
    ranks.say(f"# idle for {options.seconds:g} s: {100 * share:.1f} % of a core, {wakes:.0f} wake-ups a second")
    if ranks.size == 1:
        return content

    share, after = late(tensor, options.seconds, ranks)
    content |= {"waiting_share": share, "after_arrival": after}
    ranks.say(f"# in synchronize while rank 0 is {options.seconds:g} s late: {100 * share:.1f} % of a core")
    ranks.say(f"# done {1e3 * after:.1f} ms after rank 0 came (4 MiB)")

    least, most = timed_out(tensor, options.timeout, ranks)
    content |= {"timeout": options.timeout, "timed_out_after": [least, most]}
    ranks.say(
        f"# synchronize(timeout={options.timeout:g}) came back after {least:.4f} to {most:.4f} s, and a second wait "
        f"with the result"
    )

    if ranks.size > 2:
        alone, beside = set_goes_on(options.seconds, ranks)
        content |= {"set_calls": alone, "set_calls_while_late": beside}
        ranks.say(
            f"# a process set of the other {ranks.size - 1}, blocking all-reduces of 8 bytes: {alone:.0f} a second "
            f"by itself,"
        )
        ranks.say(f"# {beside:.0f} a second while an operation of all ranks waits for rank 0")
    else:
        ranks.say("# a process set that goes on beside a late rank: needs 3 ranks")
    return content


def idle(seconds: float, ranks: Ranks) -> tuple[float, float]:
    """No work for a while: (share of a core, wake-ups a second)."""
    ranks.barrier()
    before = Usage.now()
    sleep(seconds)
    after = Usage.now()
    share, wakes = ranks.maximum(np.array([before.share(after), before.wakes(after)]))
    return float(share), float(wakes)


def late(tensor: np.ndarray, seconds: float, ranks: Ranks) -> tuple[float, float]:
    """Rank 0 is late: (the peers' share of a core while they wait, seconds from its arrival until all are done)."""
    ranks.barrier()
    before = Usage.now()
    if ranks.rank == 0:
        sleep(seconds)
    came = perf_counter()
    collectives.synchronize(collectives.allreduce_async_(tensor, average=False, name="late"))
    after = Usage.now()
    share = before.share(after) if ranks.rank else 0.0
    waited = after.clock - came if ranks.rank == 0 else 0.0
    largest = ranks.maximum(np.array([share, waited]))
    return float(largest[0]), float(largest[1])


def timed_out(tensor: np.ndarray, timeout: float, ranks: Ranks) -> tuple[float, float]:
    """A wait that is too short, and then one that is not: the shortest and the longest that the first one took."""
    ranks.barrier()
    if ranks.rank == 0:
        sleep(timeout + _GRACE)
    handle = collectives.allreduce_async_(tensor, average=False, name="timed")
    took = None
    if ranks.rank:
        start = perf_counter()
        try:
            collectives.synchronize(handle, timeout=timeout)
        except CollectiveTimeoutError:
            took = perf_counter() - start
    collectives.synchronize(handle)
    problem = "synchronize came back without a CollectiveTimeoutError" if ranks.rank and took is None else None
    problem = ranks.agree(problem)
    if problem:
        raise RuntimeError(problem)
    # The shortest is the longest of the negative ones; rank 0, which has none, must never win.
    largest = ranks.maximum(np.array([-np.inf, -np.inf] if took is None else [-took, took]))
    return -float(largest[0]), float(largest[1])


def set_goes_on(seconds: float, ranks: Ranks) -> tuple[float, float]:
    """Blocking calls a second of all ranks but 0: medians of periods in which rank 0 owes nothing, or an operation."""
    others = collectives.add_process_set(list(range(1, ranks.size)))
    pending = np.zeros(1, np.float32)
    period = seconds / _PERIODS
    rates = np.zeros((_PERIODS, 2))
    for turn, owed in product(range(_PERIODS), (False, True)):
        ranks.barrier()
        if ranks.rank == 0:
            sleep(period + _GRACE)
        handle = collectives.allreduce_async_(pending, average=False, name="owed") if owed else None
        if ranks.rank:
            rates[turn, int(owed)] = _calls_a_second(period, others)
        if handle is not None:
            collectives.synchronize(handle)
    collectives.remove_process_set(others)
    alone, beside = np.median(ranks.maximum(rates), axis=0)
    return float(alone), float(beside)


def _calls_a_second(seconds: float, members: Any) -> float:
    """All-reduces for so long; each reduces whether a member goes on, so that all make the same number."""
    start = perf_counter()
    calls, going = 0, np.ones(1)
    while going[0]:
        going[0] = perf_counter() - start < seconds
        collectives.allreduce_(going, op=collectives.Min, process_set=members)
        calls += 1
    return calls / (perf_counter() - start)


if __name__ == "__main__":
    main()
