"""What can be said about anybody's tensor without touching its numbers: its type, its framework, and how it lies in
memory.

Nothing here imports a framework. A framework's tensor can only exist in a program that has imported the framework, so
that ``sys.modules`` is where it is found.
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


NO_ELEMENTS = "on meta, where tensors have a shape and no elements: give it memory first, as by module.to_empty(device=...), and values"
"""What is wrong with a tensor of torch's meta device, and what to do."""
Extent = tuple[int, int, bool, Strided | None]
"""What an operation uses of a tensor's memory: lowest address, the one behind the highest, whether it is written, and
the layout where that may have gaps."""
_EFFORT: Any = 100_000
"""Steps for which NumPy may look for a byte that two tensors have in common."""


def describe(tensor: Any) -> str:
    """The type of a tensor as messages call it: ``numpy.ndarray``, ``list``, ``torch.Tensor``."""
    kind = type(tensor)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def misplaced(tensor: Any, argument: str, place: str) -> InvalidTypeError:
    """The refusal of memory that is out of reach, or of a tensor that has none."""
    if place == "meta":
        return InvalidTypeError(f"{argument}: expected a tensor with elements, got a {describe(tensor)} {NO_ELEMENTS}")
    return InvalidTypeError(
        f"{argument}: expected memory of the CPU or of an NVIDIA GPU, got a {describe(tensor)} on {place}: copy it "
        f"to the host first"
    )


def frozen(tensor: Any, argument: str, shape: Sequence[int], dtype: Any) -> InvalidArgumentError:
    """The refusal to write to what is read-only."""
    return InvalidArgumentError(
        f"{argument}: an in-place operation needs a writable tensor, got a read-only {describe(tensor)} of shape "
        f"{tuple(shape)} and dtype"
        f" {dtype}; use the operation that returns a new tensor, or copy it first"
    )


def overlapping(tensor: Any, argument: str, shape: Sequence[int], strides: Sequence[int]) -> InvalidArgumentError:
    """The refusal to write to elements that share memory."""
    return InvalidArgumentError(
        f"{argument}: an in-place operation needs elements that do not share memory, got a {describe(tensor)} of "
        f"shape {tuple(shape)} and"
        f" strides {tuple(strides)} (a broadcast or sliding view); copy it first"
    )


def strided_extent(address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int, writes: bool) -> Extent:
    """The extent of a tensor that has elements; strides in bytes."""
    reaches = [stride * (length - 1) for stride, length in zip(strides, shape, strict=True)]
    start, end = (
        address + sum(min(0, reach) for reach in reaches),
        address + sum(max(0, reach) for reach in reaches) + itemsize,
    )
    return start, end, writes, Strided(address, tuple(shape), tuple(strides), itemsize)


def share_a_byte(one: Extent, other: Extent) -> bool:
    """Whether two tensors whose addresses overlap have a byte in common; if that is too hard to tell, they count as if
    they had."""
    if one[3] is None and other[3] is None:
        return True
    try:
        return bool(np.shares_memory(_laid_out(one), _laid_out(other), max_work=_EFFORT))
    except np.exceptions.TooHardError:
        return True


def _laid_out(extent: Extent) -> Any:
    """An array that lies there, which is never read: the memory may be a GPU's, or free by now."""
    start, end, _, strided = extent
    address, shape, strides, itemsize = strided or (start, (end - start,), None, 1)
    interface = {"version": 3, "data": (address, False), "shape": shape, "strides": strides, "typestr": f"|V{itemsize}"}
    return np.asarray(SimpleNamespace(__array_interface__=interface))


@functools.lru_cache(maxsize=256)
def framework(kind: Any) -> str | None:
    """The module whose tensor a type is: "torch", "cupy", "jax", "tensorflow"; None for all others."""
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
    """The module that can make this tensor's type again from DLPack, or None."""
    if not hasattr(tensor, "__dlpack__"):
        return None
    if hasattr(tensor, "__array_namespace__"):
        module = tensor.__array_namespace__()
    else:
        module = sys.modules.get(type(tensor).__module__.partition(".")[0])
    return module if hasattr(module, "from_dlpack") else None


def is_contiguous(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether the elements lie one behind the other in C order; strides in bytes."""
    if 0 in shape:
        return True
    expected = itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


def may_overlap(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether two indices might mean the same memory; exact for every layout that slicing, transposing and broadcasting
    make."""
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
    """Whether a tensor lies on a GPU; False for whatever cannot say."""
    if isinstance(tensor, np.ndarray):
        return False
    kind: Any = type(tensor)
    known = framework(kind)
    if known == "torch":
        return bool(tensor.is_cuda)
    if known == "tensorflow":
        return "GPU" in (getattr(tensor, "device", None) or "")
    try:
        if hasattr(tensor, "__dlpack_device__"):
            return tensor.__dlpack_device__()[0] in (dlpack.CUDA, dlpack.MANAGED)
    except Exception:
        return False  # a tracer of jax, say: the door has words for it
    return hasattr(tensor, "__cuda_array_interface__")
