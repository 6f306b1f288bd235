"""All-reduce over hosts: equal and unequal ones, ranks in any order, and no byte across the network twice."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives import ring
from collectives.schedules import direct, hierarchical
from collectives.schedules.proof.races import races
from collectives.schedules.proof.verify import verify
from collectives.schedules.schedule import Schedule
from collectives.simulation.clock import simulate
from collectives.simulation.links import Network

Hosts = tuple[tuple[int, ...], ...]


def hosts_of(*counts: int) -> Hosts:
    """Consecutive ranks on each host."""
    return tuple(tuple(range(end - count, end)) for end, count in zip(accumulate(counts), counts, strict=True))


def schedules(hosts: Hosts) -> list[Schedule]:
    return [hierarchical.allreduce(rank, hosts) for rank in range(sum(map(len, hosts)))]


@st.composite
def shuffled_hosts(draw: st.DrawFn, most: int) -> Hosts:
    counts = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8).filter(lambda counts: sum(counts) <= most))
    order = draw(st.permutations(range(sum(counts))))
    return tuple(tuple(order[rank] for rank in ranks) for ranks in hosts_of(*counts))


def test_every_number_of_equal_hosts_is_proved() -> None:
    for local in range(1, 25):
        for number in range(1, 24 // local + 1):
            verify(schedules(hosts_of(*[local] * number)))


@pytest.mark.parametrize("counts", [[8] * 16, [64, 64], [4] * 64, [16] * 32, [100, 3, 25], [200, 1, 56]])
def test_large_ones_are_proved(counts: list[int]) -> None:
    verify(schedules(hosts_of(*counts)))


@given(shuffled_hosts(most=40))
@settings(max_examples=60)
def test_any_hosts_are_proved_and_nothing_races(hosts: Hosts) -> None:
    verify(schedules(hosts))
    if sum(map(len, hosts)) <= 12:
        assert races(schedules(hosts), aliased=True) == races(schedules(hosts), aliased=False) == []


@pytest.mark.parametrize("size", [2, 3, 5])
def test_one_host_is_direct_and_lone_ranks_are_a_ring(size: int) -> None:
    for rank in range(size):
        assert hierarchical.allreduce(rank, hosts_of(size)).rounds == direct.allreduce(rank, size).rounds
        assert hierarchical.allreduce(rank, hosts_of(*[1] * size)).rounds == ring.allreduce(rank, size).rounds


@pytest.mark.parametrize("counts", [[3, 3], [2, 2, 2, 2], [4, 1], [3, 1, 2]])
def test_a_host_exchanges_no_more_than_one_rank_of_a_ring_would(counts: list[int]) -> None:
    hosts, number = hosts_of(*counts), len(counts)
    every = schedules(hosts)
    nbytes = 1200 * every[0].chunks
    links = simulate(every, [1200] * every[0].chunks, Network(0.0, 1.0, hosts)).links
    for host in range(number):
        assert links[f"host {host} out"] == links[f"host {host} in"] == 2 * (number - 1) * nbytes // number
