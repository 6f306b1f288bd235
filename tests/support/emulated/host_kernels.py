"""CUDA kernels on the CPU: their sources compiled by g++ (see ``cuda_on_host.h``), for tests and for the emulated
device.

A library is kept under the system's temporary directory, by the hash of what it was made of, so that many tests and the
ranks of many runs share one compilation. What `g++` takes longest for is the text that all kernels have in common: so
those of one dtype are compiled together as soon as one of them is needed, and `prepare` compiles all that there are.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from collectives.base import dtypes
from collectives.device import kernel_sources
from collectives.device.kernel_sources import Kernel
from collectives.device.kernels import bits

COMPILER = shutil.which("g++")
MISSING = "needs g++, which compiles the CUDA kernels for the CPU"

_HEADER = Path(__file__).with_name("cuda_on_host.h")
# No strict aliasing, wrapping integers, no fused multiply-add: as the CUDA compiler has it, or as the kernels ask it
# to.
_OPTIONS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-fno-strict-aliasing", "-fwrapv", "-ffp-contract=off", "-w")
_KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(")
_MOST_ARGUMENTS = 256

Launch = Callable[[tuple[int, int], int, int], None]
"""``launch(grid, threads, parameters)``: blocks in x and y, threads of a block, the address of an array of pointers to
the arguments."""


@functools.cache
def compile(source: str) -> ctypes.CDLL:
    """A CUDA C++ source as a library, with an entry ``name__host`` for every kernel ``name`` that it defines.

    Raises:
        RuntimeError: there is no g++, or it refuses the source; with its messages.
    """
    if COMPILER is None:
        raise RuntimeError(MISSING)
    entries = "".join(f"HOST_ENTRY({name})\n" for name in _KERNEL.findall(source))
    text = f"{_HEADER.read_text()}\n{source}\n{entries}"
    digest = hashlib.sha256("\0".join((text, *_OPTIONS)).encode()).hexdigest()[:32]
    folder = Path(tempfile.gettempdir()) / f"collectives-host-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{digest}.so"
    if not library.exists():
        # One at a time: ranks need the same kernels at the same moment.
        with open(folder / f"{digest}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _compile(text, library)
    return ctypes.CDLL(str(library))


def _compile(text: str, library: Path) -> None:
    unfinished = library.with_suffix(".unfinished")
    done = subprocess.run(
        [str(COMPILER), *_OPTIONS, "-x", "c++", "-", "-o", str(unfinished)],
        input=text,
        capture_output=True,
        text=True,
        timeout=250,
    )
    if done.returncode:
        raise RuntimeError(f"g++ refuses the kernels:\n{done.stderr[:5000]}")
    unfinished.rename(library)


def prepare() -> None:
    """Compile whatever kernels the engine may ask for, two bundles at a time; does nothing where that was done
    before."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda bundle: compile(kernel_sources.source(*bundle)), set(_bundles().values())))


@functools.cache
def _bundles() -> dict[str, tuple[Kernel, ...]]:
    """By a kernel's name: all that are compiled together with it, those of one dtype."""
    found: dict[str, tuple[Kernel, ...]] = {}
    for name in dtypes.NAMES:
        bundle = tuple(dict.fromkeys(kernel for kernel in _kernels_of(name) if kernel.name not in found))
        found |= dict.fromkeys((kernel.name for kernel in bundle), bundle)
    return found


def _kernels_of(name: str) -> Iterator[Kernel]:
    """The kernels for elements of a dtype: operations, and for each way of scaling a sum, a copy, and the way through a
    buffer."""
    dtype = dtypes.resolve(name)
    operations = ["Or", "And"] if dtypes.is_bool(dtype) else ["Sum", "Product", "Min", "Max"]
    if dtypes.is_complex(dtype):
        # Their sums and copies are those of their parts.
        yield kernel_sources.combine("Product", name, "Unscaled")
        return
    floating = dtypes.is_floating(dtype)
    if dtypes.is_half(dtype):
        operations.append("Mean")
    scalings = (
        ["Multiply", "Divide"] if floating else ["Truncate"] if dtypes.is_bool(dtype) else ["Truncate", "Quotient"]
    )
    moves = (kernel_sources.pack, kernel_sources.unpack)
    yield from (kernel_sources.combine(operation, name, "Unscaled") for operation in operations)
    yield kernel_sources.copy(bits(dtype)[0], "Unscaled")
    yield from (move(bits(dtype)[0], bits(dtype)[0], "Unscaled") for move in moves)
    for scaling in scalings:
        yield from (
            kernel_sources.combine(operation, name, scaling)
            for operation in (operations if dtypes.is_bool(dtype) else ["Sum", *operations[4:]])
        )
        yield kernel_sources.copy(name, scaling)
        yield from (move(name, name, scaling) for move in moves)
    if name in ("float32", "float64"):
        for half in ("float16", "bfloat16"):
            yield from (move(name, half, scaling) for scaling in ("Unscaled", *scalings) for move in moves)


def run(library: ctypes.CDLL, name: str, grid: tuple[int, int], threads: int, parameters: int) -> None:
    """Run a kernel to its end; other Python threads may run meanwhile. ``parameters``: as in `Launch`."""
    entry = library[f"{name}__host"]
    entry.restype, entry.argtypes = None, (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
    entry(grid[0], grid[1], threads, parameters)


class HostKernel:
    """One kernel of a source, as `run` runs it.

    Attributes:
        argument_sizes: in bytes; whoever runs the kernel later than it was asked for copies the arguments, as CUDA
            does.
    """

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._library, self.name = library, name
        sizes = (ctypes.c_int * _MOST_ARGUMENTS)()
        self.argument_sizes: tuple[int, ...] = tuple(sizes[: library[f"{name}__sizes"](sizes)])

    def __call__(self, grid: tuple[int, int], threads: int, parameters: int) -> None:
        run(self._library, self.name, grid, threads, parameters)


def function(source: str, name: str) -> HostKernel:
    """One kernel of a source; a `Launch`."""
    bundle = _bundles().get(name, ())
    known = any(kernel.name == name and kernel_sources.source(kernel) == source for kernel in bundle)
    library = compile(kernel_sources.source(*bundle) if known else source)
    if not hasattr(library, f"{name}__host"):
        raise RuntimeError(f"the source defines no kernel {name!r}, but {_KERNEL.findall(source)}")
    return HostKernel(library, name)
