"""What a job says of itself: one line at ``info``, each new plan at ``debug``, and every record with its rank and
host."""

from __future__ import annotations

import re

import pytest

from tests.support.launching.mpirun import IMPLEMENTATIONS, run_ranks

PROGRAM = """
import logging
import numpy as np
import collectives as hvd
hvd.init()
for _ in range(3):
    hvd.allreduce(np.ones(1000, np.float32), name="small")
    hvd.allreduce_(np.ones(1 << 20, np.float32), name="large")
    hvd.allreduce(np.ones(10), algorithm="ring")
hvd.grouped_allreduce([np.ones(3), np.ones(4)])
hvd.broadcast(np.ones(7, np.int16), 0)
logging.getLogger("collectives").warning("from every rank")
"""
MPI = {"openmpi": r"Open MPI v\d+\.\d+\.\d+", "mpich": r"MPICH \d+\.\d+\.\d+"}


@pytest.mark.parametrize("mpi", IMPLEMENTATIONS)
def test_info_is_one_line_on_one_rank(mpi: str) -> None:
    result = run_ranks(2, PROGRAM, mpi=mpi, env={"COLLECTIVES_LOG_LEVEL": "info", "COLLECTIVES_LOG_LEVLE": "debug"})
    said = [[line for line in text.splitlines() if " collectives " in line] for text in result.ranks]
    assert [len(lines) for lines in said] == [3, 1], str(result)
    world = rf"INFO \[rank 0 on [^]]+\]: 2 ranks on 1 host, connected by {MPI[mpi]}; transports: within a host windows"
    assert re.search(world, said[0][0]), str(result)
    assert "COLLECTIVES_LOG_LEVLE is not a setting of collectives; did you mean COLLECTIVES_LOG_LEVEL?" in said[0][1], (
        str(result)
    )
    for rank, lines in enumerate(said):
        assert re.search(rf"WARNING \[rank {rank} on [^]]+\]: from every rank", lines[-1]), str(result)


def test_debug_says_what_was_chosen_and_why_once_for_each_plan() -> None:
    result = run_ranks(2, PROGRAM, env={"COLLECTIVES_LOG_LEVEL": "debug"})
    plans = [line.partition("]: ")[2] for line in result.ranks[0].splitlines() if " DEBUG [rank 0 on " in line]
    assert [plan.partition(":")[0] for plan in plans] == [
        "allreduce of 4000 bytes of float32",
        "allreduce of 4194304 bytes of float32",
        "allreduce of 80 bytes of float64",
        "allreduce of 56 bytes of float64",
        "broadcast of 14 bytes of int16",
    ], str(result)
    assert "one-shot over window" in plans[0] and "one round, up to 32768 bytes" in plans[0], plans[0]
    assert "direct over direct-read" in plans[1] and "above 524288 bytes" in plans[1], plans[1]
    assert "ring over window" in plans[2] and "algorithm as requested" in plans[2], plans[2]
    assert "fused one-shot over window" in plans[3] and "segments of 56 bytes" in plans[3], plans[3]
    assert " DEBUG " not in result.ranks[1], str(result)


def test_debug_says_why_mpi_reduces_by_itself() -> None:
    result = run_ranks(2, PROGRAM, env={"COLLECTIVES_LOG_LEVEL": "debug", "COLLECTIVES_TRANSPORT": "mpi"})
    (plan,) = [line for line in result.ranks[0].splitlines() if "of 56 bytes of float64" in line]
    assert "native over mpi" in plan and "up to 2048 bytes" in plan and "medium as requested" in plan, plan
