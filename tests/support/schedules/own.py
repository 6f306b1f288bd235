"""Algorithms as users write them, of every kind that the engine treats apart; and their registration for one test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from collectives import ring
from collectives.algorithms import register_algorithm
from collectives.schedules import copy, direct, hierarchical, receive, reduce, registry, send, tree
from collectives.schedules.schedule import Step

Rounds = Sequence[Sequence[Step]]


def star(rank: int, size: int) -> Rounds:
    """All-reduce: rank 0 combines everything, and sends the result to all."""
    if rank:
        return [[send(0, 0)], [receive(0, 0)]]
    peers = range(1, size)
    return [[reduce(peer, 0) for peer in peers], [send(peer, 0) for peer in peers]]


def bidirectional(rank: int, size: int) -> Rounds:
    """All-reduce: half of the chunks go around a ring, the others around its mirror image."""
    forth, back = ring.allreduce(rank, size).rounds, ring.allreduce(-rank % size, size).rounds
    mirrored = [[Step(step.kind, -step.peer % size, size + step.chunk) for step in steps] for steps in back]
    return [[*one, *two] for one, two in zip(forth, mirrored, strict=True)]


def halves(rank: int, size: int) -> Rounds:
    """All-reduce of two chunks: ranks 0 and 1 combine one each, so that there are fewer chunks than ranks."""
    others = [peer for peer in range(size) if peer != rank]
    owner = rank < 2
    first = [send(chunk, chunk) for chunk in (0, 1) if chunk != rank]
    second = [receive(chunk, chunk) for chunk in (0, 1) if chunk != rank]
    if owner:
        first += [reduce(peer, rank) for peer in others]
        second += [send(peer, rank) for peer in others]
    return [first, second]


def around(rank: int, size: int) -> Rounds:
    """All-to-all: blocks go around the ring until they arrive, through ranks that they are not for."""
    after, before = (rank + 1) % size, (rank - 1) % size
    rounds = []
    for number in range(size - 1):
        out, come = (rank - number) % size, (before - number) % size
        steps = [send(after, out * size + (out + k) % size) for k in range(number + 1, size)]
        rounds.append(steps + [receive(before, come * size + (come + k) % size) for k in range(number + 1, size)])
    return [*rounds, [copy(rank, rank * size + rank)]]


def doubling(rank: int, size: int) -> Rounds:
    """Allgather of powers of two: in round k, pairs exchange the 2^k blocks that they have."""
    rounds: list[list[Step]] = [[copy(rank, rank)]]
    span = 1
    while span < size:
        own, other = rank // span * span, (rank ^ span) // span * span
        rounds.append([send(rank ^ span, own, span), receive(rank ^ span, other, span)])
        span *= 2
    return rounds


def twice(rank: int, size: int) -> Rounds:
    """Allgather: every rank gets every block twice, the second time while it passes the same block on."""
    others = [peer for peer in range(size) if peer != rank]
    swap = [*(send(peer, rank) for peer in others), *(receive(peer, peer) for peer in others)]
    after, before = (rank + 1) % size, (rank - 1) % size
    passed = [chunk for chunk in range(size) if chunk not in (rank, after)]
    come = [chunk for chunk in range(size) if chunk not in (rank, before)]
    return [[copy(rank, rank), *swap], [*(send(after, k) for k in passed), *(receive(before, k) for k in come)]]


def two_levels(rank: int, size: int, width: int) -> Rounds:
    """All-reduce of hosts with ``width`` ranks each."""
    return hierarchical.allreduce(rank, [range(at, at + width) for at in range(0, size, width)]).rounds


OWN: tuple[tuple[str, str, Callable[..., Rounds]], ...] = (
    ("allreduce", "own-star", star),
    ("allreduce", "own-bidirectional", bidirectional),
    ("allreduce", "own-halves", halves),
    ("allreduce", "own-pushed", lambda rank, size: direct.allreduce(rank, size).rounds),
    ("allreduce", "own-ordered", lambda rank, size: direct.one_shot(rank, size).rounds),
    ("allreduce", "own-exchange", lambda rank, size: tree.recursive_doubling(rank, size).rounds),
    ("allreduce", "own-levels", two_levels),
    ("reducescatter", "own-ring", lambda rank, size: ring.reducescatter(rank, size).rounds),
    ("allgather", "own-ring", lambda rank, size: ring.allgather(rank, size).rounds),
    ("allgather", "own-doubling", doubling),
    ("allgather", "own-twice", twice),
    ("broadcast", "own-chain", lambda rank, size: ring.broadcast(rank, size, 0).rounds),
    ("broadcast", "own-shares", lambda rank, size: direct.broadcast(rank, size, 0).rounds),
    ("alltoall", "own-around", around),
)


@contextlib.contextmanager
def registered(sizes: Sequence[int]) -> Iterator[Callable[[str], tuple[str, ...]]]:
    """Context manager in which all of `OWN` are registered; yields a function that names those of a collective."""
    before = dict(registry._ALL)
    try:
        for collective, name, build in OWN:
            served = [size for size in sizes if name != "own-doubling" or size & (size - 1) == 0]
            if served:
                register_algorithm(collective, name, build, sizes=served, spans_hosts=build is two_levels)
        yield lambda collective: tuple(name for of, name, _ in OWN if of == collective and (of, name) in registry._ALL)
    finally:
        registry._ALL.clear()
        registry._ALL.update(before)
