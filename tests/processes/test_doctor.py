"""``collectivesrun --doctor`` on hosts with faults made on purpose: each is found and named."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from collectives.launch import mpirun
from collectives.worlds import capabilities
from tests.support.launching.clusters import Cluster, cluster
from tests.support.launching.mpirun import run_command

DOCTOR = [sys.executable, "-m", "collectives.launch", "--doctor", "--json"]
WITHOUT_SHARED_FOLDER = """
mount -t tmpfs tmpfs "$0" && for one in null zero random urandom full; do
    touch "$0/$one" && mount --bind /dev/$one "$0/$one" || exit
done && mount --rbind "$0" /dev && exec "$@"
"""
"""Has a /dev with devices alone, and runs a command."""


def examine(command: list[str], expect: int, env: dict[str, str] | None = None) -> dict[tuple[str, str], list[str]]:
    """Run the doctor; returns by check and state what was found, with cost and cure."""
    result = run_command(command, timeout=90, expect=expect, env=env or {})
    findings: dict[tuple[str, str], list[str]] = {}
    for one in json.loads(result.output):
        assert bool(one["cost"] and one["cure"]) == (one["state"] != "fine"), one
        words = f"{one['host']}: {one['found']}; {one['cost']}; {one['cure']}"
        findings.setdefault((one["check"], one["state"]), []).append(words)
    return findings


def test_faults_of_one_host(tmp_path: Path) -> None:
    if mpirun.find() is None or not capabilities.mpi_library():
        pytest.skip("no MPI is installed beside which there could be another one")
    (tmp_path / "dev").mkdir()
    (tmp_path / "mpi").mkdir()
    other = tmp_path / "mpi" / "mpirun"
    other.write_text("#!/bin/sh\necho 'HYDRA build details:'\necho '    Version: 9.8.7'\n")
    other.chmod(0o755)
    hide = ["unshare", "-m", "sh", "-c", WITHOUT_SHARED_FOLDER, str(tmp_path / "dev")]
    hides = subprocess.run([*hide, "true"], capture_output=True, timeout=30, check=False).returncode == 0
    path = f"{os.environ['PATH']}{os.pathsep}{other.parent}"
    command = [*(hide if hides else []), *DOCTOR, "--network-interface", "lo"]
    found = examine(command, expect=1 if hides else 0, env={"PATH": path})
    assert f"MPICH 9.8.7 ({other})" in found["two MPIs", "slow"][0]
    assert "lo (127.0.0.1) is loopback" in found["interface", "slow"][0]
    assert found["job without MPI", "fine"]
    if not hides:
        pytest.skip("a /dev without /dev/shm needs root and mount namespaces; the other faults were found")
    assert "No such file or directory" in found["/dev/shm", "wrong"][0]


REFUSING = """
import ctypes, os, struct, sys
libc, X86_64, READV, EPERM = ctypes.CDLL(None, use_errno=True), 0xC000003E, 310, 1
rows = [
    (0x20, 0, 0, 4), (0x15, 0, 2, X86_64),                     # of another architecture: allowed
    (0x20, 0, 0, 0), (0x15, 1, 0, READV),
    (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | EPERM),
]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(rows), ctypes.addressof(code)))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program) == 0, os.strerror(ctypes.get_errno())
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Runs a command to which a seccomp filter refuses process_vm_readv."""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter names a system call by x86-64's number")
def test_a_seccomp_filter() -> None:
    found = examine([sys.executable, "-c", REFUSING, *DOCTOR], expect=0)
    assert "process_vm_readv is refused: a seccomp filter is active" in found["peers' memory", "slow"][0]
    assert "--cap-add=SYS_PTRACE" in found["peers' memory", "slow"][0]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    """Two hosts whose links carry 25 MB/s."""
    with cluster(2, rate="200mbit") as made:
        yield made


def test_a_slow_link_and_a_clock_that_is_behind(hosts: Cluster) -> None:
    """The clocks of the hosts are one: what ssh starts on host2 is told another time by libfaketime, where it is."""
    library = next(iter(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)
    if library is not None:
        variables = f"Host host2\n  SetEnv LD_PRELOAD={library} FAKETIME=-5s"
        of_ssh = "/etc/ssh/ssh_config.d/cluster.conf"  # of host1 alone
        run_command(hosts.on("host1", "sh", "-c", f'echo "$0" >> {of_ssh}', variables), timeout=20)
    found = examine(hosts.on("host1", *DOCTOR, "-H", "host1,host2"), expect=0)
    assert [(one.split(":")[0], "s or more" in one) for one in found["connection", "slow"]] == [
        ("host1", True),
        ("host2", True),
    ]
    assert any("host1 to host1,host2: 2 ranks" in one for one in found["job without MPI", "fine"])
    clock = found["clock", "fine" if library is None else "slow"][0]
    assert clock.startswith(("host2: +0.0", "host2: -0.0") if library is None else ("host2: -5.0", "host2: -4.9")), (
        clock
    )


def test_blocked_ports_and_a_wrong_interface(hosts: Cluster) -> None:
    """Nothing passes from host1 to ports above 1024, and host2 is told an address of host1 that leads nowhere."""
    for fault in (
        "ip rule add pref 5 ipproto tcp dport 1024-65534 blackhole",
        "ip link add other0 type veth peer name end0",
        "ip addr add 192.168.99.1/24 dev other0",
        "ip link set other0 up",
        "ip link set end0 up",
    ):
        run_command(hosts.on("host1", *fault.split()), timeout=20)
    interface = ["--network-interface", "192.168.99.0/24,10.77.0.0/24"]
    found = examine(hosts.on("host1", *DOCTOR, "-H", "host1,host2,host9", *interface), expect=1)
    there, back = found["connection", "wrong"]
    assert there.startswith("host1: to host2 (10.77.0.2) port ")
    assert "firewall" in there
    assert back.startswith("host2: to host1 (192.168.99.1) port ")
    assert "leave out --network-interface: eth0 (10.77.0.1) leads" in back
    assert "host9" in found["host", "wrong"][0]
    run_command(hosts.on("host1", "ip", "link", "set", "other0", "down"), timeout=20)
    found = examine(hosts.on("host1", *DOCTOR, *interface), expect=1)
    assert "other0 (192.168.99.1) is down" in found["interface", "wrong"][0]
