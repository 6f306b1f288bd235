"""Many tensors in one callback: what a step of training does with its gradients, and its start with its variables.

    tensors     | conv1 | bn1 | bn1b | conv2 | odd | fc |
    arguments   | bn1 + bn1b, copied into one | conv1 | conv2 | odd | fc |     a callback's argument costs about 4 us, copying little less
    results     | bn1 + bn1b, padded | conv1 | conv2 | fc | , | odd |          one for each dtype: a callback's result costs about 8 us
    tensors     views of the result, without a copy, but for the small ones

TensorFlow splits memory without a copy only along rows of 64 bytes. A large tensor that is no multiple of that, or
whose size is known only when the graph runs, has a result of its own. The engine reads the arguments and writes the
results; nothing but small tensors is copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from collectives.base.errors import CollectivesError
from collectives.base.reduce_op import Op
from collectives.engine import arguments
from collectives.frontends import agreement
from collectives.runtime import root_in
from collectives.tensorflow import graph
from collectives.tensors.host_frameworks import wrap_tensorflow

if TYPE_CHECKING:
    from collectives.tensorflow.graph_call import GraphCall

Shapes = tuple[tuple[int, ...], ...]

_SMALL = 32 << 10
"""The most bytes of a tensor that is copied together with others."""
_ROW = 64
"""Bytes at whose multiples TensorFlow takes memory apart without a copy."""


@dataclass(frozen=True)
class PackedArgument:
    """What an argument of a callback is.

    Attributes:
        numbers: the places, among the tensors that were passed, of those in it.
        shapes: of these, where several were copied into one; empty: it is a tensor itself.
        in_rows: whether its result shares an array with others of its dtype.
    """

    numbers: tuple[int, ...]
    shapes: Shapes
    in_rows: bool


def allreduce(call: GraphCall, tensors: Sequence[Any]) -> list[Any]:
    """Put the all-reduce of a group of tensors into the graph."""
    # Adasum is about each tensor as a whole.
    return _through(tensors, call.op is not Op.ADASUM, _PackedAllreduce, call)


def allreduce_now(call: GraphCall, tensors: Sequence[Any]) -> list[Any]:
    """Carry out the all-reduce of a group of tensors."""
    if any("CPU" not in tensor.device for tensor in tensors):
        return call(*tensors)
    arrays = [np.asarray(tensor) for tensor in tensors]
    by_dtype: dict[Any, list[int]] = {}
    for number, array in enumerate(arrays):
        by_dtype.setdefault(array.dtype, []).append(number)
    places = list(arrays)
    world = call.world
    for dtype, numbers in by_dtype.items():
        unit = _ROW // dtype.itemsize
        ends = list(accumulate(-(-arrays[number].size // unit) * unit for number in numbers))
        whole = world.memory(ends[-1], dtype)
        for number, start in zip(numbers, [0, *ends], strict=False):
            array = arrays[number]
            places[number] = whole[start : start + array.size].reshape(array.shape)
    how = {"compression": call.compression, **call.reduce_options()}
    if len(arrays) == 1:
        world.allreduce(arrays[0], out=places[0], **how)
    else:
        world.grouped_allreduce(arrays, out=places, **how)
    return [wrap_tensorflow(place) for place in places]


def broadcast(call: GraphCall, tensors: Sequence[Any]) -> list[Any]:
    """Carry out the broadcast of a group of tensors, or put it into the graph."""
    return _through(tensors, True, PackedBroadcast, call)


# ---- in the graph
# ----------------------------------------------------------------------------------------------------------


def _through(tensors: Sequence[Any], packs: bool, kind: type[_PackedCallback], call: GraphCall) -> list[Any]:
    """The results of a callback that gets tensors, some of them copied together."""
    given: list[Any] = []
    parts: list[PackedArgument] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        numbers = [number for number, tensor in enumerate(tensors) if tensor.dtype == dtype]
        small = [number for number in numbers if packs and _is_small(tensors[number])]
        small = small if len(small) > 1 else []
        large = sorted({*numbers} - {*small})
        split = {number for number in large if _fills_rows(tensors[number])}
        rows = len(split) + bool(small) > 1
        if small:
            given.append(tf.concat([tf.reshape(tensors[number], [-1]) for number in small], 0))
            parts.append(
                PackedArgument(tuple(small), tuple(tuple(tensors[number].shape.as_list()) for number in small), rows)
            )
        for number in large:
            given.append(tensors[number])
            parts.append(PackedArgument((number,), (), rows and number in split))

    def make(name: str | None) -> _PackedCallback:
        return _known(kind(replace(call, name=name), tuple(parts)))

    if tf.executing_eagerly():
        found = [wrap_tensorflow(array) for array in make(call.name)(*map(np.asarray, given))]
    else:
        types = [tensor.dtype for tensor in _outputs(given, parts)]
        found = graph.call(make, call.collective, given, types, [None] * len(types), call.name, call.ignore_name_scope)
    results = list(tensors)
    for part, values in zip(parts, _pieces(found, given, parts), strict=True):
        pieces = [values] if len(part.numbers) == 1 else _apart(values, part.shapes)
        for number, piece in zip(part.numbers, pieces, strict=True):
            results[number] = _shaped(piece, tensors[number])
    return results


def _is_small(tensor: Any) -> bool:
    return bool(tensor.shape.is_fully_defined() and tensor.shape.num_elements() * tensor.dtype.size <= _SMALL)


def _fills_rows(tensor: Any) -> bool:
    return bool(tensor.shape.is_fully_defined() and tensor.shape.num_elements() * tensor.dtype.size % _ROW == 0)


def _outputs(given: Sequence[Any], parts: Sequence[PackedArgument]) -> list[Any]:
    """For each result of the callback the first argument that it is for: one for all that share rows, in the place of
    their first."""
    seen: set[Any] = set()
    outputs = []
    for tensor, part in zip(given, parts, strict=True):
        if not part.in_rows or tensor.dtype not in seen:
            outputs.append(tensor)
        if part.in_rows:
            seen.add(tensor.dtype)
    return outputs


def _pieces(found: Sequence[Any], given: Sequence[Any], parts: Sequence[PackedArgument]) -> list[Any]:
    """What belongs to each argument, out of the callback's results."""
    rest = iter(found)
    shared: dict[Any, Any] = {}
    pieces = []
    for tensor, part in zip(given, parts, strict=True):
        if not part.in_rows:
            pieces.append(next(rest))
            continue
        if tensor.dtype not in shared:
            counts = [
                x.shape.num_elements()
                for x, other in zip(given, parts, strict=True)
                if other.in_rows and x.dtype == tensor.dtype
            ]
            lines = [_rows(count, tensor.dtype.size) for count in counts]
            whole = tf.reshape(next(rest), [sum(lines), _ROW // tensor.dtype.size])
            shared[tensor.dtype] = iter(tf.split(whole, lines))
        pieces.append(next(shared[tensor.dtype]))
    return pieces


def _apart(values: Any, shapes: Shapes) -> list[Any]:
    """What was copied into one array, and maybe fills its last row only in part."""
    counts = [math.prod(shape) for shape in shapes]
    values = tf.reshape(values, [-1])
    padding = [-1] if values.shape[0] is None or values.shape[0] > sum(counts) else []
    return list(tf.split(values, counts + padding)[: len(counts)])


def _shaped(values: Any, like: Any) -> Any:
    if like.shape.is_fully_defined():
        return tf.reshape(values, like.shape)
    return tf.ensure_shape(tf.reshape(values, tf.shape(like)), like.shape)


def _rows(count: int, itemsize: int) -> int:
    """How many rows so many elements take up."""
    return -(-count * itemsize // _ROW)


# ---- when the graph runs
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PackedCallback:
    """A callback: what it carries out, and what its arguments are."""

    call: GraphCall
    parts: tuple[PackedArgument, ...]

    def __call__(self, *arrays: Any) -> list[Any]:
        raise NotImplementedError

    def _memory(self, arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Memory for the results, and each argument's place in it."""
        memory = self.call.world.memory
        results, places = [], []
        begun: dict[Any, int] = {}
        for number, (array, part) in enumerate(zip(arrays, self.parts, strict=True)):
            count, dtype = array.size, array.dtype
            if not part.in_rows:
                results.append(memory(count, dtype))
                places.append(results[-1])
                continue
            unit = _ROW // dtype.itemsize
            if dtype not in begun:
                begun[dtype] = 0
                alike = zip(arrays[number:], self.parts[number:], strict=True)
                rows = sum(
                    _rows(other.size, dtype.itemsize) for other, of in alike if of.in_rows and other.dtype == dtype
                )
                shared = memory(rows * unit, dtype)
                results.append(shared)
            places.append(shared[begun[dtype] : begun[dtype] + count])
            begun[dtype] += _rows(count, dtype.itemsize) * unit
        return results, places


class _PackedAllreduce(_PackedCallback):
    def __call__(self, *arrays: Any) -> list[Any]:
        call = self.call
        results, places = self._memory(arrays)
        how = {"compression": call.compression, **call.reduce_options()}
        if len(arrays) == 1 and not self.parts[0].shapes:
            call.world.allreduce(arrays[0], out=places[0], **how)
        else:
            call.world.grouped_allreduce(arrays, out=places, parts=[part.shapes for part in self.parts], **how)
        return results


class PackedBroadcast(_PackedCallback):
    """The callback of a broadcast of variables; the ranks first show each other what they have."""

    def __call__(self, *arrays: Any) -> list[Any]:
        call, world = self.call, self.call.world
        label = call.name or "broadcast_variables"
        root = root_in(call.process_set, call.root, label)
        try:
            root = arguments.root(root, world.size)
        except CollectivesError as error:
            raise world.refused(error, label) from None
        layout = {"root_rank": f"rank {call.root}"}
        for array, part in zip(arrays, self.parts, strict=True):
            for number, shape in zip(part.numbers, part.shapes or (array.shape,), strict=True):
                layout[f"variable {number}"] = f"{array.dtype} of shape {shape}"
        agreement.agree(world, label, layout)
        names = [f"{label}.{number}" for number in range(len(arrays))]
        handles = []
        with world.composed(names) as begin:
            results, places = self._memory(arrays)
            for name, array, place in zip(names, arrays, places, strict=True):
                if world.rank == root:
                    np.copyto(place, array.reshape(-1))
                handles.append(world.broadcast_async_(place, root, name=begin(name)))
        for handle in handles:
            handle.wait()
        return results


_callbacks: dict[_PackedCallback, _PackedCallback] = {}
"""For as long as the process lives, as TensorFlow keeps its callbacks; one for each name, way and layout."""


def _known(callback: _PackedCallback) -> _PackedCallback:
    """The first of all equal callbacks."""
    return _callbacks.setdefault(callback, callback)
