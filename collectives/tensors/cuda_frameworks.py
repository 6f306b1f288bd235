"""Tensors of each framework on GPUs: their memory, the stream that the framework uses, and results in its type.

torch and CuPy have their own readers; other frameworks are read through DLPack or ``__cuda_array_interface__``. Where a
framework offers no allocation, results are arrays of the device's own type, passed on through DLPack; with CuPy such
arrays also copy tensors of any layout.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from collectives.base import dtypes
from collectives.base.errors import InvalidTypeError
from collectives.device.protocol import Device, active
from collectives.device.selection import CupyProvider
from collectives.tensors import detection, streams
from collectives.tensors.cuda_protocols import Export, TensorMemory, by_dlpack, by_interface
from collectives.tensors.host_frameworks import plain_torch


class Framework:
    """Default for frameworks without specific support.

    Args:
        from_dlpack: makes the framework's tensor from an object with ``__dlpack__``; None: results stay arrays of the
            device's own type.
    """

    def __init__(self, from_dlpack: Callable[[Any], Any] | None = None) -> None:
        self._from_dlpack = from_dlpack

    def read(self, tensor: Any, argument: str, provider: CupyProvider, passed_stream: int | None) -> TensorMemory:
        """Find a tensor's memory; ``passed_stream`` is the stream that the caller passed, or None."""
        if hasattr(tensor, "__dlpack__"):
            return by_dlpack(tensor, tensor.__dlpack__, argument, provider, passed_stream)
        return by_interface(tensor, argument, provider, passed_stream)

    def current_stream(self, device: Device) -> int:
        """The current stream of the calling thread."""
        with active(device):
            return device.current_stream()

    def contiguous(self, tensor: TensorMemory, argument: str) -> tuple[Any, int]:
        """Return a copy in C order, made on the tensor's stream, and its address."""
        with active(tensor.device):
            strided = _strided(tensor)
            if strided is None:
                raise InvalidTypeError(
                    f"{argument}: expected a contiguous tensor, got one of shape {tensor.shape} and strides "
                    f"{tensor.strides} (bytes); make it contiguous first [T28]"
                )
            with _on_own_stream(tensor.device, tensor.stream):
                copy = sys.modules["cupy"].ascontiguousarray(strided)
        return copy, copy.data.ptr

    def store(self, tensor: TensorMemory, copy: Any, stream: int) -> None:
        """Write a copy in C order back into the tensor."""
        with active(tensor.device):
            if tensor.strides is None or detection.is_contiguous(tensor.shape, tensor.strides, tensor.dtype.itemsize):
                at = copy.__cuda_array_interface__["data"][0]
                tensor.device.copy(tensor.address, at, math.prod(tensor.shape) * tensor.dtype.itemsize, stream)
                return
            strided = _strided(tensor)
            with _on_own_stream(tensor.device, stream):
                strided[...] = copy

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: Device, stream: int) -> tuple[Any, int]:
        """Allocate a result. Returns it and its address."""
        with active(device):
            result = device.empty(shape, dtype, stream)
        return result, result.__cuda_array_interface__["data"][0]

    def wrap(self, result: Any, dtype: np.dtype[Any], device: Device, made_on: int, used_on: int) -> Any:
        """Convert a result of `empty`, which is filled before the later work of stream ``used_on``, to the caller's
        type."""
        if self._from_dlpack is None:
            return result
        with active(device):
            return self._from_dlpack(Export(result, dtype, device, used_on))


# ---- torch


class Torch(Framework):
    def read(self, tensor: Any, argument: str, provider: CupyProvider, passed_stream: int | None) -> TensorMemory:
        torch: Any = sys.modules["torch"]
        if tensor.device.type != "cuda" or torch.version.hip is not None:
            rocm = " (ROCm)" if torch.version.hip is not None else ""
            raise detection.misplaced(tensor, argument, f"{tensor.device}{rocm}")
        plain, lazy = plain_torch(tensor, argument)
        index = tensor.device.index
        stream = torch.cuda.current_stream(index).cuda_stream if passed_stream is None else passed_stream
        dtype = _from_torch(tensor.dtype, argument)
        if lazy:
            with self._on(stream, index):
                plain = plain.resolve_conj().resolve_neg()
        strides = None if plain.is_contiguous() else tuple(step * dtype.itemsize for step in plain.stride())
        try:
            address = plain.data_ptr()
        except RuntimeError as error:
            raise InvalidTypeError(
                f"{argument}: {detection.describe(tensor)} has no memory of its own: {error} [T12]"
            ) from error
        return TensorMemory(
            address, tuple(plain.shape), strides, dtype, provider.device(index), not lazy, stream, plain
        )

    def current_stream(self, device: Device) -> int:
        stream: int = sys.modules["torch"].cuda.current_stream(device.index).cuda_stream
        return stream

    def contiguous(self, tensor: TensorMemory, argument: str) -> tuple[Any, int]:
        with self._on(tensor.stream, tensor.device.index):
            copy = tensor.memory.contiguous()
        return copy, copy.data_ptr()

    def store(self, tensor: TensorMemory, copy: Any, stream: int) -> None:
        with self._on(stream, tensor.device.index):
            tensor.memory.copy_(copy)
        self._keep(copy, tensor.device, tensor.stream, stream)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: Device, stream: int) -> tuple[Any, int]:
        torch: Any = sys.modules["torch"]
        with self._on(stream, device.index):
            result = torch.empty(
                shape, dtype=getattr(torch, dtypes.name(dtype)), device=torch.device("cuda", device.index)
            )
        return result, result.data_ptr()

    def wrap(self, result: Any, dtype: np.dtype[Any], device: Device, made_on: int, used_on: int) -> Any:
        self._keep(result, device, made_on, used_on)
        return result

    def _keep(self, tensor: Any, device: Device, made_on: int, used_on: int) -> None:
        """Tell torch's allocator of the second stream that uses a tensor: it reuses freed memory in the order of the
        stream that this was allocated on."""
        if used_on != made_on:
            tensor.record_stream(self._stream(used_on, device.index))

    def _on(self, stream: int, index: int) -> contextlib.AbstractContextManager[Any]:
        """A context in which torch allocates and launches on this stream."""
        torch: Any = sys.modules["torch"]
        if torch.cuda.current_stream(index).cuda_stream == stream:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = torch.cuda.stream(self._stream(stream, index))
        return context

    def _stream(self, stream: int, index: int) -> Any:
        torch: Any = sys.modules["torch"]
        # ExternalStream(0) is a new stream of torch's pool, not the default stream.
        return torch.cuda.ExternalStream(stream, device=index) if stream else torch.cuda.default_stream(index)


@functools.lru_cache(maxsize=64)
def _from_torch(dtype: Any, argument: str) -> np.dtype[Any]:
    name = str(dtype).removeprefix("torch.")
    if name not in dtypes.NAMES:
        raise InvalidTypeError(
            f"{argument}: dtype {dtype} is not supported on a GPU; expected one of {', '.join(dtypes.NAMES)}: convert "
            "the tensor, or pass a view of its bytes, such as tensor.view(torch.uint8) [T21]"
        )
    return dtypes.resolve(name)


# ---- CuPy


class Cupy(Framework):
    def read(self, tensor: Any, argument: str, provider: CupyProvider, passed_stream: int | None) -> TensorMemory:
        device = provider.device(tensor.device.id)
        stream = self.current_stream(device) if passed_stream is None else passed_stream
        strides = None if tensor.flags.c_contiguous else tensor.strides
        return TensorMemory(tensor.data.ptr, tensor.shape, strides, tensor.dtype, device, True, stream, tensor)

    def current_stream(self, device: Device) -> int:
        stream: int = sys.modules["cupy"].cuda.get_current_stream(device.index).ptr
        return stream


_BITS = {dtype.itemsize: dtype for dtype in map(np.dtype, ("u1", "u2", "u4", "u8", "c16"))}
"""Dtypes of CuPy's by their bytes; it has no bfloat16."""


def _strided(tensor: TensorMemory) -> Any:
    """A tensor's memory as a CuPy array of elements of the same size; None if the device's arrays are not CuPy's."""
    cupy: Any = sys.modules.get("cupy")
    if cupy is None or not isinstance(tensor.device.empty((0,), np.dtype(np.uint8), tensor.stream), cupy.ndarray):
        return None
    memory = cupy.cuda.UnownedMemory(tensor.address, tensor.dtype.itemsize, tensor.memory, tensor.device.index)
    return cupy.ndarray(
        tensor.shape, _BITS[tensor.dtype.itemsize], cupy.cuda.MemoryPointer(memory, 0), strides=tensor.strides
    )


@contextlib.contextmanager
def _on_own_stream(device: Device, stream: int) -> Iterator[None]:
    """Order CuPy's work inside, on its current stream, after the stream's earlier work and before its later work."""
    current = device.current_stream()
    streams.order(device, stream, current)
    yield
    streams.order(device, current, stream)


# ---- JAX and TensorFlow


class Jax(Framework):
    """JAX's arrays are immutable: results are new arrays."""

    def read(self, tensor: Any, argument: str, provider: CupyProvider, passed_stream: int | None) -> TensorMemory:
        if len(tensor.devices()) != 1:
            raise InvalidTypeError(
                f"{argument}: expected a jax array on one device, got one spread over {len(tensor.devices())} devices;"
                " pass the data of each of its addressable_shards [T51]"
            )
        return by_dlpack(tensor, tensor.__dlpack__, argument, provider, passed_stream)._replace(writable=False)

    def wrap(self, result: Any, dtype: np.dtype[Any], device: Device, made_on: int, used_on: int) -> Any:
        with active(device):
            return sys.modules["jax"].dlpack.from_dlpack(Export(result, dtype, device, used_on))


class TensorFlow(Framework):
    """TensorFlow's tensors are immutable, and its stream is not accessible: it synchronizes before it exports, and
    imports are synchronized here."""

    def read(self, tensor: Any, argument: str, provider: CupyProvider, passed_stream: int | None) -> TensorMemory:
        tensorflow: Any = sys.modules["tensorflow"]
        plain = tensorflow.convert_to_tensor(tensor)  # the value of a Variable

        def export(**options: Any) -> Any:
            return tensorflow.experimental.dlpack.to_dlpack(plain)

        return by_dlpack(plain, export, argument, provider, passed_stream)._replace(writable=False)

    def wrap(self, result: Any, dtype: np.dtype[Any], device: Device, made_on: int, used_on: int) -> Any:
        tensorflow: Any = sys.modules["tensorflow"]
        with active(device):
            device.drain(used_on)
            return tensorflow.experimental.dlpack.from_dlpack(
                Export(result, dtype, device, used_on).__dlpack__(stream=-1)
            )


_BY_MODULE: dict[str | None, Framework] = {"torch": Torch(), "cupy": Cupy(), "jax": Jax(), "tensorflow": TensorFlow()}


def of(tensor: Any) -> Framework:
    """The framework of a tensor."""
    kind: Any = type(tensor)
    imported = _BY_MODULE.get(detection.framework(kind))
    if imported is not None:
        return imported
    module = detection.namespace(tensor)
    return Framework(None if module is None else module.from_dlpack)
