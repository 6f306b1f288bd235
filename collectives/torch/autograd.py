"""Gradients through the collectives in eager mode: the engine runs each collective, and its adjoint in backward.
Within `torch.func` and forward mode, torch carries a collective out by rules (`_Transformable`).

The adjoints are those of `collectives.frontends.adjoints`; complex tensors follow torch's convention.

Every rank must use the outputs of the same calls in its backward pass, because their adjoints need all ranks. Adjoints
are matched by name: a rank that leaves one out keeps the others waiting (and all get an error), but the adjoint is
never taken for a later one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch._C import _functorch as functorch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_innermost_proxy_mode

from collectives.base.errors import UnsupportedError
from collectives.base.reduce_op import Op
from collectives.engine import arguments
from collectives.engine.handles import Handle
from collectives.frontends import adjoints
from collectives.schedules import partition
from collectives.torch.arithmetic import TorchArithmetic
from collectives.worlds.world import World

_SLOTS = 64
"""Names of the gradients of unnamed calls of one kind. The engine remembers what it has done under a name, so that
an unbounded number of names would be slow. In backward each adjoint is waited for, so ranks are never this many calls
apart."""


@dataclass(frozen=True)
class DifferentiableCall:
    """The call of a collective, and the collectives that its adjoint is made of (`adjoints.ReductionCall`).

    Attributes:
        collective: the world's method, such as "allreduce".
        name: of the operation; of a call that is being differentiated, of its gradient.
        grouped: whether it is the grouped form.
        options: the other keywords of the world's method.
        exact: whether its gradient is the adjoint under any setting.
        rows: of an all-gather being differentiated, this rank's rows of each tensor.
        root: of a broadcast, its rank in the world.
        splits: of an all-to-all, the rows for each rank.
        received: of an all-to-all being differentiated, the rows received from each rank.
    """

    world: World
    collective: str
    name: str | None = None
    grouped: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    exact: bool = False
    rows: Sequence[int] = ()
    root: int = 0
    splits: Any = None
    received: Sequence[int] = ()

    arithmetic = TorchArithmetic()

    def run(self, tensors: Sequence[Any]) -> tuple[list[Any], DifferentiableCall]:
        """Run it without autograd. Returns the results, and the call by the name of its gradient."""
        arguments: tuple[Any, ...] = ()
        if self.collective == "broadcast":
            arguments = (self.root,)
        elif self.collective == "alltoall":
            arguments = (self.splits,)
        begin = getattr(self.world, f"{'grouped_' * self.grouped}{self.collective}_async")
        handle = begin(list(tensors) if self.grouped else tensors[0], *arguments, name=self.name, **self.options)
        result: Any = handle.wait()
        about: dict[str, Any] = {"name": _name_of_gradient(handle)}
        if self.collective == "alltoall":
            result, received = result
            about["received"] = received.tolist()
        elif self.collective == "allgather":
            about["rows"] = [tensor.shape[0] for tensor in tensors if _has_gradient(tensor)]
        return list(result) if self.grouped else [result], replace(self, **about)

    def adjoint(self, gradients: Sequence[Any], inputs: Sequence[Any]) -> Sequence[Any]:
        """The gradients of its tensors; ``inputs`` are those tensors, where the adjoint needs them."""
        if self.collective in ("allreduce", "reducescatter"):
            return getattr(adjoints, self.collective)(self, gradients, inputs)
        return getattr(adjoints, self.collective)(self, gradients)

    @property
    def needs_inputs(self) -> bool:
        """Whether its adjoint depends on its tensors."""
        return not adjoints.is_linear(self.op) and not (self.collective == "allreduce" and self.as_horovod)

    def refused(self, problem: str) -> Exception:
        op = "" if self.op is None else f" with op={self.op!r}"
        return self.world.refused(UnsupportedError(f"{self.collective}{op}: {problem}"), self.name)

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
        return self.renamed(f".{number}")

    def renamed(self, suffix: str, **fields: Any) -> DifferentiableCall:
        return replace(self, name=self._derived(suffix), **fields)

    def _other(self, collective: str, suffix: str = "", **fields: Any) -> DifferentiableCall:
        return DifferentiableCall(self.world, collective, self._derived(suffix), **fields)

    def _derived(self, suffix: str) -> str | None:
        """A name; None in a compiled graph, whose unnamed calls are matched by order."""
        return self.name and self.name + suffix

    def repeat(self, tensors: Sequence[Any]) -> list[Any]:
        return run(replace(self, options={**self.options, "stream": None}), tensors)

    def allgather(self, tensors: Sequence[Any]) -> list[Any]:
        return run(self._other("allgather", grouped=self.grouped), tensors)

    def own_rows(self, tensors: Sequence[Any], op: Op) -> list[Any]:
        """Reduce-scatter where the ranks' rows are divided as it divides them; elsewhere all-to-all and a local sum."""
        size = self.world.size
        table = self.world.allgather(np.array([self.rows], np.int64), name=self._derived(".rows")).T.tolist()
        even = [i for i, counts in enumerate(table) if counts == partition.rows(sum(counts), size)]
        results = list(tensors)
        if even:
            summing = self._other("reducescatter", grouped=True, options={"op": op}, exact=True)
            for i, result in zip(even, run(summing, [tensors[i] for i in even]), strict=True):
                results[i] = result
        for i, counts in enumerate(table):
            if i not in even:
                parts = self._exchanged(f".{i}", tensors[i], counts)
                parts = parts.reshape(size, self.rows[i], *parts.shape[1:])
                results[i] = parts.mean(0) if op is Op.AVERAGE else parts.sum(0)
        return results

    def at_root(self, tensors: Sequence[Any], op: Op) -> list[Any]:
        (total,) = run(self._other("allreduce", options={"op": op}), tensors)
        if self.rank == self.root:
            return [total]
        # Zeros that depend on the all-reduce: a second backward pass needs this rank as well.
        return [total.masked_fill(torch.ones((), dtype=torch.bool, device=total.device), 0)]

    def send_back(self, tensors: Sequence[Any]) -> list[Any]:
        return [self._exchanged("", tensors[0], self.received)]

    def scaled(self, tensor: Any, factor: float, power: int = 0) -> Any:
        factor *= float(self.world.size) ** power
        return tensor if factor == 1.0 else tensor * factor

    def summed(self, tensor: Any) -> Any:
        return run(self._other("allreduce", ".sum", options={"op": Op.SUM}), [tensor])[0]

    def summed_share(self, tensor: Any) -> Any:
        return run(self._other("reducescatter", ".sum", options={"op": Op.SUM}), [tensor])[0]

    def versions(self, tensor: Any) -> Any:
        shares = partition.rows(tensor.shape[0], self.world.size)
        versions = self._exchanged(".rows", tensor, shares)
        return versions.reshape(self.world.size, shares[self.rank], *tensor.shape[1:])

    def return_versions(self, versions: Any) -> Any:
        size, own = versions.shape[:2]
        return self._exchanged(".back", versions.reshape(size * own, *versions.shape[2:]), [own] * size)

    def vectors(self, tensor: Any) -> list[Any]:
        return list(run(self._other("allgather", ".rows"), [tensor.reshape(1, -1)])[0].double())

    def _exchanged(self, suffix: str, tensor: Any, splits: Sequence[int]) -> Any:
        return alltoall(self._other("alltoall", suffix, splits=splits), tensor)[0]


def tracks(tensor: Any) -> bool:
    """Whether autograd records operations on a tensor, or a transform may."""
    return isinstance(tensor, torch.Tensor) and ((tensor.requires_grad and torch.is_grad_enabled()) or _in_transform())


def run(call: DifferentiableCall, tensors: Sequence[Any]) -> list[Any]:
    """Carry a collective out on one tensor, or on those of a group. Differentiable."""
    if _in_transform():
        return _run_in_transform(call, tensors)
    results, backward = call.run(tensors)
    return _attach(backward, results, tensors)


def alltoall(call: DifferentiableCall, tensor: Any) -> tuple[Any, Sequence[int]]:
    """`run` of an all-to-all with splits; also returns how many rows came from each rank."""
    if _in_transform():
        call = replace(call, received=_received(call, tensor))
        return _run_in_transform(call, [tensor])[0], call.received
    results, backward = call.run([tensor])
    return _attach(backward, results, [tensor])[0], backward.received


# ---- torch's graph


class _Collective(torch.autograd.Function):
    """A collective that has been carried out, in torch's graph."""

    @staticmethod
    def forward(ctx: Any, call: DifferentiableCall, results: Sequence[Any], *tensors: Any) -> tuple[Any, ...]:
        ctx.call = call
        if call.needs_inputs:
            ctx.save_for_backward(*tensors)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        # Each output of a group may have a backward pass of its own, unless there are inputs, which torch keeps for
        # one.
        return None, None, *ctx.call.adjoint(list(gradients), ctx.saved_tensors if ctx.call.needs_inputs else ())


def _attach(call: DifferentiableCall, results: list[Any], tensors: Sequence[Any]) -> list[Any]:
    """The results as functions of the tensors, if any of these needs a gradient.

    Then of all of them: all ranks' adjoints must be about the same ones, and another rank may need one that is not
    needed here.
    """
    if any(map(tracks, tensors)):
        chosen = [i for i, tensor in enumerate(tensors) if _has_gradient(tensor)]
        apply: Any = _Collective.apply
        attached = apply(call, [results[i] for i in chosen], *(tensors[i] for i in chosen))
        for i, result in zip(chosen, attached, strict=True):
            results[i] = result
    return results


def _has_gradient(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex())


# ---- torch.func's transforms, and forward mode


# torch 2.4 cannot trace the call; every graph is checked for the transforms that it was made in.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _transforms_active() -> bool:
    return torch._C._are_functorch_transforms_active()


def _in_transform() -> bool:
    return _transforms_active() or forward_ad._current_level >= 0


def refuse_transforms_in_graph() -> None:
    """Refuse a transform that a compiler traces: torch has no rules there for operators of others."""
    if _in_transform():
        raise UnsupportedError(
            "torch.compile cannot trace a torch.func transform that contains a collective; exclude the transformed "
            "function from the graph with torch.compiler.disable [F76]"
        )


class _Transformable(torch.autograd.Function):
    """The rules by which torch takes a collective through the levels of its transforms.

    Calls without a name are matched by their order, in adjoints too: every rank applies the same transforms.
    """

    @staticmethod
    def forward(call: DifferentiableCall, *tensors: Any) -> tuple[Any, ...]:
        # torch calls this from C++, where a compiler that has given up a graph may begin another.
        run = torch.compiler.disable(call.run) if torch.compiler.is_compiling() else call.run
        return tuple(run(tensors)[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        inputs = ctx.saved_tensors
        chosen = [i for i, x in enumerate(inputs) if _has_gradient(x)]
        rows = [inputs[i].shape[0] for i in chosen] if ctx.call.collective == "allgather" else ()
        call = ctx.call.renamed(".gradient", rows=rows)
        results = call.adjoint([gradients[i] for i in chosen], [inputs[i] for i in chosen])
        spread = dict(zip(chosen, results, strict=True))
        return None, *map(spread.get, range(len(inputs)))

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> tuple[Any, ...]:
        call, inputs = ctx.call, ctx.saved_tensors
        if not adjoints.is_linear(call.op):
            raise call.refused("has no forward-mode derivative; use reverse mode (torch.func.grad, vjp, jacrev) [F77]")
        chosen = [i for i, x in enumerate(inputs) if _has_gradient(x)]
        moving = [torch.zeros_like(inputs[i]) if tangents[i] is None else tangents[i] for i in chosen]
        spread = dict(zip(chosen, _apply(call.renamed(".tangent"), *moving), strict=True))
        return tuple(map(spread.get, range(len(inputs))))

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: DifferentiableCall, *tensors: Any) -> tuple[Any, Any]:
        """One collective of all examples, whose dimension becomes the last: rows stay the first."""
        if call.op is Op.ADASUM:
            raise call.refused("cannot be vectorised, because it combines whole tensors; call it outside vmap [F78]")
        batched = [dim is not None for dim in in_dims[1:]]
        moved = [x.movedim(dim, -1) if at else x for x, dim, at in zip(tensors, in_dims[1:], batched, strict=True)]
        results = _apply(call, *moved)
        return results, tuple(y.dim() - 1 if at else None for y, at in zip(results, batched, strict=True))


_apply: Any = _Transformable.apply


def _run_in_transform(call: DifferentiableCall, tensors: Sequence[Any]) -> list[Any]:
    if torch.compiler.is_compiling():
        refuse_transforms_in_graph()
    if get_innermost_proxy_mode() is not None:  # a recorded result would be used again in place of a call
        raise call.refused(
            "cannot be recorded by torch.func.linearize or make_fx; use torch.func.jvp or torch.compile [F79]"
        )
    if _transforms_active() and functorch.peek_interpreter_stack().key() == functorch.TransformType.Functionalize:
        raise call.refused("cannot run inside torch.func.functionalize; call it outside [F80]")
    # vmap would have a batch of numbers pass for rows.
    if call.collective in ("allgather", "reducescatter") and not all(x.dim() for x in tensors):
        raise call.refused("needs at least one dimension, got a 0-d tensor; reshape it to (1,) [A30]")
    return list(_apply(call, *tensors))


def _received(call: DifferentiableCall, tensor: Any) -> list[int]:
    """The rows that each rank sends here, which a transform cannot return: of an exchange of their own."""
    world, renamed = call.world, call.renamed(".splits")
    with world.refusing(renamed.name):
        arguments.with_rows(tensor, "alltoall")
        counts = arguments.splits(call.splits, tensor.shape[0], world.size)
    received: Any = world.alltoall(np.array(counts, np.int64), name=renamed.name)
    return received.tolist()


def _name_of_gradient(handle: Handle) -> str:
    """Alike on all ranks: by the number that the engine gave to an unnamed call, by which it found the other ranks'."""
    request = handle.entry.request
    if request.name is not None:
        return f"{request.name}.gradient"
    kind = len(request.members) if request.members else f"{request.dtype}{list(request.shape or ())}"
    number = handle.key % _SLOTS if isinstance(handle.key, int) else 0  # a world of one rank counts nothing
    return f"{request.collective}.{kind}.{number}.gradient"
