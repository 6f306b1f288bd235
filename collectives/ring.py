"""The ring: every rank talks to its two neighbours only, and every link carries the same load in every round.

        0 ---> 1 ---> 2            chunk c belongs to rank c
        ^             |            round k: rank r sends to r + 1 and receives from r - 1
        +------ 3 <---+

All-reduce is a reduce-scatter followed by an allgather. For four ranks, what rank r holds of each chunk (letters are
the ranks whose contributions are in it):

    reduce-scatter: in round k rank r passes on chunk r-k-1, and reduces chunk r-k-2

            chunk 0   chunk 1   chunk 2   chunk 3
    rank 0     .         .       d+a..       .         after N-1 = 3 rounds rank r owns the whole of chunk r:
    rank 1  (all)        .         .       a+b..       a chunk c starts at rank c+1 and goes once around,
    ...                                                being reduced at every stop, until it is home

    allgather: in round k rank r passes on chunk r-k, and receives chunk r-k-1

Cost for N ranks and S bytes: 2(N-1) rounds, in which each rank sends and receives 2(N-1)/N * S bytes: no all-reduce can
move less. Reduce-scatter and allgather take half of each.

Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel
Distrib. Comput. 69 (2009); made popular for deep learning by Baidu's allreduce (2017).
"""

from __future__ import annotations

from collectives.schedules.algorithm import Algorithm, Tuned
from collectives.schedules.schedule import Round, Schedule, copy, receive, reduce, send


def allreduce(rank: int, size: int) -> Schedule:
    """All-reduce: chunks 0 to ``size`` - 1, 2(N-1) rounds. Each chunk is summed on one path, so all ranks get the same
    bits."""
    rounds = (*_reduce_scatter(rank, size), *_allgather(rank, size)) if size > 1 else ((copy(rank, 0),),)
    return Schedule("allreduce", "ring", rank, size, size, rounds)


def reducescatter(rank: int, size: int) -> Schedule:
    """Reduce-scatter: rank r ends with the whole of chunk r. N-1 rounds, (N-1)/N * S bytes sent per rank."""
    rounds = _reduce_scatter(rank, size) if size > 1 else ((copy(rank, 0),),)
    return Schedule("reducescatter", "ring", rank, size, size, rounds)


def allgather(rank: int, size: int) -> Schedule:
    """Allgather: rank r starts with chunk r. N-1 rounds, (N-1)/N * S bytes sent per rank."""
    own = copy(rank, rank)
    around = _allgather(rank, size)
    rounds = ((own, *around[0]), *around[1:]) if size > 1 else ((own,),)
    return Schedule("allgather", "ring", rank, size, size, rounds)


def broadcast(rank: int, size: int, root: int) -> Schedule:
    """Broadcast along the chain root, root + 1, ...: one chunk, N-1 rounds; round k crosses the k-th link.

    By itself that is slow; cut into G segments whose rounds overlap, it takes N-2+G rounds of S/G bytes, and every link
    is busy all the time: S bytes in all, whatever N is.
    """
    place = (rank - root) % size
    rounds: list[Round] = []
    for link in range(max(1, size - 1)):
        steps = [copy(rank, 0)] if place == 0 and link == 0 else []
        if place == link and size > 1:
            steps.append(send((rank + 1) % size, 0))
        if place == link + 1:
            steps.append(receive((rank - 1) % size, 0))
        rounds.append(tuple(steps))
    return Schedule("broadcast", "ring", rank, size, 1, tuple(rounds))


def _reduce_scatter(rank: int, size: int) -> tuple[Round, ...]:
    after, before = (rank + 1) % size, (rank - 1) % size
    return tuple((send(after, (rank - k - 1) % size), reduce(before, (rank - k - 2) % size)) for k in range(size - 1))


def _allgather(rank: int, size: int) -> tuple[Round, ...]:
    after, before = (rank + 1) % size, (rank - 1) % size
    return tuple((send(after, (rank - k) % size), receive(before, (rank - k - 1) % size)) for k in range(size - 1))


ALGORITHMS = (
    Algorithm("allreduce", "ring", allreduce, passes_on=True, tuned=Tuned.ALWAYS),
    Algorithm("reducescatter", "ring", reducescatter, passes_on=True),
    Algorithm("allgather", "ring", allgather, passes_on=True),
    Algorithm("broadcast", "ring", broadcast, passes_on=True, one_chunk=True),
)
