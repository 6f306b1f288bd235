"""``TORCH_DIST_NAN_CHECK=1``: NaN in what a rank contributes is an error, before it reaches the others' tensors.

torch 2.14 and later attach this check to its own groups, by hooks that a group written in Python passes by.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from collectives.base.errors import OperationError
from collectives.c10d.work import Work

_INPUTS = {
    "allreduce": 0,
    "allreduce_coalesced": 0,
    "reduce": 0,
    "broadcast": 0,
    "send": 0,
    "allgather": 1,
    "allgather_coalesced": 1,
    "all_gather_single": 1,
    "all_gather_single_coalesced": 1,
    "_allgather_base": 1,
    "allgather_into_tensor_coalesced": 1,
    "gather": 1,
    "scatter": 1,
    "reduce_scatter": 1,
    "reduce_scatter_single": 1,
    "reduce_scatter_single_coalesced": 1,
    "_reduce_scatter_base": 1,
    "reduce_scatter_tensor_coalesced": 1,
    "all_to_all_single": 1,
    "alltoall_base": 1,
    "alltoall": 1,
    "all_to_all": 1,
}
"""The operations, with the place of their inputs among the arguments."""
_NAMES = {0: ("tensors", "tensor"), 1: ("input_tensors", "inputs", "input", "input_tensor")}


@functools.cache
def checked(kind: Any) -> Any:
    """The class of groups like ``kind`` that look for NaN in their inputs; integers and bools have none."""
    return type(f"Checked{kind.__name__}", (kind,), {name: _checked(kind, name, at) for name, at in _INPUTS.items()})


def _refuse_nan(group: Any, operation: str, inputs: Any) -> None:
    for tensor in _tensors(inputs):
        if tensor.is_floating_point() and bool(torch.isnan(tensor.detach()).any()):
            error = OperationError(
                f"{operation}: NaN found in input tensor of shape {tuple(tensor.shape)} on rank {group.rank()}; this "
                "is checked because TORCH_DIST_NAN_CHECK=1 is set [F116]"
            )
            raise group._connected().operations.refused(error, None)


def _checked(kind: Any, name: str, place: int) -> Callable[..., Work]:
    method: Callable[..., Work] = getattr(kind, name)

    def call(self: Any, *arguments: Any, **keywords: Any) -> Work:
        named = next((keywords[each] for each in _NAMES[place] if each in keywords), None)
        inputs = arguments[place] if len(arguments) > place else named
        if name != "broadcast" or _root(arguments, keywords) == self.rank():
            _refuse_nan(self, name, inputs)
        return method(self, *arguments, **keywords)

    call.__name__ = name
    return call


def _root(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> int:
    """The root of a broadcast: the others' tensors hold nothing yet."""
    for value in (*arguments[1:], *keywords.values()):
        root = value if isinstance(value, int) else getattr(value, "rootRank", None)
        if root is not None:
            return int(root)
    return 0


def _tensors(inputs: Any) -> Iterator[Any]:
    if isinstance(inputs, torch.Tensor):
        yield inputs
    elif inputs is not None:
        for each in inputs:
            yield from _tensors(each)
