"""The meaning of a schedule, as a program over arrays."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from collectives.schedules.proof.verify import ScheduleError
from collectives.schedules.schedule import Schedule, Step, StepKind

T = TypeVar("T")


def tree(values: Sequence[T], combine: Callable[[T, T], T]) -> T:
    """The fixed tree over the values: split at the largest power of two below their number."""
    if len(values) == 1:
        return values[0]
    middle = 1 << (len(values) - 1).bit_length() - 1
    return combine(tree(values[:middle], combine), tree(values[middle:], combine))


def replay(
    schedules: Sequence[Schedule], data: Sequence[Mapping[int, T]], combine: Callable[[T, T], T] = operator.add
) -> list[dict[int, T]]:
    """Move and combine values, such as arrays, round by round: the meaning of a schedule, as a program.

    Cutting chunks into segments would change no value, because segments are disjoint.

    Args:
        data: for each rank, the chunks that it starts with.

    Returns:
        For each rank, the chunks that it holds in the end.
    """
    held = [dict(chunks) for chunks in data]
    for number in range(len(schedules[0].rounds)):
        before = [dict(chunks) for chunks in held]
        for rank, schedule in enumerate(schedules):
            contributions: dict[int, dict[int, T]] = {}
            for step in schedule.rounds[number]:
                for chunk in range(step.chunk, step.chunk + step.span):
                    if step.kind is StepKind.REDUCE:
                        contributions.setdefault(chunk, {})[step.peer] = before[step.peer][chunk]
                    elif step.kind is not StepKind.SEND:
                        held[rank][chunk] = before[step.peer][chunk]
            for chunk, values in contributions.items():
                values[rank] = held[rank][chunk]
                ordered = [values[one] for one in sorted(values, key=schedule.key)]
                held[rank][chunk] = tree(ordered, combine)
    return held


def counted(schedules: Sequence[Schedule]) -> list[Schedule]:
    """The schedules with the `Step.count` of all that is received. A step over chunks with different numbers of
    contributions becomes one for each chunk. The schedules must be proved by `verify`."""
    held: list[dict[int, int]] = [{} for _ in schedules]  # one contribution where there is nothing
    rounds: list[list[tuple[Step, ...]]] = [[] for _ in schedules]
    for number in range(len(schedules[0].rounds)):
        before = [dict(chunks) for chunks in held]
        for rank, schedule in enumerate(schedules):
            steps: list[Step] = []
            for step in schedule.rounds[number]:
                if step.kind not in (StepKind.RECEIVE, StepKind.REDUCE):
                    steps.append(step)
                    continue
                chunks = range(step.chunk, step.chunk + step.span)
                counts = [before[step.peer].get(chunk, 1) for chunk in chunks]
                if len(set(counts)) == 1:
                    steps.append(replace(step, count=counts[0]))
                else:
                    steps += [replace(step, chunk=at, span=1, count=n) for at, n in zip(chunks, counts, strict=True)]
                for chunk, count in zip(chunks, counts, strict=True):
                    reduced = step.kind is StepKind.REDUCE
                    held[rank][chunk] = count + (held[rank].get(chunk, 1) if reduced else 0)
            rounds[rank].append(tuple(steps))
    return [replace(schedule, rounds=tuple(rounds[rank])) for rank, schedule in enumerate(schedules)]


def same_bits(schedules: Sequence[Schedule]) -> None:
    """Prove that an all-reduce combines each chunk in one order on all ranks, up to ``a op b`` being ``b op a``, so
    that all get the same bits although rounding depends on the order. The schedules must be proved by `verify`.

    Raises:
        ScheduleError: two ranks combine in different orders.
    """
    first = schedules[0]
    orders: dict[tuple[int, int], int] = {}

    def combine(one: int, other: int) -> int:
        pair = (one, other) if one < other else (other, one)
        return orders.setdefault(pair, first.size + len(orders))

    start = [dict.fromkeys(range(first.chunks), rank) for rank in range(first.size)]
    results = replay(schedules, start, combine)
    for rank, held in enumerate(results):
        for chunk, order in results[0].items():
            if held[chunk] != order:
                raise ScheduleError(
                    f"{first.collective}/{first.algorithm} of {first.size} ranks: rank {rank} combines chunk {chunk} "
                    "in another order than rank 0, so that rounding gives them different bits; let one rank combine "
                    "it, or all in the same order"
                )
