"""Compression: tensors are sent as float16 or bfloat16, and results have the caller's dtype.

``compression=Compression.fp16`` or ``Compression.bf16`` halves the bytes of float32 and quarters those of float64;
other dtypes are sent unchanged. float16 has 11 significant bits, and values beyond 65504 become infinity; bfloat16 has
8 and float32's range.

A compressor is any object with ``compress`` and ``decompress``, as in Horovod. The built-in ones also have ``wire``,
the dtype that is sent: the engine converts in its own buffers and never calls their ``compress``, which serves
compressors built upon them. It returns the caller's type on the caller's device (a torch tensor for a torch tensor),
and a NumPy array for tensors of no known framework.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.base import dtypes
from collectives.base.errors import InvalidTypeError
from collectives.tensors import detection
from collectives.tensors.arrays import View, view
from collectives.tensors.halves import cast

_Array = npt.NDArray[Any]
_Dtype = np.dtype[Any]
_COMPRESSED = (np.dtype(np.float32), np.dtype(np.float64))


class Compressor:
    """Interface of a compressor. Inheritance is optional: a class with static methods or an instance works, too."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send and a context for ``decompress``."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """Return the original tensor of a received one."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Send every tensor unchanged."""

    @staticmethod
    def wire(dtype: _Dtype) -> _Dtype | None:
        """The dtype in which a tensor of ``dtype`` is sent; None: its own."""
        return None

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, context: None) -> Any:
        return tensor


class _HalfCompressor(Compressor):
    """Send float32 and float64 as ``half``."""

    half: str

    @classmethod
    def wire(cls, dtype: _Dtype) -> _Dtype | None:
        return dtypes.resolve(cls.half) if dtype in _COMPRESSED else None

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return the tensor as ``half``, in the caller's type, and its dtype; or the tensor itself and None."""
        kind: Any = type(tensor)
        framework = detection.framework(kind)
        if framework is None:
            seen = view(tensor)
            wire = cls.wire(seen.dtype)
            return (tensor, None) if wire is None else (_converted(seen, wire), seen.dtype)
        namespace: Any = sys.modules["jax.numpy" if framework == "jax" else framework]
        if tensor.dtype not in (namespace.float32, namespace.float64):
            return tensor, None
        # CuPy uses NumPy's dtypes, and NumPy has no attribute for bfloat16.
        half = dtypes.resolve(cls.half) if framework == "cupy" else getattr(namespace, cls.half)
        return _cast(framework, tensor, half), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Any, context: Any) -> Any:
        if context is None:
            return tensor
        kind: Any = type(tensor)
        framework = detection.framework(kind)
        return _converted(view(tensor), context) if framework is None else _cast(framework, tensor, context)


class FP16Compressor(_HalfCompressor):
    """Send float32 and float64 as float16; values beyond 65504 become infinity."""

    half = "float16"


class BF16Compressor(_HalfCompressor):
    """Send float32 and float64 as bfloat16: float32's range, with 8 significant bits."""

    half = "bfloat16"


class Compression:
    """The built-in compressors, for ``compression=``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


BUILT_IN = (NoneCompressor, FP16Compressor, BF16Compressor)
"""Compressors defined by ``wire`` alone. Subclasses are not among them, because their ``compress`` may do more."""


def is_built_in(compression: Any) -> bool:
    """Whether a compressor is one of `BUILT_IN`."""
    return any(compression is built_in for built_in in BUILT_IN)


def wire_name(compression: Any) -> str | None:
    """The name of the dtype in which a built-in compressor sends tensors; None: their own."""
    return getattr(compression, "half", None)


def named(wire: str | None) -> type[Compressor] | None:
    """The built-in compressor of a `wire_name`; None: no compression."""
    return next((kind for kind in (FP16Compressor, BF16Compressor) if kind.half == wire), None)


def compress_all(compression: Any, tensors: Sequence[Any]) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """Compress tensors by a compressor's methods.

    Returns:
        The compressed tensors, and the function that decompresses the results of an operation on them.
    """
    pairs = [compression.compress(tensor) for tensor in tensors]

    def restore(results: Sequence[Any]) -> list[Any]:
        return [compression.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)]

    return [compressed for compressed, _ in pairs], restore


def check(compression: Any) -> None:
    """Reject an object that is not a compressor.

    Raises:
        InvalidTypeError: ``compress`` or ``decompress`` is missing, or cannot be called with (tensor) and (tensor,
            context) respectively.
    """
    if is_built_in(compression):
        return
    expected = (
        "compression: expected "
        f"Compression.{', Compression.'.join(name for name in vars(Compression) if name[0] != '_')}, or a class or "
        "instance with compress(tensor) -> (tensor, context) and decompress(tensor, context) -> tensor"
    )
    kind = compression.__name__ if isinstance(compression, type) else f"{type(compression).__name__} {compression!r}"
    for name, arguments in (("compress", ("tensor",)), ("decompress", ("tensor", "context"))):
        method = getattr(compression, name, None)
        if not callable(method):
            raise InvalidTypeError(f"{expected}; got {kind}, which has no method {name!r} [A48]")
        if not _takes(method, arguments):
            # Most likely a class whose methods need an instance.
            advice = "; pass an instance, or make it a @staticmethod" if isinstance(compression, type) else ""
            raise InvalidTypeError(
                f"{expected}; got {kind}, whose {name} cannot be called with ({', '.join(arguments)}){advice} [A49]"
            )


def _takes(method: Any, arguments: tuple[str, ...]) -> bool:
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a method written in C, without a signature
        return True
    return True


def _cast(framework: str, tensor: Any, dtype: Any) -> Any:
    """Cast a tensor with its own framework, so that it stays on its device."""
    if framework == "torch":
        return tensor.to(dtype)
    if framework == "tensorflow":
        return sys.modules["tensorflow"].cast(tensor, dtype)
    return tensor.astype(dtype)


def _converted(seen: View, dtype: _Dtype) -> _Array:
    out = np.empty(seen.array.size, dtype)
    cast(seen.array, out)
    return out.reshape(seen.shape)
