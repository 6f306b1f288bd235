"""Users' own algorithms: schedules that are proved when they are registered."""

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
    """Add your own algorithm. Choose it with ``algorithm=name`` or ``COLLECTIVES_ALGORITHM``.

    It is proved before it is added, for every number of ranks in ``sizes``: each contribution arrives exactly once,
    every send meets its receive, all ranks of an all-reduce get the same bits, and accesses to shared memory have no
    races. Every rank registers the same algorithm, before or after ``init()``. If the algorithms differ, the first
    call raises an error on all ranks. Registering the same algorithm again has no effect.

    Args:
        collective: "allreduce", "reducescatter", "allgather", "broadcast" or "alltoall".
        name: a new name. Several collectives may use the same name.
        build: ``build(rank, size)`` returns the rounds of a rank. A round is a sequence of steps from
            `collectives.schedules`: ``send``, ``receive``, ``reduce`` and ``copy``, over chunks. A reduce-scatter and
            an allgather have one chunk for each rank. An all-to-all has chunk i * N + j from rank i to rank j. The
            others have as many chunks as you use. Write a broadcast for root 0; for other roots, ranks are renamed.
        sizes: the numbers of ranks that the algorithm supports; 2 to 64 by default. One rank always works.
        spans_hosts: True for an all-reduce whose ``build`` takes ``(rank, size, width)``: each host has ``width``
            ranks, and rank r is on host r // width. It is proved for every ``width`` that divides a size.

    Raises:
        InvalidArgumentError: the algorithm is wrong, or the name is taken. The message for a wrong algorithm has a
            counterexample: size, round, rank, chunk.

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
