"""Which rank a process is, and where the ranks can meet, by what launchers say in the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from collectives.base import places
from collectives.base.places import LOOPBACK, detect, nodes, ports_of

TORCH = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "29500", "LOCAL_RANK": "1"}
SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gpu[07,09-12]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-1@1",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "PMI_JOBID": "job"}
JAX = {"JAX_COORDINATOR_ADDRESS": "[::1]:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


def tensorflow(role: str, index: int, **roles: int) -> dict[str, str]:
    cluster = {name: [f"{name}{number}:2222" for number in range(count)] for name, count in roles.items()}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})}


@pytest.mark.parametrize(
    ("nodelist", "expected"),
    [
        ("node1", "node1"),
        ("node[01-03,07],x[1-2]-y", "node01 node02 node03 node07 x1-y x2-y"),
        ("a,b[1-3]", "a b1 b2 b3"),
        ("rack[2,4]n[08-10].lan", "rack2n08.lan rack2n09.lan rack2n10.lan rack4n08.lan rack4n09.lan rack4n10.lan"),
        ("", ""),
    ],
)
def test_the_hosts_of_a_nodelist(nodelist: str, expected: str) -> None:
    assert nodes(nodelist) == expected.split()


@pytest.mark.parametrize(
    ("environment", "rank", "size", "host"),
    [
        (TORCH, 1, 4, "node1"),
        (SLURM, 3, 8, "gpu07"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "", "SLURM_NTASKS": "4"}, 3, 4, "gpu07"),
        (tensorflow("worker", 1, worker=2), 1, 2, "worker0"),
        (tensorflow("worker", 1, chief=1, worker=2, ps=3), 2, 3, "chief0"),
        (tensorflow("chief", 0, worker=2, chief=1), 0, 3, "chief0"),
        (tensorflow("master", 0, master=1, worker=1), 0, 2, "master0"),
        (JAX, 1, 2, "::1"),
        # The innermost launcher decides.
        ({**SLURM, **TORCH}, 1, 4, "node1"),
        ({**OPEN_MPI, **TORCH}, 1, 4, "node1"),
        ({**TORCH, "WORLD_SIZE": "1", "RANK": "0", **SLURM}, 0, 1, "node1"),
        ({**SLURM, **tensorflow("worker", 0, worker=2)}, 3, 8, "gpu07"),
        # srun --mpi=pmi2
        ({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "8"}, 3, 8, "gpu07"),
    ],
)
def test_detect(environment: dict[str, str], rank: int, size: int, host: str) -> None:
    for without_mpi in (False, True):
        spot = detect(environment, without_mpi=without_mpi)
        assert spot is not None
        assert (spot.rank, spot.size, spot.host) == (rank, size, host)
        assert spot.torch == ("RANK" in environment)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WORLD_SIZE": "2", "RANK": "0"},
        {**TORCH, "RANK": "4"},
        {**TORCH, "COLLECTIVES_TORCHS_PLACE": "1 4 29500"},  # collectivesrun's, whose ranks meet elsewhere
        {**TORCH, "RANK": "x"},
        {key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"},  # the script of a batch job
        {"TF_CONFIG": "{"},
        {"TF_CONFIG": "[]"},
        tensorflow("ps", 0, worker=2, ps=1),
        tensorflow("evaluator", 0, worker=2),
        {key: value for key, value in JAX.items() if key != "JAX_PROCESS_ID"},
    ],
)
def test_nothing_is_known(environment: dict[str, str]) -> None:
    assert detect(environment) is None and detect(environment, without_mpi=True) is None


@pytest.mark.parametrize("environment", [OPEN_MPI, PMI, {**OPEN_MPI, **SLURM}])
def test_what_mpi_launchers_say_counts_without_mpi(environment: dict[str, str]) -> None:
    assert detect(environment) is None
    spot = detect(environment, without_mpi=True)
    assert spot is not None and (spot.rank, spot.size, spot.host) == (1, 2, LOOPBACK) and spot.job
    several_hosts = {**environment, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MPI_LOCALNRANKS": "1"}
    spot = detect(several_hosts, without_mpi=True)
    assert spot is not None and (spot.rank, spot.size, spot.host) == (1, 2, "")


def test_ranks_of_a_launcher_without_a_job_number_find_its_process() -> None:
    """As under MPICH's mpirun, with a shell between the launcher's process and the second rank."""
    program = (
        "from collectives.base import places; import os;"
        "spot = places.detect(os.environ, without_mpi=True); print(spot.rank, spot.host, spot.job)"
    )
    environment = {**os.environ, "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
    commands: list[list[str]] = [[sys.executable, "-c", program], ["sh", "-c", '"$@"; true', "-"]]
    commands[1] += commands[0]
    shown = [
        subprocess.run(
            command, env={**environment, "PMI_RANK": str(rank)}, capture_output=True, text=True, check=True, timeout=60
        ).stdout.split(maxsplit=2)
        for rank, command in enumerate(commands)
    ]
    assert [words[:2] for words in shown] == [["0", LOOPBACK], ["1", LOOPBACK]]
    assert shown[0][2] == shown[1][2] and f"process {os.getpid()} " in shown[0][2]


def test_ports_are_those_of_the_job() -> None:
    first, second = detect(SLURM), detect({**SLURM, "SLURM_PROCID": "0"})
    assert first is not None and second is not None and first.ports == second.ports == ports_of(first.job)
    other = detect({**SLURM, "SLURM_STEP_ID": "1"})
    assert other is not None and other.ports != first.ports
    one, two = (detect(tensorflow("worker", index, worker=2)) for index in (0, 1))
    assert one is not None and two is not None and (one.job, one.ports) == (two.job, two.ports)
    for ports in (first.ports, other.ports, one.ports):
        assert len(ports) == places.CANDIDATES == len(set(ports)) and all(20000 <= port < 32000 for port in ports)
