"""Where a benchmark's buffers lie: in the host's memory, or on a GPU. The contestants and the stopwatch know no other
difference.

A call on a GPU returns before its work is done, so what is timed there is the call and the synchronisation of the
current stream: the host's clock then covers the launch, the device's work, and the wait, as a program that needs the
result would see them.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

import collectives
from benchmarks import room

DEVICES = ("cpu", "cuda")
MEMORIES = ("private", "mapped")
"""Kinds of the host's memory: NumPy's own, and the engine's, which the other ranks of the host can map."""

Call = Callable[[], Any]


class Memory(Protocol):
    """Arrays of one kind of memory: NumPy's or CuPy's."""

    name: str

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        """A new array."""

    def fill(self, array: Any, write: Callable[[np.ndarray], object]) -> None:
        """Give a 1-D array the values that ``write`` writes into a NumPy array of its size and dtype."""

    def read(self, array: Any) -> np.ndarray:
        """The values of a 1-D array, as a NumPy array."""

    def copy(self, target: Any, source: Any) -> None:
        """One plain copy between two 1-D arrays of bytes, as quick as the device can; not waited for."""

    def finished(self, call: Call) -> Call:
        """The call, together with the wait for what it began."""

    def available(self) -> int | None:
        """Bytes that are free; None where the system does not tell."""


class Host:
    """NumPy arrays."""

    name = "cpu"

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.zeros(shape, dtype)

    def fill(self, array: np.ndarray, write: Callable[[np.ndarray], object]) -> None:
        write(array)

    def read(self, array: np.ndarray) -> np.ndarray:
        return array

    def copy(self, target: np.ndarray, source: np.ndarray) -> None:
        np.copyto(target, source)

    def finished(self, call: Call) -> Call:
        return call

    def available(self) -> int | None:
        return room.available_bytes()


class Mapped(Host):
    """NumPy arrays of `collectives.empty`."""

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
        """A new array.

        Raises:
            MemoryError: the engine has no mapped memory left, or was refused any.
        """
        array: np.ndarray = collectives.empty(shape, dtype)
        if array.nbytes and not collectives.is_mapped(array):
            raise MemoryError(
                f"--memory mapped: the engine gave private memory for {array.nbytes} bytes, and its log says why; "
                "choose a smaller -e, or --memory private"
            )
        array.fill(0)
        return array


class Cuda:
    """CuPy arrays on the GPU that belongs to a local rank; ranks beyond the number of GPUs share them."""

    name = "cuda"

    def __init__(self, local_rank: int) -> None:
        self.cupy: Any = importlib.import_module("cupy")
        self.gpus: int = self.cupy.cuda.runtime.getDeviceCount()
        self.cupy.cuda.Device(local_rank % self.gpus).use()

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        return self.cupy.zeros(shape, dtype)

    def fill(self, array: Any, write: Callable[[np.ndarray], object]) -> None:
        values = np.empty(array.size, array.dtype)
        write(values)
        # As bytes: a dtype that CuPy does not compute with is copied all the same.
        array.view(np.uint8).set(values.view(np.uint8))

    def read(self, array: Any) -> np.ndarray:
        values: np.ndarray = self.cupy.asnumpy(array.view(np.uint8)).view(array.dtype)
        return values

    def copy(self, target: Any, source: Any) -> None:
        target.data.copy_from_device_async(source.data, source.nbytes)

    def finished(self, call: Call) -> Call:
        current = self.cupy.cuda.get_current_stream

        def whole() -> Any:
            result = call()
            current().synchronize()
            return result

        return whole

    def available(self) -> int | None:
        free: int = self.cupy.cuda.runtime.memGetInfo()[0]
        return free

    def shared_by(self, local_size: int) -> str | None:
        """Why NCCL cannot connect this many ranks of the host, or None: it wants a GPU for each, or to be asked for the
        mode without."""
        nccl = importlib.import_module("cupy.cuda.nccl")
        if not nccl.available:
            return "CuPy finds no NCCL: pip install nvidia-nccl-cu13 (or -cu12)"
        if local_size <= self.gpus:
            return None
        version = nccl.get_version()
        if version >= 23000 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
            return None
        return (
            f"{local_size} ranks on {self.gpus} GPU: needs NCCL 2.30 (found {version}) and NCCL_MULTI_RANK_GPU_ENABLE=1"
        )


def why_not(device: str) -> str | None:
    """What a device lacks on this machine, or None."""
    if device == "cpu":
        return None
    from collectives.device import diagnosis

    return diagnosis.why_not()


def memory(device: str, local_rank: int) -> Host | Cuda:
    """The memory that ``--device`` names."""
    return Cuda(local_rank) if device == "cuda" else Host()


def memories(device: str, local_rank: int, kinds: Sequence[str]) -> dict[str, Host | Cuda]:
    """The memory of each kind that ``--memory`` names, on the device."""
    return {kind: Mapped() if kind == "mapped" else memory(device, local_rank) for kind in kinds}


HOST = Host()
