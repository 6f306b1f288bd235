"""Lowering: from the schedules of all ranks to one rank's program.

A schedule speaks of chunks and their values. Lowering gives each value a place (`collectives.plan.versions`), each
exchange a medium, and each wait a number: a rank reads a value on a peer of its host when the peer has finished the
round that wrote it. All ranks count rounds alike, so a wait is "until the peer has finished step group g".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from collectives.plan.program import Action, Layout, Medium, Place, Program, RoundProgram, Space, Verb
from collectives.plan.versions import ChunkValue, Versions
from collectives.schedules.schedule import Schedule, StepKind


def compile_program(
    schedule_of: Callable[[int], Schedule],
    rank: int,
    layout: Layout,
    block: int,
    medium_of: Callable[[int, int], Medium],
    staged: bool,
    versioned: bool,
    packed: bool = False,
) -> Program:
    """Lower the schedule of ``rank``.

    Args:
        schedule_of: any rank's schedule.
        layout: where chunks lie in inputs and outputs.
        block: elements that a segment takes from each chunk.
        medium_of: how two ranks exchange blocks.
        staged: whether the ranks of a host read only windows (`Medium.WINDOW`).
        versioned: whether each version of a chunk needs its own place in the window, because a peer may still read one
            while the next is written.
        packed: the input exists in the window only, where staging packs it.
    """
    versions: dict[int, Versions] = {}

    def versions_of(peer: int) -> Versions:
        if peer not in versions:
            versions[peer] = Versions(schedule_of(peer), layout, block, medium_of, staged, versioned)
        return versions[peer]

    own = versions_of(rank)
    lowering = _Lowering(own, versions_of, layout, medium_of, staged, packed)
    rounds = tuple(lowering.round(number) for number in range(len(own.rounds)))
    held = sum(action.verb is Verb.REDUCE or action.detour for each in rounds for action in each.receives)
    return Program(
        (*((lowering.stage(),) if staged else ()), *rounds),
        tuple(sorted(lowering.touched.items())),
        own.window_elements,
        bool(own.window_index),
        tuple(chunk for chunk in sorted(own.inputs) if chunk not in own.staged_chunks),
        held,
    )


def window_blocks(
    schedule_of: Callable[[int], Schedule],
    rank: int,
    layout: Layout,
    medium_of: Callable[[int, int], Medium],
    staged: bool,
    versioned: bool,
) -> int:
    """The number of blocks that a segment keeps in a rank's window; arguments as for `compile_program`."""
    return len(Versions(schedule_of(rank), layout, 1, medium_of, staged, versioned).window_index)


class _Lowering:
    """Lowers the rounds of one rank.

    Attributes:
        touched: peers that read or write this rank's private memory, with the last round in which each does.
    """

    def __init__(
        self,
        own: Versions,
        versions_of: Callable[[int], Versions],
        layout: Layout,
        medium_of: Callable[[int, int], Medium],
        staged: bool,
        packed: bool,
    ) -> None:
        self._own_versions, self._versions_of = own, versions_of
        self._sizes, self._medium_of = layout.sizes, medium_of
        self._staged, self._packed = staged, packed
        self.touched: dict[int, int] = {}

    def stage(self) -> RoundProgram:
        """The round before the first, which copies into the window what peers read."""
        own = self._own_versions
        actions = [
            self._own(Verb.STAGE, chunk, own.place(chunk, 0), own.window_place(chunk, 0))
            for chunk in sorted(own.staged_chunks)
        ]
        return RoundProgram((), (), (), tuple(actions), False)

    def round(self, number: int) -> RoundProgram:
        """Lower one round of the schedule."""
        own, steps = self._own_versions, self._own_versions.rounds[number]
        media = [self._medium_of(own.rank, step.peer) for step in steps]
        leaving = {
            step.chunk
            for step, medium in zip(steps, media, strict=True)
            if step.kind is StepKind.SEND and medium is Medium.MESSAGE
        }
        left = Counter(step.chunk for step in steps if step.kind is StepKind.REDUCE)
        reductions: dict[int, list[Action]] = {}
        sends: list[Action] = []
        pushes: list[Action] = []
        rest: list[Action] = []
        for step, medium in zip(steps, media, strict=True):
            if step.kind is StepKind.COPY:
                home = Place(Space.OUTPUT, own.outputs[step.chunk])
                rest.append(self._own(Verb.TAKE, step.chunk, own.place(step.chunk, 0), home))
            elif step.kind is StepKind.REDUCE:
                reductions.setdefault(step.chunk, []).extend(self._receive(number, step, medium, leaving))
                left[step.chunk] -= 1
                if not left[step.chunk]:
                    rest.append(self._merge(reductions[step.chunk]))
            elif step.kind is StepKind.RECEIVE:
                rest += self._receive(number, step, medium, leaving)
            elif medium is Medium.MESSAGE:
                sends.append(self._send(Verb.SEND, step, medium))
            elif medium.in_place and step.push:
                peer = self._versions_of(step.peer)
                version = peer.receive(number, own.rank, step.index).version + 1
                pushes.append(self._send(Verb.PUSH, step, medium, peer.place(step.chunk, version)))
            elif medium.in_place and own.place(step.chunk, step.version).space is not Space.WINDOW:
                self.touched[step.peer] = number
        round_program = RoundProgram(
            (), tuple(sends), tuple(pushes), tuple(rest), not leaving.isdisjoint(own.written_in(number))
        )
        receives = tuple(action for action in round_program.reads if action.medium is Medium.MESSAGE)
        return replace(round_program, receives=receives)

    def _merge(self, reductions: list[Action]) -> Action:
        """The reductions of one chunk in one round as one action."""
        first, last = reductions[0], reductions[-1]
        if first is last:
            return first
        rank = self._own_versions.rank
        own = Action(Verb.TAKE, Medium.WINDOW, rank, first.size, first.operand, counts=first.counts[::-1])
        return replace(
            last,
            verb=Verb.MERGE,
            medium=Medium.WINDOW,
            peer=rank,
            source=None,
            operand=first.operand,
            after=-1,
            detour=False,
            values=tuple(sorted((own, *reductions), key=lambda action: self._own_versions.key(action.peer))),
        )

    def _own(self, verb: Verb, chunk: int, source: Place, target: Place) -> Action:
        return Action(verb, Medium.WINDOW, self._own_versions.rank, self._sizes[chunk], source, target=target)

    def _send(self, verb: Verb, step: ChunkValue, medium: Medium, target: Place | None = None) -> Action:
        source = self._own_versions.place(step.chunk, step.version)
        return Action(verb, medium, step.peer, self._sizes[step.chunk], source, target=target)

    def _receive(self, number: int, step: ChunkValue, medium: Medium, leaving: set[int]) -> list[Action]:
        """Lower a receive, with or without a reduction; nothing is left of a pushed block that is not read again."""
        own, chunk, peer, size = self._own_versions, step.chunk, step.peer, self._sizes[step.chunk]
        source, after, target, returned = None, -1, own.place(chunk, step.version + 1), False
        also = own.second_place(chunk, step.version + 1)
        if medium.in_place and step.push:
            self.touched[peer] = number
            again = own.read_later(number, chunk)
            return [Action(Verb.AWAIT, medium, peer, size, None, after=number)] if again else []
        elif medium is not Medium.MESSAGE:
            peer_versions = self._versions_of(peer)
            sent = peer_versions.send(number, own.rank, step.index)
            after = sent.written + self._staged  # Staging is the round before the first.
            if (chunk, sent.version) in peer_versions.returned:
                source, returned = own.window_place(chunk, 0), True
            else:
                source = peer_versions.place_for_peers(chunk, sent.version)
            if step.kind is StepKind.REDUCE and (chunk, step.version + 1) in own.returned:
                target, also, returned = source, target, True
        action = Action(
            Verb.REDUCE if step.kind is StepKind.REDUCE else Verb.TAKE,
            medium,
            peer,
            size,
            source,
            self._operand(step),
            target,
            also,
            after,
            own.finishes(step, self._versions_of),
            medium is Medium.MESSAGE and chunk in leaving,
            returned,
            counts=(step.own_count, step.count),
        )
        return [action]

    def _operand(self, step: ChunkValue) -> Place | None:
        """Where a reduction finds this rank's own value."""
        if step.kind is not StepKind.REDUCE:
            return None
        if self._packed and step.version == 0 and step.chunk in self._own_versions.staged_chunks:
            return self._own_versions.window_place(step.chunk, 0)
        return self._own_versions.place(step.chunk, step.version)
