"""A world in one line."""

from __future__ import annotations

import pytest

from collectives.plan.planner import Placement
from collectives.worlds.summary import describe, mpi_version


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Open MPI v5.0.11, package: Open MPI root@host Distribution, ident: 5.0.11\0", "Open MPI v5.0.11"),
        ("MPICH Version:      5.0.2\nMPICH Release date: today\nMPICH ABI: 17", "MPICH 5.0.2"),
        ("", ""),
    ],
)
def test_the_name_and_version_of_an_mpi(said: str, expected: str) -> None:
    assert mpi_version(said) == expected


@pytest.mark.parametrize(
    ("hosts", "memory", "reads", "transport", "expected"),
    [
        (((0,),), False, False, "auto", "1 rank, without MPI"),
        (
            ((0, 1),),
            True,
            True,
            "auto",
            "2 ranks on 1 host, connected by MPICH 5.0.2; transports: within a host windows in shared memory "
            "and direct reads of the peers' memory",
        ),
        (((0, 1),), True, True, "window", "... within a host windows in shared memory"),
        (((0, 1),), True, False, "auto", "... within a host windows in shared memory"),
        (((0, 1),), False, False, "mpi", "... within a host MPI messages"),
        (
            ((0, 1), (2,)),
            True,
            False,
            "auto",
            "3 ranks on 2 hosts (2 + 1), connected by MPICH 5.0.2; transports: within a host windows in shared memory, "
            "between hosts MPI messages",
        ),
        (((0,), (1,)), False, False, "auto", "... between hosts MPI messages"),
    ],
)
def test_a_world(hosts: tuple[tuple[int, ...], ...], memory: bool, reads: bool, transport: str, expected: str) -> None:
    placement = Placement(0, sum(map(len, hosts)), hosts, shares_memory=memory, reads_private=reads)
    shown = describe(placement, transport, "MPICH 5.0.2", "mpi")
    if expected.startswith("... "):
        assert shown.endswith(f"transports: {expected[4:]}")
    else:
        assert shown == expected


def test_a_world_without_mpi() -> None:
    placement = Placement(0, 3, ((0, 1), (2,)), shares_memory=True, reads_private=False)
    assert describe(placement, "auto", "", "tcp") == (
        "3 ranks on 2 hosts (2 + 1), connected by TCP; transports: within a host windows in shared memory, between "
        "hosts TCP messages"
    )
