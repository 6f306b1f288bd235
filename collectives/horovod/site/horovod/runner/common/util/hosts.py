"""Hosts with their numbers of slots, and the placement of ranks.

``horovodrun`` itself uses `collectives.launch.hosts`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from collectives.launch.hosts import read_hostfile

_ENTRY = re.compile(r"[\w.-]+:[0-9]+")


@dataclass
class HostInfo:
    """A host and the number of ranks that it takes."""

    hostname: str
    slots: int

    @staticmethod
    def from_string(host_string: str) -> HostInfo:
        """Parse ``host:4``."""
        name, _, slots = host_string.strip().rpartition(":")
        return HostInfo(name, int(slots))


@dataclass
class SlotInfo:
    """The placement of a rank, and all its numbers."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int

    def to_response_string(self) -> str:
        """Return the numbers, separated by commas."""
        return f"{self.rank},{self.size},{self.local_rank},{self.local_size},{self.cross_rank},{self.cross_size}"


INVALID_SLOT_INFO = SlotInfo("", -1, -1, -1, -1, -1, -1)


def parse_host_files(filename: str) -> str:
    """Read a host file (``host slots=4`` a line) into ``host:4,host:4``.

    Raises:
        ValueError: the file cannot be read, or has an invalid line; names it.
    """
    return ",".join(map(str, read_hostfile(filename)))


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """Parse ``host1:2,host2:2``."""
    return [HostInfo.from_string(entry) for entry in hosts_string.split(",")]


def parse_hosts_and_slots(hosts: str) -> tuple[list[str], dict[str, int]]:
    """Parse ``host1:2,host2:2`` into the names and the slots by name.

    Raises:
        ValueError: an entry is not of that form.
    """
    entries = [entry.strip() for entry in hosts.split(",")]
    wrong = next((entry for entry in entries if not _ENTRY.fullmatch(entry)), None)
    if wrong is not None:
        raise ValueError(
            f"hosts: expected host:slots,host:slots,... such as worker-0:2,worker-1:2, got {wrong!r} in {hosts!r}"
        )
    found = [HostInfo.from_string(entry) for entry in entries]
    return [host.hostname for host in found], {host.hostname: host.slots for host in found}


def get_host_assignments(
    hosts: Sequence[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """Place ranks on hosts: each host is filled before the next.

    Args:
        hosts: with their slots.
        min_num_proc: the fewest ranks.
        max_num_proc: the most; None: as many as there are slots.

    Raises:
        ValueError: there are fewer slots than ``min_num_proc``.
    """
    left = sum(host.slots for host in hosts) if max_num_proc is None else max_num_proc
    sizes = []
    for host in hosts:
        sizes.append(min(host.slots, left))
        left -= sizes[-1]
    if sum(sizes) < min_num_proc:
        raise ValueError(f"hosts: expected slots for {min_num_proc} ranks, got {sum(sizes)}")
    placed: list[SlotInfo] = []
    for number, (host, local_size) in enumerate(zip(hosts, sizes, strict=True)):
        for local_rank in range(local_size):
            peers = [other for other, size in enumerate(sizes) if size > local_rank]
            numbers = (len(placed), local_rank, peers.index(number), sum(sizes), local_size, len(peers))
            placed.append(SlotInfo(host.hostname, *numbers))
    return placed
