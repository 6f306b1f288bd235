"""Host lists, host files, and what a batch system has allotted."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectives.base.errors import InvalidArgumentError
from collectives.launch.hosts import Host, allotted, parse_hosts, read_hostfile


def test_a_list_of_hosts() -> None:
    assert parse_hosts("host1:4,host2:2") == (Host("host1", 4), Host("host2", 2))
    assert parse_hosts("node-7.cluster, 10.0.0.3:16,[fe80::1]:2") == (
        Host("node-7.cluster", 1),
        Host("10.0.0.3", 16),
        Host("[fe80::1]", 2),
    )


@pytest.mark.parametrize(
    "text", ["", "host1:", "host1:0", "host1:-1", "host1:two", "host1,,host2", ":4", "host1:4:4", "a b:2"]
)
def test_a_wrong_list_is_shown(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="-H/--hosts: expected host:ranks"):
        parse_hosts(text)


def test_a_host_given_twice_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="'a' 2 times"):
        parse_hosts("a:1,b:1,a:1")


def test_a_file_in_either_spelling(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# two racks\nhost1 slots=4\nhost2:2   # the small one\n\nhost3\nhost4 slots = 2 max_slots=8\n")
    assert read_hostfile(str(file)) == (Host("host1", 4), Host("host2", 2), Host("host3", 1), Host("host4", 2))


def test_a_wrong_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("host1 slots=4\nhost2 cores=4\n")
    with pytest.raises(InvalidArgumentError, match=r"hosts:2: expected .* got 'host2 cores=4'"):
        read_hostfile(str(file))


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"cannot read .*nowhere.*No such file"):
        read_hostfile(str(tmp_path / "nowhere"))
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n")
    with pytest.raises(InvalidArgumentError, match="names no host"):
        read_hostfile(str(empty))


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
        ({**SLURM, "SLURM_GPUS_ON_NODE": "2"}, "gpu08:2 gpu09:2 gpu10:2 login:2"),  # no number of tasks was requested
        ({**SLURM, "SLURM_GPUS_ON_NODE": "2", "SLURM_NTASKS": "13"}, "gpu08:4 gpu09:4 gpu10:4 login:1"),
        ({"LSB_MCPU_HOSTS": "batch 1 node2 16 node1 16"}, "batch:1 node2:16 node1:16"),
        ({"LSB_MCPU_HOSTS": "batch one"}, ""),
        ({"PBS_NODEFILE": "no-such-file"}, ""),
    ],
)
def test_what_a_batch_system_has_allotted(environment: dict[str, str], expected: str) -> None:
    assert " ".join(map(str, allotted(environment))) == expected


def test_a_file_of_pbs(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("b\nb\n\na\nb\n")
    assert " ".join(map(str, allotted({"PBS_NODEFILE": str(file)}))) == "b:3 a:1"
