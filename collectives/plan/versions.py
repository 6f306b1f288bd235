"""Versions and places: where each value of a chunk lies on its rank.

* The value that a rank starts with is version 0 and lies in its input; each receive of the chunk makes the next
  version. Versions from 1 on lie in the output, or in the window if the chunk is not part of this rank's output.
* With `Medium.WINDOW` peers read nothing but windows: version 0 of the chunks that they read is staged there first, and
  later versions that they read are written there, too.
* A copy makes no version, so that peers go on reading the input.
* With two ranks, a reduced value that is pushed back to the only peer replaces, in that peer's window, the value that
  it was combined with. A rank that overwrites what its peer has last read waits for the other core, line by line
  (measured: up to 10 times as long, if the cores share no cache); this way, the last reader of a line writes it next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from collectives.plan.program import Layout, Medium, Place, Space
from collectives.schedules.schedule import Schedule, StepKind


@dataclass(frozen=True, slots=True)
class ChunkValue:
    """A step of one chunk, and the version of the chunk that it deals with."""

    kind: StepKind
    peer: int
    chunk: int
    push: bool
    index: int
    """The step is the index-th send to its peer in its round, or the index-th receive from it."""
    version: int
    """The version that a send passes on, or that a receive replaces or combines."""
    written: int
    """The round that wrote the chunk's version at the start of the round; -1 for version 0."""
    own_count: int
    """The number of contributions in that version."""
    count: int
    """The number of contributions in what a REDUCE receives."""


class Versions:
    """One rank's schedule, chunk by chunk, with the versions of chunks and their places; arguments as of
    `collectives.plan.lowering.compile_program`.

    Attributes:
        key: sorts ranks into the order in which their values are combined.
        rounds: the steps, each of one chunk.
        staged_chunks: chunks of the input that peers read from the window.
        window_index: the window's block of a (chunk, version); without ``versioned`` the version is always 0.
        returned: every (chunk, version) that this rank writes into its peer's window, in place of what it was combined
            with.
    """

    def __init__(
        self,
        schedule: Schedule,
        layout: Layout,
        block: int,
        medium_of: Callable[[int, int], Medium],
        staged: bool,
        versioned: bool,
    ) -> None:
        self.rank, self.key, self._block = schedule.rank, schedule.key, block
        self._staged, self._versioned = staged, versioned
        self.inputs, self.outputs = layout.inputs(self.rank), layout.outputs(self.rank)
        self.rounds: list[list[ChunkValue]] = []
        self._last: dict[int, int] = {}
        """The last version of each chunk."""
        self._read: set[tuple[int, int]] = set()
        """Every (chunk, version) that peers on the same host read."""
        self._met: dict[tuple[int, int, int, bool], ChunkValue] = {}
        self._sent_on: dict[tuple[int, int], tuple[int, ChunkValue]] = {}
        """The first send of each (chunk, version), and its round."""
        self._last_read: dict[int, int] = {}
        """The last round that sends a chunk or combines with it."""
        self._last_reduction: dict[int, int] = {}
        """The version that a chunk's last reduction makes."""
        self._trace(schedule, medium_of)
        self.returned = self._find_returned(medium_of) if staged and not versioned and schedule.size == 2 else set()
        self._read -= self.returned
        self.staged_chunks = {chunk for chunk, version in self._read if version == 0} if staged else set()
        self.window_index: dict[tuple[int, int], int] = {}
        self._index_window()

    def _trace(self, schedule: Schedule, medium_of: Callable[[int, int], Medium]) -> None:
        written: dict[int, int] = {}
        contributions: dict[int, int] = {}
        version = self._last
        for number, steps in enumerate(schedule.rounds):
            start, start_written = dict(version), dict(written)
            values: list[ChunkValue] = []
            counts: dict[tuple[int, bool], int] = {}
            for step in steps:
                sends = step.kind is StepKind.SEND
                for chunk in range(step.chunk, step.chunk + step.span):
                    index = counts.get((step.peer, sends), 0)
                    counts[step.peer, sends] = index + 1
                    now = (start if sends else version).get(chunk, 0)
                    own = contributions.get(chunk, 1)
                    value = ChunkValue(
                        step.kind,
                        step.peer,
                        chunk,
                        step.push,
                        index,
                        now,
                        start_written.get(chunk, -1),
                        own,
                        step.count,
                    )
                    values.append(value)
                    self._met[number, step.peer, index, sends] = value
                    if sends and medium_of(self.rank, step.peer) is not Medium.MESSAGE:
                        self._read.add((chunk, now))
                    if step.kind in (StepKind.RECEIVE, StepKind.REDUCE):
                        version[chunk], written[chunk] = now + 1, number
                        contributions[chunk] = step.count + (own if step.kind is StepKind.REDUCE else 0)
            self.rounds.append(values)
            for value in values:
                if value.kind is StepKind.SEND:
                    self._sent_on.setdefault((value.chunk, value.version), (number, value))
                if value.kind is StepKind.REDUCE:
                    self._last_reduction[value.chunk] = value.version + 1
                if value.kind in (StepKind.SEND, StepKind.REDUCE):
                    self._last_read[value.chunk] = number

    def _find_returned(self, medium_of: Callable[[int, int], Medium]) -> set[tuple[int, int]]:
        reduced = {
            (value.chunk, value.version + 1)
            for values in self.rounds
            for value in values
            if value.kind is StepKind.REDUCE and medium_of(self.rank, value.peer) is Medium.WINDOW
        }
        return {
            key for key, (_, send) in self._sent_on.items() if send.push and key in reduced and key[0] in self.outputs
        }

    def _index_window(self) -> None:
        """Number every (chunk, version) that lives in the window; versions share a block where that is safe."""
        for value in (value for values in self.rounds for value in values):
            sends = value.kind is StepKind.SEND
            for version in (value.version,) if sends else (value.version, value.version + 1):
                if self._in_window(value.chunk, version):
                    key = (value.chunk, version if self._versioned else 0)
                    self.window_index.setdefault(key, len(self.window_index))
        for chunk in self.staged_chunks:
            self.window_index.setdefault((chunk, 0), len(self.window_index))

    def _in_window(self, chunk: int, version: int) -> bool:
        read = self._staged and (chunk, version) in self._read
        return read or (version > 0 and chunk not in self.outputs)

    @property
    def window_elements(self) -> int:
        """Elements of a window slot that one segment uses."""
        return len(self.window_index) * self._block

    def window_place(self, chunk: int, version: int) -> Place:
        """The place of a version in the window."""
        return Place(Space.WINDOW, self.window_index[chunk, version if self._versioned else 0] * self._block)

    def place(self, chunk: int, version: int) -> Place:
        """Where this rank itself reads or writes a version of a chunk."""
        return self.place_for_peers(chunk, version) if version else Place(Space.INPUT, self.inputs[chunk])

    def place_for_peers(self, chunk: int, version: int) -> Place:
        """Where a peer on the same host reads it."""
        if self._in_window(chunk, version):
            return self.window_place(chunk, version)
        return Place(Space.OUTPUT, self.outputs[chunk]) if version else Place(Space.INPUT, self.inputs[chunk])

    def second_place(self, chunk: int, version: int) -> Place | None:
        """The output, for a final version that lives in the window."""
        final = version == self._last.get(chunk, 0) and chunk in self.outputs
        return Place(Space.OUTPUT, self.outputs[chunk]) if final and self._in_window(chunk, version) else None

    def receive(self, number: int, peer: int, index: int) -> ChunkValue:
        """This rank's index-th receive from ``peer`` in a round."""
        return self._met[number, peer, index, False]

    def send(self, number: int, peer: int, index: int) -> ChunkValue:
        """This rank's index-th send to ``peer`` in a round."""
        return self._met[number, peer, index, True]

    def read_later(self, number: int, chunk: int) -> bool:
        """Whether a later round sends the chunk or combines with it."""
        return self._last_read.get(chunk, -1) > number

    def written_in(self, number: int) -> set[int]:
        """The chunks that a round writes."""
        return {value.chunk for value in self.rounds[number] if value.kind is not StepKind.SEND}

    def finishes(self, reduction: ChunkValue, versions_of: Callable[[int], Versions]) -> bool:
        """Whether the value is reduced no further after this reduction, here or on a rank that it is sent to."""
        version = reduction.version + 1
        if reduction.kind is not StepKind.REDUCE or version != self._last_reduction[reduction.chunk]:
            return False
        number, send = self._sent_on.get((reduction.chunk, version), (0, None))
        return send is None or (
            versions_of(send.peer).receive(number, self.rank, send.index).kind is not StepKind.REDUCE
        )
