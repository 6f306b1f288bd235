"""Worlds that follow each other in processes that live: ranks, process sets, operations in flight, GPU tensors, and
gradients that are combined again."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from collectives.engine import timeline
from tests.support.launching.mpirun import UNUSED_BY_TENSORFLOW, run_command

NUMPY = """
import os, signal, sys
import numpy as np
import collectives as hvd
from collectives.worlds import generations

first = hvd.ProcessSet([0, 1])
hvd.init(process_sets=[first])
job = generations.job()
early = hvd.add_process_set([0, 2]) if job.came_late else None  # as its program does before the training
was_alone = generations.enter()

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
    low, high, gone = first, hvd.add_process_set([1, 2]), hvd.add_process_set([1])
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
assert first.ranks == [0] and first.included() is (job.member == 0)
assert early is None or early.ranks == [1] and not early.included()
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


def run(folder: Path, program: str, survivors: tuple[int, ...], options: str = "-np 3 --min-np 2", **env: str) -> str:
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "collectives.launch", *options.split()]
    shown = run_command([*command, sys.executable, str(folder / "program.py")], timeout=120, env=env).output
    for member in survivors:
        assert f"[{member}] member {member} is done\n" in shown, shown
    return shown


BACK = """
from collectives import elastic

members = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2])]
hvd.init(process_sets=members)
member, numbers = int(os.environ["COLLECTIVES_MEMBER"]), []
state = elastic.ObjectState(step=0)

@elastic.run(recover=RECOVER)
def train(state):
    while state.step < 8:
        assert hvd.allreduce(member, op=hvd.Sum, name="step") == 3
        for each in members:
            if each.included():
                ranks = each.ranks
                assert hvd.allreduce(member, op=hvd.Sum, name="of set", process_set=each) == sum(ranks), ranks
        state.step += 1
        state.commit()
        if state.step == 4 and member in LEAVE and not numbers:
            raise ValueError("the program's own")

try:
    train(state)
except ValueError:
    hvd.shutdown()
    members = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2])]
    hvd.init(process_sets=members)
    numbers.append(hvd.size())
    train(state)
assert state.step == 8 and numbers == [3] * (member in LEAVE)
print("member", member, "is done")
"""


@pytest.mark.parametrize("recover", ["restore", "retry"])
@pytest.mark.parametrize("leave", [(0,), (2,), (0, 1, 2)])
def test_an_init_in_the_middle_joins_the_others(leave: tuple[int, ...], recover: str, tmp_path: Path) -> None:
    """Ranks that have called shutdown and init meet those that have renewed the generation; or all have called it."""
    program = NUMPY.partition("first =")[0] + BACK.replace("LEAVE", str(leave)).replace("RECOVER", repr(recover))
    run(tmp_path, program, survivors=(0, 1, 2))


@pytest.mark.parametrize("hosts", [1, 3], ids=["one host", "hosts"])
def test_process_sets_and_handles_over_generations(hosts: int, tmp_path: Path) -> None:
    env = {"COLLECTIVES_LOCAL_SIZE": "1"} if hosts > 1 else {}
    trace = tmp_path / "trace.json"
    run(tmp_path, NUMPY + SETS, survivors=(0, 2, 3), COLLECTIVES_TIMELINE=str(trace), **env)
    changes = [event for event in timeline.read(trace) if event.get("cat") == "generations"]
    ranks = sorted((change["name"], change["pid"]) for change in changes)
    assert ranks == [("generation 2", 0), ("generation 2", 1), *(("generation 3", rank) for rank in range(3))]
    assert {tuple(change["args"]["members"]) for change in changes} == {(0, 2), (0, 2, 3)}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("hosts", [1, 3], ids=["one host", "hosts"])
def test_gpu_tensors_over_generations(hosts: int, tmp_path: Path) -> None:
    env = {"COLLECTIVES_LOCAL_SIZE": "1"} if hosts > 1 else {}
    run(tmp_path, NUMPY + GPU, survivors=(0, 2), COLLECTIVES_DEVICE_HOST_UNTIL="0", **env)


RETRY = """
import os, signal
import numpy as np
import collectives
from collectives import elastic
from collectives.elastic import retry
from collectives.worlds import generations

computed = []

def dies(member, step, place):
    if (generations.job().member, step) == (member, len(computed) - 1) and place in ("step", now[0]):
        os.kill(os.getpid(), signal.SIGKILL)

now, vote = [""], retry.vote

def watched_vote(world, name):
    now[0] = "before the vote"
    dies(2, 6, "before the vote")
    vote(world, name)
    now[0] = "after the vote"
    dies(3, 8, "after the vote")

retry.vote = watched_vote

def gradient(step, count):
    member = generations.job().member
    computed.append(step)
    return np.arange(count) % 7 + (step + 1) * (member + 1) * 12.0

def expected(count, last):
    '''The sum of the steps' means; the ranks of step 8 had combined it, but who of them is left may not know.'''
    total = np.zeros(count)
    for step in range(10):
        members = [0, *([1] if step < 3 else []), *([2] if step < 6 else []), *([3] if step < 8 + last else [])]
        total += np.arange(count) % 7 + (step + 1) * 12.0 * np.mean([member + 1 for member in members])
    return total

def check(weights):
    assert computed == list(range(10)), computed  # no step was computed again
    assert generations.job().members == (0,) and generations.job().generation == 4
    outcomes = [all(np.array_equal(each, -expected(len(each), last)) for each in weights) for last in (False, True)]
    assert any(outcomes), [each[:3] for each in weights]
    print("member", generations.job().member, "is done")

state = elastic.ObjectState(step=0)
"""
TORCH = """
import torch
import collectives.torch as hvd

hvd.init()
weights = [torch.nn.Parameter(torch.zeros(count, dtype=torch.float64)) for count in (3, 2000, 10_000, 300_000)]
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(weights, lr=1.0), [(str(number), weight) for number, weight in enumerate(weights)]
)

@elastic.run(recover="retry")
def train(state):
    while state.step < 10:
        optimizer.zero_grad()
        values = torch.from_numpy(gradient(state.step, 300_000))
        sum((weight * values[: len(weight)]).sum() for weight in weights).backward()
        dies(1, 3, "step")
        optimizer.step()
        state.step += 1

train(state)
check([weight.detach().numpy() for weight in weights])
"""
TENSORFLOW = """
import tensorflow as tf
import collectives.tensorflow as hvd

hvd.init()
weights = [tf.Variable(tf.zeros(count, tf.float64)) for count in (3, 10_000)]
fed = tf.Variable(tf.zeros(10_000, tf.float64))

@tf.function
def step():
    with tf.GradientTape() as tape:
        loss = sum(tf.reduce_sum(weight * fed[: weight.shape[0]]) for weight in weights)
    tape = hvd.DistributedGradientTape(tape)
    for weight, grad in zip(weights, tape.gradient(loss, weights)):
        weight.assign_sub(grad)

step.get_concrete_function()

@elastic.run(recover="retry")
def train(state):
    while state.step < 10:
        fed.assign(gradient(state.step, 10_000))
        dies(1, 3, "step")
        step()
        state.step += 1

train(state)
check([weight.numpy() for weight in weights])
"""
JAX = """
import jax, jax.numpy as jnp, optax
import collectives.jax as hvd

hvd.init()
jax.config.update("jax_enable_x64", True)
optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), {options})
state = hvd.elastic.JaxState(step=0, weights=[jnp.zeros(count) for count in (3, 2000, 10_000, 300_000)])

def loss(weights, values):
    return sum((weight * values[: len(weight)]).sum() for weight in weights)

def step(weights, optimizer_state, values):
    grads = jax.grad(loss)(weights, values)
    updates, optimizer_state = optimizer.update(grads, optimizer_state, weights)
    mean = hvd.allreduce(values.sum())  # another reduction of the program
    return optax.apply_updates(weights, updates), optimizer_state, mean

step = {compiled}(step)

@elastic.run(recover="retry")
def train(state):
    optimizer_state = optimizer.init(state.weights)
    while state.step < 10:
        values = gradient(state.step, 300_000)
        dies(1, 3, "step")
        state.weights, optimizer_state, mean = step(state.weights, optimizer_state, values)
        state.settle()
        if state.step == 0:
            assert float(mean) == values.sum() + 300_000 * (2.5 - generations.job().member - 1) * 12.0
        state.step += 1

train(state)
check([np.asarray(weight) for weight in state.weights])
"""
ADAPTERS = {
    "torch": TORCH,
    "tensorflow": TENSORFLOW,
    "jax": JAX.format(options="", compiled="jax.jit"),
    "jax unordered": JAX.format(options="ordered=False", compiled="jax.jit"),
    "jax eager": JAX.format(options="", compiled=""),
}


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
def test_no_step_is_lost_where_gradients_are_combined_again(adapter: str, tmp_path: Path) -> None:
    """Ranks die before they combine, before they vote, and after it; nobody takes their places."""
    hosts = ",".join(f"127.0.0.{number}:1" for number in (1, 2, 3, 4))
    options = f"-np 4 --min-np 1 --hosts {hosts} --on-rank-failure host"
    run(tmp_path, RETRY + adapter, (0,), options, **(UNUSED_BY_TENSORFLOW if adapter is TENSORFLOW else {}))


AHEAD = """
import os
import os
import torch
import collectives.torch as hvd
from collectives.base.errors import RankFailedError
from collectives.elastic import retry
from collectives.worlds import generations

hvd.init()
member = generations.job().member
carry_out, lost = retry.Steps.carry_out, []

def watched(steps, name, step, *arguments, **options):
    def loses(world):
        step(world)
        if name == "elastic: host updates" and (member, state.step, lost) == (1, 2, []):
            lost.append(open(os.environ["BEGUN"]).read())  # the other rank has begun the next step
            raise RankFailedError("as if the answer had not come")

    return carry_out(steps, name, loses, *arguments, **options)

retry.Steps.carry_out = watched
weights = [torch.nn.Parameter(torch.zeros(count, dtype=torch.float64)) for count in (3, 2000)]
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), [("a", weights[0]), ("b", weights[1])])
state = hvd.elastic.TorchState(torch.nn.ParameterList(weights), optimizer, step=0)

@hvd.elastic.run(recover="retry")
def train(state):
    while state.step < 4:
        optimizer.zero_grad()
        (-(state.step + 1.0) * (member + 1.0) * sum(weight.sum() for weight in weights)).backward()
        if (member, state.step) == (0, 2):
            open(os.environ["BEGUN"], "w").close()
        optimizer.step()
        state.step += 1
        state.commit()

train(state)
assert generations.job().generation == 2 and bool(lost) == (member == 1)
assert all((weight == (1 + 2 + 3 + 4) * 1.5).all() for weight in weights), weights
print("member", member, "is done")
"""


def test_a_rank_that_is_ahead_of_a_failed_commit_combines_again_with_the_others(tmp_path: Path) -> None:
    """It has left the commit, and begun the next step, of which the others know nothing yet."""
    os.mkfifo(tmp_path / "begun")
    run(tmp_path, AHEAD, (0, 1), "-np 2 --min-np 2", BEGUN=str(tmp_path / "begun"))
