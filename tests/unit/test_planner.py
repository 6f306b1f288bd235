"""The planner: what ranks of one host choose by default; and where there is nothing to choose, a group of one rank
accepts every transport and algorithm that exists."""

from __future__ import annotations

import pytest

from collectives.base.errors import InvalidArgumentError, TransportError
from collectives.plan.planner import KIB, MIB, Crossovers, Placement, Planner
from collectives.plan.program import Medium
from collectives.schedules.registry import COLLECTIVES, on_host

ALONE = Placement(0, 1, ((0,),), shares_memory=False, reads_private=False)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("transport", ["auto", "window", "direct-read", "mpi", "tcp"])
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


def test_tcp_may_be_asked_for_where_it_carries_the_messages() -> None:
    both = [Placement(0, 2, ((0, 1),), True, True, network=network) for network in ("tcp", "mpi")]
    by_tcp, by_mpi = (Planner(placement) for placement in both)
    assert by_tcp.choose("allreduce", 64, transport="tcp").medium is Medium.MESSAGE
    assert by_mpi.choose("allreduce", 64, transport="mpi").medium is Medium.MESSAGE
    with pytest.raises(TransportError, match=r"over mpi, not over TCP; set COLLECTIVES_TRANSPORT=tcp on all ranks"):
        by_mpi.choose("allreduce", 64, transport="tcp")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("nbytes", "algorithm", "medium"),
    [
        (4, "one-shot", Medium.WINDOW),
        (32 * KIB, "one-shot", Medium.WINDOW),
        (32 * KIB + 4, "direct", Medium.WINDOW),
        (512 * KIB, "direct", Medium.WINDOW),
        (512 * KIB + 4, "direct", Medium.DIRECT),
        (64 * MIB, "direct", Medium.DIRECT),
    ],
)
def test_an_allreduce_of_private_tensors_on_one_host(size: int, nbytes: int, algorithm: str, medium: Medium) -> None:
    placement = Placement(0, size, (tuple(range(size)),), shares_memory=True, reads_private=True)
    choice = Planner(placement).choose("allreduce", nbytes, native=True)
    assert (choice.algorithm, choice.medium) == (algorithm, medium)


@pytest.mark.parametrize("nbytes", [4, MIB, 64 * MIB])
def test_windows_serve_every_size_where_memory_cannot_be_read(nbytes: int) -> None:
    placement = Placement(0, 2, ((0, 1),), shares_memory=True, reads_private=False)
    assert Planner(placement).choose("allreduce", nbytes).medium is Medium.WINDOW


def test_buckets_are_located_from_16_kib_a_tensor_on() -> None:
    planner = Planner(Placement(0, 2, ((0, 1),), shares_memory=True, reads_private=True, maps=True))
    assert planner.choose("allreduce", 4 * MIB, pieces=255).medium is Medium.WINDOW
    assert planner.locates_bucket(4 * MIB, 255)
    assert not planner.locates_bucket(4 * MIB, 256)
    assert not planner.locates_bucket(512 * KIB, 2)
    assert not planner.locates_bucket(4 * MIB, 2, algorithm="ring")
    assert not planner.locates_bucket(4 * MIB, 2, transport="window")


@pytest.mark.parametrize(
    ("hosts", "nbytes", "algorithm"),
    [
        (2, 64 * KIB, "inline"),
        (2, 64 * KIB + 4, "direct"),
        (2, 64 * MIB, "direct"),
        (5, 16 * KIB, "inline"),
        (4, 22 * KIB, "recursive-doubling"),
        (4, 64 * KIB, "recursive-doubling"),
        (4, 64 * KIB + 4, "direct"),
        (8, 84 * KIB, "recursive-doubling"),
        (8, 88 * KIB, "ring"),
        (512, MIB, "recursive-doubling"),
        (512, 2 * MIB, "ring"),
        (4, 512 * KIB, "direct"),
        (4, 512 * KIB + 4, "ring"),
    ],
)
def test_ranks_on_hosts_of_their_own_pass_messages_over_tcp(hosts: int, nbytes: int, algorithm: str) -> None:
    placement = Placement(0, hosts, tuple((rank,) for rank in range(hosts)), True, True, carries=True)
    choice = Planner(placement).choose("allreduce", nbytes)
    assert choice.algorithm == algorithm and (choice.inline or choice.medium is Medium.MESSAGE)


def test_reasons_agree_with_what_was_chosen() -> None:
    planner = Planner(Placement(0, 2, ((0, 1),), shares_memory=True, reads_private=True))
    forced = planner.choose("allreduce", 1 << 20, algorithm="recursive-doubling", transport="direct-read")
    assert forced.medium is Medium.WINDOW
    assert forced.why == "algorithm as requested; window, which recursive-doubling needs"
    planner.change(algorithm="auto", segment=0, crossovers=Crossovers())
    assert planner.choose("allreduce", 1 << 20).why.startswith("ranks of one host; ")
    planner.change(algorithm="ring", segment=0, crossovers=Crossovers())
    assert planner.choose("allreduce", 1 << 20).why.startswith("algorithm as tuned; ")
    assert planner.choose("allreduce", 1 << 20, algorithm="ring").why.startswith("algorithm as requested; ")
