"""Hosts and ranks that a batch system has allotted, by its variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectives.launch.hosts import allotted

SLURM = {"SLURM_JOB_NODELIST": "gpu[08-10],login", "SLURM_TASKS_PER_NODE": "4(x3),1"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ""),
        (SLURM, "gpu08:4 gpu09:4 gpu10:4 login:1"),
        ({"SLURM_JOB_NODELIST": "a"}, "a:1"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, "gpu08:4 gpu09:4 gpu10:4 login:1"),  # srun --pty bash
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "13"}, ""),  # this process is one of them
        ({"SLURM_JOB_NODELIST": "a[b-c]"}, ""),
        ({"LSB_MCPU_HOSTS": "batch 1 node2 16 node1 16"}, "batch:1 node2:16 node1:16"),
        ({"LSB_MCPU_HOSTS": "batch one"}, ""),
        ({"PBS_NODEFILE": "no-such-file"}, ""),
    ],
)
def test_hosts_and_ranks(environment: dict[str, str], expected: str) -> None:
    assert " ".join(map(str, allotted(environment))) == expected


def test_a_file_of_pbs(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("b\nb\n\na\nb\n")
    assert " ".join(map(str, allotted({"PBS_NODEFILE": str(file)}))) == "b:3 a:1"
