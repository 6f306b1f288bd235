"""How and where a rank dies, and which deaths a job has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from benchmarks.chaos.training import NUMPY

ROWS = {
    "kill": 4,
    "_exit": 2,
    "exception": 3,
    "exit 0": 1,
    "stop": 2,
    "long stop": 1,
    "late stop": 1,
}
"""Ways to die, and how often each is drawn: SIGKILL; os._exit; an exception; exit with 0; SIGSTOP for less than the
timeout; SIGSTOP until the rank has been declared dead; SIGSTOP until the others have noticed, but no longer."""
ENDS = ("launcher killed", "all die", "start")
"""Ways to end a whole job: its launcher is killed, or all ranks die. And a way to begin: one dies before it trains."""
HOST_OFF, HOST_CUT = HOST_ENDS = ("host off", "host cut")
"""A host is switched off, or its cable pulled until its ranks have been declared dead; at the end of a job."""
OPERATIONS = ("blocking", "fused", "mapped", "persistent", "large")
SAVE_TO = "save_to"
COLUMNS = ("user code", *OPERATIONS, "commit", SAVE_TO, "forming", "transfer", "init")
"""Where a rank dies: between operations; in an operation of a kind; in a commit; while rank 0 writes the state's file;
while the next generation forms; while the state is sent to newcomers; in `collectives.init`, as a newcomer. Large
operations use direct reads, or TCP."""
BUILDING = "building"
"""Where else a rank dies before it trains: between `collectives.init` and the training function."""
GRADIENTS = "gradients"
FRAMEWORK_COLUMNS = ("user code", GRADIENTS, "commit", SAVE_TO, "forming", "transfer", "init")
"""Those of a training through a framework's optimizer, which combines gradients instead."""
TRIGGERED = ("forming", "transfer", "init")
"""Columns that another rank's death leads to."""
STOPS = ("stop", "long stop", "late stop")


@dataclass(frozen=True)
class Death:
    """One death.

    Attributes:
        row, column: how and where.
        rank: a number from 0 to 1 that chooses the victim among the ranks; ``newcomer``: a newcomer is to die instead,
            in the transfer.
        delay: from 0 to 1: when, as a part of the time that is spent there.
        seconds: of a stop.
        trigger: from 0 to 1, chooses the rank whose death comes first, where the column needs one.
    """

    row: str
    column: str
    rank: float
    delay: float
    seconds: float = 0.0
    newcomer: bool = False
    trigger: float = 0.0

    def __str__(self) -> str:
        return f"{self.row}/{self.column}"


@dataclass(frozen=True)
class Plan:
    """One job.

    Attributes:
        number, seed: which one of which run.
        largest: the most ranks.
        tcp: whether every rank counts as a host of its own.
        deaths: in order; each leaves ranks that go on.
        retry: whether survivors retry steps, instead of returning to the last commit.
        framework: what they train with.
        by_hand: whether the benchmark itself starts the processes, without a launcher.
        end: how it ends: one of `ENDS` or `HOST_ENDS`, or "" for when it is done.
    """

    number: int
    seed: int
    largest: int
    tcp: bool
    deaths: tuple[Death, ...]
    end: str = ""
    retry: bool = False
    framework: str = NUMPY
    by_hand: bool = False

    def __str__(self) -> str:
        how = f"{self.framework}, {'TCP' if self.tcp else 'memory'}{', retried' if self.retry else ''}"
        how += ", without launcher" if self.by_hand else ""
        return f"job {self.number} of seed {self.seed}, {how}, up to {self.largest} ranks"


def draw(
    number: int,
    seed: int,
    count: int,
    only: Sequence[tuple[str, str]],
    *,
    hosts: int = 0,
    retry: bool = False,
    framework: str = NUMPY,
    by_hand: bool = False,
) -> Plan:
    """Return the plan of a job of ``count`` deaths; ``only``: pairs of rows and columns, each "" for any."""
    random = Random(f"chaos {seed} {number}")
    possible = (*(ENDS[1:2] if by_hand else ENDS), *(HOST_ENDS if hosts else ()))
    ends = [end for end in possible if not only or (end, "") in only]
    cells = [
        (row, column)
        for row in ROWS
        for column in (COLUMNS if framework == NUMPY else FRAMEWORK_COLUMNS)
        if (not only or {(row, column), (row, ""), ("", column)} & {*only})
        and not (row == "late stop" and (column == "init" or hosts))  # nobody waits for a newcomer, or so briefly
        # A newcomer has no number yet; and members that go on without a majority may each do so alone.
        and not (by_hand and ((row in STOPS and column == "init") or (retry and row == "long stop")))
    ]
    # Every few jobs end otherwise than by being done; where only such ends are wanted, all do.
    end = random.choice(ends) if ends and (not cells or number % 4 == 3 or (hosts and number % 2)) else ""
    deaths = [] if end == "start" or not cells else [_death(random, cells) for _ in range(count - bool(end))]
    # A rank that leaves is not replaced while there are enough: that comes last, and once.
    leaves = [death for death in deaths if death.row == "exit 0"]
    deaths = [
        death if death.row != "exit 0" else replace(death, row="_exit") for death in deaths if death not in leaves[:1]
    ] + leaves[:1]
    # Without a launcher a generation needs a majority of the one before it.
    largest, tcp = 4 if by_hand else random.choice((3, 4, 4)), bool(hosts) or number % 3 == 2
    return Plan(number, seed, largest, tcp, tuple(deaths), end, retry, framework, by_hand)


def early(plan: Plan) -> Death:
    """The death of a rank that has not begun to train."""
    random = Random(f"early {plan.seed} {plan.number}")
    return Death(random.choice(("kill", "_exit", "exception")), random.choice(("init", BUILDING)), 0.0, random.random())


def _death(random: Random, cells: Sequence[tuple[str, str]]) -> Death:
    row, column = random.choices(cells, [ROWS[row] for row, _ in cells])[0]
    # Exponents that prefer the beginning: delays are parts of typical times, which a slow rank exceeds.
    seconds = random.uniform(0.05, 1.0)
    return Death(row, column, random.random(), random.random(), seconds, random.random() < 0.5, random.random())
