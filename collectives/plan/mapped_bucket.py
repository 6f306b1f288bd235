"""The loop of a bucket of mapped tensors: the direct all-reduce of `mapped_loops`, piece by piece.

A rank that cannot map a peer's memory, as where its system limits mappings, copies the blocks by direct reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from collectives.fusion import Pieces
from collectives.plan.fast_paths import ExecutorState, Kernel, Scale
from collectives.plan.mapped_loops import meet, spare_blocks
from collectives.tensors.reduction import combine, merging
from collectives.transport.base import Array, MemoryTransport


class PeerTensors(NamedTuple):
    """The tensors of a peer's bucket.

    Attributes:
        rank: the peer's.
        inputs, outputs: as arrays; None where this rank cannot map them.
        addresses: in the peer's process, of the inputs and then of the outputs.
    """

    rank: int
    inputs: Sequence[Array | None]
    outputs: Sequence[Array | None]
    addresses: Sequence[int]


@dataclass(eq=False)
class MappedBucket:
    """The loop of one bucket.

    Attributes:
        peers: the other ranks, beginning with the next one; ``own`` of them are below this one.
        pieces: the tensors; ``sources`` and ``outs`` are this rank's.
        start, size, block: of this rank's chunk of all tensors together, in elements.
        rest: tensors' numbers and slices of the peers' chunks: what they read of this rank's inputs.
    """

    state: ExecutorState
    memory: MemoryTransport
    peers: Sequence[int]
    own: int
    pieces: Pieces
    start: int
    size: int
    block: int
    kernel: Kernel
    finish: Scale | None
    scratch: Sequence[Array]
    """As of `MappedReduction`."""

    def __post_init__(self) -> None:
        self._steps = merging(self.kernel, [1] * (1 + len(self.peers)), self.own)
        pieces, start, end = self.pieces, self.start, self.start + self.size
        self._cuts = [
            (number, slice(at, min(at + self.block, until)))
            for number, first, until, _, _ in (pieces.cut(start, self.size) if self.size else ())
            for at in range(first, until, self.block)
        ]
        self.rest = tuple(
            (number, slice(first, until))
            for at, count in ((0, start), (end, pieces.total - end))
            for number, first, until, _, _ in pieces.cut(at, count)
        )

    def run(self, peers: Sequence[PeerTensors]) -> None:
        """Reduce the pieces; all ranks have entered the call.

        Raises:
            RankFailedError, CollectiveTimeoutError, TransportError: as the transport; arrays are undefined then.
        """
        finish, sources, outs = self.finish, self.pieces.sources, self.pieces.outs
        spares, below = spare_blocks(self.scratch, self.block, 1 + len(peers)), len(peers) - self.own
        for number, cut in self._cuts:
            source, out = sources[number], outs[number]
            result = out[cut]
            values = []
            for peer in peers:
                tensor = peer.inputs[number]
                values.append(self._fetch(peer, number, cut, result) if tensor is None else tensor[cut])
            own = result if source is out else source[cut]
            values = [*values[below:], own, *values[:below]]
            combine(self._steps, values, [spare[: result.size] for spare in spares], result)
            if finish is not None:
                finish(result, result)
            for peer in peers:
                tensor = peer.outputs[number]
                if tensor is None:
                    self._store(peer, number, cut, result)
                else:
                    tensor[cut] = result
        meet(self.state, self.memory.board, self.peers, 1)

    def _fetch(self, peer: PeerTensors, number: int, cut: slice, like: Array) -> Array:
        block = np.empty_like(like)
        at = peer.addresses[number] + cut.start * block.itemsize
        self.memory.fetch(peer.rank, at, block.ctypes.data, block.nbytes)
        return block

    def _store(self, peer: PeerTensors, number: int, cut: slice, block: Array) -> None:
        at = peer.addresses[len(peer.outputs) + number] + cut.start * block.itemsize
        self.memory.store(peer.rank, at, block.ctypes.data, block.nbytes)
