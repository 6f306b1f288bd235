"""The collectives on JAX arrays and pytrees of them, eager and inside `jax.jit`.

Arguments stand in the order of the other adapters. A tensor is a JAX array, a NumPy array, a number, another
framework's tensor with DLPack (torch, CuPy, TensorFlow), or a pytree of these. A pytree travels in one fused call and
keeps its structure; None in it is not a leaf. Results are always new JAX arrays; arrays of the program
are never written to. All collectives are differentiable in both directions to any order, and can be vectorised;
`collectives.frontends.adjoints` states the gradients, for a loss that is the sum of the ranks' losses.

Inside `jax.jit` the ranks run the same program, and their calls pair up in program order, also with eager calls before
and after it, and in loops and branches. A branch that contains a collective must be taken on every rank alike.

``ordered=False`` gives up that order. The call is matched by its ``name`` alone, so a name stands for one place in the
program, of which two executions may be in flight only if one needs the other's result; a call whose result is unused is
removed. In return, a program without ordered calls is started by JAX's fast path, which saves 0.25 ms, and 10 us for
each array that the program takes or returns.

A compiled program may be for several devices of its rank, as `jax.jit` makes it of arrays that are replicated or
sharded over them: one device makes the call on the whole array, and every device has the result. Outside of `jax.jit`
arrays on several devices must be replicated. Inside pmap and shard_map, which write a program for each device,
collectives are refused. On GPUs a compiled call goes through host memory; eager calls do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, overload

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from collectives import api
from collectives.base.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from collectives.base.options import spelled_out
from collectives.base.reduce_op import Op
from collectives.elastic import retry
from collectives.engine import arguments
from collectives.jax import eager, primitive, pytrees
from collectives.jax.dispatch import (
    ProgramOptions,
    as_list,
    begin,
    check_has_rows,
    compressed,
    is_staged,
    reducing,
    require_eager,
    rows_of_ranks,
    run,
    run_allreduce,
)
from collectives.tensors.compression import Compression, is_built_in, wire_name
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import global_process_set, root_in

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "reducescatter",
]

Average = Op.AVERAGE

Tree = TypeVar("Tree")
"""An array or a pytree of arrays; leaves of other kinds are returned as JAX arrays."""

_spelled_out = spelled_out(ProgramOptions, ordered=True)


@_spelled_out
def allreduce(
    tensor: Tree,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    **options: Unpack[ProgramOptions],
) -> Tree:
    """Reduce the ranks' tensors element by element. Differentiable.

    The gradient of Min and Max is divided evenly among the ranks that hold the extreme value; the gradient of Product
    is multiplied by the other ranks' elements; the gradient of Adasum follows its tree.

    Args:
        tensor: an array or a pytree; of equal structure, shapes and dtypes on every rank. Left unchanged.
        average: the older spelling of ``op``: True for Average, False for Sum.
        name: of the operation; None: matched by order of call.
        compression: `Compression.fp16` or ``bf16``, or an object with ``compress`` and ``decompress``, which get and
            return JAX arrays.
        op: Average (the default), Sum, Min, Max, Product or Adasum.
        prescale_factor: multiplies each rank's tensor before the reduction.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part.
        algorithm, transport: as for `collectives.allreduce`.
        ordered: False: a compiled program need not keep this call's place in its order; needs a name.

    Returns:
        New arrays of the same shapes and dtypes, in the same structure.

    Raises:
        InvalidTypeError, InvalidArgumentError: a leaf that is not an array, or lies on several devices; both
            ``average`` and ``op``; a missing ``name``; and all that `collectives.allreduce` raises. Errors found while
            a compiled program runs are raised as JAX's runtime error, with the type and text of ours.

    Example:
        >>> hvd.allreduce({"w": jnp.array([hvd.rank(), 4.0])})
        {'w': Array([0.5, 4. ], dtype=float32)}
    """
    world, call = begin("allreduce", process_set, name, options)
    with world.refusing(name):
        call = reducing(call, arguments.operation(op, average), prescale_factor, postscale_factor)
        leaves, rebuild, grouped = pytrees.leaves(tensor)
        in_engine = compression is None or is_built_in(compression)
        leaves, restore = (leaves, list) if in_engine else compressed(compression, leaves)
    any_size = call.process_set == 0 and retry.right_for_fewer(Op(call.op), call.prescale * call.postscale)
    call = replace(call, grouped=grouped, wire=wire_name(compression) if in_engine else None, any_size=any_size)
    return rebuild(restore(run_allreduce(call, leaves)))


@_spelled_out
def grouped_allreduce(
    tensors: Sequence[Tree],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    **options: Unpack[ProgramOptions],
) -> list[Tree]:
    """`allreduce` of several tensors, or pytrees, in one fused call; the results in order.

    Example:
        >>> hvd.grouped_allreduce([jnp.ones(2), jnp.arange(3)], op=hvd.Sum)
        [Array([2., 2.], dtype=float32), Array([0, 2, 4], dtype=int32)]
    """
    tree = as_list(tensors, process_set, name)
    return allreduce(tree, average, name, compression, op, prescale_factor, postscale_factor, process_set, **options)


@_spelled_out
def reducescatter(
    tensor: Tree,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    **options: Unpack[ProgramOptions],
) -> Tree:
    """Reduce the ranks' tensors and give each rank its share of the rows. Differentiable.

    Args:
        tensor: an array of shape ``(rows, ...)`` or a pytree of such, equal on every rank. Rows that do not divide
            evenly go to the first ranks, one each.
        op: Average (the default), Sum, Min, Max or Product.
        name, compression, process_set, prescale_factor, postscale_factor, algorithm, transport, ordered: as for
            `allreduce`.

    Returns:
        New arrays of this rank's rows and the same dtypes.

    Example:
        >>> hvd.reducescatter(jnp.ones(4), op=hvd.Sum)
        Array([2., 2.], dtype=float32)
    """
    world, call = begin("reducescatter", process_set, name, options)
    with world.refusing(name):
        call = reducing(call, arguments.operation(op, None), prescale_factor, postscale_factor)
        if call.op == Op.ADASUM.value:
            raise UnsupportedError(
                "op=Adasum: reducescatter does not support Adasum; call allreduce, or pass another op [A13]"
            )
        leaves, rebuild, grouped = pytrees.leaves(tensor)
        leaves, restore = compressed(compression, leaves)
        check_has_rows("reducescatter", leaves)
    call = replace(call, grouped=grouped, rows_before=tuple(leaf.shape[0] for leaf in leaves))
    return rebuild(restore(run(call, leaves)))


@_spelled_out
def grouped_reducescatter(
    tensors: Sequence[Tree],
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    **options: Unpack[ProgramOptions],
) -> list[Tree]:
    """`reducescatter` of several tensors in one fused call; the results in order.

    Example:
        >>> hvd.grouped_reducescatter([jnp.ones(4), jnp.ones(2)], op=hvd.Sum)
        [Array([2., 2.], dtype=float32), Array([2.], dtype=float32)]
    """
    tree = as_list(tensors, process_set, name)
    return reducescatter(tree, name, compression, op, process_set, prescale_factor, postscale_factor, **options)


@_spelled_out
def allgather(
    tensor: Tree,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    rows: Sequence[int] | None = None,
    **options: Unpack[ProgramOptions],
) -> Tree:
    """Concatenate the ranks' tensors along the first dimension, in rank order, on every rank. Differentiable.

    Args:
        tensor: an array of shape ``(rows, ...)`` or a pytree of such; ranks may differ in ``rows`` only, which may be
            0. Left unchanged.
        rows: every rank's rows, equal for all leaves. Inside `jax.jit` and under differentiation shapes must be known
            beforehand: None means there that all ranks have as many rows as this one.
        name, process_set, algorithm, transport, ordered: as for `allreduce`.

    Returns:
        New arrays of shape ``(sum of all rows, ...)``.

    Raises:
        InvalidArgumentError: a tensor without a dimension, or ``rows`` that does not fit; and all that
            `collectives.allgather` raises.
        MismatchError: the ranks sent other rows than stated.

    Example:
        >>> hvd.allgather(jnp.full(hvd.rank() + 1, float(hvd.rank())))
        Array([0., 1., 1.], dtype=float32)
    """
    world, call = begin("allgather", process_set, name, options)
    with world.refusing(name):
        leaves, rebuild, grouped = pytrees.leaves(tensor)
        check_has_rows("allgather", leaves)
        expected = None if rows is None else rows_of_ranks("rows", rows, world)
        for leaf in leaves:
            if expected is not None and leaf.shape[0] != expected[world.rank]:
                raise InvalidArgumentError(
                    f"rows: expected rows[{world.rank}] to be {leaf.shape[0]}, the number of rows that this rank "
                    f"sends, got {list(expected)} [M5]"
                )
    all_rows = None
    if rows is not None or is_staged(leaves):
        all_rows = tuple(expected or (leaf.shape[0],) * world.size for leaf in leaves)
    return rebuild(run(replace(call, grouped=grouped, rows=all_rows), leaves))


@_spelled_out
def grouped_allgather(
    tensors: Sequence[Tree],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    rows: Sequence[int] | None = None,
    **options: Unpack[ProgramOptions],
) -> list[Tree]:
    """`allgather` of several tensors in one fused call; the results in order.

    Example:
        >>> hvd.grouped_allgather([jnp.array([1.0 * hvd.rank()]), jnp.ones(1)])
        [Array([0., 1.], dtype=float32), Array([1., 1.], dtype=float32)]
    """
    return allgather(as_list(tensors, process_set, name), name, process_set, rows=rows, **options)


@_spelled_out
def broadcast(
    tensor: Tree,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    **options: Unpack[ProgramOptions],
) -> Tree:
    """Copy the root's tensor to every rank. Differentiable.

    Args:
        tensor: an array or a pytree; of equal structure, shapes and dtypes on every rank.
        root_rank: the root, by its number among all ranks.
        name, process_set, algorithm, transport, ordered: as for `allreduce`.

    Returns:
        New arrays of the same shapes and dtypes, in the same structure.

    Example:
        >>> hvd.broadcast(jnp.array([hvd.rank(), 7.0]), root_rank=1)
        Array([1., 7.], dtype=float32)
    """
    world, call = begin("broadcast", process_set, name, options)
    root = root_in(process_set, root_rank, name)
    with world.refusing(name):
        leaves, rebuild, grouped = pytrees.leaves(tensor)
        call = replace(call, grouped=grouped, root=arguments.root(root, world.size))
    return rebuild(run(call, leaves))


@overload
def alltoall(
    tensor: Tree,
    splits: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    rows: Sequence[int] | None = None,
    **options: Unpack[ProgramOptions],
) -> Tree: ...


@overload
def alltoall(
    tensor: Tree,
    splits: Sequence[int] | np.ndarray[Any, Any] | jnp.ndarray,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    rows: Sequence[int] | None = None,
    **options: Unpack[ProgramOptions],
) -> tuple[Tree, jnp.ndarray]: ...


@_spelled_out
def alltoall(
    tensor: Tree,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    rows: Sequence[int] | None = None,
    **options: Unpack[ProgramOptions],
) -> Tree | tuple[Tree, jnp.ndarray]:
    """Send the first rows to rank 0, the next to rank 1, and so on; receive each rank's rows for this one, in rank
    order. Differentiable.

    Args:
        tensor: an array of shape ``(rows, ...)`` or a pytree of such. Left unchanged.
        splits: integers, one per rank, that sum to ``rows``: how many rows go to each. None: equally many.
        rows: how many rows each rank sends to this one. Required inside `jax.jit` and under differentiation if
            ``splits`` is given.
        name, process_set, algorithm, transport, ordered: as for `allreduce`.

    Returns:
        New arrays of the rows received. With ``splits``: these, and how many came from each rank, an int32 array.

    Raises:
        InvalidArgumentError: splits that do not fit, or ``rows`` is missing; and all that `collectives.alltoall`
            raises.
        MismatchError: the ranks sent other rows than stated.

    Example:
        >>> hvd.alltoall(jnp.array([1.0, 1.0]) * hvd.rank())
        Array([0., 1.], dtype=float32)
    """
    world, call = begin("alltoall", process_set, name, options)
    with world.refusing(name):
        leaves, rebuild, grouped = pytrees.leaves(tensor)
        check_has_rows("alltoall", leaves)
        if splits is not None and isinstance(splits, Tracer):
            raise InvalidTypeError(
                "splits: expected integers that are known while tracing, got a traced array; pass a list or a NumPy "
                "array [A26]"
            )
        counts = None if splits is None else np.asarray(splits)
        sent = [arguments.splits(counts, leaf.shape[0], world.size) for leaf in leaves]
        if len(set(sent)) > 1:
            raise InvalidArgumentError(
                "tensor: expected the same number of rows in every leaf of the tree, got "
                f"{[sum(each) for each in sent]}; call alltoall once for each leaf [F70]"
            )
        received = None if rows is None else rows_of_ranks("rows", rows, world)
        if received is None and is_staged(leaves):
            if splits is not None:
                raise InvalidArgumentError(
                    "rows: expected the number of rows that each rank sends to this one, got None; pass rows, "
                    "because shapes must be known in advance inside jit, grad and vmap [F71]"
                )
            received = sent[0] if sent else ()
    if not leaves:
        return tensor
    call = replace(
        call, grouped=grouped, splits=sent[0], rows=received if received is None else (received,) * len(leaves)
    )
    if is_staged(leaves):
        results = primitive.bind(call, leaves)
    else:
        results, received = eager.exchange(call, leaves)
    return rebuild(results) if splits is None else (rebuild(results), jnp.asarray(received, jnp.int32))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank has called it. In a compiled program no later call starts before that.

    Example:
        >>> hvd.barrier()
    """
    run(begin("barrier", process_set, None, {})[1], [])


def join(device: int = -1, *, process_set: ProcessSet = global_process_set) -> int:
    """`collectives.join`, outside of `jax.jit`; ``device`` is part of Horovod's interface and has no effect.

    Example:
        >>> last = hvd.join()
    """
    require_eager("join")
    eager.wait_for_effects()
    return api.join(process_set=process_set)
