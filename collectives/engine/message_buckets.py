"""Buckets of tensors that travel as messages, where neither windows nor direct reads reach every rank.

Tiny tensors are copied into a buffer, and travel as one; larger ones are sent and received where they lie.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from collectives import fusion
from collectives.engine.context import Context
from collectives.engine.handles import Handle
from collectives.engine.inline import Inline
from collectives.engine.request_cache import CachedRequest, Reduce
from collectives.engine.tasks import HostTask, Words
from collectives.plan.message_lists import ListPieces
from collectives.plan.plan import Plan
from collectives.plan.planner import Choice
from collectives.plan.program import Medium
from collectives.tensors import reduction
from collectives.transport.base import Array

JOINED_BELOW = 16 << 10
"""Bytes below which copying a tensor in and out costs no more than a block of its own in lists, which takes a
microsecond of Python besides the system's part. Measured: lists take 1.05 to 1.10 of the time of copies at 8 KiB, 0.92
to 1.04 at 16 KiB, 0.89 to 0.95 at 32 KiB (docs/performance.md)."""


def sends_lists(context: Context, entries: Sequence[CachedRequest], choice: Choice) -> bool:
    """Whether a bucket is a `MessageBucket`: its ranks have messages alone, which take lists, and it has a tensor that
    is not tiny."""
    messages = context.group.messages
    return (
        choice.medium is Medium.MESSAGE
        and not (choice.native or choice.inline)
        and messages is not None
        and messages.takes_lists
        and any(entry.nbytes >= JOINED_BELOW for entry in entries)
    )


class Joined:
    """Tensors that are copied into a buffer, reduced there as one, and copied back.

    Args:
        context: of the world.
        entries: the requests; of one dtype and scaling.

    Attributes:
        total: elements of all.
        buffer: the tensors, from `pack` to `unpack`.
    """

    def __init__(self, context: Context, entries: Sequence[CachedRequest]) -> None:
        self._context, self._entry = context, entries[0]
        self._pieces = fusion.Pieces([entry.count for entry in entries])
        self.total = self._pieces.total
        self.buffer: Array = np.empty(0)

    def pack(self, handles: Sequence[Handle]) -> None:
        """Copy the inputs into the buffer, and scale them there."""
        context, pieces, entry = self._context, self._pieces, self._entry
        pieces.sources = [handle.source for handle in handles]
        pieces.scale = None if context.joined else entry.prescale
        buffer = context.buffer(pieces.total, entry.dtype)
        if self.buffer.base is not buffer.base:
            self.buffer = buffer
        with reduction.quiet():
            pieces.gather(0, pieces.total, self.buffer)

    def unpack(self, handles: Sequence[Handle]) -> None:
        """Copy the results from the buffer to the outputs, and release the tensors."""
        timeline, begun = self._context.timeline, time.monotonic()
        self._pieces.outs = [handle.out for handle in handles]
        self._pieces.scatter(self.buffer)
        if timeline is not None:
            timeline.span("engine", "unpack", begun, time.monotonic())
        self.release()

    def release(self) -> None:
        """Release the tensors."""
        self._pieces.sources = self._pieces.outs = ()


class BufferBucket(HostTask):
    """A bucket of tensors that are all copied into a buffer.

    Args:
        context: of the world.
        entries: the requests; of one dtype, operation and scaling.
        choice: the planner's, for their bytes in all.
    """

    packs_below = math.inf
    description = "copied"

    def __init__(self, context: Context, entries: Sequence[CachedRequest], choice: Choice) -> None:
        super().__init__(context, entries[0])
        self._joined = Joined(context, entries)
        self._native: Reduce | None = None
        self._inline: Inline | None = None
        self._plan: Plan | None = None
        first, total = self.entry, self._joined.total
        assert first.kernel is not None
        if choice.inline:
            self._inline = context.entries.inline(first, total)
            context.plans.tell("allreduce", total, first.dtype, choice, "fused inline")
        elif choice.native:
            self._native = context.entries.natively(first)
            context.plans.tell("allreduce", total, first.dtype, choice, "fused native over mpi")
        else:
            self._plan = context.plans.allreduce((total,), first.dtype, choice, first.kernel, first.finish)
            self.description = self._plan.description

    def prepare_handles(self, handles: Sequence[Handle]) -> Words:
        plan, joined = self._plan, self._joined
        joined.pack(handles)
        if self._inline is not None:
            return self._inline.words(joined.buffer)
        addresses = self._set_arrays(joined.buffer, joined.buffer)
        if plan is not None and plan.needs_addresses:
            return addresses
        if plan is not None and plan.staged:
            self._context.executor.stage(plan)
        return ()

    def run_handles(self, handles: Sequence[Handle]) -> None:
        context, plan, buffer = self._context, self._plan, self._joined.buffer
        if plan is not None:
            self._learn_places(plan, self.entry.dtype)
            context.run_plan(plan, plan.staged, True)
        elif self._inline is not None:
            context.quietly(self._inline.reduce, context.control.words_of, buffer)
        elif self._native is not None:
            self._native(buffer, buffer)
            if self.entry.finish is not None:
                context.scale(self.entry.finish, buffer, buffer)
        self._joined.unpack(handles)
        self._clear_arrays()

    def withdraw(self) -> None:
        super().withdraw()
        self._joined.release()


class MessageBucket(HostTask):
    """A bucket of which no tensor is copied but the tiny ones, which are joined to one tensor.

    Args:
        context: of the world, whose messages take lists.
        entries: the requests; of one dtype, operation and scaling, at least one not tiny.
        choice: the planner's, for their bytes in all.
    """

    def __init__(self, context: Context, entries: Sequence[CachedRequest], choice: Choice) -> None:
        super().__init__(context, entries[0])
        entry = self.entry
        assert entry.kernel is not None
        self._tiny = [number for number, each in enumerate(entries) if each.nbytes < JOINED_BELOW]
        self._large = [number for number, each in enumerate(entries) if each.nbytes >= JOINED_BELOW]
        counts = [entries[number].count for number in self._large]
        self._joined: Joined | None = None
        if self._tiny:
            self._joined = Joined(context, [entries[number] for number in self._tiny])
            counts.append(self._joined.total)
            self.packs_below = JOINED_BELOW
        self._pieces = ListPieces(counts, entry.dtype.itemsize)
        self._plan = context.plans.fused(self._pieces, None, entry.dtype, choice, entry.kernel, entry.finish)
        self.description = self._plan.description

    def prepare_handles(self, handles: Sequence[Handle]) -> Words:
        if self._joined is not None:
            self._joined.pack([handles[number] for number in self._tiny])
        return ()

    def run_handles(self, handles: Sequence[Handle]) -> None:
        context, pieces, joined, prescale = self._context, self._pieces, self._joined, self.entry.prescale
        large = [handles[number] for number in self._large]
        sources, outs = [handle.source for handle in large], [handle.out for handle in large]
        if prescale is not None and not context.joined:
            with reduction.quiet():
                for source, out in zip(sources, outs, strict=True):
                    prescale(source, out)
            sources = list(outs)
        if joined is not None:
            sources.append(joined.buffer)
            outs.append(joined.buffer)
        pieces.set(sources, outs)
        context.run_plan(self._plan, False, self.entry.warns)
        pieces.release()
        if joined is not None:
            joined.unpack([handles[number] for number in self._tiny])

    def withdraw(self) -> None:
        super().withdraw()
        if self._joined is not None:
            self._joined.release()
