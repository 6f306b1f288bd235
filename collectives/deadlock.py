"""Deadlocks: every rank waits, and nothing that they wait for is asked for by all. Which operations fail, and which go on waiting.

Where it is known which rank is behind, only that rank's operation fails, so that it can come to where the others wait:

    rank 0:  ------- b        rank 0 has passed over "a"; rank 1 is behind
    rank 1:  a                "a" fails, "b" stays; rank 1 comes to "b", and the ranks are in step again

There are two kinds of evidence, and both hold only for names that have never been carried out: a name that comes again in every step
says nothing of the order, and might meet another step's operation of that name.

    passed    a rank that lacks the operation has waited for it before, in vain: whoever waits for it now is behind
    source    each rank waits for one operation, at places of the same function that no common loop contains

Without evidence all of them fail. Everything here is a pure function of what the ranks tell each other, hence alike on all of them.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

from collectives.errors import MismatchError
from collectives.negotiation import UNNAMED, Key, Request

_PACKAGE = str(Path(__file__).parent)
AGAIN = (
    "A rank that has passed over one, as by an exception that it has caught, meets the others again at a name that is new, or once every "
    "rank has called shutdown() and init()."
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a function is: what one frame of a thread's stack says.

    Attributes:
        function: its file, its name and its first line.
        line: of the file.
        at: the offset of the instruction.
        loops: the loops around it, by the offsets of their first and last instruction.
    """

    function: tuple[str, str, int]
    line: int
    at: int
    loops: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return f"{self.function[0]}:{self.line} in {self.function[1]}"


Stack = tuple[Place, ...]
"""The functions that a thread is in, the outermost first, without this package's own that it has called last."""


@dataclass(frozen=True, slots=True)
class Wait:
    """An operation that a rank waits for, and where in the program it does; ``stack`` is empty where that is not known."""

    key: Key
    request: Request
    stack: Stack = ()


def stacks(waiting: CodeType, variable: str) -> dict[int, Stack]:
    """Where the threads of this process are that execute ``waiting``, by the identity of what their local ``variable`` is."""
    found = {}
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None and frame.f_code is not waiting:
            frame = frame.f_back
        if frame is None:
            continue
        awaited = id(frame.f_locals.get(variable))
        while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
            frame = frame.f_back
        places: list[Place] = []
        while frame is not None:
            places.append(_place(frame))
            frame = frame.f_back
        found[awaited] = tuple(reversed(places))
    return found


def _place(frame: FrameType) -> Place:
    code, at = frame.f_code, frame.f_lasti
    around = tuple((first, last) for first, last in _loops(code) if first <= at <= last)
    return Place((code.co_filename, code.co_name, code.co_firstlineno), frame.f_lineno or 0, at, around)


@functools.lru_cache(256)
def _loops(code: CodeType) -> tuple[tuple[int, int], ...]:
    """The loops of a function: from where a jump backwards leads to the jump."""
    jumps = [(step.argval, step.offset) for step in dis.get_instructions(code) if "JUMP" in step.opname]
    return tuple((first, last) for first, last in jumps if isinstance(first, int) and first < last)


def before(one: Stack, other: Stack) -> bool | None:
    """Whether the program comes to ``one`` before it comes to ``other``; None where that cannot be told."""
    for mine, theirs in zip(one, other, strict=False):
        if mine.function != theirs.function or any(first <= theirs.at <= last for first, last in mine.loops if mine.line != theirs.line):
            return None
        if mine.line != theirs.line:
            return mine.line < theirs.line
    return None


def failing(
    waits: Sequence[Sequence[Wait]],
    asking: Mapping[Key, Collection[int]],
    passed: Mapping[Key, Collection[int]],
    known: Collection[Key],
    joined: Collection[int] = (),
) -> set[Key]:
    """The operations that fail.

    Args:
        waits: what each rank waits for.
        asking: by operation, the ranks that ask for it.
        passed: by operation, the ranks that have waited for one of its name in vain.
        known: those whose names have been carried out before.
        joined: ranks that wait for nothing but the end.
    """
    every = {wait.key for mine in waits for wait in mine}
    new: set[Key] = {key for key in every if isinstance(key, str) and key not in known}
    behind = {key for key in new if set(passed.get(key, ())).difference(asking[key], joined)}
    if behind and behind != every:
        return behind
    active = [mine for rank, mine in enumerate(waits) if rank not in joined]
    if new == every and all(len(mine) == 1 for mine in active):
        for (last,) in active:
            if all(wait.key == last.key or before(wait.stack, last.stack) for (wait,) in active):
                return every - {last.key}
    return every


def error(
    rank: int, waits: Sequence[Sequence[Wait]], asking: Mapping[Key, Collection[int]], fails: Collection[Key], numbers: Sequence[int]
) -> MismatchError:
    """What a rank raises whose operation fails, and what a rank is warned of whose operation goes on.

    Args:
        rank: this one, as messages call it.
        waits, asking: as for `failing`.
        fails: the operations that fail.
        numbers: what messages call the ranks.
    """

    def describe(wait: Wait) -> str:
        missing = ", ".join(str(numbers[peer]) for peer in range(len(waits)) if peer not in asking[wait.key])
        where = f" at {wait.stack[-1]}" if wait.stack else ""
        end = "" if wait.key in fails else ", and goes on waiting for it"
        return f"{wait.request.describe()}{where}, for which rank {missing} has not asked{end}"

    lines = [f"  rank {numbers[peer]}: waits for {'; and for '.join(map(describe, mine)) or 'nothing'}" for peer, mine in enumerate(waits)]
    requests = [wait.request for mine in waits for wait in mine]
    names = sorted({request.name for request in requests if request.name})
    differing = "name" if len(names) > 1 else "what they wait for"
    subject = f" for tensor {' / '.join(map(repr, names))}" if names else ""
    again = UNNAMED if any(request.name is None for request in requests) else AGAIN
    return MismatchError(
        f"rank {rank}: the ranks disagree{subject} in {differing}: every rank waits, and nothing that they wait for is asked for by all; "
        f"no tensor was touched:\n" + "\n".join(lines) + f"\nEvery rank must submit the same operations, by the same names. {again}"
    )
