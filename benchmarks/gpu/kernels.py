"""Packing and unpacking beside the device's own copy: ``python -m benchmarks.gpu.kernels``.

ResNet-50's 161 gradients go into one buffer and back; several sets of them, in turn, so that none is found in the
cache. Bandwidths count bytes read and bytes written; the copy is one of 512 MiB within the device. All are timed with
events, around several launches, in turn.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.gpu.figures import Figure, publish, skip
from benchmarks.models import elements, resnet50
from collectives.device.diagnosis import why_not
from collectives.tools.bench.measure import Summary

_SETS = 4
_COPY = 512 << 20
_WARMUP, _ROUNDS = 5, 40


def main() -> None:
    problem = why_not()
    if problem:
        skip(problem)
    device = importlib.import_module("collectives.device.selection").provider().device(0)
    device.activate()
    cupy = importlib.import_module("cupy")
    calls, moved = contestants(cupy, device)
    times = {name: Summary.of(row) for name, row in zip(calls, timed(cupy, list(calls.values())), strict=True)}
    rates = {name: moved[name] / times[name].median / 1e6 for name in calls}
    figures = [Figure("copy within the device, 512 MiB", rates["copy"], "GB/s")]
    for name in calls:
        if name != "copy":
            figures.append(Figure(f"{name}: 161 tensors", rates[name], "GB/s"))
            figures.append(Figure(f"{name}: of the copy's bandwidth", 100 * rates[name] / rates["copy"], "%", least=85))
    fused, flat = launches(cupy)
    figures.append(Figure("kernel launches of an all-reduce of one tensor as large", flat, "launches"))
    figures.append(
        Figure("kernel launches of a fused all-reduce of 161 tensors besides these", fused - flat, "launches", most=2)
    )
    publish(
        figures,
        times={name: {"milliseconds": summary.as_dict(), "bytes": moved[name]} for name, summary in times.items()},
    )


def contestants(cupy: Any, device: Any) -> tuple[dict[str, Callable[[], None]], dict[str, int]]:
    """What is timed, and the bytes that each reads and writes; results are compared with the tensors once."""
    from collectives.device.kernels import Kernels
    from collectives.device.packing import Packing

    stream = device.current_stream()
    counts = [prod(shape) for shape in resnet50().values()]
    values = np.random.default_rng(0).standard_normal(sum(counts), np.float32)
    sets = [[cupy.asarray(part) for part in np.split(values, np.cumsum(counts)[:-1])] for _ in range(_SETS)]
    addresses = [np.array([tensor.data.ptr for tensor in tensors], np.int64) for tensors in sets]
    nbytes = sum(counts) * 4
    source, target = (cupy.ones(_COPY, cupy.uint8) for _ in range(2))

    def copy() -> None:
        target.data.copy_from_device_async(source.data, _COPY)

    calls: dict[str, Callable[[], None]] = {"copy": copy}
    moved = {"copy": 2 * _COPY}
    kernels = Kernels(device)
    for wire in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)):
        packing = Packing(device, kernels, counts, np.dtype(np.float32), wire)
        buffers = [cupy.zeros(packing.total * wire.itemsize, cupy.uint8) for _ in range(_SETS)]

        def pack(packing: Packing = packing, buffers: list[Any] = buffers) -> None:
            for table, buffer in zip(addresses, buffers, strict=True):
                packing.pack(table, buffer.data.ptr, stream)

        def unpack(packing: Packing = packing, buffers: list[Any] = buffers) -> None:
            for table, buffer in zip(addresses, buffers, strict=True):
                packing.unpack(buffer.data.ptr, table, stream)

        before = [cupy.asnumpy(tensor) for tensor in sets[-1]]
        pack()
        for tensor in sets[-1]:
            tensor.fill(cupy.nan)
        unpack()
        for tensor, wanted in zip(sets[-1], before, strict=True):
            np.testing.assert_array_equal(cupy.asnumpy(tensor), wanted.astype(wire).astype(np.float32))
        way = "float32" if wire == np.float32 else f"float32 as {wire.name}"
        calls |= {f"pack {way}": pack, f"unpack {way}": unpack}
        moved |= dict.fromkeys((f"pack {way}", f"unpack {way}"), _SETS * (nbytes + nbytes * wire.itemsize // 4))
    return calls, moved


def timed(cupy: Any, calls: list[Callable[[], None]]) -> np.ndarray:
    """Milliseconds of each call, shape (calls, rounds), by events; they take turns. The first is the copy."""
    milliseconds = np.zeros((len(calls), _ROUNDS))
    for turn in range(-_WARMUP, _ROUNDS):
        for place in range(len(calls)):
            index = (place + turn) % len(calls)
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            # Something to do while the host gives out what is timed, or the wait for the host would be timed as well.
            calls[0]()
            start.record()
            calls[index]()
            stop.record()
            stop.synchronize()
            if turn >= 0:
                milliseconds[index, turn] = cupy.cuda.get_elapsed_time(start, stop)
    return milliseconds


def launches(cupy: Any) -> list[float]:
    """Kernels that a rank (a thread) launches in an all-reduce of 161 tensors and of one as large; mean of three."""
    import threading

    from collectives.base.reduce_op import Op
    from collectives.transport.threads import thread_groups
    from collectives.worlds.world import World

    device_class = importlib.import_module("collectives.device.cupy_device").CupyDevice
    launch, lock, counted = device_class.launch, threading.Lock(), [0]

    def counting(*arguments: Any) -> None:
        with lock:
            counted[0] += 1
        launch(*arguments)

    def rank(world: World) -> list[float]:
        per_case = []
        with cupy.cuda.Device(0), cupy.cuda.Stream(non_blocking=True) as stream:
            tensors = [cupy.ones(shape, cupy.float32) for shape in resnet50().values()]
            flat = [cupy.ones(elements(resnet50()), cupy.float32)]
            for group in (tensors, flat):
                for step in range(4):
                    world.barrier()
                    if step == 1:
                        counted[0] = 0
                    world.barrier()
                    world.grouped_allreduce_(group, op=Op.SUM, name=f"group of {len(group)}", transport="cuda-ipc")
                stream.synchronize()
                world.barrier()
                per_case.append(counted[0] / 3 / world.size)
                world.barrier()
        return per_case

    device_class.launch = counting
    try:
        per_case: list[float] = thread_groups.run(2, rank, timeout=20, make_world=World)[0]
    finally:
        device_class.launch = launch
    return per_case


if __name__ == "__main__":
    main()
