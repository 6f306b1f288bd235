"""Elastic jobs of each framework: a rank is killed in a step, and another process gets its place and the state."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.launching.mpirun import UNUSED, UNUSED_BY_TENSORFLOW, run_command

MODELS = {
    "numpy": """
import collectives as hvd
hvd.init()
import numpy as np, collectives.elastic
state = collectives.elastic.ObjectState(weights=np.full(1000, float(member)), step=0, after=0)
def step():
    state.weights += hvd.allreduce(np.arange(1000.0) + member) / 1000
def values():
    return [state.weights]
""",
    "torch": """
import torch, collectives.torch as hvd
hvd.init()
torch.set_num_threads(1)
torch.manual_seed(member)
model = torch.nn.Linear(4, 3)
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0, after=0)
def step():
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
def values():
    return [*model.state_dict().values(), *(each["exp_avg_sq"] for each in optimizer.state.values())]
""",
    "jax": """
import jax, jax.numpy as jnp, collectives.jax as hvd
hvd.init()
state = hvd.elastic.JaxState(weights=jnp.full(1000, float(member)), step=0, after=0)
@jax.jit
def update(weights):
    return weights + hvd.allreduce(jnp.arange(1000.0) + member) / hvd.size()
def step():
    state.weights = update(state.weights)
def values():
    return [state.weights]
""",
    "keras": """
import keras, numpy as np, collectives.keras as hvd
hvd.init()
keras.utils.set_random_seed(member)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")
state = hvd.elastic.KerasState(model, step=0, after=0)
def step():
    model.fit(np.random.randn(8, 4), np.ones((8, 3)), 8, verbose=0)
def values():
    return [each.numpy() for each in [*model.variables, *model.optimizer.variables]]
""",
}
TRAINING = """
import os, signal, time
member = int(os.environ["COLLECTIVES_MEMBER"])
{model}
import hashlib
import numpy as np
from collectives import elastic

@elastic.run
def train(state):
    while state.after < 5:
        if (member, state.step) == (0, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        step()
        state.step += 1
        # Alone, the survivor goes on until there is another one, which needs the processors to start.
        state.after += hvd.size() == 2 and state.step > 3
        time.sleep(0.2 if hvd.size() == 1 else 0)
        state.commit()

train(state)
digest = hashlib.blake2b(b"".join(np.asarray(value).tobytes() for value in values()), digest_size=8).hexdigest()
print(f"member {{member}}: rank {{hvd.rank()}} of {{hvd.size()}}, step {{state.step}}: {{digest}}.")
"""
BACKENDS = ["jax", "tensorflow", "torch"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["numpy", "torch", "jax", *(f"keras on {backend}" for backend in BACKENDS)])
def test_a_killed_rank_is_replaced_and_gets_the_state(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    framework, _, backend = model.partition(" on ")
    missing = [name for name in (framework, backend) if name and find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    monkeypatch.setenv("KERAS_BACKEND", backend)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    program = tmp_path / "training.py"
    program.write_text(TRAINING.format(model=MODELS[framework]))
    result = run_command(
        [sys.executable, "-m", "collectives.launch", "-np", "2", "--min-np", "1", sys.executable, str(program)],
        timeout=240,
        env=UNUSED if "jax" in model else UNUSED_BY_TENSORFLOW,
    )
    ends = re.findall(r"member (\d): rank (\d) of 2, step (\d+): (\w+)\.", result.output)
    assert sorted(each[:2] for each in ends) == [("1", "0"), ("2", "1")], result.output
    assert ends[0][2:] == ends[1][2:] and int(ends[0][2]) >= 3 + 5, result.output


RETRY = """
import os, signal
import numpy as np
{model}
from collectives import elastic
from collectives.elastic import retry

member, begun, votes, vote = int(os.environ["COLLECTIVES_MEMBER"]), [], [], retry.vote

def watched_vote(world, name):
    votes.append(name)
    if member == 2 and len(votes) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    vote(world, name)

retry.vote = watched_vote

def values(step, member):
    return (np.arange(50_000) % 7 + (step + 1) * (member + 1) * 12.0).astype(np.float32)

{training}

elastic.run(recover="retry")(train)(state)
total = sum(np.mean([values(step, each) for each in range(3 if step < {last} else 2)], 0) for step in range(10))
assert np.array_equal(np.ravel(weights()), total), (np.ravel(weights())[:3], total[:3])
print(f"member {{member}} is done: {{len(begun) == 10}}.")
"""
JIT = """
@jax.jit
def step(weights, values):
    mean = hvd.allreduce(values)
    return weights + mean, {other}

def train(state):
    while state.step < 10:
        begun.append(state.step)
        state.weights, state.other = step(state.weights, values(state.step, member))
        state.step += 1
        if state.step == 4:
            state.commit()

def weights():
    assert state.other.shape == (hvd.size(),)
    return state.weights
"""
FIT = """
def train(state):
    begin = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: begun.append(batch))
    data = np.stack([-values(step, member) for step in range(10)])
    model.fit(data, np.zeros((10, 1)), 1, shuffle=False, verbose=0, callbacks=[begin])

def weights():
    return model.get_weights()
"""
USES_JAX = """
import jax, jax.numpy as jnp, collectives.jax as hvd
hvd.init()
state = hvd.elastic.JaxState(weights=jnp.zeros(50_000), other=jnp.zeros(()), step=0)
"""
USES_KERAS = """
import keras, collectives.keras as hvd
hvd.init()
model = keras.Sequential([keras.Input((50_000,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), lambda true, predicted: predicted)
state = hvd.elastic.KerasState(model)
"""
RETRIED = {
    "jit": (USES_JAX, JIT.format(other="jnp.zeros(2)"), 5, True),
    # An all-gather has the number of ranks in it: all return to the commit after step 3.
    "jit with another collective": (USES_JAX, JIT.format(other="hvd.allgather(mean[:1])"), 4, False),
    "keras": (USES_KERAS, FIT, 5, True),
}


@pytest.mark.parametrize(("model", "training", "last", "once"), RETRIED.values(), ids=RETRIED)
def test_a_compiled_step_is_carried_out_again_with_fewer_ranks(
    model: str, training: str, last: int, once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank dies in step 5, before the vote, while the others' programs may have begun later steps.

    Args:
        last: the first step in whose result the dead rank has no part.
        once: whether each step is begun once.
    """
    frameworks = re.findall(r"import (jax|keras)\b", f"import jax\n{model}")
    missing = [name for name in frameworks if find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    program = tmp_path / "training.py"
    program.write_text(RETRY.format(model=model, training=training, last=last))
    launcher = [sys.executable, "-m", "collectives.launch", "-np", "3", "--hosts", "127.0.0.1:2,127.0.0.2:1"]
    options = ["--min-np", "1", "--on-rank-failure", "host"]
    output = run_command([*launcher, *options, sys.executable, str(program)], timeout=120, env=UNUSED).output
    ends = re.findall(r"member (\d) is done: (\w+)\.", output)
    assert sorted(ends) == [("0", str(once)), ("1", str(once))], output
