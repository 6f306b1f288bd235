"""Elastic jobs of each framework: a rank is killed in a step, and another process gets its place and the state."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.launching.mpirun import run_command

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
    )
    ends = re.findall(r"member (\d): rank (\d) of 2, step (\d+): (\w+)\.", result.output)
    assert sorted(each[:2] for each in ends) == [("1", "0"), ("2", "1")], result.output
    assert ends[0][2:] == ends[1][2:] and int(ends[0][2]) >= 3 + 5, result.output
