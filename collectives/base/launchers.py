"""Launchers: whether the environment says that this process was started as one of several.

A process that was started as one of several but finds no other would train alone: weights diverge, and no comparison
within the process detects it. A world of one rank is therefore made only if no launcher's variable says "several", or
if the user allows it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Sign(NamedTuple):
    """An environment variable by which a launcher states how many processes it started."""

    variable: str
    text: str
    launcher: str
    processes: int
    """A lower bound."""

    def __str__(self) -> str:
        text = self.text if len(self.text) <= 60 else f"{self.text[:57]}..."
        return f"{self.variable}={text} says that {self.launcher} started this process as one of several"


MOST_DIGITS = 9
"""Of a number of ranks, or of a rank."""


def _size(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else 0


def _rank(text: str) -> int:
    """A rank above 0 implies several processes; rank 0 says nothing."""
    rank = _size(text)
    return rank + 1 if rank else 0


def _address(text: str) -> int:
    """A coordinator address implies several processes."""
    return 2


def _cluster(text: str) -> int:
    """The number of training tasks in a ``TF_CONFIG``, without parameter servers and evaluators."""
    try:
        cluster = json.loads(text)["cluster"]
        return sum(len(cluster.get(role, ())) for role in ("chief", "master", "worker"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return 0


_Family = Mapping[str, tuple[tuple[str, Callable[[str], int]], ...]]
"""By launcher: variables, each with the function that reads how many processes its text implies, 0 if it does not say.
The first one that implies a number decides for the whole family."""

_TORCHS_PLACE = "COLLECTIVES_TORCHS_PLACE"
_MPIRUN: _Family = {
    "Open MPI's mpirun": (("OMPI_COMM_WORLD_SIZE", _size), ("OMPI_COMM_WORLD_RANK", _rank)),
    "a launcher with PMI (MPICH's or Intel MPI's mpirun, srun)": (("PMI_SIZE", _size), ("PMI_RANK", _rank)),
    "MVAPICH's mpirun": (("MV2_COMM_WORLD_SIZE", _size), ("MV2_COMM_WORLD_RANK", _rank)),
}
_JOBS: _Family = {
    "Slurm": (
        ("SLURM_STEP_NUM_TASKS", _size),
        ("SLURM_NTASKS", _size),
        ("SLURM_NPROCS", _size),
        ("SLURM_PROCID", _rank),
    ),
    "Flux": (("FLUX_JOB_SIZE", _size),),
}
_MPI: _Family = {**_MPIRUN, **_JOBS}
"""Launchers whose processes MPI can connect, innermost first: ``mpirun`` within a Slurm job is more precise."""

_SLURM_PMI = ("PMI_FD", "PMI_RANK", "PMI_SIZE", "PMIX_RANK", "I_MPI_PMI_LIBRARY")
"""Variables of a step of Slurm's whose tasks MPI can connect."""
_PMIX: _Family = {"a launcher with PMIx (prterun, srun)": (("PMIX_RANK", _rank),)}
_TORCH: _Family = {
    "torchrun, or a launcher that sets the same variables (Ray Train, DeepSpeed, Accelerate, your own program),": (
        ("WORLD_SIZE", _size),
        ("RANK", _rank),
        ("LOCAL_WORLD_SIZE", _size),
    )
}
_JAX: _Family = {
    "a launcher for JAX": (
        ("JAX_NUM_PROCESSES", _size),
        ("JAX_PROCESS_ID", _rank),
        ("JAX_COORDINATOR_ADDRESS", _address),
    )
}
_TENSORFLOW: _Family = {"a launcher for TensorFlow": (("TF_CONFIG", _cluster),)}
_HOROVOD: _Family = {"horovodrun": (("HOROVOD_SIZE", _size), ("HOROVOD_RANK", _rank))}
_OWN: _Family = {
    "collectivesrun, or a launcher that sets the same variables,": (
        ("COLLECTIVES_SIZE", _size),
        ("COLLECTIVES_RANK", _rank),
    )
}

_FAMILIES = (_OWN, _MPI, _PMIX, _TORCH, _JAX, _TENSORFLOW, _HOROVOD)

_NEEDED = {
    launcher: names
    for family, names in (
        (_TORCH, ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),
        (_JAX, ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS")),
    )
    for launcher in family
}
"""By launcher: all variables that the ranks need to meet."""

VARIABLES = tuple(variable for family in _FAMILIES for rows in family.values() for variable, _ in rows)
"""Every variable that says something about the number of processes."""

RANK_VARIABLES = (
    *("COLLECTIVES_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"),
    *("RANK", "SLURM_PROCID", "JAX_PROCESS_ID"),
)
"""Variables with this process's rank; the first that is there counts."""


def rank(environment: Mapping[str, str]) -> int:
    """This process's rank, as its launcher says it; 0 where none does."""
    return next((int(environment[name]) for name in RANK_VARIABLES if environment.get(name, "").isdigit()), 0)


def several(environment: Mapping[str, str]) -> Sign | None:
    """The first variable that says this process is one of several; None if there is none."""
    families = [family for family in _FAMILIES if family is not _TORCH or not torchs_are_ours(environment)]
    signs = (_first(environment, family) for family in families)
    return next((sign for sign in signs if sign is not None and sign.processes > 1), None)


def has_pmix_alone(environment: Mapping[str, str]) -> bool:
    """Whether the launcher connects its processes by PMIx, and not by an older PMI."""
    return bool(environment.get("PMIX_NAMESPACE")) and not any(
        name in environment for name in ("PMI_FD", "PMI_RANK", "PMI_PORT")
    )


def remedy(environment: Mapping[str, str], sign: Sign) -> str:
    """What the user of a launcher can do about a process that is one of several, by ``sign``, and finds no other; empty
    where nothing special is known."""
    if sign.variable in ("SLURM_NTASKS", "SLURM_NPROCS") and not environment.get("SLURM_STEP_ID"):
        return "this process is the Slurm job's script, not a task; start the tasks with srun: srun python train.py"
    needed = _NEEDED.get(sign.launcher, ())
    missing = [name for name in needed if not environment.get(name)]
    return f"the ranks meet through {', '.join(needed)}; set also {' and '.join(missing)}" if missing else ""


def torchs_are_ours(environment: Mapping[str, str]) -> bool:
    """Whether torch's variables are those that ``collectivesrun`` has set, for programs that read no others: they tell
    `init` nothing, and their address is free for torch."""
    place = environment.get(_TORCHS_PLACE, "").split()
    return "TORCHELASTIC_RUN_ID" not in environment and place == [
        environment.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")
    ]


def mpi_may_join(environment: Mapping[str, str]) -> bool:
    """Whether MPI must be asked for the number of ranks: a launcher that it supports may have started several."""
    if environment.get("TORCHELASTIC_RUN_ID"):
        return False  # what an MPI launcher says here, it has said of torchrun
    mpirun = _first(environment, _MPIRUN)
    if mpirun is not None:
        return mpirun.processes > 1
    if environment.get("PMIX_NAMESPACE"):
        return True  # PMIx gives the number of processes to the MPI library only
    if environment.get("SLURM_STEP_ID") and not any(name in environment for name in _SLURM_PMI):
        return False  # srun --mpi=none
    job = _first(environment, _JOBS)
    return job is not None and job.processes > 1


def _first(environment: Mapping[str, str], family: _Family) -> Sign | None:
    for launcher, rows in family.items():
        for variable, read in rows:
            text = environment.get(variable, "").strip()
            processes = read(text) if text else 0
            if processes:
                return Sign(variable, text, launcher, processes)
    return None
