"""The executor: runs any program over any transport, block by block.

A collective of S segments and K rounds runs in step groups: round k of segment s belongs to group
``s * stride + k``. With a stride of K a group is one round, and a segment goes through all its rounds while it is in
cache. With a stride of 1 segments overlap: a rank reads what its peer finished a group ago and seldom waits, and
several messages are in flight at once:

    group      0        1        2        3                 stride = 1, K = 3
    segment 0  round 0  round 1  round 2
    segment 1           round 0  round 1  round 2
    segment 2                    round 0  round 1  round 2

A window has `SLOTS` slots, so that at most as many segments may be in flight through windows: `stride_for` ensures
that. After each group the rank writes its progress on the board.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.fusion import Pieces
from collectives.plan.binder import Binder
from collectives.plan.bucket_loop import BucketLoop
from collectives.plan.fast_paths import ExecutorState, Kernel, Scale
from collectives.plan.mapped_loops import make_loop
from collectives.plan.one_reduction import OneReduction, Quietly
from collectives.plan.packing_binder import PackingBinder
from collectives.plan.plan import BoundRound, Plan
from collectives.plan.program import Program
from collectives.schedules import fixed_tree
from collectives.transport.base import SLOTS, WINDOW_BYTES, Array
from collectives.transport.group import Group

Trace = Callable[[str, float, float], None]


def stride_for(rounds: int, segments: int, overlap: bool, uses_windows: bool) -> int:
    """The number of step groups between the starts of two segments, which may ``overlap``.

    ``uses_windows``: any rank has segments in window slots, of which one is always left for peers to read.
    """
    if not overlap or segments == 1:
        return rounds
    return -(-rounds // (SLOTS - 1)) if uses_windows else 1


class Executor:
    """Runs plans for one rank of a group. Not thread-safe: the world admits one call at a time.

    Attributes:
        state: set ``input`` and ``output`` (1-D arrays of the plan's dtype) before `run`.
    """

    def __init__(self, group: Group) -> None:
        self.state = ExecutorState(group.size)
        self.trace: Trace | None = None
        """Called after every step group with its name, its beginning and its end (`time.monotonic`)."""
        self._group = group
        self._board = group.memory.board if group.memory is not None else None
        windows = group.memory.windows if group.memory is not None else ()
        self._windows: Sequence[Array | None] = windows or [
            np.empty(WINDOW_BYTES, np.uint8) if rank == group.rank else None for rank in range(group.size)
        ]
        self._others = [(group.rank + distance) % group.size for distance in range(1, group.size)]
        """The peers, in the order in which the direct algorithms meet them."""
        self._held = 1 + fixed_tree.intermediates(group.size)
        """Blocks of the scratch memory that a reduction needs besides its messages."""
        self._scratch = np.empty(0, np.uint8)
        self._scratch_views: dict[np.dtype[Any], list[Array]] = {}

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
        pieces: Pieces | None = None,
        mapped: bool = False,
        takes_slots: bool = True,
    ) -> Plan:
        """Make a plan: every action of the program becomes a closure that takes the segment's number. ``mapped``: the
        tensors of all ranks are."""
        # The first blocks take what is read directly and sums in between, those behind them messages.
        first = self._held if kernel is not None else program.messages > 0
        self._grow_scratch((program.messages + first) * block * dtype.itemsize)
        scratch = self._scratch_as(dtype)
        common = self.state, self._group, self._windows, scratch, dtype, block, segments, stride, staged, kernel, finish
        binder = Binder(*common) if pieces is None else PackingBinder(*common, pieces=pieces)
        rounds = [binder.round(r) for r in program.rounds]
        combination = binder.combination(program)
        plan = Plan(program, rounds, segments, stride, staged, description, reads_outputs, combination)
        plan.takes_slots = takes_slots
        if mapped and not takes_slots and self._board is not None:
            peers, groups = self._others, plan.groups
            plan.loop = make_loop(
                program, self._group.rank, self.state, self._board, peers, groups, block, kernel, finish, scratch
            )
        return plan

    def release(self) -> None:
        """Drop the windows and views of the board, so that they can be unmapped, and the scratch memory."""
        self.state.addresses.clear()
        self.state.inputs.clear()
        self.state.outputs.clear()
        self._windows = ()
        self._scratch = np.empty(0, np.uint8)
        self._scratch_views.clear()

    def _scratch_as(self, dtype: np.dtype[Any]) -> list[Array]:
        """The scratch memory as a list of one array of ``dtype``, which is replaced when the memory grows."""
        if dtype not in self._scratch_views:
            self._scratch_views[dtype] = [self._scratch.view(dtype)]
        return self._scratch_views[dtype]

    def _grow_scratch(self, nbytes: int) -> None:
        if nbytes > self._scratch.nbytes:
            self._scratch = np.empty(-(-nbytes // 64) * 64, np.uint8)
            self.state.scratch_at = self._scratch.ctypes.data
            for dtype, holder in self._scratch_views.items():
                holder[0] = self._scratch.view(dtype)

    def bucket_loop(
        self,
        pieces: Pieces,
        dtype: np.dtype[Any],
        start: int,
        size: int,
        block: int,
        direct_block: int,
        kernel: Kernel,
        finish: Scale | None,
    ) -> BucketLoop:
        """What reduces a bucket where its tensors lie; this rank owns ``size`` elements of all from ``start`` on."""
        memory = self._group.memory
        assert memory is not None
        self._grow_scratch(self._held * direct_block * dtype.itemsize)
        rank, scratch = self._group.rank, self._scratch_as(dtype)
        return BucketLoop(
            self.state,
            memory,
            self._others,
            rank,
            pieces,
            start,
            size,
            block,
            direct_block,
            kernel,
            finish,
            scratch,
        )

    def one_reduction(self, plan: Plan, quietly: Quietly | None) -> OneReduction | None:
        """The quickest way to agree on a plan and to run it, if one reduction is all that it does."""
        board = self._board
        if board is None or plan.combination is None:
            return None
        return OneReduction(self.state, board, plan.combination, self._group.control.enter_and_look, quietly)

    def stage(self, plan: Plan) -> None:
        """Copy segment 0 into the window before the call is entered. The plan must be staged."""
        if plan.uses_window:
            self._claim(0, plan)
        for do in plan.rounds[0].rest:
            do(0)

    def run(self, plan: Plan, staged_first: bool = False, staged_everywhere: bool | None = None) -> None:
        """Run a plan that all ranks have agreed on. Returns when the result is in the output and the input may change.

        Args:
            staged_first: this rank staged segment 0 before it entered the call.
            staged_everywhere: so did all others, so that this rank does not wait for theirs; None: as ``staged_first``.

        Raises:
            RankFailedError, CollectiveTimeoutError, TransportError: as the transports; arrays are undefined then.
        """
        state, board = self.state, self._board
        state.entered_staged = staged_first if staged_everywhere is None else staged_everywhere
        base, trace = state.base, self.trace
        if state.entered_staged and plan.later is not None and trace is None and board is not None:
            # What is below, for any plan, would take a tenth longer for a private all-reduce of 64 KiB.
            progress = base + 1
            for actions in plan.later:
                for do in actions:
                    do(0)
                progress += 1
                board.advance(progress)
            state.free_at[state.slot] = state.base = progress
            state.slot = (state.slot + 1) % SLOTS
            return
        if trace is None and plan.stride == len(plan.rounds):
            self._run_in_sequence(plan, staged_first)
        else:
            for group in range(plan.groups):
                begun = time.monotonic()
                self._run_group(plan, group, staged_first)
                if board is not None:
                    board.advance(base + group + 1)
                if trace is not None:
                    trace(_name(plan, group), begun, time.monotonic())
        if board is not None:
            for peer, groups in plan.touched_by:
                if board.seen[peer] < base + groups:
                    board.wait(peer, base + groups)
        if plan.takes_slots:
            self._leave_slots(plan)
        state.base = base + plan.groups

    def _run_in_sequence(self, plan: Plan, staged_first: bool) -> None:
        """Run all rounds of a segment before the next segment: each round is a step group."""
        state, board, progress, skip = self.state, self._board, self.state.base, staged_first
        for segment in range(plan.segments):
            if plan.uses_window and not skip:
                self._claim(segment, plan)
            for bound in plan.rounds:
                progress += 1
                if not skip:
                    for do in bound.first:
                        do(segment)
                    self._finish_round(bound, segment)
                    if bound.has_messages:
                        self._drain()
                if board is not None and not (skip and state.entered_staged):
                    board.advance(progress)
                skip = False

    def _run_group(self, plan: Plan, group: int, staged_first: bool) -> None:
        """Run the rounds of different segments in one step group: all messages first, so that they travel together."""
        stride, segments, rounds = plan.stride, plan.segments, plan.rounds
        active: list[tuple[BoundRound, int]] = []
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
        has_messages = False
        for bound, segment in active:
            self._finish_round(bound, segment)
            has_messages |= bound.has_messages
        if has_messages:
            self._drain()

    def _finish_round(self, bound: BoundRound, segment: int) -> None:
        """Run what comes after the posts and pushes; each action waits for its own message alone."""
        if bound.drain_first:
            self._drain()
        for do in bound.rest:
            do(segment)

    def _drain(self) -> None:
        """Wait until all that was posted has arrived and has left: later groups may write what was sent."""
        messages = self._group.messages
        assert messages is not None
        messages.drain()

    def _claim(self, segment: int, plan: Plan) -> None:
        """Wait until no peer reads the slot any more that a segment is about to overwrite."""
        board = self._board
        if board is None:
            return
        state = self.state
        if segment < SLOTS:
            free = state.free_at[(state.slot + segment) % SLOTS]
        else:
            free = state.base + (segment - SLOTS) * plan.stride + len(plan.rounds)
        seen = board.seen
        for peer in board.peers:
            if seen[peer] < free:
                board.wait(peer, free)

    def _leave_slots(self, plan: Plan) -> None:
        state, segments = self.state, plan.segments
        if segments == 1:
            state.free_at[state.slot] = state.base + len(plan.rounds)
            state.slot = (state.slot + 1) % SLOTS
            return
        for segment in range(max(0, segments - SLOTS), segments):
            state.free_at[(state.slot + segment) % SLOTS] = state.base + segment * plan.stride + len(plan.rounds)
        state.slot = (state.slot + segments) % SLOTS


def _name(plan: Plan, group: int) -> str:
    """The name of a step group in traces."""
    numbers = range(group % plan.stride, len(plan.rounds), plan.stride)
    which = [(number, (group - number) // plan.stride) for number in numbers]
    return ", ".join(f"round {k} of segment {segment}" for k, segment in which if 0 <= segment < plan.segments)
