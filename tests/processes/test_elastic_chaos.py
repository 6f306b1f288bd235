"""An elastic job whose ranks die: a part of what ``python -m benchmarks.chaos`` does, and what its judge refuses."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from benchmarks.chaos import judge
from benchmarks.chaos.deaths import COLUMNS, Death, Plan, draw
from benchmarks.chaos.job import Outcome
from benchmarks.chaos.run import run
from benchmarks.chaos.training import SIZES, after


def test_survivors_go_on_from_the_newest_commit() -> None:
    deaths = (
        Death("kill", "mapped", rank=0.9, delay=0.4),
        Death("exception", "commit", rank=0.0, delay=0.5),
        Death("_exit", "transfer", rank=0.0, delay=0.3, trigger=0.9),
    )
    outcome = run(Plan(0, 0, largest=4, tcp=False, deaths=deaths))
    assert not judge.problems(outcome), outcome.output
    assert outcome.code == 0 and len(outcome.strikes) == 3
    assert all(one.detect is not None for one in judge.times(outcome))


def test_retried_steps_are_not_lost() -> None:
    outcome = run(Plan(0, 0, largest=3, tcp=True, deaths=(Death("kill", "fused", rank=0.5, delay=0.5),), retry=True))
    assert not judge.problems(outcome), outcome.output
    steps = [record for records in outcome.records.values() for record in records if record["what"] == "step"]
    assert outcome.code == 0 and len({tuple(record["by"]) for record in steps}) > 1


@pytest.mark.parametrize("row", ["kill", "exception"])
def test_a_death_while_the_states_file_is_written(row: str) -> None:
    outcome = run(Plan(0, 0, largest=3, tcp=False, deaths=(Death(row, "save_to", rank=0.0, delay=0.5),)))
    assert not judge.problems(outcome), outcome.output
    assert outcome.code == 0 and outcome.file is not None


def test_the_owner_of_a_job_without_launcher_dies() -> None:
    deaths = (Death("kill", "blocking", rank=0.0, delay=0.5), Death("exception", "commit", rank=0.0, delay=0.5))
    outcome = run(Plan(0, 0, largest=4, tcp=False, deaths=deaths, by_hand=True))
    assert not judge.problems(outcome), outcome.output
    assert outcome.code == 0 and outcome.strikes[0].victim == 0
    assert "now serves the store" in outcome.output


def test_half_of_the_members_go_on_once_the_stopped_owner_is_killed() -> None:
    deaths = (Death("long stop", "forming", rank=0.0, delay=0.3, trigger=0.9),)
    outcome = run(Plan(0, 0, largest=4, tcp=True, deaths=deaths, by_hand=True))
    assert not judge.problems(outcome), outcome.output
    assert outcome.code == 0 and "is stopped, kill it" in outcome.output


@pytest.mark.parametrize("retry", [False, True])
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_gradients_of_a_frameworks_optimizer(retry: bool) -> None:
    deaths = (Death("kill", "gradients", rank=0.5, delay=0.5),)
    outcome = run(Plan(0, 0, largest=3, tcp=False, deaths=deaths, retry=retry, framework="torch"))
    assert not judge.problems(outcome), outcome.output
    assert outcome.code == 0 and all(one.detect is not None for one in judge.times(outcome))


def job_of_two() -> Outcome:
    """What a job has recorded of which member 1 dies after step 2, and member 0 finishes with step 4."""
    together = after(after([0] * len(SIZES), [0, 1], 0), [0, 1], 1)
    alone = after(after(together, [0], 2), [0], 3)

    def start(generation: int, members: list[int], member: int, step: int, numbers: list[int]) -> dict[str, Any]:
        rank = members.index(member)
        return dict(what="starts", generation=generation, members=members, rank=rank, step=step, numbers=numbers)

    events = [
        dict(event="generation", generation=1, members=[0, 1], hosts=["localhost"] * 2, born=[1, 1]),
        dict(event="generation", generation=2, members=[0], hosts=["localhost"], born=[1]),
    ]
    zeros = [0] * len(SIZES)
    saved, done = dict(what="saved", step=2, numbers=together), dict(what="done", step=4, numbers=alone)
    records = {
        0: [start(1, [0, 1], 0, 0, zeros), saved, start(2, [0], 0, 2, together), {**done, "what": "saved"}, done],
        1: [start(1, [0, 1], 1, 0, zeros), dict(saved)],
    }
    return Outcome(Plan(0, 0, 2, False, ()), 0, records, events)


def test_a_right_job_passes() -> None:
    assert judge.problems(job_of_two()) == []


@pytest.mark.parametrize(
    ("member", "record", "field", "value", "problem"),
    [
        (0, 2, "step", 0, "begins with step 0; a member has committed step 2"),
        (0, 2, "numbers", [1] * len(SIZES), "was committed"),
        (0, 3, "numbers", [1] * len(SIZES), "a run without failures has"),
        (1, 0, "numbers", [1] * len(SIZES), "generation 1 begins with different states"),
        (1, 0, "rank", 0, "generation 1 is"),
        (0, 1, "uneven", ["mapped"], "not a multiple of the pattern"),
    ],
)
def test_a_wrong_job_is_refused(member: int, record: int, field: str, value: Any, problem: str) -> None:
    outcome = job_of_two()
    outcome.records[member][record][field] = value
    with pytest.raises(AssertionError, match=problem):
        assert not judge.problems(outcome)


def test_a_seed_says_which_deaths_come() -> None:
    assert draw(3, 7, 5, ()) == draw(3, 7, 5, ()) != draw(3, 8, 5, ())
    columns = {death.column for number in range(30) for death in draw(number, 1, 10, ()).deaths}
    assert columns == {*COLUMNS}
