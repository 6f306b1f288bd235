"""The verifier catches what is broken: every single step of right schedules, changed in every way, and broken ones by
hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from collectives import ring
from collectives.schedules import direct, hierarchical, tree
from collectives.schedules.schedule import Round, Schedule, Step, StepKind, copy, receive, reduce, send
from tests.support.schedules.races import races
from tests.support.schedules.replay import replay
from tests.support.schedules.verify import ScheduleError, verify

HOSTS = {
    "two hosts": ((0, 1), (2, 3)),
    "unequal hosts": ((0,), (1, 2)),
    "three hosts": ((0, 1), (2,), (3,)),
    "mixed ranks": ((3, 0), (1, 2)),
}


def catalogue() -> dict[str, list[Schedule]]:
    """Small schedules of every algorithm."""
    plain: list[Callable[[int, int], Schedule]] = [
        ring.allreduce,
        ring.reducescatter,
        ring.allgather,
        direct.allreduce,
        direct.one_shot,
        direct.reducescatter,
        direct.allgather,
        direct.alltoall,
        tree.recursive_doubling,
    ]
    rooted = [ring.broadcast, direct.broadcast, direct.broadcast_flat, tree.broadcast]
    found = {}
    for algorithm in plain:
        for size in (1, 2, 3, 4, 5):
            found[f"{algorithm.__module__}.{algorithm.__name__} {size}"] = [
                algorithm(rank, size) for rank in range(size)
            ]
    for broadcast in rooted:
        for size in (1, 2, 3, 4, 5):
            for root in {0, size - 1}:
                found[f"{broadcast.__module__}.{broadcast.__name__} {size} root {root}"] = [
                    broadcast(rank, size, root) for rank in range(size)
                ]
    for name, hosts in HOSTS.items():
        found[f"hierarchical.allreduce {name}"] = [
            hierarchical.allreduce(rank, hosts) for rank in range(sum(map(len, hosts)))
        ]
    return found


CATALOGUE = catalogue()


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


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_original_is_proved(name: str) -> None:
    verify(CATALOGUE[name])


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_mutant_is_caught(name: str) -> None:
    schedules = CATALOGUE[name]
    start = numbers(schedules)
    wanted = [{chunk: list(v) for chunk, v in held.items()} for held in replay(schedules, start)]
    survivors = []
    for mutation in mutations(schedules):
        mutant = mutation.apply(schedules)
        if mutation.changes_nothing(schedules):
            assert [{chunk: list(v) for chunk, v in held.items()} for held in replay(mutant, start)] == wanted, mutation
            verify(mutant)
            continue
        try:
            verify(mutant)
        except ScheduleError:
            continue
        survivors.append(mutation)
    assert not survivors


def test_few_mutants_change_nothing() -> None:
    """The exceptions stay what they are: one dropped step of one rank in one-shot, and copies of the own value."""
    dropped = [
        (name, m)
        for name, schedules in CATALOGUE.items()
        for m in mutations(schedules)
        if not m.instead and m.changes_nothing(schedules)
    ]
    assert [(name, m.rank) for name, m in dropped] == [
        (f"collectives.schedules.direct.one_shot {size}", 0) for size in (3, 4, 5)
    ]


def by_hand(collective: str, chunks: int, *rounds: Sequence[Round]) -> list[Schedule]:
    """Schedules from the rounds of each rank."""
    return [Schedule(collective, "by-hand", rank, len(rounds), chunks, tuple(mine)) for rank, mine in enumerate(rounds)]


EXCHANGE = ((send(1, 0), reduce(1, 0)),), ((send(0, 0), reduce(0, 0)),)


@pytest.mark.parametrize(
    ("schedules", "message"),
    [
        ([], "no schedules"),
        (by_hand("allreduce", 1, *EXCHANGE)[:1], "1 schedules came"),
        (by_hand("allreduce", 1, *EXCHANGE)[::-1], "rank 0: its rank is 1, expected 0"),
        (by_hand("allgather", 3, ((),), ((),)), "3 chunks, expected 2"),
        (by_hand("allreduce", 0, ((),), ((),)), "0 chunks, expected 1"),
        (by_hand("gossip", 1, *EXCHANGE), "nothing is known of what 'gossip' promises"),
        (by_hand("allreduce", 1, ((),), ()), "rank 1: its number of rounds is 0, expected 1"),
        (
            by_hand("broadcast", 1, ((copy(0, 0),),), ((copy(1, 0),),)),
            r"ranks \[0, 1\] copy their own value, expected one, the root",
        ),
        (by_hand("broadcast", 1, ((send(1, 0),),), ((receive(0, 0),),)), r"ranks \[\] copy their own value"),
        (
            by_hand("allreduce", 1, ((send(1, 0), reduce(1, 0)),) * 2, ((send(0, 0), reduce(0, 0)),) * 2),
            "round 1, rank 0, chunk 0: receive-and-reduce from rank 1, chunk 0: the contribution of rank 0 is "
            "reduced twice",
        ),
        (
            by_hand("allgather", 2, ((copy(0, 0), send(1, 1)),), ((copy(1, 1), receive(0, 1)),)),
            "by-hand of 2 ranks, round 0, rank 0, chunk 1: send to rank 1, chunk 1: it does not hold chunk 1",
        ),
        (
            by_hand("allreduce", 1, ((send(1, 0), reduce(1, 0)),), ((send(0, 0), receive(0, 0)),)),
            r"after round 0, rank 1, chunk 0: holds the contributions of ranks \[0\], expected \[0, 1\]",
        ),
        (by_hand("allreduce", 1, ((),)), "rank 0, chunk 0: the value lies in the input only"),
        (
            by_hand("allreduce", 2, ((send(1, 0, 2), reduce(1, 0, 2)),), ((send(0, 0), send(0, 1), reduce(0, 0, 2)),)),
            "rank 0, chunk 0: receive-and-reduce from rank 1, chunks 0 to 1: it meets send to rank 0, chunk 0 of "
            "rank 1",
        ),
        (
            by_hand("allreduce", 1, ((send(1, 0), reduce(1, 0)),), ((send(0, 0, push=True), reduce(0, 0)),)),
            "it meets send to rank 0, chunk 0, pushed of rank 1",
        ),
        (by_hand("allreduce", 1, ((send(0, 0),),)), "a rank does not send to itself"),
        (by_hand("allreduce", 1, ((send(1, 0),),)), "peers are 0 to 0, and chunks 0 to 0"),
        (
            by_hand("allreduce", 1, ((send(1, 0),), ()), ((), (reduce(0, 0),))),
            "round 0, rank 0, .* rank 1 does not receive it in this round",
        ),
    ],
)
def test_the_message_tells_what_is_wrong(schedules: list[Schedule], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        verify(schedules)


def test_a_reduction_cannot_be_pushed() -> None:
    pushed = replace(reduce(1, 0), push=True), replace(reduce(0, 0), push=True)
    with pytest.raises(ScheduleError, match="only what is received from a peer can be pushed"):
        verify(by_hand("allreduce", 1, ((send(1, 0, push=True), pushed[0]),), ((send(0, 0, push=True), pushed[1]),)))


def test_values_from_before_the_round_are_sent() -> None:
    """A relay in one round cannot work: rank 1 has nothing to pass on yet."""
    chain = by_hand("broadcast", 1, ((copy(0, 0), send(1, 0)),), ((receive(0, 0), send(2, 0)),), ((receive(1, 0),),))
    with pytest.raises(ScheduleError, match="rank 1, chunk 0: send to rank 2, chunk 0: it does not hold chunk 0"):
        verify(chain)


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


def test_what_was_pushed_is_read_by_its_receiver_in_order_and_by_others_in_none() -> None:
    """Rank 1 waits for the push before it sends it on, but rank 2 waits only for rank 1 to have finished the round of
    the push."""
    first = ((send(1, 0, push=True),), ())
    own = by_hand(
        "probe",
        1,
        (*first,),
        ((receive(0, 0, push=True),), (send(2, 0, push=True),)),
        ((), (receive(1, 0, push=True),)),
    )
    assert races(own, aliased=True) == []
    pulled = by_hand("probe", 1, (*first,), ((receive(0, 0, push=True),), (send(2, 0),)), ((), (receive(1, 0),)))
    assert ["written by rank 0" in line for line in races(pulled, aliased=True)] == [True]


def test_own_steps_race_when_the_value_from_before_the_round_is_gone() -> None:
    schedules = by_hand("probe", 1, ((receive(1, 0), reduce(0, 0)),), ((send(0, 0),),))
    assert races(schedules, aliased=False) == []
    assert ["read by rank 0 in round 0" in line for line in races(schedules, aliased=True)] == [True]


def test_two_writers_race() -> None:
    schedules = by_hand(
        "probe",
        1,
        ((receive(1, 0, push=True), receive(2, 0, push=True)),),
        ((send(0, 0, push=True),),),
        ((send(0, 0, push=True),),),
    )
    assert [
        "version 1 is written by rank 1" in line and "overwritten by rank 2" in line
        for line in races(schedules, aliased=False)
    ] == [True]


def pushed_chunks_read_later(schedules: Sequence[Schedule]) -> list[tuple[int, int, int]]:
    found = []
    for schedule in schedules:
        pushed: set[int] = set()
        for number, steps in enumerate(schedule.rounds):
            touched = {
                c
                for s in steps
                if s.kind in (StepKind.SEND, StepKind.REDUCE) or s.peer == schedule.rank
                for c in range(s.chunk, s.chunk + s.span)
            }
            found += [(schedule.rank, number, chunk) for chunk in touched & pushed]
            pushed |= {
                c for s in steps if s.kind is StepKind.RECEIVE and s.push for c in range(s.chunk, s.chunk + s.span)
            }
    return found


@pytest.mark.parametrize("name", CATALOGUE)
def test_no_pushed_chunk_is_used_again(name: str) -> None:
    """So nobody ever waits for a push within a call; two ranks that did, each for the other's, could wait for ever."""
    assert pushed_chunks_read_later(CATALOGUE[name]) == []


@pytest.mark.parametrize("aliased", [True, False])
@pytest.mark.parametrize("name", CATALOGUE)
def test_who_moves_the_bytes_makes_no_race(name: str, aliased: bool) -> None:
    """Where ranks share windows, what could be pushed is pulled like the rest: then, too, nothing races that did not
    before."""
    pulled = [
        replace(schedule, rounds=tuple(tuple(replace(step, push=False) for step in steps) for steps in schedule.rounds))
        for schedule in CATALOGUE[name]
    ]
    verify(pulled)
    assert bool(races(pulled, aliased)) == bool(races(CATALOGUE[name], aliased))
