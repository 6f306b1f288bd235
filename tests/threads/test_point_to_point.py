"""Messages between ranks that are threads."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings

from collectives.base.config import Config
from collectives.base.errors import (
    CollectiveTimeoutError,
    InvalidArgumentError,
    MismatchError,
    NotInitializedError,
    RankFailedError,
)
from collectives.engine.messages.matching import ANY_SOURCE
from collectives.engine.messages.transfers import Transfers
from collectives.transport.threads import thread_groups
from collectives.transport.threads.thread_groups import ThreadEndpoint
from collectives.worlds.world import World
from tests.support.scenarios.point_to_point import LARGE, SCENARIOS, Program, programs, run_program


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("size", (1, 2, 3, pytest.param(5, marks=pytest.mark.slow)))
def test_scenario(scenario: Callable[[World], None], size: int) -> None:
    thread_groups.run(size, scenario, make_world=World)


@given(programs(5))
@settings(max_examples=40)
def test_a_program(program: Program) -> None:
    thread_groups.run(program.size, lambda world: run_program(world, program), make_world=World)


def with_timeout(seconds: float) -> Callable[..., World]:
    return lambda group: World(group, Config(timeout=seconds))


def test_a_message_that_nobody_sends_is_waited_for_within_a_bound() -> None:
    def program(world: World) -> None:
        if world.rank == 0:
            world.send(np.zeros(2), 1, 7)
            world.recv(np.zeros(3), 1, 5)
        else:
            world.recv(np.zeros(3), 0, 6)

    with pytest.raises(CollectiveTimeoutError) as caught:
        thread_groups.run(2, program, make_world=with_timeout(0.3))
    text = str(caught.value)
    if text.startswith("rank 0"):
        assert "recv from rank 1, tag 5: waited 0.3 s" in text
        assert "messages that wait for a recv: none" in text
    else:
        assert "recv from rank 0, tag 6: waited 0.3 s" in text
        assert "messages that wait for a recv: from rank 0 with tag 7" in text


def test_a_large_send_that_nobody_receives() -> None:
    def program(world: World) -> None:
        if world.rank == 0:
            with pytest.raises(
                CollectiveTimeoutError, match=r"send to rank 1, tag 3: waited 0\.3 s: the receiver is alive"
            ):
                world.send(np.zeros(LARGE), 1, 3)
            over.set()
        else:
            assert over.wait(20)

    over = threading.Event()
    thread_groups.run(2, program, make_world=with_timeout(0.3))


def test_synchronize_with_a_timeout_goes_on() -> None:
    def program(world: World) -> None:
        if world.rank == 0:
            handle = world.irecv(np.zeros(3), 1)
            with pytest.raises(
                CollectiveTimeoutError, match=r"recv from rank 1, tag 0: not complete after 0\.05 s; it continues"
            ):
                world.synchronize(handle, 0.05)
            assert not world.poll(handle)
            world.barrier()
            assert (world.synchronize(handle) == 1).all()
            assert world.poll(handle)
        else:
            world.barrier()
            world.send(np.ones(3), 0)

    thread_groups.run(2, program, make_world=World)


@pytest.mark.parametrize("source", (1, ANY_SOURCE))
def test_a_sender_that_has_left(source: int) -> None:
    def program(world: World) -> None:
        if world.rank == 1:
            world.send(np.ones(3), 0)
            world.shutdown()
            return
        assert (world.recv(None, source) == 1).all(), "what was sent before is received"
        with pytest.raises(RankFailedError, match="has shut down or ended") as caught:
            world.recv(None, source)
        assert ("rank 1 has" in str(caught.value)) == (source == 1)

    thread_groups.run(2, program, make_world=World)


def test_a_receiver_that_has_left() -> None:
    def program(world: World) -> None:
        if world.rank == 0:
            with pytest.raises(RankFailedError, match="send to rank 1, tag 2: rank 1 has shut down or ended"):
                world.send(np.ones(LARGE), 1, 2)
        else:
            world.shutdown()

    thread_groups.run(2, program, make_world=World)


def test_a_rank_that_fails() -> None:
    def program(world: World) -> None:
        if world.rank == 2:
            raise ZeroDivisionError("no data")
        begun = time.monotonic()
        with pytest.raises(RankFailedError, match=r"(?s)rank 2 has failed.*no data"):
            world.recv(None, 1 - world.rank)
        assert time.monotonic() - begun < 20

    with pytest.raises(ZeroDivisionError):
        thread_groups.run(3, program, make_world=World)


def test_an_interrupted_recv_takes_no_later_message() -> None:
    class Interrupt(BaseException):
        pass

    def interrupt() -> None:
        raise Interrupt

    def program(world: World) -> None:
        if world.rank == 0:
            relax, first = world._control.relax, np.zeros(3)
            world._control.relax = interrupt  # type: ignore[method-assign]  # which the wait calls
            with pytest.raises(Interrupt):
                world.recv(first, 1)
            world._control.relax = relax  # type: ignore[method-assign]
            world.barrier()
            assert (world.recv(None, 1) == 1).all() and (first == 0).all()
        else:
            world.barrier()
            world.send(np.ones(3), 0)

    thread_groups.run(2, program, make_world=World)


def stay_until_it_has_left(world: World, rank: int) -> None:
    while not world._control.has_left(rank):
        world._control.relax()


def test_shutting_down_fails_what_is_unfinished() -> None:
    def program(world: World) -> None:
        if world.rank == 0:
            handles = [world.irecv(np.zeros(3), 1, 1), world.isend(np.zeros(LARGE), 1, 2)]
            world.shutdown()
            for handle in handles:
                assert handle.poll()
                with pytest.raises(NotInitializedError, match="this world was shut down"):
                    handle.wait()
        else:
            stay_until_it_has_left(world, 0)
            world.shutdown()
        with pytest.raises(NotInitializedError, match="this world was shut down"):
            world.send(np.zeros(3), world.rank)

    thread_groups.run(2, program, make_world=World)


def test_shutting_down_ends_a_wait_of_another_thread() -> None:
    def program(world: World) -> None:
        if world.rank == 1:
            stay_until_it_has_left(world, 0)
            return
        problems = []

        def wait() -> None:
            try:
                world.recv(None, 1 - world.rank)
            except NotInitializedError as error:
                problems.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        while not world._transfers.delivery.unfinished:
            world._control.relax()
        world.shutdown()
        thread.join(10)
        assert len(problems) == 1

    thread_groups.run(2, program, make_world=World)


def test_no_thread_outlives_its_world() -> None:
    def program(world: World) -> None:
        world.recv(None, 1 - world.rank) if world.isend(np.ones(LARGE), 1 - world.rank).poll() else None
        world.irecv(None, 1 - world.rank, 5)

    def ours() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.endswith("messages")]

    before = len(ours())
    thread_groups.run(2, program, make_world=World)
    end = time.monotonic() + 10
    while len(ours()) > before and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert len(ours()) <= before


def test_a_large_message_of_a_rank_that_has_left() -> None:
    """Its memory may have been used again."""

    def program(world: World) -> None:
        if world.rank == 0:
            mine = np.ones(LARGE)
            world.isend(mine, 1)
            world.shutdown()
            mine[...] = -1
            return
        stay_until_it_has_left(world, 0)
        with pytest.raises(RankFailedError, match="rank 0 has shut down or failed"):
            world.recv(None, 0)

    thread_groups.run(2, program, make_world=World)


def test_a_signal_handler_in_the_middle_of_a_message() -> None:
    """It can neither wait for a message nor end the world, of which the interrupted call uses the memory."""

    def program(world: World) -> None:
        transfers, handle = world._transfers, world.irecv(np.zeros(3), 0, 1)

        def handler() -> None:
            with pytest.raises(
                InvalidArgumentError, match="sent, received or waited for a message while the same thread"
            ):
                handle.wait()
            world.shutdown()
            assert transfers.delivery.unfinished

        transfers.delivery.use(handler)
        with pytest.raises(RankFailedError, match="shut down in the middle of a call"):
            handle.wait()

    thread_groups.run(1, program, make_world=World)


def test_a_receiver_without_memory() -> None:
    """The sender does not wait for the timeout."""

    class Pool:
        def empty(self, size: int, dtype: np.dtype) -> np.ndarray:
            raise MemoryError("no room")

    def program(world: World) -> None:
        if world.rank == 0:
            with pytest.raises(MismatchError, match="the receiver has refused it: MemoryError: no room"):
                world.send(np.ones(LARGE), 1)
        else:
            world._transfers.delivery._pool = Pool()  # type: ignore[assignment]
            with pytest.raises(MemoryError):
                world.recv(None, 0)

    thread_groups.run(2, program, make_world=with_timeout(5))


def test_what_a_receive_leaves_to_be_sent_is_sent_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a word for the sender, for which there was no room."""
    woken: list[bool] = []
    monkeypatch.setattr(Transfers, "in_background", lambda self: woken.append(True))

    def program(world: World) -> None:
        world.send(np.ones(3), 1 - world.rank)
        world.barrier()
        if world.rank == 0:
            monkeypatch.setattr(ThreadEndpoint, "busy", True)
            assert (world.recv(None, 1) == 1).all() and woken == [True]

    thread_groups.run(2, program, make_world=World)
