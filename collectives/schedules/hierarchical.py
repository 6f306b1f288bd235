"""All-reduce in two levels: within the hosts over memory, across them over the network, so that no byte crosses twice.

Equal hosts, here two hosts of three ranks (L = 3 local ranks, H = 2 hosts); rank l of each host reduces slice l:

    1. within each host    rank l reduces slice l from its L - 1 neighbours               direct
    2. across hosts        the ranks l of all hosts all-reduce slice l in a ring          H chunks per slice
    3. within each host    rank l sends slice l to its neighbours                         direct, pushed

A host sends and receives 2(H-1)/H * S bytes in all, in equal shares by each of its ranks: as little as if it were one
rank. 2(H-1) + 2 rounds.

Unequal hosts have no common slices. There each host's first rank, its leader, reduces the host's tensors, the leaders
all-reduce the sums in a ring, and send the result to their neighbours. The network carries as little; the leader's
memory carries more.

Source: the hierarchical all-reduce of Horovod and of NCCL 1; A. Sergeev and M. Del Balso, arXiv:1802.05799 (2018).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from collectives import ring
from collectives.schedules import direct, fixed_tree
from collectives.schedules.algorithm import Algorithm, Hosts, Tuned, always
from collectives.schedules.schedule import Round, Schedule, Step, StepKind, copy, receive, reduce, send


def allreduce(rank: int, hosts: Sequence[Sequence[int]]) -> Schedule:
    """All-reduce; ``hosts`` lists the ranks on each host."""
    host = next(number for number, ranks in enumerate(hosts) if rank in ranks)
    size = sum(map(len, hosts))
    if size == 1:
        return Schedule("allreduce", "hierarchical", rank, size, 1, ((copy(rank, 0),),))
    if len({len(ranks) for ranks in hosts}) == 1:
        chunks, rounds = len(hosts) * len(hosts[0]), _by_slices(rank, host, hosts)
    else:
        chunks, rounds = len(hosts) * max(map(len, hosts)), _by_leaders(rank, host, hosts)
    return Schedule("allreduce", "hierarchical", rank, size, chunks, rounds)


def reproducible(rank: int, hosts: Sequence[Sequence[int]]) -> Schedule:
    """All-reduce by the fixed tree over all ranks, wherever they are.

    Where each host's ranks are a subtree of it, slices as above, which the hosts exchange directly in place of a ring:
    a host sends as few bytes, in two rounds. Elsewhere every rank exchanges directly with every other, and a host of L
    ranks sends up to L times as many bytes.
    """
    size = sum(map(len, hosts))
    if len(hosts) == 1 or not fixed_tree.follows(hosts):
        schedule = direct.allreduce(rank, size)
        return Schedule("allreduce", "reproducible", rank, size, schedule.chunks, schedule.rounds)
    host = next(number for number, ranks in enumerate(hosts) if rank in ranks)
    return Schedule("allreduce", "reproducible", rank, size, size, _by_slices(rank, host, hosts, direct.allreduce))


def _by_slices(
    rank: int, host: int, hosts: Sequence[Sequence[int]], exchange: Callable[[int, int], Schedule] = ring.allreduce
) -> tuple[Round, ...]:
    width = len(hosts)  # chunks of a slice
    number = hosts[host].index(rank)
    within = _among(hosts[host], direct.allreduce(number, len(hosts[host])), 0, width)
    counts = list(map(len, hosts))
    across = _among([ranks[number] for ranks in hosts], exchange(host, len(hosts)), number * width, 1, counts)
    # What has come from another host is passed on, so that nobody may push it.
    pulled = (tuple(replace(step, push=False) for step in steps) for steps in across)
    return (*within[:1], *pulled, *within[1:])


def _by_leaders(rank: int, host: int, hosts: Sequence[Sequence[int]]) -> tuple[Round, ...]:
    span = max(map(len, hosts))  # chunks that a leader's ring treats as one
    chunks = len(hosts) * span
    leader, *followers = hosts[host]
    across = _among([ranks[0] for ranks in hosts], ring.allreduce(host, len(hosts)), 0, span, list(map(len, hosts)))
    if rank != leader:
        idle: list[Round] = [()] * len(across)
        return ((send(leader, 0, chunks),), *idle, (receive(leader, 0, chunks),))
    return (
        tuple(reduce(peer, 0, chunks) for peer in followers),
        *across,
        tuple(send(peer, 0, chunks) for peer in followers),
    )


def _among(
    ranks: Sequence[int], schedule: Schedule, first: int, span: int, counts: Sequence[int] | None = None
) -> list[Round]:
    """The rounds of a schedule among these ranks, over chunks from ``first`` on, ``span`` in place of each of its own;
    none for one rank.

    Args:
        counts: the number of contributions in each rank's value, if they are not one each; a value of several ranks is
            of those that precede the receiver, as in a ring.
    """

    def contributions(step: Step) -> int:
        if counts is None or step.kind is not StepKind.REDUCE:
            return step.count
        return sum(counts[(step.peer - back) % len(counts)] for back in range(step.count))

    return [
        tuple(
            Step(step.kind, ranks[step.peer], first + step.chunk * span, span, step.push, contributions(step))
            for step in steps
        )
        for steps in schedule.rounds
        if len(ranks) > 1
    ]


def _on_two_hosts(hosts: Hosts) -> bool:
    """A ring of two is one addition of the hosts' sums."""
    return len(hosts) <= 2 and fixed_tree.follows(hosts)


ALGORITHMS = (
    Algorithm(
        "allreduce",
        "hierarchical",
        allreduce,
        spans_hosts=True,
        tuned=Tuned.SEVERAL_HOSTS,
        keeps_order=_on_two_hosts,
    ),
    Algorithm("allreduce", "reproducible", reproducible, spans_hosts=True, keeps_order=always),
)
