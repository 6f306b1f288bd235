"""Coordinators of several ranks, in any order: what all have submitted is carried out once, in one order; what differs,
or is awaited in vain, fails on every rank. No tensors, no tasks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.base.config import Config
from collectives.base.errors import MismatchError, OutOfMemoryError, TransportError
from collectives.engine import coordinator as module
from collectives.engine.context import Statistics
from collectives.engine.coordinator import Coordinator
from collectives.engine.handles import Handle
from collectives.engine.negotiation import OUT_OF_MEMORY, Request
from collectives.engine.overlaps import InFlight
from collectives.engine.submissions import Submissions
from collectives.transport.base import Control
from tests.support.turns import SEEDS, Turns, groups

NAMES = (3, 5, 8, 9)
"""The ranks' numbers in messages."""


def operation(name: str | None, shape: int = 4, members: int = 0, **more: Any) -> Handle:
    request = Request("allreduce", name, "float32", (shape,), **more)
    entry: Any = SimpleNamespace(
        last_step=-1,
        request=request,
        name=name,
        nbytes=4 * shape,
        signature=request.signature(),
        binding=None,
        step=None,
    )
    return Handle(entry, (), (), lambda handle: handle.key, members=[operation(None) for _ in range(members)])


class FakeBatch:
    """Stands in for `Batch`: notes what is carried out."""

    def __init__(self, context: Any, entries: Sequence[Any], threshold: int, chain: int) -> None:
        self.context, self.entries, self.chain = context, entries, chain
        self.generation = -1
        self.tasks: list[Any] = []

    def prepare(self, handles: Sequence[Handle]) -> tuple[int, ...]:
        if self.context.refusals:
            self.context.refusals -= 1
            raise OutOfMemoryError("no device memory")
        self.context.prepared += 1
        return ()

    def withdraw(self) -> None:
        self.context.prepared -= 1

    def run(self, handles: Sequence[Handle]) -> None:
        assert [handle.entry for handle in handles] == self.entries
        self.context.prepared -= 1
        self.context.carried_out += [handle.key for handle in handles]


class FakeTask:
    """Stands in for the task of a blocking call, which enters the round and carries out its operation at once."""

    epoch = generation = -1
    attempt = None

    def __init__(self, context: Any, handle: Handle) -> None:
        self.context, self.handle, self.entry = context, handle, handle.entry

    def bind(self) -> None:
        self.epoch = 0
        self.attempt = self._attempt

    def _attempt(self, token: int, source: Any, out: Any) -> bool | None:
        same: bool | None = self.context.control.enter_and_look(token)
        if same:
            self.context.carried_out.append(self.handle.key)
        else:
            self.context.prepared += 1
        return same


class Rank:
    """A coordinator and what it needs, without threads and tasks."""

    def __init__(self, rank: int, turns: Turns, control: Control, **settings: Any) -> None:
        self.turns, self.control, self.stuck, size = turns, control, False, turns.size
        self.rounds = 0
        self.context: Any = SimpleNamespace(
            control=control,
            rank=rank,
            size=size,
            statistics=Statistics(),
            planner=SimpleNamespace(epoch=0),
            timeline=None,
            joined=False,
            carried_out=[],
            prepared=0,
            refusals=0,
            unmapped=0,
        )
        self.context.make_room = self.make_room
        self.callers: Any = SimpleNamespace(
            stuck=lambda: self.stuck, made_progress=lambda: None, awaited=[], followers=[]
        )
        self.submissions = Submissions(NAMES[rank], InFlight())
        self.coordinator = Coordinator(
            self.context,
            Config(**settings),
            NAMES[:size],
            lambda request: operation(request.name, request.shape[0]),
            self.submissions,
            self.callers,
        )

    def make_room(self) -> None:
        self.context.unmapped += 1

    def submit(self, *handles: Handle) -> None:
        for handle in handles:
            assert self.submissions.add(handle) is None

    def round(self) -> bool:
        """Enter a round, if there is a reason to, and carry out or compare. Returns whether it was entered."""
        coordinator, control = self.coordinator, self.control
        self.rounds += 1
        assert self.rounds < 1000, "the ranks never agree"
        if not coordinator.propose():
            return False
        if coordinator.open is None:
            assert self.context.prepared == 0
            return True  # carried out already
        if control._board.await_entries():
            coordinator.carry_out()
        else:
            coordinator.compare()
        assert coordinator.open is None and self.context.prepared == 0
        return True

    def is_idle(self) -> bool:
        return not self.submissions.has_work()

    def until(self, done: Callable[[], bool]) -> None:
        """Enter rounds until ``done()``, waiting for other ranks where there is no reason to."""
        while not done():
            if not self.round():
                self.turns.until(self.context.rank, self.coordinator.has_reason_to_propose)


@pytest.fixture(autouse=True)
def no_tasks_and_no_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every look at the clock takes longer than the longest pause."""
    ticks = itertools.count()
    monkeypatch.setattr(module, "Batch", FakeBatch)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(ticks) * 1e-2))
    yield


def run(size: int, seed: int, body: Callable[[Rank, Turns], Any], **settings: Any) -> list[Any]:
    turns = Turns(size, seed)
    made = groups(turns, (range(size),))
    return turns.run(lambda rank: body(Rank(rank, turns, made[rank].control, **settings), turns))


Step = tuple[frozenset[str], int]
"""The names that all ranks submit, in orders of their own, and the number of unnamed operations between them."""


@st.composite
def programs(draw: st.DrawFn) -> tuple[int, list[Step], set[str]]:
    """The number of ranks, the steps, some of which come again, and the names that one rank submits differently."""
    names = st.frozensets(st.sampled_from("abcdefgh"), max_size=5)
    kinds = draw(st.lists(st.tuples(names, st.integers(0, 3)).filter(any), min_size=1, max_size=3))
    odd = draw(st.sets(st.sampled_from("abcdefgh"), max_size=2))
    return draw(st.integers(2, 4)), draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=5)), odd


def operations(step: Step, differs: set[str], random: Random) -> list[Handle]:
    """The operations of one rank's step: the unnamed ones, which are matched by their order, differ in shape."""
    names, count = step
    named = [operation(name, 5 if name in differs else 4, members=2 * (name == "h")) for name in sorted(names)]
    random.shuffle(named)
    unnamed = [operation(None, 10 + place) for place in range(count)]
    places = [named] * len(named) + [unnamed] * len(unnamed)
    random.shuffle(places)
    return [handles.pop(0) for handles in places]


@settings(max_examples=200)
@given(programs(), st.sampled_from([0, 1, 3, 64]), st.sampled_from([1, 40, 1 << 20]), SEEDS)
def test_what_all_submit_is_carried_out_once_and_in_one_order_on_every_rank(
    program: tuple[int, list[Step], set[str]], capacity: int, threshold: int, seed: int
) -> None:
    size, steps, odd = program
    log: list[list[Any]] = [[] for _ in range(size)]

    def body(rank: Rank, turns: Turns) -> None:
        number = rank.context.rank
        random = Random(f"{seed} {number}")
        joining = operation("join")
        joining.deliver = lambda handle: handle.keep
        lists = [operations(each, odd if number == at % size else set(), random) for at, each in enumerate(steps)]
        lists.append([operation(f"only some {place}") for place in range(number)])
        for step, handles in enumerate(lists):
            for handle in handles:
                if not handle.members and random.random() < 0.5:
                    handle.entry.step = FakeTask(rank.context, handle)
            waiting = list(handles)
            while waiting or not rank.is_idle():
                rank.submit(*[waiting.pop(0) for _ in range(min(len(waiting), random.randint(0, 3)))])
                if not rank.round() and not waiting:
                    turns.until(number, rank.coordinator.has_reason_to_propose)
            for handle in handles:
                refused = handle.entry.name in odd
                assert isinstance(handle.error, MismatchError) if refused else handle.result == handle.key
                if refused:
                    assert f"rank {NAMES[step % size]}: allreduce(" in str(handle.error)
                    assert "shape=(5,)" in str(handle.error) and "shape=(4,)" in str(handle.error)
            log[number].append(rank.submissions.unnamed)
        rank.coordinator.begin_join(joining)
        rank.until(lambda: joining.done)
        assert joining.result == NAMES[size - 1]  # the last one to join
        log[number].append(list(rank.context.carried_out))
        assert not rank.submissions.pending and not rank.coordinator.ledger.news

    run(size, seed, body, cache_capacity=capacity, fusion_threshold=threshold)
    for line in log[1:]:
        assert line == log[0]


def test_a_step_that_comes_again_is_told_by_bits_and_by_one_word() -> None:
    def body(rank: Rank, turns: Turns) -> list[Any]:
        statistics, counts = rank.context.statistics, []
        for step in range(4):
            names = "abcd" if rank.context.rank or step == 3 else "dbca"
            handles = [operation(name) for name in names]
            rank.submit(*handles)
            rank.until(rank.is_idle)
            counts.append((statistics.compared, statistics.exchanged))
            assert rank.context.carried_out[-4:] == list("abcd" if step == 3 else "dbca")
        assert len(rank.coordinator._batches) == 2
        return counts

    # The first step is told in full, in the order of rank 0; the cache is in that order. The last one is unanimous.
    for counts in run(2, 1, body):
        assert counts == [(1, 1), (2, 1), (3, 1), (3, 1)]


def test_caches_stay_alike_though_a_rank_has_dropped_the_tasks_of_a_list_that_they_have_no_room_for() -> None:
    def body(rank: Rank, turns: Turns) -> list[Any]:
        coordinator, handles = rank.coordinator, [operation(name) for name in "abc"]
        for _ in range(4):
            if rank.context.rank:
                coordinator.forget_batches()
            rank.submit(*[operation(name) for name in "abc"])
            rank.until(rank.is_idle)
        return [coordinator.ledger.position(handle.entry.name, handle.entry.signature) for handle in handles]

    first, second = run(2, 7, body, cache_capacity=2)
    assert first == second and sorted(first, key=str) == [0, 1, None]


def test_tokens_differ_by_order_operations_and_the_number_of_the_first_unnamed_one() -> None:
    tokens: list[int] = []

    def body(rank: Rank, turns: Turns) -> None:
        coordinator = rank.coordinator
        rank.control.enter = lambda token, words=(): tokens.append(token)
        for names in ("ab", "ba", "a", "aa", ["a", None], ["a", None], [None, "a"], [None]):
            rank.submit(*[operation(name) for name in dict.fromkeys(names)])
            assert coordinator.propose() and coordinator.open is not None
            coordinator.carry_out()
        rank.coordinator.enter_alone(operation("a"))
        assert coordinator.open is not None and coordinator.open[0] == [rank.submissions.pending["a"]]

    run(1, 0, body)
    assert len(set(tokens)) == len(tokens) - 1 and tokens[2] == tokens[3]
    assert all(0 <= token < 1 << 47 for token in tokens)


def test_a_list_ends_at_the_threshold_and_the_next_one_begins_there() -> None:
    def body(rank: Rank, turns: Turns) -> list[int]:
        rank.submit(*[operation(name, shape=25) for name in "abcde"])
        lengths = []
        while rank.round():
            lengths.append(len(rank.context.carried_out))
        return lengths

    assert run(1, 0, body, fusion_threshold=200) == [[2, 4, 5]]


def test_a_rank_that_lacks_memory_has_all_unmap_before_it_fails() -> None:
    def body(rank: Rank, turns: Turns) -> list[Any]:
        entered: list[int] = []
        enter, context = rank.control.enter, rank.context
        rank.control.enter = lambda token, words=(): (entered.append(token), enter(token, words))
        handles, last = [operation("a"), operation("b")], operation("c")
        context.refusals = context.rank
        rank.submit(*handles)
        rank.until(rank.is_idle)
        assert context.unmapped == 1 and context.carried_out == ["a", "b"]
        assert (entered[0] == OUT_OF_MEMORY) == (context.rank == 1)
        context.refusals = 1  # on all ranks, which enter the round alike
        rank.submit(operation("a"))
        rank.until(rank.is_idle)
        assert context.unmapped == 2 and context.carried_out == ["a", "b", "a"]
        context.refusals = 2 * context.rank
        rank.submit(last)
        assert rank.round() and context.unmapped == 3 and not last.done
        if context.rank:
            with pytest.raises(OutOfMemoryError):
                rank.round()
        return entered

    run(2, 2, body)


def test_ranks_that_wait_for_each_other_fail_by_name_and_go_on_with_equal_numbers() -> None:
    def body(rank: Rank, turns: Turns) -> tuple[str, list[Any]]:
        number, coordinator, statistics = rank.context.rank, rank.coordinator, rank.context.statistics
        if number == 2:
            coordinator.begin_join(operation("join"))
            alone = after = None
            rank.round()
        else:
            alone, after = operation("its own" if number else None), operation(None)
            rank.submit(alone)
            rank.callers.awaited.append(alone)
            assert rank.round() and not coordinator.has_reason_to_propose()
            assert coordinator.missing(alone) == [NAMES[1 - number]]
        turns.exchange(number, None)
        rank.stuck = alone is not None
        coordinator.tell_if_stuck()
        rank.until(lambda: statistics.compared == 2)
        assert coordinator.chosen == [] and (alone is None or isinstance(alone.error, MismatchError))
        rank.stuck = False
        if after is not None:
            rank.submit(after)
        rank.until(lambda: bool(rank.context.carried_out))
        return str(alone.error) if alone else "", rank.context.carried_out

    (first, done), (second, also_done), (_, joined) = run(3, 4, body)
    for rank, text in ((3, first), (5, second)):
        assert text.startswith(f"rank {rank}: ")
        assert "rank 3: waits for allreduce(dtype='float32', shape=(4,)) (not submitted by rank 5)" in text
        assert "rank 5: waits for allreduce(name='its own'" in text and "(not submitted by rank 3)" in text
    assert done == also_done == joined == [1]


def test_what_needs_every_rank_is_refused_once_one_has_joined() -> None:
    def body(rank: Rank, turns: Turns) -> None:
        number = rank.context.rank
        joining = operation("join")
        if number == 0:
            rank.coordinator.begin_join(joining)
        else:
            refused, carried_out = operation("rooted", root=0), operation(None)
            rank.submit(refused, carried_out)
            rank.until(rank.is_idle)
            assert "the root, rank 3, has called join()" in str(refused.error) and carried_out.error is None
            rank.coordinator.begin_join(joining)
        rank.until(lambda: joining.done)
        assert rank.submissions.unnamed == 1 and rank.context.carried_out == [0]
        assert rank.context.joined and not rank.coordinator.ledger.news
        rank.coordinator.end_join()
        assert not rank.context.joined

    run(2, 3, body)


def test_rounds_that_decide_nothing_are_further_and_further_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))

    def body(rank: Rank, turns: Turns) -> None:
        nonlocal now
        number, coordinator = rank.context.rank, rank.coordinator
        rank.submit(operation(f"of rank {number}"))
        assert rank.round()
        turns.exchange(number, None)
        for pause in (50e-6, 100e-6, 200e-6, 400e-6, 800e-6, 1.6e-3, 2e-3, 2e-3):
            if number:
                coordinator._compare_again = True
                assert coordinator.propose()
            turns.exchange(number, None)
            if not number:
                assert not coordinator.has_reason_to_propose()
                now += 0.9 * pause
                assert not coordinator.has_reason_to_propose()
                now += 0.2 * pause
                assert coordinator.has_reason_to_propose() and coordinator.propose()
            turns.exchange(number, None)
            assert not rank.control._board.await_entries()
            coordinator.compare()
            turns.exchange(number, None)
        assert rank.context.statistics.exchanged == 1  # each is told once

    run(2, 5, body)


def test_a_rank_that_compares_alone_is_an_error() -> None:
    def body(rank: Rank, turns: Turns) -> None:
        rank.submit(operation(f"of rank {rank.context.rank}"))
        assert rank.coordinator.propose()
        if rank.context.rank:
            assert not rank.control.agree(17, [0] * 17)
        else:
            assert not rank.control._board.await_entries()
            with pytest.raises(TransportError, match="rank 3: some ranks compare"):
                rank.coordinator.compare()

    run(2, 6, body)
