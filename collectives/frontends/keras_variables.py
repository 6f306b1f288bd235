"""Variables of a model and its optimizer as one rank has them, for Keras 3 on any backend and for ``tf_keras``.

Both kinds of variables have a shape, a dtype, ``numpy()`` and ``assign()``. Values travel as bytes, through host
memory: this happens once, and then nobody has to know the dtype or where a backend keeps its arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from collectives.engine import arguments
from collectives.frontends.agreement import agree
from collectives.process_sets import ProcessSet
from collectives.runtime import root_in, world_of


def of_model(model: Any) -> list[Any]:
    """Weights and all other state of the layers, random seeds included; not that of metrics."""
    return list(model.variables)


def of_optimizer(optimizer: Any) -> list[Any]:
    """Iterations, learning rate, moments and so on; none where there is no optimizer."""
    found = getattr(optimizer, "variables", ())
    return list(found() if callable(found) else found)


def without(variables: Iterable[Any], local: Sequence[Any]) -> list[Any]:
    """The variables that are not among ``local``, which may be Keras's or TensorFlow's own."""
    kept = {
        id(each)
        for variable in local
        for each in (variable, getattr(variable, "value", variable))
        if not callable(each)
    }
    return [
        variable
        for variable in variables
        if id(variable) not in kept and id(getattr(variable, "value", None)) not in kept
    ]


def read(variables: Sequence[Any]) -> list[Any]:
    """Their values, as arrays."""
    return [variable.numpy() for variable in variables]


def write(variables: Sequence[Any], values: Sequence[Any]) -> None:
    """Give them these values."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def broadcast(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet,
    label: str,
    read: Callable[[Sequence[Any]], Sequence[Any]] = read,
    write: Callable[[Sequence[Any], Sequence[Any]], None] = write,
) -> None:
    """Give every rank the root's values, in place.

    Args:
        variables: equally many on every rank, of equal shapes and dtypes in the same order.
        root_rank: by its number among all ranks.
        read, write: how variables are read and written; in a graph for sessions they have no ``numpy()``.

    Raises:
        InvalidArgumentError: there is no such rank.
        MismatchError: the ranks' variables or roots differ; raised on every rank, and names the first that does.
            Nothing was touched.
    """
    world = world_of(process_set)
    number = root_in(process_set, root_rank, label)
    try:
        root = arguments.root(number, world.size)
        described = {f"variable {at}": _described(variable) for at, variable in enumerate(variables)}
        values = [np.array(value) for value in read(variables)]
    except Exception as error:
        raise world.refused(error, label) from None
    agree(world, label, {"root_rank": f"rank {root_rank}", **described})
    travelling = {f"{label}.{at}": value.reshape(-1).view(np.uint8) for at, value in enumerate(values) if value.size}
    with world.composed(travelling) as begin:
        handles = [world.broadcast_async_(value, root, name=begin(name)) for name, value in travelling.items()]
    for handle in handles:
        handle.wait()
    if world.rank != root:
        write(variables, values)


def _described(variable: Any) -> str:
    dtype = variable.dtype
    return f"{getattr(dtype, 'name', dtype)} of shape {tuple(variable.shape)}"
