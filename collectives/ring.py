"""The ring: each rank exchanges data with its two neighbours only, and each link carries the same load.

        0 ---> 1 ---> 2         in each round rank r sends one chunk to r + 1 and receives another from r - 1
        ^             |         (mod N); N ranks, N chunks, chunk c belongs to rank c
        +------ 3 <---+

All-reduce is a reduce-scatter followed by an allgather. Below, four ranks contribute a, b, c and d. The tables show the
chunk that each rank receives in a round, and the contributions in the chunk afterwards (all: a, b, c and d).

    reduce-scatter: in round k rank r sends chunk r-k-1, and adds what it receives to its own chunk r-k-2

                    round 0                   round 1                   round 2
    chunk     0    1    2    3          0    1    2    3          0    1    2    3
    rank 0    .    .    da   .          .    cda  .    .          all  .    .    .
    rank 1    .    .    .    ab         .    .    dab  .          .    all  .    .
    rank 2    bc   .    .    .          .    .    .    abc        .    .    all  .
    rank 3    .    cd   .    .          bcd  .    .    .          .    .    .    all

    Chunk c starts at rank c+1, goes around once, and is complete at rank c after N-1 = 3 rounds.

    allgather: in round k (after the N-1 rounds above) rank r sends chunk r-k, and replaces chunk r-k-1

                    round 0                   round 1                   round 2
    chunk     0    1    2    3          0    1    2    3          0    1    2    3
    rank 0    .    .    .    all        .    .    all  .          .    all  .    .
    rank 1    all  .    .    .          .    .    .    all        .    .    all  .
    rank 2    .    all  .    .          all  .    .    .          .    .    .    all
    rank 3    .    .    all  .          .    all  .    .          all  .    .    .

Cost for N ranks and S bytes: 2(N-1) rounds of S/N bytes. Each rank sends and receives 2(N-1)/N * S bytes, which is the
minimum for an all-reduce. Reduce-scatter and allgather each cost half as much. (Direct exchange moves the same bytes in
two rounds: `collectives.schedules.direct`.)

From a schedule to bytes: `schedules.schedule` defines the four steps. `plan.lowering` assigns memory to each value and
a wait to each exchange. `plan.binder` turns each step into a closure. `plan.executor` runs the closures segment by
segment, and rounds of different segments overlap. `transport.host.shared_memory` (windows),
`transport.host.direct_read` (process_vm_readv) and `transport.mpi.mpi_groups` (messages) move the bytes;
`tensors.reduction` adds them. The tests prove the schedules (`schedules/proof/verify.py`).

Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel
Distrib. Comput. 69 (2009); made popular for deep learning by Baidu's allreduce (2017).
"""

from __future__ import annotations

from collectives.schedules.algorithm import Algorithm, Tuned
from collectives.schedules.schedule import Round, Schedule, copy, receive, reduce, send


def allreduce(rank: int, size: int) -> Schedule:
    """All-reduce of N chunks in 2(N-1) rounds. Each chunk is summed along one path, so all ranks get the same bits."""
    rounds = (*_reduce_scatter(rank, size), *_allgather(rank, size)) if size > 1 else ((copy(rank, 0),),)
    return Schedule("allreduce", "ring", rank, size, size, rounds)


def reducescatter(rank: int, size: int) -> Schedule:
    """Reduce-scatter: rank r ends with the sum of chunk r. N-1 rounds, (N-1)/N * S bytes per rank."""
    rounds = _reduce_scatter(rank, size) if size > 1 else ((copy(rank, 0),),)
    return Schedule("reducescatter", "ring", rank, size, size, rounds)


def allgather(rank: int, size: int) -> Schedule:
    """Allgather: rank r starts with chunk r, and copies it to its output. N-1 rounds, (N-1)/N * S bytes per rank."""
    own = copy(rank, rank)
    around = _allgather(rank, size)
    rounds = ((own, *around[0]), *around[1:]) if size > 1 else ((own,),)
    return Schedule("allgather", "ring", rank, size, size, rounds)


def broadcast(rank: int, size: int, root: int) -> Schedule:
    """Broadcast along the chain root, root + 1, ...: one chunk, N-1 rounds; round k crosses the k-th link.

    With G segments whose rounds overlap, it takes N-2+G rounds of S/G bytes, and every link is busy. That is about the
    time of S bytes on one link, for any N.
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
    """N-1 rounds. Afterwards rank r holds the sum of chunk r."""
    after, before = (rank + 1) % size, (rank - 1) % size
    return tuple(
        (send(after, (rank - k - 1) % size), reduce(before, (rank - k - 2) % size, count=k + 1))
        for k in range(size - 1)
    )


def _allgather(rank: int, size: int) -> tuple[Round, ...]:
    """N-1 rounds. Rank r starts with chunk r."""
    after, before = (rank + 1) % size, (rank - 1) % size
    return tuple((send(after, (rank - k) % size), receive(before, (rank - k - 1) % size)) for k in range(size - 1))


ALGORITHMS = (
    Algorithm("allreduce", "ring", allreduce, passes_on=True, tuned=Tuned.ALWAYS),
    Algorithm("reducescatter", "ring", reducescatter, passes_on=True),
    Algorithm("allgather", "ring", allgather, passes_on=True),
    Algorithm("broadcast", "ring", broadcast, passes_on=True, one_chunk=True),
)
