"""The process's provider of devices, and the choice of a rank's device."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable

from collectives.base.errors import InvalidArgumentError, MissingDependencyError, TransportError
from collectives.base.exclusion import exclusively
from collectives.device import diagnosis, libcuda
from collectives.device.protocol import Device

_lock = threading.RLock()


class CupyProvider:
    """The GPUs that this process sees, through CuPy. The tests have emulated ones, with the same methods.

    Raises:
        MissingDependencyError: there is no GPU, or a requirement is missing; says what to do.
    """

    def __init__(self) -> None:
        if reason := diagnosis.why_not():
            raise MissingDependencyError(f"GPUs cannot be used here: {reason} [G5]")
        self._count = libcuda.count()
        self._make: Callable[[int], Device] = importlib.import_module("collectives.device.cupy_device").CupyDevice
        self._making = threading.RLock()
        self._devices: dict[int, Device] = {}

    def count(self) -> int:
        return self._count

    def device(self, index: int) -> Device:
        """The device of a number, the same object every time; raises InvalidArgumentError if there is none."""
        if index in self._devices:
            return self._devices[index]
        _check_number(index, self._count)
        return exclusively(self._making, self._made, index)

    def _made(self, index: int) -> Device:
        if index not in self._devices:
            self._devices[index] = self._make(index)
        return self._devices[index]

    def device_of(self, address: int) -> Device:
        """The device that has an address; raises InvalidArgumentError if it is not in device memory."""
        # By the driver, because CUDA's runtime would create a context on GPU 0 in a thread that has not chosen a GPU.
        try:
            on_device = libcuda.attribute(address, libcuda.MEMORY_TYPE) == libcuda.DEVICE_MEMORY
            index = libcuda.attribute(address, libcuda.DEVICE_ORDINAL)
        except TransportError as error:
            raise InvalidArgumentError(
                f"{address:#x}: expected an address in device memory, but CUDA does not know this one: {error} [G8]"
            ) from error
        if not on_device:
            raise InvalidArgumentError(
                f"{address:#x}: expected an address in device memory, got page-locked host memory [G9]"
            )
        return self.device(index)


_provider: CupyProvider | None = None


def provider() -> CupyProvider:
    """The provider of this process: CuPy's, unless `use` has set another. Created by the first call; raises as
    `CupyProvider`."""
    return exclusively(_lock, _made_provider)


def _made_provider() -> CupyProvider:
    global _provider
    if _provider is None:
        _provider = CupyProvider()
    return _provider


def use(replacement: CupyProvider | None) -> CupyProvider | None:
    """Replace the provider; None: CuPy's. Returns the previous one."""
    global _provider
    previous, _provider = _provider, replacement
    return previous


def choose(local_rank: int, override: int | None = None) -> int:
    """The number of the GPU that a rank uses: ``override``, otherwise its local rank modulo the number of GPUs.

    Args:
        local_rank: this rank among those of its host.
        override: the number of a GPU in this process.

    Raises:
        InvalidArgumentError: there is no such GPU.
        MissingDependencyError: GPUs cannot be used here; says why.
    """
    count = provider().count()
    if not count:
        raise InvalidArgumentError(
            "this process sees no GPU; check CUDA_VISIBLE_DEVICES, and what nvidia-smi lists [G10]"
        )
    if override is None:
        return local_rank % count
    _check_number(override, count)
    return override


def _check_number(index: int, count: int) -> None:
    if not 0 <= index < count:
        raise InvalidArgumentError(f"GPU {index}: expected 0 to {count - 1}, the GPUs that this process sees [G11]")
