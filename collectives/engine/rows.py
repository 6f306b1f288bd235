"""Allgathers and all-to-alls: the ranks learn in the round how many rows move, and only then make their results."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from collectives.engine.context import Context
from collectives.engine.handles import EMPTY, Handle
from collectives.engine.request_cache import CachedRequest
from collectives.engine.tasks import HostTask, Words
from collectives.plan.mapped_loops import Loop
from collectives.tensors.arena import MAPPED, arena
from collectives.tensors.arrays import address
from collectives.tensors.result_pool import ResultPool
from collectives.transport.base import Array


@dataclass(slots=True, eq=False)
class GatheredRows:
    """The result of a blocking call that has no handle."""

    rows: tuple[int, ...]
    """That this rank sends: to all, or to each receiver."""
    handle: Callable[[], Handle]
    """Makes the handle of the operation, should it need one after all."""
    out: Array | None = None
    """Memory of the caller's for the result, contiguous; None: it comes from the result pool."""
    array: Any = None
    """The result, of shape ``(rows, ...)``; not in ``out`` if that has another number of elements."""
    received: Sequence[int] = ()
    """The rows received from each rank."""

    def place(self, shape: tuple[int, ...], dtype: Any, pool: ResultPool) -> Array:
        """Set ``array``, and return it."""
        fits = self.out is not None and self.out.size == math.prod(shape)
        self.array = array = self.out.reshape(shape) if self.out is not None and fits else pool.empty(shape, dtype)
        return array


_AllWords = tuple[tuple[int, ...], ...]
"""The words of all ranks."""


class _Kept(NamedTuple):
    """A loop for mapped tensors, what it needs of the peers' tensors, the result's shape, and the rows received."""

    loop: Loop
    blocks: Any
    shape: tuple[int, ...]
    received: Sequence[int]


class Rows(HostTask):
    """An allgather or an all-to-all.

    What was found out about mapped tensors is kept by the words of all ranks, which are their places and rows.

    Attributes:
        epoch, generation: as of `collectives.engine.tasks.OneTensor`.
    """

    description = "rows"

    def __init__(self, context: Context, entry: CachedRequest) -> None:
        super().__init__(context, entry)
        self.epoch = self.generation = -1
        self._row = entry.request.shape or ()
        self._source: Array = EMPTY
        self._gathered = _NOWHERE
        self._at = 0
        self._ranges: object = None
        self._words: tuple[int, ...] = ()
        """This rank's, when its tensor was at this address and the arena had these pieces."""
        self._kept: dict[_AllWords, _Kept] = {}

    def bind(self) -> None:
        """Prepare for blocking calls."""
        self.epoch = self._context.planner.epoch
        self._kept.clear()

    def prepare(self, source: Array, gathered: GatheredRows) -> Words:
        """`prepare_handles` of a blocking call, which has no handle."""
        if self.epoch != self._context.planner.epoch:
            self.bind()  # plans of before have other step groups
        self._source, self._gathered = source, gathered
        at = address(source)
        if at != self._at or self._words[2:] != gathered.rows or self._ranges is not arena.ranges:
            self._at, self._ranges = at, arena.ranges
            mapped = self._mapped
            word = at if mapped is None or not source.size else mapped.word_of(at, source.nbytes)
            self._words = (word, 0, *gathered.rows)
        return self._words

    def run(self) -> None:
        """`run_handles` of a blocking call."""
        words_of, rank = self._context.control.words_of, self._context.rank
        all_words = tuple(
            [self._words if peer == rank else tuple(words_of(peer)) for peer in range(self._context.size)]
        )
        kept = self._kept.get(all_words)
        if kept is None:
            self._run_anew(all_words)
        else:
            gathered = self._gathered
            out = gathered.place(kept.shape, self.entry.dtype, self._context.pool)
            gathered.received = kept.received
            kept.loop.run(self._source, out.reshape(-1), kept.blocks)
        self._source, self._gathered = EMPTY, _NOWHERE

    def _run_anew(self, all_words: _AllWords) -> None:
        """Make the result, choose a plan for the rows, and run it."""
        context, entry, gathered, rank = self._context, self.entry, self._gathered, self._context.rank
        received, rows = exchanged_rows(entry.request.collective, [words[2:] for words in all_words], rank)
        gathered.received = received
        out = gathered.place((sum(received), *self._row), entry.dtype, context.pool)
        # A rank without rows has no tensor to be mapped.
        mapped = all(words[0] & MAPPED or not any(words[2:]) for words in all_words)
        plan = context.entries.plan_for_rows(entry, rows, mapped)
        if plan is None:
            return
        flat = out.reshape(-1)
        words = self._set_arrays(self._source, flat)
        if plan.reads_outputs:  # allocated only now: their places take a further round
            context.meet(self.token, words)
        self._learn_places(plan, entry.dtype)
        inputs = self._state.inputs
        views = [(inputs[peer], inputs[peer]) for peer in self._peers]
        if plan.loop is not None and context.executor.trace is None and all(view is not None for view, _ in views):
            blocks = plan.loop.cut(views)  # type: ignore[arg-type]  # checked above
            if mapped:
                if len(self._kept) >= _MOST_KEPT:
                    self._kept.clear()
                self._kept[all_words] = _Kept(plan.loop, blocks, out.shape, received)
            plan.loop.run(self._source, flat, blocks)
        else:
            context.executor.run(plan)
        self._clear_arrays()

    def withdraw(self) -> None:
        super().withdraw()
        self._source, self._gathered = EMPTY, _NOWHERE

    def prepare_handles(self, handles: Sequence[Handle]) -> Words:
        handle = handles[0]
        out = None if handle.out is EMPTY else handle.out
        return self.prepare(handle.source, GatheredRows(tuple(handle.rows), lambda: handle, out))

    def run_handles(self, handles: Sequence[Handle]) -> None:
        handle, gathered = handles[0], self._gathered
        if self._context.executor.trace is not None:
            self._kept.clear()  # a loop tells nothing of its rounds
        self.run()
        handle.keep = (handle.keep, gathered.array, gathered.received)
        handle.out = gathered.array.reshape(-1)


def exchanged_rows(collective: str, counts: Sequence[Sequence[int]], rank: int) -> tuple[list[int], tuple[int, ...]]:
    """The rows that this rank receives from each in an allgather or an all-to-all, and those of every rank, or of every
    pair of ranks by sender; ``counts`` are the rows that each rank sends, to all or to each receiver."""
    if collective == "allgather":
        gathered = [words[0] for words in counts]
        return gathered, tuple(gathered)
    return [words[rank] for words in counts], tuple(itertools.chain.from_iterable(counts))


def _none() -> Handle:
    raise AssertionError("no call is in progress")


_NOWHERE = GatheredRows((), _none)
_MOST_KEPT = 16
