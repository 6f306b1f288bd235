"""Small all-reduces between hosts whose data travels inline, as words of the round in which the ranks agree.

Every rank gets the tensors of all ranks with their tokens, and combines them by the fixed tree: one message in place of
two in turn, and the same result on every rank, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.schedules import fixed_tree
from collectives.tensors.reduction import Kernel, Scaling, merging
from collectives.transport.base import Array

WORD_BYTES = 8


class Inline:
    """How one such all-reduce is carried out: ``kernel`` combines two tensors, and ``finish``, if any, scales the
    result."""

    def __init__(self, size: int, count: int, dtype: np.dtype[Any], kernel: Kernel, finish: Scaling | None) -> None:
        self._peers = range(size)
        self._dtype = dtype
        self._nbytes = nbytes = count * dtype.itemsize
        self._finish = finish
        self._spares = list(np.empty((fixed_tree.intermediates(size), count), dtype))
        self._steps = merging(kernel, [1] * size)
        self._padded: Array | None = None
        if nbytes % WORD_BYTES:
            self._padded = np.zeros(-(-nbytes // WORD_BYTES) * WORD_BYTES, np.uint8)
            self._into = self._padded[:nbytes].view(dtype)
            self._words = self._padded.data

    def words(self, source: Array) -> memoryview:
        """A tensor as what its record carries (see `Control.enter`), valid until it changes or this is called again."""
        if self._padded is None:
            return source.view(np.uint8).data
        self._into[...] = source
        return self._words

    def reduce(self, words_of: Callable[[int], Sequence[int]], out: Array) -> None:
        """Combine the tensors that all ranks entered the round with (``words_of`` as of `Control`) into ``out``, which
        may be the memory of this rank's tensor."""
        nbytes, dtype = self._nbytes, self._dtype
        operands: list[Array] = []
        for peer in self._peers:
            block = np.frombuffer(words_of(peer), np.uint8)  # type: ignore[call-overload]
            operands.append(block[:nbytes].view(dtype))
        count, (*inner, (last, kernel)) = len(operands), self._steps
        operands += self._spares  # as `reduction.combine`, without a call
        for (left, right, depth, _), combine_two in inner:
            combine_two(operands[left], operands[right], operands[count + depth])
        kernel(operands[last.left], operands[last.right], out)
        if self._finish is not None:
            self._finish(out, out)
