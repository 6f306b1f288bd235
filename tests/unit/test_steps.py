"""Where the steps of a training begin, told by the operations that come again."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from collectives.tuning.steps import Steps

MODEL = [(f"layer {number}", 4_000 * (1 + number % 5)) for number in range(40)]
BROADCAST = [(f"parameter {number}", nbytes) for number, (_, nbytes) in enumerate(MODEL)]


def begins(
    training: Sequence[Sequence[tuple[str | int, int]]], before: Sequence[tuple[str | int, int]] = ()
) -> list[list[int]]:
    """For each step of a training of single operations: which of its operations are told to begin one."""
    steps = Steps()
    for operation in before:
        assert not steps.begins([operation])
    return [[at for at, operation in enumerate(step) if steps.begins([operation])] for step in training]


@pytest.mark.parametrize(
    "before", [[], BROADCAST, [("one", 1 << 30)]], ids=["at once", "after a broadcast", "after one large tensor"]
)
def test_named_gradients_in_one_order(before: list[tuple[str | int, int]]) -> None:
    assert begins([MODEL] * 30, before) == [[]] + [[0]] * 29


def test_named_gradients_in_any_order() -> None:
    drawn = random.Random(0)
    found = begins([drawn.sample(MODEL, len(MODEL)) for _ in range(60)], BROADCAST)
    assert found == [[]] + [[0]] * 59


def test_changing_sets_of_named_gradients() -> None:
    """Some layers are frozen, others come: a step in the mean has a step's operations."""
    drawn = random.Random(1)
    training = [drawn.sample(MODEL, 30) for _ in range(200)]
    found = begins(training, BROADCAST)
    assert 100 <= sum(map(len, found)) <= 250
    assert max(map(len, found)) <= 2


def test_other_tensors_in_a_second_phase() -> None:
    head = [(f"head {number}", 4_000) for number in range(5)]
    found = begins([MODEL] * 50 + [head] * 50)
    assert found[50] == [] and found[51:] == [[0]] * 49


def resnet() -> Iterator[tuple[int, int]]:
    """Unnamed: many tensors of a few shapes; a number stands for a shape."""
    yield 1, 37_632
    for stage in range(4):
        for _ in range(3 + stage):
            yield from (
                (10 + stage, 65_536 << stage),
                (20 + stage, 1_024),
                (20 + stage, 1_024),
                (30 + stage, 147_456 << stage),
            )
    yield 2, 8_192_000
    yield 3, 4_000


def test_unnamed_gradients_of_a_few_shapes() -> None:
    """Once it is known what is rare, one of 74 operations tells the step."""
    found = begins([list(resnet())] * 40, [(99, 1 << 20)])
    assert all(len(step) == 1 for step in found[4:]), found
    assert found[10:] == [found[10]] * 30


def test_one_unnamed_operation_a_step() -> None:
    assert begins([[(7, 1 << 20)]] * 20) == [[]] + [[0]] * 19


def test_pairs_alone() -> None:
    """Nothing is rare: then steps are pieces, of the same mixture again and again."""
    found = begins([[(7, 100), (7, 100), (8, 100), (8, 100)]] * 50)
    assert 50 <= sum(map(len, found)) <= 100


@pytest.mark.parametrize("known_by", ["loss", 5])
def test_what_is_small_or_seldom_tells_nothing(known_by: str | int) -> None:
    """A loss that is averaged twice in every step, and a large tensor that comes every 30 steps."""
    named = known_by == "loss"
    gradients: list[tuple[str | int, int]] = list(MODEL) if named else [(number, 40_000) for number in range(100, 140)]
    step = [(known_by, 4), *gradients, (known_by, 4)]
    seldom: tuple[str | int, int] = ("statistics" if named else 6, 1 << 20)
    found = begins([[*step, seldom] if number % 30 == 0 else step for number in range(300)])
    assert [len(each) for each in found[3:]] == [1] * 297


def test_batches_are_whole() -> None:
    steps = Steps()
    halves = [MODEL[:20], MODEL[20:]]
    assert [steps.begins(half) for half in halves * 5] == [False, False, *([True, False] * 4)]


def test_names_that_never_come_again() -> None:
    steps = Steps()
    found = [steps.begins([(f"tensor {number}", 8)]) for number in range(200_000)]
    assert sum(found) == 199 and not steps.repeats
    assert len(steps._counts) < 1 << 17
