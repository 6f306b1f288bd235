"""Random programs of collectives, drawn from a seed, and what NumPy says must come of them.

Every rank draws the same program and takes its own part from it. A program is a list of epochs:

- `Epoch`: segments, one after the other. In a segment a rank first submits its asynchronous operations, the named ones
  in an order of its own, the unnamed ones of each set in everybody's order; between them it polls, and synchronizes
  what every rank has submitted by then. A segment may end with a blocking operation, at the same place on all its
  ranks. A *late* operation is submitted one segment later by one rank, so that it is certainly in flight when another
  rank tries to submit it twice.
- `JoinPhase`: ranks run out of data one after another and join; the others go on.

Nothing can wait in a circle, because nothing is synchronized before the place where all ranks have submitted it.
Mistakes are part of the program: what one rank does wrong fails on every rank, and all else in flight must come out
right. Algorithms and transports are forced now and then; such an operation may be refused, but only on all ranks. Where
its tensors lie is each rank's own choice (`tests.support.random.places`). Some operations are persistent: made when
the first epoch that has them begins, and started in each.

    python -m tests.support.random.programs 0 200  seeds 0 to 199; `program_runs` has the options
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from collectives.base.config import ALGORITHMS, TRANSPORTS
from collectives.base.errors import (
    CollectivesError,
    InvalidArgumentError,
    MismatchError,
    RankFailedError,
    TransportError,
)
from collectives.base.reduce_op import Op
from collectives.schedules import registry
from collectives.worlds.world import World
from tests.support.random.places import MEMORIES, Laid, Places
from tests.support.scenarios.worlds import DTYPES, assert_close, expected, sample

Array = np.ndarray[Any, Any]

REDUCTIONS = (
    "allreduce",
    "allreduce_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "reducescatter",
    "grouped_reducescatter",
)
KINDS = (*REDUCTIONS, "allgather", "grouped_allgather", "broadcast", "broadcast_", "alltoall")
PERSISTENT = (
    "allreduce",
    "allreduce_",
    "grouped_allreduce_",
    "reducescatter",
    "grouped_reducescatter",
    "allgather",
    "grouped_allgather",
    "broadcast_",
    "alltoall",
)
"""Kinds that can be persistent; an all-reduce out of place with a tensor for the result."""
OPS = (Op.AVERAGE, Op.SUM, Op.MIN, Op.MAX, Op.PRODUCT)
SETS: Mapping[int, tuple[tuple[int, ...], ...]] = {
    1: (),
    2: ((1,), (0, 1)),
    3: ((0, 1), (2,), (1, 2), (0, 2)),
    4: ((0, 1), (2, 3), (0, 2, 3), (1, 2), (3,)),
    5: ((0, 1), (2, 3, 4), (0, 2, 4), (1, 3), (4,)),
}
"""The process sets that a program may use, by the number of ranks: disjoint, overlapping, single, and all ranks once
more."""

_SIZES: Mapping[int, float] = {
    0: 30, 1: 60, 2: 40, 63: 80, 1000: 70, 4095: 12, 4097: 12, 10_007: 44, 16_383: 6, 16_385: 6, 50_021: 8,
    200_003: 8, 262_143: 3, 262_145: 3, 1_500_001: 2, 2_097_151: 0.5, 2_097_153: 0.5,
}  # fmt: skip
"""Elements of float32 and how often: both sides of 16 KiB, 64 KiB, 1 MiB and 8 MiB, where plans change."""
_PERIOD = 65_521
_REFUSAL = re.compile(r"\b(algorithm|transport)=")


@dataclass(frozen=True)
class Menu:
    """What programs are drawn from; ``asynchronous`` is the share of the operations that are, ``forced`` of those whose
    algorithm or transport is, ``persistent`` of those that could be; ``transports`` may be asked for."""

    kinds: tuple[str, ...] = KINDS
    asynchronous: float = 0.8
    sets: bool = True
    joins: bool = True
    forced: float = 0.25
    transports: tuple[str, ...] = TRANSPORTS
    persistent: float = 0.2


@dataclass(frozen=True)
class Tensor:
    """A dtype and every rank's shape."""

    dtype: np.dtype[Any]
    shapes: tuple[tuple[int, ...], ...]

    def __repr__(self) -> str:
        return f"{self.dtype.name} {self.shapes[0] if len(set(self.shapes)) == 1 else self.shapes}"


@dataclass(frozen=True)
class Operation:
    """One operation of a set of ranks. ``root``, ``odd``, ``late``, ``duplicate`` and ``active`` are numbered within
    the set.

    Attributes:
        uid: tells operations apart, and their data.
        ranks: the set, in the world's numbers.
        mistake, odd: what one rank does wrong, and which.
        late: the rank that submits it one segment later, or -1.
        duplicate: the rank that tries to submit it twice, or -1.
        active: the ranks that have not joined.
        memory: where its tensors lie, one of `MEMORIES`.
        algorithm, transport: forced, or None.
        persistent: the number of the persistent operation that is started, or 0.
    """

    uid: int
    kind: str
    ranks: tuple[int, ...]
    name: str | None
    blocking: bool
    tensors: tuple[Tensor, ...]
    active: tuple[int, ...]
    op: Op = Op.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: tuple[tuple[int, ...], ...] | None = None
    strided: bool = False
    mistake: str = ""
    odd: int = -1
    late: int = -1
    duplicate: int = -1
    memory: str = "private"
    algorithm: str | None = None
    transport: str | None = None
    persistent: int = 0

    @property
    def forced(self) -> bool:
        return self.algorithm is not None or self.transport is not None

    def __repr__(self) -> str:
        """What differs from the defaults, for people."""
        given = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        return f"{given.pop('kind')}({', '.join(f'{name}={value}' for name, value in given.items())})"


@dataclass(frozen=True)
class Segment:
    """Asynchronous operations, and a blocking one after them."""

    operations: tuple[Operation, ...]
    blocking: Operation | None


@dataclass(frozen=True)
class Epoch:
    """Segments; ``order`` seeds each rank's own order."""

    segments: tuple[Segment, ...]
    order: int


@dataclass(frozen=True)
class JoinPhase:
    """Operations in everybody's order; rank r of the set does the first ``limits[r]`` of them and joins."""

    ranks: tuple[int, ...]
    operations: tuple[Operation, ...]
    limits: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    seed: int
    size: int
    sets: tuple[tuple[int, ...], ...]
    phases: tuple[Epoch | JoinPhase, ...]


# ---- drawing


def draw(seed: int, size: int, menu: Menu = Menu()) -> Program:
    """The program of a seed."""
    return _Drawing(seed, size, menu).program()


class _Drawing:
    def __init__(self, seed: int, size: int, menu: Menu) -> None:
        self._random = Random(f"{seed}/{size}/{menu}")
        self._seed, self._size, self._menu = seed, size, menu
        self._world = tuple(range(size))
        self._uid = 0

    def program(self) -> Program:
        random = self._random
        sets = SETS[self._size] if self._menu.sets and random.random() < 0.5 else ()
        self._sets = tuple(random.sample(sets, random.randint(1, min(2, len(sets))))) if sets else ()
        phases: list[Epoch | JoinPhase] = []
        while len(phases) < 4 and (not phases or random.random() < 0.5):
            phases += [self._join_phase()] if self._menu.joins and random.random() < 0.3 else self._epochs()
        return Program(self._seed, self._size, self._sets, tuple(phases))

    def _epochs(self) -> list[Epoch]:
        """One epoch, or several that are alike but for their data, mistakes, and sometimes a shape."""
        random = self._random
        names = {ranks: random.sample([f"tensor {k}" for k in range(24)], 24) for ranks in (self._world, *self._sets)}
        first = []
        for _ in range(random.choice((1, 1, 2, 3))):
            operations = [
                self._perhaps_persistent(self._operation(self._ranks(), names, blocking=False))
                for _ in range(self._number())
            ]
            blocking = (
                self._perhaps_persistent(self._operation(self._ranks(), names, blocking=True))
                if random.random() < 0.6 or not operations
                else None
            )
            first.append(Segment(tuple(operations), blocking))
        order, same_order = random.getrandbits(30), random.random() < 0.5
        epochs = []
        for step in range(random.choice((1, 1, 1, 2, 3))):
            segments = [
                Segment(
                    tuple(
                        self._delayed(self._again(operation, names), segment.blocking, last=segment is first[-1])
                        for operation in segment.operations
                    ),
                    segment.blocking and self._again(segment.blocking, names),
                )
                for segment in first
            ]
            epochs.append(Epoch(tuple(segments), order if same_order else order + step))
        return epochs

    def _join_phase(self) -> JoinPhase:
        random = self._random
        ranks = self._ranks()
        names = {ranks: random.sample([f"tensor {k}" for k in range(24)], 24)}
        count = random.randint(1, 5)
        limits = [random.randint(0, count) for _ in ranks]
        limits[random.randrange(len(ranks))] = count
        operations = []
        for k in range(count):
            active = tuple(rank for rank, limit in enumerate(limits) if limit > k)
            operation = self._operation(ranks, names, random.random() > self._menu.asynchronous / 2, active)
            if "allgather" not in operation.kind and operation.kind != "alltoall":  # these need every rank
                operation = self._perhaps_persistent(operation)
            operations.append(self._with_mistake(operation))
        return JoinPhase(ranks, tuple(operations), tuple(limits))

    def _number(self) -> int:
        return min(int(self._random.expovariate(0.35)), 9) if self._menu.asynchronous else 0

    def _ranks(self) -> tuple[int, ...]:
        return self._random.choice(self._sets) if self._sets and self._random.random() < 0.4 else self._world

    def _operation(
        self,
        ranks: tuple[int, ...],
        names: Mapping[tuple[int, ...], list[str]],
        blocking: bool,
        active: tuple[int, ...] | None = None,
    ) -> Operation:
        name = names[ranks].pop() if self._random.random() < 0.6 else None
        return self._filled(
            self._random.choice(self._menu.kinds), ranks, name, blocking, active or tuple(range(len(ranks)))
        )

    def _filled(
        self, kind: str, ranks: tuple[int, ...], name: str | None, blocking: bool, active: tuple[int, ...]
    ) -> Operation:
        """An operation of a kind under a name, with tensors and all that belongs to them drawn afresh."""
        random, size = self._random, len(ranks)
        self._uid += 1
        number = random.randint(1, 5) if kind.startswith("grouped") else 1
        splits = None
        if kind == "alltoall":
            scale = random.choice((1, 1, 7, 300, 3000))
            splits = (
                tuple(tuple(random.randint(0, 3) * scale for _ in ranks) for _ in ranks)
                if random.random() < 0.7
                else None
            )
            rows = [sum(row) for row in splits] if splits else [random.randint(0, 3) * scale * size for _ in ranks]
            tensors = [self._with_rows(self._dtype(), rows, size)]
        elif "allgather" in kind:
            tensors = [
                self._with_rows(self._dtype(), [self._count() // (size * number) for _ in ranks], size)
                for _ in range(number)
            ]
        else:
            tensors = [self._alike(self._dtype(), kind, size, number) for _ in range(number)]
        dtypes = [tensor.dtype for tensor in tensors]
        scaled = kind in REDUCTIONS and random.random() < 0.3 and not any(dtype.kind in "biu" for dtype in dtypes)
        return Operation(
            self._uid,
            kind,
            ranks,
            name,
            blocking,
            tuple(tensors),
            active,
            op=random.choice(
                [op for op in OPS if op not in (Op.MIN, Op.MAX) or all(dtype.kind != "c" for dtype in dtypes)]
            ),
            prescale=random.choice((0.5, 2.0)) if scaled else 1.0,
            postscale=random.choice((1.0, 0.25, 3.0)) if scaled else 1.0,
            root=random.choice(active),
            splits=splits,
            strided=random.random() < 0.15,
            memory=random.choice((*MEMORIES, "mapped")),
            **self._way(kind),
        )

    def _way(self, kind: str) -> dict[str, str | None]:
        """An algorithm or a transport to be forced; seldom one that this collective does not have."""
        random = self._random
        if random.random() >= self._menu.forced:
            return {}
        collective = next(name for name in registry.COLLECTIVES if name in kind)
        names = ALGORITHMS if random.random() < 0.1 else registry.on_host(collective)
        which = random.randrange(3)
        return {
            "algorithm": random.choice(names) if which != 0 else None,
            "transport": random.choice(self._menu.transports) if which != 1 else None,
        }

    def _perhaps_persistent(self, operation: Operation) -> Operation:
        if operation.kind not in PERSISTENT or self._random.random() >= self._menu.persistent:
            return operation
        return dataclasses.replace(operation, persistent=operation.uid)

    def _dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float32) if self._random.random() < 0.4 else self._random.choice(DTYPES)

    def _count(self) -> int:
        return self._random.choices(tuple(_SIZES), tuple(_SIZES.values()))[0]

    def _with_rows(self, dtype: np.dtype[Any], rows: Sequence[int], size: int) -> Tensor:
        trailing = self._random.choice(((), (), (1,), (3,), (2, 2)))
        return Tensor(dtype, tuple((count, *trailing) for count in rows))

    def _alike(self, dtype: np.dtype[Any], kind: str, size: int, number: int) -> Tensor:
        """A tensor that has the same shape on every rank, of about as many bytes as that many float32."""
        drawn = self._count()
        count = drawn if drawn < 64 else drawn * 4 // dtype.itemsize // number
        shapes: list[tuple[int, ...]] = [(count,), (count,), (count // 3, 3)]
        if count == 1 and "reducescatter" not in kind:
            shapes = [(1,), ()]
        return Tensor(dtype, (self._random.choice(shapes),) * size)

    def _again(self, operation: Operation, names: Mapping[tuple[int, ...], list[str]]) -> Operation:
        """The same operation on other data; sometimes with other tensors under its name; sometimes with a mistake."""
        self._uid += 1
        if self._random.random() < 0.15:
            again = self._filled(operation.kind, operation.ranks, operation.name, operation.blocking, operation.active)
            if operation.persistent:
                again = dataclasses.replace(again, persistent=again.uid)
        else:
            again = dataclasses.replace(operation, uid=self._uid)
        return self._with_mistake(again)

    def _with_mistake(self, operation: Operation) -> Operation:
        if len(operation.active) < 2 or operation.persistent or self._random.random() > 0.12:
            return operation
        mistakes = ["shape", "dtype", "collective", "refused"]
        if operation.kind in REDUCTIONS:
            mistakes += ["op", "scale"]
        if operation.kind.startswith("grouped"):
            mistakes += ["members"]
        if operation.kind.startswith("broadcast"):
            mistakes += ["root"]
        # A way that cannot serve, or that the other collective does not have, would be a mistake of its own.
        return dataclasses.replace(
            operation,
            mistake=self._random.choice(mistakes),
            odd=self._random.choice(operation.active),
            algorithm=None,
            transport=None,
        )

    def _delayed(self, operation: Operation, blocking: Operation | None, *, last: bool) -> Operation:
        """Sometimes let one rank come late, and another try to submit twice what is in flight until then."""
        random, ranks = self._random, operation.ranks
        if last or operation.name is None or len(ranks) < 2 or random.random() > 0.3:
            return operation
        late, other = random.sample(range(len(ranks)), 2)
        # Whoever was refused has nothing in flight.
        certain = (
            blocking is not None
            and not operation.persistent
            and {ranks[late], ranks[other]} <= set(blocking.ranks)
            and other != operation.odd
        )
        return dataclasses.replace(operation, late=late, duplicate=other if certain and random.random() < 0.5 else -1)


# ---- what must come of it


def values(program: Program, operation: Operation, rank: int) -> list[Array]:
    """What a rank of the set puts in; as it is asked by that rank."""
    asked = as_asked(operation, rank)
    return [
        _numbers(tensor.dtype, tensor.shapes[rank], program.seed, operation.uid, index, rank)
        for index, tensor in enumerate(asked.tensors)
    ]


def _numbers(dtype: np.dtype[Any], shape: tuple[int, ...], *key: int) -> Array:
    start = zlib.crc32(repr(key).encode()) % _PERIOD
    count = math.prod(shape)
    pool = _pool(dtype)[start : start + min(count, _PERIOD)]
    return np.resize(pool, shape) if count > _PERIOD else pool.copy().reshape(shape)


@functools.cache
def _pool(dtype: np.dtype[Any]) -> Array:
    """Numbers to cut from: drawing afresh would take longer than the operations. The period is a prime, unlike all
    blocks."""
    return np.resize(sample(dtype, _PERIOD, 0, 11), 2 * _PERIOD)


def as_asked(operation: Operation, rank: int) -> Operation:
    """The operation as a rank of the set asks for it: with the mistake, on the odd one."""
    if rank != operation.odd:
        return operation
    first, rest = operation.tensors[0], operation.tensors[1:]
    if operation.mistake == "shape":
        return dataclasses.replace(
            operation, tensors=(Tensor(first.dtype, tuple((*shape, 2) for shape in first.shapes)), *rest)
        )
    if operation.mistake == "dtype":
        other = np.dtype(np.float64 if first.dtype == np.int32 else np.int32)
        return dataclasses.replace(operation, tensors=(Tensor(other, first.shapes), *rest))
    if operation.mistake == "collective":
        kind = "allgather" if "allreduce" in operation.kind else "allreduce"
        vector = tuple(shape or (1,) for shape in first.shapes)
        return dataclasses.replace(operation, kind=kind, tensors=(Tensor(first.dtype, vector),), splits=None)
    if operation.mistake == "op":
        return dataclasses.replace(operation, op=Op.SUM if operation.op is not Op.SUM else Op.PRODUCT)
    if operation.mistake == "scale":
        return dataclasses.replace(operation, postscale=operation.postscale + 1)
    if operation.mistake == "members":
        return dataclasses.replace(operation, tensors=(first, first, *rest))
    if operation.mistake == "root":
        return dataclasses.replace(operation, root=(operation.root + 1) % len(operation.ranks))
    return operation


def wanted(program: Program, operation: Operation, rank: int) -> list[Array]:
    """What a rank of the set must get, halves in float64. Ranks that have joined give no rows, and nothing to a
    reduction."""
    size = len(operation.ranks)
    inputs = {peer: values(program, operation, peer) for peer in operation.active}
    results = []
    for index in range(len(operation.tensors)):
        parts = [inputs[peer][index] for peer in operation.active]
        if operation.kind in REDUCTIONS:
            scaled = parts if operation.prescale == 1.0 else [_wide(part) * operation.prescale for part in parts]
            total = _reduced(operation.op, scaled, size)
            total = total if operation.postscale == 1.0 else _wide(total) * operation.postscale
            results.append(_share(total, rank, size) if "reducescatter" in operation.kind else total)
        elif operation.kind.startswith("broadcast"):
            results.append(inputs[operation.root][index])
        elif operation.kind == "alltoall":
            results.append(
                np.concatenate([part[_window(operation, peer, rank)] for peer, part in _by_rank(operation, parts)])
            )
        else:
            results.append(np.concatenate(parts))
    return results


def _wide(array: Array) -> Array:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _reduced(op: Op, parts: list[Array], size: int) -> Array:
    """As `expected`; an average divides by the size of the set, however many have joined."""
    if op is not Op.AVERAGE or len(parts) == size or parts[0].dtype.kind == "b":
        return expected(op, parts)
    total = expected(Op.SUM, parts)
    return np.trunc(total.astype(np.float64) / size).astype(total.dtype) if total.dtype.kind in "iu" else total / size


def _share(total: Array, rank: int, size: int) -> Array:
    share, extra = divmod(total.shape[0], size)
    first = rank * share + min(rank, extra)
    return total[first : first + share + (rank < extra)]


def _by_rank(operation: Operation, parts: list[Array]) -> list[tuple[int, Array]]:
    return list(zip(operation.active, parts, strict=True))


def _splits(operation: Operation, peer: int) -> tuple[int, ...]:
    size = len(operation.ranks)
    return operation.splits[peer] if operation.splits else (operation.tensors[0].shapes[peer][0] // size,) * size


def _window(operation: Operation, peer: int, rank: int) -> slice:
    """The rows that ``peer`` sends to ``rank``."""
    counts = _splits(operation, peer)
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


# ---- running


def make_sets(world: World, sets: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], World | None]:
    """The worlds of process sets, made on all ranks in the same order; None where this rank is no member."""
    return {ranks: world.add_process_set(ranks) for ranks in sets}


def run(
    world: World,
    program: Program,
    sets: Mapping[tuple[int, ...], World | None] | None = None,
    *,
    forks: bool = False,
) -> None:
    """Do one rank's part, and check all that comes of it.

    Args:
        sets: the worlds of the program's sets, if they exist already.
        forks: fork now and then, in the middle of the program; ranks must be processes.

    Raises:
        AssertionError: something came out wrong; says the seed, the size, the rank and the operation.
    """
    _Run(world, program, sets, forks).carry_out()


@dataclass(eq=False)
class _Persistent:
    """A persistent operation and where it lies; ``out`` of an all-reduce out of place. Without a start: refused."""

    tensors: list[Laid]
    out: Laid | None = None
    start: Any = None
    error: CollectivesError | None = None


@dataclass(eq=False)
class _Pending:
    """An operation in flight: the tensors passed, where they lie, and the handle, or the error that its submission
    raised."""

    operation: Operation
    world: World
    tensors: list[Any]
    laid: list[Laid] = dataclasses.field(default_factory=list)
    handle: Any = None
    error: CollectivesError | None = None


class _Run:
    def __init__(
        self,
        world: World,
        program: Program,
        sets: Mapping[tuple[int, ...], World | None] | None = None,
        forks: bool = False,
    ) -> None:
        opened = make_sets(world, program.sets) if sets is None else sets
        self._world, self._program, self._worlds = world, program, {**opened, tuple(range(world.size)): world}
        self._random = Random(f"{program.seed}/{world.rank}")
        self._forks = forks
        self._digests: dict[int, bytes] = {}
        self._refusals: dict[int, str] = {}
        self._persistent: dict[int, _Persistent] = {}
        self.places = Places(Random(f"places {program.seed}/{world.rank}"))
        self.doing: Any = "the start"

    def carry_out(self) -> None:
        program = self._program
        try:
            for phase in program.phases:
                self.join_phase(phase) if isinstance(phase, JoinPhase) else self.epoch(phase)
                self.look_at_snapshots()
            self.make_persistent(())
            self.compare("bits", self._digests)
            self.compare("refusals", self._refusals)
            self.places.check()
        except (RankFailedError, KeyboardInterrupt):
            raise  # not this rank's fault
        except BaseException as error:
            text = (
                f"seed {program.seed}, size {program.size}, rank {self._world.rank}, at {self.doing}: "
                f"{type(error).__name__}: {error}"
            )
            raise AssertionError(text) from error

    def look_at_snapshots(self) -> None:
        """Judge what was seen in the meantime; here everything is judged at once."""

    def epoch(self, epoch: Epoch) -> None:
        everything = (operation for segment in epoch.segments for operation in (*segment.operations, segment.blocking))
        self.make_persistent([operation for operation in everything if operation is not None])
        order = Random(f"{epoch.order}/{self._world.rank}")
        ripe: list[_Pending] = []
        held: list[_Pending] = []  # submitted here, while the late rank has still to
        delayed: list[Operation] = []
        for segment in epoch.segments:
            mine = [operation for operation in segment.operations if self._world.rank in operation.ranks]
            late = [operation for operation in mine if operation.late == self._rank(operation)]
            punctual = [operation for operation in mine if operation.late != self._rank(operation)]
            submitted = []
            for operation in _shuffled(punctual + delayed, order):
                submitted.append(self._submit(operation))
                if operation.duplicate == self._rank(operation) and submitted[-1].error is None:
                    self._submit_twice(submitted[-1])
                self._look_at(ripe)
                self._fork()
            early = {operation.uid for operation in punctual if operation.late >= 0}
            ripe += held + [pending for pending in submitted if pending.operation.uid not in early]
            held = [pending for pending in submitted if pending.operation.uid in early]
            delayed = late
            while ripe and self._random.random() < 0.5:
                self._look_at(ripe)
            if segment.blocking is not None and self._world.rank in segment.blocking.ranks:
                self._block(segment.blocking)
        self._finish(ripe)

    def join_phase(self, phase: JoinPhase) -> None:
        world = self._worlds[phase.ranks]
        if world is None:
            return
        self.make_persistent(phase.operations)
        pending = []
        for operation in phase.operations[: phase.limits[world.rank]]:
            if operation.blocking:
                self._block(operation)
            else:
                pending.append(self._submit(operation))
            self._look_at(pending)
        self.doing = phase
        last = world.join()
        self._finish(pending)
        self.doing = phase
        assert world.allgather_object(last) == [last] * world.size, "the ranks do not agree on who joined last"
        # Who took part in the last blocking operation that others had joined before joined later than they.
        met = [
            operation.active
            for operation in phase.operations
            if operation.blocking and not operation.forced and len(operation.active) < world.size
        ]
        assert phase.ranks.index(last) in (met[-1] if met else range(world.size)), f"rank {last} did not join last"

    def compare(self, what: str, mine: Mapping[int, Any]) -> None:
        """All ranks must have got the same all-reduces, to the bit; and what was refused on one, on all."""
        self.doing = f"the comparison of {what}"
        if self._world.size == 1:
            return
        for rank, theirs in enumerate(self._world.allgather_object(mine)):
            differing = [uid for uid in theirs if mine.get(uid, theirs[uid]) != theirs[uid]]
            assert not differing, f"the operations with uid {differing} have other {what} on rank {rank}"

    def make_persistent(self, operations: Sequence[Operation]) -> None:
        """Make the persistent operations of an epoch that are not there yet, in everybody's order, and free those that
        are not of it."""
        needed = {operation.persistent for operation in operations}
        for number in [number for number in self._persistent if number not in needed]:
            old = self._persistent.pop(number)
            if old.start is not None and self._random.random() < 0.7:
                old.start.free()
            for laid in (*old.tensors, *filter(None, (old.out,))):
                self.places.done(laid, "a persistent operation")
        for operation in operations:
            mine = self._world.rank in operation.ranks
            if mine and operation.persistent and operation.persistent not in self._persistent:
                self._persistent[operation.persistent] = self._make(operation)

    def _make(self, operation: Operation) -> _Persistent:
        pending, kind, arguments, keywords = self._prepare(operation, made=True)
        made = _Persistent(pending.laid)
        if kind == "allreduce":
            made.out = self.places.lay(np.zeros_like(pending.tensors[0]), operation.memory, contiguous=True)
            keywords["out"] = made.out.tensor
        try:
            made.start = getattr(pending.world, f"{kind.removesuffix('_')}_init")(*arguments, **keywords)
        except (InvalidArgumentError, TransportError) as error:
            if not operation.forced or not _REFUSAL.search(str(error)):
                raise
            made.error = error
        return made

    def _fork(self) -> None:
        """Now and then; a child writes to all memory that it has."""
        if self._forks and self._random.random() < 0.03:
            self.doing = "a fork"
            self.places.fork()

    def _rank(self, operation: Operation) -> int:
        return operation.ranks.index(self._world.rank)

    def _prepare(self, operation: Operation, *, made: bool = False) -> tuple[_Pending, str, list[Any], dict[str, Any]]:
        """What to call, and with what; ``made``: to make it persistent."""
        self.doing = operation
        rank = self._rank(operation)
        asked = as_asked(operation, rank)
        arrays = values(self._program, operation, rank)
        world = self._worlds[operation.ranks]
        assert world is not None
        if operation.persistent and not made:
            bound = self._persistent[operation.persistent]
            for one, array in zip(bound.tensors, arrays, strict=True):
                np.copyto(one.tensor, array)
            return _Pending(operation, world, [one.tensor for one in bound.tensors], bound.tensors), asked.kind, [], {}
        laid = [self.places.lay(array, operation.memory, strided=operation.strided) for array in arrays]
        tensors = [one.tensor for one in laid]
        refused = operation.mistake == "refused" and rank == operation.odd
        given: list[Any] = ["text"] if refused and not operation.kind.startswith("broadcast") else tensors
        if given is tensors and not made and not operation.kind.endswith("_") and self._random.random() < 0.1:
            given = [_read_only(tensor) for tensor in tensors]
        arguments, keywords = self._call(asked, rank, given)
        if operation.forced:
            keywords |= {"algorithm": asked.algorithm, "transport": asked.transport}
        return _Pending(operation, world, tensors, laid), asked.kind, arguments, keywords

    def _call(self, asked: Operation, rank: int, given: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments and keywords of what a rank of the set asks for, but for the way."""
        arguments: list[Any] = [given if asked.kind.startswith("grouped") else given[0]]
        keywords: dict[str, Any] = {"name": asked.name}
        if asked.kind in REDUCTIONS:
            keywords |= {"op": asked.op, "prescale_factor": asked.prescale, "postscale_factor": asked.postscale}
        if asked.kind.startswith("broadcast"):
            refused = asked.mistake == "refused" and rank == asked.odd
            arguments.append(len(asked.ranks) if refused else asked.root)
        if asked.kind == "alltoall":
            arguments.append(asked.splits and list(asked.splits[rank]))
        return arguments, keywords

    def _submit(self, operation: Operation) -> _Pending:
        pending, kind, arguments, keywords = self._prepare(operation)
        method = f"{kind.removesuffix('_')}_async{'_' if kind.endswith('_') else ''}"
        if operation.persistent:
            bound = self._persistent[operation.persistent]
            pending.error = bound.error
            if bound.start is not None:
                bound.start.start()
            return pending
        try:
            pending.handle = getattr(pending.world, method)(*arguments, **keywords)
        except CollectivesError as error:
            pending.error = error
        return pending

    def _submit_twice(self, pending: _Pending) -> None:
        """The late rank cannot have submitted it yet, so the name is in flight."""
        try:
            pending.world.allreduce_async(np.zeros(3), name=pending.operation.name)
        except InvalidArgumentError:
            return
        raise AssertionError("a name in flight was accepted a second time")

    def _block(self, operation: Operation) -> None:
        pending, kind, arguments, keywords = self._prepare(operation)
        if not operation.persistent:
            self._judge(pending, lambda: getattr(pending.world, kind)(*arguments, **keywords))
            return
        bound = self._persistent[operation.persistent]
        pending.error = bound.error
        self._judge(pending, lambda: self._result(pending, bound.start))

    def _look_at(self, ripe: list[_Pending]) -> None:
        """Now and then, poll or synchronize one of the operations that every rank has submitted or will without
        waiting."""
        if not ripe or self._random.random() < 0.6:
            return
        chosen = self._random.randrange(len(ripe))
        if self._random.random() < 0.5:
            self.doing = ripe[chosen].operation
            persistent = self._persistent.get(ripe[chosen].operation.persistent)
            if persistent is not None and persistent.start is not None:
                assert persistent.start.poll() in (True, False)
            if ripe[chosen].handle is not None:
                assert ripe[chosen].world.poll(ripe[chosen].handle) in (True, False)
        else:
            self._synchronize(ripe.pop(chosen))

    def _finish(self, ripe: list[_Pending]) -> None:
        self._random.shuffle(ripe)
        while ripe:
            self._synchronize(ripe.pop())

    def _synchronize(self, pending: _Pending) -> None:
        self.doing = pending.operation
        bound = self._persistent.get(pending.operation.persistent)
        wait = bound.start and bound.start.wait if bound else lambda: pending.world.synchronize(pending.handle)
        self._judge(pending, lambda: self._result(pending, wait))

    def _result(self, pending: _Pending, wait: Callable[[], Any]) -> Any:
        if pending.error is not None:
            raise pending.error
        return wait()

    def _judge(self, pending: _Pending, result: Callable[[], Any]) -> None:
        operation = pending.operation
        try:
            got = result()
        except (RankFailedError, AssertionError):
            raise
        except CollectivesError as error:
            if operation.mistake:
                refused = operation.mistake == "refused" and self._rank(operation) == operation.odd
                assert isinstance(error, (ValueError, TypeError) if refused else MismatchError), (
                    f"a {type(error).__name__}: {error}"
                )
            else:
                allowed = self._may_be_refused(operation) and isinstance(error, (InvalidArgumentError, TransportError))
                if not allowed or not _REFUSAL.search(str(error)):
                    raise
                self._refusals[operation.uid] = type(error).__name__
            # Of a group that is refused for its way, some may have been carried out.
            if operation.mistake or len(operation.tensors) == 1:
                self._check_untouched(pending)
            self._finished(pending)
            return
        if operation.mistake:
            raise AssertionError(f"rank {operation.odd} of the set made a mistake, but here came {got!r}")
        if operation.forced:
            self._refusals[operation.uid] = "done"
        self._check(pending, got)
        self._finished(pending)

    def _may_be_refused(self, operation: Operation) -> bool:
        return operation.forced

    def _check_untouched(self, pending: _Pending) -> None:
        operation = pending.operation
        given = values(self._program, operation, self._rank(operation))
        for tensor, array in zip(pending.tensors, given, strict=True):
            np.testing.assert_array_equal(tensor, array, "touched although the operation was refused")

    def _finished(self, pending: _Pending) -> None:
        if pending.operation.persistent:
            bound = self._persistent[pending.operation.persistent]
            for laid in (*bound.tensors, *filter(None, (bound.out,))):
                laid.check(f"{pending.operation}")
            return
        for laid in pending.laid:
            self.places.done(laid, f"{pending.operation}")

    def _results(self, operation: Operation, result: Any) -> list[Any]:
        """The tensors of a result; of an all-to-all also the numbers of rows must be right."""
        if operation.splits:
            result, received = result
            rank, active = self._rank(operation), operation.active
            assert list(received) == [
                _splits(operation, peer)[rank] if peer in active else 0 for peer in range(len(operation.ranks))
            ]
        return result if operation.kind.startswith("grouped") else [result]

    def _check(self, pending: _Pending, result: Any) -> None:
        operation = pending.operation
        rank, size = self._rank(operation), len(operation.ranks)
        results = self._results(operation, result)
        tolerance = math.ceil(size * max(1.0, operation.prescale) * max(1.0, operation.postscale))
        for index, (tensor, got, right) in enumerate(
            zip(pending.tensors, results, wanted(self._program, operation, rank), strict=True)
        ):
            assert got.dtype == tensor.dtype and got.shape == right.shape, (
                f"tensor {index}: {got.dtype}{got.shape}, not {right.shape}"
            )
            assert_close(got, right, tolerance)
            if operation.kind.endswith("_"):
                assert got is tensor, "in place, another tensor came back"
            else:
                np.testing.assert_array_equal(
                    tensor, values(self._program, operation, rank)[index], "the input was changed"
                )
        if operation.persistent:
            out = self._persistent[operation.persistent].out
            if out is not None:
                assert results[0].ctypes.data == out.tensor.ctypes.data, "the result is not where it was to be"
                np.testing.assert_array_equal(results[0], out.tensor)
        elif not operation.kind.endswith("_"):
            self.places.results(results)
        if "allreduce" in operation.kind and operation.op is not Op.PRODUCT:
            self._digests[operation.uid] = hashlib.blake2b(
                b"".join(got.tobytes() for got in results), digest_size=8
            ).digest()


def _read_only(tensor: Array) -> Array:
    view = tensor.view()
    view.flags.writeable = False
    return view


def _shuffled(operations: list[Operation], random: Random) -> list[Operation]:
    """Named operations in an order of this rank's own; the unnamed ones of each set stay in everybody's."""
    order = list(operations)
    random.shuffle(order)
    turns = {
        ranks: iter([one for one in operations if one.name is None and one.ranks == ranks])
        for ranks in {o.ranks for o in operations}
    }
    return [operation if operation.name is not None else next(turns[operation.ranks]) for operation in order]


if __name__ == "__main__":
    from tests.support.random.program_runs import main

    main()
