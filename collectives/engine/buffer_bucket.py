"""A bucket of tensors that are copied into a buffer: where neither windows nor direct reads reach every rank."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from collectives import fusion
from collectives.engine.context import Context
from collectives.engine.handles import Handle
from collectives.engine.inline import Inline
from collectives.engine.request_cache import CachedRequest, Reduce
from collectives.engine.tasks import HostTask, Words
from collectives.plan.plan import Plan
from collectives.plan.planner import Choice
from collectives.tensors import reduction
from collectives.transport.base import Array


class BufferBucket(HostTask):
    """Several all-reduces that are carried out as one, of a buffer.

    Args:
        context: of the world.
        entries: the requests; of one dtype, operation and scaling.
        choice: the planner's, for their bytes in all.
    """

    packs = True
    description = "copied"

    def __init__(self, context: Context, entries: Sequence[CachedRequest], choice: Choice) -> None:
        super().__init__(context, entries[0])
        self._pieces = fusion.Pieces([entry.count for entry in entries])
        self._buffer: Array = np.empty(0)
        self._native: Reduce | None = None
        self._inline: Inline | None = None
        self._plan: Plan | None = None
        first, total = self.entry, self._pieces.total
        assert first.kernel is not None
        if choice.inline:
            self._inline = context.entries.inline(first, total)
            context.plans.log_choice("allreduce", total, first.dtype, "fused inline", choice.why)
        elif choice.native:
            self._native = context.entries.natively(first)
            context.plans.log_choice("allreduce", total, first.dtype, "fused native over mpi", choice.why)
        else:
            self._plan = context.plans.allreduce((total,), first.dtype, choice, first.kernel, first.finish)
            self.description = self._plan.description

    def prepare_handles(self, handles: Sequence[Handle]) -> Words:
        plan = self._plan
        self._pack(handles)
        if self._inline is not None:
            return self._inline.words(self._buffer)
        addresses = self._set_arrays(self._buffer, self._buffer)
        if plan is not None and plan.needs_addresses:
            return addresses
        if plan is not None and plan.staged:
            self._context.executor.stage(plan)
        return ()

    def run_handles(self, handles: Sequence[Handle]) -> None:
        context, plan, buffer = self._context, self._plan, self._buffer
        if plan is not None:
            self._learn_places(plan, self.entry.dtype)
            context.run_plan(plan, plan.staged, True)
        elif self._inline is not None:
            context.quietly(self._inline.reduce, context.control.words_of, buffer)
        elif self._native is not None:
            self._native(buffer, buffer)
            if self.entry.finish is not None:
                context.scale(self.entry.finish, buffer, buffer)
        self._unpack(handles)
        self._clear_arrays()

    def withdraw(self) -> None:
        super().withdraw()
        self._release()

    def _pack(self, handles: Sequence[Handle]) -> None:
        """Copy the inputs into the buffer, and scale them there."""
        context, pieces, entry = self._context, self._pieces, self.entry
        pieces.sources = [handle.source for handle in handles]
        pieces.scale = None if context.joined else entry.prescale
        buffer = context.buffer(pieces.total, entry.dtype)
        if self._buffer.base is not buffer.base:
            self._buffer = buffer
        with reduction.quiet():
            pieces.gather(0, pieces.total, self._buffer)

    def _unpack(self, handles: Sequence[Handle]) -> None:
        """Copy the results from the buffer to the outputs, and release the tensors."""
        timeline, begun = self._context.timeline, time.monotonic()
        self._pieces.outs = [handle.out for handle in handles]
        self._pieces.scatter(self._buffer)
        if timeline is not None:
            timeline.span("engine", "unpack", begun, time.monotonic())
        self._release()

    def _release(self) -> None:
        self._pieces.sources = self._pieces.outs = ()
