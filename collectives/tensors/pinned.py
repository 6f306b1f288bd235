"""Memory that stays where it is: what an operation that is bound to a tensor's memory must know before each start.

While a persistent operation holds a NumPy array, NumPy refuses to resize it. A torch tensor may be given other memory
(``set_``, ``.data = ...``) or another layout at any time, so it is looked at before every start.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.base.errors import InvalidTypeError
from collectives.tensors import detection

_IMMUTABLE = {"jax": "JAX arrays never change", "tensorflow": "TensorFlow's tensors do not stay at one address"}


def check_mutable(tensor: Any) -> None:
    """Raise InvalidTypeError for a tensor whose elements never change, so that a second start would be pointless."""
    kind: Any = type(tensor)
    why = _IMMUTABLE.get(detection.framework(kind) or "")
    if why is None and isinstance(tensor, (bool, int, float, complex, bytes, np.generic)):
        why = "numbers never change"
    if why is not None:
        raise InvalidTypeError(
            f"tensor: a persistent operation reads and writes the same memory in every start, and {why}; call the "
            f"ordinary operation with this {detection.describe(tensor)}, or keep the values in a NumPy array [W32]"
        )


class Pin:
    """Tensors in host memory to which an operation is bound: NumPy arrays and torch tensors.

    Args:
        tensors: for which `can_pin` is true.

    Attributes:
        moved: tells whether a tensor has been given other memory or another layout; None if none of them can be.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._references = [weakref.ref(tensor) for tensor in tensors if isinstance(tensor, np.ndarray)]
        """NumPy resizes no array to which there is a weak reference."""
        self._tensors = [tensor for tensor in tensors if not isinstance(tensor, np.ndarray)]
        self.moved: Callable[[], bool] | None = None
        if len(self._tensors) == 1:
            self.moved = _watch(self._tensors[0])
        elif self._tensors:
            self._layouts = [_layout(tensor) for tensor in self._tensors]
            self.moved = self._any_moved

    def _any_moved(self) -> bool:
        return [(t.data_ptr(), t.shape, t.stride()) for t in self._tensors] != self._layouts


def can_pin(tensor: Any) -> bool:
    """Whether a tensor on the CPU can be pinned."""
    kind: Any = type(tensor)
    return isinstance(tensor, np.ndarray) or detection.framework(kind) == "torch"


def _layout(tensor: Any) -> tuple[int, Any, Any]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _watch(tensor: Any) -> Callable[[], bool]:
    at, shape, strides = _layout(tensor)

    def moved() -> bool:
        return bool(tensor.data_ptr() != at or tensor.shape != shape or tensor.stride() != strides)

    return moved
