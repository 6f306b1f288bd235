"""Algorithms of users: a function that returns rounds is proved for every size that it serves, and registered."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from collectives.schedules import registry
from collectives.schedules.algorithm import Algorithm
from collectives.schedules.proof.races import races
from collectives.schedules.proof.replay import counted, same_bits
from collectives.schedules.proof.verify import ScheduleError, verify
from collectives.schedules.schedule import Round, Schedule, Step, StepKind, copy

SIZES = range(2, 65)
"""The numbers of ranks for which an algorithm is proved that does not name its own."""

_KINDS = {kind: number for number, kind in enumerate(StepKind)}


def register(
    collective: str,
    name: str,
    build: Callable[..., Sequence[Sequence[Step]]],
    sizes: Collection[int] | None = None,
    spans_hosts: bool = False,
) -> Algorithm:
    """Prove an algorithm and add it to the registry; arguments as of `collectives.register_algorithm`.

    Raises:
        ScheduleError: the schedule is wrong, with a counterexample; or the name is taken or cannot be one.
    """
    if collective not in registry.COLLECTIVES:
        raise ScheduleError(f"collective={collective!r}: expected one of {', '.join(registry.COLLECTIVES)}")
    if not name.replace("-", "").replace("_", "").isalnum() or name == "auto":
        raise ScheduleError(f"name={name!r}: expected letters, digits, '-' and '_', and not 'auto'")
    if spans_hosts and collective != "allreduce":
        raise ScheduleError(f"{collective}/{name}: spans_hosts: only an allreduce can distinguish hosts")
    served = sorted({size for size in SIZES if sizes is None} | {size for size in sizes or () if size != 1})
    if not served or served[0] < 2:
        raise ScheduleError(f"{collective}/{name}: sizes={sizes!r}: expected at least one number of ranks, 2 or more")
    examined = _Examined()
    for size in served:
        for width in [width for width in range(1, size + 1) if size % width == 0] if spans_hosts else [size]:
            schedules = _schedules(collective, name, build, size, width if spans_hosts else None)
            examined.add(schedules, collective)
            examined.digests[size, width if spans_hosts else None] = _digest(schedules)
    entry = Algorithm(
        collective,
        name,
        _renamed(collective, name, build, spans_hosts, examined.digests),
        one_chunk=examined.one_chunk,
        versioned=examined.versioned,
        spans_hosts=spans_hosts,
        passes_on=examined.passes_on,
        on_gpu=not examined.versioned,
        sizes=frozenset(served),
        digest=_hash(b"".join(examined.digests.values())).hex(),
    )
    return registry.add(entry)


class _Examined:
    """What the proof of all sizes has found: the properties that `Algorithm` documents, and the digest of each size."""

    def __init__(self) -> None:
        self.one_chunk, self.versioned, self.passes_on = True, False, False
        self.digests: dict[tuple[int, int | None], bytes] = {}

    def add(self, schedules: Sequence[Schedule], collective: str) -> None:
        verify(schedules)
        if collective == "broadcast" and not any(
            step.kind is StepKind.COPY for steps in schedules[0].rounds for step in steps
        ):
            raise ScheduleError(
                f"{schedules[0].collective}/{schedules[0].algorithm} of {schedules[0].size} ranks: the root is rank 0, "
                "and it is another rank that copies its own value into the result"
            )
        if collective == "allreduce":
            same_bits(schedules)
        for schedule in schedules:
            self._trace(schedule)
        self.one_chunk &= schedules[0].chunks == 1
        if not self.versioned:
            copies = any(step.kind is StepKind.COPY for each in schedules for steps in each.rounds for step in steps)
            # Without copies, what races out of place does so in place, where all versions share one location.
            self.versioned = any(races(schedules, aliased) for aliased in ((True, False) if copies else (True,)))

    def _trace(self, schedule: Schedule) -> None:
        """Find what peers read, and refuse what is right as values but has no place in memory."""
        where = f"{schedule.collective}/{schedule.algorithm} of {schedule.size} ranks"
        rank, written, pushed = schedule.rank, set[int](), set[int]()
        for number, steps in enumerate(schedule.rounds):
            sent = {
                chunk
                for step in steps
                if step.kind is StepKind.SEND
                for chunk in range(step.chunk, step.chunk + step.span)
            }
            self.passes_on |= not sent.isdisjoint(written) or any(step.push for step in steps)
            arrives: set[int] = set()
            for step in steps:
                chunks = range(step.chunk, step.chunk + step.span)
                used = step.kind is StepKind.SEND or step.kind is StepKind.REDUCE or step.peer == rank
                if used and not pushed.isdisjoint(chunks):
                    raise ScheduleError(
                        f"{where}, round {number}, rank {rank}: {step}: a peer has pushed into it, which this rank "
                        "does not wait for before the end; leave push=True out"
                    )
                if step.kind in (StepKind.RECEIVE, StepKind.REDUCE):
                    written.update(chunks)
                    arrives.update(chunks if step.push else ())
            pushed |= arrives


def _digest(schedules: Sequence[Schedule]) -> bytes:
    numbers = array("q", [schedules[0].size])
    for steps in (steps for schedule in schedules for steps in schedule.rounds):
        numbers.append(-1)
        for step in steps:
            numbers.extend((_KINDS[step.kind], step.peer, step.chunk, step.span, step.push))
    return _hash(numbers.tobytes())


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=4).digest()


def _schedules(
    collective: str, name: str, build: Callable[..., Sequence[Sequence[Step]]], size: int, width: int | None
) -> list[Schedule]:
    """The schedules of all ranks as the function makes them: of hosts with ``width`` ranks each, in order."""
    parts = [_rounds(collective, name, build, rank, size, width) for rank in range(size)]
    longest = max(map(len, parts))
    if collective == "alltoall":
        chunks = size * size
    elif collective in ("reducescatter", "allgather"):
        chunks = size
    else:
        chunks = max((step.chunk + step.span for rounds in parts for steps in rounds for step in steps), default=1)
    return [
        Schedule(collective, name, rank, size, chunks, (*rounds, *[()] * (longest - len(rounds))))
        for rank, rounds in enumerate(parts)
    ]


def _rounds(
    collective: str, name: str, build: Callable[..., Any], rank: int, size: int, width: int | None
) -> tuple[Round, ...]:
    arguments = (rank, size) if width is None else (rank, size, width)
    call = f"{collective}/{name}: build({', '.join(map(str, arguments))})"
    try:
        rounds = tuple(map(tuple, build(*arguments)))
    except Exception as error:
        raise ScheduleError(
            f"{call} raised {type(error).__name__}: {error}; sizes= names the numbers of ranks that it serves"
        ) from error
    for step in (step for steps in rounds for step in steps):
        if not isinstance(step, Step):
            raise ScheduleError(f"{call}: expected rounds of send, receive, reduce and copy, found {step!r}")
    return rounds


def _renamed(
    collective: str,
    name: str,
    build: Callable[..., Sequence[Sequence[Step]]],
    spans_hosts: bool,
    digests: Mapping[tuple[int, int | None], bytes],
) -> Callable[..., Schedule]:
    """The function of `Algorithm.build`. The user's numbers a broadcast's root 0, and the ranks host by host; what is
    proved for these holds for any other numbers, which are put in their place."""

    @lru_cache(2)
    def of_size(size: int, width: int | None) -> list[Schedule]:
        if size == 1:
            return [Schedule(collective, name, 0, 1, 1, ((copy(0, 0),),))]
        schedules = _schedules(collective, name, build, size, width)
        if _digest(schedules) != digests[size, width]:
            raise ScheduleError(
                f"{collective}/{name} of {size} ranks: build returns other steps than those that were proved; it may "
                "depend on rank and size only"
            )
        return counted(schedules)

    def numbered(rank: int, ranks: Sequence[int], width: int | None) -> Schedule:
        """The schedule of ``rank`` where the function's rank k is ``ranks[k]``."""
        own = of_size(len(ranks), width)[ranks.index(rank)]
        if list(ranks) == sorted(ranks):
            return own
        rounds = tuple(
            tuple(Step(step.kind, ranks[step.peer], step.chunk, step.span, step.push, step.count) for step in steps)
            for steps in own.rounds
        )
        # Values are combined in the order that was proved: another one could be another on each rank.
        return Schedule(collective, name, rank, own.size, own.chunks, rounds, tuple(ranks))

    if spans_hosts:
        return lambda rank, hosts: numbered(rank, [one for host in hosts for one in host], len(hosts[0]))
    if collective == "broadcast":
        return lambda rank, size, root: numbered(rank, [(root + k) % size for k in range(size)], None)
    return lambda rank, size: of_size(size, None)[rank]
