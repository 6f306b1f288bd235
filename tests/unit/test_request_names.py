"""Requests whose texts are of subclasses of str: equal on all ranks, and like those of plain strings."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest

from collectives.engine.negotiation import Request
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World


class Name(str, enum.Enum):
    LOSS = "loss"


@pytest.mark.parametrize("name", [np.str_("loss"), Name.LOSS])
def test_a_text_counts_by_its_characters(name: Any) -> None:
    plain, other = Request("allreduce", "loss", algorithm="loss"), Request("allreduce", name, algorithm=name)
    assert plain == other and plain.signature() == other.signature()
    assert type(other.name) is str and type(other.algorithm) is str


@pytest.mark.parametrize("name", [np.str_("loss"), Name.LOSS])
def test_ranks_may_name_a_tensor_by_different_kinds_of_str(name: Any) -> None:
    def run(world: World) -> None:
        for step in range(3):
            tensor = np.full(3, world.rank + step, np.float32)
            assert (world.allreduce_async(tensor, name="loss" if world.rank else name).wait(10) == 0.5 + step).all()
            assert (world.allreduce(tensor, name=name, prescale_factor=np.float64(2)) == 1 + 2 * step).all()

    thread_groups.run(2, run, make_world=World)
