"""The door: anything that holds numbers on the CPU becomes one kind of view, and results leave as the caller's type.

Below the door there are only views: 1-D, C-contiguous, aligned, in native byte order. A view is the caller's own memory
whenever that is possible; otherwise it is a copy, which ``View.store`` writes back after an in-place operation.
A Fortran-ordered array is copied as well: its elements could be moved in the order of its memory only if every rank's
were ordered alike, and no rank can know.

Nothing here imports a framework. What must be known about one is its reader in ``_READERS``; all others speak DLPack,
the buffer protocol or ``__array_interface__``. A tensor on a GPU is handed to `collectives.tensors.cuda_tensors`, by
the same rules.
"""

from __future__ import annotations

import array as array_module
import ctypes
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from collectives.base.dtypes import SUPPORTED, resolve
from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.tensors import detection, dlpack
from collectives.tensors.detection import Extent

if TYPE_CHECKING:
    from collectives.tensors.cuda_tensors import DeviceView

_Array = npt.NDArray[Any]
_Wrap = Callable[[_Array], Any]
_addressof = ctypes.addressof
_byte_of: Any = ctypes.c_char.from_buffer
_Read = tuple[_Array, _Wrap | None]
"""A tensor's memory, and what turns a result of the same dtype into the tensor's type (None: a result stays an
array)."""


class View:
    """A tensor as the engine sees it.

    Attributes:
        array: 1-D, C-contiguous, aligned, native byte order; the caller's memory unless ``copied``. Read-only where the
            caller's is.
        shape: the tensor's shape; ``()`` for scalars.
        dtype: a supported dtype in native byte order.
        nbytes: bytes in ``array``.
        copied: ``array`` is not the caller's memory.
        writable: an in-place operation may write ``array`` and then call ``store``.
    """

    __slots__ = ("_target", "_wrap", "array", "copied", "dtype", "nbytes", "shape", "writable")

    def __init__(
        self,
        array: _Array,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        writable: bool,
        target: _Array | None = None,
        wrap: _Wrap | None = None,
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
        """After an in-place operation: bring ``array`` into the caller's tensor. Nothing to do where it is the same
        memory."""
        if self._target is not None:
            np.copyto(self._target, self.array.reshape(self._target.shape))

    def extent(self, writes: bool) -> Extent:
        """The caller's memory, which an operation reads or writes: ``array``, or what ``store`` writes to."""
        if not self.copied:
            try:
                at = _addressof(_byte_of(self.array))  # takes a quarter of the time that the array interface does
            except (TypeError, ValueError):  # read-only, or of a dtype that the buffer protocol does not know
                at = self.array.__array_interface__["data"][0]
            return at, at + self.nbytes, writes, None
        target = self.array if self._target is None else self._target
        return detection.strided_extent(
            target.__array_interface__["data"][0], target.shape, target.strides, target.itemsize, writes
        )

    def detach(self) -> None:
        """Work on a copy from here on, which ``store`` brings back."""
        self._target, self.array, self.copied = self.array, self.array.copy(), True

    def wrap(self, array: _Array) -> Any:
        """A result as the caller's type.

        Args:
            array: C-contiguous, of any shape, with this view's dtype; nobody else may write to it afterwards.
        """
        return array if self._wrap is None else self._wrap(array)

    def __repr__(self) -> str:
        return (
            f"View(shape={self.shape}, dtype={SUPPORTED[self.dtype]}, copied={self.copied}, writable={self.writable})"
        )


@overload
def view(tensor: _Array, *, argument: str = ..., writable: bool = ..., stream: None = ...) -> View: ...


@overload
def view(tensor: Any, *, argument: str = ..., writable: bool = ..., stream: Any = ...) -> View | DeviceView: ...


def view(tensor: Any, *, argument: str = "tensor", writable: bool = False, stream: Any = None) -> View | DeviceView:
    """Look at a tensor, without a copy if possible.

    Args:
        tensor: a NumPy array or scalar; a Python bool, int (int64), float or complex; anything on the CPU with the
            buffer protocol, ``__array_interface__`` or DLPack (torch, jax, TensorFlow, ...), or on an NVIDIA GPU with
            DLPack or ``__cuda_array_interface__``. Any shape and strides.
        argument: what messages call it.
        writable: an in-place operation is going to write to it.
        stream: of a tensor on a GPU: see `collectives.tensors.cuda_tensors.view`.

    Returns:
        A view; of a tensor on a GPU a `DeviceView`.

    Raises:
        InvalidTypeError: a type or dtype that cannot be used, or memory that is neither the CPU's nor an NVIDIA GPU's.
        InvalidArgumentError: ``writable`` and the tensor is read-only or its elements overlap; an int beyond 64 bits; a
            stream for a tensor on the CPU.
        MissingDependencyError: the tensor is on a GPU, and something that GPUs need is missing.
    """
    wrap: _Wrap | None = None
    if type(tensor) is np.ndarray and stream is None:
        array: _Array = tensor
    else:
        read = _read(tensor, argument)
        if read is None:
            from collectives.tensors import cuda_tensors  # nothing of GPUs is imported before a tensor on one is met

            return cuda_tensors.view(tensor, argument=argument, writable=writable, stream=stream)
        if stream is not None:
            raise InvalidArgumentError(
                f"stream: expected None for a tensor on the CPU, got {stream!r}: the numbers of {argument} "
                f"({detection.describe(tensor)})"
                " must be there when the operation is called"
            )
        array, wrap = read
    dtype = array.dtype
    if dtype in SUPPORTED:
        flags = array.flags
        if flags.carray:  # contiguous, aligned and writable: one question in place of three
            return View(array if array.ndim == 1 else array.reshape(-1), array.shape, dtype, True, None, wrap)
        if not writable and flags.c_contiguous and flags.aligned:
            return View(array if array.ndim == 1 else array.reshape(-1), array.shape, dtype, False, None, wrap)
    return _look(tensor, array, argument, writable, wrap)


def on_device(tensor: Any, stream: Any = None) -> bool:
    """Whether a call is about a tensor on a GPU: it is one, or a stream is named."""
    return stream is not None or (type(tensor) is not np.ndarray and detection.is_on_device(tensor))


def _look(tensor: Any, array: _Array, argument: str, writable: bool, wrap: _Wrap | None) -> View:
    dtype = resolve(array.dtype, argument=f"{argument} ({detection.describe(tensor)})")
    flags = array.flags
    if writable:
        if not flags.writeable:
            raise detection.frozen(tensor, argument, array.shape, array.dtype)
        if not flags.c_contiguous and detection.may_overlap(array.shape, array.strides, array.itemsize):
            raise detection.overlapping(tensor, argument, array.shape, array.strides)
    if flags.c_contiguous and flags.aligned and array.dtype.isnative:
        return View(array.reshape(-1), array.shape, dtype, flags.writeable, None, wrap)
    flat = np.array(array, dtype=dtype, order="C", copy=True, subok=False).reshape(-1)
    return View(flat, array.shape, dtype, flags.writeable, array if flags.writeable else None, wrap, True)


# ---- every other type
# -------------------------------------------------------------------------------------------------

_CPU_DEVICES = (1, 3, 11)  # DLPack: CPU, CUDA's and ROCm's page-locked host memory
_EXPECTED = (
    "a NumPy array or scalar, a Python number, a CPU tensor with the buffer protocol, __array_interface__ or DLPack,"
    " or a GPU tensor with DLPack or __cuda_array_interface__"
)
_PYTHON_SCALARS = {bool: np.bool_, int: np.int64, float: np.float64, complex: np.complex128}


def _read(tensor: Any, argument: str) -> _Read | None:
    """Anything in any layout; read-only where in-place operations must not write. None: it is on a GPU."""
    kind: Any = type(tensor)
    if isinstance(tensor, np.ndarray):
        if isinstance(tensor, np.ma.MaskedArray):
            raise InvalidTypeError(
                f"{argument}: masked arrays are refused because their mask would be lost; pass tensor.filled(...) or "
                f"tensor.data"
            )
        return tensor.view(np.ndarray), tensor.__array_wrap__
    if isinstance(tensor, np.generic):
        return _frozen(np.asarray(tensor)), _numpy_scalar
    if kind in _PYTHON_SCALARS:
        try:
            return _frozen(np.asarray(tensor, _PYTHON_SCALARS[kind])), _python_scalar
        except OverflowError:
            raise InvalidArgumentError(
                f"{argument}: expected an int of at most 64 bits (int64), got {tensor}"
            ) from None
    framework = detection.framework(kind)
    if framework is not None:
        return _READERS[framework](tensor, argument)
    if isinstance(tensor, (list, tuple)):
        raise InvalidTypeError(
            f"{argument}: expected {_EXPECTED}; got a {kind.__name__}: pass numpy.asarray({argument})"
        )
    return _read_protocol(tensor, argument)


def _frozen(array: _Array) -> _Array:
    array.flags.writeable = False
    return array


def _numpy_scalar(array: _Array) -> Any:
    return array[()] if array.ndim == 0 else array


def _python_scalar(array: _Array) -> Any:
    return array.item() if array.ndim == 0 else array


# ---- protocols
# -----------------------------------------------------------------------------------------------------------


def _read_protocol(tensor: Any, argument: str) -> _Read | None:
    if hasattr(tensor, "__dlpack_device__"):
        kind = int(tensor.__dlpack_device__()[0])
        if kind in (dlpack.CUDA, dlpack.MANAGED):
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
            f"{argument}: the buffer of {detection.describe(tensor)} cannot be read: {error}"
        ) from None
    else:
        return _from_buffer(memory, tensor, argument), _buffer_wrap(tensor)
    if hasattr(tensor, "__array_interface__"):
        return np.asarray(tensor), None
    if hasattr(tensor, "__dlpack__"):
        return _from_dlpack(tensor, argument), None
    advice = f": pass numpy.asarray({argument})" if hasattr(tensor, "__array__") else ""
    raise InvalidTypeError(f"{argument}: expected {_EXPECTED}; got {detection.describe(tensor)}{advice}")


def _from_dlpack(tensor: Any, argument: str) -> _Array:
    try:
        return np.from_dlpack(tensor)
    except (RuntimeError, TypeError, ValueError, BufferError) as error:
        raise InvalidTypeError(
            f"{argument}: {detection.describe(tensor)} cannot be read through DLPack: {error}"
        ) from error


def _from_buffer(memory: memoryview, tensor: Any, argument: str) -> _Array:
    try:
        return np.asarray(memory)
    except (TypeError, ValueError, NotImplementedError, RuntimeError):
        raise InvalidTypeError(
            f"{argument}: {detection.describe(tensor)} has elements of format {memory.format!r}, which are not numbers"
        ) from None


def _buffer_wrap(tensor: Any) -> _Wrap | None:
    """How to make the type of a buffer again; None where a result stays a NumPy array (mmap and the like)."""
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


# ---- frameworks
# ----------------------------------------------------------------------------------------------------------


def _read_torch(tensor: Any, argument: str) -> _Read | None:
    torch: Any = sys.modules["torch"]
    if tensor.is_cuda:
        return None
    if not tensor.is_cpu:
        raise detection.misplaced(tensor, argument, str(tensor.device))
    if tensor.layout is not torch.strided:
        raise InvalidTypeError(
            f"{argument}: expected a dense tensor, got layout {tensor.layout}; pass {argument}.to_dense()"
        )
    plain = tensor.detach() if tensor.requires_grad else tensor
    lazy = plain.is_conj() or plain.is_neg()  # conjugated or negated only when read: its memory holds other numbers
    if lazy:
        plain = plain.resolve_conj().resolve_neg()
    try:
        # bfloat16: NumPy has no such type of its own, nor does DLPack bring it one. The same bits go under another
        # name.
        half = plain.dtype is torch.bfloat16
        array = plain.view(torch.int16).numpy().view(resolve("bfloat16")) if half else plain.numpy()
    except (RuntimeError, TypeError) as error:
        raise InvalidTypeError(f"{argument}: a torch tensor of dtype {tensor.dtype} cannot be read: {error}") from error
    return _frozen(array) if lazy else array, _wrap_torch


def _wrap_torch(array: _Array) -> Any:
    torch: Any = sys.modules["torch"]
    if SUPPORTED[array.dtype] == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _read_cupy(tensor: Any, argument: str) -> None:
    """There is no CuPy array but on a GPU."""


def _read_jax(tensor: Any, argument: str) -> _Read | None:
    jax: Any = sys.modules["jax"]
    if isinstance(tensor, jax.core.Tracer):
        raise InvalidTypeError(
            f"{argument}: expected a concrete jax array, got a tracer: call collectives.jax, or collectives outside "
            f"jit, grad and vmap"
        )
    platforms = {device.platform for device in tensor.devices()}
    if platforms == {"gpu"}:
        return None
    if platforms != {"cpu"}:
        raise detection.misplaced(tensor, argument, ", ".join(sorted(platforms)))
    return _frozen(np.asarray(tensor).view()), _wrap_jax


def _wrap_jax(array: _Array) -> Any:
    """A result, which nobody is going to write to, as a jax array: without a copy if it is aligned to 64 bytes."""
    jax: Any = sys.modules["jax"]
    try:
        return jax.device_put(array, may_alias=True)
    except TypeError:  # before 0.4.32
        return jax.numpy.asarray(array)


def _read_tensorflow(tensor: Any, argument: str) -> _Read | None:
    tensorflow: Any = sys.modules["tensorflow"]
    if not hasattr(tensor, "numpy"):
        raise InvalidTypeError(
            f"{argument}: expected an eager tensor, got a symbolic {detection.describe(tensor)}: call outside "
            f"tf.function"
        )
    device = tensor.device or "CPU"
    if "GPU" in device:
        return None
    if "CPU" not in device:
        raise detection.misplaced(tensor, argument, device)
    # Not numpy(), which copies. A variable's value is its memory, which TensorFlow does not write to while the value
    # lives.
    array = np.asarray(tensor.read_value() if isinstance(tensor, tensorflow.Variable) else tensor)
    return _frozen(array.view()), wrap_tensorflow


_TENSORFLOW_ALIGNMENT = 64


def wrap_tensorflow(array: _Array) -> Any:
    """An array as an eager tensor, without a copy if it is aligned to 64 bytes, as TensorFlow's kernels want their
    tensors to be."""
    tensorflow: Any = sys.modules["tensorflow"]
    if array.__array_interface__["data"][0] % _TENSORFLOW_ALIGNMENT or not array.flags.carray or array.size == 0:
        return tensorflow.convert_to_tensor(array)
    if SUPPORTED[array.dtype] == "bfloat16":  # DLPack brings NumPy no such type
        return tensorflow.bitcast(wrap_tensorflow(array.view(np.uint16)), tensorflow.bfloat16)
    return tensorflow.experimental.dlpack.from_dlpack(array.__dlpack__())


_READERS: dict[str, Callable[[Any, str], _Read | None]] = {
    "torch": _read_torch,
    "cupy": _read_cupy,
    "jax": _read_jax,
    "tensorflow": _read_tensorflow,
}
"""jax's arrays and TensorFlow's tensors are immutable, so read-only here."""
