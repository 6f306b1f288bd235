"""Buckets: several all-reduces carried out as one, in the two halves of every task (`collectives.engine.tasks`)."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable, Sequence

import numpy as np

from collectives import fusion
from collectives.engine.context import Context
from collectives.engine.faster_way import FasterWay
from collectives.engine.handles import Handle
from collectives.engine.request_cache import CachedRequest
from collectives.engine.tasks import HostTask, OneTensor, Words
from collectives.plan.bucket_loop import PeerTensors
from collectives.plan.plan import Plan
from collectives.plan.planner import LARGE_TENSOR, Choice
from collectives.plan.program import Medium
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
        self._pieces = fusion.Pieces([each.count for each in entries])
        self._choice = choice

    @functools.cached_property
    def _plan(self) -> Plan:
        entry = self.entry
        assert entry.kernel is not None
        return self._context.plans.fused(self._pieces, entry.dtype, self._choice, entry.kernel, entry.finish)

    def prepare_handles(self, handles: Sequence[Handle]) -> Words:
        pieces = self._pieces
        pieces.sources = pieces.operands = [handle.source for handle in handles]
        pieces.outs = [handle.out for handle in handles]
        self._stage()
        return ()

    def _stage(self) -> None:
        """Pack the first segment into the window."""
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
        self.description = self._plan.description
        self._release_pieces()

    def withdraw(self) -> None:
        super().withdraw()
        self._release_pieces()

    def _release_pieces(self) -> None:
        pieces = self._pieces
        pieces.sources = pieces.operands = pieces.outs = ()


class LocatedBucket(Bucket):
    """A bucket whose ranks tell each other where its tensors lie.

    Mapped tensors are reduced in place. Private tensors whose results are mapped are published there, as in
    `collectives.engine.located`. Where some rank's are neither, there are two ways, of which each rank proposes the one
    that takes less time here: direct reads; or windows, into which the ranks without mapped tensors have packed theirs
    already. A word says which, and windows it is if none of these ranks proposes direct reads, or the system refuses
    them.
    """

    def __init__(self, context: Context, entries: Sequence[CachedRequest], choice: Choice) -> None:
        super().__init__(context, entries, choice)
        entry, memory = self.entry, context.group.memory
        assert entry.kernel is not None and memory is not None
        self._reads_private = memory.reads_private
        self._windows_are_faster = FasterWay() if max(each.nbytes for each in entries) < LARGE_TENSOR else None
        """None: they never are."""
        self._loop = context.plans.bucket_loop(self._pieces, entry.dtype, entry.kernel, entry.finish)
        self._addresses: Array = np.empty(2 * len(entries), np.int64)
        self._nbytes = np.array([each.nbytes for each in entries] * 2, np.int64)
        self._told: Array = np.empty(2 * len(entries) + 1, np.int64)
        """Where this rank's tensors lie, all inputs before all outputs, and whether it has packed them."""
        self._words = memoryview(self._told.data).cast("B").cast("q")
        self._kept: dict[int, tuple[bytes, PeerTensors]] = {}
        """Each peer's tensors, by the words that they were found by."""
        self._seconds = 0.0
        """What packing took."""

    def prepare_handles(self, handles: Sequence[Handle]) -> Words:
        count, addresses, pieces = len(handles), self._addresses, self._pieces
        pieces.sources = pieces.operands = sources = [handle.source for handle in handles]
        pieces.outs = outs = [handle.out for handle in handles]
        addresses[:count] = inputs = [address(source) for source in sources]
        addresses[count:] = [
            at if out is source else address(out) for at, source, out in zip(inputs, sources, outs, strict=True)
        ]
        assert self._mapped is not None
        self._told[:-1] = self._mapped.words_of(addresses, self._nbytes)
        self._show()
        return self._words

    def _show(self) -> None:
        """Have the tensors where the peers read them."""
        begun, told, pieces, faster = time.perf_counter(), self._told, self._pieces, self._windows_are_faster
        if is_reached(told):
            self.packs = False
            private = ((told[: told.size // 2] & MAPPED) == 0).tolist()
            if any(private):
                for number, cut in self._loop.rest:
                    if private[number]:
                        pieces.outs[number][cut] = pieces.sources[number][cut]
        else:
            self.packs = not self._reads_private or (faster is not None and faster.choose())
            if self.packs:
                self._stage()
        told[-1] = self.packs
        self._seconds = time.perf_counter() - begun

    def run_handles(self, handles: Sequence[Handle]) -> None:
        words_of = self._context.control.words_of
        words_by_peer = {peer: np.frombuffer(words_of(peer), np.int64) for peer in self._peers}  # type: ignore[call-overload]
        self._reduce(
            [is_reached(words) for words in words_by_peer.values()],
            [bool(words[-1]) for words in words_by_peer.values()],
            lambda: [self._tensors_of(peer, words) for peer, words in words_by_peer.items()],
        )
        self._release_pieces()

    def _reduce(
        self, reached: Sequence[bool], packed: Sequence[bool], tensors: Callable[[], Sequence[PeerTensors]]
    ) -> None:
        """Reduce the tensors, in the way that follows from what all ranks have told: of each peer, whether its tensors
        are mapped or published, and whether it has packed them."""
        context, warns, own_is_reached = self._context, self.entry.warns, is_reached(self._told)
        begun = time.perf_counter()
        all_reached = own_is_reached and all(reached)
        windows = not all_reached and all(map(operator.or_, (own_is_reached, *reached), (self.packs, *packed)))
        if windows:
            self.description = self._plan.description
            context.run_quietly(warns, context.executor.run, self._plan, self.packs, self.packs and all(packed))
        else:
            self.description = f"fused direct over {(Medium.MAPPED if all_reached else Medium.DIRECT).value}"
            context.run_quietly(warns, self._loop.run, tensors())
        if self._windows_are_faster is not None and not own_is_reached:
            self._windows_are_faster.note(windows, self._seconds + time.perf_counter() - begun)

    def _tensors_of(self, peer: int, words: Array) -> PeerTensors:
        """A peer's tensors, kept while it has the same ones."""
        text = words[:-1].tobytes()
        kept = self._kept.get(peer)
        if kept is None or kept[0] != text:
            self._kept[peer] = kept = text, self._locate(peer, words)
        return kept[1]

    def _locate(self, peer: int, words: Array) -> PeerTensors:
        """Where a peer's tensors lie."""
        mapped, dtype, count = self._mapped, self.entry.dtype, words.size // 2
        assert mapped is not None
        inputs, outs = words[:count], words[count : 2 * count]
        if is_reached(words):
            inputs = np.where(inputs & MAPPED, inputs, outs)
        places = np.concatenate((inputs, outs))
        views = [mapped.view_of(peer, word, dtype) for word in places.tolist()]
        return PeerTensors(peer, views[:count], views[count:], mapped.addresses_of(peer, places).tolist())


def is_reached(words: Array) -> bool:
    """Whether the tensors of a rank that has told these words are mapped, or published in mapped results."""
    count = words.size // 2
    return bool((words[count : 2 * count] & MAPPED).all())


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
