"""Horovod's queries of available libraries, from ``mpi_built`` to ``rocm_built``.

Horovod is compiled with or without a library. Here "built" means that the library can be loaded in this process and
that the engine would use it.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from typing import Any

from collectives.worlds import runtime

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]

_LIBRARY = "from mpi4py import MPI; print(' '.join(MPI.Get_library_version().split(',')[0].splitlines()[0].split()))"


@functools.cache
def mpi_library() -> str:
    """The MPI that mpi4py loads, such as ``"Open MPI v5.0.11"``; empty if there is none.

    Found out in another process, because loading MPI for the first time starts it.
    """
    import subprocess  # slow to import, and seldom needed

    environment = {**os.environ, "MPI4PY_RC_INITIALIZE": "0"}
    try:
        shown = subprocess.run(
            [sys.executable, "-c", _LIBRARY], capture_output=True, text=True, timeout=30, env=environment, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return shown.stdout.strip().rpartition("\n")[2] if shown.returncode == 0 else ""


def mpi_built() -> bool:
    """Whether mpi4py can load an MPI."""
    return "mpi4py.MPI" in sys.modules or bool(mpi_library())


def mpi_enabled() -> bool:
    """Whether MPI connects the ranks: after `init`, if there are several."""
    return runtime.is_initialized() and runtime.world().network == "mpi"


def mpi_threads_supported() -> bool:
    """Whether several threads may call MPI, so that the program may use mpi4py besides the collectives. False without
    an MPI.

    In a world of one rank, which needs no MPI, this starts MPI, since the program is about to use it.

    Raises:
        NotInitializedError: before `init`.
    """
    runtime.world()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return False
    return MPI.Is_initialized() and MPI.Query_thread() == MPI.THREAD_MULTIPLE


def nccl_built() -> int:
    """NCCL's version as a number, such as 22304 for 2.23.4, if its binding can load it; else 0."""
    cuda_built()  # has CuPy imported without its warnings
    try:
        return int(_import("collectives.device.nccl_binding").load().get_version())
    except Exception:
        return 0


def cuda_built() -> bool:
    """Whether CuPy for CUDA, which tensors on GPUs require, can be loaded. There need not be a GPU."""
    try:
        return not _import("cupy").cuda.runtime.is_hip
    except Exception:
        return False


def gloo_built() -> bool:
    """True: ranks can be connected without MPI, which is what Gloo does for Horovod. Gloo itself is not used."""
    return True


def gloo_enabled() -> bool:
    """Whether ranks are connected without MPI: after `init`, if there are several."""
    return runtime.is_initialized() and runtime.world().network == "tcp"


def ddl_built() -> bool:
    """False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """False: Intel's oneCCL is not used."""
    return False


def rocm_built() -> bool:
    """False: tensors on AMD's GPUs cannot be used."""
    return False


def _import(name: str) -> Any:
    with warnings.catch_warnings():
        # CuPy warns of missing libraries.
        warnings.simplefilter("ignore")
        return importlib.import_module(name)
