"""From options to the command of one MPI: a pure function, tested for each.

    Open MPI    mpirun -n 4 --host h1:2,h2:2 -x NAME [--allow-run-as-root] [--oversubscribe] --bind-to none PROGRAM
    MPICH       mpirun -n 4 -hosts h1:2,h2:2 -genv NAME VALUE PROGRAM
    Intel MPI   mpirun -n 4 -machinefile FILE -genv NAME VALUE PROGRAM

``srun`` needs no building: ``srun --mpi=pmix -n 4 python train.py`` (Open MPI), ``srun --mpi=pmi2`` (MPICH, Intel MPI).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from collectives.launch.hosts import Host
from collectives.launch.mpirun import Launcher, Vendor

_OURS = ("COLLECTIVES_", "HOROVOD_")
_TO_OTHER_HOSTS = (*_OURS, "CUDA_", "NCCL_", "OMP_NUM_THREADS", "LD_LIBRARY_PATH", "PATH", "PYTHON", "VIRTUAL_ENV")


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What is to be started.

    Attributes:
        ranks: the number of ranks.
        program: the user's command, untouched.
        hosts: where; empty: on this host.
        machinefile: path of a file with one ``host:ranks`` a line; needed where hosts are given.
        mpi_args: further arguments for ``mpirun``, passed on as they are.
        root: whether the superuser starts it.
        cores: of this host.
    """

    ranks: int
    program: Sequence[str]
    hosts: Sequence[Host] = ()
    machinefile: str = ""
    mpi_args: Sequence[str] = ()
    root: bool = False
    cores: int = 1


def build(launcher: Launcher, request: JobSpec, environment: Mapping[str, str]) -> list[str]:
    """Build the command that starts the ranks.

    Args:
        launcher: the ``mpirun``.
        request: what is to be started.
        environment: of the launcher. Its settings for collectives reach every rank on every MPI; with several hosts,
            those for Python, CUDA and NCCL too (Hydra passes on the whole environment by itself).
    """
    is_open_mpi = launcher.vendor is Vendor.OPEN_MPI
    options = _open_mpi(request, environment) if is_open_mpi else _hydra(request, environment, launcher.vendor)
    return [launcher.path, "-n", str(request.ranks), *options, *request.mpi_args, *request.program]


def _open_mpi(request: JobSpec, environment: Mapping[str, str]) -> list[str]:
    options = []
    if request.root:
        options += ["--allow-run-as-root"]
    if request.hosts:
        options += ["--host", ",".join(map(str, request.hosts))]
    elif request.ranks > request.cores:
        options += ["--oversubscribe"]
    if not any("bind-to" in argument for argument in request.mpi_args):
        # Otherwise Open MPI binds each of two ranks to one core, which all its threads then share: the engine's and the
        # framework's.
        options += ["--bind-to", "none"]
    for name in sorted(environment):
        if name.startswith(_TO_OTHER_HOSTS if request.hosts else _OURS):
            options += ["-x", name]
    return options


def _hydra(request: JobSpec, environment: Mapping[str, str], vendor: Vendor) -> list[str]:
    options = []
    if request.hosts:
        options += (
            ["-machinefile", request.machinefile]
            if vendor is Vendor.INTEL_MPI
            else ["-hosts", ",".join(map(str, request.hosts))]
        )
    for name in sorted(environment):
        if name.startswith(_OURS):
            options += ["-genv", name, environment[name]]
    return options
