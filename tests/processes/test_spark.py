"""Ranks in the tasks of a local Spark."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.launching.training import train_alone, train_as_rank

pytest.importorskip("pyspark", reason="Spark is not installed")
if shutil.which("java") is None:
    pytest.skip("there is no Java", allow_module_level=True)

import collectives.spark
from collectives import CollectiveTimeoutError, InvalidArgumentError, NotInitializedError, RankFailedError

pytestmark = pytest.mark.slow
ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[3]").config("spark.executorEnv.PYTHONPATH", ROOT)
    for name, value in {"ui.enabled": False, "driver.host": "127.0.0.1", "sql.shuffle.partitions": 3}.items():
        builder = builder.config(f"spark.{name}", value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("FATAL")
    yield session
    session.stop()


def meet(culprit: int = -1, how: str = "") -> tuple[int, int, float]:
    collectives.init()
    rank = collectives.rank()
    if rank == culprit and how == "raise":
        raise ValueError("as asked")
    if rank == culprit and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return rank, os.getpid(), float(collectives.allreduce(np.full(4, rank + 1.0), average=False)[0])


def test_there_has_to_be_a_context() -> None:
    with pytest.raises(NotInitializedError, match="there is no SparkContext"):
        collectives.spark.run(meet)


def test_training(spark: Any) -> None:
    for weights in collectives.spark.run(train_as_rank):
        np.testing.assert_allclose(weights, train_alone(), rtol=1e-12)


def test_workers_are_ranks_of_one_job_after_the_other(spark: Any) -> None:
    first, second = (collectives.spark.run(meet, env={"ANY": 1}) for _ in range(2))
    assert [(rank, total) for rank, _, total in first] == [(rank, 6.0) for rank in range(3)]
    assert {process for _, process, _ in first} == {process for _, process, _ in second}
    assert [total for *_, total in collectives.spark.run(meet, num_proc=2)] == [3.0, 3.0]


def test_a_rank_that_raises_ends_the_call(spark: Any) -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 on .* failed: ValueError: as asked\nTraceback"):
        collectives.spark.run(meet, (1, "raise"))


def test_a_python_worker_that_is_killed_ends_the_call(spark: Any) -> None:
    with pytest.raises(RankFailedError, match=r"(?s)Spark's job has failed: .*Python worker exited unexpectedly"):
        collectives.spark.run(meet, kwargs={"culprit": 1, "how": "kill"})
    assert len(collectives.spark.run(meet)) == 3


def test_what_cannot_be_run_is_said(spark: Any) -> None:
    with pytest.raises(CollectiveTimeoutError, match=r"started none of 5 tasks within 1 s.* 3 slots"):
        collectives.spark.run(meet, num_proc=5, start_timeout=1)
    with pytest.raises(InvalidArgumentError, match="num_proc=0: expected at least 1"):
        collectives.spark.run(meet, num_proc=0)
    with pytest.raises(InvalidArgumentError, match="executable: there is no such argument"):
        collectives.spark.run(meet, executable="python3", verbose=2)


def test_a_rank_that_raises_ends_others_that_compute(spark: Any) -> None:
    def fail_or_compute() -> None:
        collectives.spark.runner._AFTER_FAILURE = 0.1
        collectives.init()
        if collectives.rank() == 1:
            raise ValueError("as asked")
        time.sleep(1000)  # is ended

    with pytest.raises(RankFailedError, match=r"rank 1 on .* failed: ValueError: as asked"):
        collectives.spark.run(fail_or_compute)


def train_elastically(folder: str) -> tuple[int, float, int]:
    """Trains until a killed rank has been replaced."""
    collectives.init()

    @collectives.elastic.run
    def loop(state: Any) -> tuple[int, float, int]:
        while state.step < 10 or collectives.size() < 2:
            if os.environ["COLLECTIVES_MEMBER"] == "1" and state.step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            state.total += float(collectives.allreduce(np.full(1, collectives.rank() + 1.0), average=True)[0])
            state.step += 1
            state.commit()
        return collectives.rank(), state.total, state.step

    return loop(collectives.elastic.ObjectState(step=0, total=0.0))


def test_a_killed_rank_of_an_elastic_job_is_replaced(spark: Any) -> None:
    results = collectives.spark.run_elastic(train_elastically, ("",), num_proc=2, min_num_proc=1, max_num_proc=2)
    assert [rank for rank, *_ in results] == [0, 1]
    assert len({(total, steps) for _, total, steps in results}) == 1
    with pytest.raises(RankFailedError, match=r"run_elastic: .*\n?.*as asked"):
        collectives.spark.run_elastic(meet, (0, "raise"), num_proc=1)
    with pytest.raises(InvalidArgumentError, match="expected 1 <= min_num_proc <= max_num_proc, got 3 and 2"):
        collectives.spark.run_elastic(meet, num_proc=2, min_num_proc=3)
