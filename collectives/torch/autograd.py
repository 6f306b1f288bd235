"""Gradients through the collectives in eager mode: the engine runs each collective, and its adjoint in backward.
Within `torch.func` and forward mode, torch carries a collective out by rules (`_Transformable`).

The adjoints are those of `collectives.frontends.adjoints`; complex tensors follow torch's convention.

Every rank must use the outputs of the same calls in its backward pass, because their adjoints need all ranks. Adjoints
are matched by name: a rank that leaves one out keeps the others waiting (and all get an error), but the adjoint is
never taken for a later one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch._C import _are_functorch_transforms_active as _transforms_active
from torch._C import _functorch as functorch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from collectives.base.errors import UnsupportedError
from collectives.base.reduce_op import Op
from collectives.engine import arguments
from collectives.engine.handles import Handle
from collectives.frontends import adjoints
from collectives.schedules import partition
from collectives.torch.arithmetic import TorchArithmetic, scaled
from collectives.worlds.world import World

_Adjoint = Callable[[list[Any], Sequence[Any]], Sequence[Any]]
"""Maps the gradients of outputs, and the inputs if they were kept, to the gradients of inputs."""

_SLOTS = 64
"""Names of the gradients of unnamed calls of one kind. The engine remembers what it has done under a name, so that
an unbounded number of names would be slow. In backward each adjoint is waited for, so ranks are never this many calls
apart."""


@dataclass(frozen=True)
class DifferentiableCall:
    """The call of a collective, and the collectives that its adjoint is made of (`adjoints.ReductionCall`).

    Attributes:
        world: of the process set.
        name: of the operation; of a call that is being differentiated, of its gradient.
        grouped: whether it is the grouped form.
        options: the other keywords of the world's method.
        exact: whether its gradient is the adjoint under any setting.
        rows: of an all-gather being differentiated, this rank's rows of each tensor.
        root: of a broadcast, its rank in the world.
        received: of an all-to-all being differentiated, the rows received from each rank.
    """

    world: World
    name: str | None = None
    grouped: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    exact: bool = False
    rows: Sequence[int] = ()
    root: int = 0
    received: Sequence[int] = ()

    arithmetic = TorchArithmetic()

    def run(self, collective: str, *arguments: Any) -> tuple[Any, DifferentiableCall]:
        """Run it without autograd. Returns the result, and the call by the name of its gradient."""
        begin = getattr(self.world, f"grouped_{collective}_async" if self.grouped else f"{collective}_async")
        handle = begin(*arguments, name=self.name, **self.options)
        return handle.wait(), replace(self, name=_name_of_gradient(handle))

    def run_all(self, collective: str, tensors: Sequence[Any]) -> tuple[list[Any], DifferentiableCall]:
        """`run` for a group, or for the only tensor."""
        result, backward = self.run(collective, list(tensors) if self.grouped else tensors[0])
        return list(result) if self.grouped else [result], backward

    # ---- for the adjoint

    @property
    def op(self) -> Op | None:
        return self.options.get("op")

    @property
    def factors(self) -> tuple[float, float]:
        return float(self.options.get("prescale_factor", 1.0)), float(self.options.get("postscale_factor", 1.0))

    @property
    def as_horovod(self) -> bool:
        return not self.exact and self.world.config.gradients == "horovod"

    @property
    def rank(self) -> int:
        return self.world.rank

    def numbered(self, number: int) -> DifferentiableCall:
        return replace(self, name=self._derived(f".{number}"))

    def _other(self, suffix: str = "", **fields: Any) -> DifferentiableCall:
        return DifferentiableCall(self.world, self._derived(suffix), **fields)

    def _derived(self, suffix: str) -> str | None:
        """A name; None in a compiled graph, whose unnamed calls are matched by order."""
        return self.name and self.name + suffix

    def repeat(self, tensors: Sequence[Any]) -> list[Any]:
        return allreduce(replace(self, options={**self.options, "stream": None}), tensors)

    def allgather(self, tensors: Sequence[Any]) -> list[Any]:
        return allgather(self._other(grouped=self.grouped), tensors)

    def own_rows(self, tensors: Sequence[Any], op: Op) -> list[Any]:
        """Reduce-scatter where the ranks' rows are divided as it divides them; elsewhere all-to-all and a local sum."""
        size = self.world.size
        table = self.world.allgather(np.array([self.rows], np.int64), name=self._derived(".rows")).T.tolist()
        even = [i for i, counts in enumerate(table) if counts == partition.rows(sum(counts), size)]
        results = list(tensors)
        if even:
            summing = self._other(grouped=True, options={"op": op}, exact=True)
            for i, result in zip(even, reducescatter(summing, [tensors[i] for i in even]), strict=True):
                results[i] = result
        for i, counts in enumerate(table):
            if i not in even:
                parts, _ = alltoall(self._other(f".{i}"), tensors[i], counts)
                parts = parts.reshape(size, self.rows[i], *parts.shape[1:])
                results[i] = parts.mean(0) if op is Op.AVERAGE else parts.sum(0)
        return results

    def at_root(self, tensors: Sequence[Any], op: Op) -> list[Any]:
        (total,) = allreduce(self._other(options={"op": op}), tensors)
        if self.rank == self.root:
            return [total]
        # Zeros that depend on the all-reduce: a second backward pass needs this rank as well.
        return [total.masked_fill(torch.ones((), dtype=torch.bool, device=total.device), 0)]

    def send_back(self, tensors: Sequence[Any]) -> list[Any]:
        return [alltoall(self._other(), tensors[0], self.received)[0]]

    def scaled(self, tensor: Any, factor: float, power: int = 0) -> Any:
        return scaled(tensor, factor * float(self.world.size) ** power)

    def summed(self, tensor: Any) -> Any:
        return allreduce(self._other(".sum", options={"op": Op.SUM}), [tensor])[0]

    def summed_share(self, tensor: Any) -> Any:
        return reducescatter(self._other(".sum", options={"op": Op.SUM}), [tensor])[0]

    def versions(self, tensor: Any) -> Any:
        shares = partition.rows(tensor.shape[0], self.world.size)
        versions, _ = alltoall(self._other(".rows"), tensor, shares)
        return versions.reshape(self.world.size, shares[self.rank], *tensor.shape[1:])

    def return_versions(self, versions: Any) -> Any:
        size, own = versions.shape[:2]
        return alltoall(self._other(".back"), versions.reshape(size * own, *versions.shape[2:]), [own] * size)[0]

    def vectors(self, tensor: Any) -> list[Any]:
        return list(allgather(self._other(".rows"), [tensor.reshape(1, -1)])[0].double())


def tracks(tensor: Any) -> bool:
    """Whether autograd records operations on a tensor, or a transform may."""
    return isinstance(tensor, torch.Tensor) and ((tensor.requires_grad and torch.is_grad_enabled()) or _in_transform())


# ---- the collectives


def allreduce(call: DifferentiableCall, tensors: Sequence[Any]) -> list[Any]:
    """`collectives.torch.allreduce` of one tensor, or of a group; ``op`` is among the options."""
    if _in_transform():
        return _transformed("allreduce", call, tensors)
    results, backward = call.run_all("allreduce", tensors)
    keeps = not (adjoints.is_linear(call.op) or call.as_horovod)
    return _attach(lambda *about: adjoints.allreduce(backward, *about), results, tensors, keeps)


def reducescatter(call: DifferentiableCall, tensors: Sequence[Any]) -> list[Any]:
    """`collectives.torch.reducescatter` of one tensor, or of a group; ``op`` is among the options."""
    if _in_transform():
        return _transformed("reducescatter", call, tensors)
    results, backward = call.run_all("reducescatter", tensors)
    keeps = not adjoints.is_linear(call.op)
    return _attach(lambda *about: adjoints.reducescatter(backward, *about), results, tensors, keeps)


def allgather(call: DifferentiableCall, tensors: Sequence[Any]) -> list[Any]:
    """`collectives.torch.allgather` of one tensor, or of a group."""
    if _in_transform():
        return _transformed("allgather", call, tensors)
    results, backward = call.run_all("allgather", tensors)
    backward = replace(backward, rows=[tensor.shape[0] for tensor in tensors if _has_gradient(tensor)])
    return _attach(lambda gradients, _: adjoints.allgather(backward, gradients), results, tensors)


def broadcast(call: DifferentiableCall, tensor: Any, root: int) -> Any:
    """`collectives.torch.broadcast`; the root by its number in the world."""
    if _in_transform():
        return _transformed("broadcast", replace(call, root=root), [tensor], root)[0]
    result, backward = call.run("broadcast", tensor, root)
    backward = replace(backward, root=root)
    return _attach(lambda gradients, _: adjoints.broadcast(backward, gradients), [result], [tensor])[0]


def alltoall(call: DifferentiableCall, tensor: Any, splits: Any) -> tuple[Any, list[int]]:
    """`collectives.torch.alltoall`, with splits; the rows received, and how many from each rank."""
    if _in_transform():
        call = replace(call, received=_received(call, tensor, splits))
        return _transformed("alltoall", call, [tensor], splits)[0], list(call.received)
    (result, received), backward = call.run("alltoall", tensor, splits)
    counts: list[int] = received.tolist()
    backward = replace(backward, received=counts)
    return _attach(lambda gradients, _: adjoints.alltoall(backward, gradients), [result], [tensor])[0], counts


# ---- torch's graph


class _Collective(torch.autograd.Function):
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
        apply: Any = _Collective.apply
        attached = apply(adjoint, keeps, [results[i] for i in chosen], *(tensors[i] for i in chosen))
        for i, result in zip(chosen, attached, strict=True):
            results[i] = result
    return results


def _has_gradient(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex())


# ---- torch.func's transforms, and forward mode


def _in_transform() -> bool:
    return _transforms_active() or forward_ad._current_level >= 0


def refuse_transforms_in_graph() -> None:
    """Refuse a transform that a compiler traces: torch has no rules there for operators of others."""
    if _in_transform():
        raise UnsupportedError(
            "torch.compile does not look into the transforms of torch.func where they hold a collective: keep the "
            "transformed function out of the graph (torch.compiler.disable)"
        )


@dataclass(frozen=True)
class _Transformed:
    """A collective that a transform sees as one function of its tensors.

    Calls without a name are matched by their order, in adjoints too: every rank applies the same transforms.

    Attributes:
        collective: the world's method.
        call, arguments: of the collective.
    """

    collective: str
    call: DifferentiableCall
    arguments: tuple[Any, ...]

    def run(self, tensors: Sequence[Any]) -> list[Any]:
        """Carry it out, on tensors that have elements."""
        inputs = list(tensors) if self.call.grouped else tensors[0]
        result, _ = self.call.run(self.collective, inputs, *self.arguments)
        return list(result) if self.call.grouped else [result[0] if self.collective == "alltoall" else result]

    def differentiated(self, gradients: list[Any], inputs: Sequence[Any]) -> Sequence[Any]:
        rows = [x.shape[0] for x in inputs] if self.collective == "allgather" else ()
        call = replace(self.call, name=self.call._derived(".gradient"), rows=rows)
        if self.collective in ("allreduce", "reducescatter"):
            return getattr(adjoints, self.collective)(call, gradients, inputs)
        return getattr(adjoints, self.collective)(call, gradients)

    def refused(self, problem: str) -> Exception:
        op = "" if self.call.op is None else f" with op={self.call.op!r}"
        return self.call.world.refused(UnsupportedError(f"{self.collective}{op}: {problem}"), self.call.name)


class _Transformable(torch.autograd.Function):
    """The rules by which torch takes a collective through the levels of its transforms."""

    @staticmethod
    def forward(this: _Transformed, *tensors: Any) -> tuple[Any, ...]:
        # torch calls this from C++, where a compiler that has given up a graph may begin another.
        run = torch.compiler.disable(this.run) if torch.compiler.is_compiling() else this.run
        return tuple(run(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.this, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        inputs = ctx.saved_tensors
        chosen = [i for i, x in enumerate(inputs) if _has_gradient(x)]
        results = ctx.this.differentiated([gradients[i] for i in chosen], [inputs[i] for i in chosen])
        spread = dict(zip(chosen, results, strict=True))
        return None, *map(spread.get, range(len(inputs)))

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> tuple[Any, ...]:
        this, inputs = ctx.this, ctx.saved_tensors
        if not adjoints.is_linear(this.call.op):
            raise this.refused("has no forward derivative; use a reverse one (torch.func.grad, vjp, jacrev)")
        chosen = [i for i, x in enumerate(inputs) if _has_gradient(x)]
        moving = [torch.zeros_like(inputs[i]) if tangents[i] is None else tangents[i] for i in chosen]
        call = replace(this.call, name=this.call._derived(".tangent"))
        spread = dict(zip(chosen, _apply(replace(this, call=call), *moving), strict=True))
        return tuple(map(spread.get, range(len(inputs))))

    @staticmethod
    def vmap(info: Any, in_dims: Any, this: _Transformed, *tensors: Any) -> tuple[Any, Any]:
        """One collective of all examples, whose dimension becomes the last: rows stay the first."""
        if this.call.op is Op.ADASUM:
            raise this.refused("cannot be vectorised, since it combines whole tensors; call it outside of vmap")
        batched = [dim is not None for dim in in_dims[1:]]
        moved = [x.movedim(dim, -1) if at else x for x, dim, at in zip(tensors, in_dims[1:], batched, strict=True)]
        results = _apply(this, *moved)
        return results, tuple(y.dim() - 1 if at else None for y, at in zip(results, batched, strict=True))


_apply: Any = _Transformable.apply


def _transformed(collective: str, call: DifferentiableCall, tensors: Sequence[Any], *arguments: Any) -> list[Any]:
    this = _Transformed(collective, call, arguments)
    if torch.compiler.is_compiling():
        refuse_transforms_in_graph()
    if get_proxy_mode() is not None:  # a recorded result would be used again in place of a call
        raise this.refused("cannot be recorded by torch.func.linearize or make_fx; use torch.func.jvp or torch.compile")
    if _transforms_active() and functorch.peek_interpreter_stack().key() == functorch.TransformType.Functionalize:
        raise this.refused("torch.func.functionalize has no rule for it; call it outside")
    # vmap would have a batch of numbers pass for rows.
    if collective in ("allgather", "reducescatter") and not all(x.dim() for x in tensors):
        raise this.refused("works along the first dimension, got a 0-d tensor; reshape it to (1,)")
    return list(_apply(this, *tensors))


def _received(call: DifferentiableCall, tensor: Any, splits: Any) -> list[int]:
    """The rows that each rank sends here, which a transform cannot return: of an exchange of their own."""
    world, name = call.world, call._derived(".splits")
    with world.refusing(name):
        arguments.with_rows(tensor, "alltoall")
        counts = arguments.splits(splits, tensor.shape[0], world.size)
    received: Any = world.alltoall(np.array(counts, np.int64), name=name)
    return received.tolist()


def _name_of_gradient(handle: Handle) -> str:
    """Alike on all ranks: by the number that the engine gave to an unnamed call, by which it found the other ranks'."""
    request = handle.entry.request
    if request.name is not None:
        return f"{request.name}.gradient"
    kind = len(request.members) if request.members else f"{request.dtype}{list(request.shape or ())}"
    number = handle.key % _SLOTS if isinstance(handle.key, int) else 0  # a world of one rank counts nothing
    return f"{request.collective}.{kind}.{number}.gradient"
