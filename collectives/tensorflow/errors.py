"""Errors that are both ours and TensorFlow's, so that handlers for either catch them.

    ours                                          TensorFlow's, in eager mode and out of a graph
    MismatchError, NotInitializedError            FailedPreconditionError
    InvalidArgumentError, InvalidTypeError        InvalidArgumentError
    RankFailedError and every other kind          UnknownError

The codes are Horovod's. An eager call raises a class that has both bases. A graph that TensorFlow runs raises
TensorFlow's alone, with our message; `status` provides the code.
"""

# mypy: allow-subclassing-any

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from collectives.base import errors
from collectives.base.errors import CollectivesError

Function = TypeVar("Function", bound=Callable[..., Any])


class _TensorFlowError(CollectivesError):
    """Our error with the attributes of a ``tf.errors.OpError``; must precede it among the bases."""

    code: int
    node_def = op = None
    __str__ = Exception.__str__
    __reduce__ = Exception.__reduce__  # TensorFlow's constructor takes three arguments

    @property
    def message(self) -> str:
        return str(self)

    @property
    def error_code(self) -> int:
        return int(self.code)

    @property
    def experimental_payloads(self) -> dict[str, Any]:
        return {}


_CODES = {
    tf.errors.InvalidArgumentError: tf.errors.INVALID_ARGUMENT,
    tf.errors.FailedPreconditionError: tf.errors.FAILED_PRECONDITION,
    tf.errors.UnknownError: tf.errors.UNKNOWN,
}
_BASES: dict[type, tuple[type, ...]] = {
    errors.InvalidArgumentError: (tf.errors.InvalidArgumentError,),
    errors.InvalidTypeError: (tf.errors.InvalidArgumentError,),
    errors.InvalidSplitsError: (tf.errors.InvalidArgumentError,),
    errors.UnsupportedError: (NotImplementedError, tf.errors.InvalidArgumentError),
    errors.NotInitializedError: (tf.errors.FailedPreconditionError,),
    errors.OperationError: (tf.errors.UnknownError,),
    errors.MismatchError: (tf.errors.FailedPreconditionError,),
    errors.RecoverableError: (tf.errors.UnknownError,),
    errors.RankFailedError: (tf.errors.UnknownError,),
    errors.CollectiveTimeoutError: (tf.errors.UnknownError,),
    errors.TransportError: (tf.errors.UnknownError,),
    errors.OutOfMemoryError: (tf.errors.UnknownError,),
}
"""By class of ours, the further bases of the class that is both."""


def _combined(ours: type, bases: tuple[type, ...]) -> Any:
    members = {"code": _CODES[bases[-1]], "__module__": __name__, "__doc__": ours.__doc__}
    return type(ours.__name__, (_TensorFlowError, ours, *bases), members)


_CLASSES = {ours: _combined(ours, bases) for ours, bases in _BASES.items()}
globals().update({each.__name__: each for each in _CLASSES.values()})  # where pickle looks for them


def as_tensorflow(error: CollectivesError) -> CollectivesError:
    """Convert an error to the class that is also TensorFlow's; returns it unchanged if there is none."""
    if type(error) not in _CLASSES:
        return error
    twin = _CLASSES[type(error)](*error.args).with_traceback(error.__traceback__)
    twin.__dict__.update(error.__dict__)
    twin.__cause__, twin.__suppress_context__ = error.__cause__, True
    return twin


def raises_tensorflow(function: Function) -> Function:
    """Decorate a function so that its errors are also TensorFlow's."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except CollectivesError as error:
            raise as_tensorflow(error) from error.__cause__

    return wrapped  # type: ignore[return-value]


def unconverted(function: Function) -> Function:
    """Decorate a function so that its errors are also TensorFlow's, and AutoGraph converts neither it nor its callees.

    AutoGraph would convert the whole adapter down to the engine for every ``tf.function``: slow tracing, tracebacks
    through generated files, and Python conditions that could become part of the graph.
    """
    result: Function = tf.autograph.experimental.do_not_convert(raises_tensorflow(function))
    return result
