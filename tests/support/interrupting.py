"""Interrupt a call at each moment in turn at which some version of Python may run a signal handler."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from collectives.base import interrupts

_DO_NOTHING = ("NOP", "NOT_TAKEN")
"""Instructions that nothing can interrupt: the compiler leaves them out of the blocks of `try`."""


class Interrupt(KeyboardInterrupt):
    pass


def interrupted(
    call: Callable[[], object],
    at: int,
    within: Sequence[str],
    error: type[BaseException] = Interrupt,
    *,
    anywhere: bool = True,
    failures: Sequence[type[BaseException]] = (),
) -> bool:
    """Make a call, and raise ``error`` at the ``at``-th moment, unless handlers are deferred there. Returns whether
    there was such a moment.

    Args:
        within: the beginnings of the files whose code is interrupted.
        anywhere: before any instruction, and after a function of C has returned. Else when a function begins, and after
            one of C has returned, which is where every version looks for signals.
        failures: what the call may raise instead.
    """
    moments = 0
    files = tuple(within)

    def moment(frame: FrameType) -> None:
        nonlocal moments
        if interrupts._deferral is None and frame.f_code.co_filename.startswith(files):
            moments += 1
            if moments == at:
                raise error

    def instruction(frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode" and dis.opname[frame.f_code.co_code[frame.f_lasti]] not in _DO_NOTHING:
            moment(frame)
        return instruction

    def begun(frame: FrameType, event: str, _: Any) -> Any:
        if not anywhere:
            moment(frame)
            return None
        frame.f_trace = instruction  # first: from Python 3.13 on instructions of a frame without one are not traced
        frame.f_trace_opcodes = True
        return instruction

    def returned(frame: FrameType, event: str, _: Any) -> None:
        if event == "c_return":
            moment(frame)

    expected = (error, *failures)
    before = sys.getprofile(), sys.gettrace()
    sys.setprofile(returned)
    sys.settrace(begun)
    try:
        call()
    except expected:
        return True
    finally:
        sys.settrace(before[1])
        sys.setprofile(before[0])
    return False
