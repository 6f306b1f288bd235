"""The transports among processes pass the conformance suite: shared memory and MPI on one host, and on pretended
ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from collectives.transport.group import Group
from tests.mpi.worlds import every_config, group_of_all
from tests.support.scenarios import conformance

pytestmark = pytest.mark.mpi
RANKS = {"openmpi": (3,), "mpich": (3,)}

CONFIGS = every_config()


@pytest.fixture(scope="module", params=list(CONFIGS))
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    group = group_of_all(CONFIGS[request.param])
    yield group
    group.control.leave()  # or its end would be a death
    group.close()


@pytest.mark.parametrize("check", conformance.control_checks, ids=lambda check: check.__name__)
def test_control(check: Callable[[Group], None], group: Group) -> None:
    check(group)


@pytest.mark.parametrize("check", conformance.memory_checks, ids=lambda check: check.__name__)
def test_memory(check: Callable[[Group], None], group: Group) -> None:
    if group.memory is None:
        pytest.skip("this group shares no memory")
    check(group)


@pytest.mark.parametrize("check", conformance.message_checks, ids=lambda check: check.__name__)
def test_messages(check: Callable[[Group], None], group: Group) -> None:
    check(group)
