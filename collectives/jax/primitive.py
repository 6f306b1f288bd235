"""The JAX primitive of all collectives, and its rules.

    evaluation    call the engine at once
    abstract      shapes, and the effect that keeps calls in program order unless they are matched by name
    lowering      on the CPU a foreign function that reads and writes XLA's buffers (`collectives.jax.ffi`); elsewhere,
                  and in older versions, a JAX callback
    jvp           `collectives.jax.autodiff`: linear collectives of the tangents
    transpose     `collectives.jax.autodiff`: the adjoint
    vmap          one collective of all examples; rows stay the first dimension

The ranks' calls pair up if every rank traces, differentiates and vectorises alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching

from collectives.base.errors import InvalidArgumentError
from collectives.base.reduce_op import Op
from collectives.jax import compat, eager, ffi
from collectives.jax.collective_call import CollectiveCall, deserialize

collective_p = compat.primitive("collective")


def bind(call: CollectiveCall, operands: Sequence[Any]) -> list[Any]:
    """Add the call to the program that is being traced; carry it out if the operands are concrete."""
    return list(collective_p.bind(*operands, call=call))


def _abstract(*operands: Any, call: CollectiveCall) -> tuple[Any, Any]:
    shapes = call.result_shapes([(each.shape, each.dtype) for each in operands])
    return [compat.shaped(*each) for each in shapes], {compat.ORDERED} if call.ordered else set()


def _lower(ctx: Any, *operands: Any, call: CollectiveCall) -> Any:
    """Lower to a JAX callback, whose operands and results are copied."""

    def run(*arrays: Any) -> tuple[Any, ...]:
        return tuple(call.run([np.asarray(array) for array in arrays]))

    return compat.lower_as_callback(ctx, run, operands, call.ordered)


def _lower_without_copies(ctx: Any, *operands: Any, call: CollectiveCall) -> Any:
    if compat.devices(ctx) > 1:
        return _lower(ctx, *operands, call=call)
    shapes = [(each.shape, each.dtype) for each in ctx.avals_in]
    # Gradients are usually computed by the program and used by the all-reduce alone. In place, no fresh memory is
    # touched, whose page faults take as long as the all-reduce itself.
    in_place = call.collective in ("allreduce", "broadcast")
    return compat.lower_as_ffi_call(ctx, _TARGET, operands, call.serialize(shapes), call.ordered, in_place)


def _vectorise(operands: Sequence[Any], dims: Sequence[Any], *, call: CollectiveCall) -> tuple[list[Any], list[Any]]:
    if call.op == Op.ADASUM.value:
        raise InvalidArgumentError(
            "op=Adasum: cannot be vectorised, since it combines whole tensors; call it outside vmap"
        )
    if call.collective in ("allreduce", "broadcast"):  # element by element
        return bind(call, operands), list(dims)
    moved = [each if dim is None else jnp.moveaxis(each, dim, 1) for each, dim in zip(operands, dims, strict=True)]
    return bind(call, moved), [dim if dim is None else 1 for dim in dims]


collective_p.def_impl(lambda *operands, call: eager.run(call, operands))
collective_p.def_effectful_abstract_eval(_abstract)
batching.primitive_batchers[collective_p] = _vectorise

_TARGET = "collectives.jax"
compat.register_lowering(collective_p, _lower)
if compat.register_ffi_target(_TARGET, lambda version: ffi.handler(lambda text: deserialize(text).run, version)):
    compat.register_lowering(collective_p, _lower_without_copies, platform="cpu")
