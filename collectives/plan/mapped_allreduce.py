"""The direct all-reduce of mapped tensors as one loop, of one tensor or of a bucket.

Each rank combines its own chunk of all ranks' tensors, block by block, and writes each block into all of them while it
is in its cache. Nobody else touches the chunk, so that the ranks meet twice: before, when all tensors are there, and
after, when all have been written. What `binder` and `executor` do in general is written out here, because it doubles
the time of small tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from collectives.fusion import Pieces
from collectives.plan.fast_paths import ExecutorState, Kernel, Scale
from collectives.transport.base import Array
from collectives.transport.board import Board

Views = tuple[Sequence[Array], Sequence[Array]]
"""The inputs and the outputs of a peer's bucket."""


class MappedAllreduce:
    """The loop of one plan.

    Args:
        state, board: of the executor.
        peers: the other ranks, in the order in which their blocks are combined.
        groups: step groups of the plan.
        start, size, block: of this rank's chunk, in elements.
        kernel, finish: combine two blocks, and scale a reduced one.
    """

    def __init__(
        self,
        state: ExecutorState,
        board: Board,
        peers: Sequence[int],
        groups: int,
        start: int,
        size: int,
        block: int,
        kernel: Kernel,
        finish: Scale | None,
    ) -> None:
        self._state = state
        self._board = board
        self._peers = tuple(peers)
        self._groups = groups
        self._cuts = tuple(slice(start + at, start + min(at + block, size)) for at in range(0, size, block))
        self._kernel = kernel
        self._finish = finish

    def run(self, source: Array, out: Array, views: Sequence[tuple[Array, Array]]) -> None:
        """Reduce ``source`` into ``out``; all ranks have entered the call.

        Args:
            source, out: 1-D arrays of this rank.
            views: every peer's input and output, in the order of ``peers``.
        """
        kernel, finish = self._kernel, self._finish
        (theirs, into), *others = views
        in_place = source is out
        for cut in self._cuts:
            result = out[cut]
            kernel(result if in_place else source[cut], theirs[cut], result)
            for more, _ in others:
                kernel(result, more[cut], result)
            if finish is not None:
                finish(result, result)
            into[cut] = result
            for _, target in others:
                target[cut] = result
        _meet(self._state, self._board, self._peers, self._groups)


class MappedBucket:
    """The loop of a bucket: as `MappedAllreduce`, piece by piece.

    Args:
        state, board: of the executor.
        peers: the other ranks, in the order in which their blocks are combined.
        groups: step groups of the plan for private tensors, which ranks run that cannot map their peers' tensors.
        pieces: the tensors; ``sources`` and ``outs`` are this rank's.
        start, size, block: of this rank's chunk of all tensors together, in elements.
        kernel, finish: combine two blocks, and scale a reduced one.
    """

    def __init__(
        self,
        state: ExecutorState,
        board: Board,
        peers: Sequence[int],
        groups: int,
        pieces: Pieces,
        start: int,
        size: int,
        block: int,
        kernel: Kernel,
        finish: Scale | None,
    ) -> None:
        self._state = state
        self._board = board
        self._peers = tuple(peers)
        self._groups = groups
        self._pieces = pieces
        self._cuts = [
            (number, slice(at, min(at + block, until)))
            for number, first, until, _, _ in (pieces.cut(start, size) if size else ())
            for at in range(first, until, block)
        ]
        self._kernel = kernel
        self._finish = finish

    def run(self, views: Sequence[Views]) -> None:
        """Reduce the pieces; all ranks have entered the call. ``views`` are the peers' tensors, in their order."""
        kernel, finish, sources, outs = self._kernel, self._finish, self._pieces.sources, self._pieces.outs
        (inputs, outputs), *others = views
        for number, cut in self._cuts:
            mine, out = sources[number], outs[number]
            result = out[cut]
            kernel(result if mine is out else mine[cut], inputs[number][cut], result)
            for more, _ in others:
                kernel(result, more[number][cut], result)
            if finish is not None:
                finish(result, result)
            outputs[number][cut] = result
            for _, targets in others:
                targets[number][cut] = result
        _meet(self._state, self._board, self._peers, self._groups)


def _meet(state: ExecutorState, board: Board, peers: Sequence[int], groups: int) -> None:
    """Announce the end of this rank's part, and wait until all peers have ended theirs."""
    state.base = progress = state.base + groups
    board.advance(progress)
    seen = board.seen
    for peer in peers:
        if seen[peer] < progress:
            board.wait(peer, progress)
