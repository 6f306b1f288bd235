"""The interface that ranks of this host use, and connections between two hosts: latency and bandwidth, or why none."""

from __future__ import annotations

import fcntl
import os
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from collectives.base.errors import CollectivesError, TransportError
from collectives.launch.doctor.findings import FINE, SLOW, WRONG, Finding
from collectives.transport.tcp import network
from collectives.transport.tcp.authentication import Connection
from collectives.transport.tcp.listener import Listener, dialled
from collectives.transport.tcp.service import Service

_PINGS = 50
_BLOCK = bytes(1 << 20)
_CONNECT_WITHIN, _TRANSFER_WITHIN = 3.0, 8.0
_GET_FLAGS, _RUNS = 0x8913, 0x41
"""SIOCGIFFLAGS; IFF_UP and IFF_RUNNING."""
Offers = Sequence[Mapping[str, Sequence[str]]]


def choose(setting: str, stacks: Sequence[str], offers: Offers, rank: int) -> tuple[str, Finding]:
    """Return this host's address for ranks, as the engine would choose it, and what is to be said of it.

    Args:
        setting: ``network_interface``; empty: none.
        stacks, offers: of all hosts, as `network.choose` has them; ``rank``: this host's place there.
    """
    alone = len(set(stacks)) == 1
    own = network.addresses()
    try:
        address = network.address_of(setting) if setting else network.choose(stacks, offers, rank)
    except CollectivesError as error:
        cure = "name one that leads to the other hosts: --network-interface NAME"
        return "", Finding("interface", WRONG, str(error), "no job over TCP starts", cure)
    name = next((one for one, of_one in own.items() if address in of_one), "")
    found = f"{name} ({address})" if name else address  # an interface's further addresses of IPv4 are not listed
    if name and not _is_up(name):
        cure = f"ip link set {name} up, or name another one: --network-interface NAME"
        return address, Finding("interface", WRONG, f"{found} is down", "it leads to no other host", cure)
    if setting and network.is_loopback(address):
        cost = "no job on several hosts starts" if alone else "the other hosts cannot reach the ranks here"
        leading = [one for one, of_one in own.items() if not network.is_loopback(of_one[0])]
        cure = f"--network-interface {' or '.join(leading) or 'NAME'}"
        return address, Finding("interface", SLOW if alone else WRONG, f"{found} is loopback", cost, cure)
    if alone and not setting:
        listed = ", ".join(f"{one} ({of_one[0]})" for one, of_one in own.items())
        return address, Finding("interface", FINE, f"loopback, for ranks of one host; there are {listed}")
    return address, Finding("interface", FINE, found)


def _is_up(name: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        flags = fcntl.ioctl(probe.fileno(), _GET_FLAGS, struct.pack("16sh22x", name.encode(), 0))[16:18]
    return int.from_bytes(flags, sys.byteorder) & _RUNS == _RUNS


def listen(address: str, token: str) -> int:
    """Answer the pings of other probes, which hold the token, and count what they send, until the process ends; return
    the port."""

    def accepted(hello: bytes, connection: Connection) -> None:
        threading.Thread(target=_answer, args=(connection,), daemon=True).start()

    return Listener(Service(), address, 0, bytes.fromhex(token), accepted).address[1]


def _answer(connection: Connection) -> None:
    connection.settimeout(_TRANSFER_WITHIN)
    with suppress(OSError), connection, connection.makefile("rb") as asked:
        for _ in range(_PINGS):
            connection.sendall(asked.read(1))
        count = 0
        while block := asked.read1(len(_BLOCK)):
            count += len(block)
        connection.sendall(b"%d\n" % count)


def dial(address: str, port: int, token: str, send_for: float) -> dict[str, Any]:
    """Measure the connection to another host's listener.

    Args:
        send_for: for how many seconds to send.

    Returns:
        ``latency`` in seconds, one way, and ``bandwidth`` in bytes per second; or ``error``.
    """
    try:
        with dialled(address, port, bytes.fromhex(token), b"", _CONNECT_WITHIN) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, len(_BLOCK))  # little is left to send at the end
            connection.settimeout(_TRANSFER_WITHIN)
            answers = connection.makefile("rb")
            times = []
            for _ in range(_PINGS):
                began = time.perf_counter()
                connection.sendall(b"p")
                if not answers.read(1):
                    raise ConnectionError("the connection was closed")
                times.append(time.perf_counter() - began)
            began = time.perf_counter()
            while time.perf_counter() < began + send_for:
                connection.sendall(_BLOCK)
            connection.shutdown(socket.SHUT_WR)
            count = int(answers.readline() or 0)
            return {"latency": statistics.median(times) / 2, "bandwidth": count / (time.perf_counter() - began)}
    except TransportError as error:
        return {"error": str(error)}
    except OSError as error:
        return {"error": os.strerror(error.errno) if error.errno else str(error)}
