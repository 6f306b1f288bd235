"""A 4-byte all-reduce on the device: ``collectivesrun -np 2 python -m benchmarks.gpu.latency --transport
auto,cuda-ipc,host``.

Timed from the call to the end of the wait for its stream. The transports take turns call by call; ``auto`` is the
planner's choice. ``--device cpu`` does the same with memory of the host.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

import collectives
from benchmarks.gpu.figures import Figure, publish, skip
from benchmarks.gpu.ipc import SHARED
from collectives.base.errors import TransportError
from collectives.tools.bench.device import Cuda, Memory, memory, why_not
from collectives.tools.bench.ranks import Ranks, session

_WARMUP, _ROUNDS = 50, 1000


def main() -> None:
    flags = argparse.ArgumentParser(prog="benchmarks.gpu.latency")
    flags.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    flags.add_argument("--transport", default="auto,cuda-ipc,host")
    options = flags.parse_args()
    with session() as ranks:
        problem = ranks.agree(why_not(options.device))
        if problem:
            skip(problem, ranks.rank)
        place = memory(options.device, collectives.local_rank())
        tensor = place.zeros(1, np.float32)
        calls: dict[str, Callable[[], Any]] = {}
        reasons: dict[str, str] = {}
        for name in options.transport.split(","):
            call = _call(tensor, name)
            try:
                call()
                calls[name] = call
            except TransportError as error:
                reasons[name] = str(error)
        if not calls:
            skip("; ".join(reasons.values()), ranks.rank)
        issued, whole = measure(ranks, list(calls.values()), place)
        shared = SHARED if isinstance(place, Cuda) and place.gpus < ranks.local_size else ""
        bar = (None, 60, shared) if isinstance(place, Cuda) else ()
        figures = []
        for name, until_issued, until_done in zip(calls, issued, whole, strict=True):
            what = f"4 bytes, {ranks.size} ranks, {name}"
            figures += [
                Figure(f"{what}: median", float(np.median(until_done)), "us", *(bar if name == "auto" else ())),
                Figure(f"{what}: 95th percentile", float(np.percentile(until_done, 95)), "us"),
                Figure(f"{what}: until the call returns, median", float(np.median(until_issued)), "us"),
            ]
        algorithm, transport = _choice(tensor.nbytes)
        if ranks.rank == 0:
            publish(figures, unavailable=reasons, choice=[algorithm, transport])
            print(f"the planner's choice for {tensor.nbytes} bytes: {algorithm} over {transport}")


def _choice(nbytes: int) -> tuple[str, str]:
    """The algorithm and the transport that the planner has chosen."""
    world = collectives.world()
    if world._devices is None:
        host_choice = world.planner.choose("allreduce", nbytes)
        return host_choice.algorithm, str(host_choice.medium.value)
    choice = world._devices.accelerator.connection.planner.choose("allreduce", nbytes, native=True)
    return choice.algorithm, choice.transport


def _call(tensor: Any, transport: str) -> Callable[[], Any]:
    forced: dict[str, Any] = {} if transport == "auto" else {"transport": transport}
    return lambda: collectives.allreduce_(tensor, average=False, **forced)


def measure(ranks: Ranks, calls: list[Callable[[], Any]], place: Memory) -> np.ndarray:
    """Microseconds, shape (2, calls, rounds), of the slowest rank: until the call returns, and until it is done."""
    finish = place.cupy.cuda.get_current_stream().synchronize if isinstance(place, Cuda) else _nothing
    seconds = np.zeros((2, len(calls), _ROUNDS))
    for turn in range(-_WARMUP, _ROUNDS):
        for shift in range(len(calls)):
            index = (shift + turn) % len(calls)
            ranks.barrier()
            start = perf_counter()
            calls[index]()
            issued = perf_counter()
            finish()
            if turn >= 0:
                seconds[:, index, turn] = issued - start, perf_counter() - start
    return ranks.maximum(seconds) * 1e6


def _nothing() -> None:
    """A call on the host's memory is done when it returns."""


if __name__ == "__main__":
    main()
