"""The transports among threads pass the conformance suite."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from collectives.transport.group import Group
from collectives.transport.threads import thread_groups
from tests.support.scenarios import conformance

ALL = [
    *conformance.control_checks,
    *conformance.memory_checks,
    *conformance.message_checks,
    conformance.a_failure_reaches_every_wait,
]


@pytest.mark.parametrize("hosts", [None, ((0, 1), (2, 3))], ids=["one-host", "two-hosts"])
@pytest.mark.parametrize("size", [1, 2, 4, 7])
@pytest.mark.parametrize("check", ALL, ids=lambda check: check.__name__)
def test_threads(check: Callable[[Group], None], size: int, hosts: tuple[tuple[int, ...], ...] | None) -> None:
    if hosts is not None and size != 4:
        hosts = (tuple(range(size // 2)), tuple(range(size // 2, size))) if size > 1 else ((0,),)
    thread_groups.run(size, check, hosts=hosts, make_world=lambda group: group)
