"""The hosts of a job, and how many ranks each takes.

They are told as ``host1:4,host2:4``, or by a file with one host per line in Open MPI's or MPICH's syntax, or a batch
system has allotted them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, repeat
from pathlib import Path

from collectives.base import places
from collectives.base.errors import InvalidArgumentError

_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:]+\]|[^\s:,\[\]]+)(?::(?P<slots>[1-9][0-9]{0,8}))?")
_LINE = re.compile(rf"{_HOST.pattern}(?:\s+slots\s*=\s*(?P<named>[1-9][0-9]{{0,8}}))?(?:\s+max[-_]slots\s*=\s*[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Host:
    """A host by name or address, and the number of ranks that it takes."""

    name: str
    slots: int = 1

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse ``host1:4,host2:4``; a host without a number takes one rank. Raises InvalidArgumentError."""
    hosts = []
    for entry in text.split(","):
        match = _HOST.fullmatch(entry.strip())
        if match is None:
            raise InvalidArgumentError(
                f"-H/--hosts: expected host:ranks,host:ranks,... such as host1:4,host2:4, got {entry!r:.200} in "
                f"{text!r:.200} [L41]"
            )
        hosts.append(Host(match["name"], int(match["slots"] or 1)))
    return _distinct(hosts, "-H/--hosts")


def read_hostfile(path: str) -> tuple[Host, ...]:
    """Read a host file: lines ``host slots=4`` (Open MPI) or ``host:4`` (MPICH); ``#`` starts a comment.

    An InvalidArgumentError names the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            f"--hostfile: cannot read {path!r}: {getattr(error, 'strerror', None) or error} [L42]"
        ) from None
    hosts = parse_lines(lines, f"--hostfile: {path}")
    if not hosts:
        raise InvalidArgumentError(
            f"--hostfile: {path!r} names no host; write one a line, such as 'host slots=4' [L43]"
        )
    return hosts


def parse_lines(lines: Sequence[str], source: str, slots: int = 1) -> tuple[Host, ...]:
    """Parse one host a line; one without a number takes ``slots`` ranks. An InvalidArgumentError names the line."""
    hosts = []
    for number, line in enumerate(lines, 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        match = _LINE.fullmatch(entry)
        if match is None:
            raise InvalidArgumentError(
                f"{source}:{number}: expected 'host slots=4' or 'host:4', got {entry!r:.200} [L44]"
            )
        hosts.append(Host(match["name"], int(match["named"] or match["slots"] or slots)))
    return _distinct(hosts, source)


def allotted(environment: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the hosts that Slurm, LSF or PBS has allotted to the job that this process is in, in their order.

    Empty where this process is one of several tasks of the job already, or no batch system says anything.
    """
    slots: dict[str, int] = {}
    with suppress(ValueError, OSError):
        for host, number in chain(_slurm(environment), _lsf(environment), _pbs(environment)):
            slots[host] = slots.get(host, 0) + number
        return tuple(Host(host, number) for host, number in slots.items())
    return ()


def ranks_of_each(ranks: int, hosts: Sequence[Host]) -> list[range]:
    """Return the ranks of each host, which is filled before the next; all on one if none is named."""
    ends = [0, *accumulate(host.slots for host in hosts or (Host("localhost", ranks),))]
    return [range(min(first, ranks), min(end, ranks)) for first, end in pairwise(ends)]


def _distinct(hosts: Sequence[Host], source: str) -> tuple[Host, ...]:
    names = [host.name for host in hosts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidArgumentError(
            f"{source}: expected each host once, got {twice!r} {names.count(twice)} times; write {twice}:N for N "
            "ranks on it [L45]"
        )
    return tuple(hosts)


def _slurm(said: Mapping[str, str]) -> list[tuple[str, int]]:
    if said.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return []
    names = places.nodes(said.get("SLURM_JOB_NODELIST", ""))
    counts = [  # of "2(x3),1": 2, 2, 2, 1
        int(tasks)
        for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", said.get("SLURM_TASKS_PER_NODE", ""))
        for _ in range(int(times or 1))
    ]
    gpus = said.get("SLURM_GPUS_ON_NODE", "")
    if gpus.isdigit() and "SLURM_NTASKS" not in said:
        counts = [int(gpus)] * len(names)  # no number of tasks was requested; Slurm says one for each core, or one
    return list(zip(names, counts or repeat(1), strict=False))


def _lsf(said: Mapping[str, str]) -> list[tuple[str, int]]:
    words = said.get("LSB_MCPU_HOSTS", "").split()
    return [(host, int(number)) for host, number in zip(words[::2], words[1::2], strict=False)]


def _pbs(said: Mapping[str, str]) -> list[tuple[str, int]]:
    file = said.get("PBS_NODEFILE", "")
    return [(line.strip(), 1) for line in Path(file).read_text().splitlines() if line.strip()] if file else []
