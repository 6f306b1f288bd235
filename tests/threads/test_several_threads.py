"""Several threads of a rank, ranks that have joined, and calls that only some ranks can make: nobody waits for ever."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collectives.base.config import Config
from collectives.base.errors import (
    ForkedProcessError,
    InvalidArgumentError,
    InvalidTypeError,
    MismatchError,
    NotInitializedError,
    RankFailedError,
)
from collectives.engine import timeline
from collectives.transport.group import Group
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World


def test_what_is_submitted_during_a_blocking_call_needs_nobody_to_wait_for_it() -> None:
    """The blocking call gives the lead back; the background thread, which could not have it, must be told."""

    def program(world: World) -> None:
        stop = threading.Event()

        def blocking() -> None:
            while not world.allreduce(np.float64(stop.is_set()), op=None, average=False, name="loop") >= world.size:
                pass

        thread = threading.Thread(target=blocking)
        thread.start()
        try:
            for number in range(40):
                handle = world.allreduce_async(np.full(10, 1.0), average=False, name=f"async {number}")
                deadline = time.monotonic() + 20
                while not world.poll(handle):
                    assert time.monotonic() < deadline, f"operation {number} was never carried out"
                    time.sleep(0)
                assert handle.wait()[0] == world.size
        finally:
            stop.set()
        thread.join(20)
        assert not thread.is_alive()

    thread_groups.run(2, program, make_world=lambda group: World(group, Config(cycle_time=0.1)))


def test_threads_that_wait_for_one_operation_get_its_one_result() -> None:
    def program(world: World) -> None:
        with ThreadPoolExecutor(4) as pool:
            for step in range(30):
                handle = world.allreduce_async(np.full(1000, float(world.rank + step)), average=False, name="shared")
                results = list(pool.map(world.synchronize, [handle] * 4, timeout=20))
                assert all(result is results[0] for result in results) and (results[0] == 2 * step + 1).all()

    thread_groups.run(2, program, make_world=World)


def test_threads_that_go_on_in_a_moment_do_not_count_as_stuck() -> None:
    def program(world: World) -> None:
        errors: list[BaseException] = []

        def calls(names: list[str]) -> None:
            try:
                for step in range(60):
                    for name in names:
                        result = world.allreduce(np.full(4, float(world.rank + step)), average=False, name=name)
                        assert result[0] == world.size * step + sum(range(world.size))
            except BaseException as error:
                errors.append(error)

        lists = [["a", "b"], ["c"]] if world.rank == 0 else [["a"], ["b"], ["c"]]
        workers = [threading.Thread(target=calls, args=(names,)) for names in lists]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        assert not errors, errors
        assert not any(worker.is_alive() for worker in workers)

    thread_groups.run(2, program, make_world=World)


@pytest.mark.slow
def test_a_rank_may_be_in_join_for_longer_than_the_timeout_while_others_go_on() -> None:
    def program(world: World) -> int:
        if world.rank == 0:
            end = time.monotonic() + 4.0
            while time.monotonic() < end:
                assert world.allreduce(np.ones(3), average=False)[0] == 1
        return world.join()

    assert thread_groups.run(2, program, make_world=lambda group: World(group, Config(timeout=1.5))) == [0, 0]


@pytest.mark.parametrize("what", ["add_process_set", "start_timeline", "tune"])
def test_what_needs_every_rank_is_refused_while_one_has_joined(what: str, tmp_path: Path) -> None:
    def program(world: World) -> None:
        if world.rank == 2:
            world.join()
            return
        act = {
            "add_process_set": lambda: world.add_process_set([0, 1]),
            "start_timeline": lambda: world.start_timeline(tmp_path / "trace.json"),
            "tune": lambda: world.tune(),
        }[what]
        with pytest.raises(MismatchError, match=r"rank 2 has called join\(\)"):
            act()
        np.testing.assert_array_equal(world.allreduce(np.ones(2), average=False), 2.0)
        world.join()

    thread_groups.run(3, program, make_world=World)


def test_removing_a_process_set_leaves_the_timeline_alone(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def program(world: World) -> None:
        world.start_timeline(path)
        child = world.add_process_set([0])
        if child is not None:
            child.allreduce(np.ones(2), name="in the set")
        world.remove_process_set([0], child)
        world.allreduce(np.ones(2), name="afterwards")
        world.stop_timeline()

    thread_groups.run(2, program, make_world=World)
    assert [event["name"] for event in timeline.read(path) if event["ph"] == "b"].count("afterwards") >= 2


def test_an_object_that_cannot_be_pickled_is_an_error_on_every_rank_also_with_a_name() -> None:
    def program(world: World) -> None:
        with pytest.raises(InvalidTypeError if world.rank == 1 else MismatchError):
            world.allgather_object(threading.Lock() if world.rank == 1 else 1, name="thing")
        assert world.allgather_object(world.rank, name="thing") == list(range(world.size))

    thread_groups.run(2, program, make_world=World)


def test_a_log_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    def make_world(group: Group) -> World:
        return World(group, Config(autotune=True, autotune_log=str(tmp_path / "no" / "log.csv")))

    assert thread_groups.run(2, lambda world: world.allreduce(1, average=False), make_world=make_world) == [2, 2]


def test_shutting_down_ends_what_another_thread_waits_for() -> None:
    def program(world: World) -> None:
        caught: list[BaseException] = []
        waits = threading.Event()

        def wait() -> None:
            handle = world.allreduce_async(np.ones(3), name="never everywhere")
            waits.set()
            try:
                world.synchronize(handle)
            except (NotInitializedError, RankFailedError) as error:
                caught.append(error)

        if world.rank == 0:
            thread = threading.Thread(target=wait)
            thread.start()
            waits.wait(10)
            begun = time.monotonic()
            world.shutdown()
            assert time.monotonic() - begun < 10
            thread.join(10)
            assert caught and not thread.is_alive()
            # Whether a round had been entered by then, so that the other rank was counting on this one, is a matter of
            # time.
            assert isinstance(caught[0], NotInitializedError) or "never everywhere; synchronize them before" in str(
                caught[0]
            )

    thread_groups.run(2, program, make_world=World)


def test_an_interrupt_just_before_the_lock_is_released_leaves_it_free() -> None:
    def program(world: World) -> None:
        progress = world._engine._progress
        if world.rank == 0:
            release, interrupted = progress.release, []

            def interrupted_release() -> None:
                if not interrupted:
                    interrupted.append(True)
                    raise KeyboardInterrupt
                release()

            progress.release = interrupted_release  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                world.allreduce_async(np.ones(2), name="interrupted").wait()
            assert interrupted and not progress.drives()
        else:
            world.allreduce_async(np.ones(2), name="interrupted").wait()
        assert world.allreduce(np.float64(1), average=False) == world.size

    thread_groups.run(2, program, make_world=World)


def test_after_shutdown_everything_is_refused_by_name(tmp_path: Path) -> None:
    def program(world: World) -> None:
        world.shutdown()
        calls = [
            lambda: world.allreduce(np.ones(2)),
            lambda: world.allgather_async(np.ones(2)),
            lambda: world.grouped_allreduce([np.ones(2)]),
            lambda: world.barrier(),
            lambda: world.join(),
            lambda: world.add_process_set([0]),
            lambda: world.start_timeline(tmp_path / "trace.json"),
            lambda: world.tune(),
            lambda: world.check_consistency([np.ones(2)]),
        ]
        for call in calls:
            with pytest.raises(NotInitializedError, match="shut down"):
                call()

    thread_groups.run(2, program, make_world=World)


def test_tuning_from_different_starts_is_a_mismatch() -> None:
    """Settings decide what is planned: ranks with different ones would move different bytes."""

    def program(world: World) -> None:
        with pytest.raises(MismatchError, match="tune"):
            world.tune(fusion_threshold=1 << (20 + world.rank))
        with pytest.raises(InvalidArgumentError if world.rank else MismatchError):
            world.tune(**({"quickness": 3} if world.rank else {}))
        assert world.tuning is None
        assert world.allreduce(np.float64(1), average=False) == world.size

    thread_groups.run(2, program, make_world=World)


def test_sets_of_sets_are_called_by_the_outermost_numbers() -> None:
    def program(world: World) -> None:
        child = world.add_process_set([1, 2, 3])
        if child is not None:
            grandchild = child.add_process_set([1, 2])
            assert (grandchild is None) == (world.rank == 1)
            if grandchild is not None:
                assert grandchild.ranks == (2, 3)

    thread_groups.run(4, program, make_world=World)


def test_a_refusal_names_the_rank_and_the_tensor() -> None:
    def program(world: World) -> None:
        with pytest.raises(
            InvalidArgumentError,
            match=f"rank {world.rank}: tensor 'bias': root_rank: expected a rank from 0 to 1, got 7",
        ):
            world.broadcast(np.ones(2), 7, name="bias")

    thread_groups.run(2, program, make_world=World)


def test_a_thread_that_bears_the_number_of_one_that_called_and_ended_is_not_waited_for() -> None:
    """A number is given out again as soon as its thread has ended; whoever has it next may never call anything."""

    def program(world: World) -> None:
        caller = threading.Thread(target=lambda: world.allreduce(np.ones(2), name="by a thread"))
        caller.start()
        caller.join()
        over = threading.Event()
        idle = [threading.Thread(target=over.wait) for _ in range(8)]
        for thread in idle:
            thread.start()
        try:
            if all(thread.ident != caller.ident for thread in idle):
                pytest.skip("this system gave none of the next threads the number of the one that ended")
            with pytest.raises(MismatchError, match="waits for"):
                world.allreduce(np.ones(2), name=f"of rank {world.rank}")
        finally:
            over.set()

    thread_groups.run(2, program, make_world=World, timeout=30)


def test_a_plan_that_cannot_be_made_fails_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*arguments: Any) -> None:
        raise MemoryError("no memory for the plan")

    def program(world: World) -> None:
        if world.rank == 0:
            monkeypatch.setattr(world._context.plans, "allreduce", no_memory)
            with pytest.raises(MemoryError):
                world.allreduce(np.ones(3))
        # On rank 0 again, where the request is cached by now: it must not return without having moved anything.
        with pytest.raises(RankFailedError, match="no memory for the plan"):
            world.allreduce(np.ones(3))

    thread_groups.run(2, program, make_world=World, timeout=5)


def test_a_forked_child_does_not_speak_for_a_world_that_has_failed() -> None:
    groups = thread_groups.connect(2)
    world, peer = (World(group) for group in groups)
    world.fail("something else went wrong")
    world.after_fork()
    with pytest.raises(ForkedProcessError):
        world.allreduce(np.ones(3))
    world.leave()
    world.shutdown()
    assert not peer.all_left()


def test_a_rank_that_has_left_begins_nothing() -> None:
    """Otherwise its background thread would enter a round while MPI is finalised."""

    def program(world: World) -> None:
        if world.rank == 0:
            handle = world.allreduce_async(np.ones(3), name="the other rank never calls it")
            world.leave()
            with pytest.raises(NotInitializedError, match="rank 0: this world was shut down"):
                world.synchronize(handle, timeout=5)
            with pytest.raises(NotInitializedError):
                world.allreduce(np.ones(3))

    thread_groups.run(2, program, make_world=World, timeout=30)
