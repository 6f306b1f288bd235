"""The same memory in several operations in flight: refused on every rank, or of one defined meaning, on every
transport."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collectives.base.config import Config
from collectives.base.errors import CollectivesError, InvalidArgumentError, InvalidTypeError, MismatchError
from collectives.base.reduce_op import Op
from collectives.engine.handles import Handle
from collectives.tensors.compression import Compression
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World
from tests.support.scenarios.conformance import until

WAYS: dict[str, tuple[Config, Any]] = {
    "window": (Config(transport="window"), None),
    "direct-read": (Config(transport="direct-read"), None),
    "messages": (Config(), [(0,), (1,), (2,)]),
    "no fusion": (Config(fusion_threshold=0), None),
}


def on_every_way(program: Callable[[World], Any], size: int = 3) -> None:
    for config, hosts in WAYS.values():
        thread_groups.run(
            size, program, hosts=hosts and hosts[:size], make_world=lambda group, config=config: World(group, config)
        )


def mine(world: World, count: int = 6) -> np.ndarray[Any, Any]:
    """Different on every rank, and in every place."""
    return np.arange(1.0, count + 1) * 10.0**world.rank


def total(world: World, count: int = 6) -> np.ndarray[Any, Any]:
    return np.arange(1.0, count + 1) * sum(10.0**rank for rank in range(world.size))


def works(world: World) -> None:
    np.testing.assert_array_equal(world.allreduce(mine(world), average=False), total(world))


OVERLAPS: dict[str, Callable[[World, Any], Any]] = {
    "the same": lambda world, b: world.allreduce_async_(b, average=False, name="second"),
    "unnamed": lambda world, b: world.allreduce_async_(b, average=False),
    "a part": lambda world, b: world.allreduce_async_(b[2:4], average=False, name="second"),
    "every other": lambda world, b: world.allreduce_async_(b[::2], average=False, name="second"),
    "backwards": lambda world, b: world.allreduce_async_(b[::-1], average=False, name="second"),
    "read": lambda world, b: world.allreduce_async(b, average=False, name="second"),
    "blocking": lambda world, b: world.allreduce_(b, average=False, name="second"),
    "blocking read": lambda world, b: world.allreduce(b, average=False, name="second"),
    "broadcast": lambda world, b: world.broadcast_async_(b, 0, name="second"),
    "gathered": lambda world, b: world.allgather_async(b, name="second"),
    "in a group": lambda world, b: world.grouped_allreduce_async_([mine(world), b[1:]], average=False, name="second"),
    "compressed": lambda world, b: world.allreduce_async_(
        b, average=False, name="second", compression=Compression.fp16
    ),
}


@pytest.mark.parametrize("second", OVERLAPS.values(), ids=OVERLAPS)
def test_memory_that_an_operation_in_flight_writes_is_refused_to_another(second: Callable[[World, Any], Any]) -> None:
    """Rank 1 has the same memory in two operations; the others do not, and hear of it. The first goes on, and the next
    call works."""

    refused = threading.Event()

    def program(world: World) -> None:
        b = mine(world)
        if world.rank == 1:
            first = world.allreduce_async_(b, average=False, name="first")
            with pytest.raises(InvalidArgumentError) as caught:
                second(world, b)
            for part in ("rank 1: ", "'first'", "submitted at", __file__, "synchronize that operation first", "a copy"):
                assert part in str(caught.value)
            refused.set()
        else:
            assert refused.wait(20)  # until then the first one cannot be complete
            first = world.allreduce_async_(b, average=False, name="first")
            with pytest.raises(
                MismatchError, match=r"(?s)rank 1: refused its arguments: InvalidArgumentError: .*'first'"
            ):
                result = second(world, mine(world))
                result.wait()
        np.testing.assert_array_equal(first.wait(), total(world))
        works(world)

    thread_groups.run(3, program, make_world=World)


def test_failed_and_refused_operations_leave_their_memory() -> None:
    def program(world: World) -> None:
        b = mine(world)
        for _ in range(2):
            with pytest.raises(MismatchError):
                world.allreduce_async_(b[: 3 + world.rank], name="differs").wait()
            with pytest.raises(InvalidTypeError if world.rank == 0 else MismatchError):
                world.allreduce_async_("no tensor" if world.rank == 0 else b, name="refused").wait()
        np.testing.assert_array_equal(world.allreduce_(b, average=False), total(world))
        assert not world._in_flight.operations
        if world.rank == 0:
            handle = world.allreduce_async_(b, average=False)
            assert world._in_flight.operations
            world.shutdown()
            with pytest.raises(CollectivesError):
                handle.wait()
            assert not world._in_flight.operations

    thread_groups.run(2, program, make_world=World)


def test_what_does_not_share_an_element_is_not_refused() -> None:
    def program(world: World) -> None:
        table = np.stack([mine(world) * (row + 1) for row in range(4)])
        handles = [
            world.allreduce_async_(table[:, column], average=False, name=f"column {column}") for column in range(6)
        ]
        for handle in handles:
            handle.wait()
        np.testing.assert_array_equal(table, np.stack([total(world) * (row + 1) for row in range(4)]))
        flat = mine(world, 12)
        handles = [world.allreduce_async_(flat[at : at + 3], average=False, name=f"part {at}") for at in (9, 0, 6, 3)]
        handles.append(world.allreduce_async_(flat[5:5], average=False, name="nothing"))
        for handle in handles:
            handle.wait()
        np.testing.assert_array_equal(flat, total(world, 12))

    on_every_way(program)


def test_memory_that_is_only_read_is_shared() -> None:
    def program(world: World) -> None:
        b = mine(world)
        handles = [
            world.allreduce_async(part, average=False, name=f"read {at}")
            for at, part in enumerate((b, b, b[2:], b[::2]))
        ]
        handles.append(world.grouped_allreduce_async([b, b], average=False, name="group"))
        handles.append(world.allgather_async(b, name="gathered"))
        results = [handle.wait() for handle in handles]
        sums = total(world)
        for result, wanted in zip(results, (sums, sums, sums[2:], sums[::2]), strict=False):
            np.testing.assert_array_equal(result, wanted)
        np.testing.assert_array_equal(results[4], [sums, sums])
        assert results[5].shape == (6 * world.size,)

    on_every_way(program)


def test_within_a_group_every_member_reads_what_was_submitted() -> None:
    def program(world: World) -> None:
        for count in (6, 300_000):
            b = mine(world, count)
            results = world.grouped_allreduce_([b, b, b[1:3], mine(world)], average=False, prescale_factor=0.5)
            np.testing.assert_array_equal(b, total(world, count) / 2)
            assert results[0] is b and results[1] is b
            np.testing.assert_array_equal(results[3], total(world) / 2)
            lone = mine(world)  # on one rank only: what is planned does not depend on it
            pair = [lone, lone] if world.rank == 0 else [lone, mine(world)]
            world.grouped_allreduce_async_(pair, average=False, name="pair").wait()
            for member in pair:
                np.testing.assert_array_equal(member, total(world))
            for compression in (Compression.fp16, Halving):
                c = mine(world)
                world.grouped_allreduce_([c[::2], c, c], average=False, compression=compression)
                np.testing.assert_array_equal(c, total(world))

    on_every_way(program)
    thread_groups.run(1, program, make_world=World)


class Halving:
    """A compressor of the user's."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor / 2, None

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        return tensor * 2


def test_process_sets_share_the_rule() -> None:
    def program(world: World) -> None:
        child = world.add_process_set(range(world.size))
        assert child is not None
        b = mine(world)
        if world.rank == 0:
            handle = world.allreduce_async_(b, average=False, name="b")
            with pytest.raises(InvalidArgumentError, match="an operation in flight"):
                child.allreduce_(b, average=False)
        else:
            with pytest.raises(MismatchError, match="refused its arguments"):
                child.allreduce_(mine(world), average=False)
            handle = world.allreduce_async_(b, average=False, name="b")
        np.testing.assert_array_equal(handle.wait(), total(world))
        works(child)
        works(world)

    thread_groups.run(2, program, make_world=World)


def test_threads_of_a_rank_that_share_memory_are_told() -> None:
    """A blocking call whose peers are late is in flight, too."""

    def program(world: World) -> None:
        b = mine(world)
        if world.rank == 0:
            thread = threading.Thread(target=lambda: world.allreduce_(b, average=False, name="blocking"))
            thread.start()
            until(lambda: bool(world._in_flight.operations))
            with pytest.raises(InvalidArgumentError, match="'blocking'"):
                world.allreduce_async_(b, average=False, name="second")
            thread.join(20)
        else:
            with pytest.raises(MismatchError):
                world.allreduce_async_(mine(world), average=False, name="second").wait()
            world.allreduce_(b, average=False, name="blocking")
        works(world)

    thread_groups.run(2, program, make_world=World)


def test_an_interrupt_while_memory_is_claimed_leaves_no_claim() -> None:
    def program(world: World) -> None:
        tensor, in_flight = mine(world), world._engine.in_flight

        def interrupted(handle: Handle) -> None:
            type(in_flight).claim(in_flight, handle)
            raise KeyboardInterrupt

        in_flight.claim = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            world.allreduce_async_(tensor, op=Op.SUM, name="tensor")
        del in_flight.claim  # type: ignore[method-assign]
        assert not in_flight.operations
        np.testing.assert_array_equal(world.allreduce_async_(tensor, op=Op.SUM, name="tensor").wait(), total(world))

    thread_groups.run(2, program, make_world=World)
