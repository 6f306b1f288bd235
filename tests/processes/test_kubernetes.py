"""Manifests for Kubernetes, whose pods are processes of this host: started with the commands and variables that the
controllers and the kubelet would give them. Where rank 0's pod is, the cluster's DNS says there, and this test here."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from collectives.launch import cli
from tests.support.launching.mpirun import ROOT, rank_environment
from tests.support.launching.pods import Pod, pods_of
from tests.support.launching.ports import free_port
from tests.support.launching.training import train_alone
from tests.support.launching.watched_process import Process

pytestmark = pytest.mark.slow

TRAINS = """
from tests.support.launching.training import train_as_rank
print("trained", train_as_rank().tolist())
"""
GOES_ON = """
import numpy as np
import collectives
collectives.init()
while True:
    collectives.allreduce(np.ones(3))
    print("step", flush=True)
"""
ELASTIC = """
import sys
from pathlib import Path
import numpy as np
import collectives
import collectives.elastic
collectives.init()
state = collectives.elastic.ObjectState(step=0)

@collectives.elastic.run
def train(state):
    print("size", collectives.size(), flush=True)
    done = np.zeros(1)
    while not done[0]:
        state.step += 1
        state.commit()
        done = collectives.allreduce(np.array([float(Path(sys.argv[1]).exists())]), op=collectives.Max)

train(state)
print("finished")
"""
KEY = os.urandom(32).hex()
Start = Callable[[Pod], Process]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a pod of a job whose pods meet on this host."""
    port, started = free_port(), list[Process]()
    launcher = "import sys; from collectives.launch import main; sys.exit(main())"

    def start_one(pod: Pod) -> Process:
        name, *words = pod.command
        assert name == "collectivesrun"
        variables = {**pod.variables, "COLLECTIVES_RENDEZVOUS": f"tcp://127.0.0.1:{port}"}
        environment = rank_environment({**variables, "HOSTNAME": pod.name, "PYTHONPATH": str(ROOT)})
        started.append(Process([sys.executable, "-c", launcher, *words], environment))
        return started[-1]

    yield start_one
    for process in started:
        process.kill()


def written(folder: Path, program: str, options: str, *arguments: str) -> list[dict[str, Any]]:
    """Write a manifest, and read it."""
    manifest, script = folder / "job.yaml", folder / "train.py"
    script.write_text(program)
    words = [*options.split(), sys.executable, str(script), *arguments]
    assert cli.main(["--kubernetes", str(manifest), "--image", "train:1", *words]) == 0
    return list(yaml.safe_load_all(manifest.read_text()))


@pytest.mark.parametrize("kind", ["indexed-job", "pytorchjob"])
def test_pods_train_as_one_process_does(kind: str, start: Start, tmp_path: Path) -> None:
    options = f"--kubernetes-kind {kind} -np 4 --slots-per-host 2"
    processes = [start(pod) for pod in pods_of(written(tmp_path, TRAINS, options), KEY)]
    outputs = [process.ends() for process in processes]
    results = re.findall(r"\[(\d)\] trained \[(.*)\]", "".join(outputs))
    assert sorted(int(rank) for rank, _ in results) == [0, 1, 2, 3]
    for _, weights in results:
        np.testing.assert_allclose([float(word) for word in weights.split(",")], train_alone(), rtol=1e-12)


def test_a_lost_pod_ends_the_others(start: Start, tmp_path: Path) -> None:
    first, second = map(start, pods_of(written(tmp_path, GOES_ON, "-np 4 --slots-per-host 2"), KEY))
    first.prints("step")
    second.signal(signal.SIGKILL)
    assert re.search("rank [01]: rank [23] .*died", first.ends(1))


def test_a_pod_that_is_deleted_ends_its_ranks(start: Start, tmp_path: Path) -> None:
    (pod,) = pods_of(written(tmp_path, GOES_ON, "-np 1"), KEY)
    process = start(pod)
    process.prints("step")
    process.signal(signal.SIGTERM)
    process.ends(128 + signal.SIGTERM)


def test_an_elastic_jobs_pods_come_and_go(start: Start, tmp_path: Path) -> None:
    finish = tmp_path / "finish"
    manifests = written(tmp_path, ELASTIC, "--kubernetes-kind elastic -np 3 --min-np 2 --max-np 4", str(finish))
    pods = pods_of(manifests, KEY)
    first, second, third = processes = [start(pod) for pod in pods]
    for process in processes:
        process.prints("size 3")
    second.signal(signal.SIGKILL)
    first.prints("size 2")
    again = start(pods[1])
    again.prints("size 3")
    # kubectl patch job: more completions are more pods.
    manifests[-1]["spec"]["completions"] = 4
    fourth = start(pods_of(manifests, KEY)[3])
    fourth.prints("size 4")
    finish.touch()
    for process in (first, third, again, fourth):
        assert process.ends().endswith("finished\n")
