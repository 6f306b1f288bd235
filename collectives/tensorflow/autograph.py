"""What AutoGraph must leave alone: every function of ours that a user's ``tf.function`` calls.

AutoGraph rewrites whatever a ``tf.function`` calls, however deep, and that would be the whole adapter down to the
engine: slow to trace, errors with tracebacks through made-up files, and an ``if`` that could become part of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from collectives.tensorflow.errors import raises_tensorflow

Function = TypeVar("Function", bound=Callable[..., Any])


def unconverted(function: Function) -> Function:
    """A function that AutoGraph does not rewrite, nor what it calls; its errors of ours are TensorFlow's as well."""
    result: Function = tf.autograph.experimental.do_not_convert(raises_tensorflow(function))
    return result
