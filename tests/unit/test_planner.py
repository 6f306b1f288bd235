"""The planner where there is nothing to choose: a group of one rank accepts every transport and algorithm that
exists."""

from __future__ import annotations

import pytest

from collectives.base.errors import InvalidArgumentError
from collectives.plan.planner import Placement, Planner
from collectives.schedules.registry import COLLECTIVES, on_host

ALONE = Placement(0, 1, ((0,),), shares_memory=False, reads_private=False)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("transport", ["auto", "window", "direct-read", "mpi"])
def test_one_rank_may_ask_for_any_transport_and_algorithm(collective: str, transport: str) -> None:
    """By the environment, which holds for every process set, and for one call."""
    Planner(ALONE, transport=transport).choose(collective, 1 << 20)
    for algorithm in on_host(collective):
        Planner(ALONE, transport=transport, algorithm=algorithm).choose(collective, 64)
        Planner(ALONE).choose(collective, 64, algorithm=algorithm, transport=transport)


def test_one_rank_may_not_ask_for_what_does_not_exist() -> None:
    with pytest.raises(InvalidArgumentError, match="pigeon"):
        Planner(ALONE).choose("allreduce", 64, transport="pigeon")
    with pytest.raises(InvalidArgumentError, match="quick"):
        Planner(ALONE).choose("allreduce", 64, algorithm="quick")
