"""Waking a thread, and waiting for the network's thread, while signal handlers interrupt the thread that does it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from collectives.base.wake_up import WakeUp
from collectives.engine.callers import Callers
from collectives.engine.messages.transfers import Transfers
from collectives.transport.tcp.service import Service


class Interrupt(KeyboardInterrupt):
    pass


@pytest.fixture
def interrupted() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Calls a function over and over until an interrupt comes at some moment of it."""

    came = False

    def on_alarm(number: int, frame: object) -> None:
        nonlocal came
        came = True
        raise Interrupt

    def until_it_comes(function: Callable[[], object]) -> None:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 3e-4))
        while not came:  # Python drops what is raised within a destructor
            function()

    def call(function: Callable[[], object]) -> None:
        nonlocal came
        came = False
        with contextlib.suppress(Interrupt):
            until_it_comes(function)  # Python 3.13 has no handler for what a signal raises at the jump of a loop here

    before = signal.signal(signal.SIGALRM, on_alarm)
    yield call
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def elsewhere(function: Callable[[], object]) -> bool:
    """Whether a function returns in another thread."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(10)
    return not thread.is_alive()


def test_is_set_until_somebody_has_waited() -> None:
    wake_up = WakeUp()
    assert not wake_up.is_set() and not wake_up.wait(0)
    wake_up.set()
    wake_up.set()
    assert wake_up.is_set() and wake_up.wait() and not wake_up.is_set() and not wake_up.wait(0.001)


def test_wakes_a_thread_that_was_interrupted_itself(interrupted: Callable[[Callable[[], object]], None]) -> None:
    asleep, awake, ended = WakeUp(), WakeUp(), False

    def sleeper() -> None:
        while not ended:
            asleep.wait()
            awake.set()

    thread = threading.Thread(target=sleeper, daemon=True)
    thread.start()
    for _ in range(300):
        interrupted(asleep.set)
        interrupted(lambda: awake.wait(0))
        assert elsewhere(asleep.set)
        assert awake.wait(10)
    ended = True
    asleep.set()
    thread.join(10)
    assert not thread.is_alive()


def test_an_interrupted_follower_is_no_follower_any_more(
    interrupted: Callable[[Callable[[], object]], None],
) -> None:
    callers = Callers(ranks_are_threads=False)

    def follow() -> None:
        with callers.following() as stopped:
            callers.notify()
            assert stopped.wait(10)

    for _ in range(300):
        interrupted(follow)
        assert not callers.followers
        assert elsewhere(callers.notify)


def test_an_interrupted_start_of_the_thread_of_messages_is_made_up_for(
    interrupted: Callable[[Callable[[], object]], None],
) -> None:
    class Busy(Transfers):
        def __init__(self) -> None:
            self._rank, self._names, self._work, self._thread = 0, (0,), WakeUp(), None
            self.delivery: Any = SimpleNamespace(idle=lambda: False)
            self._engine: Any = SimpleNamespace(refusal=None)
            self.looks = threading.Semaphore(0)

        def look(self, deep: bool) -> None:
            self.looks.release()

    for _ in range(100):
        transfers, before = Busy(), threading.active_count()
        interrupted(transfers.in_background)
        transfers.in_background()
        assert transfers.looks.acquire(timeout=10)
        assert threading.active_count() == before + 1
        transfers._engine.refusal = RuntimeError
        transfers._work.set()
        assert transfers._thread is not None
        transfers._thread.join(10)
        assert not transfers._thread.is_alive()


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_interrupts_do_not_stop_the_thread_of_the_network(interrupted: Callable[[Callable[[], object]], None]) -> None:
    service = Service()
    try:
        for _ in range(300):
            interrupted(lambda: service.run(asyncio.sleep(0), 10))
        assert service.run(asyncio.sleep(0, "value"), 10) == "value"
        assert elsewhere(lambda: service.run(asyncio.sleep(0), 10))
    finally:
        service.close()
