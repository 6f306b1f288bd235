"""Addresses of this host, and free ports."""

from __future__ import annotations

import importlib
import random
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from horovod.runner.util import threads  # type: ignore[import-not-found]

_PORTS = range(1024, 65536)


def _addresses() -> dict[str, list[str]]:
    """Return the IPv4 addresses by interface."""
    found = importlib.import_module("psutil").net_if_addrs()
    return {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET] for name, entries in found.items()
    }


def get_local_host_addresses() -> set[str]:
    """Return the IPv4 addresses of this host. Needs psutil."""
    return {address for addresses in _addresses().values() for address in addresses}


def get_local_intfs(nic: str | None = None) -> set[str]:
    """Return the interfaces with the address 127.0.0.1; of ``nic`` alone if given."""
    return {name for name, addresses in _addresses().items() if nic in (None, "", name) and "127.0.0.1" in addresses}


def resolve_host_address(host_name: str) -> str | None:
    """Return the host's IPv4 address; None if its name is unknown."""
    try:
        return socket.gethostbyname(host_name)
    except socket.gaierror:
        return None


def filter_local_addresses(all_host_names: Sequence[str]) -> list[str]:
    """Return the hosts that are not this one."""
    local = get_local_host_addresses()
    resolved = threads.execute_function_multithreaded(resolve_host_address, [[name] for name in all_host_names])
    return [name for number, name in enumerate(all_host_names) if resolved[number] not in local]


def find_port(server_factory: Callable[[tuple[str, int]], Any]) -> tuple[Any, int]:
    """Make a server on a free port; return it and the port.

    Args:
        server_factory: called with ``("", port)`` until it succeeds.

    Raises:
        OSError: no port is free.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        try:
            return server_factory(("", port)), port
        except OSError:
            continue
    raise OSError("find_port: every port is taken")


def get_driver_ip(nics: Iterable[str]) -> str:
    """Return the IPv4 address of the first of the interfaces.

    Raises:
        RuntimeError: it has none.
    """
    first = next(iter(nics))
    address = next(iter(_addresses().get(first, [])), None)
    if address is None:
        raise RuntimeError(
            f"get_driver_ip: the interface {first!r} has no IPv4 address; there are {sorted(_addresses())}"
        )
    return address
