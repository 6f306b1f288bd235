"""The verifier catches what is broken: every single step of right schedules, changed in every way; and races of pushes,
which no algorithm of the registry has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from collectives.schedules.algorithm import Algorithm
from collectives.schedules.proof.races import races
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


@pytest.mark.parametrize("algorithm", WITH_SCHEDULE, ids=name)
def test_every_mutant_is_caught(algorithm: Algorithm) -> None:
    for hosts in HOSTS:
        right = schedules(algorithm, hosts, root=sum(map(len, hosts)) - 1)
        survivors = []
        for mutation in mutations(right):
            mutant = mutation.apply(right)
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
