"""Arguments and results that torch's collectives share."""

from __future__ import annotations

from typing import Any, TypedDict, TypeVar

import torch
from torch.autograd.graph import increment_version

from collectives.base.reduce_op import Op
from collectives.engine import arguments
from collectives.torch.autograd import tracks
from collectives.worlds.world import World

Tensor = TypeVar("Tensor")


class Choices(TypedDict, total=False):
    """Keywords beyond those of Horovod's functions."""

    algorithm: str | None
    transport: str | None
    stream: Any


def world_options(
    choices: Any,
    name: str | None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> dict[str, Any]:
    """Add the arguments that differ from their defaults to ``choices``, for a method of a world.

    Calls without keywords take the engine's fast path.
    """
    if name is not None:
        choices["name"] = name
    if op is not None:
        choices["op"] = op
    if prescale_factor != 1.0:
        choices["prescale_factor"] = prescale_factor
    if postscale_factor != 1.0:
        choices["postscale_factor"] = postscale_factor
    options: dict[str, Any] = choices
    return options


def operation(world: World, average: Any, op: Op | None, name: str | None) -> Op:
    """The operation that ``op`` or ``average`` names.

    Raises:
        InvalidArgumentError: both, on this rank and, as a mismatch, on the others.
    """
    try:
        return arguments.operation(op, average)
    except Exception as error:
        raise world.refused(error, name) from None


def any_tracked(tensors: Any) -> bool:
    """Whether autograd records operations on one of several tensors."""
    return isinstance(tensors, (list, tuple)) and any(map(tracks, tensors))


def written(tensor: Any) -> Any:
    """Increment a tensor's version, so that autograd refuses to use elements saved before they changed."""
    if isinstance(tensor, torch.Tensor):
        increment_version(tensor)
    return tensor
