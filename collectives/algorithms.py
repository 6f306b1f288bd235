"""Algorithms of the program's own: schedules that are proved when they are registered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from collectives.base.errors import InvalidArgumentError
from collectives.schedules import registration
from collectives.schedules.proof.verify import ScheduleError
from collectives.schedules.schedule import Step


def register_algorithm(
    collective: str,
    name: str,
    build: Callable[..., Sequence[Sequence[Step]]],
    *,
    sizes: Collection[int] | None = None,
    spans_hosts: bool = False,
) -> None:
    """Add an algorithm of your own, which ``algorithm=name`` and ``COLLECTIVES_ALGORITHM`` then choose.

    Proved before it is added, for every number of ranks that it serves: each contribution arrives exactly once, every
    send meets its receive, all ranks of an all-reduce get the same bits; and its accesses to shared memory are searched
    for races. Every rank registers the same one, before or after ``init()``; a difference is an error on all ranks of
    the first call. Registering the same algorithm again has no effect.

    Args:
        collective: "allreduce", "reducescatter", "allgather", "broadcast" or "alltoall".
        name: a new name; the same for several collectives if need be.
        build: ``build(rank, size)`` returns a rank's rounds, each a sequence of the steps of `collectives.schedules`:
            ``send``, ``receive``, ``reduce`` and ``copy``, over chunks. A reduce-scatter and an allgather have a chunk
            for each rank, an all-to-all has chunk i * N + j from rank i to rank j, the others as many as you use. Rank
            0 is a broadcast's root; other roots are rank 0 renamed.
        sizes: the numbers of ranks that it serves; 2 to 64 by default. One rank is always served.
        spans_hosts: an all-reduce whose function takes ``(rank, size, width)`` for hosts of ``width`` ranks each, that
            of rank r being r // width. It is proved for every ``width`` that divides a size.

    Raises:
        InvalidArgumentError: the algorithm is wrong, and the message has the counterexample: size, round, rank, chunk;
            or the name is taken.

    Example:
        >>> from collectives.schedules import receive, reduce, send
        >>> def pair(rank, size):
        ...     return [[send(0, 0)], [receive(0, 0)]] if rank else [[reduce(1, 0)], [send(1, 0)]]
        >>> register_algorithm("allreduce", "pair", pair, sizes=[2])
    """
    try:
        registration.register(collective, name, build, sizes, spans_hosts)
    except ScheduleError as error:
        raise InvalidArgumentError(str(error)) from error
