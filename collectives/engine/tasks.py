"""Tasks: how one operation that the ranks have agreed on is carried out.

A task is carried out in two halves, between which the ranks meet:

    prepare    what peers will read is put where they read it: staged in the window, or given by address
    run        all ranks are here: move and reduce, and unpack

so that the very round in which the ranks agree also brings the first task's data, or the addresses of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.base.reduce_op import Op
from collectives.engine import adasum
from collectives.engine.context import Context, address
from collectives.engine.handles import Handle
from collectives.engine.request_cache import CachedRequest
from collectives.plan.binder import Plan
from collectives.schedules import partition
from collectives.tensors import arrays, halves
from collectives.transport.base import Array


class One:
    """An all-reduce, reduce-scatter, broadcast or barrier by itself; also one without elements, where coming is all
    there is to it."""

    packs = False

    def __init__(self, context: Context, entry: CachedRequest) -> None:
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
            self._scaled = scaled = (
                out if out is not source and out.size == source.size else context.pool.empty(source.shape, source.dtype)
            )
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

    def __init__(self, context: Context, entry: CachedRequest) -> None:
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
            context.meet(self.token, (state.input_at, state.output_at))
            for peer in plan.partners:
                state.addresses[peer] = control.words_of(peer)
        context.run_plan(plan, False, True)
        state.input = state.output = _EMPTY


class Combine:
    """An Adasum: an all-to-all, a tiny all-reduce for each level of the tree, and an allgather; for each tensor by
    itself."""

    packs = False

    def __init__(self, context: Context, entry: CachedRequest) -> None:
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
            _carry_out(
                context,
                context.entries.reducing("allreduce", arrays.view(flat), None, {"op": Op.SUM}),
                flat,
                flat,
            )
            adasum.combine(vectors, pairs, dots)
        mine = np.empty(sizes[rank], source.dtype)
        halves.cast(vectors[0], mine)
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
        context.meet(self.token, (state.input_at, state.output_at))
        for peer in range(context.size):
            if peer != context.rank:
                state.addresses[peer] = control.words_of(peer)
        context.run_plan(plan, False, False)
        state.input = state.output = _EMPTY


def _carry_out(context: Context, entry: CachedRequest, source: Array, out: Array) -> None:
    """Agree on and run an operation that is part of another: all ranks are here, and know what comes."""
    one = One(context, entry)
    words = one.prepare(source, out)
    context.meet(one.token, words)
    one.run(source, out)


_EMPTY = np.empty(0)
