"""The doctor's checks, each given a fault."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from collectives.base.errors import InvalidArgumentError
from collectives.device import diagnosis
from collectives.launch import mpirun, report
from collectives.launch.doctor import host, launches, links, packages
from collectives.launch.doctor.examination import _clock, _judge
from collectives.launch.doctor.findings import FINE, SLOW, WRONG, Finding, as_text
from collectives.transport.tcp import network
from collectives.worlds import capabilities

HERE = [{"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]}, {"eth0": ["10.0.0.2"]}]


def test_a_missing_folder_for_shared_memory_is_wrong(tmp_path: Path) -> None:
    finding = host.shared_folder(str(tmp_path / "shm"))
    assert (finding.state, finding.found) == (WRONG, "No such file or directory")
    assert "--shm-size" in finding.cure


@pytest.mark.parametrize(
    ("files", "granted"),
    [
        ({}, float("inf")),
        ({"cpu.max": "max 100000\n"}, float("inf")),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "400000 100000\n", "job/cpu.max": "50000 100000\n"}, 0.5),
        ({"cpu,cpuacct/job/cpu.cfs_quota_us": "200000\n", "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, float("inf")),
    ],
)
def test_the_cpus_that_control_groups_grant(files: dict[str, str], granted: float, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert host.quota("4:memory:/job\n3:cpu,cpuacct:/job\n0::/job\n", str(tmp_path)) == granted


@pytest.mark.parametrize(
    ("yama", "status", "named", "cure"),
    [
        ("2", "Seccomp:\t2\n", "ptrace_scope is 2", "sysctl"),
        ("1", "Name:\tpython\nSeccomp:\t2\n", "seccomp", "SYS_PTRACE"),
        ("", "Seccomp:\t0\n", "users or containers", "one user"),
    ],
)
def test_why_direct_reads_are_refused(yama: str, status: str, named: str, cure: str) -> None:
    reason, remedy = host.why_refused(yama, status)
    assert named in reason
    assert cure in remedy


def test_ranks_that_share_nothing_and_ranks_that_share_all() -> None:
    nothing = list(host.sharing({"shares_memory": False, "reads_private": False, "maps": False}))
    assert [(one.check, one.state) for one in nothing] == [("shared memory", SLOW)]
    everything = list(host.sharing({"shares_memory": True, "reads_private": True, "maps": True}))
    assert [(one.check, one.state) for one in everything] == [("peers' memory", FINE)]
    windows = list(host.sharing({"shares_memory": True, "reads_private": False, "maps": False}))
    assert [(one.check, one.state) for one in windows] == [("mapped memory", SLOW), ("peers' memory", SLOW)]


@pytest.mark.parametrize(
    ("setting", "stacks", "state", "named"),
    [
        ("", ["here"], FINE, "loopback, for ranks of one host"),
        ("lo", ["here"], SLOW, "lo (127.0.0.1) is loopback"),
        ("lo", ["here", "there"], WRONG, "lo (127.0.0.1) is loopback"),
        ("none0", ["here"], WRONG, "'none0'"),
        ("", ["here", "there"], WRONG, "no network interface"),
    ],
)
def test_the_interface(
    setting: str, stacks: list[str], state: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(host: str) -> str:
        raise OSError(host)

    monkeypatch.setattr(network, "address_towards", unreachable)
    finding = links.choose(setting, stacks, HERE[: len(stacks)], 0)[1]
    assert (finding.check, finding.state) == ("interface", state)
    assert named in finding.found


@pytest.mark.parametrize(
    ("library", "state", "named"),
    [
        ("Open MPI v5.0", FINE, "yes, by MPI"),
        ("MPICH 5.0", WRONG, "mpirun belongs to Open MPI, but mpi4py loads MPICH 5.0"),
        ("", WRONG, "mpi4py cannot load an MPI library"),
    ],
)
def test_another_mpi_than_the_launchers(library: str, state: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = mpirun.Launcher(sys.executable, mpirun.Vendor.OPEN_MPI, "5.0")
    monkeypatch.setattr(mpirun, "find", lambda: launcher)
    monkeypatch.setattr(capabilities, "mpi_library", lambda: library)
    monkeypatch.setattr(report, "version", lambda package: "4.1")
    monkeypatch.setenv("PATH", "")
    (finding,), by_mpi = packages.mpis()
    assert (finding.state, by_mpi) == (state, state == FINE)
    assert "Open MPI 5.0" in finding.found
    assert named in finding.found + finding.cost


def test_an_mpirun_that_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise InvalidArgumentError("mpirun --version: cannot run")

    monkeypatch.setattr(mpirun, "find", fail)
    monkeypatch.setattr(capabilities, "mpi_library", lambda: "MPICH 5.0")
    monkeypatch.setattr(report, "version", lambda package: "4.1")
    (finding,), by_mpi = packages.mpis()
    assert (finding.state, by_mpi) == (WRONG, False)
    assert "cannot run" in finding.found


def test_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [diagnosis.Row("driver", None, "install it", True), diagnosis.Row("NCCL", "2.20", "upgrade it")]
    monkeypatch.setattr(diagnosis, "report", lambda: rows)
    monkeypatch.setattr(packages, "_DRIVER", tmp_path / "none")
    assert [one.state for one in packages.gpus()] == [FINE]
    monkeypatch.setattr(packages, "_DRIVER", tmp_path)
    assert [(one.check, one.state, one.cure) for one in packages.gpus()] == [
        ("GPU: driver", WRONG, "install it"),
        ("GPU: NCCL", SLOW, "upgrade it"),
    ]


def test_a_connection_is_measured_with_the_token_alone() -> None:
    right, wrong = "ab" * 32, "cd" * 32
    port = links.listen("127.0.0.1", right)
    link = links.dial("127.0.0.1", port, right, 0.01)
    assert link["latency"] > 0
    assert link["bandwidth"] > 0
    assert "has refused this connection" in links.dial("127.0.0.1", port, wrong, 0.01)["error"]


def test_a_port_where_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert links.dial("127.0.0.1", unused.getsockname()[1], "ab" * 32, 0) == {"error": "Connection refused"}


@pytest.mark.parametrize(
    ("latency", "bandwidth", "cost"),
    [
        (1e-4, 1e9, ""),
        (5e-3, 1e9, "each small operation takes 5.0 ms or more"),
        (1e-4, 10e6, "100 MB of gradients take 10.0 s or more"),
    ],
)
def test_slow_connections(latency: float, bandwidth: float, cost: str) -> None:
    finding = _judge("to host2", latency, bandwidth)
    assert (finding.cost, finding.state) == (cost, SLOW if cost else FINE)


def test_a_clock_that_is_behind() -> None:
    probe = SimpleNamespace(host="host2", ask=lambda order: time.time() - 5)
    finding = _clock(cast(Any, probe))
    assert (finding.check, finding.state, finding.host) == ("clock", SLOW, "host2")
    assert finding.found.startswith("-5.0")


@pytest.mark.parametrize(
    ("program", "named"),
    [
        ("echo 'no route' >&2; exit 1", "no route"),
        ("exit 1", "it ended without a word"),
        ("exec sleep 60", "it was ended after 0.2 s"),
    ],
)
def test_a_launcher_that_starts_nothing(program: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "_WITHIN", 0.2)
    finding, world = launches._run("job by sh", ["sh", "-c", program])
    assert (finding.state, finding.found, world) == (WRONG, named, {})


def test_the_text_of_findings() -> None:
    findings = [Finding("CPUs", FINE, "2 of 2", host="a"), Finding("clock", SLOW, "late", "time", "chrony", "b")]
    assert as_text(findings) == (
        "a\n  fine   CPUs               2 of 2\n\nb\n  slow   clock              late\n"
        "         costs: time\n         to do: chrony\n\n0 wrong, 1 slow, 1 fine"
    )
