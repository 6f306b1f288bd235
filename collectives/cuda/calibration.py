"""Measures up to how many bytes an all-reduce through host memory is the fastest, when the ranks' GPUs first connect:
it depends on the driver, the bus, and whether ranks share a GPU.

The cost of a tiny all-reduce is that of its steps, not of its bytes. Between processes that share a GPU each context
switch takes longer than two copies of a few bytes to host memory and back.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from collectives.base.reduce_op import Op
from collectives.cuda.accelerator import Accelerator
from collectives.cuda.paths import DevicePath, allreduce_path
from collectives.cuda.planner import DeviceChoice
from collectives.cuda.transfer import DeviceBlock

_SIZES = (4, 4 << 10, 32 << 10, 256 << 10)
_REPEATS = 5
_WARM_UPS = 2
_TOKEN = 0x63616C69

_DTYPE = np.dtype(np.float32)


def calibrate(accelerator: Accelerator) -> None:
    """Measure, and tell the planner; collective. Measures nothing if the limit was set by hand."""
    context, config, planner = accelerator.context, accelerator.config, accelerator.connection.planner
    # The host path blocks the caller until its stream has finished; it is worth that only if it is much faster, which
    # it can be only where processes share a GPU.
    facts = planner.facts
    if (
        config.host_until >= 0
        or config.device_transport != "auto"
        or not facts.shares_gpus
        or (facts.ipc and facts.nccl)
    ):
        planner.learn(max(0, config.host_until))
        return
    address = accelerator.buffers.get("bucket", _SIZES[-1])
    accelerator.device.clear(address, _SIZES[-1], accelerator.executor.main)
    own_times = [
        (_time(accelerator, address, nbytes, True), _time(accelerator, address, nbytes, False)) for nbytes in _SIZES
    ]
    slowest = np.max(context.control.exchange(own_times), axis=0)
    until = 0
    for nbytes, (by_host, otherwise) in zip(_SIZES, slowest, strict=True):
        if by_host >= otherwise:
            break
        until = nbytes
    planner.learn(until)


def _time(accelerator: Accelerator, address: int, nbytes: int, through_host: bool) -> float:
    """Median time of an all-reduce, in seconds, until the GPU has done it."""
    count, planner = nbytes // _DTYPE.itemsize, accelerator.connection.planner
    choice = DeviceChoice("auto", "host") if through_host else planner.choose("allreduce", nbytes, native=True)
    path = allreduce_path(accelerator, choice, count, _DTYPE, Op.SUM)
    times = [_once(accelerator, path, DeviceBlock(address, nbytes)) for _ in range(_WARM_UPS + _REPEATS)]
    return statistics.median(times[_WARM_UPS:])


def _once(accelerator: Accelerator, path: DevicePath, block: DeviceBlock) -> float:
    begun = time.perf_counter()
    accelerator.context.meet(_TOKEN, path.prepare(block, block))
    path.run(block, block)
    accelerator.wait(accelerator.complete(block))  # complete: lets other process sets take their turn
    return time.perf_counter() - begun
