"""Checks and conversions of the arguments of collectives to TensorFlow's tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from collectives.base import dtypes
from collectives.base.errors import InvalidTypeError
from collectives.engine import arguments
from collectives.tensors import detection
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import world_of


@contextmanager
def refusing(name: str | None, process_set: ProcessSet) -> Iterator[None]:
    """Tell the other ranks of an argument that this rank refuses, so that all of them get an exception."""
    try:
        yield
    except Exception as error:
        raise world_of(process_set).refused(error, name) from None


def factors(prescale: Any, postscale: Any, name: str | None, process_set: ProcessSet) -> tuple[float, float]:
    """Check scale factors; one that is not a number is an InvalidTypeError on all ranks."""
    with refusing(name, process_set):
        return arguments.factor("prescale_factor", prescale), arguments.factor("postscale_factor", postscale)


def tensors(values: Any) -> list[Any]:
    """Convert a list of tensors, variables, arrays or numbers to tensors; ``tf.IndexedSlices`` stay sparse.

    Raises:
        InvalidTypeError: not a list or tuple, or an element has no dtype that the engine supports.
    """
    if not isinstance(values, (list, tuple)):
        raise InvalidTypeError(f"tensors: expected a list or tuple of tensors, got {detection.describe(values)} [A36]")
    return [
        tf.IndexedSlices(_tensor(each.values), tf.convert_to_tensor(each.indices), each.dense_shape)
        if isinstance(each, tf.IndexedSlices)
        else _tensor(each)
        for each in values
    ]


def _tensor(value: Any) -> Any:
    try:
        tensor = value if isinstance(value, tf.Tensor) else tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        text = (
            f"tensor: expected a tensor, a variable, an array or a number, got {detection.describe(value)}: {error} "
            "[T5]"
        )
        raise InvalidTypeError(text) from None
    if tensor.dtype.name not in (*dtypes.NAMES, *dtypes.FLOAT8):
        raise InvalidTypeError(f"tensor: dtype {tensor.dtype.name} is not supported; {dtypes.OFFER} [T20]")
    return tensor


def splits(value: Any) -> Any:
    """Convert the splits of an all-to-all to a tensor; InvalidTypeError: not integers."""
    try:
        counts = tf.convert_to_tensor(value if hasattr(value, "dtype") else np.asarray(value, np.int32))
        if counts.dtype.is_integer:
            return counts
    except (TypeError, ValueError):
        pass
    raise InvalidTypeError(f"splits: expected integers, one per rank, got {value!r} [A27]")
