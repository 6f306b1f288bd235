"""Calls that run apart from the thread that waits for them; no MPI is needed for that."""

from __future__ import annotations

import sys
import threading

import pytest

from collectives.base.errors import CollectiveTimeoutError, RankFailedError, TransportError
from collectives.transport.mpi import bounded_mpi
from collectives.transport.mpi.bounded_mpi import Waiter, barrier_then, forget


def gone() -> None:
    raise RankFailedError("rank 1 has failed")


def test_a_call_whose_wait_ends_early_is_made_once_and_goes_on() -> None:
    calls, gate = [], threading.Event()

    def slow() -> int:
        calls.append(threading.current_thread())
        assert gate.wait(20)
        return len(calls)

    waiting = Waiter(0, 20.0)
    waiting.check = gone
    with pytest.raises(RankFailedError, match="rank 1"):
        waiting.call(slow, "the others", "meeting")
    waiting.check = gate.set
    assert waiting.call(slow, "the others", "meeting") == 1
    assert waiting.call(slow, "the others", "meeting") == 1, "its result counts until it is in use"
    forget("meeting")
    assert waiting.call(slow, "the others", "meeting") == 2
    forget("meeting")
    assert threading.current_thread() not in calls and not bounded_mpi._under_way


def test_a_call_is_bounded_and_names_what_was_waited_for() -> None:
    gate = threading.Event()
    with pytest.raises(CollectiveTimeoutError, match=r"rank 3: waited 0.05 s for the others.*COLLECTIVES_TIMEOUT"):
        Waiter(3, 0.05).call(lambda: gate.wait(20), "the others")
    gate.set()


def test_an_error_of_mpi_is_the_failure_of_a_rank_if_one_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_mpi, "_FAILURE_SHOWS_WITHIN", 0.05)
    waiting = Waiter(3, 20.0)
    with pytest.raises(
        TransportError, match="rank 3: MPI failed while this rank waited for the others: division by zero"
    ):
        waiting.call(lambda: 1 / 0, "the others", "meeting")
    waiting.check = lambda: None if bounded_mpi._under_way else gone()  # not before the call has ended
    with pytest.raises(RankFailedError, match="rank 1"):
        waiting.call(lambda: 1 / 0, "the others", "meeting")
    assert not bounded_mpi._under_way


def test_a_function_runs_when_all_have_come() -> None:
    class Request:
        looks = 0

        def Test(self) -> bool:
            self.looks += 1
            return self.looks == 3

    request = Request()
    assert barrier_then(lambda: request, lambda: request.looks) == 3  # type: ignore[arg-type,return-value]


def test_a_barrier_that_a_rank_never_enters_is_given_up() -> None:
    class Request:
        def Test(self) -> bool:
            return False

    with pytest.raises(CollectiveTimeoutError, match="not every rank"):
        barrier_then(Request, lambda: None, 0.01)  # type: ignore[arg-type]


def test_a_barrier_is_tested_often_between_naps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as Open MPI needs to look at a connection that is not established yet, and soon again."""
    naps: list[float] = []

    class Request:
        tests = 0

        def Test(self) -> bool:
            self.tests += 1
            return len(naps) == 300

    clock = iter(range(1000))
    monkeypatch.setattr(bounded_mpi.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(bounded_mpi.time, "sleep", naps.append)
    request = Request()
    assert barrier_then(lambda: request, lambda: request.tests) == 8 * 300 + 1  # type: ignore[arg-type,return-value]
    assert max(naps) <= 0.01


def test_an_interrupt_anywhere_in_a_wait_leaves_its_call_to_finish() -> None:
    """An interrupt comes between any two steps of Python, also while a lock of the standard library is taken."""

    class Interrupt(KeyboardInterrupt):
        pass

    for step in range(1, 150):
        gate, left = threading.Event(), step
        waiting = Waiter(0, 5.0)

        def interrupt(*_: object) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                raise Interrupt
            return interrupt

        before = sys.gettrace()
        sys.settrace(interrupt)  # type: ignore[arg-type]
        try:
            waiting.call(lambda gate=gate: gate.wait(20), "the others", "meeting")
        except Interrupt:
            pass
        finally:
            sys.settrace(before)
        gate.set()
        waiting.call(lambda: True, "the others", "meeting")
        forget("meeting")
