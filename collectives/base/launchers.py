"""Which launcher started this process, and whether as one of several: what the environment says.

A process that was started as one of several and finds no other would train by itself: weights diverge, and nothing that
the process can compare shows it. So a world of one rank is made only where no launcher says "several", or the user says
that it is meant.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Sign(NamedTuple):
    """A variable by which a launcher says how many processes it started."""

    variable: str
    text: str
    launcher: str
    processes: int
    """At least so many."""

    def __str__(self) -> str:
        text = self.text if len(self.text) <= 60 else f"{self.text[:57]}..."
        return f"{self.variable}={text} says that {self.launcher} started this process as one of several"


def _size(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _rank(text: str) -> int:
    """A rank other than the first is one of several; the first says nothing."""
    return int(text) + 1 if text.isdecimal() and int(text) > 0 else 0


def _address(text: str) -> int:
    """Where processes need an address to meet at, there are several."""
    return 2


def _cluster(text: str) -> int:
    """The tasks of a ``TF_CONFIG`` that train; parameter servers and evaluators serve them, however many there are."""
    try:
        cluster = json.loads(text)["cluster"]
        return sum(len(cluster.get(role, ())) for role in ("chief", "master", "worker"))
    except (ValueError, TypeError, KeyError, AttributeError):
        return 0


class _Row(NamedTuple):
    variable: str
    read: Callable[[str], int]
    """How many processes a text speaks of; 0: it does not say."""


_Family = Mapping[str, tuple[_Row, ...]]
"""Rows by launcher; the first row that says anything decides for all of them, whether that is "one" or "several"."""

_MPIRUN: _Family = {
    "Open MPI's mpirun": (_Row("OMPI_COMM_WORLD_SIZE", _size), _Row("OMPI_COMM_WORLD_RANK", _rank)),
    "a launcher with PMI (MPICH's or Intel MPI's mpirun, srun)": (_Row("PMI_SIZE", _size), _Row("PMI_RANK", _rank)),
    "MVAPICH's mpirun": (_Row("MV2_COMM_WORLD_SIZE", _size), _Row("MV2_COMM_WORLD_RANK", _rank)),
}
_JOBS: _Family = {
    "Slurm": (
        _Row("SLURM_STEP_NUM_TASKS", _size),
        _Row("SLURM_NTASKS", _size),
        _Row("SLURM_NPROCS", _size),
        _Row("SLURM_PROCID", _rank),
    ),
    "Flux": (_Row("FLUX_JOB_SIZE", _size),),
}
_MPI: _Family = {**_MPIRUN, **_JOBS}
"""Launchers whose processes MPI may join, the innermost first: an ``mpirun`` within a job of Slurm's knows better what
it started."""

_PMIX: _Family = {"a launcher with PMIx (prterun, srun)": (_Row("PMIX_RANK", _rank),)}
_TORCH: _Family = {
    "torchrun, or a launcher that speaks as it does (Ray Train, DeepSpeed, Accelerate, a program of its own),": (
        _Row("WORLD_SIZE", _size),
        _Row("RANK", _rank),
        _Row("LOCAL_WORLD_SIZE", _size),
    )
}
_JAX: _Family = {
    "a launcher for JAX": (
        _Row("JAX_NUM_PROCESSES", _size),
        _Row("JAX_PROCESS_ID", _rank),
        _Row("JAX_COORDINATOR_ADDRESS", _address),
    )
}
_TENSORFLOW: _Family = {"a launcher for TensorFlow": (_Row("TF_CONFIG", _cluster),)}
_HOROVOD: _Family = {"horovodrun": (_Row("HOROVOD_SIZE", _size), _Row("HOROVOD_RANK", _rank))}

_FAMILIES = (_MPI, _PMIX, _TORCH, _JAX, _TENSORFLOW, _HOROVOD)

VARIABLES = tuple(row.variable for family in _FAMILIES for rows in family.values() for row in rows)
"""Every variable that says something about the number of processes."""


def several(environment: Mapping[str, str]) -> Sign | None:
    """The first sign that this process is one of several; None if there is none."""
    signs = (_first(environment, family) for family in _FAMILIES)
    return next((sign for sign in signs if sign is not None and sign.processes > 1), None)


def mpi_may_join(environment: Mapping[str, str]) -> bool:
    """Whether MPI has to be asked for the number of ranks, because a launcher that it knows may have started more than
    one."""
    mpirun = _first(environment, _MPIRUN)
    if mpirun is not None:
        return mpirun.processes > 1
    job = _first(environment, _JOBS)
    # PMIx tells the number of processes to the MPI library alone.
    return (job is not None and job.processes > 1) or bool(environment.get("PMIX_NAMESPACE"))


def _first(environment: Mapping[str, str], family: _Family) -> Sign | None:
    for launcher, rows in family.items():
        for variable, read in rows:
            text = environment.get(variable, "").strip()
            processes = read(text) if text else 0
            if processes:
                return Sign(variable, text, launcher, processes)
    return None
