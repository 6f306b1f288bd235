"""Binding: every action of a program becomes a closure that takes the segment's number and moves one block.

What can be known when a plan is made is looked up once: arrays of windows, addresses within slots (`blocks`), kernels,
the peers to wait for. What changes from call to call is read from `ExecutorState`. So a call in the steady state runs a
list of closures, and neither plans nor allocates. The most frequent actions have closures of their own in `fast_paths`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from collectives.plan import fast_paths
from collectives.plan.blocks import BlockLookup, BlockOf
from collectives.plan.fast_paths import Do, ExecutorState, Kernel, Scale
from collectives.plan.one_reduction import Combination, combination
from collectives.plan.plan import BoundRound
from collectives.plan.program import Action, Medium, Program, RoundProgram, Space, Verb
from collectives.schedules import fixed_tree
from collectives.tensors.reduction import merging, weighted
from collectives.transport.base import Array
from collectives.transport.group import Group

PART_BYTES = 128 << 10
"""Bytes of a message that are reduced while the next ones arrive; so many are still in the cache that they came to."""


@dataclass(eq=False)
class Binder:
    """Binds the rounds of one program; the fields are of its plan."""

    state: ExecutorState
    group: Group
    windows: Sequence[Array | None]
    """Every rank's window as bytes; None for ranks elsewhere."""
    scratch: list[Array]
    """One array of ``dtype``: block 0 takes what is read directly, the next ones intermediate results of merges, and
    the others messages that are reduced."""
    dtype: np.dtype[Any]
    block: int
    """In elements."""
    segments: int
    stride: int
    staged: bool
    kernel: Kernel | None
    finish: Scale | None

    def __post_init__(self) -> None:
        self._board = self.group.memory.board if self.group.memory is not None else None
        self._itemsize = self.dtype.itemsize
        self._blocks = BlockLookup(self.state, self.group.rank, self.windows, self.scratch, self.dtype, self.block)
        self._buffers = 1 + (fixed_tree.intermediates(self.group.size) if self.kernel is not None else 0)
        """Blocks of the scratch memory in use."""
        self._arrivals: dict[int, list[Any]] = {}
        """The message that an action receives in the present segment, by the action's id."""

    def round(self, program: RoundProgram) -> BoundRound:
        buffers: dict[int, int] = {}
        posts: list[Do] = []
        for action in program.receives:
            if action.verb is Verb.REDUCE or action.detour:
                buffers[id(action)] = self._buffers
                self._buffers += 1
            posts.append(self._post_receive(action, buffers.get(id(action))))
        posts += [self._post_send(action) for action in program.sends]
        pushes = [self._push(action) for action in program.pushes]
        rest = [
            self._merge(a, buffers) if a.verb is Verb.MERGE else self._act(a, buffers.get(id(a))) for a in program.rest
        ]
        return BoundRound(posts, pushes, rest, program.drain_first)

    def combination(self, program: Program) -> Combination | None:
        """What the plan combines, if that is all that it does: of a staged plan of one segment within this host."""
        if self._board is None or not self.staged or self.segments > 1:
            return None
        return combination(program, self.group.rank, self._blocks, self.kernel, self.finish)

    def _post_receive(self, action: Action, buffer: int | None) -> Do:
        messages, length, peer = self.group.messages, self._blocks.length(action.size), action.peer
        assert messages is not None and action.target is not None
        into = self._blocks.own(action.target) if buffer is None else self._blocks.in_scratch(buffer)
        self._arrivals[id(action)] = arrival = [None]

        def post_receive(segment: int) -> None:
            n = length(segment)
            if n > 0:
                arrival[0] = messages.post_receive(peer, into(segment, n))

        return post_receive

    def _post_send(self, action: Action) -> Do:
        messages, length, peer = self.group.messages, self._blocks.length(action.size), action.peer
        assert messages is not None and action.source is not None
        block = self._blocks.own(action.source)

        def post_send(segment: int) -> None:
            n = length(segment)
            if n > 0:
                messages.post_send(peer, block(segment, n))

        return post_send

    def _push(self, action: Action) -> Do:
        memory, source = self.group.memory, action.source
        assert memory is not None and source is not None
        length, peer, itemsize, store = self._blocks.length(action.size), action.peer, self._itemsize, memory.store
        assert action.target is not None
        here, there = self._blocks.own_address(source), self._blocks.peer_address(peer, action.target)
        block, remote = self._blocks.own(source), self._blocks.mapped(peer, action.target)

        def push(segment: int) -> None:
            n = length(segment)
            if n <= 0:
                return
            into = remote(segment, n)
            if into is None:
                store(peer, there(segment), here(segment), n * itemsize)
            else:
                np.copyto(into, block(segment, n))

        return push

    def _act(self, action: Action, buffer: int | None) -> Do:
        wait = self._wait(action)
        if action.verb is Verb.AWAIT:
            return wait
        shortcut = self._shortcut(action, wait)
        if shortcut is not None:
            return shortcut
        if action.verb is Verb.STAGE or (action.verb is Verb.TAKE and action.peer == self.group.rank):
            return self._copy_own(action)
        value = self._value(action, buffer)
        if action.verb is Verb.REDUCE:
            if action.medium is Medium.MESSAGE:
                return self._reduce_message(action, value)
            return self._reduce(action, value, wait)
        return self._take(action, value, wait, buffer)

    def _merge(self, action: Action, buffers: Mapping[int, int]) -> Do:
        """Combine values by the fixed tree, each when it is there."""
        values, finish = action.values, self.finish if action.finish else None
        assert self.kernel is not None
        length = self._blocks.length(action.size)
        target, also = self._merged(action)

        def operand(number: int, spare: int) -> tuple[Do, BlockOf]:
            if number >= len(values):
                return _nothing, self._blocks.in_scratch(1 + number - len(values))
            value = values[number]
            if value.peer == self.group.rank:
                return _nothing, self._own_value(value, 1 + spare)
            return self._wait(value), self._value(value, buffers.get(id(value)), 1 + spare)

        own = next(number for number, value in enumerate(values) if value.peer == self.group.rank)
        steps = [
            (*operand(left, depth), *operand(right, spare), self._blocks.in_scratch(1 + depth), kernel)
            for (left, right, depth, spare), kernel in merging(self.kernel, [value.counts[1] for value in values], own)
        ]
        *inner, (wait_left, left, wait_right, right, _, combine_last) = steps

        def merge(segment: int) -> None:
            n = length(segment)
            if n <= 0:
                return
            for wait_one, one, wait_other, other, into, combine in inner:
                wait_one(segment)
                wait_other(segment)
                combine(one(segment, n), other(segment, n), into(segment, n))
            wait_left(segment)
            wait_right(segment)
            out = target(segment, n)
            combine_last(left(segment, n), right(segment, n), out)
            if finish is not None:
                finish(out, out)
            if also is not None:
                also(segment, n, out)

        return merge

    def _own_value(self, action: Action, spare: int) -> BlockOf:
        """This rank's value of a merge, which may use a block of the scratch memory."""
        assert action.source is not None
        return self._blocks.own(action.source)

    def _merged(self, action: Action) -> tuple[BlockOf, Callable[[int, int, Array], None] | None]:
        """Where the result of a merge goes, and what copies it to its second place."""
        assert action.target is not None
        second = self._second(action)
        if second is None:
            return self._blocks.own(action.target), None
        return self._blocks.own(action.target), lambda segment, n, block: np.copyto(second(segment, n), block)

    def _shortcut(self, action: Action, wait: Do) -> Do | None:
        """The closure of `fast_paths` for an action, if there is one."""
        state, source, operand, target = self.state, action.source, action.operand, action.target
        kernel, finish = self._kernel_of(action), self.finish if action.finish else None
        if source is None or target is None:
            return None
        if action.returned and self.segments == 1:
            return self._one_returned(action, wait)
        if action.also is not None:
            return None
        if action.medium is Medium.WINDOW and action.verb is Verb.STAGE and self.segments == 1:
            return fast_paths.stage(
                state, self._blocks.in_slots(self.group.rank, target, action.size), source, action.size
            )
        if target.space is not Space.OUTPUT:
            return None
        if action.medium is Medium.WINDOW and source.space is Space.WINDOW and self.segments == 1:
            in_slots = self._blocks.in_slots(action.peer, source, action.size)
            staged = self.staged and action.after == 0
            if action.verb is Verb.TAKE:
                return fast_paths.take_from_window(state, in_slots, target, action.size, wait, staged)
            if operand is not None and operand.space is Space.INPUT and kernel is not None:
                return fast_paths.reduce_from_window(
                    state, in_slots, operand, target, action.size, wait, staged, kernel, finish
                )
        return None

    def _one_returned(self, action: Action, wait: Do) -> Do:
        """The closure of `fast_paths` for a block of a plan of one segment that is reduced in the peer's window, or
        taken from the own one."""
        source, operand, target, also = action.source, action.operand, action.target, action.also
        assert source is not None and target is not None
        if action.verb is Verb.TAKE:
            own = self._blocks.in_slots(self.group.rank, source, action.size)
            return fast_paths.take_from_window(self.state, own, target, action.size, wait, False)
        kernel = self._kernel_of(action)
        assert operand is not None and also is not None and kernel is not None
        in_slots = self._blocks.in_slots(action.peer, source, action.size)
        staged = self.staged and action.after == 0
        finish = self.finish if action.finish else None
        return fast_paths.reduce_in_window(
            self.state, in_slots, operand, also, action.size, wait, staged, kernel, finish
        )

    def _kernel_of(self, action: Action) -> Kernel | None:
        """What combines the own value with the peer's in a REDUCE."""
        return None if self.kernel is None else weighted(self.kernel, *action.counts)

    def _copy_own(self, action: Action) -> Do:
        assert action.source is not None and action.target is not None
        length = self._blocks.length(action.size)
        source, target, also = self._blocks.own(action.source), self._blocks.own(action.target), self._second(action)
        state = self.state
        if action.verb is Verb.TAKE and (action.source.space, action.target.space) == (Space.INPUT, Space.OUTPUT):
            size, start, end = action.size, action.source.offset, action.target.offset

            last = self.segments - 1

            # Not by segments: a copy of many MiB bypasses the caches and does not read what it overwrites. In the last
            # segment, because no peer waits for this copy.
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

    def _reduce(self, action: Action, value: BlockOf, wait: Do) -> Do:
        kernel = self._kernel_of(action)
        assert action.operand is not None and action.target is not None and kernel is not None
        length, finish = self._blocks.length(action.size), self.finish if action.finish else None
        operand, also = self._blocks.own(action.operand), self._second(action)
        target = value if action.returned else self._blocks.own(action.target)

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

    def _reduce_message(self, action: Action, value: BlockOf) -> Do:
        """Reduce a message part by part, while the next parts arrive."""
        messages, kernel = self.group.messages, self._kernel_of(action)
        assert action.operand is not None and action.target is not None and kernel is not None and messages is not None
        length, finish = self._blocks.length(action.size), self.finish if action.finish else None
        operand, target, also = self._blocks.own(action.operand), self._blocks.own(action.target), self._second(action)
        arrival, await_arrival, itemsize = self._arrivals[id(action)], messages.await_arrival, self._itemsize
        part = max(1, PART_BYTES // itemsize)

        def reduce(segment: int) -> None:
            n = length(segment)
            if n <= 0:
                return
            message, own_block, peer_block, out = arrival[0], operand(segment, n), value(segment, n), target(segment, n)
            for at in range(0, n, part):
                end = min(at + part, n)
                await_arrival(message, end * itemsize)
                into = out[at:end]
                kernel(own_block[at:end], peer_block[at:end], into)
                if finish is not None:
                    finish(into, into)
            if also is not None:
                np.copyto(also(segment, n), out)

        return reduce

    def _take(self, action: Action, value: BlockOf, wait: Do, buffer: int | None) -> Do:
        assert action.target is not None
        length, target, also = self._blocks.length(action.size), self._blocks.own(action.target), self._second(action)
        arrives_in_place = action.medium is Medium.MESSAGE and buffer is None
        memory, peer, itemsize = self.group.memory, action.peer, self._itemsize
        if action.medium.in_place and action.source is not None and action.source.space is not Space.WINDOW:
            assert memory is not None
            there, here, fetch = (
                self._blocks.peer_address(peer, action.source),
                self._blocks.own_address(action.target),
                memory.fetch,
            )
            remote = self._blocks.mapped(peer, action.source)

            def take_directly(segment: int) -> None:
                n = length(segment)
                if n <= 0:
                    return
                wait(segment)
                block = remote(segment, n)
                if block is None:
                    fetch(peer, there(segment), here(segment), n * itemsize)
                else:
                    np.copyto(target(segment, n), block)
                if also is not None:
                    np.copyto(also(segment, n), target(segment, n))

            return take_directly

        def take(segment: int) -> None:
            n = length(segment)
            if n <= 0:
                return
            wait(segment)
            out = target(segment, n)
            if not arrives_in_place:
                np.copyto(out, value(segment, n))
            if also is not None:
                np.copyto(also(segment, n), out)

        return take

    def _value(self, action: Action, buffer: int | None, number: int = 0) -> BlockOf:
        """The peer's block as an array: in its window, in this rank's memory, or fetched into block ``number`` of the
        scratch memory."""
        if action.medium is Medium.MESSAGE:
            return self._blocks.in_scratch(buffer or 0)
        source, peer = action.source, action.peer
        assert source is not None
        if source.space is Space.WINDOW:
            own = action.returned and action.verb is Verb.TAKE
            return self._blocks.in_window(self.group.rank if own else peer, source)
        memory, into, itemsize = self.group.memory, self._blocks.in_scratch(number), self._itemsize
        at = number * self.block * itemsize
        assert memory is not None
        there, fetch, state = self._blocks.peer_address(peer, source), memory.fetch, self.state
        remote = self._blocks.mapped(peer, source)

        def value(segment: int, n: int) -> Array:
            block = remote(segment, n)
            if block is not None:
                return block
            fetch(peer, there(segment), state.scratch_at + at, n * itemsize)
            return into(segment, n)

        return value

    def _wait(self, action: Action) -> Do:
        """Wait for the action's message, or for the peer's round ``after`` of the same segment."""
        if action.medium is Medium.MESSAGE:
            messages, arrival = self.group.messages, self._arrivals[id(action)]
            assert messages is not None
            await_arrival = messages.await_arrival
            return lambda segment: await_arrival(arrival[0])
        if action.after < 0 or action.peer == self.group.rank:
            return _nothing
        board, state, peer = self._board, self.state, action.peer
        assert board is not None
        seen, stride, ahead = board.seen, self.stride, action.after + 1
        first = 1 if self.staged and action.after == 0 else 0

        def wait(segment: int) -> None:
            if segment < first and state.entered_staged:
                return
            progress = state.base + stride * segment + ahead
            if seen[peer] < progress:
                board.wait(peer, progress)

        return wait

    def _second(self, action: Action) -> BlockOf | None:
        return None if action.also is None else self._blocks.own(action.also)


def _nothing(segment: int) -> None:
    """No peer to wait for."""
