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

from collections.abc import Sequence

from collectives import ring
from collectives.schedules import direct
from collectives.schedules.algorithm import Algorithm, Tuned
from collectives.schedules.schedule import Round, Schedule, Step, copy, receive, reduce, send


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


def _by_slices(rank: int, host: int, hosts: Sequence[Sequence[int]]) -> tuple[Round, ...]:
    width = len(hosts)  # chunks of a slice
    number = hosts[host].index(rank)
    within = _among(hosts[host], direct.allreduce(number, len(hosts[host])), 0, width)
    across = _among([ranks[number] for ranks in hosts], ring.allreduce(host, len(hosts)), number * width, 1)
    return (*within[:1], *across, *within[1:])


def _by_leaders(rank: int, host: int, hosts: Sequence[Sequence[int]]) -> tuple[Round, ...]:
    span = max(map(len, hosts))  # chunks that a leader's ring treats as one
    chunks = len(hosts) * span
    leader, *followers = hosts[host]
    across = _among([ranks[0] for ranks in hosts], ring.allreduce(host, len(hosts)), 0, span)
    if rank != leader:
        idle: list[Round] = [()] * len(across)
        return ((send(leader, 0, chunks),), *idle, (receive(leader, 0, chunks),))
    return (
        tuple(reduce(peer, 0, chunks) for peer in followers),
        *across,
        tuple(send(peer, 0, chunks) for peer in followers),
    )


def _among(ranks: Sequence[int], schedule: Schedule, first: int, span: int) -> list[Round]:
    """The rounds of a schedule among these ranks, over chunks from ``first`` on, ``span`` in place of each of its own;
    none for one rank."""
    return [
        tuple(Step(step.kind, ranks[step.peer], first + step.chunk * span, span, step.push) for step in steps)
        for steps in schedule.rounds
        if len(ranks) > 1
    ]


ALGORITHMS = (Algorithm("allreduce", "hierarchical", allreduce, spans_hosts=True, tuned=Tuned.SEVERAL_HOSTS),)
