"""From a program to kernel launches: the actions of a round become the jobs of as few launches as possible.

A job reads blocks, combines them, and writes the result to one or more places: the rank's own memory, or a peer's that
is mapped here. A reduction from all peers is one job, whose sources are read once and whose result is written once;
where the next round only pushes that result to the peers, they are further targets of the same job. So the direct
all-reduce is one launch, and reads and writes every byte once.

A plan is complete but for one table of addresses, which changes from call to call: each rank's input, output and
window, and the scratch memory that messages are received into.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from collectives.device.kernel_sources import WAYS
from collectives.device.kernels import Combination
from collectives.device.protocol import Array
from collectives.plan.program import Action, Medium, Place, Program, RoundProgram, Space, Verb

_SPACES = {Space.INPUT: 0, Space.OUTPUT: 1, Space.WINDOW: 2}
SPACES = 3

Location = tuple[int, int]
"""An entry of the table of addresses, and an offset in bytes."""
Combine = Callable[[Sequence[tuple[int, int, int]], bool, Sequence[Sequence[int]]], Combination]
"""Creates the launch of jobs (sources, targets, elements), given whether results are scaled, and, for each job, the
number of ranks that have contributed to each source."""


def entry_of(rank: int, space: Space) -> int:
    """Index of a rank's memory in the table of addresses."""
    return rank * SPACES + _SPACES[space]


@dataclass(slots=True)
class Job:
    """A block that is read from ``sources``, combined, and written to ``targets``."""

    sources: list[Location]
    targets: list[Location]
    count: int
    finish: bool = False
    ranks: Sequence[int] = (1,)
    """How many have contributed to each source."""


@dataclass(frozen=True, slots=True)
class Message:
    """``count`` elements that are sent to ``peer`` from ``location``, or received from it there."""

    peer: int
    location: Location
    count: int


class Launch:
    """A launch whose addresses are looked up in the table."""

    __slots__ = ("_at", "_offsets", "_pointers", "_which", "combination")

    def __init__(self, combination: Combination, jobs: Sequence[Job]) -> None:
        self.combination = combination
        pointers = combination.pointers
        self._pointers = pointers.reshape(-1)
        ways = pointers.shape[1] // 2
        columns = [
            (number * 2 * ways + column, *location)
            for number, job in enumerate(jobs)
            for column, location in (*enumerate(job.sources), *enumerate(job.targets, ways))
        ]
        self._at, self._which, self._offsets = (np.array(part, np.int64) for part in zip(*columns, strict=True))

    def place(self, table: Array) -> None:
        """Set the addresses from the table."""
        self._pointers[self._at] = table[self._which] + self._offsets


@dataclass(slots=True)
class Stage:
    """The work that is issued at once: one round of one segment, or of several segments.

    Attributes:
        waits: peers and the groups that they must have finished.
        receives, sends: messages, which travel together.
        launches: in order, after the messages.
        needs: index of the stage whose launches produce what is sent here; -1: none.
    """

    waits: tuple[tuple[int, int], ...] = ()
    receives: list[Message] = field(default_factory=list)
    sends: list[Message] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    needs: int = -1


@dataclass(slots=True)
class DevicePlan:
    """A program bound to a dtype and an operation.

    Attributes:
        stages: in the order in which they are issued; stage n finishes group n + 1.
        pipelined: launches have a stream of their own, beside that of the messages.
        partners: the peers whose memory this rank's kernels access, or that access this rank's.
        leave: peers, and the group after which each accesses this rank's memory no more.
        window_bytes, scratch_bytes: memory that the plan needs besides input and output.
        reached: the peers' memory that this rank's kernels access.
        least_words: the smallest number of words with which every rank enters the negotiation round.
        captures: number of captures into a graph so far; the same on every rank.
        placed: the table of addresses that the launches have at present.
    """

    stages: list[Stage]
    pipelined: bool
    partners: tuple[int, ...]
    leave: tuple[tuple[int, int], ...]
    window_bytes: int
    scratch_bytes: int
    messages: bool
    reached: frozenset[tuple[int, Space]]
    least_words: int
    description: str
    captures: int = 0
    placed: bytes = b""


@dataclass(slots=True)
class LaunchBinder:
    """Binds the program of one rank to launches and messages.

    Args:
        program: of one segment.
        block: elements that a segment takes from each chunk.
        segments: above 1 only where all media are messages.
        merges: whether the job that reduces in the first round may make the pushes of the second (`direct.allreduce`).
    """

    program: Program
    rank: int
    size: int
    dtype: np.dtype[Any]
    block: int
    segments: int
    combine: Combine
    merges: bool
    _reached: set[tuple[int, Space]] = field(default_factory=set)

    def plan(self, *, pipelined: bool, least_words: int, description: str) -> DevicePlan:
        """The plan.

        Args:
            pipelined: a stage is one round of one segment, and segments alternate, so that one is reduced while another
                travels; otherwise a stage holds rounds of different segments, each one round behind the one before.
        """
        rounds, touched = self._merged() if self.merges else (self.program.rounds, dict(self.program.touched_by))
        stages: list[Stage] = []
        if pipelined:
            for number in range(len(rounds)):
                for segment in range(self.segments):
                    stages.append(self._stage([(rounds[number], segment)]))
                    if number:
                        stages[-1].needs = len(stages) - 1 - self.segments
        else:
            for group in range(len(rounds) + self.segments - 1):
                together = [(rounds[k], group - k) for k in range(len(rounds)) if 0 <= group - k < self.segments]
                stages.append(self._stage(together))
        itemsize, partners = self.dtype.itemsize, self._partners(rounds, touched)
        leave = (
            dict.fromkeys(partners, len(stages))
            if self.program.uses_window
            else {peer: last + 1 for peer, last in touched.items()}
        )
        return DevicePlan(
            stages=stages,
            pipelined=pipelined,
            partners=partners,
            leave=tuple(sorted(leave.items())),
            window_bytes=self.program.slot_elements * self.segments * itemsize,
            scratch_bytes=self.program.messages * self.block * self.segments * itemsize,
            messages=any(stage.receives or stage.sends for stage in stages),
            reached=frozenset(self._reached),
            least_words=least_words,
            description=description,
        )

    def _partners(self, rounds: Sequence[RoundProgram], touched: dict[int, int]) -> tuple[int, ...]:
        acting = (
            a for r in rounds for a in (*r.pushes, *r.rest) if a.medium is not Medium.MESSAGE and a.peer != self.rank
        )
        return tuple(sorted({a.peer for a in acting} | set(touched)))

    def _merged(self) -> tuple[Sequence[RoundProgram], dict[int, int]]:
        """The direct all-reduce as one round: results are pushed at once, because no other rank reads what they
        overwrite. A job has up to `WAYS` targets; with more ranks the pushes remain a round of their own.

        Returns:
            The rounds, and after which of them each peer has accessed this rank's memory for the last time.
        """
        first, second = self.program.rounds
        if len(second.pushes) >= WAYS or second.rest:
            return self.program.rounds, dict(self.program.touched_by)
        merged = RoundProgram(first.receives, first.sends, second.pushes, first.rest, False)
        return (merged,), dict.fromkeys(dict(self.program.touched_by), 0)

    def _stage(self, rounds: Sequence[tuple[RoundProgram, int]]) -> Stage:
        stage = Stage()
        jobs: list[list[Job]] = [[]]
        waits: dict[int, int] = {}
        for program, segment in rounds:
            merges = self.merges and bool(program.pushes) and bool(program.rest)
            arrivals: dict[int, Location] = {}
            for action in program.receives:
                count = self._count(action, segment)
                if action.detour:
                    raise ValueError(
                        f"a block of {action} arrives where its old value is still on its way out: not on devices"
                    )
                if action.verb is Verb.REDUCE:  # one by itself, or a value of a merge
                    number = segment * self.program.messages + len(arrivals)
                    arrivals[id(action)] = location = (self.size * SPACES, number * self.block * self.dtype.itemsize)
                else:
                    assert action.target is not None
                    location = self._own(action.target, segment)
                if count > 0:
                    stage.receives.append(Message(action.peer, location, count))
            for action in program.sends:
                assert action.source is not None
                if (count := self._count(action, segment)) > 0:
                    stage.sends.append(Message(action.peer, self._own(action.source, segment), count))
            pushes = () if merges else program.pushes
            for action in (*pushes, *program.reads):
                if action.after >= 0 and action.medium is not Medium.MESSAGE and action.peer != self.rank:
                    waits[action.peer] = max(waits.get(action.peer, 0), action.after + 1)
            for action in (*pushes, *program.rest):
                if action.verb is not Verb.AWAIT and self._count(action, segment) > 0:
                    self._add(jobs, action, segment, arrivals)
            if merges and jobs[-1]:
                jobs[-1][-1].targets += [self._target(action, segment) for action in program.pushes]
        for batch in jobs:
            for finish in (False, True):
                alike = [job for job in batch if job.finish is finish]
                if alike:
                    shapes = [(len(job.sources), len(job.targets), job.count) for job in alike]
                    combination = self.combine(shapes, finish, [job.ranks for job in alike])
                    stage.launches.append(Launch(combination, alike))
        stage.waits = tuple(waits.items())
        return stage

    def _add(self, launches: list[list[Job]], action: Action, segment: int, arrivals: Mapping[int, Location]) -> None:
        """Add the action as a job, in a new launch if it must run after one before it. A message that it reduces has
        arrived at the place of its id."""
        count, target = self._count(action, segment), self._target(action, segment)
        assert action.target is not None
        if action.also is not None:
            raise ValueError(f"the result of {action} has two places, which only staged plans have: not on devices")
        if action.verb is Verb.MERGE:
            self._merge(launches, action, [self._value(value, segment, arrivals) for value in action.values], segment)
            return
        if action.medium is Medium.MESSAGE and id(action) not in arrivals:
            return  # received in place
        value = self._value(action, segment, arrivals)
        if action.verb is Verb.REDUCE:
            assert action.operand is not None
            sources = [self._own(action.operand, segment), value]
            self._append(launches, Job(sources, [target], count, action.finish, action.counts))
        elif value != target:
            self._append(launches, Job([value], [target], count, action.finish))

    def _merge(self, launches: list[list[Job]], action: Action, sources: Sequence[Location], segment: int) -> None:
        """Combine the sources by the fixed tree, or, where they are more than a job can have, in groups one behind the
        other, of which the first has this rank's own, because the result may replace it."""
        count, target = self._count(action, segment), self._target(action, segment)
        ranks = [value.counts[1] for value in action.values]
        if len(sources) > WAYS:
            own = next(number for number, value in enumerate(action.values) if value.peer == self.rank)
            sources, ranks = (*sources[own:], *sources[:own]), [*ranks[own:], *ranks[:own]]
        self._append(launches, Job(list(sources[:WAYS]), [target], count, ranks=ranks[:WAYS]))
        for at in range(WAYS, len(sources), WAYS - 1):
            end = at + WAYS - 1
            parts = [sum(ranks[:at]), *ranks[at:end]]
            self._append(launches, Job([target, *sources[at:end]], [target], count, ranks=parts))
        launches[-1][-1].finish = action.finish

    def _value(self, action: Action, segment: int, arrivals: Mapping[int, Location]) -> Location:
        """Where the block is that an action reads."""
        if id(action) in arrivals:
            return arrivals[id(action)]
        assert action.source is not None
        return self._at(action.source, self.rank if action.verb in (Verb.PUSH, Verb.STAGE) else action.peer, segment)

    def _append(self, launches: list[list[Job]], job: Job) -> None:
        """Add a job to the last launch, or to a new one: jobs of one launch run concurrently, so none may write what
        another reads or writes."""
        written = set(map(self._memory, job.targets))
        touched = written.union(map(self._memory, job.sources))
        for other in launches[-1]:
            if touched.intersection(map(self._memory, other.targets)) or written.intersection(
                map(self._memory, other.sources)
            ):
                launches.append([])
                break
        launches[-1].append(job)

    def _memory(self, location: Location) -> Location:
        """The same value for locations that may be the same memory: input and output of a tensor that is reduced in
        place."""
        entry, offset = location
        in_output = entry < self.size * SPACES and entry % SPACES == _SPACES[Space.OUTPUT]
        return (entry - 1, offset) if in_output else location

    def _count(self, action: Action, segment: int) -> int:
        return min(self.block, action.size - segment * self.block)

    def _target(self, action: Action, segment: int) -> Location:
        assert action.target is not None
        return self._at(action.target, action.peer if action.verb is Verb.PUSH else self.rank, segment)

    def _own(self, place: Place, segment: int) -> Location:
        return self._at(place, self.rank, segment)

    def _at(self, place: Place, rank: int, segment: int) -> Location:
        if rank != self.rank:
            self._reached.add((rank, place.space))
        step = self.program.slot_elements if place.space is Space.WINDOW else self.block
        return entry_of(rank, place.space), (place.offset + segment * step) * self.dtype.itemsize
