"""Worlds that fail one after the other in ranks that go on, as those of elastic jobs do, and what they leave behind.

A rank runs ``python -m tests.trials.failed_worlds CYCLES``. In every cycle the ranks meet, one of them fails, all
catch that, call `shutdown` and meet again.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import collectives as hvd

LARGE = 300_000
"""Elements that travel neither through a window nor with an envelope."""
_MOST_GROWTH = 32.0
"""MiB, from the first tenth of the worlds to the last."""
Footprint = dict[str, list[str]]
"""What a process holds, each by its name: threads, descriptors, and mappings that other ranks have, too."""


class Interrupted(BaseException):
    """What a signal handler of the program raises."""


def footprint() -> Footprint:
    """What this process holds."""
    gc.collect()  # the program's exceptions refer to what it called, which refers to them
    descriptors = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            descriptors.append(os.readlink(f"/proc/self/fd/{number}"))
    with open("/proc/self/maps") as maps:
        shared = [line.partition("/")[2].strip() for line in maps if "/memfd:collectives" in line]
    return {
        "threads": os.listdir("/proc/self/task"),  # also those of which Python knows nothing
        "descriptors": descriptors,
        "mappings": shared,
    }


def check(held: Sequence[Footprint], every: int) -> None:
    """Refuse what has grown by one in every sixth world since the first ones; ``every`` worlds differ in what they
    leave for the next."""
    for name in held[0]:
        before, after = ([footprint[name] for footprint in part] for part in (held[:every], held[-every:]))
        most, now = max(before, key=len), max(after, key=len)
        assert len(now) < len(most) + len(held) // 6, f"{name}: at first {most}, after {len(held)} worlds {now}"


# ---- how a rank fails


def by_the_program() -> None:
    """The program gives up between two calls."""
    hvd.world().fail("the disk is full")
    raise Interrupted


def by_an_interrupt() -> None:
    """In the middle of an operation that the others are in."""

    def interrupted(*_: Any) -> None:
        raise Interrupted

    hvd.world()._engine.guarded(interrupted)


def by_leaving() -> None:
    """The rank leaves while an operation of its own is in flight."""
    hvd.allreduce_async(np.ones(LARGE), name="in flight")
    raise Interrupted


def by_a_message() -> None:
    """While a large message is on its way, which nobody receives."""
    hvd.isend(np.ones(LARGE), (hvd.rank() + 1) % hvd.size())
    hvd.world().fail("interrupted")
    raise Interrupted


WAYS: tuple[Callable[[], None], ...] = (by_the_program, by_an_interrupt, by_leaving, by_a_message)


def world_that_fails(cycle: int) -> None:
    """Meet the other ranks, and fail with them."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    total = hvd.allreduce(np.full(LARGE, rank + 1.0, np.float32), op=hvd.Sum)
    assert total[0] == size * (size + 1) / 2
    assert hvd.sendrecv(np.full(LARGE, rank), (rank + 1) % size, None, (rank - 1) % size)[0] == (rank - 1) % size
    waiting = hvd.irecv(None, (rank - 1) % size, 9)  # which nobody sends
    with contextlib.suppress(Interrupted, hvd.RankFailedError):
        hvd.barrier()  # a failure ends the calls that other ranks are still in
        if rank == cycle // len(WAYS) % size:
            WAYS[cycle % len(WAYS)]()
        for _ in itertools.count():
            hvd.allreduce(np.ones(LARGE))
    del total, waiting
    hvd.shutdown()


def resident() -> float:
    """This process's memory in MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def main() -> None:
    held, memory = [], []
    for cycle in range(int(sys.argv[1])):
        world_that_fails(cycle)
        held.append(footprint())
        memory.append(resident())
    check(held, len(WAYS))
    tenth = -(-len(memory) // 10)
    before, after = max(memory[:tenth]), max(memory[-tenth:])
    # MPI cannot cancel what is pending in a communicator, which therefore stays, with its messages.
    assert "mpi4py.MPI" in sys.modules or after < before + _MOST_GROWTH, (
        f"memory: at first {before:.0f} MiB, in the end {after:.0f}"
    )
    print(f"nothing has grown; memory: at first {before:.0f} MiB, in the end {after:.0f}")


if __name__ == "__main__":
    main()
