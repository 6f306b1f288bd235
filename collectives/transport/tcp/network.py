"""This host: its identity, and the addresses at which others reach it."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from collectives.base.errors import InvalidArgumentError, TransportError

LOOPBACK = "127.0.0.1"
_GET_ADDRESS = 0x8915
"""SIOCGIFADDR"""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_OF_IPV6 = Path("/proc/net/if_inet6")
_ANY_PORT = 9


def identity() -> str:
    """A text that is equal in two processes that may share memory: of one boot, one host name, and one table of
    processes (containers on one machine count as hosts)."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(_BOOT.read_text(encoding="ascii").strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def stack() -> str:
    """A text that is equal in two processes that have the same interfaces, and reach each other by loopback: those of
    one host, and containers of one machine that share its network."""
    try:
        return f"{_BOOT.read_text(encoding='ascii').strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return identity()


def addresses() -> dict[str, list[str]]:
    """The addresses of each interface that has any, by the interface's name: the one of IPv4, then those of IPv6 that
    lead beyond one link."""
    by_interface: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                request = struct.pack("16s240x", name.encode()[:15])
                by_interface[name] = [socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)[20:24])]
    with suppress(OSError):
        for line in _OF_IPV6.read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
            if not address.is_link_local:
                by_interface.setdefault(name, []).append(str(address))
    return by_interface


def address_of(setting: str) -> str:
    """This host's address by the setting ``network_interface``: an interface's name, an address, or a network such as
    ``10.0.0.0/8``; several separated by commas, of which the first that is found counts.

    Raises:
        InvalidArgumentError: there is none.
    """
    interfaces = addresses()
    every = [address for of_one in interfaces.values() for address in of_one]
    for word in filter(None, (part.strip() for part in setting.split(","))):
        if word in interfaces:
            return interfaces[word][0]
        with suppress(ValueError):
            network = ipaddress.ip_network(word, strict=False)
            for address in every:
                if ipaddress.ip_address(address) in network:
                    return address
    listed = ", ".join(f"{name} ({', '.join(of_one)})" for name, of_one in interfaces.items())
    raise InvalidArgumentError(
        f"network interface {setting!r}: expected the name, address or network of an interface of "
        f"{socket.gethostname()}, which has {listed or 'none'} [N4]"
    )


def address_towards(host: str) -> str:
    """The address of this host from which packets to ``host`` leave; sends none. OSError: the name is unknown, or there
    is no route."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def is_loopback(address: str) -> bool:
    """Whether an address leads to no other host."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def joined(host: str, port: int) -> str:
    """``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def choose(hosts: Sequence[str], offers: Sequence[Mapping[str, Sequence[str]]], rank: int) -> str:
    """This rank's address for the others: loopback if all are on this host, else one that leads to another host.

    Args:
        hosts: each rank's host, as `stack` has it.
        offers: each rank's `addresses`.

    Raises:
        TransportError: no interface leads to the others.
    """
    if len(set(hosts)) == 1:
        return LOOPBACK
    # Addresses that several hosts have, of container bridges for instance, lead nowhere.
    owners: dict[str, set[str]] = {}
    every = [[address for of_one in offer.values() for address in of_one] for offer in offers]
    for host, host_addresses in zip(hosts, every, strict=True):
        for address in host_addresses:
            owners.setdefault(address, set()).add(host)

    def leads(address: str) -> bool:
        return len(owners.get(address, ())) == 1 and not is_loopback(address)

    for version in (4, 6):  # of these the first that all hosts have, so that all ranks decide alike
        offered = [
            [one for one in host_addresses if leads(one) and ipaddress.ip_address(one).version == version]
            for host_addresses in every
        ]
        for host, host_addresses in zip(hosts, offered if all(offered) else (), strict=False):
            for address in host_addresses if host != hosts[rank] else ():
                with suppress(OSError):
                    if leads(own_address := address_towards(address)):
                        return own_address
    raise TransportError(
        f"rank {rank}: no network interface of {socket.gethostname()} ({dict(offers[rank])}) leads to the other hosts "
        f"({', '.join(str(dict(offer)) for offer in offers)}); set COLLECTIVES_NETWORK_INTERFACE to one that does [N5]"
    )
