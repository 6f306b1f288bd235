"""The handles of c10d's calls: each is made of a tensor's elements, and stores its result where the caller wants it.

`Operations` passes these functions to the world's, which submit what they return, or tell the other ranks why it is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from collectives.base.errors import InvalidTypeError, MismatchError
from collectives.base.reduce_op import Op
from collectives.c10d.aliases import aliases
from collectives.engine.handles import Handle
from collectives.engine.requests import HandleFactory
from collectives.tensors import arrays

_PLAIN = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)
"""The dtypes that NumPy has too."""


# ---- tensors


def dense(tensor: Any, operation: str) -> Any:
    if tensor.layout is not torch.strided:
        raise InvalidTypeError(
            f"{operation}: expected a dense tensor, got layout {tensor.layout}; only all_reduce takes sparse tensors "
            "(a sum of COO tensors on the CPU) [T26]"
        )
    return tensor


def is_plain(tensor: Any) -> bool:
    """Whether the memory of a dense tensor holds its elements, in order: a view may negate what its memory holds."""
    return bool(tensor.is_contiguous() and not tensor.is_neg())


def array(tensor: Any) -> Any:
    """The memory of a tensor as a 1-D array, of which the engine makes no view; None if it needs one."""
    if tensor.is_cpu and tensor.dtype in _PLAIN and tensor.layout is torch.strided and is_plain(tensor):
        array = (tensor.detach() if tensor.requires_grad else tensor).numpy()
        return array if array.ndim == 1 else array.reshape(-1)
    return None


def elements_of(tensor: Any) -> Any:
    """The elements of a tensor that is read, in order, and copied only where its strides require that."""
    return tensor.detach().reshape(-1)


def joined(parts: Sequence[Any]) -> Any:
    return torch.cat([elements_of(dense(part, "a list of tensors")) for part in parts])


def result_memory(tensor: Any) -> Any:
    """The memory of a tensor as an array for a result; None where the result has to be copied."""
    if not tensor.is_cpu or tensor.layout is not torch.strided or not is_plain(tensor):
        return None
    view: Any = arrays.view(tensor.detach().view(-1), writable=True)
    return None if view.copied else view.array


def store(flat: Any, tensor: Any) -> None:
    with writing(tensor):
        tensor.copy_(flat.view(tensor.shape))


@contextmanager
def writing(tensor: Any) -> Iterator[None]:
    """Modes of this thread, which may be the engine's, in which a tensor of the caller's is written."""
    with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
        yield


# ---- handles


def allreduce(handles: HandleFactory, tensor: Any, op: Op, in_place: bool = True, **options: Any) -> Handle:
    if tensor.layout is torch.sparse_coo and tensor.is_cpu and op is Op.SUM and in_place:
        return sparse_allreduce(handles, tensor)
    options["op"] = op
    if not in_place:
        return handles.allreduce(options, elements_of(dense(tensor, "all_reduce")), None, False)
    target = dense(tensor, "all_reduce").detach()
    if is_plain(target):
        flat = target.view(-1)
        alias = aliases.of(flat)
        if alias is not None:
            return after(handles.allreduce(options, alias.enter(flat), None, True), lambda _: alias.leave(flat))
        return handles.allreduce(options, flat, None, True)
    flat = target.resolve_neg().reshape(-1)
    return after(handles.allreduce(options, flat, None, True), lambda _: store(flat, target))


def sparse_allreduce(handles: HandleFactory, tensor: Any) -> Handle:
    """The ranks' nonzeros are gathered, and those of equal indices added."""
    coalesced = tensor.detach().coalesce()
    rows = [coalesced.indices().t().contiguous(), coalesced.values()]

    def store(gathered: list[Any]) -> None:
        with writing(tensor):
            tensor.copy_(torch.sparse_coo_tensor(gathered[0].t(), gathered[1], tensor.shape).coalesce())

    return after(handles.grouped({}, handles.allgather, rows), store)


def broadcast(handles: HandleFactory, tensor: Any, root: int, **options: Any) -> Handle:
    target = dense(tensor, "broadcast").detach()
    if is_plain(target):
        return handles.broadcast(options, target.view(-1), root, True)
    flat = target.resolve_neg().reshape(-1)
    return after(handles.broadcast(options, flat, root, True), lambda _: store(flat, target))


def grouped(
    handles: HandleFactory, items: list[Any], make: Callable[..., Handle], *further: Any, **options: Any
) -> Handle:
    """What ``make`` makes of each item, as one operation."""

    def member(shared: Any, item: Any, *rest: Any) -> Handle:
        return make(handles, item, *rest, **shared)

    member.__name__ = make.__name__
    return handles.grouped(options, member, items, *further)


def reduce_scatter(handles: HandleFactory, pair: tuple[Any, Any], op: Op, **options: Any) -> Handle:
    out, whole = pair
    flat = elements_of(dense(whole, "reduce_scatter"))
    memory = None if share_memory(out, whole) else result_memory(out)
    return into(handles.reducescatter(options, flat, op, memory), out, memory)


def reduce_scatter_list(
    handles: HandleFactory, out: Any, parts: Sequence[Any], rank: int, op: Op, **options: Any
) -> Handle:
    """Shares of different sizes are rare: by an all-reduce."""
    whole, sizes = joined(parts), [part.numel() for part in parts]
    if len(set(sizes)) == 1:
        return reduce_scatter(handles, (out, whole), op, **options)
    at = sum(sizes[:rank])
    return after(allreduce(handles, whole, op, **options), lambda _: store(whole[at : at + out.numel()], out))


def gather(handles: HandleFactory, pair: tuple[Any, Any], **options: Any) -> Handle:
    out, part = pair
    flat = elements_of(dense(part, "all_gather_into_tensor"))
    memory = result_memory(out)
    handle, count = into(handles.allgather(options, flat, memory), out, memory), len(flat)
    return after(handle, lambda _: check_counts(handle, [count] * (out.numel() // count))) if count else handle


def gather_to_list(handles: HandleFactory, pair: tuple[Any, Sequence[Any]], **options: Any) -> Handle:
    tensor, parts = pair
    check_dtype(parts, tensor, "all_gather")
    return to_list(handles.allgather(options, elements_of(dense(tensor, "all_gather"))), parts)


def exchange(
    handles: HandleFactory, out: Any, whole: Any, sent: list[int], received: list[int], **options: Any
) -> Handle:
    memory = None if share_memory(out, whole) else result_memory(out)
    handle = handles.alltoall(options, elements_of(dense(whole, "all_to_all")), sent, memory)
    return after(into(handle, out, memory), lambda _: check_counts(handle, received))


def exchange_lists(
    handles: HandleFactory, parts: Sequence[Any], whole: Sequence[Any], sent: list[int], **options: Any
) -> Handle:
    check_dtype(parts, whole[0], "all_to_all")
    flat = elements_of(dense(whole[0], "all_to_all")) if len(whole) == 1 else joined(whole)
    return to_list(handles.alltoall(options, flat, sent), parts)


def scatter(handles: HandleFactory, out: Any, parts: Sequence[Any], root: int, size: int) -> Handle:
    nothing = dense(out, "scatter").new_empty(0)
    received = [nothing] * size
    received[root] = out
    return exchange_lists(handles, received, parts or [nothing], [part.numel() for part in parts] or [0] * size)


def into(handle: Handle, out: Any, memory: Any) -> Handle:
    """Have the result stored in ``out``, unless it is made there."""
    return handle if memory is not None else after(handle, lambda result: store(result_tensor(result), out))


def to_list(handle: Handle, parts: Sequence[Any]) -> Handle:
    """Have the ranks' elements stored in one tensor each."""
    if not parts:
        return handle

    def divide(result: Any) -> None:
        flat, expected = result_tensor(result), [part.numel() for part in parts]
        check_counts(handle, expected)
        for part, elements in zip(parts, flat.split(expected), strict=True):
            store(elements, part)

    return after(handle, divide)


def check_dtype(parts: Sequence[Any], sent: Any, operation: str) -> None:
    other = next((part.dtype for part in parts if part.dtype != sent.dtype), None)
    if other is not None:
        raise InvalidTypeError(
            f"{operation}: expected tensors of dtype {sent.dtype} for the result, as for the input, got {other} [F98]"
        )


def check_counts(handle: Handle, expected: list[int]) -> None:
    check_received(handle.title, handle.gathered if isinstance(handle.gathered, list) else handle.gathered[1], expected)


def check_received(title: str, received: Sequence[int], expected: list[int]) -> None:
    if list(received) != expected:
        raise MismatchError(
            f"{title}: expected {expected} elements from the ranks, the sizes of the output tensors, but the ranks "
            f"sent {list(received)}; pass output tensors of the sizes sent [M1]"
        )


def result_tensor(result: Any) -> Any:
    """The tensor of a result; that of an all-to-all comes with the numbers of elements received."""
    return result[0] if isinstance(result, tuple) else result


def barrier(handles: HandleFactory, **options: Any) -> Handle:
    return handles.barrier()


def share_memory(first: Any, second: Any) -> bool:
    return bool(first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr())


def after(handle: Handle, finish: Callable[[Any], object]) -> Handle:
    """Have ``finish(result)`` called when the operation's result is there: as a part of the operation on the host,
    before the caller's next work on a GPU."""
    if handle.fence is not None:

        def pass_on(result: Any) -> Any:
            finish(result)
            return result

        handle.fence.then(pass_on)
        return handle
    deliver = handle.deliver

    def finished(completed: Handle) -> Any:
        result = deliver(completed)
        finish(result)
        return result

    handle.deliver = finished
    return handle
