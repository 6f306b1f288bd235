"""Messages of a simulated collective: what all ranks send, receive and reduce, read from their schedules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter

import numpy as np

from collectives.base.errors import InvalidArgumentError
from collectives.schedules.schedule import Schedule, StepKind
from collectives.simulation.links import Floats, Ints

_CODE = {kind.value: number for number, kind in enumerate(StepKind)}
_ROUND, _RANK, _PEER, _CHUNK, _SPAN = range(5)  # the rows of a table of steps


class Traffic:
    """All messages of a collective and the reductions of each rank, in arrays sorted by round; see `clock.simulate`."""

    def __init__(self, schedules: Iterable[Schedule], sizes: Sequence[int], segment: int | None, stride: int) -> None:
        sends: list[Ints] = []
        receives: list[Ints] = []
        reductions: list[Ints] = []
        self.size, self.rounds = 0, 0
        for rank, schedule in enumerate(schedules):
            if schedule.rank != rank or schedule.chunks != len(sizes):
                raise InvalidArgumentError(
                    f"schedules, sizes: expected a schedule of rank {rank} with {len(sizes)} chunks, one for each "
                    f"size; found one of rank {schedule.rank} with {schedule.chunks} [U27]"
                )
            self.collective, self.size = schedule.collective, schedule.size
            self.rounds = max(self.rounds, len(schedule.rounds))
            kind, steps = _flatten(schedule)
            sends.append(steps[:, kind == _CODE[StepKind.SEND.value]])
            reductions.append(steps[:, kind == _CODE[StepKind.REDUCE.value]])
            arrives = (kind == _CODE[StepKind.RECEIVE.value]) | (kind == _CODE[StepKind.REDUCE.value])
            receives.append(steps[:, arrives & (steps[_PEER] != rank)])
        if len(sends) != self.size or not sends:
            raise InvalidArgumentError(
                f"schedules: expected one for each of {self.size} ranks, found {len(sends)} [U28]"
            )
        self._sends = self._sorted(sends, (_ROUND, _RANK, _PEER))
        self._reductions = self._sorted(reductions, (_ROUND,))
        self._check(self._sends, self._sorted(receives, (_ROUND, _PEER, _RANK)))
        rounds = np.arange(self.rounds + 1)
        self._send_bounds = np.searchsorted(self._sends[_ROUND], rounds)
        self._reduction_bounds = np.searchsorted(self._reductions[_ROUND], rounds)
        self._sizes = np.asarray(sizes, np.int64)
        self._segment = segment or max(1, int(self._sizes.max(initial=0)))
        self._segments = max(1, -(-int(self._sizes.max(initial=0)) // self._segment))
        self._stride = max(1, min(stride, self.rounds))
        self.groups = self.rounds + (self._segments - 1) * self._stride if self.rounds else 0

    def _sorted(self, parts: list[Ints], by: Sequence[int]) -> Ints:
        """All ranks' steps in one table, sorted by the rows ``by`` and then by their order in the schedule."""
        table = np.concatenate(parts, axis=1)
        parts.clear()
        key = np.zeros(table.shape[1], np.int64)
        for row in by:
            key = key * max(self.size, 1) + table[row]
        return table[:, np.argsort(key, kind="stable")]

    def _check(self, sends: Ints, receives: Ints) -> None:
        """Check that the k-th send from a to b in a round and the k-th receive by b from a cover the same chunks."""
        receives = receives[[_ROUND, _PEER, _RANK, _CHUNK, _SPAN]]
        count = min(sends.shape[1], receives.shape[1])
        differs = (sends[:, :count] != receives[:, :count]).any(axis=0)
        if sends.shape == receives.shape and not differs.any():
            return
        first = int(differs.argmax()) if differs.any() else count
        sent, received = (
            "nothing"
            if first >= table.shape[1]
            else "in round {} from rank {} to rank {} chunk {}, span {}".format(*table[:, first])
            for table in (sends, receives)
        )
        raise InvalidArgumentError(
            f"schedules: a send and its receive do not match: sent is {sent}; received is {received} [U29]"
        )

    def group(self, number: int) -> tuple[Ints, Ints, Floats, Floats]:
        """Sender, receiver and bytes of each message of a step group, and the bytes that each rank reduces in it."""
        messages: list[tuple[Ints, Ints, Floats]] = []
        reduced = np.zeros(self.size)
        stride = self._stride
        first = max(number % stride, number - (self._segments - 1) * stride)
        for now in range(first, min(number + 1, self.rounds), stride):
            sent_bytes = (number - now) // stride * self._segment
            sums = np.concatenate([[0], np.cumsum(np.clip(self._sizes - sent_bytes, 0, self._segment))])
            steps = self._sends[:, self._send_bounds[now] : self._send_bounds[now + 1]]
            nbytes = sums[steps[_CHUNK] + steps[_SPAN]] - sums[steps[_CHUNK]]
            moving = nbytes > 0
            messages.append((steps[_RANK, moving], steps[_PEER, moving], nbytes[moving].astype(np.float64)))
            steps = self._reductions[:, self._reduction_bounds[now] : self._reduction_bounds[now + 1]]
            reduced += np.bincount(steps[_RANK], sums[steps[_CHUNK] + steps[_SPAN]] - sums[steps[_CHUNK]], self.size)
        sender, receiver, nbytes = (
            messages[0] if len(messages) == 1 else map(np.concatenate, zip(*messages, strict=True))
        )
        return sender, receiver, nbytes, reduced


def _flatten(schedule: Schedule) -> tuple[Ints, Ints]:
    """The kinds of a schedule's steps, and a table of their round, rank, peer, chunk and span."""
    steps = list(chain.from_iterable(schedule.rounds))
    kinds = np.fromiter(map(_CODE.__getitem__, map(attrgetter("kind._value_"), steps)), np.int32, len(steps))
    table = np.empty((5, len(steps)), np.int32)
    table[_ROUND] = np.repeat(np.arange(len(schedule.rounds)), [len(r) for r in schedule.rounds])
    table[_RANK] = schedule.rank
    for row, name in ((_PEER, "peer"), (_CHUNK, "chunk"), (_SPAN, "span")):
        table[row] = np.fromiter(map(attrgetter(name), steps), np.int32, len(steps))
    return kinds, table
