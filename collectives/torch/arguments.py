"""Arguments and results that torch's collectives share, and their asynchronous forms."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypedDict, TypeVar

import torch
from torch.autograd.graph import increment_version

from collectives.base.reduce_op import Op
from collectives.engine import arguments
from collectives.engine.handles import Handle
from collectives.torch.autograd import tracks
from collectives.torch.compiled import untraced
from collectives.worlds.runtime import global_process_set, root_in, world_of
from collectives.worlds.variants import example, like
from collectives.worlds.world import World

Tensor = TypeVar("Tensor")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


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
    """The operation that ``op`` or ``average`` names; both are refused, on the other ranks as well."""
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


def begun(name: str, blocking: Callable[Arguments, Result]) -> Callable[Arguments, Handle[Result]]:
    """The asynchronous function of this name, with the parameters of a blocking one."""
    signature = inspect.signature(blocking)
    positional = [each for each in signature.parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    names = [each.name for each in positional]
    required = {each.name for each in positional if each.default is each.empty}
    rooted, grouped, in_place = "root_rank" in names, name.startswith("grouped"), name.endswith("_")

    @untraced
    def call(*arguments: Any, **options: Any) -> Any:
        if len(arguments) != 1 or rooted:  # the tensor alone is the frequent case
            given = {**dict(zip(names, arguments, strict=False)), **options}
            if len(given) < len(arguments) + len(options) or not required <= given.keys():
                try:
                    signature.bind(*arguments, **options)
                except TypeError as error:
                    raise TypeError(f"{name}() {error}") from None
            arguments, options = (given.pop(names[0]),), given
        process_set = options.pop("process_set", global_process_set)
        if rooted:
            arguments += (root_in(process_set, options.pop("root_rank"), options.get("name")),)
        handle = getattr(world_of(process_set), name)(*arguments, **options)
        if in_place:
            for tensor in arguments[0] if grouped else arguments[:1]:
                written(tensor)
        return handle

    function: Any = like(blocking, call, name, f"Handle[{signature.return_annotation}]")
    function.__doc__ = (
        f"Begin `{name.replace('_async', '')}` and return a handle at once, for `synchronize` and `poll`. Not "
        f"differentiable.\n\nWhat it takes must not {'be used' if in_place else 'change'} until it is done."
    )
    finished = re.sub(r"(hvd\..*\))$", r"hvd.synchronize(\1)", example(blocking, function, ""), flags=re.MULTILINE)
    function.__doc__ += finished
    return function
