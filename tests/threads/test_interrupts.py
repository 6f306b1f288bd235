"""An interrupt at any moment of a blocking call, with a peer that is always there: either the world has failed and says
so, or nothing is left of the call: no lock, no name, no claim."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives
from collectives.base.errors import RankFailedError
from collectives.base.reduce_op import Op
from collectives.engine import failure
from collectives.engine.messages.transfers import Transfers
from collectives.transport.base import WINDOW_BYTES
from collectives.transport.group import Group
from collectives.transport.host.board import Board, board_bytes
from collectives.transport.host.board_control import BoardControl
from collectives.transport.point_to_point import Incoming, Outgoing
from collectives.transport.threads import thread_groups
from collectives.transport.threads.thread_groups import ThreadMemory
from collectives.worlds.world import World
from tests.support import interrupting
from tests.support.interrupting import Interrupt

PACKAGE = Path(collectives.__file__).parent
Call = Callable[[World, Any], object]
CALLS: dict[str, Call] = {
    "allreduce_": lambda world, tensor: world.allreduce_(tensor, op=Op.SUM),
    "named": lambda world, tensor: world.allreduce_(tensor, name="loss"),
    "allreduce": lambda world, tensor: world.allreduce(tensor),
    "broadcast_": lambda world, tensor: world.broadcast_(tensor, 1),
    "reducescatter": lambda world, tensor: world.reducescatter(tensor, name="loss"),
}


def mirrored() -> World:
    """A world of two ranks, of which the other one is this rank's mirror image: it shares its pages and its window."""

    def board() -> Board:
        page = memoryview(bytearray(board_bytes(2)))
        return Board([page, page], 0, timeout=60, spins=10)

    window = np.zeros(WINDOW_BYTES, np.uint8)
    memory = ThreadMemory(board(), [window, window], True)
    control = BoardControl(board(), lambda value: [value, value])
    return World(Group(0, 2, ((0, 1),), control, memory, None, lambda members: None, (0, 1), memory.close))


interrupted = partial(interrupting.interrupted, within=[str(PACKAGE)], failures=[RankFailedError])


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_interrupt_at_any_moment_leaves_a_failed_world_or_nothing(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure, "_ACKNOWLEDGE_WITHIN", 0.0)  # nobody is there to acknowledge a failure
    failed = went_on = 0
    world: World | None = None
    while True:
        if world is None:
            world, tensor = mirrored(), np.zeros(2, np.float32)
            for _ in range(2):
                call(world, tensor)
        if not interrupted(lambda: call(world, tensor), failed + went_on + 1):  # noqa: B023  # called at once
            break
        engine = world._engine
        assert not engine._submissions.names
        if engine.refusal is not None:
            with pytest.raises(RankFailedError, match="Interrupt"):
                call(world, tensor)
            failed, world = failed + 1, None
        else:
            call(world, tensor)
            went_on += 1
        progress, submissions = engine._progress, engine._submissions
        assert not progress.lock._is_owned() and not progress.driving
        assert not submissions.has_work() and not engine.in_flight.operations
    assert failed and went_on


def test_a_thread_whose_first_call_is_interrupted_is_known_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise deadlocks would be noticed only after 20 seconds."""
    monkeypatch.setattr(failure, "_ACKNOWLEDGE_WITHIN", 0.0)
    for at in itertools.count(1):
        world = mirrored()
        world.allreduce_(np.zeros(2))
        callers = world._engine._callers
        callers.reset()
        if not interrupted(lambda: world.allreduce_(np.zeros(2)), at):  # noqa: B023  # called at once
            break
        if world._engine.refusal is None:
            world.allreduce_(np.zeros(2))
            assert threading.current_thread() in callers._known


class Slow:
    """An endpoint whose every third poll lets one message come from rank 1, and ends what was begun before."""

    def __init__(self, *, at_once: bool) -> None:
        self.at_once: Any = self if at_once else None
        self.arrived: Callable[[Incoming], object] = lambda message: None
        self.moving: list[Incoming | Outgoing] = []
        self.polls = 0

    def send(self, *what: Any) -> Outgoing:
        message: Outgoing = what[0] if len(what) == 1 else Outgoing(*what[:2], what[2], what[2].shape)
        self.moving.append(message)
        return message

    def receive(self, *what: Any) -> bool:
        if len(what) == 2:
            self.moving.append(what[0])
        return False  # of `AtOnce`

    def refuse(self, message: Incoming, why: str) -> None:
        assert message not in self.moving, "its payload is on its way"

    def confirm(self, message: Outgoing, looks: int) -> bool:
        return message.done

    def poll(self) -> None:
        self.polls += 1
        if self.polls % 3 == 0:
            while self.moving:
                self.moving.pop().end()
            if self.polls == 3:
                self.arrived(Incoming(1, 0, "float32", (5,), 20, None))

    busy = False

    def close(self) -> None:
        self.moving.clear()


def begun(call: str, at_once: bool) -> tuple[World, Callable[[], object]]:
    """A world whose messages are slow, and a call of it."""
    world, mine, into = mirrored(), np.ones(5, np.float32), np.zeros(5, np.float32)
    delivery = world._transfers.delivery
    delivery._open_endpoint = partial(Slow, at_once=at_once)
    delivery.opened()
    arguments = (mine, 1, into, 1) if call == "sendrecv" else (into if call.endswith("recv") else mine, 1)
    return world, partial(getattr(world, call), *arguments)


@pytest.mark.parametrize(("at_once", "error"), [(False, Interrupt), (True, TimeoutError)], ids=("ordinary", "at-once"))
@pytest.mark.parametrize("call", ("send", "isend", "recv", "irecv", "sendrecv"))
def test_an_interrupt_at_any_moment_of_a_message(
    call: str, at_once: bool, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No endpoint reads or writes the memory of a call that has ended, and no later message is received for it."""
    monkeypatch.setattr(failure, "_ACKNOWLEDGE_WITHIN", 0.0)
    monkeypatch.setattr(Transfers, "in_background", lambda self: None)
    went_on = 0
    for at in itertools.count(1):
        world, begin = begun(call, at_once)
        transfers, delivery = world._transfers, world._transfers.delivery
        endpoint: Any = delivery._endpoint
        if not interrupted(begin, at, error=error, anywhere=False):
            break
        if world._engine.refusal is None:
            went_on += 1
            assert not [message for message in endpoint.moving if not message.done]
            assert not delivery.matching._posted.of and not delivery.unfinished
            assert not transfers.in_flight.operations
    assert went_on and at > 20


@pytest.mark.parametrize(
    ("call", "at_once"), [("isend", False), ("irecv", False), ("send", True), ("recv", True), ("sendrecv", True)]
)
def test_an_interrupt_of_a_message_at_any_instruction_leaves_no_lock(
    call: str, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure, "_ACKNOWLEDGE_WITHIN", 0.0)
    monkeypatch.setattr(Transfers, "in_background", lambda self: None)
    for at in itertools.count(1):
        world, begin = begun(call, at_once)
        if not interrupted(begin, at):
            break
        assert not world._transfers.delivery.drives() and not world._transfers._awaited
        assert not world._engine.in_flight._lock._is_owned()
    assert at > 100


def test_an_interrupt_as_a_blocking_call_takes_the_lock_leaves_it_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads go on, whether this one calls again or not."""

    def run(world: World) -> None:
        engine = world._engine
        acquire = engine._acquire

        def interrupted(blocking: bool) -> bool:
            assert acquire(blocking)
            raise KeyboardInterrupt

        monkeypatch.setattr(engine, "_acquire", interrupted)
        with pytest.raises(KeyboardInterrupt):
            world.allreduce(np.ones(1, np.float32))
        assert not engine._progress.lock._is_owned() and not engine.drives()
        monkeypatch.setattr(engine, "_acquire", acquire)
        assert world.allreduce(np.ones(1, np.float32), average=False) == world.size

    thread_groups.run(2, run, make_world=World)
