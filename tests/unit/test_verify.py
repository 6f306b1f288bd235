"""The verifier catches what is broken: every single step of right schedules, changed in every way; and races of pushes,
which no algorithm of the registry has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from collectives.schedules.algorithm import Algorithm
from collectives.schedules.proof.races import races
from collectives.schedules.proof.replay import replay
from collectives.schedules.proof.verify import ScheduleError, verify
from collectives.schedules.schedule import Round, Schedule, Step, StepKind, receive, send
from tests.unit.test_registry import WITH_SCHEDULE, name, schedules

HOSTS = [*((tuple(range(size)),) for size in range(1, 6)), ((0, 1), (2, 3)), ((0,), (1, 2)), ((3, 0), (1, 2))]


@dataclass(frozen=True)
class Mutation:
    """One step of one rank, replaced by others."""

    rank: int
    round: int
    place: int
    step: Step
    instead: tuple[Step, ...]

    def apply(self, schedules: Sequence[Schedule]) -> list[Schedule]:
        changed = list(schedules)
        rounds = list(changed[self.rank].rounds)
        steps = rounds[self.round]
        rounds[self.round] = (*steps[: self.place], *self.instead, *steps[self.place + 1 :])
        changed[self.rank] = replace(changed[self.rank], rounds=tuple(rounds))
        return changed

    def changes_nothing(self, schedules: Sequence[Schedule]) -> bool:
        """Whether the mutant does the same as the original. There are two such ways, both with one's own value:

        * a receive from oneself and a copy both put the own value, from before the round, where it was (but only a copy
          marks the root of a broadcast);
        * a receive from oneself that is the first step on its chunk, in a round that goes on to reduce into it, may be
          left out.
        """
        step, own = self.step, self.step.peer == self.rank
        alike = (StepKind.COPY, StepKind.RECEIVE)
        if own and step.kind in alike and len(self.instead) == 1 and schedules[0].collective != "broadcast":
            other = self.instead[0]
            return other.kind in alike and replace(other, kind=step.kind) == step
        if own and step.kind is StepKind.RECEIVE and not self.instead:
            steps = schedules[self.rank].rounds[self.round]
            first = all(earlier.kind is StepKind.SEND for earlier in steps[: self.place])
            return first and any(
                later.kind is StepKind.REDUCE and later.chunk == step.chunk for later in steps[self.place + 1 :]
            )
        return False


def mutations(schedules: Sequence[Schedule]) -> Iterator[Mutation]:
    """Every step dropped, doubled, misdirected, on another chunk, longer, shorter, of another kind, moved by the other
    side."""
    size, chunks = schedules[0].size, schedules[0].chunks
    for rank, schedule in enumerate(schedules):
        for number, steps in enumerate(schedule.rounds):
            for place, step in enumerate(steps):
                instead: list[tuple[Step, ...]] = [(), (step, step)]
                instead += [(replace(step, peer=peer),) for peer in range(-1, size + 1) if peer != step.peer]
                instead += [(replace(step, chunk=chunk),) for chunk in range(-1, chunks + 1) if chunk != step.chunk]
                instead += [(replace(step, span=span),) for span in (step.span - 1, step.span + 1)]
                instead += [(replace(step, kind=kind),) for kind in StepKind if kind is not step.kind]
                instead.append((replace(step, push=not step.push),))
                yield from (Mutation(rank, number, place, step, other) for other in instead)


def numbers(schedules: Sequence[Schedule]) -> list[dict[int, np.ndarray]]:
    """Distinct powers of three for each rank and chunk, so that nothing that is lost or doubled cancels out; all chunks
    everywhere."""
    return [
        {chunk: np.array([3**rank, chunk * 3**rank], object) for chunk in range(schedule.chunks)}
        for rank, schedule in enumerate(schedules)
    ]


@pytest.mark.parametrize("algorithm", WITH_SCHEDULE, ids=name)
def test_every_mutant_is_caught(algorithm: Algorithm) -> None:
    for hosts in HOSTS:
        right = schedules(algorithm, hosts, root=sum(map(len, hosts)) - 1)
        start = numbers(right)
        wanted = [{chunk: list(v) for chunk, v in held.items()} for held in replay(right, start)]
        survivors = []
        for mutation in mutations(right):
            mutant = mutation.apply(right)
            if mutation.changes_nothing(right):
                assert [{c: list(v) for c, v in held.items()} for held in replay(mutant, start)] == wanted, mutation
                verify(mutant)
                continue
            try:
                verify(mutant)
            except ScheduleError:
                continue
            survivors.append(mutation)
        assert not survivors


def by_hand(collective: str, chunks: int, *rounds: Sequence[Round]) -> list[Schedule]:
    """Schedules from the rounds of each rank."""
    return [Schedule(collective, "by-hand", rank, len(rounds), chunks, tuple(mine)) for rank, mine in enumerate(rounds)]


@pytest.mark.parametrize("aliased", [True, False])
def test_a_push_over_what_another_still_reads_races(aliased: bool) -> None:
    """Rank 2 pulls chunk 0 of rank 0 while rank 1 may push over it."""
    schedules = by_hand(
        "probe",
        1,
        ((send(2, 0),), (receive(1, 0, push=True),)),
        ((), (send(0, 0, push=True),)),
        ((receive(0, 0),), ()),
    )
    found = races(schedules, aliased)
    assert len(found) == (1 if aliased else 0)
    if aliased:
        assert (
            "chunk 0 of rank 0: version 0 is read by rank 2 in round 0" in found[0]
            and "overwritten by rank 1 in round 1" in found[0]
        )


def test_a_push_is_safe_once_the_pusher_has_heard_from_the_reader() -> None:
    schedules = by_hand(
        "probe",
        2,
        ((send(2, 0),), (), (receive(1, 0, push=True),)),
        ((), (receive(2, 0),), (send(0, 0, push=True),)),
        ((receive(0, 0),), (send(1, 0),), ()),
    )
    assert races(schedules, aliased=True) == []
