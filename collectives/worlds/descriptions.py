"""Each collective once: its parameters, its documentation, and the handle that is made of a call.

A description takes the maker of handles, the positional arguments and the keywords that the caller has given. The
blocking, asynchronous and persistent functions of worlds and of `collectives` follow from it
(`collectives.worlds.operations`, `collectives.worlds.persistent_init`, `collectives.api`). `collectives.allreduce`
documents the keywords and the errors that all share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from collectives.base.reduce_op import Op
from collectives.engine.handles import Handle
from collectives.engine.requests import HandleFactory

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from collectives.base.options import CallOptions, ReduceOptions, ScaleOptions

Tensor = TypeVar("Tensor")


def allreduce(
    handles: HandleFactory, tensor: Tensor, average: bool | None = None, **options: Unpack[ReduceOptions]
) -> Handle[Tensor]:
    """See `collectives.allreduce`.

    Example:
        >>> hvd.allreduce(np.array([hvd.rank(), 4.0]))
        array([0.5, 4. ])
    """
    return handles.allreduce(options, tensor, average, False)


def allreduce_(
    handles: HandleFactory, tensor: Tensor, average: bool | None = None, **options: Unpack[ReduceOptions]
) -> Handle[Tensor]:
    """See `collectives.allreduce_`.

    Example:
        >>> hvd.allreduce_(np.array([hvd.rank(), 4.0]), op=hvd.Sum)
        array([1., 8.])
    """
    return handles.allreduce(options, tensor, average, True)


def grouped_allreduce(
    handles: HandleFactory, tensors: Sequence[Tensor], average: bool | None = None, **options: Unpack[ReduceOptions]
) -> Handle[list[Tensor]]:
    """`allreduce` of several tensors that are carried out, and complete, together.

    ``tensors`` is a list or tuple, equally long on every rank; dtypes may be mixed. Returns the results in order.

    Example:
        >>> hvd.grouped_allreduce([np.ones(2), np.arange(3)], op=hvd.Sum)
        [array([2., 2.]), array([0, 2, 4])]
    """
    return handles.grouped(options, handles.allreduce, tensors, average, False)


def grouped_allreduce_(
    handles: HandleFactory, tensors: Sequence[Tensor], average: bool | None = None, **options: Unpack[ReduceOptions]
) -> Handle[list[Tensor]]:
    """`grouped_allreduce` in place; returns the tensors themselves.

    The tensors may share memory, as tied gradients do: each is reduced with the elements that it had when it was
    passed, and where they overlap the last one's result stands.

    Example:
        >>> hvd.grouped_allreduce_([np.ones(2), np.arange(3)], op=hvd.Sum)
        [array([2., 2.]), array([0, 2, 4])]
    """
    return handles.grouped(options, handles.allreduce, tensors, average, True)


def reducescatter(
    handles: HandleFactory, tensor: Tensor, op: Op | None = Op.AVERAGE, **options: Unpack[ScaleOptions]
) -> Handle[Tensor]:
    """Combine the ranks' tensors and give each rank its share of the rows, as a new tensor.

    Args:
        tensor: of shape ``(rows, ...)``, equal on every rank. Rows that do not divide evenly go to the first ranks, one
            each.
        op: as for `allreduce`, without Adasum.
        algorithm: "ring" or "direct".

    Example:
        >>> hvd.reducescatter(np.ones(4), op=hvd.Sum)
        array([2., 2.])
    """
    return handles.reducescatter(options, tensor, op)


def grouped_reducescatter(
    handles: HandleFactory, tensors: Sequence[Tensor], op: Op | None = Op.AVERAGE, **options: Unpack[ScaleOptions]
) -> Handle[list[Tensor]]:
    """`reducescatter` of several tensors that complete together; the results in order.

    Example:
        >>> hvd.grouped_reducescatter([np.ones(4), np.ones(2)], op=hvd.Sum)
        [array([2., 2.]), array([2.])]
    """
    return handles.grouped(options, handles.reducescatter, tensors, op)


def allgather(handles: HandleFactory, tensor: Tensor, **options: Unpack[CallOptions]) -> Handle[Tensor]:
    """Concatenate the ranks' tensors along the first dimension, in rank order, on every rank.

    Args:
        tensor: of shape ``(rows, ...)``; ranks may differ in ``rows`` only, which may be 0.
        algorithm: "ring" or "direct".

    Returns a new tensor of shape ``(sum of all rows, ...)``.

    Example:
        >>> hvd.allgather(np.full(hvd.rank() + 1, hvd.rank()))
        array([0, 1, 1])
    """
    return handles.allgather(options, tensor)


def grouped_allgather(
    handles: HandleFactory, tensors: Sequence[Tensor], **options: Unpack[CallOptions]
) -> Handle[list[Tensor]]:
    """`allgather` of several tensors that complete together; the results in order.

    Example:
        >>> hvd.grouped_allgather([np.array([hvd.rank()]), np.ones(1)])
        [array([0, 1]), array([1., 1.])]
    """
    return handles.grouped(options, handles.allgather, tensors)


def broadcast(handles: HandleFactory, tensor: Tensor, root_rank: int, **options: Unpack[CallOptions]) -> Handle[Tensor]:
    """Give every rank the root's tensor, as a new tensor.

    Args:
        tensor: equal shape and dtype on every rank; its elements matter on the root only. Left unchanged.
        root_rank: the root's number among all ranks; equal on every rank.
        algorithm: "ring", "direct", "one-shot" or "recursive-doubling".

    Example:
        >>> hvd.broadcast(np.array([hvd.rank(), 7]), root_rank=1)
        array([1, 7])
    """
    return handles.broadcast(options, tensor, root_rank, False)


def broadcast_(
    handles: HandleFactory, tensor: Tensor, root_rank: int, **options: Unpack[CallOptions]
) -> Handle[Tensor]:
    """`broadcast` in place: the root's elements replace those of the other ranks' tensors. Returns the tensor itself.

    Tensors of broadcasts from the same root may share memory, as tied weights do.

    Raises:
        InvalidArgumentError: the tensor is read-only, also on the root.

    Example:
        >>> hvd.broadcast_(np.array([hvd.rank(), 7]), root_rank=1)
        array([1, 7])
    """
    return handles.broadcast(options, tensor, root_rank, True)


def grouped_broadcast(
    handles: HandleFactory, tensors: Sequence[Tensor], root_rank: int, **options: Unpack[CallOptions]
) -> Handle[list[Tensor]]:
    """`broadcast` of several tensors that complete together; the results in order.

    Example:
        >>> hvd.grouped_broadcast([np.array([hvd.rank()]), np.ones(2)], root_rank=1)
        [array([1]), array([1., 1.])]
    """
    return handles.grouped(options, handles.broadcast, tensors, root_rank, False)


def grouped_broadcast_(
    handles: HandleFactory, tensors: Sequence[Tensor], root_rank: int, **options: Unpack[CallOptions]
) -> Handle[list[Tensor]]:
    """`grouped_broadcast` in place; returns the tensors themselves, which may share memory.

    Example:
        >>> hvd.grouped_broadcast_([np.array([hvd.rank()]), np.ones(2)], root_rank=1)
        [array([1]), array([1., 1.])]
    """
    return handles.grouped(options, handles.broadcast, tensors, root_rank, True)


@overload
def alltoall(
    handles: HandleFactory, tensor: Tensor, splits: None = None, **options: Unpack[CallOptions]
) -> Handle[Tensor]: ...


@overload
def alltoall(
    handles: HandleFactory,
    tensor: Tensor,
    splits: Sequence[int] | npt.NDArray[Any],
    **options: Unpack[CallOptions],
) -> Handle[tuple[Tensor, npt.NDArray[np.int64]]]: ...


@overload
def alltoall(
    handles: HandleFactory,
    tensor: Tensor,
    splits: Sequence[int] | npt.NDArray[Any] | None,
    **options: Unpack[CallOptions],
) -> Handle[Any]: ...


def alltoall(
    handles: HandleFactory, tensor: Tensor, splits: Any = None, **options: Unpack[CallOptions]
) -> Handle[Tensor | tuple[Tensor, npt.NDArray[np.int64]]]:
    """Send the first rows to rank 0, the next to rank 1, and so on; receive each rank's rows in rank order.

    Args:
        tensor: of shape ``(rows, ...)``; ranks may differ in ``rows``.
        splits: integers, one per rank, that sum to ``rows``: how many rows go to each. None: equally many.
        algorithm: "direct".

    Returns a new tensor of the rows received; with ``splits`` also their number from each rank, as an int64 array.

    Example:
        >>> hvd.alltoall(np.full(2, hvd.rank()))
        array([0, 1])
    """
    return handles.alltoall(options, tensor, splits)
