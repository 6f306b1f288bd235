"""What launchers say in the environment: "several" is seen however it is said, and "one" is no alarm."""

from __future__ import annotations

import json

import pytest

from collectives.base import launchers


def cluster(**roles: int) -> str:
    tasks = {role: [f"host{number}:2222" for number in range(count)] for role, count in roles.items()}
    return json.dumps({"cluster": tasks, "task": {"type": "worker", "index": 0}})


@pytest.mark.parametrize(
    ("environment", "variable", "processes"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE", 4),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "PMI_SIZE", 2),
        ({"PMI_RANK": "3"}, "PMI_RANK", 4),
        ({"MV2_COMM_WORLD_SIZE": "8"}, "MV2_COMM_WORLD_SIZE", 8),
        ({"PMIX_RANK": "1"}, "PMIX_RANK", 2),
        ({"SLURM_NTASKS": "4"}, "SLURM_NTASKS", 4),
        ({"SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "4"}, "SLURM_STEP_NUM_TASKS", 3),
        ({"SLURM_NPROCS": "2"}, "SLURM_NPROCS", 2),
        ({"SLURM_PROCID": "1"}, "SLURM_PROCID", 2),
        ({"FLUX_JOB_SIZE": "2"}, "FLUX_JOB_SIZE", 2),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}, "WORLD_SIZE", 2),
        ({"RANK": "1"}, "RANK", 2),
        ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE", 2),
        ({"JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "host:1234"}, "JAX_NUM_PROCESSES", 2),
        ({"JAX_PROCESS_ID": "1"}, "JAX_PROCESS_ID", 2),
        ({"JAX_COORDINATOR_ADDRESS": "host:1234"}, "JAX_COORDINATOR_ADDRESS", 2),
        ({"TF_CONFIG": cluster(worker=2)}, "TF_CONFIG", 2),
        ({"TF_CONFIG": cluster(chief=1, worker=2, ps=3)}, "TF_CONFIG", 3),
        ({"HOROVOD_SIZE": "4", "HOROVOD_RANK": "0"}, "HOROVOD_SIZE", 4),
        ({"COLLECTIVES_SIZE": "2", "COLLECTIVES_RANK": "0"}, "COLLECTIVES_SIZE", 2),
        # One rank of mpirun's that is several of somebody else's.
        ({"OMPI_COMM_WORLD_SIZE": "1", "WORLD_SIZE": "4"}, "WORLD_SIZE", 4),
    ],
)
def test_several(environment: dict[str, str], variable: str, processes: int) -> None:
    sign = launchers.several(environment)
    assert sign is not None and (sign.variable, sign.processes) == (variable, processes)
    assert f"{variable}={environment[variable]}"[:50] in str(sign)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        dict.fromkeys(launchers.VARIABLES, ""),
        dict.fromkeys(launchers.VARIABLES, "nonsense") | {"JAX_COORDINATOR_ADDRESS": ""},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-1"},
        {"PMI_SIZE": "1", "PMI_RANK": "0"},
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"},
        {"JAX_NUM_PROCESSES": "1", "JAX_COORDINATOR_ADDRESS": "localhost:1234"},
        {"TF_CONFIG": cluster(worker=1, evaluator=1)},
        {"TF_CONFIG": "[]"},
        {"TF_CONFIG": "{"},
        {"HOROVOD_SIZE": "1"},
        # Programs choose their GPU by it.
        {"LOCAL_RANK": "1"},
        # A shell on one task of an allocation of four; one rank started by mpirun within an allocation of four.
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"},
        {"OMPI_COMM_WORLD_SIZE": "1", "SLURM_NTASKS": "4"},
        {"PMI_SIZE": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
    ],
)
def test_one(environment: dict[str, str]) -> None:
    assert launchers.several(environment) is None


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "1", "PMIX_NAMESPACE": "prterun-1"}, False),
        ({"PMI_SIZE": "1", "SLURM_NTASKS": "4"}, False),
        ({"SLURM_NTASKS": "4"}, True),
        ({"SLURM_NTASKS": "1"}, False),
        ({"PMIX_NAMESPACE": "prterun-1", "PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "1"}, True),
        ({"PMIX_RANK": "1"}, False),
        ({"WORLD_SIZE": "4"}, False),
        ({"TF_CONFIG": cluster(worker=2)}, False),
        ({"COLLECTIVES_SIZE": "4"}, False),
        # A step of srun's: MPI can connect its tasks by PMI or PMIx only.
        ({"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}, False),
        ({"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "PMI_FD": "3"}, True),
        ({"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "PMIX_NAMESPACE": "slurm.pmix.17.0"}, True),
        # One torchrun on each of two nodes.
        ({"OMPI_COMM_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "8"}, False),
    ],
)
def test_mpi_is_asked_where_its_launcher_may_have_started_several(environment: dict[str, str], expected: bool) -> None:
    assert launchers.mpi_may_join(environment) is expected


def test_torchs_variables_of_collectivesrun_say_nothing() -> None:
    ours = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500", "COLLECTIVES_TORCHS_PLACE": "1 2 29500"}
    assert launchers.torchs_are_ours(ours) and launchers.several(ours) is None
    # A torchrun, or a program, that collectivesrun has started starts others.
    for theirs in ({"RANK": "0"}, {"WORLD_SIZE": "8"}, {"MASTER_PORT": "1"}, {"TORCHELASTIC_RUN_ID": "none"}):
        assert not launchers.torchs_are_ours({**ours, **theirs}) and launchers.several({**ours, **theirs})


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        # sbatch with plain python
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, "start the tasks with srun"),
        ({"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}, ""),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "set also MASTER_ADDR and MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "set also MASTER_PORT"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, "set also JAX_COORDINATOR_ADDRESS"),
        ({"HOROVOD_SIZE": "2"}, ""),
    ],
)
def test_the_remedy_is_the_launchers(environment: dict[str, str], expected: str) -> None:
    sign = launchers.several(environment)
    assert sign is not None
    remedy = launchers.remedy(environment, sign)
    assert expected in remedy and bool(remedy) == bool(expected)


def test_a_long_text_is_cut() -> None:
    sign = launchers.several({"TF_CONFIG": cluster(worker=100)})
    assert sign is not None and len(str(sign)) < 200
