"""All-reduce of sparse tensors: the ranks' nonzeros are gathered, and elements of equal indices are added."""

from __future__ import annotations

from typing import Any

import torch

from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.base.reduce_op import Op
from collectives.torch.compiled import untraced
from collectives.torch.handles import Derived
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import global_process_set, world_of

_MOST_INT32 = 2**31 - 1


@untraced
def sparse_allreduce_async(
    tensor: Any, name: str | None, op: Op, process_set: ProcessSet = global_process_set
) -> Derived:
    """Begin the all-reduce of a sparse tensor, and return at once.

    Each rank coalesces its nonzeros and sends them, with indices as int32 where the shape allows. That is cheaper than
    a dense all-reduce if all ranks' nonzeros together are few.

    Args:
        tensor: in torch's COO layout, hybrid or not, on the CPU or a GPU; of equal shape, dtype and number of sparse
            dimensions on every rank, with any number of nonzeros, which may be 0. Left unchanged.
        name: of the operation; None: matched by order of call.
        op: Average or Sum.
        process_set: the ranks that take part.

    Returns:
        A handle, for `synchronize` or to be called. Its result is a new COO tensor of the input's shape, not coalesced.
        An average of integers truncates toward zero as a dense one does, and is coalesced.

    Raises:
        InvalidArgumentError (a ValueError): another ``op``. InvalidTypeError: not a COO tensor. MismatchError, by the
            handle: the ranks' tensors do not match.

    Example:
        >>> gradient = torch.sparse_coo_tensor([[hvd.rank()]], [1.0], (3,))
        >>> hvd.synchronize(hvd.sparse_allreduce_async(gradient, None, hvd.Sum)).to_dense()
        tensor([1., 1., 0.])
    """
    world = world_of(process_set)
    with world.refusing(name):
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
            got = f"layout {tensor.layout}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise InvalidTypeError(
                f"tensor: expected a sparse COO tensor, got {got}; allreduce_async takes dense ones [T33]"
            )
        if op not in (Op.SUM, Op.AVERAGE):
            raise InvalidArgumentError(
                f"op: expected Average or Sum of a sparse tensor, got {op!r}; use Sum, or tensor.to_dense() [T34]"
            )
        shape = tensor.shape
        coalesced = tensor.detach().coalesce()
        # One row for each nonzero, because rows are gathered.
        indices, values = coalesced.indices().t(), coalesced.values()
        if max(shape, default=0) <= _MOST_INT32:
            indices = indices.to(torch.int32)
        exact = values.is_floating_point() or values.is_complex()
        if op is Op.AVERAGE and exact:
            values = values / world.size

    def build(gathered: list[Any]) -> Any:
        result = torch.sparse_coo_tensor(gathered[0].t().to(torch.int64), gathered[1], shape, check_invariants=False)
        if op is Op.AVERAGE and not exact:
            result = result.coalesce()
            result.values().div_(world.size, rounding_mode="trunc")
        return result

    return Derived(world.grouped_allgather_async([indices, values], name=name), build)
