"""What an all-reduce costs in memory: ``collectivesrun -np 2 python -m benchmarks.memory``.

Three questions. How far does resident memory rise above the tensors during a call (peak, from the kernel's high-water
mark)? Does it stay flat over very many calls? And what does the Python side allocate per call (tracemalloc, which
NumPy's buffers report to as well)? The largest value of all ranks is shown.

``--operations 1000000`` asks instead whether resident memory, mappings and descriptors stay flat over so many small
operations: asynchronous and named, blocking, persistent. ``--allocations 100000`` asks the same of tensors in memory
that the ranks can map, of all sizes, which come and go, every tenth of them after an all-reduce.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import collectives
from benchmarks import common
from collectives.tools.bench import cli
from collectives.tools.bench.device import available_bytes, check_memory, read
from collectives.tools.bench.plot import short_bytes
from collectives.tools.bench.ranks import Ranks, session

_SMALL = 4096
"""Bytes of the tensor that is reduced very many times."""
_NAMES = 100
"""Names that take turns among very many asynchronous operations; all of them are in flight at once."""
_SAMPLES = 10
"""How often the process is looked at meanwhile."""
_ALIVE = 30
"""Tensors that live at a time among very many that come and go."""
_LARGEST = 1 << 20
"""Elements of the largest of them."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, on rank 0."""
    flags = cli.Parser(prog="benchmarks.memory", description="Memory that all-reduces need: peak, growth, allocations.")
    flags.add_argument("-b", "--minbytes", type=cli.size, default="1M", metavar="SIZE", help="smallest size")
    flags.add_argument("-e", "--maxbytes", type=cli.size, default="256M", metavar="SIZE", help="largest size")
    flags.add_argument(
        "-f", "--stepfactor", type=cli.whole_number(2), default=4, metavar="FACTOR", help="next size = size * FACTOR"
    )
    flags.add_argument(
        "-n", "--calls", type=cli.whole_number(10), default=100_000, metavar="N", help="calls in the test of flatness"
    )
    flags.add_argument(
        "-m",
        "--operations",
        type=cli.whole_number(_SAMPLES * _NAMES),
        metavar="N",
        help="only the flatness of N operations",
    )
    flags.add_argument(
        "--allocations",
        type=cli.whole_number(_SAMPLES * _NAMES),
        metavar="N",
        help="only the flatness of N mapped tensors that come and go",
    )
    flags.add_json()
    options = flags.parse_args(arguments)
    with session() as ranks:
        problem = ranks.agree(
            check_memory(max(options.minbytes, options.maxbytes), False, ranks.local_size, available_bytes())
        )
        if not problem:
            only_flat = options.operations or options.allocations
            results = flatness(options.operations, options.allocations, ranks) if only_flat else measure(options, ranks)
            common.write_results(options.json, ranks, "memory", "bytes", {"records": results})
        elif ranks.rank == 0:
            print(f"benchmarks.memory: error: {problem}", file=sys.stderr)
    if problem:
        sys.exit(2)


def measure(options: Any, ranks: Ranks) -> list[dict[str, Any]]:
    """All three measurements; rank 0 prints them."""
    ranks.say(f"# float32 sum, {ranks.size} ranks, MiB, the largest of all ranks; out-of-place: beside the result")
    ranks.say(f"#{'size':>9}{'peak extra, in place':>24}{'out of place':>16}{'allocated per call, in place':>32}")
    results: list[dict[str, Any]] = []
    for size in cli.sweep(options.minbytes, max(options.minbytes, options.maxbytes), options.stepfactor, 0):
        tensor = np.zeros(max(1, size // 4), np.float32)
        tensor.fill(0.0)
        inside = _peak(ranks, partial(collectives.allreduce_, tensor, op=collectives.Sum))
        outside = _peak(ranks, partial(collectives.allreduce, tensor, op=collectives.Sum)) - tensor.nbytes
        allocated, _ = _traced(ranks, tensor, 10)
        results.append(
            {"size": tensor.nbytes, "in_place": inside, "out_of_place": outside, "allocated_per_call": allocated}
        )
        ranks.say(
            f" {short_bytes(size):>9}{inside / 2**20:>24.2f}{max(0, outside) / 2**20:>16.2f}{allocated / 2**20:>32.4f}",
        )
        del tensor
    tensor = np.zeros(_SMALL // 4, np.float32)
    allocated, kept = _traced(ranks, tensor, 1000)
    ranks.say(f"# {short_bytes(_SMALL)} in place: a call allocates at most {allocated} bytes and keeps {kept:.2f}")
    before = resident()
    for _ in range(options.calls):
        collectives.allreduce_(tensor, op=collectives.Sum)
    gc.collect()
    growth = int(ranks.maximum(np.array([resident() - before], np.float64))[0])
    results.append(
        {
            "calls": options.calls,
            "size": _SMALL,
            "growth": growth,
            "allocated_per_call": allocated,
            "kept_per_call": kept,
        }
    )
    ranks.say(
        f"# {options.calls} calls of {short_bytes(_SMALL)} in place: resident memory grew by {growth / 1024:.0f} KiB"
    )
    return results


def flatness(operations: int | None, allocations: int | None, ranks: Ranks) -> list[dict[str, Any]]:
    """The footprint over very many small operations of each kind, and over allocations; rank 0 prints it."""
    tensors = [np.zeros(_SMALL // 4, np.float32) for _ in range(_NAMES)]
    names = [f"tensor {index}" for index in range(_NAMES)]

    def asynchronous() -> None:
        handles = [
            collectives.allreduce_async_(tensor, op=collectives.Sum, name=name)
            for tensor, name in zip(tensors, names, strict=True)
        ]
        for handle in handles:
            collectives.synchronize(handle)

    def blocking() -> None:
        for tensor in tensors:
            collectives.allreduce_(tensor, op=collectives.Sum)

    kinds: list[tuple[str, int, Callable[[], object]]] = []
    if operations:
        kinds += [(batch.__name__, operations, batch) for batch in (asynchronous, blocking, _persistent(tensors))]
        ranks.say(f"# operations on {short_bytes(_SMALL)} in place, {_NAMES} names or none, {ranks.size} ranks")
    if allocations:
        kinds.append(("allocations", allocations, _allocations()))
        ranks.say(f"# allocations of up to {short_bytes(4 * _LARGEST)}, {_ALIVE} alive at a time, {ranks.size} ranks")
    ranks.say("# KiB that resident memory has grown since the first batch, after each tenth; then how far mappings and")
    ranks.say("# descriptors have; the largest of all ranks")
    results: list[dict[str, Any]] = []
    for kind, times, batch in kinds:
        growth = ranks.maximum(np.array(grown(batch, times // _NAMES), np.float64))
        memory, mappings, descriptors = growth.T.tolist()
        results.append(
            {"operations": times, "kind": kind, "growth": memory, "mappings": mappings, "descriptors": descriptors}
        )
        tenths = "".join(f"{value / 1024:>8.0f}" for value in memory)
        ranks.say(f" {times:>9} {kind:<14}{tenths} {mappings[-1]:>+7.0f} {descriptors[-1]:>+5.0f}")
    return results


def _persistent(tensors: Sequence[np.ndarray]) -> Callable[[], object]:
    """A batch of as many persistent operations, one after the other."""
    operations = [collectives.allreduce_init(tensor, op=collectives.Sum) for tensor in tensors]

    def persistent() -> None:
        for operation in operations:
            operation()

    return persistent


def _allocations() -> Callable[[], object]:
    """A batch of tensors, each in the place of one that goes; their sizes are the same on all ranks."""
    random = Random(0)
    alive = [collectives.empty(1, np.float32)] * _ALIVE

    def allocations() -> None:
        for turn in range(_NAMES):
            tensor = collectives.zeros(int(_LARGEST ** random.random()), np.float32)
            if turn % 10 == 0:
                collectives.allreduce_(tensor, op=collectives.Sum)
            alive[random.randrange(_ALIVE)] = tensor

    return allocations


def grown(batch: Callable[[], object], times: int) -> list[list[int]]:
    """How far the footprint has grown since the first of ``times`` calls, looked at ten times, evenly spread."""
    batch()
    gc.collect()
    before = footprint()
    samples = []
    for sample in range(_SAMPLES):
        for _ in range(times * sample // _SAMPLES, times * (sample + 1) // _SAMPLES):
            batch()
        gc.collect()
        samples.append([now - then for now, then in zip(footprint(), before, strict=True)])
    return samples


def footprint() -> tuple[int, int, int]:
    """This process's resident memory in bytes, its mappings, and its open descriptors (0 where there is no /proc)."""
    descriptors = Path("/proc/self/fd")
    opened = len(os.listdir(descriptors)) if descriptors.is_dir() else 0
    return resident(), read("/proc/self/maps").count("\n"), opened


def _peak(ranks: Ranks, call: Callable[[], object]) -> int:
    """Bytes by which resident memory rises at most during a call; the largest of all ranks."""
    gc.collect()
    ranks.barrier()
    _forget_peak()
    before = resident()
    call()
    extra = peak() - before
    return int(ranks.maximum(np.array([max(0, extra)], np.float64))[0])


def _traced(ranks: Ranks, tensor: np.ndarray, calls: int) -> tuple[int, float]:
    """Bytes that one call held at most, and that each of many kept on average; the largest of all ranks."""
    collectives.allreduce_(tensor, op=collectives.Sum)
    tracemalloc.start()
    try:
        collectives.allreduce_(tensor, op=collectives.Sum)
        held, _ = tracemalloc.get_traced_memory()
        most = 0
        for _ in range(calls):
            tracemalloc.reset_peak()
            now, _ = tracemalloc.get_traced_memory()
            collectives.allreduce_(tensor, op=collectives.Sum)
            most = max(most, tracemalloc.get_traced_memory()[1] - now)
        kept = (tracemalloc.get_traced_memory()[0] - held) / calls
    finally:
        tracemalloc.stop()
    largest = ranks.maximum(np.array([most, kept], np.float64))
    return int(largest[0]), float(largest[1])


def resident() -> int:
    """This process's resident memory in bytes (VmRSS; elsewhere the peak so far, which never falls)."""
    return _status("VmRSS:")


def peak() -> int:
    """The peak of resident memory since ``_forget_peak`` in bytes (VmHWM)."""
    return _status("VmHWM:")


def _status(field: str) -> int:
    for line in read("/proc/self/status").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    # Kilobytes on Linux, bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _forget_peak() -> None:
    """Set the kernel's high-water mark back to the present; where that is not allowed, growing sizes still show it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


if __name__ == "__main__":
    main()
