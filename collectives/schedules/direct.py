"""Direct exchange: every rank exchanges with every other in one round.

    reduce-scatter                         allgather
    rank 0: chunk 0 <- 1, 2, 3             rank 0: chunk 0 -> 1, 2, 3
    rank 1: chunk 1 <- 2, 3, 0             rank 1: chunk 1 -> 2, 3, 0
    rank 2: chunk 2 <- 3, 0, 1             rank 2: chunk 2 -> 3, 0, 1
    rank 3: chunk 3 <- 0, 1, 2             rank 3: chunk 3 -> 0, 1, 2

The bytes are those of the ring, 2(N-1)/N * S per rank for an all-reduce, but in two rounds instead of 2(N-1): the
choice where any two ranks reach each other equally well, as in the memory of one host. Each rank begins with the next
rank, so that the load on the ranks is even at any time.

Sources: the reduce-scatter and allgather phases of R. Rabenseifner, "Optimization of collective reduction operations",
ICCS 2004; pairwise exchange in R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication
operations in MPICH", IJHPCA 19 (2005); scatter and allgather as a broadcast in the latter.
"""

from __future__ import annotations

from collectives.schedules.algorithm import Algorithm, Tuned, always
from collectives.schedules.schedule import Schedule, Step, copy, receive, reduce, send


def _others(rank: int, size: int) -> list[int]:
    """Every other rank, beginning with the next."""
    return [(rank + distance) % size for distance in range(1, size)]


def allreduce(rank: int, size: int) -> Schedule:
    """All-reduce: each rank reduces its own chunk from all peers, then writes it back to them while it is in its cache.

    Two rounds, 2(N-1)/N * S bytes per rank. Each chunk is reduced by one rank, so all ranks get the same bits, by the
    fixed tree, so that it does not matter which rank that is.
    """
    if size == 1:
        return Schedule("allreduce", "direct", rank, size, 1, ((copy(rank, 0),),))
    others = _others(rank, size)
    scatter = (*(send(peer, peer) for peer in others), *(reduce(peer, rank) for peer in others))
    gather = (*(send(peer, rank, push=True) for peer in others), *(receive(peer, peer, push=True) for peer in others))
    return Schedule("allreduce", "direct", rank, size, size, (scatter, gather))


def one_shot(rank: int, size: int) -> Schedule:
    """All-reduce of one chunk in one round, in which every rank reads all others; for small tensors.

    (N-1) * S bytes per rank. Every rank combines by the fixed tree, so that all get the same bits; two ranks need no
    order, because a + b is b + a.
    """
    others = _others(rank, size)
    steps = (*(send(peer, 0) for peer in others), *(reduce(peer, 0) for peer in others))
    return Schedule("allreduce", "one-shot", rank, size, 1, (steps or (copy(rank, 0),),))


def reducescatter(rank: int, size: int) -> Schedule:
    """Reduce-scatter: rank r ends with the whole of chunk r. One round, (N-1)/N * S bytes per rank."""
    others = _others(rank, size)
    steps = (*(send(peer, peer) for peer in others), *(reduce(peer, rank) for peer in others))
    return Schedule("reducescatter", "direct", rank, size, size, (steps or (copy(rank, 0),),))


def allgather(rank: int, size: int) -> Schedule:
    """Allgather: rank r starts with chunk r. One round, (N-1)/N * S bytes per rank; the own copy follows, for which no
    peer waits."""
    others = _others(rank, size)
    exchange = (*(send(peer, rank) for peer in others), *(receive(peer, peer) for peer in others))
    return Schedule("allgather", "direct", rank, size, size, (exchange, (copy(rank, rank),)))


def alltoall(rank: int, size: int) -> Schedule:
    """All-to-all: chunk i * N + j goes from rank i to rank j. One round; the own copy follows, for which no peer
    waits."""
    others = _others(rank, size)
    own = copy(rank, rank * size + rank)
    sends = (send(peer, rank * size + peer) for peer in others)
    receives = (receive(peer, peer * size + rank) for peer in others)
    return Schedule("alltoall", "direct", rank, size, size * size, ((*sends, *receives), (own,)))


def broadcast(rank: int, size: int, root: int) -> Schedule:
    """Broadcast in two rounds: chunk c goes to rank c, then from there to the rest, while the root makes its own copy.

        root 0, N = 3     round 0: rank 1 takes chunk 1, rank 2 takes chunk 2, the root gives chunk 0 to both
                          round 1: rank 1 takes chunk 2 from rank 2, rank 2 takes chunk 1 from rank 1

    The root's memory is read once instead of N-1 times, and all ranks, including the root, move bytes at the same time.
    S bytes received per rank.
    """
    others = _others(rank, size)
    if rank == root:
        first = (*(send(peer, peer) for peer in others), *(send(peer, root, push=True) for peer in others))
        second: tuple[Step, ...] = (copy(rank, 0, size),)
    else:
        owners = [peer for peer in others if peer != root]
        first = (receive(root, rank), receive(root, root, push=True))
        second = (*(send(peer, rank) for peer in owners), *(receive(peer, peer) for peer in owners))
    return Schedule("broadcast", "direct", rank, size, size, (first, second))


def broadcast_flat(rank: int, size: int, root: int) -> Schedule:
    """Broadcast of one chunk in one round: every rank reads it from the root; for small tensors."""
    if rank == root:
        steps: tuple[Step, ...] = (copy(rank, 0), *(send(peer, 0) for peer in _others(rank, size)))
    else:
        steps = (receive(root, 0),)
    return Schedule("broadcast", "one-shot", rank, size, 1, (steps,))


ALGORITHMS = (
    Algorithm(
        "allreduce",
        "direct",
        allreduce,
        owner_pushes=True,
        overlaps=False,
        tuned=Tuned.SEVERAL_HOSTS,
        keeps_order=always,
    ),
    Algorithm(
        "allreduce",
        "one-shot",
        one_shot,
        one_chunk=True,
        versioned=True,
        by_messages=False,
        on_gpu=False,
        keeps_order=always,
    ),
    Algorithm("reducescatter", "direct", reducescatter, overlaps=False, keeps_order=always),
    Algorithm("allgather", "direct", allgather, overlaps=False),
    Algorithm("broadcast", "direct", broadcast, overlaps=False),
    Algorithm("broadcast", "one-shot", broadcast_flat, one_chunk=True),
    Algorithm("alltoall", "direct", alltoall, overlaps=False),
)
