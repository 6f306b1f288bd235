"""Worlds of threads that come and go leave nothing behind."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from collectives.base.reduce_op import Op
from collectives.engine import failure
from collectives.engine.callers import THREAD_NAME
from collectives.engine.handles import Handle
from collectives.tensors.arena import Arena
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World


def test_twenty_worlds_leave_nothing_behind() -> None:
    def program(world: World) -> weakref.ref[World]:
        assert world.allreduce_async(np.full(3, world.rank + 1.0), op=Op.SUM).wait()[0] == 3
        child = world.add_process_set([0, 1])
        assert child is not None and child.allreduce_async(np.full(3, world.rank + 2.0), op=Op.SUM).wait()[0] == 5
        world.shutdown()
        return weakref.ref(world)

    def background() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)}

    before = background()
    worlds = [world for _ in range(20) for world in thread_groups.run(2, program, make_world=World)]
    assert background() <= before  # those of earlier tests may end meanwhile
    gc.collect()
    assert not [world for world in worlds if world() is not None]


def test_a_world_that_has_failed_is_released_once_no_peer_touches_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then its memory stays, also that of a call in which it failed."""
    monkeypatch.setattr(failure, "_ACKNOWLEDGE_WITHIN", 0.0)
    worlds = [World(group) for group in thread_groups.connect(2)]
    memory = worlds[0]._group.memory
    assert memory is not None
    tensor = np.ones(1000)
    mine = weakref.ref(tensor)

    def interrupted() -> None:
        assert worlds[0]._engine._coordinator.propose()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), worlds[0]._engine.paused():
        worlds[0].allreduce_async_(tensor)
        worlds[0]._engine.guarded(interrupted)
    worlds[0].shutdown()
    del tensor
    gc.collect()
    World(thread_groups.connect(1)[0]).shutdown()
    assert memory.windows and mine() is not None, "the other rank has not noticed yet"
    worlds[1].shutdown()
    World(thread_groups.connect(1)[0])
    assert not memory.windows
    worlds.clear()
    gc.collect()
    assert mine() is None


def test_an_interrupt_is_not_lost_when_a_world_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ignores what is raised in the callback of a weak reference, and handles a signal at its first line."""
    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    world = World(thread_groups.connect(1)[0])
    world.shutdown()
    end = weakref.ref(world)

    def interrupt(*event: Any) -> Any:
        raise KeyboardInterrupt

    # JAX adds a callback of its own to those of the garbage collector, which would be interrupted as well.
    others, gc.callbacks[:] = gc.callbacks[:], []
    before = sys.gettrace()
    sys.settrace(interrupt)
    del world
    gc.collect()
    sys.settrace(before)
    gc.callbacks[:] = others
    assert end() is None and not ignored


def test_a_handle_that_outlives_its_world_keeps_its_result_and_no_window() -> None:
    windows = []

    def program(world: World) -> Handle:
        assert world._group.memory is not None
        windows.extend(weakref.ref(window) for window in world._group.memory.windows if window is not None)
        handle = world.allreduce_async(np.full(3, world.rank + 1.0), op=Op.SUM)
        world.allreduce(np.ones(3), name="kept by the cache")
        handle.wait()
        world.shutdown()
        return handle

    handles = thread_groups.run(2, program, make_world=World)
    gc.collect()
    assert [handle.wait()[0] for handle in handles] == [3, 3]
    assert not [window for window in windows if window() is not None]


@pytest.mark.parametrize("end", ["empty_cache", "shutdown"])
def test_dropped_results_memory_goes_back(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena()
    for module in ("collectives.tensors.result_pool", "collectives.worlds.world"):
        monkeypatch.setattr(sys.modules[module], "arena", arena)
    world = World(thread_groups.connect(1)[0])
    tensor = np.full(1_000_000, 1.0, np.float32)
    for _ in range(3):
        tensor = world.allreduce(tensor, op=Op.SUM)
        assert arena.locate(tensor.ctypes.data, tensor.nbytes)
    del tensor
    assert arena.numbers()
    getattr(world, end)()
    assert not arena.numbers()


@pytest.mark.parametrize("elements", [100, 1 << 16, 1 << 18], ids=["window", "direct", "large"])
def test_tensors_of_a_list_that_was_proposed_in_vain_are_released(elements: int) -> None:
    """The ranks begin two groups in different orders, so that what they first propose is not carried out."""

    def program(world: World) -> tuple[int, list[str]]:
        def group(name: str) -> tuple[Handle, dict[str, weakref.ref[Any]]]:
            tensors = [np.full(elements, world.rank + 1.0, np.float32) for _ in range(3)]
            handle = world.grouped_allreduce_async_(tensors, op=Op.SUM, name=name)
            return handle, {f"{name}[{number}]": weakref.ref(tensor) for number, tensor in enumerate(tensors)}

        names = ["first", "second", "third"]
        begun = [group(name) for name in (names if world.rank == 0 else names[::-1])]
        for handle, _ in begun:
            assert [tensor[0] for tensor in handle.wait()] == [3, 3, 3]
        references = {name: reference for _, found in begun for name, reference in found.items()}
        del handle, begun
        gc.collect()
        return world.statistics.compared, [name for name, reference in references.items() if reference() is not None]

    for compared, kept in thread_groups.run(2, program, make_world=World):
        assert compared and not kept
