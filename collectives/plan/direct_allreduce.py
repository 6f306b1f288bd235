"""The direct all-reduce of private tensors as one loop.

Each rank reads its own chunk of its peers' tensors, block by block, combines it, and writes each block into all of them
while it is in its cache. Nobody else touches the chunk, so that the ranks meet twice, as in `mapped_loops`: before,
when all tensors are there, and after, when all have been written.
"""

from __future__ import annotations

from collections.abc import Sequence

from collectives.plan.fast_paths import ExecutorState, Kernel, Move, Scale
from collectives.plan.mapped_loops import meet
from collectives.transport.base import Array
from collectives.transport.board import Board


class DirectAllreduce:
    """The loop of one plan.

    Args:
        state, board: of the executor.
        fetch, store: of the memory transport.
        scratch: one array of the plan's dtype with room for a block.
        peers: the other ranks, in the order in which their blocks are combined.
        groups: step groups of the plan.
        start, size, block: of this rank's chunk, in elements.
        itemsize: bytes of an element.
        kernel, finish: combine two blocks, and scale a reduced one.
    """

    def __init__(
        self,
        state: ExecutorState,
        board: Board,
        fetch: Move,
        store: Move,
        scratch: Sequence[Array],
        peers: Sequence[int],
        groups: int,
        start: int,
        size: int,
        block: int,
        itemsize: int,
        kernel: Kernel,
        finish: Scale | None,
    ) -> None:
        self._state = state
        self._board = board
        self._fetch = fetch
        self._store = store
        self._scratch = scratch
        self._peers = tuple(peers)
        self._groups = groups
        cuts = [(start + at, min(block, size - at)) for at in range(0, size, block)]
        self._cuts = tuple((slice(at, at + n), at * itemsize, n * itemsize, n) for at, n in cuts)
        self._kernel = kernel
        self._finish = finish

    def run(self, source: Array, out: Array, out_at: int, places: Sequence[tuple[int, int, int]]) -> None:
        """Reduce ``source`` into ``out``; all ranks have entered the call.

        Args:
            source, out: 1-D arrays of this rank.
            out_at: address of ``out``.
            places: every peer with the addresses of its input and output, in the order of ``peers``.

        Raises:
            RankFailedError, CollectiveTimeoutError, TransportError: as the transport; arrays are undefined then.
        """
        fetch, store, kernel, finish, state = self._fetch, self._store, self._kernel, self._finish, self._state
        scratch = self._scratch[0]
        for cut, at, nbytes, n in self._cuts:
            result, value = out[cut], scratch[:n]
            mine = result if source is out else source[cut]
            for peer, theirs, _ in places:
                fetch(peer, theirs + at, state.scratch_at, nbytes)
                kernel(mine, value, result)
                mine = result
            if finish is not None:
                finish(result, result)
            for peer, _, into in places:
                store(peer, into + at, out_at + at, nbytes)
        meet(state, self._board, self._peers, self._groups)
