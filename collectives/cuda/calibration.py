"""Up to how many bytes the way through the host is the quickest: measured when the ranks' GPUs first meet, because it
depends on the driver, on the bus, and on whether ranks take turns on a GPU.

A tiny all-reduce costs what its steps cost, not its bytes. Between processes that share a GPU each change of turn takes
longer than two copies of some bytes to host memory and back.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from collectives.base.reduce_op import Op
from collectives.cuda.accelerator import Accelerator
from collectives.cuda.paths import Way, allreduce_by
from collectives.cuda.planner import DeviceChoice
from collectives.cuda.transfer import DeviceBlock

_SIZES = (4, 4 << 10, 32 << 10, 256 << 10)
_REPEATS = 5
_WARM_UPS = 2
_TOKEN = 0x63616C69

_DTYPE = np.dtype(np.float32)


def calibrate(accelerator: Accelerator) -> None:
    """Measure, and tell the planner; all ranks are in the same operation. Does nothing the second time, and where it
    was set by hand."""
    context, config = accelerator.context, accelerator.config
    if accelerator.calibrated:
        return
    accelerator.calibrated = True
    # The way through the host holds up whoever calls until all that its stream has to do is done; so it must be much
    # quicker to be worth it, which it can be only where processes take turns on a GPU.
    facts = accelerator.connection.planner.facts
    if (
        config.host_until >= 0
        or config.device_transport != "auto"
        or not facts.shares_gpus
        or (facts.ipc and facts.nccl)
    ):
        accelerator.connection.planner.learn(max(0, config.host_until))
        return
    address = accelerator.buffers.get("bucket", _SIZES[-1])
    accelerator.device.clear(address, _SIZES[-1], accelerator.executor.main)
    mine = [
        (_time(accelerator, address, nbytes, True), _time(accelerator, address, nbytes, False)) for nbytes in _SIZES
    ]
    slowest = np.max(context.control.exchange(mine), axis=0)
    until = 0
    for nbytes, (by_host, otherwise) in zip(_SIZES, slowest, strict=True):
        if by_host >= otherwise:
            break
        until = nbytes
    accelerator.connection.planner.learn(until)


def _time(accelerator: Accelerator, address: int, nbytes: int, through_host: bool) -> float:
    """Seconds of an all-reduce until the GPU is done with it: a median."""
    count = nbytes // _DTYPE.itemsize
    choice = (
        DeviceChoice("auto", "host")
        if through_host
        else accelerator.connection.planner.choose("allreduce", nbytes, native=True)
    )
    way = allreduce_by(choice, accelerator, count, _DTYPE, Op.SUM, None, accelerator.host_entry(count, _DTYPE, Op.SUM))
    times = [_once(accelerator, way, DeviceBlock(address, nbytes)) for _ in range(_WARM_UPS + _REPEATS)]
    return statistics.median(times[_WARM_UPS:])


def _once(accelerator: Accelerator, way: Way, block: DeviceBlock) -> float:
    begun = time.perf_counter()
    accelerator.context.meet(_TOKEN, way.prepare(block, block))
    way.run(block, block)
    accelerator.wait(accelerator.complete(block))  # complete: other process sets may have their turn
    return time.perf_counter() - begun
