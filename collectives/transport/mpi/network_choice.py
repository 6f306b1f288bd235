"""The quicker of two networks between the same ranks, by a short measurement."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TypeVar

import numpy as np

from collectives.base.logging import logger
from collectives.transport.assembly import Wiring
from collectives.transport.base import Array

SIZES = (0, 64 << 10, 1 << 20)
"""Bytes of what is timed: 0 is a round of words, the others are blocks that every rank sends to the next one."""
_ROUNDS = (20, 8, 4)
"""Of each size; the first round, in which connections are made, does not count."""

_blocks: list[list[Array]] = []
"""Of measurements that are under way, or that an exception has ended: messages may still be written into them."""

A = TypeVar("A", bound=Wiring)
B = TypeVar("B", bound=Wiring)


def choose(first: A, second: B, clock: Callable[[], float] = time.perf_counter) -> A | B:
    """The wiring that is quicker, by the geometric mean over `SIZES` of their times; called on all ranks of both.

    The two take turns, the slowest rank counts, and all ranks decide alike, by what they have exchanged through the
    first. Takes tens of milliseconds on a network of 1 Gbit/s. Closes neither.

    Raises:
        RankFailedError, CollectiveTimeoutError: a rank failed meanwhile, or did not come in time.
    """
    blocks: list[Array] = []
    _blocks.append(blocks)
    trials = [_trials(wiring, blocks) for wiring in (first, second)]
    medians = []
    for rounds, *both in zip(_ROUNDS, *trials, strict=True):
        seconds: list[list[float]] = [[], []]
        for turn in range(rounds):
            for trial, samples in zip(both, seconds, strict=True):
                begun = clock()
                trial()
                if turn:
                    samples.append(clock() - begun)
        medians.append([median(samples) for samples in seconds])
    share = ratio(first.channel.exchange(medians))
    _blocks[:] = [kept for kept in _blocks if kept is not blocks]
    if first.channel.rank == 0:
        names = first.messages.name, second.messages.name
        logger.info("between these hosts %s takes %.2f of the time of %s", names[1], share, names[0])
    return second if share < 1 else first


def ratio(times: Sequence[Sequence[Sequence[float]]]) -> float:
    """The times of the second of two, divided by those of the first: the geometric mean over the sizes. ``times`` has,
    by rank and size, the seconds of the first and of the second."""
    slowest = np.array(times).max(axis=0)
    return math.exp(float(np.log(slowest[:, 1] / slowest[:, 0]).mean()))


def _trials(wiring: Wiring, blocks: list[Array]) -> list[Callable[[], object]]:
    """What is timed, in the order of `SIZES`; ``blocks`` gets the memory of its messages."""
    words, messages = wiring.words(), wiring.messages
    rank, size = wiring.channel.rank, wiring.channel.size
    after, before = (rank + 1) % size, (rank - 1) % size

    def agree() -> None:
        words.post(1, ())
        if not words.test(True):
            words.wait()

    def passing(nbytes: int) -> Callable[[], object]:
        block, box = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        blocks.extend((block, box))

        def trial() -> None:
            messages.post_receive(before, box)
            messages.post_send(after, block)
            messages.drain()

        return trial

    return [passing(nbytes) if nbytes else agree for nbytes in SIZES]
