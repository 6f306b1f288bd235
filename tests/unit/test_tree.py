"""Recursive doubling and the binomial tree: few rounds, any number of ranks."""

from __future__ import annotations

import math

from collectives.schedules import tree

SIZES = [*range(1, 65), 67, 96, 127, 128, 129, 200, 257, 384, 511, 512]


def test_rounds() -> None:
    for size in SIZES[1:]:
        folds = 0 if size & (size - 1) == 0 else 2
        assert len(tree.recursive_doubling(0, size).rounds) == math.floor(math.log2(size)) + folds
        assert len(tree.broadcast(0, size, 0).rounds) == math.ceil(math.log2(size))
