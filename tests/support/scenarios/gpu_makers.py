"""Device tensors for the scenarios, of whichever kind: CuPy arrays and torch tensors on a GPU, emulated arrays without
one."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import ml_dtypes
import numpy as np

from tests.support.scenarios.worlds import DTYPES

if TYPE_CHECKING:
    from tests.support.emulated.cuda import EmulatedDevice

_POOL_BYTES, _POOL_STEP = 256 << 20, 512
"""Of the allocation that CuPy's pool is warmed with, and of its smallest block."""

Array = np.ndarray[Any, np.dtype[Any]]


class Maker(Protocol):
    """Makes device tensors out of NumPy arrays, and NumPy arrays out of device tensors.

    Attributes:
        dtypes: that this kind of tensor can have.
        strided: whether tensors need not be contiguous: those of a framework that the engine knows, which can copy
            them.
    """

    dtypes: Sequence[np.dtype[Any]]
    strided: bool

    def device(self, values: Array) -> Any:
        """A new tensor with these values, which arrive in the order of the current stream."""

    def host(self, tensor: Any) -> Array:
        """The tensor's values once the current stream has done its work."""

    def is_mine(self, tensor: Any) -> bool:
        """Whether it is a tensor of this kind."""


class CupyMaker:
    """CuPy arrays on the current device."""

    dtypes = tuple(DTYPES)
    strided = True

    def __init__(self) -> None:
        self.cupy: Any = importlib.import_module("cupy")

    def device(self, values: Array) -> Any:
        # As whole numbers, for bfloat16: only bytes are moved, by whatever CuPy knows of the dtype.
        if values.dtype == ml_dtypes.bfloat16:
            return self.cupy.asarray(values.view(np.uint16)).view(values.dtype)
        return self.cupy.asarray(values)

    def host(self, tensor: Any) -> Array:
        if tensor.dtype == ml_dtypes.bfloat16:
            values: Array = self.cupy.asnumpy(tensor.view(np.uint16)).view(tensor.dtype)
            return values
        values = self.cupy.asnumpy(tensor)
        return values

    def is_mine(self, tensor: Any) -> bool:
        return isinstance(tensor, self.cupy.ndarray)

    def warm(self, rank: int) -> str:
        """Have CuPy's pool carve what this stream asks for next out of one allocation, from an offset of this rank's
        own.

        The engine maps an allocation of 2 MiB or more where it is, and copies smaller ones; and a small tensor from an
        empty pool has an allocation of its own. So without this, hardly a tensor would be mapped, and each at offset 0.

        Returns:
            Where the next arrays are, for the log.
        """
        whole = self.cupy.empty(_POOL_BYTES, np.uint8)
        begin = whole.data.ptr
        del whole
        self._filler = self.cupy.empty(_POOL_STEP * (2 * rank + 1), np.uint8)
        offset = self.cupy.empty(1, np.uint8).data.ptr - begin
        assert 0 < offset < _POOL_BYTES, (
            f"CuPy's pool did not carve: expected an offset in {_POOL_BYTES} bytes, found {offset}"
        )
        return f"arrays begin at offset {offset} of an allocation of {_POOL_BYTES >> 20} MiB"


class TorchMaker:
    """torch tensors on the current device."""

    dtypes = tuple(dtype for dtype in DTYPES if dtype.name not in ("uint16", "uint32", "uint64"))
    strided = True

    def __init__(self) -> None:
        self.torch: Any = importlib.import_module("torch")

    def device(self, values: Array) -> Any:
        if values.dtype == ml_dtypes.bfloat16:
            return self.torch.from_numpy(values.view(np.int16)).view(self.torch.bfloat16).cuda()
        return self.torch.from_numpy(values.copy()).cuda()

    def host(self, tensor: Any) -> Array:
        values: Array
        if tensor.dtype == self.torch.bfloat16:
            values = tensor.cpu().view(self.torch.int16).numpy().view(ml_dtypes.bfloat16)
        else:
            values = tensor.cpu().numpy()
        return values

    def is_mine(self, tensor: Any) -> bool:
        return isinstance(tensor, self.torch.Tensor)


class EmulatedMaker:
    """Arrays of an emulated device."""

    dtypes = tuple(DTYPES)
    strided = False

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self._array: Any = importlib.import_module("tests.support.emulated.array").EmulatedArray

    def device(self, values: Array) -> Any:
        return self._array.of(self._device, values)

    def host(self, tensor: Any) -> Array:
        values: Array = tensor.get(self._device.current_stream())
        return values

    def is_mine(self, tensor: Any) -> bool:
        return isinstance(tensor, self._array)


def maker(name: str) -> Maker:
    """The maker that the command line calls so, for the current device."""
    return {"cupy": CupyMaker, "torch": TorchMaker}[name]()
