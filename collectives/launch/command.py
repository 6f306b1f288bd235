"""Build the command line that starts the ranks, for each MPI; a pure function.

    Open MPI    mpirun -n 4 --host h1:2,h2:2 -x NAME [--allow-run-as-root] [--oversubscribe] --bind-to none PROGRAM
    MPICH       mpirun -n 4 -hosts h1:2,h2:2 -genv NAME VALUE PROGRAM
    Intel MPI   mpirun -n 4 -machinefile FILE -genv NAME VALUE PROGRAM

``srun`` needs no such command: ``srun --mpi=pmix -n 4 python train.py`` (Open MPI), ``srun --mpi=pmi2`` (others).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from collectives.launch.hosts import Host
from collectives.launch.mpirun import Launcher, Vendor

_OURS = ("COLLECTIVES_", "HOROVOD_", "MASTER_")
_TO_OTHER_HOSTS = (*_OURS, "CUDA_", "NCCL_", "OMP_NUM_THREADS", "LD_LIBRARY_PATH", "PATH", "PYTHON", "VIRTUAL_ENV")


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The ranks to start.

    Attributes:
        ranks: their number.
        program: the command of each.
        hosts: where they run; empty: on this host.
        machinefile: path of a file with one ``host:ranks`` per line; Intel MPI needs it if hosts are given.
        mpi_args: further arguments for ``mpirun``, passed on unchanged.
        root: whether the superuser starts them.
        cores: the number of this host's cores.
    """

    ranks: int
    program: Sequence[str]
    hosts: Sequence[Host] = ()
    machinefile: str = ""
    mpi_args: Sequence[str] = ()
    root: bool = False
    cores: int = 1


def build(launcher: Launcher, spec: JobSpec, environment: Mapping[str, str]) -> list[str]:
    """Build the command that starts the ranks.

    Args:
        launcher: the ``mpirun`` to use.
        spec: the ranks to start.
        environment: the launcher's. Variables of collectives are passed to all ranks by every MPI; with several hosts,
            those of Python, CUDA and NCCL as well (Hydra passes on the whole environment by itself).
    """
    is_open_mpi = launcher.vendor is Vendor.OPEN_MPI
    options = _open_mpi(spec, environment) if is_open_mpi else _hydra(spec, environment, launcher.vendor)
    return [launcher.path, "-n", str(spec.ranks), *options, *spec.mpi_args, *spec.program]


def _open_mpi(spec: JobSpec, environment: Mapping[str, str]) -> list[str]:
    options = []
    if spec.root:
        options += ["--allow-run-as-root"]
    if spec.hosts:
        options += ["--host", ",".join(map(str, spec.hosts))]
    elif spec.ranks > spec.cores:
        options += ["--oversubscribe"]
    if not any("bind-to" in argument for argument in spec.mpi_args):
        # By default Open MPI binds each of two ranks to one core, which all threads of the rank would share.
        options += ["--bind-to", "none"]
    for name in sorted(environment):
        if name.startswith(_TO_OTHER_HOSTS if spec.hosts else _OURS):
            options += ["-x", name]
    return options


def _hydra(spec: JobSpec, environment: Mapping[str, str], vendor: Vendor) -> list[str]:
    options = []
    if spec.hosts:
        options += (
            ["-machinefile", spec.machinefile]
            if vendor is Vendor.INTEL_MPI
            else ["-hosts", ",".join(map(str, spec.hosts))]
        )
    for name in sorted(environment):
        if name.startswith(_OURS):
            options += ["-genv", name, environment[name]]
    return options
