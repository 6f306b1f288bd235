"""Read, write and broadcast the variables of models and optimizers, for Keras 3 on any backend and for ``tf_keras``.

Both kinds of variables have a shape, a dtype, ``numpy()`` and ``assign()``. Values are sent as bytes through host
memory, independent of dtypes and of where a backend keeps its arrays; this happens once per training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from collectives.frontends.broadcasts import ArrayMemory, agreed_root, broadcast_in_place
from collectives.worlds.process_sets import ProcessSet


def of_model(model: Any) -> list[Any]:
    """Return the weights and all other state of the layers, random seeds included; not the metrics' state."""
    return list(model.variables)


def of_optimizer(optimizer: Any) -> list[Any]:
    """Return iterations, learning rate, moments and so on; empty without an optimizer."""
    variables = getattr(optimizer, "variables", ())
    return list(variables() if callable(variables) else variables)


def without(variables: Iterable[Any], local: Sequence[Any]) -> list[Any]:
    """Return the variables that are not in ``local``, which may contain Keras's or TensorFlow's variables."""
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
    """The values of variables as arrays."""
    return [variable.numpy() for variable in variables]


def write(variables: Sequence[Any], values: Sequence[Any]) -> None:
    """Assign values to variables."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def described(variables: Sequence[Any]) -> dict[str, str]:
    """What must be equal on all ranks, by number: names may differ."""
    return {
        f"variable {at}": f"{getattr(variable.dtype, 'name', variable.dtype)} of shape {tuple(variable.shape)}"
        for at, variable in enumerate(variables)
    }


def broadcast(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet,
    label: str,
    read: Callable[[Sequence[Any]], Sequence[Any]] = read,
    write: Callable[[Sequence[Any], Sequence[Any]], None] = write,
) -> None:
    """Copy the root's values to every rank, in place.

    Args:
        variables: the same number on every rank, of equal shapes and dtypes in the same order.
        label: prefix of the operations' names, and of error messages.
        read, write: access to the variables' values; in a graph for sessions they have no ``numpy()``.

    Raises:
        InvalidArgumentError, MismatchError: as for `agreed_root`.
    """

    def prepare() -> tuple[list[Any], dict[str, str]]:
        return [np.array(value, order="C") for value in read(variables)], described(variables)

    world, root, values = agreed_root(label, root_rank, process_set, prepare)
    broadcast_in_place(world, label, root, {str(at): value for at, value in enumerate(values)}, ArrayMemory())
    if world.rank != root:
        write(variables, values)
