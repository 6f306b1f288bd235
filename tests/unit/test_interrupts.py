"""Blocks in which signal handlers run at waits alone, with real signals."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

from collectives.base import interrupts
from collectives.base.interrupts import Interrupted, check, deferred

Handler = Callable[[int, FrameType | None], Any]


@pytest.fixture
def handle() -> Iterator[Callable[[int, Handler], None]]:
    """Sets a signal's handler until the test ends."""
    before: dict[int, Any] = {}

    def install(number: int, handler: Handler) -> None:
        before.setdefault(number, signal.getsignal(number))
        signal.signal(number, handler)

    yield install
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_handler_runs_at_the_next_check_and_not_before(handle: Callable[[int, Handler], None]) -> None:
    happened: list[object] = []
    handle(signal.SIGUSR1, lambda number, frame: happened.append(number))
    with deferred():
        signal.raise_signal(signal.SIGUSR1)
        happened.append("first")
        check()
        check()
        signal.raise_signal(signal.SIGUSR1)
        happened.append("second")
    assert happened == ["first", signal.SIGUSR1, "second", signal.SIGUSR1]


def test_one_exception_leaves_the_block_and_the_rest_waits_for_its_end(
    handle: Callable[[int, Handler], None],
) -> None:
    """Nothing interrupts the cleaning up, and no `suppress` takes a handler's exception for its own."""
    cleaned = []

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("late")

    handle(signal.SIGALRM, late)
    with pytest.raises(TimeoutError, match="late") as raised, deferred():
        try:
            with suppress(OSError):
                signal.raise_signal(signal.SIGALRM)
                check()
        except BaseException as error:
            assert isinstance(error, Interrupted) and "TimeoutError: late" in str(error)
            handle(signal.SIGALRM, lambda number, frame: cleaned.append("handled"))
            signal.raise_signal(signal.SIGALRM)
            raise
    assert type(raised.value) is TimeoutError and cleaned == ["handled"]


def test_a_keyboard_interrupt_comes_out_as_it_is() -> None:
    with pytest.raises(KeyboardInterrupt), deferred():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        with suppress(Exception):
            check()
        raise AssertionError("the check has not raised")


def test_handlers_are_restored_unless_a_handler_has_replaced_them(handle: Callable[[int, Handler], None]) -> None:
    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    handle(signal.SIGUSR1, first)
    handle(signal.SIGUSR2, first)
    with deferred():
        assert signal.getsignal(signal.SIGUSR2) is not first
        with deferred():
            signal.raise_signal(signal.SIGUSR1)
            check()
            assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGUSR2) is not first
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGUSR2) is first


def test_a_handler_that_could_not_be_restored_hands_on(handle: Callable[[int, Handler], None]) -> None:
    happened: list[int] = []
    handle(signal.SIGUSR2, lambda number, frame: happened.append(number))

    with deferred():
        signal.raise_signal(signal.SIGUSR2)
        wrapper = signal.getsignal(signal.SIGUSR2)
    assert happened == [signal.SIGUSR2]
    assert callable(wrapper)
    wrapper(signal.SIGUSR2, None)
    assert happened == [signal.SIGUSR2] * 2


def test_a_lock_that_another_thread_holds_is_waited_for_until_an_interrupt() -> None:
    lock = threading.Lock()
    assert not lock.locked() and interrupts.acquire(lock) and not interrupts.acquire(lock, 0.01)
    with pytest.raises(KeyboardInterrupt), deferred():
        signal.raise_signal(signal.SIGINT)
        interrupts.acquire(lock)


def test_other_threads_defer_nothing_and_run_no_handler(handle: Callable[[int, Handler], None]) -> None:
    happened: list[str] = []
    handle(signal.SIGUSR1, lambda number, frame: happened.append(threading.current_thread().name))

    def elsewhere() -> None:
        with deferred():
            check()

    with deferred():
        signal.raise_signal(signal.SIGUSR1)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert not happened
    assert happened == [threading.main_thread().name]
