"""Ranks on a local Ray. `RayExecutor` is used as Horovod's own tests use theirs."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.launching.training import train_alone, train_as_rank

ray = pytest.importorskip("ray", reason="Ray is not installed")

from ray.util.placement_group import placement_group  # noqa: E402

import collectives  # noqa: E402
from collectives import CollectiveTimeoutError, InvalidArgumentError, NotInitializedError, RankFailedError  # noqa: E402
from collectives.ray import RayExecutor, log  # noqa: E402

pytestmark = pytest.mark.slow
ROOT = str(Path(__file__).parents[2])
SETTINGS = RayExecutor.create_settings(timeout_s=60, placement_group_timeout_s=60)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    environment = {"env_vars": {"PYTHONPATH": ROOT}}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def executor() -> Iterator[RayExecutor]:
    executor = RayExecutor(SETTINGS, num_workers=2)
    executor.start(executable_cls=Counter, executable_args=[10], extra_env_vars={"OF_THE_TEST": 7})
    yield executor
    executor.shutdown()


class Counter:
    """A rank's executable."""

    def __init__(self, start: int) -> None:
        collectives.init()
        self.count = start * collectives.rank()

    def add(self) -> int:
        self.count += 1
        return self.count


def meet(culprit: int = -1) -> tuple[int, int, float, str | None]:
    collectives.init()
    rank = collectives.rank()
    for step in range(3):
        log({"step": step, "rank": rank})
        if rank == culprit:
            raise ValueError("as asked")
        total = collectives.allreduce(np.full(4, rank + 1.0), average=False)
    return rank, collectives.local_rank(), float(total[0]), os.environ.get("OF_THE_TEST")


def meet_for_ever() -> None:
    log(meet())
    while True:
        collectives.barrier()


def fail_before_init(others_sleep: bool) -> None:
    if os.environ["COLLECTIVES_RANK"] == "1":
        raise ValueError("as asked")
    if others_sleep:
        time.sleep(1000)
    collectives.init()


def wait_on_rank_1(file: str) -> int:
    while os.environ["COLLECTIVES_RANK"] == "1" and not os.path.exists(file):
        time.sleep(0.01)  # the program makes it
    return os.getpid()


def die() -> None:
    collectives.init()
    if collectives.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    collectives.barrier()


def test_training(executor: RayExecutor) -> None:
    for weights in executor.run(train_as_rank):
        np.testing.assert_allclose(weights, train_alone(), rtol=1e-12)


def test_results_are_by_rank(executor: RayExecutor) -> None:
    expected = [(0, 0, 3.0, "7"), (1, 1, 3.0, "7")]
    assert executor.run(meet) == expected
    assert executor.run(meet, kwargs={"culprit": 9}) == expected
    assert ray.get(executor.run_remote(meet)) == expected


def test_executables_stay(executor: RayExecutor) -> None:
    first = executor.execute(lambda counter: counter.add())
    assert executor.execute(lambda counter: counter.add()) == [count + 1 for count in first]
    assert first[1] - first[0] == 10
    assert executor.execute_single(lambda counter: counter.count) == first[0] + 1


def test_callbacks_hear_what_rank_0_logs(executor: RayExecutor) -> None:
    heard: list[Any] = []
    executor.run(meet, callbacks=[heard.append])
    assert heard == [{"step": step, "rank": 0} for step in range(3)]


def test_a_rank_that_raises_ends_the_call(executor: RayExecutor) -> None:
    with pytest.raises(
        RankFailedError, match=r"RayExecutor.run: rank 1 on .* failed: ValueError: as asked \[L7\]\nTraceback"
    ):
        executor.run(meet, [1])
    assert len(executor.run(meet)) == 2
    with pytest.raises(Exception, match="ValueError: as asked"):
        ray.get(executor.run_remote(meet, [1]))
    assert len(executor.run(meet)) == 2


@pytest.mark.parametrize("others_sleep", [False, True])
def test_a_rank_that_raises_before_init_costs_no_worker(executor: RayExecutor, others_sleep: bool) -> None:
    processes = executor.run(os.getpid)
    executor.run(collectives.shutdown)
    with pytest.raises(
        RankFailedError, match=r"RayExecutor.run: rank 1 on .* failed: ValueError: as asked \[L7\]\nTraceback"
    ):
        executor.run(fail_before_init, [others_sleep])
    assert [total for _, _, total, _ in executor.run(meet)] == [3.0, 3.0]
    assert executor.run(os.getpid) == processes


def test_a_callback_that_raises_costs_no_worker(executor: RayExecutor) -> None:
    with pytest.raises(ZeroDivisionError):
        executor.run(meet_for_ever, callbacks=[lambda _: 1 / 0])
    assert [total for _, _, total, _ in executor.run(meet)] == [3.0, 3.0]


def test_a_single_call_that_raises_leaves_the_other_ranks_calls_alone(executor: RayExecutor, tmp_path: Path) -> None:
    references = executor.run_remote(wait_on_rank_1, [str(tmp_path / "goes-on")])
    first = ray.get(references[0])
    with pytest.raises(RankFailedError, match=r"RayExecutor.execute_single: rank 0 .*ZeroDivisionError"):
        executor.execute_single(lambda counter: 1 / 0)
    (tmp_path / "goes-on").touch()
    processes = [first, ray.get(references[1])]
    assert [total for _, _, total, _ in executor.run(meet)] == [3.0, 3.0]
    assert executor.run(os.getpid) == processes


def test_ranks_meet_at_a_port_that_is_free(executor: RayExecutor) -> None:
    executor.run(collectives.shutdown)
    address, port = executor.run(os.getenv, ["COLLECTIVES_RENDEZVOUS"])[0].removeprefix("tcp://").split(":")
    with socket.create_server((address, int(port))):
        assert [total for _, _, total, _ in executor.run(meet)] == [3.0, 3.0]


def test_a_worker_that_is_killed_ends_the_call_and_is_replaced_by_start() -> None:
    executor = RayExecutor(SETTINGS, num_hosts=1, num_workers_per_host=2)
    executor.start()
    try:
        for _ in range(2):  # at once, the second time
            with pytest.raises(RankFailedError, match=r"the process of rank 1 on .* has ended"):
                executor.run(die)
        executor.shutdown()
        executor.start()
        assert len(executor.run(meet)) == 2
    finally:
        executor.shutdown()


def test_what_has_no_place_is_said() -> None:
    for shape in ({"num_workers": 9}, {"num_hosts": 3, "num_workers_per_host": 1}):
        executor = RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=2), **shape)
        with pytest.raises(CollectiveTimeoutError, match=r"Ray found no room for \d times {'CPU': 1} .* within 2 s"):
            executor.start()
        executor.shutdown()


def test_mistakes_are_said(executor: RayExecutor) -> None:
    with pytest.raises(InvalidArgumentError, match="expected either num_workers, or num_hosts"):
        RayExecutor(SETTINGS)
    with pytest.raises(InvalidArgumentError, match="needs use_gpu=True"):
        RayExecutor(SETTINGS, num_workers=2, gpus_per_worker=1)
    with pytest.raises(InvalidArgumentError, match="are already started"):
        executor.start()
    with pytest.raises(NotInitializedError, match=r"call start\(\) first"):
        RayExecutor(SETTINGS, num_workers=1).run(meet)


def test_the_placement_group_of_the_program_is_used() -> None:
    group = placement_group([{"CPU": 1}] * 2, strategy="PACK")
    ray.get(group.ready(), timeout=60)

    @ray.remote(num_cpus=0)
    class Program:
        def run(self) -> list[Any]:
            executor = RayExecutor(SETTINGS, num_workers=2)
            executor.start()
            try:
                return executor.run(meet) + executor.execute(lambda _: ray.util.get_current_placement_group().id.hex())
            finally:
                executor.shutdown()

    where = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, 0, True)
    *results, first_group, second_group = ray.get(Program.options(scheduling_strategy=where).remote().run.remote())
    assert [total for _, _, total, _ in results] == [3.0, 3.0]
    assert {first_group, second_group} == {group.id.hex()}
