"""Tasks whose ranks tell each other where their tensors lie, so that mapped tensors are reached in place.

An all-reduce of a private tensor into a mapped result, which is what ``y = allreduce(x)`` makes of any array, counts as
mapped, too: the rank copies into its result what its peers read of its tensor, and they read it there.

    rank 0    tensor | own  | rest |       result | sum      | rest, then sum by rank 1 |
    rank 1    tensor | rest | own  |       result | rest, then sum by rank 0 | sum      |
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from collectives.engine.context import Context
from collectives.engine.handles import EMPTY, Handle
from collectives.engine.request_cache import CachedRequest
from collectives.engine.rows import Rows
from collectives.engine.tasks import OneTensor, Words
from collectives.plan.mapped_loops import Loop
from collectives.plan.plan import Plan
from collectives.tensors.arena import MAPPED, arena
from collectives.tensors.arrays import address
from collectives.transport.base import Array

_UNUSED = EMPTY, EMPTY
_MOST_KEPT = 16
_PUBLISHED_UP_TO = 16 << 20
"""Bytes of the largest private tensor that is copied in part into its mapped result. Above, the copy takes as long as
what direct reads of private memory lose."""

_Run = Callable[[Array, Array, Any], None]


class _Kept(NamedTuple):
    """What was found out in a call in which all ranks' tensors were mapped.

    Attributes:
        ranges: the arena's pieces at that time.
        words: this rank's.
        rest: what it publishes.
        peer_words: each peer with its two words.
        loop, quiet_loop: carry out such a call; the second silences NumPy's warnings.
        blocks: what they need of the peers' tensors.
    """

    ranges: object
    words: tuple[int, int]
    rest: tuple[slice, ...]
    peer_words: list[tuple[int, int, int]]
    loop: _Run
    quiet_loop: _Run
    blocks: Any


class LocatedTensor(OneTensor):
    """`OneTensor` where the ranks tell each other where their tensors lie.

    If all are mapped or published, the plan for mapped tensors runs. Otherwise the one for private tensors does, for
    which ranks with private tensors may have staged theirs already. Whether a rank has published its tensor follows
    from its words, which say where the tensor itself lies.

    Programs call with the same tensors again and again: what was found out about them is kept, and holds while this
    rank's addresses, the arena's pieces and the peers' words are the same. Words are never used for other memory.
    """

    def __init__(self, context: Context, entry: CachedRequest) -> None:
        super().__init__(context, entry)
        self._keeps_outputs = entry.request.collective == "reducescatter"
        """Whether peers use inputs only."""
        self._is_mapped = False
        """Whether this rank's tensors of the present call are, or are published."""
        self._rest: tuple[slice, ...] = ()
        """What it publishes of its input."""
        # Not with a factor: a tensor that is its own result would be scaled again if the ranks disagreed first.
        self._may_publish = (
            entry.request.collective == "allreduce" and entry.nbytes <= _PUBLISHED_UP_TO and entry.prescale is None
        )
        self._at = self._out_at = 0
        self._ranges: object = None
        self._words: tuple[int, int] = (0, 0)
        """This rank's words, when its tensors were at these addresses and the arena had these pieces."""
        self._kept: dict[tuple[int, int], _Kept] = {}
        """By the addresses of this rank's input and output: programs take turns with a few tensors."""
        self._enter_and_look, self._tells = context.control.enter_and_look, context.control.tells
        self._carry_out = functools.partial(context.quietly, self._run) if entry.warns else self._run

    def bind(self) -> None:
        context, entry = self._context, self.entry
        self.epoch = context.planner.epoch
        self._kept.clear()
        self._ranges = None  # what is published depends on the plan
        self.attempt = self._attempt if entry.prescale is None else None

    def _attempt(self, signature: int, source: Array, out: Array) -> bool | None:
        """`prepare`, enter the round, and `run`; written out for tensors of a call before."""
        if self._kept:
            at = address(source)
            out_at = at if out is source or self._keeps_outputs else address(out)
            kept = self._kept.get((at, out_at))
            if kept is not None and kept.ranges is arena.ranges:
                for cut in kept.rest:
                    out[cut] = source[cut]
                same = self._enter_and_look(signature, kept.words)
                if same and self._tells(kept.peer_words):
                    kept.quiet_loop(source, out, kept.blocks)
                    return True
                self._source, self._out, self._at, self._out_at = source, out, at, out_at
                self._ranges, self._words, self._rest, self._is_mapped = kept.ranges, kept.words, kept.rest, True
                if same:
                    self._carry_out()
                return same
        words = self.prepare(source, out)
        same = self._enter_and_look(signature, words)
        if same:
            self._carry_out()
        return same

    def prepare(self, source: Array, out: Array) -> Words:
        entry = self.entry
        if self.epoch != self._context.planner.epoch:
            self.bind()
        if entry.prescale is not None:
            source = self._prescaled(source, out)
        self._source, self._out = source, out
        at = address(source)
        out_at = at if out is source or self._keeps_outputs else address(out)
        if at != self._at or out_at != self._out_at or self._ranges is not arena.ranges:
            self._locate(source, out, at, out_at)
        if not self._is_mapped:
            self._stage(source, out)
        for cut in self._rest:
            out[cut] = source[cut]
        return self._words

    def _locate(self, source: Array, out: Array, at: int, out_at: int) -> None:
        """Find out where this rank's tensors lie."""
        mapped = self._mapped
        assert mapped is not None
        self._at, self._out_at, self._ranges = at, out_at, arena.ranges
        word = mapped.word_of(at, source.nbytes)
        self._words = word, word if out_at == at else mapped.word_of(out_at, out.nbytes)
        self._is_mapped = self._is_reached(*self._words)
        private = self._is_mapped and not word & MAPPED
        self._rest = self.entry.mapped_plan().rest or () if private else ()

    def _is_reached(self, source: int, out: int) -> bool:
        """Whether the tensors of a rank with these words are mapped, or published; the same on every rank."""
        if not out & MAPPED:
            return False
        return source & MAPPED != 0 or (self._may_publish and self.entry.mapped_plan().rest is not None)

    def _stage(self, source: Array, out: Array) -> None:
        """Put a private tensor where the plan for private tensors has it."""
        plan = self.entry.plan()
        assert plan is not None
        if plan.staged:
            self._state.input, self._state.output = source, out
            self._context.executor.stage(plan)

    def run(self) -> None:
        self._carry_out()

    def run_handles(self, handles: Sequence[Handle]) -> None:
        if self._context.executor.trace is not None:
            self._kept.clear()  # a loop tells nothing of its rounds
        self._carry_out()

    def _run(self) -> None:
        if self._is_mapped:
            kept = self._kept.get((self._at, self._out_at))
            if kept is not None and kept.ranges is self._ranges and self._tells(kept.peer_words):
                kept.loop(self._source, self._out, kept.blocks)
                self._source = self._out = EMPTY
                return
        else:
            plan, words_of = self.entry.plan(), self._context.control.words_of
            assert plan is not None
            if plan.staged and not any([self._is_reached(*words_of(peer)) for peer in self._peers]):
                self._context.executor.run(plan, True)
                self.description = plan.description
                self._clear_arrays()
                self._source = self._out = EMPTY
                return
        self._run_otherwise()

    def _run_otherwise(self) -> None:
        """Run after finding out where the peers' tensors lie."""
        entry, executor, words_of = self.entry, self._context.executor, self._context.control.words_of
        state = self._state
        state.input, state.output, state.input_at, state.output_at = self._source, self._out, self._at, self._out_at
        peer_words: list[tuple[int, int, int]] = []
        for peer in self._peers:
            source, out = words_of(peer)
            peer_words.append((peer, source, out))
        mapped_peers = sum(self._is_reached(source, out) for _, source, out in peer_words)
        if self._is_mapped and mapped_peers == len(self._peers):
            plan = entry.mapped_plan()
            self._learn_places(plan, entry.dtype)
            for peer, source, _ in peer_words:
                if not source & MAPPED:  # published in its output
                    state.inputs[peer], state.addresses[peer] = state.outputs[peer], (state.addresses[peer][1],) * 2
            kept = self._keep(plan, plan.loop, peer_words) if plan.loop is not None and executor.trace is None else None
            if kept is not None:
                kept.loop(self._source, self._out, kept.blocks)
            else:
                executor.run(plan)
        else:
            private = entry.plan()
            assert private is not None
            plan = private
            staged = plan.staged and not self._is_mapped
            if plan.needs_addresses:
                self._learn_places(plan, entry.dtype)
            executor.run(plan, staged, staged and not mapped_peers)
        self.description = plan.description
        self._clear_arrays()
        self._source = self._out = EMPTY

    def _keep(self, plan: Plan, loop: Loop, peer_words: list[tuple[int, int, int]]) -> _Kept | None:
        """Keep the partners' tensors for further calls with the same ones; returns None if some cannot be mapped."""
        inputs, outputs = self._state.inputs, self._state.outputs
        views = [(inputs[peer], outputs[peer]) if peer in plan.partners else _UNUSED for peer in self._peers]
        if any(view is None for pair in views for view in pair):
            return None
        run = loop.run
        quiet = functools.partial(self._context.quietly, run) if self.entry.warns else run
        blocks = loop.cut(views)  # type: ignore[arg-type]  # checked above
        if len(self._kept) >= _MOST_KEPT:
            self._kept.clear()
        kept = self._kept[self._at, self._out_at] = _Kept(
            self._ranges, self._words, self._rest, peer_words, run, quiet, blocks
        )
        return kept


def one_tensor(context: Context, entry: CachedRequest) -> OneTensor | Rows:
    """The task of an operation on one tensor, other than Adasum."""
    if entry.request.collective in ("allgather", "alltoall"):
        return Rows(context, entry)
    return (LocatedTensor if entry.locates_tensors else OneTensor)(context, entry)
