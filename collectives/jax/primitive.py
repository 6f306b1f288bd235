"""The JAX primitive of all collectives, and its rules.

    evaluation    call the engine at once
    abstract      shapes, and the effect that keeps calls in program order unless they are matched by name
    lowering      on the CPU a foreign function that reads and writes XLA's buffers (`collectives.jax.ffi`); elsewhere,
                  and in older versions, a JAX callback
    jvp           a tangent of a linear collective passes through the same collective
    transpose     the adjoint that `collectives.frontends.adjoints` states
    vmap          one collective of all examples; rows stay the first dimension

Min, Max, Product and Adasum gather every rank's tensor and are differentiated by JAX. Derivatives are made of the same
primitive, so they can be differentiated again, forward and reverse. Integers and bools have none.

The ranks' calls pair up if every rank traces, differentiates and vectorises alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.interpreters import ad, batching

from collectives.base.errors import InvalidArgumentError
from collectives.base.reduce_op import Op
from collectives.frontends import adjoints
from collectives.jax import compat, eager, ffi
from collectives.jax.collective_call import CollectiveCall, deserialize
from collectives.schedules import partition

collective_p = compat.primitive("collective")


def bind(call: CollectiveCall, operands: Sequence[Any]) -> list[Any]:
    """Add the call to the program that is being traced; carry it out if the operands are concrete."""
    return list(collective_p.bind(*operands, call=call))


def _evaluate(*operands: Any, call: CollectiveCall) -> list[Any]:
    eager.wait_for_effects()
    return eager.run(call, operands)


def _abstract(*operands: Any, call: CollectiveCall) -> tuple[Any, Any]:
    shapes = call.result_shapes([(each.shape, each.dtype) for each in operands])
    return [ShapedArray(*each) for each in shapes], {compat.ORDERED} if call.ordered else set()


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
            "op=Adasum cannot be vectorised, because it combines whole tensors; call it outside vmap [A14]"
        )
    if call.collective in ("allreduce", "broadcast"):  # element by element
        return bind(call, operands), list(dims)
    moved = [each if dim is None else jnp.moveaxis(each, dim, 1) for each, dim in zip(operands, dims, strict=True)]
    return bind(call, moved), [dim if dim is None else 1 for dim in dims]


# ---- derivatives


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: CollectiveCall) -> tuple[list[Any], list[Any]]:
    results = bind(call, primals)
    moving = [number for number, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    moving_tangents = [ad.instantiate_zeros(tangents[number]) for number in moving]
    derivative = call.derived("tangent", moving)
    if call.linear:
        moved = bind(derivative, moving_tangents)
    else:
        moved = _through_reduction(derivative, [primals[number] for number in moving], moving_tangents)
    out: list[Any] = [compat.no_tangent(result) for result in results]
    for number, tangent in zip(moving, moved, strict=True):
        out[number] = tangent
    return results, out


def _transpose(gradients: Sequence[Any], *operands: Any, call: CollectiveCall) -> list[Any]:
    """Return the gradients of a linear call's operands from those of its results."""
    cotangents = [ad.instantiate_zeros(gradient) for gradient in gradients]
    derivative = _Differentiable(call.derived("gradient", range(len(cotangents))))
    operand_gradients = _ADJOINTS[call.collective](derivative, cotangents)
    return [
        gradient if ad.is_undefined_primal(operand) else None
        for operand, gradient in zip(operands, operand_gradients, strict=True)
    ]


@dataclass(frozen=True)
class _Differentiable:
    """A call as `collectives.frontends.adjoints.LinearCall`."""

    call: CollectiveCall

    @property
    def op(self) -> Op | None:
        return Op(self.call.op) if self.call.op else None

    @property
    def factors(self) -> tuple[float, float]:
        return self.call.prescale, self.call.postscale

    @property
    def as_horovod(self) -> bool:
        return False

    def repeat(self, tensors: Sequence[Any]) -> Sequence[Any]:
        return bind(self.call, tensors)

    def allgather(self, tensors: Sequence[Any]) -> Sequence[Any]:
        rows = tuple(tuple(partition.rows(total, self.call.size)) for total in self.call.rows_before)
        unscaled = replace(self.call, op="", prescale=1.0, postscale=1.0, rows_before=(), algorithm=None)
        return bind(replace(unscaled, collective="allgather", rows=rows), tensors)

    def own_rows(self, tensors: Sequence[Any], op: Op) -> Sequence[Any]:
        call = self.call
        assert call.rows is not None
        totals = tuple(sum(rows) for rows in call.rows)
        summing = replace(call, op=op.value, rows=None, algorithm=None)
        if all(tuple(partition.rows(total, call.size)) == rows for total, rows in zip(totals, call.rows, strict=True)):
            return bind(replace(summing, collective="reducescatter", rows_before=totals), tensors)
        sums = bind(replace(summing, collective="allreduce"), tensors)
        return [_share(each, rows, call.rank) for each, rows in zip(sums, call.rows, strict=True)]

    def at_root(self, tensors: Sequence[Any], op: Op) -> Sequence[Any]:
        call = self.call
        totals = bind(replace(call, collective="allreduce", op=op.value, root=0, algorithm=None), tensors)
        # The zeros depend on the all-reduce, so that a second derivative runs on this rank as well.
        return [jnp.where(call.rank == call.root, total, jnp.zeros_like(total)) for total in totals]

    def send_back(self, tensors: Sequence[Any]) -> Sequence[Any]:
        call = self.call
        assert call.splits is not None and call.rows is not None
        return bind(replace(call, splits=call.rows[0], rows=(call.splits,) * len(tensors)), tensors)

    def scaled(self, tensor: Any, factor: float, power: int = 0) -> Any:
        return tensor * jnp.asarray(factor * float(self.call.size) ** power, tensor.dtype)


def _share(tensor: Any, rows: Sequence[int], rank: int) -> Any:
    """The rows of one rank, where ``rows`` counts those of each."""
    start = sum(rows[:rank])
    return jax.lax.slice_in_dim(tensor, start, start + rows[rank])


_ADJOINTS: dict[str, Callable[[Any, list[Any]], Sequence[Any]]] = {
    "allreduce": lambda call, gradients: adjoints.allreduce(call, gradients, ()),
    "reducescatter": adjoints.linear_reducescatter,
    "allgather": adjoints.allgather,
    "broadcast": adjoints.broadcast,
    "alltoall": adjoints.alltoall,
}


# ---- reductions that are not linear


def _through_reduction(call: CollectiveCall, primals: list[Any], tangents: list[Any]) -> list[Any]:
    # Two calls instead of one: the derivative is linear in the gathered tangents and needs the gathered primals.
    all_primals, all_tangents = _gathered(call, "inputs", primals), _gathered(call, "tangents", tangents)
    results = []
    for all_x, all_t in zip(all_primals, all_tangents, strict=True):
        _, tangent = jax.jvp(lambda x: _reduced(call, x), (all_x,), (all_t,))
        if call.collective == "reducescatter":
            tangent = _share(tangent, partition.rows(tangent.shape[0], call.size), call.rank)
        results.append(tangent)
    return results


def _gathered(call: CollectiveCall, suffix: str, tensors: list[Any]) -> list[Any]:
    """Every rank's tensors, along a new first dimension."""
    gathering = CollectiveCall(
        "allgather",
        call.size,
        call.rank,
        name=call.name and f"{call.name}.{suffix}",
        process_set=call.process_set,
        grouped=True,
        ordered=call.ordered,
        rows=((1,) * call.size,) * len(tensors),
        local_rank=call.local_rank,
    )
    return bind(gathering, [each[None] for each in tensors])


def _reduced(call: CollectiveCall, all_x: Any) -> Any:
    """The reduction of every rank's tensor, along the first dimension."""
    dtype = all_x.dtype
    wide = all_x.astype(jnp.promote_types(dtype, jnp.float32)) * call.prescale
    if call.op == Op.ADASUM.value:
        result = adjoints.adasum(_ARITHMETIC, list(wide))
    else:
        reduce: Any = {"min": jnp.min, "max": jnp.max, "product": jnp.prod}[call.op]
        result = reduce(wide, axis=0)
    return (result * call.postscale).astype(dtype)


class _Arithmetic:
    """The part of `collectives.frontends.adjoints.Arithmetic` that `adjoints.adasum` uses."""

    def dot(self, a: Any, b: Any) -> Any:
        return jnp.sum(a * b)

    def nonzero(self, scalar: Any) -> Any:
        return jnp.where(scalar == 0, 1.0, scalar)


_ARITHMETIC: Any = _Arithmetic()


# ---- registration

collective_p.def_impl(_evaluate)
collective_p.def_effectful_abstract_eval(_abstract)
batching.primitive_batchers[collective_p] = _vectorise
ad.primitive_jvps[collective_p] = _jvp
ad.primitive_transposes[collective_p] = _transpose

_TARGET = "collectives.jax"
compat.register_lowering(collective_p, _lower)
if compat.register_ffi_target(_TARGET, lambda version: ffi.handler(lambda text: deserialize(text).run, version)):
    compat.register_lowering(collective_p, _lower_without_copies, platform="cpu")
