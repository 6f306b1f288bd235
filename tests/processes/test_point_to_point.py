"""Messages between processes of one host, without MPI; and what a rank sees when another is killed."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import signal
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from collectives.base.config import Config
from collectives.base.errors import ForkedProcessError, RankFailedError
from collectives.engine import timeline
from collectives.engine.messages.matching import ANY_SOURCE, ANY_TAG
from collectives.transport.host.memory_endpoint import MemoryEndpoint
from collectives.worlds import memory
from collectives.worlds.world import World
from tests.support.launching import processes
from tests.support.scenarios.point_to_point import LARGE, SCENARIOS, Program, programs, run_program, values

BOUND = 5.0
"""Seconds from a death to the survivors' errors."""


def all_scenarios(world: World) -> None:
    for scenario in SCENARIOS:
        scenario(world)
        world.barrier()


def test_scenarios() -> None:
    processes.run(4, all_scenarios)


@pytest.mark.parametrize(
    ("size", "settings"),
    [(2, {"local_size": 1}), (3, {"transport": "tcp"}), (5, {"local_size": 2})],
    ids=["two-hosts", "messages", "three-hosts"],
)
def test_scenarios_over_tcp(size: int, settings: dict[str, Any]) -> None:
    processes.run(size, all_scenarios, config=Config(timeout=30, **settings), connect=processes.by_tcp)


def test_scenarios_where_no_rank_may_read_anothers_memory() -> None:
    """Large payloads pass through the rings in parts."""

    def program(world: World) -> None:
        world._group.memory.reads_private = False  # type: ignore[union-attr]
        all_scenarios(world)
        endpoint = world._transfers.delivery.opened()
        assert isinstance(endpoint, MemoryEndpoint) and endpoint._reader is None

    processes.run(3, program)


def test_mapped_tensors_are_read_where_they_lie() -> None:
    """In the call, by a receive posted before, and beside operations that map the same pieces."""

    def program(world: World) -> None:
        peer, count = 1 - world.rank, 3 * LARGE
        mine, into = memory.empty(count, np.float32), np.zeros(count, np.float32)
        endpoint = world._transfers.delivery.opened()
        assert isinstance(endpoint, MemoryEndpoint) and endpoint._reader is not None
        endpoint._reader.fetch = _no_system_call  # type: ignore[method-assign]
        for number in range(4):
            mine[...] = values(world.rank, number, count)
            reduced = world.allreduce_async(mine, average=False)
            receiving = world.irecv(into, peer) if number % 2 else None
            world.sendrecv(mine, peer, into, peer, 1) if receiving is None else world.send(mine, peer)
            if receiving is not None:
                receiving.wait()
            np.testing.assert_array_equal(into, values(peer, number, count))
            np.testing.assert_array_equal(reduced.wait(), values(0, number, count) + values(1, number, count))
            world.barrier()

    processes.run(2, program)


def _no_system_call(peer: int, at: int, into: int, nbytes: int) -> None:
    raise AssertionError("mapped memory was read by a system call")


def test_the_timeline_shows_messages(tmp_path: Path) -> None:
    """Each with its peer, tag and bytes, also those that would take no transfer without a timeline."""
    path = tmp_path / "trace.json"

    def program(world: World) -> None:
        mine, peer = np.ones(5), 1 - world.rank
        world.sendrecv(mine, peer, mine.copy(), peer)  # before the timeline
        world.start_timeline(path)
        world.sendrecv(mine, peer, mine.copy(), peer, 1)
        sending, receiving = world.isend(np.ones((2, LARGE)), peer, 2), world.irecv(None, ANY_SOURCE, ANY_TAG)
        sending.wait()
        receiving.wait()
        world.send(mine, world.rank, 3)
        world.recv(None, world.rank, 3)
        world.stop_timeline()
        world.sendrecv(mine, peer, mine.copy(), peer)  # and after it

    processes.run(2, program)
    spans = [event for event in timeline.read(path) if event["ph"] == "X" and event["cat"] == "messages"]
    for rank in range(2):
        found = sorted(
            (event["name"], event["args"]["peer"], event["args"]["tag"], event["args"]["bytes"])
            for event in spans
            if event["pid"] == rank
        )
        messages = [(1 - rank, 1, 40), (1 - rank, 2, 16 * LARGE), (rank, 3, 40)]
        assert found == sorted((name, *message) for name in ("send", "recv") for message in messages)
    assert all(event["dur"] >= 0 for event in spans)


@given(programs(4))
@settings(max_examples=15)
def test_a_program(program: Program) -> None:
    processes.run(program.size, lambda world: run_program(world, program))


def waits_in_recv(world: World, victim: int) -> None:
    world.recv(None, victim, 99)


def waits_for_anybody(world: World, victim: int) -> None:
    world.recv(None, ANY_SOURCE, ANY_TAG)


def waits_in_send(world: World, victim: int) -> None:
    world.send(np.zeros(LARGE), victim, 99)


def waits_for_a_handle(world: World, victim: int) -> None:
    handle = world.irecv(None, victim, 99)
    while not handle.poll():  # the background thread notices
        time.sleep(0.01)
    handle.wait()


def streams(world: World, victim: int) -> None:
    """Messages in both directions, of which one is cut off somewhere."""
    block = np.ones(3 * LARGE)
    while True:
        world.sendrecv(block, victim, block.copy(), victim)


def sends_on(world: World, victim: int) -> None:
    """Small messages that nobody receives, until one finds the connection closed."""
    while True:
        world.send(np.ones(3), victim)


@pytest.mark.parametrize(
    "waits", (waits_in_recv, waits_for_anybody, waits_in_send, waits_for_a_handle, streams, sends_on)
)
@pytest.mark.parametrize("connect", (processes.by_pipes, processes.by_tcp), ids=("one-host", "hosts"))
def test_a_rank_that_is_killed(waits: Callable[[World, int], None], connect: Any) -> None:
    victim = 1

    def program(world: World) -> float:
        world.barrier()
        if world.rank == victim:
            end = time.monotonic() + 0.2
            block = np.ones(3 * LARGE)
            while time.monotonic() < end:
                if waits is streams:
                    world.sendrecv(block, 0, block.copy(), 0)
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        death = r"has failed \[R5\] \(it died" if connect is processes.by_pipes else r"on \S+ has died: its connection"
        with pytest.raises(RankFailedError, match=f"^rank {world.rank}: rank {victim} {death}"):
            waits(world, victim) if waits is not streams or world.rank == 0 else waits_in_recv(world, victim)
        return time.monotonic() - begun

    config = Config(timeout=30, local_size=1 if connect is processes.by_tcp else 0)
    ended: list[Any] = processes.finish(processes.start(3, program, config, timeout=60, connect=connect))
    assert ended[victim].status == -signal.SIGKILL
    for survivor in (0, 2):
        assert ended[survivor].error is None, ended[survivor].text
        assert ended[survivor].result < BOUND


def test_a_large_send_that_failed_is_not_received() -> None:
    """The sender, who has seen a rank die, uses the memory for something else."""
    changed = mmap.mmap(-1, 1)  # shared with the ranks, which are forked

    def program(world: World) -> None:
        mine = np.ones(LARGE)
        if world.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if world.rank == 0:
            handle = world.isend(mine, 1)
            with pytest.raises(RankFailedError, match="rank 2 has failed"):
                handle.wait()
            mine[...] = -1
            changed[0] = 1
            return
        while not changed[0]:
            world._control.relax()
        with pytest.raises(RankFailedError, match=r"rank [02] has failed"):
            world.recv(None, 0)

    ended: list[Any] = processes.finish(processes.start(3, program, Config(timeout=30), timeout=30))
    for survivor in (0, 1):
        assert ended[survivor].error is None, ended[survivor].text


def test_a_forked_child_takes_no_message() -> None:
    """It shares the rings with its parent."""

    def program(world: World) -> None:
        if world.rank == 1:
            world.barrier()
            world.send(np.ones(3), 0)
            world.barrier()
            return
        handle, ready = world.irecv(None, 1), os.pipe()
        with world._transfers.delivery.held():  # as by a thread that the child does not have
            child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                os.read(ready[0], 1)
                world._transfers.delivery.advance()
                with contextlib.suppress(ForkedProcessError):
                    handle.wait()
                    os._exit(1)
                os._exit(0)
            os._exit(2)
        with world._transfers.delivery.held():  # nobody takes it here meanwhile
            world.barrier()
            world.barrier()
            os.write(ready[1], b"x")
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert (handle.wait() == 1).all()

    processes.run(2, program)


def test_the_last_message_of_a_rank_that_has_left_comes_late() -> None:
    """Messages between hosts travel on other connections than the news that a rank has left."""

    def program(world: World) -> None:
        if world.rank == 0:
            world.send(np.ones(3), 1)
            world.shutdown()
            return
        endpoint, control = world._transfers.delivery.opened(), world._control
        while not control.has_left(0):
            control.relax()
        poll = endpoint.poll
        arrives = time.monotonic() + 0.3
        endpoint.poll = lambda: poll() if time.monotonic() > arrives else None  # type: ignore[method-assign]
        assert (world.recv(None, 0) == 1).all()

    processes.run(2, program, config=Config(timeout=30, local_size=1), connect=processes.by_tcp)


def test_a_process_set_that_was_removed_leaves_no_endpoint() -> None:
    def program(world: World) -> None:
        for _ in range(2):
            part = world.add_process_set((0, 1))
            assert part is not None
            part.sendrecv(np.ones(3), 1 - part.rank, None, 1 - part.rank)
            endpoint = weakref.ref(part._transfers.delivery.opened()._far)  # type: ignore[attr-defined]
            world.remove_process_set((0, 1), part)
            del part
            end = time.monotonic() + 10
            while endpoint() is not None and time.monotonic() < end:
                gc.collect()
                world._control.relax()
            assert endpoint() is None

    processes.run(2, program, config=Config(timeout=30, local_size=1), connect=processes.by_tcp)
