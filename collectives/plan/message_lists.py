"""Buckets over messages: a block is a list of pieces of tensors, which are sent and received where they lie.

    tensors    |      conv1.weight      | bn1 |          conv2.weight          |
    block                   |  piece    | all |    piece     |
                            one message, sent by one system call, received by another

What arrives to be combined is received into scratch memory, as a whole, and combined piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from collectives.fusion import Piece, Pieces
from collectives.plan.binder import PART_BYTES, Binder
from collectives.plan.blocks import BlockOf
from collectives.plan.fast_paths import Do
from collectives.plan.program import Action, Medium, Place, Space, Verb
from collectives.transport.base import Array, ListTransport, as_bytes

Part = tuple[int, tuple[Piece, ...]]
"""The last byte of a part of a message, and the pieces of the part."""


class ListPieces(Pieces):
    """Tensors whose pieces travel in lists.

    Args:
        counts: elements of each tensor.
        itemsize: bytes of an element.
    """

    def __init__(self, counts: Sequence[int], itemsize: int) -> None:
        super().__init__(counts)
        self._itemsize = itemsize
        self._source_bytes: Sequence[memoryview] = ()
        self._out_bytes: Sequence[memoryview] = ()
        self._spans: dict[tuple[int, int], tuple[tuple[int, int, int], ...]] = {}
        self._in_parts: dict[tuple[int, int], tuple[Part, ...]] = {}

    def set(self, sources: Sequence[Array], outs: Sequence[Array]) -> None:
        """Set each tensor's input and output, which may be one array, for a run."""
        self.sources, self.outs = sources, outs
        self._source_bytes = [as_bytes(source) for source in sources]
        self._out_bytes = [
            view if out is source else as_bytes(out)
            for view, source, out in zip(self._source_bytes, sources, outs, strict=True)
        ]

    def release(self) -> None:
        """Release the tensors of a run."""
        self.sources = self.outs = ()
        self._source_bytes = self._out_bytes = ()

    def inputs(self, at: int, count: int) -> list[memoryview]:
        """The bytes of ``count`` elements of the inputs, from ``at`` on."""
        views = self._source_bytes
        return [views[number][first:last] for number, first, last in self._spans_of(at, count)]

    def outputs(self, at: int, count: int) -> list[memoryview]:
        """The bytes of ``count`` elements of the outputs, from ``at`` on."""
        views = self._out_bytes
        return [views[number][first:last] for number, first, last in self._spans_of(at, count)]

    def _spans_of(self, at: int, count: int) -> tuple[tuple[int, int, int], ...]:
        """As `cut`, but in bytes, and without the places in the block."""
        known = self._spans.get((at, count))
        if known is None:
            n = self._itemsize
            known = tuple((number, first * n, last * n) for number, first, last, _, _ in self.cut(at, count))
            self._spans[at, count] = known
        return known

    def parts(self, at: int, count: int) -> tuple[Part, ...]:
        """The pieces of a block in parts of `PART_BYTES`, which are combined as they arrive."""
        known = self._in_parts.get((at, count))
        if known is not None:
            return known
        step, parts = max(1, PART_BYTES // self._itemsize), []
        for begin in range(0, count, step):
            end = min(begin + step, count)
            pieces = [
                (number, first, last, begin + start, begin + stop)
                for number, first, last, start, stop in self.cut(at + begin, end - begin)
            ]
            parts.append((end * self._itemsize, tuple(pieces)))
        self._in_parts[at, count] = tuple(parts)
        return self._in_parts[at, count]


class ListBinder(Binder):
    """Binds the rounds of a fused plan over messages.

    Args:
        pieces: the tensors.
        others: as `Binder`, of a group whose messages take lists.
    """

    def __init__(self, *others: Any, pieces: ListPieces) -> None:
        super().__init__(*others)
        messages = self._group.messages
        assert messages is not None and messages.takes_lists
        self._tensors, self._messages = pieces, cast(ListTransport, messages)

    def _post_receive(self, action: Action, buffer: int | None) -> Do:
        if buffer is not None:
            return super()._post_receive(action, buffer)
        messages, length, peer = self._messages, self._blocks.length(action.size), action.peer
        assert action.target is not None
        blocks = self._bytes(action.target)
        self._arrivals[id(action)] = arrival = [None]

        def post_receive(segment: int) -> None:
            n = length(segment)
            if n > 0:
                arrival[0] = messages.post_receive_list(peer, blocks(segment, n))

        return post_receive

    def _post_send(self, action: Action) -> Do:
        messages, length, peer = self._messages, self._blocks.length(action.size), action.peer
        assert action.source is not None
        blocks = self._bytes(action.source)

        def post_send(segment: int) -> None:
            n = length(segment)
            if n > 0:
                messages.post_send_list(peer, blocks(segment, n))

        return post_send

    def _act(self, action: Action, buffer: int | None) -> Do:
        assert action.medium is Medium.MESSAGE and action.also is None
        if action.verb is Verb.REDUCE:
            return self._combine(action, self._value(action, buffer))
        # No all-reduce replaces, by a message, a block that it sends in the same round: it arrives where it belongs.
        assert action.verb is Verb.TAKE and buffer is None
        wait, length = self._wait(action), self._blocks.length(action.size)

        def take(segment: int) -> None:
            if length(segment) > 0:  # otherwise no message was posted
                wait(segment)

        return take

    def _combine(self, action: Action, value: BlockOf) -> Do:
        """Combine a message with pieces of the tensors, part by part, while the next parts arrive."""
        tensors, kernel, block = self._tensors, self._kernel, self._block
        assert kernel is not None and action.operand is not None and action.target is not None
        length, finish = self._blocks.length(action.size), self._finish if action.finish else None
        from_inputs, start = action.operand.space is Space.INPUT, action.target.offset
        arrival, await_arrival = self._arrivals[id(action)], self._messages.await_arrival

        def combine(segment: int) -> None:
            n = length(segment)
            if n <= 0:
                return
            message, theirs = arrival[0], value(segment, n)
            mine, outs = tensors.sources if from_inputs else tensors.outs, tensors.outs
            for nbytes, pieces in tensors.parts(start + segment * block, n):
                await_arrival(message, nbytes)
                for number, first, last, begin, end in pieces:
                    out = outs[number][first:last]
                    kernel(mine[number][first:last], theirs[begin:end], out)
                    if finish is not None:
                        finish(out, out)

        return combine

    def _bytes(self, place: Place) -> Callable[[int, int], list[memoryview]]:
        """The block of a segment at a place, as a list."""
        assert place.space is not Space.WINDOW
        of = self._tensors.inputs if place.space is Space.INPUT else self._tensors.outputs
        block, offset = self._block, place.offset
        return lambda segment, n: of(offset + segment * block, n)
