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
from tests.support.launching.mpirun import run_ranks
from tests.support.launching.ports import free_port
from tests.trials.failed_worlds import Footprint, check, footprint


@pytest.mark.parametrize(
    ("network", "settings"),
    [
        ("mpi", {}),
        ("mpi", {"COLLECTIVES_LOCAL_SIZE": "1", "COLLECTIVES_NETWORK": "mpi"}),
        ("tcp", {"COLLECTIVES_LOCAL_SIZE": "1"}),
    ],
    ids=["mpi-memory", "mpi-hosts", "tcp-hosts"],
)
def test_worlds_that_fail_leave_nothing_behind(network: str, settings: dict[str, str]) -> None:
    if network == "tcp":
        settings = {**settings, "COLLECTIVES_RENDEZVOUS": f"tcp://127.0.0.1:{free_port()}"}
    result = run_ranks(3, ["-m", "tests.trials.failed_worlds", "24"], env=settings, timeout=90)
    assert all("nothing has grown" in text for text in result.ranks), str(result)


@pytest.mark.parametrize("env", [{}, {"COLLECTIVES_LOCAL_SIZE": "1"}], ids=["memory", "hosts"])
def test_an_init_that_fails_under_mpi_leaves_nothing_behind(env: dict[str, str]) -> None:
    """Least of all a thread in MPI, which would go on there beside the calls of the worlds that follow."""
    program = """
import contextlib
import os
import collectives as hvd
from collectives.transport import assembly
from collectives.transport.mpi import mpi_groups
from collectives.transport.host import shared_memory
from mpi4py import MPI
from tests.trials.failed_worlds import check, footprint

wiring, interrupts = mpi_groups.MpiWiring, None

def interrupted(place, function):
    def instead(*arguments):
        if place == interrupts:
            raise KeyboardInterrupt
        return function(*arguments)
    return instead

assembly._hosts_of = interrupted("hosts", assembly._hosts_of)
wiring.settled = interrupted("settled", wiring.settled)
shared_memory._map_peer = interrupted("memory", shared_memory._map_peer)
shared_memory._probe_direct_reads = interrupted("reads", shared_memory._probe_direct_reads)
places = ("hosts", "memory", "settled", "reads")
held = []
for attempt in range(12):
    interrupts = places[attempt % 4] if MPI.COMM_WORLD.Get_rank() == attempt % 3 else None
    with contextlib.suppress(KeyboardInterrupt, hvd.RankFailedError):
        hvd.init()
    hvd.shutdown()
    held.append(footprint())
check(held, len(places))
print("nothing has grown", flush=True)
MPI.COMM_WORLD.Barrier()
os._exit(0)  # requests are pending, which MPI's finalisation would wait for
"""
    result = run_ranks(3, program, env={**env, "COLLECTIVES_NETWORK": "mpi"}, timeout=90, expect=None)
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
