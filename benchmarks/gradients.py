"""A training step's gradients: ``collectivesrun -np 2 python -m benchmarks.gradients --peers mpi,flat,gloo``.

Each parameter of a model has a gradient in memory of its own. A step submits them all, the last layer first, as a
backward pass brings them forth, and waits for all. The contestants do the same sums on the same tensors, and take turns
step by step; only ``flat`` sums one buffer of the same size, which is what packing would cost nothing for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import collectives
from benchmarks import cli, report
from benchmarks.device import HOST, Cuda, Host, memories
from benchmarks.floor import NAME as FLOOR
from benchmarks.floor import floor
from benchmarks.measure import Summary, alternate, bandwidth
from benchmarks.models import MODELS, Shapes, elements
from benchmarks.peers import NATIVE, Cupyx, Mpi, Peer, Torch, connect
from benchmarks.per_tensor import cost_per_tensor
from benchmarks.progress import Progress, watched
from benchmarks.ranks import Ranks
from benchmarks.record import OURS
from benchmarks.session import counters, per_step, say, session
from benchmarks.values import Values

PEERS = {"cpu": ("mpi", "flat", "gloo", FLOOR), "cuda": ("nccl", "torch", "cupyx", FLOOR)}

_COUNTED = 5
"""Steps over which the engine's counters are averaged."""

Tensors = Sequence[Any]

Step = Callable[[], Tensors]
"""One training step's communication; returns the arrays that hold the results, the last layer first."""


class Gradients:
    """One rank's gradients of a model, the last layer first: float32, each in memory of its own."""

    def __init__(self, shapes: Shapes, rank: int, size: int, place: Host | Cuda = HOST) -> None:
        self.place = place
        self.names = list(shapes)[::-1]
        self.tensors = [place.zeros(shapes[name], np.float32) for name in self.names]
        self.flat = place.zeros(elements(shapes), np.float32)
        """As many elements in one piece: what a single all-reduce of everything works on."""
        self._rank = rank
        self._values = Values(np.dtype(np.float32), "sum", size)

    def fill(self) -> None:
        """Give every tensor its values; they differ from rank to rank and from tensor to tensor, so that none can stand
        for another."""
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
    flags.add_argument(
        "-n", "--steps", type=cli.whole_number(1), default=20, metavar="N", help="timed steps per contestant"
    )
    flags.add_argument(
        "-w", "--warmup", type=cli.whole_number(0), default=5, metavar="N", help="untimed steps before them"
    )
    flags.add_argument("--out-of-place", action="store_true", help="ours returns new arrays; the peers go on in place")
    flags.add_argument("--blocking", action="store_true", help="ours waits for each tensor before the next")
    flags.add_argument(
        "-J", "--json", type=Path, default=None, metavar="FILE", help="write everything measured to FILE"
    )
    options = flags.parse_args(arguments)
    cli.check_device(flags, options)
    with session() as ranks:
        content = measure(options, ranks)
        if options.json and ranks.rank == 0:
            head = {
                "benchmark": "gradients",
                "ranks": ranks.size,
                "machine": report.machine(),
                "unit": "milliseconds per step",
            }
            report.write(options.json, {**head, **content})
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
    open_peers: dict[str, Peer] = {}
    try:
        for told, (name, kind) in contestants.items():
            outcome = _step(name, copies[kind], options, ranks, open_peers)
            if isinstance(outcome, str):
                say(ranks, f"# {outcome}")
            else:
                steps[told] = outcome
                wrong[told] = None if name == FLOOR else _check(outcome, copies[kind], ranks)
        for gradients in copies.values():
            gradients.clear()
        kind = (
            f"{'blocking' if options.blocking else 'asynchronous'}, "
            f"{'out of place' if options.out_of_place else 'in place'}"
        )
        say(
            ranks,
            f"# gradients of {options.model}: {count} float32 tensors, {nbytes / 1e6:.1f} MB; ours: {kind}; "
            f"{ranks.size} ranks; memory {','.join(places)}",
        )
        say(
            ranks,
            f"# {report.mpi_library() or 'no MPI'}; medians of {options.steps} steps of the slowest rank, the "
            f"contestants in turn",
        )
        with Progress(options.warmup + options.steps, ranks.rank == 0 and watched()) as progress:
            seconds = alternate(ranks, list(steps.values()), options.warmup, options.steps, progress.tick, memory=place)
    finally:
        for peer in open_peers.values():
            peer.close()
    records = [
        {
            "contestant": name,
            "time": Summary.of(row * 1e3).as_dict(),
            "ratio": Summary.of(row / seconds[0]).as_dict(),
            "bandwidth": bandwidth(nbytes, float(np.median(row)) * 1e6),
            "wrong": wrong[name],
        }
        for name, row in zip(steps, seconds, strict=True)
    ]
    say(ranks, table(records))
    cost = cost_per_tensor(ranks, count, options.steps, options.blocking, place)
    say(ranks, f"# {cost}")
    counted = _count(steps[OURS], ranks)
    shown = ", ".join(f"{name} {value:g}" for name, value in counted.items() if value)
    say(ranks, f"# the engine's counters per step: {shown or 'all 0'}")
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
    """One plain copy of as many bytes on every rank at once: what would be left of a step if it did nothing but move
    bytes."""
    source = gradients.place.zeros(gradients.flat.nbytes, np.uint8)
    # Written once: untouched zeros would all be read from one page.
    source.fill(0)
    copy = floor(source, gradients.flat, source.nbytes, gradients.place)
    return lambda: [copy()]


def persistent(gradients: Gradients) -> Step:
    """Our persistent operation of the whole group."""
    return collectives.grouped_allreduce_init(gradients.tensors, average=False)


def _step(name: str, gradients: Gradients, options: Any, ranks: Ranks, open_peers: dict[str, Peer]) -> Step | str:
    """A contestant's step, or the reason why there is none; the same kind on every rank."""
    if name == OURS:
        return ours(gradients, options.blocking, options.out_of_place)
    if name == "persistent":
        return persistent(gradients)
    if name == FLOOR:
        return of_floor(gradients)
    if name == "nccl":
        return of_nccl(gradients)
    library = "mpi" if name == "flat" else name
    if library not in open_peers:
        peer_or_reason = connect(library, ranks, gradients.place)
        if isinstance(peer_or_reason, str):
            return peer_or_reason
        open_peers[library] = peer_or_reason
    peer = open_peers[library]
    if isinstance(peer, Torch):
        return of_torch(peer, gradients)
    if isinstance(peer, Cupyx):
        return of_cupyx(peer, gradients)
    assert isinstance(peer, Mpi)
    return of_flat(peer, gradients) if name == "flat" else of_mpi(peer, gradients)


def _check(step: Step, gradients: Gradients, ranks: Ranks) -> int:
    """Wrong values on all ranks after one step with values of every rank's own."""
    gradients.fill()
    return ranks.total(gradients.wrong(step()))


def _count(step: Step, ranks: Ranks) -> dict[str, float]:
    """The rise of this rank's counters per step."""
    ranks.barrier()
    before = counters(collectives.world().statistics)
    for _ in range(_COUNTED):
        step()
        ranks.barrier()
    return per_step(before, counters(collectives.world().statistics), _COUNTED)


def table(records: Sequence[dict[str, Any]]) -> str:
    """A line per contestant: its time, its bandwidth, how it compares with ours in the same round, and its wrong
    values."""
    width = max(10, *(len(record["contestant"]) for record in records))
    heads = f"{'ms':>10}{'p25':>10}{'p75':>10}{'GB/s':>8}{'x ours':>9}{'p25':>8}{'p75':>8}{'#wrong':>8}"
    lines = [f"#{'contestant':<{width}}{heads}"]
    for record in records:
        time, ratio = record["time"], record["ratio"]
        compared = f"{ratio['median']:>9.2f}{ratio['p25']:>8.2f}{ratio['p75']:>8.2f}"
        if record["contestant"] == OURS:
            compared = f"{'-':>9}{'-':>8}{'-':>8}"
        lines.append(
            f" {record['contestant']:<{width}}{time['median']:>10.3f}{time['p25']:>10.3f}{time['p75']:>10.3f}"
            f"{record['bandwidth']:>8.2f}{compared}{'N/A' if record['wrong'] is None else record['wrong']:>8}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
