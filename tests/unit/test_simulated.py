"""The virtual clock against closed forms, and the command."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from collectives import ring
from collectives.base.errors import InvalidArgumentError
from collectives.schedules import direct, hierarchical, tree
from collectives.schedules.partition import split
from collectives.schedules.schedule import Round, Schedule, receive, reduce, send
from collectives.simulation.clock import Report, simulate
from collectives.simulation.links import Network
from collectives.simulation.prediction import exact
from collectives.tools.simulate import main

LATENCY, BANDWIDTH = 5e-6, 12.5e9
NETWORK = Network(LATENCY, BANDWIDTH)


def run(
    algorithm: Callable[..., Schedule],
    size: int,
    nbytes: int,
    *,
    network: Network = NETWORK,
    root: int | None = None,
    segment: int | None = None,
) -> Report:
    """Simulate an algorithm with ``nbytes`` in all chunks together."""
    schedules = [algorithm(rank, size) if root is None else algorithm(rank, size, root) for rank in range(size)]
    return simulate(schedules, split(nbytes, schedules[0].chunks), network, segment)


def equal_hosts(number: int, local: int) -> list[range]:
    return [range(host * local, (host + 1) * local) for host in range(number)]


def probe(chunks: int, *rounds: Sequence[Round]) -> list[Schedule]:
    return [Schedule("probe", "by-hand", rank, len(rounds), chunks, tuple(mine)) for rank, mine in enumerate(rounds)]


@pytest.mark.slow
@pytest.mark.parametrize("uplink", [math.inf, BANDWIDTH])
def test_hierarchical_of_64_hosts_of_8(uplink: float) -> None:
    """Two local exchanges of (L-1)/L of S, and a ring over H hosts in which each rank has S/(L * H) per round, or L
    share an uplink."""
    number, local, nbytes = 64, 8, 100_000_000
    hosts = equal_hosts(number, local)
    network = Network(LATENCY, BANDWIDTH, hosts, local_latency=1e-6, local_bandwidth=200e9, uplink=uplink)
    size = number * local
    report = simulate((hierarchical.allreduce(rank, hosts) for rank in range(size)), split(nbytes, size), network)
    exchange = 1e-6 + (local - 1) / local * nbytes / 200e9
    across = 2 * (number - 1) * (LATENCY + nbytes / size / min(BANDWIDTH, uplink / local))
    assert report.total == pytest.approx(2 * exchange + across, rel=0.01)


@pytest.mark.parametrize("size", [2, 3, 7, 16])
def test_closed_forms(size: int) -> None:
    nbytes = 1 << 24
    share = nbytes / size / BANDWIDTH

    def total(algorithm: Callable[..., Schedule], root: int | None = None) -> float:
        return run(algorithm, size, nbytes, root=root).total

    def cost(rounds: int, seconds: float) -> Any:
        return pytest.approx(rounds * LATENCY + seconds, rel=1e-3)

    report = run(ring.allreduce, size, nbytes)
    assert report.total == cost(2 * (size - 1), 2 * (size - 1) * share)
    assert report.messages == 2 * (size - 1) * size
    assert report.busbw == pytest.approx(nbytes / report.total * 2 * (size - 1) / size)
    assert total(ring.reducescatter) == total(ring.allgather) == cost(size - 1, (size - 1) * share)
    assert total(direct.allreduce) == cost(2, 2 * (size - 1) * share)
    assert total(direct.reducescatter) == total(direct.allgather) == cost(1, (size - 1) * share)
    assert total(direct.one_shot) == cost(1, (size - 1) * size * share)
    assert total(direct.alltoall) == cost(1, (size - 1) / size * share)
    assert total(direct.broadcast_flat, 1) == cost(1, (size - 1) * size * share)
    assert total(ring.broadcast, 1) == cost(size - 1, (size - 1) * size * share)
    assert total(tree.broadcast, 1) == cost(math.ceil(math.log2(size)), math.ceil(math.log2(size)) * size * share)
    rounds = math.floor(math.log2(size)) + (0 if size & (size - 1) == 0 else 2)
    assert total(tree.recursive_doubling) == cost(rounds, rounds * size * share)


@pytest.mark.parametrize("segments", [1, 2, 10, 64])
def test_segments_overlap_the_rounds_of_a_chain(segments: int) -> None:
    """N - 2 + G rounds of S/G bytes."""
    size, nbytes = 9, 64 << 20
    report = run(ring.broadcast, size, nbytes, root=4, segment=-(-nbytes // segments))
    assert report.total == pytest.approx((size - 2 + segments) * (LATENCY + nbytes / segments / BANDWIDTH), rel=0.01)


@pytest.mark.parametrize("segments", [1, 2, 5])
@pytest.mark.parametrize("stride", [1, 2, 3, 8, 100])
def test_the_stride_says_how_closely_segments_follow(segments: int, stride: int) -> None:
    """A ring keeps every link busy, so all bytes take what they take, and each of the K + (G-1) * stride groups adds a
    latency."""
    size, nbytes = 5, 5 << 20
    rounds = 2 * (size - 1)
    schedules = [ring.allreduce(rank, size) for rank in range(size)]
    report = simulate(schedules, split(nbytes, size), NETWORK, -(-(nbytes // size) // segments), stride=stride)
    groups = rounds + (segments - 1) * min(stride, rounds)
    assert report.total == pytest.approx(groups * LATENCY + rounds * nbytes / size / BANDWIDTH, rel=1e-9)
    assert report.messages == rounds * segments * size


def test_reductions_take_time() -> None:
    report = run(ring.reducescatter, 4, 4 << 20, network=Network(LATENCY, BANDWIDTH, reduction=1e9))
    assert report.total == pytest.approx(3 * (LATENCY + (1 << 20) / BANDWIDTH + (1 << 20) / 1e9))


def test_messages_share_links_and_full_duplex_does_not() -> None:
    """Two into rank 2, two out of rank 1, and one back from rank 2, which has that way for itself."""
    schedules = probe(
        1,
        ((send(2, 0),),),
        ((send(2, 0), send(3, 0)),),
        ((send(0, 0), receive(0, 0), reduce(1, 0)),),
        ((receive(1, 0),),),
    )
    schedules[0] = Schedule("probe", "by-hand", 0, 4, 1, ((send(2, 0), receive(2, 0)),))
    report = simulate(schedules, [1000], Network(1.0, 100.0))
    assert list(report.times) == pytest.approx([21.0, 21.0, 21.0, 21.0])
    assert {link: nbytes for link, nbytes in report.links.items() if link.startswith("rank")} == {
        "rank 0 out": 1000,
        "rank 1 out": 2000,
        "rank 2 out": 1000,
        "rank 0 in": 1000,
        "rank 2 in": 2000,
        "rank 3 in": 1000,
    }


def test_hosts_have_faster_links_within_and_share_one_way_out() -> None:
    """Ranks 0 and 1 send to ranks 2 and 3 of another host, and then to each other."""
    schedules = probe(
        1,
        ((send(2, 0),), (send(1, 0),)),
        ((send(3, 0),), (receive(0, 0),)),
        ((receive(0, 0),), ()),
        ((receive(1, 0),), ()),
    )
    report = simulate(
        schedules,
        [1000],
        Network(1.0, 100.0, [[0, 1], [2, 3]], local_latency=0.5, local_bandwidth=1000.0, uplink=100.0),
    )
    assert list(report.times) == pytest.approx([22.5, 22.5, 21.0, 21.0])
    assert report.links["host 0 out"] == report.links["host 1 in"] == 2000
    assert report.links["rank 0 local out"] == report.links["rank 1 local in"] == 1000
    assert "host 1 out" not in report.links


@pytest.mark.parametrize("segment", [None, 300])
def test_an_uplink_that_is_never_full_changes_nothing(segment: int | None) -> None:
    hosts = [range(5), range(5, 7), range(7, 14)]
    every = {
        "hierarchical": [hierarchical.allreduce(rank, hosts) for rank in range(14)],
        "ring": [ring.allreduce(rank, 14) for rank in range(14)],
        "chain": [ring.broadcast(rank, 14, 3) for rank in range(14)],
        "doubling": [tree.recursive_doubling(rank, 14) for rank in range(14)],
        "direct": [direct.alltoall(rank, 14) for rank in range(14)],
    }
    for name, schedules in every.items():
        sizes = [1000 + 377 * (chunk % 5) for chunk in range(schedules[0].chunks)]
        in_turn, together = (
            simulate(schedules, sizes, Network(3e-6, 1e9, hosts, 1e-6, 7e9, uplink=uplink, reduction=5e9), segment)
            for uplink in (math.inf, 1e30)
        )
        np.testing.assert_allclose(in_turn.times, together.times, rtol=1e-9, err_msg=name)
        assert in_turn.links == together.links and in_turn.messages == together.messages


def test_one_rank_and_no_bytes_take_no_time() -> None:
    assert run(ring.allreduce, 1, 1000).total == 0.0
    report = run(ring.allreduce, 5, 0)
    assert (report.total, report.messages, report.busbw, report.links) == (0.0, 0, 0.0, {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([ring.allreduce(0, 2)], [8, 8], NETWORK), "expected one for each of 2 ranks, found 1"),
        (
            ([ring.allreduce(1, 2), ring.allreduce(0, 2)], [8, 8], NETWORK),
            "expected a schedule of rank 0 .* found one of rank 1",
        ),
        (
            ([ring.allreduce(0, 1)], [8, 8], NETWORK),
            "of rank 0 with 2 chunks, one for each size; found one of rank 0 with 1",
        ),
        (([ring.allreduce(0, 1)], [-8], NETWORK), "sizes: .*found -8"),
        (([ring.allreduce(0, 1)], [8], NETWORK, 0), "segment=0: expected a positive number"),
        (([ring.allreduce(0, 1)], [8], Network(0.0, 0.0)), "expected bandwidths and reduction above 0"),
        (([ring.allreduce(0, 1)], [8], Network(-1.0, 1.0)), "latencies of 0 or more"),
        (
            ([ring.allreduce(r, 2) for r in range(2)], [8, 8], Network(1.0, 1.0, [[0]])),
            "hosts=.*expected each of the ranks 0 to 1 on one host",
        ),
        (
            (probe(1, ((send(1, 0),),), ((),)), [8], NETWORK),
            "sent is in round 0 from rank 0 to rank 1 chunk 0, span 1; received is nothing",
        ),
        (
            (probe(2, ((send(1, 0),),), ((receive(0, 1),),)), [8, 8], NETWORK),
            "received is in round 0 from rank 0 to rank 1 chunk 1",
        ),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        simulate(*arguments)


def test_the_command_predicts_every_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collective", "-np", "16", "--bytes", "16M", "--local-size", "4", "--local-bandwidth", "200e9"]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split() == ["algorithm", "ms", "bus", "GB/s"]
    times = {row.split()[0]: float(row.split()[1]) for row in rows[:-2]}
    assert {"ring", "direct", "hierarchical", "recursive-doubling"} <= set(times)
    assert list(times.values()) == sorted(times.values()) and next(iter(times)) == "hierarchical"
    assert rows[-2].startswith("the planner chooses hierarchical: several hosts")


@pytest.mark.parametrize("collective", ["allreduce", "reducescatter", "allgather", "alltoall"])
def test_a_prediction_has_the_cost_of_the_schedule(collective: str) -> None:
    """An all-to-all's bytes are those of one rank, of which each peer gets a part."""
    report = exact(collective, "direct", 1 << 20, Network(LATENCY, BANDWIDTH, equal_hosts(4, 1)))
    rounds = 2 if collective == "allreduce" else 1
    share = (1 << 18) / BANDWIDTH
    assert report.total == pytest.approx(rounds * (LATENCY + 3 * share), rel=1e-3)
