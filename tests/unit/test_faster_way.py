"""Two ways to do the same: both are tried, the quicker one is taken, and both are tried again."""

from __future__ import annotations

from collectives.engine import faster_way
from collectives.engine.faster_way import FasterWay


def ways(race: FasterWay, calls: int, seconds: tuple[float, float]) -> list[bool]:
    """The ways of ``calls`` calls, which take so long by either."""
    chosen = []
    for _ in range(calls):
        chosen.append(race.choose())
        race.note(chosen[-1], seconds[chosen[-1]])
    return chosen


def test_the_quicker_way_is_taken_until_both_are_tried_again() -> None:
    race, trials, rest = FasterWay(), faster_way._TRIALS, faster_way._PERIOD - faster_way._TRIALS
    assert ways(race, trials, (2.0, 1.0)) == [False, True] * (trials // 2)
    assert ways(race, rest, (2.0, 9.0)) == [True] * rest
    assert ways(race, trials, (2.0, 3.0)) == [False, True] * (trials // 2)
    assert ways(race, rest, (2.0, 3.0)) == [False] * rest


def test_a_way_that_others_have_prevented_is_not_taken() -> None:
    race = FasterWay()
    for _ in range(faster_way._TRIALS):
        race.note(False, 1.0)
    assert race.choose() is False


def test_medians_count() -> None:
    race = FasterWay()
    for seconds in ((9.0, 2.0), (5.0, 8.0), (6.0, 7.0)):
        ways(race, 2, seconds)
    assert race.choose() is False
