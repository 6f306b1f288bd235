"""What a batch system has allotted to a job: hosts, and how many ranks each takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain, repeat
from pathlib import Path

from collectives.base import places
from collectives.launch.hosts import Host


def hosts(environment: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the hosts that Slurm, LSF or PBS has allotted to the job that this process is in, in their order.

    Empty where this process is one of several tasks of the job already, or no batch system says anything.
    """
    slots: dict[str, int] = {}
    with suppress(ValueError, OSError):
        for host, number in chain(_slurm(environment), _lsf(environment), _pbs(environment)):
            slots[host] = slots.get(host, 0) + number
        return tuple(Host(host, number) for host, number in slots.items())
    return ()


def _slurm(said: Mapping[str, str]) -> list[tuple[str, int]]:
    if said.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return []
    names = places.nodes(said.get("SLURM_JOB_NODELIST", ""))
    counts = [  # of "2(x3),1": 2, 2, 2, 1
        int(tasks)
        for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", said.get("SLURM_TASKS_PER_NODE", ""))
        for _ in range(int(times or 1))
    ]
    return list(zip(names, counts or repeat(1), strict=False))


def _lsf(said: Mapping[str, str]) -> list[tuple[str, int]]:
    words = said.get("LSB_MCPU_HOSTS", "").split()
    return [(host, int(number)) for host, number in zip(words[::2], words[1::2], strict=False)]


def _pbs(said: Mapping[str, str]) -> list[tuple[str, int]]:
    file = said.get("PBS_NODEFILE", "")
    return [(line.strip(), 1) for line in Path(file).read_text().splitlines() if line.strip()] if file else []
