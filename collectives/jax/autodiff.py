"""Derivatives of the collectives, forward and reverse, of any order.

The loss is the SUM of the ranks' losses: a rank's gradient says how that sum changes with the rank's input. With gy the
gradients of the ranks' outputs:

    allreduce (Sum)       gx = allreduce(gy, Sum)                                 with both factors, and compressed like the forward one
    allreduce (Average)   gx = allreduce(gy, Average)
    reducescatter (Sum)   gx = allgather(gy)                                      Average: divided by the number of ranks; with both factors
    allgather             gx = my rows of the sum of gy
    broadcast             gx = allreduce(gy, Sum) on the root, zeros elsewhere
    alltoall              gx = alltoall(gy), with the rows received as splits
    Min, Max, Product, Adasum    every rank's tensor comes here (allgather), and the operation is differentiated as JAX does: equal extreme
                          values share the gradient evenly, a product multiplies the other ranks' elements

A tangent goes through the same collective (jvp), and these are its transposes. They are made of the same primitive, so
that they have derivatives of their own. Integers and bools have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from collectives.base.reduce_op import Op
from collectives.engine import adasum
from collectives.jax import compat
from collectives.jax.collective_call import CollectiveCall
from collectives.jax.primitive import bind, collective_p
from collectives.schedules import partition


def _tangents(primals: Sequence[Any], tangents: Sequence[Any], *, call: CollectiveCall) -> tuple[list[Any], list[Any]]:
    results = bind(call, primals)
    moving = [number for number, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    given = [ad.instantiate_zeros(tangents[number]) for number in moving]
    if call.linear:
        found = bind(call.derived("tangent", moving), given)
    else:
        found = _through_reduction(call.derived("tangent", moving), [primals[number] for number in moving], given)
    out: list[Any] = [compat.no_tangent(result) for result in results]
    for number, tangent in zip(moving, found, strict=True):
        out[number] = tangent
    return results, out


def _adjoint(gradients: Sequence[Any], *operands: Any, call: CollectiveCall) -> list[Any]:
    """The gradients of the operands of a linear call from those of its results."""
    given = [ad.instantiate_zeros(gradient) for gradient in gradients]
    call = call.derived("gradient", range(len(given)))
    found = _ADJOINTS[call.collective](call, given)
    return [
        gradient if ad.is_undefined_primal(operand) else None for operand, gradient in zip(operands, found, strict=True)
    ]


def _of_allreduce(call: CollectiveCall, gradients: list[Any]) -> list[Any]:
    return bind(call, gradients)


def _of_reducescatter(call: CollectiveCall, gradients: list[Any]) -> list[Any]:
    factor = call.prescale * call.postscale / (call.size if call.op == Op.AVERAGE.value else 1)
    rows = tuple(tuple(partition.rows(total, call.size)) for total in call.rows_before)
    gathering = replace(
        call, collective="allgather", op="", prescale=1.0, postscale=1.0, rows=rows, rows_before=(), algorithm=None
    )
    return bind(gathering, [gradient * jnp.asarray(factor, gradient.dtype) for gradient in gradients])


def _of_allgather(call: CollectiveCall, gradients: list[Any]) -> list[Any]:
    assert call.rows is not None
    totals = tuple(sum(rows) for rows in call.rows)
    summing = replace(call, op=Op.SUM.value, rows=None, algorithm=None)
    if all(tuple(partition.rows(total, call.size)) == rows for total, rows in zip(totals, call.rows, strict=True)):
        return bind(replace(summing, collective="reducescatter", rows_before=totals), gradients)
    sums = bind(replace(summing, collective="allreduce"), gradients)
    starts = [sum(rows[: call.rank]) for rows in call.rows]
    return [
        jax.lax.slice_in_dim(each, start, start + rows[call.rank])
        for each, start, rows in zip(sums, starts, call.rows, strict=True)
    ]


def _of_broadcast(call: CollectiveCall, gradients: list[Any]) -> list[Any]:
    totals = bind(replace(call, collective="allreduce", op=Op.SUM.value, root=0, algorithm=None), gradients)
    # Zeros that still know of the all-reduce: a second derivative needs this rank as well.
    return [jnp.where(call.rank == call.root, total, jnp.zeros_like(total)) for total in totals]


def _of_alltoall(call: CollectiveCall, gradients: list[Any]) -> list[Any]:
    assert call.splits is not None and call.rows is not None
    return bind(replace(call, splits=call.rows[0], rows=(call.splits,) * len(gradients)), gradients)


_ADJOINTS = {
    "allreduce": _of_allreduce,
    "reducescatter": _of_reducescatter,
    "allgather": _of_allgather,
    "broadcast": _of_broadcast,
    "alltoall": _of_alltoall,
}


# ---- reductions that are not linear
# ----------------------------------------------------------------------------------------------------


def _through_reduction(call: CollectiveCall, primals: list[Any], tangents: list[Any]) -> list[Any]:
    # Two calls, and not one: a derivative is linear in what has come with the second, and must know what has come with
    # the first.
    all_primals, all_tangents = _everyone(call, "inputs", primals), _everyone(call, "tangents", tangents)
    results = []
    for all_x, all_t in zip(all_primals, all_tangents, strict=True):
        _, tangent = jax.jvp(lambda x: _reduced(call, x), (all_x,), (all_t,))
        if call.collective == "reducescatter":
            rows = partition.rows(tangent.shape[0], call.size)
            start = sum(rows[: call.rank])
            tangent = jax.lax.slice_in_dim(tangent, start, start + rows[call.rank])
        results.append(tangent)
    return results


def _everyone(call: CollectiveCall, what: str, tensors: list[Any]) -> list[Any]:
    """Every rank's tensors, along a new first dimension."""
    gathering = CollectiveCall(
        "allgather",
        call.size,
        call.rank,
        name=call.name and f"{call.name}.{what}",
        process_set=call.process_set,
        grouped=True,
        ordered=call.ordered,
        rows=((1,) * call.size,) * len(tensors),
    )
    return bind(gathering, [each[None] for each in tensors])


def _reduced(call: CollectiveCall, all_x: Any) -> Any:
    """The reduction of every rank's tensor, along the first dimension."""
    dtype = all_x.dtype
    wide = all_x.astype(jnp.promote_types(dtype, jnp.float32)) * call.prescale
    if call.op == Op.ADASUM.value:
        rows = list(wide)
        for level in adasum.tree(call.size):
            for left, right in level:
                rows[left] = _adasum(rows[left], rows[right])
        result = rows[0]
    else:
        reduce: Any = {"min": jnp.min, "max": jnp.max, "product": jnp.prod}[call.op]
        result = reduce(wide, axis=0)
    return (result * call.postscale).astype(dtype)


def _adasum(a: Any, b: Any) -> Any:
    dot = jnp.sum(a * b)

    def coefficient(vector: Any) -> Any:
        square = jnp.sum(vector * vector)
        return jnp.where(square == 0, 1.0, 1.0 - dot / (2 * jnp.where(square == 0, 1.0, square)))

    return coefficient(a) * a + coefficient(b) * b


ad.primitive_jvps[collective_p] = _tangents
ad.primitive_transposes[collective_p] = _adjoint
