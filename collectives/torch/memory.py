"""Tensors in memory that the other ranks of this host can map: ``empty``, ``zeros``, ``empty_like``.

The collectives read and write such tensors, and contiguous views of them, where they lie. See
`collectives.worlds.memory`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.tensors import detection
from collectives.tensors.arena import arena

_BYTE = np.dtype(np.uint8)


def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> torch.Tensor:
    """An uninitialised tensor, as ``torch.empty``, in memory that peers can map.

    Args:
        size: the dimensions, each by itself or as one sequence.
        dtype: torch's default dtype if it is None; any of torch's, bfloat16 included.
        device: the CPU, which is also the default even if torch's default device is another.
        requires_grad: whether autograd records operations on it.

    Returns:
        A contiguous ``torch.Tensor``, aligned to 64 bytes, whose storage cannot be resized.

    Raises:
        InvalidArgumentError: a negative dimension, or a device that is not the CPU.
        InvalidTypeError: dimensions that are not ints, or a dtype that is not torch's.
        RuntimeError: as of torch: a gradient of a dtype that has none.
        MemoryError, ValueError: as of NumPy: no memory, or no address for so much.

    Example:
        >>> hvd.empty(2, 3, dtype=torch.bfloat16).shape
        torch.Size([2, 3])
    """
    return _allocate(_dimensions(size), dtype, device, requires_grad)


def zeros(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> torch.Tensor:
    """A tensor of zeros, as ``torch.zeros``, in memory that peers can map; arguments and errors as of `empty`.

    Example:
        >>> hvd.zeros(3)
        tensor([0., 0., 0.])
    """
    return _allocate(_dimensions(size), dtype, device, requires_grad, zero=True)


def empty_like(
    input: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> torch.Tensor:
    """An uninitialised tensor with the shape and dtype of another one, in memory that peers can map.

    Unlike the result of ``torch.empty_like``, it is always contiguous.

    Args:
        input: a tensor on the CPU, or on any device if ``device`` is given.
        dtype: in place of the tensor's.
        device, requires_grad: as of `empty`.

    Raises:
        InvalidArgumentError: ``input`` is not on the CPU and ``device`` is not given.
        InvalidTypeError: ``input`` is not a tensor.

    Example:
        >>> hvd.empty_like(torch.ones(2, 3)).shape
        torch.Size([2, 3])
    """
    if not isinstance(input, torch.Tensor):
        raise InvalidTypeError(f"input: expected a torch.Tensor, got a {detection.describe(input)} [T15]")
    dtype, device = input.dtype if dtype is None else dtype, input.device if device is None else device
    return _allocate(tuple(input.shape), dtype, device, requires_grad)


def _allocate(
    shape: tuple[int, ...], dtype: Any, device: Any, requires_grad: bool, *, zero: bool = False
) -> torch.Tensor:
    if device is not None and torch.device(device).type != "cpu":
        raise InvalidArgumentError(
            f"device: expected cpu, got {device}: this function allocates host memory only; tensors on GPUs need no "
            "such allocation [T41]"
        )
    kind = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(kind, torch.dtype):
        raise InvalidTypeError(f"dtype: expected a torch.dtype, got {dtype!r} [T61]")
    nbytes = math.prod(shape) * kind.itemsize
    if nbytes:
        memory = arena.empty(nbytes, _BYTE)
        if zero:
            memory.fill(0)
        tensor = over(memory, shape, kind)
    else:
        tensor = torch.empty(shape, dtype=kind, device="cpu")
    return tensor.requires_grad_() if requires_grad else tensor


def over(memory: npt.NDArray[np.uint8], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose storage is this array of bytes."""
    # Not a view of the tensor of bytes, because autograd treats views differently.
    storage = torch.from_numpy(memory).untyped_storage()
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, tuple(shape))  # type: ignore[call-overload]


def _dimensions(size: tuple[int | Sequence[int], ...]) -> tuple[int, ...]:
    dimensions: Any = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size or None
    try:
        shape = tuple(dimension.__index__() for dimension in dimensions)
    except (AttributeError, TypeError):
        raise InvalidTypeError(f"size: expected ints, or one sequence of ints, got {dimensions!r} [T62]") from None
    if any(dimension < 0 for dimension in shape):
        raise InvalidArgumentError(f"size: expected dimensions of 0 or more, got {dimensions!r} [T63]")
    return shape
