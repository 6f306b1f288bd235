"""Persistent operations and the memory that they are bound to: it stays, or the start is refused; and nothing outlives
the operation."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collectives.base.errors import InvalidArgumentError, InvalidTypeError, MismatchError
from collectives.plan.planner import Crossovers
from collectives.transport import backoff
from collectives.transport.threads import thread_groups
from collectives.worlds.persistent import BoundOperation
from collectives.worlds.world import World
from tests.support.scenarios.engine import works
from tests.threads.test_fast_path import fewest_calls_in


def test_numpy_resizes_no_array_that_an_operation_holds() -> None:
    def program(world: World) -> None:
        tensor = np.full(10, world.rank + 1.0)
        operation = world.allreduce_init(tensor, average=False)
        with pytest.raises(ValueError, match="cannot resize"):
            tensor.resize(1000, refcheck=False)
        assert (operation() == 3).all()
        operation.free()
        tensor.resize(1000, refcheck=False)
        works(world)

    thread_groups.run(2, program, make_world=World)


def test_an_array_that_shows_its_memory_in_another_way_is_reduced_as_it_was() -> None:
    def program(world: World) -> None:
        tensor = np.full(10, world.rank + 1.0)
        with world.allreduce_init(tensor, average=False) as operation:
            tensor.dtype = np.dtype(np.int64)
            tensor.shape = (2, 5)
            operation()
            assert (tensor.view(np.float64) == 3).all()

    thread_groups.run(2, program, make_world=World)


@pytest.mark.parametrize("run", [lambda operation: operation(), lambda operation: operation.start()])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("frees", (True, False))
def test_nothing_keeps_the_tensors_of_an_operation_that_was_freed_or_dropped(
    frees: bool, grouped: bool, run: Callable[[Any], Any]
) -> None:
    """The engine still knows the list of operations that it was in."""

    def program(world: World) -> None:
        for count in (3, 400_000):
            tensor = np.ones(count)
            alive = weakref.ref(tensor)
            operation: Any = world.grouped_allreduce_init([tensor]) if grouped else world.allreduce_init(tensor)
            run(operation)
            if operation._started is not None:
                operation.wait()
            if frees:
                operation.free()
            del tensor, operation
            gc.collect()
            assert alive() is None
        works(world)

    thread_groups.run(2, program, make_world=World)


def _torch_tensor(fill: float) -> Any:
    torch = pytest.importorskip("torch")
    return torch.full((300, 300), fill)


MOVES: dict[str, Callable[[Any], Any]] = {
    "set_": lambda tensor: tensor.set_(tensor.clone()),
    "data": lambda tensor: setattr(tensor, "data", tensor.clone()),
    "transposed": lambda tensor: tensor.t_(),
    "smaller": lambda tensor: tensor.resize_(30, 300),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("grouped", [False, True])
def test_a_torch_tensor_that_has_moved_is_refused_on_every_rank(grouped: bool, move: Callable[[Any], Any]) -> None:
    def program(world: World) -> None:
        tensor, other = _torch_tensor(world.rank + 1.0), _torch_tensor(world.rank + 1.0)
        operation: Any = (
            world.grouped_allreduce_init([other, tensor], average=False)
            if grouped
            else world.allreduce_init(tensor, average=False)
        )
        assert isinstance(operation, BoundOperation)
        operation()
        assert (tensor == 3).all()
        if world.rank == 1:
            move(tensor)
        error = InvalidArgumentError if world.rank == 1 else MismatchError
        for start in (operation, lambda: operation.start() or operation.wait()):
            with pytest.raises(
                error, match=r"rank 1: .*memory or the layout of a tensor has changed.*create a new one"
            ):
                start()
        assert (tensor == 3).all()
        operation.free()
        works(world)

    thread_groups.run(2, program, make_world=World)


def test_results_are_torch_tensors_on_memory_that_stays() -> None:
    torch = pytest.importorskip("torch")

    def program(world: World) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            rows = torch.full((2, 30), world.rank + 1.0, dtype=dtype)
            gathers, shares = world.allgather_init(rows), world.reducescatter_init(rows)
            gathered, share = gathers(), shares()
            at = gathered.data_ptr(), share.data_ptr()
            assert gathered[:, 0].tolist() == [1, 1, 2, 2] and (share == 1.5).all() and share.dtype is dtype
            rows += 1
            assert gathers() is gathered and shares() is share
            assert gathered[:, 0].tolist() == [2, 2, 3, 3] and (share == 2.5).all()
            assert at == (gathered.data_ptr(), share.data_ptr())
        weight = torch.nn.Parameter(torch.full((5,), world.rank + 1.0))
        with world.broadcast_init(weight, 1) as operation:
            assert operation() is weight and (weight == 2).all()
        lazy = torch.full((5,), world.rank + 1.0, dtype=torch.complex64).conj()
        with pytest.raises(InvalidArgumentError, match="negates or conjugates"):
            world.allreduce_init(lazy)
        works(world)

    thread_groups.run(2, program, make_world=World)


@pytest.mark.parametrize("framework", ["jax", "tensorflow"])
def test_tensors_that_never_change_are_refused(framework: str) -> None:
    pytest.importorskip(framework)
    if framework == "jax":
        import jax

        make: Any = jax.numpy.ones
    else:
        import tensorflow

        make = tensorflow.ones

    def program(world: World) -> None:
        for call in (
            lambda: world.allreduce_init(make(3)),
            lambda: world.allgather_init(make(3)),
            lambda: world.grouped_allreduce_init([np.ones(3), make(3)]),
            lambda: world.broadcast_init(make(3), 0),
        ):
            with pytest.raises(InvalidTypeError, match="a persistent operation reads and writes the same memory"):
                call()
        works(world)

    thread_groups.run(2, program, make_world=World)


def test_plans_are_made_anew_when_the_settings_change() -> None:
    """Between the same two starts on every rank."""

    def program(world: World) -> None:
        tensor, rows = np.empty(50_000), np.empty((1000, 3))
        group = [np.empty(300), np.empty(7000)]
        operations = [world.allreduce_init(tensor), world.allgather_init(rows), world.grouped_allreduce_init(group)]
        settings = [(name, limit) for limit in (1 << 10, 1 << 20, 1 << 30) for name in ("auto", "ring", "direct")]
        for algorithm, limit in settings:
            for started in (False, True):
                for each in (tensor, rows, *group):
                    each[...] = world.rank
                results = [
                    (operation.start(), operation.wait())[1] if started else operation() for operation in operations
                ]
                assert (results[0] == 1).all() and all((each == 1).all() for each in results[2])
                np.testing.assert_array_equal(results[1][:, 1], np.repeat([0.0, 1, 2], 1000))
            world.planner.change(
                algorithm=algorithm, segment=0, crossovers=Crossovers(window=limit, window_moves=limit)
            )

    thread_groups.run(3, program, make_world=World)


def test_the_timeline_shows_every_start(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def program(world: World) -> None:
        operation = world.allreduce_init(np.ones(300_000), name="weights")
        group = world.grouped_allreduce_init([np.ones(3), np.ones(5)], name="group")
        world.start_timeline(path)
        for _ in range(3):
            operation()
            group()
        world.stop_timeline()

    thread_groups.run(2, program, make_world=World)
    events = json.loads(path.read_text())
    tasks = [
        event["args"]["tensors"] for event in events if event.get("name", "").startswith(("allreduce: ", "grouped"))
    ]
    assert tasks.count(["weights"]) == tasks.count(["group"]) == 2 * 3


def test_a_start_compares_nothing_and_plans_nothing() -> None:
    def program(world: World) -> None:
        group = world.grouped_allreduce_init([np.ones(count) for count in range(1, 500)])
        single = world.allreduce_init(np.ones(10))
        group()
        single()
        world.barrier()
        before = world.statistics
        for _ in range(20):
            group()
            single()
        after = world.statistics
        assert after.plans_made == before.plans_made and after.exchanged == before.exchanged
        assert after.tensors - before.tensors == after.buckets - before.buckets == 40
        assert after.bytes_reduced - before.bytes_reduced == 20 * 8 * (10 + sum(range(1, 500)))

    thread_groups.run(2, program, make_world=World)


def test_a_call_passes_few_functions() -> None:
    def program(world: World) -> list[str]:
        operation = world.allreduce_init(np.ones(1, np.float32))
        return fewest_calls_in(operation)

    for calls in thread_groups.run(2, program, make_world=World):
        assert len(calls) <= 11, calls


def test_another_thread_may_wait_for_a_start() -> None:
    def program(world: World) -> None:
        tensor = np.full(5, world.rank + 1.0)
        operation = world.allreduce_init(tensor, average=False)
        operation.start()
        results: list[Any] = []
        waiting = threading.Thread(target=lambda: results.append(operation.wait()))
        waiting.start()
        waiting.join()
        assert results[0] is tensor and (tensor == 3).all()

    thread_groups.run(2, program, make_world=World)


def test_an_operation_is_not_copied() -> None:
    def program(world: World) -> None:
        operation = world.allreduce_init(np.ones(3))
        for copies in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied"):
                copies(operation)
        operation()

    thread_groups.run(2, program, make_world=World)


@pytest.mark.parametrize("step", (1, 2))
def test_no_other_thread_frees_or_starts_an_operation_within_a_call(step: int) -> None:
    def program(world: World) -> None:
        memory = np.full(10_000 * step, world.rank + 1.0)
        operation = world.allreduce_init(memory[::step], average=False, name="called")
        if world.rank == 0:
            calling = threading.Thread(target=operation)
            calling.start()
            assert backoff.poll(lambda: "called" in world._engine._names, 10)
            for misuse in (operation.free, operation.start, operation):
                with pytest.raises(InvalidArgumentError, match="in flight"):
                    misuse()
            world.barrier()
            calling.join()
        else:
            world.barrier()
            operation()
        assert (memory[::step] == 3).all()
        operation.free()

    thread_groups.run(2, program, make_world=World)
