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
from time import perf_counter, sleep
from typing import Any

import numpy as np

import collectives
from benchmarks import common
from benchmarks.peers import PEERS, Mpi, Torch, connect_all
from collectives.tools.bench import cli
from collectives.tools.bench.measure import OURS, Summary, alternate
from collectives.tools.bench.plot import short_bytes
from collectives.tools.bench.ranks import Ranks, session

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
    """One library's all-reduce of the tensor: the whole call, and its start, which returns the wait for its end."""

    name: str
    blocking: Call
    start: Callable[[], Call]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, on rank 0."""
    flags = cli.Parser(
        prog="benchmarks.overlap", description="How much of an asynchronous all-reduce hides behind computation."
    )
    flags.add_argument("-b", "--bytes", type=cli.size, default="64M", metavar="SIZE", help="size of the tensor")
    flags.add_count("-n", "--rounds", default=15, help="timed rounds")
    flags.add_count("-w", "--warmup", default=3, help="untimed rounds before them", least=0)
    flags.add_argument(
        "-f", "--factor", type=float, default=2.0, metavar="FACTOR", help="compute phase = blocking time * FACTOR"
    )
    flags.add_names("--compute", "kind", COMPUTE, default=COMPUTE, help=", ".join(COMPUTE))
    flags.add_names("--peers", "peer", PEERS["cpu"], default=(), help="also measure: " + ", ".join(PEERS["cpu"]))
    flags.add_json()
    options = flags.parse_args(arguments)
    with session() as ranks:
        records = measure(options, ranks)
        content = {"size": options.bytes, "records": records}
        common.write_results(options.json, ranks, "overlap", "milliseconds", content)


def measure(options: Any, ranks: Ranks) -> list[dict[str, Any]]:
    """Both measurements; rank 0 prints them."""
    tensor = np.zeros(max(1, options.bytes // 4), np.float32)
    tensor.fill(0)
    with connect_all(options.peers, ranks) as peers:
        contestants = [ours(tensor)]
        for peer in peers.values():
            if isinstance(peer, Mpi):
                contestants.append(of_mpi(peer, tensor))
            elif isinstance(peer, Torch):
                contestants.append(of_gloo(peer, tensor))
        where = common.place_of(ranks)
        ranks.say(f"# {short_bytes(tensor.nbytes)} float32 sum in place; {where}; milliseconds, medians")
        ranks.say(
            f"#{'compute':<9}{'contestant':<14}{'blocking':>10}{'compute':>10}{'both':>10}{'hidden %':>10}{'p25':>8}"
            f"{'p75':>8}"
        )
        records = [overlap(kind, contestant, options, ranks) for contestant in contestants for kind in options.compute]
        records.append(beside_python(tensor, options, ranks))
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
    alone = alternate(ranks, [contestant.blocking], 1, 5)
    seconds = float(np.median(alone)) * options.factor
    compute, limits = phase(kind, seconds, ranks)

    def both() -> None:
        wait = contestant.start()
        compute()
        wait()

    with limits:
        times = alternate(ranks, [contestant.blocking, compute, both], options.warmup, options.rounds)
    communication, computation, together = (float(value) * 1e3 for value in np.median(times, axis=1))
    hidden = hidden_share(communication, computation, together)
    shares = Summary.of(np.array([hidden_share(*row) for row in times.T]))
    ranks.say(
        f" {kind:<9}{contestant.name:<14}{communication:>10.3f}{computation:>10.3f}{together:>10.3f}"
        f"{100 * hidden:>10.1f}{100 * shares.p25:>8.1f}{100 * shares.p75:>8.1f}"
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
    """A compute phase of about so many seconds, the same work in every round, and the context that it needs."""
    if kind == "device":
        return lambda: _wait_for_device(seconds), nullcontext()
    limits = _one_thread(ranks)
    left, right, product = (np.ones((_SIDE, _SIDE), np.float32) for _ in range(3))

    def multiply() -> None:
        np.matmul(left, right, out=product)

    with limits:
        piece = float(np.median(alternate(ranks, [multiply], 5, 25)))
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
        ranks.say("# threadpoolctl is not installed: BLAS takes as many threads as the environment lets it")
        return nullcontext()
    limits: AbstractContextManager[Any] = threadpoolctl.threadpool_limits(1)
    return limits


def beside_python(tensor: np.ndarray, options: Any, ranks: Ranks) -> dict[str, Any]:
    """Time our all-reduce until it is done, while the main thread waits in it, sleeps, or runs pure Python."""

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

    times = alternate(ranks, [waiting, sleeping, running], options.warmup, options.rounds)
    blocked, slept, ran = (Summary.of(row * 1e3) for row in times)
    ratio = Summary.of(times[2] / times[1])
    ranks.say("# from submission until done, the main thread:")
    ranks.say(
        f"#{'in synchronize':>16}{'sleeping':>12}{'in Python':>12}{'p25':>10}{'p75':>10}{'x sleeping':>12}{'p25':>8}"
        f"{'p75':>8}"
    )
    ranks.say(
        f" {blocked.median:>16.3f}{slept.median:>12.3f}{ran.median:>12.3f}{ran.p25:>10.3f}{ran.p75:>10.3f}"
        f"{ratio.median:>12.2f}{ratio.p25:>8.2f}{ratio.p75:>8.2f}"
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


if __name__ == "__main__":
    main()
