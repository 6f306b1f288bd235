"""Where a tensor lies on a GPU, as DLPack and ``__cuda_array_interface__`` say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from collectives.base.errors import InvalidTypeError
from collectives.device.protocol import Device, Provider, active
from collectives.tensors import detection, dlpack, streams


class TensorMemory(NamedTuple):
    """A tensor's memory.

    Attributes:
        address: of the first element.
        shape, strides: the latter in bytes; None: contiguous.
        dtype: not checked yet.
        device: on which it lies.
        writable: whether in-place operations may write to it.
        stream: after whose work it may be read.
        memory: keeps it alive.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: np.dtype[Any]
    device: Device
    writable: bool
    stream: int
    memory: Any


def by_dlpack(
    tensor: Any, export: Callable[..., Any], argument: str, provider: Provider, given: int | None
) -> TensorMemory:
    """Through DLPack, for use on the stream that the caller named, or on the device's current one."""
    name = detection.describe(tensor)
    device, stream = _place(provider.device(tensor.__dlpack_device__()[1]), given, argument)
    try:
        capsule = _capsule(export, stream or 1)  # 1 is the default stream there, and 0 is forbidden
    except (RuntimeError, TypeError, ValueError, BufferError) as error:
        raise InvalidTypeError(f"{argument}: {name} cannot be read through DLPack: {error}") from error
    memory = dlpack.read(capsule, argument=f"{argument} ({name})")
    if memory.kind not in (dlpack.CUDA, dlpack.MANAGED):
        raise detection.misplaced(tensor, argument, f"DLPack device kind {memory.kind}")
    return TensorMemory(
        memory.address, memory.shape, memory.strides, memory.dtype, device, not memory.read_only, stream, memory.capsule
    )


def _capsule(export: Callable[..., Any], stream: int) -> Any:
    try:
        return export(stream=stream, max_version=dlpack.VERSION)
    except TypeError:  # an exporter from before there were versions
        return export(stream=stream)


def by_interface(tensor: Any, argument: str, provider: Provider, given: int | None) -> TensorMemory:
    """Through ``__cuda_array_interface__``, versions 2 and 3."""
    kind = detection.describe(tensor)
    interface = getattr(tensor, "__cuda_array_interface__", None)
    if not isinstance(interface, dict) or interface.get("version") not in (2, 3):
        raise InvalidTypeError(
            f"{argument}: expected a {kind} whose __cuda_array_interface__ is of version 2 or 3, got {interface!r}"
        )
    if interface.get("mask") is not None:
        raise InvalidTypeError(f"{argument}: a masked {kind} is refused because its mask would be lost")
    address, read_only = interface["data"]
    dtype = np.dtype(interface["typestr"])
    if dtype.kind == "V":  # bfloat16 has no name of its own there
        dtype = np.dtype(getattr(tensor, "dtype", dtype))
    device, stream = _place(provider.device_of(address) if address else provider.device(0), given, argument)
    made_on = interface.get("stream")
    if made_on is not None:
        made_on = streams.handle(made_on, argument=f"{argument} ({kind}): stream")
        if given is None and made_on != streams.PER_THREAD:
            stream = made_on
        else:
            with active(device):
                streams.free_of_capture(device, made_on, argument, streams.OUTSIDE)
                streams.order(device, made_on, stream)
    strides = interface.get("strides")
    return TensorMemory(
        address, tuple(interface["shape"]), strides and tuple(strides), dtype, device, not read_only, stream, tensor
    )


def _place(device: Device, given: int | None, argument: str) -> tuple[Device, int]:
    """A device, and the stream on which its tensor is to be used, which is about to be made to wait for the tensor's
    own."""
    with active(device):
        stream = device.current_stream() if given is None else given
        streams.free_of_capture(device, stream, argument, streams.OUTSIDE)
        return device, stream
