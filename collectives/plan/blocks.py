"""Where the block of a segment is: as an array of this process, or as an address in this rank's or a peer's memory.

What can be known when a plan is made is looked up once. The functions that are returned take the segment's number, and
read from the executor's state what changes from call to call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.plan.fast_paths import ExecutorState
from collectives.plan.program import Place, Space
from collectives.transport.base import SLOT_BYTES, SLOTS, Array

BlockOf = Callable[[int, int], Array]
"""``block(segment, n)``: the block of a segment as an array of ``n`` elements."""
AddressOf = Callable[[int], int]
"""``address(segment)``: where the block of a segment begins."""


class BlockLookup:
    """The blocks of one plan; arguments as of `collectives.plan.binder.Binder`. The array of ``scratch`` is replaced
    when the scratch memory grows."""

    def __init__(
        self,
        state: ExecutorState,
        rank: int,
        windows: Sequence[Array | None],
        scratch: list[Array],
        dtype: np.dtype[Any],
        block: int,
    ) -> None:
        self._state = state
        self._rank = rank
        self._itemsize = dtype.itemsize
        self._block = block
        self._windows = [None if window is None else window.view(dtype) for window in windows]
        own = windows[rank]
        assert own is not None
        self._window_at = own.ctypes.data
        self._slot = SLOT_BYTES // dtype.itemsize
        self._scratch = scratch

    def length(self, size: int) -> Callable[[int], int]:
        """The elements of each segment's block of a chunk with ``size`` elements; not positive beyond its end."""
        block = self._block

        def length(segment: int) -> int:
            left = size - segment * block
            return left if left < block else block

        return length

    def in_slots(self, rank: int, place: Place, size: int) -> list[Array]:
        """A block of a rank's window, for each slot."""
        window = self._windows[rank]
        assert window is not None
        return [window[slot * self._slot + place.offset :][:size] for slot in range(SLOTS)]

    def in_scratch(self, number: int) -> BlockOf:
        """The ``number``-th block of the scratch memory."""
        scratch, at = self._scratch, number * self._block
        return lambda segment, n: scratch[0][at : at + n]

    def in_window(self, rank: int, place: Place) -> BlockOf:
        """A block of a rank's window."""
        window, slot, offset, state = self._windows[rank], self._slot, place.offset, self._state
        assert window is not None

        def block(segment: int, n: int) -> Array:
            at = (state.slot + segment) % SLOTS * slot + offset
            return window[at : at + n]

        return block

    def own(self, place: Place) -> BlockOf:
        """This rank's own block at a place."""
        state, block, offset = self._state, self._block, place.offset
        if place.space is Space.WINDOW:
            return self.in_window(self._rank, place)
        if place.space is Space.INPUT:

            def of_input(segment: int, n: int) -> Array:
                at = offset + segment * block
                return state.input[at : at + n]

            return of_input

        def of_output(segment: int, n: int) -> Array:
            at = offset + segment * block
            return state.output[at : at + n]

        return of_output

    def own_address(self, place: Place) -> AddressOf:
        """The address of this rank's own block."""
        state, block, itemsize, offset = self._state, self._block, self._itemsize, place.offset
        slot, window_at = self._slot, self._window_at
        if place.space is Space.WINDOW:
            return lambda segment: window_at + ((state.slot + segment) % SLOTS * slot + offset) * itemsize
        if place.space is Space.INPUT:
            return lambda segment: state.input_at + (offset + segment * block) * itemsize
        return lambda segment: state.output_at + (offset + segment * block) * itemsize

    def mapped(self, peer: int, place: Place) -> Callable[[int, int], Array | None]:
        """The peer's block as an array, or None where its tensor is not mapped in this call."""
        state, block, offset = self._state, self._block, place.offset
        views = state.inputs if place.space is Space.INPUT else state.outputs

        def of_peer(segment: int, n: int) -> Array | None:
            whole = views[peer]
            at = offset + segment * block
            return None if whole is None else whole[at : at + n]

        return of_peer

    def peer_address(self, peer: int, place: Place) -> AddressOf:
        """The address of a block in the peer's private memory."""
        state, block, itemsize, offset = self._state, self._block, self._itemsize, place.offset
        which = 0 if place.space is Space.INPUT else 1
        return lambda segment: state.addresses[peer][which] + (offset + segment * block) * itemsize
