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
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from collectives.base import dtypes
from collectives.base.reduce_op import Op
from collectives.frontends import broadcasts, joined
from collectives.frontends.joined import Shapes
from collectives.tensorflow import graph
from collectives.tensors.host_frameworks import wrap_tensorflow

if TYPE_CHECKING:
    from collectives.tensorflow.graph_call import GraphCall

_SMALL = 32 << 10
"""Tensors of at most this many bytes are copied together."""
_NO_PARTS = Shapes()
_ROW = 64
"""TensorFlow splits memory without a copy at multiples of this many bytes."""


@dataclass(frozen=True)
class PackedArgument:
    """The contents of one argument of a callback.

    Attributes:
        numbers: the positions of its tensors among those that were passed.
        shapes: their shapes; empty if the argument is a single tensor whose shape is unknown until the graph runs.
        in_rows: whether its result shares an array with others of its dtype.
    """

    numbers: tuple[int, ...]
    shapes: Shapes
    in_rows: bool

    @property
    def parts(self) -> Shapes:
        """The shapes of the tensors, if several were copied into one."""
        return self.shapes if len(self.numbers) > 1 else _NO_PARTS


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
    places, wholes = list(arrays), []
    world = call.world
    for dtype, numbers in by_dtype.items():
        unit = _ROW // dtype.itemsize
        ends = list(accumulate(-(-arrays[number].size // unit) * unit for number in numbers))
        whole = world.memory(ends[-1], dtype)
        wholes.append(whole)
        for number, start in zip(numbers, [0, *ends], strict=False):
            array = arrays[number]
            places[number] = whole[start : start + array.size].reshape(array.shape)
    how = call.reduce_options()
    if call.compression is not None:
        how["compression"] = call.compression
    if len(arrays) == 1:
        world.allreduce(arrays[0], out=places[0], **how)
    elif joined.pays(arrays, call.op, call.compression):
        shapes = [tuple(arrays[number].shape for number in numbers) for numbers in by_dtype.values()]
        flat = [place.reshape(-1) for place in places]
        joined.allreduce(world, arrays, flat, wholes, shapes, **how)
    else:
        world.grouped_allreduce(arrays, out=places, **how)
    return [wrap_tensorflow(place) for place in places]


def broadcast(call: GraphCall, tensors: Sequence[Any]) -> list[Any]:
    """Run the broadcast of tensors, or add it to the graph."""
    return _packed(tensors, True, PackedBroadcast, call)


# ---- in the graph


def _packed(tensors: Sequence[Any], packs: bool, kind: type[_PackedCallback], call: GraphCall) -> list[Any]:
    """Call a callback with tensors, the small ones copied together if ``packs``; returns a result for each tensor."""
    inputs: list[Any] = []
    parts: list[PackedArgument] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        numbers = [number for number, tensor in enumerate(tensors) if tensor.dtype == dtype]
        small = [number for number in numbers if packs and _is_small(tensors[number])]
        small = small if len(small) > 1 else []
        large = sorted({*numbers} - {*small})
        split = {number for number in large if _fills_rows(tensors[number])}
        rows = len(split) + bool(small) > 1
        if small:
            inputs.append(tf.concat([tf.reshape(tensors[number], [-1]) for number in small], 0))
            parts.append(
                PackedArgument(tuple(small), Shapes(tuple(tensors[number].shape.as_list()) for number in small), rows)
            )
        for number in large:
            inputs.append(tensors[number])
            shape = tensors[number].shape
            shapes = Shapes([tuple(shape.as_list())] if shape.is_fully_defined() else [])
            parts.append(PackedArgument((number,), shapes, rows and number in split))

    def make(name: str | None) -> _PackedCallback:
        return _interned(kind(replace(call, name=name), tuple(parts)))

    if tf.executing_eagerly():
        outputs = [wrap_tensorflow(array) for array in make(call.name)(*map(np.asarray, inputs))]
    else:
        types = [tensor.dtype for tensor in _outputs(inputs, parts)]
        outputs = graph.call(
            make, call.collective, inputs, types, [None] * len(types), call.name, call.ignore_name_scope
        )
    results = list(tensors)
    for part, values in zip(parts, _pieces(outputs, inputs, parts), strict=True):
        pieces = [values] if len(part.numbers) == 1 else _apart(values, part.shapes)
        for number, piece in zip(part.numbers, pieces, strict=True):
            results[number] = _shaped(piece, tensors[number])
    return results


def _is_small(tensor: Any) -> bool:
    return bool(tensor.shape.is_fully_defined() and tensor.shape.num_elements() * tensor.dtype.size <= _SMALL)


def _fills_rows(tensor: Any) -> bool:
    return bool(tensor.shape.is_fully_defined() and tensor.shape.num_elements() * tensor.dtype.size % _ROW == 0)


def _outputs(inputs: Sequence[Any], parts: Sequence[PackedArgument]) -> list[Any]:
    """For each result of the callback the argument whose result it is, or the first of those that share it."""
    seen: set[Any] = set()
    outputs = []
    for tensor, part in zip(inputs, parts, strict=True):
        if not part.in_rows or tensor.dtype not in seen:
            outputs.append(tensor)
        if part.in_rows:
            seen.add(tensor.dtype)
    return outputs


def _pieces(outputs: Sequence[Any], inputs: Sequence[Any], parts: Sequence[PackedArgument]) -> list[Any]:
    """Split the callback's results into one piece for each argument."""
    rest = iter(outputs)
    shared: dict[Any, Any] = {}
    pieces = []
    for tensor, part in zip(inputs, parts, strict=True):
        if not part.in_rows:
            pieces.append(next(rest))
            continue
        if tensor.dtype not in shared:
            counts = [
                x.shape.num_elements()
                for x, other in zip(inputs, parts, strict=True)
                if other.in_rows and x.dtype == tensor.dtype
            ]
            lines = [_rows(count, tensor.dtype.size) for count in counts]
            whole = tf.reshape(next(rest), [sum(lines), _ROW // tensor.dtype.size])
            shared[tensor.dtype] = iter(tf.split(whole, lines))
        pieces.append(next(shared[tensor.dtype]))
    return pieces


def _apart(values: Any, shapes: Shapes) -> list[Any]:
    """Split an array into the tensors that were copied into it; its last row may be padded."""
    counts = [math.prod(shape) for shape in shapes]
    values = tf.reshape(values, [-1])
    padding = [-1] if values.shape[0] is None or values.shape[0] > sum(counts) else []
    return list(tf.split(values, counts + padding)[: len(counts)])


def _shaped(values: Any, like: Any) -> Any:
    if like.shape.is_fully_defined():
        return tf.reshape(values, like.shape)
    return tf.ensure_shape(tf.reshape(values, tf.shape(like)), like.shape)


def _rows(count: int, itemsize: int) -> int:
    """The number of rows that ``count`` elements occupy."""
    return -(-count * itemsize // _ROW)


# ---- when the graph runs


@dataclass(frozen=True)
class _PackedCallback:
    """A callback: the call that it runs, and the contents of its arguments."""

    call: GraphCall
    arguments: tuple[PackedArgument, ...]
    _known: list[Shapes] = field(default_factory=list, init=False, compare=False)
    """What `_parts_of_results` returns, if no shape is unknown until the graph runs."""

    def __call__(self, *arrays: Any) -> list[Any]:
        raise NotImplementedError

    def _memory(self, arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Allocate the results, and the part of them that belongs to each argument."""
        memory = self.call.world.memory
        results, places = [], []
        begun: dict[Any, int] = {}
        for number, (array, part) in enumerate(zip(arrays, self.arguments, strict=True)):
            count, dtype = array.size, array.dtype
            if not part.in_rows:
                results.append(memory(count, dtype))
                places.append(results[-1])
                continue
            unit = _ROW // dtype.itemsize
            if dtype not in begun:
                begun[dtype] = 0
                alike = zip(arrays[number:], self.arguments[number:], strict=True)
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
        how = call.reduce_options()
        if call.compression is not None:
            how["compression"] = call.compression
        parts = [argument.parts for argument in self.arguments]
        if len(arrays) == 1:
            call.world.allreduce(arrays[0], out=places[0], parts=parts[0], **how)
        elif joined.pays(arrays, call.op, call.compression):
            joined.allreduce(call.world, arrays, places, results, self._parts_of_results(arrays), **how)
        else:
            call.world.grouped_allreduce(arrays, out=places, parts=parts, **how)
        return results

    def _parts_of_results(self, arrays: Sequence[Any]) -> list[Shapes]:
        """For each result the shapes of all tensors in it."""
        if self._known:
            return self._known
        per_result: list[list[tuple[int, ...]]] = []
        shared: dict[Any, list[tuple[int, ...]]] = {}
        for array, argument in zip(arrays, self.arguments, strict=True):
            if argument.in_rows and array.dtype in shared:
                shared[array.dtype].extend(argument.shapes)
                continue
            per_result.append(list(argument.shapes or (array.shape,)))
            if argument.in_rows:
                shared[array.dtype] = per_result[-1]
        parts = [Shapes(shapes) for shapes in per_result]
        if all(argument.shapes for argument in self.arguments):
            self._known[:] = parts
        return parts


class PackedBroadcast(_PackedCallback):
    """The callback of a broadcast of variables, whose dtypes and shapes the ranks compare first."""

    def __call__(self, *arrays: Any) -> list[Any]:
        call = self.call
        label = call.name or "broadcast_variables"

        def prepare() -> tuple[tuple[list[Any], list[Any]], dict[str, str]]:
            described = {}
            for array, argument in zip(arrays, self.arguments, strict=True):
                for number, shape in zip(argument.numbers, argument.shapes or (array.shape,), strict=True):
                    described[f"variable {number}"] = f"{dtypes.name(array.dtype)} of shape {shape}"
            return self._memory(arrays), described

        world, root, (results, places) = broadcasts.agreed_root(label, call.root, call.process_set, prepare)
        if world.rank == root:
            for array, place in zip(arrays, places, strict=True):
                np.copyto(place, array.reshape(-1))
        tensors = {str(number): place for number, place in enumerate(places)}
        broadcasts.broadcast_in_place(world, label, root, tensors, broadcasts.ArrayMemory())
        return results


_callbacks: dict[_PackedCallback, _PackedCallback] = {}
"""Interned callbacks, never evicted: TensorFlow retains its callbacks. One for each call and layout."""


def _interned(callback: _PackedCallback) -> _PackedCallback:
    """One object for all equal callbacks."""
    return _callbacks.setdefault(callback, callback)
