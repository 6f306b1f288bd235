"""Ranks with emulated GPUs: each program runs on its own stream, and afterwards the devices are checked for violations
and leaks.

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
from collectives.transport.cuda import nccl
from collectives.transport.group import Group
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World
from tests.support.emulated.cuda import EmulatedDevice, EmulatedProvider
from tests.support.emulated.nccl import EmulatedNccl
from tests.support.scenarios.gpu_makers import EmulatedMaker

PATIENCE = 20.0
"""Bound of every wait, in seconds."""

Program = Callable[[World, EmulatedMaker], Any]


@contextlib.contextmanager
def emulated(count: int = 1, *, library: Any = None, **options: Any) -> Iterator[EmulatedProvider]:
    """Context manager in which devices, and NCCL among threads, are emulated.

    Args:
        count: of devices, each with its own identity.
        library: in place of NCCL; None: a working emulation.
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
    """Call ``program(world, maker)`` on ranks that are threads, and shut them down. Rank r uses device r modulo their
    number. Returns the results in rank order."""

    def make_world(group: Group) -> World:
        # Activated here, because the engine must make its device current for every call.
        provider.device(group.rank % provider.count()).activate()
        return World(group, config)

    def body(world: World) -> Any:
        device = provider.device(world.rank % provider.count())
        with own_stream(device):
            result = program(world, EmulatedMaker(device))
            world.shutdown()
        return result

    results = thread_groups.run(size, body, hosts=hosts, timeout=2 * PATIENCE, make_world=make_world)
    for number in range(provider.count()):
        check(provider.device(number))
    return results


@contextlib.contextmanager
def own_stream(device: EmulatedDevice) -> Iterator[None]:
    """Context manager in which the calling thread has its own current stream, so that only the engine orders it with
    other ranks."""
    device.forbid()
    stream = device.create_stream()
    try:
        with device.use_stream(stream):
            yield
            device.drain(stream)
    finally:
        device.destroy_stream(stream)


def check(device: EmulatedDevice, *, collect: bool = True) -> None:
    """Assert that a device whose worlds are shut down has neither failures, nor violations, nor leaks; without
    ``collect`` although no garbage has been collected."""
    if collect:
        gc.collect()
    assert device.failure is None, device.failure
    assert not device.violations, device.violations
    left = {what: number for what, number in device.held().items() if number}
    assert left == {}, f"not given back: {left}"


def own_device(**options: Any) -> EmulatedDevice:
    """Create and activate the emulated device of this process, which is one rank. Ranks share the GPU unless they pass
    an ``identity``. There is no NCCL, which is not emulated among processes."""
    provider = EmulatedProvider(1, **({"patience": PATIENCE} | options))
    selection.use(provider)
    nccl.use(EmulatedNccl(1, missing="NCCL is not emulated among processes"))
    device = provider.device(0)
    device.activate()
    return device
