"""Ranks as threads that take turns: one runs at a time, and a seed decides which goes on wherever a rank announces
progress or waits.

Every order is reproducible and none depends on time. Where all ranks wait, the test fails at once.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from collectives.transport.base import Array
from collectives.transport.group import Group
from collectives.transport.threads import thread_groups

_SECONDS = 60
INT = np.dtype(np.int64)
SEEDS = st.integers(0, 1 << 32)


def numbers(count: int, *seed: int) -> Array:
    """Different on every rank and in every call, so that a contribution that is lost and doubled shows."""
    return np.random.default_rng(seed).integers(-(1 << 62), 1 << 62, count)


def triple(block: Array, out: Array) -> None:
    """Scale a reduced block; what is scaled twice, or not at all, shows."""
    np.multiply(block, 3, out=out)


class _Ended(Exception):
    """Ends a rank whose test has failed on another one."""


class Turns:
    """The turns of one test.

    Args:
        size: the number of ranks.
        seed: of the order. Some orders have a rank go on for as long as it can.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self._random = random.Random(seed)
        self._stays = self._random.choice((0.0, 0.5, 1.0))
        self._batons = [threading.Semaphore(0) for _ in range(size)]
        self._waits: dict[int, Callable[[], bool]] = {}
        self._running = set(range(size))
        self._error: BaseException | None = None
        self._exchanges: list[dict[int, Any]] = []
        self._exchanged = [0] * size

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """Call ``body(rank)`` for every rank. Returns the results in rank order, or raises the first error."""
        results: list[Any] = [None] * self.size

        def run(rank: int) -> None:
            self._batons[rank].acquire()
            try:
                if self._error is None:
                    results[rank] = body(rank)
            except _Ended:
                pass
            except BaseException as error:  # raised in the caller below
                self._error = self._error or error
            self._running.discard(rank)
            self._pass_on()

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        self._pass_on()
        for thread in threads:
            thread.join(_SECONDS)
            assert not thread.is_alive(), "a rank neither ends nor waits"
        if self._error is not None:
            raise self._error
        return results

    def switch(self, rank: int) -> None:
        """Let another rank go on, perhaps."""
        if self._random.random() >= self._stays:
            self._pass_on(rank)

    def until(self, rank: int, done: Callable[[], bool]) -> None:
        """Let other ranks go on until ``done()`` is true."""
        while not done():
            self._waits[rank] = done
            self._pass_on(rank)
            del self._waits[rank]

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Gather every rank's value on every rank, in rank order."""
        number = self._exchanged[rank]
        self._exchanged[rank] += 1
        if number == len(self._exchanges):
            self._exchanges.append({})
        values = self._exchanges[number]
        values[rank] = value
        self.until(rank, lambda: len(values) == self.size)
        return [values[peer] for peer in range(self.size)]

    def _pass_on(self, rank: int | None = None) -> None:
        ready = [peer for peer in sorted(self._running) if peer not in self._waits or self._waits[peer]()]
        if not ready and self._running:
            self._error = self._error or AssertionError(f"ranks {sorted(self._running)} wait for each other")
        if self._error is not None:
            for baton in self._batons:
                baton.release()
        elif ready:
            chosen = self._random.choice(ready)
            if chosen == rank:
                return
            self._batons[chosen].release()
        if rank is not None:
            self._batons[rank].acquire()
            if self._error is not None:
                raise _Ended


def groups(turns: Turns, hosts: Sequence[Sequence[int]]) -> list[Group]:
    """The groups of ranks on these hosts, all of whose waits are turns."""
    made = thread_groups.connect(turns.size, hosts=hosts)
    for group in made:
        _take_turns(turns, group)
    return made


def _take_turns(turns: Turns, group: Group) -> None:
    rank, memory, control, messages = group.rank, group.memory, group.control, group.messages
    assert memory is not None
    for board in (memory.board, control._board):
        board._wait_long = lambda peer, arrived: turns.until(rank, arrived)

        def advance(progress: int, announce: Callable[[int], None] = board.advance) -> None:
            announce(progress)
            turns.switch(rank)

        board.advance = advance
    messages._until = lambda peer, done: turns.until(rank, done)
    control.exchange = lambda value: turns.exchange(rank, value)
