"""Tensors and buckets whose ranks tell each other where they lie: mapped, published in a mapped result, or private, as
each rank has them, in any order of ranks; packed into windows, or reduced in place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.engine import buckets, located
from collectives.engine.buckets import Bucket, LocatedBucket
from collectives.engine.context import Context
from collectives.engine.located import LocatedTensor
from collectives.engine.negotiation import Request
from collectives.plan import builder, packing_binder
from collectives.plan.builder import Plans
from collectives.plan.executor import Executor
from collectives.plan.planner import Choice, Placement
from collectives.plan.program import Medium
from collectives.tensors.arena import MAPPED, arena
from collectives.transport.base import Array
from collectives.transport.group import Group
from tests.support.turns import INT, SEEDS, Turns, groups, numbers, triple

TOKEN = 5


@pytest.fixture(autouse=True)
def small_pieces_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are combined piece by piece, or gathered first."""
    monkeypatch.setattr(packing_binder, "_LARGE_PIECE", 64)


def double(block: Array, out: Array) -> None:
    np.multiply(block, 2, out=out)


class Rank:
    """One rank's context, and its own decisions."""

    def __init__(self, group: Group, seed: int, medium: Medium = Medium.WINDOW, reads_private: bool = False) -> None:
        self.rank, self.size, self.control = group.rank, group.size, group.control
        self.executor = Executor(group)
        self.plans = Plans(
            Placement(group.rank, group.size, (tuple(range(group.size)),), True, True, True), self.executor, ""
        )
        self.planner: Any = SimpleNamespace(epoch=0)
        entries: Any = None
        pool: Any = SimpleNamespace(empty=np.empty)
        self.context = Context(group, self.executor, entries, self.plans, self.planner, pool)
        self.shared, self.own = np.random.default_rng(seed), np.random.default_rng([seed, group.rank])
        """Decide what all ranks do alike, and what each does by itself."""
        self.inputs_mapped, self.results_mapped = self.own.choice((0.1, 0.9)), self.shared.choice((0.5, 1.0))
        """How likely an input and a result lie in the arena."""
        assert group.memory is not None and group.memory.mapped is not None
        view_of, unmapped = group.memory.mapped.view_of, self.own.random() < 0.2
        group.memory.mapped.view_of = lambda peer, word, dtype: (
            None if unmapped and peer == 0 else view_of(peer, word, dtype)
        )
        group.memory.reads_private = reads_private
        if medium is Medium.WINDOW and not unmapped and not reads_private:
            group.memory.fetch = group.memory.store = None  # neither is called

    def tensors(self, count: int, result: int) -> list[tuple[Array, Array]]:
        """Inputs with outputs, among which calls take turns; one is both."""

        def empty(size: int, mapped: float) -> Array:
            return (arena.empty if self.own.random() < mapped else np.empty)(size, INT)

        pairs = [(empty(count, self.inputs_mapped), empty(result, self.results_mapped)) for _ in range(2)]
        return [*pairs, (pairs[0][0],) * 2] if count == result else pairs

    def propose_in_vain(self, task: Any, handles: list[Any]) -> None:
        """Prepare, and find that the ranks disagree, perhaps."""
        if self.shared.random() < 0.2:
            assert not self.control.agree(TOKEN + self.rank, task.prepare_handles(handles))
            task.withdraw()

    def carry_out(self, task: Any, handles: list[Any]) -> None:
        """Prepare, enter, and run, as a batch does."""
        assert self.control.agree(TOKEN, task.prepare_handles(handles))
        self.executor.trace = (lambda *_: None) if self.own.random() < 0.2 else None
        task.run_handles(handles)
        self.executor.trace = None

    def attempt(self, task: Any, source: Array, out: Array) -> None:
        """Carry out a blocking call, which has no handle."""
        if task.attempt is None or task.epoch != self.planner.epoch:
            task.bind()
        if task.attempt is None:
            assert self.control.agree(TOKEN, task.prepare(source, out))
            task.run()
        elif not task.attempt(TOKEN, source, out):
            assert self.control._board.await_entries()
            task.run()


def located_tensor(
    rank: Rank, collective: str, algorithm: str, medium: Medium, count: int, warns: bool = False, scaled: bool = False
) -> LocatedTensor:
    """The task of an operation, whose plans for private and for mapped tensors change with the planner's epoch."""
    plans = [
        rank.plans.broadcast((count,), INT, 1, choice)
        if collective == "broadcast"
        else getattr(rank.plans, collective)((count, 1), INT, choice, np.add, triple)
        for block in (64, 1 << 20)
        for choice in (Choice(algorithm, medium, block, False), Choice(algorithm, Medium.MAPPED, block, False))
    ]
    entry: Any = SimpleNamespace(
        request=Request(collective),
        signature=TOKEN,
        dtype=INT,
        nbytes=8 * count,
        warns=warns,
        prescale=double if scaled else None,
        plan=lambda: plans[2 * (rank.planner.epoch % 2)],
        mapped_plan=lambda: plans[2 * (rank.planner.epoch % 2) + 1],
    )
    return LocatedTensor(rank.context, entry)


@settings(max_examples=150)
@given(
    st.integers(2, 4),
    st.sampled_from(["allreduce", "allreduce", "allreduce", "reducescatter", "broadcast"]),
    st.sampled_from([Medium.WINDOW, Medium.DIRECT]),
    st.sampled_from(["direct", "direct", "ring"]),
    st.sampled_from([False, False, True]),
    st.integers(1, 60),
    SEEDS,
)
def test_a_tensor_is_reduced_wherever_each_rank_has_it(
    size: int, collective: str, medium: Medium, algorithm: str, scaled: bool, count: int, seed: int
) -> None:
    turns, moves = Turns(size, seed), collective == "broadcast"
    if collective == "reducescatter":
        count += -count % size
    made, result = groups(turns, (range(size),)), count // size if collective == "reducescatter" else count

    def body(number: int) -> None:
        rank = Rank(made[number], seed, medium)
        task = located_tensor(rank, collective, algorithm, medium, count, seed % 2 == 0, scaled and not moves)
        tensors = rank.tensors(count, result)
        for call in range(8):
            rank.planner.epoch += rank.shared.random() < 0.1
            inputs = [numbers(count, call, peer) for peer in range(size)]
            total = inputs[1] if moves else np.sum(inputs, axis=0) * (6 if scaled else 3)
            wanted = total[number * result :][:result] if collective == "reducescatter" else total
            source, out = tensors[rank.own.integers(len(tensors))]
            source[:], out[:] = 0, 77
            source[:] = inputs[number]
            handles = [SimpleNamespace(source=source, out=out)]
            rank.propose_in_vain(task, handles)
            if rank.own.random() < 0.6:
                rank.attempt(task, source, out)
            else:
                rank.carry_out(task, handles)
            np.testing.assert_array_equal(out, wanted)
            if out is not source:
                np.testing.assert_array_equal(source, inputs[number])
            source[:], out[:] = -1, -2

    turns.run(body)


def test_places_are_looked_up_again_when_the_arena_has_other_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece has ended, and private memory lies at its addresses."""
    pieces = SimpleNamespace(ranges=("some",))
    monkeypatch.setattr(located, "arena", pieces)
    turns = Turns(2, 0)
    made = groups(turns, ((0, 1),))

    def body(number: int) -> None:
        rank, tensor = Rank(made[number], 0, Medium.DIRECT), arena.empty(50, INT)
        task, mapped = located_tensor(rank, "allreduce", "direct", Medium.DIRECT, 50), made[number].memory.mapped
        for call in range(3):
            tensor[:] = number + 1
            rank.attempt(task, tensor, tensor)
            assert (tensor == 9).all()
            assert all(word & MAPPED for word in rank.control.words_of(1 - number)) == (call < 2)
            if call == 1:
                mapped.word_of = lambda at, nbytes: at
                turns.exchange(number, None)
                pieces.ranges = ("others",)

    turns.run(body)


@settings(max_examples=150)
@given(
    st.integers(2, 4),
    st.lists(st.integers(1, 30), min_size=1, max_size=7),
    st.sampled_from(["direct", "ring", "one-shot"]),
    st.sampled_from([8, 64, 1 << 20]),
    st.booleans(),
    st.sampled_from([None, False, True, True]),
    SEEDS,
)
def test_a_bucket_is_reduced_wherever_each_rank_has_its_tensors(
    size: int, counts: list[int], algorithm: str, block: int, scaled: bool, reads: bool | None, seed: int
) -> None:
    """``reads``: whether the system allows direct reads, of ranks that tell where their tensors lie."""
    turns, locates = Turns(size, seed), reads is not None
    made = groups(turns, (range(size),))

    def body(number: int) -> None:
        rank = Rank(made[number], seed, reads_private=bool(reads))
        entries: list[Any] = [
            SimpleNamespace(
                signature=TOKEN,
                count=count,
                dtype=INT,
                nbytes=8 * count,
                kernel=np.add,
                finish=triple,
                warns=seed % 2 == 0,
                prescale=double if scaled and not locates else None,
            )
            for count in counts
        ]
        choice = Choice(algorithm, Medium.WINDOW, block, True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(builder, "MAPPED_BLOCK_BYTES", block)
            patch.setattr(builder, "DIRECT_BLOCK_BYTES", 2 * block)
            patch.setattr(buckets, "LARGE_TENSOR", 8 * 25)
            task = (LocatedBucket if locates else Bucket)(rank.context, entries, choice)
        tensors = [rank.tensors(count, count) for count in counts]
        for call in range(8):
            handles = []
            for place, pairs in enumerate(tensors):
                source, out = pairs[rank.own.integers(len(pairs))]
                out[:] = 77
                source[:] = numbers(counts[place], call, place, number)
                handles.append(SimpleNamespace(source=source, out=out))
            rank.propose_in_vain(task, handles)
            rank.carry_out(task, handles)
            for place, handle in enumerate(handles):
                inputs = [numbers(counts[place], call, place, peer) for peer in range(size)]
                wanted = np.sum(inputs, axis=0) * (6 if scaled and not locates else 3)
                np.testing.assert_array_equal(handle.out, wanted)
                if handle.out is not handle.source:
                    np.testing.assert_array_equal(handle.source, inputs[number])
                handle.source[:], handle.out[:] = -1, -2

    turns.run(body)
