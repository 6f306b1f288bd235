"""CUDA's errors as the package's own: what was attempted on which GPU, CUDA's error, and what to do where that is
known."""

from __future__ import annotations

from collectives.base.errors import CollectivesError, OutOfMemoryError, TransportError
from collectives.device.protocol import Device

_OUT_OF_MEMORY = (
    "; the memory is in use by this process, by its framework's pool (which can release what it does not use: "
    "torch.cuda.empty_cache(), cupy.get_default_memory_pool().free_all_blocks()), by other ranks that still map memory "
    "that was freed (collectives.empty_cache(), on every rank), or by other processes (nvidia-smi lists them)"
)
_BROKEN = (
    "; work on this GPU has failed, perhaps earlier, and perhaps work of the program itself: restart this process; "
    "compute-sanitizer, or CUDA_LAUNCH_BLOCKING=1, shows which work it was"
)
_OLD_DRIVER = "; the driver is older than CuPy's CUDA: update the driver, or install the CuPy for its CUDA"
_ADVICE = {
    "cudaErrorMemoryAllocation": _OUT_OF_MEMORY,
    "CUDA_ERROR_OUT_OF_MEMORY": _OUT_OF_MEMORY,
    "cudaErrorIllegalAddress": _BROKEN,
    "CUDA_ERROR_ILLEGAL_ADDRESS": _BROKEN,
    "cudaErrorLaunchFailure": _BROKEN,
    "CUDA_ERROR_LAUNCH_FAILED": _BROKEN,
    "cudaErrorMisalignedAddress": _BROKEN,
    "CUDA_ERROR_MISALIGNED_ADDRESS": _BROKEN,
    "CUDA_ERROR_NO_BINARY_FOR_GPU": _OLD_DRIVER,
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": _OLD_DRIVER,
}
_SHARING = frozenset(
    f"cudaError{name}"
    for name in (
        "DeviceUninitialized",
        "InvalidContext",
        "InvalidDevice",
        "InvalidResourceHandle",
        "InvalidValue",
        "MapBufferObjectFailed",
        "NotPermitted",
        "NotSupported",
        "PeerAccessUnsupported",
    )
)
"""CUDA's errors when memory or events cannot be shared."""
_SHARING_ADVICE = (
    "; memory of expandable segments (PYTORCH_CUDA_ALLOC_CONF) and of cudaMallocAsync's pools cannot be shared; both "
    "processes must see both GPUs (CUDA_VISIBLE_DEVICES); containers need --ipc=host, and --pid=host where each has "
    "its own"
)


def refused(device: Device, attempt: str, error: BaseException, *, sharing: bool = False) -> TransportError:
    """The exception to raise for CUDA's ``error``, which occurred when trying to ``attempt``.

    Args:
        sharing: the attempt was to share memory or events with another process.
    """
    name = str(error).partition(":")[0]
    advice = _OUT_OF_MEMORY if isinstance(error, MemoryError) else _ADVICE.get(name, "")
    if sharing and name in _SHARING:
        advice = _SHARING_ADVICE
    kind = OutOfMemoryError if advice is _OUT_OF_MEMORY else TransportError
    return kind(f"GPU {device.index} ({device.name}): cannot {attempt}: {error}{advice} [G12]")


class Attempt:
    """Context manager that converts CUDA's errors by `refused`. Methods on the hot path catch and convert in place."""

    __slots__ = ("_attempt", "_device", "_sharing")

    def __init__(self, device: Device, attempt: str, *, sharing: bool = False) -> None:
        self._device, self._attempt, self._sharing = device, attempt, sharing

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (RuntimeError, MemoryError)) and not isinstance(error, CollectivesError):
            raise refused(self._device, self._attempt, error, sharing=self._sharing) from error
