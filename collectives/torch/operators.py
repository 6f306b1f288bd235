"""The bodies of the operators of `collectives.torch.compiled`: blocking calls of the engine, and adjoints.

Arguments are what a graph can hold: tensors, numbers, strings; an operation is its name, and ``where`` a process set's
number, an algorithm and a transport. Autograd is off. Results are new tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from collectives.base.reduce_op import Op
from collectives.frontends import adjoints
from collectives.tensors.compression import named
from collectives.torch.autograd import DifferentiableCall
from collectives.worlds.runtime import world_of
from collectives.worlds.world import World


def allreduce(
    x: Any, op: str, name: str | None, prescale: float, postscale: float, wire: str | None, *where: Any
) -> Any:
    world, keywords = _call(name, *where, prescale, postscale)
    return world.allreduce(x, op=Op(op), compression=named(wire), **keywords)


def grouped_allreduce(
    xs: Sequence[Any], op: str, name: str | None, prescale: float, postscale: float, wire: str | None, *where: Any
) -> list[Any]:
    world, keywords = _call(name, *where, prescale, postscale)
    return world.grouped_allreduce(xs, op=Op(op), compression=named(wire), **keywords)


def reducescatter(x: Any, op: str, name: str | None, prescale: float, postscale: float, rows: int, *where: Any) -> Any:
    world, keywords = _call(name, *where, prescale, postscale)
    return world.reducescatter(x, Op(op), **keywords)


def allgather(x: Any, name: str | None, rows: int | None, *where: Any) -> Any:
    world, keywords = _call(name, *where)
    return world.allgather(x, **keywords)


def broadcast(x: Any, root: int, name: str | None, *where: Any) -> Any:
    world, keywords = _call(name, *where)
    return world.broadcast(x, root, **keywords)


def alltoall(x: Any, splits: Any, name: str | None, rows: int | None, ranks: int, *where: Any) -> list[Any]:
    world, keywords = _call(name, *where)
    if splits is not None:
        splits = splits.cpu().numpy()
    elif x.dim() and x.shape[0] % ranks == 0:  # else it is the engine's to refuse
        splits = np.full(ranks, x.shape[0] // ranks)
    result, received = world.alltoall(x, splits, **keywords)
    return [result, torch.from_numpy(received.astype(np.int64))]


def _call(
    name: str | None, process_set: int, algorithm: str | None, transport: str | None, *factors: float
) -> tuple[World, dict[str, Any]]:
    scales = dict(zip(("prescale_factor", "postscale_factor"), factors, strict=False))
    return world_of(process_set), {"name": name, "algorithm": algorithm, "transport": transport, **scales}


# ---- adjoints


def repeats_in_backward(op: str, process_set: int) -> bool:
    """Whether the adjoint of an all-reduce is the same all-reduce."""
    return adjoints.is_linear(Op(op)) or world_of(process_set).config.gradients == "horovod"


def adjoint(
    gradients: Sequence[Any],
    xs: Sequence[Any],
    collective: str,
    op: str | None,
    name: str | None,
    prescale: float,
    postscale: float,
    rows: int | None,
    root: int,
    process_set: int,
) -> list[Any]:
    """The gradients of a collective's inputs.

    Args:
        xs: the inputs, if the operation is not linear.
        rows: of each input, if it may have others than its gradient.
    """
    options = {} if op is None else {"op": Op(op), "prescale_factor": prescale, "postscale_factor": postscale}
    call = DifferentiableCall(
        world_of(process_set), collective, name, options=options, rows=() if rows is None else [rows], root=root
    )
    with torch.no_grad():
        return list(call.adjoint(gradients, xs))
