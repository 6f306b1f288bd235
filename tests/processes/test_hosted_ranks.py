"""Processes that are kept become ranks, again and again."""

import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from collectives import RankFailedError
from collectives.launch import hosted_ranks

WITHIN = 60.0


def summed(culprit: int) -> tuple[int, float, bool]:
    import collectives

    collectives.init()
    rank = collectives.rank()
    if rank == culprit:
        raise ValueError("as asked")
    total = collectives.allreduce(np.full(3, rank + 1.0), average=False)
    return rank, float(total[0]), os.environ["WORLD_SIZE"] == os.environ["HOROVOD_SIZE"] == "3"


def keep(connection: Connection) -> None:
    """A process that takes part in each job that comes."""
    connection.send(hosted_ranks.here())
    while (job := connection.recv()) is not None:
        variables, culprit = job
        outcome = hosted_ranks.as_rank(variables, hosted_ranks.call, summed, (culprit,))
        connection.send((outcome, "COLLECTIVES_RANK" in os.environ))


@pytest.mark.slow
def test_processes_are_ranks_of_one_job_after_the_other() -> None:
    context = multiprocessing.get_context("spawn")
    ends: list[Connection] = []
    for _ in range(3):
        end, other_end = context.Pipe()
        context.Process(target=keep, args=(other_end,), daemon=True).start()
        other_end.close()
        ends.append(end)

    def heard(end: Connection) -> Any:
        assert end.poll(WITHIN)
        return end.recv()

    places = hosted_ranks.arrange([heard(end) for end in ends])

    def job(culprit: int) -> list[tuple[int, float, bool]]:
        for end, variables in zip(ends, places, strict=True):
            end.send((variables, culprit))
        outcomes, still_ranks = zip(*map(heard, ends), strict=True)
        assert not any(still_ranks)
        return hosted_ranks.results(outcomes, "job")

    expected = [(rank, 6.0, True) for rank in range(3)]
    assert job(-1) == expected
    with pytest.raises(RankFailedError, match=r"job: rank 1 on .* failed: ValueError: as asked"):
        job(1)
    assert job(-1) == expected
    for end in ends:
        end.send(None)
