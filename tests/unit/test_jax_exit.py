"""A program may end, or leave, right after a compiled step whose result nobody has read."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import jax, jax.numpy as jnp
import collectives.jax as hvd


class Descent:
    init = staticmethod(lambda params: ())
    update = staticmethod(lambda found, state, params=None: (jax.tree.map(lambda each: -0.01 * each, found), state))


def main():
    hvd.init()
    params = {"w": jnp.ones((900, 900))}
    optimizer = hvd.DistributedOptimizer(Descent())
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, x):
        gradients = jax.grad(lambda params: ((x @ params["w"] @ params["w"]) ** 2).mean())(params)
        updates, state = optimizer.update(gradients, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    for _ in range(3):
        params, state = step(params, state, jnp.ones((900, 900)) * 1e-3)
    LEAVE
    return params


RUN
print("ended")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leave", "run"),
    [
        ("", "main()"),
        ("hvd.shutdown()", "jax.block_until_ready(main())"),
    ],
    ids=["exit", "shutdown and read"],
)
def test_leaving(leave: str, run: str) -> None:
    pytest.importorskip("jax")
    program = PROGRAM.replace("LEAVE", leave).replace("RUN", run)
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert (shown.returncode, shown.stdout) == (0, "ended\n"), shown.stderr
