"""The frameworks' tensors in host memory: reading them in place, and results in their types.

This module imports no framework: a framework's tensor exists only if the program has imported the framework.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.base import dtypes
from collectives.base.errors import InvalidTypeError
from collectives.tensors import detection

Array = npt.NDArray[Any]
Wrap = Callable[[Array], Any]
Read = tuple[Array, Wrap | None]
"""A tensor's memory, and the conversion of results of its dtype to its type (None: results stay arrays)."""


def read_only(array: Array) -> Array:
    """Make an array read-only, and return it."""
    array.flags.writeable = False
    return array


def plain_torch(tensor: Any, argument: str) -> tuple[Any, bool]:
    """Return a dense torch tensor detached from autograd, and whether it is lazily conjugated or negated.

    The memory of a lazy tensor holds other values than the tensor.
    """
    if tensor.layout is not sys.modules["torch"].strided:
        _refuse_nested(tensor, argument)
        raise InvalidTypeError(
            f"{argument}: expected a dense tensor, got layout {tensor.layout}; pass {argument}.to_dense() [T31]"
        )
    plain = tensor.detach() if tensor.requires_grad else tensor
    return plain, plain.is_conj() or plain.is_neg()


def _refuse_nested(tensor: Any, argument: str) -> None:
    if tensor.is_nested:
        raise InvalidTypeError(
            f"{argument}: expected one tensor, got a nested one; pass each of {argument}.unbind(), or "
            f"{argument}.to_padded_tensor(...) [T32]"
        )


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
        # NumPy lacks bfloat16, also through DLPack: the same bits are passed as int16.
        half = plain.dtype is torch.bfloat16
        array = plain.view(torch.int16).numpy().view(dtypes.resolve("bfloat16")) if half else plain.numpy()
    except (RuntimeError, TypeError) as error:
        _refuse_nested(tensor, argument)
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise InvalidTypeError(
                f"{argument}: expected a tensor with elements, got one inside a torch.func transform (grad, vmap, "
                "jvp, ...): only the functions of collectives.torch that block and return a new tensor, such as "
                "collectives.torch.allreduce, work there; call all others outside [T46]"
            ) from None
        array = _read_float8(plain, argument, error)
    return read_only(array) if lazy else array, _wrap_torch


def _read_float8(tensor: Any, argument: str, error: Exception) -> Array:
    """The memory of a torch tensor that NumPy has refused with ``error``, if it is of a float8."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name in dtypes.FLOAT8:
        array: Array = tensor.view(sys.modules["torch"].uint8).numpy().view(dtypes.resolve(name))
        return array
    if name in dtypes.NAMES:
        raise InvalidTypeError(f"{argument}: a {detection.describe(tensor)} cannot be read: {error} [T14]") from error
    raise InvalidTypeError(
        f"{argument}: a {detection.describe(tensor)} of dtype {tensor.dtype} is not supported; {dtypes.OFFER}. "
        "Convert the tensor, or pass the numbers under it: tensor.view(torch.uint8), torch.view_as_real(tensor) or "
        "tensor.int_repr() [T25]"
    )


def _wrap_torch(array: Array) -> Any:
    torch: Any = sys.modules["torch"]
    name = dtypes.name(array.dtype)
    if name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if name in dtypes.FLOAT8:
        return torch.from_numpy(array.view(np.uint8)).view(getattr(torch, name))
    return torch.from_numpy(array)


def _read_jax(tensor: Any, argument: str) -> Read | None:
    jax: Any = sys.modules["jax"]
    if isinstance(tensor, jax.core.Tracer):
        raise InvalidTypeError(
            f"{argument}: expected a concrete jax array, got a tracer; call collectives.jax instead, or call "
            "collectives outside jit, grad and vmap [T47]"
        )
    platforms = {device.platform for device in tensor.devices()}
    if platforms == {"gpu"}:
        return None
    if platforms != {"cpu"}:
        raise detection.misplaced(tensor, argument, ", ".join(sorted(platforms)))
    return read_only(np.asarray(tensor).view()), _wrap_jax


def _wrap_jax(array: Array) -> Any:
    """Convert a result, which is not written to again, to a jax array; without a copy if aligned to 64 bytes."""
    jax: Any = sys.modules["jax"]
    try:
        return jax.device_put(array, may_alias=True)
    except TypeError:  # before 0.4.32
        return jax.numpy.asarray(array)


def _read_tensorflow(tensor: Any, argument: str) -> Read | None:
    tensorflow: Any = sys.modules["tensorflow"]
    if not hasattr(tensor, "numpy"):
        raise InvalidTypeError(
            f"{argument}: expected an eager tensor, got a symbolic {detection.describe(tensor)}; call it outside "
            "tf.function, or call collectives.tensorflow instead [T48]"
        )
    device = tensor.device or "CPU"
    if "GPU" in device:
        return None
    if "CPU" not in device:
        raise detection.misplaced(tensor, argument, device)
    # Not numpy(), which copies. A variable's value shares its memory, which TensorFlow does not write to while the
    # value lives.
    array = np.asarray(tensor.read_value() if isinstance(tensor, tensorflow.Variable) else tensor)
    return read_only(array.view()), wrap_tensorflow


_TENSORFLOW_ALIGNMENT = 64


def wrap_tensorflow(array: Array) -> Any:
    """Convert an array to an eager tensor; without a copy if aligned to 64 bytes, as TensorFlow's kernels require."""
    tensorflow: Any = sys.modules["tensorflow"]
    if dtypes.is_float8(array.dtype):  # neither DLPack nor a bitcast knows it
        return tensorflow.convert_to_tensor(array)
    if array.__array_interface__["data"][0] % _TENSORFLOW_ALIGNMENT or not array.flags.carray or array.size == 0:
        return tensorflow.convert_to_tensor(array)
    if dtypes.name(array.dtype) == "bfloat16":  # NumPy cannot export it through DLPack
        return tensorflow.bitcast(wrap_tensorflow(array.view(np.uint16)), tensorflow.bfloat16)
    return tensorflow.experimental.dlpack.from_dlpack(array.__dlpack__())


READERS: dict[str, Callable[[Any, str], Read | None]] = {
    "torch": _read_torch,
    "cupy": lambda tensor, argument: None,  # always on a GPU
    "jax": _read_jax,
    "tensorflow": _read_tensorflow,
}
"""Readers by framework, as `detection.framework` names it; each returns a tensor's memory, or None on a GPU.

jax's arrays and TensorFlow's tensors are immutable and therefore read-only here.
"""
