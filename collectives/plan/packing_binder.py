"""Binding of fused plans over windows, whose inputs and outputs are pieces of many tensors.

A block in a window is contiguous. A block of few large pieces is combined piece by piece, without an intermediate copy;
one of many small pieces is gathered by one call, combined by one call, and scattered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from collectives.fusion import Piece, Pieces
from collectives.plan.binder import Binder
from collectives.plan.blocks import BlockOf
from collectives.plan.fast_paths import Do
from collectives.plan.one_reduction import Combination
from collectives.plan.program import Action, Program, Space, Verb
from collectives.transport.base import Array

_LARGE_PIECE = 16 << 10
"""Bytes of a piece from which combining it by itself costs less than copying it."""


class PackingBinder(Binder):
    """Binds the rounds of a fused plan: inputs and outputs are ``pieces``, everything else is a block."""

    def __init__(self, *others: Any, pieces: Pieces) -> None:
        super().__init__(*others)
        self._pieces = pieces

    def combination(self, program: Program) -> Combination | None:
        return None

    def _act(self, action: Action, buffer: int | None) -> Do:
        wait = self._wait(action)
        if action.verb is Verb.AWAIT:
            return wait
        target = action.target
        assert target is not None and action.source is not None
        if action.verb is Verb.STAGE:
            return self._pack(action, action.source.offset, self._blocks.own(target))
        outputs = next(
            (place.offset for place in (target, action.also) if place is not None and place.space is Space.OUTPUT), None
        )
        value = self._value(action, None)
        into = None
        if target.space is Space.WINDOW:
            into = value if action.returned else self._blocks.own(target)
        if action.verb is Verb.TAKE:
            return self._unpack(action, value, into, outputs, wait)
        return self._combine(action, value, into, outputs, wait)

    def _own_value(self, action: Action, spare: int) -> BlockOf:
        source, pieces, block = action.source, self._pieces, self.block
        assert source is not None
        if source.space is Space.WINDOW:
            return self._blocks.own(source)
        start, from_inputs, into = source.offset, source.space is Space.INPUT, self._blocks.in_scratch(spare)

        def gather(segment: int, n: int) -> Array:
            gathered = into(segment, n)
            pieces.gather_from(pieces.operands if from_inputs else pieces.outs, start + segment * block, n, gathered)
            return gathered

        return gather

    def _merged(self, action: Action) -> tuple[BlockOf, Callable[[int, int, Array], None] | None]:
        target, pieces, block = action.target, self._pieces, self.block
        assert target is not None
        into = self._blocks.own(target) if target.space is Space.WINDOW else self._blocks.in_scratch(0)
        outputs = action.also if target.space is Space.WINDOW else target
        if outputs is None:
            return into, None
        start = outputs.offset
        return into, lambda segment, n, packed: _scatter(pieces, pieces.cut(start + segment * block, n), packed)

    def _pack(self, action: Action, start: int, window: BlockOf) -> Do:
        """Gather a block of the inputs into the window, where peers read it."""
        pieces, length, block = self._pieces, self._blocks.length(action.size), self.block

        def pack(segment: int) -> None:
            n = length(segment)
            if n > 0:
                pieces.gather(start + segment * block, n, window(segment, n))

        return pack

    def _unpack(self, action: Action, value: BlockOf, into: BlockOf | None, outputs: int | None, wait: Do) -> Do:
        """Copy a peer's block to the outputs, into the own window, or both."""
        pieces, length, block = self._pieces, self._blocks.length(action.size), self.block

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

    def _combine(self, action: Action, value: BlockOf, into: BlockOf | None, outputs: int | None, wait: Do) -> Do:
        """Combine the own value with a peer's block.

        Args:
            into: the window's block for the result, or None; ``value`` itself if the result replaces the peer's block.
            outputs: the first element of the result in the outputs, or None.
        """
        pieces, length, block, scratch = self._pieces, self._blocks.length(action.size), self.block, self.scratch
        operand, kernel, finish = action.operand, self._kernel_of(action), self.finish if action.finish else None
        assert operand is not None and kernel is not None
        own = self._blocks.own(operand) if operand.space is Space.WINDOW else None
        start, from_inputs = operand.offset, operand.space is Space.INPUT

        def combine(segment: int) -> None:
            n = length(segment)
            if n <= 0:
                return
            wait(segment)
            peer_block, at = value(segment, n), segment * block
            if own is None:
                own_tensors = pieces.operands if from_inputs else pieces.outs
                cut = pieces.cut(start + at, n)
                if len(cut) * _LARGE_PIECE <= peer_block.nbytes + _LARGE_PIECE:
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

        return combine


def _scatter(pieces: Pieces, cut: Sequence[Piece], block: Array) -> None:
    outs, counts = pieces.outs, pieces.counts
    for number, first, last, begin, end in cut:
        if last - first == counts[number]:
            outs[number][...] = block[begin:end]
        else:
            outs[number][first:last] = block[begin:end]
