"""The collectives with the names, arguments and habits of Horovod's TensorFlow interface.

Each works eagerly, in a ``tf.function`` and in a graph for sessions, and is differentiable, by the adjoints that
`collectives.tensorflow.autograd` states. Arguments stand in Horovod's order; ``algorithm`` and ``transport`` are ours,
and for `collectives.allreduce` mean the same.

Tensors are TensorFlow's, variables, NumPy arrays or numbers; results are new tensors of their dtype. ``device_dense``
and ``device_sparse`` are Horovod's and change nothing: a tensor is combined where it is, or in a graph on the host. A
name is given within the name scopes of a graph unless ``ignore_name_scope``; unnamed operations are matched by their
order, and in graphs for sessions by the names of their tensors, so that every rank must build the same graph.

Eagerly, errors are those of `collectives.tensorflow.errors`, which are those of `collectives.base.errors` and of
``tf.errors`` at once. Out of a graph they are those of ``tf.errors`` alone, with the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar, overload

import numpy as np
import tensorflow as tf

from collectives.base import dtypes
from collectives.base.errors import InvalidTypeError
from collectives.base.reduce_op import Op
from collectives.engine import arguments
from collectives.process_sets import ProcessSet
from collectives.runtime import global_process_set, world_of
from collectives.tensorflow import autograd, graph, sparse
from collectives.tensorflow.autograph import unconverted
from collectives.tensorflow.graph_call import GraphCall
from collectives.tensors import compression as compressors
from collectives.tensors import detection
from collectives.tensors.compression import BUILT_IN, Compression

Tensor = TypeVar("Tensor")

Average = Op.AVERAGE

# ---- all-reduce
# ----------------------------------------------------------------------------------------------------------


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
    """Combine the ranks' tensors element by element. Differentiable.

    Args:
        tensor: of equal shape and dtype on every rank, left unchanged; or ``tf.IndexedSlices``, of which ranks may have
            different rows.
        average: the older way to say ``op``: True for Average, False for Sum.
        compression: `Compression.fp16` or ``bf16``, or anything with ``compress`` and ``decompress``, which get and
            return tensors. Sparse tensors travel as they are.
        op: Average (the default), Sum, Min, Max, Product or Adasum; of sparse tensors Average or Sum.
        prescale_factor: multiplies each rank's tensor first.
        postscale_factor: multiplies the result.
        name: of the operation.
        process_set: the ranks that take part.

    Returns:
        A tensor of the same shape and dtype; ``tf.IndexedSlices`` whose indices ascend, each once. The average of
        integers truncates toward zero; that of slices of integers is of floating point.

    Raises:
        InvalidArgumentError (a ValueError): both ``average`` and ``op``; XLA is to compile the graph; and all that
            `collectives.allreduce` raises.
        UnsupportedError (a NotImplementedError and a ValueError): another ``op`` of sparse tensors.
    """
    how = (
        device_dense,
        device_sparse,
        compression,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        ignore_name_scope,
        name,
    )
    return grouped_allreduce([tensor], average, *how, algorithm=algorithm, transport=transport)[0]


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
    """`allreduce` of several tensors that are carried out, and complete, together; in a graph by one callback.

    Args:
        tensors: equally many on every rank, in the same order; dtypes may be mixed, and dense with sparse ones (which
            make one more callback).

    Returns:
        The results in order.
    """
    chosen = _operation(average, op, name, process_set)
    given = _tensors(tensors, name, process_set)
    factors = _factors(prescale_factor, postscale_factor, name, process_set)
    call = GraphCall(
        "allreduce",
        name,
        process_set,
        chosen,
        *factors,
        None,
        algorithm,
        transport,
        ignore_name_scope=ignore_name_scope,
    )
    results: list[Any] = list(given)
    dense = [i for i, tensor in enumerate(given) if not isinstance(tensor, tf.IndexedSlices)]
    others = [i for i, tensor in enumerate(given) if isinstance(tensor, tf.IndexedSlices)]
    if others:
        sparse.check(call)
    if dense:
        for i, result in zip(dense, _compressed(call, compression, [given[i] for i in dense]), strict=True):
            results[i] = result
    if others:
        call = replace(call, name=(name and dense and f"{name}.sparse") or name)
        for i, result in zip(others, sparse.allreduce(call, [given[i] for i in others]), strict=True):
            results[i] = result
    return results


# ---- the other collectives
# -------------------------------------------------------------------------------------------------


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
    """Combine the ranks' tensors and give each rank its share of the rows. Differentiable.

    Args:
        tensor: of shape ``(rows, ...)``, equal on every rank. Rows that do not divide evenly go to the first ranks, one
            each.
        op, name, ...: as for `allreduce`, without Adasum.

    Returns:
        A tensor of this rank's rows.
    """
    (given,) = _tensors([tensor], name, process_set)
    how = *_factors(prescale_factor, postscale_factor, name, process_set), None, algorithm, transport
    return _compressed(
        GraphCall("reducescatter", name, process_set, op, *how, ignore_name_scope=ignore_name_scope),
        compression,
        [given],
    )[0]


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
    """`reducescatter` of several tensors that complete together; the results in order."""
    given = _tensors(tensors, name, process_set)
    how = *_factors(prescale_factor, postscale_factor, name, process_set), None, algorithm, transport
    return _compressed(GraphCall("reducescatter", name, process_set, op, *how), compression, given) if given else []


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
    """Put the ranks' tensors one below the other, in rank order, on every rank. Differentiable.

    Args:
        tensor: of shape ``(rows, ...)``; ranks may differ in ``rows`` only, which may be 0.
        name, process_set: as for `allreduce`.

    Returns:
        A tensor of shape ``(sum of all rows, ...)``; in a graph the rows are not known before it runs.
    """
    return grouped_allgather([tensor], name, ignore_name_scope, process_set, algorithm=algorithm, transport=transport)[
        0
    ]


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
    """`allgather` of several tensors that complete together; the results in order."""
    given = _tensors(tensors, name, process_set)
    how: dict[str, Any] = {"algorithm": algorithm, "transport": transport, "ignore_name_scope": ignore_name_scope}
    return autograd.run(GraphCall("allgather", name, process_set, **how), given) if given else []


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
        tensor: of equal shape and dtype on every rank; its elements matter on the root only. Left unchanged.
        root_rank: the rank whose tensor it is, by its number among all ranks.
        name, process_set: as for `allreduce`.

    Returns:
        A new tensor.
    """
    given = _tensors([tensor], name, process_set)
    how: dict[str, Any] = {"algorithm": algorithm, "transport": transport, "ignore_name_scope": ignore_name_scope}
    return autograd.run(GraphCall("broadcast", name, process_set, root=root_rank, **how), given)[0]


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
        splits: integers, one per rank, that sum to ``rows``: how many rows go to each. None: equally many.
        name, process_set: as for `allreduce`.

    Returns:
        A tensor of the rows received. With ``splits``: that, and the number of rows received from each rank, in the
            splits' dtype (int32
        if they are no tensor or array).
    """
    (given,) = _tensors([tensor], name, process_set)
    if splits is None:
        counts = tf.zeros((0,), tf.int32)
    else:
        try:
            counts = splits if hasattr(splits, "dtype") else np.asarray(splits, np.int32)
            counts = tf.convert_to_tensor(counts)
            if not counts.dtype.is_integer:
                raise TypeError
        except (TypeError, ValueError):
            text = f"splits: expected integers, one per rank, got {splits!r}"
            raise world_of(process_set).refused(InvalidTypeError(text), name) from None
    how: dict[str, Any] = {"algorithm": algorithm, "transport": transport, "ignore_name_scope": ignore_name_scope}
    result, received = autograd.run(GraphCall("alltoall", name, process_set, **how), [given, counts])
    return result if splits is None else (result, received)


# ---- without tensors
# -----------------------------------------------------------------------------------------------------


@unconverted
def join(*, process_set: ProcessSet = global_process_set) -> tf.Tensor:
    """Say that this rank has run out of data, and help the others until all have: see `collectives.join`.

    Returns:
        The last rank to join; of several at once, the highest: an int32 scalar.
    """
    last = _without_tensors("join", process_set)
    if tf.executing_eagerly():
        autograd.reset_numbering(process_set)
    return last


@unconverted
def barrier(process_set: ProcessSet = global_process_set) -> tf.Operation | None:
    """Return when every rank has called it; in a graph, an operation."""
    result = _without_tensors("barrier", process_set)
    return None if tf.executing_eagerly() else result.op


def _without_tensors(collective: str, process_set: ProcessSet) -> Any:
    call = GraphCall(collective, None, process_set)
    if tf.executing_eagerly():
        return tf.constant(call()[0])
    return graph.call(call.named, collective, [], [tf.int32], [()])[0]


@unconverted
def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Whether a number of ranks is a power of two. Adasum works with any number here."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


@unconverted
def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Whether TensorFlow has a GPU; the arguments are of Horovod's interface."""
    return bool(tf.config.list_physical_devices("GPU"))


# ---- arguments and results
# -------------------------------------------------------------------------------------------------


def _operation(average: Any, op: Op | None, name: str | None, process_set: ProcessSet) -> Op:
    try:
        return arguments.operation(op, average)
    except Exception as error:
        raise world_of(process_set).refused(error, name) from None


def _factors(prescale: Any, postscale: Any, name: str | None, process_set: ProcessSet) -> tuple[float, float]:
    try:
        return arguments.factor("prescale_factor", prescale), arguments.factor("postscale_factor", postscale)
    except InvalidTypeError as error:
        raise world_of(process_set).refused(error, name) from None


def _tensors(given: Any, name: str | None, process_set: ProcessSet) -> list[Any]:
    """Tensors, and ``tf.IndexedSlices`` as they are."""
    try:
        if not isinstance(given, (list, tuple)):
            raise InvalidTypeError(f"tensors: expected a list or tuple of tensors, got {detection.describe(given)}")
        return [_slices(tensor) if isinstance(tensor, tf.IndexedSlices) else _tensor(tensor) for tensor in given]
    except Exception as error:
        raise world_of(process_set).refused(error, name) from None


def _slices(given: Any) -> Any:
    return tf.IndexedSlices(_tensor(given.values), tf.convert_to_tensor(given.indices), given.dense_shape)


def _tensor(given: Any) -> Any:
    try:
        tensor = given if isinstance(given, tf.Tensor) else tf.convert_to_tensor(given)
    except (TypeError, ValueError) as error:
        text = f"tensor: expected a tensor, a variable, an array or a number, got {detection.describe(given)}: {error}"
        raise InvalidTypeError(text) from None
    if tensor.dtype.name not in dtypes.NAMES:
        raise InvalidTypeError(
            f"tensor: dtype {tensor.dtype.name} is not supported; expected one of {', '.join(dtypes.NAMES)}"
        )
    return tensor


def _compressed(call: GraphCall, compression: Any, tensors: list[Any]) -> list[Any]:
    """What a call makes of the tensors in the form in which they travel; gradients see what the compressor does."""
    if compression is None or compression is Compression.none:
        return autograd.run(call, tensors)
    if call.collective == "allreduce" and any(compression is known for known in BUILT_IN):
        return autograd.run(replace(call, compression=compression), tensors)
    try:
        compressors.check(compression)
        packed = [compression.compress(tensor) for tensor in tensors]
    except Exception as error:
        raise call.world.refused(error, call.name) from None
    results = autograd.run(call, [tensor for tensor, _ in packed])
    return [compression.decompress(result, context) for result, (_, context) in zip(results, packed, strict=True)]
