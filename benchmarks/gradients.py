"""A training step's gradients: ``collectivesrun -np 2 python -m benchmarks.gradients --peers mpi,flat,gloo``.

Each parameter of a model has a gradient in memory of its own. A step submits them all, the last layer first, as a
backward pass brings them forth, and waits for all. The contestants do the same sums on the same tensors, and take turns
step by step; only ``flat`` sums one buffer of the same size, which is what packing would cost nothing for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from time import perf_counter, process_time
from typing import Any

import numpy as np

import collectives
from benchmarks import common
from benchmarks.models import MODELS, Shapes, elements
from benchmarks.peers import NATIVE, Cupyx, Mpi, Peer, Torch, connect_all
from collectives.tools.bench import cli, report
from collectives.tools.bench.collective import FLOOR, floor
from collectives.tools.bench.device import HOST, Memory, memories
from collectives.tools.bench.measure import OURS, Summary, bandwidth
from collectives.tools.bench.ranks import Ranks, session
from collectives.tools.bench.values import Values

PEERS = {"cpu": ("mpi", "flat", "gloo", FLOOR), "cuda": ("nccl", "torch", "cupyx", FLOOR)}

Tensors = Sequence[Any]

Step = Callable[[], Tensors]
"""One training step's communication; returns the arrays that hold the results, the last layer first."""


class Gradients:
    """One rank's gradients of a model, the last layer first: float32, each in memory of its own."""

    def __init__(self, shapes: Shapes, rank: int, size: int, place: Memory = HOST) -> None:
        self.place = place
        self.names = list(shapes)[::-1]
        self.tensors = [place.zeros(shapes[name], np.float32) for name in self.names]
        self.flat = place.zeros(elements(shapes), np.float32)
        """As many elements in one piece: what a single all-reduce of everything works on."""
        self._rank = rank
        self._values = Values(np.dtype(np.float32), "sum", size)

    def fill(self) -> None:
        """Give every tensor values that differ from rank to rank and from tensor to tensor."""
        self.place.fill(self.flat, lambda out: self._values.fill(out, self._rank))
        start = 0
        for tensor in self.tensors:
            tensor.reshape(-1)[...] = self.flat[start : start + tensor.size]
            start += tensor.size

    def clear(self) -> None:
        """Zeros: a sum repeated thousands of times stays what it is."""
        for tensor in (self.flat, *self.tensors):
            tensor.fill(0)

    def wrong(self, results: Tensors) -> int:
        """How many elements of all results together are not the sum over the ranks of what `fill` wrote."""
        start = wrong = 0
        for result in results:
            wrong += self._values.wrong_reduced(self.place.read(result.reshape(-1)), start)
            start += result.size
        return int(wrong + abs(self.flat.size - start))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, on rank 0; wrong values end the process with status 1."""
    flags = cli.Parser(
        prog="benchmarks.gradients", description="Time a training step's all-reduces of all gradients of a model."
    )
    flags.add_argument("--model", choices=tuple(MODELS), default="resnet50", help="whose parameters")
    cli.add_device(flags, PEERS)
    flags.add_count("-n", "--steps", default=20, help="timed steps per contestant")
    flags.add_count("-w", "--warmup", default=5, help="untimed steps before them", least=0)
    flags.add_argument("--out-of-place", action="store_true", help="ours returns new arrays; the peers go on in place")
    flags.add_argument("--blocking", action="store_true", help="ours waits for each tensor before the next")
    flags.add_json()
    options = flags.parse_args(arguments)
    cli.check_device(flags, options)
    with session() as ranks:
        content = measure(options, ranks)
        common.write_results(options.json, ranks, "gradients", "milliseconds per step", content)
    if any(record["wrong"] for record in content["records"]):
        sys.exit(1)


def measure(options: Any, ranks: Ranks) -> dict[str, Any]:
    """Time the contestants' steps, ours per tensor, and count what ours does; rank 0 prints it."""
    places = memories(options.device, collectives.local_rank(), options.memory)
    first, *others = places
    place = places[first]
    shapes = MODELS[options.model]()
    # Peers use private memory: libraries that reach a peer's tensor through system calls are slower in a file.
    copies = {
        kind: Gradients(shapes, ranks.rank, ranks.size, each) for kind, each in {"private": HOST, **places}.items()
    }
    count, nbytes = len(shapes), copies[first].flat.nbytes
    own_names = (OURS, "persistent") if options.persistent else (OURS,)
    contestants = {
        **{name: (name, first) for name in own_names},
        **{f"{name}, {kind}": (name, kind) for name, kind in product(own_names, others)},
        **{name: (name, "private") for name in options.peers},
    }
    """Told name -> its step's name, and whose memory it uses."""
    steps: dict[str, Step] = {}
    wrong: dict[str, int | None] = {}
    libraries = [_LIBRARIES.get(name, name) for name in options.peers if name != FLOOR]
    with connect_all(libraries, ranks, copies["private"].place) as peers:
        for told, (name, kind) in contestants.items():
            step = _step(name, copies[kind], options, peers)
            if step is not None:
                steps[told] = step
                wrong[told] = None if name == FLOOR else _check(step, copies[kind], ranks)
        for gradients in copies.values():
            gradients.clear()
        kind = (
            f"{'blocking' if options.blocking else 'asynchronous'}, "
            f"{'out of place' if options.out_of_place else 'in place'}"
        )
        ranks.say(
            f"# gradients of {options.model}: {count} float32 tensors, {nbytes / 1e6:.1f} MB; ours: {kind}; "
            f"{ranks.size} ranks; memory {','.join(places)}"
        )
        ranks.say(
            f"# {report.mpi_library() or 'no MPI'}; medians of {options.steps} steps of the slowest rank, the "
            f"contestants in turn"
        )
        seconds = common.time_in_turn(ranks, steps, options.warmup, options.steps, place)
    records = [
        {
            "contestant": name,
            "time": Summary.of(row * 1e3).as_dict(),
            "ratio": Summary.of(row / seconds[OURS]).as_dict(),
            "bandwidth": bandwidth(nbytes, float(np.median(row)) * 1e6),
            "wrong": wrong[name],
        }
        for name, row in seconds.items()
    ]
    ranks.say(table(records))
    cost = cost_per_tensor(ranks, count, options.steps, options.blocking, place)
    ranks.say(f"# {cost}")
    counted = common.counters_per_step(ranks, steps[OURS])
    shown = ", ".join(f"{name} {value:g}" for name, value in counted.items() if value)
    ranks.say(f"# the engine's counters per step: {shown or 'all 0'}")
    return {
        "model": options.model,
        "tensors": count,
        "bytes": nbytes,
        "blocking": options.blocking,
        "out_of_place": options.out_of_place,
        "records": records,
        "per_tensor": asdict(cost),
        "counters_per_step": counted,
    }


def ours(gradients: Gradients, blocking: bool, out_of_place: bool) -> Step:
    """Our step, as a user writes it: named, summed, synchronized in the order of submission."""
    named = list(zip(gradients.names, gradients.tensors, strict=True))
    if blocking:
        call = collectives.allreduce if out_of_place else collectives.allreduce_
        return lambda: [call(tensor, average=False, name=name) for name, tensor in named]
    submit = collectives.allreduce_async if out_of_place else collectives.allreduce_async_
    synchronize = collectives.synchronize

    def step() -> Tensors:
        handles = [submit(tensor, average=False, name=name) for name, tensor in named]
        return [synchronize(handle) for handle in handles]

    return step


def of_mpi(peer: Mpi, gradients: Gradients) -> Step:
    """One in-place Allreduce per tensor."""
    allreduce, in_place, tensors = peer.comm.Allreduce, peer.in_place, gradients.tensors

    def step() -> Tensors:
        for tensor in tensors:
            allreduce(in_place, tensor)
        return tensors

    return step


def of_flat(peer: Mpi, gradients: Gradients) -> Step:
    """One in-place Allreduce of everything in one piece; nothing is packed."""
    allreduce, in_place, flat = peer.comm.Allreduce, peer.in_place, gradients.flat

    def step() -> Tensors:
        allreduce(in_place, flat)
        return [flat]

    return step


def of_torch(peer: Torch, gradients: Gradients) -> Step:
    """One asynchronous all_reduce per tensor, then the waits."""
    all_reduce, tensors = peer.distributed.all_reduce, gradients.tensors
    tensors_of_torch = [peer.tensor(tensor) for tensor in tensors]

    def step() -> Tensors:
        for work in [all_reduce(tensor, async_op=True) for tensor in tensors_of_torch]:
            work.wait()
        return tensors

    return step


def of_nccl(gradients: Gradients) -> Step:
    """NCCL's own all-reduce of each tensor, through our communicator."""
    tensors = gradients.tensors
    return lambda: [collectives.allreduce_(tensor, average=False, **NATIVE) for tensor in tensors]


def of_cupyx(peer: Cupyx, gradients: Gradients) -> Step:
    """One in-place all_reduce per tensor."""
    all_reduce, tensors = peer.backend.all_reduce, gradients.tensors

    def step() -> Tensors:
        for tensor in tensors:
            all_reduce(tensor, tensor)
        return tensors

    return step


def of_floor(gradients: Gradients) -> Step:
    """One plain copy of as many bytes on every rank at once: a step that does nothing but move bytes."""
    source = gradients.place.zeros(gradients.flat.nbytes, np.uint8)
    # Written once: untouched zeros would all be read from one page.
    source.fill(0)
    copy = floor(source, gradients.flat, source.nbytes, gradients.place)
    return lambda: [copy()]


def _step(name: str, gradients: Gradients, options: Any, peers: Mapping[str, Peer]) -> Step | None:
    """A contestant's step; None for a peer that could not be started."""
    if name == OURS:
        return ours(gradients, options.blocking, options.out_of_place)
    if name == "persistent":
        return collectives.grouped_allreduce_init(gradients.tensors, average=False)
    if name == FLOOR:
        return of_floor(gradients)
    if name == "nccl":
        return of_nccl(gradients)
    peer = peers.get(_LIBRARIES.get(name, name))
    return None if peer is None else _OF_PEERS[name](peer, gradients)


_LIBRARIES = {"flat": "mpi"}
"""The peer that makes a contestant's step, where its name is another one."""
_OF_PEERS: dict[str, Callable[[Any, Gradients], Step]] = {
    "mpi": of_mpi,
    "flat": of_flat,
    "gloo": of_torch,
    "torch": of_torch,
    "cupyx": of_cupyx,
}


def _check(step: Step, gradients: Gradients, ranks: Ranks) -> int:
    """Wrong values on all ranks after one step with values of every rank's own."""
    gradients.fill()
    return ranks.total(gradients.wrong(step()))


def table(records: Sequence[dict[str, Any]]) -> str:
    """A line per contestant: time, bandwidth, its time against ours in the same round, and its wrong values."""
    width = max(10, *(len(record["contestant"]) for record in records))
    heads = f"{'ms':>10}{'p25':>10}{'p75':>10}{'GB/s':>8}{'x ours':>9}{'p25':>8}{'p75':>8}{'#wrong':>8}"
    lines = [f"#{'contestant':<{width}}{heads}"]
    for record in records:
        ratio = None if record["contestant"] == OURS else record["ratio"]
        lines.append(
            f" {record['contestant']:<{width}}{common.quartiles(record['time'])}{record['bandwidth']:>8.2f}"
            f"{common.quartiles(ratio, 2, 9, 8)}{'N/A' if record['wrong'] is None else record['wrong']:>8}"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class Cost:
    """What one tensor of a single element costs, in microseconds: there is next to nothing in it but our own Python."""

    tensors: int
    submission: float
    """The caller's time per submission; the whole call where calls block."""
    whole: float
    """A step's time divided by its tensors."""
    processor: float
    """Processor time of all threads of the process, divided by the tensors."""

    def __str__(self) -> str:
        return (
            f"{self.tensors} tensors of one element, microseconds per tensor: submission {self.submission:.2f}, "
            f"whole step {self.whole:.2f}, processor time {self.processor:.2f}"
        )


def cost_per_tensor(ranks: Ranks, count: int, steps: int, blocking: bool, place: Memory) -> Cost:
    """Medians over ``steps`` steps of ``count`` tensors of one element, in place; the slowest rank counts."""
    tensors = [place.zeros(1, np.float32) for _ in range(count)]
    wait = place.finished(lambda: None)
    names = [f"one element.{index}" for index in range(count)]
    samples = np.zeros((steps, 3))
    warmup = 3
    for step in range(-warmup, steps):
        ranks.barrier()
        processor, start = process_time(), perf_counter()
        if blocking:
            for tensor, name in zip(tensors, names, strict=True):
                collectives.allreduce_(tensor, average=False, name=name)
            submitted = perf_counter()
        else:
            handles = [
                collectives.allreduce_async_(tensor, average=False, name=name)
                for tensor, name in zip(tensors, names, strict=True)
            ]
            submitted = perf_counter()
            for handle in handles:
                collectives.synchronize(handle)
        wait()
        stop = perf_counter()
        if step >= 0:
            samples[step] = submitted - start, stop - start, process_time() - processor
    submission, whole, processor = (float(value) for value in np.median(ranks.maximum(samples), axis=0) / count * 1e6)
    return Cost(count, submission, whole, processor)


if __name__ == "__main__":
    main()
