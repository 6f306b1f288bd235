"""Export of results on a GPU to other libraries through DLPack."""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives.base.dtypes import SUPPORTED
from collectives.device.protocol import Device
from collectives.tensors import streams
from collectives.tensors.dlpack import BFLOAT, CUDA, structure


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
        return CUDA, self._device.index

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        if stream != -1:  # -1: no ordering
            streams.order(self._device, self._stream, streams.LEGACY if stream is None else streams.handle(stream))
        array = self._array.view(np.uint16) if self._bfloat16 else self._array
        capsule = array.__dlpack__(stream=-1, **options)
        if self._bfloat16:
            structure(capsule, "result")[0].dtype.code = BFLOAT
        return capsule
