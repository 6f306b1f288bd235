"""Tasks: how one operation that the ranks have agreed on is carried out.

A task has two halves, between which the ranks meet:

    prepare    put what peers read where they read it: into the window, or give its address
    run        all ranks have prepared: move, reduce and unpack

so that the round in which the ranks agree also brings the first task's data, or its addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.base.reduce_op import Op
from collectives.engine import adasum
from collectives.engine.context import Context
from collectives.engine.handles import EMPTY, Handle
from collectives.engine.inline import Inline
from collectives.engine.request_cache import CachedRequest
from collectives.plan.plan import Plan
from collectives.schedules import partition
from collectives.tensors import arrays, halves
from collectives.tensors.arrays import address
from collectives.transport.base import Array

Words = Sequence[int] | memoryview
"""What a rank enters a round with, besides the token."""


class Task:
    """One operation, or several in one bucket, of which ``entry`` is the first request.

    Attributes:
        token: enters the round in which the ranks meet for this task.
        packs: whether `prepare_handles` copies the tensors into a buffer or window.
        description: how it is carried out, for the timeline.
    """

    packs = False
    description = ""

    def __init__(self, entry: CachedRequest) -> None:
        self.entry = entry
        self.token = entry.signature

    def prepare_handles(self, handles: Sequence[Handle]) -> Words:
        """Make visible to the peers what they will read. Returns the words to enter the round with."""
        raise NotImplementedError

    def withdraw(self) -> None:
        """Release the tensors that were prepared: the task is not carried out now."""

    def run_handles(self, handles: Sequence[Handle]) -> None:
        """Carry it out; all ranks have prepared."""
        raise NotImplementedError


class HostTask(Task):
    """A task on host memory.

    Attributes:
        attempt: prepares, enters the round with a token and runs, all in one, if the plan is a single reduction;
            returns what `Control.look` does.
    """

    attempt: Callable[[int, Array, Array], bool | None] | None = None

    def __init__(self, context: Context, entry: CachedRequest) -> None:
        super().__init__(entry)
        self._context = context
        self._state = context.executor.state
        self._mapped = context.group.memory.mapped if context.group.memory is not None else None
        self._peers = tuple((context.rank + distance) % context.size for distance in range(1, context.size))

    def _set_arrays(self, source: Array, out: Array) -> tuple[int, int]:
        """Have the executor read and write these arrays. Returns the words that tell the peers where they lie."""
        state = self._state
        state.input, state.output = source, out
        state.input_at = at = address(source)
        mapped = self._mapped
        word = at if mapped is None else mapped.word_of(at, source.nbytes)
        if out is source:
            state.output_at = at
            return word, word
        state.output_at = at = address(out)
        return word, at if mapped is None else mapped.word_of(at, out.nbytes)

    def _clear_arrays(self) -> None:
        """Release the arrays that the executor has read and written."""
        self._state.input = self._state.output = EMPTY

    def withdraw(self) -> None:
        self._clear_arrays()

    def release(self) -> None:
        """Drop what refers to windows and to the peers' tensors, for good: a task refers to itself too, by its bound
        methods, and would keep them until garbage is collected."""
        vars(self).clear()

    def _prescaled(self, source: Array, out: Array) -> Array:
        """The source, multiplied by the request's factor if it has one."""
        entry, context = self.entry, self._context
        if entry.prescale is None or context.joined:
            return source
        # Scaled into the output where that is possible: it is overwritten anyway.
        into_output = out is not source and out.size == source.size
        scaled = out if into_output else context.pool.empty(source.shape, source.dtype)
        context.quietly(entry.prescale, source, scaled)
        return scaled

    def _learn_places(self, plan: Plan, dtype: np.dtype[Any]) -> None:
        """Take from the words of a plan's partners where their tensors are: arrays if they are mapped, or addresses."""
        state, words_of, mapped = self._state, self._context.control.words_of, self._mapped
        for peer in plan.partners:
            source, out = words_of(peer)[:2]
            if mapped is None:
                state.addresses[peer] = source, out
                continue
            state.inputs[peer] = view = mapped.view_of(peer, source, dtype)
            state.outputs[peer] = into = view if out == source else mapped.view_of(peer, out, dtype)
            if view is None or into is None:
                state.addresses[peer] = mapped.address_of(peer, source), mapped.address_of(peer, out)


class OneTensor(HostTask):
    """An all-reduce, reduce-scatter, broadcast or barrier by itself; without elements it only synchronises the ranks.

    Attributes:
        epoch: the planner's, when they were bound.
        generation: the ledger's, when its cache last knew this request.
    """

    description = "one"

    def __init__(self, context: Context, entry: CachedRequest) -> None:
        super().__init__(context, entry)
        self.epoch = self.generation = -1
        self._plan: Plan | None = None
        self._inline: Inline | None = None
        self._source = self._out = EMPTY

    def bind(self) -> None:
        """Bind the plan that is in force."""
        context, entry = self._context, self.entry
        self._plan = plan = entry.plan()
        self.epoch = context.planner.epoch
        self.attempt = None
        if entry.prescale is not None:
            return
        if plan is None:
            self._inline = entry.inline
            if self._inline is not None:
                self.attempt = self._attempt_inline
            return
        quietly = context.quietly if entry.warns else None
        reduction = context.executor.one_reduction(plan, quietly)
        if reduction is not None:
            self.attempt = reduction.attempt

    def prepare(self, source: Array, out: Array) -> Words:
        """`prepare_handles` of a blocking call, which has no handle."""
        entry = self.entry
        self._plan = plan = entry.plan()
        source = self._prescaled(source, out)
        if plan is None:
            self._source, self._out = source, out
            return () if entry.inline is None else entry.inline.words(source)
        self.description = plan.description
        if plan.needs_addresses:
            return self._set_arrays(source, out)
        self._state.input, self._state.output = source, out
        if plan.staged:
            self._context.executor.stage(plan)
        return ()

    def run(self) -> None:
        """`run_handles` of a blocking call."""
        context, plan, entry = self._context, self._plan, self.entry
        if plan is not None:
            if plan.needs_addresses:
                self._learn_places(plan, entry.dtype)
            context.run_quietly(entry.warns, context.executor.run, plan, plan.staged)
            self._clear_arrays()
        elif entry.native is not None:
            entry.native(self._source, self._out)
            if entry.finish is not None:
                context.quietly(entry.finish, self._out, self._out)
        elif entry.inline is not None:
            context.quietly(entry.inline.reduce, context.control.words_of, self._out)
        self._source = self._out = EMPTY

    def _attempt_inline(self, signature: int, source: Array, out: Array) -> bool | None:
        """Enter the round with the tensor's data, and reduce if every rank has entered it with the same signature."""
        inline, control = self._inline, self._context.control
        assert inline is not None
        same = control.enter_and_look(signature, inline.words(source))
        if same:
            self._context.quietly(inline.reduce, control.words_of, out)
        else:
            self._source, self._out = source, out
        return same

    def withdraw(self) -> None:
        super().withdraw()
        self._source = self._out = EMPTY

    def prepare_handles(self, handles: Sequence[Handle]) -> Words:
        return self.prepare(handles[0].source, handles[0].out)

    def run_handles(self, handles: Sequence[Handle]) -> None:
        self.run()


class AdasumTensor(HostTask):
    """An Adasum of one tensor: an all-to-all, a tiny all-reduce for each level of the tree, and an allgather."""

    description = "combine"

    def prepare_handles(self, handles: Sequence[Handle]) -> Words:
        return ()

    def run_handles(self, handles: Sequence[Handle]) -> None:
        handle, entry, context = handles[0], self.entry, self._context
        source, out, size, rank = self._prescaled(handle.source, handle.out), handle.out, context.size, context.rank
        sizes = partition.split(source.size, size)
        slices = np.empty((size, sizes[rank]), source.dtype)
        self._move(entry.plan_for((), lambda: self._scatter(sizes, entry.dtype)), source, slices.reshape(-1))
        vectors = adasum.widen(slices)
        for pairs in adasum.tree(size):
            dots = adasum.dots(vectors, pairs)
            self._sum(dots.reshape(-1))
            adasum.combine(vectors, pairs, dots)
        own_part = np.empty(sizes[rank], source.dtype)
        halves.cast(vectors[0], own_part)
        self._move(entry.plan_for((1,), lambda: self._gather(sizes, entry.dtype)), own_part, out)
        if entry.finish is not None:
            context.quietly(entry.finish, out, out)

    def _sum(self, dots: Array) -> None:
        """All-reduce in place within this task: the ranks need not agree on it."""
        context = self._context
        entry = context.entries.reducing("allreduce", arrays.view(dots), None, {"op": Op.SUM})
        task = OneTensor(context, entry)  # a few numbers: never located
        context.meet(task.token, task.prepare(dots, dots))
        task.run()

    def _scatter(self, sizes: Sequence[int], dtype: np.dtype[Any]) -> Plan:
        context, nbytes = self._context, sum(sizes) * dtype.itemsize
        table = [to for _ in sizes for to in sizes]
        return context.plans.alltoall(table, dtype, context.planner.choose("alltoall", nbytes))

    def _gather(self, sizes: Sequence[int], dtype: np.dtype[Any]) -> Plan:
        context, nbytes = self._context, sum(sizes) * dtype.itemsize
        return context.plans.allgather(sizes, dtype, context.planner.choose("allgather", nbytes))

    def _move(self, plan: Plan | None, source: Array, out: Array) -> None:
        assert plan is not None
        self._context.meet(self.token, self._set_arrays(source, out))
        self._learn_places(plan, source.dtype)
        self._context.executor.run(plan)
        self._clear_arrays()
