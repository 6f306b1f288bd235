"""Fusion: many tensors are reduced as one.

A bucket is a list of tensors with the same reduction. The schedule sees one tensor, their concatenation:

    tensors    |  conv1.weight  | bn1 | bn1b |      conv2.weight      | fc |
    chunks     |        rank 0's half         |        rank 1's half       |
    blocks     |  block 0  |  block 1  |  each block is a list of pieces of tensors

There is no buffer of that size. On one host, a block is packed into a window, where the peers read it. If the tensors
of all ranks are mapped, a block is combined piece by piece instead. Between hosts, small tensors are copied into a
buffer, and large tensors are reduced one by one.

`plan` divides an agreed list of operations into buckets, in the order of the list. The operations of a bucket have the
same dtype, reduction and scale factors, and a bucket of several operations does not exceed the threshold. An operation
joins the open bucket of its kind, even if operations of other kinds come in between. The result depends only on the
list, so every rank makes the same buckets.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from itertools import accumulate

import numpy as np

from collectives.tensors.reduction import Scaling
from collectives.transport.base import Array

MOST_TENSORS = 1024
"""The most tensors in a bucket. Each sends two words with a token (`collectives.transport.host.board.max_words`)."""

Piece = tuple[int, int, int, int, int]
"""A tensor's number, the start and end of the piece in the tensor, and its start and end in the block; in elements."""


def plan(keys: Sequence[Hashable | None], nbytes: Sequence[int], threshold: int) -> list[tuple[int, ...]]:
    """Divide a list of operations into buckets.

    Args:
        keys: operations with equal keys may be fused; an operation with the key None is not fused.
        nbytes: bytes of each operation's tensor.
        threshold: the most bytes of a bucket with several tensors.

    Returns:
        The buckets, as positions in the list, ordered by their first members. Each operation is in exactly one bucket.
    """
    buckets: list[list[int]] = []
    filled: list[int] = []
    open_bucket: dict[Hashable, int] = {}
    for number, (key, size) in enumerate(zip(keys, nbytes, strict=True)):
        at = open_bucket.get(key) if key is not None else None
        if at is None or filled[at] + size > threshold or len(buckets[at]) == MOST_TENSORS:
            at = len(buckets)
            buckets.append([])
            filled.append(0)
            if key is not None:
                open_bucket[key] = at
        buckets[at].append(number)
        filled[at] += size
    return [tuple(members) for members in buckets]


class Pieces:
    """Several tensors that are reduced as one. Each block consists of pieces of the tensors.

    Attributes:
        counts: elements of each tensor.
        total: elements of all tensors.
        sources, outs: the input and output of each tensor, as 1-D arrays of one dtype; set before every run.
        operands: this rank's values to combine: the inputs, or the outputs if the inputs were scaled into them.
        unstaged: start and length, in elements, of the chunks that no peer reads from this rank's window.
        scale: scales each packed block, or None.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)
        ends = list(accumulate(counts))
        self.total = ends[-1]
        self._ends = ends
        self.sources: Sequence[Array] = ()
        self.outs: Sequence[Array] = ()
        self.operands: Sequence[Array] = ()
        self.scale: Scaling | None = None
        self.unstaged: Sequence[tuple[int, int]] = ()
        self._cuts: dict[tuple[int, int], tuple[Piece, ...]] = {}
        self._parts: list[Array] = []
        self._parts_of: Array | None = None

    def cut(self, at: int, count: int) -> tuple[Piece, ...]:
        """The pieces of the block of ``count`` elements that starts at ``at``."""
        cached = self._cuts.get((at, count))
        if cached is not None:
            return cached
        pieces: list[Piece] = []
        number = bisect_right(self._ends, at)
        covered = 0
        while covered < count:
            start = at + covered - (self._ends[number] - self.counts[number])
            length = min(self.counts[number] - start, count - covered)
            if length > 0:
                pieces.append((number, start, start + length, covered, covered + length))
            covered += length
            number += 1
        self._cuts[at, count] = tuple(pieces)
        return self._cuts[at, count]

    def gather(self, at: int, count: int, out: Array) -> None:
        """Pack a block of the inputs into ``out`` in one call, and scale it."""
        self.gather_from(self.sources, at, count, out)
        if self.scale is not None:
            self.scale(out, out)

    def scale_operands(self) -> None:
        """Scale the inputs that are combined without packing, and store them in the outputs."""
        assert self.scale is not None
        for start, count in self.unstaged:
            for number, first, last, _, _ in self.cut(start, count):
                self.scale(self.sources[number][first:last], self.outs[number][first:last])

    def gather_from(self, tensors: Sequence[Array], at: int, count: int, out: Array) -> None:
        """Pack a block of ``tensors``, whose lengths are ``counts``, into ``out``."""
        counts = self.counts
        np.concatenate(
            [
                tensors[number] if end - start == counts[number] else tensors[number][start:end]
                for number, start, end, _, _ in self.cut(at, count)
            ],
            out=out,
        )

    def scatter(self, packed: Array) -> None:
        """Unpack all outputs from an array of ``total`` elements. Caches the views until the array changes."""
        if self._parts_of is not packed:
            starts = [end - count for end, count in zip(self._ends, self.counts, strict=True)]
            self._parts = [packed[start:end] for start, end in zip(starts, self._ends, strict=True)]
            self._parts_of = packed
        for out, part in zip(self.outs, self._parts, strict=True):
            out[...] = part
