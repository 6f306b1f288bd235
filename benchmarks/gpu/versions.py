"""What a GPU check runs on, as JSON; a program of its own, so that the check itself holds no GPU."""

from __future__ import annotations

import contextlib
import importlib
import json
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import collectives
from benchmarks.gpu.figures import publish
from collectives.device.diagnosis import why_not


def versions() -> dict[str, Any]:
    """Versions, the GPUs, the date, and under "problem" why GPUs cannot be used (None if they can)."""
    report: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "collectives": collectives.__version__,
        "python": platform.python_version(),
        "problem": why_not(),
    }
    for ask in (_driver, _mpi, _torch, _cupy):
        # Whatever is missing or broken is simply not told: the checks themselves say what they lack.
        with contextlib.suppress(Exception):
            report.update(ask())
    return report


def _driver() -> dict[str, Any]:
    return {"driver": Path("/proc/driver/nvidia/version").read_text().splitlines()[0]}


def _mpi() -> dict[str, Any]:
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    return {"mpi": MPI.Get_library_version().strip("\0 \n").splitlines()[0].split(",")[0]}


def _torch() -> dict[str, Any]:
    return {"torch": importlib.import_module("torch").__version__}


def _cupy() -> dict[str, Any]:
    cupy = importlib.import_module("cupy")
    runtime, nccl = cupy.cuda.runtime, cupy.cuda.nccl
    report = {"cupy": cupy.__version__, "nccl": nccl.get_version() if nccl.available else None}
    with contextlib.suppress(Exception):
        gpus = [runtime.getDeviceProperties(index) for index in range(runtime.getDeviceCount())]
        report["cuda"] = {"runtime": runtime.runtimeGetVersion(), "driver": runtime.driverGetVersion()}
        report["gpus"] = [{"name": gpu["name"].decode(), "bytes": gpu["totalGlobalMem"]} for gpu in gpus]
    return report


if __name__ == "__main__":
    here = versions()
    print(json.dumps(here))
    publish([], **here)
