"""Compiles kernels for one GPU architecture by NVRTC, and caches the code on disk beside CuPy's own.

NVRTC is called directly, because CuPy's compiler flushes subnormal numbers to zero (``-ftz=true``): bfloat16 has the
exponents of float32, so its small values would be lost on a GPU and kept on a CPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

from cupy.cuda import nvrtc, runtime

from collectives.base.errors import MissingDependencyError, TransportError

# Without fused multiply-adds a sum has the same bits as NumPy's. The kernels are bound by memory, so it costs nothing.
_OPTIONS = ("--std=c++17", "--fmad=false")


def compiled(source: str, capability: int) -> bytes:
    """The code of a CUDA C++ source, as the driver loads it.

    Args:
        capability: the GPU's compute capability, such as 90.

    Raises:
        TransportError: the source does not compile, or NVRTC does not support so old a GPU.
        MissingDependencyError: NVRTC is not installed.
    """
    try:
        major, minor = nvrtc.getVersion()
        served = nvrtc.getSupportedArchs()
    except RuntimeError as error:
        raise MissingDependencyError(
            f"NVRTC, which compiles the GPU kernels, cannot be loaded: {error}; run pip install "
            f'"cupy-cuda{runtime.runtimeGetVersion() // 1000}x[ctk]", or set CUDA_PATH to a CUDA toolkit [G1]'
        ) from error
    if capability < min(served):
        raise TransportError(
            f"NVRTC {major}.{minor} compiles for GPUs of compute capability {min(served)} and newer, but this GPU has "
            f"{capability}; install a CuPy for an older CUDA: pip install cupy-cuda12x [G2]"
        )
    # A GPU newer than this NVRTC gets PTX, which its driver compiles.
    exact = capability in served
    target = f"sm_{capability}" if exact else f"compute_{max(arch for arch in served if arch <= capability)}"
    options = (*_OPTIONS, f"-arch={target}")
    key = hashlib.sha256("\0".join((source, f"{major}.{minor}", *options)).encode()).hexdigest()
    path = Path(os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache").expanduser() / f"collectives-{key}.cubin"
    code = _read(path)
    if code is None:
        code = _compile(source, options, exact=exact)
        _write(path, code)
    return code


def _compile(source: str, options: tuple[str, ...], *, exact: bool) -> bytes:
    program = nvrtc.createProgram(source, "collectives.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        # CuPy cuts off the last byte of both, as of a string that ends in a zero.
        code: bytes = (nvrtc.getCUBIN(program) if exact else nvrtc.getPTX(program)) + b"\0"
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise TransportError(f"a kernel does not compile ({error}, {' '.join(options)}) [G3]:\n{log}") from error
    finally:
        nvrtc.destroyProgram(program)
    return code


def _read(path: Path) -> bytes | None:
    """The cached code; None if there is none, or it is damaged."""
    try:
        cached = path.read_bytes()
    except OSError:
        return None
    digest, code = cached[:32], cached[32:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    # Renamed into place, because other ranks write the same file at this moment. If the folder is not writable, every
    # process compiles.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(file.name, path)
