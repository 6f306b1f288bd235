"""Tasks: how what the ranks have agreed on is carried out.

A task is one operation, or one bucket of fused ones. It is carried out in two halves, between which the ranks meet:

    prepare    what peers will read is put where they read it: staged in the window, or given by address
    run        all ranks are here: move and reduce, and unpack

so that the very round in which the ranks agree also brings the first bucket's data, or the addresses of it. A `Batch` is the
tasks of one agreed list, kept under the list's signature: when the same list comes again, nothing is planned.
"""

from __future__ import annotations

import contextvars
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives import adasum, arrays, compression, fusion, partition, reduction
from collectives.binder import Plan
from collectives.buffers import ResultPool
from collectives.entries import Entries, Entry, Reduce
from collectives.executor import Executor
from collectives.planner import Choice, Planner
from collectives.plans import Plans
from collectives.program import Medium
from collectives.reduction import Op
from collectives.transport.base import Array, Control
from collectives.transport.group import Group

if TYPE_CHECKING:
    from collectives.handles import Handle
    from collectives.timeline import Timeline

_ALONE_FROM = 256 << 10
"""Bytes from which a tensor gains nothing from being copied into a buffer with others."""
_COPIED_BYTES = 16 << 20
"""The most bytes of one such buffer."""


@dataclass(slots=True)
class Statistics:
    """What a world has done so far. Bytes are of this rank's tensors."""

    rounds: int = 0
    """Rounds of agreement."""
    unanimous: int = 0
    """Rounds in which all ranks proposed the same."""
    compared: int = 0
    """Rounds after which the ranks compared what they have."""
    exchanged: int = 0
    """Comparisons in which something new was told in full."""
    tensors: int = 0
    buckets: int = 0
    """Tasks carried out; a bucket of fused tensors is one."""
    plans_made: int = 0
    """Lists of several operations that were not known yet."""
    bytes_reduced: int = 0
    bytes_packed: int = 0
    bytes_unpacked: int = 0

    def copy(self) -> Statistics:
        """The counters as they are now."""
        return Statistics(**{field.name: getattr(self, field.name) for field in fields(self)})


class Context:
    """What the tasks of one world share."""

    def __init__(self, group: Group, executor: Executor, entries: Entries, plans: Plans, planner: Planner, pool: ResultPool) -> None:
        self.rank, self.size = group.rank, group.size
        self.group = group
        self.control: Control = group.control
        self.executor = executor
        self.entries = entries
        self.plans = plans
        self.planner = planner
        self.pool = pool
        self.statistics = Statistics()
        self.timeline: Timeline | None = None
        self.joined = False
        """Whether this rank contributes neutral elements, which no factor may touch."""
        self.quietly = _quiet_runner()
        self._buffer = np.empty(0, np.uint8)

    def buffer(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Memory that tasks take turns in using, as ``count`` elements."""
        if self._buffer.nbytes < count * dtype.itemsize:
            self._buffer = np.empty(-(-count * dtype.itemsize // 4096) * 4096, np.uint8)
        return self._buffer[: count * dtype.itemsize].view(dtype)

    def release(self) -> None:
        """Let go of the windows."""
        del self.executor, self.entries, self.plans

    def run_plan(self, plan: Plan, staged: bool, warns: bool) -> None:
        """Run a plan without NumPy's warnings."""
        # Entered here and not around a wait: a context admits one thread at a time.
        if warns:
            self.quietly(self.executor.run, plan, staged)
        else:
            self.executor.run(plan, staged)

    def scale(self, scaling: reduction.Scaling, source: Array, out: Array) -> None:
        with reduction.quiet():
            scaling(source, out)

    def carry_out(self, entry: Entry, source: Array, out: Array) -> None:
        """Agree on and run an operation that is part of another: all ranks are here, and know what comes."""
        one = One(self, entry)
        words = one.prepare(source, out)
        self.control.agree(one.token, words)
        one.run(source, out)


class One:
    """An all-reduce, reduce-scatter, broadcast or barrier by itself; also one without elements, where coming is all there is to it."""

    packs = False

    def __init__(self, context: Context, entry: Entry) -> None:
        self._context = context
        self.entry = entry
        self.token = entry.signature
        self._plan: Plan | None = None
        self._scaled: Array | None = None

    def prepare(self, source: Array, out: Array) -> Sequence[int]:
        """Make visible to the peers what they will read; the words to enter with."""
        entry, context = self.entry, self._context
        self._plan = plan = entry.plan()
        if entry.prescale is not None and not context.joined:
            self._scaled = scaled = out if out is not source and out.size == source.size else context.pool.empty(source.shape, source.dtype)
            context.scale(entry.prescale, source, scaled)
            source = scaled
        if plan is None:
            return ()
        state = context.executor.state
        state.input, state.output = source, out
        if plan.needs_addresses:
            state.input_at = at = address(source)
            state.output_at = at if out is source else address(out)
            return (at, state.output_at)
        if plan.staged:
            context.executor.stage(plan)
        return ()

    def run(self, source: Array, out: Array) -> None:
        """All ranks have prepared."""
        context, plan, entry = self._context, self._plan, self.entry
        if plan is not None:
            state = context.executor.state
            if plan.needs_addresses:
                words_of = context.control.words_of
                for peer in plan.partners:
                    state.addresses[peer] = words_of(peer)
            if entry.warns:
                context.quietly(context.executor.run, plan, plan.staged)
            else:
                context.executor.run(plan, plan.staged)
            state.input = state.output = _EMPTY
            self._scaled = None
        elif entry.native is not None:
            entry.native(source if self._scaled is None else self._scaled, out)
            self._scaled = None
            if entry.finish is not None:
                context.scale(entry.finish, out, out)

    def prepare_handles(self, handles: Sequence[Handle]) -> Sequence[int]:
        return self.prepare(handles[0].source, handles[0].out)

    def run_handles(self, handles: Sequence[Handle]) -> None:
        self.run(handles[0].source, handles[0].out)


class Rows:
    """An allgather or an all-to-all: how many rows move is found out on the way."""

    packs = False

    def __init__(self, context: Context, entry: Entry) -> None:
        self._context = context
        self.entry = entry
        self.token = entry.signature

    def prepare_handles(self, handles: Sequence[Handle]) -> Sequence[int]:
        return (address(handles[0].source), 0, *handles[0].rows)

    def run_handles(self, handles: Sequence[Handle]) -> None:
        handle, context, entry = handles[0], self._context, self.entry
        state, control, rank = context.executor.state, context.control, context.rank
        every: list[Sequence[int]] = []
        for peer in range(context.size):
            words = (address(handle.source), 0, *handle.rows) if peer == rank else control.words_of(peer)
            state.addresses[peer] = words[:2]
            every.append(words[2:])
        if entry.request.collective == "allgather":
            received, rows = [words[0] for words in every], tuple(words[0] for words in every)
        else:
            received, rows = [words[rank] for words in every], tuple(itertools.chain.from_iterable(every))
        out = context.pool.empty((sum(received), *(entry.request.shape or ())), entry.dtype)
        handle.keep = (handle.keep, out, received)
        handle.out = flat = out.reshape(-1)
        plan = context.entries.plan_for_rows(entry, rows)
        if plan is None:
            return
        state.input, state.output = handle.source, flat
        if plan.needs_addresses:
            state.input_at, state.output_at = address(handle.source), address(flat)
        if plan.reads_outputs:
            control.agree(self.token, (state.input_at, state.output_at))
            for peer in plan.partners:
                state.addresses[peer] = control.words_of(peer)
        context.run_plan(plan, False, True)
        state.input = state.output = _EMPTY


class Combine:
    """An Adasum: an all-to-all, a tiny all-reduce for each level of the tree, and an allgather; for each tensor by itself."""

    packs = False

    def __init__(self, context: Context, entry: Entry) -> None:
        self._context = context
        self.entry = entry
        self.token = entry.signature

    def prepare_handles(self, handles: Sequence[Handle]) -> Sequence[int]:
        return ()

    def run_handles(self, handles: Sequence[Handle]) -> None:
        handle, entry, context = handles[0], self.entry, self._context
        source, out, size, rank = handle.source, handle.out, context.size, context.rank
        if entry.prescale is not None and not context.joined:
            scaled = context.pool.empty(source.shape, source.dtype)
            context.scale(entry.prescale, source, scaled)
            source = scaled
        sizes = partition.split(source.size, size)
        slices = np.empty((size, sizes[rank]), source.dtype)
        plans = entry.plan_for((), lambda: self._exchange(sizes, entry.dtype, gathers=False))
        self._move(plans, source, slices.reshape(-1))
        vectors = adasum.widen(slices)
        for pairs in adasum.tree(size):
            dots = adasum.dots(vectors, pairs)
            flat = dots.reshape(-1)
            context.carry_out(
                context.entries.reducing("allreduce", arrays.view(flat), False, Op.SUM, None, 1.0, 1.0, None, None), flat, flat
            )
            adasum.combine(vectors, pairs, dots)
        mine = np.empty(sizes[rank], source.dtype)
        compression.cast(vectors[0], mine)
        self._move(entry.plan_for((1,), lambda: self._exchange(sizes, entry.dtype, gathers=True)), mine, out)
        if entry.finish is not None:
            context.scale(entry.finish, out, out)

    def _exchange(self, sizes: Sequence[int], dtype: np.dtype[Any], *, gathers: bool) -> Plan:
        plans, nbytes, size = self._context.plans, sum(sizes) * dtype.itemsize, self._context.size
        if gathers:
            return plans.allgather(sizes, dtype, self._context.planner.choose("allgather", nbytes))
        table = [sizes[to] for _ in range(size) for to in range(size)]
        return plans.alltoall(table, dtype, self._context.planner.choose("alltoall", nbytes))

    def _move(self, plan: Plan | None, source: Array, out: Array) -> None:
        context = self._context
        state, control = context.executor.state, context.control
        assert plan is not None
        state.input, state.output = source, out
        state.input_at, state.output_at = address(source), address(out)
        control.agree(self.token, (state.input_at, state.output_at))
        for peer in range(context.size):
            if peer != context.rank:
                state.addresses[peer] = control.words_of(peer)
        context.run_plan(plan, False, False)
        state.input = state.output = _EMPTY


class Packed:
    """A bucket through windows: the pack is the send."""

    packs = True

    def __init__(self, context: Context, entries: Sequence[Entry], choice: Choice) -> None:
        self._context = context
        self._entry = first = entries[0]
        self.token = first.signature
        self._pieces = fusion.Pieces([entry.count for entry in entries])
        assert first.kernel is not None
        self._plan = context.plans.fused(self._pieces, None, first.dtype, choice, first.kernel, first.finish)

    def prepare_handles(self, handles: Sequence[Handle]) -> Sequence[int]:
        context, pieces = self._context, self._pieces
        pieces.sources = pieces.operands = [handle.source for handle in handles]
        pieces.outs = [handle.out for handle in handles]
        pieces.scale = None if context.joined else self._entry.prescale
        if pieces.scale is None:
            context.executor.stage(self._plan)
        else:
            with reduction.quiet():
                context.executor.stage(self._plan)
        return ()

    def run_handles(self, handles: Sequence[Handle]) -> None:
        context, pieces = self._context, self._pieces
        if pieces.scale is not None:
            with reduction.quiet():
                pieces.scale_operands()
            pieces.operands = pieces.outs
        context.run_plan(self._plan, True, self._entry.warns)
        pieces.sources = pieces.operands = pieces.outs = ()


class Listed:
    """A bucket over direct reads: nothing is packed, lists of addresses say where everything lies."""

    packs = False

    def __init__(self, context: Context, entries: Sequence[Entry], choice: Choice) -> None:
        self._context = context
        self._entry = first = entries[0]
        self.token = first.signature
        self._pieces = fusion.Pieces([entry.count for entry in entries])
        self._lists = fusion.Lists(self._pieces, first.dtype.itemsize)
        assert first.kernel is not None
        self._plan = context.plans.fused(self._pieces, self._lists, first.dtype, choice, first.kernel, first.finish)
        self._lists.seal((*self._plan.partners, context.rank))
        self._addresses: Array = np.empty(2 * len(entries), np.int64)
        self._words = memoryview(self._addresses.data).cast("B").cast("q")

    def prepare_handles(self, handles: Sequence[Handle]) -> memoryview:
        count, addresses, pieces = len(handles), self._addresses, self._pieces
        pieces.sources = sources = [handle.source for handle in handles]
        pieces.outs = outs = [handle.out for handle in handles]
        addresses[:count] = inputs = [source.__array_interface__["data"][0] for source in sources]
        addresses[count:] = [
            at if out is source else out.__array_interface__["data"][0] for at, source, out in zip(inputs, sources, outs, strict=True)
        ]
        return self._words

    def run_handles(self, handles: Sequence[Handle]) -> None:
        context, lists = self._context, self._lists
        lists.locate(context.rank, self._addresses)
        for peer in self._plan.partners:
            lists.locate(peer, np.frombuffer(context.control.words_of(peer), np.int64))  # type: ignore[call-overload]
        context.run_plan(self._plan, False, self._entry.warns)
        self._pieces.sources = self._pieces.outs = ()


class Copied:
    """A bucket of small tensors in a buffer, where neither windows nor direct reads reach every rank."""

    packs = True

    def __init__(self, context: Context, entries: Sequence[Entry], choice: Choice) -> None:
        self._context = context
        self._entry = first = entries[0]
        self.token = first.signature
        self._pieces = fusion.Pieces([entry.count for entry in entries])
        self._native: Reduce | None = None
        self._plan: Plan | None = None
        assert first.kernel is not None
        if choice.algorithm == "native":
            self._native = context.entries.natively(first)
        else:
            self._plan = context.plans.allreduce((self._pieces.total,), first.dtype, choice, first.kernel, first.finish)
        self._buffer: Array = _EMPTY

    def prepare_handles(self, handles: Sequence[Handle]) -> Sequence[int]:
        context, pieces, entry, plan = self._context, self._pieces, self._entry, self._plan
        pieces.sources = [handle.source for handle in handles]
        pieces.scale = None if context.joined else entry.prescale
        buffer = context.buffer(pieces.total, entry.dtype)
        if self._buffer.base is not buffer.base:
            self._buffer = buffer
        with reduction.quiet():
            pieces.gather(0, pieces.total, self._buffer)
        state = context.executor.state
        state.input = state.output = self._buffer
        if plan is not None and plan.needs_addresses:
            state.input_at = state.output_at = address(self._buffer)
            return (state.input_at, state.output_at)
        if plan is not None and plan.staged:
            context.executor.stage(plan)
        return ()

    def run_handles(self, handles: Sequence[Handle]) -> None:
        context, plan, pieces = self._context, self._plan, self._pieces
        state = context.executor.state
        if plan is not None:
            for peer in plan.partners:
                state.addresses[peer] = context.control.words_of(peer)
            context.run_plan(plan, plan.staged, True)
        elif self._native is not None:
            self._native(self._buffer, self._buffer)
            if self._entry.finish is not None:
                context.scale(self._entry.finish, self._buffer, self._buffer)
        pieces.outs = [handle.out for handle in handles]
        pieces.scatter(self._buffer)
        pieces.sources = pieces.outs = ()
        state.input = state.output = _EMPTY


Task = One | Rows | Combine | Packed | Listed | Copied


class Batch:
    """The tasks of one list of operations.

    Args:
        context: of the world.
        entries: of the list, the members of groups in place of the groups.
        threshold: the most bytes of a bucket.
        chain: the list's signature.
    """

    def __init__(self, context: Context, entries: Sequence[Entry], threshold: int, chain: int) -> None:
        self._context = context
        self.entries = entries
        self.chain = chain
        self.generation = -1
        """Of the ledger, when its cache last knew all these requests."""
        self.tasks: list[tuple[Task, tuple[int, ...]]] = []
        context.statistics.plans_made += len(entries) > 1
        keys = [entry.fuses_with for entry in entries]
        for bucket in fusion.plan(keys, [entry.nbytes for entry in entries], threshold):
            self._plan(bucket.members)
        self.nbytes = sum(entry.nbytes for entry in entries)
        self._packed = sum(entries[number].nbytes for task, members in self.tasks if task.packs for number in members)

    def _plan(self, members: tuple[int, ...]) -> None:
        entries, context = [self.entries[number] for number in members], self._context
        first = entries[0]
        if len(entries) == 1:
            self.tasks.append((self._alone(first), members))
            return
        total = sum(entry.nbytes for entry in entries)
        choice = context.entries.choose_fused(first, total)
        one_host = len(context.group.hosts) == 1
        if one_host and choice.medium is Medium.WINDOW and choice.algorithm != "native":
            self.tasks.append((Packed(context, entries, choice), members))
        elif one_host and choice.medium is Medium.DIRECT and choice.algorithm == "direct" and first.prescale is None:
            self.tasks.append((Listed(context, entries, choice), members))
        else:
            for number in members:
                if self.entries[number].nbytes >= _ALONE_FROM:
                    self.tasks.append((self._alone(self.entries[number]), (number,)))
            small = tuple(number for number in members if self.entries[number].nbytes < _ALONE_FROM)
            self._split(small, _COPIED_BYTES, lambda part, chosen: Copied(context, part, chosen))

    def _split(self, members: Sequence[int], limit: int, make: Callable[[Sequence[Entry], Choice], Task]) -> None:
        """Make one task for each part of the members that has at most ``limit`` bytes."""
        part: list[int] = []
        filled = 0
        for number in (*members, -1):
            nbytes = self.entries[number].nbytes if number >= 0 else 0
            if part and (number < 0 or filled + nbytes > limit):
                entries = [self.entries[n] for n in part]
                choice = self._context.entries.choose_fused(entries[0], filled)
                self.tasks.append((make(entries, choice) if len(part) > 1 else self._alone(entries[0]), tuple(part)))
                part, filled = [], 0
            part.append(number)
            filled += nbytes

    def _alone(self, entry: Entry) -> Task:
        context = self._context
        if entry.request.collective in ("allgather", "alltoall"):
            return Rows(context, entry)
        if entry.op is Op.ADASUM and entry.moves:
            return Combine(context, entry)
        # The very object that a blocking call has prepared, if it could not be carried out at once.
        entry.step = entry.step or One(context, entry)
        one: One = entry.step
        return one

    def prepare(self, handles: Sequence[Handle]) -> Sequence[int] | memoryview:
        """Prepare the first task; the words to enter the round with."""
        if not self.tasks:
            return ()
        task, members = self.tasks[0]
        return task.prepare_handles([handles[number] for number in members])

    def run(self, handles: Sequence[Handle]) -> None:
        """All ranks are in the round: carry out every task."""
        context = self._context
        control, timeline = context.control, context.timeline
        for position, (task, members) in enumerate(self.tasks):
            mine = handles if len(self.tasks) == 1 else [handles[number] for number in members]
            if timeline is not None:
                self._run_timed(timeline, position, task, mine)
                continue
            if position:
                control.agree(task.token, task.prepare_handles(mine))
            task.run_handles(mine)
        statistics = context.statistics
        statistics.tensors += len(handles)
        statistics.buckets += len(self.tasks)
        statistics.bytes_reduced += self.nbytes
        statistics.bytes_packed += self._packed
        statistics.bytes_unpacked += self._packed

    def _run_timed(self, timeline: Timeline, position: int, task: Task, handles: Sequence[Handle]) -> None:
        """The same, with a record of where the time goes."""
        begun = time.monotonic()
        if position:
            words = task.prepare_handles(handles)
            packed = time.monotonic()
            if task.packs:
                timeline.span("engine", "pack", begun, packed)
            self._context.control.agree(task.token, words)
            begun = time.monotonic()
            timeline.span("engine", "wait", packed, begun)
        task.run_handles(handles)
        request = handles[0].entry.request
        kind = type(task).__name__.lower()
        plan = getattr(task, "_plan", None)
        how = plan.description if plan is not None else kind
        timeline.span(
            "engine",
            f"{request.collective}: {how}",
            begun,
            time.monotonic(),
            tensors=[handle.name for handle in handles],
            bytes=sum(handle.entry.nbytes for handle in handles),
        )


def address(array: Array) -> int:
    """Where an array's elements begin."""
    at: int = array.__array_interface__["data"][0]
    return at


def _quiet_runner() -> Callable[..., Any]:
    """A function that calls another without NumPy's floating-point warnings.

    NumPy 2 keeps its error state in a context variable: a context in which it is off, made once and entered under the
    engine's lead, costs a twentieth of `numpy.errstate`. NumPy 1 needs the latter.
    """
    if int(np.__version__.split(".")[0]) >= 2:
        context = contextvars.copy_context()
        context.run(np.seterr, all="ignore")
        return context.run

    def run(function: Callable[..., Any], *arguments: Any) -> Any:
        with reduction.quiet():
            return function(*arguments)

    return run


_EMPTY = np.empty(0)
