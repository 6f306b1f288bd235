"""Ranks with emulated GPUs: each program runs on a stream of its own, and afterwards nothing may be wrong with the
devices or left on them.

    with emulated(count=2, delays=3) as provider:
        on_threads(2, lambda world, maker: ..., provider)

In a process of its own a rank calls `own_device` before anything else.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from collectives.base.config import Config
from collectives.device import selection
from collectives.transport import nccl, threads
from collectives.transport.group import Group
from collectives.world import World
from tests.emulated_cuda import EmulatedDevice, EmulatedProvider
from tests.emulated_nccl import EmulatedNccl
from tests.gpu_makers import EmulatedMaker

PATIENCE = 20.0
"""Seconds that anything may take."""

Program = Callable[[World, EmulatedMaker], Any]


@contextlib.contextmanager
def emulated(count: int = 1, *, library: nccl.Library | None = None, **options: Any) -> Iterator[EmulatedProvider]:
    """Devices, and NCCL among threads, are emulated ones within.

    Args:
        count: how many devices there are, each with an identity of its own.
        library: instead of NCCL; None: one that works.
        options: of `EmulatedDevice`.
    """
    provider = EmulatedProvider(count, patience=PATIENCE, **options)
    before = selection.use(provider), nccl.use(library or EmulatedNccl(8, timeout=PATIENCE))
    try:
        yield provider
    finally:
        selection.use(before[0])
        nccl.use(before[1])
        provider.close()


def on_threads(
    size: int,
    program: Program,
    provider: EmulatedProvider,
    *,
    hosts: Sequence[Sequence[int]] | None = None,
    config: Config | None = None,
) -> list[Any]:
    """Call ``program(world, maker)`` on ranks that are threads and shut them down; the results in rank order. The ranks
    use the devices in turns."""

    def make_world(group: Group) -> World:
        # Here, since whatever the engine does with a device it must do with that device current.
        provider.device(group.rank % provider.count()).activate()
        return World(group, config)

    def body(world: World) -> Any:
        device = provider.device(world.rank % provider.count())
        with own_stream(device):
            result = program(world, EmulatedMaker(device))
            world.shutdown()
        return result

    results = threads.run(size, body, hosts=hosts, timeout=2 * PATIENCE, make_world=make_world)
    for number in range(provider.count()):
        check(provider.device(number))
    return results


@contextlib.contextmanager
def own_stream(device: EmulatedDevice) -> Iterator[None]:
    """The calling thread's program works on a stream of its own: what orders it with other ranks is only what the
    engine does."""
    device.forbid()
    stream = device.create_stream()
    try:
        with device.use_stream(stream):
            yield
            device.drain(stream)
    finally:
        device.destroy_stream(stream)


def check(device: EmulatedDevice) -> None:
    """Nothing went wrong on a device whose worlds are shut down, and nothing of theirs is left."""
    gc.collect()
    assert device.failure is None, device.failure
    assert not device.violations, device.violations
    left = {what: number for what, number in device.held().items() if number}
    assert left == {}, f"not given back: {left}"


def own_device(**options: Any) -> EmulatedDevice:
    """The emulated device of this process, which is a rank: current, and where tensors come from. Ranks share the GPU
    unless they are given an ``identity``. There is no NCCL, which among processes is not emulated."""
    provider = EmulatedProvider(1, **({"patience": PATIENCE} | options))
    selection.use(provider)
    nccl.use(EmulatedNccl(1, missing="NCCL is not emulated among processes"))
    device = provider.device(0)
    device.activate()
    return device
