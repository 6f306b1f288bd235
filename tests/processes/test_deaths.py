"""A few of the deaths of ranks and hosts that ``python -m tests.trials.deaths``, ``killed_ranks 0 100`` and
``lost_hosts 0 60 [--mpi]`` try: the survivors are told who died, and keep nothing."""

from __future__ import annotations

import pytest

from tests.support.launching.mpirun import python_for
from tests.trials.deaths import WHERES, Injection, inject
from tests.trials.killed_ranks import OPERATIONS, die
from tests.trials.lost_hosts import draw, lose


@pytest.mark.parametrize(
    ("where", "how", "mpi", "launcher"),
    [
        ("all-reduce, direct-read", "SIGKILL", "openmpi", "collectivesrun"),
        ("synchronize", "os._exit(3)", "mpich", "mpirun"),
        ("init, together", "SIGTERM, sys.exit(7)", "mpich", "mpirun"),
        ("shutdown and init again", "SIGTERM", "openmpi", "collectivesrun"),
    ],
)
def test_a_death_ends_the_job_and_is_named(where: str, how: str, mpi: str, launcher: str) -> None:
    python_for(mpi)  # or skip
    outcome = inject(Injection(where, how, mpi, launcher, 3, 1, WHERES[where] / 2))
    assert not outcome.problems, outcome


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_death_in_an_operation_on_mapped_memory(operation: str) -> None:
    assert die(OPERATIONS.index(operation), operation) == []


@pytest.mark.parametrize(
    ("seed", "how", "mpi"),
    [(5, "killed", ""), (2, "off", ""), (7, "cut for a moment", ""), (4, "off", "openmpi"), (4, "cut", "mpich")],
)
def test_a_death_between_hosts(seed: int, how: str, mpi: str) -> None:
    assert lose(draw(seed, how, mpi)) == []
