"""Places: which rank a process is, of how many, and where the ranks can meet, as launchers' variables say it.

A launcher that starts processes says more or less: torchrun gives everything; Slurm, ``TF_CONFIG`` and JAX's variables
name a host on which rank 0 runs, but no port that is free; Open MPI and MPICH say only how many ranks there are, and
how many of them are on this host.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from collectives.base.launchers import torchs_are_ours

_MOST_NODES = 1 << 20
CANDIDATES = 8
"""Ports of which rank 0 takes the first that is free."""
_FIRST_PORT, _PORTS = 20000, 12000
"""Below the range from which Linux assigns ports by itself."""
LOOPBACK = "127.0.0.1"


class Spot(NamedTuple):
    """Where a launcher has put a process, and where the ranks can meet."""

    rank: int
    size: int
    launcher: str
    """With the variables that said it; for messages."""
    host: str
    """Of rank 0; empty: unknown."""
    ports: tuple[int, ...] = ()
    """Where rank 0 may listen."""
    job: str = ""
    """A text that the ranks of this job share, and those of another do not, unless it meets at the same port."""
    torch: bool = False
    """Whether torch's store may be served at this address."""


def detect(environment: Mapping[str, str], *, without_mpi: bool = False) -> Spot | None:
    """What the innermost launcher says; None if none says enough.

    A process that it has started as the only one has a spot of size 1. With ``without_mpi``, for a process that cannot
    load MPI, what MPI launchers say counts; a spot of theirs has no host unless all ranks are on this one.
    """
    spot = None if torchs_are_ours(environment) else _read(_torchrun, environment)
    if spot is not None:
        return spot
    mpi, slurm = _read(_open_mpi, environment) or _read(_pmi, environment), _read(_slurm, environment)
    if mpi is None:
        spot = slurm
    elif mpi.size > 1:
        by_srun = slurm is not None and slurm[:2] == mpi[:2] and "PMI_RANK" in environment
        return slurm if by_srun else mpi if without_mpi else None
    return spot or _read(_tensorflow, environment) or _read(_jax, environment)


def _read(reader: Callable[[Mapping[str, str]], Spot | None], environment: Mapping[str, str]) -> Spot | None:
    wrong = (KeyError, ValueError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)
    with suppress(*wrong):
        spot = reader(environment)
        if spot is not None and 0 <= spot.rank < spot.size:
            return spot
    return None


def ports_of(job: str) -> tuple[int, ...]:
    """The ports at which the ranks of a job may meet: the same on all ranks, others for other jobs."""
    digest = hashlib.sha256(job.encode()).digest()
    ports = (int.from_bytes(digest[i : i + 4], "big") % _PORTS + _FIRST_PORT for i in range(0, 4 * CANDIDATES, 4))
    return tuple(dict.fromkeys(ports))


def nodes(nodelist: str) -> list[str]:
    """The hosts of a list of Slurm's such as ``node[01-03,07],login``."""
    return [node for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist.strip()) for node in _expanded(part)]


def _expanded(part: str) -> list[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, tail = rest.partition("]")
    numbers: list[str] = []
    for span in inside.split(","):
        first, dash, last = span.partition("-")
        if dash and int(last) - int(first) >= _MOST_NODES:
            raise ValueError(f"{span} are more than {_MOST_NODES} hosts")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)] if dash else [first]
    return [f"{head}{number}{end}" for number in numbers for end in _expanded(tail)]


def _torchrun(environment: Mapping[str, str]) -> Spot:
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    host, port = environment["MASTER_ADDR"], environment["MASTER_PORT"]
    launcher = "torchrun, or one that sets the same variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)"
    return Spot(rank, size, launcher, host, (int(port),), f"torchrun {host}:{port}", torch=True)


def _slurm(environment: Mapping[str, str]) -> Spot:
    job_id, step = environment["SLURM_JOB_ID"], environment["SLURM_STEP_ID"]
    # Without a step this is the script of a batch job, which is not one of its tasks.
    job = f"slurm {job_id}.{step}.{environment.get('SLURM_RESTART_COUNT', '0')}"
    rank = int(environment["SLURM_PROCID"])
    size = int(environment.get("SLURM_STEP_NUM_TASKS") or environment["SLURM_NTASKS"])
    launcher = "srun (SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST)"
    return Spot(rank, size, launcher, nodes(environment["SLURM_STEP_NODELIST"])[0], ports_of(job), job)


def _tensorflow(environment: Mapping[str, str]) -> Spot:
    config: dict[str, Any] = json.loads(environment["TF_CONFIG"])
    cluster, task = config["cluster"], config["task"]
    tasks = [(role, number) for role in ("chief", "master", "worker") for number in range(len(cluster.get(role, ())))]
    role, number = tasks[0]
    # The ports that are listed belong to TensorFlow's own servers.
    job = f"TF_CONFIG {json.dumps(cluster, sort_keys=True)}"
    rank = tasks.index((task["type"], int(task["index"])))
    return Spot(rank, len(tasks), "TF_CONFIG", _host(cluster[role][number]), ports_of(job), job)


def _jax(environment: Mapping[str, str]) -> Spot:
    coordinator = environment["JAX_COORDINATOR_ADDRESS"]
    rank, size = int(environment["JAX_PROCESS_ID"]), int(environment["JAX_NUM_PROCESSES"])
    job = f"JAX {coordinator} {size}"
    launcher = "a launcher for JAX (JAX_PROCESS_ID, JAX_NUM_PROCESSES, JAX_COORDINATOR_ADDRESS)"
    return Spot(rank, size, launcher, _host(coordinator), ports_of(job), job)


def _open_mpi(environment: Mapping[str, str]) -> Spot:
    rank, size = int(environment["OMPI_COMM_WORLD_RANK"]), int(environment["OMPI_COMM_WORLD_SIZE"])
    launcher = "Open MPI's mpirun (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE)"
    job = environment.get("PMIX_NAMESPACE") or _launcher_process("OMPI_COMM_WORLD_RANK")
    return _local(rank, size, launcher, environment.get("OMPI_COMM_WORLD_LOCAL_SIZE"), job)


def _pmi(environment: Mapping[str, str]) -> Spot:
    rank, size = int(environment["PMI_RANK"]), int(environment["PMI_SIZE"])
    job = environment.get("PMI_JOBID") or _launcher_process("PMI_RANK")
    local_size = environment.get("MPI_LOCALNRANKS")
    return _local(rank, size, "a launcher with PMI (PMI_RANK, PMI_SIZE)", local_size, job)


def _local(rank: int, size: int, launcher: str, here: str | None, job: str) -> Spot:
    if not job or int(here or 0) != size:
        return Spot(rank, size, launcher, "")
    return Spot(rank, size, launcher, LOOPBACK, ports_of(job), job)


def _launcher_process(variable: str) -> str:
    """The nearest ancestor without a rank's variable: the launcher's process on this host, for all its ranks here."""
    folder, prefix = Path("/proc/self"), f"{variable}=".encode()
    try:
        while any(entry.startswith(prefix) for entry in (folder / "environ").read_bytes().split(b"\0")):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            folder = Path("/proc", parent)
        began = (folder / "stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
    return f"process {folder.name} {began}" if folder.name != "self" else ""


def _host(address: str) -> str:
    """The host of ``host:port``."""
    return address.rpartition(":")[0].strip("[]")
