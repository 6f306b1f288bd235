"""Where a benchmark's buffers lie: in the host's memory, or on a GPU. The contestants and the stopwatch know no other
difference.

A call on a GPU returns before its work is done, so what is timed there is the call and the synchronisation of the
current stream: the host's clock then covers the launch, the device's work, and the wait, as a program that needs the
result would see them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import collectives

DEVICES = ("cpu", "cuda")
MEMORIES = ("private", "mapped")
"""Kinds of the host's memory: NumPy's own, and the engine's, which the other ranks of the host can map."""

Call = Callable[[], Any]


class Host:
    """NumPy arrays."""

    name = "cpu"

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
        """A new array."""
        return np.zeros(shape, dtype)

    def fill(self, array: np.ndarray, write: Callable[[np.ndarray], object]) -> None:
        """Give a 1-D array the values that ``write`` writes into a NumPy array of its size and dtype."""
        write(array)

    def read(self, array: np.ndarray) -> np.ndarray:
        """The values of a 1-D array, as a NumPy array."""
        return array

    def copy(self, target: np.ndarray, source: np.ndarray) -> None:
        """One plain copy between two 1-D arrays of bytes, as quick as the device can; not waited for."""
        np.copyto(target, source)

    def finished(self, call: Call) -> Call:
        """The call, together with the wait for what it began."""
        return call

    def available(self) -> int | None:
        """Bytes that are free; None where the system does not tell."""
        return available_bytes()


class Mapped(Host):
    """NumPy arrays of `collectives.empty`."""

    def zeros(self, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
        """A new array; MemoryError where the engine has no mapped memory left, or was refused any."""
        array: np.ndarray = collectives.empty(shape, dtype)
        if array.nbytes and not collectives.is_mapped(array):
            raise MemoryError(
                f"--memory mapped: the engine gave private memory for {array.nbytes} bytes, and its log says why; "
                "pass a smaller -e, or --memory private [U3]"
            )
        array.fill(0)
        return array


class Cuda:
    """CuPy arrays on the GPU that belongs to a local rank; ranks beyond the number of GPUs share them. See `Host`."""

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


Memory = Host | Cuda
"""Arrays of one kind of memory: NumPy's or CuPy's."""


def why_not(device: str) -> str | None:
    """What a device lacks on this machine, or None."""
    if device == "cpu":
        return None
    from collectives.device import diagnosis

    return diagnosis.why_not()


def memory(device: str, local_rank: int) -> Memory:
    """The memory that ``--device`` names."""
    return Cuda(local_rank) if device == "cuda" else Host()


def memories(device: str, local_rank: int, kinds: Sequence[str]) -> dict[str, Memory]:
    """The memory of each kind that ``--memory`` names, on the device."""
    return {kind: Mapped() if kind == "mapped" else memory(device, local_rank) for kind in kinds}


HOST = Host()


def available_bytes(meminfo: str | None = None, limit: str | None = None, used: str | None = None) -> int | None:
    """Free memory of this host in bytes, or of this container if it has less; None where the system does not tell.

    The arguments are the texts of /proc/meminfo, and of a control group's ``memory.max`` and ``memory.current``.
    """
    meminfo = read("/proc/meminfo") if meminfo is None else meminfo
    limit = read("/sys/fs/cgroup/memory.max") if limit is None else limit
    used = read("/sys/fs/cgroup/memory.current") if used is None else used
    free = [int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemAvailable:")]
    if limit.strip().isdigit() and used.strip().isdigit():
        free.append(max(0, int(limit) - int(used)))
    return min(free, default=None)


def read(path: str) -> str:
    """A small system file's text; empty where there is no such file."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def check_memory(largest: int, peers: bool, ranks_here: int, available: int | None, memories: int = 1) -> str | None:
    """None when the buffers fit; otherwise a message that says what is needed, what there is, and what to do."""
    # Of each rank: input and work in each kind of memory, a result, and a peer's temporary copy.
    needed = largest * (2 * memories + (2 if peers else 1)) * ranks_here
    if available is None or needed <= available:
        return None
    return (
        f"-e {largest}: {ranks_here} ranks on this host need about {needed / 2**30:.1f} GiB, but "
        f"{available / 2**30:.1f} GiB are free; "
        f"choose a smaller -e{', no --peers' if peers else ''} or fewer ranks"
    )
