"""Find ``mpirun``, and detect its MPI implementation from its version text."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from collectives.base.errors import InvalidArgumentError

_PATIENCE = 30.0


class Vendor(Enum):
    """MPI implementations with a supported command line."""

    OPEN_MPI = "Open MPI"
    MPICH = "MPICH"
    INTEL_MPI = "Intel MPI"


@dataclass(frozen=True, slots=True)
class Launcher:
    """An ``mpirun``: its path, MPI implementation and version."""

    path: str
    vendor: Vendor
    version: str

    def __str__(self) -> str:
        return f"{self.vendor.value} {self.version} ({self.path})"


def recognise(text: str) -> tuple[Vendor, str] | None:
    """Return vendor and version from the output of ``mpirun --version``; None for an unknown MPI."""
    for vendor, pattern in (
        (Vendor.OPEN_MPI, r"\(Open(?: MPI|RTE)\) (\S+)|\(PRRTE\) (\S+)"),
        (Vendor.INTEL_MPI, r"Intel\(R\) MPI Library.*?Version (\S+)"),
        (Vendor.MPICH, r"HYDRA build details:\s+Version:\s+(\S+)"),
    ):
        match = re.search(pattern, text, re.DOTALL)
        if match is not None:
            return vendor, next(group for group in match.groups() if group)
    return None


def with_tools(path: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with the folder of an ``mpirun`` at the end of PATH, where Intel MPI's looks for its
    programs."""
    folders = [folder for folder in (environment.get("PATH"), os.path.dirname(path)) if folder]
    return {**environment, "PATH": os.pathsep.join(folders)}


def find() -> Launcher | None:
    """Find the ``mpirun`` to use: the one beside this Python (an MPI wheel's) before the first one on PATH.

    Returns:
        None if there is none.

    Raises:
        InvalidArgumentError: it does not run, or its MPI is unknown.
    """
    beside = os.path.join(os.path.dirname(sys.executable), "mpirun")
    path = beside if os.access(beside, os.X_OK) else shutil.which("mpirun") or shutil.which("mpiexec")
    if path is None:
        return None
    try:
        shown = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
            stdin=subprocess.DEVNULL,
            env=with_tools(path, os.environ),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidArgumentError(f"{path} --version: {error}; or start the ranks with --launcher ssh") from None
    implementation = recognise(shown.stdout + shown.stderr)
    if implementation is None:
        first = (shown.stdout + shown.stderr).strip().partition("\n")[0]
        names = ", ".join(vendor.value for vendor in Vendor)
        raise InvalidArgumentError(
            f"{path} --version: expected one of {names}, got {first!r}; start the ranks with that MPI's own mpirun: "
            f"mpirun -np N python ..., or with --launcher ssh"
        )
    return Launcher(path, *implementation)
