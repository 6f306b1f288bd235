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
    "1-alone": (1, {}),
    "2-one-host": (2, {}),
    "2-hosts": (2, {"local_size": 1}),
    "2-and-2": (4, {"local_size": 2}),
    "5-messages": (5, {"transport": "tcp"}),
    "7-hosts": (7, {"local_size": 1}),
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


def where_memory_is_shared(check: Check, group: Group) -> None:
    if group.memory is not None:
        check(group)


def where_there_are_messages(check: Check, group: Group) -> None:
    assert (group.messages is None) == (group.size == 1)
    if group.messages is not None:
        check(group)


@pytest.mark.parametrize("check", conformance.control_checks, ids=lambda check: check.__name__)
def test_control(check: Check, team: Team) -> None:
    team.run(check)


@pytest.mark.parametrize("check", conformance.memory_checks, ids=lambda check: check.__name__)
def test_memory(check: Check, team: Team) -> None:
    team.run(functools.partial(where_memory_is_shared, check))


@pytest.mark.parametrize("check", conformance.message_checks, ids=lambda check: check.__name__)
def test_messages(check: Check, team: Team) -> None:
    team.run(functools.partial(where_there_are_messages, check))


@pytest.mark.parametrize("name", GROUPS)
def test_a_failure_reaches_every_wait(name: str) -> None:
    team = connected(name)
    team.run(conformance.a_failure_reaches_every_wait)
    team.end()
