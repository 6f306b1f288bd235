"""`ElasticSampler`: every index once, while ranks come and go."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from collectives.elastic import ElasticSampler
from collectives.elastic import sampler as module


def samplers(size: int, count: int, shuffle: bool = False, seed: int = 0) -> list[ElasticSampler]:
    """One for each rank."""
    result = []
    for rank in range(size):
        with at(rank, size):
            result.append(ElasticSampler(range(count), shuffle, seed))
    return result


def at(rank: int, size: int):  # type: ignore[no-untyped-def]
    return patch.multiple(module.runtime, rank=lambda: rank, size=lambda: size)


@given(
    st.integers(0, 200),
    st.booleans(),
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6), st.integers(1, 7)), min_size=1, max_size=5),
)
def test_every_index_once_over_shrinks_and_grows(
    count: int, shuffle: bool, epoch: int, worlds: list[tuple[int, int, int]]
) -> None:
    """By world: its size, how many batches it processes, and of what size; the last one processes the rest."""
    seen: list[int] = []
    committed = {"epoch": epoch, "processed_num": 0}
    for number, (size, batches, batch_size) in enumerate(worlds):
        lasts = number == len(worlds) - 1
        ranks = samplers(size, count, shuffle)
        for rank, sampler in enumerate(ranks):
            with at(rank, size):
                sampler.load_state_dict(committed)
            own = list(sampler)
            assert len(own) == len(sampler) == ranks[0].num_samples
            full = len(own) // batch_size
            done = -(-len(own) // batch_size) if lasts else min(batches, full)
            seen += own[: done * batch_size]
            for batch in range(done):
                sampler.record_batch(batch, batch_size)
        assert len({sampler.processed_num for sampler in ranks}) == 1
        committed = ranks[0].state_dict()
    counts = Counter(seen)
    assert set(counts) == set(range(count))
    assert sum(counts.values()) - count < sum(size for size, _, _ in worlds)  # what fills up the ranks' shares


def of_member(member: int, living: tuple[int, ...]) -> ExitStack:
    """What a sampler of a member sees whose newest step has combined the values of the living."""
    stack = ExitStack()
    stack.enter_context(patch.object(module.generations, "job", lambda: SimpleNamespace(member=member)))
    stack.enter_context(patch.object(module.retry, "contributors", lambda: living))
    return stack


@given(
    st.integers(0, 200),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), max_size=4),
)
def test_what_was_dealt_to_the_dead_is_dealt_again(
    count: int, batch_size: int, deaths: list[tuple[int, int, int]]
) -> None:
    """By death: how many batches come before it, who dies, and how many batches come before the next commit."""
    seen: list[int] = []
    committed: dict[str, Any] = {"epoch": 0, "processed_num": 0}
    living, dealt_twice = (0, 1, 2, 3, 4), 0
    for before, who, after in [*deaths, (200, 0, 0)]:
        samplers: dict[int, ElasticSampler] = {}
        for member in living:
            with of_member(member, living):
                samplers[member] = ElasticSampler(range(count), shuffle=False)
                samplers[member].load_state_dict(committed)
        dealt_twice += len(living)
        shares = {member: list(sampler) for member, sampler in samplers.items()}
        for batch in range(before + after):
            if batch == before:
                living = tuple(member for member in living if member != living[who % len(living)]) or living
            at = batch * batch_size
            for member in living:
                seen += shares[member][at : at + batch_size]
                with of_member(member, living):
                    samplers[member].record_batch(batch, batch_size)
        states = [samplers[member].state_dict() for member in living]
        committed = states[0]
        assert all(state == committed for state in states)
        assert committed["processed_num"] <= len(set(seen))
    counts = Counter(seen)
    assert set(counts) == set(range(count)) and sum(counts.values()) - count <= dealt_twice


@given(
    st.integers(0, 60),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.booleans()), min_size=1, max_size=4),
)
def test_what_the_dead_have_left_over_of_an_epoch_is_dealt_in_the_next_one(
    count: int, batch_size: int, epochs: list[tuple[int, int, bool]]
) -> None:
    """By epoch: how many batches come before a death, who dies, and whether a commit comes before the epoch's end."""
    seen: list[int] = []
    committed: dict[str, Any] = {"epoch": 0, "processed_num": 0}
    living, filled_up = (0, 1, 2, 3, 4), 0
    for epoch, (before, who, commits) in enumerate([*epochs, (99, 0, True)]):
        while True:
            samplers: dict[int, ElasticSampler] = {}
            for member in living:
                with of_member(member, living):
                    samplers[member] = ElasticSampler(range(count), shuffle=True)
                    samplers[member].load_state_dict(committed)
            filled_up += len(living)
            shares, dead = {member: list(sampler) for member, sampler in samplers.items()}, living
            for batch in range(-(-len(shares[living[0]]) // batch_size)):
                if batch == before:
                    living = tuple(member for member in living if member != living[who % len(living)]) or living
                    before = 99
                for member in living:
                    seen += shares[member][batch * batch_size :][:batch_size]
                    with of_member(member, living):
                        samplers[member].record_batch(batch, batch_size)
            if not commits or dead == living:
                break
            committed = samplers[living[0]].state_dict()
        for member in living:
            with of_member(member, living):
                samplers[member].set_epoch(epoch + 1)
        states = [samplers[member].state_dict() for member in living]
        committed = states[0]
        assert all(state == committed for state in states) and (not commits or "carried" not in committed)
    counts, number = Counter(seen), len(epochs) + 1
    assert all(counts[index] >= number for index in range(count))
    assert sum(counts.values()) - number * count <= filled_up


@given(st.integers(0, 40), st.integers(1, 6))
def test_ranks_get_equally_many_even_of_fewer_samples_than_ranks(count: int, size: int) -> None:
    shares = [list(sampler) for sampler in samplers(size, count)]
    assert {len(share) for share in shares} == {-(-count // size)}
    assert {index for share in shares for index in share} == set(range(count))


def test_an_epoch_has_an_order_of_its_own_that_all_ranks_know() -> None:
    (one,) = samplers(1, 50, shuffle=True, seed=3)
    orders = []
    for epoch in (0, 1, 0):
        with at(0, 1):
            one.set_epoch(epoch)
        orders.append(list(one))
    assert orders[0] == orders[2] != orders[1] and sorted(orders[1]) == list(range(50))
    pair = samplers(2, 50, shuffle=True, seed=3)
    assert [index for both in zip(*pair, strict=True) for index in both] == orders[0]


def test_the_next_epoch_begins_with_nothing_processed() -> None:
    sampler = samplers(3, 30)[1]
    with at(1, 3):
        sampler.record_batch(0, 4)
        assert sampler.state_dict() == {"epoch": 0, "processed_num": 12} and len(sampler) == 10
        sampler.reset()
        assert sampler.remaining_indices == list(range(12, 30)) and len(sampler) == 6
        sampler.set_epoch(1)
        assert sampler.state_dict() == {"epoch": 1, "processed_num": 0} and len(sampler) == 10
