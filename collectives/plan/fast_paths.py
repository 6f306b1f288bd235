"""Fast paths: the few closures that most calls consist of.

They do what `binder` does in general, with everything that can be known looked up beforehand: whole actions of plans of
one segment, whose blocks never move within a slot.

`one_reduction` has the shortest way through a whole plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from collectives.plan.program import Place, Space
from collectives.transport.base import SLOTS, Array
from collectives.transport.host.board import Board

Kernel = Callable[[Array, Array, Array], object]
Scale = Callable[[Array, Array], object]
Do = Callable[[int], None]
_EMPTY: Array = np.empty(0)


class ExecutorState:
    """What changes from call to call: the caller's arrays, the peers' addresses, and the progress of the world.

    Attributes:
        input, output: 1-D arrays of the plan's dtype.
        input_at, output_at, scratch_at: the addresses of these and of the scratch memory.
        addresses: of every rank's input and output.
        inputs, outputs: of every peer, as 1-D arrays of the plan's dtype; None where they are not mapped here.
        base: groups finished before this call; equal on all ranks.
        slot: the window slot of segment 0.
        free_at: of each window slot, the progress that every peer must have made before it may be overwritten.
        finished: a progress that every peer is known to have made, besides what the board has shown.
        entered_staged: segment 0 was in the window before the call was entered, so that no rank waits for it.
    """

    def __init__(self, size: int) -> None:
        self.input: Array = _EMPTY
        self.output: Array = _EMPTY
        self.input_at = self.output_at = self.scratch_at = 0
        self.addresses: list[Sequence[int]] = [(0, 0)] * size
        self.inputs: list[Array | None] = [None] * size
        self.outputs: list[Array | None] = [None] * size
        self.base = self.slot = self.finished = 0
        self.free_at = [0] * SLOTS
        self.entered_staged = False


def await_all(board: Board, peers: Iterable[int], progress: int) -> None:
    """Wait until all of ``peers`` have made this progress."""
    seen = board.seen
    for peer in peers:
        if seen[peer] < progress:
            board.wait(peer, progress)


def stage(state: ExecutorState, views: Sequence[Array], source: Place, size: int) -> Do:
    """Copy a block of the input into the window; ``views`` are the block in each slot."""
    own = slice(source.offset, source.offset + size)

    def stage(segment: int) -> None:
        views[state.slot][...] = state.input[own]

    return stage if size else _nothing


def take_from_window(
    state: ExecutorState, views: Sequence[Array], target: Place, size: int, wait: Do, staged: bool
) -> Do:
    """Copy a block of a peer's window into the output; ``staged`` blocks may be there before the call is entered."""
    here = slice(target.offset, target.offset + size)

    def take(segment: int) -> None:
        if not (staged and state.entered_staged):
            wait(0)
        state.output[here] = views[state.slot]

    return take if size else _nothing


def reduce_from_window(
    state: ExecutorState,
    views: Sequence[Array],
    operand: Place,
    target: Place,
    size: int,
    wait: Do,
    staged: bool,
    kernel: Kernel,
    finish: Scale | None,
) -> Do:
    """Combine a block of the input with one of a peer's window, into the output; ``staged`` as above."""
    here, own = slice(target.offset, target.offset + size), slice(operand.offset, operand.offset + size)

    def reduce(segment: int) -> None:
        if not (staged and state.entered_staged):
            wait(0)
        out = state.output[here]
        kernel(state.input[own], views[state.slot], out)
        if finish is not None:
            finish(out, out)

    return reduce if size else _nothing


def reduce_in_window(
    state: ExecutorState,
    views: Sequence[Array],
    operand: Place,
    target: Place,
    size: int,
    wait: Do,
    staged: bool,
    kernel: Kernel,
    finish: Scale | None,
) -> Do:
    """`reduce_from_window`, whose result also replaces the peer's block, from where the peer takes it."""
    here, own = slice(target.offset, target.offset + size), slice(operand.offset, operand.offset + size)
    from_input = operand.space is Space.INPUT

    def reduce(segment: int) -> None:
        if not (staged and state.entered_staged):
            wait(0)
        block = views[state.slot]
        kernel((state.input if from_input else state.output)[own], block, block)
        if finish is not None:
            finish(block, block)
        state.output[here] = block

    return reduce if size else _nothing


def _nothing(segment: int) -> None:
    """A block without elements."""
