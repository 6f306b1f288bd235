"""Exclusion of our functions from AutoGraph, which would convert every function that a ``tf.function`` calls.

That would be the whole adapter down to the engine: slow tracing, tracebacks through generated files, and Python
conditions that could become part of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from collectives.tensorflow.errors import raises_tensorflow

Function = TypeVar("Function", bound=Callable[..., Any])


def unconverted(function: Function) -> Function:
    """Decorate a function so that AutoGraph converts neither it nor its callees; its errors are also TensorFlow's."""
    result: Function = tf.autograph.experimental.do_not_convert(raises_tensorflow(function))
    return result
