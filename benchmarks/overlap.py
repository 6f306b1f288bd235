"""Communication beside computation: ``collectivesrun -np 2 python -m benchmarks.overlap --peers mpi,gloo``.

Two questions. How much of an asynchronous all-reduce disappears behind a compute phase that gives the interpreter lock
away?

    hidden = 1 - (both - compute) / blocking

where ``both`` is the time of submit, compute, synchronize: 100 % where the communication costs nothing, 0 % where it
might as well have blocked, less where the two disturb each other. And how much longer does the all-reduce take while
the main thread runs pure Python, and so holds that lock, than while it sleeps?
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np

import collectives
from benchmarks import cli, report
from benchmarks.measure import Summary, alternate
from benchmarks.peers import PEERS, Mpi, Peer, Torch, connect
from benchmarks.plot import short_bytes
from benchmarks.ranks import Ranks
from benchmarks.record import OURS
from benchmarks.session import say, session

COMPUTE = ("device", "blas")

_PIECE = 1e-3
"""Seconds that a device is waited for at a time."""
_NAP = 1e-4
"""Seconds between two looks of a main thread that sleeps; the figure is so much too large at most."""
_SIDE = 256
"""Rows of the matrices of a compute phase: three of them stay in a core's own cache."""

Call = Callable[[], object]


@dataclass(frozen=True)
class Contestant:
    """One library's all-reduce of the same tensor: the whole call, and its beginning, which returns what waits for the
    end."""

    name: str
    blocking: Call
    start: Callable[[], Call]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, on rank 0."""
    flags = cli.Parser(
        prog="benchmarks.overlap", description="How much of an asynchronous all-reduce hides behind computation."
    )
    flags.add_argument("-b", "--bytes", type=cli.size, default="64M", metavar="SIZE", help="size of the tensor")
    flags.add_argument("-n", "--rounds", type=cli.whole_number(1), default=15, metavar="N", help="timed rounds")
    flags.add_argument(
        "-w", "--warmup", type=cli.whole_number(0), default=3, metavar="N", help="untimed rounds before them"
    )
    flags.add_argument(
        "-f", "--factor", type=float, default=2.0, metavar="FACTOR", help="compute phase = blocking time * FACTOR"
    )
    flags.add_argument(
        "--compute", type=cli.names("kind", COMPUTE), default=COMPUTE, metavar="LIST", help=", ".join(COMPUTE)
    )
    flags.add_argument(
        "--peers",
        type=cli.names("peer", PEERS["cpu"]),
        default=(),
        metavar="LIST",
        help="also measure: " + ", ".join(PEERS["cpu"]),
    )
    flags.add_argument(
        "-J", "--json", type=Path, default=None, metavar="FILE", help="write everything measured to FILE"
    )
    options = flags.parse_args(arguments)
    with session() as ranks:
        records = measure(options, ranks)
        if options.json and ranks.rank == 0:
            content = {"benchmark": "overlap", "ranks": ranks.size, "machine": report.machine(), "unit": "milliseconds"}
            report.write(options.json, {**content, "size": options.bytes, "records": records})


def measure(options: Any, ranks: Ranks) -> list[dict[str, Any]]:
    """Both measurements; rank 0 prints them."""
    tensor = np.zeros(max(1, options.bytes // 4), np.float32)
    tensor.fill(0)
    open_peers: list[Peer] = []
    contestants = [ours(tensor)]
    try:
        for name in options.peers:
            connected = connect(name, ranks)
            if isinstance(connected, str):
                say(ranks, f"# {connected}")
                continue
            open_peers.append(connected)
            if isinstance(connected, Mpi):
                contestants.append(of_mpi(connected, tensor))
            elif isinstance(connected, Torch):
                contestants.append(of_gloo(connected, tensor))
        machine = report.machine()
        where = f"{ranks.size} ranks, each on {machine['usable_cores']} of {machine['cores']} cores"
        say(ranks, f"# {short_bytes(tensor.nbytes)} float32 sum in place; {where}; milliseconds, medians")
        say(
            ranks,
            f"#{'compute':<9}{'contestant':<14}{'blocking':>10}{'compute':>10}{'both':>10}{'hidden %':>10}{'p25':>8}"
            f"{'p75':>8}",
        )
        records = [overlap(kind, contestant, options, ranks) for contestant in contestants for kind in options.compute]
        records.append(beside_python(tensor, options, ranks))
    finally:
        for peer in open_peers:
            peer.close()
    return records


def ours(tensor: np.ndarray) -> Contestant:
    """The engine."""

    def start() -> Call:
        handle = collectives.allreduce_async_(tensor, average=False, name="overlap")
        return lambda: collectives.synchronize(handle)

    return Contestant(OURS, lambda: collectives.allreduce_(tensor, average=False, name="overlap"), start)


def of_mpi(peer: Mpi, tensor: np.ndarray) -> Contestant:
    """mpi4py: Allreduce and Iallreduce."""
    comm, in_place = peer.comm, peer.in_place
    return Contestant("mpi", lambda: comm.Allreduce(in_place, tensor), lambda: comm.Iallreduce(in_place, tensor).Wait)


def of_gloo(peer: Torch, tensor: np.ndarray) -> Contestant:
    """torch.distributed over gloo, which has threads of its own."""
    tensor_of_torch = peer.torch.from_numpy(tensor)
    all_reduce = peer.distributed.all_reduce
    return Contestant(
        "gloo", lambda: all_reduce(tensor_of_torch), lambda: all_reduce(tensor_of_torch, async_op=True).wait
    )


def overlap(kind: str, contestant: Contestant, options: Any, ranks: Ranks) -> dict[str, Any]:
    """Time the communication, the computation, and both at once, in turn."""
    alone = alternate(ranks, [contestant.blocking], 1, 5, _nothing)
    seconds = float(np.median(alone)) * options.factor
    compute, limits = phase(kind, seconds, ranks)

    def both() -> None:
        wait = contestant.start()
        compute()
        wait()

    with limits:
        times = alternate(ranks, [contestant.blocking, compute, both], options.warmup, options.rounds, _nothing)
    communication, computation, together = (float(value) * 1e3 for value in np.median(times, axis=1))
    hidden = hidden_share(communication, computation, together)
    shares = Summary.of(np.array([hidden_share(*row) for row in times.T]))
    say(
        ranks,
        f" {kind:<9}{contestant.name:<14}{communication:>10.3f}{computation:>10.3f}{together:>10.3f}"
        f"{100 * hidden:>10.1f}{100 * shares.p25:>8.1f}{100 * shares.p75:>8.1f}",
    )
    return {
        "compute": kind,
        "contestant": contestant.name,
        "blocking": communication,
        "alone": computation,
        "both": together,
        "hidden": hidden,
        "hidden_by_round": shares.as_dict(),
    }


def hidden_share(communication: float, computation: float, both: float) -> float:
    """The part of the communication that costs no time: 1 where both together take as long as the computation alone."""
    return 1 - (both - computation) / communication


def phase(kind: str, seconds: float, ranks: Ranks) -> tuple[Call, AbstractContextManager[Any]]:
    """A compute phase of about so many seconds, the same work in every round and on every rank, and what it is to run
    within."""
    if kind == "device":
        return lambda: _wait_for_device(seconds), nullcontext()
    limits = _one_thread(ranks)
    left, right, product = (np.ones((_SIDE, _SIDE), np.float32) for _ in range(3))

    def multiply() -> None:
        np.matmul(left, right, out=product)

    with limits:
        piece = float(np.median(alternate(ranks, [multiply], 5, 25, _nothing)))
    times = max(1, round(seconds / piece))

    def compute() -> None:
        for _ in range(times):
            multiply()

    return compute, _one_thread(ranks)


def _wait_for_device(seconds: float) -> None:
    """Stand in for a host whose accelerator computes: poll now and then, and leave the core free."""
    end = perf_counter() + seconds
    while (left := end - perf_counter()) > 0:
        sleep(min(left, _PIECE))


def _one_thread(ranks: Ranks) -> AbstractContextManager[Any]:
    """NumPy's BLAS on one thread, as far as there is a way to tell it."""
    try:
        threadpoolctl = import_module("threadpoolctl")
    except ImportError:
        say(ranks, "# threadpoolctl is not installed: BLAS takes as many threads as the environment lets it")
        return nullcontext()
    limits: AbstractContextManager[Any] = threadpoolctl.threadpool_limits(1)
    return limits


def beside_python(tensor: np.ndarray, options: Any, ranks: Ranks) -> dict[str, Any]:
    """Time our all-reduce from its submission until it is done: the main thread blocks in it, sleeps, or runs pure
    Python."""

    def submit() -> Any:
        return collectives.allreduce_async_(tensor, average=False, name="beside")

    def waiting() -> None:
        collectives.synchronize(submit())

    def sleeping() -> None:
        handle = submit()
        while not collectives.poll(handle):
            sleep(_NAP)
        collectives.synchronize(handle)

    def running() -> None:
        handle = submit()
        while not collectives.poll(handle):
            run_python()
        collectives.synchronize(handle)

    times = alternate(ranks, [waiting, sleeping, running], options.warmup, options.rounds, _nothing)
    blocked, slept, ran = (Summary.of(row * 1e3) for row in times)
    ratio = Summary.of(times[2] / times[1])
    say(ranks, "# from submission until done, the main thread:")
    say(
        ranks,
        f"#{'in synchronize':>16}{'sleeping':>12}{'in Python':>12}{'p25':>10}{'p75':>10}{'x sleeping':>12}{'p25':>8}"
        f"{'p75':>8}",
    )
    say(
        ranks,
        f" {blocked.median:>16.3f}{slept.median:>12.3f}{ran.median:>12.3f}{ran.p25:>10.3f}{ran.p75:>10.3f}"
        f"{ratio.median:>12.2f}{ratio.p25:>8.2f}{ratio.p75:>8.2f}",
    )
    return {
        "contestant": OURS,
        "in_synchronize": blocked.as_dict(),
        "sleeping": slept.as_dict(),
        "in_python": ran.as_dict(),
        "ratio": ratio.as_dict(),
    }


def run_python(iterations: int = 2000) -> int:
    """Some 50 microseconds of plain Python, which never gives the interpreter lock away of itself."""
    total = 0
    for number in range(iterations):
        total += number & 7
    return total


def _nothing() -> None:
    """No progress is shown: a few seconds at most."""


if __name__ == "__main__":
    main()
