"""The verifier: proves a schedule by executing it over all ranks with symbols instead of numbers.

The value of a chunk is the set of ranks whose contributions are in it, kept as the bits of an integer, so that a union
is an ``or``, and a contribution that would count twice is an overlap. `verify` proves that a collective has the result
that it is defined to have; `collectives.schedules.proof.races` finds memory that is read too early or too late.

    round      rank 0                        rank 1                        values of chunk 0 after the round
    start                                                                  rank 0: {0}     rank 1: {1}
    0          reduce(1, chunk 0)            send(0, chunk 0)              rank 0: {0, 1}  rank 1: {1}
    1          send(1, chunk 0)              receive(0, chunk 0)           rank 0: {0, 1}  rank 1: {0, 1}

If every send meets its receive in the same round, no rank deadlocks: by induction, all ranks finish every round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from collectives.schedules.schedule import Schedule, Step, StepKind


class ScheduleError(ValueError):
    """A schedule is wrong; the message names the algorithm, the size, the round, the rank and the chunk."""


def verify(schedules: Sequence[Schedule]) -> None:
    """Prove the schedules of all ranks of one collective, rank by rank in order.

    Proved are: peers and chunks are in range; every send meets its receive in the same round, over the same chunks and
    with the same ``push``; no rank sends or combines a chunk that it does not hold; no contribution is reduced twice;
    no step's effect is lost to a later step of its round; a rank copies its contribution into its own result only, at
    most once, and before anything else is written there; in the end every rank's result is that of the collective. The
    root of a broadcast is the rank that copies.

    Raises:
        ScheduleError: one of these does not hold.
    """
    held_values(schedules)


def held_values(schedules: Sequence[Schedule]) -> list[list[dict[int, int]]]:
    """`verify`, and what each rank holds before the first round and after each: ``[round][rank][chunk]``, as the bits
    of the ranks whose contributions are in it."""
    machine = _Machine(schedules)
    history = [[dict(chunks) for chunks in machine.held]]
    for number in range(len(schedules[0].rounds)):
        machine.run(number)
        history.append([dict(chunks) for chunks in machine.held])
    machine.finish()
    return history


class _Machine:
    """The values of all ranks: for each rank a dict from chunk to the bits of the ranks that contributed."""

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
            for attribute, expected, actual in (
                ("rank", rank, schedule.rank),
                ("size", self.size, schedule.size),
                ("collective", self.collective, schedule.collective),
                ("algorithm", first.algorithm, schedule.algorithm),
                ("chunks", self.chunks, schedule.chunks),
                ("number of rounds", len(first.rounds), len(schedule.rounds)),
            ):
                if expected != actual:
                    raise ScheduleError(
                        f"{self.name}, rank {rank}: its {attribute} is {actual!r}, expected {expected!r}"
                    )
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
        return ScheduleError(f"{self.name}, round {number}, rank {rank}, chunk {step.chunk}: {step}: {why}")

    def run(self, number: int) -> None:
        """Execute a round: all sends first, with the values from before it, then each rank's other steps in order."""
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
        before: dict[int, int] = {}  # values from before the round, of the chunks written in it
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
                raise self._fail(number, rank, step, "a rank receives from its peers only; it copies its own value")
            else:
                letters = mail.get(step.peer * self.size + rank)
                if not letters:
                    raise self._fail(number, rank, step, f"rank {step.peer} does not send it in this round")
                sent, values = letters.pop()
                if sent.chunk != step.chunk or sent.span != step.span or sent.push != step.push:
                    raise self._fail(number, rank, step, f"it meets {sent} of rank {step.peer}")
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
            for chunk, expected in self._promise(rank):
                actual = held.get(chunk, 0)
                if actual != expected:
                    lacking, foreign = expected & ~actual, actual & ~expected
                    faults = [f"lacks the {_contributions(lacking)}"] * bool(lacking)
                    faults += [f"has the {_contributions(foreign)}, which is not part of it"] * bool(foreign)
                    raise ScheduleError(
                        f"{self.name}: chunk {chunk} of rank {rank} {' and '.join(faults)} after the last round, "
                        f"{last} (holds {_ranks(actual)}, expected {_ranks(expected)})"
                    )
                if chunk not in written:
                    raise ScheduleError(
                        f"{self.name}: chunk {chunk} of rank {rank} lies in its input only after the last round, "
                        f"{last}: no step has put it into the result; add copy({rank}, {chunk}) to rank {rank}"
                    )


def _contributions(bits: int) -> str:
    ranks = _ranks(bits)
    return f"contribution{'s' * (len(ranks) > 1)} of rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _ranks(bits: int) -> list[int]:
    return [rank for rank in range(bits.bit_length()) if bits >> rank & 1]
