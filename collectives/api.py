"""The functions that users call: the operations of the default world, or of a process set's.

Memory that an operation in flight writes may not be read or written by another one, whichever names, process sets or
views they have; it is refused with an InvalidArgumentError that names both, and the other ranks get a MismatchError.
Memory that is only read may be shared. So may memory that broadcasts from the same root write. An operation is in
flight from its submission until it is complete.

`allreduce` documents the keywords and the errors that all functions share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from collectives.base.options import (
    CallOptions,
    RarerCallOptions,
    RarerReduceOptions,
    ReduceOptions,
    ScaleOptions,
    spelled_out,
)
from collectives.base.reduce_op import Op
from collectives.engine.handles import Handle
from collectives.worlds.persistent import PersistentOperation
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import default, root_in, world, world_of
from collectives.worlds.world import World

if TYPE_CHECKING:
    from typing_extensions import Unpack

Tensor = TypeVar("Tensor")

Average, Sum, Min, Max, Product, Adasum = Op.AVERAGE, Op.SUM, Op.MIN, Op.MAX, Op.PRODUCT, Op.ADASUM


def _world(options: RarerCallOptions) -> World:
    """The world of a call; takes ``process_set`` out of its keywords."""
    process_set = options.pop("process_set", None) if options else None
    return default.world or world() if process_set is None else world_of(process_set)


def _rooted(root_rank: int, options: CallOptions) -> tuple[World, int]:
    """The world of a call, and a rank of all ranks as a rank of that world."""
    root = root_in(options.get("process_set"), root_rank, options.get("name"))
    return _world(options), root


@spelled_out(ReduceOptions)
def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    *,
    op: Op | None = None,
    name: str | None = None,
    **rarer: Unpack[RarerReduceOptions],
) -> Tensor:
    """Combine the ranks' tensors element by element.

    Every rank gets the same result, bit for bit; apart from NaN's payload, and zeros' signs in Min and Max.

    Args:
        tensor: equal shape and dtype on every rank: a NumPy array or scalar, a number, anything on the CPU with the
            buffer protocol, ``__array_interface__`` or DLPack, or anything on an NVIDIA GPU with DLPack or
            ``__cuda_array_interface__`` (CuPy, torch, JAX, ...). Left unchanged.
        average: instead of ``op``: True for Average, False for Sum. Only one of the two may be given.
        op: Average (the default), Sum, Min, Max, Product, or Adasum (see `collectives.engine.adasum`).
        name: operations of different names may come in any order; unnamed ones are matched by order of call.
        prescale_factor, postscale_factor: multiply each rank's tensor first, and the result.
        compression: `Compression.fp16` or ``bf16``, as which float32 and float64 travel; or any object with
            ``compress`` and ``decompress``.
        process_set: the ranks that take part; all by default.
        algorithm: "ring", "direct", "one-shot", "recursive-doubling", "hierarchical", "inline" or "native"; chosen by
            default.
        transport: "window", "direct-read", or messages, "mpi" (or "tcp", where TCP carries them), for the ranks of one
            host; of GPU tensors "cuda-ipc", "nccl" or "host"; chosen by default.
        stream: of a GPU tensor: the CUDA stream after whose work it is read, and before whose later work the result is
            ready; the framework's current one by default. No synchronisation is needed.

    Returns:
        A new tensor of the caller's type, shape and dtype. float16 and bfloat16 are combined in float32 and rounded in
        every step. Integer averages truncate toward zero; integers wrap on overflow. For bool, Sum and Max mean "or";
        Product, Min and Average mean "and".

    Raises:
        NotInitializedError, InvalidTypeError, InvalidArgumentError, TypeError: an argument that no rank can accept;
            both ``average`` and ``op``; no such keyword.
        MismatchError: the ranks' requests differ; raised on every rank, no tensor was touched.
        RankFailedError, CollectiveTimeoutError: another rank failed, or did not make the call.
    """
    if rarer:
        return _world(rarer).allreduce(tensor, average, op=op, name=name, **rarer)
    return (default.world or world()).allreduce(tensor, average, op=op, name=name)


@spelled_out(ReduceOptions)
def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    *,
    op: Op | None = None,
    name: str | None = None,
    **rarer: Unpack[RarerReduceOptions],
) -> Tensor:
    """`allreduce` in place: the result replaces the tensor's elements, in any writable memory layout.

    Returns the tensor itself. After a mismatch it is unchanged; after a failure in mid-call it is undefined.

    Raises:
        InvalidArgumentError: the tensor is read-only, or its elements overlap.
    """
    if rarer:
        return _world(rarer).allreduce_(tensor, average, op=op, name=name, **rarer)
    return (default.world or world()).allreduce_(tensor, average, op=op, name=name)


@spelled_out(ReduceOptions)
def allreduce_async(tensor: Tensor, average: bool | None = None, **options: Unpack[ReduceOptions]) -> Handle[Tensor]:
    """Begin an `allreduce` and return at once.

    Returns a handle, with `wait` and `poll`. The tensor must not change until the operation is done; other operations
    may read it meanwhile.

    Raises:
        InvalidArgumentError: an operation of this name is in flight, or one that writes this tensor's memory. Errors
            that only the ranks together can detect are raised by `Handle.wait`.
    """
    return _world(options).allreduce_async(tensor, average, **options)


@spelled_out(ReduceOptions)
def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    *,
    op: Op | None = None,
    name: str | None = None,
    **rarer: Unpack[RarerReduceOptions],
) -> Handle[Tensor]:
    """Begin an `allreduce_` and return at once; the tensor may not be used until it is done.

    Raises:
        InvalidArgumentError: as `allreduce_async`; or an operation in flight reads or writes this tensor's memory:
            synchronize that one first, or pass one of the two a copy.
    """
    if rarer:
        return _world(rarer).allreduce_async_(tensor, average, op=op, name=name, **rarer)
    return (default.world or world()).allreduce_async_(tensor, average, op=op, name=name)


@spelled_out(ReduceOptions)
def grouped_allreduce(
    tensors: Sequence[Tensor], average: bool | None = None, **options: Unpack[ReduceOptions]
) -> list[Tensor]:
    """`allreduce` of several tensors that are carried out, and complete, together.

    ``tensors`` is a list or tuple, equally long on every rank; dtypes may be mixed. Returns the results in order.
    """
    return _world(options).grouped_allreduce(tensors, average, **options)


@spelled_out(ReduceOptions)
def grouped_allreduce_(
    tensors: Sequence[Tensor], average: bool | None = None, **options: Unpack[ReduceOptions]
) -> list[Tensor]:
    """`grouped_allreduce` in place; returns the tensors themselves.

    The tensors may share memory, as tied gradients do: each is reduced with the elements that it had when it was
    passed, and where they overlap the last one's result stands.
    """
    return _world(options).grouped_allreduce_(tensors, average, **options)


@spelled_out(ReduceOptions)
def grouped_allreduce_async(
    tensors: Sequence[Tensor], average: bool | None = None, **options: Unpack[ReduceOptions]
) -> Handle[list[Tensor]]:
    """Begin a `grouped_allreduce`; one handle for all tensors."""
    return _world(options).grouped_allreduce_async(tensors, average, **options)


@spelled_out(ReduceOptions)
def grouped_allreduce_async_(
    tensors: Sequence[Tensor], average: bool | None = None, **options: Unpack[ReduceOptions]
) -> Handle[list[Tensor]]:
    """Begin a `grouped_allreduce_`; one handle for all tensors."""
    return _world(options).grouped_allreduce_async_(tensors, average, **options)


@spelled_out(ScaleOptions)
def reducescatter(tensor: Tensor, op: Op | None = Op.AVERAGE, **options: Unpack[ScaleOptions]) -> Tensor:
    """Combine the ranks' tensors and give each rank its share of the rows, as a new tensor.

    Args:
        tensor: of shape ``(rows, ...)``, equal on every rank. Rows that do not divide evenly go to the first ranks, one
            each.
        op: as for `allreduce`, without Adasum.
        algorithm: "ring" or "direct".
    """
    return _world(options).reducescatter(tensor, op, **options)


@spelled_out(ScaleOptions)
def reducescatter_async(tensor: Tensor, op: Op | None = Op.AVERAGE, **options: Unpack[ScaleOptions]) -> Handle[Tensor]:
    """Begin a `reducescatter` and return its handle at once."""
    return _world(options).reducescatter_async(tensor, op, **options)


@spelled_out(ScaleOptions)
def grouped_reducescatter(
    tensors: Sequence[Tensor], op: Op | None = Op.AVERAGE, **options: Unpack[ScaleOptions]
) -> list[Tensor]:
    """`reducescatter` of several tensors that complete together; the results in order."""
    return _world(options).grouped_reducescatter(tensors, op, **options)


@spelled_out(ScaleOptions)
def grouped_reducescatter_async(
    tensors: Sequence[Tensor], op: Op | None = Op.AVERAGE, **options: Unpack[ScaleOptions]
) -> Handle[list[Tensor]]:
    """Begin a `grouped_reducescatter`; one handle for all tensors."""
    return _world(options).grouped_reducescatter_async(tensors, op, **options)


@spelled_out(CallOptions)
def allgather(tensor: Tensor, **options: Unpack[CallOptions]) -> Tensor:
    """Concatenate the ranks' tensors along the first dimension, in rank order, on every rank.

    Args:
        tensor: of shape ``(rows, ...)``; ranks may differ in ``rows`` only, which may be 0.
        algorithm: "ring" or "direct".

    Returns a new tensor of shape ``(sum of all rows, ...)``.
    """
    return _world(options).allgather(tensor, **options)


@spelled_out(CallOptions)
def allgather_async(tensor: Tensor, **options: Unpack[CallOptions]) -> Handle[Tensor]:
    """Begin an `allgather` and return its handle at once."""
    return _world(options).allgather_async(tensor, **options)


@spelled_out(CallOptions)
def grouped_allgather(tensors: Sequence[Tensor], **options: Unpack[CallOptions]) -> list[Tensor]:
    """`allgather` of several tensors that complete together; the results in order."""
    return _world(options).grouped_allgather(tensors, **options)


@spelled_out(CallOptions)
def grouped_allgather_async(tensors: Sequence[Tensor], **options: Unpack[CallOptions]) -> Handle[list[Tensor]]:
    """Begin a `grouped_allgather`; one handle for all tensors."""
    return _world(options).grouped_allgather_async(tensors, **options)


@spelled_out(CallOptions)
def broadcast(tensor: Tensor, root_rank: int, **options: Unpack[CallOptions]) -> Tensor:
    """Give every rank the root's tensor, as a new tensor.

    Args:
        tensor: equal shape and dtype on every rank; its elements matter on the root only. Left unchanged.
        root_rank: the root's number among all ranks; equal on every rank.
        algorithm: "ring", "direct", "one-shot" or "recursive-doubling".
    """
    world, root = _rooted(root_rank, options)
    return world.broadcast(tensor, root, **options)


@spelled_out(CallOptions)
def broadcast_(tensor: Tensor, root_rank: int, **options: Unpack[CallOptions]) -> Tensor:
    """`broadcast` in place: the root's elements replace those of the other ranks' tensors. Returns the tensor itself.

    Raises:
        InvalidArgumentError: the tensor is read-only, also on the root.
    """
    world, root = _rooted(root_rank, options)
    return world.broadcast_(tensor, root, **options)


@spelled_out(CallOptions)
def broadcast_async(tensor: Tensor, root_rank: int, **options: Unpack[CallOptions]) -> Handle[Tensor]:
    """Begin a `broadcast` and return its handle at once."""
    world, root = _rooted(root_rank, options)
    return world.broadcast_async(tensor, root, **options)


@spelled_out(CallOptions)
def broadcast_async_(tensor: Tensor, root_rank: int, **options: Unpack[CallOptions]) -> Handle[Tensor]:
    """Begin a `broadcast_`; tensors of broadcasts from the same root may share memory, as tied weights do."""
    world, root = _rooted(root_rank, options)
    return world.broadcast_async_(tensor, root, **options)


@spelled_out(CallOptions)
def grouped_broadcast(tensors: Sequence[Tensor], root_rank: int, **options: Unpack[CallOptions]) -> list[Tensor]:
    """`broadcast` of several tensors that complete together; the results in order."""
    world, root = _rooted(root_rank, options)
    return world.grouped_broadcast(tensors, root, **options)


@spelled_out(CallOptions)
def grouped_broadcast_(tensors: Sequence[Tensor], root_rank: int, **options: Unpack[CallOptions]) -> list[Tensor]:
    """`grouped_broadcast` in place; returns the tensors themselves, which may share memory."""
    world, root = _rooted(root_rank, options)
    return world.grouped_broadcast_(tensors, root, **options)


@spelled_out(CallOptions)
def grouped_broadcast_async(
    tensors: Sequence[Tensor], root_rank: int, **options: Unpack[CallOptions]
) -> Handle[list[Tensor]]:
    """Begin a `grouped_broadcast`; one handle for all tensors."""
    world, root = _rooted(root_rank, options)
    return world.grouped_broadcast_async(tensors, root, **options)


@spelled_out(CallOptions)
def grouped_broadcast_async_(
    tensors: Sequence[Tensor], root_rank: int, **options: Unpack[CallOptions]
) -> Handle[list[Tensor]]:
    """Begin a `grouped_broadcast_`; one handle for all tensors."""
    world, root = _rooted(root_rank, options)
    return world.grouped_broadcast_async_(tensors, root, **options)


@overload
def alltoall(tensor: Tensor, splits: None = None, **options: Unpack[CallOptions]) -> Tensor: ...


@overload
def alltoall(
    tensor: Tensor, splits: Sequence[int] | npt.NDArray[Any], **options: Unpack[CallOptions]
) -> tuple[Tensor, npt.NDArray[np.int64]]: ...


@spelled_out(CallOptions)
def alltoall(
    tensor: Tensor, splits: Any = None, **options: Unpack[CallOptions]
) -> Tensor | tuple[Tensor, npt.NDArray[np.int64]]:
    """Send the first rows to rank 0, the next to rank 1, and so on; receive each rank's rows in rank order.

    Args:
        tensor: of shape ``(rows, ...)``; ranks may differ in ``rows``.
        splits: integers, one per rank, that sum to ``rows``: how many rows go to each. None: equally many.
        algorithm: "direct".

    Returns a new tensor of the rows received; with ``splits`` also their number from each rank, as an int64 array.
    """
    return _world(options).alltoall(tensor, splits, **options)


@spelled_out(CallOptions)
def alltoall_async(tensor: Any, splits: Any = None, **options: Unpack[CallOptions]) -> Handle[Any]:
    """Begin an `alltoall` and return its handle at once."""
    return _world(options).alltoall_async(tensor, splits, **options)


@spelled_out(ReduceOptions)
def allreduce_init(
    tensor: Tensor, average: bool | None = None, *, out: Any = None, **options: Unpack[ReduceOptions]
) -> PersistentOperation[Tensor]:
    """Make an `allreduce` that is started any number of times, in place: the result replaces the tensor's elements.

    Every rank makes it with the same call; a start then costs the ranks one word each. It has ``start()``, ``wait()``
    and a call that does both, and keeps the tensor until ``free()``. Every start counts like a call of `allreduce_`:
    starts and other operations may be mixed in any way, in the same order on every rank unless they have names.

    Args:
        tensor: writable; most is gained with contiguous NumPy arrays and torch tensors on the CPU. On a GPU, in any
            other layout, with ``compression``, ``prescale_factor`` or Adasum every start works as the ordinary
            operation does. Its memory, shape and layout must remain as they are.
        out: contiguous memory for the result, of the tensor's shape and dtype, and apart from it; the tensor is left
            unchanged then.
        name: of every start.

    Raises:
        InvalidTypeError: a tensor that never changes, as of JAX and TensorFlow.
        MismatchError: the ranks' calls differ, or a rank has joined.
    """
    return _world(options).allreduce_init(tensor, average, out=out, **options)


@spelled_out(ReduceOptions)
def grouped_allreduce_init(
    tensors: Sequence[Tensor], average: bool | None = None, **options: Unpack[ReduceOptions]
) -> PersistentOperation[list[Tensor]]:
    """`allreduce_init` of several tensors that are carried out together, in place: one start for all of them."""
    return _world(options).grouped_allreduce_init(tensors, average, **options)


@spelled_out(ScaleOptions)
def reducescatter_init(
    tensor: Tensor, op: Op | None = Op.AVERAGE, **options: Unpack[ScaleOptions]
) -> PersistentOperation[Tensor]:
    """Make a `reducescatter` that is started any number of times, as `allreduce_init` does.

    Its result is made once: every start returns the same tensor, with new elements. (A new one, where a start works as
    the ordinary operation does.)
    """
    return _world(options).reducescatter_init(tensor, op, **options)


@spelled_out(ScaleOptions)
def grouped_reducescatter_init(
    tensors: Sequence[Tensor], op: Op | None = Op.AVERAGE, **options: Unpack[ScaleOptions]
) -> PersistentOperation[list[Tensor]]:
    """`reducescatter_init` of several tensors that complete together; the results in order."""
    return _world(options).grouped_reducescatter_init(tensors, op, **options)


@spelled_out(CallOptions)
def allgather_init(tensor: Tensor, **options: Unpack[CallOptions]) -> PersistentOperation[Tensor]:
    """Make an `allgather` that is started any number of times, as `allreduce_init` does.

    The ranks agree on their rows when it is made. Its result is made once, as that of `reducescatter_init`. It cannot
    be started while a rank has joined.
    """
    return _world(options).allgather_init(tensor, **options)


@spelled_out(CallOptions)
def grouped_allgather_init(
    tensors: Sequence[Tensor], **options: Unpack[CallOptions]
) -> PersistentOperation[list[Tensor]]:
    """`allgather_init` of several tensors that complete together; the results in order."""
    return _world(options).grouped_allgather_init(tensors, **options)


@spelled_out(CallOptions)
def broadcast_init(tensor: Tensor, root_rank: int, **options: Unpack[CallOptions]) -> PersistentOperation[Tensor]:
    """Make a `broadcast_` that is started any number of times, as `allreduce_init` does."""
    world, root = _rooted(root_rank, options)
    return world.broadcast_init(tensor, root, **options)


@spelled_out(CallOptions)
def grouped_broadcast_init(
    tensors: Sequence[Tensor], root_rank: int, **options: Unpack[CallOptions]
) -> PersistentOperation[list[Tensor]]:
    """`broadcast_init` of several tensors that complete together, in place."""
    world, root = _rooted(root_rank, options)
    return world.grouped_broadcast_init(tensors, root, **options)


@spelled_out(CallOptions)
def alltoall_init(tensor: Any, splits: Any = None, **options: Unpack[CallOptions]) -> PersistentOperation[Any]:
    """Make an `alltoall` that is started any number of times, as `allgather_init` does.

    With ``splits`` every start returns the rows received and their numbers, as `alltoall` does.
    """
    return _world(options).alltoall_init(tensor, splits, **options)


def barrier(*, process_set: ProcessSet | None = None) -> None:
    """Return when every rank has called it."""
    world_of(process_set).barrier()


def broadcast_object(
    value: Tensor, root_rank: int = 0, *, name: str | None = None, process_set: ProcessSet | None = None
) -> Tensor:
    """Give every rank the root's (picklable) object; those of other ranks are ignored. The root gets its own back."""
    return world_of(process_set).broadcast_object(value, root_in(process_set, root_rank, name), name=name)


def allgather_object(value: Tensor, *, name: str | None = None, process_set: ProcessSet | None = None) -> list[Tensor]:
    """Give every rank every rank's (picklable) object, as a list in rank order."""
    return world_of(process_set).allgather_object(value, name=name)


def poll(handle: Handle) -> bool:
    """``handle.poll()``, under Horovod's name."""
    return world().poll(handle)


def synchronize(handle: Handle[Tensor], timeout: float | None = None) -> Tensor:
    """``handle.wait(timeout)``, under Horovod's name."""
    return (default.world or world()).synchronize(handle, timeout)


def join(*, process_set: ProcessSet | None = None) -> int:
    """Contribute neutral elements to the other ranks' operations until all ranks have joined, for lack of data.

    These are zeros to a sum, no rows to allgather and alltoall; Average still divides by the number of all ranks. A
    broadcast whose root has joined raises a MismatchError on the ranks that call it. Returns the last rank to join; of
    several at once, the highest.
    """
    return world_of(process_set).join()


def check_consistency(tensors: Any, *, process_set: ProcessSet | None = None) -> None:
    """Compare tensors over the ranks by a hash of each.

    Args:
        tensors: a mapping of names to tensors, a sequence of them, or of pairs of name and tensor.

    Raises:
        MismatchError: names the first tensor that differs, in what, and on which ranks.
    """
    world_of(process_set).check_consistency(tensors)


def empty_cache(*, process_set: ProcessSet | None = None) -> int:
    """Release memory that is held but not in use; every rank calls it.

    On the host, that is what dropped results and dropped arrays of `collectives.empty` have left for reuse.

    On GPUs, a rank maps the memory of its peers' tensors and keeps the mapping, so that memory which a peer has freed
    stays allocated until it is unmapped. Memory that is used again is mapped again. The engine does the same by itself
    when an allocation fails.

    Call it after large tensors were dropped, before ``torch.cuda.empty_cache()`` or ``free_all_blocks()``. Each process
    set has mappings of its own.

    Returns the bytes of device memory that this rank has released: mappings of its peers' memory, and outgrown buffers
    of its own. 0 where no GPU tensor was used.
    """
    return world_of(process_set).empty_cache()
