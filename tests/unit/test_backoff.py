"""Waits that look: they yield, sleep longer and longer, look at peers now and then, and end."""

from __future__ import annotations

import itertools
import time

import pytest

from collectives.base.errors import CollectiveTimeoutError, RankFailedError
from collectives.transport import backoff


def test_a_wait_yields_before_it_checks_or_sleeps() -> None:
    looks, yields = itertools.count(1), itertools.count(1)
    checked: list[bool] = []
    backoff.wait(lambda: next(looks) > 5, checked.append, 20.0, lambda: "late", yields=10, pause=lambda: next(yields))
    assert next(yields) == 6 and not checked


def test_a_wait_checks_between_its_sleeps_and_looks_deeper_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sleeps = [0.0], []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", sleep)
    checked: list[bool] = []
    with pytest.raises(CollectiveTimeoutError, match="rank 3: waited"):
        backoff.wait(lambda: False, checked.append, 0.45, lambda: "rank 3: waited", yields=0)
    assert sleeps[0] == pytest.approx(20e-6) and sleeps == sorted(sleeps) and sleeps[-1] == backoff.LONGEST_NAP
    assert len(checked) == len(sleeps) + 1 and sum(checked) == 4


def test_what_a_check_raises_ends_the_wait() -> None:
    def check(deep: bool) -> None:
        raise RankFailedError("rank 1 has failed")

    with pytest.raises(RankFailedError, match="rank 1"):
        backoff.wait(lambda: False, check, 20.0, lambda: "late")


def test_a_sleep_ends_with_the_deadline_that_it_is_given() -> None:
    sleeps = backoff.Backoff(first_nap=20.0)
    assert not sleeps.look()
    sleeps.nap(until=sleeps.now + 0.01)
    sleeps.look()
    assert sleeps.now - sleeps.begun < 10


def test_polling_ends_with_its_condition_or_its_time() -> None:
    looks = itertools.count(1)
    assert backoff.poll(lambda: next(looks) == 3, 20.0)
    assert next(looks) == 4
    assert not backoff.poll(lambda: None, 0.01)
