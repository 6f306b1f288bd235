"""How other hosts are reached: the command, which names mean this host, what travels; and a whole job by a program that
stands in for ssh."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from collectives.base.errors import InvalidArgumentError, MissingDependencyError
from collectives.launch import ssh
from collectives.launch.ssh import Ssh
from collectives.transport.tcp import network

STANDS_IN = """#!/bin/sh
echo "$@" >> "$0.calls"
case " $* " in *" -G "*) echo "hostname 127.0.0.1"; exit;; esac
for last; do :; done
echo "a shell's greeting"; echo "a warning of ssh's" >&2
exec sh -c "$last"
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in place of ssh, which runs commands here; its calls are in a file beside it."""
    path = tmp_path / "ssh"
    path.write_text(STANDS_IN)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return path


def test_the_command(program: Path) -> None:
    assert Ssh().command("host2", ["/a b/python", "-I", "$x"]) == [
        *(str(program), "-T", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30"),
        *("--", "host2", "exec '/a b/python' -I '$x'"),
    ]
    words = Ssh(2222, "key", 0.5).command("[fe80::1]", ["x"])
    assert words[7:] == ["-p", "2222", "-i", "key", "--", "fe80::1", "exec x"] and words[6] == "ConnectTimeout=1"


def test_without_ssh_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MissingDependencyError, match="cannot start ranks on other hosts: ssh is not installed"):
        Ssh().command("host2", ["x"])


@pytest.mark.parametrize(
    ("name", "here"),
    [("localhost", True), ("127.0.0.1", True), ("[::1]", True), ("192.0.2.1", False), ("me@localhost", False)],
)
def test_names_of_this_host(name: str, here: bool) -> None:
    assert ssh.is_here(name) is here


def test_this_hosts_own_name() -> None:
    assert ssh.is_here(socket.gethostname()) and not ssh.is_here("no-such-host.invalid")


def test_the_address_for_other_hosts(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "addresses", lambda: {"lo": ["127.0.0.1"], "eth7": ["192.0.2.7", "2001:db8::7"]})
    assert ssh.address_for([], "", Ssh()) == "127.0.0.1"
    assert ssh.address_for(["alias"], "", Ssh(port=7)) == "127.0.0.1"  # as ssh is configured
    assert program.with_name("ssh.calls").read_text() == "-G -p 7 -- alias\n"
    assert ssh.address_for(["alias"], "192.0.2.0/24", Ssh()) == "192.0.2.7"
    assert ssh.address_for(["alias"], "2001:db8::/64", Ssh()) == "2001:db8::7"
    with pytest.raises(
        InvalidArgumentError, match=r"lo: 127\.0\.0\.1 is a loopback address, which alias, other cannot reach"
    ):
        ssh.address_for(["alias", "other"], "lo", Ssh())
    with pytest.raises(InvalidArgumentError, match="expected the name, address or network of an interface"):
        ssh.address_for(["alias"], "no-such-interface", Ssh())


def test_no_way_to_the_other_hosts(program: Path) -> None:
    program.write_text("#!/bin/sh\nexit 255\n")
    with pytest.raises(InvalidArgumentError, match=r"leads to the other hosts \(me@no-such-host\.invalid: "):
        ssh.address_for(["me@no-such-host.invalid"], "", Ssh())


def test_variables_that_travel() -> None:
    of_here = ("PWD", "SSH_AUTH_SOCK", "DISPLAY", "HOSTNAME", "XDG_RUNTIME_DIR", "_", "BASH_FUNC_x%%")
    travels = {"PATH": "/bin", "PYTHONPATH": "/x", "TMPDIR": "/t", "COLLECTIVES_ALGORITHM": "ring", "HOME": "/me"}
    assert Ssh().travelling("host2", {**travels, **dict.fromkeys(of_here, "x")}) == travels


def test_a_job_on_another_host(program: Path) -> None:
    rank = (
        "import os, sys; print(*sys.argv[1:], *(os.environ[f'COLLECTIVES_{name}'] for name in "
        "('RANK', 'SIZE', 'LOCAL_RANK', 'LOG_LEVEL')))"
    )
    environment = {**os.environ, "COLLECTIVES_LOG_LEVEL": "debug"}
    options = ["--launcher", "ssh", "-p", "7", "-H", "localhost:1,other:2"]
    command = [sys.executable, "-m", "collectives.launch", *options, sys.executable, "-c", rank, "a  b\n"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    for number, local in ((0, 0), (1, 0), (2, 1)):
        # Lines of other ranks may come between.
        own = [line for line in done.stdout.splitlines() if line.startswith(f"[{number}] ")]
        assert own == [f"[{number}] a  b", f"[{number}]  {number} 3 {local} debug"], done.stdout
    called = program.with_name("ssh.calls").read_text()
    assert " -p 7 -- other exec " in called and "COLLECTIVES_" not in called
