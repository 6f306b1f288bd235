"""Jobs of a real Slurm, by the scripts of ``examples/slurm/``: the ranks of other nodes are started by srun."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.launching.slurm import Slurm, slurm
from tests.support.launching.training import train_alone

TRAIN = "examples/slurm/train.sbatch"
TRAINING = """
import os
import collectives as hvd
from tests.support.launching.training import train_as_rank

weights = train_as_rank().tolist()
place = hvd.rank(), hvd.local_rank(), os.uname().nodename, len(os.sched_getaffinity(0)), os.environ.get("SLURM_PROCID")
print("trained", *place, weights, flush=True)
"""
WAITING = """
import os, signal, sys
rank, size = os.environ["COLLECTIVES_RANK"], os.environ["COLLECTIVES_SIZE"]
signal.signal(signal.SIGUSR1, lambda number, frame: os.write(1, f"rank {rank} saves\\n".encode()))
print(f"rank {rank} of {size} waits as {os.getpid()}", flush=True)
while True:
    signal.pause()
"""
ELASTIC = """
import os, sys
import collectives as hvd

hvd.init()
state = hvd.elastic.ObjectState(step=0)

@hvd.elastic.run
def train(state):
    print(f"{hvd.size()} ranks, one on {os.uname().nodename} as {os.getpid()} at step {min(state.step, 1)}", flush=True)
    while not hvd.allreduce(float(os.path.exists(sys.argv[1])), op=hvd.Max):
        state.step += 1
        state.commit()

train(state)
"""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(2, tmp_path_factory.mktemp("slurm")) as up:
        yield up


def program(system: Slurm, text: str) -> list[str]:
    """Return the command that runs a program on any node."""
    path = system.folder / "program.py"
    path.write_text(text)
    return [sys.executable, str(path)]


def kill(system: Slurm, job: str, line: str) -> None:
    """Kill the process on host2 whose number follows in a line of a job's output."""
    numbers = re.findall(rf"{line} (\d+)", system.output(job))
    system.on("host2", "kill", "-9", numbers[-1])


def all_end(system: Slurm) -> bool:
    """Whether no program is left on any node within a bounded time."""
    wait = 'for _ in $(seq 100); do pgrep -f "[p]rogram.py|[a]gent.py" >/dev/null || exit 0; sleep 0.1; done; echo left'
    return not any(system.on(host, "sh", "-c", wait) for host in ("host1", "host2"))


def test_a_training_on_two_nodes_equals_that_of_one_process(system: Slurm) -> None:
    job = system.submit(TRAIN, *program(system, TRAINING))
    assert "JobState=COMPLETED" in system.state_at_end(job), system.output(job)
    # No rank is bound to one core, and none is told that it is the only task of a step.
    for rank, local_rank, host in ((0, 0, "host1"), (1, 1, "host1"), (2, 0, "host2"), (3, 1, "host2")):
        weights = re.findall(rf"trained {rank} {local_rank} {host} 2 None (.*)", system.output(job))
        np.testing.assert_allclose(json.loads(weights[0]), train_alone(), rtol=1e-12)


def test_a_rank_that_is_killed_ends_the_job_and_is_named(system: Slurm) -> None:
    job = system.submit(TRAIN, *program(system, WAITING))
    for rank in range(4):
        system.wait_for(job, f"rank {rank} of 4 waits")
    system.on("host1", "scancel", "--batch", "--signal=USR1", job)
    for rank in range(4):
        system.wait_for(job, f"rank {rank} saves")
    kill(system, job, "rank 3 of 4 waits as")
    assert "JobState=FAILED" in system.state_at_end(job)
    assert system.output(job).endswith("collectivesrun: rank 3 on host2 was killed by signal 9 (SIGKILL) [L8]\n")
    assert all_end(system)


def test_scancel_ends_all_ranks_on_all_nodes(system: Slurm) -> None:
    job = system.submit(TRAIN, *program(system, WAITING))
    for rank in range(4):
        system.wait_for(job, f"rank {rank} of 4 waits")
    system.on("host1", "scancel", job)
    assert "JobState=CANCELLED" in system.state_at_end(job)
    assert all_end(system)


def test_an_elastic_job_replaces_a_rank_on_another_node(system: Slurm) -> None:
    done = system.folder / "done"
    job = system.submit("--nodes=2", "examples/slurm/elastic.sbatch", *program(system, ELASTIC), str(done))
    system.wait_for(job, "2 ranks, one on host2 as ")
    kill(system, job, "2 ranks, one on host2 as")
    system.wait_for(job, "member 2 on host2 joins")
    done.touch()
    assert "JobState=COMPLETED" in system.state_at_end(job), system.output(job)
    assert "member 1 on host2 was killed by SIGKILL" in system.output(job)


def test_the_doctor_examines_the_nodes_of_a_job(system: Slurm) -> None:
    job = system.submit("examples/slurm/train.sbatch", "--doctor")
    system.state_at_end(job)
    said = system.output(job)
    assert "fine   job by srun        2 ranks" in said
    assert "\nhost2\n" in said
    assert "\nhost1 to host1,host2\n  fine   job without MPI    2 ranks" in said
