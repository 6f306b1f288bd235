"""Properties of any tensor that are known without reading its elements: its type, its framework, and its layout.

This module imports no framework. A framework's tensor exists only in a program that has imported the framework, so
frameworks are looked up in ``sys.modules``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.tensors import dlpack

_FRAMEWORKS = (
    ("torch", ("Tensor",)),
    ("cupy", ("ndarray",)),
    ("jax", ("Array", "core.Tracer")),
    ("tensorflow", ("Tensor", "Variable")),
)
"""Modules and their tensor types."""


class Strided(NamedTuple):
    """A layout that may have gaps; strides in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


NO_ELEMENTS = (
    "on meta, where tensors have a shape but no elements: first give it memory (module.to_empty(device=...)) and values"
)
"""The problem with a tensor of torch's meta device, and the remedy."""
Extent = tuple[int, int, bool, Strided | None]
"""The memory that an operation uses: start and end (exclusive) address, whether it is written, any layout with gaps."""
_EFFORT: Any = 100_000
"""NumPy's limit of work when it searches for a byte that two tensors share."""


def describe(tensor: Any) -> str:
    """The type of a tensor in messages: ``numpy.ndarray``, ``list``, ``torch.Tensor``."""
    kind = type(tensor)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def misplaced(tensor: Any, argument: str, place: str) -> InvalidTypeError:
    """The error for a tensor in inaccessible memory, or without memory."""
    if place == "meta":
        return InvalidTypeError(
            f"{argument}: expected a tensor with elements, got a {describe(tensor)} {NO_ELEMENTS} [T39]"
        )
    return InvalidTypeError(
        f"{argument}: expected memory of the CPU or of an NVIDIA GPU, got a {describe(tensor)} on {place}: copy it "
        f"to the host first [T40]"
    )


def frozen(tensor: Any, argument: str, shape: Sequence[int], dtype: Any) -> InvalidArgumentError:
    """The error for an in-place operation on a read-only tensor."""
    kind: Any = type(tensor)
    if framework(kind) == "torch" and (tensor.is_neg() or tensor.is_conj()):
        return InvalidArgumentError(
            f"{argument}: an in-place operation needs a tensor whose memory holds its values, got a view of shape "
            f"{tuple(shape)} that negates or conjugates them; pass {argument}.resolve_conj().resolve_neg(), or use the "
            "operation that returns a new tensor [T64]"
        )
    return InvalidArgumentError(
        f"{argument}: an in-place operation needs a writable tensor, got a read-only {describe(tensor)} of shape "
        f"{tuple(shape)} and dtype {dtype}; use the operation that returns a new tensor, or copy it first [T36]"
    )


def overlapping(tensor: Any, argument: str, shape: Sequence[int], strides: Sequence[int]) -> InvalidArgumentError:
    """The error for an in-place operation on elements that share memory."""
    return InvalidArgumentError(
        f"{argument}: an in-place operation needs elements that do not share memory, got a {describe(tensor)} of shape "
        f"{tuple(shape)} and strides {tuple(strides)} (a broadcast or sliding view); copy it first [T37]"
    )


def strided_extent(address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int, writes: bool) -> Extent:
    """The extent of a tensor with at least one element; strides in bytes."""
    reaches = [stride * (length - 1) for stride, length in zip(strides, shape, strict=True)]
    start = address + sum(min(0, reach) for reach in reaches)
    end = address + sum(max(0, reach) for reach in reaches) + itemsize
    return start, end, writes, Strided(address, tuple(shape), tuple(strides), itemsize)


def share_a_byte(one: Extent, other: Extent) -> bool:
    """Whether two tensors with overlapping addresses share a byte; True if that takes too long to compute."""
    if one[3] is None and other[3] is None:
        return True
    try:
        return bool(np.shares_memory(_laid_out(one), _laid_out(other), max_work=_EFFORT))
    except np.exceptions.TooHardError:
        return True


def _laid_out(extent: Extent) -> Any:
    """An array with the layout of an extent; must not be read, because the memory may be a GPU's or already freed."""
    start, end, _, strided = extent
    address, shape, strides, itemsize = strided or (start, (end - start,), None, 1)
    interface = {"version": 3, "data": (address, False), "shape": shape, "strides": strides, "typestr": f"|V{itemsize}"}
    return np.asarray(SimpleNamespace(__array_interface__=interface))


@functools.lru_cache(maxsize=256)
def framework(kind: Any) -> str | None:
    """The module of a tensor type: "torch", "cupy", "jax" or "tensorflow"; None for other types."""
    for name, types in _FRAMEWORKS:
        module = sys.modules.get(name)
        for attribute in types:
            base: Any = module
            for part in attribute.split("."):
                base = getattr(base, part, None)
            if isinstance(base, type) and issubclass(kind, base):
                return name
    return None


def namespace(tensor: Any) -> Any:
    """The module whose ``from_dlpack`` makes tensors of this type, or None."""
    if not hasattr(tensor, "__dlpack__"):
        return None
    if hasattr(tensor, "__array_namespace__"):
        module = tensor.__array_namespace__()
    else:
        module = sys.modules.get(type(tensor).__module__.partition(".")[0])
    return module if hasattr(module, "from_dlpack") else None


def is_contiguous(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether the elements are contiguous in C order; strides in bytes."""
    if 0 in shape:
        return True
    expected = itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


def may_overlap(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether two indices may refer to the same memory; exact for sliced, transposed and broadcast layouts."""
    if 0 in shape:
        return False
    reach = itemsize
    for stride, length in sorted(
        (abs(stride), length) for stride, length in zip(strides, shape, strict=True) if length > 1
    ):
        if stride < reach:
            return True
        reach += stride * (length - 1)
    return False


def is_on_device(tensor: Any) -> bool:
    """Whether a tensor is on a GPU; False if that cannot be determined."""
    if isinstance(tensor, np.ndarray):
        return False
    kind: Any = type(tensor)
    name = framework(kind)
    if name == "torch":
        return bool(tensor.is_cuda)
    if name == "tensorflow":
        return "GPU" in (getattr(tensor, "device", None) or "")
    try:
        if hasattr(tensor, "__dlpack_device__"):
            return tensor.__dlpack_device__()[0] in dlpack.ON_GPU
    except Exception:
        return False  # such as a tracer of jax, which `arrays.view` rejects with a message
    return hasattr(tensor, "__cuda_array_interface__")
