"""One collective call as a value, and its execution: eagerly, or as a callback in a graph.

Calls compare by value, so a function that is traced again uses the callback that TensorFlow already has. The world is
looked up when the call runs: a graph remains valid after `collectives.shutdown` and the next `collectives.init`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from collectives.base import dtypes
from collectives.base.errors import InvalidTypeError
from collectives.base.reduce_op import Op
from collectives.schedules import partition
from collectives.tensorflow import graph, packed_callbacks, sparse_rows
from collectives.tensorflow.errors import raises_tensorflow
from collectives.tensors import detection
from collectives.worlds.runtime import root_in, world_of
from collectives.worlds.world import World


@dataclass(frozen=True)
class GraphCall:
    """A collective call. Calling it with arrays runs it, and returns arrays.

    Attributes:
        collective: one of `_RUN`.
        algorithm, transport, op, prescale, postscale, compression: as for `collectives.allreduce`.
        ignore_name_scope: whether ``name`` is used without the graph's name scopes.
        root: of a broadcast, as a rank of the world.
        exact: whether its gradient is the adjoint under any setting.

    Raises:
        InvalidTypeError: ``root`` is a tensor whose value is unknown.
    """

    collective: str
    name: str | None = None
    process_set: Any = None
    algorithm: str | None = None
    transport: str | None = None
    ignore_name_scope: bool = False
    op: Op | None = None
    prescale: float = 1.0
    postscale: float = 1.0
    compression: Any = None
    root: Any = None
    exact: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.root, (tf.Tensor, np.ndarray)):  # as `join` returns; not hashable
            object.__setattr__(self, "root", _number(self.root))

    @property
    def world(self) -> World:
        return world_of(self.process_set)

    def named(self, name: str | None) -> GraphCall:
        return replace(self, name=name)

    def other(self, collective: str, suffix: str = "", **changes: Any) -> GraphCall:
        """A call of another collective, with the ranks, name and ``exact`` of this one."""
        name = self.name and self.name + suffix
        scope = self.ignore_name_scope
        return GraphCall(collective, name, self.process_set, ignore_name_scope=scope, exact=self.exact, **changes)

    def options(self) -> dict[str, Any]:
        """The keywords that all methods of a `World` have."""
        return {"name": self.name, "algorithm": self.algorithm, "transport": self.transport}

    def reduce_options(self) -> dict[str, Any]:
        """The keywords of reductions; compression, which a reduce-scatter does not have, only if there is one."""
        options = self.options()
        options.update(op=self.op, prescale_factor=self.prescale, postscale_factor=self.postscale)
        if self.compression is not None:
            options["compression"] = self.compression
        return options

    def __call__(self, *tensors: Any) -> list[Any]:
        return _RUN[self.collective](self, self.world, tensors)


def _number(root: Any) -> int:
    try:
        return int(root.__index__())
    except (AttributeError, TypeError):
        raise InvalidTypeError(
            f"root_rank: expected an int that is known when the graph is built, got {detection.describe(root)}; pass "
            "a Python int [A19]"
        ) from None


@raises_tensorflow
def run(call: GraphCall, tensors: Sequence[Any]) -> list[Any]:
    """Run a call, or add it to the graph that is being built, without differentiation.

    Args:
        tensors: TensorFlow's; for alltoall the tensor and the splits.

    Returns:
        The results, as tensors.
    """
    is_eager, is_allreduce = tf.executing_eagerly(), call.collective == "allreduce"
    if is_eager:
        return packed_callbacks.allreduce_now(call, tensors) if is_allreduce else call(*tensors)
    if is_allreduce:
        return packed_callbacks.allreduce(call, tensors)
    types, shapes = _signature(call, tensors)
    return graph.call(call.named, call.collective, tensors, types, shapes, call.name, call.ignore_name_scope)


def _signature(call: GraphCall, tensors: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The dtypes of the results, and their static shapes: numbers of rows depend on the ranks that run the graph."""
    if call.collective in ("broadcast", "at_root"):
        return [tensor.dtype for tensor in tensors], [tensor.shape for tensor in tensors]
    if call.collective == "alltoall":
        return [tensors[0].dtype, tensors[1].dtype], [_rows(tensors[0]), [None]]
    if call.collective == "own_rows":
        tensors = tensors[:-1]
    return [tensor.dtype for tensor in tensors], [_rows(tensor) for tensor in tensors]


def _rows(tensor: Any) -> Any:
    shape = tensor.shape
    return shape if shape.rank is None else tf.TensorShape([None]).concatenate(shape[1:])


# ---- execution


def _single_or_grouped(call: GraphCall, world: World, tensors: Sequence[Any]) -> list[Any]:
    options = call.options() if call.collective == "allgather" else call.reduce_options()
    if len(tensors) == 1:
        return [getattr(world, call.collective)(tensors[0], **options)]
    results: list[Any] = getattr(world, f"grouped_{call.collective}")(tensors, **options)
    return results


def _broadcast(call: GraphCall, world: World, tensors: Sequence[Any]) -> list[Any]:
    return [world.broadcast(tensors[0], root_in(call.process_set, call.root, call.name), **call.options())]


def _alltoall(call: GraphCall, world: World, tensors: Sequence[Any]) -> list[Any]:
    tensor, splits = tensors
    counts: Any = np.asarray(splits)
    if not counts.size and tensor.shape:
        # Equal parts, passed as splits, because the engine returns the received counts only with splits.
        counts = None if tensor.shape[0] % world.size else np.full(world.size, tensor.shape[0] // world.size)
    result, received = world.alltoall(tensor, counts, **call.options())
    received = np.asarray(received).astype(np.asarray(splits).dtype)
    return [result, received if isinstance(splits, np.ndarray) else tf.convert_to_tensor(received)]


def _at_root(call: GraphCall, world: World, tensors: Sequence[Any]) -> list[Any]:
    """The adjoint of a broadcast: the sum of the ranks' tensors on the root, zeros elsewhere."""
    total = world.allreduce(tensors[0], op=Op.SUM, name=call.name)
    if world.rank == root_in(call.process_set, call.root, call.name):
        return [total]
    return [np.zeros_like(total) if isinstance(total, np.ndarray) else tf.zeros_like(total)]


def _own_rows(call: GraphCall, world: World, tensors: Sequence[Any]) -> list[Any]:
    """The adjoint of an allgather: this rank's rows of each tensor's sum; the last argument has their numbers."""
    *tensors, rows = tensors
    own_counts = np.asarray(rows).astype(np.int64)
    table = world.allgather(own_counts.reshape(1, -1), name=call.name and f"{call.name}.rows").T
    even = [counts.tolist() == partition.rows(int(counts.sum()), world.size) for counts in table]
    parts: list[Any] = []
    for number, (tensor, counts) in enumerate(zip(tensors, table, strict=True)):
        name = call.name and f"{call.name}.{number}"
        if even[number]:
            parts.append(world.reducescatter(tensor, Op.SUM, name=name))
        else:
            parts.append(world.alltoall(tensor, counts, name=name)[0])
    # Sums follow all operations: an error in one occurs on this rank alone.
    return [
        part if is_sum else _sum_of_rows(part, (world.size, int(count)))
        for part, is_sum, count in zip(parts, even, own_counts, strict=True)
    ]


def _sum_of_rows(parts: Any, shape: tuple[int, int]) -> Any:
    """The sum over the ranks of concatenated rows, of halves in float32; ``shape`` is (ranks, rows of each)."""
    apart, dtype = (*shape, *parts.shape[1:]), parts.dtype
    if isinstance(parts, np.ndarray):
        return parts.reshape(apart).sum(0, dtype=np.float32 if dtypes.is_half(dtype) else dtype).astype(dtype)
    wide = tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype
    return tf.cast(tf.reduce_sum(tf.cast(tf.reshape(parts, apart), wide), 0), dtype)


def _merge(call: GraphCall, world: World, tensors: Sequence[Any]) -> list[Any]:
    results = sparse_rows.allreduce(world, [np.asarray(tensor) for tensor in tensors], call.op is Op.AVERAGE, call.name)
    return results if isinstance(tensors[0], np.ndarray) else [tf.convert_to_tensor(result) for result in results]


def _join(call: GraphCall, world: World, tensors: Sequence[Any]) -> list[Any]:
    return [np.int32(world.join())]


def _barrier(call: GraphCall, world: World, tensors: Sequence[Any]) -> list[Any]:
    world.barrier()
    return [np.int32(0)]


_RUN: dict[str, Callable[[GraphCall, World, Sequence[Any]], list[Any]]] = {
    **dict.fromkeys(("allreduce", "reducescatter", "allgather"), _single_or_grouped),
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "at_root": _at_root,
    "own_rows": _own_rows,
    "merge": _merge,
    "join": _join,
    "barrier": _barrier,
}
