"""Ranks that wait for each other are told so although their other threads might call something still."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import collectives
from collectives.base.errors import MismatchError, RecoverableError
from collectives.engine import callers, stall
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World


def until_told(world: World, told: list[BaseException]) -> None:
    try:
        world.allreduce(np.ones(2), name=f"of rank {world.rank}")
    except BaseException as error:
        told.append(error)


def in_a_join(worker: threading.Thread) -> None:
    worker.join()


def in_a_queue(worker: threading.Thread) -> None:
    results: queue.Queue[None] = queue.Queue()
    threading.Thread(target=lambda: (worker.join(), results.put(None))).start()
    results.get()


def in_a_pool(worker: threading.Thread) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(worker.join).result()


def asleep(worker: threading.Thread) -> None:
    while worker.is_alive():
        time.sleep(0.05)  # as a program does that looks for results now and then


@pytest.mark.slow
@pytest.mark.parametrize(("wait", "bound"), [(in_a_join, 20.0), (in_a_queue, 20.0), (in_a_pool, 20.0), (asleep, 1.5)])
def test_a_thread_that_has_called_and_does_nothing_hides_nobody(
    wait: Callable[[threading.Thread], None], bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers, "STUCK_AFTER", bound)

    def program(world: World) -> None:
        world.allreduce(np.ones(2))
        told: list[BaseException] = []
        worker = threading.Thread(target=until_told, args=(world, told))
        worker.start()
        wait(worker)
        assert len(told) == 1 and isinstance(told[0], MismatchError) and "every rank waits" in str(told[0]), told
        assert world.allreduce(np.float64(1), average=False) == world.size

    begun = time.monotonic()
    thread_groups.run(2, program, make_world=World)
    assert time.monotonic() - begun < 15


@pytest.mark.slow
def test_a_thread_that_computes_may_call_when_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "STUCK_AFTER", 0.5)

    def program(world: World) -> None:
        world.allreduce(np.ones(2))
        told: list[BaseException] = []
        worker = threading.Thread(target=until_told, args=(world, told))
        worker.start()
        used = time.thread_time()
        while time.thread_time() - used < 1.5:
            np.ones(1000).sum()
        for rank in range(world.size):
            if rank != world.rank:
                world.allreduce(np.ones(2), name=f"of rank {rank}")
        worker.join()
        assert not told

    thread_groups.run(2, program, make_world=World)


def test_a_thread_may_wait_for_one_that_computes_and_call_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "STUCK_AFTER", 0.5)

    def compute() -> None:
        used = time.thread_time()
        while time.thread_time() - used < 1.0:
            np.ones(1000).sum()

    def program(world: World) -> None:
        world._engine._callers.ranks_are_threads = False  # as where each rank is a process
        world.allreduce(np.ones(2))
        told: list[BaseException] = []
        worker = threading.Thread(target=until_told, args=(world, told))
        worker.start()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(compute).result()
        for rank in range(world.size):
            if rank != world.rank:
                world.allreduce(np.ones(2), name=f"of rank {rank}")
        worker.join()
        assert not told

    thread_groups.run(2, program, make_world=World)


def test_only_waits_without_a_bound_count_as_parked() -> None:
    over, begun = threading.Event(), threading.Barrier(5)

    def run(wait: Callable[[], object]) -> None:
        begun.wait()
        wait()

    sleeper = threading.Thread(target=over.wait)
    sleeper.start()
    waits: list[Callable[[], object]] = [over.wait, sleeper.join, lambda: over.wait(60), lambda: sleeper.join(60)]
    waiting = [threading.Thread(target=run, args=(wait,)) for wait in waits]
    for thread in waiting:
        thread.start()
    begun.wait()
    deadline = time.monotonic() + 10
    while stall.parked([sleeper, *waiting]) != {sleeper, *waiting[:2]}:
        assert time.monotonic() < deadline, stall.parked(waiting)
        time.sleep(0.001)  # they enter their waits in a moment
    over.set()
    for thread in waiting:
        thread.join()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="this system does not tell")
def test_the_processor_time_of_a_thread_grows_as_it_computes() -> None:
    before = stall.processor_seconds(threading.current_thread())
    begun = time.thread_time()
    while time.thread_time() - begun < 0.1:
        pass
    assert 0.05 < stall.processor_seconds(threading.current_thread()) - before < 0.5


def test_a_process_set_that_waits_while_its_other_rank_is_elsewhere_may_be_bounded() -> None:
    """As where ranks have changed, and a branch on the rank takes them apart."""

    def program(world: World) -> str:
        pair = collectives.add_process_set([0, 1])
        world.bound_waits_of_sets(0.2, "Ranks have changed.")
        try:
            collectives.allreduce(np.ones(2), name="x", process_set=pair if world.rank == 0 else None)
        except RecoverableError as error:
            world.fail(str(error))
            return str(error)
        return ""

    with collectives.local_world(3) as local:
        texts = local.run(program)
    assert "process set of ranks [0, 1]. Ranks have changed. [E45]" in texts[0] and "missing ranks: 1" in texts[0]
    assert all("[E45]" in text for text in texts[1:])
