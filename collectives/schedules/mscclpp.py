"""Schedules from the execution plans of MSCCL++: JSON files that its DSL writes for a fixed number of GPUs.

A plan has operations of thread blocks on buffers; a schedule has steps over chunks. The plan is executed with symbols:
every place in memory holds "the value that rank q had of chunk c after its v-th change". Whatever changes a chunk on a
rank becomes steps, in the first round in which what it reads is complete; copies to scratch memory become nothing, and
what is read there later is received from where it came. The steps are then proved like those of any other algorithm, so
that nothing depends on this translation.

Read are the operations of `_MOVES`, `_REDUCTIONS` and `_WAITS`; everything else (multimem,
pipelines) is refused by name. Data types, sizes of messages, numbers of threads and the reduction belong to the call.

Source: https://github.com/microsoft/mscclpp, docs/dsl and python/mscclpp/language.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from collectives.schedules.proof.verify import ScheduleError
from collectives.schedules.schedule import Step, StepKind, copy, send

_MOVES = {"put", "pws", "pwsf", "ppkt", "rppkt", "get", "copy", "cpkt", "upkt"}
_REDUCTIONS = {"re", "repkt", "recpkt", "rre", "rres", "res", "respkt", "recspkt"}
_WAITS = {"nop", "signal", "rlxsignal", "wait", "rlxwait", "flush", "barrier", "sem_acquire", "sem_release"}
_PACKETS = {"rppkt", "upkt", "repkt", "recpkt", "respkt", "recspkt"}
"""Operations that wait for what they read."""
_SIGNALS = {"signal", "rlxsignal", "pws", "pwsf"}


@dataclass(frozen=True, slots=True)
class Plan:
    """What `collectives.register_algorithm` takes: ``register_algorithm(plan.collective, plan.name, plan.build,
    sizes=plan.sizes)``."""

    collective: str
    name: str
    sizes: tuple[int, ...]
    rounds: tuple[tuple[tuple[Step, ...], ...], ...]

    def build(self, rank: int, size: int) -> Sequence[Sequence[Step]]:
        """The rounds of a rank."""
        return self.rounds[rank]


def from_mscclpp(source: str | os.PathLike[str]) -> Plan:
    """Read an execution plan of MSCCL++.

    Args:
        source: a path, or the JSON text itself.

    Returns:
        The plan's schedule, named for its file, or as the text says.

    Raises:
        ScheduleError: not such a plan; or it has what the four steps cannot express, which the message names.
        OSError: the file cannot be read.

    Example:
        >>> from_mscclpp('{"name": "x", "collective": "allreduce", "inplace": true, "gpus": []}')
        Traceback (most recent call last):
        ...
        collectives.schedules.proof.verify.ScheduleError: x: a plan of 0 GPUs
    """
    is_text = isinstance(source, str) and source.lstrip().startswith("{")
    text = str(source) if is_text else Path(source).read_text(encoding="utf-8")
    try:
        plan = json.loads(text)
        name = plan["name"] if is_text else Path(source).stem
        return Plan(plan["collective"], name, (len(plan["gpus"]),), _Translation(name, plan).rounds())
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, ScheduleError):
            raise
        raise ScheduleError(f"no execution plan of MSCCL++: {type(error).__name__}: {error}") from error


_Value = tuple[int, int, int]
"""A rank, a chunk, and how often the rank had changed it."""
_Place = tuple[int, str, int]
"""A rank, the type of a buffer (i, o or s), and a chunk, or a place in scratch memory."""


class _Translation:
    def __init__(self, name: str, plan: Mapping[str, Any]) -> None:
        self.name, self.gpus, self.collective = name, plan["gpus"], plan["collective"]
        self.size, self.in_place = len(self.gpus), bool(plan["inplace"])
        if self.size < 2:
            self._refuse(f"a plan of {self.size} GPUs")
        share = None if self.in_place else 1  # in place, a rank's share lies in the whole
        expected = {
            "allgather": (share, self.size),
            "reducescatter": (self.size, share),
            "alltoall": (self.size, self.size),
        }
        for gpu in self.gpus:
            chunks = gpu["input_chunks"], gpu["output_chunks"]
            if any(
                one not in (None, found)
                for one, found in zip(expected.get(self.collective, chunks), chunks, strict=True)
            ):
                self._refuse(f"{chunks[0]} input and {chunks[1]} output chunks; read is one for each pair of ranks")
        self.memory: dict[_Place, _Value] = {}
        self.changes: dict[tuple[int, int], int] = defaultdict(int)
        self.made: dict[_Value, int] = {}
        """The round that made a value, and so replaced the one before it."""
        self.free: dict[tuple[int, int], int] = defaultdict(int)
        """The first round in which nobody reads the value before."""
        self.steps: dict[tuple[int, int], list[Step]] = defaultdict(list)
        self.posted: dict[tuple[Any, ...], int] = defaultdict(int)

    def _refuse(self, why: str) -> NoReturn:
        raise ScheduleError(f"{self.name}: {why}")

    def rounds(self) -> tuple[tuple[tuple[Step, ...], ...], ...]:
        blocks = {(gpu["id"], block["id"]): self._run(gpu, block) for gpu in self.gpus for block in gpu["threadblocks"]}
        while blocks:
            # Every block goes on until it waits; none that waits has anything to wait for if no block goes on.
            moved = False
            for key, block in list(blocks.items()):
                for waits in block:
                    if waits:
                        break
                    moved = True
                else:
                    moved = True
                    del blocks[key]
            if not moved:
                self._refuse(f"thread blocks (GPU, block) {sorted(blocks)} wait for ever")
        self._copy_own()
        last = max((number for _, number in self.steps), default=-1)
        return tuple(tuple(tuple(self.steps[rank, number]) for number in range(last + 1)) for rank in range(self.size))

    def _copy_own(self) -> None:
        """In place, a rank's own share is where it belongs; a schedule has a copy there."""
        last = max((number for _, number in self.steps), default=0)
        for rank in range(self.size):
            chunk = {"allgather": rank, "alltoall": rank * self.size + rank}.get(self.collective)
            if self.in_place and chunk is not None and not self.changes[rank, chunk]:
                self.steps[rank, last].append(copy(rank, chunk))

    def _run(self, gpu: Mapping[str, Any], block: Mapping[str, Any]) -> Iterator[bool]:
        """Execute a thread block; yields whether it waits."""
        rank = gpu["id"]
        for operation in block["ops"]:
            kind = operation["name"]
            if operation.get("tbg_info", {}).get("tb_id"):
                continue  # a block's part of an operation that the first block of its group stands for
            if kind not in _MOVES | _REDUCTIONS | _WAITS:
                self._refuse(f"operation {kind!r} of GPU {rank} has no counterpart among the four steps")
            if kind == "barrier":
                place, count = (rank, "barrier", operation["barrier_id"]), operation["num_threadblocks"]
                arrived = self.posted[place]
                self.posted[place] += 1
                while self.posted[place] < (arrived // count + 1) * count:
                    yield True
            waits = [("semaphore", rank, number) for number in operation.get("semaphore_ids", ())]
            if kind in ("wait", "rlxwait"):
                waits = list(self._channels(gpu, block, operation, arriving=True))
            if kind in ("wait", "rlxwait", "sem_acquire"):
                for key in waits:
                    while not self.posted[key]:
                        yield True
                    self.posted[key] -= 1
            if kind == "sem_release":
                for key in waits:
                    self.posted[key] += 1
            if kind in _MOVES | _REDUCTIONS:
                sources = list(self._places(gpu, block, operation, "src_buff"))
                targets = list(self._places(gpu, block, operation, "dst_buff"))
                while kind in _PACKETS and any(self._value(place) is None for source in sources for place in source):
                    yield True
                if kind in _MOVES:
                    for number, target in enumerate(targets):
                        for source, to in zip(sources[number % len(sources)], target, strict=True):
                            self._move(kind, self._read(kind, source), to)
                else:
                    for each in zip(*sources, *targets, strict=True):
                        self._reduce(kind, rank, each[: len(sources)], each[len(sources) :])
            if kind in _SIGNALS:
                for key in self._channels(gpu, block, operation, arriving=False):
                    self.posted[key] += 1
            yield False

    def _channels(
        self, gpu: Mapping[str, Any], block: Mapping[str, Any], operation: Mapping[str, Any], arriving: bool
    ) -> Iterator[tuple[Any, ...]]:
        """The sender, the receiver and the number of each channel that an operation names."""
        kind, rank = operation["channel_type"], gpu["id"]
        [own] = [each["channel_ids"] for each in block["channels"] if each["channel_type"] == kind]
        [peers] = [each["connected_to"] for each in gpu["channels"] if each["channel_type"] == kind]
        for number in operation["channel_ids"]:
            place = own[number]
            peer, nth = peers[place], peers[:place].count(peers[place])
            yield (kind, peer, rank, nth) if arriving else (kind, rank, peer, nth)

    def _places(
        self, gpu: Mapping[str, Any], block: Mapping[str, Any], operation: Mapping[str, Any], which: str
    ) -> Iterator[list[_Place]]:
        for buffer in operation[which]:
            rank, kind = gpu["id"], buffer.get("type")
            if "buffer_id" in buffer:
                refs = [
                    each["remote_buffer_ids"]
                    for each in block["remote_buffer_refs"]
                    if each["access_channel_type"] == operation["channel_type"]
                ]
                remote = gpu["remote_buffers"][refs[0][buffer["buffer_id"]]]
                rank, kind = remote["rank"], remote["type"]
            numbers = range(buffer["index"], buffer["index"] + buffer["size"])
            yield [(rank, kind, self._chunk(rank, kind, number)) for number in numbers]

    def _chunk(self, rank: int, kind: str, number: int) -> int:
        if kind != "s" and self.collective == "alltoall":
            return rank * self.size + number if kind == "i" else number * self.size + rank
        own = {"allgather": "i", "reducescatter": "o"}.get(self.collective)
        return rank if kind == own else number

    def _value(self, place: _Place) -> _Value | None:
        rank, kind, chunk = place
        if kind != "s" and self.in_place:
            return rank, chunk, self.changes[rank, chunk]
        return self.memory.get(place, (rank, chunk, 0) if kind == "i" else None)

    def _read(self, kind: str, place: _Place) -> _Value:
        value = self._value(place)
        if value is None:
            self._refuse(f"{kind!r} reads place {place[2]} of buffer {place[1]!r} of GPU {place[0]}, never written")
        return value

    def _move(self, kind: str, value: _Value, place: _Place) -> None:
        rank, buffer, chunk = place
        if buffer == "s":
            self.memory[place] = value
        elif value[1] != chunk:
            self._refuse(f"{kind!r} moves chunk {value[1]} of GPU {value[0]} to where chunk {chunk} of GPU {rank} lies")
        elif value[0] != rank:
            self._change(StepKind.RECEIVE, rank, chunk, [value], buffer)
        else:
            if buffer == "o" and not value[2] and not self.in_place and place not in self.memory:
                self.steps[rank, 0].append(copy(rank, chunk))
            self.memory[place] = value

    def _reduce(self, kind: str, rank: int, sources: Sequence[_Place], targets: Sequence[_Place]) -> None:
        values = [self._read(kind, place) for place in sources]
        chunk, own = values[0][1], (rank, values[0][1], self.changes[rank, values[0][1]])
        if own not in values or any(value[1] != chunk for value in values):
            self._refuse(
                f"{kind!r} of GPU {rank} combines {values} (GPU, chunk, change): not one chunk, its own included"
            )
        at_home = [place for place in targets if place[0] == rank and place[1] != "s" and place[2] == chunk]
        if not at_home:
            self._refuse(f"{kind!r} of GPU {rank} puts a sum of chunk {chunk} elsewhere only")
        self._change(StepKind.REDUCE, rank, chunk, [value for value in values if value != own], at_home[0][1])
        for place in targets:
            self._move(kind, (rank, chunk, self.changes[rank, chunk]), place)

    def _change(self, kind: StepKind, rank: int, chunk: int, values: Sequence[_Value], buffer: str) -> None:
        """Rank's chunk becomes the value of a peer, or is combined with those of peers."""
        own = rank, chunk, self.changes[rank, chunk]
        number = max(self.free[rank, chunk], *(self.made.get(value, -1) + 1 for value in (own, *values)))
        for peer, _, change in values:
            replaced = self.made.get((peer, chunk, change + 1), number)
            if peer == rank or replaced < number:
                self._refuse(
                    f"GPU {rank} needs in round {number} a value of chunk {chunk} that GPU {peer} has replaced in "
                    f"round {replaced}; a schedule keeps no earlier values"
                )
            self.steps[peer, number].append(send(rank, chunk))
            self.steps[rank, number].append(Step(kind, peer, chunk))
            self.free[peer, chunk] = max(self.free[peer, chunk], number)
        self.changes[rank, chunk] += 1
        new = rank, chunk, self.changes[rank, chunk]
        self.made[new], self.memory[rank, buffer, chunk] = number, new
