"""Buckets: several all-reduces carried out as one, in the two halves of every task (`collectives.engine.tasks`)."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from collectives import fusion
from collectives.engine.context import Context
from collectives.engine.handles import Handle
from collectives.engine.request_cache import CachedRequest
from collectives.engine.tasks import HostTask, OneTensor, Words
from collectives.plan.mapped_bucket import PeerTensors
from collectives.plan.planner import Choice
from collectives.tensors import reduction
from collectives.tensors.arena import MAPPED
from collectives.tensors.arrays import address
from collectives.transport.base import Array


class Bucket(HostTask):
    """Several all-reduces of one dtype, operation and scaling, through windows: packing is sending. ``choice`` is the
    planner's for their bytes in all."""

    packs = True

    def __init__(self, context: Context, entries: Sequence[CachedRequest], choice: Choice) -> None:
        super().__init__(context, entries[0])
        entry = self.entry
        assert entry.kernel is not None
        self._pieces = fusion.Pieces([each.count for each in entries])
        self._plan = context.plans.fused(self._pieces, entry.dtype, choice, entry.kernel, entry.finish)
        self.description = self._plan.description

    def prepare_handles(self, handles: Sequence[Handle]) -> Words:
        pieces = self._pieces
        pieces.sources = pieces.operands = [handle.source for handle in handles]
        pieces.outs = [handle.out for handle in handles]
        self._stage()
        return ()

    def _stage(self) -> None:
        context, pieces = self._context, self._pieces
        pieces.scale = None if context.joined else self.entry.prescale
        if pieces.scale is None:
            context.executor.stage(self._plan)
        else:
            with reduction.quiet():
                context.executor.stage(self._plan)

    def run_handles(self, handles: Sequence[Handle]) -> None:
        pieces = self._pieces
        if pieces.scale is not None:
            with reduction.quiet():
                pieces.scale_operands()
            pieces.operands = pieces.outs
        self._context.run_quietly(self.entry.warns, self._context.executor.run, self._plan, True)
        self._release_pieces()

    def withdraw(self) -> None:
        super().withdraw()
        self._release_pieces()

    def _release_pieces(self) -> None:
        pieces = self._pieces
        pieces.sources = pieces.operands = pieces.outs = ()


class LocatedBucket(Bucket):
    """A bucket whose ranks tell each other where its tensors lie, so that mapped ones are reduced in place.

    Private tensors whose results are mapped are published there, as in `collectives.engine.located`. If some rank's
    are neither, all tensors go through windows, into which the ranks without mapped ones have packed theirs already.
    """

    def __init__(self, context: Context, entries: Sequence[CachedRequest], choice: Choice) -> None:
        super().__init__(context, entries, choice)
        entry = self.entry
        assert entry.kernel is not None
        self._loop = context.plans.bucket_loop(self._pieces, entry.dtype, entry.kernel, entry.finish)
        self._addresses: Array = np.empty(2 * len(entries), np.int64)
        self._nbytes = np.array([each.nbytes for each in entries] * 2, np.int64)
        self._told: Array = np.empty(2 * len(entries), np.int64)
        self._words = memoryview(self._told.data).cast("B").cast("q")
        self._kept: dict[int, tuple[bytes, PeerTensors]] = {}
        """Each peer's mapped tensors, by the words that they were found by."""

    def prepare_handles(self, handles: Sequence[Handle]) -> Words:
        count, addresses, pieces = len(handles), self._addresses, self._pieces
        pieces.sources = pieces.operands = sources = [handle.source for handle in handles]
        pieces.outs = outs = [handle.out for handle in handles]
        addresses[:count] = inputs = [address(source) for source in sources]
        addresses[count:] = [
            at if out is source else address(out) for at, source, out in zip(inputs, sources, outs, strict=True)
        ]
        assert self._mapped is not None
        self._told[:] = self._mapped.words_of(addresses, self._nbytes)
        self.packs = not _is_reached(self._told)
        if self.packs:
            self._stage()
        else:
            private = ((self._told[:count] & MAPPED) == 0).tolist()
            if any(private):
                for number, cut in self._loop.rest:
                    if private[number]:
                        outs[number][cut] = sources[number][cut]
        return self._words

    def run_handles(self, handles: Sequence[Handle]) -> None:
        context, words_of, warns = self._context, self._context.control.words_of, self.entry.warns
        words_by_peer = {peer: np.frombuffer(words_of(peer), np.int64) for peer in self._peers}  # type: ignore[call-overload]
        reached = [_is_reached(words) for words in words_by_peer.values()]
        if not self.packs and all(reached):
            self.description = "fused direct over mapped"
            context.run_quietly(
                warns, self._loop.run, [self._tensors_of(peer, words) for peer, words in words_by_peer.items()]
            )
        else:
            self.description = self._plan.description
            staged_everywhere = self.packs and not any(reached)
            context.run_quietly(warns, context.executor.run, self._plan, self.packs, staged_everywhere)
        self._release_pieces()

    def _tensors_of(self, peer: int, words: Array) -> PeerTensors:
        """A peer's tensors, kept while it has the same ones."""
        text = words.tobytes()
        kept = self._kept.get(peer)
        if kept is None or kept[0] != text:
            self._kept[peer] = kept = text, self._locate(peer, words)
        return kept[1]

    def _locate(self, peer: int, words: Array) -> PeerTensors:
        """Where a peer's tensors lie, all of whose results are mapped."""
        mapped, dtype, count = self._mapped, self.entry.dtype, words.size // 2
        assert mapped is not None
        outs = words[count:]
        places = np.concatenate((np.where(words[:count] & MAPPED, words[:count], outs), outs))
        views = [mapped.view_of(peer, word, dtype) for word in places.tolist()]
        return PeerTensors(peer, views[:count], views[count:], mapped.addresses_of(peer, places).tolist())


def _is_reached(words: Array) -> bool:
    """Whether the tensors of a rank with these words are mapped, or published in mapped results."""
    return bool((words[words.size // 2 :] & MAPPED).all())


class BufferBucket(OneTensor):
    """Several all-reduces of one dtype, operation and scaling that are copied into a buffer, and carried out as one of
    it: where neither windows nor direct reads reach every rank. Arguments as of `Bucket`."""

    packs = True
    description = "copied"

    def __init__(self, context: Context, entries: Sequence[CachedRequest], choice: Choice) -> None:
        self._pieces = fusion.Pieces([entry.count for entry in entries])
        super().__init__(context, context.entries.of_buffer(entries[0], self._pieces.total, choice))
        self.token = entries[0].signature
        self._prescale = entries[0].prescale
        self._buffer: Array = np.empty(0)

    def prepare_handles(self, handles: Sequence[Handle]) -> Words:
        context, pieces = self._context, self._pieces
        pieces.sources = [handle.source for handle in handles]
        pieces.scale = None if context.joined else self._prescale
        buffer = context.buffer(pieces.total, self.entry.dtype)
        if self._buffer.base is not buffer.base:
            self._buffer = buffer
        with reduction.quiet():
            pieces.gather(0, pieces.total, self._buffer)
        return self.prepare(self._buffer, self._buffer)

    def run_handles(self, handles: Sequence[Handle]) -> None:
        self.run()
        timeline, begun, pieces = self._context.timeline, time.monotonic(), self._pieces
        pieces.outs = [handle.out for handle in handles]
        pieces.scatter(self._buffer)
        if timeline is not None:
            timeline.span("engine", "unpack", begun, time.monotonic())
        pieces.sources = pieces.outs = ()

    def withdraw(self) -> None:
        super().withdraw()
        self._pieces.sources = ()
