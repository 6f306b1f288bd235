"""Gradients through the collectives: each is carried out by the engine, and its adjoint by other collectives in
backward.

The loss is the SUM of the ranks' losses: a rank's gradient says how that sum changes with the rank's input. With gy the
gradients of the ranks' outputs, `f` a reduction with its scale factors, and rows as a reduce-scatter divides them:

    allreduce (Sum)       gx = allreduce(gy, Sum)
    allreduce (Average)   gx = allreduce(gy, Average)
    allreduce (else)      gx = the adjoint of reducescatter, of reducescatter(gy, Sum)
    reducescatter (Sum)   gx = allgather(gy)                                      Average: divided by the number of ranks
    reducescatter (else)  every rank's version of my rows comes here (alltoall), f is differentiated there, and each
    goes back (alltoall) allgather             gx = my rows of the sum of gy: a reduce-scatter, or where ranks differ in rows an alltoall and a local sum
    broadcast             gx = allreduce(gy, Sum) on the root, zeros elsewhere
    alltoall              gx = alltoall(gy), with the rows received as splits
    Adasum                every rank's tensor comes here (allgather), its tree is differentiated, with allreduce(gy, Sum)

Linear ones are scaled by both factors. Of Min and Max, equal extreme values share the gradient evenly; Product
multiplies the other ranks' elements, so that zeros do no harm; Adasum takes the coefficient of a vector of zeros for
the constant that it is taken for in forward. Complex tensors follow torch's convention (the conjugate of what
multiplies). Tensors of integers and bools have no gradient.

An adjoint is made of the same differentiable collectives, so that it can be differentiated again.

With ``COLLECTIVES_GRADIENTS=horovod`` the gradients are those of Horovod, where these differ:

    allreduce (else)      gx = allreduce(gy), by the same operation and with the same factors
    reducescatter         size() times the adjoint, of Sum and Average; Horovod has no others
    allgather, broadcast  the adjoint divided by size()

Every rank must use the outputs of the same calls in its backward pass, because their adjoints need all ranks. These
pair up by name: a rank that leaves one out keeps the others waiting (and all get an error), but is never taken for a
later one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from collectives.base.reduce_op import Op
from collectives.engine import adasum
from collectives.engine.handles import Handle
from collectives.schedules import partition
from collectives.world import World

_Adjoint = Callable[[list[Any], Sequence[Any]], Sequence[Any]]
"""The gradients of outputs, and the inputs if they were kept, to the gradients of inputs."""

_SLOTS = 64
"""Names of the gradients of unnamed calls of one kind. The engine remembers what it has done under a name, so that new
ones forever would be slow; and one rank is never as many calls ahead of another in backward, where each is waited
for."""


@dataclass(frozen=True)
class Call:
    """How a collective is called.

    Attributes:
        world: of the process set.
        name: of the operation.
        grouped: whether it is the grouped form.
        options: what else the world's method takes, by its names.
        exact: whether its gradient is the adjoint under any setting.
    """

    world: World
    name: str | None = None
    grouped: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    exact: bool = False

    @property
    def as_horovod(self) -> bool:
        """Whether its gradient is Horovod's."""
        return not self.exact and self.world.config.gradients == "horovod"

    def run(self, collective: str, *arguments: Any) -> tuple[Any, str]:
        """Carry it out; the result, and the name of its gradient."""
        begin = getattr(self.world, f"grouped_{collective}_async" if self.grouped else f"{collective}_async")
        handle = begin(*arguments, name=self.name, **self.options)
        return handle.wait(), _name_of_gradient(handle)

    def run_all(self, collective: str, tensors: Sequence[Any]) -> tuple[list[Any], str]:
        """Carry it out for a group, or for the only tensor."""
        result, name = self.run(collective, list(tensors) if self.grouped else tensors[0])
        return list(result) if self.grouped else [result], name

    def scales(self) -> tuple[float, float]:
        return float(self.options.get("prescale_factor", 1.0)), float(self.options.get("postscale_factor", 1.0))


def tracks(tensor: Any) -> bool:
    """Whether autograd wants to know what becomes of a tensor."""
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled()


# ---- the collectives
# -----------------------------------------------------------------------------------------------------


def allreduce(call: Call, tensors: Sequence[Any]) -> list[Any]:
    """`collectives.torch.allreduce` of one tensor, or of a group; ``op`` is among the options."""
    results, name = call.run_all("allreduce", tensors)
    world, op = call.world, call.options["op"]
    alike = op in (Op.SUM, Op.AVERAGE) or call.as_horovod

    def adjoint(gradients: list[Any], inputs: Sequence[Any]) -> Sequence[Any]:
        if alike:
            return allreduce(replace(call, name=name, options={**call.options, "stream": None}), gradients)
        return [
            of_one(f"{name}.{i}", gradient, x) for i, (gradient, x) in enumerate(zip(gradients, inputs, strict=True))
        ]

    def of_one(name: str, gradient: Any, x: Any) -> Any:
        if op is Op.ADASUM:
            return _through_adasum(world, name, x, gradient, *call.scales())
        (share,) = reducescatter(Call(world, f"{name}.sum", options={"op": Op.SUM}), [gradient.reshape(-1)])
        return _through_rows(world, name, op, x.reshape(-1), share, *call.scales()).reshape(x.shape)

    return _attach(adjoint, results, tensors, keeps=not alike)


def reducescatter(call: Call, tensors: Sequence[Any]) -> list[Any]:
    """`collectives.torch.reducescatter` of one tensor, or of a group; ``op`` is among the options."""
    results, name = call.run_all("reducescatter", tensors)
    world, op = call.world, call.options["op"]
    linear = op in (Op.SUM, Op.AVERAGE)

    def adjoint(gradients: list[Any], inputs: Sequence[Any]) -> Sequence[Any]:
        before, after = call.scales()
        if linear:
            factor = before * after * (world.size if call.as_horovod else 1) / (world.size if op is Op.AVERAGE else 1)
            return allgather(Call(world, name, call.grouped), [_scaled(gradient, factor) for gradient in gradients])
        pairs = enumerate(zip(gradients, inputs, strict=True))
        return [_through_rows(world, f"{name}.{i}", op, x, gradient, before, after) for i, (gradient, x) in pairs]

    return _attach(adjoint, results, tensors, keeps=not linear)


def allgather(call: Call, tensors: Sequence[Any]) -> list[Any]:
    """`collectives.torch.allgather` of one tensor, or of a group."""
    results, name = call.run_all("allgather", tensors)
    rows = [tensor.shape[0] for tensor in tensors if _has_gradient(tensor)]
    op = Op.AVERAGE if call.as_horovod else Op.SUM

    def adjoint(gradients: list[Any], inputs: Sequence[Any]) -> Sequence[Any]:
        return _own_rows(call.world, name, gradients, rows, op)

    return _attach(adjoint, results, tensors)


def broadcast(call: Call, tensor: Any, root: int) -> Any:
    """`collectives.torch.broadcast`; the root by its number in the world."""
    result, name = call.run("broadcast", tensor, root)
    world = call.world
    op = Op.AVERAGE if call.as_horovod else Op.SUM

    def adjoint(gradients: list[Any], inputs: Sequence[Any]) -> Sequence[Any]:
        (total,) = allreduce(Call(world, name, options={"op": op}), gradients)
        if world.rank == root:
            return [total]
        # Zeros that still know of the all-reduce: a second backward pass needs this rank as well.
        return [total.masked_fill(torch.ones((), dtype=torch.bool, device=total.device), 0)]

    return _attach(adjoint, [result], [tensor])[0]


def alltoall(call: Call, tensor: Any, splits: Any) -> tuple[Any, list[int]]:
    """`collectives.torch.alltoall`, with splits; the rows received, and how many from each rank."""
    (result, received), name = call.run("alltoall", tensor, splits)
    counts: list[int] = received.tolist()

    def adjoint(gradients: list[Any], inputs: Sequence[Any]) -> Sequence[Any]:
        return [alltoall(Call(call.world, name), gradients[0], counts)[0]]

    return _attach(adjoint, [result], [tensor])[0], counts


# ---- the graph
# -----------------------------------------------------------------------------------------------------------


class _Collective(torch.autograd.Function):  # type: ignore[misc]
    """A collective that has been carried out, in torch's graph."""

    @staticmethod
    def forward(ctx: Any, adjoint: _Adjoint, keeps: bool, results: Sequence[Any], *tensors: Any) -> tuple[Any, ...]:
        ctx.adjoint, ctx.keeps = adjoint, keeps
        if keeps:
            ctx.save_for_backward(*tensors)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        # Each output of a group may have a backward pass of its own, unless there are inputs, which torch keeps for
        # one.
        return (None, None, None, *ctx.adjoint(list(gradients), ctx.saved_tensors if ctx.keeps else ()))


def _attach(adjoint: _Adjoint, results: list[Any], tensors: Sequence[Any], keeps: bool = False) -> list[Any]:
    """The results as functions of the tensors, if any of these needs a gradient.

    Then of all of them: all ranks' adjoints must be about the same ones, and another rank may need one that is not
    needed here.
    """
    if any(map(tracks, tensors)):
        chosen = [i for i, tensor in enumerate(tensors) if _has_gradient(tensor)]
        attached = _Collective.apply(adjoint, keeps, [results[i] for i in chosen], *(tensors[i] for i in chosen))
        for i, result in zip(chosen, attached, strict=True):
            results[i] = result
    return results


def _has_gradient(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex())


def _name_of_gradient(handle: Handle) -> str:
    """Alike on all ranks: by the number that the engine gave to an unnamed call, by which it found the other ranks'."""
    request = handle.entry.request
    if request.name is not None:
        return f"{request.name}.gradient"
    kind = len(request.members) if request.members else f"{request.dtype}{list(request.shape or ())}"
    number = handle.key % _SLOTS if isinstance(handle.key, int) else 0  # a world of one rank counts nothing
    return f"{request.collective}.{kind}.{number}.gradient"


# ---- adjoints
# ------------------------------------------------------------------------------------------------------------


def _own_rows(world: World, name: str, gradients: Sequence[Any], rows: Sequence[int], op: Op) -> list[Any]:
    """This rank's rows of each Sum or Average over the ranks; ``rows`` says how many are this rank's."""
    table = world.allgather(np.array([rows], np.int64), name=f"{name}.rows").T.tolist()
    even = [i for i, counts in enumerate(table) if counts == partition.rows(sum(counts), world.size)]
    results = list(gradients)
    if even:
        call = Call(world, name, grouped=True, options={"op": op}, exact=True)
        for i, result in zip(even, reducescatter(call, [gradients[i] for i in even]), strict=True):
            results[i] = result
    for i, counts in enumerate(table):
        if i not in even:
            parts, _ = alltoall(Call(world, f"{name}.{i}"), gradients[i], counts)
            parts = parts.reshape(world.size, rows[i], *parts.shape[1:])
            results[i] = parts.mean(0) if op is Op.AVERAGE else parts.sum(0)
    return results


_REDUCTIONS: dict[Op, Callable[[Any], Any]] = {
    Op.MIN: lambda rows: torch.amin(rows, 0),
    Op.MAX: lambda rows: torch.amax(rows, 0),
    Op.PRODUCT: lambda rows: torch.prod(rows, 0),
}
"""Their gradients in torch: amin and amax share among equals, prod knows of zeros."""


def _through_rows(world: World, name: str, op: Op, x: Any, gradient: Any, before: float, after: float) -> Any:
    """The adjoint of a reduce-scatter that is not linear: ``gradient`` of this rank's rows of the result, to that of
    all rows of ``x``."""
    shares = partition.rows(x.shape[0], world.size)
    own = shares[world.rank]
    versions, _ = alltoall(Call(world, f"{name}.rows"), x, shares)

    def reduce(versions: Any) -> Any:
        wide = versions.float() if versions.dtype in (torch.float16, torch.bfloat16) else versions
        return _scaled(_REDUCTIONS[op](_scaled(wide, before).reshape(world.size, own, *x.shape[1:])), after)

    back, _ = alltoall(Call(world, f"{name}.back"), _differentiated(reduce, versions, gradient), [own] * world.size)
    return back


def _through_adasum(world: World, name: str, x: Any, gradient: Any, before: float, after: float) -> Any:
    """The adjoint of Adasum, computed in float64 as its sums are. Takes memory for every rank's tensor."""
    (rows,) = allgather(Call(world, f"{name}.rows"), [x.reshape(1, -1)])
    (total,) = allreduce(Call(world, f"{name}.sum", options={"op": Op.SUM}), [gradient])

    def combined(mine: Any) -> Any:
        vectors = [_scaled(row.double(), before) for row in (*rows[: world.rank], mine, *rows[world.rank + 1 :])]
        for level in adasum.tree(world.size):
            for i, j in level:
                a, b = vectors[i], vectors[j]
                product = a @ b
                vectors[i] = _coefficient(product, a @ a) * a + _coefficient(product, b @ b) * b
        return _scaled(vectors[0], after)

    return _differentiated(combined, rows[world.rank], total.reshape(-1)).reshape(x.shape)


def _coefficient(product: Any, square: Any) -> Any:
    return 1 - product / square.masked_fill(square == 0, 1) / 2


def _differentiated(function: Callable[[Any], Any], x: Any, gradient: Any) -> Any:
    """The gradient of ``x``, given that of ``function(x)``; differentiable where the backward pass that asks is."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        variable = x if x.requires_grad else x.detach().requires_grad_()
        y = function(variable)
        (result,) = torch.autograd.grad(y, variable, gradient.to(y.dtype), create_graph=again)
    return result


def _scaled(tensor: Any, factor: float) -> Any:
    return tensor if factor == 1.0 else tensor * factor
