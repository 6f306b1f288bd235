"""The collectives with the names, arguments and habits of Horovod's PyTorch interface.

Arguments stand in Horovod's order; ``algorithm``, ``transport`` and ``stream`` are ours, and for
`collectives.allreduce` mean the same. Results are new torch tensors of the caller's dtype, on its device; the forms
that end in ``_`` return the very tensors they were given. What is no torch tensor is treated as in `collectives`. The
blocking forms that return new tensors are differentiable, by the adjoints that `collectives.torch.autograd` states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import numpy as np
import torch
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from collectives import api
from collectives.base.errors import InvalidArgumentError
from collectives.base.reduce_op import Op
from collectives.engine import arguments
from collectives.engine.handles import Handle
from collectives.process_sets import ProcessSet
from collectives.runtime import global_process_set, root_in, world_of
from collectives.tensors import compression as compressors
from collectives.tensors.compression import Compression
from collectives.torch import autograd, compiled
from collectives.torch.autograd import DifferentiableCall, tracks
from collectives.torch.compiled import untraced
from collectives.torch.handles import Derived
from collectives.world import World

Tensor = TypeVar("Tensor")

Average = Op.AVERAGE

# ---- all-reduce


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
    stream: Any = None,
) -> Tensor:
    """Combine the ranks' tensors element by element. Differentiable.

    Its gradient, for a loss that is the sum of the ranks' losses: of Sum and Average the all-reduce of the outputs'
    gradients with the same ``op`` and factors; of Min and Max the summed gradient, to the ranks that hold the extreme
    value, evenly; of Product that times the other ranks' elements; of Adasum that of its tree. With compression the
    gradient travels compressed as well.

    Args:
        tensor: of equal shape and dtype on every rank, on the CPU or a GPU, in any memory layout. Left unchanged.
        average: the older way to say ``op``: True for Average, False for Sum.
        name: of the operation; None: matched by order of call.
        compression: `Compression.fp16` or ``bf16``, or anything with ``compress`` and ``decompress``, which get and
            return torch tensors.
        op: Average (the default), Sum, Min, Max, Product or Adasum.
        prescale_factor: multiplies each rank's tensor first.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part.

    Returns:
        A new tensor of the same shape and dtype, on the same device.

    Raises:
        InvalidArgumentError (a ValueError): both ``average`` and ``op``; and all that `collectives.allreduce` raises.
    """
    if is_compiling():
        how = _chosen(average, op, name, process_set), name, prescale_factor, postscale_factor, compression, process_set
        return compiled.allreduce(tensor, *how, **_nothing_else(algorithm, transport, stream))
    world = world_of(process_set)
    op = _operation(world, average, op, name)
    if tracks(tensor):
        call = DifferentiableCall(
            world, name, False, _options(op, prescale_factor, postscale_factor, algorithm, transport, stream)
        )
        return _compressed(call, compression, [tensor], autograd.allreduce)[0]
    return world.allreduce(
        tensor,
        op=op,
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=None if compression is Compression.none else compression,
        algorithm=algorithm,
        transport=transport,
        stream=stream,
    )


@untraced
def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
    stream: Any = None,
) -> Handle[Tensor]:
    """Begin an `allreduce` and return a handle at once, for `synchronize` and `poll`. Not differentiable.

    The tensor must not change until the operation is done.
    """
    world = world_of(process_set)
    return world.allreduce_async(
        tensor,
        op=_operation(world, average, op, name),
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        algorithm=algorithm,
        transport=transport,
        stream=stream,
    )


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
    stream: Any = None,
) -> Tensor:
    """`allreduce` in place: the result replaces the tensor's elements, also a leaf's that requires grad. Not
    differentiable.

    Autograd notices where it had saved the tensor for a backward pass.

    Returns:
        The very tensor that was passed. After a mismatch it is unchanged; after a failure in mid-call it is undefined.
    """
    if is_compiling():
        result = allreduce(tensor, average, name, Compression.none, op, prescale_factor, postscale_factor, process_set)
        return compiled.stored(tensor, result)
    world = world_of(process_set)
    world.allreduce_(
        tensor,
        op=_operation(world, average, op, name),
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        algorithm=algorithm,
        transport=transport,
        stream=stream,
    )
    return _written(tensor)


@untraced
def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
    stream: Any = None,
) -> Handle[Tensor]:
    """Begin an `allreduce_` and return a handle at once. The tensor must be left alone until the operation is done."""
    world = world_of(process_set)
    handle = world.allreduce_async_(
        tensor,
        op=_operation(world, average, op, name),
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        algorithm=algorithm,
        transport=transport,
        stream=stream,
    )
    _written(tensor)
    return handle


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
    stream: Any = None,
) -> list[Tensor]:
    """`allreduce` of several tensors that are carried out, and complete, together. Differentiable, as `allreduce` of
    each.

    Args:
        tensors: a list or tuple; equally many on every rank, each with equal shape and dtype there. dtypes may be
            mixed.

    Returns:
        The results in order.
    """
    if is_compiling():
        how = _chosen(average, op, name, process_set), name, prescale_factor, postscale_factor, compression, process_set
        return compiled.grouped_allreduce(tensors, *how, **_nothing_else(algorithm, transport, stream))
    world = world_of(process_set)
    op = _operation(world, average, op, name)
    options = _options(op, prescale_factor, postscale_factor, algorithm, transport, stream)
    if _any_tracked(tensors):
        return _compressed(DifferentiableCall(world, name, True, options), compression, tensors, autograd.allreduce)
    return world.grouped_allreduce(
        tensors, name=name, compression=None if compression is Compression.none else compression, **options
    )


@untraced
def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
    stream: Any = None,
) -> Handle[list[Tensor]]:
    """Begin a `grouped_allreduce`; one handle for all tensors. Not differentiable."""
    world = world_of(process_set)
    op = _operation(world, average, op, name)
    options = _options(op, prescale_factor, postscale_factor, algorithm, transport, stream)
    return world.grouped_allreduce_async(tensors, name=name, **options)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
    stream: Any = None,
) -> list[Tensor]:
    """`grouped_allreduce` in place, as `allreduce_`; returns the very tensors."""
    if is_compiling():
        results = grouped_allreduce(
            tensors, average, name, Compression.none, op, prescale_factor, postscale_factor, process_set
        )
        return [compiled.stored(tensor, result) for tensor, result in zip(tensors, results, strict=True)]
    world = world_of(process_set)
    op = _operation(world, average, op, name)
    options = _options(op, prescale_factor, postscale_factor, algorithm, transport, stream)
    return [_written(tensor) for tensor in world.grouped_allreduce_(tensors, name=name, **options)]


@untraced
def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
    stream: Any = None,
) -> Handle[list[Tensor]]:
    """Begin a `grouped_allreduce_`; one handle for all tensors."""
    world = world_of(process_set)
    op = _operation(world, average, op, name)
    options = _options(op, prescale_factor, postscale_factor, algorithm, transport, stream)
    handle = world.grouped_allreduce_async_(tensors, name=name, **options)
    for tensor in tensors:
        _written(tensor)
    return handle


# ---- allgather


def allgather(
    tensor: Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
    stream: Any = None,
) -> Tensor:
    """Put the ranks' tensors one below the other, in rank order, on every rank. Differentiable.

    Its gradient, for a loss that is the sum of the ranks' losses: this rank's rows of the sum of the outputs'
    gradients.

    Args:
        tensor: of shape ``(rows, ...)``; ranks may differ in ``rows`` only, which may be 0. Left unchanged.
        name, process_set: as for `allreduce`.

    Returns:
        A new tensor of shape ``(sum of all rows, ...)`` and the same dtype, on the same device.

    Raises:
        InvalidArgumentError (a ValueError): the tensor has no dimension; and all that `collectives.allgather` raises.
    """
    if is_compiling():
        return compiled.allgather(tensor, name, process_set, **_nothing_else(algorithm, transport, stream))
    world = world_of(process_set)
    if tracks(tensor):
        call = DifferentiableCall(
            world, name, False, {"algorithm": algorithm, "transport": transport, "stream": stream}
        )
        return autograd.allgather(call, [tensor])[0]
    return world.allgather(tensor, name=name, algorithm=algorithm, transport=transport, stream=stream)


@untraced
def allgather_async(
    tensor: Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
    stream: Any = None,
) -> Handle[Tensor]:
    """Begin an `allgather` and return a handle at once. Not differentiable."""
    return world_of(process_set).allgather_async(
        tensor, name=name, algorithm=algorithm, transport=transport, stream=stream
    )


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
    stream: Any = None,
) -> list[Tensor]:
    """`allgather` of several tensors that complete together; the results in order. Differentiable, as `allgather` of
    each."""
    if is_compiling():
        return [allgather(tensor, name and f"{name}.{i}", process_set) for i, tensor in enumerate(tensors)]
    return _gather_group(tensors, name, process_set, {"algorithm": algorithm, "transport": transport, "stream": stream})


@untraced  # the compiler runs the loop above eagerly if it cannot trace results whose shapes depend on other ranks
def _gather_group(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, options: dict[str, Any]
) -> list[Tensor]:
    world = world_of(process_set)
    if _any_tracked(tensors):
        return autograd.allgather(DifferentiableCall(world, name, True, options), tensors)
    return world.grouped_allgather(tensors, name=name, **options)


@untraced
def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
    stream: Any = None,
) -> Handle[list[Tensor]]:
    """Begin a `grouped_allgather`; one handle for all tensors. Not differentiable."""
    return world_of(process_set).grouped_allgather_async(
        tensors, name=name, algorithm=algorithm, transport=transport, stream=stream
    )


# ---- broadcast


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
    stream: Any = None,
) -> Tensor:
    """Give every rank the root's tensor. Differentiable.

    Its gradient, for a loss that is the sum of the ranks' losses: on the root the sum of the outputs' gradients, zeros
    elsewhere.

    Args:
        tensor: of equal shape and dtype on every rank; its elements matter on the root only. Left unchanged.
        root_rank: the rank whose tensor it is, by its number among all ranks, also in a process set; equal on every
            rank.
        name, process_set: as for `allreduce`.

    Returns:
        A new tensor of the same shape and dtype, on the same device.

    Raises:
        InvalidArgumentError (a ValueError): there is no such rank; and all that `collectives.broadcast` raises.
    """
    if is_compiling():
        root = root_in(process_set, root_rank, name)
        return compiled.broadcast(tensor, root, name, process_set, **_nothing_else(algorithm, transport, stream))
    world, root = world_of(process_set), root_in(process_set, root_rank, name)
    if tracks(tensor):
        call = DifferentiableCall(
            world, name, False, {"algorithm": algorithm, "transport": transport, "stream": stream}
        )
        return autograd.broadcast(call, tensor, root)
    return world.broadcast(tensor, root, name=name, algorithm=algorithm, transport=transport, stream=stream)


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
    stream: Any = None,
) -> Tensor:
    """`broadcast` in place, also of a leaf that requires grad; returns the very tensor. Not differentiable."""
    if is_compiling():
        return compiled.stored(tensor, broadcast(tensor, root_rank, name, process_set))
    world, root = world_of(process_set), root_in(process_set, root_rank, name)
    world.broadcast_(tensor, root, name=name, algorithm=algorithm, transport=transport, stream=stream)
    return _written(tensor)


@untraced
def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
    stream: Any = None,
) -> Handle[Tensor]:
    """Begin a `broadcast` and return a handle at once. Not differentiable."""
    world, root = world_of(process_set), root_in(process_set, root_rank, name)
    return world.broadcast_async(tensor, root, name=name, algorithm=algorithm, transport=transport, stream=stream)


@untraced
def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
    stream: Any = None,
) -> Handle[Tensor]:
    """Begin a `broadcast_` and return a handle at once. The tensor must be left alone until the operation is done."""
    world, root = world_of(process_set), root_in(process_set, root_rank, name)
    handle = world.broadcast_async_(tensor, root, name=name, algorithm=algorithm, transport=transport, stream=stream)
    _written(tensor)
    return handle


# ---- all-to-all


@overload
def alltoall(
    tensor: Tensor,
    splits: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
    stream: Any = None,
) -> Tensor: ...


@overload
def alltoall(
    tensor: Tensor,
    splits: Sequence[int] | torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
    stream: Any = None,
) -> tuple[Tensor, torch.Tensor]: ...


def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
    stream: Any = None,
) -> Tensor | tuple[Tensor, torch.Tensor]:
    """Send the first rows to rank 0, the next to rank 1, and so on; receive what each rank sent here, in rank order.
    Differentiable.

    Its gradient, for a loss that is the sum of the ranks' losses: the outputs' gradients, sent back to where the rows
    came from.

    Args:
        tensor: of shape ``(rows, ...)``; ranks may differ in ``rows``. Left unchanged.
        splits: integers, one per rank, that sum to ``rows``: how many rows go to each; a tensor of any integer dtype on
            any device, or a list. None: equally many.
        name, process_set: as for `allreduce`.

    Returns:
        A new tensor of the rows received. With ``splits``: that, and how many came from each rank, as a tensor of the
            dtype and on the
        device of ``splits``, or of int32 on the CPU where ``splits`` is no tensor.

    Raises:
        InvalidArgumentError (a ValueError): the tensor has no dimension, or the splits do not fit it; and all that
            `collectives.alltoall` raises.
    """
    if is_compiling():
        rows, received = compiled.alltoall(
            tensor, splits, name, process_set, **_nothing_else(algorithm, transport, stream)
        )
        return rows if splits is None else (rows, _received(received, splits))
    world = world_of(process_set)
    counts = _counts(splits, tensor, world.size)
    if tracks(tensor):
        call = DifferentiableCall(
            world, name, False, {"algorithm": algorithm, "transport": transport, "stream": stream}
        )
        result, received = autograd.alltoall(call, tensor, counts)
        return result if splits is None else (result, _received(received, splits))
    found: Any = world.alltoall(tensor, counts, name=name, algorithm=algorithm, transport=transport, stream=stream)
    return found[0] if splits is None else (found[0], _received(found[1], splits))


@untraced
def alltoall_async(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
    stream: Any = None,
) -> Derived:
    """Begin an `alltoall` and return a handle at once. Not differentiable.

    Its result is always a pair, of the rows received and how many came from each rank, as in Horovod.
    """
    world = world_of(process_set)
    counts = _counts(splits, tensor, world.size)
    handle = world.alltoall_async(tensor, counts, name=name, algorithm=algorithm, transport=transport, stream=stream)
    return Derived([handle], lambda found: (found[0], _received(found[1], splits)))


# ---- reduce-scatter


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
    stream: Any = None,
) -> Tensor:
    """Combine the ranks' tensors and give each rank its share of the rows. Differentiable.

    Its gradient, for a loss that is the sum of the ranks' losses: of Sum the allgather of the outputs' gradients, of
    Average that divided by the number of ranks, both times the factors; of Min, Max and Product as of `allreduce`.

    Args:
        tensor: of shape ``(rows, ...)``, equal on every rank. Rows that do not divide evenly go to the first ranks, one
            each.
        op: Average (the default), Sum, Min, Max or Product.
        name, compression, process_set, prescale_factor, postscale_factor: as for `allreduce`.

    Returns:
        A new tensor of this rank's rows and the same dtype, on the same device.

    Raises:
        InvalidArgumentError (a ValueError): the tensor has no dimension; and all that `collectives.reducescatter`
            raises.
    """
    if is_compiling():
        how = Average if op is None else op, name, prescale_factor, postscale_factor, process_set
        packed, context = (compression or Compression.none).compress(tensor)
        result = compiled.reducescatter(packed, *how, **_nothing_else(algorithm, transport, stream))
        return (compression or Compression.none).decompress(result, context)
    world = world_of(process_set)
    options = _options(Average if op is None else op, prescale_factor, postscale_factor, algorithm, transport, stream)
    run = autograd.reducescatter if tracks(tensor) else _reducescatter
    return _compressed(DifferentiableCall(world, name, False, options), compression, [tensor], run)[0]


@untraced
def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: Op | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
    stream: Any = None,
) -> Handle[Tensor]:
    """Begin a `reducescatter` and return a handle at once. Not differentiable."""
    options = _options(op, prescale_factor, postscale_factor, algorithm, transport, stream)
    return world_of(process_set).reducescatter_async(tensor, name=name, **options)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
    stream: Any = None,
) -> list[Tensor]:
    """`reducescatter` of several tensors that complete together; the results in order. Differentiable, as
    `reducescatter` of each."""
    if is_compiling():
        how = compression, op, process_set, prescale_factor, postscale_factor
        return [reducescatter(tensor, name and f"{name}.{i}", *how) for i, tensor in enumerate(tensors)]
    world = world_of(process_set)
    options = _options(Average if op is None else op, prescale_factor, postscale_factor, algorithm, transport, stream)
    run = autograd.reducescatter if _any_tracked(tensors) else _reducescatter
    return _compressed(DifferentiableCall(world, name, True, options), compression, tensors, run)


@untraced
def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: Op | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
    stream: Any = None,
) -> Handle[list[Tensor]]:
    """Begin a `grouped_reducescatter`; one handle for all tensors. Not differentiable."""
    options = _options(op, prescale_factor, postscale_factor, algorithm, transport, stream)
    return world_of(process_set).grouped_reducescatter_async(tensors, name=name, **options)


# ---- without tensors


@untraced
def join(device: int = -1, *, process_set: ProcessSet = global_process_set) -> int:
    """Say that this rank has run out of data, and help the others until all have: see `collectives.join`.

    Args:
        device: of Horovod's interface; the elements that this rank contributes are made where the others' tensors are.

    Returns:
        The last rank to join; of several at once, the highest.
    """
    return api.join(process_set=process_set)


@untraced
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank has called it."""
    api.barrier(process_set=process_set)


# ---- arguments and results


def _operation(world: World, average: Any, op: Op | None, name: str | None) -> Op:
    try:
        return arguments.operation(op, average)
    except Exception as error:
        raise world.refused(error, name) from None


def _chosen(average: Any, op: Op | None, name: str | None, process_set: ProcessSet) -> Op:
    return _operation(world_of(process_set), average, op, name)


def _nothing_else(*given: Any) -> dict[str, Any]:
    """No arguments: in a graph an operator has none of ``algorithm``, ``transport`` and ``stream``."""
    if any(value is not None for value in given):
        raise InvalidArgumentError(
            "algorithm, transport, stream: expected None inside of torch.compile; set COLLECTIVES_ALGORITHM instead"
        )
    return {}


def _options(
    op: Op | None, prescale: float, postscale: float, algorithm: str | None, transport: str | None, stream: Any
) -> dict[str, Any]:
    """What the world's methods call them."""
    return {
        "op": op,
        "prescale_factor": prescale,
        "postscale_factor": postscale,
        "algorithm": algorithm,
        "transport": transport,
        "stream": stream,
    }


def _compressed(
    call: DifferentiableCall,
    compression: Any,
    tensors: Sequence[Any],
    run: Callable[[DifferentiableCall, Sequence[Any]], list[Any]],
) -> list[Any]:
    """What ``run`` makes of the tensors in the form in which they travel; autograd sees what the compressor does."""
    if compression is None or compression is Compression.none:
        return run(call, tensors)
    try:
        compressors.check(compression)
        packed = [compression.compress(tensor) for tensor in tensors]
    except Exception as error:
        raise call.world.refused(error, call.name) from None
    results = run(call, [tensor for tensor, _ in packed])
    return [compression.decompress(result, context) for result, (_, context) in zip(results, packed, strict=True)]


def _reducescatter(call: DifferentiableCall, tensors: Sequence[Any]) -> list[Any]:
    if call.grouped:
        return call.world.grouped_reducescatter(tensors, name=call.name, **call.options)
    return [call.world.reducescatter(tensors[0], name=call.name, **call.options)]


def _any_tracked(tensors: Any) -> bool:
    return isinstance(tensors, (list, tuple)) and any(map(tracks, tensors))


def _written(tensor: Any) -> Any:
    """The tensor, whose elements are other ones now: autograd must not use what it had saved of it."""
    if isinstance(tensor, torch.Tensor):
        increment_version(tensor)
    return tensor


def _counts(splits: Any, tensor: Any, size: int) -> Any:
    """The splits as the engine takes them, so that it tells of the rows received; None only where it is to refuse."""
    if splits is None:
        rows = tensor.shape[0] if getattr(tensor, "shape", ()) else 1
        return None if rows % size else [rows // size] * size
    return splits.tolist() if isinstance(splits, torch.Tensor) else splits


def _received(counts: Any, splits: Any) -> Any:
    """How many rows came from each rank, as the caller's splits are."""
    like = (
        {"dtype": splits.dtype, "device": splits.device} if isinstance(splits, torch.Tensor) else {"dtype": torch.int32}
    )
    return torch.as_tensor(counts if isinstance(counts, torch.Tensor) else np.asarray(counts), **like)
