"""Which command starts processes on the hosts that a batch system has allotted, and what travels there."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectives.launch import cli
from collectives.launch.batch_system import batch_system
from collectives.launch.ssh import Ssh

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_TASKS_PER_NODE": "2,3", "SLURM_NTASKS": "5"}
LSF = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "node1 2 node2 3"}


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, the only one on PATH, with a program of each name."""
    for name in ("ssh", "srun", "blaunch", "pbs_attach"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_slurm_starts_a_step_that_shares_what_the_job_has_on_the_host() -> None:
    system = batch_system(SLURM, Ssh())
    assert system is not None and (system.starter("node2"), system.address("node2")) == ("srun", "node2")
    assert system.command("node2", ["x", "a b"]) == [
        *("env", "-uSLURM_CPUS_PER_TASK", "-uSRUN_CPUS_PER_TASK", "-uSLURM_NTASKS_PER_NODE"),
        *("srun", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist=node2"),
        *("--export=ALL", "--cpu-bind=none", "--mpi=none", "--quiet"),
        *("env", "-uSSH_CONNECTION", "-uSLURM_STEP_NUM_TASKS", "-uSLURM_NTASKS", "-uSLURM_NPROCS", "-uSLURM_PROCID"),
        *("x", "a b"),
    ]


@pytest.mark.parametrize("requested", ["2", "a100:2"])
def test_a_step_has_the_gpus_of_all_tasks_of_its_host(requested: str) -> None:
    system = batch_system({**SLURM, "SLURM_GPUS_PER_TASK": requested}, Ssh())
    assert system is not None and "--gpus-per-node=6" in system.command("node2", ["x"])


def test_lsf_starts_the_words_without_a_shell_between() -> None:
    system = batch_system(LSF, Ssh())
    assert system is not None and system.starter("node2") == "blaunch"
    command = system.command("node2", ["x", "a b"])
    assert command[:5] == ["blaunch", "-no-shell", "node2", "env", "-uSSH_CONNECTION"] and command[-2:] == ["x", "a b"]


def test_pbs_takes_what_ssh_starts_into_its_job(programs: Path) -> None:
    (programs / "nodes").write_text("node1\nnode2\n")
    system = batch_system({"PBS_JOBID": "7.server", "PBS_NODEFILE": str(programs / "nodes")}, Ssh(port=7))
    assert system is not None and system.starter("node2") == "ssh"
    assert system.command("node2", ["x"])[-4:] == ["7", "--", "node2", f"exec {programs}/pbs_attach -j 7.server x"]


def test_hosts_that_are_not_allotted_are_reached_by_ssh() -> None:
    ssh, system = Ssh(7, "key"), batch_system(SLURM, Ssh(7, "key"))
    assert system is not None and system.starter("node3") == "ssh" and system.advice("node3", 255)[:4] == "'ssh"
    assert system.command("node3", ["x"]) == ssh.command("node3", ["x"])
    assert system.travelling("node3", {"TMPDIR": "/t"}) == {"TMPDIR": "/t"}


def test_what_a_step_says_of_its_host_precedes_what_travels() -> None:
    system = batch_system(SLURM, Ssh())
    assert system is not None
    kept = {"PATH": "/bin", "SLURM_CPUS_PER_TASK": "2", "SLURM_JOB_ID": "7"}
    of_steps = {"CUDA_VISIBLE_DEVICES": "0", "TMPDIR": "/t", "SLURM_CPUS_ON_NODE": "4", "SLURM_STEP_ID": "0"}
    assert system.travelling("node2", {**kept, **of_steps}) == kept


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_ID": "7"}, {**SLURM, "SLURM_STEP_NUM_TASKS": "5"}])
def test_no_job(environment: dict[str, str]) -> None:
    assert batch_system(environment, Ssh()) is None


def test_a_job_without_its_command(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (programs / "srun").unlink()
    assert batch_system(SLURM, Ssh()) is None
    for name, text in SLURM.items():
        monkeypatch.setenv(name, text)
    assert cli.main(["--launcher", "batch", "-np", "2", "ssh"]) == 2


def test_a_step_that_cannot_start_names_the_command_to_try() -> None:
    system = batch_system(SLURM, Ssh())
    assert system is not None
    assert system.advice("node2", 1).startswith("'srun --overlap -N 1 -n 1 -w node2 true' must succeed in the job")
    assert system.advice("node2", 1).endswith("; or pass --launcher ssh")
