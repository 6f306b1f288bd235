"""Kill a rank with SIGKILL in the middle of operations on mapped memory, and look at the others.

    python -m tests.trials.killed_ranks 0 100        the deaths of seeds 0 to 99

The ranks are processes without MPI (`tests.support.launching.processes`), so that nobody ends the survivors. Each of
them must raise RankFailedError within `BOUND` seconds of the death, and keep nothing of its peers when its world is
gone: no mapping, no descriptor.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from collectives.base.config import Config
from collectives.base.errors import RankFailedError
from collectives.base.reduce_op import Op
from collectives.tensors.arena import arena
from collectives.worlds.world import World
from tests.support.launching import processes

BOUND = 5.0
"""Seconds from the death to the last survivor's error."""
OPERATIONS = ("allreduce_", "allreduce", "bucket", "reducescatter", "allgather", "broadcast_", "alltoall", "mixed")
_COUNTS = (1000, 20_000, 300_000, 2_100_000)

Array = np.ndarray[Any, Any]


def die(seed: int, operation: str | None = None) -> list[str]:
    """One death; returns what was wrong."""
    random = Random(f"death {seed}")
    size, delay = random.choice((2, 3, 4)), random.uniform(0.0, 0.15)
    victim, count = random.randrange(size), random.choice(_COUNTS)
    chosen = operation or random.choice(OPERATIONS)
    before = set(os.listdir("/dev/shm"))

    def program(world: World) -> tuple[list[str], int]:
        return _rank(world, chosen, count, victim, delay)

    ended = processes.finish(processes.start(size, program, Config(timeout=30), timeout=60, afterwards=_check_left))
    problems = [f"rank {rank}: {one.error!r}" for rank, one in enumerate(ended) if rank != victim and one.error]
    problems += [f"rank {rank}: {text}" for rank, one in enumerate(ended) for text in one.result or ()]
    if ended[victim].status != -signal.SIGKILL:
        problems.append(f"rank {victim} was to be killed, but ended with {ended[victim].status}: {ended[victim].text}")
    left = [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("collectives")]
    problems += [f"left in /dev/shm: {left}"] if left else []
    what = f"{chosen} of {count} elements, rank {victim} of {size} killed after {delay:.3f} s"
    return [f"seed {seed}, {what}: {problem}" for problem in problems]


def _rank(world: World, operation: str, count: int, victim: int, delay: float) -> tuple[list[str], int]:
    """A rank's part; the victim's never ends. Returns what was wrong, and the number of descriptors at the beginning,
    but for those of the world."""
    mapped, _ = _mappings()
    descriptors = len(os.listdir("/proc/self/fd")) - len(mapped)
    problems = []
    each = calls(world, operation, count)
    next(each)  # peers map the memory
    death = world.allgather_object(time.monotonic() + delay)[victim]
    if world.rank == victim:
        threading.Timer(death - time.monotonic(), os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        for _ in each:
            pass
    except RankFailedError as error:
        late = time.monotonic() - death
        if f"rank {victim}" not in str(error):
            problems.append(f"the error names another rank: {error}")
        if late > BOUND:
            problems.append(f"told {late:.1f} s after the death")
    return problems, descriptors


def _check_left(returned: tuple[list[str], int]) -> list[str]:
    """What was wrong, and what is left of the world."""
    problems, descriptors = returned
    mapped, own = _mappings()
    if mapped:
        problems.append(f"{len(mapped)} mappings of other ranks' memory stay: {mapped}")
    more = len(os.listdir("/proc/self/fd")) - descriptors
    if more > 2 * own:  # a mapping has a descriptor of its own
        problems.append(f"{more} more descriptors, but {own} pieces of an arena")
    return problems


def calls(world: World, operation: str, count: int) -> Iterator[None]:
    """Operation after operation, for ever; the first numbers are checked."""
    size, rank = world.size, world.rank
    count -= count % size
    own_is_private = operation == "mixed" and rank == size - 1
    tensor: Array = np.empty(count, np.float32) if own_is_private else arena.empty(count, np.float32)
    tensor.fill(rank + 1)
    others = [arena.empty(1 + count // 8, np.float32) for _ in range(5)]
    for other in others:
        other.fill(rank + 1)
    average, total = (size + 1) / 2, size * (size + 1) / 2

    def bucket() -> Array:
        handles = [world.allreduce_async_(other, op=Op.AVERAGE, name=f"{k}") for k, other in enumerate(others)]
        return [handle.wait() for handle in handles][-1]

    in_place = world.allreduce_
    call: Callable[[], Array] = {
        "allreduce_": lambda: in_place(tensor, op=Op.AVERAGE),
        "mixed": lambda: in_place(tensor, op=Op.AVERAGE),
        "allreduce": lambda: world.allreduce(tensor, op=Op.AVERAGE),
        "bucket": bucket,
        "reducescatter": lambda: world.reducescatter(tensor, Op.SUM),
        "allgather": lambda: world.allgather(tensor)[count:],
        "broadcast_": lambda: world.broadcast_(tensor, 0),
        "alltoall": lambda: world.alltoall(tensor)[: count // size],
    }[operation]
    right = {"reducescatter": total, "allgather": 2, "broadcast_": 1, "alltoall": 1}.get(operation, average)
    result = call()
    assert (result[: count // 8] == right).all(), f"{operation}: {result}, not {right}"
    del result
    yield
    while True:
        call()
        yield


def _mappings() -> tuple[list[str], int]:
    """This process's mappings of other processes' memory, and the number of its own pieces."""
    inodes = {os.fstat(arena.piece(number).descriptor).st_ino for number in arena.numbers()}
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "memfd:collectives" in line and int(line.split()[4]) not in inodes], len(inodes)


def main() -> None:
    flags = argparse.ArgumentParser(prog="tests.trials.killed_ranks", description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("first", type=int)
    flags.add_argument("count", type=int)
    flags.add_argument("--operation", choices=OPERATIONS, help="only this one")
    flags.add_argument("--within", type=float, default=float("inf"), help="seconds after which no more are started")
    given = flags.parse_args()
    sys.exit(
        try_all(range(given.first, given.first + given.count), given.within, lambda seed: die(seed, given.operation))
    )


def try_all(seeds: range, within: float, one: Callable[[int], list[str]]) -> bool:
    """Print what is wrong with the death of each seed, until the time is up; whether anything is."""
    begun, done, wrong = time.monotonic(), 0, 0
    for seed in seeds:
        if time.monotonic() - begun > within:
            break
        problems = one(seed)
        done, wrong = done + 1, wrong + bool(problems)
        for problem in problems:
            print(problem, flush=True)
    print(f"{done} deaths in {time.monotonic() - begun:.0f} s; {wrong} wrong")
    return bool(wrong)


if __name__ == "__main__":
    main()
