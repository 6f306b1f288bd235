"""A blocking call of a few bytes passes few functions: what CONTRIBUTING.md follows from line to line.

mpirun -n 2 python -m tests.threads.test_fast_path        # prints the calls, with ranks as processes
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import collectives
from collectives.base.errors import InvalidArgumentError, InvalidTypeError, MismatchError
from collectives.base.reduce_op import Op
from collectives.transport import backoff
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World

PACKAGE = Path(collectives.__file__).parent
TRIES = 300


def calls_in(call: Callable[[], object]) -> list[str]:
    """The package's functions that a call passes, in their order, on the calling thread."""
    passed: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            module = Path(frame.f_code.co_filename).relative_to(PACKAGE)
            passed.append(f"{module} {frame.f_code.co_name}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return passed


def fewest_calls_in(call: Callable[[], object]) -> list[str]:
    """`calls_in` when no rank waits: the shortest of many."""
    return min((calls_in(call) for _ in range(TRIES)), key=len)


def test_a_blocking_call_passes_four_modules_below_the_public_function() -> None:
    def run(world: World) -> list[str]:
        tensor = np.ones(1, np.float32)
        return fewest_calls_in(lambda: world.allreduce_(tensor))

    for calls in thread_groups.run(2, run, make_world=World):
        assert len({call.split()[0] for call in calls}) <= 5, calls
        assert len(calls) <= 7, calls


def test_a_blocking_call_whose_peer_is_late_passes_few_more() -> None:
    came = threading.Event()

    def run(world: World) -> list[str]:
        tensor = np.ones(1, np.float32)
        for _ in range(5):
            world.allreduce_(tensor)
        if world.rank == 1:
            came.wait(30)
            world.allreduce_(tensor)
            return []
        control: Any = world._engine.context.control
        relax = control.relax
        # The other rank comes once this one has given up spinning.
        control.relax = lambda: (came.set(), relax())
        try:
            return calls_in(lambda: world.allreduce_(tensor))
        finally:
            control.relax = relax

    calls = thread_groups.run(2, run, make_world=World)[0]
    waits = [call for call in calls if call.endswith((" relax", " look", " _let_others_run"))]
    assert came.is_set() and waits
    assert len(calls) - len(waits) <= 20, calls


def test_a_persistent_start_and_wait_pass_few_functions() -> None:
    def run(world: World) -> list[str]:
        operation = world.allreduce_init(np.ones(1, np.float32))

        def start_and_wait() -> None:
            operation.start()
            operation.wait()

        calls = fewest_calls_in(start_and_wait)
        operation.free()
        return calls

    for calls in thread_groups.run(2, run, make_world=World):
        assert len(calls) <= 30, calls


def test_broadcasts_and_reduce_scatters_of_known_arrays() -> None:
    def run(world: World) -> None:
        rank, size = world.rank, world.size
        for step in range(6):
            for root in range(size):
                for shape in ((), (5,), (3, 4), (0, 3), (100_000,)):
                    tensor = np.full(shape, rank + step, np.float32)
                    result = world.broadcast(tensor, root)
                    assert result.shape == shape and (result == root + step).all() and (tensor == rank + step).all()
                    assert world.broadcast_(tensor, root, name="tensor") is tensor and (tensor == root + step).all()
            for rows in (1, 4, 7):
                tensor = np.full((rows, 2), rank + step, np.float64)
                share = world.reducescatter(tensor, Op.SUM)
                assert share.shape == (rows // size + (rank < rows % size), 2)
                assert (share == size * step + sum(range(size))).all() and (tensor == rank + step).all()
            with pytest.raises(InvalidTypeError, match="root_rank"):
                world.broadcast_(np.zeros(5, np.float32), True)
            frozen = np.full(5, step)
            frozen.flags.writeable = False
            assert (world.broadcast(frozen, 1) == step).all()
            with pytest.raises(InvalidArgumentError, match="read-only"):
                world.broadcast_(frozen, 1)
        shared = np.zeros(1000)  # the root's is only read: another operation may read it too
        if rank == 0:
            handles = [world.broadcast_async_(shared, 0, name="first"), world.allreduce_async(shared, name="second")]
            world.broadcast_(shared, 0, name="third")
        else:
            handles = [world.broadcast_async_(np.ones(1000), 0, name="first")]
            handles.append(world.allreduce_async(shared, name="second"))
            world.broadcast_(np.ones(1000), 0, name="third")
        for handle in handles:
            assert (handle.wait() == 0).all()

    for size in (2, 3):
        thread_groups.run(size, run, make_world=World)


def test_submissions_of_known_arrays_claim_their_memory() -> None:
    def run(world: World) -> None:
        both = np.zeros((2, 6), np.float32)
        parts = {"whole": both, "first": both[0], "second": both[1]}
        for name in parts:
            world.allreduce_async_(parts[name], name=name).wait()
        for step in range(3):
            both[:] = world.rank + step
            handles = [world.allreduce_async_(parts[name], name=name) for name in ("first", "second")]
            with pytest.raises(InvalidArgumentError, match=r"whole.*its memory, which it writes, is written by"):
                world.allreduce_async_(both, name="whole")
            with pytest.raises(InvalidArgumentError, match="'first': an operation of this name is in flight"):
                world.allreduce_async_(parts["first"], name="first")
            assert handles[0].wait() is parts["first"] and handles[1].wait() is parts["second"]
            assert (both == 0.5 + step).all()
            assert world.synchronize(world.allreduce_async_(both, name="whole")) is both

    thread_groups.run(2, run, make_world=World)


def test_a_rank_without_memory_for_a_known_result_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(world: World) -> None:
        tensor = np.full(3, world.rank, np.float32)
        calls = (lambda: world.allreduce(tensor, op=Op.SUM), lambda: world.broadcast(tensor, 1))
        for call in calls:
            call()
        if world.rank == 1:
            monkeypatch.setattr(world.operations._pool, "empty", _no_memory)
        for call in calls:
            with pytest.raises(MemoryError if world.rank == 1 else MismatchError):
                call()
        assert (world.allreduce_(tensor, op=Op.SUM) == 1).all()

    thread_groups.run(2, run, make_world=World)


def _no_memory(*_: Any) -> None:
    raise MemoryError


def test_no_call_keeps_its_tensor() -> None:
    calls: dict[str, Callable[[World, Any], object]] = {
        "allreduce_": lambda world, tensor: world.allreduce_(tensor),
        "allreduce": lambda world, tensor: world.allreduce(tensor),
        "allreduce_async_": lambda world, tensor: world.allreduce_async_(tensor).wait(),
        "grouped_allreduce_": lambda world, tensor: world.grouped_allreduce_([tensor]),
        "broadcast_": lambda world, tensor: world.broadcast_(tensor, 0),
        "broadcast": lambda world, tensor: world.broadcast(tensor, 1),
        "reducescatter": lambda world, tensor: world.reducescatter(tensor),
        "allgather": lambda world, tensor: world.allgather(tensor),
        "alltoall": lambda world, tensor: world.alltoall(tensor),
    }

    def run(world: World) -> None:
        for what, call in calls.items():
            for count in (2, 100_000):
                for _ in range(2):
                    tensor = np.ones(count, np.float32)
                    kept = weakref.ref(tensor)
                    call(world, tensor)
                    del tensor
                    # The background thread may be about to leave the frame in which it completed the handle.
                    backoff.poll(lambda kept=kept: kept() is None, 5.0)  # type: ignore[misc]
                    assert kept() is None, (what, count)

    thread_groups.run(2, run, make_world=World)


def test_an_array_of_another_layout_or_dtype_is_another_request() -> None:
    def run(world: World) -> None:
        table = np.arange(12, dtype=np.float32).reshape(3, 4)
        for _ in range(2):
            strided = np.repeat(table, 2, axis=1)[:, ::2]
            for tensor in (table.copy(), strided, table.copy(order="F"), table.astype(">f4"), table.astype("f8")):
                before = tensor.copy()
                assert world.allreduce_(tensor, op=Op.SUM) is tensor
                assert (tensor == 2 * before).all()
            with pytest.raises(InvalidArgumentError, match="read-only"):
                world.allreduce_(np.broadcast_to(table, (2, 3, 4)), op=Op.SUM)
            with pytest.raises(TypeError, match="unexpected keyword argument 'ops'"):
                world.allreduce_(table, ops=Op.SUM)
            with pytest.raises(InvalidTypeError, match="name"):
                world.allreduce_(table, name=["unhashable"])  # type: ignore[arg-type]
            with pytest.raises(InvalidArgumentError, match="either average or op"):
                world.allreduce_(table, average=True, op=Op.SUM)

    thread_groups.run(2, run, make_world=World)


if __name__ == "__main__":
    collectives.init()
    ones = np.ones(1, np.float32)
    fewest = fewest_calls_in(lambda: collectives.allreduce_(ones))
    if collectives.rank() == 0:
        print(f"{len(fewest)} calls in {len({call.split()[0] for call in fewest})} modules", *fewest, sep="\n    ")
    collectives.shutdown()
