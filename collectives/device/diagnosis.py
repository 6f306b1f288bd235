"""Reports the requirements of GPU tensors, and how to meet those that are missing. Raises nothing, uses no GPU."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any, NamedTuple

from collectives.base.errors import TransportError
from collectives.device import libcuda, nccl_binding

_OLDEST_CUDA = 12
_OLDEST_CUPY = 14
_SEVERAL_RANKS = (2, 30)
_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


class Row(NamedTuple):
    """One requirement.

    Attributes:
        installed: its version, or whatever tells it; None if it is missing.
        advice: what to do; empty if nothing needs to be done.
        stops: whether GPU tensors cannot be used because of it.
    """

    what: str
    installed: str | None
    advice: str = ""
    stops: bool = False


def report() -> list[Row]:
    """All requirements, in the order in which they are to be met.

    Imports CuPy if it is installed, and initializes the driver: not for a process that later forks users of GPUs.
    """
    driver, cuda = _driver()
    cupy = _cupy(cuda)
    rows = [driver, _gpus(driver), cupy]
    if not cupy.stops:
        package = cupy.installed.partition(" ")[0] if cupy.installed else ""
        extra = f'pip install "{package}[ctk]", or set CUDA_PATH to a CUDA toolkit'
        rows += [_compiler(extra), _headers(extra)]
    return [*rows, _nccl(f"nvidia-nccl-cu{_major(cuda)}", loaded=not cupy.stops)]


def why_not() -> str | None:
    """Why GPU tensors cannot be used here and what to do, in one line; None if they can be used."""
    for row in report():
        if row.stops:
            subject = f"no {row.what}" if row.installed is None else f"{row.what}, {row.installed}"
            return f"{subject}: {row.advice}"
    return None


def _missing(what: str, advice: str) -> Row:
    return Row(what, None, advice, stops=True)


def _driver() -> tuple[Row, tuple[int, int] | None]:
    """The driver, and the newest CUDA version that it supports."""
    library = libcuda.LIBRARY
    try:
        libcuda.load()
    except TransportError:
        advice = f"{library} cannot be loaded: install NVIDIA's driver, or start the container with --gpus all"
        return _missing("driver", advice), None
    try:
        cuda = libcuda.version()
    except (AttributeError, TransportError) as error:
        return _missing("driver", f"{library} does not work ({error}): reinstall NVIDIA's driver"), None
    version = f"for CUDA {cuda[0]}.{cuda[1]}"
    if cuda[0] < _OLDEST_CUDA:
        return Row("driver", version, f"too old: update it to one for CUDA {_OLDEST_CUDA} or newer", stops=True), cuda
    return Row("driver", version), cuda


def _gpus(driver: Row) -> Row:
    if driver.installed is None:
        return _missing("device", "none can be seen without the driver")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    why = "see nvidia-smi" if visible is None else f"CUDA_VISIBLE_DEVICES is {visible!r}"
    try:
        names = [libcuda.name(index) for index in range(libcuda.count())]
    except (AttributeError, TransportError) as error:
        return _missing("device", f"none is visible ({error}): {why}")
    if not names:
        return _missing("device", f"none is visible: {why}")
    return Row("device", ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)))


def _major(cuda: tuple[int, int] | None) -> int:
    """The major CUDA version to install packages for: the driver's, or the newest without a driver."""
    return 12 if cuda is not None and cuda[0] < 13 else 13


def _cupy(cuda: tuple[int, int] | None) -> Row:
    install = f"pip install cupy-cuda{_major(cuda)}x"
    try:
        module = _import("cupy")
        number = str(module.__version__)
        built = module.cuda.runtime.runtimeGetVersion() // 1000
    except ModuleNotFoundError as error:
        if error.name == "cupy":
            older = " (cupy-cuda12x if the driver is older than CUDA 13)" if cuda is None else ""
            return _missing("CuPy", install + older)
        return _missing("CuPy", f"it is installed, but lacks a package: pip install {error.name}")
    except Exception as error:
        said = [line.strip() for line in str(error).splitlines() if line.strip("= ")] or [type(error).__name__]
        return _missing("CuPy", f"it is installed, but cannot be imported: {said[-1]}")
    package = next((name for name in _CUPY if _version(name)), "cupy")
    version = f"{package} {number}"
    if int(number.partition(".")[0]) < _OLDEST_CUPY:
        return Row("CuPy", version, f"too old: pip install --upgrade {package}", stops=True)
    if cuda is not None and cuda[0] < built:
        advice = f"too new for the driver: update the driver, or pip uninstall {package} and {install}"
        return Row("CuPy", version, advice, stops=True)
    return Row("CuPy", version)


def _compiler(extra: str) -> Row:
    try:
        return Row("NVRTC", ".".join(map(str, _import("cupy.cuda").nvrtc.getVersion())))
    except Exception:
        return _missing("NVRTC", f"kernels cannot be compiled: {extra}")


def _headers(extra: str) -> Row:
    try:
        folder = _import("cuda.pathfinder").find_nvidia_header_directory("cudart")
    except Exception:
        folder = None
    return Row("headers", folder) if folder else Row("headers", None, f"CuPy compiles few of its own kernels: {extra}")


def _nccl(package: str, *, loaded: bool) -> Row:
    """NCCL as ``loaded`` by its binding, which may be another than pip has installed."""
    try:
        if loaded:
            # 23203 is 2.32.3.
            code = int(nccl_binding.load().get_version())
            number: tuple[int, ...] = (code // 10000, code // 100 % 100, code % 100)
        else:
            version = next(version for name in _NCCL if (version := _version(name)))
            number = tuple(map(int, version.split(".")[:3]))
    except Exception:
        return Row("NCCL", None, f"not needed within one host: pip install {package}")
    version = ".".join(map(str, number))
    if number < _SEVERAL_RANKS:
        needs = "several ranks on one GPU need 2.30 or newer, and NCCL_MULTI_RANK_GPU_ENABLE=1"
        return Row("NCCL", version, f"{needs}: pip install --upgrade {package}")
    return Row("NCCL", version)


def _import(name: str) -> Any:
    with warnings.catch_warnings():
        # CuPy warns of missing parts, which the rows report too.
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def _version(package: str) -> str:
    metadata: Any = importlib.import_module("importlib.metadata")  # slow to import, and seldom needed
    try:
        return str(metadata.version(package))
    except metadata.PackageNotFoundError:
        return ""
