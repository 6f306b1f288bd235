"""Locks that no interrupt leaves held, interrupted before every instruction and after every call of C."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from collectives.base import exclusion
from collectives.base.exclusion import attempted, exclusive, exclusively, give_back
from tests.support.interrupting import Interrupt, interrupted


class Counter:
    def __init__(self) -> None:
        self._lock: Any = threading.RLock()
        self.count = 0

    @exclusive
    def add(self, number: int, *, twice: bool = False) -> int:
        self.count += number
        return self.add(number) if twice else self.count


def nested(lock: Any) -> object:
    return exclusively(lock, exclusively, lock, exclusively, lock, len, "abc")


@pytest.mark.parametrize(
    "call",
    [
        lambda lock: exclusively(lock, len, "abc"),
        nested,
        lambda lock: attempted(lock, 0.0, len, "abc"),
        lambda lock: attempted(lock, 9.0, len, "abc"),
        lambda lock: exclusively(lock, attempted, lock, 0.0, len, "abc"),
    ],
    ids=["exclusively", "nested", "attempted", "waited for", "attempted within"],
)
def test_an_interrupt_at_any_instruction_leaves_the_lock_free(call: Callable[[Any], object]) -> None:
    for at in itertools.count(1):
        lock: Any = threading.RLock()
        if not interrupted(lambda: call(lock), at, [exclusion.__file__]):  # noqa: B023  # called at once
            break
        assert not lock._is_owned()
    assert at > 20


def test_an_interrupt_within_a_held_lock_leaves_it_held_until_its_end() -> None:
    lock: Any = threading.RLock()
    for at in itertools.count(1):
        with lock:
            if not interrupted(lambda: nested(lock), at, [exclusion.__file__]):
                break
            assert lock._is_owned()
        give_back(lock)  # what an interrupted call within has left goes with the outermost
        assert not lock._is_owned()


def test_what_the_function_raises_comes_out_and_the_lock_is_free() -> None:
    lock: Any = threading.RLock()
    for call in (lambda: exclusively(lock, int, "a"), lambda: attempted(lock, 0.0, int, "a")):
        with pytest.raises(ValueError, match="invalid literal"):
            call()
        assert not lock._is_owned()


def test_a_lock_that_another_thread_holds_is_not_taken() -> None:
    lock: Any = threading.RLock()
    held, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: exclusively(lock, lambda: (held.set(), done.wait(60))))
    thread.start()
    assert held.wait(60)
    assert attempted(lock, 0.0, len, "abc") is None and attempted(lock, 0.01, len, "abc") is None
    done.set()
    thread.join()
    assert attempted(lock, 0.0, len, "abc") == 3


def test_methods_exclude_each_other_and_may_call_themselves() -> None:
    counter = Counter()
    assert counter.add(2) == 2 and counter.add(3, twice=True) == 8
    threads = [threading.Thread(target=lambda: [counter.add(1) for _ in range(1000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.count == 4008 and not counter._lock._is_owned()
    with pytest.raises(Interrupt):
        counter.add(Interrupted())  # type: ignore[arg-type]
    assert not counter._lock._is_owned()


class Interrupted:
    def __radd__(self, other: int) -> int:
        raise Interrupt
