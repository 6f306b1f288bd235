"""The verifier: proves a schedule by executing it over all ranks with symbols instead of numbers.

The value of a chunk is the set of ranks whose contributions are in it, kept as the bits of an integer, so that a union
is an ``or``, and a contribution that would count twice is an overlap. `verify` proves that a collective does what it
promises; `races` asks the other question, whether memory that peers read and write in place is ever read too late or
too early.

    round      rank 0                        rank 1                        values of chunk 0 after the round
    start                                                                  rank 0: {0}     rank 1: {1}
    0          reduce(1, chunk 0)            send(0, chunk 0)              rank 0: {0, 1}  rank 1: {1}
    1          send(1, chunk 0)              receive(0, chunk 0)           rank 0: {0, 1}  rank 1: {0, 1}

Nothing deadlocks if every send meets its receive in the same round: by induction over the rounds, everyone finishes
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from collectives.schedules.schedule import Schedule, Step, StepKind


class ScheduleError(AssertionError):
    """A schedule is wrong; the message names the algorithm, the size, the round, the rank and the chunk."""


def verify(schedules: Sequence[Schedule]) -> None:
    """Prove the schedules of all ranks of one collective, rank by rank in order.

    Proved are: peers and chunks are in range; every send meets its receive in the same round, over the same chunks and
    with the same word about who moves the bytes; nobody passes on or combines a chunk that it does not hold; no
    contribution is reduced twice; no step's effect is lost to a later one of its round; the own contribution is copied
    into the own result only, at most once, and before anything else is written there; and in the end every rank's
    result holds what the collective promises. The root of a broadcast is the rank that copies.

    Raises:
        ScheduleError: one of these does not hold.
    """
    machine = _Machine(schedules)
    for number in range(len(schedules[0].rounds)):
        machine.run(number)
    machine.finish()


class _Machine:
    """All ranks and what they hold: a dict per rank from chunk to the bits of the ranks that contributed."""

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        if not schedules:
            raise ScheduleError("no schedules: expected one for each rank")
        first = schedules[0]
        self.schedules = schedules
        self.collective, self.size, self.chunks = first.collective, first.size, first.chunks
        self.name = f"{first.collective}/{first.algorithm} of {first.size} ranks"
        if len(schedules) != self.size:
            raise ScheduleError(f"{self.name}: {len(schedules)} schedules came")
        for rank, schedule in enumerate(schedules):
            for attribute, wanted, found in (
                ("rank", rank, schedule.rank),
                ("size", self.size, schedule.size),
                ("collective", self.collective, schedule.collective),
                ("algorithm", first.algorithm, schedule.algorithm),
                ("chunks", self.chunks, schedule.chunks),
                ("number of rounds", len(first.rounds), len(schedule.rounds)),
            ):
                if wanted != found:
                    raise ScheduleError(f"{self.name}, rank {rank}: its {attribute} is {found!r}, expected {wanted!r}")
        wanted_chunks = {"reducescatter": self.size, "allgather": self.size, "alltoall": self.size**2}.get(
            self.collective, self.chunks
        )
        if wanted_chunks != self.chunks or self.chunks < 1:
            raise ScheduleError(f"{self.name}: {self.chunks} chunks, expected {max(1, wanted_chunks)}")
        self.roots = self._find_roots()
        self.held = [dict.fromkeys(self._starts(rank), 1 << rank) for rank in range(self.size)]
        self.written: list[set[int]] = [set() for _ in range(self.size)]

    def _find_roots(self) -> tuple[int, ...]:
        if self.collective != "broadcast":
            return ()
        roots = tuple(
            s.rank for s in self.schedules if any(step.kind is StepKind.COPY for steps in s.rounds for step in steps)
        )
        if len(roots) != 1:
            raise ScheduleError(f"{self.name}: ranks {list(roots)} copy their own value, expected one, the root")
        return roots

    def _starts(self, rank: int) -> Iterable[int]:
        """The chunks that a rank holds before the first round."""
        if self.collective == "allgather":
            return (rank,)
        if self.collective == "alltoall":
            return range(rank * self.size, (rank + 1) * self.size)
        if self.collective == "broadcast" and rank not in self.roots:
            return ()
        return range(self.chunks)

    def _promise(self, rank: int) -> Iterable[tuple[int, int]]:
        """The chunks that a rank's result must hold after the last round, and the ranks whose contributions must be in
        them."""
        everyone = (1 << self.size) - 1
        if self.collective == "allreduce":
            return ((chunk, everyone) for chunk in range(self.chunks))
        if self.collective == "reducescatter":
            return ((rank, everyone),)
        if self.collective == "allgather":
            return ((chunk, 1 << chunk) for chunk in range(self.chunks))
        if self.collective == "broadcast":
            return ((chunk, 1 << self.roots[0]) for chunk in range(self.chunks))
        if self.collective == "alltoall":
            return ((peer * self.size + rank, 1 << peer) for peer in range(self.size))
        raise ScheduleError(f"{self.name}: nothing is known of what {self.collective!r} promises")

    def _fail(self, number: int, rank: int, step: Step, why: str) -> ScheduleError:
        return ScheduleError(f"{self.name}, round {number}, rank {rank}, chunk {step.chunk}: {_say(step)}: {why}")

    def run(self, number: int) -> None:
        """One round: all sends first, with the values from before it, then the rest of every rank in order."""
        size, chunks = self.size, self.chunks
        mail: dict[int, list[tuple[Step, tuple[int, ...]]]] = {}
        for rank, schedule in enumerate(self.schedules):
            held = self.held[rank]
            for step in schedule.rounds[number]:
                chunk, span = step.chunk, step.span
                if not (0 <= step.peer < size and chunk >= 0 and span >= 1 and chunk + span <= chunks):
                    raise self._fail(number, rank, step, f"peers are 0 to {size - 1}, and chunks 0 to {chunks - 1}")
                if step.kind is not StepKind.SEND:
                    continue
                if step.peer == rank:
                    raise self._fail(number, rank, step, "a rank does not send to itself")
                values = (
                    (held.get(chunk, 0),) if span == 1 else tuple([held.get(c, 0) for c in range(chunk, chunk + span)])
                )
                if not all(values):
                    raise self._fail(number, rank, step, f"it does not hold chunk {chunk + values.index(0)}")
                mail.setdefault(rank * size + step.peer, []).append((step, values))
        for letters in mail.values():
            letters.reverse()
        for rank, schedule in enumerate(self.schedules):
            self._receive(number, rank, schedule.rounds[number], mail)
        for key, letters in mail.items():
            if letters:
                raise self._fail(
                    number, key // size, letters[-1][0], f"rank {key % size} does not receive it in this round"
                )

    def _receive(
        self, number: int, rank: int, steps: Sequence[Step], mail: dict[int, list[tuple[Step, tuple[int, ...]]]]
    ) -> None:
        held, written = self.held[rank], self.written[rank]
        before: dict[int, int] = {}  # the values from before the round of the chunks that it has written
        for step in steps:
            if step.kind is StepKind.SEND:
                continue
            if step.push and (step.kind is not StepKind.RECEIVE or step.peer == rank):
                raise self._fail(number, rank, step, "only what is received from a peer can be pushed")
            if step.kind is StepKind.COPY:
                if step.peer != rank:
                    raise self._fail(number, rank, step, "a rank copies its own value only")
                values = tuple([held.get(c, 0) for c in range(step.chunk, step.chunk + step.span)])
                result = dict(self._promise(rank))
                if any(chunk not in result for chunk in range(step.chunk, step.chunk + step.span)):
                    raise self._fail(number, rank, step, "not all of that is part of its result")
            elif step.peer == rank:
                values = tuple([before.get(c, held.get(c, 0)) for c in range(step.chunk, step.chunk + step.span)])
            else:
                letters = mail.get(step.peer * self.size + rank)
                if not letters:
                    raise self._fail(number, rank, step, f"rank {step.peer} does not send it in this round")
                sent, values = letters.pop()
                if sent.chunk != step.chunk or sent.span != step.span or sent.push != step.push:
                    raise self._fail(number, rank, step, f"it meets {_say(sent)} of rank {step.peer}")
            for chunk, value in enumerate(values, step.chunk):
                own = held.get(chunk, 0)
                if not value:
                    raise self._fail(number, rank, step, f"it does not hold chunk {chunk}")
                if step.kind is StepKind.REDUCE:
                    if not own:
                        raise self._fail(number, rank, step, f"it holds no value of chunk {chunk} to combine with")
                    if own & value:
                        raise self._fail(
                            number, rank, step, f"the contribution of rank {_lowest(own & value)} is reduced twice"
                        )
                elif step.kind is StepKind.COPY and chunk in written:
                    raise self._fail(
                        number,
                        rank,
                        step,
                        "it has written there before, so its own contribution is gone or copied twice",
                    )
                elif chunk in before:
                    raise self._fail(number, rank, step, "it replaces what an earlier step of the round has written")
                before.setdefault(chunk, own)
                held[chunk] = own | value if step.kind is StepKind.REDUCE else value
                written.add(chunk)

    def finish(self) -> None:
        last = len(self.schedules[0].rounds) - 1
        for rank, (held, written) in enumerate(zip(self.held, self.written, strict=True)):
            for chunk, wanted in self._promise(rank):
                found = held.get(chunk, 0)
                where = f"{self.name}, after round {last}, rank {rank}, chunk {chunk}"
                if found != wanted:
                    raise ScheduleError(
                        f"{where}: holds the contributions of ranks {_ranks(found)}, expected {_ranks(wanted)}"
                    )
                if chunk not in written:
                    raise ScheduleError(
                        f"{where}: the value lies in the input only; no step has put it into the result"
                    )


def _say(step: Step) -> str:
    chunks = f"chunk {step.chunk}" if step.span == 1 else f"chunks {step.chunk} to {step.chunk + step.span - 1}"
    way = "to" if step.kind is StepKind.SEND else "from"
    return f"{step.kind.value} {way} rank {step.peer}, {chunks}{', pushed' if step.push else ''}"


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _ranks(bits: int) -> list[int]:
    return [rank for rank in range(bits.bit_length()) if bits >> rank & 1]


@dataclass(frozen=True, slots=True)
class _Access:
    """A rank reads or writes a version of a chunk in someone's memory."""

    rank: int
    round: int
    order: int
    version: int
    knows: tuple[int, ...]
    """How many rounds of each rank are known to be finished at that moment."""
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
    """Find what may be read too early or too late where peers read and write each other's memory in place.

    The schedules must be proved by `verify`. The model is what the executor does on shared memory:

    * all ranks enter before anything happens, and all wait for all at the end;
    * a rank does its rounds in order; in a round first its pushes, then its receives and copies, in the order of the
    steps;
    * a pull of a chunk waits until its owner has finished the last earlier round in which the chunk was written there,
    by the
      owner or by a push (no wait if there is none): nothing is waited for but finished rounds;
    * a push waits for nothing. Its receiver waits until the pusher has finished the round before it reads or sends that
    chunk
      in a later round;
    * a copy in place does nothing.

    Args:
        aliased: input and output are one (in place), and every version of a chunk on a rank shares one location.
            Otherwise version 0 stays in the input, and all that is written shares the output.

    Returns:
        One line for each pair of accesses whose order the waits do not enforce; empty if the schedules are free of
        races.
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
        self.clock = [[0] * self.size for _ in schedules]
        self.finished: list[list[tuple[int, ...]]] = []
        self.locations: dict[tuple[int, int, bool], _Location] = {}

    def _at(self, rank: int, chunk: int, version: int) -> _Location:
        return self.locations.setdefault((rank, chunk, self.aliased or version > 0), _Location())

    def run(self, number: int) -> None:
        start = [dict(versions) for versions in self.version]
        written = [dict(rounds) for rounds in self.written]
        targets: dict[
            tuple[int, int, int], list[int]
        ] = {}  # by pusher, receiver and chunk: the versions that its pushes write
        plans = [self._versions(number, rank, targets) for rank in range(self.size)]
        for rank, plan in enumerate(plans):
            self._play(number, rank, plan, start, written, targets)
        self.finished.append([tuple(clock) for clock in self.clock])

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
        clock, pending = self.clock[rank], self.pushed[rank]
        for step in self.schedules[rank].rounds[number]:
            if step.kind in (StepKind.SEND, StepKind.REDUCE) or step.peer == rank:
                for chunk in range(step.chunk, step.chunk + step.span):
                    if chunk in pending:
                        pusher, when = pending.pop(chunk)
                        self._learn(clock, self.finished[when][pusher])
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
                self._learn(clock, self.finished[written[step.peer][chunk]][step.peer])
            self._read(number, rank, order, step, step.peer, chunk, start[step.peer].get(chunk, 0))
            if step.kind is StepKind.REDUCE:
                self._read(number, rank, order, step, rank, chunk, old)
            self._write(number, rank, order, step, rank, chunk, old + 1)
        clock[rank] = number + 1

    @staticmethod
    def _learn(clock: list[int], news: tuple[int, ...]) -> None:
        clock[:] = map(max, clock, news)

    def _read(self, number: int, rank: int, order: int, step: Step, owner: int, chunk: int, version: int) -> None:
        access = _Access(rank, number, 2 * order, version, tuple(self.clock[rank]), step)
        self._at(owner, chunk, version).reads.append(access)

    def _write(self, number: int, rank: int, order: int, step: Step, owner: int, chunk: int, version: int) -> None:
        access = _Access(rank, number, 2 * order + 1, version, tuple(self.clock[rank]), step)
        self._at(owner, chunk, version).writes.append(access)

    def findings(self) -> list[str]:
        found = []
        for (owner, chunk, _), location in self.locations.items():
            for place, write in enumerate(location.writes):
                for read in location.reads:
                    early = read.version < write.version
                    if not (read.precedes(write) if early else write.precedes(read)):
                        found.append(
                            self._tell(owner, chunk, "read", read, "overwritten" if early else "written", write)
                        )
                for other in location.writes[:place]:
                    first, second = sorted((other, write), key=lambda access: access.version)
                    if not first.precedes(second):
                        found.append(self._tell(owner, chunk, "written", first, "overwritten", second))
        return found

    def _tell(self, owner: int, chunk: int, what: str, one: _Access, then: str, two: _Access) -> str:
        return (
            f"{self.name}: chunk {chunk} of rank {owner}: version {one.version} is {what} by rank {one.rank} in "
            f"round {one.round} "
            f"({_say(one.step)}), and {then} by rank {two.rank} in round {two.round} ({_say(two.step)}), in no order"
        )
