"""The meaning of a schedule, as a program over arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from collectives.schedules.schedule import Schedule, StepKind

Values = Mapping[int, np.ndarray[Any, Any]]


def replay(
    schedules: Sequence[Schedule], data: Sequence[Values], combine: Callable[[Any, Any], Any] = np.add
) -> list[dict[int, np.ndarray[Any, Any]]]:
    """Move and combine real arrays, round by round: the meaning of a schedule, as a program.

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
            for step in schedule.rounds[number]:
                for chunk in range(step.chunk, step.chunk + step.span):
                    if step.kind is StepKind.REDUCE:
                        held[rank][chunk] = combine(held[rank][chunk], before[step.peer][chunk])
                    elif step.kind is not StepKind.SEND:
                        held[rank][chunk] = before[step.peer][chunk].copy()
    return held
