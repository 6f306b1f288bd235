"""Buckets: several all-reduces carried out as one, in the two halves of every task (`collectives.engine.tasks`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from collectives import fusion
from collectives.engine.context import Context
from collectives.engine.handles import Handle
from collectives.engine.request_cache import CachedRequest
from collectives.engine.tasks import HostTask, Words
from collectives.plan.mapped_loops import BucketViews
from collectives.plan.plan import Plan
from collectives.plan.planner import Choice
from collectives.tensors import reduction
from collectives.tensors.arena import MAPPED
from collectives.tensors.arrays import address
from collectives.transport.base import Array
from collectives.transport.mapped_memory import MappedMemory


class Bucket(HostTask):
    """Several all-reduces of one dtype, operation and scaling.

    Args:
        context: of the world.
        entries: the requests.
        choice: the planner's, for their bytes in all.
    """

    def __init__(self, context: Context, entries: Sequence[CachedRequest], choice: Choice) -> None:
        super().__init__(context, entries[0])
        self._pieces = fusion.Pieces([entry.count for entry in entries])

    def _fused(self, choice: Choice, lists: fusion.Lists | None) -> Plan:
        entry = self.entry
        assert entry.kernel is not None
        plan = self._context.plans.fused(self._pieces, lists, entry.dtype, choice, entry.kernel, entry.finish)
        self.description = plan.description
        return plan

    def withdraw(self) -> None:
        super().withdraw()
        self._release_pieces()

    def _release_pieces(self) -> None:
        pieces = self._pieces
        pieces.sources = pieces.operands = pieces.outs = ()


class WindowBucket(Bucket):
    """A bucket through windows: packing is sending."""

    packs_below = math.inf

    def __init__(self, context: Context, entries: Sequence[CachedRequest], choice: Choice) -> None:
        super().__init__(context, entries, choice)
        self._plan = self._fused(choice, None)

    def prepare_handles(self, handles: Sequence[Handle]) -> Words:
        context, pieces = self._context, self._pieces
        pieces.sources = pieces.operands = [handle.source for handle in handles]
        pieces.outs = [handle.out for handle in handles]
        pieces.scale = None if context.joined else self.entry.prescale
        if pieces.scale is None:
            context.executor.stage(self._plan)
        else:
            with reduction.quiet():
                context.executor.stage(self._plan)
        return ()

    def run_handles(self, handles: Sequence[Handle]) -> None:
        pieces = self._pieces
        if pieces.scale is not None:
            with reduction.quiet():
                pieces.scale_operands()
            pieces.operands = pieces.outs
        self._context.run_plan(self._plan, True, self.entry.warns)
        self._release_pieces()


class ListBucket(Bucket):
    """A bucket over direct reads: nothing is packed, lists of addresses say where the pieces are.

    Private tensors whose results are mapped are published there, as in `collectives.engine.located`.
    """

    def __init__(self, context: Context, entries: Sequence[CachedRequest], choice: Choice) -> None:
        super().__init__(context, entries, choice)
        self._lists = fusion.Lists(self._pieces, self.entry.dtype.itemsize)
        self._plan = self._fused(choice, self._lists)
        self._lists.seal((*self._plan.partners, context.rank))
        self._addresses: Array = np.empty(2 * len(entries), np.int64)
        self._nbytes = np.array([entry.nbytes for entry in entries] * 2, np.int64)
        self._told: Array = np.empty(2 * len(entries), np.int64)
        self._words = memoryview(self._told.data).cast("B").cast("q")
        self._views: dict[int, tuple[bytes, BucketViews]] = {}
        """Each peer's mapped tensors, with the words that they were found by."""

    def prepare_handles(self, handles: Sequence[Handle]) -> Words:
        count, addresses, pieces = len(handles), self._addresses, self._pieces
        pieces.sources = sources = [handle.source for handle in handles]
        pieces.outs = outs = [handle.out for handle in handles]
        addresses[:count] = inputs = [address(source) for source in sources]
        addresses[count:] = [
            at if out is source else address(out) for at, source, out in zip(inputs, sources, outs, strict=True)
        ]
        self._told[:] = addresses if self._mapped is None else self._mapped.words_of(addresses, self._nbytes)
        loop = self._plan.bucket_loop
        if loop is not None and bool((self._told[count:] & MAPPED).all()):
            private = ((self._told[:count] & MAPPED) == 0).tolist()
            if any(private):
                for number, cut in loop.rest:
                    if private[number]:
                        outs[number][cut] = sources[number][cut]
        return self._words

    def run_handles(self, handles: Sequence[Handle]) -> None:
        context, plan = self._context, self._plan
        if self._mapped is None or context.executor.trace is not None or not self._run_mapped(self._mapped):
            self._lists.locate(context.rank, self._addresses)
            for peer in plan.partners:
                addresses = np.frombuffer(context.control.words_of(peer), np.int64)  # type: ignore[call-overload]
                if self._mapped is not None:
                    addresses = self._mapped.addresses_of(peer, addresses)
                self._lists.locate(peer, addresses)
            context.run_plan(plan, False, self.entry.warns)
        self._release_pieces()

    def _run_mapped(self, mapped: MappedMemory) -> bool:
        """Reduce the tensors where they lie, or are published; returns False, with nothing done, unless all ranks'
        results are mapped."""
        loop, words_of = self._plan.bucket_loop, self._context.control.words_of
        if loop is None or not bool((self._told[self._told.size // 2 :] & MAPPED).all()):
            return False
        views: list[BucketViews] = []
        for peer in self._peers:
            words = memoryview(words_of(peer)).tobytes()  # type: ignore[arg-type]
            known = self._views.get(peer)
            if known is None or known[0] != words:
                found = self._find(mapped, peer, np.frombuffer(words, np.int64).tolist())
                if found is None:
                    return False
                self._views[peer] = known = words, found
            views.append(known[1])
        if self.entry.warns:
            self._context.quietly(loop.run, views)
        else:
            loop.run(views)
        return True

    def _find(self, mapped: MappedMemory, peer: int, words: Sequence[int]) -> BucketViews | None:
        """A peer's tensors as arrays; None unless all results are mapped."""
        dtype, count = self.entry.dtype, len(words) // 2
        inputs = [word if word & MAPPED else out for word, out in zip(words[:count], words[count:], strict=True)]
        found = [mapped.view_of(peer, word, dtype) for word in (*inputs, *words[count:])]
        arrays = [array for array in found if array is not None]
        return (arrays[:count], arrays[count:]) if len(arrays) == len(words) else None
