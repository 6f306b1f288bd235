"""The direct all-reduce of mapped tensors as one loop.

Each rank combines its own chunk of all ranks' tensors, block by block, and writes each block into all of them while it
is in its cache. Nobody else touches the chunk, so that the ranks meet twice: before, when all tensors are there, and
after, when all have been written. What `binder` and `executor` do in general is written out here, because it doubles
the time of small tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from collectives.plan.fast_paths import ExecutorState, Kernel, Scale
from collectives.transport.board import Board


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
        self._first, self._others = peers[0], tuple(peers[1:])
        self._peers = tuple(peers)
        self._groups = groups
        self._cuts = tuple(slice(start + at, start + min(at + block, size)) for at in range(0, size, block))
        self._kernel = kernel
        self._finish = finish

    def run(self) -> bool:
        """Reduce ``state.input`` into ``state.output``; all ranks have entered the call. Returns False, with nothing
        done, if a peer's tensor is not mapped here."""
        state, board, kernel, finish = self._state, self._board, self._kernel, self._finish
        inputs, outputs, mine, out = state.inputs, state.outputs, state.input, state.output
        theirs, into = inputs[self._first], outputs[self._first]
        others = [(inputs[peer], outputs[peer]) for peer in self._others]
        if theirs is None or into is None or any(view is None for pair in others for view in pair):
            return False
        for cut in self._cuts:
            result = out[cut]
            kernel(result if mine is out else mine[cut], theirs[cut], result)
            for source, _ in others:
                kernel(result, source[cut], result)  # type: ignore[index]
            if finish is not None:
                finish(result, result)
            into[cut] = result
            for _, target in others:
                target[cut] = result  # type: ignore[index]
        state.base = progress = state.base + self._groups
        board.advance(progress)
        seen = board.seen
        for peer in self._peers:
            if seen[peer] < progress:
                board.wait(peer, progress)
        return True
