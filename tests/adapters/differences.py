"""Central differences of the sum of all ranks' losses, with which gradients through collectives are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import collectives

Array = np.ndarray[Any, Any]


def compare(
    found: Sequence[Array],
    inputs: Sequence[Array],
    loss: Callable[[list[Array]], float],
    moves: int,
    step: float = 1e-6,
    process_set: Any = None,
) -> None:
    """Move elements of every rank's inputs one at a time, in lockstep, and compare with the gradients that were found.

    Args:
        inputs: this rank's, in float64 or complex128.
        loss: this rank's, of its inputs; collective over the ranks.
        moves: at most so many of each rank's elements are moved.
        process_set: whose ranks call this.
    """
    members = process_set or collectives.global_process_set
    places = [
        (i, k, unit)
        for i, x in enumerate(inputs)
        for k in range(x.size)
        for unit in ((1, 1j) if np.iscomplexobj(x) else (1,))
    ]
    places = places[:: -(-len(places) // moves) or 1]
    counts = collectives.allgather_object(len(places), process_set=members)
    differences = []
    for rank, count in enumerate(counts):
        for number in range(count):
            sides = []
            for sign in (1, -1):
                moved = [x.copy() for x in inputs]
                if rank == members.rank():
                    i, k, unit = places[number]
                    moved[i].reshape(-1)[k] += sign * step * unit
                sides.append(loss(moved))
            differences.append((sides[0] - sides[1]) / (2 * step))
    slopes = collectives.allreduce(np.array(differences), op=collectives.Sum, process_set=members)
    for place, slope in zip(places, slopes[sum(counts[: members.rank()]) :].tolist(), strict=False):
        i, k, unit = place
        gradient = complex(found[i].reshape(-1)[k])
        assert (gradient.imag if unit == 1j else gradient.real) == pytest.approx(slope, rel=2e-6, abs=2e-6), place
