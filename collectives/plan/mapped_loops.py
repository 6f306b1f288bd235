"""Mapped loops: the shortest way through the plans that carry out most calls on mapped tensors.

Where every block is read from a peer's input, no rank waits for another in the middle of the call. The ranks meet
twice: before, when all tensors are there, and after, when no rank reads or writes them any more. What `binder` and
`executor` do in general is then one loop over NumPy arrays, which halves the time of small tensors:

- `MappedReduction`: the direct all-reduce and reduce-scatter. Each rank combines its chunk of all ranks' tensors block
  by block, and in an all-reduce writes each block into the peers' outputs while it is in its cache;
- `MappedMoves`: the direct allgather and all-to-all, and the broadcast in which every rank reads from the root.

`bucket_loop` has the loop of many tensors as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from collectives.plan.fast_paths import ExecutorState, Kernel, Scale, await_all
from collectives.plan.program import Action, Program, Space, Verb
from collectives.schedules.fixed_tree import intermediates
from collectives.tensors.reduction import combine, merging
from collectives.transport.base import Array
from collectives.transport.host.board import Board

Views = Sequence[tuple[Array, Array]]
"""Every peer's input and output, in the order in which the loop was given the peers."""


class Loop(Protocol):
    """Carries out a whole plan on one mapped tensor of each rank."""

    def cut(self, views: Views) -> Any:
        """The blocks of the peers' tensors that the plan reads and writes, for `run`."""

    def run(self, source: Array, out: Array, blocks: Any) -> None:
        """Carry out the plan on this rank's input and output; all ranks have entered the call."""


@dataclass(eq=False)
class MappedReduction:
    """The loop of a direct all-reduce or reduce-scatter."""

    state: ExecutorState
    board: Board
    peers: Sequence[int]
    """The other ranks, beginning with the next one."""
    own: int
    """This rank's place among all ranks."""
    groups: int
    """Step groups of the plan."""
    start: int
    """Of this rank's chunk in the inputs, as all that follows in elements."""
    size: int
    block: int
    out_start: int
    """Of the chunk in this rank's output."""
    pushes: bool
    """Whether the chunk is written into the peers' outputs."""
    kernel: Kernel
    finish: Scale | None
    scratch: Sequence[Array]
    """One array, with room for the intermediate results of a block behind a first block; replaced when it grows."""

    def __post_init__(self) -> None:
        self._steps = merging(self.kernel, [1] * (1 + len(self.peers)), self.own)
        cuts = [(at, min(at + self.block, self.size)) for at in range(0, self.size, self.block)]
        self._cuts = [
            (slice(self.start + at, self.start + until), slice(self.out_start + at, self.out_start + until))
            for at, until in cuts
        ]

    def cut(self, views: Views) -> Any:
        blocks = []
        for cut, at in self._cuts:
            values = [source[cut] for source, _ in views]
            targets = tuple(target[at] for _, target in views) if self.pushes else ()
            below = len(values) - self.own
            blocks.append((cut, at, values[below:], values[:below], targets))
        return blocks

    def run(self, source: Array, out: Array, blocks: Any) -> None:
        finish, steps, kernel = self.finish, self._steps, self._steps[-1][1]
        in_place, pair = source is out, len(self.peers) == 1
        spares = spare_blocks(self.scratch, self.block, 1 + len(self.peers))
        for cut, at, before, after, targets in blocks:
            result = out[at]
            value = result if in_place else source[cut]
            if pair:
                kernel(value, (before or after)[0], result)
            else:
                values = (*before, value, *after)
                combine(steps, values, [spare[: result.size] for spare in spares], result)
            if finish is not None:
                finish(result, result)
            for target in targets:
                target[...] = result
        # As `meet`, without the calls.
        state, board = self.state, self.board
        state.base = progress = state.base + self.groups
        board.advance(progress)
        seen = board.seen
        for peer in self.peers:
            if seen[peer] < progress:
                board.wait(peer, progress)


class MappedMoves:
    """The loop of a plan whose every action copies a block of some rank's input into this rank's output.

    Args:
        moves: the peer's place in ``peers``, the first element in its input and in the output, and the number of
            elements.
        own: the same of what this rank copies from its own input, without a place.
    """

    def __init__(
        self,
        state: ExecutorState,
        board: Board,
        peers: Sequence[int],
        groups: int,
        moves: Sequence[tuple[int, int, int, int]],
        own: Sequence[tuple[int, int, int]],
    ) -> None:
        self._state, self._board, self._peers, self._groups = state, board, peers, groups
        self._moves = [
            (place, slice(source, source + size), slice(target, target + size))
            for place, source, target, size in moves
            if size
        ]
        self._own = [
            (slice(source, source + size), slice(target, target + size)) for source, target, size in own if size
        ]

    def cut(self, views: Views) -> Any:
        return [(here, views[place][0][there]) for place, there, here in self._moves]

    def run(self, source: Array, out: Array, blocks: Any) -> None:
        for here, block in blocks:
            out[here] = block
        state, board = self._state, self._board
        state.base = progress = state.base + self._groups
        board.advance(progress)
        # No peer waits for this copy.
        if source is not out:
            for there, here in self._own:
                out[here] = source[there]
        await_all(board, self._peers, progress)


def make_loop(
    program: Program,
    rank: int,
    state: ExecutorState,
    board: Board,
    peers: Sequence[int],
    groups: int,
    block: int,
    kernel: Kernel | None,
    finish: Scale | None,
    scratch: Sequence[Array],
) -> Loop | None:
    """The loop that does what a program for mapped tensors says, all of whose exchanges are in place, and which takes
    no window slots on any rank; None if it is none of these. Arguments as of `MappedReduction`."""
    acts = [action for each in program.rounds for action in each.rest if action.verb is not Verb.AWAIT]
    pushes = [action for each in program.rounds for action in each.pushes]
    if not acts and not pushes and not program.touched_by:
        return None
    if any(each.receives or each.sends for each in program.rounds) or not all(map(_reads_input, acts)):
        return None
    place = {peer: number for number, peer in enumerate(peers)}
    if all(action.verb is Verb.TAKE for action in acts) and not pushes:
        moves = [(action.peer, *_offsets(action), action.size) for action in acts]
        return MappedMoves(
            state,
            board,
            peers,
            groups,
            [(place[peer], *move) for peer, *move in moves if peer != rank],  # type: ignore[misc]
            [tuple(move) for peer, *move in moves if peer == rank],  # type: ignore[misc]
        )
    if kernel is None or len(acts) != 1 or not acts[0].finish:
        return None
    (reduced,) = acts
    values = reduced.values or (reduced,)
    if {action.peer for action in values} - {rank} != set(peers):
        return None
    assert reduced.operand is not None and reduced.target is not None
    start, out_start = reduced.operand.offset, reduced.target.offset
    pushed = {(action.peer, action.target.offset if action.target is not None else -1) for action in pushes}
    if pushes and pushed != {(peer, out_start) for peer in peers}:
        return None
    return MappedReduction(
        state,
        board,
        peers,
        sum(peer < rank for peer in peers),
        groups,
        start,
        reduced.size,
        block,
        out_start,
        bool(pushes),
        kernel,
        finish,
        scratch,
    )


def spare_blocks(scratch: Sequence[Array], block: int, ranks: int) -> list[Array]:
    """The memory for the intermediate results of a block of each of ``ranks``."""
    return [scratch[0][number * block : (number + 1) * block] for number in range(1, 1 + intermediates(ranks))]


def _reads_input(action: Action) -> bool:
    """Whether an action reads inputs that no rank changes before, and writes this rank's output."""
    target = action.target
    return (
        target is not None
        and target.space is Space.OUTPUT
        and action.also is None
        and all(
            one.source is not None and one.source.space is Space.INPUT and one.after < 0
            for one in action.values or (action,)
        )
    )


def _offsets(action: Action) -> tuple[int, int]:
    assert action.source is not None and action.target is not None
    return action.source.offset, action.target.offset


def meet(state: ExecutorState, board: Board, peers: Sequence[int], groups: int) -> None:
    """Announce the end of this rank's part, and wait until all peers have ended theirs."""
    state.base = progress = state.base + groups
    board.advance(progress)
    await_all(board, peers, progress)
