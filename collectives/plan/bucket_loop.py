"""The loop of a bucket: the direct all-reduce of `mapped_loops`, piece by piece, wherever the tensors lie.

Mapped tensors are read and written as arrays. The blocks of private ones, and of those that this rank cannot map, are
copied by direct reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from collectives.fusion import Pieces
from collectives.plan.fast_paths import ExecutorState, Kernel, Scale
from collectives.plan.mapped_loops import meet
from collectives.tensors.arrays import address
from collectives.tensors.reduction import merging
from collectives.transport.base import Array, MemoryTransport

Cut = tuple[int, slice]
"""A tensor's number, and a block of it in elements."""


@dataclass(eq=False, slots=True)
class PeerTensors:
    """The tensors of a peer's bucket.

    Attributes:
        rank: the peer's.
        inputs, outputs: as arrays; None where they are private, or this rank cannot map them.
        addresses: in the peer's process, of the inputs and then of the outputs.
        are_mapped: all are arrays here.
    """

    rank: int
    inputs: Sequence[Array | None]
    outputs: Sequence[Array | None]
    addresses: Sequence[int]
    are_mapped: bool = field(init=False)

    def __post_init__(self) -> None:
        self.are_mapped = all(tensor is not None for tensor in (*self.inputs, *self.outputs))


@dataclass(eq=False)
class BucketLoop:
    """The loop of one bucket.

    Attributes:
        peers: the other ranks, beginning with the next one; ``own`` of them are below this one.
        pieces: the tensors; ``sources`` and ``outs`` are this rank's.
        start, size: of this rank's chunk of all tensors together, in elements.
        block, direct_block: the most elements that are combined at once, of mapped tensors and by direct reads.
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
    direct_block: int
    kernel: Kernel
    finish: Scale | None
    scratch: Sequence[Array]
    """As of `MappedReduction`, of blocks of ``direct_block``."""

    def __post_init__(self) -> None:
        self._steps = merging(self.kernel, [1] * (1 + len(self.peers)), self.own)
        start, end = self.start, self.start + self.size
        self._cuts = self._divide(start, end, self.block)
        self._direct_cuts = self._divide(start, end, self.direct_block)
        total = self.pieces.total
        self.rest = (*self._divide(0, start, total), *self._divide(end, total, total))

    def _divide(self, start: int, end: int, block: int) -> list[Cut]:
        """The blocks of the tensors from element ``start`` of all tensors together up to ``end``."""
        return [
            (number, slice(at, min(at + block, until)))
            for number, first, until, _, _ in self.pieces.cut(start, end - start)
            for at in range(first, until, block)
        ]

    def run(self, peers: Sequence[PeerTensors]) -> None:
        """Reduce the pieces; all ranks have entered the call.

        Raises:
            RankFailedError, CollectiveTimeoutError, TransportError: as the transport; arrays are undefined then.
        """
        finish, sources, outs, kernel = self.finish, self.pieces.sources, self.pieces.outs, self._steps[-1][1]
        for number, cut in self._cuts if all([peer.are_mapped for peer in peers]) else self._direct_cuts:
            source, out = sources[number], outs[number]
            result = out[cut]
            value = result if source is out else source[cut]
            if len(peers) == 1:
                other = self._value(peers[0], number, cut, 0)
                left, right = (other, value) if self.own else (value, other)
                kernel(left, right, result)
            else:
                self._combine(peers, number, cut, value, result)
            if finish is not None:
                finish(result, result)
            for peer in peers:
                target = peer.outputs[number]
                if target is None:
                    at = peer.addresses[len(peer.outputs) + number] + cut.start * result.itemsize
                    self.memory.store(peer.rank, at, address(result), result.nbytes)
                else:
                    target[cut] = result
        meet(self.state, self.memory.board, self.peers, 1)

    def _combine(self, peers: Sequence[PeerTensors], number: int, cut: slice, own: Array, result: Array) -> None:
        """Combine a block of all ranks by the fixed tree, each fetched when it is needed."""
        below, count = len(peers) - self.own, 1 + len(peers)
        by_rank = (*peers[below:], None, *peers[:below])

        def operand(place: int, spare: int) -> Array:
            if place >= count:
                return self._spare(1 + place - count, result.size)
            peer = by_rank[place]
            return own if peer is None else self._value(peer, number, cut, 1 + spare)

        *inner, (last, kernel) = self._steps
        for (left, right, depth, spare), combine in inner:
            combine(operand(left, depth), operand(right, spare), self._spare(1 + depth, result.size))
        kernel(operand(last.left, last.depth), operand(last.right, last.spare), result)

    def _value(self, peer: PeerTensors, number: int, cut: slice, spare: int) -> Array:
        """A block of a peer's input; fetched into block ``spare`` of the scratch memory, unless it is an array here."""
        tensor = peer.inputs[number]
        if tensor is not None:
            return tensor[cut]
        block = self._spare(spare, cut.stop - cut.start)
        at = peer.addresses[number] + cut.start * block.itemsize
        self.memory.fetch(peer.rank, at, address(block), block.nbytes)
        return block

    def _spare(self, place: int, size: int) -> Array:
        at = place * self.direct_block
        return self.scratch[0][at : at + size]
