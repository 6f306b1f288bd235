"""Packing: the actions of a fused plan over windows, whose inputs and outputs are pieces of many tensors.

A block in a window is contiguous. A block of few large pieces is combined piece by piece, without an intermediate copy;
one of many small pieces is gathered by one call, combined by one call, and scattered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from collectives.fusion import Piece, Pieces
from collectives.plan.fast_paths import Do, Kernel, Scale
from collectives.transport.base import Array

Block = Callable[[int, int], Array]
"""A contiguous block, by segment and length."""
Length = Callable[[int], int]

_LARGE_PIECE = 16 << 10
"""Bytes of a piece from which combining it by itself costs less than copying it."""


def pack(pieces: Pieces, start: int, block: int, length: Length, window: Block) -> Do:
    """Make an action that gathers a block of the inputs into the window, where peers read it."""

    def pack(segment: int) -> None:
        n = length(segment)
        if n > 0:
            pieces.gather(start + segment * block, n, window(segment, n))

    return pack


def unpack(
    pieces: Pieces, value: Block, into: Block | None, outputs: int | None, block: int, length: Length, wait: Do
) -> Do:
    """Make an action that copies a peer's block to the outputs, into the own window, or both."""

    def unpack(segment: int) -> None:
        n = length(segment)
        if n <= 0:
            return
        wait(segment)
        packed = value(segment, n)
        if into is not None:
            into(segment, n)[...] = packed
        if outputs is not None:
            _scatter(pieces, pieces.cut(outputs + segment * block, n), packed)

    return unpack


def reduce(
    pieces: Pieces,
    value: Block,
    own: Block | None,
    inputs: tuple[int, bool],
    into: Block | None,
    outputs: int | None,
    block: int,
    length: Length,
    wait: Do,
    kernel: Kernel,
    finish: Scale | None,
    scratch: Sequence[Array],
) -> Do:
    """Make an action that combines the own value with a peer's block.

    Args:
        value: the peer's block.
        own: the own value in the window; None: it lies in the tensors.
        inputs: the first element of the own value in the tensors, and whether it is among inputs or outputs.
        into: the window's block for the result, or None; ``value`` itself if the result replaces the peer's block.
        outputs: the first element of the result in the outputs, or None.
        block: elements of a segment.
        length: elements of the block in a segment.
        wait: waits for the peer.
        kernel, finish: combine two blocks, and scale a reduced one.
        scratch: one array with room for a block.
    """
    start, from_inputs = inputs

    def reduce(segment: int) -> None:
        n = length(segment)
        if n <= 0:
            return
        wait(segment)
        peer_block, at = value(segment, n), segment * block
        if own is None:
            own_tensors = pieces.operands if from_inputs else pieces.outs
            cut = pieces.cut(start + at, n)
            if _are_large(cut, peer_block):
                result = into(segment, n) if into is not None else None
                for number, first, last, begin, end in cut:
                    out = result[begin:end] if result is not None else pieces.outs[number][first:last]
                    kernel(own_tensors[number][first:last], peer_block[begin:end], out)
                    if finish is not None:
                        finish(out, out)
                if result is not None and outputs is not None:
                    _scatter(pieces, pieces.cut(outputs + at, n), result)
                return
            gathered = scratch[0][:n] if into is None or into is value else into(segment, n)
            result = peer_block if into is value else gathered
            pieces.gather_from(own_tensors, start + at, n, gathered)
            kernel(gathered, peer_block, result)
        else:
            result = into(segment, n) if into is not None else scratch[0][:n]
            kernel(own(segment, n), peer_block, result)
        if finish is not None:
            finish(result, result)
        if outputs is not None:
            _scatter(pieces, pieces.cut(outputs + at, n), result)

    return reduce


def _are_large(cut: Sequence[Piece], block: Array) -> bool:
    return len(cut) * _LARGE_PIECE <= block.nbytes + _LARGE_PIECE


def _scatter(pieces: Pieces, cut: Sequence[Piece], block: Array) -> None:
    outs, counts = pieces.outs, pieces.counts
    for number, first, last, begin, end in cut:
        if last - first == counts[number]:
            outs[number][...] = block[begin:end]
        else:
            outs[number][first:last] = block[begin:end]
