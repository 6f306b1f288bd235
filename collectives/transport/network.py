"""This host: how it is told from others, and by which of its addresses others reach it."""

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
_ANY_PORT = 9


def identity() -> str:
    """A text that is equal in two processes that may share memory: of one boot, one host name, and one table of
    processes (containers on one machine count as hosts)."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def addresses() -> dict[str, str]:
    """The IPv4 address of each interface that has one, by the interface's name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                request = struct.pack("16s240x", name.encode()[:15])
                found[name] = socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)[20:24])
    return found


def address_of(wanted: str) -> str:
    """This host's address by the setting ``network_interface``: an interface's name, an address, or a network such as
    ``10.0.0.0/8``; several separated by commas, of which the first that is found counts.

    Raises:
        InvalidArgumentError: there is none.
    """
    known = addresses()
    for word in filter(None, (part.strip() for part in wanted.split(","))):
        if word in known:
            return known[word]
        with suppress(ValueError):
            network = ipaddress.ip_network(word, strict=False)
            for address in known.values():
                if ipaddress.ip_address(address) in network:
                    return address
    listed = ", ".join(f"{name} ({address})" for name, address in known.items())
    raise InvalidArgumentError(
        f"network interface {wanted!r}: expected the name, address or network of an interface of "
        f"{socket.gethostname()}, which has {listed or 'none'}"
    )


def address_towards(host: str) -> str:
    """The address of this host from which packets to ``host`` leave; sends none.

    Raises:
        OSError: the name is unknown, or there is no route.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        found: str = probe.getsockname()[0]
        return found


def choose(hosts: Sequence[str], offers: Sequence[Mapping[str, str]], rank: int) -> str:
    """This rank's address for the others: loopback if all are on this host, else one that leads to another host.

    Args:
        hosts: each rank's host, as `identity` has it.
        offers: each rank's `addresses`.

    Raises:
        TransportError: no interface leads to the others.
    """
    if len(set(hosts)) == 1:
        return LOOPBACK
    # Addresses that several hosts have, of container bridges for instance, lead nowhere.
    owners: dict[str, set[str]] = {}
    for host, offer in zip(hosts, offers, strict=True):
        for address in offer.values():
            owners.setdefault(address, set()).add(host)
    for host, offer in zip(hosts, offers, strict=True):
        if host == hosts[rank]:
            continue
        for address in offer.values():
            if len(owners[address]) > 1 or address.startswith("127."):
                continue
            with suppress(OSError):
                mine = address_towards(address)
                if len(owners.get(mine, ())) == 1 and not mine.startswith("127."):
                    return mine
    raise TransportError(
        f"rank {rank}: no network interface of {socket.gethostname()} ({dict(offers[rank])}) leads to the other hosts "
        f"({', '.join(str(dict(offer)) for offer in offers)}); name one with COLLECTIVES_NETWORK_INTERFACE"
    )
