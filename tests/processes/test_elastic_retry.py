"""Jobs with ``recover="retry"`` whose ranks die: what the survivors train with, and how they finish."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.launching.mpirun import run_command

DYING = """
import os, signal
import numpy as np
import collectives as hvd
from collectives import elastic
from collectives.elastic import retry
from collectives.worlds import generations

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def have_some_leave_the_vote(of):
    '''In the step of this number all leave the vote but member 2, which fails in it, and member 3 dies.'''
    vote, votes = retry.vote, [0]

    def watched(world, name):
        vote(world, name)
        votes[0] += 1
        if votes[0] == of and generations.job().member == 3:
            die()
        if votes[0] == of and generations.job().member == 2:
            world.barrier()  # in which nobody else is
            raise AssertionError("passed a barrier alone")

    retry.vote = watched
"""
SAMPLER = """
import torch
import collectives.torch as hvd

count, batch_size, alone_in = 237, 4, int(sys.argv[1])
hvd.init()
weights = torch.nn.Parameter(torch.zeros(count))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weights], lr=1.0), [("weights", weights)])
sampler = hvd.elastic.ElasticSampler(range(count), seed=5)
loader = torch.utils.data.DataLoader(range(count), batch_size, sampler=sampler)
state = hvd.elastic.TorchState(None, optimizer, sampler=sampler, epoch=0, step=0)
processed, sizes, steps = [], [], 0
have_some_leave_the_vote(of=alone_in)

@elastic.run(recover="retry")
def train(state):
    global steps
    sizes.append(hvd.size())
    while state.epoch < 2:
        for number, batch in enumerate(loader):
            optimizer.zero_grad()
            weights[batch].sum().backward()
            if (generations.job().member, state.step) == (1, 5):
                die()
            optimizer.synchronize()
            # Sums, in which each sample counts 1 at its own index: the weights count who was processed.
            weights.grad.mul_(len(retry.contributors())).round_()
            with optimizer.skip_synchronize():
                optimizer.step()
            sampler.record_batch(number, batch_size)
            state.step += 1
            steps += 1
            if state.step % 8 == 0:
                state.commit()
        sampler.set_epoch(state.epoch + 1)
        state.epoch += 1
        processed.append((-weights.detach()).tolist())

train(state)
assert steps == state.step  # no step was lost, or computed again
least, total = [int(min(each)) for each in processed], int(sum(processed[0]))
print(f"member {generations.job().member}: {sizes} {least} {total} {hash(tuple(processed[1]))}.")
"""
FINISH = """
hvd.init()
have_some_leave_the_vote(of=3)
state = elastic.ObjectState(step=0, total=0.0)

@elastic.run(recover="retry")
def train(state):
    while state.step < 3:
        values = np.array([generations.job().member + 10.0 ** state.step])
        state.total += retry.steps().reduce("step", lambda world: hvd.allreduce(values, op=hvd.Sum))[0]
        state.step += 1

train(state)
print(f"member {generations.job().member}: {state.total}.")
"""

EARLY = """
hvd.init()
retry._FINISHED_WITHIN = 0.2
state = elastic.ObjectState(step=0, total=0.0)

@elastic.run(recover="retry")
def train(state):
    while state.step < (2 if generations.job().member == 1 else 4):
        values = np.array([generations.job().member + 10.0 ** state.step])
        state.total += retry.steps().reduce("step", lambda world: hvd.allreduce(values, op=hvd.Sum))[0]
        state.step += 1

train(state)
print(f"member {generations.job().member}: {state.total}.")
"""


def run(folder: Path, program: str, *arguments: str) -> list[tuple[str, str]]:
    """Run four members, who are not replaced, and return what each has printed at its end."""
    (folder / "program.py").write_text("import sys\n" + DYING + program)
    hosts = ",".join(f"127.0.0.{number}:1" for number in (1, 2, 3, 4))
    launcher = [sys.executable, "-m", "collectives.launch", "-np", "4", "--min-np", "1", "--hosts", hosts]
    launcher += ["--on-rank-failure", "host"]
    output = run_command([*launcher, sys.executable, str(folder / "program.py"), *arguments], timeout=60).output
    ends = re.findall(r"member (\d): (.*)\.\n", output)
    assert ends, output
    return sorted(ends)


@pytest.mark.skipif(not find_spec("torch"), reason="needs torch")
@pytest.mark.parametrize("asymmetric", ["in the middle", "at the epoch's end"])
def test_what_was_dealt_to_the_dead_is_dealt_again(asymmetric: str, tmp_path: Path) -> None:
    """Of two deaths, the second one is seen by one survivor after the step, and by the other in it."""
    # Of 237 samples 8 times 16 less those of three steps of the first dead are processed, which leaves 121 for three.
    number = {"in the middle": 12, "at the epoch's end": 8 + 11}[asymmetric]
    ends = run(tmp_path, SAMPLER, str(number))
    assert [member for member, _ in ends] == ["0", "2"] and ends[0][1] == ends[1][1]
    first = re.match(r"\[4, 3, 2\] \[1, 2\] (\d+) ", ends[0][1])
    assert first, ends
    assert int(first[1]) - 237 < 4 + 3 + 2  # what fills up the ranks' shares


def test_ranks_finish_with_the_same_steps(tmp_path: Path) -> None:
    """One has left the last step when another one dies, and the third fails in it."""
    ends = run(tmp_path, FINISH)
    assert ends == [(member, str(3 * 6.0 + 4 * 111.0)) for member in ("0", "1", "2")]


def test_others_go_on_without_a_rank_that_finishes_early(tmp_path: Path) -> None:
    ends = run(tmp_path, EARLY)
    early, late = 2 * 6.0 + 4 * 11.0, 2 * 6.0 + 4 * 11.0 + 2 * 5.0 + 3 * 1100.0
    assert ends == [(str(member), str(early if member == 1 else late)) for member in range(4)]
