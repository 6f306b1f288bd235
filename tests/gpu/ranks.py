"""One rank of the scenarios on a GPU: ``collectivesrun -np 2 python -m tests.gpu.ranks --transport cuda-ipc``.

All ranks may share one GPU. Where a transport cannot be had, this says so and ends well; any other failure ends all
ranks. ``--device cpu`` does the same on an emulated GPU, which needs g++.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import collectives
from benchmarks.gpu.figures import attempt, publish, skip
from collectives.base import launchers
from collectives.device.diagnosis import why_not
from tests.support.scenarios.gpu import QUICK, SCENARIOS
from tests.support.scenarios.gpu_makers import Maker, maker


def main() -> None:
    flags = argparse.ArgumentParser(prog="tests.gpu.ranks")
    flags.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    flags.add_argument("--makers", default="cupy")
    flags.add_argument("--transport")
    flags.add_argument("--quick", action="store_true", help="only those that touch memory in every way")
    flags.add_argument(
        "--no-pool", action="store_true", help="every array is an allocation of its own, whose bounds a checker sees"
    )
    given = flags.parse_args()
    with _on_gpu(given) if given.device == "cuda" else _emulated() as frameworks:
        run(frameworks, QUICK if given.quick else SCENARIOS, given.transport)


def run(frameworks: dict[str, Maker], scenarios: list[Any], transport: str | None) -> None:
    """The scenarios with the tensors of each framework; publishes how many there were."""
    world = collectives.world()
    forced: dict[str, Any] = {"transport": transport} if transport else {}
    if world.size > 1:
        first = next(iter(frameworks.values()))
        attempt(lambda: world.allreduce(first.device(np.ones(1, np.float32)), **forced), world.rank)
    done = 0
    for name, framework in frameworks.items():
        for scenario in scenarios:
            start = time.perf_counter()
            say(f"{name} {scenario.__name__} ...")
            scenario(world, framework, forced)
            world.barrier()
            done += 1
            say(f"{name} {scenario.__name__}: {time.perf_counter() - start:.2f} s")
    if world.rank == 0:
        publish([], scenarios=done, ranks=world.size, transport=transport)
        say(f"{done} scenarios, {world.size} ranks, {', '.join(frameworks)}, {transport or 'auto'}: all right")


@contextlib.contextmanager
def _on_gpu(given: argparse.Namespace) -> Iterator[dict[str, Maker]]:
    """The default world, and the frameworks that are there."""
    collectives.init()
    problem = why_not()
    if problem:
        skip(problem, collectives.rank())
    cupy = importlib.import_module("cupy")
    cupy.cuda.Device(collectives.local_rank() % cupy.cuda.runtime.getDeviceCount()).use()
    if given.no_pool:
        cupy.cuda.set_allocator(None)
    frameworks: dict[str, Maker] = {}
    for name in given.makers.split(","):
        try:
            frameworks[name] = found = maker(name)
        except ImportError as error:
            say(f"{name}: skipped: {error}")
            continue
        if name == "torch":
            found.torch.cuda.set_device(cupy.cuda.Device().id)  # type: ignore[attr-defined]
        elif not given.no_pool:
            print(f"rank {collectives.rank()}: {found.warm(collectives.rank())}", flush=True)  # type: ignore[attr-defined]
    assert frameworks, "no framework, so nothing was checked"
    yield frameworks
    collectives.shutdown()


@contextlib.contextmanager
def _emulated() -> Iterator[dict[str, Maker]]:
    """The same on one emulated GPU that all ranks share, whose streams dawdle differently on each."""
    from tests.support.emulated import host_kernels
    from tests.support.emulated import ranks as emulated_ranks
    from tests.support.scenarios.gpu_makers import EmulatedMaker

    if host_kernels.COMPILER is None:
        skip(host_kernels.MISSING, launchers.rank(os.environ))
    device = emulated_ranks.own_device(delays=launchers.rank(os.environ))
    collectives.init()
    with emulated_ranks.own_stream(device):
        yield {"emulated": EmulatedMaker(device)}
        collectives.shutdown()
    emulated_ranks.check(device)
    device.close()


def say(text: str) -> None:
    """Print on rank 0."""
    if collectives.rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
