"""An operation that fails with an error code of our choice, for callbacks in graphs.

TensorFlow converts a ``ValueError`` or ``TypeError`` of a callback to ``InvalidArgumentError``, and most others to
``UnknownError``; no Python exception becomes ``FailedPreconditionError``, with which Horovod's operations fail. So a
callback returns such an error, as one more result, and an operation that follows it fails:

    callback -> results, error
    error -> Switch, if it has bytes  -> CollectivesStatus -> Merge
                     if it has none   -------------------> Merge    (control dependency) -> results

The bytes are the code and the text. The operation is registered through TensorFlow's C interface, as plug-in devices
do. It is Python and would wait for the interpreter lock, so the Switch runs it only when it must fail. Without that
interface callbacks raise, and TensorFlow chooses the code.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from collectives.base.errors import CollectivesError
from collectives.base.exclusion import exclusively
from collectives.tensorflow.errors import as_tensorflow

_NAME = "CollectivesStatus"
_NONE = np.zeros(0, np.uint8)
_registering = threading.RLock()


def returning(
    callback: Callable[..., Any], types: Sequence[Any], shapes: Sequence[tf.TensorShape]
) -> tuple[Callable[..., Any], list[Any], list[tf.TensorShape]]:
    """Wrap a callback so that it returns errors as one more result.

    Returns:
        The callback, one object for all equal ones, and the dtypes and shapes of its results, the error included.
    """
    if not _is_registered():
        return _interned(callback), list(types), list(shapes)
    stand_ins = tuple((dtype, _smallest(shape)) for dtype, shape in zip(types, shapes, strict=True))
    return _guarded(callback, stand_ins), [*types, tf.uint8], [*shapes, tf.TensorShape([None])]


def _smallest(shape: tf.TensorShape) -> tuple[int, ...]:
    """The smallest shape that is compatible with a partially known one; a dataset refuses incompatible results."""
    return (0,) if shape.rank is None else tuple(size or 0 for size in shape.as_list())


def checked(results: Sequence[Any], label: str) -> list[Any]:
    """The results of a callback of `returning` in a graph; the graph fails if there is an error.

    Not for functions of datasets, whose executor does not support Switch.
    """
    if not _is_registered():
        return list(results)
    *results, error = results
    well, failed = tf.raw_ops.Switch(data=error, pred=tf.size(error) > 0)
    (told,) = error.graph.create_op(_NAME, [failed], [tf.uint8], name=f"{label}_status").outputs
    merged = tf.raw_ops.Merge(inputs=[well, told])
    with tf.control_dependencies([merged.output]):
        return list(tf.identity_n(results))


@functools.cache
def _guarded(callback: Callable[..., Any], stand_ins: tuple[Any, ...]) -> Callable[..., list[Any]]:
    """One wrapper for all equal callbacks, never evicted: TensorFlow retains its callbacks."""

    def guarded(*arrays: Any) -> list[Any]:
        try:
            return [*callback(*arrays), _NONE]
        except CollectivesError as error:
            code = getattr(as_tensorflow(error), "code", tf.errors.UNKNOWN)
            if code != tf.errors.FAILED_PRECONDITION:
                raise
            told = bytes([code]) + f"{type(error).__name__}: {error}".encode()
            nothing = [np.zeros(shape, dtype.as_numpy_dtype) for dtype, shape in stand_ins]
            return [*nothing, np.frombuffer(told, np.uint8)]

    return guarded


@functools.cache
def _interned(callback: Callable[..., Any]) -> Callable[..., Any]:
    return callback


# ---- the operation --------------------------------------------------------------------------------------------------

_Pointer = ctypes.c_void_p
_Compute = ctypes.CFUNCTYPE(None, _Pointer, _Pointer)


def _is_registered() -> bool:
    """Register the operation, once per process. Returns whether TensorFlow has it."""
    return exclusively(_registering, _registered)  # TensorFlow ends the process when a second thread registers it


@functools.cache
def _registered() -> bool:
    try:
        return _register(_library())
    except (OSError, AttributeError):
        return False


def _library() -> ctypes.CDLL:
    """The library of TensorFlow, which is already loaded."""
    paths = sorted(Path(tf.sysconfig.get_lib()).glob("libtensorflow_framework.*"))
    if not paths:
        raise OSError("TensorFlow has no library of its own")
    return ctypes.CDLL(str(paths[0]))


def _register(library: ctypes.CDLL) -> bool:
    def function(name: str, result: Any, *arguments: Any) -> Any:
        symbol = library[name]
        symbol.restype, symbol.argtypes = result, arguments
        return symbol

    new_status = function("TF_NewStatus", _Pointer)
    set_status = function("TF_SetStatus", None, _Pointer, ctypes.c_int, ctypes.c_char_p)
    get_code = function("TF_GetCode", ctypes.c_int, _Pointer)
    delete_status = function("TF_DeleteStatus", None, _Pointer)
    get_input = function("TF_GetInput", None, _Pointer, ctypes.c_int, ctypes.POINTER(_Pointer), _Pointer)
    byte_size = function("TF_TensorByteSize", ctypes.c_size_t, _Pointer)
    data = function("TF_TensorData", _Pointer, _Pointer)
    delete_tensor = function("TF_DeleteTensor", None, _Pointer)
    fail = function("TF_OpKernelContext_Failure", None, _Pointer, _Pointer)

    def compute(_: Any, context: Any) -> None:
        tensor, status = _Pointer(), new_status()
        get_input(context, 0, ctypes.byref(tensor), status)
        told = ctypes.string_at(data(tensor), byte_size(tensor))
        set_status(status, told[0], told[1:])
        fail(context, status)
        delete_tensor(tensor)
        delete_status(status)

    kernel = _Compute(compute)
    name = _NAME.encode()
    operation = function("TF_NewOpDefinitionBuilder", _Pointer, ctypes.c_char_p)(name)
    function("TF_OpDefinitionBuilderAddInput", None, _Pointer, ctypes.c_char_p)(operation, b"error: uint8")
    function("TF_OpDefinitionBuilderAddOutput", None, _Pointer, ctypes.c_char_p)(operation, b"told: uint8")
    text = ctypes.c_char_p
    make_kernel = function("TF_NewKernelBuilder", _Pointer, text, text, _Pointer, _Compute, _Pointer)
    add_kernel = function("TF_RegisterKernelBuilder", None, ctypes.c_char_p, _Pointer, _Pointer)
    status = new_status()
    try:
        function("TF_RegisterOpDefinition", None, _Pointer, _Pointer)(operation, status)
        if get_code(status) == tf.errors.OK:
            add_kernel(name, make_kernel(name, b"CPU", None, kernel, None), status)
            # TensorFlow may call it until the process ends, also after this module is imported again.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kernel))
        return get_code(status) in (tf.errors.OK, tf.errors.ALREADY_EXISTS)
    finally:
        delete_status(status)
