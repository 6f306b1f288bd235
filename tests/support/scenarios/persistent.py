"""What persistent operations must do on every world: run by threads in one process and by processes under mpirun.

As in `scenarios`, each is a function of a world that asserts by itself, and inputs differ from rank to rank.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collectives.base.errors import InvalidArgumentError, InvalidTypeError, MismatchError
from collectives.base.reduce_op import Op
from collectives.tensors.arena import arena
from collectives.tensors.compression import Compression
from collectives.worlds.persistent import BoundOperation, PersistentOperation
from collectives.worlds.world import World
from tests.support.scenarios.engine import works
from tests.support.scenarios.worlds import DTYPES, assert_close, choices, expected, ops_for, sample


def mapped(shape: int | tuple[int, ...], dtype: Any = np.float64) -> np.ndarray[Any, Any]:
    return arena.empty(shape, dtype)


empty: Callable[..., Any] = np.empty
"""Makes the tensors of most scenarios; tests replace it by `mapped`."""
COUNTS = (0, 1, 1000, 40_003, 600_001)
"""Elements that cross every threshold of the planner when they are float64."""
Run = Callable[[PersistentOperation[Any]], Any]


def at_once(operation: PersistentOperation[Any]) -> Any:
    return operation()


def started(operation: PersistentOperation[Any]) -> Any:
    operation.start()
    return operation.wait()


def polled(operation: PersistentOperation[Any]) -> Any:
    operation.start()
    while not operation.poll():
        pass
    return operation.wait()


RUNS: tuple[Run, ...] = (at_once, started, at_once, polled, at_once)
"""Ways to run an operation, one after the other, so that each comes after another."""


def all_reduces(world: World) -> None:
    for count in COUNTS:
        tensor, kept = empty(count), empty(count)
        with (
            world.allreduce_init(tensor, average=False) as in_place,
            world.allreduce_init(tensor, op=Op.MAX, out=kept, name=f"apart {count}") as apart,
        ):
            assert isinstance(in_place, BoundOperation) and isinstance(apart, BoundOperation)
            for seed, run in enumerate(RUNS):
                parts = [sample(tensor.dtype, count, rank, seed) for rank in range(world.size)]
                tensor[:] = parts[world.rank]
                assert run(apart) is kept
                np.testing.assert_array_equal(tensor, parts[world.rank])
                assert run(in_place) is tensor
                assert_close(tensor, expected(Op.SUM, parts), world.size)
                assert_close(kept, expected(Op.MAX, parts), world.size)


def every_dtype_and_operation(world: World) -> None:
    for dtype in DTYPES:
        parts = [sample(dtype, 700, rank) for rank in range(world.size)]
        for op in ops_for(dtype):
            tensor = empty(700, dtype)
            with world.allreduce_init(tensor, op=op) as operation:
                for run in (at_once, started):
                    tensor[:] = parts[world.rank]
                    run(operation)
                    assert_close(tensor, expected(op, parts), world.size)


def every_choice(world: World) -> None:
    """Every algorithm over every transport, in several segments."""
    count = 50_000
    for collective in ("allreduce", "broadcast", "reducescatter", "allgather", "alltoall"):
        for algorithm, transport in choices(world, collective):
            how: Any = {"algorithm": algorithm, "transport": transport}
            rows = world.size * count
            tensor = empty(rows)
            makes: dict[str, Callable[[], PersistentOperation[Any]]] = {
                "allreduce": lambda how=how, tensor=tensor: world.allreduce_init(tensor, average=False, **how),
                "broadcast": lambda how=how, tensor=tensor: world.broadcast_init(tensor, world.size - 1, **how),
                "reducescatter": lambda how=how, tensor=tensor: world.reducescatter_init(tensor, op=Op.SUM, **how),
                "allgather": lambda how=how, tensor=tensor: world.allgather_init(tensor, **how),
                "alltoall": lambda how=how, tensor=tensor: world.alltoall_init(tensor, **how),
            }
            with makes[collective]() as operation:
                for seed, run in enumerate(RUNS[:3]):
                    parts = [sample(tensor.dtype, rows, rank, seed) for rank in range(world.size)]
                    tensor[:] = parts[world.rank]
                    total, share = expected(Op.SUM, parts), slice(count * world.rank, count * (world.rank + 1))
                    wanted = {
                        "allreduce": total,
                        "broadcast": parts[-1],
                        "reducescatter": total[share],
                        "allgather": np.concatenate(parts),
                        "alltoall": np.concatenate([part[share] for part in parts]),
                    }
                    assert_close(run(operation), wanted[collective], world.size)


def results_are_made_once(world: World) -> None:
    """Rows differ between the ranks; a rank may have none."""
    for width in (1, 9, 30_011):
        mine, rows = empty((world.rank, width), np.float32), sum(range(world.size))
        splits = np.arange(world.size) + world.rank
        sent = empty((int(splits.sum()), width), np.float32)
        gathers, exchanges = world.allgather_init(mine, name="gathers"), world.alltoall_init(sent, splits)
        seen = []
        for step, run in enumerate(RUNS):
            mine[:], sent[:] = world.rank + step, world.rank * 100 + step
            gathered, (received, counts) = run(gathers), run(exchanges)
            assert gathered.shape == (rows, width) and received.shape == (sum(counts), width)
            np.testing.assert_array_equal(
                gathered[:, 0], [rank + step for rank in range(world.size) for _ in range(rank)]
            )
            assert counts.tolist() == [rank + world.rank for rank in range(world.size)]
            np.testing.assert_array_equal(
                received[:, -1], [rank * 100 + step for rank in range(world.size) for _ in range(counts[rank])]
            )
            seen.append((gathered, received))
        assert all(gathered is seen[0][0] and received is seen[0][1] for gathered, received in seen)
        gathers.free()
        exchanges.free()


def groups(world: World) -> None:
    """Of one bucket and of several; members that are too large for a bucket, empty ones, other dtypes."""
    counts = [1, 0, 77, 300_000, 5, *range(1, 40), 20_000]
    tensors = [empty(count, np.float32 if count % 3 else np.int64) for count in counts]
    rooted = [empty(count) for count in counts]
    sliced = [empty((count, 2)) for count in counts]
    sums = world.grouped_allreduce_init(tensors, average=False)
    copies = world.grouped_broadcast_init(rooted, world.size - 1, name="copies")
    shares = world.grouped_reducescatter_init(sliced, op=Op.SUM)
    gathers = world.grouped_allgather_init(sliced, name="gathers")
    total = world.size * (world.size + 1) // 2
    for step, run in enumerate(RUNS):
        for group in (tensors, rooted, sliced):
            for tensor in group:
                tensor[...] = world.rank + 1 + step
        assert all(result is tensor for result, tensor in zip(run(sums), tensors, strict=True))
        assert all((tensor == total + step * world.size).all() for tensor in tensors)
        assert run(copies)[2] is rooted[2] and all((tensor == world.size + step).all() for tensor in rooted)
        assert all((share == total + step * world.size).all() for share in run(shares))
        for count, gathered in zip(counts, run(gathers), strict=True):
            np.testing.assert_array_equal(gathered[:, 1], np.repeat(np.arange(world.size) + 1 + step, count))
    for operation in (sums, copies, shares, gathers):
        operation.free()


def what_cannot_be_bound(world: World) -> None:
    """Works as the ordinary operation does: other layouts, compression, factors, Adasum; on one rank or on all."""
    strided = np.empty((30, 40))[::2, ::3]
    on_one = strided if world.rank == world.size - 1 else np.empty(strided.shape)
    tied, single = np.empty(50), np.empty(500, np.float32)
    base = np.empty(60)
    ways: list[tuple[PersistentOperation[Any], list[Any], Callable[[float], float]]] = [
        (world.allreduce_init(strided, average=False), [strided], lambda total: total),
        (world.allreduce_init(on_one, average=False), [on_one], lambda total: total),
        (world.allreduce_init(tied, prescale_factor=2, average=False), [tied], lambda total: 2 * total),
        (world.allreduce_init(single, average=False, compression=Compression.fp16), [single], lambda total: total),
        (world.grouped_allreduce_init([base[:40], base[20:]], average=False), [base], lambda total: total),
    ]
    for step, run in enumerate(RUNS):
        for operation, tensors, of_total in ways:
            for tensor in tensors:
                tensor[...] = world.rank + 1 + step
            run(operation)
            total = sum(rank + 1 + step for rank in range(world.size))
            for tensor in tensors:
                np.testing.assert_array_equal(tensor, of_total(total))
    for number, (operation, _, _) in enumerate(ways):
        assert not isinstance(operation, BoundOperation) or number == 1 == world.size
        operation.free()
    adasum, ordinary = sample(np.dtype(np.float64), 90, world.rank), sample(np.dtype(np.float64), 90, world.rank)
    with world.allreduce_init(adasum, op=Op.ADASUM) as operation:
        for run in RUNS:
            run(operation)
            np.testing.assert_array_equal(adasum, world.allreduce_(ordinary, op=Op.ADASUM))
    kept = np.empty(50)
    for keywords in ({"prescale_factor": 2}, {"compression": Compression.fp16}):
        tied[:] = 1
        with world.allreduce_init(tied, average=False, out=kept, **keywords) as operation:
            for run in RUNS:
                kept[:] = -1
                assert run(operation) is kept
                np.testing.assert_array_equal(kept, world.size * keywords.get("prescale_factor", 1))
                np.testing.assert_array_equal(tied, 1)
    with world.grouped_allreduce_init([]) as empty:
        assert empty() == [] and started(empty) == []


def mixed_with_everything_else(world: World) -> None:
    """Ordinary operations, asynchronous ones in flight, and operations of other sizes, in every order."""
    total = world.size * (world.size + 1) / 2
    small, large, late = empty(3), empty(200_000), empty(1000)
    operations = [world.allreduce_init(small, average=False), world.allreduce_init(large, average=False, name="large")]
    background = world.allreduce_init(late, average=False, name="late")
    for order in itertools.permutations(range(4)):
        late[:] = world.rank + 1
        background.start()
        handle = world.allreduce_async(np.full(70_000, world.rank + 1.0), average=False, name="asynchronous")
        for which in order:
            for tensor in (small, large):
                tensor[:] = world.rank + 1
            if which < 2:
                assert (operations[which]() == total).all()
            elif which == 2:
                assert (world.allgather(np.full(2, 7)) == 7).all()
            else:
                assert (world.allreduce(np.full(3, world.rank + 1.0), average=False) == total).all()
        assert (world.synchronize(handle) == total).all()
        assert background.wait() is late and (late == total).all()
    works(world)


def named_ones_in_any_order(world: World) -> None:
    total = world.size * (world.size + 1) / 2
    tensors = [empty(count) for count in (10, 100_000, 1, 5000)]
    by_name = {
        f"tensor {number}": world.allreduce_init(tensor, average=False, name=f"tensor {number}")
        for number, tensor in enumerate(tensors)
    }
    for step in range(6):
        for tensor in tensors:
            tensor[:] = world.rank + 1
        names = list(by_name)[:: 1 if (step + world.rank) % 2 else -1]
        for name in names:
            by_name[name].start()
        for name in reversed(names):
            assert (by_name[name].wait() == total).all()
    works(world)


def mismatches(world: World) -> None:
    """Another operation, an ordinary one, other arguments: every rank is told of both, and may go on."""
    if world.size == 1:
        return
    tensors = [np.full(10, world.rank + 1.0) for _ in range(2)]
    first, second = (world.allreduce_init(tensor, average=False) for tensor in tensors)
    for run in (at_once, started):
        with pytest.raises(MismatchError, match=r"(?s)disagree on persistent.*persistent=\d+.*persistent=\d+"):
            run(second if world.rank == 0 else first)
        with pytest.raises(MismatchError, match=r"(?s)persistent=.*allreduce\(dtype='float64'|allreduce.*persistent="):
            if world.rank == 0:
                world.allreduce_(tensors[0], average=False)
            else:
                run(first)
    grouped = [world.grouped_allreduce_init([tensor]) for tensor in tensors]
    with pytest.raises(MismatchError, match=r"(?s)persistent=\d+, 1 tensors.*persistent=\d+, 1 tensors"):
        grouped[world.rank == 0]()
    with pytest.raises(MismatchError, match=r"allreduce_init\(.*shape=\(11,\)"):
        world.allreduce_init(np.empty(10 + (world.rank == 0)))
    with pytest.raises(MismatchError, match="allgather_init"):
        world.allgather_init(tensors[0]) if world.rank == 0 else world.allreduce_init(tensors[0])
    np.testing.assert_array_equal(tensors[0], world.rank + 1)
    assert (first() == world.size * (world.size + 1) / 2).all()
    works(world)


def misuse(world: World) -> None:
    tensor = np.zeros(8)
    operation = world.allreduce_init(tensor, name="weights")
    assert repr(operation) == f"<PersistentOperation {operation._entry.request.describe()}: ready>"
    for call in (operation.wait, operation.poll):
        with pytest.raises(InvalidArgumentError, match=rf"rank {world.rank}: .*name='weights'.*call start\(\) first"):
            call()
    operation.start()
    assert repr(operation).endswith(": started>")
    with pytest.raises(InvalidArgumentError, match="in flight and cannot be freed"):
        operation.free()
    for call in (operation.start, operation):
        with pytest.raises(InvalidArgumentError, match="already in flight"):
            call()
    assert operation.wait() is tensor
    operation.free()
    operation.free()
    assert repr(operation).endswith(": freed>")
    for call in (operation.start, operation):
        with pytest.raises(InvalidArgumentError, match=r"'weights'.* was freed"):
            call()
    with pytest.raises(InvalidArgumentError, match="not started"):
        operation.wait()
    blocks(world)
    for wrong in (3.0, np.float32(1), b"bytes"):
        with pytest.raises(InvalidTypeError, match="persistent operation"):
            world.allreduce_init(wrong)
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    with pytest.raises(InvalidArgumentError, match="writable"):
        world.allreduce_init(frozen)
    for out in (np.zeros(7), np.zeros(8, np.float32), np.zeros(16)[::2], tensor[:], np.zeros((2, 4))):
        with pytest.raises(InvalidArgumentError, match="out: "):
            world.allreduce_init(tensor, out=out)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'colour'"):
        world.allreduce_init(tensor, colour="red")
    works(world)


def blocks(world: World) -> None:
    """A block may free its operation, or be left by an exception; after it the operation is freed."""

    def left_by_exception(operation: PersistentOperation[Any]) -> None:
        operation.start()
        raise ValueError("of the program")

    for leave, error in ((at_once, None), (PersistentOperation.free, None), (left_by_exception, ValueError)):
        for operation in (world.allreduce_init(np.ones(3)), world.grouped_allgather_init([np.ones(2)])):
            with pytest.raises(error) if error else contextlib.nullcontext(), operation:
                leave(operation)
            if error:
                operation.wait()
            for call in (operation.start, operation):
                with pytest.raises(InvalidArgumentError, match="was freed"):
                    call()
            with operation:
                pass


def one_rank_refuses(world: World) -> None:
    """The others are told, at once, and all go on."""
    tensor, odd = np.zeros(8), world.size - 1
    operation = world.allreduce_init(tensor, average=False)
    other = world.allreduce_init(np.zeros(3))
    if world.rank == odd:
        operation.free()
    for run in (at_once, started):
        error = InvalidArgumentError if world.rank == odd else MismatchError
        with pytest.raises(error, match=f"rank {odd}: (persistent allreduce|refused).* was freed"):
            run(operation)
        other()
    with pytest.raises(InvalidTypeError if world.rank == odd else MismatchError, match="never change"):
        world.allreduce_init(5 if world.rank == odd else np.zeros(()))
    again = world.allreduce_init(tensor, average=False)
    tensor[:] = world.rank
    np.testing.assert_array_equal(again(), sum(range(world.size)))
    works(world)


def overlaps(world: World) -> None:
    """Memory of a start in flight is as that of any operation; the other ranks start it only when they have been told
    what the last one has refused, so that until then it is in flight there."""
    if world.size == 1:
        return
    odd = world.rank == world.size - 1
    tensor = np.full(1000, world.rank + 1.0)
    operation, part = world.allreduce_init(tensor, name="all"), world.allreduce_init(tensor[:10], name="part")
    group = world.grouped_allreduce_init([np.zeros(3), tensor[500:]], name="group")
    calls = (part, part.start, group, group.start, lambda: world.allreduce_(tensor[5:7], name="ordinary"))
    for first, seconds, which in ((operation, calls, "name='all'"), (group, (operation,), "grouped_allreduce")):
        if odd:
            first.start()
        for call in seconds:
            with pytest.raises(InvalidArgumentError if odd else MismatchError, match=f"in flight.*{which}"):
                call()
                part.wait() if call == part.start else group.wait()
        if not odd:
            first.start()
        first.wait()
    part()
    np.testing.assert_array_equal(tensor, tensor.mean())
    results_in_flight(world)
    works(world)


def results_in_flight(world: World) -> None:
    """The program has the results before the start that replaces their elements is complete."""
    odd, source = world.rank == world.size - 1, np.ones(10 * world.size)
    makes: tuple[Callable[[Any], PersistentOperation[Any]], ...] = (
        world.allgather_init,
        world.reducescatter_init,
        lambda tensor: world.grouped_allgather_init([np.ones(3), tensor]),
    )
    for make in makes:
        operation = make(source)
        result = operation()
        if odd:
            operation.start()
        with pytest.raises(InvalidArgumentError if odd else MismatchError, match="in flight"):
            world.allreduce_(result[-1] if isinstance(result, list) else result, name="result")
        if not odd:
            operation.start()
        operation.wait()


def ranks_that_join(world: World) -> None:
    """Reductions and broadcasts go on, with neutral elements from those that have joined; gathers cannot."""
    if world.size == 1:
        return
    single, grouped, rows = empty(5000), [empty(3, np.float32), empty((300, 700))], empty((4, 3))
    large = np.empty((60, 50))[:, ::2]
    sums = world.allreduce_init(single, average=False, name="sums")
    group = world.grouped_allreduce_init(grouped, average=False)
    shares = world.reducescatter_init(rows, op=Op.SUM)
    strided = world.allreduce_init(large, average=False)
    first = world.broadcast_init(single, world.size - 1)
    gathers, gather_group = world.allgather_init(rows), world.grouped_allgather_init([rows])
    for step in range(world.rank + 1):
        for run in (at_once, started):
            present = [rank + 1 for rank in range(world.size) if rank >= step]
            for tensor in (single, *grouped, rows, large):
                tensor[...] = world.rank + 1
            assert (run(sums) == sum(present)).all()
            assert all((tensor == sum(present)).all() for tensor in run(group))
            assert (run(shares) == sum(present)).all()
            assert (run(strided) == sum(present)).all()
            single[:] = world.rank
            assert (run(first) == world.size - 1).all()
            for gather in (gathers, gather_group):
                if step:
                    with pytest.raises(MismatchError, match=r"needs every rank, but ranks? .* ha(s|ve) called join"):
                        run(gather)
                else:
                    run(gather)
            if step:
                with pytest.raises(MismatchError, match=r"allreduce_init.* needs every rank"):
                    world.allreduce_init(single)
    world.join()
    for run in RUNS:
        single[:], rows[:] = world.rank, world.rank
        assert (run(sums) == sum(range(world.size))).all()
        np.testing.assert_array_equal(run(gathers)[:, 0], np.repeat(np.arange(world.size), 4))
    works(world)


def mapped_and_private_meet(world: World) -> None:
    """The last rank's tensors are private, the others' are in the arena; of some groups one tensor is private."""
    total = world.size * (world.size + 1) / 2
    make = np.empty if world.rank == world.size - 1 else mapped
    for count in (1000, 40_003, 600_001):
        tensor, kept = make(count), mapped(count)
        group = [mapped(count), make(count), make(7), mapped(70_000)]
        rows = make((world.rank + 1, count))
        operations: list[PersistentOperation[Any]] = [
            world.allreduce_init(tensor, average=False),
            world.allreduce_init(tensor, average=False, out=kept),
            world.grouped_allreduce_init(group, average=False),
            world.broadcast_init(tensor, 0),
        ]
        gathers = world.allgather_init(rows)
        for run in RUNS:
            for operation in operations:
                for each in (tensor, *group):
                    each[:] = world.rank + 1
                results = run(operation)
                wanted = 1 if operation is operations[-1] else total
                assert all((result == wanted).all() for result in (results if type(results) is list else [results]))
            rows[:] = world.rank
            np.testing.assert_array_equal(
                run(gathers)[:, -1], [rank for rank in range(world.size) for _ in range(rank + 1)]
            )
        for operation in operations:
            operation.free()
    works(world)


def process_sets(world: World) -> None:
    """Each has numbers of its own; a rank in several of them may start any of its operations."""
    everybody = empty(9)
    outer = world.allreduce_init(everybody, average=False)
    lower, upper = range((world.size + 2) // 2), range(world.size // 2, world.size)
    sets = [(ranks, world.add_process_set(ranks)) for ranks in (lower, upper)]
    inner = [(ranks, empty(70_000), its) for ranks, its in sets if its is not None]
    operations = [its.allreduce_init(tensor, average=False) for _, tensor, its in inner]
    for run in RUNS:
        everybody[:] = world.rank
        for (ranks, tensor, _), operation in zip(inner, operations, strict=True):
            tensor[:] = world.rank
            np.testing.assert_array_equal(run(operation), sum(ranks))
        np.testing.assert_array_equal(run(outer), sum(range(world.size)))
    for ranks, its in sets:
        world.remove_process_set(ranks, its)
    for operation in operations:
        with pytest.raises(ValueError, match="shut down"):
            operation()
    outer()
    works(world)


SCENARIOS = [
    all_reduces,
    every_dtype_and_operation,
    every_choice,
    results_are_made_once,
    groups,
    what_cannot_be_bound,
    mixed_with_everything_else,
    named_ones_in_any_order,
    mismatches,
    misuse,
    one_rank_refuses,
    overlaps,
    ranks_that_join,
    mapped_and_private_meet,
    process_sets,
]
