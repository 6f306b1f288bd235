"""All-gather, broadcast, all-to-all, join and barrier with Horovod's names and order of arguments.

Arguments, results and gradients are as `collectives.torch.reductions` states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch.compiler import is_compiling

from collectives import api
from collectives.base.options import spelled_out
from collectives.torch import autograd, compiled
from collectives.torch.arguments import Choices, Tensor, any_tracked, begun, world_options, written
from collectives.torch.autograd import DifferentiableCall, tracks
from collectives.torch.compiled import untraced
from collectives.torch.handles import Derived
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import global_process_set, root_in, world_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "join",
]

# ---- all-gather


@spelled_out(Choices)
def allgather(
    tensor: Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    **choices: Unpack[Choices],
) -> Tensor:
    """Concatenate the ranks' tensors along the first dimension, in rank order, on every rank. Differentiable.

    Its gradient, for a loss that is the sum of the ranks' losses: this rank's rows of the sum of the outputs'
    gradients.

    Args:
        tensor: of shape ``(rows, ...)``; ranks may differ in ``rows`` only, which may be 0. Left unchanged.
        name, process_set: as for `allreduce`.

    Returns:
        A new tensor of shape ``(sum of all rows, ...)`` and the same dtype, on the same device.

    Raises:
        InvalidArgumentError (a ValueError): the tensor has no dimension; and all that `collectives.allgather` raises.

    Example:
        >>> hvd.allgather(torch.full((hvd.rank() + 1,), hvd.rank()))
        tensor([0, 1, 1])
    """
    if is_compiling():
        return compiled.allgather(tensor, name, process_set, choices)
    world = world_of(process_set)
    if tracks(tensor):
        return autograd.run(DifferentiableCall(world, "allgather", name, False, {**choices}), [tensor])[0]
    return world.allgather(tensor, **world_options(choices, name))


@spelled_out(Choices)
def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    **choices: Unpack[Choices],
) -> list[Tensor]:
    """`allgather` of several tensors as one grouped operation; the results in order. Differentiable.

    Example:
        >>> hvd.grouped_allgather([torch.tensor([hvd.rank()]), torch.ones(1)])
        [tensor([0, 1]), tensor([1., 1.])]
    """
    if is_compiling():
        return [allgather(tensor, name and f"{name}.{i}", process_set, **choices) for i, tensor in enumerate(tensors)]
    return _grouped_allgather(tensors, name, process_set, choices)


@untraced  # the compiler runs the loop above eagerly if it cannot trace results whose shapes depend on other ranks
def _grouped_allgather(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, choices: Choices
) -> list[Tensor]:
    world = world_of(process_set)
    if any_tracked(tensors):
        return autograd.run(DifferentiableCall(world, "allgather", name, True, {**choices}), tensors)
    return world.grouped_allgather(tensors, **world_options(choices, name))


allgather_async = begun("allgather_async", allgather)
grouped_allgather_async = begun("grouped_allgather_async", grouped_allgather)

# ---- broadcast


@spelled_out(Choices)
def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    **choices: Unpack[Choices],
) -> Tensor:
    """Give every rank the root's tensor. Differentiable.

    Its gradient, for a loss that is the sum of the ranks' losses: on the root the sum of the outputs' gradients, zeros
    elsewhere.

    Args:
        tensor: of equal shape and dtype on every rank; its elements matter on the root only. Left unchanged.
        root_rank: the root, by its number among all ranks, also in a process set.
        name, process_set: as for `allreduce`.

    Returns:
        A new tensor of the same shape and dtype, on the same device.

    Raises:
        InvalidArgumentError (a ValueError): there is no such rank; and all that `collectives.broadcast` raises.

    Example:
        >>> hvd.broadcast(torch.tensor([hvd.rank(), 7]), root_rank=1)
        tensor([1, 7])
    """
    root = root_in(process_set, root_rank, name)
    if is_compiling():
        return compiled.broadcast(tensor, root, name, process_set, choices)
    world = world_of(process_set)
    if tracks(tensor):
        call = DifferentiableCall(world, "broadcast", name, options={**choices}, root=root)
        return autograd.run(call, [tensor])[0]
    return world.broadcast(tensor, root, **world_options(choices, name))


@spelled_out(Choices)
def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    **choices: Unpack[Choices],
) -> Tensor:
    """`broadcast` in place, also of a leaf that requires grad; returns the same tensor object. Not differentiable.

    Example:
        >>> hvd.broadcast_(torch.tensor([hvd.rank(), 7]), root_rank=1)
        tensor([1, 7])
    """
    if is_compiling():
        return compiled.stored(tensor, broadcast(tensor, root_rank, name, process_set, **choices))
    root = root_in(process_set, root_rank, name)
    return written(world_of(process_set).broadcast_(tensor, root, **world_options(choices, name)))


broadcast_async = begun("broadcast_async", broadcast)
broadcast_async_ = begun("broadcast_async_", broadcast)

# ---- all-to-all


@overload
def alltoall(
    tensor: Tensor,
    splits: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    **choices: Unpack[Choices],
) -> Tensor: ...


@overload
def alltoall(
    tensor: Tensor,
    splits: Sequence[int] | torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    **choices: Unpack[Choices],
) -> tuple[Tensor, torch.Tensor]: ...


@spelled_out(Choices)
def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    **choices: Unpack[Choices],
) -> Tensor | tuple[Tensor, torch.Tensor]:
    """Send the first rows to rank 0, the next to rank 1, and so on; receive what each rank sent here, in rank order.
    Differentiable.

    Its gradient, for a loss that is the sum of the ranks' losses: the outputs' gradients, returned to the ranks of the
    rows.

    Args:
        tensor: of shape ``(rows, ...)``; ranks may differ in ``rows``. Left unchanged.
        splits: integers, one per rank, that sum to ``rows``: how many rows go to each; a tensor of any integer dtype on
            any device, or a list. None: equally many.
        name, process_set: as for `allreduce`.

    Returns:
        A new tensor of the rows received. With ``splits``: that, and how many came from each rank, as a tensor of the
        dtype and on the device of ``splits``, or of int32 on the CPU where ``splits`` is no tensor.

    Raises:
        InvalidArgumentError (a ValueError): the tensor has no dimension, or the splits do not fit it; and all that
            `collectives.alltoall` raises.

    Example:
        >>> hvd.alltoall(torch.full((2,), hvd.rank()))
        tensor([0, 1])
    """
    if is_compiling():
        rows, received = compiled.alltoall(tensor, splits, name, process_set, choices)
        return rows if splits is None else (rows, _received(received, splits))
    world = world_of(process_set)
    counts = _counts(splits, tensor, world.size)
    outcome: Any = (
        autograd.alltoall(DifferentiableCall(world, "alltoall", name, options={**choices}, splits=counts), tensor)
        if tracks(tensor)
        else world.alltoall(tensor, counts, **world_options(choices, name))
    )
    return outcome[0] if splits is None else (outcome[0], _received(outcome[1], splits))


@untraced
@spelled_out(Choices)
def alltoall_async(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    **choices: Unpack[Choices],
) -> Derived:
    """Begin an `alltoall` and return a handle at once. Not differentiable.

    Its result is always the pair of the rows received and the number from each rank, as in Horovod.

    Example:
        >>> rows, counts = hvd.synchronize(hvd.alltoall_async(torch.full((2,), hvd.rank())))
        >>> rows
        tensor([0, 1])
    """
    world = world_of(process_set)
    handle = world.alltoall_async(tensor, _counts(splits, tensor, world.size), **world_options(choices, name))
    return Derived(handle, lambda outcome: (outcome[0], _received(outcome[1], splits)))


# ---- without tensors


@untraced
def join(device: int = -1, *, process_set: ProcessSet = global_process_set) -> int:
    """`collectives.join`; ``device`` is part of Horovod's interface and has no effect.

    Example:
        >>> last = hvd.join()
    """
    return api.join(process_set=process_set)


@untraced
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank has called it.

    Example:
        >>> hvd.barrier()
    """
    api.barrier(process_set=process_set)


# ---- splits


def _counts(splits: Any, tensor: Any, size: int) -> Any:
    """The splits for the engine, which returns the numbers of rows received only with splits; None: it will refuse."""
    if splits is None:
        rows = tensor.shape[0] if getattr(tensor, "shape", ()) else 1
        return None if rows % size else [rows // size] * size
    return splits.tolist() if isinstance(splits, torch.Tensor) else splits


def _received(counts: Any, splits: Any) -> Any:
    """The numbers of rows from each rank, in the dtype and on the device of the caller's splits."""
    dtype, device = (splits.dtype, splits.device) if isinstance(splits, torch.Tensor) else (torch.int32, None)
    numbers = counts if isinstance(counts, torch.Tensor) else np.asarray(counts)
    return torch.as_tensor(numbers, dtype=dtype, device=device)
