"""Buckets: how several all-reduces are carried out as one, in the two halves of every task
(`collectives.engine.tasks`)."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from collectives import fusion
from collectives.engine.context import Context, address
from collectives.engine.handles import Handle
from collectives.engine.request_cache import CachedRequest, Reduce
from collectives.plan.binder import Plan
from collectives.plan.planner import Choice
from collectives.tensors import reduction
from collectives.transport.base import Array


class Packed:
    """A bucket through windows: the pack is the send."""

    packs = True

    def __init__(self, context: Context, entries: Sequence[CachedRequest], choice: Choice) -> None:
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

    def __init__(self, context: Context, entries: Sequence[CachedRequest], choice: Choice) -> None:
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
            at if out is source else out.__array_interface__["data"][0]
            for at, source, out in zip(inputs, sources, outs, strict=True)
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

    def __init__(self, context: Context, entries: Sequence[CachedRequest], choice: Choice) -> None:
        self._context = context
        self._entry = first = entries[0]
        self.token = first.signature
        self._pieces = fusion.Pieces([entry.count for entry in entries])
        self._native: Reduce | None = None
        self._plan: Plan | None = None
        assert first.kernel is not None
        if choice.native:
            self._native = context.entries.natively(first)
            context.plans.tell("allreduce", self._pieces.total, first.dtype, choice, "fused native over mpi")
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
        begun = time.monotonic()
        pieces.scatter(self._buffer)
        if context.timeline is not None:
            context.timeline.span("engine", "unpack", begun, time.monotonic())
        pieces.sources = pieces.outs = ()
        state.input = state.output = _EMPTY


_EMPTY = np.empty(0)
