"""What is to be called when an operation is done: once each, whoever completes it and whenever it is said."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from collectives.engine.handles import Handle


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads take turns as often as possible, so that a race has its chance."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def make(deliver: Any = lambda handle: 7, members: Any = ()) -> Handle:
    entry: Any = SimpleNamespace(request=SimpleNamespace(name="x", collective="allreduce"))
    return Handle(entry, None, None, deliver, members=members)


@pytest.mark.parametrize("failed", (False, True))
def test_called_once_when_it_is_done_and_at_once_afterwards(failed: bool) -> None:
    handle = make()
    told: list[Any] = []
    handle.add_done_callback(lambda handle: told.append((handle.done, handle.result, handle.error)))
    assert not told
    error = ValueError("gone")
    for _ in range(2):  # the second time changes nothing
        handle.fail(error) if failed else handle.finish()
    expected = (True, None, error) if failed else (True, 7, None)
    assert told == [expected]
    handle.add_done_callback(lambda handle: told.append((handle.done, handle.result, handle.error)))
    assert told == [expected, expected]


def test_an_error_of_the_result_is_told_too() -> None:
    handle = make(lambda handle: 1 / 0)
    told: list[Any] = []
    handle.add_done_callback(told.append)
    handle.finish()
    assert told == [handle] and isinstance(handle.error, ZeroDivisionError)


def test_a_group_is_told_of_when_all_members_are_done() -> None:
    members = [make(), make()]
    group, seen = make(lambda handle: [member.result for member in handle.members], members), []
    group.add_done_callback(lambda handle: seen.append([member.done for member in members]))
    group.finish()
    assert seen == [[True, True]] and group.result == [7, 7]


def test_what_a_callback_raises_is_logged_and_the_next_is_called(caplog: pytest.LogCaptureFixture) -> None:
    handle = make()
    told: list[Any] = []

    def fail(handle: Handle) -> None:
        raise ValueError("not the engine's affair")

    handle.add_done_callback(fail)
    handle.add_done_callback(told.append)
    with caplog.at_level(logging.ERROR, logger="collectives"):
        handle.finish()
    assert told == [handle] and handle.wait() == 7
    assert (
        "x: a callback on its completion raised an exception" in caplog.text
        and "not the engine's affair" in caplog.text
    )


def test_none_is_lost_and_none_called_twice(quick_switches: None) -> None:
    for _ in range(300):
        handle = make()
        told: list[int] = []
        start = threading.Barrier(3)

        def add(
            numbers: range, handle: Handle = handle, told: list[int] = told, start: threading.Barrier = start
        ) -> None:
            start.wait()
            for number in numbers:
                handle.add_done_callback(lambda _, number=number: told.append(number))  # type: ignore[misc]

        threads = [threading.Thread(target=add, args=(range(at, at + 5),)) for at in (0, 5)]
        for thread in threads:
            thread.start()
        start.wait()
        handle.finish()
        for thread in threads:
            thread.join()
        assert sorted(told) == list(range(10))
