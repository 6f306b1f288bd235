"""An elastic job on a local Ray cluster of several nodes: a rank is killed, a node comes, and goes."""

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed")

from ray.util.placement_group import placement_group, remove_placement_group  # noqa: E402

import collectives  # noqa: E402
from collectives import InvalidArgumentError, RankFailedError  # noqa: E402
from collectives.ray import ElasticRayExecutor, RayExecutor, log, nodes  # noqa: E402

pytestmark = pytest.mark.slow
ROOT = str(Path(__file__).parents[2])
WITHIN = 120.0
STEPS = 30


def train(folder: str) -> tuple[int, float, list[int]]:
    """Trains until the file "done" is there; rank 0 notes in "sizes" with how many ranks."""
    collectives.init()
    sizes: list[int] = []

    @collectives.elastic.run
    def loop(state: Any) -> tuple[int, float, list[int]]:
        while True:
            time.sleep(0.02)
            if os.environ["COLLECTIVES_MEMBER"] == "1" and state.step == STEPS:
                os.kill(os.getpid(), signal.SIGKILL)
            is_done = np.array([Path(folder, "done").exists()], np.int8)
            if collectives.allreduce(is_done, op=collectives.Max, name="done")[0]:
                return state.step, state.total, sizes
            state.total += float(collectives.allreduce(np.full(1, collectives.rank() + 1.0), average=True)[0])
            state.step += 1
            if sizes[-1:] != [collectives.size()]:
                sizes.append(collectives.size())
                log(collectives.size())
                if collectives.rank() == 0:
                    Path(folder, "sizes").write_text(" ".join(map(str, sizes)))
            state.commit()

    return loop(collectives.elastic.ObjectState(step=0, total=0.0))


def fail() -> None:
    collectives.init()
    raise ValueError("as asked")


def log_for_ever() -> None:
    collectives.init()
    log(1)
    while True:
        collectives.barrier()


def wait_for(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WITHIN
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)  # another process writes the file


def test_a_rank_is_killed_a_node_comes_and_goes(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        ray.init(cluster.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": ROOT}})
        others = placement_group([{"CPU": 1}])  # of another program: one of two CPUs
        ray.get(others.ready(), timeout=WITHIN)
        single = ElasticRayExecutor(ElasticRayExecutor.create_settings(max_num_proc=1, timeout_s=60))
        with pytest.raises(RankFailedError, match=r"ElasticRayExecutor.run: .*\n?.*ValueError: as asked|as asked"):
            single.run(fail)
        with pytest.raises(ZeroDivisionError):
            single.run(log_for_ever, callbacks=[lambda _: 1 / 0])
        remove_placement_group(others)

        executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), min_workers=1)
        executor.start(executable_cls=str, executable_args=[tmp_path])
        results: list[Any] = []
        heard: list[int] = []
        job = threading.Thread(target=lambda: results.extend(executor.execute(train, [heard.append])), daemon=True)
        job.start()

        def sizes() -> list[int]:
            path = tmp_path / "sizes"
            return [int(word) for word in path.read_text().split()] if path.exists() else []

        wait_for(lambda: sizes()[:3] == [2, 1, 2])  # member 1 has been killed, and another one has come
        node = cluster.add_node(num_cpus=1)
        wait_for(lambda: sizes()[-1:] == [3])
        cluster.remove_node(node, allow_graceful=False)
        wait_for(lambda: sizes()[-1:] == [2])
        (tmp_path / "done").touch()
        job.join(WITHIN)
        assert len(results) == 2
        assert len({(steps, total) for steps, total, _ in results}) == 1
        assert results[0][2] == heard == sizes()

        with pytest.raises(InvalidArgumentError, match=r"only run\(\) and execute\(\)"):
            executor.run_remote(fail)
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_nodes_on_one_machine_bring_each_logged_value_once_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Values(list[Any]):
        def put(self, data: bytes) -> None:
            time.sleep(0.001)  # as long as Ray's queue takes: what comes twice does so meanwhile
            self.append(pickle.loads(data))

    values = Values()
    monkeypatch.setenv(nodes.LOG, str(tmp_path))
    several = [nodes.Node(str(tmp_path), b"") for _ in range(4)]
    for value in range(50):
        nodes.log(value)
    with ThreadPoolExecutor(len(several)) as threads:
        for done in [threads.submit(node.bring_logged, values) for node in several]:
            done.result(WITHIN)
    assert values == list(range(50))


def test_mistakes_are_said() -> None:
    with pytest.raises(InvalidArgumentError, match="expected 1 <= min_num_proc <= max_num_proc, got 4 and 2"):
        ElasticRayExecutor.create_settings(min_num_proc=4, max_num_proc=2)
    with pytest.raises(InvalidArgumentError, match="needs use_gpu=True"):
        ElasticRayExecutor(gpus_per_slot=1)
    with pytest.raises(InvalidArgumentError, match="needs min_workers"):
        RayExecutor(max_workers=2)
    with pytest.raises(InvalidArgumentError, match="got both"):
        RayExecutor(min_workers=1, num_workers=2)
