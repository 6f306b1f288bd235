"""What the operators of `collectives.torch.compiled` do when compiled code runs: calls of the engine, and the
mathematics of the adjoints.

The arguments are what a graph can hold: tensors, numbers, strings; a process set is its number, an operation its name.
Autograd is off in here. Results are new tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from collectives.base.reduce_op import Op
from collectives.engine import adasum
from collectives.runtime import world_of
from collectives.tensors.compression import named

LINEAR = (Op.SUM.value, Op.AVERAGE.value)


def allreduce(
    x: Any, op: str, name: str | None, prescale: float, postscale: float, wire: str | None, process_set: int
) -> Any:
    how: dict[str, Any] = {
        "name": name,
        "prescale_factor": prescale,
        "postscale_factor": postscale,
        "compression": named(wire),
    }
    return world_of(process_set).allreduce(x, op=Op(op), **how)


def grouped_allreduce(
    xs: Sequence[Any], op: str, name: str | None, prescale: float, postscale: float, wire: str | None, process_set: int
) -> list[Any]:
    how: dict[str, Any] = {
        "name": name,
        "prescale_factor": prescale,
        "postscale_factor": postscale,
        "compression": named(wire),
    }
    return world_of(process_set).grouped_allreduce(xs, op=Op(op), **how)


def reducescatter(
    x: Any, op: str, name: str | None, prescale: float, postscale: float, rows: int, process_set: int
) -> Any:
    return world_of(process_set).reducescatter(
        x, Op(op), name=name, prescale_factor=prescale, postscale_factor=postscale
    )


def allgather(x: Any, name: str | None, rows: int | None, process_set: int) -> Any:
    return world_of(process_set).allgather(x, name=name)


def broadcast(x: Any, root: int, name: str | None, process_set: int) -> Any:
    return world_of(process_set).broadcast(x, root, name=name)


def alltoall(x: Any, splits: Any, name: str | None, rows: int | None, ranks: int, process_set: int) -> list[Any]:
    if splits is not None:
        splits = splits.cpu().numpy()
    elif x.dim() and x.shape[0] % ranks == 0:  # else it is the engine's to refuse
        splits = np.full(ranks, x.shape[0] // ranks)
    result, received = world_of(process_set).alltoall(x, splits, name=name)
    return [result, torch.from_numpy(received.astype(np.int64))]


def as_horovod(process_set: int) -> bool:
    """Whether gradients are Horovod's: see `collectives.torch.autograd`."""
    return world_of(process_set).config.gradients == "horovod"


# ---- adjoints
# ------------------------------------------------------------------------------------------------------------


def own_rows(gradient: Any, name: str | None, rows: int, process_set: int) -> Any:
    """Of an allgather: this rank's rows of the sum of the ranks' gradients, of Horovod's their mean."""
    world = world_of(process_set)
    counts = world.allgather(np.array([rows], np.int64), name=name and f"{name}.rows")
    parts, _ = world.alltoall(gradient, counts, name=name)
    parts = parts.reshape(world.size, rows, *parts.shape[1:])
    return parts.mean(0) if as_horovod(process_set) else parts.sum(0)


def at_root(gradient: Any, root: int, name: str | None, process_set: int) -> Any:
    """Of a broadcast: the sum of the ranks' gradients on the root, of Horovod's their mean; zeros elsewhere."""
    world = world_of(process_set)
    total = world.allreduce(gradient, op=Op.AVERAGE if as_horovod(process_set) else Op.SUM, name=name)
    return total if world.rank == root else total.zero_()


def through_reduction(
    total: Any, x: Any, op: str, name: str | None, prescale: float, postscale: float, process_set: int
) -> Any:
    """Of a reduction with its factors, given the gradient of all rows of its result, summed over the ranks.

    Takes memory for every rank's ``x``, unless the reduction is linear. Horovod's is ``size()`` times that of a linear
    one.
    """
    world = world_of(process_set)
    if op in LINEAR:
        times = world.size if as_horovod(process_set) else 1
        return total * (prescale * postscale * times / (world.size if op == Op.AVERAGE.value else 1))
    wide = torch.float64 if op == Op.ADASUM.value else torch.promote_types(x.dtype, torch.float32)
    inputs = world.allgather(x.reshape(1, -1), name=name and f"{name}.inputs").to(wide) * prescale
    own, gradient = world.rank, total.reshape(-1).to(wide) * postscale
    if op == Op.ADASUM.value:
        gradient = _through_adasum(list(inputs), own, gradient)
    elif op == Op.PRODUCT.value:
        gradient = gradient * torch.cat([inputs[:own], inputs[own + 1 :]]).prod(0).conj()
    else:
        extreme = inputs == (inputs.amax(0) if op == Op.MAX.value else inputs.amin(0))
        gradient = gradient * extreme[own] / extreme.sum(0)
    return (gradient * prescale).to(x.dtype).reshape(x.shape)


def _through_adasum(vectors: list[Any], rank: int, gradient: Any) -> Any:
    """From the root of the tree of pairs to this rank's leaf."""
    at, path = rank, []
    for level in adasum.tree(len(vectors)):
        for i, j in level:
            a, b = vectors[i], vectors[j]
            if at in (i, j):
                path.append((a, b) if at == i else (b, a))
                at = i
            vectors[i] = _coefficient(a, b) * a + _coefficient(b, a) * b
    for own, other in reversed(path):
        product, square = own @ other, _square(own)
        along_own, along_other = gradient @ own, gradient @ other
        to_product = -(along_own / square + along_other / _square(other)) / 2
        gradient = _coefficient(own, other) * gradient + to_product * other + along_own * product / square**2 * own
    return gradient


def _coefficient(a: Any, b: Any) -> Any:
    return 1 - a @ b / _square(a) / 2


def _square(a: Any) -> Any:
    """Of a vector of zeros 1: the coefficient is the constant 1 there."""
    square = a @ a
    return square.masked_fill(square == 0, 1)
