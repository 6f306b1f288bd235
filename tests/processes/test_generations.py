"""Worlds that follow each other in processes that live: ranks, process sets, operations in flight, GPU tensors, and
gradients that are combined again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.launching.mpirun import run_command

NUMPY = """
import os, signal, sys
import numpy as np
import collectives as hvd
from collectives.worlds import generations

hvd.init()
was_alone = generations.enter()
job = generations.job()

def kill_member(number):
    if job.member == number:
        os.kill(os.getpid(), signal.SIGKILL)

def total(of=None):
    return hvd.allreduce(np.full(1000, float(job.member)), op=hvd.Sum, **({} if of is None else {"process_set": of}))[0]

def fails(function):
    '''The error of a call that begins in the present generation and never ends in it.'''
    try:
        for _ in range(100_000):
            function()
    except hvd.RankFailedError as error:
        return error
"""
SETS = """
if not was_alone:
    assert job.members == (0, 1, 2) and job.generation == 1
    low, high, gone = hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2]), hvd.add_process_set([1])
    assert total() == 3.0
    kept = [hvd.allreduce_async(np.ones(5), name=f"in flight {number}") for number in range(3)]
    kill_member(1)
    error = fails(total)
    assert "rank 1" in str(error), error
    assert generations.renew(error, record=job.member) == [0, 2]  # without newcomers
    for handle in kept:  # complete, or of a world that has ended: never a hang, and never another generation's
        try:
            assert handle.wait()[0] == 1.0
        except hvd.RankFailedError:
            pass
    assert job.members == (0, 2) and job.generation == 2 and hvd.rank() == (0, 1)[job.member == 2]
    assert low.ranks == [0] and high.ranks == [1] and gone.process_set_id is None
    assert (low.process_set_id, high.process_set_id) == (1, 2)
    own = low if job.member == 0 else high
    assert total() == 2.0 and total(own) == job.member
    while not hvd.allreduce(np.array([generations.notices()[1]]), op=hvd.Max)[0]:
        pass
    assert generations.notices()[1] in (0, 2)  # on some rank
    generations.renew("hosts updated")
assert job.members == (0, 2, 3) and job.generation == 3 and hvd.size() == 3
assert total() == 5.0
later = hvd.add_process_set([0, 2])
assert later.process_set_id == 3
if job.member != 2:
    assert total(later) == 3.0
generations.finished()
print("member", job.member, "is done")
"""
GPU = """
from tests.support.emulated.ranks import own_device
from tests.support.scenarios.gpu_makers import EmulatedMaker

device = own_device(delays=None)
maker = EmulatedMaker(device)

def reduced(count=100_000):
    return maker.host(hvd.allreduce(maker.device(np.full(count, float(job.member), np.float32)), op=hvd.Sum))

if not was_alone:
    assert (reduced() == 3.0).all()
    handles = [hvd.allreduce_async(maker.device(np.ones(1000, np.float32)), name=f"in flight {n}") for n in range(4)]
    kill_member(1)
    generations.renew(fails(reduced), record=job.member)
    assert job.members == (0, 2) and (reduced() == 2.0).all() and (reduced(10) == 2.0).all()
assert device.violations == [] and device.failure is None, (device.violations, device.failure)
generations.finished()
print("member", job.member, "is done")
"""


def run(folder: Path, program: str, survivors: tuple[int, ...], **env: str) -> str:
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "collectives.launch", "-np", "3", "--min-np", "2"]
    shown = run_command([*command, sys.executable, str(folder / "program.py")], timeout=60, env=env).output
    for member in survivors:
        assert f"[{member}] member {member} is done\n" in shown, shown
    return shown


@pytest.mark.parametrize("hosts", [1, 3], ids=["one host", "hosts"])
def test_process_sets_and_handles_over_generations(hosts: int, tmp_path: Path) -> None:
    env = {"COLLECTIVES_LOCAL_SIZE": "1"} if hosts > 1 else {}
    run(tmp_path, NUMPY + SETS, survivors=(0, 2, 3), **env)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("hosts", [1, 3], ids=["one host", "hosts"])
def test_gpu_tensors_over_generations(hosts: int, tmp_path: Path) -> None:
    env = {"COLLECTIVES_LOCAL_SIZE": "1"} if hosts > 1 else {}
    run(tmp_path, NUMPY + GPU, survivors=(0, 2), COLLECTIVES_DEVICE_HOST_UNTIL="0", **env)
