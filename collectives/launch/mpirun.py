"""Ranks by an MPI launcher: find ``mpirun``, build its command line, start and end the ranks.

    Open MPI    mpirun -n 4 --host h1:2,h2:2 -x NAME [--allow-run-as-root] [--oversubscribe] --bind-to none PROGRAM
    MPICH       mpirun -n 4 -hosts h1:2,h2:2 -genvall PROGRAM
    Intel MPI   mpirun -n 4 -machinefile FILE -genvall PROGRAM

No value of a variable is on a command line, which every user of the host can read.

``srun`` needs no such command: ``srun --mpi=pmix -n 4 python train.py`` (Open MPI), ``srun --mpi=pmi2`` (others).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from collectives.base.errors import InvalidArgumentError
from collectives.launch.agent import die_with_parent
from collectives.launch.hosts import Host
from collectives.launch.job import Ranks
from collectives.launch.output import Output
from collectives.launch.rank import INPUT

_PATIENCE = 30.0
_AFTER_FAILURE = 6.0
_CLOCKS_DIFFER = 1.0
"""Seconds by which a file system's clock may be behind."""
_OURS = ("COLLECTIVES_", "HOROVOD_", "MASTER_")
_HYDRAS_CHOICES = ("-genvall", "-genvlist", "-genvnone")
"""Hydra's options of which it takes one: which variables ranks get."""
_TO_OTHER_HOSTS = (*_OURS, "CUDA_", "NCCL_", "OMP_NUM_THREADS", "LD_LIBRARY_PATH", "PATH", "PYTHON", "VIRTUAL_ENV")


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
    """Append the folder of an ``mpirun`` to PATH, where Intel MPI's looks for its programs."""
    folders = [folder for folder in (environment.get("PATH"), os.path.dirname(path)) if folder]
    return {**environment, "PATH": os.pathsep.join(folders)}


def find() -> Launcher | None:
    """Find the ``mpirun`` to use: the one beside this Python (an MPI wheel's) before the first one on PATH.

    Returns None if there is none, and raises InvalidArgumentError for one that does not run, or of an unknown MPI.
    """
    beside = os.path.join(os.path.dirname(sys.executable), "mpirun")
    path = beside if os.access(beside, os.X_OK) else shutil.which("mpirun") or shutil.which("mpiexec")
    return None if path is None else identify(path)


def identify(path: str) -> Launcher:
    """Return the launcher at a path. InvalidArgumentError: it does not run, or its MPI is unknown."""
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
        raise InvalidArgumentError(
            f"cannot run {path} --version: {error}; repair that MPI, or pass --launcher ssh [L73]"
        ) from None
    implementation = recognise(shown.stdout + shown.stderr)
    if implementation is None:
        first = (shown.stdout + shown.stderr).strip().partition("\n")[0]
        names = ", ".join(vendor.value for vendor in Vendor)
        raise InvalidArgumentError(
            f"{path} --version: expected one of {names}, got {first!r}; start the ranks with that MPI's own mpirun "
            "(mpirun -np N python ...), or pass --launcher ssh [L74]"
        )
    return Launcher(path, *implementation)


def build(
    launcher: Launcher,
    ranks: int,
    program: Sequence[str],
    environment: Mapping[str, str],
    *,
    hosts: Sequence[Host] = (),
    machinefile: str = "",
    mpi_args: Sequence[str] = (),
    root: bool = False,
    cores: int = 1,
) -> list[str]:
    """Build the command that starts the ranks; a pure function.

    Args:
        environment: the launcher's. Variables of collectives are passed to all ranks by every MPI; with several hosts,
            those of Python, CUDA and NCCL as well. Hydra, of MPICH and Intel MPI, passes on all of it, unless
            ``mpi_args`` choose.
        machinefile: path of a file with one ``host:ranks`` per line; Intel MPI needs it if hosts are given.
        root: whether the superuser starts them.
        cores: the number of this host's cores.
    """
    options: list[str] = []
    if launcher.vendor is not Vendor.OPEN_MPI:
        if hosts and launcher.vendor is Vendor.INTEL_MPI:
            options += ["-machinefile", machinefile]
        elif hosts:
            options += ["-hosts", ",".join(map(str, hosts))]
        if not any(argument in _HYDRAS_CHOICES for argument in mpi_args):
            options += ["-genvall"]
    else:
        if root:
            options += ["--allow-run-as-root"]
        if hosts:
            options += ["--host", ",".join(map(str, hosts))]
        elif ranks > cores:
            options += ["--oversubscribe"]
        if not any("bind-to" in argument for argument in mpi_args):
            # By default Open MPI binds each of two ranks to one core, which all threads of the rank would share.
            options += ["--bind-to", "none"]
        for name in sorted(environment):
            if name.startswith(_TO_OTHER_HOSTS if hosts else _OURS):
                options += ["-x", name]
    return [launcher.path, "-n", str(ranks), *options, *mpi_args, *program]


class MpiRanks(Ranks):
    """The ranks of one ``mpirun``, which does not end reliably.

    Open MPI's was seen to hang, ignoring SIGTERM, after a rank had died during start-up.
    """

    ends_within = 1.5

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__()
        self.command, self.environment = list(command), dict(environment)
        self._began = self._failed_at = 0.0

    @property
    def code(self) -> int:
        # Hydra's mpirun ended with 0 in half of the runs in which it had killed the ranks beside one that had left MPI
        # by os._exit(0).
        return super().code or int(bool(self._output.records.cut_short()))

    def start(self, output: Output) -> None:
        self._began = time.time() - _CLOCKS_DIFFER
        process = subprocess.Popen(
            self.command,
            env=self.environment,
            stdin=subprocess.DEVNULL if self.environment.get(INPUT) else None,  # which rank 0 reads itself
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        self.processes.append(process)
        self._output = output
        assert process.stdout is not None and process.stderr is not None
        output.attach(process.stdout.fileno(), process.stderr.fileno())

    def turn(self, readable: Collection[int], writable: Collection[int]) -> None:
        if self._output.records and not self._failed_at:
            self._failed_at = time.monotonic()

    def end_at(self) -> float:
        return self._failed_at + _AFTER_FAILURE if self._failed_at else float("inf")

    def forward(self, number: int) -> None:
        self.processes[0].send_signal(number)

    def end(self) -> None:
        self._output.say("the job has ended, but mpirun is still running; ending it [L75]")
        self.processes[0].terminate()

    def close(self) -> None:
        for process in self.processes:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.close()
            process.stderr.close()
            self._remove_session(process.pid)

    def _remove_session(self, pid: int) -> None:
        """Remove the folder of Open MPI's launcher, which leaves it behind where it is killed."""
        base = next((self.environment[name] for name in ("TMPDIR", "TEMP", "TMP") if name in self.environment), "/tmp")
        folder = Path(base, f"ompi.{pid}")
        with contextlib.suppress(OSError):
            status = folder.stat()
            if status.st_uid == os.geteuid() and status.st_mtime >= self._began:  # else another container's
                shutil.rmtree(folder, ignore_errors=True)
