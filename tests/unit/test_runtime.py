"""The default world: what an interrupt in the middle of leaving it does not undo, and that it is one rank's."""

from __future__ import annotations

import concurrent.futures
import threading
from datetime import timedelta
from typing import Any

import pytest

import collectives
from collectives.worlds import runtime


class InterruptedOnce:
    """A world in which another thread's call has to end first, and an interrupt ends that wait the first time."""

    shutdowns = 0

    def shutdown(self) -> None:
        self.shutdowns += 1
        if self.shutdowns == 1:
            raise KeyboardInterrupt


class Hooks:
    removed = False

    def remove(self) -> None:
        self.removed = True


def test_an_interrupted_shutdown_may_be_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then the exit is watched: the others may wait for this rank, whose end must end the job."""
    world: Any = InterruptedOnce()
    hooks: Any = Hooks()
    monkeypatch.setattr(runtime.default, "world", world)
    monkeypatch.setattr(runtime.default, "hooks", hooks)
    with pytest.raises(KeyboardInterrupt):
        collectives.shutdown()
    assert not hooks.removed and collectives.is_initialized()
    collectives.shutdown()
    assert hooks.removed and not collectives.is_initialized() and world.shutdowns == 2
    collectives.init()
    assert collectives.size() == 1
    collectives.shutdown()


class LonelyStore:
    """A store of which one process has a client, until it is closed."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.waits, self.closed = threading.Event(), threading.Event()

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value

    def get(self, key: str) -> Any:
        return self.values[key]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        if not all(key in self.values for key in keys):
            self.waits.set()
            closed = self.closed.wait(min(timeout.total_seconds(), 60))
            raise OSError("closed") if closed else TimeoutError


def test_a_second_rank_in_another_thread_is_refused_at_once() -> None:
    """As under Dask, with two threads a worker. The other thread is in init(), and waits for rank 1."""
    store = LonelyStore()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        try:
            first = pool.submit(collectives.init, store=store, rank=0, size=2)
            assert store.waits.wait(60)
            with pytest.raises(collectives.InvalidArgumentError, match="this process is already rank 0 of 2") as caught:
                collectives.init(store=store, rank=1, size=2)
            assert "rank=1, size=2" in str(caught.value) and "collectives.local_world" in str(caught.value)
        finally:
            store.closed.set()
        with pytest.raises(collectives.TransportError, match="closed"):
            first.result(60)
    collectives.init(store=store, rank=0, size=1)  # what has failed binds nobody
    try:
        collectives.init(store=store, rank=0, size=1)
        with pytest.raises(collectives.InvalidArgumentError, match="this process is already rank 0 of 1"):
            collectives.init(store=store, rank=1, size=2)
    finally:
        collectives.shutdown()
