"""The one-shot all-reduce of one block: what carries out tiny tensors, where every call of Python counts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives.plan.blocks import BlockLookup
from collectives.plan.fast_paths import ExecutorState, Kernel, Scale, await_all
from collectives.plan.program import Medium, Place, Program, Space, Verb
from collectives.schedules import fixed_tree
from collectives.tensors.reduction import merging
from collectives.transport.base import SLOTS, Array
from collectives.transport.host.board import Board

EnterAndLook = Callable[[int], bool | None]
"""`collectives.transport.base.Control.enter_and_look`, without words."""
Quietly = Callable[..., Any]
"""``quietly(function, *arguments)`` calls a function without NumPy's floating-point warnings."""
_INPUT, _OUTPUT = Place(Space.INPUT, 0), Place(Space.OUTPUT, 0)


class Combination(NamedTuple):
    """What a one-shot all-reduce of one block combines."""

    own: Sequence[Array]
    """This rank's block in each slot of its window."""
    blocks: Sequence[Sequence[Array]]
    """The blocks of all ranks' windows, likewise, in the order of ranks; of two ranks, this rank's is the first one."""
    kernel: Kernel
    finish: Scale | None


def combination(
    program: Program, rank: int, blocks: BlockLookup, kernel: Kernel | None, finish: Scale | None
) -> Combination | None:
    """What a staged program of one segment combines; None if it does anything else."""
    if kernel is None or len(program.rounds) != 2:
        return None
    stage, combine = program.rounds
    if any(r.receives or r.sends or r.pushes for r in program.rounds) or len(stage.rest) != 1 or len(combine.rest) != 1:
        return None
    (staged,), (reduced,) = stage.rest, combine.rest
    if staged.source != _INPUT or staged.target is None or reduced.verb not in (Verb.REDUCE, Verb.MERGE):
        return None
    if reduced.operand != _INPUT or reduced.target != _OUTPUT or reduced.also is not None:
        return None
    actions = (staged, *combine.reads)
    if any(action.medium is not Medium.WINDOW or action.size != staged.size for action in actions):
        return None
    own = blocks.in_slots(rank, staged.target, staged.size)
    operands: list[Sequence[Array]] = []
    for action in combine.reads:
        if action.peer == rank:
            operands.append(own)
        elif action.source is not None and action.source.space is Space.WINDOW:
            operands.append(blocks.in_slots(action.peer, action.source, action.size))
        else:
            return None
    if reduced.verb is Verb.REDUCE:
        operands.insert(0, own)
    return Combination(own, operands, kernel, finish if reduced.finish else None)


class OneReduction:
    """A one-shot all-reduce of one block, from the first byte to the last: each rank stages its block, enters the round
    in which the ranks agree, and combines what all have staged. ``quietly`` runs kernels that may emit warnings; it
    is None if they emit none."""

    def __init__(
        self,
        state: ExecutorState,
        board: Board,
        combination: Combination,
        enter_and_look: EnterAndLook,
        quietly: Quietly | None,
    ) -> None:
        self._state, self._board = state, board
        self._enter_and_look = enter_and_look
        self._advance = board.advance
        own, blocks, kernel, finish = combination
        *inner, (last, kernel) = merging(kernel, [1] * len(blocks))
        spares = np.empty((fixed_tree.intermediates(len(blocks)), own[0].size), own[0].dtype)
        slots = [(*values, *spares) for values in zip(*blocks, strict=True)]
        first, self._own = [operands[last.left] for operands in slots], own
        self._second = [operands[last.right] for operands in slots]
        self._inner = [
            [
                (_quiet(combine, quietly), operands[left], operands[right], operands[len(blocks) + depth])
                for (left, right, depth, _), combine in inner
            ]
            for operands in slots
        ]
        """In each slot: what is combined before the last two operands are there."""
        # NumPy takes three times as long where one array of a single element is both operand and result. Then the
        # operand is its copy in the window, and what is yet to be scaled lies in between.
        single = own[0].size == 1
        self._first = first if single or inner else None
        self._between = np.empty_like(own[0]) if single and finish is not None else None
        self._kernel = _quiet(kernel, quietly)
        self._finish = None if finish is None else _quiet(finish, quietly)

    def attempt(self, signature: int, source: Array, out: Array) -> bool | None:
        """Stage the input, enter the round with ``signature``, and, if every rank has entered it with the same, reduce.

        Returns:
            What `Control.look` does. Unless it is true, the input is staged and the output unchanged, as after
            `Executor.stage`.
        """
        state = self._state
        slot, base = state.slot, state.base
        if state.free_at[slot] > state.finished:
            await_all(self._board, self._board.peers, state.free_at[slot])  # until none reads what is overwritten
        self._own[slot][...] = source
        same = self._enter_and_look(signature)
        if not same:
            state.input, state.output = source, out
            return same
        into = out if self._between is None else self._between
        for combine, left, right, between in self._inner[slot]:
            combine(left, right, between)
        self._kernel(source if self._first is None else self._first[slot], self._second[slot], into)
        if self._finish is not None:
            self._finish(into, out)
        # A peer that has entered this round has finished all before it: `stage` seldom needs to read its progress.
        state.finished = base
        state.free_at[slot] = state.base = base = base + 2
        self._advance(base)
        state.slot = (slot + 1) % SLOTS
        return True


def _quiet(function: Callable[..., Any], quietly: Quietly | None) -> Callable[..., Any]:
    return function if quietly is None else functools.partial(quietly, function)
