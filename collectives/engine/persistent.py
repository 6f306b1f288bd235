"""Persistent operations: requests that are bound, once, to the memory of every rank.

A persistent operation has a request of its own, with a number that all ranks have agreed on, so that it meets nothing
but itself. Its arrays stay, and so do their addresses, which the ranks exchange when it is made: a start enters its
round with the token alone, and its task has nothing to look up.

While a rank has joined, the operation is carried out as the ordinary one that it was made from: the neutral elements of
that rank are not where the operation is bound to.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.engine.batches import Batch
from collectives.engine.buckets import LocatedBucket, is_reached
from collectives.engine.context import Context
from collectives.engine.handles import EMPTY, Handle, no_result
from collectives.engine.overlaps import claimed_extents
from collectives.engine.request_cache import CachedRequest
from collectives.engine.rows import exchanged_rows
from collectives.engine.tasks import HostTask, OneTensor, Task, Words
from collectives.plan.plan import Plan
from collectives.tensors import arrays
from collectives.tensors.arena import MAPPED
from collectives.tensors.arrays import address
from collectives.transport.base import Array

_RESULT = operator.attrgetter("keep.result")
"""Delivers a start's result: its handle keeps the operation."""
Places = tuple[int, int]
"""The words that tell where a rank's input and output lie."""


class Bound:
    """The request, the task and the handles of one persistent operation; a `collectives.engine.request_cache.Binding`.

    Args:
        template: a handle of the ordinary operation, which is not submitted; of a gather, `place_gathered` has placed
            its result.
        number: the operation's, equal on every rank.
        words: for each tensor those of every rank.
        rows: for each tensor the rows of every rank, or of every pair of ranks, if it is gathered.
        threshold: the bytes at which a bucket ends, at present.

    Attributes:
        source, out: the arrays; of a grouped operation tuples of them.
        result: what every start returns.
    """

    def __init__(
        self,
        context: Context,
        template: Handle,
        number: int,
        result: Any,
        words: Sequence[Sequence[Places]],
        rows: Sequence[tuple[int, ...]],
        threshold: Callable[[], int],
    ) -> None:
        self._template = template
        self.result = result
        self._parts = template.members or (template,)
        for part in self._parts:
            _fix(part)
        _claim_results(template)
        self._extents = claimed_extents(template)
        self.source: Any = template.source
        self.out: Any = template.out
        bound = [
            self._bind(context, part, number, its_rows, its_words)
            for part, its_rows, its_words in zip(self._parts, rows, words, strict=True)
        ]
        if not template.members:
            (self.entry,) = self._entries = bound
            return
        self.source, self.out = tuple(part.source for part in self._parts), tuple(part.out for part in self._parts)
        self.entry = template.entry.persistent(number, self)
        self.entry.simple, self.entry.nbytes = True, sum(part.entry.nbytes for part in self._parts)
        members = [
            Handle(entry, part.source, part.out, no_result) for entry, part in zip(bound, self._parts, strict=True)
        ]
        self.entry.step = BoundGroup(context, self.entry, members, words, threshold)
        self._entries = [self.entry, *(entry for entry in bound if entry.binding is self)]

    def _bind(
        self, context: Context, part: Handle, number: int, rows: tuple[int, ...], words: Sequence[Places]
    ) -> CachedRequest:
        """The request of one tensor: in a group the ordinary one, if the tensor is fused with others."""
        ordinary = part.entry
        if ordinary.fuses_with is not None and part is not self._template:
            return ordinary
        make_plan = None
        if rows:
            # As in `Rows`: a rank without rows has no tensor to be mapped.
            mapped = all(source & MAPPED or not source for source, _ in words)
            make_plan = functools.partial(context.entries.plan_for_rows, ordinary, rows, mapped)
        entry = ordinary.persistent(number, self, make_plan)
        entry.step, entry.simple = BoundTensor(context, entry, part, words), True
        return entry

    def handle(self) -> Handle:
        handle = Handle(self.entry, self.source, self.out, _RESULT, self)
        handle.extents = self._extents
        return handle

    def unbind(self, handle: Handle) -> None:
        handle.entry = self._template.entry
        handle.members = [
            Handle(part.entry, part.source, part.out, part.deliver, part.keep) for part in self._template.members
        ]
        for place, member in enumerate(handle.members):
            member.place, member.key = place, handle.key

    def run_alone(self, scale: Callable[[CachedRequest, Array, Array], None]) -> None:
        """Carry it out in a world of one rank; ``scale`` copies and scales."""
        for part in self._parts:
            scale(part.entry, part.source, part.out)

    def release(self) -> None:
        """Drop the plans, which refer to windows and to the peers' memory."""
        for entry in self._entries:
            entry.release()

    def free(self) -> None:
        """Drop the plans and the tensors; it is not started any more. The engine may still know the request."""
        for entry in self._entries:
            if entry.step is not None:
                entry.step.forget()
            entry.release()
        self._parts, self.result, self.source, self.out = (), None, EMPTY, EMPTY
        del self._template


class Rebuilt:
    """A persistent operation whose tensors cannot be bound: every start makes the ordinary handle anew. A `Binding`."""

    def __init__(self, template: Handle, number: int) -> None:
        self._ordinary = template.entry
        self.entry = template.entry.persistent(number, self)

    def handle(self) -> Handle:
        raise AssertionError("every start of this operation brings its handle")

    def unbind(self, handle: Handle) -> None:
        handle.entry = self._ordinary

    def release(self) -> None:
        """Drop the plans, which refer to windows."""
        self.entry.release()


class BoundTensor(OneTensor):
    """A persistent operation on one tensor, or one of a group's: that of ``part``, a handle which is not submitted.
    ``words`` are those of every rank's tensor."""

    def __init__(self, context: Context, entry: CachedRequest, part: Handle, words: Sequence[Places]) -> None:
        super().__init__(context, entry)
        self._words = words
        self._all_mapped = entry.locates_tensors and all(source & out & MAPPED for source, out in words)
        self._arrays = part.source, part.out, address(part.source), address(part.out)
        self._peers_at: tuple[list[Sequence[int]], list[Array | None], list[Array | None]] = [], [], []
        """The addresses, inputs and outputs of the executor's state."""
        self._loop: Callable[[], object] | None = None

    def bind(self) -> None:
        context, entry = self._context, self.entry
        plan = entry.mapped_plan() if self._all_mapped else entry.plan()
        self._loop = None
        in_place = plan is not None and (self._all_mapped or plan.needs_addresses)
        if not in_place:
            super().bind()
        if plan is None:
            return
        self._plan, self.description, self.epoch = plan, plan.description, context.planner.epoch
        self._find_peers(plan)
        if in_place:
            self.attempt = None
            loop = self._bind_loop(plan)
            self._loop = functools.partial(context.quietly, loop) if loop is not None and entry.warns else loop

    def prepare(self, source: Array, out: Array) -> Words:
        if self.epoch != self._context.planner.epoch:
            self.bind()
        if self._plan is None:
            return super().prepare(source, out)
        return self._stage(source, out) if self._loop is None else ()

    def run(self) -> None:
        if self._plan is None:
            super().run()
        elif self._loop is not None and self._context.executor.trace is None:
            self._loop()
        elif self.entry.warns:
            self._context.quietly(self._execute)
        else:
            self._execute()

    def forget(self) -> None:
        """Drop the plan and the tensor."""
        self.attempt = self._plan = self._loop = None
        self._peers_at = [], [], []
        del self._arrays

    def _stage(self, source: Array, out: Array) -> Words:
        """Have the executor read and write the arrays, whose places all ranks know."""
        state, plan = self._state, self._plan
        assert plan is not None
        state.input, state.output, state.input_at, state.output_at = self._arrays
        if plan.staged:
            self._context.executor.stage(plan)
        return ()

    def _execute(self) -> None:
        plan, state = self._plan, self._state
        assert plan is not None
        state.input, state.output, state.input_at, state.output_at = self._arrays
        state.addresses[:], state.inputs[:], state.outputs[:] = self._peers_at
        self._context.executor.run(plan, plan.staged)
        self._clear_arrays()

    def _find_peers(self, plan: Plan) -> None:
        """Look up the tensors of a plan's partners: arrays if they are mapped, or addresses."""
        state, mapped = self._state, self._mapped
        addresses, inputs, outputs = self._peers_at = list(state.addresses), list(state.inputs), list(state.outputs)
        for peer in plan.partners if plan.loop is None else self._peers:
            source, out = self._words[peer]
            if mapped is None:
                addresses[peer] = source, out
                continue
            inputs[peer] = mapped.view_of(peer, source, self.entry.dtype)
            outputs[peer] = mapped.view_of(peer, out, self.entry.dtype)
            addresses[peer] = mapped.address_of(peer, source), mapped.address_of(peer, out)

    def _bind_loop(self, plan: Plan) -> Callable[[], None] | None:
        """The loop of a plan, if it has one and every peer's tensor is an array here."""
        if plan.loop is None:
            return None
        _, inputs, outputs = self._peers_at
        if self.entry.request.collective in ("allgather", "alltoall"):
            outputs = inputs  # which is where no peer writes, and no loop reads
        views = [(inputs[peer], outputs[peer]) for peer in self._peers]
        located = [(source, out) for source, out in views if source is not None and out is not None]
        if len(located) < len(views):
            return None
        return functools.partial(plan.loop.run, *self._arrays[:2], plan.loop.cut(located))


class BoundBucket(LocatedBucket):
    """A bucket of a persistent operation."""

    def fix(self, members: Sequence[Handle], words: Sequence[Array]) -> None:
        """Look up what every start needs; ``words`` are, of every rank, those of all inputs and then of all outputs."""
        pieces = self._pieces
        pieces.sources = pieces.operands = [member.source for member in members]
        pieces.outs = [member.out for member in members]
        self._told[:-1] = words[self._context.rank]
        self._words = self._words[-1:]
        self._reached = [is_reached(words[peer]) for peer in self._peers]
        self._fixed = [self._locate(peer, words[peer]) for peer in self._peers]

    def prepare_handles(self, handles: Sequence[Handle]) -> Words:
        self._show()
        return self._words

    def run_handles(self, handles: Sequence[Handle]) -> None:
        words_of = self._context.control.words_of
        self._reduce(self._reached, [bool(words_of(peer)[0]) for peer in self._peers], lambda: self._fixed)

    def withdraw(self) -> None:
        """The tensors stay where they are."""


class BoundGroup(HostTask):
    """A persistent grouped operation: its buckets are made once for each state of the planner. Arguments as of `Bound`;
    ``members`` are not submitted."""

    description = "group"

    def __init__(
        self,
        context: Context,
        entry: CachedRequest,
        members: Sequence[Handle],
        words: Sequence[Sequence[Places]],
        threshold: Callable[[], int],
    ) -> None:
        super().__init__(context, entry)
        self._members = members
        self._words = words
        self._threshold = threshold
        self.epoch = self.generation = -1
        self._parts: list[tuple[Task, list[Handle]]] = []

    def bind(self) -> None:
        """Make the buckets."""
        context, entries = self._context, [member.entry for member in self._members]
        batch = Batch(context, entries, self._threshold(), self.token, BoundBucket)
        self._parts = [(task, [self._members[number] for number in numbers]) for task, numbers in batch.tasks]
        for (task, members), (_, numbers) in zip(self._parts, batch.tasks, strict=True):
            if isinstance(task, BoundBucket):
                # By rank: the words of all inputs, then of all outputs.
                words = np.array([self._words[number] for number in numbers], np.int64)
                task.fix(members, list(words.transpose(1, 2, 0).reshape(context.size, -1)))
        self.epoch = context.planner.epoch

    def prepare(self, source: Any, out: Any) -> Words:
        """Prepare the first bucket."""
        if self.epoch != self._context.planner.epoch:
            self.bind()
        if not self._parts:
            return ()
        task, members = self._parts[0]
        return task.prepare_handles(members)

    def run(self) -> None:
        """Carry out every bucket; all ranks have prepared the first."""
        for position, (task, members) in enumerate(self._parts):
            if position:
                self._context.meet(task.token, task.prepare_handles(members))
            task.run_handles(members)

    def forget(self) -> None:
        """Drop the buckets and the tensors."""
        self._members, self._parts = (), []

    def prepare_handles(self, handles: Sequence[Handle]) -> Words:
        return self.prepare(handles[0].source, handles[0].out)

    def run_handles(self, handles: Sequence[Handle]) -> None:
        self.run()


def place_gathered(context: Context, part: Handle, counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Make the result of an allgather or an all-to-all whose rows are fixed, which its handle holds from here on.
    ``counts`` and what is returned are as of `exchanged_rows`."""
    request = part.entry.request
    received, rows = exchanged_rows(request.collective, counts, context.rank)
    out = context.pool.empty((sum(received), *(request.shape or ())), part.entry.dtype)
    part.keep = (part.keep, out, received)
    part.out = out.reshape(-1)
    return rows


def _fix(part: Handle) -> None:
    """Give a handle arrays of its own, of the same memory: the program may change the shape or the dtype of its own."""
    in_place = part.out is part.source
    part.source = part.source.view()
    part.out = part.source if in_place else part.out.view()


def _claim_results(template: Handle) -> None:
    """Have starts claim results, too: the program has them from the start before."""
    parts = template.members or (template,)
    results = [part.out for part in parts if part.writes is None and part.out is not part.source]
    if template.members:
        extents = [*template.extents, *(arrays.extent_of(out, True) for out in results if out.size)]
        template.extents = sorted(extents, key=operator.itemgetter(0))
    elif results:
        template.writes = arrays.view(template.out)


def words_of(context: Context, part: Handle) -> Places:
    """What tells the peers where a handle's input and output lie: places in the arena, or addresses; 0 for nothing."""
    memory = context.group.memory
    mapped = None if memory is None else memory.mapped

    def word(array: Array) -> int:
        if not array.size:
            return 0
        at = address(array)
        return at if mapped is None else mapped.word_of(at, array.nbytes)

    source = word(part.source)
    if part.out is part.source or part.entry.request.collective == "reducescatter":  # whose outputs no peer uses
        return source, source
    return source, word(part.out)
