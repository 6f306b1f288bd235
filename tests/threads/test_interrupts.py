"""An interrupt at any moment of a blocking call, with a peer that is always there: either the world has failed and says
so, or nothing is left of the call: no lock, no name, no claim."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import collectives
from collectives.base.errors import RankFailedError
from collectives.base.reduce_op import Op
from collectives.engine import failure
from collectives.transport.base import WINDOW_BYTES
from collectives.transport.board import Board, board_bytes
from collectives.transport.board_control import BoardControl
from collectives.transport.group import Group
from collectives.transport.threads import ThreadMemory
from collectives.world import World

PACKAGE = Path(collectives.__file__).parent
Call = Callable[[World, Any], object]
CALLS: dict[str, Call] = {
    "allreduce_": lambda world, tensor: world.allreduce_(tensor, op=Op.SUM),
    "named": lambda world, tensor: world.allreduce_(tensor, name="loss"),
    "allreduce": lambda world, tensor: world.allreduce(tensor),
    "broadcast_": lambda world, tensor: world.broadcast_(tensor, 1),
    "reducescatter": lambda world, tensor: world.reducescatter(tensor, name="loss"),
}


class Interrupt(KeyboardInterrupt):
    pass


def mirrored() -> World:
    """A world of two ranks, of which the other one is this rank's mirror image: it shares its pages and its window."""

    def board() -> Board:
        page = memoryview(bytearray(board_bytes(2)))
        return Board([page, page], 0, timeout=60, spins=10, processes=False)

    window = np.zeros(WINDOW_BYTES, np.uint8)
    memory = ThreadMemory(board(), [window, window], True)
    control = BoardControl(board(), lambda value: [value, value])
    return World(Group(0, 2, ((0, 1),), control, memory, None, lambda members: None, (0, 1), memory.close))


def interrupted(call: Callable[[], object], at: int) -> bool:
    """Make a call, and interrupt it at the ``at``-th moment at which Python looks for signals: when a function of the
    package begins, or when it has called one of C. Returns whether there was such a moment."""
    moments = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal moments
        if event in ("call", "c_return") and Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            moments += 1
            if moments == at:
                raise Interrupt

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        call()
    except (Interrupt, RankFailedError):
        return True
    finally:
        sys.setprofile(before)
    return False


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
    for at in range(1, 1000):
        world = mirrored()
        world.allreduce_(np.zeros(2))
        callers = world._engine._callers
        callers.reset()
        if not interrupted(lambda: world.allreduce_(np.zeros(2)), at):  # noqa: B023  # called at once
            break
        if world._engine.refusal is None:
            world.allreduce_(np.zeros(2))
            assert threading.current_thread() in callers._known
