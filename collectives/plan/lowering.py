"""From schedules to a program: what one rank does with memory, block by block.

A schedule speaks of chunks and their values. Here each value gets a place, each exchange a way, and each wait a number:

* A value that a rank started with is version 0 and lies in its input; each receive of the chunk makes the next
  version. Versions from 1 on lie in the output, or, if the chunk is no part of this rank's output, in its window.
* With `Medium.WINDOW` peers read nothing but windows: a stage step copies version 0 of what they will read into the
window
  first, and a result that they will read is written there too.
* Peers on the same host read a value when its owner has finished the round that wrote it. So every program counts its
  groups of steps alike on all ranks, and a wait is "until the peer has finished group g".

The program is written for one segment; `Step`-like actions take the segment's number and find their blocks by
arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from collectives.schedules.schedule import Kind, Schedule


class Medium(Enum):
    """How this rank and a peer exchange blocks."""

    WINDOW = "window"
    DIRECT = "direct-read"
    MESSAGE = "mpi"


class Space(Enum):
    """Where a block lies on its rank."""

    INPUT = "input"
    OUTPUT = "output"
    WINDOW = "window"


@dataclass(frozen=True, slots=True)
class Place:
    """A chunk's home: elements from the start of the space; in a window from the start of the segment's slot."""

    space: Space
    offset: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Which chunks a rank's input and output hold, and where: element offsets by chunk, for any rank."""

    sizes: Sequence[int]
    """Elements of each chunk; the same on all ranks."""
    inputs: Callable[[int], Mapping[int, int]]
    outputs: Callable[[int], Mapping[int, int]]


class Verb(Enum):
    """What an action does."""

    STAGE = "copy own input into the window"
    PUSH = "write own value into the peer's output"
    SEND = "send own value as a message"
    TAKE = "replace by the peer's value"
    REDUCE = "combine with the peer's value"
    AWAIT = "wait until the peer has pushed"


@dataclass(frozen=True, slots=True)
class Action:
    """One block of one segment to move or to combine. Places are None where the verb has no use for them."""

    verb: Verb
    medium: Medium
    peer: int
    size: int
    """Elements of the whole chunk."""
    source: Place | None
    """Where the peer's value lies (TAKE, REDUCE), or the own one (STAGE, PUSH, SEND)."""
    operand: Place | None = None
    """REDUCE: where the own value lies."""
    target: Place | None = None
    """Where the result goes; PUSH: on the peer."""
    also: Place | None = None
    """A second place for the result: the output, when the first is the window."""
    after: int = -1
    """The round of the same segment that the peer must have finished; -1: entering the call was enough."""
    finish: bool = False
    """The block is now fully reduced: scale it."""
    detour: bool = False
    """A message that must not land in its target yet, because the old value is still on its way out."""


@dataclass(frozen=True, slots=True)
class RoundProgram:
    """The actions of one round: message sends and pushes first (values from before the round), then the rest in
    order."""

    receives: tuple[Action, ...]
    sends: tuple[Action, ...]
    pushes: tuple[Action, ...]
    rest: tuple[Action, ...]
    drain_first: bool
    """A block that is being sent is also written in this round: wait for the messages before anything is written."""


@dataclass(frozen=True, slots=True)
class Program:
    """What a rank does for each segment, and whom it waits for at the end."""

    rounds: tuple[RoundProgram, ...]
    touched_by: tuple[tuple[int, int], ...]
    """Peers that read or write this rank's private memory, each with the last round in which it does: the memory must
    not be given back before that."""
    slot_elements: int
    """Elements of a window slot that one segment uses on this rank."""
    uses_window: bool
    unstaged: tuple[int, ...]
    """Chunks of the input that no peer reads from the window."""
    messages: int
    """The most message blocks that wait for their turn at once, for sizing the scratch memory."""


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
    """Give every step of ``rank`` its places and waits.

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
    mine = _Trace(schedule_of(rank), rank, layout, block, medium_of, staged, versioned)
    traces = {rank: mine}

    def trace(peer: int) -> _Trace:
        if peer not in traces:
            traces[peer] = _Trace(schedule_of(peer), peer, layout, block, medium_of, staged, versioned)
        return traces[peer]

    rounds: list[RoundProgram] = []
    touched: dict[int, int] = {}
    if staged:
        stage = tuple(
            Action(
                Verb.STAGE,
                Medium.WINDOW,
                rank,
                layout.sizes[chunk],
                mine.place(chunk, 0),
                target=mine.window_place(chunk, 0),
            )
            for chunk in sorted(mine.staged_chunks)
        )
        rounds.append(RoundProgram((), (), (), stage, False))
    for number, steps in enumerate(mine.rounds):
        receives: list[Action] = []
        sends: list[Action] = []
        pushes: list[Action] = []
        rest: list[Action] = []
        leaving = {
            step.chunk for step in steps if step.kind is Kind.SEND and medium_of(rank, step.peer) is Medium.MESSAGE
        }
        for step in steps:
            chunk, size = step.chunk, layout.sizes[step.chunk]
            if step.kind is Kind.SEND:
                medium = medium_of(rank, step.peer)
                if medium is Medium.MESSAGE:
                    sends.append(Action(Verb.SEND, medium, step.peer, size, mine.place(chunk, step.version)))
                elif medium is Medium.DIRECT:
                    if step.push:
                        there = trace(step.peer).match(number, rank, step.index)
                        pushes.append(
                            Action(
                                Verb.PUSH,
                                medium,
                                step.peer,
                                size,
                                mine.place(chunk, step.version),
                                target=trace(step.peer).place(chunk, there.version + 1),
                            )
                        )
                    elif mine.place(chunk, step.version).space is not Space.WINDOW:
                        touched[step.peer] = number
                continue
            if step.kind is Kind.COPY:
                home = Place(Space.OUTPUT, mine.outputs[chunk])
                rest.append(Action(Verb.TAKE, Medium.WINDOW, rank, size, mine.place(chunk, 0), target=home))
                continue
            home = mine.place(chunk, step.version + 1)
            also = mine.second_place(chunk, step.version + 1)
            verb = Verb.REDUCE if step.kind is Kind.REDUCE else Verb.TAKE
            operand = mine.place(chunk, step.version) if verb is Verb.REDUCE else None
            if operand is not None and packed and step.version == 0 and chunk in mine.staged_chunks:
                operand = mine.window_place(chunk, 0)
            finish = mine.finishes(step, trace)
            if step.peer == rank:
                own = (
                    mine.window_place(chunk, 0)
                    if staged and chunk in mine.staged_chunks
                    else mine.place(chunk, step.before)
                )
                rest.append(Action(verb, Medium.WINDOW, rank, size, own, operand, home, also, finish=finish))
                continue
            medium = medium_of(rank, step.peer)
            if medium is Medium.MESSAGE:
                action = Action(
                    verb, medium, step.peer, size, None, operand, home, also, finish=finish, detour=chunk in leaving
                )
                receives.append(action)
                rest.append(action)
                continue
            there = trace(step.peer).match_send(number, rank, step.index)
            if medium is Medium.DIRECT and step.push:
                touched[step.peer] = number
                if mine.read_later(number, chunk):
                    rest.append(Action(Verb.AWAIT, medium, step.peer, size, None, after=number))
                continue
            source = trace(step.peer).place_sent(chunk, there.version)
            after = there.written + 1 if staged else there.written
            rest.append(Action(verb, medium, step.peer, size, source, operand, home, also, after=after, finish=finish))
        rounds.append(
            RoundProgram(
                tuple(receives), tuple(sends), tuple(pushes), tuple(rest), bool(leaving & mine.written_in(number))
            )
        )
    most = sum(action.verb is Verb.REDUCE or action.detour for r in rounds for action in r.receives)
    unstaged = tuple(chunk for chunk in sorted(mine.inputs) if chunk not in mine.staged_chunks)
    return Program(
        tuple(rounds), tuple(sorted(touched.items())), mine.window_elements, bool(mine.window_index), unstaged, most
    )


def window_blocks(
    schedule_of: Callable[[int], Schedule],
    rank: int,
    layout: Layout,
    medium_of: Callable[[int, int], Medium],
    staged: bool,
    versioned: bool,
) -> int:
    """How many blocks a segment keeps in a rank's window; arguments as for `compile_program`."""
    return len(_Trace(schedule_of(rank), rank, layout, 1, medium_of, staged, versioned).window_index)


@dataclass(slots=True)
class _Traced:
    """A step of one chunk with what is known about the value it meets."""

    kind: Kind
    peer: int
    chunk: int
    push: bool
    index: int
    """The step is the index-th send to (or receive from) its peer in its round."""
    version: int
    """The chunk's version that a send passes on, or that a receive replaces or combines."""
    before: int
    """The chunk's version at the start of the round."""
    written: int
    """The round that wrote that version; -1 for version 0."""


@dataclass(slots=True)
class _Trace:
    """One rank's schedule, chunk by chunk, with versions and places."""

    schedule: Schedule
    rank: int
    layout: Layout
    block: int
    medium_of: Callable[[int, int], Medium]
    staged: bool
    versioned: bool
    rounds: list[list[_Traced]] = field(default_factory=list)
    inputs: Mapping[int, int] = field(default_factory=dict)
    outputs: Mapping[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    sent: set[tuple[int, int]] = field(default_factory=set)
    staged_chunks: set[int] = field(default_factory=set)
    window_index: dict[tuple[int, int], int] = field(default_factory=dict)
    sends_by: dict[tuple[int, int, int], _Traced] = field(default_factory=dict)
    receives_by: dict[tuple[int, int, int], _Traced] = field(default_factory=dict)
    sends_of: dict[tuple[int, int], tuple[int, _Traced]] = field(default_factory=dict)
    """Where each version of a chunk is first sent on: the round and the step."""
    last_read: dict[int, int] = field(default_factory=dict)
    """The last round that sends a chunk or combines with it."""
    last_reduction: dict[int, int] = field(default_factory=dict)
    """The version that a chunk's last reduction makes."""

    def __post_init__(self) -> None:
        self.inputs, self.outputs = self.layout.inputs(self.rank), self.layout.outputs(self.rank)
        version: dict[int, int] = {}
        written: dict[int, int] = {}
        for number, steps in enumerate(self.schedule.rounds):
            start, start_written = dict(version), dict(written)
            traced: list[_Traced] = []
            sends: dict[int, int] = {}
            receives: dict[int, int] = {}
            for step in steps:
                count = sends if step.kind is Kind.SEND else receives
                for chunk in range(step.chunk, step.chunk + step.span):
                    index = count.get(step.peer, 0)
                    count[step.peer] = index + 1
                    before = start.get(chunk, 0)
                    if step.kind is Kind.SEND:
                        traced.append(
                            _Traced(
                                step.kind,
                                step.peer,
                                chunk,
                                step.push,
                                index,
                                before,
                                before,
                                start_written.get(chunk, -1),
                            )
                        )
                        if self.medium_of(self.rank, step.peer) is not Medium.MESSAGE:
                            self.sent.add((chunk, before))
                    else:
                        now = version.get(chunk, 0)
                        traced.append(
                            _Traced(
                                step.kind, step.peer, chunk, step.push, index, now, before, start_written.get(chunk, -1)
                            )
                        )
                        if (
                            step.kind is not Kind.COPY
                        ):  # a copy makes no new value: whoever asks later is shown the input
                            version[chunk] = now + 1
                            written[chunk] = number
            self.rounds.append(traced)
            for entry in traced:
                by = self.sends_by if entry.kind is Kind.SEND else self.receives_by
                by[number, entry.peer, entry.index] = entry
                if entry.kind is Kind.SEND:
                    self.sends_of.setdefault((entry.chunk, entry.version), (number, entry))
                if entry.kind is Kind.REDUCE:
                    self.last_reduction[entry.chunk] = entry.version + 1
                if entry.kind in (Kind.SEND, Kind.REDUCE):
                    self.last_read[entry.chunk] = number
        self.last = version
        if self.staged:
            self.staged_chunks = {chunk for chunk, v in self.sent if v == 0}
        self._index_window()

    def _index_window(self) -> None:
        """Give a number to every (chunk, version) that lives in the window; versions share one where that is safe."""
        for steps in self.rounds:
            for step in steps:
                for version in (step.version, step.version + 1) if step.kind is not Kind.SEND else (step.version,):
                    if self._lives_in_window(step.chunk, version):
                        key = (step.chunk, version if self.versioned else 0)
                        self.window_index.setdefault(key, len(self.window_index))
        for chunk in self.staged_chunks:
            self.window_index.setdefault((chunk, 0), len(self.window_index))

    def _lives_in_window(self, chunk: int, version: int) -> bool:
        if version == 0:
            return self.staged and (chunk, 0) in self.sent
        if chunk not in self.outputs:
            return True
        return self.staged and (chunk, version) in self.sent

    @property
    def window_elements(self) -> int:
        return len(self.window_index) * self.block

    def window_place(self, chunk: int, version: int) -> Place:
        return Place(Space.WINDOW, self.window_index[(chunk, version if self.versioned else 0)] * self.block)

    def place(self, chunk: int, version: int) -> Place:
        """Where this rank itself finds or puts a version of a chunk."""
        if version == 0:
            return Place(Space.INPUT, self.inputs[chunk])
        if self._lives_in_window(chunk, version):
            return self.window_place(chunk, version)
        return Place(Space.OUTPUT, self.outputs[chunk])

    def place_sent(self, chunk: int, version: int) -> Place:
        """Where a peer on the same host finds it."""
        return (
            self.window_place(chunk, version) if self._lives_in_window(chunk, version) else self.place(chunk, version)
        )

    def second_place(self, chunk: int, version: int) -> Place | None:
        """The output, for a final version that lives in the window."""
        if version == self.last.get(chunk, 0) and chunk in self.outputs and self._lives_in_window(chunk, version):
            return Place(Space.OUTPUT, self.outputs[chunk])
        return None

    def match(self, number: int, peer: int, index: int) -> _Traced:
        """This rank's index-th receive from ``peer`` in a round."""
        return self.receives_by[number, peer, index]

    def match_send(self, number: int, peer: int, index: int) -> _Traced:
        """This rank's index-th send to ``peer`` in a round."""
        return self.sends_by[number, peer, index]

    def read_later(self, number: int, chunk: int) -> bool:
        """Whether a later round sends the chunk or combines with it."""
        return self.last_read.get(chunk, -1) > number

    def written_in(self, number: int) -> set[int]:
        return {step.chunk for step in self.rounds[number] if step.kind is not Kind.SEND}

    def finishes(self, step: _Traced, trace: Callable[[int], _Trace]) -> bool:
        """Whether this reduction is the last that the chunk's value goes through, here or on a rank it is sent to."""
        version = step.version + 1
        if step.kind is not Kind.REDUCE or version != self.last_reduction[step.chunk]:
            return False
        passed_on = self.sends_of.get((step.chunk, version))
        if passed_on is None:
            return True
        number, send = passed_on
        return trace(send.peer).match(number, self.rank, send.index).kind is not Kind.REDUCE
