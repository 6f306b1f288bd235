"""The JSON file: the machine, the settings, and every record."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import collectives
from collectives.launch.report import version
from collectives.tools.bench.cli import Settings
from collectives.tools.bench.collective import Collective
from collectives.tools.bench.device import read
from collectives.tools.bench.measure import Record
from collectives.worlds.summary import mpi_version

_PACKAGES = ("numpy", "mpi4py", "numkong", "ml_dtypes", "torch", "tensorflow", "tensorflow-cpu", "keras", "jax")


def machine() -> dict[str, Any]:
    """Processor, cores, caches, system, MPI library, versions; no names of hosts or users."""
    model = next(
        (line.split(":", 1)[1].strip() for line in read("/proc/cpuinfo").splitlines() if line.startswith("model name")),
        "",
    )
    caches = {
        f"L{read(f'{folder}/level').strip()} {read(f'{folder}/type').strip()}": read(f"{folder}/size").strip()
        for folder in sorted(str(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
    }
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": model or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": cores,
        "caches": caches,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "mpi": mpi_library(),
        "packages": {"collectives": collectives.__version__}
        | {name: installed for name in _PACKAGES if (installed := version(name))},
    }


def mpi_library() -> str:
    """The name and version of the MPI library; empty when this run has started none."""
    mpi = sys.modules.get("mpi4py.MPI")
    if not mpi:
        return ""
    return mpi_version(mpi.Get_library_version())


def document(collective: Collective, ranks: int, settings: Settings, records: Sequence[Record]) -> dict[str, Any]:
    """Everything that was measured, ready for ``json.dump``."""
    asked = asdict(settings)
    return {
        "benchmark": collective.name,
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "ranks": ranks,
        "machine": machine(),
        "settings": {key: str(value) if isinstance(value, Path) else value for key, value in asked.items()},
        "units": {"time": "microseconds", "bandwidth": "GB/s, 1e9 bytes", "size": "bytes"},
        "limit": f"one memcpy of {collective.limit_text}",
        "records": [record.as_dict() for record in records],
    }


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
