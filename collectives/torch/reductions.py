"""All-reduce and reduce-scatter with Horovod's names and order of arguments.

Keywords in `Choices` are as for `collectives.allreduce`. Results are new torch tensors of the caller's dtype, on its
device; functions whose names end in ``_`` work in place and return the same tensor objects. Arguments that are not
torch tensors are treated as in `collectives`. The blocking functions that return new tensors are differentiable, by the
adjoints of `collectives.frontends.adjoints`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.compiler import is_compiling

from collectives.base.options import spelled_out
from collectives.base.reduce_op import Op
from collectives.engine.handles import Handle
from collectives.tensors import compression as compressors
from collectives.tensors.compression import Compression
from collectives.torch import autograd, compiled
from collectives.torch.arguments import Choices, Tensor, any_tracked, begun, operation, world_options, written
from collectives.torch.autograd import DifferentiableCall, tracks
from collectives.torch.compiled import untraced
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import global_process_set, world_of
from collectives.worlds.world import World

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]

Average = Op.AVERAGE

# ---- all-reduce


@spelled_out(Choices)
def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    **choices: Unpack[Choices],
) -> Tensor:
    """Combine the ranks' tensors element by element. Differentiable.

    Its gradient, if the loss is the sum of the ranks' losses: for Sum and Average, the all-reduce of the outputs'
    gradients with the same ``op`` and factors; for Min and Max, the summed gradient, divided evenly among the ranks
    that hold the extreme value; for Product, the summed gradient times the other ranks' elements; for Adasum, the
    gradient of its tree. With compression the gradient is sent compressed, too.

    Args:
        tensor: of equal shape and dtype on every rank, on the CPU or a GPU, in any memory layout. Left unchanged.
        average: the older form of ``op``: True for Average, False for Sum.
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

    Example:
        >>> hvd.allreduce(torch.tensor([hvd.rank(), 4.0]))
        tensor([0.5000, 4.0000])
    """
    if is_compiling():
        how = operation(world_of(process_set), average, op, name), name, prescale_factor, postscale_factor
        return compiled.allreduce([tensor], False, *how, compression, process_set, choices)[0]
    world = world_of(process_set)
    options = world_options(choices, name, op, prescale_factor, postscale_factor)
    if tracks(tensor):
        return _differentiable(world, [tensor], False, average, compression, options)[0]
    if compression is not Compression.none:
        options["compression"] = compression
    return world.allreduce(tensor, average, **options)


@spelled_out(Choices)
def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    **choices: Unpack[Choices],
) -> Tensor:
    """`allreduce` in place, also of a leaf that requires grad. Not differentiable; if autograd has saved the tensor for
    a backward pass, that pass raises an error.

    Returns:
        The same tensor object: unchanged after a mismatch, undefined after a failure in mid-call.

    Example:
        >>> hvd.allreduce_(torch.tensor([hvd.rank(), 4.0]), op=hvd.Sum)
        tensor([1., 8.])
    """
    if is_compiling():
        how = average, name, Compression.none, op, prescale_factor, postscale_factor, process_set
        return compiled.stored(tensor, allreduce(tensor, *how, **choices))
    options = world_options(choices, name, op, prescale_factor, postscale_factor)
    return written(world_of(process_set).allreduce_(tensor, average, **options))


@spelled_out(Choices)
def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    **choices: Unpack[Choices],
) -> list[Tensor]:
    """`allreduce` of several tensors as one grouped operation; the results in order. Differentiable.

    Args:
        tensors: a list or tuple; the same number on every rank, in the same order; dtypes may be mixed.

    Example:
        >>> hvd.grouped_allreduce([torch.ones(2), torch.arange(3)], op=hvd.Sum)
        [tensor([2., 2.]), tensor([0, 2, 4])]
    """
    if is_compiling():
        how = operation(world_of(process_set), average, op, name), name, prescale_factor, postscale_factor
        return compiled.allreduce(tensors, True, *how, compression, process_set, choices)
    world = world_of(process_set)
    options = world_options(choices, name, op, prescale_factor, postscale_factor)
    if any_tracked(tensors):
        return _differentiable(world, tensors, True, average, compression, options)
    if compression is not Compression.none:
        options["compression"] = compression
    return world.grouped_allreduce(tensors, average, **options)


@spelled_out(Choices)
def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    **choices: Unpack[Choices],
) -> list[Tensor]:
    """`grouped_allreduce` in place, as `allreduce_`; returns the same tensor objects.

    Example:
        >>> hvd.grouped_allreduce_([torch.ones(2), torch.arange(3)], op=hvd.Sum)
        [tensor([2., 2.]), tensor([0, 2, 4])]
    """
    if is_compiling():
        how = average, name, Compression.none, op, prescale_factor, postscale_factor, process_set
        results = grouped_allreduce(tensors, *how, **choices)
        return [compiled.stored(tensor, result) for tensor, result in zip(tensors, results, strict=True)]
    options = world_options(choices, name, op, prescale_factor, postscale_factor)
    return [written(tensor) for tensor in world_of(process_set).grouped_allreduce_(tensors, average, **options)]


allreduce_async = begun("allreduce_async", allreduce_)
allreduce_async_ = begun("allreduce_async_", allreduce_)
grouped_allreduce_async = begun("grouped_allreduce_async", grouped_allreduce_)
grouped_allreduce_async_ = begun("grouped_allreduce_async_", grouped_allreduce_)

# ---- reduce-scatter


@spelled_out(Choices)
def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    **choices: Unpack[Choices],
) -> Tensor:
    """Combine the ranks' tensors and give each rank its share of the rows. Differentiable.

    Its gradient, for a loss that is the sum of the ranks' losses: of Sum the allgather of the outputs' gradients, of
    Average that divided by the number of ranks, both times the factors; of Min, Max and Product as of `allreduce`.

    Args:
        tensor: of shape ``(rows, ...)``, equal on every rank. Rows left over by an even division go to the first
            ranks, one each.
        op: Average (the default), Sum, Min, Max or Product.
        name, compression, process_set, prescale_factor, postscale_factor: as for `allreduce`.

    Returns:
        A new tensor of this rank's rows and the same dtype, on the same device.

    Raises:
        InvalidArgumentError (a ValueError): the tensor has no dimension; and all that `collectives.reducescatter`
            raises.

    Example:
        >>> hvd.reducescatter(torch.ones(4), op=hvd.Sum)
        tensor([2., 2.])
    """
    if is_compiling():
        how = operation(world_of(process_set), None, op, name), name, prescale_factor, postscale_factor
        (compressed,), restore = compressors.compress_all(compression or Compression.none, [tensor])
        return restore([compiled.reducescatter(compressed, *how, process_set, choices)])[0]
    options = world_options(choices, name, Average if op is None else op, prescale_factor, postscale_factor)
    run = autograd.run if tracks(tensor) else _reducescatter
    return _compressed(_call(world_of(process_set), "reducescatter", False, options), compression, [tensor], run)[0]


@untraced
@spelled_out(Choices)
def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: Op | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    **choices: Unpack[Choices],
) -> Handle[Tensor]:
    """Begin a `reducescatter` and return a handle at once. Not differentiable.

    Example:
        >>> hvd.synchronize(hvd.reducescatter_async(torch.ones(4), op=hvd.Sum))
        tensor([2., 2.])
    """
    return world_of(process_set).reducescatter_async(
        tensor, **world_options(choices, name, op, prescale_factor, postscale_factor)
    )


@spelled_out(Choices)
def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    **choices: Unpack[Choices],
) -> list[Tensor]:
    """`reducescatter` of several tensors as one grouped operation; the results in order. Differentiable.

    Example:
        >>> hvd.grouped_reducescatter([torch.ones(4), torch.ones(2)], op=hvd.Sum)
        [tensor([2., 2.]), tensor([2.])]
    """
    if is_compiling():
        how = compression, op, process_set, prescale_factor, postscale_factor
        return [reducescatter(tensor, name and f"{name}.{i}", *how, **choices) for i, tensor in enumerate(tensors)]
    options = world_options(choices, name, Average if op is None else op, prescale_factor, postscale_factor)
    run = autograd.run if any_tracked(tensors) else _reducescatter
    return _compressed(_call(world_of(process_set), "reducescatter", True, options), compression, tensors, run)


@untraced
@spelled_out(Choices)
def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: Op | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    **choices: Unpack[Choices],
) -> Handle[list[Tensor]]:
    """Begin a `grouped_reducescatter`; one handle for all tensors. Not differentiable.

    Example:
        >>> hvd.synchronize(hvd.grouped_reducescatter_async([torch.ones(4), torch.ones(2)], op=hvd.Sum))
        [tensor([2., 2.]), tensor([2.])]
    """
    options = world_options(choices, name, op, prescale_factor, postscale_factor)
    return world_of(process_set).grouped_reducescatter_async(tensors, **options)


# ---- autograd and compression


def _call(world: World, collective: str, grouped: bool, options: dict[str, Any]) -> DifferentiableCall:
    return DifferentiableCall(world, collective, options.pop("name", None), grouped, options)


def _differentiable(
    world: World,
    tensors: Sequence[Any],
    grouped: bool,
    average: bool | None,
    compression: Any,
    options: dict[str, Any],
) -> list[Any]:
    options["op"] = operation(world, average, options.get("op"), options.get("name"))
    return _compressed(_call(world, "allreduce", grouped, options), compression, tensors, autograd.run)


def _compressed(
    call: DifferentiableCall,
    compression: Any,
    tensors: Sequence[Any],
    run: Callable[[DifferentiableCall, Sequence[Any]], list[Any]],
) -> list[Any]:
    """Apply ``run`` to the compressed tensors, and decompress the results. Differentiable, compression included."""
    if compression is None or compression is Compression.none:
        return run(call, tensors)
    with call.world.refusing(call.name):
        compressors.check(compression)
        compressed, restore = compressors.compress_all(compression, tensors)
    return restore(run(call, compressed))


def _reducescatter(call: DifferentiableCall, tensors: Sequence[Any]) -> list[Any]:
    if call.grouped:
        return call.world.grouped_reducescatter(tensors, name=call.name, **call.options)
    return [call.world.reducescatter(tensors[0], name=call.name, **call.options)]
