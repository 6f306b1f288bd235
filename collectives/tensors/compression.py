"""Compression: tensors travel as halves, and come back in the caller's dtype.

``compression=Compression.fp16`` or ``Compression.bf16`` halves the bytes of float32 and quarters those of float64;
everything else is sent as it is. float16 has 11 significant bits, and what lies beyond 65504 becomes infinity; bfloat16
has 8 and float32's range.

A compressor is anything with ``compress`` and ``decompress``, as in Horovod. The built-in ones also say what travels,
``wire``: the engine then converts in its own buffers, and never calls their ``compress``. That is for compressors made
of them: it gives back the caller's type, on the caller's device (a torch tensor for a torch tensor), and a NumPy array
for what no framework owns.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.base import dtypes
from collectives.base.errors import InvalidTypeError
from collectives.tensors import detection
from collectives.tensors.arrays import View, view
from collectives.tensors.reduction import import_numkong, quiet

_Array = npt.NDArray[Any]
_Dtype = np.dtype[Any]
_Conversion = Callable[[_Array, _Array], object]
_FLOAT32 = np.dtype(np.float32)
_COMPRESSED = (_FLOAT32, np.dtype(np.float64))


class Compressor:
    """What a compressor has. Inherit from it or not: a class with static methods will do, and so will an instance."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """What travels instead of the tensor, and a context: whatever ``decompress`` needs to bring the tensor back."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """What arrived, as the tensor would have."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Every tensor travels as it is."""

    @staticmethod
    def wire(dtype: _Dtype) -> _Dtype | None:
        """The dtype in which a tensor of ``dtype`` travels; None: its own."""
        return None

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, context: None) -> Any:
        return tensor


class FP16Compressor(Compressor):
    """float32 and float64 travel as float16; beyond 65504 they become infinity."""

    @staticmethod
    def wire(dtype: _Dtype) -> _Dtype | None:
        """The dtype in which a tensor of ``dtype`` travels; None: its own."""
        return np.dtype(np.float16) if dtype in _COMPRESSED else None

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return _compress(tensor, "float16")

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        return _decompress(tensor, context)


class BF16Compressor(Compressor):
    """float32 and float64 travel as bfloat16: float32's range, with 8 significant bits."""

    @staticmethod
    def wire(dtype: _Dtype) -> _Dtype | None:
        """The dtype in which a tensor of ``dtype`` travels; None: its own."""
        return dtypes.resolve("bfloat16") if dtype in _COMPRESSED else None

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return _compress(tensor, "bfloat16")

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        return _decompress(tensor, context)


class Compression:
    """The built-in compressors, for ``compression=``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


BUILT_IN = (NoneCompressor, FP16Compressor, BF16Compressor)
"""Those whose ``wire`` says all. A subclass of one is not among them, because its ``compress`` may do more."""


def named(wire: str | None) -> type[Compressor] | None:
    """The built-in compressor whose tensors travel as ``wire``; None: there is nothing to compress."""
    return {"float16": FP16Compressor, "bfloat16": BF16Compressor}.get(wire or "")


def check(compression: Any) -> None:
    """Refuse what is no compressor.

    Raises:
        InvalidTypeError: no ``compress`` and ``decompress``, or they cannot be called with (tensor) and (tensor,
            context).
    """
    if any(compression is known for known in BUILT_IN):
        return
    expected = (
        f"compression: expected "
        f"Compression.{', Compression.'.join(name for name in vars(Compression) if name[0] != '_')}, or a class or"
        " instance with compress(tensor) -> (tensor, context) and decompress(tensor, context) -> tensor"
    )
    kind = compression.__name__ if isinstance(compression, type) else f"{type(compression).__name__} {compression!r}"
    for name, arguments in (("compress", ("tensor",)), ("decompress", ("tensor", "context"))):
        method = getattr(compression, name, None)
        if not callable(method):
            raise InvalidTypeError(f"{expected}; got {kind}, which has no method {name!r}")
        if not _takes(method, arguments):
            # Most likely a class whose methods need an instance.
            advice = "; pass an instance, or make it a @staticmethod" if isinstance(compression, type) else ""
            raise InvalidTypeError(
                f"{expected}; got {kind}, whose {name} cannot be called with ({', '.join(arguments)}){advice}"
            )


def _takes(method: Any, arguments: tuple[str, ...]) -> bool:
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a method written in C that does not tell what it takes
        return True
    return True


def _compress(tensor: Any, half: str) -> tuple[Any, Any]:
    """A tensor of the caller's type in ``half``, and the tensor's dtype; or the tensor itself and None."""
    kind: Any = type(tensor)
    framework = detection.framework(kind)
    if framework is not None:
        namespace: Any = sys.modules["jax.numpy" if framework == "jax" else framework]
        dtype = tensor.dtype
        if dtype not in (namespace.float32, namespace.float64):
            return tensor, None
        # CuPy's dtypes are NumPy's, where bfloat16 is not among the names of a module.
        return _cast(
            framework, tensor, dtypes.resolve(half) if framework == "cupy" else getattr(namespace, half)
        ), dtype
    seen = view(tensor)
    return (_converted(seen, dtypes.resolve(half)), seen.dtype) if seen.dtype in _COMPRESSED else (tensor, None)


def _decompress(tensor: Any, context: Any) -> Any:
    if context is None:
        return tensor
    kind: Any = type(tensor)
    framework = detection.framework(kind)
    return _converted(view(tensor), context) if framework is None else _cast(framework, tensor, context)


def _cast(framework: str, tensor: Any, dtype: Any) -> Any:
    """A tensor in another dtype, by its own framework, so that it stays on its device."""
    if framework == "torch":
        return tensor.to(dtype)
    if framework == "tensorflow":
        return sys.modules["tensorflow"].cast(tensor, dtype)
    return tensor.astype(dtype)


def _converted(seen: View, dtype: _Dtype) -> _Array:
    out = np.empty(seen.array.size, dtype)
    cast(seen.array, out)
    return out.reshape(seen.shape)


# ---- conversion
# ----------------------------------------------------------------------------------------------------------

_BLOCK = 65536
"""Elements that are in float32 at a time between float64 and a half: 256 KiB, which stay in the L2 cache."""


def cast(source: _Array, out: _Array) -> None:
    """Write ``source`` into ``out`` in its dtype: float16, bfloat16, float32 or float64, either way, without warnings.

    Rounds to the nearest, ties to even. What is too large for ``out`` becomes infinity, what is too small zero; NaN
    stays NaN, maybe with other bits. Widening is exact, and narrowing rounds once; but from float64 to a half it goes
    through float32, as in torch and ml_dtypes. A number that float32 puts just between two halves (one in 20,000, for
    float16) may then become the farther one, which is farther by 1/8000 of their distance at most.

    With numkong, 1e6 elements of float32 take 0.1 to 0.2 ms (NumPy: 2.5 ms to float16, 0.4 ms to bfloat16), of float64
    0.3 to 0.4 ms.

    Args:
        source: 1-D, contiguous, aligned, in native byte order.
        out: the same, equally long, in memory of its own.
    """
    if source.size == 0:
        return
    halves = dtypes.is_half(source.dtype) + dtypes.is_half(out.dtype)
    with quiet():
        if halves == 0 or source.dtype == out.dtype or _FLOAT32 in (source.dtype, out.dtype):
            _conversion(source.dtype, out.dtype)(source, out)
            return
        first, second = _conversion(source.dtype, _FLOAT32), _conversion(_FLOAT32, out.dtype)
        single = np.empty(min(_BLOCK, source.size), _FLOAT32)
        for start in range(0, source.size, _BLOCK):
            block = source[start : start + _BLOCK]
            between = single[: block.size]
            first(block, between)
            second(between, out[start : start + _BLOCK])


@functools.cache
def _conversion(given: _Dtype, wanted: _Dtype) -> _Conversion:
    """NumPy's conversion; but between float32 and a half numkong's, which is nearly as fast as a copy. Call it under
    ``quiet()``."""
    half = next((dtype for dtype in (given, wanted) if dtypes.is_half(dtype)), None)
    numkong = None if half is None or given == wanted else _numkong(half)
    return _convert_numpy if numkong is None else _with_numkong(numkong, wanted)


def _convert_numpy(source: _Array, out: _Array) -> None:
    np.copyto(out, source, casting="unsafe")


def _with_numkong(numkong: Any, wanted: _Dtype) -> _Conversion:
    name = dtypes.name(wanted)
    astype = numkong.astype

    def convert(source: _Array, out: _Array) -> None:
        astype(_tensor(numkong, source), name, out=_tensor(numkong, out))

    def convert_unless_nan(source: _Array, out: _Array) -> None:
        # numkong (7.8.6) rounds NaN as if it were a number: CUDA's, 0x7fffffff, becomes -0.0. The largest element tells
        # of any NaN.
        if np.isnan(np.maximum.reduce(source)):
            _convert_numpy(source, out)
        else:
            convert(source, out)

    return convert_unless_nan if name == "bfloat16" else convert


def _tensor(numkong: Any, array: _Array) -> Any:
    """An array as numkong takes it: bfloat16, which NumPy offers to nobody as a buffer, by its address."""
    if dtypes.name(array.dtype) != "bfloat16":
        return array
    return numkong.from_pointer(array.ctypes.data, array.shape, "bfloat16", owner=array)


@functools.cache
def _numkong(half: _Dtype) -> Any:
    """The module numkong, or None where it is missing or does not convert this half as NumPy and ml_dtypes do."""
    module = import_numkong()
    return module if module is not None and _agrees(module, half) else None


def _agrees(numkong: Any, half: _Dtype) -> bool:
    """A sample of all halves to float32, and of float32 back: subnormals, ties and their neighbours, infinities and
    NaN."""
    bits = np.arange(0, 1 << 16, 41, dtype=np.uint16)
    narrow, following = bits.view(half), (bits + np.uint16(1)).view(half)
    middle = (narrow.astype(_FLOAT32) + following.astype(_FLOAT32)) / np.float32(2)
    around = (middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf)))
    wide = np.concatenate([np.arange(0, 1 << 32, 1_000_003, dtype=np.uint32).view(_FLOAT32), *around])
    nans = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32).view(_FLOAT32)
    for given, dtype in ((narrow, _FLOAT32), (wide[~np.isnan(wide)], half), (nans, half)):
        found, wanted = np.empty(given.size, dtype), given.astype(dtype)
        try:
            _with_numkong(numkong, dtype)(given, found)
        except (TypeError, ValueError, AttributeError, RuntimeError):
            return False
        pattern = np.dtype(f"u{dtype.itemsize}")
        if not np.all((found.view(pattern) == wanted.view(pattern)) | (np.isnan(found) & np.isnan(wanted))):
            return False
    return True
