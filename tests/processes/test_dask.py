"""Ranks on the workers of a Dask cluster of processes."""

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.launching.training import train_alone, train_as_rank

distributed = pytest.importorskip("distributed", reason="Dask is not installed")

import collectives.dask  # noqa: E402
from collectives import CollectiveTimeoutError, InvalidArgumentError, RankFailedError  # noqa: E402

pytestmark = pytest.mark.slow
ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    options = {"n_workers": 3, "threads_per_worker": 2, "dashboard_address": None, "env": {"PYTHONPATH": ROOT}}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
        yield client


def meet(culprit: int = -1, how: str = "") -> tuple[int, int, float]:
    collectives.init()
    rank = collectives.rank()
    if rank == culprit and how == "raise":
        raise ValueError("as asked")
    if rank == culprit and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while rank != culprit and how == "wait":
        collectives.barrier()
    if how == "wait":
        collectives.allreduce(np.zeros(1), name="never met")
    return rank, os.getpid(), float(collectives.allreduce(np.full(4, rank + 1.0), average=False)[0])


def fail_before_init() -> None:
    if os.environ["COLLECTIVES_RANK"] == "1":
        raise ValueError("as asked")
    collectives.init()


def test_training(client: Any) -> None:
    for weights in collectives.dask.run(client, train_as_rank):
        np.testing.assert_allclose(weights, train_alone(), rtol=1e-12)


def test_workers_are_ranks_of_one_job_after_the_other(client: Any) -> None:
    first, second = (collectives.dask.run(client, meet) for _ in range(2))
    assert [(rank, total) for rank, _, total in first] == [(rank, 6.0) for rank in range(3)]
    assert {process for _, process, _ in first} == {process for _, process, _ in second}
    assert [total for *_, total in collectives.dask.run(client, meet, np=2)] == [3.0, 3.0]


def test_a_rank_that_raises_ends_the_call(client: Any) -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 on .* failed: ValueError: as asked \[L7\]\nTraceback"):
        collectives.dask.run(client, meet, (1, "raise"))
    assert len(collectives.dask.run(client, meet)) == 3


def test_a_worker_that_is_killed_ends_the_call(client: Any) -> None:
    former = set(client.scheduler_info()["workers"])
    with pytest.raises(RankFailedError, match=r"rank 1 on .* its worker has ended"):
        collectives.dask.run(client, meet, kwargs={"culprit": 1, "how": "kill"})
    end = time.monotonic() + 60
    while len(present := set(client.scheduler_info()["workers"])) < 3 or present == former:
        assert time.monotonic() < end
        time.sleep(0.1)  # the scheduler takes note of a worker's end and start
    assert len(collectives.dask.run(client, meet)) == 3


def test_a_call_that_takes_too_long_is_ended(client: Any) -> None:
    with pytest.raises(CollectiveTimeoutError, match="did not finish within 1 s"):
        collectives.dask.run(client, meet, kwargs={"culprit": 3, "how": "wait"}, timeout=1.0)
    assert len(collectives.dask.run(client, meet)) == 3


def test_a_rank_that_raises_before_init_ends_the_others_wait_in_it(client: Any) -> None:
    with pytest.raises(RankFailedError, match=r"failed: ValueError: as asked"):
        collectives.dask.run(client, fail_before_init)
    assert len(collectives.dask.run(client, meet)) == 3


def test_what_cannot_be_ranks_is_refused(client: Any) -> None:
    with pytest.raises(
        InvalidArgumentError, match="np=6, but there are 3 workers, and each worker process is one rank"
    ):
        collectives.dask.run(client, meet, np=6)
    with pytest.raises(InvalidArgumentError, match="unknown worker 'tcp://nowhere:1'"):
        collectives.dask.run(client, meet, workers=["tcp://nowhere:1"])


def test_threads_of_one_process_are_refused() -> None:
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": None}
    with (
        distributed.LocalCluster(**options) as cluster,
        distributed.Client(cluster) as client,
        pytest.raises(InvalidArgumentError, match=r"threads of one process.*local_world"),
    ):
        collectives.dask.run(client, meet)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_torchs_groups_meet_there_too(client: Any) -> None:
    assert collectives.dask.run(client, gloo_sum) == [6.0, 6.0, 6.0]


def gloo_sum() -> float:
    collectives.init()
    import torch

    torch.distributed.init_process_group("gloo")
    tensor = torch.full((2,), collectives.rank() + 1.0)
    torch.distributed.all_reduce(tensor)
    torch.distributed.destroy_process_group()
    return float(tensor[0])
