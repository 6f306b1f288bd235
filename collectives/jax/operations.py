"""The collectives on JAX arrays and pytrees of them; eager, and inside `jax.jit`.

Arguments stand in the order of the other adapters. A tensor is a JAX array, a NumPy array, a number or another
framework's tensor with DLPack (torch, CuPy, TensorFlow), or a pytree of such; a pytree travels in one fused call, keeps
its structure, and None in it is no tensor. Results are new JAX arrays, whatever the tensor was; nothing is ever written
into an array that the program has. They are differentiable in both directions, of any order (`collectives.jax.autodiff`
states the adjoints), and can be vectorised.

Inside `jax.jit` the ranks run the same program, and their calls pair up in its order: also with those that are made
before and after it, and in loops and branches. A branch that holds a collective must be taken on every rank alike.

``ordered=False`` lets go of that order. The call is matched by its ``name`` alone, so that a name stands for one place
in the program, of which no two executions may be under way at once unless one needs the other's result; and a call
whose result nobody needs is left out. In return a program without ordered calls is started by JAX's quick path, which
saves 0.25 ms, and 10 us for each array that the program takes or returns.

A compiled program may be for several devices of its rank, as `jax.jit` makes it of arrays that are replicated or
sharded over them: the call is made once, by one device, of the whole array, and every device has the result. Outside of
`jax.jit` arrays on several devices must be replicated. Inside pmap and shard_map, which write a program for each
device, a collective is refused. On GPUs a compiled call goes through host memory; eager calls do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, overload

import jax.numpy as jnp
import numpy as np

from collectives import api
from collectives.base.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from collectives.base.reduce_op import Op
from collectives.engine import arguments
from collectives.jax import compat, eager, primitive, pytrees, small_tensors
from collectives.jax import compression as compressors
from collectives.jax.collective_call import CollectiveCall
from collectives.process_sets import ProcessSet
from collectives.runtime import global_process_set, root_in, world_of
from collectives.tensors.compression import Compression
from collectives.world import World

Average = Op.AVERAGE

Tree = TypeVar("Tree")
"""An array, or a pytree of arrays; a leaf that is none of JAX's comes back as one."""


def allreduce(
    tensor: Tree,
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
    ordered: bool = True,
) -> Tree:
    """Combine the ranks' tensors element by element. Differentiable.

    Its gradient, for a loss that is the sum of the ranks' losses: of Sum and Average the all-reduce of the outputs'
    gradients with the same ``op``, factors and compression; of Min and Max the summed gradient, to the ranks that hold
    the extreme value, evenly; of Product that times the other ranks' elements; of Adasum that of its tree.

    Args:
        tensor: an array or a pytree; of equal structure, shapes and dtypes on every rank. Left unchanged.
        average: the older way to say ``op``: True for Average, False for Sum.
        name: of the operation; None: matched by order of call.
        compression: `Compression.fp16` or ``bf16``, or anything with ``compress`` and ``decompress``, which get and
            return JAX arrays.
        op: Average (the default), Sum, Min, Max, Product or Adasum.
        prescale_factor: multiplies each rank's tensor first.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part.
        ordered: False: a compiled program need not keep this call in its place; it needs a name.

    Returns:
        New arrays of the same shapes and dtypes, in the same structure.

    Raises:
        InvalidTypeError, InvalidArgumentError: a leaf that is no array, or lies on several devices; both ``average``
            and ``op``; a ``name`` that is missing; and all that `collectives.allreduce` raises. What is found out only
            when a compiled program runs comes as JAX's runtime error, with the type and text of ours.
    """
    world = world_of(process_set)
    call = _call("allreduce", world, process_set, name, algorithm, transport, ordered)
    try:
        chosen = arguments.operation(op, average)
        call = _reducing(call, chosen, prescale_factor, postscale_factor)
        found, rebuild, grouped = pytrees.leaves(tensor)
        wire, found, restore = compressors.inside(compression, found)
    except Exception as error:
        raise world.refused(error, name) from None
    call = call.having(grouped=grouped, wire=wire)
    return rebuild(restore(_allreduce(call, found)))


def grouped_allreduce(
    tensors: Sequence[Tree],
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
    ordered: bool = True,
) -> list[Tree]:
    """`allreduce` of several tensors, or pytrees, in one fused call; the results in order."""
    how = average, name, compression, op, prescale_factor, postscale_factor, process_set
    tensors = _several(tensors, process_set, name)
    found: list[Any] = allreduce(tensors, *how, algorithm=algorithm, transport=transport, ordered=ordered)
    return found


def reducescatter(
    tensor: Tree,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
    ordered: bool = True,
) -> Tree:
    """Combine the ranks' tensors and give each rank its share of the rows. Differentiable.

    Its gradient, for a loss that is the sum of the ranks' losses: of Sum the allgather of the outputs' gradients, of
    Average that divided by the number of ranks, both times the factors; of Min, Max and Product as of `allreduce`.

    Args:
        tensor: an array of shape ``(rows, ...)`` or a pytree of such, equal on every rank. Rows that do not divide
            evenly go to the first ranks, one each.
        op: Average (the default), Sum, Min, Max or Product.
        name, compression, process_set, prescale_factor, postscale_factor, ordered: as for `allreduce`.

    Returns:
        New arrays of this rank's rows and the same dtypes.
    """
    world = world_of(process_set)
    call = _call("reducescatter", world, process_set, name, algorithm, transport, ordered)
    try:
        call = _reducing(call, arguments.operation(op, None), prescale_factor, postscale_factor)
        if call.op == Op.ADASUM.value:
            raise UnsupportedError("op=Adasum: reducescatter has no Adasum; allreduce has")
        found, rebuild, grouped = pytrees.leaves(tensor)
        found, restore = compressors.outside(compression, found)
        _check_rows("reducescatter", found)
    except Exception as error:
        raise world.refused(error, name) from None
    call = call.having(grouped=grouped, rows_before=tuple(each.shape[0] for each in found))
    return rebuild(restore(_run(call, found)))


def grouped_reducescatter(
    tensors: Sequence[Tree],
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
    ordered: bool = True,
) -> list[Tree]:
    """`reducescatter` of several tensors in one fused call; the results in order."""
    how = name, compression, op, process_set, prescale_factor, postscale_factor
    tensors = _several(tensors, process_set, name)
    found: list[Any] = reducescatter(tensors, *how, algorithm=algorithm, transport=transport, ordered=ordered)
    return found


def allgather(
    tensor: Tree,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    rows: Sequence[int] | None = None,
    algorithm: str | None = None,
    transport: str | None = None,
    ordered: bool = True,
) -> Tree:
    """Put the ranks' tensors one below the other, in rank order, on every rank. Differentiable.

    Its gradient, for a loss that is the sum of the ranks' losses: this rank's rows of the sum of the outputs'
    gradients.

    Args:
        tensor: an array of shape ``(rows, ...)`` or a pytree of such; ranks may differ in ``rows`` only, which may be
            0. Left unchanged.
        name, process_set, ordered: as for `allreduce`.
        rows: every rank's rows, of all leaves alike. Inside `jax.jit` and under differentiation shapes must be known
            beforehand: None means there that all ranks have as many rows as this one.

    Returns:
        New arrays of shape ``(sum of all rows, ...)``.

    Raises:
        InvalidArgumentError: a tensor without a dimension, or ``rows`` that does not fit; and all that
            `collectives.allgather` raises.
        MismatchError: other rows came than were said.
    """
    world = world_of(process_set)
    call = _call("allgather", world, process_set, name, algorithm, transport, ordered)
    try:
        found, rebuild, grouped = pytrees.leaves(tensor)
        _check_rows("allgather", found)
        expected = None if rows is None else _counts("rows", rows, world)
        for each in found:
            if expected is not None and each.shape[0] != expected[world.rank]:
                raise InvalidArgumentError(
                    f"rows: expected this rank's {each.shape[0]} rows in place {world.rank}, got {list(expected)}"
                )
    except Exception as error:
        raise world.refused(error, name) from None
    everyone = None
    if rows is not None or _staged(found):
        everyone = tuple(expected or (each.shape[0],) * world.size for each in found)
    return rebuild(_run(call.having(grouped=grouped, rows=everyone), found))


def grouped_allgather(
    tensors: Sequence[Tree],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    rows: Sequence[int] | None = None,
    algorithm: str | None = None,
    transport: str | None = None,
    ordered: bool = True,
) -> list[Tree]:
    """`allgather` of several tensors in one fused call; the results in order."""
    tensors = _several(tensors, process_set, name)
    found: list[Any] = allgather(
        tensors, name, process_set, rows=rows, algorithm=algorithm, transport=transport, ordered=ordered
    )
    return found


def broadcast(
    tensor: Tree,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    algorithm: str | None = None,
    transport: str | None = None,
    ordered: bool = True,
) -> Tree:
    """Give every rank the root's tensor. Differentiable.

    Its gradient, for a loss that is the sum of the ranks' losses: on the root the sum of the outputs' gradients,
    elsewhere zeros.

    Args:
        tensor: an array or a pytree; of equal structure, shapes and dtypes on every rank.
        root_rank: whose it is, by its number among all ranks.
        name, process_set, ordered: as for `allreduce`.

    Returns:
        New arrays of the same shapes and dtypes, in the same structure.
    """
    world = world_of(process_set)
    root = root_in(process_set, root_rank, name)
    call = _call("broadcast", world, process_set, name, algorithm, transport, ordered)
    try:
        found, rebuild, grouped = pytrees.leaves(tensor)
        call = call.having(grouped=grouped, root=arguments.root(root, world.size))
    except Exception as error:
        raise world.refused(error, name) from None
    return rebuild(_run(call, found))


@overload
def alltoall(
    tensor: Tree,
    splits: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    rows: Sequence[int] | None = None,
    algorithm: str | None = None,
    transport: str | None = None,
    ordered: bool = True,
) -> Tree: ...


@overload
def alltoall(
    tensor: Tree,
    splits: Sequence[int] | np.ndarray[Any, Any] | jnp.ndarray,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    rows: Sequence[int] | None = None,
    algorithm: str | None = None,
    transport: str | None = None,
    ordered: bool = True,
) -> tuple[Tree, jnp.ndarray]: ...


def alltoall(
    tensor: Tree,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    rows: Sequence[int] | None = None,
    algorithm: str | None = None,
    transport: str | None = None,
    ordered: bool = True,
) -> Tree | tuple[Tree, jnp.ndarray]:
    """Send the first rows to rank 0, the next to rank 1, and so on; receive what each rank sent here, in rank order.
    Differentiable.

    Its gradient, for a loss that is the sum of the ranks' losses: the outputs' gradients, sent back to where the rows
    came from.

    Args:
        tensor: an array of shape ``(rows, ...)`` or a pytree of such. Left unchanged.
        splits: integers, one per rank, that sum to ``rows``: how many rows go to each. None: equally many.
        name, process_set, ordered: as for `allreduce`.
        rows: how many rows each rank sends here. Inside `jax.jit` and under differentiation it must be said where
            ``splits`` is.

    Returns:
        New arrays of the rows received. With ``splits``: that, and how many came from each rank, an int32 array.

    Raises:
        InvalidArgumentError: splits that do not fit, or ``rows`` is missing; and all that `collectives.alltoall`
            raises.
        MismatchError: other rows came than were said.
    """
    world = world_of(process_set)
    call = _call("alltoall", world, process_set, name, algorithm, transport, ordered)
    try:
        found, rebuild, grouped = pytrees.leaves(tensor)
        _check_rows("alltoall", found)
        if splits is not None and compat.is_tracer(splits):
            raise InvalidTypeError(
                "splits: expected integers that are known while tracing, got a traced array; pass a list or a NumPy "
                "array"
            )
        sent = [
            arguments.splits(None if splits is None else np.asarray(splits), each.shape[0], world.size)
            for each in found
        ]
        if len(set(sent)) > 1:
            raise InvalidArgumentError(
                f"tensor: expected as many rows in every leaf, got {[sum(each) for each in sent]}; call it for each"
            )
        received = None if rows is None else _counts("rows", rows, world)
        if received is None and _staged(found):
            if splits is not None:
                raise InvalidArgumentError(
                    "rows: expected how many rows each rank sends here, got None; inside jit, grad and vmap shapes "
                    "must be known beforehand"
                )
            received = sent[0] if sent else ()
    except Exception as error:
        raise world.refused(error, name) from None
    if not found:
        return tensor
    call = call.having(grouped=grouped, splits=sent[0], rows=received and (received,) * len(found))
    if _staged(found):
        results = primitive.bind(call, found)
    else:
        results, received = eager.exchange(call, found)
    return rebuild(results) if splits is None else (rebuild(results), jnp.asarray(received, jnp.int32))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank has called it; in a compiled program, no later call is made before every rank has come
    here."""
    world = world_of(process_set)
    _run(_call("barrier", world, process_set, None, None, None, True), [])


def join(device: int = -1, *, process_set: ProcessSet = global_process_set) -> int:
    """Say that this rank has run out of data, and help the others until all have: see `collectives.join`.

    Args:
        device: of Horovod's interface; means nothing.

    Returns:
        The last rank to join; of several at once, the highest.

    Raises:
        InvalidArgumentError: inside of a function that is being compiled.
    """
    outside("join")
    eager.settle()
    return api.join(process_set=process_set)


def outside(function: str) -> None:
    """Refuse to be traced."""
    if compat.tracing():
        raise InvalidArgumentError(f"{function}: it cannot be part of a compiled program; call it outside jit")


# ---- calls
# ----------------------------------------------------------------------------------------------------------------------


def _call(
    collective: str,
    world: World,
    process_set: ProcessSet | int,
    name: str | None,
    algorithm: str | None,
    transport: str | None,
    ordered: bool,
) -> CollectiveCall:
    try:
        arguments.check_name(name)
        if not ordered and name is None:
            raise InvalidArgumentError(
                "name: expected one with ordered=False, by which the ranks' calls are matched; got None"
            )
    except Exception as error:
        raise world.refused(error, name) from None
    number = process_set if isinstance(process_set, int) else process_set.process_set_id
    assert number is not None
    return CollectiveCall(collective, world.size, world.rank, name, number, algorithm, transport, ordered=bool(ordered))


def _reducing(call: CollectiveCall, op: Op, prescale: Any, postscale: Any) -> CollectiveCall:
    before, after = arguments.factor("prescale_factor", prescale), arguments.factor("postscale_factor", postscale)
    return call.having(op=op.value, prescale=before, postscale=after)


def _staged(tensors: Sequence[Any]) -> bool:
    """Whether the call becomes a part of a program, or of a derivative."""
    return compat.tracing() or any(compat.is_tracer(tensor) for tensor in tensors)


def _run(call: CollectiveCall, tensors: Sequence[Any]) -> list[Any]:
    return primitive.bind(call, tensors) if _staged(tensors) else eager.run(call, tensors)


def _allreduce(call: CollectiveCall, tensors: list[Any]) -> list[Any]:
    if not call.grouped or call.op == Op.ADASUM.value or not _staged(tensors):
        return _run(call, tensors)
    operands, parts, unpack = small_tensors.pack(tensors)
    return unpack(_run(call.having(parts=parts), operands))


# ---- arguments
# ----------------------------------------------------------------------------------------------------------------------


def _several(tensors: Any, process_set: ProcessSet, name: str | None) -> list[Any]:
    if isinstance(tensors, (list, tuple)):
        return list(tensors)
    error = InvalidTypeError(f"tensors: expected a list or tuple of tensors, got {type(tensors).__name__}")
    raise world_of(process_set).refused(error, name)


def _check_rows(collective: str, tensors: Sequence[Any]) -> None:
    if any(not tensor.shape for tensor in tensors):
        raise UnsupportedError(
            f"tensor: {collective} works along the first dimension, got a 0-d tensor; reshape it to (1,)"
        )


def _counts(argument: str, given: Any, world: World) -> tuple[int, ...]:
    """A number of rows for each rank."""
    counts = np.asarray(given)
    if counts.shape != (world.size,) or counts.dtype.kind not in "iu" or counts.min() < 0:
        raise InvalidArgumentError(
            f"{argument}: expected {world.size} numbers of rows, one for each rank, got {given!r}"
        )
    return tuple(counts.tolist())
