"""Scaling: what is run, with which command, in which order; and what cannot be meant."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scaling_plan import Work, cases, doubts, fill, order

TRAIN = ("python", "train.py", "--batch-size", "{batch}")


def test_strong_divides_the_work() -> None:
    plan = cases("strong", TRAIN, (1, 2, 4), Work(total=64))
    assert [(case.ranks, case.work, case.command[-1]) for case in plan] == [(1, 64, "64"), (2, 64, "32"), (4, 64, "16")]


def test_weak_multiplies_it() -> None:
    plan = cases("weak", ("{per_rank}", "{total}", "{ranks}"), (1, 3), Work(batch=8))
    assert [(case.work, case.command) for case in plan] == [(8, ("8", "8", "1")), (24, ("8", "24", "3"))]


def test_a_sweep_goes_over_its_values_at_each_number_of_ranks() -> None:
    plan = cases(
        "sweep",
        ("x", "--layers={value}", "{batch}"),
        (1, 2),
        Work(batch=4),
        [("3", None), ("5", None)],
        gradients=(10, 20),
    )
    assert [(case.value, case.ranks, case.work, case.gradients) for case in plan] == [
        ("3", 1, 4, 10),
        ("3", 2, 8, 10),
        ("5", 1, 4, 20),
        ("5", 2, 8, 20),
    ]
    assert plan[-1].command == ("x", "--layers=5", "4")
    assert plan[-1].label == "5, 2 ranks" and plan[0].label == "3, 1 rank"


def test_a_sweeps_value_may_be_the_batch_and_have_its_own_ranks() -> None:
    plan = cases("sweep", ("{value}",), (2,), Work(batch_is_value=True), [("8", 1), ("16", None)])
    assert [(case.ranks, case.work) for case in plan] == [(1, 8), (2, 32)]


def test_without_the_amount_of_work_there_are_throughputs_still() -> None:
    assert [case.work for case in cases("weak", ("train",), (1, 2), Work())] == [None, None]


@pytest.mark.parametrize(
    ("mode", "command", "work", "values", "gradients", "said"),
    [
        ("strong", (), Work(total=4), (), (), "no command: put it behind --"),
        ("strong", TRAIN, Work(), (), (), r"{batch}: give --total"),
        ("weak", TRAIN, Work(), (), (), r"{batch}: give --batch"),
        ("strong", TRAIN, Work(batch=4), (), (), "argument --batch: strong"),
        ("weak", TRAIN, Work(total=4), (), (), "argument --total: weak"),
        ("weak", ("{value}",), Work(batch=4), (), (), r"{value}, which only a sweep has"),
        ("weak", TRAIN, Work(batch=4), [("1", None)], (), "argument --values: weak"),
        ("sweep", ("{value}",), Work(), (), (), "argument --values: a sweep needs"),
        ("sweep", TRAIN, Work(batch=4), [("1", None)], (), r"no {value}"),
        ("sweep", ("{value}",), Work(4, 4), [("1", None)], (), "--total and --batch"),
        ("sweep", ("{value}",), Work(4, None, True), [("1", None)], (), "--total and --batch"),
        ("sweep", ("{value}",), Work(batch_is_value=True), [("wide", None)], (), "argument --batch value"),
        (
            "sweep",
            ("{value}",),
            Work(),
            [("1", None), ("2", None), ("3", None)],
            (1, 2),
            "one for each of 3 values, got 2",
        ),
        ("weak", ("x",), Work(), (), (1, 2), "--gradient-bytes"),
    ],
)
def test_what_cannot_be_meant(
    mode: str, command: tuple[str, ...], work: Work, values: list, gradients: tuple[int, ...], said: str
) -> None:
    with pytest.raises(ValueError, match=said.replace("{", r"\{").replace("}", r"\}")):
        cases(mode, command, (1, 2), work, values, gradients)


def test_work_that_cannot_be_divided_is_refused_with_what_can() -> None:
    with pytest.raises(ValueError, match=r"100 items cannot be divided evenly among 3 or 8 ranks; 96 and 120 can"):
        cases("strong", TRAIN, (1, 2, 3, 8), Work(total=100))
    with pytest.raises(ValueError, match=r"among 4 ranks; 4 can"):
        cases("strong", TRAIN, (4,), Work(total=3))
    # The program divides by itself.
    assert len(cases("strong", ("{total}",), (1, 3), Work(total=100))) == 2


def test_doubts() -> None:
    assert doubts("strong", TRAIN) == []
    assert "weak scaling" in doubts("strong", ("train",))[0]
    assert doubts("weak", ("train",)) == []
    assert doubts("weak", ("awk", "{print} {bacth} ${HOME}"))[0].startswith(
        "{print} is passed on as it is; the placeholders are {ranks}"
    )
    assert len(doubts("weak", ("awk", "{print} {bacth} ${HOME}"))) == 2


@given(st.lists(st.text()), st.integers(1, 9))
def test_filling_leaves_everything_else_alone(words: list[str], ranks: int) -> None:
    marked = [f"{word}{{ranks}}" for word in words if "{" not in word and "}" not in word]
    assert fill(marked, {"ranks": ranks}) == tuple(f"{word[: -len('{ranks}')]}{ranks}" for word in marked)
    assert fill(['{"a": 1}', "{unknown}", "${HOME}"], {"ranks": ranks}) == ('{"a": 1}', "{unknown}", "${HOME}")


@given(st.integers(1, 12), st.integers(1, 12))
def test_configurations_take_turns(count: int, repeats: int) -> None:
    rounds = order(count, repeats)
    assert len(rounds) == repeats
    assert all(sorted(indices) == list(range(count)) for indices in rounds)
    # In as many repeats as there are configurations, each is once in each place.
    if repeats == count:
        assert all(set(Counter(place).values()) == {1} for place in zip(*rounds, strict=True))


@given(st.integers(1, 64), st.integers(1, 64))
def test_division_loses_nothing(each: int, ranks: int) -> None:
    assert Work(total=each * ranks).of(ranks, None) == (each * ranks, each) == Work(batch=each).of(ranks, None)
