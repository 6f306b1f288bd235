"""Grouped operations as one callback: the gradients of a training step, and the initial broadcast of variables.

    tensors     | conv1 | bn1 | bn1b | conv2 | odd | fc |
    arguments   | bn1 + bn1b, copied into one | conv1 | conv2 | odd | fc |
    results     | bn1 + bn1b, padded | conv1 | conv2 | fc | , | odd |
    tensors     views of the results, without a copy except of the small ones

An argument of a callback costs about 4 us, more than copying a small tensor; a result costs about 8 us, so tensors of
one dtype share one. TensorFlow splits memory without a copy only along rows of 64 bytes: a large tensor whose size is
not a multiple of that, or is unknown until the graph runs, has its own result. The engine reads the arguments and
writes the results in place; only small tensors are copied, and arguments of 256 KiB and less on average, into the
results (`collectives.frontends.joined`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from collectives.base import dtypes
from collectives.base.reduce_op import Op
from collectives.elastic import retry
from collectives.frontends import broadcasts, joined
from collectives.frontends.joined import Shapes
from collectives.tensorflow import graph
from collectives.tensors.host_frameworks import wrap_tensorflow
from collectives.worlds.world import World

if TYPE_CHECKING:
    from collectives.tensorflow.graph_call import GraphCall

_SMALL = 32 << 10
"""Tensors of at most this many bytes are copied together."""
_NO_PARTS = Shapes()
_ROW = 64
"""TensorFlow splits memory without a copy at multiples of this many bytes."""


def allreduce(call: GraphCall, tensors: Sequence[Any]) -> list[Any]:
    """Add the grouped all-reduce of tensors to the graph."""
    # Adasum treats each tensor as one vector, so tensors are not copied together.
    return _packed(tensors, call.op is not Op.ADASUM, _PackedAllreduce, call)


def allreduce_now(call: GraphCall, tensors: Sequence[Any]) -> list[Any]:
    """Run the grouped all-reduce of eager tensors."""
    if any("CPU" not in tensor.device for tensor in tensors):
        return call(*tensors)
    arrays = [np.asarray(tensor) for tensor in tensors]
    by_dtype: dict[Any, list[int]] = {}
    for number, array in enumerate(arrays):
        by_dtype.setdefault(array.dtype, []).append(number)
    results, places = _memory(call.world, arrays, list(by_dtype.values()))

    def parts_of_results() -> list[Any]:
        return [tuple(arrays[number].shape for number in numbers) for numbers in by_dtype.values()]

    _reduce(call, arrays, results, places, [_NO_PARTS] * len(arrays), parts_of_results)
    return [wrap_tensorflow(place.reshape(array.shape)) for place, array in zip(places, arrays, strict=True)]


def broadcast(call: GraphCall, tensors: Sequence[Any]) -> list[Any]:
    """Run the broadcast of tensors, or add it to the graph."""
    return _packed(tensors, True, PackedBroadcast, call)


# ---- in the graph


def _packed(tensors: Sequence[Any], packs: bool, kind: type[_PackedCallback], call: GraphCall) -> list[Any]:
    """Call a callback with tensors, the small ones copied together if ``packs``; returns a result for each tensor."""
    contents = _arguments(tensors, packs)
    inputs: list[Any] = []
    shapes: list[Shapes] = []
    groups: list[list[int]] = []
    in_rows: dict[Any, list[int]] = {}
    for at, numbers in enumerate(contents):
        members = [tensors[number] for number in numbers]
        first, is_known = members[0], members[0].shape.is_fully_defined()
        inputs.append(first if len(members) == 1 else tf.concat([tf.reshape(each, [-1]) for each in members], 0))
        shapes.append(Shapes(tuple(each.shape.as_list()) for each in members) if is_known else _NO_PARTS)
        if len(members) == 1 and not _fills_rows(first):
            groups.append([at])
            continue
        if first.dtype not in in_rows:
            in_rows[first.dtype] = []
            groups.append(in_rows[first.dtype])
        in_rows[first.dtype].append(at)

    def make(name: str | None) -> _PackedCallback:
        return kind(replace(call, name=name), tuple(contents), tuple(shapes), tuple(map(tuple, groups)))

    if tf.executing_eagerly():
        outputs = [wrap_tensorflow(array) for array in make(call.name)(*map(np.asarray, inputs))]
    else:
        types = [inputs[members[0]].dtype for members in groups]
        outputs = graph.call(
            make, call.collective, inputs, types, [None] * len(types), call.name, call.ignore_name_scope
        )
    results = list(tensors)
    for output, arguments in zip(outputs, groups, strict=True):
        for at, values in zip(arguments, _pieces(output, [inputs[at] for at in arguments]), strict=True):
            pieces = [values] if len(contents[at]) == 1 else _apart(values, shapes[at])
            for number, piece in zip(contents[at], pieces, strict=True):
                results[number] = _shaped(piece, tensors[number])
    return results


def _arguments(tensors: Sequence[Any], packs: bool) -> list[tuple[int, ...]]:
    """The positions of the tensors in each argument, dtype by dtype; several small tensors are one argument."""
    arguments: list[tuple[int, ...]] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        numbers = [number for number, tensor in enumerate(tensors) if tensor.dtype == dtype]
        small = {number for number in numbers if packs and _is_small(tensors[number])}
        if len(small) > 1:
            arguments.append(tuple(sorted(small)))
            numbers = [number for number in numbers if number not in small]
        arguments += [(number,) for number in numbers]
    return arguments


def _is_small(tensor: Any) -> bool:
    return bool(tensor.shape.is_fully_defined() and tensor.shape.num_elements() * tensor.dtype.size <= _SMALL)


def _fills_rows(tensor: Any) -> bool:
    return bool(tensor.shape.is_fully_defined() and tensor.shape.num_elements() * tensor.dtype.size % _ROW == 0)


def _pieces(output: Any, inputs: Sequence[Any]) -> list[Any]:
    """Split a result of the callback into one piece for each argument that it belongs to."""
    if len(inputs) == 1:
        return [output]
    rows = [-(-tensor.shape.num_elements() * tensor.dtype.size // _ROW) for tensor in inputs]
    return list(tf.split(tf.reshape(output, [sum(rows), _ROW // output.dtype.size]), rows))


def _apart(values: Any, shapes: Shapes) -> list[Any]:
    """Split an array into the tensors that were copied into it; its last row may be padded."""
    *pieces, _ = tf.split(tf.reshape(values, [-1]), [*map(math.prod, shapes), -1])
    return pieces


def _shaped(values: Any, like: Any) -> Any:
    if like.shape.is_fully_defined():
        return tf.reshape(values, like.shape)
    return tf.ensure_shape(tf.reshape(values, tf.shape(like)), like.shape)


# ---- execution


def _memory(world: World, arrays: Sequence[Any], groups: Sequence[Sequence[int]]) -> tuple[list[Any], list[Any]]:
    """Allocate a result for each group of arrays, and for each array its place in one, 1-D and beginning at a row."""
    results: list[Any] = []
    places = list(arrays)
    for members in groups:
        dtype = arrays[members[0]].dtype
        if len(members) == 1:
            results.append(world.memory(arrays[members[0]].size, dtype))
            places[members[0]] = results[-1]
            continue
        unit = _ROW // dtype.itemsize
        ends = list(accumulate(-(-arrays[number].size // unit) * unit for number in members))
        results.append(world.memory(ends[-1], dtype))
        for number, start in zip(members, [0, *ends], strict=False):
            places[number] = results[-1][start : start + arrays[number].size]
    return results, places


def _reduce(
    call: GraphCall,
    arrays: Sequence[Any],
    results: Sequence[Any],
    places: Sequence[Any],
    parts: Sequence[Shapes],
    parts_of_results: Callable[[], Sequence[Any]],
) -> None:
    """All-reduce arrays into their places; ``parts`` are the shapes of the tensors that an array consists of."""
    how = call.reduce_options()

    def reduce(world: World) -> None:
        if len(arrays) == 1:
            world.allreduce(arrays[0], out=places[0], shapes=parts[0], **how)
        elif joined.pays(arrays, call.op, call.compression):
            joined.allreduce(world, arrays, places, results, parts_of_results(), **how)
        else:
            world.grouped_allreduce(arrays, out=places, shapes=parts, **how)

    steps = retry.steps(call.process_set, call.op, call.prescale * call.postscale)
    if steps is None or call.name is None:
        reduce(call.world)
    else:
        steps.reduce(call.name, reduce)


@dataclass(frozen=True)
class _PackedCallback:
    """A callback of a graph.

    Attributes:
        call: what it runs.
        contents: for each argument the positions of its tensors among those that were passed.
        shapes: for each argument the shapes of its tensors; empty if it is a single tensor whose shape is unknown until
            the graph runs.
        groups: for each result the arguments that belong to it.
    """

    call: GraphCall
    contents: tuple[tuple[int, ...], ...]
    shapes: tuple[Shapes, ...]
    groups: tuple[tuple[int, ...], ...]

    def __call__(self, *arrays: Any) -> list[Any]:
        raise NotImplementedError


@dataclass(frozen=True)
class _PackedAllreduce(_PackedCallback):
    _cached_parts: list[Shapes] = field(default_factory=list, init=False, compare=False)
    """For each result the shapes of all tensors in it, unless one is unknown until the graph runs."""

    def __call__(self, *arrays: Any) -> list[Any]:
        results, places = _memory(self.call.world, arrays, self.groups)
        parts = [
            shapes if len(numbers) > 1 else _NO_PARTS
            for numbers, shapes in zip(self.contents, self.shapes, strict=True)
        ]
        _reduce(self.call, arrays, results, places, parts, lambda: self._parts_of_results(arrays))
        return results

    def _parts_of_results(self, arrays: Sequence[Any]) -> list[Shapes]:
        if self._cached_parts:
            return self._cached_parts
        parts = [
            Shapes(shape for at in arguments for shape in self.shapes[at] or (arrays[at].shape,))
            for arguments in self.groups
        ]
        if all(self.shapes):
            self._cached_parts[:] = parts
        return parts


class PackedBroadcast(_PackedCallback):
    """The callback of a broadcast of variables, whose dtypes and shapes the ranks compare first."""

    def __call__(self, *arrays: Any) -> list[Any]:
        call = self.call
        label = call.name or "broadcast_variables"

        def prepare() -> tuple[tuple[list[Any], list[Any]], dict[str, str]]:
            described = {}
            for array, numbers, shapes in zip(arrays, self.contents, self.shapes, strict=True):
                for number, shape in zip(numbers, shapes or (array.shape,), strict=True):
                    described[f"variable {number}"] = f"{dtypes.name(array.dtype)} of shape {shape}"
            return _memory(call.world, arrays, self.groups), described

        world, root, (results, places) = broadcasts.agreed_root(label, call.root, call.process_set, prepare)
        if world.rank == root:
            for array, place in zip(arrays, places, strict=True):
                np.copyto(place, array.reshape(-1))
        tensors = {str(number): place for number, place in enumerate(places)}
        broadcasts.broadcast_in_place(world, label, root, tensors, broadcasts.ArrayMemory())
        return results
