"""Views of tensors in host memory: one representation for all callers' types, and results in the caller's type.

The engine works on views only: 1-D, C-contiguous, aligned, in native byte order. A view is the caller's own memory
where possible; otherwise it is a copy, which ``View.store`` writes back after an in-place operation.
A Fortran-ordered array is copied, too: its elements could be sent in memory order only if the arrays of all ranks had
the same order, which a rank cannot know.

This module imports no framework. `host_frameworks` has one reader per framework; other tensors are read through DLPack,
the buffer protocol or ``__array_interface__``. `collectives.tensors.cuda_tensors` does the same for tensors on GPUs.
"""

from __future__ import annotations

import array as array_module
import ctypes
import sys
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from collectives.base.dtypes import SUPPORTED, resolve
from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.tensors import detection, dlpack
from collectives.tensors.arena import MAPPED_FROM, arena
from collectives.tensors.detection import Extent
from collectives.tensors.host_frameworks import READERS, Array, Read, Wrap, read_only

if TYPE_CHECKING:
    from collectives.tensors.cuda_tensors import DeviceView

_addressof = ctypes.addressof
_byte_of: Any = ctypes.c_char.from_buffer


class View:
    """A tensor in host memory as the engine sees it.

    Attributes:
        array: 1-D, C-contiguous, aligned, native byte order; the caller's memory unless ``copied``; read-only if the
            caller's memory is.
        shape: the tensor's shape; ``()`` for scalars.
        dtype: a supported dtype in native byte order.
        nbytes: bytes in ``array``.
        copied: ``array`` is not the caller's memory.
        writable: an in-place operation may write ``array`` and then call ``store``.
    """

    __slots__ = ("_target", "_wrap", "array", "copied", "dtype", "nbytes", "shape", "writable")

    def __init__(
        self,
        array: Array,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        writable: bool,
        target: Array | None = None,
        wrap: Wrap | None = None,
        copied: bool = False,
    ) -> None:
        self.array = array
        self.shape = shape
        self.dtype = dtype
        self.nbytes = array.nbytes
        self.writable = writable
        self.copied = copied
        self._target = target
        self._wrap = wrap

    def store(self) -> None:
        """Copy ``array`` into the caller's tensor after an in-place operation; does nothing if they share memory."""
        if self._target is not None:
            np.copyto(self._target, self.array.reshape(self._target.shape))

    def extent(self, writes: bool) -> Extent:
        """The caller's memory that an operation reads or writes: ``array``, or the target of ``store``."""
        if not self.copied:
            return extent_of(self.array, writes)
        target = self.array if self._target is None else self._target
        return detection.strided_extent(
            target.__array_interface__["data"][0], target.shape, target.strides, target.itemsize, writes
        )

    def detach(self) -> None:
        """Replace ``array`` by a copy, which ``store`` writes back."""
        self._target, self.array, self.copied = self.array, _copy(self.array, self.dtype).reshape(-1), True

    def wrap(self, array: Array) -> Any:
        """Convert a result to the caller's type.

        Args:
            array: C-contiguous, of any shape, with this view's dtype; must not be written to afterwards.
        """
        return array if self._wrap is None else self._wrap(array)


def address(array: Array) -> int:
    """The address of an array's first element."""
    try:
        return _addressof(_byte_of(array))  # four times as fast as the array interface
    except (TypeError, ValueError):  # read-only, empty, or of a dtype that the buffer protocol lacks
        at: int = array.__array_interface__["data"][0]
        return at


def extent_of(array: Array, writes: bool) -> Extent:
    """The memory of a contiguous array that an operation reads or writes."""
    at = address(array)
    return at, at + array.nbytes, writes, None


@overload
def view(tensor: Array, *, argument: str = ..., writable: bool = ..., stream: None = ...) -> View: ...


@overload
def view(tensor: Any, *, argument: str = ..., writable: bool = ..., stream: Any = ...) -> View | DeviceView: ...


def view(tensor: Any, *, argument: str = "tensor", writable: bool = False, stream: Any = None) -> View | DeviceView:
    """View a tensor, without a copy if possible.

    Args:
        tensor: a NumPy array or scalar; a Python bool, int (int64), float or complex; anything on the CPU with the
            buffer protocol, ``__array_interface__`` or DLPack (torch, jax, TensorFlow, ...), or on an NVIDIA GPU with
            DLPack or ``__cuda_array_interface__``. Any shape and strides.
        argument: its name in messages.
        writable: whether an in-place operation will write to it.
        stream: for tensors on GPUs only; see `collectives.tensors.cuda_tensors.view`.

    Returns:
        A `View`; for a tensor on a GPU a `DeviceView`.

    Raises:
        InvalidTypeError: an unsupported type or dtype, or memory of neither the CPU nor an NVIDIA GPU.
        InvalidArgumentError: ``writable`` and the tensor is read-only or its elements overlap; an int beyond 64 bits; a
            stream for a tensor on the CPU.
        MissingDependencyError: the tensor is on a GPU, and a package that GPUs need is missing.
    """
    wrap: Wrap | None = None
    if type(tensor) is np.ndarray and stream is None:
        array: Array = tensor
    else:
        read = _read(tensor, argument)
        if read is None:
            from collectives.tensors import cuda_tensors  # imports GPU modules only for a tensor on a GPU

            return cuda_tensors.view(tensor, argument=argument, writable=writable, stream=stream)
        if stream is not None:
            raise InvalidArgumentError(
                f"stream: expected None for a tensor on the CPU, got {stream!r}: the values of {argument} "
                f"({detection.describe(tensor)}) must be ready when the operation is called [T55]"
            )
        array, wrap = read
    dtype = array.dtype
    if dtype in SUPPORTED:
        flags = array.flags
        if flags.carray:  # contiguous, aligned and writable in one lookup
            return View(array if array.ndim == 1 else array.reshape(-1), array.shape, dtype, True, None, wrap)
        if not writable and flags.c_contiguous and flags.aligned:
            return View(array if array.ndim == 1 else array.reshape(-1), array.shape, dtype, False, None, wrap)
    return _look(tensor, array, argument, writable, wrap)


on_device = detection.is_on_device


def host_memory(tensor: Any, argument: str) -> Array | None:
    """The memory of a tensor that `view` takes, in its own shape and strides; None if it is on a GPU.

    Raises:
        InvalidTypeError, InvalidArgumentError: as `view`.
    """
    if type(tensor) is np.ndarray:
        return tensor
    read = _read(tensor, argument)
    return None if read is None else read[0]


def _look(tensor: Any, array: Array, argument: str, writable: bool, wrap: Wrap | None) -> View:
    dtype = resolve(array.dtype, argument=f"{argument} ({detection.describe(tensor)})")
    flags = array.flags
    if writable:
        if not flags.writeable:
            raise detection.frozen(tensor, argument, array.shape, array.dtype)
        if not flags.c_contiguous and detection.may_overlap(array.shape, array.strides, array.itemsize):
            raise detection.overlapping(tensor, argument, array.shape, array.strides)
    if flags.c_contiguous and flags.aligned and array.dtype.isnative:
        return View(array.reshape(-1), array.shape, dtype, flags.writeable, None, wrap)
    flat = _copy(array, dtype).reshape(-1)
    return View(flat, array.shape, dtype, flags.writeable, array if flags.writeable else None, wrap, True)


def _copy(array: Array, dtype: np.dtype[Any]) -> Array:
    """A C-contiguous copy in memory that peers can map, if it is large enough for that to pay."""
    copy: Array = (arena.empty if array.nbytes >= MAPPED_FROM else np.empty)(array.shape, dtype)
    np.copyto(copy, array)
    return copy


# ---- other types

_CPU_DEVICES = (1, 3, 11)  # DLPack: CPU, CUDA's and ROCm's page-locked host memory
_EXPECTED = (
    "a NumPy array or scalar, a Python number, a CPU tensor with the buffer protocol, __array_interface__ or DLPack,"
    " or a GPU tensor with DLPack or __cuda_array_interface__"
)
_PYTHON_SCALARS = {bool: np.bool_, int: np.int64, float: np.float64, complex: np.complex128}


def _read(tensor: Any, argument: str) -> Read | None:
    """Return the memory of a tensor in any layout, read-only if in-place operations must not write; None on a GPU."""
    kind: Any = type(tensor)
    if isinstance(tensor, np.ndarray):
        masked = sys.modules.get("numpy.ma")  # imported with the first masked array
        if masked is not None and isinstance(tensor, masked.MaskedArray):
            raise InvalidTypeError(
                f"{argument}: masked arrays are refused, because the mask would be lost; pass tensor.filled(...) or "
                "tensor.data [T27]"
            )
        return tensor.view(np.ndarray), tensor.__array_wrap__
    if isinstance(tensor, np.generic):
        return read_only(np.asarray(tensor)), _numpy_scalar
    if kind in _PYTHON_SCALARS:
        try:
            return read_only(np.asarray(tensor, _PYTHON_SCALARS[kind])), _python_scalar
        except OverflowError:
            raise InvalidArgumentError(
                f"{argument}: expected an int of at most 64 bits (int64), got {tensor} [T6]"
            ) from None
    framework = detection.framework(kind)
    if framework is not None:
        return READERS[framework](tensor, argument)
    if isinstance(tensor, (list, tuple)):
        raise InvalidTypeError(
            f"{argument}: expected {_EXPECTED}; got a {kind.__name__}: pass numpy.asarray({argument}) [T7]"
        )
    return _read_protocol(tensor, argument)


def _numpy_scalar(array: Array) -> Any:
    return array[()] if array.ndim == 0 else array


def _python_scalar(array: Array) -> Any:
    return array.item() if array.ndim == 0 else array


# ---- protocols


def _read_protocol(tensor: Any, argument: str) -> Read | None:
    if hasattr(tensor, "__dlpack_device__"):
        kind = int(tensor.__dlpack_device__()[0])
        if kind in dlpack.ON_GPU:
            return None
        if kind not in _CPU_DEVICES:
            raise detection.misplaced(tensor, argument, f"DLPack device kind {kind}")
    elif hasattr(tensor, "__cuda_array_interface__"):
        return None
    namespace = detection.namespace(tensor)
    if namespace is not None:
        return _from_dlpack(tensor, argument), namespace.from_dlpack
    try:
        memory = memoryview(tensor)
    except TypeError:
        pass
    except (ValueError, BufferError) as error:
        raise InvalidTypeError(
            f"{argument}: the buffer of {detection.describe(tensor)} cannot be read: {error} [T8]"
        ) from None
    else:
        try:
            return np.asarray(memory), _buffer_wrap(tensor)
        except (TypeError, ValueError, NotImplementedError, RuntimeError):
            raise InvalidTypeError(
                f"{argument}: {detection.describe(tensor)} has elements of format {memory.format!r}, which are not "
                f"numbers [T9]"
            ) from None
    if hasattr(tensor, "__array_interface__"):
        return np.asarray(tensor), None
    if hasattr(tensor, "__dlpack__"):
        return _from_dlpack(tensor, argument), None
    advice = f": pass numpy.asarray({argument})" if hasattr(tensor, "__array__") else ""
    raise InvalidTypeError(f"{argument}: expected {_EXPECTED}; got {detection.describe(tensor)}{advice} [T10]")


def _from_dlpack(tensor: Any, argument: str) -> Array:
    try:
        return np.from_dlpack(tensor)
    except (RuntimeError, TypeError, ValueError, BufferError) as error:
        raise InvalidTypeError(
            f"{argument}: {detection.describe(tensor)} cannot be read through DLPack: {error} [T11]"
        ) from error


def _buffer_wrap(tensor: Any) -> Wrap | None:
    """The conversion of an array to the type of a buffer; None if results stay NumPy arrays (mmap and the like)."""
    kind = type(tensor)
    if kind in (bytes, bytearray, memoryview):
        return lambda result: kind(result.data)
    if kind is array_module.array:
        code = tensor.typecode
        return lambda result: array_module.array(code, result.tobytes())
    if isinstance(tensor, ctypes.Array):
        # The length is part of a ctypes array's type, and a gathered result is longer.
        return lambda result: kind.from_buffer_copy(result) if result.nbytes == ctypes.sizeof(kind) else result
    return None
