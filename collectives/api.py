"""The functions that users call: operations of the default world, or of a process set.

An operation is in flight from its submission until it is complete. While it writes memory, no other operation may read
or write that memory, even under another name, in another process set or through another view. A call that does so
raises an InvalidArgumentError that names both operations, and the other ranks get a MismatchError. Operations may share
memory that they only read, and broadcasts from the same root may share the memory that they write.

`allreduce` documents the keywords and errors that all functions share.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from collectives.base.options import (
    CallOptions,
    IreceiveOptions,
    MessageOptions,
    RarerCallOptions,
    RarerReduceOptions,
    ReceiveOptions,
    ReduceOptions,
    ScaleOptions,
    spelled_out,
)
from collectives.base.reduce_op import Op
from collectives.engine.handles import Handle
from collectives.worlds import descriptions as describe
from collectives.worlds.operations import Operations
from collectives.worlds.persistent_init import PersistentInit
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import default, rank_in, root_in, world, world_of
from collectives.worlds.variants import blocking, like
from collectives.worlds.world import World

if TYPE_CHECKING:
    from typing_extensions import Unpack

Tensor = TypeVar("Tensor")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

Average, Sum, Min, Max, Product, Adasum = Op.AVERAGE, Op.SUM, Op.MIN, Op.MAX, Op.PRODUCT, Op.ADASUM


def _world(options: RarerCallOptions) -> World:
    """The world of a call. Removes ``process_set`` from the keywords."""
    process_set = options.pop("process_set", None) if options else None
    return default.world or world() if process_set is None else world_of(process_set)


def of_default(method: Callable[Concatenate[Any, Parameters], Result]) -> Callable[Parameters, Result]:
    """A function that calls ``method`` on the default world, or on the world of a process set."""
    signature, name = inspect.signature(method), method.__name__
    _, *parameters = signature.parameters.values()
    ranks = [(at, each.name) for at, each in enumerate(parameters) if each.name in ("root_rank", "dst", "src")]

    def call(*arguments: Any, **options: Any) -> Any:
        try:
            if not options:
                return getattr(default.world or world(), name)(*arguments)
            process_set = options.pop("process_set", None)
            if process_set is None:
                return getattr(default.world or world(), name)(*arguments, **options)
            positional = list(arguments)
            for at, rank in ranks:
                if at < len(positional):
                    positional[at] = rank_in(process_set, positional[at], rank, options.get("name"))
                elif rank in options:
                    options[rank] = rank_in(process_set, options[rank], rank, options.get("name"))
            return getattr(world_of(process_set), name)(*positional, **options)
        except TypeError:
            misfit = _misfit(arguments, options)
            if misfit is None:
                raise
            raise TypeError(f"{name}() {misfit}") from None

    def _misfit(arguments: tuple[Any, ...], options: dict[str, Any]) -> str | None:
        """Why the arguments do not fit the function. The error of the method does not name the function."""
        try:
            named = {keyword: value for keyword, value in options.items() if keyword in signature.parameters}
            signature.replace(parameters=parameters).bind(*arguments, **named)
        except TypeError as error:
            return str(error)
        return None

    function: Any = like(method, call, name, signature.return_annotation)
    function.__module__ = __name__
    function.__signature__ = signature.replace(parameters=parameters)
    accepted = _ACCEPTED[parameters[-1].annotation]
    described: Callable[Parameters, Result] = spelled_out(accepted, like=None, shape=None, dtype=None, status=None)(
        function
    )
    return described


_ACCEPTED: dict[str, type[Any]] = {
    f"Unpack[{accepted.__name__}]": accepted
    for accepted in (CallOptions, ScaleOptions, ReduceOptions, MessageOptions, IreceiveOptions, ReceiveOptions)
}
"""The keywords of a function, keyed by the annotation of its ``**options``."""


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

    Every rank gets the same result, bit for bit, except for the payload of NaNs and the sign of zeros in Min and Max.

    Args:
        tensor: equal shape and dtype on every rank: a NumPy array or scalar, a number, anything on the CPU with the
            buffer protocol, ``__array_interface__`` or DLPack, or anything on an NVIDIA GPU with DLPack or
            ``__cuda_array_interface__`` (CuPy, torch, JAX, ...). Left unchanged.
        average: instead of ``op``: True for Average, False for Sum. Pass only one of the two.
        op: Average (the default), Sum, Min, Max, Product, or Adasum (see `collectives.engine.adasum`).
        name: matches the ranks' calls. Operations with different names may be called in any order; calls without a
            name are matched by their order.
        prescale_factor: multiplies each rank's tensor before the reduction.
        postscale_factor: multiplies the result.
        compression: `Compression.fp16` or ``bf16``, the dtype in which float32 and float64 are sent; or any object with
            ``compress`` and ``decompress``.
        process_set: the ranks that take part; all by default.
        parts: the number of parts of all ranks together. The first dimension of the tensor holds this rank's share of
            the parts, divided as `numpy.array_split` divides. The result has the shape of one part, and is the same on
            any number of ranks. Needs ``algorithm="reproducible"`` and host memory.
        algorithm: "ring", "direct", "one-shot", "recursive-doubling", "hierarchical", "inline", "native" or
            "reproducible"; chosen by default. "reproducible" selects one that adds in a fixed order, so that the result
            has the same bits over every transport (docs/reproducible.md).
        transport: for ranks of one host, "window", "direct-read", or messages: "mpi", or "tcp" if TCP carries them. For
            GPU tensors, "cuda-ipc", "nccl" or "host". Chosen by default.
        stream: the CUDA stream of a GPU tensor; the framework's current one by default. The tensor is read after the
            work already on the stream, and the result is ready for work added later. No synchronisation is needed.

    Returns:
        A new tensor of the caller's type, shape and dtype. float16 and bfloat16 are combined in float32 and rounded in
        every step. Their average keeps a mean instead of a sum in every step, so it stays finite if the result fits.
        Integer averages truncate toward zero. Integers wrap on overflow. For bool, Sum and Max mean "or"; Product, Min
        and Average mean "and".

    Raises:
        NotInitializedError: the world is not initialized, or was shut down.
        InvalidTypeError, InvalidArgumentError: an argument is invalid, or both ``average`` and ``op`` are given.
        TypeError: there is no such keyword.
        MismatchError: the requests of the ranks differ. Every rank raises it, and no tensor has changed.
        RankFailedError: another rank failed.
        CollectiveTimeoutError: another rank did not make the call in time.

    Example:
        >>> hvd.allreduce(np.array([hvd.rank(), 4.0]))
        array([0.5, 4. ])
        >>> hvd.allreduce(np.array([hvd.rank(), 4.0]), op=hvd.Sum)
        array([1., 8.])
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

    Returns the tensor itself. After a mismatch its elements are unchanged; after a failure during the call they are
    undefined.

    Raises:
        InvalidArgumentError: the tensor is read-only, or its elements overlap.

    Example:
        >>> gradient = np.array([hvd.rank(), 4.0])
        >>> hvd.allreduce_(gradient) is gradient
        True
        >>> gradient
        array([0.5, 4. ])
    """
    if rarer:
        return _world(rarer).allreduce_(tensor, average, op=op, name=name, **rarer)
    return (default.world or world()).allreduce_(tensor, average, op=op, name=name)


@spelled_out(ReduceOptions)
def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    *,
    op: Op | None = None,
    name: str | None = None,
    **rarer: Unpack[RarerReduceOptions],
) -> Handle[Tensor]:
    """Start an `allreduce_` and return at once. Do not use the tensor until the operation is complete.

    Raises:
        InvalidArgumentError: for the reasons of `allreduce_async`, or because an operation in flight reads or writes
            this tensor's memory. Synchronize that operation first, or pass a copy to one of the two.

    Example:
        >>> hvd.allreduce_async_(np.array([hvd.rank(), 4.0])).wait()
        array([0.5, 4. ])
    """
    if rarer:
        return _world(rarer).allreduce_async_(tensor, average, op=op, name=name, **rarer)
    return (default.world or world()).allreduce_async_(tensor, average, op=op, name=name)


allreduce_async = of_default(Operations.allreduce_async)
grouped_allreduce = of_default(blocking(describe.grouped_allreduce))
grouped_allreduce_ = of_default(blocking(describe.grouped_allreduce_))
grouped_allreduce_async = of_default(Operations.grouped_allreduce_async)
grouped_allreduce_async_ = of_default(Operations.grouped_allreduce_async_)

reducescatter = of_default(Operations.reducescatter)
reducescatter_async = of_default(Operations.reducescatter_async)
grouped_reducescatter = of_default(Operations.grouped_reducescatter)
grouped_reducescatter_async = of_default(Operations.grouped_reducescatter_async)

allgather = of_default(Operations.allgather)
allgather_async = of_default(Operations.allgather_async)
grouped_allgather = of_default(Operations.grouped_allgather)
grouped_allgather_async = of_default(Operations.grouped_allgather_async)

broadcast = of_default(Operations.broadcast)
broadcast_ = of_default(Operations.broadcast_)
broadcast_async = of_default(Operations.broadcast_async)
broadcast_async_ = of_default(Operations.broadcast_async_)
grouped_broadcast = of_default(Operations.grouped_broadcast)
grouped_broadcast_ = of_default(Operations.grouped_broadcast_)
grouped_broadcast_async = of_default(Operations.grouped_broadcast_async)
grouped_broadcast_async_ = of_default(Operations.grouped_broadcast_async_)

alltoall = of_default(Operations.alltoall)
alltoall_async = of_default(Operations.alltoall_async)

allreduce_init = of_default(PersistentInit.allreduce_init)
grouped_allreduce_init = of_default(PersistentInit.grouped_allreduce_init)
reducescatter_init = of_default(PersistentInit.reducescatter_init)
grouped_reducescatter_init = of_default(PersistentInit.grouped_reducescatter_init)
allgather_init = of_default(PersistentInit.allgather_init)
grouped_allgather_init = of_default(PersistentInit.grouped_allgather_init)
broadcast_init = of_default(PersistentInit.broadcast_init)
grouped_broadcast_init = of_default(PersistentInit.grouped_broadcast_init)
alltoall_init = of_default(PersistentInit.alltoall_init)


def barrier(*, process_set: ProcessSet | None = None) -> None:
    """Wait until every rank has called `barrier`.

    Example:
        >>> hvd.barrier()
    """
    world_of(process_set).barrier()


def broadcast_object(
    value: Tensor, root_rank: int = 0, *, name: str | None = None, process_set: ProcessSet | None = None
) -> Tensor:
    """Send the root's picklable object to every rank. Objects of other ranks are ignored. The root gets its own back.

    Example:
        >>> hvd.broadcast_object({"from": hvd.rank()}, root_rank=1)
        {'from': 1}
    """
    return world_of(process_set).broadcast_object(value, root_in(process_set, root_rank, name), name=name)


def allgather_object(value: Tensor, *, name: str | None = None, process_set: ProcessSet | None = None) -> list[Tensor]:
    """Gather one picklable object from each rank. Every rank gets the list, in rank order.

    Example:
        >>> hvd.allgather_object({"rank": hvd.rank()})
        [{'rank': 0}, {'rank': 1}]
    """
    return world_of(process_set).allgather_object(value, name=name)


def poll(handle: Handle) -> bool:
    """``handle.poll()``, under Horovod's name."""
    return world().poll(handle)


def synchronize(handle: Handle[Tensor], timeout: float | None = None) -> Tensor:
    """``handle.wait(timeout)``, under Horovod's name."""
    return (default.world or world()).synchronize(handle, timeout)


def join(*, process_set: ProcessSet | None = None) -> int:
    """Contribute neutral elements to the other ranks' operations until all ranks have joined. For ranks out of data.

    Neutral elements are zeros for a sum, and no rows for allgather and alltoall. Average still divides by the number of
    all ranks. A broadcast whose root has joined raises a MismatchError on the ranks that call it. Returns the last rank
    that joined; if several joined at once, the highest of them.

    Example:
        >>> last = hvd.join()
    """
    return world_of(process_set).join()


def check_consistency(tensors: Any, *, process_set: ProcessSet | None = None) -> None:
    """Check that tensors are equal on all ranks, by comparing a hash of each.

    Args:
        tensors: a mapping of names to tensors, a sequence of tensors, or a sequence of (name, tensor) pairs.

    Raises:
        MismatchError: a tensor differs. The message names the first one, what differs, and on which ranks.

    Example:
        >>> hvd.check_consistency({"weights": np.zeros(3)})
    """
    world_of(process_set).check_consistency(tensors)


def empty_cache(*, process_set: ProcessSet | None = None) -> int:
    """Release memory that is held but not in use. Every rank must call it.

    On the host, this releases the memory of deleted results and of deleted arrays from `collectives.empty`, which is
    kept for reuse.

    On GPUs, a rank maps the memory of its peers' tensors and keeps the mapping. Memory that a peer has freed therefore
    stays allocated until it is unmapped. `empty_cache` unmaps it; memory that is used again is mapped again. The engine
    does the same by itself when an allocation fails.

    Call it after you delete large tensors, before ``torch.cuda.empty_cache()`` or ``free_all_blocks()``. Each process
    set has its own mappings.

    Returns the bytes of device memory that this rank has released: mappings of peers' memory, and its own buffers that
    had become too small. Returns 0 if no GPU tensor was used.

    Example:
        >>> hvd.empty_cache()
        0
    """
    return world_of(process_set).empty_cache()
