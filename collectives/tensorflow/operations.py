"""The collectives with the names, arguments and conventions of Horovod's TensorFlow interface.

Each works eagerly, in a ``tf.function`` and in a graph for sessions, and is differentiable, by the adjoints of
`collectives.frontends.adjoints`. Positional arguments stand in Horovod's order; ``algorithm`` and ``transport`` are the
engine's, as for `collectives.allreduce`.

Tensors are TensorFlow's, variables, NumPy arrays or numbers; results are new tensors of their dtype. ``device_dense``
and ``device_sparse`` are part of Horovod's interface and have no effect: a tensor is reduced where it is, or in a graph
on the host. A name is prefixed by the name scopes of a graph unless ``ignore_name_scope``. Unnamed operations are
matched by their order, and in graphs for sessions by the names of their tensors, so every rank must build the same
graph.

Eagerly, errors are those of `collectives.tensorflow.errors`, which are those of `collectives.base.errors` and of
``tf.errors`` at once. A running graph raises those of ``tf.errors`` alone, with the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar, overload

import tensorflow as tf

from collectives.base.reduce_op import Op
from collectives.engine import arguments
from collectives.tensorflow import autograd, conversion, graph, sparse
from collectives.tensorflow.errors import unconverted
from collectives.tensorflow.graph_call import GraphCall
from collectives.tensors import compression as compressors
from collectives.tensors.compression import Compression
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import global_process_set

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "check_num_rank_power_of_2",
    "gpu_available",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "reducescatter",
]

Tensor = TypeVar("Tensor")

Average = Op.AVERAGE

# ---- all-reduce


@unconverted
def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
) -> Tensor:
    """Reduce the ranks' tensors element by element. Differentiable.

    Args:
        tensor: equal shape and dtype on every rank, left unchanged; or ``tf.IndexedSlices``, whose rows may differ
            between ranks.
        average: the older form of ``op``: True for Average, False for Sum.
        compression: `Compression.fp16`, ``bf16``, or an object with ``compress`` and ``decompress``, which take and
            return tensors. Sparse tensors are not compressed.
        op: Average (the default), Sum, Min, Max, Product or Adasum; of sparse tensors Average or Sum.
        prescale_factor: multiplies each rank's tensor first.
        postscale_factor: multiplies the result.
        name: of the operation.
        process_set: the ranks that take part.

    Returns:
        A tensor of the same shape and dtype; or ``tf.IndexedSlices`` with ascending, unique indices. The average of
        integers truncates toward zero; that of slices of integers is floating point.

    Raises:
        InvalidArgumentError (a ValueError): both ``average`` and ``op``, or XLA compiles the graph.
        UnsupportedError (a NotImplementedError and a ValueError): another ``op`` of sparse tensors.
        CollectivesError: as for `collectives.allreduce`.

    Example:
        >>> hvd.allreduce(tf.constant([hvd.rank(), 4.0])).numpy()
        array([0.5, 4. ], dtype=float32)
    """
    return grouped_allreduce(
        [tensor],
        average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        ignore_name_scope=ignore_name_scope,
        name=name,
        algorithm=algorithm,
        transport=transport,
    )[0]


@unconverted
def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
) -> list[Tensor]:
    """`allreduce` of several tensors as one grouped operation; in a graph by one callback.

    Args:
        tensors: the same number on every rank, in the same order; dtypes may be mixed, and so may dense and sparse
            tensors (which take a second callback).

    Returns:
        The results in order.

    Example:
        >>> [each.numpy() for each in hvd.grouped_allreduce([tf.ones(2), tf.range(3)], op=hvd.Sum)]
        [array([2., 2.], dtype=float32), array([0, 2, 4], dtype=int32)]
    """
    with conversion.refusing(name, process_set):
        op = arguments.operation(op, average)
        converted = conversion.tensors(tensors)
    factors = conversion.factors(prescale_factor, postscale_factor, name, process_set)
    call = GraphCall("allreduce", name, process_set, algorithm, transport, ignore_name_scope, op, *factors)
    results: list[Any] = list(converted)
    sparse_positions = [i for i, tensor in enumerate(converted) if isinstance(tensor, tf.IndexedSlices)]
    dense_positions = [i for i, tensor in enumerate(converted) if not isinstance(tensor, tf.IndexedSlices)]
    if sparse_positions:
        sparse.check(call)
    if dense_positions:
        dense = _compressed(call, compression, [converted[i] for i in dense_positions])
        for i, result in zip(dense_positions, dense, strict=True):
            results[i] = result
    if sparse_positions:
        call = replace(call, name=f"{name}.sparse" if name and dense_positions else name)
        slices = sparse.allreduce(call, [converted[i] for i in sparse_positions])
        for i, result in zip(sparse_positions, slices, strict=True):
            results[i] = result
    return results


# ---- the other collectives


@unconverted
def reducescatter(
    tensor: Tensor,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Op = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
) -> Tensor:
    """Reduce the ranks' tensors and give each rank its share of the rows. Differentiable.

    Args:
        tensor: of shape ``(rows, ...)``, equal on every rank. Rows left over by an even division go to the first
            ranks, one each.
        op, name, ...: as for `allreduce`, without Adasum.

    Example:
        >>> hvd.reducescatter(tf.ones(4), op=hvd.Sum).numpy()
        array([2., 2.], dtype=float32)
    """
    factors = conversion.factors(prescale_factor, postscale_factor, name, process_set)
    call = GraphCall("reducescatter", name, process_set, algorithm, transport, ignore_name_scope, op, *factors)
    return _run(call, [tensor], compression)[0]


@unconverted
def grouped_reducescatter(
    tensors: Sequence[Tensor],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    name: str | None = None,
    algorithm: str | None = None,
    transport: str | None = None,
) -> list[Tensor]:
    """`reducescatter` of several tensors as one grouped operation; returns the results in order.

    Example:
        >>> [each.numpy() for each in hvd.grouped_reducescatter([tf.ones(4), tf.ones(2)], op=hvd.Sum)]
        [array([2., 2.], dtype=float32), array([2.], dtype=float32)]
    """
    factors = conversion.factors(prescale_factor, postscale_factor, name, process_set)
    call = GraphCall("reducescatter", name, process_set, algorithm, transport, False, op, *factors)
    return _run(call, tensors, compression)


@unconverted
def allgather(
    tensor: Tensor,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
) -> Tensor:
    """Concatenate the ranks' tensors along the first dimension, in rank order, on every rank. Differentiable.

    Args:
        tensor: of shape ``(rows, ...)``; ranks may differ in ``rows`` only, which may be 0.

    Returns:
        A tensor of shape ``(sum of all rows, ...)``; in a graph the number of rows is unknown until it runs.

    Example:
        >>> hvd.allgather(tf.fill([hvd.rank() + 1], hvd.rank())).numpy()
        array([0, 1, 1], dtype=int32)
    """
    return _run(GraphCall("allgather", name, process_set, algorithm, transport, ignore_name_scope), [tensor])[0]


@unconverted
def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
) -> list[Tensor]:
    """`allgather` of several tensors as one grouped operation; returns the results in order.

    Example:
        >>> [each.numpy() for each in hvd.grouped_allgather([tf.constant([hvd.rank()]), tf.ones(1)])]
        [array([0, 1], dtype=int32), array([1., 1.], dtype=float32)]
    """
    return _run(GraphCall("allgather", name, process_set, algorithm, transport, ignore_name_scope), tensors)


@unconverted
def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
) -> Tensor:
    """Give every rank the root's tensor. Differentiable.

    Args:
        tensor: equal shape and dtype on every rank, left unchanged; its elements matter on the root only.
        root_rank: the root, as a rank of the world.

    Example:
        >>> hvd.broadcast(tf.constant([hvd.rank(), 7]), root_rank=1).numpy()
        array([1, 7], dtype=int32)
    """
    call = GraphCall("broadcast", name, process_set, algorithm, transport, ignore_name_scope, root=root_rank)
    return _run(call, [tensor])[0]


@overload
def alltoall(
    tensor: Tensor,
    splits: None = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
) -> Tensor: ...


@overload
def alltoall(
    tensor: Tensor,
    splits: Sequence[int] | tf.Tensor,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
) -> tuple[Tensor, tf.Tensor]: ...


@unconverted
def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
) -> Tensor | tuple[Tensor, tf.Tensor]:
    """Send the first rows to rank 0, the next to rank 1, and so on; receive what each rank sent here, in rank order.
    Differentiable.

    Args:
        tensor: of shape ``(rows, ...)``; ranks may differ in ``rows``.
        splits: the number of rows for each rank: integers that sum to ``rows``. None: equal numbers.

    Returns:
        A tensor of the rows received. With ``splits`` also the number of rows received from each rank, in the splits'
        dtype (int32 if they are neither a tensor nor an array).

    Example:
        >>> hvd.alltoall(tf.fill([2], hvd.rank())).numpy()
        array([0, 1], dtype=int32)
    """
    with conversion.refusing(name, process_set):
        (converted,) = conversion.tensors([tensor])
        counts = tf.zeros((0,), tf.int32) if splits is None else conversion.splits(splits)
    call = GraphCall("alltoall", name, process_set, algorithm, transport, ignore_name_scope)
    result, received = autograd.run(call, [converted, counts])
    return result if splits is None else (result, received)


# ---- without tensors


@unconverted
def join(*, process_set: ProcessSet = global_process_set) -> tf.Tensor:
    """Declare that this rank has no more data, and take part in the other ranks' operations until all have joined.

    Returns:
        The last rank to join, the highest if several joined at once: an int32 scalar. See `collectives.join`.

    Example:
        >>> last = hvd.join()
    """
    last = _without_tensors("join", process_set)
    if tf.executing_eagerly():
        autograd.reset_numbering(process_set)
    return last


@unconverted
def barrier(process_set: ProcessSet = global_process_set) -> tf.Operation | None:
    """Wait until every rank has called it; in a graph, returns the operation that does.

    Example:
        >>> hvd.barrier()
    """
    result = _without_tensors("barrier", process_set)
    return None if tf.executing_eagerly() else result.op


def _without_tensors(collective: str, process_set: ProcessSet) -> Any:
    call = GraphCall(collective, None, process_set)
    if tf.executing_eagerly():
        return tf.constant(call()[0])
    return graph.call(call.named, collective, [], [tf.int32], [()])[0]


@unconverted
def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Whether a number of ranks is a power of two. Adasum supports any number of ranks here.

    Example:
        >>> hvd.check_num_rank_power_of_2(6)
        False
    """
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


@unconverted
def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Whether TensorFlow has a GPU; the arguments are part of Horovod's interface.

    Example:
        >>> gpu = hvd.gpu_available()
    """
    return bool(tf.config.list_physical_devices("GPU"))


# ---- execution


def _run(call: GraphCall, tensors: Any, compression: Any = None) -> list[Any]:
    with conversion.refusing(call.name, call.process_set):
        converted = conversion.tensors(tensors)
    return _compressed(call, compression, converted) if converted else []


def _compressed(call: GraphCall, compression: Any, tensors: list[Any]) -> list[Any]:
    """Run a reduction on compressed tensors, and decompress the results; gradients pass through both."""
    if compression is None or compression is Compression.none:
        return autograd.run(call, tensors)
    if call.collective == "allreduce" and compressors.is_built_in(compression):
        return autograd.run(replace(call, compression=compression), tensors)
    with conversion.refusing(call.name, call.process_set):
        compressors.check(compression)
        compressed, restore = compressors.compress_all(compression, tensors)
    return restore(autograd.run(call, compressed))
