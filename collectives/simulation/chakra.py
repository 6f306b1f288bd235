"""Schedules as Chakra execution traces, one file per rank, for simulators that read these.

A step that sends or receives is a node; the nodes of a round depend on all of the round before. Copies and reductions
are computation nodes, which follow the receive that brings their operand.

The format: mlcommons/chakra, schema/protobuf/et_def.proto, version 0.0.4 of the metadata; messages that follow each
other, each preceded by its length. A message of it has a few fields here, written by the rules of protocol buffers'
wire format, so that nobody needs the package to export; the tests read the files with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from collectives.schedules.schedule import Schedule, Step, StepKind

_COMPUTE, _SEND, _RECEIVE = 4, 5, 6
"""Of enum NodeType."""
_VARINT, _DELIMITED = 0, 2
"""Of the wire format."""
_METADATA_VERSION, _METADATA_ATTRIBUTE, _ATTRIBUTE = 1, 2, 10
_ID, _NAME, _TYPE, _DATA_DEPENDENCIES = 1, 2, 3, 5
_ATTRIBUTE_NAME, _INT32, _INT64, _UINT64, _BOOL, _STRING = 1, 7, 9, 13, 27, 29


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _field(number: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3 | _VARINT) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | _DELIMITED) + _varint(len(data)) + data


def _attribute(of: int, name: str, kind: int, value: int | str) -> bytes:
    return _field(of, _field(_ATTRIBUTE_NAME, name) + _field(kind, value))


def _node(number: int, name: str, kind: int, dependencies: Iterable[int], attributes: Iterable[bytes]) -> bytes:
    needed = b"".join(map(_varint, dependencies))
    packed = _field(_DATA_DEPENDENCIES, needed) if needed else b""
    identity = _field(_ID, number) if number else b""  # the format leaves out zeros
    node = identity + _field(_NAME, name) + _field(_TYPE, kind) + packed + b"".join(attributes)
    return _varint(len(node)) + node


def trace(schedule: Schedule, sizes: Sequence[int]) -> bytes:
    """One rank's trace.

    Args:
        sizes: bytes of each chunk.
    """
    metadata = _field(_METADATA_VERSION, "0.0.4") + _attribute(
        _METADATA_ATTRIBUTE, "schema", _STRING, f"{schedule.collective}, {schedule.algorithm}, {schedule.size} ranks"
    )
    nodes = [_varint(len(metadata)) + metadata]
    number, before = 0, list[int]()
    for steps in schedule.rounds:
        current = []
        for step in steps:
            for name, kind, attributes in _actions(
                schedule.rank, step, sum(sizes[step.chunk : step.chunk + step.span])
            ):
                # What is done with a received chunk follows its receive.
                follows = kind == _COMPUTE and step.kind is StepKind.REDUCE and step.peer != schedule.rank
                needed = [number - 1] if follows else before
                nodes.append(_node(number, name, kind, needed, attributes))
                current.append(number)
                number += 1
        before = current or before
    return b"".join(nodes)


def _actions(rank: int, step: Step, nbytes: int) -> list[tuple[str, int, list[bytes]]]:
    """The nodes of a step: name, type, attributes."""
    on_cpu = _attribute(_ATTRIBUTE, "is_cpu_op", _BOOL, 0)
    compute = [
        on_cpu,
        _attribute(_ATTRIBUTE, "num_ops", _INT64, nbytes // 4 if step.kind is StepKind.REDUCE else 0),
        _attribute(_ATTRIBUTE, "tensor_size", _UINT64, nbytes),
    ]
    if step.peer == rank:
        return [(str(step), _COMPUTE, compute)]
    sends = step.kind is StepKind.SEND
    source, target = (rank, step.peer) if sends else (step.peer, rank)
    message = [
        on_cpu,
        _attribute(_ATTRIBUTE, "comm_src", _INT32, source),
        _attribute(_ATTRIBUTE, "comm_dst", _INT32, target),
        _attribute(_ATTRIBUTE, "comm_tag", _INT32, step.chunk),
        _attribute(_ATTRIBUTE, "comm_size", _INT64, nbytes),
    ]
    nodes = [(str(step), _SEND if sends else _RECEIVE, message)]
    return [*nodes, ("reduce", _COMPUTE, compute)] if step.kind is StepKind.REDUCE else nodes


def write(schedules: Iterable[Schedule], sizes: Sequence[int], folder: Path) -> list[Path]:
    """Write ``ALGORITHM.RANK.et`` for each rank; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for schedule in schedules:
        files.append(folder / f"{schedule.algorithm}.{schedule.rank}.et")
        files[-1].write_bytes(trace(schedule, sizes))
    return files
