"""The transports of ranks connected by TCP pass the conformance suite: on one host, on pretended ones, and over
messages only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from collectives.base.config import Config
from collectives.transport.group import Group
from tests.support.launching.processes import by_tcp, group_alone
from tests.support.launching.teams import Team
from tests.support.scenarios import conformance
from tests.support.scenarios.everywhere import OF_GROUPS, name_of

Check = Callable[[Group], None]
GROUPS: dict[str, tuple[int, dict[str, Any]]] = {
    "2-one-host": (2, {}),
    "2-and-2": (4, {"local_size": 2}),
    "7-messages": (7, {"transport": "tcp"}),
}
"""By name: the number of ranks, and their settings."""


def connected(name: str) -> Team:
    size, settings = GROUPS[name]
    return Team(size, Config(timeout=30, **settings), connect=by_tcp, make_world=group_alone)


@pytest.fixture(scope="module", params=list(GROUPS))
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    team = connected(request.param)
    yield team
    team.end()


@pytest.mark.parametrize("check", OF_GROUPS, ids=name_of)
def test_check(check: Check, team: Team) -> None:
    team.run(check)


@pytest.mark.parametrize("name", GROUPS)
def test_a_failure_reaches_every_wait(name: str) -> None:
    team = connected(name)
    team.run(conformance.a_failure_reaches_every_wait)
    team.end()
