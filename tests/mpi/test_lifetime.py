"""Worlds that come and go in one process leave nothing behind: no thread, no descriptor, no memory."""

from __future__ import annotations

import gc
import json
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

import collectives
from collectives import InvalidArgumentError, MismatchError, ProcessSet
from collectives.base.reduce_op import Op
from collectives.worlds import runtime
from collectives.worlds.world import World

pytestmark = pytest.mark.mpi
RANKS = (2,)

CYCLES = 20
SETTLED = 5
"""Cycles after which nothing may grow any more."""
LEAST_LEAK = 16 << 20
"""Bytes of the windows that a world of two ranks maps."""


@contextmanager
def _idle_thread() -> Iterator[threading.Thread]:
    """A thread of the program; `threading` keeps the hooks in it that it found in `sys` when it was started."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        yield thread
    finally:
        over.set()
        thread.join()


def _live_and_leave() -> weakref.ref[World]:
    collectives.init()
    rank = collectives.rank()
    handle = collectives.allreduce_async(np.full(1 << 18, rank + 1.0, np.float32), op=Op.SUM)
    assert collectives.synchronize(handle)[0] == 3
    both, alone = collectives.add_process_set([0, 1]), collectives.add_process_set([1])
    handle = collectives.allreduce_async(np.full(9, rank + 2.0), op=Op.SUM, process_set=both)
    assert collectives.synchronize(handle)[0] == 5
    if alone.included():
        assert collectives.synchronize(collectives.allgather_async(np.ones(2), process_set=alone)).sum() == 2
    collectives.remove_process_set(both)
    reference = weakref.ref(collectives.world())
    collectives.shutdown()
    return reference


def test_twenty_worlds_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_STATUS", "0")  # its thread ends, or does not, half a second later
    this, before = psutil.Process(), threading.active_count()
    worlds, grown = [], {}
    for cycle in range(1, CYCLES + 1):
        worlds.append(_live_and_leave())
        grown[cycle] = this.memory_info().rss, len(os.listdir("/proc/self/fd")), threading.active_count()
    gc.collect()
    print({cycle: grown[cycle] for cycle in (1, SETTLED, CYCLES)})
    assert not [world for world in worlds if world() is not None]
    assert grown[CYCLES][1:] == grown[SETTLED][1:] and grown[CYCLES][2] == before, grown
    assert grown[CYCLES][0] - grown[SETTLED][0] < LEAST_LEAK, grown


def test_each_rank_may_name_a_timeline_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's is the one that all write to, as in Horovod."""
    path = tmp_path / "trace.json"
    monkeypatch.setenv("HOROVOD_TIMELINE", str(path))
    collectives.init()
    rank = collectives.rank()
    collectives.allreduce(np.ones(3), name="loss")
    collectives.barrier()
    collectives.shutdown()
    monkeypatch.delenv("HOROVOD_TIMELINE")
    collectives.init()
    collectives.barrier()  # the other rank has written all that it had
    collectives.shutdown()
    assert path.exists() is (rank == 0)
    if rank == 0:
        events = json.loads(path.read_text())
        assert {event["pid"] for event in events if event.get("name") == "loss"} == {0, 1}
        assert {event["name"] for event in events if event["ph"] == "B"} >= {"NEGOTIATE_ALLREDUCE", "ALLREDUCE"}


def test_process_sets_are_recognized_by_their_ranks() -> None:
    """Those of communicators too, of which each rank has its own; the numbers are Horovod's."""
    from mpi4py import MPI

    everybody = MPI.COMM_WORLD
    rank = everybody.Get_rank()
    alone, both = ProcessSet(everybody.Split(rank)), ProcessSet(everybody.Dup())
    with pytest.raises(
        InvalidArgumentError, match=r"process_sets\[1\] is a duplicate: set 0 has the same ranks \[0, 1\]"
    ):
        collectives.init(everybody, [alone, both, ProcessSet([0])] if rank else [alone, both, ProcessSet(range(1))])
    assert (alone.process_set_id, alone.ranks, alone.rank()) == (1 + rank, [rank], 0)
    assert both.process_set_id is None and collectives.global_process_set.mpi_comm == everybody
    assert str(alone) == f"ProcessSet(process_set_id={1 + rank}, ranks=[{rank}], mpi_comm={alone.mpi_comm})"
    assert collectives.allreduce(1.0 + rank, process_set=alone) == 1.0 + rank

    for ranks in ([1], [0, 1]):
        with pytest.raises(ValueError, match="is a duplicate: process set"):
            runtime.add_process_set(ranks, unlike=True)
    with pytest.raises(NotImplementedError, match=r"init\(process_sets="):
        collectives.add_process_set(ProcessSet(everybody))
    third, fourth = collectives.add_process_set([0]), collectives.add_process_set([0, 1])
    assert (third.process_set_id, fourth.process_set_id) == (3, 4)
    assert collectives.remove_process_set(fourth) and collectives.remove_process_set(third)
    assert not collectives.remove_process_set(third) and third.process_set_id is None
    assert [runtime.add_process_set(ranks).process_set_id for ranks in ([1], [0], [1])] == [4, 3, 5]

    again = ProcessSet([1])
    collectives.init(process_sets=[again])
    assert again.process_set_id == 2 and again.included() is (rank == 1)
    with pytest.raises(InvalidArgumentError, match="no set of the ranks"):
        collectives.init(process_sets=[ProcessSet([0, 7])])
    collectives.shutdown()
    assert again.process_set_id is alone.process_set_id is collectives.global_process_set.mpi_comm is None


def test_ranks_that_give_init_different_process_sets_are_told() -> None:
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
    for sets in ([[rank]], [[0], [1]][: 1 + rank]):
        with pytest.raises(MismatchError, match=r"the ranks disagree on process_sets\[[01]\]"):
            collectives.init(process_sets=sets)
        assert collectives.allreduce(1.0, average=False) == 2
        collectives.shutdown()


def test_a_thread_that_outlives_a_world_does_not_keep_it() -> None:
    collectives.init()
    with _idle_thread() as thread:
        world = weakref.ref(collectives.world())
        collectives.shutdown()
        gc.collect()
        assert thread.is_alive() and world() is None
