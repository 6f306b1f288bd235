"""Binding of fused plans within a host: through windows, where inputs are packed, and by direct reads of lists."""

from __future__ import annotations

from typing import Any

from collectives.fusion import Lists, Pieces
from collectives.plan import fast_paths, window_packing
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


class AddressBinder(Binder):
    """Binds the rounds of a fused plan over direct reads, whose blocks are lists of addresses: of the direct
    all-reduce, the one algorithm that uses them.

    Args:
        lists: the tensors.
        others: as `Binder`.
    """

    def __init__(self, *others: Any, lists: Lists) -> None:
        super().__init__(*others)
        self._lists = lists

    def _push(self, action: Action) -> Do:
        memory = self._group.memory
        assert memory is not None
        return fast_paths.push_lists(
            memory.store_list, self._group.rank, action, self._block, self._itemsize, self._lists
        )

    def _act(self, action: Action, buffer: int | None) -> Do:
        if action.verb is Verb.AWAIT:
            return self._wait(action)
        memory, kernel, finish = self._group.memory, self._kernel, self._finish if action.finish else None
        assert memory is not None and kernel is not None and action.verb is Verb.REDUCE and action.after < 0
        return fast_paths.reduce_lists(
            self._state,
            memory.fetch_list,
            self._scratch,
            action,
            self._block,
            self._itemsize,
            kernel,
            finish,
            self._lists,
        )
