"""The gradients of a model, in the order in which a backward pass makes them: from a model, or from a timeline."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from math import prod
from typing import Any

import ml_dtypes  # noqa: F401 (NumPy knows bfloat16 by it)
import numpy as np

from collectives.base.errors import InvalidArgumentError
from collectives.engine import timeline
from collectives.launch import timeline_summary


def of_model(path: str) -> tuple[int, ...]:
    """Bytes of each gradient of a torch or Keras model, the last layer's first.

    Args:
        path: ``package.module:name`` of a model, or of a callable without arguments that makes one.

    Raises:
        InvalidArgumentError: there is no such name, or it is no model with parameters.
    """
    module, _, name = path.partition(":")
    try:
        model = getattr(importlib.import_module(module), name)
        # A model is callable too, but on its inputs.
        model = model if _parameters(model) else model()
        sizes = [_bytes(parameter) for parameter in _parameters(model)]
    except Exception as error:  # of the user's program
        raise InvalidArgumentError(
            f"--model {path!r}: expected package.module:name of a model, or of a function that makes one: {error!r} "
            "[U31]"
        ) from error
    if not sum(sizes):
        raise InvalidArgumentError(
            f"--model {path!r}: expected trainable parameters, got a {type(model).__name__} without any [U32]"
        )
    return tuple(reversed(sizes))


def _parameters(model: Any) -> Sequence[Any]:
    if isinstance(model, type):
        return ()
    if callable(parameters := getattr(model, "parameters", None)):  # torch
        return [parameter for parameter in parameters() if parameter.requires_grad]
    return list(getattr(model, "trainable_variables", ()))


def _bytes(parameter: Any) -> int:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return prod(map(int, parameter.shape)) * int(np.dtype(dtype).itemsize)


def of_timeline(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Bytes of each all-reduce of a step, in the order of a recorded timeline. Tensors that were fused are one. A step
    ends where a name comes again, so that the operations need names, as optimizers give them.

    Raises:
        InvalidArgumentError: the file cannot be read, or holds no all-reduce.
    """
    try:
        trace = timeline_summary.parse(timeline.read(path))
    except OSError as error:
        raise InvalidArgumentError(f"cannot read the timeline {os.fspath(path)!r}: {error.strerror} [U33]") from error
    steps: dict[str, Any] = {}
    for span in trace.spans:
        tensors = str(span.args.get("tensors"))
        if span.kind == "communicate" and span.rank == trace.ranks[0] and "allreduce" in span.name.lower():
            if tensors in steps:
                break
            steps[tensors] = span.args.get("bytes")
    if not (sizes := tuple(nbytes for nbytes in steps.values() if isinstance(nbytes, int) and nbytes > 0)):
        raise InvalidArgumentError(
            f"the timeline {os.fspath(path)!r} has no all-reduce with a number of bytes; record one while "
            "the program trains [U34]"
        )
    return sizes
