"""The frameworks' tensors in host memory: how each is read in place, and how a result becomes one of its tensors.

Nothing here imports a framework: a tensor of one exists only where the program has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.base.dtypes import SUPPORTED, resolve
from collectives.base.errors import InvalidTypeError
from collectives.tensors import detection

Array = npt.NDArray[Any]
Wrap = Callable[[Array], Any]
Read = tuple[Array, Wrap | None]
"""A tensor's memory, and what turns a result of the same dtype into the tensor's type (None: a result stays an
array)."""


def frozen(array: Array) -> Array:
    """The array itself, made read-only."""
    array.flags.writeable = False
    return array


def plain_torch(tensor: Any, argument: str) -> tuple[Any, bool]:
    """A dense torch tensor outside of autograd, and whether it is lazy: conjugated or negated only when read, so that
    its memory holds other numbers."""
    if tensor.layout is not sys.modules["torch"].strided:
        raise InvalidTypeError(
            f"{argument}: expected a dense tensor, got layout {tensor.layout}; pass {argument}.to_dense()"
        )
    plain = tensor.detach() if tensor.requires_grad else tensor
    return plain, plain.is_conj() or plain.is_neg()


def _read_torch(tensor: Any, argument: str) -> Read | None:
    torch: Any = sys.modules["torch"]
    if tensor.is_cuda:
        return None
    if not tensor.is_cpu:
        raise detection.misplaced(tensor, argument, str(tensor.device))
    plain, lazy = plain_torch(tensor, argument)
    if lazy:
        plain = plain.resolve_conj().resolve_neg()
    try:
        # bfloat16: NumPy has no such type of its own, nor does DLPack bring it one. The same bits go under another
        # name.
        half = plain.dtype is torch.bfloat16
        array = plain.view(torch.int16).numpy().view(resolve("bfloat16")) if half else plain.numpy()
    except (RuntimeError, TypeError) as error:
        raise InvalidTypeError(f"{argument}: a torch tensor of dtype {tensor.dtype} cannot be read: {error}") from error
    return frozen(array) if lazy else array, _wrap_torch


def _wrap_torch(array: Array) -> Any:
    torch: Any = sys.modules["torch"]
    if SUPPORTED[array.dtype] == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _read_cupy(tensor: Any, argument: str) -> None:
    """There is no CuPy array but on a GPU."""


def _read_jax(tensor: Any, argument: str) -> Read | None:
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
    return frozen(np.asarray(tensor).view()), _wrap_jax


def _wrap_jax(array: Array) -> Any:
    """A result, which nobody is going to write to, as a jax array: without a copy if it is aligned to 64 bytes."""
    jax: Any = sys.modules["jax"]
    try:
        return jax.device_put(array, may_alias=True)
    except TypeError:  # before 0.4.32
        return jax.numpy.asarray(array)


def _read_tensorflow(tensor: Any, argument: str) -> Read | None:
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
    return frozen(array.view()), wrap_tensorflow


_TENSORFLOW_ALIGNMENT = 64


def wrap_tensorflow(array: Array) -> Any:
    """An array as an eager tensor, without a copy if it is aligned to 64 bytes, as TensorFlow's kernels want their
    tensors to be."""
    tensorflow: Any = sys.modules["tensorflow"]
    if array.__array_interface__["data"][0] % _TENSORFLOW_ALIGNMENT or not array.flags.carray or array.size == 0:
        return tensorflow.convert_to_tensor(array)
    if SUPPORTED[array.dtype] == "bfloat16":  # DLPack brings NumPy no such type
        return tensorflow.bitcast(wrap_tensorflow(array.view(np.uint16)), tensorflow.bfloat16)
    return tensorflow.experimental.dlpack.from_dlpack(array.__dlpack__())


READERS: dict[str, Callable[[Any, str], Read | None]] = {
    "torch": _read_torch,
    "cupy": _read_cupy,
    "jax": _read_jax,
    "tensorflow": _read_tensorflow,
}
"""Readers by framework, as `detection.framework` names it: a tensor's memory, or None if it is on a GPU. jax's arrays
and TensorFlow's tensors are immutable, so read-only here."""
