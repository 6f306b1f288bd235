"""Ranks that catch a failure, call `shutdown` and meet again leave nothing behind, however often."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
import pytest

import collectives as hvd
from tests.failed_worlds import Footprint, check, footprint
from tests.mpirun import run_ranks
from tests.ports import free_port


@pytest.mark.parametrize(
    ("network", "settings"),
    [
        ("mpi", {}),
        ("mpi", {"COLLECTIVES_LOCAL_SIZE": "1", "COLLECTIVES_NETWORK": "mpi"}),
        ("tcp", {}),
        ("tcp", {"COLLECTIVES_LOCAL_SIZE": "1"}),
    ],
    ids=["mpi-memory", "mpi-hosts", "tcp-memory", "tcp-hosts"],
)
def test_worlds_that_fail_leave_nothing_behind(network: str, settings: dict[str, str]) -> None:
    if network == "tcp":
        settings = {**settings, "COLLECTIVES_RENDEZVOUS": f"tcp://127.0.0.1:{free_port()}"}
    result = run_ranks(3, ["-m", "tests.failed_worlds", "24"], env=settings, timeout=90)
    assert all("nothing has grown" in text for text in result.ranks), str(result)


def survivor(rank: int, deaths: int, place: str, told: Queue[Any]) -> None:
    held: list[Footprint] = []
    for _ in range(deaths):
        hvd.init(rendezvous=place, rank=rank, size=3)
        with pytest.raises(hvd.RankFailedError, match="rank 2"):
            while True:
                hvd.allreduce(np.full(300_000, rank, np.float32))
        hvd.shutdown()
        held.append(footprint())
    told.put(held)


def victim(place: str) -> None:
    hvd.init(rendezvous=place, rank=2, size=3)
    hvd.allreduce(np.full(300_000, 2, np.float32))
    os.kill(os.getpid(), signal.SIGKILL)


def test_deaths_leave_nothing_behind_in_the_survivors() -> None:
    """Whoever has died is replaced by another process, as elastic launchers do."""
    forks, place = multiprocessing.get_context("fork"), f"tcp://127.0.0.1:{free_port()}"
    told: Queue[Any] = forks.Queue()
    survivors = [forks.Process(target=survivor, args=(rank, 12, place, told)) for rank in range(2)]
    try:
        for process in survivors:
            process.start()
        for _ in range(12):
            dying = forks.Process(target=victim, args=(place,))
            dying.start()
            dying.join(30)
            assert dying.exitcode == -signal.SIGKILL
        for _ in survivors:
            check(told.get(timeout=30), 3)
    finally:
        for process in survivors:
            process.kill()
            process.join()
