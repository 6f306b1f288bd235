"""From checked arguments to a call: carried out at once, or bound as a primitive while JAX traces."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypedDict

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from collectives.base.errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from collectives.base.options import refuse_unknown
from collectives.base.reduce_op import Op
from collectives.engine import arguments
from collectives.jax import compat, eager, local_ranks, primitive
from collectives.jax.collective_call import CollectiveCall, Shape
from collectives.tensors import compression as compressors
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import world_of
from collectives.worlds.world import World

_PACKED_BELOW = 32 << 10
"""Bytes below which a tensor is packed."""


class ProgramOptions(TypedDict, total=False):
    """Keywords of every collective on JAX arrays.

    Attributes:
        algorithm, transport: as for `collectives.allreduce`.
        ordered: True (the default): a compiled program makes the call in program order; False: the call is matched by
            its name alone, see `collectives.jax.operations`.
    """

    algorithm: str | None
    transport: str | None
    ordered: bool


def begin(
    collective: str, process_set: ProcessSet | int, name: str | None, options: ProgramOptions
) -> tuple[World, CollectiveCall]:
    """Return the world of a process set and a call on it, to be completed by the collective's own arguments."""
    refuse_unknown(options, ProgramOptions)
    if not compat.tracing():
        eager.wait_for_effects()  # programs may lose ranks, and go on with the others (`collectives.elastic.retry`)
    world = world_of(process_set)
    ordered = bool(options.get("ordered", True))
    with world.refusing(name):
        arguments.check_name(name)
        if not ordered and name is None:
            raise InvalidArgumentError(
                "name: ordered=False needs a name, by which the ranks match their calls, got None; pass name=..., "
                "the same on every rank [F67]"
            )
    number = process_set if isinstance(process_set, int) else process_set.process_set_id
    assert number is not None
    where = options.get("algorithm"), options.get("transport")
    own = local_ranks.number()
    return world, CollectiveCall(
        collective, world.size, world.rank, name, number, *where, ordered=ordered, local_rank=own
    )


def reducing(call: CollectiveCall, op: Op, prescale_factor: Any, postscale_factor: Any) -> CollectiveCall:
    """Complete a call by its reduction, with checked factors."""
    before = arguments.factor("prescale_factor", prescale_factor)
    return replace(call, op=op.value, prescale=before, postscale=arguments.factor("postscale_factor", postscale_factor))


def is_staged(tensors: Sequence[Any]) -> bool:
    """Whether the call becomes part of a program or of a derivative."""
    return compat.tracing() or any(isinstance(tensor, Tracer) for tensor in tensors)


def run(call: CollectiveCall, tensors: Sequence[Any]) -> list[Any]:
    """Carry the call out, or bind it to the program that is being traced."""
    return primitive.bind(call, tensors) if is_staged(tensors) else eager.run(call, tensors)


def run_allreduce(call: CollectiveCall, tensors: list[Any]) -> list[Any]:
    """`run` of an all-reduce; in a program the small tensors of a group are concatenated."""
    if not call.grouped or call.op == Op.ADASUM.value or not is_staged(tensors):
        return run(call, tensors)
    operands, parts, unpack = _pack(tensors)
    return unpack(run(replace(call, parts=parts), operands))


def require_eager(function: str) -> None:
    """Raise an `InvalidArgumentError` while JAX traces."""
    if compat.tracing():
        raise InvalidArgumentError(f"{function} cannot be part of a compiled program; call it outside jit [F68]")


# ---- arguments


def as_list(tensors: Any, process_set: ProcessSet, name: str | None) -> list[Any]:
    """Return the tensors of a grouped operation, a list or a tuple, as a list."""
    if isinstance(tensors, (list, tuple)):
        return list(tensors)
    error = InvalidTypeError(f"tensors: expected a list or tuple of tensors, got {type(tensors).__name__} [A35]")
    raise world_of(process_set).refused(error, name)


def compressed(compression: Any, tensors: list[Any]) -> tuple[list[Any], Callable[[list[Any]], list[Any]]]:
    """Compress for an operation without compression; returns the tensors, and what restores its results."""
    if compression is None or compression is compressors.Compression.none:
        return tensors, list
    compressors.check(compression)
    return compressors.compress_all(compression, tensors)


def check_has_rows(collective: str, tensors: Sequence[Any]) -> None:
    """Raise an `UnsupportedError` if a tensor has no dimension."""
    if any(not tensor.shape for tensor in tensors):
        raise UnsupportedError(
            f"tensor: {collective} needs at least one dimension, got a 0-d tensor; reshape it to (1,) [A29]"
        )


def rows_of_ranks(argument: str, rows: Any, world: World) -> tuple[int, ...]:
    """Check a number of rows for each rank: as many integers as ranks, of 0 or more."""
    counts = np.asarray(rows)
    if counts.shape != (world.size,) or counts.dtype.kind not in "iu" or counts.min() < 0:
        raise InvalidArgumentError(
            f"{argument}: expected {world.size} numbers of rows, one for each rank, got {rows!r} [F69]"
        )
    return tuple(counts.tolist())


# ---- packing


def _pack(
    tensors: Sequence[Any],
) -> tuple[list[Any], tuple[tuple[Shape, ...], ...], Callable[[Sequence[Any]], list[Any]]]:
    """Concatenate the small tensors of each dtype, for an all-reduce of a group in a compiled program.

    Each operand costs the engine and the call a few microseconds, the bytes of a small tensor next to nothing: 161
    tensors of 1 to 40 elements become one operand. Their shapes are passed on as `CollectiveCall.parts`, so that ranks
    whose tensors happen to have the same total length are not matched.

    Returns:
        The operands (large tensors as they are, then one of each dtype), the shapes in each of them (empty for one that
        is not packed), and the function that turns results into those of the tensors.
    """
    small: dict[Any, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if math.prod(tensor.shape) * tensor.dtype.itemsize < _PACKED_BELOW:
            small.setdefault(tensor.dtype, []).append(number)
    packs = [members for members in small.values() if len(members) > 1]
    packed = {number for members in packs for number in members}
    alone = [number for number in range(len(tensors)) if number not in packed]
    operands = [tensors[number] for number in alone]
    operands += [jnp.concatenate([tensors[number].reshape(-1) for number in members]) for members in packs]
    parts = ((),) * len(alone) + tuple(tuple(tuple(tensors[number].shape) for number in members) for members in packs)

    def unpack(results: Sequence[Any]) -> list[Any]:
        unpacked: list[Any] = [None] * len(tensors)
        for number, result in zip(alone, results, strict=False):
            unpacked[number] = result
        for members, result in zip(packs, results[len(alone) :], strict=True):
            start = 0
            for number in members:
                shape = tensors[number].shape
                end = start + math.prod(shape)
                unpacked[number] = result[start:end].reshape(shape)
                start = end
        return unpacked

    return operands, parts, unpack
