"""Arrays in memory that the other ranks of this host can map: ``empty``, ``zeros``, ``empty_like``, ``is_mapped``.

The collectives read and write such arrays, and contiguous views of them, where they lie: without a copy, and without a
system call. They are plain ``numpy.ndarray``, serve every purpose of any other, and may be made before ``init()``.
Their memory goes back when the last view is gone. Where there is no such memory, arrays of private memory are
returned, with which every collective works too.

`collectives.torch` has the same functions for tensors. TensorFlow's and JAX's tensors cannot be written to, so that an
empty one has no use; those that collectives return lie in such memory by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.tensors import arrays, detection
from collectives.tensors.arena import arena


def empty(shape: SupportsIndex | Sequence[SupportsIndex], dtype: npt.DTypeLike = float) -> npt.NDArray[Any]:
    """An uninitialised array, as ``numpy.empty``, in memory that peers can map.

    Args:
        shape: a number of elements, or a sequence of dimensions.
        dtype: float64 by default, as NumPy's; any but those of Python objects.

    Returns:
        A C-contiguous ``numpy.ndarray``, aligned to 64 bytes.

    Raises:
        InvalidArgumentError: a negative dimension.
        InvalidTypeError: ``shape`` is neither a number nor a sequence of numbers, or ``dtype`` is of Python objects.
        MemoryError, ValueError: as from NumPy, if private memory is not available either, or the size has no address.

    Example:
        >>> hvd.empty((2, 3), np.float32).shape
        (2, 3)
    """
    sizes, kind = _dimensions(shape), _plain(dtype)
    return arena.empty(sizes, kind)


def zeros(shape: SupportsIndex | Sequence[SupportsIndex], dtype: npt.DTypeLike = float) -> npt.NDArray[Any]:
    """An array of zeros, as ``numpy.zeros``, in memory that peers can map; arguments and errors as of `empty`.

    Example:
        >>> hvd.zeros(3)
        array([0., 0., 0.])
    """
    sizes, kind = _dimensions(shape), _plain(dtype)
    if not kind.itemsize:
        return np.zeros(sizes, kind)
    memory = arena.empty(math.prod(sizes) * kind.itemsize, np.dtype(np.uint8))
    memory.fill(0)
    return np.ndarray(sizes, kind, memory)


def empty_like(
    prototype: Any,
    dtype: npt.DTypeLike | None = None,
    *,
    shape: SupportsIndex | Sequence[SupportsIndex] | None = None,
) -> npt.NDArray[Any]:
    """An uninitialised array with the shape and dtype of another tensor, in memory that peers can map.

    Unlike with ``numpy.empty_like``, the array is C-contiguous for every order of the prototype: only then do
    collectives use its memory without a copy.

    Args:
        prototype: any tensor in host memory that `allreduce` takes.
        dtype, shape: in place of the prototype's.

    Raises:
        InvalidTypeError: not a tensor in host memory.
        InvalidArgumentError, InvalidTypeError, MemoryError, ValueError: as `empty`.

    Example:
        >>> hvd.empty_like(np.ones((2, 3))).shape
        (2, 3)
    """
    like = _host_memory(prototype, "prototype")
    return empty(like.shape if shape is None else shape, like.dtype if dtype is None else dtype)


def is_mapped(tensor: Any) -> bool:
    """Whether collectives use a tensor's memory in place, because all ranks of the host map it.

    True for contiguous arrays of this module, contiguous views of them, any framework's tensors that share their
    memory, and results of collectives from 16 KiB up. False for all other tensors in host memory, for tensors without
    elements, and for tensors on GPUs, which are mapped by other means.

    Raises:
        InvalidTypeError: not a tensor.

    Example:
        >>> hvd.is_mapped(np.ones(5000)), hvd.is_mapped(hvd.empty(5000))
        (False, True)
    """
    if arrays.on_device(tensor):
        return False
    memory = _host_memory(tensor, "tensor")
    if not memory.flags.c_contiguous:
        return False
    return memory.nbytes > 0 and arena.locate(memory.ctypes.data, memory.nbytes) != 0


def _host_memory(tensor: Any, argument: str) -> npt.NDArray[Any]:
    memory = arrays.host_memory(tensor, argument)
    if memory is None:
        raise InvalidTypeError(
            f"{argument}: expected a tensor in host memory, got a {detection.describe(tensor)} on a GPU [T45]"
        )
    return memory


def _dimensions(shape: SupportsIndex | Sequence[SupportsIndex]) -> tuple[int, ...]:
    try:
        sizes = tuple(size.__index__() for size in (shape if isinstance(shape, Sequence) else (shape,)))
    except (AttributeError, TypeError):
        raise InvalidTypeError(f"shape: expected an int or a sequence of ints, got {shape!r} [A40]") from None
    if any(size < 0 for size in sizes):
        raise InvalidArgumentError(f"shape: expected dimensions of 0 or more, got {shape!r} [A41]")
    return sizes


def _plain(dtype: npt.DTypeLike) -> np.dtype[Any]:
    kind = np.dtype(dtype)
    if kind.hasobject:
        raise InvalidTypeError(f"dtype: expected numbers or bytes, got {kind}: peers cannot use Python objects [A42]")
    return kind
