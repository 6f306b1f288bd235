"""The transports of ranks connected by TCP pass the conformance suite: on one host, on pretended ones, and over
messages only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from collectives.base.config import Config
from collectives.transport.group import Group
from tests import conformance
from tests.processes import by_tcp, group_alone
from tests.teams import Team

Check = Callable[[Group], None]
GROUPS: dict[str, tuple[int, dict[str, Any]]] = {
    "2-one-host": (2, {}),
    "2-hosts": (2, {"local_size": 1}),
    "2-and-2": (4, {"local_size": 2}),
    "7-messages": (7, {"transport": "tcp"}),
}
"""By name: the number of ranks, and their settings."""


def connected(name: str) -> Team:
    size, settings = GROUPS[name]
    return Team(size, Config(timeout=30, **settings), connect=by_tcp, make_world=group_alone)


def where_it_applies(check: Check, group: Group) -> None:
    assert group.messages is not None
    if group.memory is not None or check not in conformance.memory_checks:
        check(group)


@pytest.fixture(scope="module", params=list(GROUPS))
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    team = connected(request.param)
    yield team
    team.end()


@pytest.mark.parametrize(
    "check",
    [*conformance.control_checks, *conformance.memory_checks, *conformance.message_checks],
    ids=lambda check: check.__name__,
)
def test_check(check: Check, team: Team) -> None:
    team.run(functools.partial(where_it_applies, check))


@pytest.mark.parametrize("name", GROUPS)
def test_a_failure_reaches_every_wait(name: str) -> None:
    team = connected(name)
    team.run(conformance.a_failure_reaches_every_wait)
    team.end()
