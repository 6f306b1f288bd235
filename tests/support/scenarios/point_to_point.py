"""What messages between two ranks must do, on any number of ranks and over any transport.

A scenario is a function of a world. Sizes lie on both sides of those up to which a payload travels with its envelope.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from collectives.base.dtypes import SUPPORTED
from collectives.base.errors import InvalidArgumentError, InvalidTypeError, MismatchError
from collectives.engine.messages.matching import ANY_SOURCE, ANY_TAG
from collectives.engine.messages.transfers import Status
from collectives.worlds.world import World

COUNTS = (0, 1, 1000, 5000, 70_000, 700_000)
"""Elements of four bytes."""
LARGE = 100_000


def values(source: int, number: int, count: int, dtype: Any = np.float32) -> np.ndarray:
    """What a rank sends as its message with this number; different for every rank and message."""
    return (np.arange(count) % 100 + 7 * source + number).astype(dtype)


def around(world: World) -> tuple[int, int]:
    """The next rank, and the one before."""
    return (world.rank + 1) % world.size, (world.rank - 1) % world.size


def a_ring(world: World) -> None:
    following, before = around(world)
    for number, count in enumerate(COUNTS):
        mine, into = values(world.rank, number, count), np.zeros(count, np.float32)
        handle = world.isend(mine, following, number)
        assert world.recv(into, before, number) is into
        assert handle.wait() is None
        np.testing.assert_array_equal(into, values(before, number, count))
        np.testing.assert_array_equal(mine, values(world.rank, number, count))


def blocking_calls(world: World) -> None:
    if world.size > 1 and world.rank < 2:
        peer = 1 - world.rank
        for number, count in enumerate(COUNTS):
            into = np.zeros(count, np.float32)
            if world.rank == 0:
                world.send(values(0, number, count), peer)
                world.recv(into, peer)
            else:
                world.recv(into, peer)
                world.send(values(1, number, count), peer)
            np.testing.assert_array_equal(into, values(peer, number, count))


def an_exchange(world: World) -> None:
    following, before = around(world)
    for number, count in enumerate(COUNTS):
        mine, into, status = values(world.rank, number, count), np.zeros(count, np.float32), Status()
        assert world.sendrecv(mine, following, into, before, 3, status=status) is into
        np.testing.assert_array_equal(into, values(before, number, count))
        assert (status.source, status.tag, status.count) == (before, 3, count)
        new = world.sendrecv(mine, following, None, before, world.rank, before)
        np.testing.assert_array_equal(new, values(before, number, count))


def every_dtype(world: World) -> None:
    following, before = around(world)
    for tag, dtype in enumerate(SUPPORTED):
        for shape in ((), (3,), (2, 3, 5), (0, 4), (40, 1000)):
            count = int(np.prod(shape))
            mine = values(world.rank, tag, count, dtype).reshape(shape)
            status = Status()
            handle = world.isend(mine, following, tag)
            got = world.recv(None, before, tag, status=status)
            handle.wait()
            expected = values(before, tag, count, dtype).reshape(shape)
            assert (got.dtype, got.shape, status.dtype) == (dtype, shape, SUPPORTED[dtype])
            assert got.tobytes() == expected.tobytes()  # NumPy does not know the NaN of each float8


def to_oneself(world: World) -> None:
    for count in COUNTS:
        sent, first, second = values(world.rank, 1, count), np.zeros(count, np.float32), np.zeros(count, np.float32)
        receiving = world.irecv(first, world.rank, 1)
        sending = world.isend(sent, world.rank, 1)
        sending.wait()
        assert receiving.wait() is first
        assert receiving.status.source == world.ranks[world.rank]
        sending = world.isend(sent, world.rank, 2)  # a copy, as of `send`: it may be changed at once
        assert sending.poll()
        sending.wait()
        world.send(sent, world.rank, 3)
        world.sendrecv(sent, world.rank, second, world.rank, 4, 2)
        sent[...] = -1
        third, fourth = world.recv(None, ANY_SOURCE, 3), world.recv(None, world.rank, 4)
        for got in (first, second, third, fourth):
            np.testing.assert_array_equal(got, values(world.rank, 1, count))
        world.isend(sent, world.rank, 5).wait()
        with pytest.raises(MismatchError, match="tag 5"):
            world.recv(np.zeros(count, np.int64), world.rank, 5)


def no_overtaking(world: World) -> None:
    """Many of one tag, small and large in turn, and more than a ring holds; sent before any receive, and after."""
    following, before = around(world)
    counts = [(1, 30_000, 1000)[number % 3] for number in range(60)]
    for ahead in (False, True):
        into = [np.zeros(count, np.float32) for count in counts]
        receives = [world.irecv(each, before, 4) for each in into] if ahead else []
        sends = [world.isend(values(world.rank, number, count), following, 4) for number, count in enumerate(counts)]
        receives = receives or [world.irecv(each, before, 4) for each in into]
        for handle in [*sends, *receives]:
            handle.wait()
        for number, count in enumerate(counts):
            np.testing.assert_array_equal(into[number], values(before, number, count))


def a_flood(world: World) -> None:
    """More small messages than a ring holds, and a collective before anybody receives."""
    following, before = around(world)
    sends = [world.isend(values(world.rank, number, 500), following, number % 7) for number in range(300)]
    assert world.allreduce(np.ones(5), average=False)[0] == world.size
    for number in range(300):
        np.testing.assert_array_equal(world.recv(None, before, number % 7), values(before, number, 500))
    for handle in sends:
        handle.wait()


def tags_in_another_order(world: World) -> None:
    following, before = around(world)
    tags = list(range(20))
    sends = [world.isend(values(world.rank, tag, 10 + tag * 500), following, tag) for tag in tags]
    Random(5).shuffle(tags)
    for tag in tags:
        np.testing.assert_array_equal(world.recv(None, before, tag), values(before, tag, 10 + tag * 500))
    for handle in sends:
        handle.wait()


def any_source(world: World) -> None:
    """Rank 0 receives from all, itself included, whoever comes first."""
    count = 20_000
    sends = [world.isend(values(world.rank, number, count), 0, 10 + number) for number in range(3)]
    if world.rank == 0:
        seen = set()
        for _ in range(world.size * 3):
            status = Status()
            into = np.zeros(count + 5, np.float32)
            world.recv(into, ANY_SOURCE, ANY_TAG, status=status)
            assert status.count == count and status.shape == (count,) and status.dtype == "float32"
            np.testing.assert_array_equal(into[:count], values(status.source, status.tag - 10, count))
            np.testing.assert_array_equal(into[count:], 0)
            assert all((status.source, tag) in seen for tag in range(10, status.tag)), "overtaken"
            seen.add((status.source, status.tag))
        assert len(seen) == world.size * 3
    for handle in sends:
        handle.wait()


def a_shorter_message(world: World) -> None:
    """The elements of a strided tensor that the message does not have stay as they are."""
    following, before = around(world)
    for count in (3, 12_000):
        handle = world.isend(values(world.rank, 0, count), following)
        memory = np.full((2 * count, 2), -1, np.float32)
        world.recv(memory[:, 0], before)
        handle.wait()
        np.testing.assert_array_equal(memory[:count, 0], values(before, 0, count))
        np.testing.assert_array_equal(memory[count:, 0], -1)
        np.testing.assert_array_equal(memory[:, 1], -1)


def a_new_tensor_of_given_shape(world: World) -> None:
    following, before = around(world)
    handle = world.isend(values(world.rank, 0, 12).reshape(3, 4), following)
    got = world.recv(None, before, shape=(3, 4), dtype="float32")
    handle.wait()
    np.testing.assert_array_equal(got, values(before, 0, 12).reshape(3, 4))


def refused_messages(world: World) -> None:
    """The receiver raises, and names sender, tag, what was expected and what was found; then all goes on."""
    following, before = around(world)
    sender = world.ranks[before]
    for count in (10, LARGE):
        into = np.full(count, -1, np.float32)
        for tag, wrong in enumerate(
            (np.zeros(count + 1, np.float32), np.zeros(count, np.int32), np.zeros((2, count // 2), np.float32))
        ):
            sending = world.isend(wrong, following, tag)
            with pytest.raises(MismatchError, match="expected") as caught:
                world.recv(into if tag < 2 else None, before, tag, **({"shape": (count,)} if tag == 2 else {}))
            for part in (f"from rank {sender}, tag {tag}", str(count), f"got a message of {wrong.size} elements"):
                assert part in str(caught.value)
            np.testing.assert_array_equal(into, -1)
            _settle(sending)
        handle = world.isend(values(world.rank, 0, count), following)
        np.testing.assert_array_equal(world.recv(into, before), values(before, 0, count))
        handle.wait()


def _settle(handle: Any) -> None:
    """Wait for a send that its receiver has refused; whether the sender is told depends on size and transport."""
    try:
        handle.wait()
    except MismatchError as error:
        assert "the receiver has refused it: expected" in str(error)


def refused_arguments(world: World) -> None:
    tensor, frozen = np.zeros(3), np.zeros(3)
    frozen.flags.writeable = False
    for wrong in (world.size, -2):
        with pytest.raises(InvalidArgumentError, match=f"dst: expected a rank from 0 to {world.size - 1}, got {wrong}"):
            world.send(tensor, wrong)
        with pytest.raises(InvalidArgumentError, match="src: expected a rank"):
            world.irecv(tensor, wrong)
    with pytest.raises(InvalidArgumentError, match=f"rank {world.ranks[world.rank]}: tag: expected an integer"):
        world.isend(tensor, 0, -1)
    with pytest.raises(InvalidTypeError, match="tag: expected an integer"):
        world.recv(tensor, 0, 0.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="dst: expected a rank"):
        world.send(tensor, "1")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="read-only"):
        world.recv(frozen, 0)
    with pytest.raises(InvalidTypeError, match="list"):
        world.send([1, 2], 0)
    with pytest.raises(InvalidArgumentError, match="shape: expected None"):
        world.recv(tensor, 0, shape=(3,))
    with pytest.raises(InvalidTypeError, match="shape: expected non-negative"):
        world.recv(None, 0, shape="x")
    for call in (world.send, world.isend, world.recv, world.irecv):
        with pytest.raises(TypeError, match=rf"{call.__name__}\(\) got an unexpected keyword argument 'name'"):
            call(tensor, 0, name="x")  # type: ignore[operator]


def memory_in_flight(world: World) -> None:
    """What a receive in flight writes, nothing else may use; what a send reads, others may read."""
    following, before = around(world)
    into, mine = np.zeros(LARGE, np.float32), values(world.rank, 0, LARGE)
    receiving = world.irecv(into, before, 1)
    with pytest.raises(InvalidArgumentError, match="is written by an operation in flight: recv from rank"):
        world.irecv(into[5:], before, 2)
    world.barrier()  # nobody has sent anything yet
    sends = [world.isend(mine, following, 1), world.isend(mine, following, 2)]
    total = world.allreduce(mine, average=False)
    np.testing.assert_array_equal(total, sum(values(rank, 0, LARGE) for rank in range(world.size)))
    other = world.recv(None, before, 2)
    np.testing.assert_array_equal(receiving.wait(), other)
    np.testing.assert_array_equal(other, values(before, 0, LARGE))
    for handle in sends:
        handle.wait()
    again = world.irecv(into, world.rank, 3)  # free again
    world.send(mine, world.rank, 3)
    np.testing.assert_array_equal(again.wait(), mine)


def mixed_with_collectives(world: World) -> None:
    """Collectives in flight, blocking and persistent ones, while messages are under way."""
    following, before = around(world)
    parameter = np.ones(50_000, np.float32)
    persistent = world.allreduce_init(parameter, average=False)
    for step in range(8):
        count = (10, 60_000)[step % 2]
        into = np.zeros(count, np.float32)
        reduced = world.allreduce_async(values(world.rank, step, 1000), average=False, name="gradients")
        receiving = world.irecv(into, before, step)
        total = world.allgather(np.array([world.rank]))
        sending = world.isend(values(world.rank, step, count), following, step)
        parameter[...] = 1
        persistent()
        receiving.wait()
        np.testing.assert_array_equal(reduced.wait(), sum(values(r, step, 1000) for r in range(world.size)))
        sending.wait()
        np.testing.assert_array_equal(into, values(before, step, count))
        np.testing.assert_array_equal(total, range(world.size))
        assert (parameter == world.size).all()


def a_collective_between_post_and_wait(world: World) -> None:
    """The sender waits in a blocking send of much, the receiver in a collective: the message moves meanwhile."""
    following, before = around(world)
    if world.size == 1:
        return
    into = np.zeros(LARGE, np.float32)
    receiving = world.irecv(into, before, 9)
    world.send(values(world.rank, 1, LARGE), following, 9)
    world.barrier()
    receiving.wait()
    np.testing.assert_array_equal(into, values(before, 1, LARGE))


def several_threads(world: World) -> None:
    """Each thread with a tag of its own, in both directions."""
    following, before = around(world)
    problems: list[BaseException] = []

    def body(tag: int) -> None:
        try:
            for number in range(10):
                count = (5, 30_000)[(number + tag) % 2]
                got = world.sendrecv(values(world.rank, number + tag, count), following, None, before, tag)
                np.testing.assert_array_equal(got, values(before, number + tag, count))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=body, args=(tag,)) for tag in range(3)]
    for thread in threads:
        thread.start()
    for number in range(5):
        assert world.allreduce(np.full(3, number))[0] == number
    for thread in threads:
        thread.join()
    assert not problems, problems


def within_a_process_set(world: World) -> None:
    """Ranks are those of the set, and its messages are its own."""
    members = tuple(range(world.size - 1, -1, -2))
    inner = world.add_process_set(members)
    if inner is not None:
        following, before = around(inner)
        outer = [world.isend(np.array([-1.0]), sorted(members)[following], 0)]
        status = Status()
        got = inner.sendrecv(np.array([float(inner.rank)]), following, None, before, 0, status=status)
        assert got == [before] and status.source == inner.ranks[before]
        assert world.recv(None, sorted(members)[before]) == [-1.0]
        outer[0].wait()
    world.remove_process_set(members, inner)


SCENARIOS: Sequence[Callable[[World], None]] = (
    a_ring,
    blocking_calls,
    an_exchange,
    every_dtype,
    to_oneself,
    no_overtaking,
    a_flood,
    tags_in_another_order,
    any_source,
    a_shorter_message,
    a_new_tensor_of_given_shape,
    refused_messages,
    refused_arguments,
    memory_in_flight,
    mixed_with_collectives,
    a_collective_between_post_and_wait,
    several_threads,
    within_a_process_set,
)


# ---- programs: every rank sends and receives at random, and a model says what it gets


@dataclass(frozen=True)
class Sent:
    """A message of a program: all fields small numbers."""

    source: int
    target: int
    tag: int
    count: int


@dataclass(frozen=True)
class Program:
    """Messages in the order in which each source sends them; ``order`` shuffles each target's receives, ``posted`` says
    which of them come before the sends, and ``blocking`` which sends wait."""

    size: int
    messages: tuple[Sent, ...]
    order: int
    posted: int


def programs(most: int) -> st.SearchStrategy[Program]:
    def of_size(size: int) -> st.SearchStrategy[Program]:
        rank = st.integers(0, size - 1)
        message = st.builds(Sent, rank, rank, st.integers(0, 2), st.sampled_from((0, 1, 300, 6000, 40_000)))
        return st.builds(
            Program, st.just(size), st.lists(message, max_size=12).map(tuple), st.integers(0, 99), st.integers(0, 99)
        )

    return st.integers(1, most).flatmap(of_size)


def run_program(world: World, program: Program) -> None:
    """Carry out this rank's part. Of several messages of one source and tag, the receives get the first one first."""
    random = Random(program.order + world.rank)
    mine = [(number, one) for number, one in enumerate(program.messages) if one.source == world.rank]
    due = [(number, one) for number, one in enumerate(program.messages) if one.target == world.rank]
    order = list(range(len(due)))
    random.shuffle(order)
    queues: dict[tuple[int, int], list[int]] = {}
    for number, one in due:
        queues.setdefault((one.source, one.tag), []).append(number)
    plan = [(due[place][1].source, due[place][1].tag) for place in order]
    expected = [queues[key].pop(0) for key in plan]
    early = sum(Random(program.posted + world.rank).random() < 0.5 for _ in plan)
    receive = lambda key: world.irecv(None, *key)  # noqa: E731
    receives = [receive(key) for key in plan[:early]]
    sends = [world.isend(values(one.source, number, one.count), one.target, one.tag) for number, one in mine]
    receives += [receive(key) for key in plan[early:]]
    for place in random.sample(range(len(receives)), len(receives)):
        number = expected[place]
        one = program.messages[number]
        np.testing.assert_array_equal(receives[place].wait(), values(one.source, number, one.count))
    for handle in sends:
        handle.wait()
