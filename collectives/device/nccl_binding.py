"""The installed binding of NCCL, with the names and arguments of ``cupy.cuda.nccl``: CuPy's, otherwise nccl4py.

CuPy's comes first because its binding is a public interface that takes numbers, as the engine has them, and CuPy is
needed in any case. nccl4py's public interface takes tensors, which every call looks up anew; the layer below takes
numbers, but may change with any version (`make gpu-compile` compares).
"""

from __future__ import annotations

import importlib
from typing import Any

from collectives.base.errors import MissingDependencyError


def load() -> Any:
    """The binding: ``NcclCommunicator``, ``get_unique_id``, ``get_version``, ``groupStart`` and ``groupEnd``.

    Raises:
        MissingDependencyError: there is none, or it finds no NCCL; says what to install.
    """
    try:
        binding = importlib.import_module("cupy.cuda.nccl")
        reason = _why_not(binding)
    except ImportError as error:
        reason = (
            f"NCCL is reached through CuPy, which cannot be imported ({error}): pip install cupy-cuda13x, or "
            f"cupy-cuda12x [G23]"
        )
    if reason is None:
        return binding
    try:
        bindings = importlib.import_module("nccl.bindings.nccl")
        bindings.get_version()
    except (ImportError, RuntimeError):
        raise MissingDependencyError(reason) from None
    return Nccl4py(bindings)


def _why_not(binding: Any) -> str | None:
    """What CuPy's binding lacks, or None."""
    if not binding.available:
        # The CUDA version that CuPy was built for; this call needs no GPU.
        major = importlib.import_module("cupy").cuda.runtime.runtimeGetVersion() // 1000
        return f"NCCL is not installed, or cannot be loaded: pip install nvidia-nccl-cu{major}"
    if not hasattr(binding, "NcclConfig"):
        return (
            "this CuPy is too old for its NCCL binding to be used: pip install --upgrade cupy-cuda13x, or cupy-cuda12x"
        )
    return None


class Nccl4py:
    """``nccl.bindings.nccl`` in CuPy's terms."""

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings
        self.get_version = bindings.get_version
        self.groupStart, self.groupEnd = bindings.group_start, bindings.group_end

    def get_unique_id(self) -> bytes:
        return bytes(self._bindings.get_unique_id())

    def NcclCommunicator(self, size: int, unique_id: bytes, rank: int) -> Nccl4pyCommunicator:
        return Nccl4pyCommunicator(self._bindings, size, unique_id, rank)


class Nccl4pyCommunicator:
    def __init__(self, bindings: Any, size: int, unique_id: bytes, rank: int) -> None:
        self._bindings = bindings
        self._handle = bindings.comm_init_rank(size, bindings.UniqueId.from_buffer(unique_id), rank)
        try:
            self.check_async_error()
        except BaseException:
            self.abort()
            raise

    def allReduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        self._bindings.all_reduce(source, target, count, dtype, op, self._handle, stream)

    def reduceScatter(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        self._bindings.reduce_scatter(source, target, count, dtype, op, self._handle, stream)

    def allGather(self, source: int, target: int, count: int, dtype: int, stream: int) -> None:
        self._bindings.all_gather(source, target, count, dtype, self._handle, stream)

    def broadcast(self, source: int, target: int, count: int, dtype: int, root: int, stream: int) -> None:
        self._bindings.broadcast(source, target, count, dtype, root, self._handle, stream)

    def send(self, source: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._bindings.send(source, count, dtype, peer, self._handle, stream)

    def recv(self, target: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._bindings.recv(target, count, dtype, peer, self._handle, stream)

    def check_async_error(self) -> None:
        # Not by its `check_status`, which lets ncclInProgress pass: the engine's calls must block.
        if status := self._bindings.comm_get_async_error(self._handle):
            raise self._bindings.NCCLError(status)

    def abort(self) -> None:
        self._bindings.comm_abort(self._handle)

    def destroy(self) -> None:
        self._bindings.comm_destroy(self._handle)
