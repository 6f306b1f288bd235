"""The objects that the engine is composed of, each by itself: no ranks, no transports."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from collectives.base.config import Config
from collectives.base.errors import InvalidArgumentError, RankFailedError
from collectives.engine.callers import Callers
from collectives.engine.failure import FailureHandler
from collectives.engine.handles import Handle
from collectives.engine.negotiation import Request
from collectives.engine.overlaps import InFlight
from collectives.engine.progress import Progress
from collectives.engine.submissions import Submissions
from collectives.transport.tcp.service import Service


def operation(name: str | None = None, nbytes: int = 8, collective: str = "allreduce") -> Handle:
    request: Any = SimpleNamespace(request=Request(collective, name), name=name, nbytes=nbytes)
    return Handle(request, (), (), lambda handle: handle.name)


def submitted(*handles: Handle) -> Submissions:
    submissions = Submissions(3, InFlight())
    for handle in handles:
        assert submissions.add(handle) is None
    return submissions


# ---- submissions


def test_an_operation_waits_for_the_mark_of_a_refused_call_of_its_name() -> None:
    mark, operation_after = operation("a", collective="invalid"), operation("a")
    submissions = submitted(mark, operation_after)
    submissions.collect()
    assert submissions.fresh == [mark]
    submissions.complete([mark], InvalidArgumentError("refused"))
    submissions.collect()
    assert submissions.pending == {"a": operation_after}


# ---- callers


def test_the_threads_that_serve_the_network_submit_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    service = Service()
    service.run(service.loop.getaddrinfo("localhost", 1), 20)
    own = set(threading.enumerate()) - before | {threading.current_thread()}
    assert len(own) == 3
    monkeypatch.setattr(threading, "enumerate", lambda: list(own))
    callers = Callers(ranks_are_threads=False)
    callers.note()
    callers.awaited.append(operation("a"))
    try:
        assert callers.stuck()
    finally:
        service.close()


# ---- progress


class OneRank:
    """Stands in for the coordinator, for a rank that needs no other: completes what is submitted."""

    def __init__(self, submissions: Submissions) -> None:
        self.open: Any = None
        self.threshold = 1 << 20
        self.names = (0,)
        self.context = SimpleNamespace(timeline=None, group=SimpleNamespace(messages=None))
        self.joining = None
        self.control = SimpleNamespace(
            look=lambda spin=True: True,
            relax=lambda: None,
            check=lambda deep, upcoming: None,
            missing=list,
            fail=lambda text, in_call: None,
            acknowledged=lambda: True,
        )
        self._submissions = submissions

    def has_reason_to_propose(self) -> bool:
        return True

    def propose(self) -> bool:
        self._submissions.collect()
        self.open = ([], None)
        return True

    def carry_out(self) -> None:
        self._submissions.complete(list(self._submissions.pending.values()))
        self._submissions.fresh.clear()
        self.open = None

    def missing(self, handle: Handle) -> list[int]:
        return []

    def tell_if_stuck(self) -> None:
        """It is alone."""


def driven() -> tuple[Progress, Submissions]:
    submissions, callers = Submissions(0, InFlight()), Callers(ranks_are_threads=False)
    coordinator: Any = OneRank(submissions)
    failure = FailureHandler(coordinator, submissions, callers, 0)
    return Progress(coordinator, submissions, callers, failure, Config(cycle_time=1), 0), submissions


@pytest.mark.parametrize("held", [False, True])
def test_waits_go_on_after_an_interrupt_in_the_end_of_the_engine(monkeypatch: pytest.MonkeyPatch, held: bool) -> None:
    progress, submissions = driven()
    lock = progress.lock

    class Interrupted:
        def __getattr__(self, name: str) -> Any:
            return getattr(lock, name)

        def acquire(self, timeout: float) -> bool:
            if held:
                lock.acquire(timeout=timeout)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(progress, "lock", Interrupted())
        with progress.paused():
            raise AssertionError("it was interrupted before")
    handle = operation("a")
    submissions.add(handle)
    thread = threading.Thread(target=lambda: progress.wait(handle, 10), daemon=True)
    thread.start()
    thread.join(2)
    assert handle.done and not lock._is_owned()


def test_a_wait_that_is_interrupted_at_its_beginning_is_none_any_more() -> None:
    progress, submissions = driven()

    class Interrupted(list[Handle]):
        def append(self, handle: Handle) -> None:
            super().append(handle)
            raise KeyboardInterrupt

    progress._callers.awaited = awaited = Interrupted()
    handle = operation("a")
    submissions.add(handle)
    with pytest.raises(KeyboardInterrupt):
        progress.wait(handle)
    assert not awaited


def test_what_was_submitted_is_carried_out_although_the_engine_is_dropped() -> None:
    progress, submissions = driven()
    handle = operation("a")
    submissions.add(handle)
    end = weakref.ref(progress)
    progress.wake()
    del progress
    gc.collect()
    deadline = time.monotonic() + 10
    while not handle.done or end() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
        gc.collect()


def test_memory_of_a_call_without_handle_is_kept_if_its_signal_handler_shut_the_world_down() -> None:
    submissions, callers = Submissions(0, InFlight()), Callers(ranks_are_threads=False)
    coordinator: Any = OneRank(submissions)
    failure = FailureHandler(coordinator, submissions, callers, 0)
    submissions.refuse(lambda: RankFailedError("shut down"))
    tensor = np.zeros(4)
    reference = weakref.ref(tensor)
    failure.fail(RankFailedError("shut down"), (tensor, tensor))  # a peer may still write it
    del tensor
    gc.collect()
    assert reference() is not None
