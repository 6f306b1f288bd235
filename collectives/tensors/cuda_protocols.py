"""Tensors on GPUs, read through DLPack and ``__cuda_array_interface__``, and results exported through DLPack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from collectives.base.dtypes import SUPPORTED
from collectives.base.errors import InvalidTypeError
from collectives.device.protocol import Device, active
from collectives.device.selection import CupyProvider
from collectives.tensors import detection, dlpack, streams


class TensorMemory(NamedTuple):
    """A tensor's memory on a GPU."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """In bytes; None: contiguous."""
    dtype: np.dtype[Any]
    """Not checked yet."""
    device: Device
    writable: bool
    stream: int
    """The memory may be read after this stream's work."""
    memory: Any
    """Keeps the memory alive."""


def by_dlpack(
    tensor: Any, export: Callable[..., Any], argument: str, provider: CupyProvider, passed_stream: int | None
) -> TensorMemory:
    """Read through DLPack, for use on stream ``passed_stream`` or on the device's current one."""
    name = detection.describe(tensor)
    device, stream = _place(provider.device(tensor.__dlpack_device__()[1]), passed_stream, argument)
    try:
        capsule = _capsule(export, stream or 1)  # DLPack's number of the default stream is 1, and 0 is forbidden
    except (RuntimeError, TypeError, ValueError, BufferError) as error:
        raise InvalidTypeError(f"{argument}: {name} cannot be read through DLPack: {error} [T13]") from error
    memory = dlpack.read(capsule, argument=f"{argument} ({name})")
    if memory.kind not in dlpack.ON_GPU:
        raise detection.misplaced(tensor, argument, f"DLPack device kind {memory.kind}")
    return TensorMemory(
        memory.address, memory.shape, memory.strides, memory.dtype, device, not memory.read_only, stream, memory.capsule
    )


def _capsule(export: Callable[..., Any], stream: int) -> Any:
    try:
        return export(stream=stream, max_version=dlpack.VERSION)
    except TypeError:  # an exporter older than DLPack's versions
        return export(stream=stream)


def by_interface(tensor: Any, argument: str, provider: CupyProvider, passed_stream: int | None) -> TensorMemory:
    """Read through ``__cuda_array_interface__``, versions 2 and 3."""
    kind = detection.describe(tensor)
    interface = getattr(tensor, "__cuda_array_interface__", None)
    if not isinstance(interface, dict) or interface.get("version") not in (2, 3):
        raise InvalidTypeError(
            f"{argument}: expected a {kind} whose __cuda_array_interface__ is of version 2 or 3, got {interface!r} "
            "[T52]"
        )
    if interface.get("mask") is not None:
        raise InvalidTypeError(
            f"{argument}: a masked {kind} is refused, because the mask would be lost; pass the data without the mask "
            "[T29]"
        )
    address, read_only = interface["data"]
    dtype = np.dtype(interface["typestr"])
    if dtype.kind == "V":  # the interface has no name for bfloat16
        dtype = np.dtype(getattr(tensor, "dtype", dtype))
    device, stream = _place(provider.device_of(address) if address else provider.device(0), passed_stream, argument)
    made_on = interface.get("stream")
    if made_on is not None:
        made_on = streams.handle(made_on, argument=f"{argument} ({kind}): stream")
        if passed_stream is None and made_on != streams.PER_THREAD:
            stream = made_on
        else:
            with active(device):
                streams.free_of_capture(device, made_on, argument)
                streams.order(device, made_on, stream)
    strides = interface.get("strides")
    return TensorMemory(
        address, tuple(interface["shape"]), strides and tuple(strides), dtype, device, not read_only, stream, tensor
    )


def _place(device: Device, passed_stream: int | None, argument: str) -> tuple[Device, int]:
    """Return a device and the stream on which its tensor will be used.

    The caller orders that stream after the tensor's own, so it must not be under capture.
    """
    with active(device):
        stream = device.current_stream() if passed_stream is None else passed_stream
        streams.free_of_capture(device, stream, argument)
        return device, stream


class Export:
    """A device array as an object that other libraries' ``from_dlpack`` accepts.

    CuPy cannot export bfloat16: the same bits are exported with another dtype, which is then corrected in the capsule.

    Args:
        array: contiguous, of the device's own type, with ``__dlpack__``.
        dtype: of its elements.
        device: of its memory; the calling thread's current one.
        stream: the array may be read after this stream's work.
    """

    def __init__(self, array: Any, dtype: np.dtype[Any], device: Device, stream: int) -> None:
        self._array = array
        self._bfloat16 = SUPPORTED[dtype] == "bfloat16"
        self._device = device
        self._stream = stream

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self._device.index

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        if stream != -1:  # -1: no ordering
            streams.order(self._device, self._stream, streams.LEGACY if stream is None else streams.handle(stream))
        array = self._array.view(np.uint16) if self._bfloat16 else self._array
        capsule = array.__dlpack__(stream=-1, **options)
        if self._bfloat16:
            dlpack.structure(capsule, "result")[0].dtype.code = dlpack.BFLOAT
        return capsule
