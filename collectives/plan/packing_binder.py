"""Binding of fused plans, through windows, where inputs are packed."""

from __future__ import annotations

from typing import Any

from collectives.fusion import Pieces
from collectives.plan import window_packing
from collectives.plan.binder import Binder
from collectives.plan.fast_paths import Do
from collectives.plan.one_reduction import Combination
from collectives.plan.program import Action, Program, Space, Verb


class PackingBinder(Binder):
    """Binds the rounds of a fused plan over windows: inputs and outputs are pieces of many tensors, everything else is
    a block.

    Args:
        pieces: the tensors.
        others: as `Binder`.
    """

    def __init__(self, *others: Any, pieces: Pieces) -> None:
        super().__init__(*others)
        self._pieces = pieces

    def combination(self, program: Program) -> Combination | None:
        return None

    def _act(self, action: Action, buffer: int | None) -> Do:
        wait = self._wait(action)
        if action.verb is Verb.AWAIT:
            return wait
        pieces, target = self._pieces, action.target
        length, block = self._blocks.length(action.size), self._block
        assert target is not None and action.source is not None
        if action.verb is Verb.STAGE:
            return window_packing.pack(pieces, action.source.offset, block, length, self._blocks.own(target))
        outputs = next(
            (place.offset for place in (target, action.also) if place is not None and place.space is Space.OUTPUT), None
        )
        value = self._value(action, None)
        into = None
        if target.space is Space.WINDOW:
            into = value if action.returned else self._blocks.own(target)
        if action.verb is Verb.TAKE:
            return window_packing.unpack(pieces, value, into, outputs, block, length, wait)
        operand, kernel = action.operand, self._kernel
        assert operand is not None and kernel is not None
        own = self._blocks.own(operand) if operand.space is Space.WINDOW else None
        inputs = (operand.offset, operand.space is Space.INPUT)
        finish = self._finish if action.finish else None
        return window_packing.reduce(
            pieces, value, own, inputs, into, outputs, block, length, wait, kernel, finish, self._scratch
        )
