"""Deadlocks: every rank waits, and no operation that they wait for was submitted by all. Which operations fail?

Where it is known which rank is behind, only that rank's operation fails, so that it reaches the place where the others
wait:

    rank 0:  ------- b        rank 0 has passed over "a"; rank 1 is behind
    rank 1:  a                "a" fails, "b" stays; rank 1 comes to "b", and the ranks are in step again

There are two kinds of evidence. Both hold only for names that were never carried out: a name that recurs in every step
says nothing about the order, and might match another step's operation. Once ranks have waited in vain for a recurring
name, one may be a step ahead, and what they have passed is no longer evidence.

    passed    a rank that lacks the operation has waited for it before, in vain: a rank that waits for it now is behind,
              unless another rank waits at another place of the same function, and the program may reach both places
              several times
    source    each rank waits for one operation, at places of the same function that the program reaches only once

Without evidence all of them fail. The decision is a pure function of what the ranks tell each other, hence equal on all
of them.
"""

from __future__ import annotations

import dis
import functools
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

from collectives.base.errors import MismatchError
from collectives.base.interchange import exchangeable
from collectives.engine.handles import PACKAGE
from collectives.engine.negotiation import UNNAMED, Key, Request

_RANKS = str(Path(PACKAGE, "transport", "threads.py"))
"""The module that calls each rank, once, where ranks are threads."""
AGAIN = (
    "A rank that has passed over one, as by an exception that it has caught, may meet the others again at a name "
    "that is new, and does "
    "once every rank has called shutdown() and init()."
)


@exchangeable
@dataclass(frozen=True, slots=True)
class CallSite:
    """Where a function is in the program: one frame of a thread's stack.

    Attributes:
        function: its file, its name and its first line.
        line: of the file.
        at: the offset of the instruction.
        loop: the outermost loop around it, by the offsets of its first and last instruction; None outside of loops.
        calls: the names in the expression that it calls, as ``step`` or ``trainer, fit``; none where unknown.
    """

    function: tuple[str, str, int]
    line: int
    at: int
    loop: tuple[int, int] | None = None
    calls: frozenset[str] = frozenset()

    def goes_round_with(self, other: CallSite) -> bool:
        """Whether a loop around this place contains another place of the same function."""
        return self.loop is not None and self.loop[0] <= other.at <= self.loop[1]

    def __str__(self) -> str:
        return f"{self.function[0]}:{self.line} in {self.function[1]}"


_ANY_THREAD = CallSite(("", "a thread", 0), 0, 0, (0, 0))
"""The start of a thread: as in a loop, because the program may start any number of threads with one function."""
Stack = tuple[CallSite, ...]
"""The functions that a thread is in, the outermost first, without the innermost ones, which are this package's."""


@exchangeable
@dataclass(frozen=True, slots=True)
class BlockedCall:
    """An operation that a rank waits for, and where in the program; ``stack`` is empty where that is not known."""

    key: Key
    request: Request
    stack: Stack = ()


def stacks(waiting: CodeType, variable: str) -> dict[int, Stack]:
    """The stacks of this process's threads that execute ``waiting``, by the ``id`` of their local ``variable``."""
    found = {}
    for number, top in sys._current_frames().items():
        frame: FrameType | None = top
        while frame is not None and frame.f_code is not waiting:
            frame = frame.f_back
        if frame is None:
            continue
        awaited = id(frame.f_locals.get(variable))
        while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        places: list[CallSite] = []
        while frame is not None and frame.f_code.co_filename != _RANKS:
            places.append(_call_site(frame))
            frame = frame.f_back
        if frame is None and number != threading.main_thread().ident:
            places.append(_ANY_THREAD)
        found[awaited] = tuple(reversed(places))
    return found


def _call_site(frame: FrameType) -> CallSite:
    code = frame.f_code
    at, calls = _instruction(code, frame.f_lasti)
    around = next((loop for loop in _loops(code) if loop[0] <= at <= loop[1]), None)
    return CallSite((code.co_filename, code.co_name, code.co_firstlineno), frame.f_lineno or 0, at, around, calls)


@functools.lru_cache(256)
def _loops(code: CodeType) -> tuple[tuple[int, int], ...]:
    """The outermost loops of a function: from the target of a backward jump to the jump.

    Overlapping ones are one loop: an `except` within a loop may be compiled behind it, and jump back into its middle.
    """
    jumps = [(step.argval, step.offset) for step in dis.get_instructions(code) if "JUMP" in step.opname]
    found: list[tuple[int, int]] = []
    for first, last in sorted((first, last) for first, last in jumps if isinstance(first, int) and first < last):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return tuple(found)


@functools.lru_cache(256)
def _instruction(code: CodeType, last: int) -> tuple[int, frozenset[str]]:
    """The offset of the instruction that a frame executes, and the names that are loaded where its expression begins:
    what a call calls.

    During a call, ``last`` may point behind the instruction, into the interpreter's inline caches.
    """
    steps = list(dis.get_instructions(code))
    at = max((step.offset for step in steps if step.offset <= last), default=last)
    if sys.version_info < (3, 11):
        return at, frozenset()
    starts = {step.offset: step.positions and (step.positions.lineno, step.positions.col_offset) for step in steps}
    start = starts.get(at)
    if start is None or None in start:
        return at, frozenset()
    return at, frozenset(step.argval for step in steps if starts[step.offset] == start and isinstance(step.argval, str))


def before(one: Stack, other: Stack) -> bool | None:
    """Whether the program reaches ``one`` before ``other``, and both only once; None where that is not known.

    It is known where no loop is around the calls that lead to both, and each calls the next function directly: a
    function called through another one in C, such as `map`, may be called several times.
    """
    called: CallSite | None = None
    for mine, theirs in zip(one, other, strict=False):
        if mine.function != theirs.function or (called is not None and mine.function[1] not in called.calls):
            return None
        if mine.at != theirs.at:
            return None if mine.line == theirs.line or mine.goes_round_with(theirs) else mine.line < theirs.line
        if mine.loop is not None:
            return None
        called = mine
    return None


def may_take_turns(one: Stack, other: Stack) -> bool:
    """Whether the program may get from ``one`` to ``other`` and back, as in a loop: names do not say in which
    iteration."""
    for mine, theirs in zip(one, other, strict=False):
        if mine.function != theirs.function:
            return False
        if mine.at != theirs.at:
            return before(one, other) is None
    return False


def failing(
    waits: Sequence[Sequence[BlockedCall]],
    asking: Mapping[Key, Collection[int]],
    passed: Mapping[Key, Collection[int]],
    known: Collection[Key],
    joined: Collection[int] = (),
) -> set[Key]:
    """The operations that fail.

    Args:
        waits: what each rank waits for.
        asking: by operation, the ranks that have submitted it.
        passed: by operation, the ranks that have waited for its name in vain.
        known: those whose names were carried out before.
        joined: ranks that have joined, and wait for nothing.
    """
    every = {wait.key for mine in waits for wait in mine}
    new: set[Key] = {key for key in every if isinstance(key, str) and key not in known}
    behind = {key for key in new if set(passed.get(key, ())).difference(asking[key], joined)}
    late = [wait for mine in waits for wait in mine if wait.key in behind]
    others = [wait for mine in waits for wait in mine if wait.key not in behind]
    if late and others and not any(may_take_turns(one.stack, other.stack) for one in late for other in others):
        return behind
    active = [mine for rank, mine in enumerate(waits) if rank not in joined]
    if new == every and all(len(mine) == 1 for mine in active):
        for (last,) in active:
            if all(wait.key == last.key or before(wait.stack, last.stack) for (wait,) in active):
                return every - {last.key}
    return every


def error(
    rank: int,
    waits: Sequence[Sequence[BlockedCall]],
    asking: Mapping[Key, Collection[int]],
    fails: Collection[Key],
    numbers: Sequence[int],
) -> MismatchError:
    """The error of a rank whose operation fails, and the warning of a rank whose operation goes on.

    Args:
        rank: this one, as messages call it.
        waits, asking: as for `failing`.
        fails: the operations that fail.
        numbers: what messages call the ranks.
    """

    def describe(wait: BlockedCall) -> str:
        missing = ", ".join(str(numbers[peer]) for peer in range(len(waits)) if peer not in asking[wait.key])
        where = f" at {wait.stack[-1]}" if wait.stack else ""
        end = "" if wait.key in fails else ", and goes on waiting for it"
        return f"{wait.request.describe()}{where}, for which rank {missing} has not asked{end}"

    lines = [
        f"  rank {numbers[peer]}: waits for {'; and for '.join(map(describe, mine)) or 'nothing'}"
        for peer, mine in enumerate(waits)
    ]
    requests = [wait.request for mine in waits for wait in mine]
    names = sorted({request.name for request in requests if request.name})
    differing = "name" if len(names) > 1 else "what they wait for"
    subject = f" for tensor {' / '.join(map(repr, names))}" if names else ""
    again = UNNAMED if any(request.name is None for request in requests) else AGAIN
    return MismatchError(
        f"rank {rank}: the ranks disagree{subject} in {differing}: every rank waits, and nothing that they wait for "
        f"is asked for by all; "
        f"no tensor was touched:\n"
        + "\n".join(lines)
        + f"\nEvery rank must submit the same operations, by the same names. {again}"
    )
