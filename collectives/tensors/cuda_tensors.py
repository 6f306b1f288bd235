"""Views of tensors on GPUs: one representation for all frameworks, and results in the caller's type.

The counterpart of `collectives.tensors.arrays`, with the same rules: the engine works on 1-D contiguous memory, the
caller's own where possible; otherwise it is a copy, which ``DeviceView.store`` writes back after an in-place operation.

Nothing here waits for a GPU. A view names the stream after whose work its memory may be read; results are filled before
the work of `DeviceView.current_stream`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from collectives.base.dtypes import SUPPORTED, resolve
from collectives.base.errors import InvalidTypeError, MissingDependencyError
from collectives.device import selection
from collectives.device.protocol import Array, Device, active
from collectives.tensors import cuda_frameworks, detection, streams
from collectives.tensors.cuda_protocols import TensorMemory
from collectives.tensors.detection import Extent


@dataclass(slots=True, eq=False)
class DeviceArray:
    """Consecutive elements in device memory; ``owner`` keeps it alive. The address may be 0 without elements."""

    address: int
    size: int
    dtype: np.dtype[Any]
    device: Device
    owner: Any

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def part(self, start: int, count: int) -> DeviceArray:
        """``count`` elements from ``start`` on."""
        return DeviceArray(self.address + start * self.dtype.itemsize, count, self.dtype, self.device, self.owner)


class DeviceView:
    """A tensor on a GPU as the engine sees it, with the attributes of `collectives.tensors.arrays.View`, and two more.

    Attributes:
        device: of the memory.
        stream: the caller's stream when the view was made; ``array`` may be read after the work enqueued until then.
    """

    def __init__(
        self,
        framework: cuda_frameworks.Framework,
        tensor: TensorMemory,
        array: DeviceArray,
        copied: bool,
        stream_passed: bool,
    ) -> None:
        self.array = array
        self.shape = tensor.shape
        self.dtype = array.dtype
        self.nbytes = array.nbytes
        self.device = array.device
        self.stream = tensor.stream
        self.copied = copied
        self.writable = tensor.writable
        self._framework = framework
        self._tensor_memory = tensor
        self._stream_passed = stream_passed

    def current_stream(self) -> int:
        """The stream before whose later work a result must be ready: the one that the caller passed, else the
        framework's current one in the calling thread; raises as `streams.usable`."""
        return self.stream if self._stream_passed else streams.usable(self._framework.current_stream(self.device))

    def store(self) -> None:
        """As `arrays.View.store`, on `current_stream`, which must already wait for the operation."""
        if self.copied and self.writable:
            self._framework.store(self._tensor_memory, self.array.owner, self.current_stream())

    def extent(self, writes: bool) -> Extent:
        """As `collectives.tensors.arrays.View.extent`."""
        tensor = self._tensor_memory
        if not self.copied or tensor.strides is None:
            return tensor.address, tensor.address + self.nbytes, writes, None
        return detection.strided_extent(tensor.address, self.shape, tensor.strides, self.dtype.itemsize, writes)

    def detach(self) -> None:
        """Replace ``array`` by a copy, made on ``stream``, which ``store`` writes back."""
        with active(self.device):
            _, array = self.empty(self.shape)
            self.device.copy(array.address, self.array.address, self.nbytes, self.stream)
        self.array, self.copied = array, True

    def fill(self, values: DeviceView) -> None:
        """Copy another view's elements, of the same dtype and number, into ``array`` on `current_stream`."""
        if values.dtype != self.dtype:
            raise InvalidTypeError(f"expected elements of dtype {self.dtype}, got {values.dtype} [T22]")
        with active(self.device):
            self.device.copy(self.array.address, values.array.address, self.nbytes, self.current_stream())

    def on_host(self) -> Array:
        """Copy the elements to a 1-D NumPy array, after the work of ``stream``; raises as `streams.free_of_capture`."""
        with active(self.device):
            streams.free_of_capture(self.device, self.stream, "tensor")
            elements = self.device.pinned(max(1, self.nbytes))[: self.nbytes]
            self.device.copy(elements.ctypes.data, self.array.address, self.nbytes, self.stream)
            self.device.drain(self.stream)
        return elements.view(self.dtype)

    def fill_from_host(self, values: Array, into: DeviceArray | None = None) -> None:
        """Copy elements, 1-D and contiguous, from the host on `current_stream`, and wait for the copy: to the first
        elements of ``array``, or of ``into``."""
        target = self.array if into is None else into
        with active(self.device):
            stream = self.current_stream()
            streams.free_of_capture(self.device, stream, "tensor")
            locked = self.device.pinned(max(1, values.nbytes))[: values.nbytes]
            locked[:] = values.view(np.uint8)
            self.device.copy(target.address, locked.ctypes.data, values.nbytes, stream)
            self.device.drain(stream)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any] | None = None) -> tuple[Any, DeviceArray]:
        """Allocate a result, of the tensor's dtype unless another is passed. Its memory may have been used before: it
        may be written after the work enqueued on ``stream`` until this returns.

        Returns:
            The argument of `wrap`, and its elements.
        """
        kind = self.dtype if dtype is None else dtype
        result, address = self._framework.empty(shape, kind, self.device, self.stream)
        return result, DeviceArray(address, math.prod(shape), kind, self.device, result)

    def wrap(self, result: Any, dtype: np.dtype[Any] | None = None) -> Any:
        """Convert a result of `empty`, with the dtype that was passed there, to the caller's type; `current_stream`
        must already wait for the operation that fills it."""
        return self._framework.wrap(
            result, self.dtype if dtype is None else dtype, self.device, self.stream, self.current_stream()
        )


def view(tensor: Any, *, argument: str = "tensor", writable: bool = False, stream: Any = None) -> DeviceView:
    """View a tensor on a GPU, without a copy if possible; as `collectives.tensors.arrays.view`.

    Args:
        tensor: a torch tensor, a CuPy array, or anything on an NVIDIA GPU with DLPack (jax, TensorFlow, ...) or
            ``__cuda_array_interface__`` (numba, ...). Any shape and strides.
        stream: the tensor is read after this stream's work, and results are ready before its later work; any form that
            `streams.handle` accepts; None: the framework's current stream.

    Raises:
        InvalidArgumentError: also for an unusable stream.
    """
    passed_stream = None if stream is None else streams.usable(streams.handle(stream))
    framework = cuda_frameworks.of(tensor)
    tensor_memory = framework.read(tensor, argument, _provider(tensor, argument), passed_stream)
    if passed_stream is None:
        streams.usable(tensor_memory.stream, argument)
    dtype = tensor_memory.dtype
    if dtype not in SUPPORTED:
        dtype = _resolve(tensor, dtype, argument)
    shape, strides = tensor_memory.shape, tensor_memory.strides
    if writable and not tensor_memory.writable:
        raise detection.frozen(tensor, argument, shape, dtype)
    contiguous = strides is None or detection.is_contiguous(shape, strides, dtype.itemsize)
    if tensor_memory.address % dtype.itemsize:
        raise InvalidTypeError(
            f"{argument}: expected elements at multiples of their size ({dtype.itemsize} bytes), got a "
            f"{detection.describe(tensor)} at address {tensor_memory.address:#x}; copy it first [T30]"
        )
    memory, address = tensor_memory.memory, tensor_memory.address
    if not contiguous:
        if writable and detection.may_overlap(shape, strides or (), dtype.itemsize):
            raise detection.overlapping(tensor, argument, shape, strides or ())
        memory, address = framework.contiguous(tensor_memory, argument)
    array = DeviceArray(address, math.prod(shape), dtype, tensor_memory.device, memory)
    return DeviceView(framework, tensor_memory, array, not contiguous, passed_stream is not None)


def _provider(tensor: Any, argument: str) -> selection.CupyProvider:
    try:
        return selection.provider()
    except MissingDependencyError as error:
        raise MissingDependencyError(
            f"{argument}: got a {detection.describe(tensor)} on a GPU, but {error} [G6]"
        ) from None


def _resolve(tensor: Any, dtype: np.dtype[Any], argument: str) -> np.dtype[Any]:
    """Resolve a dtype that is not yet in `SUPPORTED`: bfloat16 at its first use, or an unsupported one."""
    kind = f"{argument} ({detection.describe(tensor)})"
    native = resolve(dtype, argument=kind)
    if not dtype.isnative:
        raise InvalidTypeError(
            f"{kind}: byte-swapped dtype {dtype} is not supported on a GPU; convert it to {native} first [T23]"
        )
    return native
