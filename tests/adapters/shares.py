"""A global batch, what each rank has of it, and the one process that has it all: for tests of whole recipes.

A recipe is a function of ``hvd`` that trains by its own words and returns what it has at the end. Called with an
adapter, it trains on this rank's share of every batch, and the shares differ in length; called with `One`, it trains
on all rows in this process, without the adapter.

    size 2     [ 0 1 2 3 4 | 5 6 7 8 9 10 11 ]
    size 3     [ 0 1 2 | 3 4 5 6 | 7 8 9 10 11 ]

The loss of a rank is the sum over its rows times ``size / ROWS``: the average over the ranks is the mean over the rows.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import collectives

ROWS, STEPS, FEATURES, CLASSES, WORDS = 12, 4, 5, 3, 7

_draw = np.random.default_rng(14)
X = _draw.normal(size=(STEPS, ROWS, FEATURES))
Y = _draw.normal(size=(STEPS, ROWS, CLASSES))
TOKENS = _draw.integers(0, WORDS, (STEPS, ROWS, 2))


class One:
    """One process in place of ``ranks``; gradients, variables and objects stay as they are."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def broadcast_object(self, value: Any, root_rank: int = 0) -> Any:
        return value

    def barrier(self) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """``DistributedOptimizer``, ``broadcast_variables`` and the like: the first argument."""
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda value, *arguments, **keywords: value


def share(size: int, rank: int) -> slice:
    """This rank's rows of a global batch."""
    ends = np.round(ROWS * np.cumsum([0, *range(4, 4 + size)]) / sum(range(4, 4 + size))).astype(int)
    return slice(int(ends[rank]), int(ends[rank + 1]))


def mine(hvd: Any, rows: Any) -> Any:
    """This rank's share of every step's batch."""
    return rows[:, share(hvd.size(), hvd.rank())]


def alone(program: Callable[..., Any], one: One, **arguments: Any) -> Any:
    """What a program finds in one process; TensorFlow runs eagerly, as tracing takes longer than a few steps."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None:
        return program(one, **arguments)
    tensorflow.config.run_functions_eagerly(True)
    try:
        return program(one, **arguments)
    finally:
        tensorflow.config.run_functions_eagerly(False)


def compare(found: Mapping[str, Any], wanted: Mapping[str, Any], rtol: float, atol: float) -> None:
    """What this rank has found is what one process has, and on all ranks bit for bit the same."""
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        np.testing.assert_allclose(np.asarray(value), np.asarray(wanted[name]), rtol, atol, err_msg=name)
    collectives.check_consistency({name: np.asarray(value) for name, value in found.items()})


def recipe_of(
    rtol: float, atol: float, one: type[One] = One, eagerly: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """A decorator that makes a test: what a program finds on the ranks is what it finds in one process.

    Args:
        eagerly: whether the one process traces no functions of TensorFlow, which round halves elsewhere.
    """

    def decorate(program: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(program)
        def test(hvd: Any, **arguments: Any) -> None:
            found, single = program(hvd, **arguments), one(hvd.size())
            wanted = alone(program, single, **arguments) if eagerly else program(single, **arguments)
            compare(found, wanted, rtol, atol)

        return test

    return decorate
