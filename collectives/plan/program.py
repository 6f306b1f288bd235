"""A program: what one rank does with memory in a collective, block by block.

A program is written for one segment. Its actions find the blocks of segment s by arithmetic, so that a plan repeats it
over all segments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Medium(Enum):
    """How this rank and a peer exchange blocks."""

    WINDOW = "window"
    MAPPED = "mapped"
    DIRECT = "direct-read"
    MESSAGE = "mpi"

    @property
    def in_place(self) -> bool:
        """Whether peers read inputs, and write outputs, where these lie: mapped, or by system calls."""
        return self in (Medium.MAPPED, Medium.DIRECT)


class Space(Enum):
    """The memory of a rank that a block lies in."""

    INPUT = "input"
    OUTPUT = "output"
    WINDOW = "window"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk begins: elements from the start of the space, in a window from the start of the segment's slot."""

    space: Space
    offset: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The chunks of a collective, and the element offset of each chunk in any rank's input and output."""

    sizes: Sequence[int]
    """Elements of each chunk; the same on all ranks."""
    inputs: Callable[[int], Mapping[int, int]]
    outputs: Callable[[int], Mapping[int, int]]


class Verb(Enum):
    """What an action does."""

    STAGE = "copy own input into the window"
    PUSH = "write own value into the peer's output"
    SEND = "send own value as a message"
    TAKE = "replace by the peer's value"
    REDUCE = "combine with the peer's value"
    MERGE = "combine the values of several ranks"
    AWAIT = "wait until the peer has pushed"


@dataclass(frozen=True, slots=True)
class Action:
    """Moves or combines one block of one segment. Places that the verb does not use are None."""

    verb: Verb
    medium: Medium
    peer: int
    size: int
    """Elements of the whole chunk."""
    source: Place | None
    """The peer's value (TAKE, REDUCE), or the own one (STAGE, PUSH, SEND)."""
    operand: Place | None = None
    """REDUCE: the own value."""
    target: Place | None = None
    """The result; PUSH: on the peer."""
    also: Place | None = None
    """A second place for the result: the output, when the first is the window."""
    after: int = -1
    """The round of the same segment that the peer must have finished; -1: none, entering the call suffices."""
    finish: bool = False
    """Whether the block is fully reduced afterwards, and is scaled."""
    detour: bool = False
    """Whether the message must not be received into its target, because the old value there is still being sent."""
    returned: bool = False
    """REDUCE: the result replaces the value in the peer's window. TAKE: it is there, so that ``source`` is in the own
    window."""
    values: tuple[Action, ...] = ()
    """MERGE: how each value is had, in the order in which they are combined, this rank's among them: as for a REDUCE
    with it."""
    counts: tuple[int, int] = (1, 1)
    """The number of ranks whose contributions are in the own value, and in the peer's: REDUCE, and each value of a
    MERGE."""


@dataclass(frozen=True, slots=True)
class RoundProgram:
    """The actions of one round: sends and pushes first (values from before the round), then the rest in order."""

    receives: tuple[Action, ...]
    sends: tuple[Action, ...]
    pushes: tuple[Action, ...]
    rest: tuple[Action, ...]
    drain_first: bool
    """Whether the round writes a block that it also sends: all messages are waited for before anything is written."""

    @property
    def reads(self) -> tuple[Action, ...]:
        """The rest, with the values of each MERGE in its place."""
        return tuple(one for action in self.rest for one in action.values or (action,))


@dataclass(frozen=True, slots=True)
class Program:
    """What a rank does for each segment, and whom it waits for at the end."""

    rounds: tuple[RoundProgram, ...]
    touched_by: tuple[tuple[int, int], ...]
    """Peers that read or write this rank's private memory, each with the last round in which it does; the call returns
    after that."""
    slot_elements: int
    """Elements of a window slot that one segment uses on this rank."""
    uses_window: bool
    unstaged: tuple[int, ...]
    """Chunks of the input that no peer reads from the window."""
    messages: int
    """The most received blocks that are held at once, which sizes the scratch memory."""
