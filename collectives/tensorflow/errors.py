"""Errors that are both ours and TensorFlow's, so that handlers for either catch them.

    ours                                          TensorFlow's, in eager mode and out of a graph
    MismatchError, NotInitializedError            FailedPreconditionError
    InvalidArgumentError, InvalidTypeError        InvalidArgumentError
    RankFailedError and every other kind          UnknownError

The codes are Horovod's. An eager call raises a class below, which has both bases. A graph that TensorFlow runs raises
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

    code = tf.errors.UNKNOWN
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


class InvalidArgumentError(_TensorFlowError, errors.InvalidArgumentError, tf.errors.InvalidArgumentError):
    code = tf.errors.INVALID_ARGUMENT


class InvalidTypeError(_TensorFlowError, errors.InvalidTypeError, tf.errors.InvalidArgumentError):
    code = tf.errors.INVALID_ARGUMENT


class InvalidSplitsError(_TensorFlowError, errors.InvalidSplitsError, tf.errors.InvalidArgumentError):
    code = tf.errors.INVALID_ARGUMENT


class UnsupportedError(_TensorFlowError, errors.UnsupportedError, NotImplementedError, tf.errors.InvalidArgumentError):
    """An operation that this kind of tensor does not support."""

    code = tf.errors.INVALID_ARGUMENT


class NotInitializedError(_TensorFlowError, errors.NotInitializedError, tf.errors.FailedPreconditionError):
    code = tf.errors.FAILED_PRECONDITION


class OperationError(_TensorFlowError, errors.OperationError, tf.errors.UnknownError):
    pass


class MismatchError(_TensorFlowError, errors.MismatchError, tf.errors.FailedPreconditionError):
    code = tf.errors.FAILED_PRECONDITION


class RankFailedError(_TensorFlowError, errors.RankFailedError, tf.errors.UnknownError):
    pass


class CollectiveTimeoutError(_TensorFlowError, errors.CollectiveTimeoutError, tf.errors.UnknownError):
    pass


class TransportError(_TensorFlowError, errors.TransportError, tf.errors.UnknownError):
    pass


class OutOfMemoryError(_TensorFlowError, errors.OutOfMemoryError, tf.errors.UnknownError):
    pass


_CLASSES: dict[type, type[_TensorFlowError]] = {
    errors.InvalidArgumentError: InvalidArgumentError,
    errors.InvalidTypeError: InvalidTypeError,
    errors.InvalidSplitsError: InvalidSplitsError,
    errors.UnsupportedError: UnsupportedError,
    errors.NotInitializedError: NotInitializedError,
    errors.OperationError: OperationError,
    errors.MismatchError: MismatchError,
    errors.RankFailedError: RankFailedError,
    errors.CollectiveTimeoutError: CollectiveTimeoutError,
    errors.TransportError: TransportError,
    errors.OutOfMemoryError: OutOfMemoryError,
}


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
