"""A plan: a program bound to a dtype, an operation and an executor, as closures that are run again and again."""

from __future__ import annotations

from collections.abc import Sequence

from collectives.plan.fast_paths import Do
from collectives.plan.mapped_loops import Loop
from collectives.plan.one_reduction import Combination
from collectives.plan.program import Program


class BoundRound:
    """The closures of one round, in the order in which they run: first ``posts`` of messages, and ``pushes`` into the
    peers' memory. With ``drain_first`` all messages must have arrived, and have been sent, before the rest."""

    def __init__(self, posts: Sequence[Do], pushes: Sequence[Do], rest: Sequence[Do], drain_first: bool) -> None:
        self.posts, self.pushes, self.rest, self.drain_first = posts, pushes, rest, drain_first
        self.first = (*posts, *pushes)
        self.has_messages = bool(posts)


class Plan:
    """A bound program, ready to run.

    Attributes:
        staged: peers read windows only, so no addresses travel, and segment 0 may be staged before the call is entered.
        needs_addresses: peers read or write private memory; on several hosts, whether those of any rank do.
        partners: the peers whose private memory this rank reads or writes.
        reads_outputs: peers read each other's outputs, not only inputs; the same on every rank.
        later: the actions of each round but the first, if it has one segment, in windows alone; None of any other.
        loop: carries out the whole plan where the tensors of all ranks are mapped, or None
            (`collectives.plan.mapped_loops`).
        takes_slots: whether any rank has segments in window slots, so that all count the slots that the plan takes.
        rest: of a direct all-reduce of mapped tensors, what the peers read of this rank's input; None of any other.
        touched_by: the peers that read or write this rank's private memory, each with the step group, counted from
            the call's beginning, after which it does so no more.
        combination: what the plan combines, if that is all that it does; None otherwise.
    """

    def __init__(
        self,
        program: Program,
        rounds: Sequence[BoundRound],
        segments: int,
        stride: int,
        staged: bool,
        description: str,
        reads_outputs: bool,
        combination: Combination | None,
    ) -> None:
        self.rounds = rounds
        self.segments = segments
        self.stride = stride
        self.staged = staged
        self.touched_by = tuple((peer, (segments - 1) * stride + last + 1) for peer, last in program.touched_by)
        self.uses_window = program.uses_window
        short = staged and segments == 1 and self.uses_window and not self.touched_by
        self.later: tuple[tuple[Do, ...], ...] | None = None
        if short and not any(bound.has_messages for bound in rounds):
            self.later = tuple((*bound.pushes, *bound.rest) for bound in rounds[1:])
        actions = [action for r in program.rounds for action in (*r.pushes, *r.reads) if action.medium.in_place]
        self.partners = tuple(sorted({action.peer for action in actions}))
        self.needs_addresses = bool(actions or program.touched_by)
        self.groups = (segments - 1) * stride + len(rounds)
        self.description = description
        self.reads_outputs = reads_outputs
        self.takes_slots = True
        self.loop: Loop | None = None
        self.combination = combination
        self.rest: tuple[slice, ...] | None = None
