"""The benchmark between hosts: its arithmetic, its table, its command lines, and the plain sockets of several ranks."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import cluster, hosts
from benchmarks.collective import IN_PLACE, OUT_OF_PLACE, Case, Unavailable
from benchmarks.record import OURS
from benchmarks.sockets import WHOLE_UNTIL, Sockets


def test_rates_and_what_they_allow() -> None:
    assert hosts.rate("10gbit") == 1e10 and hosts.rate("1.5Mbit") == 1.5e6 and hosts.rate("8bit") == 8
    with pytest.raises(ValueError, match="expected a rate such as 10gbit, got '10gb'"):
        hosts.rate("10gb")
    # The project's own figures: 53,687 microseconds for 64 MiB between two hosts, 201,327 for 16 MiB among four.
    assert round(hosts.line_rate(64 << 20, 2, 1e10)) == 53_687
    assert round(hosts.line_rate(16 << 20, 4, 1e9)) == 201_327


def test_sizes_are_whole_elements() -> None:
    assert hosts.sizes("1,7,64K") == (4, 4, 65536)
    with pytest.raises(argparse.ArgumentTypeError, match="got 'many'"):
        hosts.sizes("4,many")
    assert [hosts.calls_of(size) for size in (4, 64 << 10, 1 << 20, 64 << 20)] == [100, 16, 1, 1]


def test_a_row_compares_round_by_round() -> None:
    names = [OURS, "mpi", "gloo"]
    times = {OURS: np.array([100.0, 200.0, 400.0]), "mpi": np.array([50.0, 150.0, 200.0])}
    shown = hosts.row(4096, names, times, None).split()
    assert shown == ["4096", "200", "(150-300)", "150", "(100-175)", "0.50x", "N/A", "N/A"]
    assert hosts.row(4096, names, {}, 12.4).split()[-1] == "12"
    assert len(hosts.row(4096, names, times, 1.0)) == len(hosts.header(names))


def test_a_setup_is_a_command_on_its_first_host() -> None:
    command = cluster.Setup(2, 2, "1gbit", "16M").command("python", ["-n", "3"])
    assert command[command.index("-np") + 1] == "4"
    assert command[command.index("-H") + 1] == "host1:2,host2:2"
    assert command[-7:] == ["benchmarks.hosts", "-b", "16M", "--rate", "1gbit", "-n", "3"]


def test_hosts_go_even_if_the_benchmark_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The tool is called as it says, without the variable that names it."""
    tool = tmp_path / "tool"
    tool.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\necho "<$COLLECTIVES_CLUSTER>"\n[ "$1" != on ] || exit 3\n'
    )
    tool.chmod(0o755)
    os.environ[cluster.VARIABLE] = str(tool)
    try:
        assert cluster.main(["--setup", "2x1", "-n", "1", "--peers", "mpi"]) == 3
    finally:
        del os.environ[cluster.VARIABLE]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == "up 2 10gbit" and calls[1].startswith(f"on host1 {sys.executable} -m collectives.launch")
    assert calls[2:] == ["down"]
    assert capfd.readouterr().out.count("<>") == 3


class Meeting:
    """A communicator of threads, as far as plain sockets need one."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=30)

    def allgather(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


class Place:
    """One rank of it."""

    def __init__(self, meeting: Meeting, rank: int, size: int) -> None:
        self.rank, self.size, self.comm = rank, size, self
        self.meeting = meeting

    def allgather(self, value: Any) -> list[Any]:
        return self.meeting.allgather(self.rank, value)

    def address(self) -> str:
        return "127.0.0.1"


@pytest.mark.parametrize("size", [2, 3])
def test_plain_sockets_reduce(size: int) -> None:
    """Tensors exchanged whole and in shares, some of them larger than a socket's buffers."""
    counts = (1, WHOLE_UNTIL // 4, WHOLE_UNTIL // 4 + 1, 3_000_001)
    meeting, wrong = Meeting(size), []

    def be(rank: int) -> None:
        peer = Sockets()
        peer.join(Place(meeting, rank, size))  # type: ignore[arg-type]
        for count in counts:
            work = np.full(count, rank + 1.0, np.float32)
            case = Case(work.dtype, "sum", -1, rank, size, count, work, work)
            result = peer.allreduce(case, IN_PLACE)()
            if result is not work or not (work == size * (size + 1) / 2).all():
                wrong.append((rank, count))
        meeting.barrier.wait()
        peer.close()

    ranks = [threading.Thread(target=be, args=(rank,)) for rank in range(size)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in ranks) and not meeting.barrier.broken


def test_plain_sockets_say_what_they_do_not_do() -> None:
    with pytest.raises(Unavailable, match="single rank"):
        Sockets().join(Place(Meeting(1), 0, 1))  # type: ignore[arg-type]
    work = np.zeros(4, np.float32)
    for mode, op in ((OUT_OF_PLACE, "sum"), (IN_PLACE, "avg")):
        with pytest.raises(Unavailable, match="in place only"):
            Sockets().allreduce(Case(work.dtype, op, -1, 0, 2, 4, work, work), mode)
