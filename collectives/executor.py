"""The executor: runs any program over any transport, block by block.

A collective of S segments and K rounds is done in groups: round k of segment s belongs to group ``s * stride + k``. With a
stride of K a group is one round, and a segment goes through all its rounds while it is in cache. With a stride of 1 segments
follow each other closely: a rank reads what its peer finished a group ago and seldom waits, and several messages travel at once:

    group      0        1        2        3                 stride = 1, K = 3
    segment 0  round 0  round 1  round 2
    segment 1           round 0  round 1  round 2
    segment 2                    round 0  round 1  round 2

A window has `SLOTS` slots, so no more segments than that may be on their way if they live there: `stride_for` sees to it.
After each group the rank writes its progress on the board. In the steady state nothing is allocated and nothing is
planned: a `Plan` holds its actions as closures over the executor's state, and a call sets the state and runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.program import Action, Medium, Place, Program, RoundProgram, Space, Verb
from collectives.transport.base import SLOT_BYTES, SLOTS, WINDOW_BYTES, Array
from collectives.transport.group import Group

Kernel = Callable[[Array, Array, Array], object]
Scale = Callable[[Array, Array], object]
Do = Callable[[int], None]


class State:
    """What changes from call to call: the caller's arrays, the peers' addresses, and how far the world has come."""

    __slots__ = ("addresses", "base", "input", "input_at", "output", "output_at", "slot")

    def __init__(self, size: int) -> None:
        self.input: Array = np.empty(0)
        self.output: Array = np.empty(0)
        self.input_at = 0
        self.output_at = 0
        self.addresses: list[Sequence[int]] = [(0, 0)] * size
        self.base = 0
        """Groups finished before this call, by every rank alike."""
        self.slot = 0
        """The window slot of segment 0."""


class Plan:
    """A program bound to a dtype, an operation and an executor: ready to run again and again.

    Attributes:
        staged: peers read windows only, so no addresses travel, and segment 0 may be staged before the call is entered.
        needs_addresses: peers read or write private memory.
        partners: the peers whose private memory this rank reads or writes.
        reads_outputs: peers read each other's outputs, not only inputs; the same on every rank.
    """

    __slots__ = ("description", "groups", "needs_addresses", "partners", "reads_outputs", "rounds", "segments", "staged", "stride", "touched_by", "uses_window")

    def __init__(self, program: Program, rounds: Sequence[_BoundRound], segments: int, stride: int, staged: bool, description: str, reads_outputs: bool) -> None:
        self.rounds = rounds
        self.segments = segments
        self.stride = stride
        self.staged = staged
        self.touched_by = program.touched_by
        self.uses_window = program.uses_window
        actions = [action for r in program.rounds for action in (*r.pushes, *r.rest) if action.medium is Medium.DIRECT]
        self.partners = tuple(sorted({action.peer for action in actions}))
        self.needs_addresses = bool(actions or program.touched_by)
        self.groups = (segments - 1) * stride + len(rounds)
        self.description = description
        self.reads_outputs = reads_outputs


def stride_for(rounds: int, overlap: bool, uses_windows: bool) -> int:
    """How many groups lie between the starts of two segments.

    Args:
        rounds: of the program, at least 1.
        overlap: whether segments may overlap at all.
        uses_windows: whether segments live in window slots on any rank; one slot is always left to be emptied.
    """
    if not overlap:
        return rounds
    return -(-rounds // (SLOTS - 1)) if uses_windows else 1


class _BoundRound:
    __slots__ = ("drain_first", "has_messages", "posts", "pushes", "rest")

    def __init__(self, posts: Sequence[Do], pushes: Sequence[Do], rest: Sequence[tuple[bool, Do]], drain_first: bool) -> None:
        self.posts = posts
        self.pushes = pushes
        self.rest = rest
        self.drain_first = drain_first
        self.has_messages = bool(posts)


class Executor:
    """Runs plans for one rank of a group. Not thread-safe: the world admits one call at a time.

    Attributes:
        state: set ``input`` and ``output`` (1-D arrays of the plan's dtype) before `run`.
    """

    def __init__(self, group: Group) -> None:
        self.state = State(group.size)
        self._group = group
        self._board = group.memory.board if group.memory is not None else None
        windows = group.memory.windows if group.memory is not None else ()
        self._windows = windows or [np.empty(WINDOW_BYTES, np.uint8) if rank == group.rank else None for rank in range(group.size)]
        self._free_at = [0] * SLOTS
        self._scratch = np.empty(0, np.uint8)
        self._scratch_views: dict[np.dtype[Any], list[Array]] = {}
        self.entered_staged = False

    def bind(
        self,
        program: Program,
        dtype: np.dtype[Any],
        block: int,
        segments: int,
        stride: int,
        staged: bool,
        kernel: Kernel | None,
        finish: Scale | None,
        description: str = "",
        reads_outputs: bool = False,
    ) -> Plan:
        """Make a plan: every action of the program becomes a closure that takes the segment's number."""
        binder = _Binder(self, dtype, block, segments, stride, staged, kernel, finish)
        self._grow_scratch(binder.scratch_bytes(program))
        rounds = [binder.round(r) for r in program.rounds]
        return Plan(program, rounds, segments, stride, staged, description, reads_outputs)

    def scratch(self, dtype: np.dtype[Any]) -> list[Array]:
        """The scratch memory as a list of one array of ``dtype``, which is replaced when the memory grows."""
        if dtype not in self._scratch_views:
            self._scratch_views[dtype] = [self._scratch.view(dtype)]
        return self._scratch_views[dtype]

    def _grow_scratch(self, nbytes: int) -> None:
        if nbytes > self._scratch.nbytes:
            self._scratch = np.empty(-(-nbytes // 64) * 64, np.uint8)
            for dtype, holder in self._scratch_views.items():
                holder[0] = self._scratch.view(dtype)

    def stage(self, plan: Plan) -> None:
        """Copy segment 0 into the window, before the call is entered; only for staged plans."""
        if plan.uses_window:
            self._claim(0, plan)
        for _, do in plan.rounds[0].rest:
            do(0)

    def run(self, plan: Plan, staged_first: bool = False) -> None:
        """Run a plan that every rank has agreed on; returns when the result is in the output and the input may change.

        Args:
            staged_first: segment 0 was staged before the call was entered, so that nobody waits for it.

        Raises:
            RankFailedError, CollectiveTimeoutError, TransportError: as the transports; arrays are undefined then.
        """
        if plan.segments == 1:
            self._run_single(plan, staged_first)
            return
        state, board = self.state, self._board
        self.entered_staged = staged_first
        base = state.base
        for group in range(plan.groups):
            self._run_group(plan, group, staged_first)
            if board is not None:
                board.advance(base + group + 1)
        end = base + plan.groups
        for peer in plan.touched_by:
            if board is not None and board.seen[peer] < end:
                board.wait(peer, end)
        self._leave_slots(plan)
        state.base = end

    def _run_single(self, plan: Plan, staged_first: bool) -> None:
        """`run` for one segment, where every step of Python counts: each round is a group."""
        state, board = self.state, self._board
        progress = state.base
        self.entered_staged = staged_first
        if plan.uses_window and not staged_first:
            self._claim(0, plan)
        first = staged_first
        for bound in plan.rounds:
            progress += 1
            if first:
                first = False
                continue
            for do in bound.posts:
                do(0)
            for do in bound.pushes:
                do(0)
            if bound.has_messages:
                self._finish_round(bound, 0)
            else:
                for _, do in bound.rest:
                    do(0)
            if board is not None:
                board.advance(progress)
        for peer in plan.touched_by:
            if board is not None and board.seen[peer] < progress:
                board.wait(peer, progress)
        slot = state.slot
        self._free_at[slot] = progress
        state.slot = (slot + 1) % SLOTS
        state.base = progress

    def _run_group(self, plan: Plan, group: int, staged_first: bool) -> None:
        """The rounds of different segments that share a group: all messages first, so that they travel together."""
        stride, segments, rounds = plan.stride, plan.segments, plan.rounds
        active: list[tuple[_BoundRound, int]] = []
        for number in range(group % stride, len(rounds), stride):
            segment = (group - number) // stride
            if segment < 0:
                break
            if segment >= segments or (staged_first and segment == 0 and number == 0):
                continue
            if number == 0 and plan.uses_window:
                self._claim(segment, plan)
            bound = rounds[number]
            active.append((bound, segment))
            for do in bound.posts:
                do(segment)
        for bound, segment in active:
            for do in bound.pushes:
                do(segment)
        for bound, segment in active:
            if bound.has_messages:
                self._finish_round(bound, segment)
            else:
                for _, do in bound.rest:
                    do(segment)

    def _finish_round(self, bound: _BoundRound, segment: int) -> None:
        messages = self._group.messages
        assert messages is not None
        drained = False
        if bound.drain_first:
            messages.drain()
            drained = True
        for by_message, do in bound.rest:
            if by_message and not drained:
                messages.drain()
                drained = True
            do(segment)
        if not drained:
            messages.drain()

    def _claim(self, segment: int, plan: Plan) -> None:
        """Wait until no peer reads the slot any more that a segment is about to fill."""
        board = self._board
        if board is None:
            return
        state = self.state
        if segment < SLOTS:
            free = self._free_at[(state.slot + segment) % SLOTS]
        else:
            free = state.base + (segment - SLOTS) * plan.stride + len(plan.rounds)
        seen = board.seen
        for peer in board.peers:
            if seen[peer] < free:
                board.wait(peer, free)

    def _leave_slots(self, plan: Plan) -> None:
        state, segments = self.state, plan.segments
        for segment in range(max(0, segments - SLOTS), segments):
            self._free_at[(state.slot + segment) % SLOTS] = state.base + segment * plan.stride + len(plan.rounds)
        state.slot = (state.slot + segments) % SLOTS


class _Binder:
    """Turns actions into closures. Everything that does not change from call to call is looked up here, once."""

    def __init__(
        self,
        executor: Executor,
        dtype: np.dtype[Any],
        block: int,
        segments: int,
        stride: int,
        staged: bool,
        kernel: Kernel | None,
        finish: Scale | None,
    ) -> None:
        self._executor = executor
        self._state = executor.state
        self._group = executor._group
        self._board = executor._board
        self._dtype = dtype
        self._itemsize = dtype.itemsize
        self._block = block
        self._single = segments == 1
        self._stride = stride
        self._staged = staged
        self._kernel = kernel
        self._finish = finish
        self._windows = [None if window is None else window.view(dtype) for window in executor._windows]
        own = executor._windows[executor._group.rank]
        assert own is not None
        self._window_at = own.ctypes.data
        self._slot = SLOT_BYTES // dtype.itemsize
        self._letters = 1
        self._scratch = executor.scratch(dtype)

    def scratch_bytes(self, program: Program) -> int:
        """Block 0 takes what is read directly; then one block per message that waits for its turn."""
        return (1 + program.messages) * self._block * self._itemsize

    def round(self, program: RoundProgram) -> _BoundRound:
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
        return _BoundRound(posts, pushes, rest, program.drain_first)

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
        memory, length, peer, itemsize = self._group.memory, self._length(action.size), action.peer, self._itemsize
        assert memory is not None and action.source is not None and action.target is not None
        source, target, store = self._address(action.source), self._peer_address(peer, action.target), memory.store

        def push(segment: int) -> None:
            n = length(segment)
            if n > 0:
                store(peer, target(segment), source(segment), n * itemsize)

        return push

    def _act(self, action: Action, letter: int | None) -> Do:
        wait = self._wait(action)
        if action.verb is Verb.AWAIT:
            return wait
        if self._single and action.medium is Medium.WINDOW and action.also is None:
            return self._act_once(action, wait)
        return self._act_in_general(action, letter, wait)

    def _act_in_general(self, action: Action, letter: int | None, wait: Do) -> Do:
        if action.verb is Verb.STAGE or (action.verb is Verb.TAKE and action.peer == self._group.rank):
            return self._copy_own(action)
        value = self._value(action, letter)
        if action.verb is Verb.REDUCE:
            return self._reduce(action, value, wait)
        return self._take(action, value, wait, letter)

    def _act_once(self, action: Action, wait: Do) -> Do:
        """An action between windows and own memory in a plan of one segment: the same as below, with all that can be known known."""
        assert action.source is not None and action.target is not None
        state, size = self._state, action.size
        if size == 0:
            return _nothing
        if action.verb is Verb.STAGE:
            own, views = slice(action.source.offset, action.source.offset + size), self._slots(self._group.rank, action.target, size)

            def stage(segment: int) -> None:
                views[state.slot][...] = state.input[own]

            return stage
        if action.source.space is Space.WINDOW and action.target.space is Space.OUTPUT:
            views, here = self._slots(action.peer, action.source, size), slice(action.target.offset, action.target.offset + size)
            if action.verb is Verb.TAKE:

                def take(segment: int) -> None:
                    wait(0)
                    state.output[here] = views[state.slot]

                return take
            operand, kernel, finish = action.operand, self._kernel, self._finish if action.finish else None
            assert operand is not None and kernel is not None
            if operand.space is Space.INPUT:
                there = slice(operand.offset, operand.offset + size)

                def reduce(segment: int) -> None:
                    wait(0)
                    out = state.output[here]
                    kernel(state.input[there], views[state.slot], out)
                    if finish is not None:
                        finish(out, out)

                return reduce
        return self._act_in_general(action, None, wait)

    def _slots(self, rank: int, place: Place, size: int) -> list[Array]:
        """A block of a rank's window, for each slot."""
        window = self._windows[rank]
        assert window is not None
        return [window[slot * self._slot + place.offset :][:size] for slot in range(SLOTS)]

    def _copy_own(self, action: Action) -> Do:
        assert action.source is not None and action.target is not None
        length = self._length(action.size)
        source, target, also = self._array(action.source), self._array(action.target), self._second(action)
        state, copies_home = self._state, {action.source.space, action.target.space} == {Space.INPUT, Space.OUTPUT}

        def copy_own(segment: int) -> None:
            n = length(segment)
            if n <= 0 or (copies_home and state.input is state.output):
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
        there, fetch = self._peer_address(peer, source), memory.fetch

        def value(segment: int, n: int) -> Array:
            block = scratch[0][:n]
            fetch(peer, there(segment), block.ctypes.data, n * itemsize)
            return block

        return value

    def _wait(self, action: Action) -> Do:
        """Wait for the peer's round ``after`` of the same segment; messages bring their own wait."""
        if action.after < 0 or action.medium is Medium.MESSAGE or action.peer == self._group.rank:
            return _nothing
        board, state, peer = self._board, self._state, action.peer
        assert board is not None
        seen, stride, ahead = board.seen, self._stride, action.after + 1
        first = 1 if self._staged and action.after == 0 else 0
        executor = self._executor

        def wait(segment: int) -> None:
            if segment < first and executor.entered_staged:
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
        state, block, itemsize, offset, slot, window_at = self._state, self._block, self._itemsize, place.offset, self._slot, self._window_at
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
