"""Races: values that peers may read too early or too late in each other's memory, found by vector clocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from collectives.schedules.schedule import Schedule, Step, StepKind


@dataclass(frozen=True, slots=True)
class _Access:
    """A rank reads or writes a version of a chunk in its own or a peer's memory."""

    rank: int
    round: int
    order: int
    version: int
    knows: tuple[int, ...]
    """Rounds of each rank that are known to be finished at that moment."""
    step: Step

    def precedes(self, other: _Access) -> bool:
        """Whether this happens before the other, whatever the ranks' speeds."""
        if self.rank == other.rank:
            return (self.round, self.order) < (other.round, other.order)
        return other.knows[self.rank] > self.round


@dataclass(slots=True)
class _Location:
    reads: list[_Access] = field(default_factory=list)
    writes: list[_Access] = field(default_factory=list)


def races(schedules: Sequence[Schedule], aliased: bool) -> list[str]:
    """Find values that may be read too early or too late where peers read and write each other's memory in place.

    The schedules must be proved by `verify`. The model is what the executor does on shared memory:

    * all ranks enter before anything happens, and all wait for all at the end;
    * a rank does its rounds in order; in a round its pushes first, then its receives and copies, in the order of the
      steps;
    * a pull of a chunk waits until its owner has finished the last earlier round in which the chunk was written there,
      by the owner or by a push (no wait if there is none);
    * a push waits for nothing. Its receiver waits until the pusher has finished the round before it reads or sends the
      chunk in a later round;
    * a copy in place does nothing.

    Args:
        aliased: input and output are one (in place), and every version of a chunk on a rank shares one location.
            Otherwise version 0 stays in the input, and all that is written shares the output.

    Returns:
        One line for each pair of accesses whose order the waits do not enforce.
    """
    tracker = _Tracker(schedules, aliased)
    for number in range(len(schedules[0].rounds)):
        tracker.run(number)
    return tracker.findings()


class _Tracker:
    """Vector clocks over (rank, round), and every access to every location."""

    def __init__(self, schedules: Sequence[Schedule], aliased: bool) -> None:
        self.schedules, self.aliased, self.size = schedules, aliased, len(schedules)
        self.name = f"{schedules[0].collective}/{schedules[0].algorithm} of {self.size} ranks"
        self.version: list[dict[int, int]] = [{} for _ in schedules]
        self.written: list[dict[int, int]] = [{} for _ in schedules]
        """The last round that wrote a chunk."""
        self.pushed: list[dict[int, tuple[int, int]]] = [{} for _ in schedules]
        """Pushes into a rank's chunks that it has not waited for yet: the pusher and its round."""
        self.clock = [(0,) * self.size for _ in schedules]
        self.finished: list[list[tuple[int, ...]]] = []
        self.locations: dict[tuple[int, int, bool], _Location] = {}

    def _at(self, rank: int, chunk: int, version: int) -> _Location:
        return self.locations.setdefault((rank, chunk, self.aliased or version > 0), _Location())

    def run(self, number: int) -> None:
        start = [dict(versions) for versions in self.version]
        written = [dict(rounds) for rounds in self.written]
        # By pusher, receiver and chunk: the versions that its pushes write.
        targets: dict[tuple[int, int, int], list[int]] = {}
        plans = [self._versions(number, rank, targets) for rank in range(self.size)]
        for rank, plan in enumerate(plans):
            self._play(number, rank, plan, start, written, targets)
        self.finished.append(list(self.clock))

    def _versions(
        self, number: int, rank: int, targets: dict[tuple[int, int, int], list[int]]
    ) -> list[tuple[Step, int, int]]:
        """The round's single-chunk steps in the order in which they are done, with the version that each replaces."""
        steps = [
            (step, chunk)
            for step in self.schedules[rank].rounds[number]
            for chunk in range(step.chunk, step.chunk + step.span)
        ]
        pushes = [(step, chunk, 0) for step, chunk in steps if step.kind is StepKind.SEND and step.push]
        rest: list[tuple[Step, int, int]] = []
        for step, chunk in steps:
            if step.kind is StepKind.SEND:
                continue
            old = self.version[rank].get(chunk, 0)
            rest.append((step, chunk, old))
            self.version[rank][chunk] = old + 1
            self.written[rank][chunk] = number
            if step.push:
                targets.setdefault((step.peer, rank, chunk), []).append(old + 1)
        return pushes + rest

    def _play(
        self,
        number: int,
        rank: int,
        plan: Sequence[tuple[Step, int, int]],
        start: Sequence[dict[int, int]],
        written: Sequence[dict[int, int]],
        targets: dict[tuple[int, int, int], list[int]],
    ) -> None:
        pending = self.pushed[rank]
        for step in self.schedules[rank].rounds[number]:
            if step.kind in (StepKind.SEND, StepKind.REDUCE) or step.peer == rank:
                for chunk in range(step.chunk, step.chunk + step.span):
                    if chunk in pending:
                        pusher, when = pending.pop(chunk)
                        self._learn(rank, self.finished[when][pusher])
        for order, (step, chunk, old) in enumerate(plan):
            if step.kind is StepKind.SEND:
                self._read(number, rank, order, step, rank, chunk, start[rank].get(chunk, 0))
                self._write(number, rank, order, step, step.peer, chunk, targets[rank, step.peer, chunk].pop(0))
                continue
            if step.push:
                pending[chunk] = (step.peer, number)
                continue
            if step.kind is StepKind.COPY and self.aliased:
                continue
            if step.peer != rank and chunk in written[step.peer]:
                self._learn(rank, self.finished[written[step.peer][chunk]][step.peer])
            self._read(number, rank, order, step, step.peer, chunk, start[step.peer].get(chunk, 0))
            if step.kind is StepKind.REDUCE:
                self._read(number, rank, order, step, rank, chunk, old)
            self._write(number, rank, order, step, rank, chunk, old + 1)
        clock = self.clock[rank]
        self.clock[rank] = (*clock[:rank], number + 1, *clock[rank + 1 :])

    def _learn(self, rank: int, news: tuple[int, ...]) -> None:
        self.clock[rank] = tuple(map(max, self.clock[rank], news))

    def _read(self, number: int, rank: int, order: int, step: Step, owner: int, chunk: int, version: int) -> None:
        access = _Access(rank, number, 2 * order, version, self.clock[rank], step)
        self._at(owner, chunk, version).reads.append(access)

    def _write(self, number: int, rank: int, order: int, step: Step, owner: int, chunk: int, version: int) -> None:
        access = _Access(rank, number, 2 * order + 1, version, self.clock[rank], step)
        self._at(owner, chunk, version).writes.append(access)

    def findings(self) -> list[str]:
        conflicts = []
        for (owner, chunk, _), location in self.locations.items():
            if all(access.rank == owner for access in (*location.reads, *location.writes)):
                continue  # in the order of the rank's steps
            for place, write in enumerate(location.writes):
                for read in location.reads:
                    early = read.version < write.version
                    if not (read.precedes(write) if early else write.precedes(read)):
                        conflicts.append(
                            self._tell(owner, chunk, "read", read, "overwritten" if early else "written", write)
                        )
                for other in location.writes[:place]:
                    first, second = sorted((other, write), key=lambda access: access.version)
                    if not first.precedes(second):
                        conflicts.append(self._tell(owner, chunk, "written", first, "overwritten", second))
        return conflicts

    def _tell(self, owner: int, chunk: int, what: str, one: _Access, then: str, two: _Access) -> str:
        return (
            f"{self.name}: chunk {chunk} of rank {owner}: version {one.version} is {what} by rank {one.rank} in "
            f"round {one.round} "
            f"({one.step}), and {then} by rank {two.rank} in round {two.round} ({two.step}), in no order"
        )
