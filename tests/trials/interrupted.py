"""Interrupt ranks at random moments of `init`, of every kind of call, and of `shutdown`, and go on.

    python -m tests.trials.interrupted --count 2000  # both MPIs and no MPI, 1 to 3 ranks, in turns
    python -m tests.trials.interrupted --world openmpi --ranks 3 --count 100 --seed 7

Each rank goes through epochs of `init`, some calls, and `shutdown`. A timer interrupts it at a random moment of some of
them, by an exception of a random kind. A rank has been interrupted rightly if just that exception comes out, all others
get it as the cause of a RankFailedError, nobody waits for longer than a few seconds, and all meet again in the next
`init`. At the end no more threads, descriptors and mappings are there than after the first epochs. Exit code 1 if
anything is wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import numpy as np

import collectives as hvd
from tests.support.launching.mpirun import Result, run_command, run_ranks
from tests.support.launching.ports import free_port
from tests.trials.failed_worlds import Footprint, footprint

WORLDS = ("tcp", "openmpi", "mpich")
LONGEST = 5.0
"""Seconds that an interrupted call, and one whose peer was interrupted, may take."""
_SETTLED = 10
"""Interrupts after which nothing more may be added to what this process holds."""


class Late(TimeoutError):
    """An OSError."""


class Stop(KeyboardInterrupt):
    pass


class Wrong(ValueError):
    pass


RAISED = (Late, Stop, Wrong, SystemExit)
_CAUSES = (*(kind.__name__ for kind in RAISED), "shut down", "begun init() again")


def calls(rank: int, size: int) -> dict[str, Callable[[], object]]:
    """Every kind of call, by name; each checks its result."""

    def expect(got: Any, expected: object) -> None:
        assert np.all(np.asarray(got) == expected), (got, expected)

    def in_flight() -> None:
        handles = [hvd.allreduce_async(np.full(n, rank), op=hvd.Sum, name=f"in flight {n}") for n in (3, 70_000, 5)]
        for handle in handles:
            expect(hvd.synchronize(handle), total)

    def messages() -> None:
        sending = hvd.isend(np.full(3000, rank), (rank + 1) % size)
        expect(hvd.recv(np.empty(3000, int), (rank - 1) % size), (rank - 1) % size)
        sending.wait()

    def persistent() -> None:
        tensor = np.full(50_000, rank)
        with hvd.allreduce_init(tensor, op=hvd.Sum) as operation:
            operation.start()
            operation.wait()
        expect(tensor, total)

    def process_set() -> None:
        members = hvd.add_process_set(range(size))
        expect(hvd.allreduce(np.full(3, rank), op=hvd.Sum, process_set=members), total)
        hvd.remove_process_set(members)

    total, ranks = sum(range(size)), list(range(size))
    return {
        "allreduce": lambda: expect(hvd.allreduce(np.full(3, rank), op=hvd.Sum), total),
        "large": lambda: expect(hvd.allreduce(np.full(400_000, rank), op=hvd.Sum), total),
        "named": lambda: expect(hvd.allreduce_(np.full(9000, rank), op=hvd.Sum, name="named"), total),
        "grouped": lambda: expect(hvd.grouped_allreduce([np.full(9, rank), np.full(9, rank)], op=hvd.Sum), total),
        "in flight": in_flight,
        "allgather": lambda: expect(hvd.allgather(np.full(1, rank)), ranks),
        "broadcast": lambda: expect(hvd.broadcast(np.full(20_000, rank), size - 1), size - 1),
        "reducescatter": lambda: expect(hvd.reducescatter(np.full(6 * size, rank), op=hvd.Sum), total),
        "alltoall": lambda: expect(hvd.alltoall(np.full(size, rank)), ranks),
        "object": lambda: expect(hvd.allgather_object(rank), ranks),
        "barrier": hvd.barrier,
        "messages": messages,
        "persistent": persistent,
        "process set": process_set,
    }


class Rank:
    """One rank's part: epochs until every rank has been interrupted often enough.

    Args:
        count: interrupts of this rank.
        seed: of its moments.
    """

    def __init__(self, count: int, seed: int) -> None:
        assert hvd.init  # the first use of a name imports the package: no import statement is safe from signals
        self.left = count
        self.random = random.Random(seed)
        self.doing = ""
        self.problems: list[str] = []
        self.longest = 0.0, ""
        self.before: Footprint = {}
        signal.signal(signal.SIGALRM, self._on_alarm)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        self.left -= 1
        self.raised = self.random.choice(RAISED)(f"interrupted, {self.left} left")
        self.where = "".join(traceback.format_stack(frame)[8:])
        raise self.raised

    def run(self) -> None:
        """All epochs."""
        self.raised: BaseException | None = None
        over = False
        while not over:
            try:
                over = self._epoch()
            except RAISED as error:
                if error is not self.raised:
                    raise
                self.raised = None
            except hvd.RankFailedError as error:
                if not any(cause in str(error) for cause in _CAUSES):
                    self.problems.append(f"{self.doing}: without the cause: {error}")
            if self.raised is not None:
                self.problems.append(f"{self.doing}: {self.raised!r} was lost, raised at\n{self.where}")
                self.raised = None
            self._timed("shutdown after an interrupt", hvd.shutdown)
            if len(self.before) == 0 and self.done >= _SETTLED:
                self.before = footprint()

    done = 0

    def _epoch(self) -> bool:
        """One epoch; whether it was the last one."""
        self.done += 1
        try:
            if self.left and self.random.random() < 0.7:
                signal.setitimer(signal.ITIMER_REAL, 10 ** self.random.uniform(-4, -1))
            return self._calls()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _calls(self) -> bool:
        self._timed("init", hvd.init)
        rank, size = hvd.rank(), hvd.size()
        everything = calls(rank, size)
        agreed = random.Random(str(hvd.broadcast_object(self.random.random(), 0)))
        for name in agreed.choices(list(everything), k=6):
            self._timed(name, everything[name])
        over = not any(hvd.allgather_object(self.left))
        self._timed("shutdown", hvd.shutdown)
        return over

    def _timed(self, doing: str, call: Callable[[], object]) -> None:
        self.doing, begun = doing, time.monotonic()
        try:
            call()
        finally:
            seconds = time.monotonic() - begun
            self.longest = max(self.longest, (seconds, doing))


def be_a_rank(count: int, seed: int) -> None:
    number = int(next(os.environ[name] for name in _NUMBERS if name in os.environ))
    rank = Rank(count, 1000 * seed + number)
    rank.run()
    grown = {what: (len(rank.before.get(what, ())), len(now)) for what, now in footprint().items()}
    for problem in rank.problems:
        print(f"WRONG rank {number}: {problem}")
    seconds, doing = rank.longest
    slow = "SLOW " if seconds > LONGEST else ""
    print(
        f"{slow}rank {number}: {count} interrupts, {rank.done} epochs, at most {seconds:.2f} s ({doing}), holds {grown}"
    )


_NUMBERS = ("COLLECTIVES_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def interrupt(
    world: str, ranks: int, count: int, seed: int, timeout: float = 300, env: Mapping[str, str] | None = None
) -> Result:
    """Run a job in which each rank is interrupted ``count`` times; bounded."""
    arguments = ["-m", "tests.trials.interrupted", "--rank", "--count", str(count), "--seed", str(seed)]
    if world != "tcp":
        return run_ranks(ranks, arguments, mpi=world, timeout=timeout, env=env)
    address = f"tcp://localhost:{free_port()}"
    program = (
        'for rank in $(seq 1 $(($COLLECTIVES_SIZE - 1))); do COLLECTIVES_RANK=$rank "$@" & done; '
        'COLLECTIVES_RANK=0 "$@"; code=$?; wait; exit $code'
    )
    environment = {"COLLECTIVES_RENDEZVOUS": address, "COLLECTIVES_SIZE": str(ranks), **(env or {})}
    return run_command(["bash", "-c", program, "bash", sys.executable, *arguments], timeout=timeout, env=environment)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    flags.add_argument("--count", type=int, default=100, help="interrupts in all, or of this rank")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--world", choices=WORLDS, help="only this one")
    flags.add_argument("--ranks", type=int, help="only so many")
    flags.add_argument("--rank", action="store_true", help="be one of the ranks")
    given = flags.parse_args()
    if given.rank:
        be_a_rank(given.count, given.seed)
        return
    worlds = [(world, ranks) for world in ([given.world] if given.world else WORLDS) for ranks in (1, 2, 3)]
    worlds = [(world, ranks) for world, ranks in worlds if given.ranks in (None, ranks)]
    wrong = 0
    for world, ranks in worlds:
        each = -(-given.count // (len(worlds) * ranks))
        try:
            result = interrupt(world, ranks, each, given.seed)
        except AssertionError as error:
            print(error, flush=True)
            wrong += 1
            continue
        text = result.output + "".join(result.ranks)
        wrong += "WRONG" in text or "SLOW" in text
        print(f"{world}, {ranks} ranks, {each} interrupts each, {result.seconds:.0f} s:\n{text}", flush=True)
    print(f"{wrong} of {len(worlds)} jobs wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
