"""What the engine must do on every world: run by threads in one process and by processes under mpirun.

As in `scenarios`, each is a function of a world that asserts by itself, and inputs differ from rank to rank. Where one
rank must come late for certain, it does so after a barrier that the others enter only when they have seen what they
came to see.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from collectives.base.errors import CollectivesError, CollectiveTimeoutError, InvalidArgumentError, MismatchError
from collectives.base.reduce_op import Op
from collectives.worlds.world import World
from tests.support.scenarios.worlds import DTYPES, assert_close, expected, ops_for, sample

PATIENCE = 60.0


def total(world: World, factor: float = 1.0) -> float:
    """The sum over all ranks of (rank + 1) * factor."""
    return factor * sum(range(1, world.size + 1))


def mine(world: World, count: int = 10, factor: float = 1.0) -> np.ndarray[Any, Any]:
    """This rank's part of `total`."""
    return np.full(count, (world.rank + 1) * factor)


def works(world: World) -> None:
    """The ranks are in step, named and unnamed."""
    np.testing.assert_array_equal(world.allreduce(mine(world), op=Op.SUM), total(world))
    np.testing.assert_array_equal(world.allreduce(mine(world), op=Op.SUM, name="in step"), total(world))


# ---- handles


def handles(world: World) -> None:
    """A handle may be asked as often as one likes, and gives the same result each time."""
    tensor = mine(world)
    handle = world.allreduce_async_(tensor, op=Op.SUM, name="in place")
    assert world.synchronize(handle) is tensor and world.synchronize(handle) is tensor and world.poll(handle)
    np.testing.assert_array_equal(tensor, total(world))
    handle = world.allreduce_async(mine(world), op=Op.SUM)
    result = world.synchronize(handle)
    assert world.synchronize(handle) is result and world.synchronize(handle, timeout=0.0) is result
    np.testing.assert_array_equal(result, total(world))
    scalar = world.synchronize(world.allreduce_async(float(world.rank + 1), op=Op.SUM))
    assert isinstance(scalar, float) and scalar == total(world)


def the_background_works_alone(world: World) -> None:
    """Nobody waits, and the operation is done all the same; a dropped handle's, too."""
    dropped = mine(world)
    world.allreduce_async_(dropped, op=Op.SUM, name="dropped")
    handle = world.allreduce_async(mine(world), op=Op.SUM, name="polled")
    deadline = time.monotonic() + PATIENCE
    while not (world.poll(handle) and dropped[0] == total(world)):
        assert time.monotonic() < deadline, "polled in vain"
        time.sleep(0)
    np.testing.assert_array_equal(world.synchronize(handle), total(world))
    np.testing.assert_array_equal(dropped, total(world))


def a_timeout_leaves_the_operation_alone(world: World) -> None:
    if world.size == 1:
        return
    late = world.rank == world.size - 1
    handle = None
    if not late:
        handle = world.allreduce_async(mine(world), op=Op.SUM, name="late")
        for _ in range(2):
            with pytest.raises(CollectiveTimeoutError, match="late"):
                world.synchronize(handle, timeout=0.02)
        assert not world.poll(handle)
    world.barrier()
    handle = handle or world.allreduce_async(mine(world), op=Op.SUM, name="late")
    np.testing.assert_array_equal(world.synchronize(handle, timeout=PATIENCE), total(world))
    works(world)


def a_failed_handle_fails_each_time(world: World) -> None:
    if world.size == 1:
        return
    handle = world.allreduce_async(np.ones(3 + world.rank), name="wrong")
    for _ in range(3):
        with pytest.raises(MismatchError, match="wrong"):
            world.synchronize(handle)
    assert world.poll(handle)
    works(world)


def kinds(world: World, name: str | None) -> Iterator[tuple[Any, Callable[[Any], None]]]:
    """One asynchronous operation of every kind: its handle, and what checks its result. Submitted as they are asked
    for."""
    rank, size = world.rank, world.size

    def named(kind: str) -> str | None:
        return name and f"{name} {kind}"

    def same(wanted: Any) -> Callable[[Any], None]:
        return lambda result: np.testing.assert_array_equal(result, wanted)

    def all_same(wanted: Sequence[Any]) -> Callable[[Any], None]:
        def check(results: Any) -> None:
            assert isinstance(results, list) and len(results) == len(wanted)
            for result, right in zip(results, wanted, strict=True):
                np.testing.assert_array_equal(result, right)

        return check

    gathered = np.repeat(np.arange(size), np.arange(size) + 1)
    ranks = np.arange(size)
    yield world.allreduce_async(mine(world), op=Op.SUM, name=named("allreduce")), same(np.full(10, total(world)))
    yield world.allreduce_async_(mine(world), op=Op.MAX, name=named("allreduce_")), same(np.full(10, float(size)))
    group = [mine(world), mine(world, 3, 2.0).astype(np.float32), np.array([rank, 1])]
    sums = [np.full(10, total(world)), np.full(3, total(world, 2.0)), [ranks.sum(), size]]
    yield world.grouped_allreduce_async(group, op=Op.SUM, name=named("grouped_allreduce")), all_same(sums)
    yield (
        world.grouped_allreduce_async_([t.copy() for t in group], op=Op.SUM, name=named("grouped_allreduce_")),
        all_same(sums),
    )
    yield world.allgather_async(np.full(rank + 1, rank), name=named("allgather")), same(gathered)
    parts = [np.full(rank + 1, rank), np.full((2, 2), float(rank))]
    yield (
        world.grouped_allgather_async(parts, name=named("grouped_allgather")),
        all_same([gathered, np.repeat(ranks, 4).reshape(-1, 2)]),
    )
    yield world.broadcast_async(mine(world), size - 1, name=named("broadcast")), same(np.full(10, float(size)))
    yield world.broadcast_async_(mine(world), 0, name=named("broadcast_")), same(np.ones(10))
    roots = [np.full(10, float(size)), np.full((2, 2), size, np.int32)]
    mine_and_more = [mine(world), np.full((2, 2), rank + 1, np.int32)]
    yield (
        world.grouped_broadcast_async(mine_and_more, size - 1, name=named("grouped_broadcast")),
        all_same(roots),
    )
    yield (
        world.grouped_broadcast_async_([t.copy() for t in mine_and_more], size - 1, name=named("grouped_broadcast_")),
        all_same(roots),
    )
    rows = np.arange(2.0 * size).reshape(size, 2)
    yield world.reducescatter_async(rows, Op.SUM, name=named("reducescatter")), same(rows[rank : rank + 1] * size)
    both = [rows, rows.astype(np.int32)]
    shares = [part[rank : rank + 1] * size for part in both]
    yield world.grouped_reducescatter_async(both, op=Op.SUM, name=named("grouped_reducescatter")), all_same(shares)
    sent = np.repeat(np.arange(size) * 10 + rank, 2)

    def check_received(result: Any) -> None:
        np.testing.assert_array_equal(result[0], np.repeat(rank * 10 + ranks, 2))
        np.testing.assert_array_equal(result[1], np.full(size, 2))

    yield world.alltoall_async(sent, [2] * size, name=named("alltoall")), check_received
    yield world.alltoall_async(sent, name=named("even alltoall")), same(np.repeat(rank * 10 + ranks, 2))


def every_kind(world: World) -> None:
    """All kinds in flight at once, with names and without, fetched from the last to the first."""
    for name in ("first", None, "second", "first", None):
        for handle, check in reversed(list(kinds(world, name))):
            check(world.synchronize(handle))


# ---- matching


def names_in_any_order(world: World) -> None:
    numbers = list(range(40))
    for step in range(3):
        order = np.random.default_rng([world.rank, step]).permutation(numbers)
        submitted = {
            k: world.allreduce_async(mine(world, 1 + k, k + step), op=Op.SUM, name=f"tensor {k}")
            for k in order.tolist()
        }
        for k in np.random.default_rng([world.rank, step, 1]).permutation(numbers).tolist():
            np.testing.assert_array_equal(world.synchronize(submitted[k]), np.full(1 + k, total(world, k + step)))


def unnamed_in_the_order_of_calls(world: World) -> None:
    """Named ones among them, at another place on every rank, do not disturb the count; nor do blocking calls."""
    for step in range(3):
        submitted: list[tuple[Any, float]] = []
        for k in range(2 * world.size):
            if k == world.rank:
                named = world.allreduce_async(mine(world), op=Op.SUM, name="among them")
            if k % 2:
                submitted.append((world.broadcast_async(mine(world, 4, k), k % world.size), (k % world.size + 1) * k))
            else:
                submitted.append((world.allreduce_async(mine(world, 4, k), op=Op.SUM), total(world, k)))
        np.testing.assert_array_equal(world.allgather(np.array([world.rank + step])), np.arange(world.size) + step)
        for handle, wanted in submitted[:: -1 if world.rank % 2 else 1]:
            np.testing.assert_array_equal(world.synchronize(handle), np.full(4, wanted))
        np.testing.assert_array_equal(world.synchronize(named), np.full(10, total(world)))


def groups_complete_together(world: World) -> None:
    """Until the last rank has submitted the group, none of its tensors is touched; members are told apart by the
    group's name."""
    late = world.rank == world.size - 1
    tensors = [mine(world, count, 1.0 + k) for k, count in enumerate((5, 0, 1000, 40_000, 3))]
    handle = None
    if not late:
        handle = world.grouped_allreduce_async_(tensors, op=Op.SUM, name="group")
    other = world.grouped_allreduce_async([mine(world, 5)], op=Op.SUM, name="other group")
    world.barrier()
    np.testing.assert_array_equal(world.synchronize(other)[0], np.full(5, total(world)))
    if handle is not None:
        assert not world.poll(handle)
        for k, tensor in enumerate(tensors):
            np.testing.assert_array_equal(tensor, (world.rank + 1) * (1.0 + k))
    world.barrier()
    handle = handle or world.grouped_allreduce_async_(tensors, op=Op.SUM, name="group")
    for k, (result, tensor) in enumerate(zip(world.synchronize(handle), tensors, strict=True)):
        assert result is tensor
        np.testing.assert_array_equal(tensor, total(world, 1.0 + k))


def duplicate_names(world: World) -> None:
    """A name in flight is refused, by every kind of call; the operation in flight is not disturbed, and the name is
    free after it."""
    late = world.size > 1 and world.rank == world.size - 1
    for _ in range(2):
        handle = None
        if not late and world.size > 1:
            handle = world.allreduce_async(mine(world), op=Op.SUM, name="twice")
            calls: list[Callable[[], Any]] = [
                lambda: world.allreduce_async(mine(world), op=Op.SUM, name="twice"),
                lambda: world.allreduce(mine(world), op=Op.SUM, name="twice"),
                lambda: world.broadcast_async(mine(world), 0, name="twice"),
                lambda: world.grouped_allreduce_async([mine(world)], name="twice"),
            ]
            for call in calls:
                with pytest.raises(InvalidArgumentError, match="twice"):
                    call()
        world.barrier()
        handle = handle or world.allreduce_async(mine(world), op=Op.SUM, name="twice")
        np.testing.assert_array_equal(world.synchronize(handle), total(world))


def shapes_change_under_one_name(world: World) -> None:
    steps = [(4,), (4,), (2, 3), (0,), (70_000,), (4,), (2, 3)]
    for step, (shape, dtype) in enumerate(itertools.product(steps, (np.float32, np.int64))):
        handle = world.allreduce_async(np.full(shape, step + world.rank, dtype), op=Op.SUM, name="changing")
        steady = world.allreduce_async(mine(world), op=Op.SUM, name="steady")
        result = world.synchronize(handle)
        assert result.shape == shape and result.dtype == dtype
        np.testing.assert_array_equal(result, step * world.size + sum(range(world.size)))
        np.testing.assert_array_equal(world.synchronize(steady), total(world))
    kinds_of_call: list[Callable[[], Any]] = [
        lambda: world.allgather_async(np.full(1, world.rank), name="changing"),
        lambda: world.broadcast_async(np.full(1, world.rank), 0, name="changing"),
        lambda: world.allreduce_async(np.full(1, world.rank), op=Op.MIN, name="changing"),
    ]
    for call, wanted in zip(kinds_of_call * 2, [list(range(world.size)), [0], [0]] * 2, strict=True):
        assert world.synchronize(call()).tolist() == wanted


def more_names_than_the_cache_has_entries(world: World) -> None:
    """The cache forgets, and nobody notices; names that were forgotten come back."""
    count = world.config.cache_capacity + 76
    for step in range(3):
        numbers = range(count) if (step + world.rank) % 2 else range(count - 1, -1, -1)
        submitted = {k: world.allreduce_async(np.array([k + world.rank]), op=Op.SUM, name=f"name {k}") for k in numbers}
        for k, handle in submitted.items():
            assert world.synchronize(handle).tolist() == [k * world.size + sum(range(world.size))]


# ---- mistakes


def mistakes_in_flight(world: World) -> None:
    """Each mistake fails on every rank, names the tensor and shows what each rank asked for; nothing else in flight is
    lost."""
    if world.size == 1:
        return
    odd = world.rank == world.size - 1
    given: list[np.ndarray[Any, Any]] = []

    def data(count: int = 100) -> np.ndarray[Any, Any]:
        given.append(np.full(count, float(world.rank)))  # operations in flight may not share what they write
        return given[-1]

    table: dict[str, tuple[Callable[[str | None], Any], str, str]] = {
        "shape": (lambda name: world.allreduce_async_(data(50 if odd else 100), name=name), "100", "50"),
        "dtype": (
            lambda name: world.allreduce_async_(data().astype(np.float32) if odd else data(), name=name),
            "float64",
            "float32",
        ),
        "op": (lambda name: world.allreduce_async_(data(), op=Op.MAX if odd else Op.SUM, name=name), "'sum'", "'max'"),
        "root": (lambda name: world.broadcast_async_(data(), 1 if odd else 0, name=name), "root=0", "root=1"),
        "prescale": (
            lambda name: world.allreduce_async_(data(), prescale_factor=4.0 if odd else 1.0, name=name),
            "allreduce",
            "4.0",
        ),
        "postscale": (
            lambda name: world.allreduce_async_(data(), postscale_factor=4.0 if odd else 1.0, name=name),
            "allreduce",
            "4.0",
        ),
        "collective": (
            lambda name: world.allgather_async(data(), name=name) if odd else world.allreduce_async_(data(), name=name),
            "allreduce",
            "allgather",
        ),
        "members": (
            lambda name: world.grouped_allreduce_async_([data()] if odd else [data(), data(7)], name=name),
            "2 tensors",
            "1 tensor",
        ),
        "root of members": (
            lambda name: world.grouped_broadcast_async_([data(), data(7)], 1 if odd else 0, name=name),
            "root=0",
            "root=1",
        ),
        "member shape": (
            lambda name: world.grouped_allreduce_async_([data(), data(6 if odd else 7)], name=name),
            "float64[7]",
            "float64[6]",
        ),
        "row shape": (
            lambda name: world.allgather_async(data().reshape(50, 2) if odd else data(), name=name),
            "allgather",
            "(2,)",
        ),
    }
    for named in (True, False):
        good = [world.allreduce_async(mine(world, 20 + k), op=Op.SUM, name=f"good {k}") for k in range(4)]
        bad = {what: call(f"bad {what}" if named else None) for what, (call, _, _) in table.items()}
        good.append(world.allreduce_async(mine(world, 30), op=Op.SUM))
        for what, handle in bad.items():
            with pytest.raises(MismatchError) as caught:
                world.synchronize(handle)
            message = str(caught.value)
            assert f"rank{'s' * (world.size > 2)} 0" in message and f"{world.size - 1}" in message, message
            assert all(said in message for said in table[what][1:]), message
            assert not named or f"bad {what}" in message, message
        for array in given:
            np.testing.assert_array_equal(array, float(world.rank))
        for handle in good:
            np.testing.assert_array_equal(world.synchronize(handle), total(world))
        works(world)


def refused_on_one_rank(world: World) -> None:
    """One rank's arguments are refused: it is told why, at once or when it waits; the others that it was; nothing else
    is lost."""
    if world.size == 1:
        return
    data = mine(world, 2 * world.size)
    frozen = data.copy()
    frozen.flags.writeable = False
    no_op: Any = "sum"
    calls: list[tuple[Callable[[str | None], Any], Callable[[str | None], Any]]] = [
        (lambda name: world.allreduce_async("text", name=name), lambda name: world.allreduce_async(data, name=name)),
        (lambda name: world.allreduce_async_(frozen, name=name), lambda name: world.allreduce_async_(data, name=name)),
        (
            lambda name: world.broadcast_async(data, world.size, name=name),
            lambda name: world.broadcast_async(data, 0, name=name),
        ),
        (
            lambda name: world.allgather_async(np.array(1.0), name=name),
            lambda name: world.allgather_async(data, name=name),
        ),
        (
            lambda name: world.alltoall_async(data, [1] * world.size, name=name),
            lambda name: world.alltoall_async(data, name=name),
        ),
        (
            lambda name: world.grouped_allreduce_async([None], name=name),
            lambda name: world.grouped_allreduce_async([data], name=name),
        ),
        (
            lambda name: world.allreduce_async(data, op=no_op, name=name),
            lambda name: world.allreduce_async(data, name=name),
        ),
    ]
    for (wrong, right), name in itertools.product(calls, ("refused", None)):
        before = world.allreduce_async(mine(world), op=Op.SUM, name="before")
        if world.rank == 0:
            with pytest.raises((ValueError, TypeError)) as caught:
                world.synchronize(wrong(name))
            assert isinstance(caught.value, CollectivesError)
        else:
            handle = right(name)
            with pytest.raises(MismatchError, match="refused its arguments"):
                world.synchronize(handle)
        np.testing.assert_array_equal(world.synchronize(before), total(world))
        np.testing.assert_array_equal(data, float(world.rank + 1))
        works(world)


def a_wrong_keyword_on_one_rank(world: World) -> None:
    """It is a TypeError that names the function, and told to the others like any refused argument."""
    if world.size == 1:
        return
    data = mine(world, world.size)
    wrong: dict[str, Any] = {"prescale": 2.0}
    calls: dict[str, Callable[..., Any]] = {
        "allreduce": lambda **keywords: world.allreduce(data, **keywords),
        "allreduce_": lambda **keywords: world.allreduce_(data.copy(), name="named", **keywords),
        "grouped_allreduce_async": lambda **keywords: world.grouped_allreduce_async([data], **keywords).wait(),
        "grouped_allgather": lambda **keywords: world.grouped_allgather([], **keywords),
        "reducescatter": lambda **keywords: world.reducescatter(data, **keywords),
        "broadcast_async": lambda **keywords: world.broadcast_async(data, 0, **keywords).wait(),
        "allgather": lambda **keywords: world.allgather(data, **keywords),
        "alltoall": lambda **keywords: world.alltoall(data, **keywords),
    }
    for function, call in calls.items():
        if world.rank == 0:
            with pytest.raises(TypeError, match=rf"{function}\(\) got an unexpected keyword argument 'prescale'"):
                call(**wrong)
        else:
            with pytest.raises(MismatchError, match=r"(?s)refused its arguments: TypeError.*prescale"):
                call()
        works(world)


def the_same_memory_twice(world: World) -> None:
    """In a group every member reads what was submitted; broadcasts from one root share memory; all else in flight is
    refused on every rank. Small and large, so that windows, direct reads and messages all take part."""
    for count in (6, 300_000):
        values = np.arange(1.0, count + 1)
        b = values * (world.rank + 1)
        world.grouped_allreduce_([b, b, b[1:3], mine(world)], op=Op.SUM)
        np.testing.assert_array_equal(b, total(world) * values)
        b = values * (world.rank + 1)
        handles = [
            world.broadcast_async_(part, world.size - 1, name=f"tied {k}")
            for k, part in enumerate((b, b, b[1:3], b[::2]))
        ]
        for handle in handles:
            handle.wait()
        np.testing.assert_array_equal(b, world.size * values)
        b = values * (world.rank + 1)
        group = [b, b, b[1:3], mine(world)]
        assert all(a is b for a, b in zip(world.grouped_broadcast_(group, world.size - 1), group, strict=True))
        np.testing.assert_array_equal(b, world.size * values)
        if world.size == 1:
            continue
        b = values * (world.rank + 1)
        if world.rank > 0:
            world.barrier()  # until then rank 0 is alone with the first one, which cannot be complete
        first = world.allreduce_async_(b, op=Op.SUM, name="first")
        with pytest.raises(
            InvalidArgumentError if world.rank == 0 else MismatchError,
            match=r"(?s)second.*an operation in flight.*first",
        ):
            world.allreduce_async_(b[2:] if world.rank == 0 else b[2:].copy(), name="second").wait()
        if world.rank == 0:
            world.barrier()
        np.testing.assert_array_equal(first.wait(), total(world) * values)
        works(world)


def ranks_that_wait_for_each_other(world: World) -> None:
    """Rank 0 waits for "a", the others for "b": all are told at once what everybody waits for. What could meet, has
    met."""
    if world.size == 1:
        return
    own = "a" if world.rank == 0 else "b"
    waits: list[Callable[[], Any]] = [
        lambda: world.synchronize(world.allreduce_async(mine(world), name=own)),
        lambda: world.allreduce(mine(world), name=own),
        lambda: world.barrier() if world.rank == 0 else world.allreduce(mine(world), name="b"),
    ]
    for k, wait in enumerate(waits):
        fine = world.allreduce_async(mine(world), op=Op.SUM, name="fine")
        with pytest.raises(MismatchError) as caught:
            wait()
        message = str(caught.value)
        assert "rank 0" in message and f"{world.size - 1}" in message, message
        assert "'b'" in message and ("barrier" if k == 2 else "'a'") in message, message
        np.testing.assert_array_equal(world.synchronize(fine), total(world))
        for name in ("a", "b"):
            np.testing.assert_array_equal(world.allreduce(mine(world), op=Op.SUM, name=name), total(world))
        works(world)


# ---- process sets


def halves(size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two disjoint sets that hold all ranks."""
    return tuple(range(size // 2)), tuple(range(size // 2, size))


def disjoint_process_sets(world: World) -> None:
    """Each half does its own, at its own pace, in flight at once with what all do."""
    if world.size == 1:
        return
    low, high = (world.add_process_set(ranks) for ranks in halves(world.size))
    own = low or high
    assert own is not None and (low is None) != (high is None)
    ranks = halves(world.size)[0 if low else 1]
    assert own.size == len(ranks) and own.rank == ranks.index(world.rank)
    everybody = world.allreduce_async(mine(world), op=Op.SUM, name="tensor")
    for step in range(3 if low else 5):
        handle = own.allreduce_async(mine(world, 10, step), op=Op.SUM, name="tensor")
        np.testing.assert_array_equal(own.allgather(np.array([world.rank])), ranks)
        np.testing.assert_array_equal(own.broadcast(np.array([world.rank]), own.size - 1), ranks[-1:])
        np.testing.assert_array_equal(own.synchronize(handle), sum(rank + 1 for rank in ranks) * step)
    np.testing.assert_array_equal(own.allreduce(mine(world)), sum(rank + 1 for rank in ranks) / len(ranks))
    np.testing.assert_array_equal(world.synchronize(everybody), total(world))
    works(world)


def overlapping_process_sets(world: World) -> None:
    """The sets of all ranks but one: every rank is in several, and submits to them in an order of its own."""
    if world.size == 1:
        return
    members = [tuple(rank for rank in range(world.size) if rank != left_out) for left_out in range(world.size)]
    sets = [world.add_process_set(ranks) for ranks in members]
    assert [own is None for own in sets] == [world.rank not in ranks for ranks in members]
    for step in range(3):
        submitted = []
        for k in np.random.default_rng([world.rank, step]).permutation(world.size).tolist():
            own = sets[k]
            if own is not None:
                submitted.append((own, own.allreduce_async(mine(world, 8, step), op=Op.SUM, name="tensor"), members[k]))
                submitted.append((own, own.allreduce_async(mine(world, 5, step), op=Op.SUM), members[k]))
        for k in np.random.default_rng([world.rank, step, 1]).permutation(len(submitted)).tolist():
            own, handle, ranks = submitted[k]
            np.testing.assert_array_equal(own.synchronize(handle), step * sum(rank + 1 for rank in ranks))
        works(world)


def mistakes_in_a_process_set(world: World) -> None:
    """They concern the members only, and are told in the world's numbers."""
    if world.size < 3:
        return
    ranks = (world.size - 2, world.size - 1)
    own = world.add_process_set(ranks)
    everybody = world.allreduce_async(mine(world), op=Op.SUM, name="everybody")
    if own is not None:
        with pytest.raises(MismatchError, match="wrong") as caught:
            own.allreduce(np.ones(2 + own.rank), name="wrong")
        assert all(f"rank {rank}" in str(caught.value) for rank in ranks), str(caught.value)
        with pytest.raises(MismatchError, match="mine 0"):
            own.allreduce(np.ones(2), name=f"mine {own.rank}")
        works(own)
    np.testing.assert_array_equal(world.synchronize(everybody), total(world))
    works(world)


def a_process_set_of_one(world: World) -> None:
    """Everything works alone, whatever the others do."""
    alone = [world.add_process_set((rank,)) for rank in range(world.size)][world.rank]
    assert alone is not None and alone.size == 1 and alone.rank == 0
    handle = world.allreduce_async(mine(world), op=Op.SUM, name="everybody")
    every_kind(alone)
    assert alone.join() == world.rank, "ranks are told in the world's numbers"
    np.testing.assert_array_equal(world.synchronize(handle), total(world))


# ---- joining


def all_ranks_join(world: World) -> None:
    for _ in range(3):
        last = world.join()
        assert 0 <= last < world.size and world.allgather_object(last) == [last] * world.size
        works(world)


def every_reduction_after_a_join(world: World) -> None:
    """Rank 0 has no more data: it is as if it gave neutral elements; an average still divides by all."""
    if world.size == 1:
        return
    if world.rank > 0:
        for dtype in DTYPES:
            for op in ops_for(dtype):
                if op.name == "ADASUM":
                    continue
                parts = [sample(dtype, 700, rank) for rank in range(1, world.size)]
                if op is Op.AVERAGE and dtype.kind != "b":
                    wanted = expected(Op.SUM, parts)
                    wanted = np.trunc(wanted / world.size).astype(dtype) if dtype.kind in "iu" else wanted / world.size
                else:
                    wanted = expected(op, parts)
                own = parts[world.rank - 1]
                assert_close(world.allreduce(own, op=op), wanted, world.size)
                assert_close(
                    world.synchronize(world.allreduce_async_(own.copy(), op=op, name=f"{dtype} {op}")),
                    wanted,
                    world.size,
                )
                shares = [np.array_split(wanted, world.size)[world.rank]] * 2
                for result in (world.reducescatter(own, op), world.grouped_reducescatter([own], op=op)[0]):
                    assert_close(result, shares.pop(), world.size)
        scaled = world.allreduce(mine(world), op=Op.PRODUCT, prescale_factor=2.0, postscale_factor=0.5)
        np.testing.assert_allclose(scaled, np.prod([2.0 * (rank + 1) for rank in range(1, world.size)]) / 2)
    last = world.join()
    assert last != 0
    works(world)


def every_collective_after_a_join(world: World) -> None:
    """What moves data gets no rows from the ranks that have joined; they join one after the other, the lowest first."""
    size = world.size
    for joined in range(size):
        if world.rank < joined:
            continue
        active = list(range(joined, size))
        np.testing.assert_array_equal(world.allgather(np.full(2, world.rank)), np.repeat(active, 2))
        first, second = world.grouped_allgather([np.full(1, world.rank), np.full((2, 3), world.rank)], name="gathered")
        np.testing.assert_array_equal(first, active)
        np.testing.assert_array_equal(second, np.repeat(active, 2)[:, None].repeat(3, 1))
        np.testing.assert_array_equal(world.broadcast(mine(world), size - 1), size)
        np.testing.assert_array_equal(world.broadcast_(mine(world), joined, name="broadcast"), joined + 1)
        for result in world.grouped_broadcast([mine(world), mine(world, 3)], size - 1):
            np.testing.assert_array_equal(result, size)
        received, counts = world.alltoall(np.full(3 * size, world.rank), [3] * size)
        np.testing.assert_array_equal(received, np.repeat(active, 3))
        np.testing.assert_array_equal(counts, [3 if rank in active else 0 for rank in range(size)])
        sums = world.grouped_allreduce([mine(world), np.array([world.rank])], op=Op.SUM)
        np.testing.assert_array_equal(sums[0], sum(rank + 1 for rank in active))
        np.testing.assert_array_equal(sums[1], sum(active))
        world.barrier()
    assert world.join() == size - 1
    works(world)


def a_broadcast_from_a_rank_that_has_joined(world: World) -> None:
    """It has nothing to give: an error where it was called, and the others go on."""
    if world.size == 1:
        return
    if world.rank > 0:
        for name in ("from nobody", None):
            data = mine(world)
            handle = world.broadcast_async_(data, 0, name=name)
            with pytest.raises(MismatchError, match=r"has called join\(\)"):
                world.synchronize(handle)
            np.testing.assert_array_equal(data, world.rank + 1)
            with pytest.raises(MismatchError, match=r"has called join\(\)"):
                world.grouped_broadcast([data, data[:3]], 0, name=name)
            np.testing.assert_array_equal(world.allreduce(mine(world), op=Op.SUM), total(world) - 1)
    world.join()
    works(world)


def handles_outlast_a_join(world: World) -> None:
    """What a rank submitted before it joined is its own contribution, scaled like any, not a neutral one."""
    before = world.allreduce_async(mine(world), op=Op.SUM, prescale_factor=2.0, name="before")
    unnamed = world.allreduce_async(mine(world), op=Op.SUM)
    if world.rank == world.size - 1:
        for k in range(5):
            after = world.allreduce_async(mine(world), op=Op.SUM, prescale_factor=2.0, name=f"after {k}")
            np.testing.assert_array_equal(world.synchronize(after), 2.0 * world.size)
            np.testing.assert_array_equal(world.allreduce(mine(world), op=Op.SUM), world.size)
    assert world.join() == world.size - 1
    np.testing.assert_array_equal(world.synchronize(before), total(world, 2.0))
    np.testing.assert_array_equal(world.synchronize(unnamed), total(world))
    works(world)


def mistakes_after_a_join(world: World) -> None:
    if world.size < 3:
        return
    if world.rank > 0:
        with pytest.raises(MismatchError, match="wrong"):
            world.allreduce(np.ones(2 if world.rank == 1 else 3), name="wrong")
        with pytest.raises(MismatchError, match="'a'"):
            world.allreduce(np.ones(2), name="a" if world.rank == 1 else "b")
        np.testing.assert_array_equal(world.allreduce(mine(world), op=Op.SUM), total(world) - 1)
    world.join()
    works(world)


# ---- the steady state


def a_training_loop(world: World) -> None:
    """The second step plans nothing, nor does any after it, and all their rounds are unanimous.

    For worlds whose background thread lets a step's operations gather for longer than a step takes.
    """
    shapes = [(64, 32), (32,), (300, 200), (7,), (1,), (500_000,), (10, 10), (3, 3, 3)]
    group: list[np.ndarray[Any, Any]] = [np.zeros(40), np.zeros(50, np.float32)]
    counts = []
    for step in range(5):
        gradients = [
            mine(world, int(np.prod(shape)), step + k).astype(np.float32).reshape(shape)
            for k, shape in enumerate(shapes)
        ]
        submitted = [world.allreduce_async_(gradient, name=f"gradient {k}") for k, gradient in enumerate(gradients)]
        submitted.append(world.grouped_allreduce_async([part + world.rank for part in group], name="group"))
        submitted.append(world.broadcast_async(np.array([step + world.rank]), 0))
        *_, together, root = [world.synchronize(handle) for handle in submitted]
        for k, gradient in enumerate(gradients):
            np.testing.assert_allclose(gradient, total(world, step + k) / world.size, rtol=1e-6)
        np.testing.assert_allclose(together[1], (world.size - 1) / 2)
        assert root.tolist() == [step]
        assert world.synchronize(world.allreduce_async(float(world.rank), name="loss")) == (world.size - 1) / 2
        counts.append(world.statistics.copy())
    for earlier, later in itertools.pairwise(counts):
        assert later.plans_made == earlier.plans_made
        assert (later.compared, later.exchanged) == (earlier.compared, earlier.exchanged)
        assert later.rounds - earlier.rounds == later.unanimous - earlier.unanimous
        assert later.tensors > earlier.tensors or world.size == 1


def a_training_loop_in_orders_of_their_own(world: World) -> None:
    """Ranks whose gradients become ready in another order compare them, but tell and plan nothing after the second
    step."""
    counts = []
    order = np.random.default_rng(world.rank).permutation(30).tolist()
    for step in range(5):
        submitted = {
            k: world.allreduce_async(mine(world, 10 + k, step), op=Op.SUM, name=f"gradient {k}") for k in order
        }
        for k, handle in submitted.items():
            np.testing.assert_array_equal(world.synchronize(handle), np.full(10 + k, total(world, step)))
        counts.append(world.statistics.copy())
    for earlier, later in itertools.pairwise(counts[1:]):
        assert (later.plans_made, later.exchanged) == (earlier.plans_made, earlier.exchanged)


SCENARIOS: list[Callable[[World], None]] = [
    handles,
    the_background_works_alone,
    a_timeout_leaves_the_operation_alone,
    a_failed_handle_fails_each_time,
    every_kind,
    names_in_any_order,
    unnamed_in_the_order_of_calls,
    groups_complete_together,
    duplicate_names,
    shapes_change_under_one_name,
    more_names_than_the_cache_has_entries,
    mistakes_in_flight,
    refused_on_one_rank,
    a_wrong_keyword_on_one_rank,
    the_same_memory_twice,
    ranks_that_wait_for_each_other,
    disjoint_process_sets,
    overlapping_process_sets,
    mistakes_in_a_process_set,
    a_process_set_of_one,
    all_ranks_join,
    every_reduction_after_a_join,
    every_collective_after_a_join,
    a_broadcast_from_a_rank_that_has_joined,
    handles_outlast_a_join,
    mistakes_after_a_join,
]

STEADY: list[Callable[[World], None]] = [a_training_loop, a_training_loop_in_orders_of_their_own]
"""For worlds with a long cycle time."""
