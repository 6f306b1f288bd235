"""Binding: every action of a program becomes a closure that takes the segment's number and moves one block.

What can be known when a plan is made is looked up here, once: arrays of windows, addresses within slots, kernels, whom
to wait for. What changes from call to call is read from the executor's `State`. So a call in the steady state runs a
list of closures, and neither plans nor allocates. The most frequent actions have closures of their own in `shortcuts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.fusion import Lists, Pieces
from collectives.plan import fast_paths, window_packing
from collectives.plan.fast_paths import Do, ExecutorState, Kernel, Scale
from collectives.plan.program import Action, Medium, Place, Program, RoundProgram, Space, Verb
from collectives.transport.base import SLOT_BYTES, SLOTS, Array
from collectives.transport.group import Group


class BoundRound:
    """The closures of one round: posts and pushes first, then the rest in order, each with whether it waits for a
    message."""

    __slots__ = ("drain_first", "has_messages", "posts", "pushes", "rest")

    def __init__(
        self, posts: Sequence[Do], pushes: Sequence[Do], rest: Sequence[tuple[bool, Do]], drain_first: bool
    ) -> None:
        self.posts = posts
        self.pushes = pushes
        self.rest = rest
        self.drain_first = drain_first
        self.has_messages = bool(posts)


class Plan:
    """A program bound to a dtype, an operation and an executor: ready to run again and again.

    Attributes:
        staged: peers read windows only, so no addresses travel, and segment 0 may be staged before the call is entered.
        needs_addresses: peers read or write private memory.
        partners: the peers whose private memory this rank reads or writes.
        reads_outputs: peers read each other's outputs, not only inputs; the same on every rank.
    """

    __slots__ = (
        "description",
        "groups",
        "needs_addresses",
        "partners",
        "reads_outputs",
        "rounds",
        "segments",
        "staged",
        "stride",
        "touched_by",
        "uses_window",
    )

    def __init__(
        self,
        program: Program,
        rounds: Sequence[BoundRound],
        segments: int,
        stride: int,
        staged: bool,
        description: str,
        reads_outputs: bool,
    ) -> None:
        self.rounds = rounds
        self.segments = segments
        self.stride = stride
        self.staged = staged
        # The group, counted from the call's beginning, after which a peer touches this rank's memory no more.
        self.touched_by = tuple((peer, (segments - 1) * stride + last + 1) for peer, last in program.touched_by)
        self.uses_window = program.uses_window
        actions = [action for r in program.rounds for action in (*r.pushes, *r.rest) if action.medium is Medium.DIRECT]
        self.partners = tuple(sorted({action.peer for action in actions}))
        self.needs_addresses = bool(actions or program.touched_by)
        self.groups = (segments - 1) * stride + len(rounds)
        self.description = description
        self.reads_outputs = reads_outputs


class Binder:
    """Binds the rounds of one program.

    Args:
        state: of the executor that will run it.
        group: whose transports move the blocks.
        windows: every rank's window as bytes; None for ranks elsewhere.
        scratch: one array of ``dtype``: block 0 takes what is read directly, the others messages that wait for their
            turn.
        dtype, block, segments, stride, staged: of the plan; the block in elements.
        kernel, finish: how two blocks combine, and what scales a finished one.
        pieces: of a fused plan over windows, whose input is packed there; None otherwise.
        lists: of a fused plan over direct reads, whose blocks are lists of pieces; None otherwise.
    """

    def __init__(
        self,
        state: ExecutorState,
        group: Group,
        windows: Sequence[Array | None],
        scratch: list[Array],
        dtype: np.dtype[Any],
        block: int,
        segments: int,
        stride: int,
        staged: bool,
        kernel: Kernel | None,
        finish: Scale | None,
        pieces: Pieces | None = None,
        lists: Lists | None = None,
    ) -> None:
        self._state = state
        self._group = group
        self._board = group.memory.board if group.memory is not None else None
        self._dtype = dtype
        self._itemsize = dtype.itemsize
        self._block = block
        self._segments = segments
        self._stride = stride
        self._staged = staged
        self._kernel = kernel
        self._finish = finish
        self._windows = [None if window is None else window.view(dtype) for window in windows]
        own = windows[group.rank]
        assert own is not None
        self._window_at = own.ctypes.data
        self._slot = SLOT_BYTES // dtype.itemsize
        self._letters = 1
        self._scratch = scratch
        self._pieces = pieces
        self._lists = lists

    def round(self, program: RoundProgram) -> BoundRound:
        letters: dict[int, int] = {}
        posts: list[Do] = []
        for action in program.receives:
            if action.verb is Verb.REDUCE or action.detour:
                letters[id(action)] = self._letters
                self._letters += 1
            posts.append(self._post_receive(action, letters.get(id(action))))
        posts += [self._post_send(action) for action in program.sends]
        pushes = [self._push(action) for action in program.pushes]
        rest = [(a.medium is Medium.MESSAGE, self._act(a, letters.get(id(a)))) for a in program.rest]
        return BoundRound(posts, pushes, rest, program.drain_first)

    def _post_receive(self, action: Action, letter: int | None) -> Do:
        messages, length, peer = self._group.messages, self._length(action.size), action.peer
        assert messages is not None and action.target is not None
        into = self._array(action.target) if letter is None else self._letter(letter)

        def post_receive(segment: int) -> None:
            n = length(segment)
            if n > 0:
                messages.post_receive(peer, into(segment, n))

        return post_receive

    def _post_send(self, action: Action) -> Do:
        messages, length, peer = self._group.messages, self._length(action.size), action.peer
        assert messages is not None and action.source is not None
        block = self._array(action.source)

        def post_send(segment: int) -> None:
            n = length(segment)
            if n > 0:
                messages.post_send(peer, block(segment, n))

        return post_send

    def _push(self, action: Action) -> Do:
        memory, source = self._group.memory, action.source
        assert memory is not None and source is not None
        if self._lists is not None:
            return fast_paths.push_lists(
                memory.store_list, self._group.rank, action, self._block, self._itemsize, self._lists
            )
        if source.space is not Space.WINDOW:
            return fast_paths.push_directly(self._state, memory.store, action, self._block, self._itemsize)
        length, peer, itemsize, store = self._length(action.size), action.peer, self._itemsize, memory.store
        assert action.target is not None
        here, there = self._address(source), self._peer_address(peer, action.target)

        def push(segment: int) -> None:
            n = length(segment)
            if n > 0:
                store(peer, there(segment), here(segment), n * itemsize)

        return push

    def _act(self, action: Action, letter: int | None) -> Do:
        wait = self._wait(action)
        if action.verb is Verb.AWAIT:
            return wait
        if self._lists is not None:
            return self._reduce_lists(action)
        if self._pieces is not None:
            return self._act_on_pieces(action, self._pieces, wait)
        shortcut = self._shortcut(action, wait)
        if shortcut is not None:
            return shortcut
        if action.verb is Verb.STAGE or (action.verb is Verb.TAKE and action.peer == self._group.rank):
            return self._copy_own(action)
        value = self._value(action, letter)
        if action.verb is Verb.REDUCE:
            return self._reduce(action, value, wait)
        return self._take(action, value, wait, letter)

    def _shortcut(self, action: Action, wait: Do) -> Do | None:
        """A closure written for the case, if it is one of those that most calls consist of."""
        state, source, operand, target = self._state, action.source, action.operand, action.target
        kernel, finish, memory = self._kernel, self._finish if action.finish else None, self._group.memory
        if source is None or target is None or action.also is not None:
            return None
        if action.medium is Medium.WINDOW and action.verb is Verb.STAGE and self._segments == 1:
            return fast_paths.stage(state, self._slots(self._group.rank, target, action.size), source, action.size)
        if target.space is not Space.OUTPUT:
            return None
        if action.medium is Medium.WINDOW and source.space is Space.WINDOW and self._segments == 1:
            theirs, staged = self._slots(action.peer, source, action.size), self._staged and action.after == 0
            if action.verb is Verb.TAKE:
                return fast_paths.take_from_window(state, theirs, target, action.size, wait, staged)
            if operand is not None and operand.space is Space.INPUT and kernel is not None:
                return fast_paths.reduce_from_window(
                    state, theirs, operand, target, action.size, wait, staged, kernel, finish
                )
        if action.medium is Medium.DIRECT and action.verb is Verb.REDUCE and action.after < 0:
            assert memory is not None and operand is not None and kernel is not None
            if Space.WINDOW not in (source.space, operand.space):
                return fast_paths.reduce_directly(
                    state, memory.fetch, self._scratch, action, self._block, self._itemsize, kernel, finish
                )
        return None

    def _act_on_pieces(self, action: Action, pieces: Pieces, wait: Do) -> Do:
        """An action of a fused plan over windows: inputs and outputs are pieces of many tensors, everything else is a
        block."""
        target, length, block = action.target, self._length(action.size), self._block
        assert target is not None and action.source is not None
        if action.verb is Verb.STAGE:
            return window_packing.pack(pieces, action.source.offset, block, length, self._array(target))
        outputs = next(
            (place.offset for place in (target, action.also) if place is not None and place.space is Space.OUTPUT), None
        )
        into = self._array(target) if target.space is Space.WINDOW else None
        value = self._window(action.peer, action.source)
        if action.verb is Verb.TAKE:
            return window_packing.unpack(pieces, value, into, outputs, block, length, wait)
        operand, kernel = action.operand, self._kernel
        assert operand is not None and kernel is not None
        own = self._array(operand) if operand.space is Space.WINDOW else None
        inputs = (operand.offset, operand.space is Space.INPUT)
        finish = self._finish if action.finish else None
        return window_packing.reduce(
            pieces, value, own, inputs, into, outputs, block, length, wait, kernel, finish, self._scratch
        )

    def _reduce_lists(self, action: Action) -> Do:
        """A block of the direct all-reduce over direct reads, the one algorithm that lists are made for."""
        memory, kernel, lists = self._group.memory, self._kernel, self._lists
        assert (
            memory is not None
            and kernel is not None
            and lists is not None
            and action.verb is Verb.REDUCE
            and action.after < 0
        )
        finish = self._finish if action.finish else None
        return fast_paths.reduce_lists(
            self._state, memory.fetch_list, self._scratch, action, self._block, self._itemsize, kernel, finish, lists
        )

    def _slots(self, rank: int, place: Place, size: int) -> list[Array]:
        """A block of a rank's window, for each slot."""
        window = self._windows[rank]
        assert window is not None
        return [window[slot * self._slot + place.offset :][:size] for slot in range(SLOTS)]

    def _copy_own(self, action: Action) -> Do:
        assert action.source is not None and action.target is not None
        length = self._length(action.size)
        source, target, also = self._array(action.source), self._array(action.target), self._second(action)
        state = self._state
        if action.verb is Verb.TAKE and (action.source.space, action.target.space) == (Space.INPUT, Space.OUTPUT):
            size, start, end = action.size, action.source.offset, action.target.offset

            last = self._segments - 1

            # Not by segments: a copy of many MiB at once goes past the caches, and need not read what it overwrites. In
            # the last segment, because peers wait for what they read, and for this copy nobody waits.
            def copy_whole(segment: int) -> None:
                if segment == last and state.input is not state.output:
                    np.copyto(state.output[end : end + size], state.input[start : start + size])

            return copy_whole

        def copy_own(segment: int) -> None:
            n = length(segment)
            if n <= 0:
                return
            block = source(segment, n)
            np.copyto(target(segment, n), block)
            if also is not None:
                np.copyto(also(segment, n), block)

        return copy_own

    def _reduce(self, action: Action, value: Callable[[int, int], Array], wait: Do) -> Do:
        assert action.operand is not None and action.target is not None and self._kernel is not None
        length, kernel, finish = self._length(action.size), self._kernel, self._finish if action.finish else None
        operand, target, also = self._array(action.operand), self._array(action.target), self._second(action)

        def reduce(segment: int) -> None:
            n = length(segment)
            if n <= 0:
                return
            wait(segment)
            out = target(segment, n)
            kernel(operand(segment, n), value(segment, n), out)
            if finish is not None:
                finish(out, out)
            if also is not None:
                np.copyto(also(segment, n), out)

        return reduce

    def _take(self, action: Action, value: Callable[[int, int], Array], wait: Do, letter: int | None) -> Do:
        assert action.target is not None
        length, target, also = self._length(action.size), self._array(action.target), self._second(action)
        arrives_home = action.medium is Medium.MESSAGE and letter is None
        memory, peer, itemsize = self._group.memory, action.peer, self._itemsize
        if action.medium is Medium.DIRECT and action.source is not None and action.source.space is not Space.WINDOW:
            assert memory is not None
            there, here, fetch = self._peer_address(peer, action.source), self._address(action.target), memory.fetch

            def take_directly(segment: int) -> None:
                n = length(segment)
                if n <= 0:
                    return
                wait(segment)
                fetch(peer, there(segment), here(segment), n * itemsize)
                if also is not None:
                    np.copyto(also(segment, n), target(segment, n))

            return take_directly

        def take(segment: int) -> None:
            n = length(segment)
            if n <= 0:
                return
            wait(segment)
            out = target(segment, n)
            if not arrives_home:
                np.copyto(out, value(segment, n))
            if also is not None:
                np.copyto(also(segment, n), out)

        return take

    def _value(self, action: Action, letter: int | None) -> Callable[[int, int], Array]:
        """The peer's block as an array: in its window, in the own memory, or brought into scratch memory."""
        if action.medium is Medium.MESSAGE:
            return self._letter(letter or 0)
        source, peer = action.source, action.peer
        assert source is not None
        if source.space is Space.WINDOW:
            return self._window(peer, source)
        if peer == self._group.rank:
            return self._array(source)
        memory, scratch, itemsize = self._group.memory, self._scratch, self._itemsize
        assert memory is not None
        there, fetch, state = self._peer_address(peer, source), memory.fetch, self._state

        def value(segment: int, n: int) -> Array:
            fetch(peer, there(segment), state.scratch_at, n * itemsize)
            return scratch[0][:n]

        return value

    def _wait(self, action: Action) -> Do:
        """Wait for the peer's round ``after`` of the same segment; messages bring their own wait."""
        if action.after < 0 or action.medium is Medium.MESSAGE or action.peer == self._group.rank:
            return _nothing
        board, state, peer = self._board, self._state, action.peer
        assert board is not None
        seen, stride, ahead = board.seen, self._stride, action.after + 1
        first = 1 if self._staged and action.after == 0 else 0

        def wait(segment: int) -> None:
            if segment < first and state.entered_staged:
                return
            progress = state.base + stride * segment + ahead
            if seen[peer] < progress:
                board.wait(peer, progress)

        return wait

    def _length(self, size: int) -> Callable[[int], int]:
        block = self._block

        def length(segment: int) -> int:
            left = size - segment * block
            return left if left < block else block

        return length

    def _second(self, action: Action) -> Callable[[int, int], Array] | None:
        return None if action.also is None else self._array(action.also)

    def _letter(self, letter: int) -> Callable[[int, int], Array]:
        scratch, at = self._scratch, letter * self._block
        return lambda segment, n: scratch[0][at : at + n]

    def _window(self, rank: int, place: Place) -> Callable[[int, int], Array]:
        window, slot, offset, state = self._windows[rank], self._slot, place.offset, self._state
        assert window is not None

        def block(segment: int, n: int) -> Array:
            at = (state.slot + segment) % SLOTS * slot + offset
            return window[at : at + n]

        return block

    def _array(self, place: Place) -> Callable[[int, int], Array]:
        """This rank's own block at a place."""
        state, block, offset = self._state, self._block, place.offset
        if place.space is Space.WINDOW:
            return self._window(self._group.rank, place)
        if place.space is Space.INPUT:

            def of_input(segment: int, n: int) -> Array:
                at = offset + segment * block
                return state.input[at : at + n]

            return of_input

        def of_output(segment: int, n: int) -> Array:
            at = offset + segment * block
            return state.output[at : at + n]

        return of_output

    def _address(self, place: Place) -> Callable[[int], int]:
        """The address of this rank's own block."""
        state, block, itemsize, offset = self._state, self._block, self._itemsize, place.offset
        slot, window_at = self._slot, self._window_at
        if place.space is Space.WINDOW:
            return lambda segment: window_at + ((state.slot + segment) % SLOTS * slot + offset) * itemsize
        if place.space is Space.INPUT:
            return lambda segment: state.input_at + (offset + segment * block) * itemsize
        return lambda segment: state.output_at + (offset + segment * block) * itemsize

    def _peer_address(self, peer: int, place: Place) -> Callable[[int], int]:
        """The address of a block in the peer's private memory."""
        state, block, itemsize, offset = self._state, self._block, self._itemsize, place.offset
        which = 0 if place.space is Space.INPUT else 1
        return lambda segment: state.addresses[peer][which] + (offset + segment * block) * itemsize


def _nothing(segment: int) -> None:
    """No peer to wait for."""
