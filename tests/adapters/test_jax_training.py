"""Optimizers and gradients of JAX, and the same start on every rank; whole trainings are in test_jax_recipes.py."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from collectives.base.errors import InvalidArgumentError, InvalidTypeError, MismatchError

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("option", ("divisor", "halves"))
def test_options_of_the_exchange(hvd: Any, option: str) -> None:
    size = hvd.size()
    how = {"gradient_predivide_factor": 4.0} if option == "divisor" else {"compression": hvd.Compression.fp16}
    optimizer = hvd.distributed_gradients(**how)
    updates, _ = optimizer.update({"w": jnp.arange(4.0) + 0.1 * hvd.rank()}, optimizer.init(None))
    wanted = np.arange(4.0) + 0.1 * (size - 1) / 2
    np.testing.assert_allclose(updates["w"], wanted, 1e-6 if option == "divisor" else 2e-3)
    if option == "halves" and size > 1:
        assert np.any(np.abs(updates["w"] - wanted) > 1e-6)


def test_gradients_of_all_ranks(hvd: Any) -> None:
    """With auxiliary data, of several arguments, and by another operation; the value stays this rank's."""
    size, scale = hvd.size(), hvd.rank() + 1.0
    mean = (size + 1) / 2
    x, y = jnp.arange(3.0), jnp.ones(3)

    def loss(x: Any, y: Any) -> Any:
        return scale * (x * y).sum(), y

    (value, extra), found = hvd.value_and_grad(loss, has_aux=True)(x, y)
    assert value == scale * 3.0
    np.testing.assert_array_equal(extra, y)
    np.testing.assert_allclose(found, mean * y, 1e-6)
    found, extra = jax.jit(hvd.grad(loss, argnums=(0, 1), has_aux=True, op=hvd.Sum, postscale_factor=0.5))(x, y)
    np.testing.assert_array_equal(extra, y)
    np.testing.assert_allclose(found[0], size * mean * y / 2, 1e-6)
    np.testing.assert_allclose(found[1], size * mean * x / 2, 1e-6)


def test_the_same_start(hvd: Any) -> None:
    rank = hvd.rank()
    root = hvd.size() - 1

    def state(rank: int) -> Any:
        return {
            "large": jnp.arange(100_000.0) + rank,
            "small": [jnp.arange(3) + rank, None, jnp.bool_(rank % 2), jnp.float32(rank).astype(jnp.float8_e4m3fn)],
            "key": jax.random.key(rank),
            "numpy": np.arange(4, dtype=np.int16) + rank,
            "number": 1.5 * rank,
            "bf16": jnp.ones((3, 1), jnp.bfloat16) * rank,
        }

    found = hvd.broadcast_parameters(state(rank), root)
    expected = state(root)
    assert jax.random.key_data(found.pop("key")).tolist() == jax.random.key_data(expected.pop("key")).tolist()
    assert jax.tree_util.tree_structure(found) == jax.tree_util.tree_structure(expected)
    for one, other in zip(jax.tree_util.tree_leaves(found), jax.tree_util.tree_leaves(expected), strict=True):
        assert isinstance(one, jax.Array)
        assert one.dtype == jnp.asarray(other).dtype
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
    assert hvd.broadcast_parameters({}, 0) == {}
    assert hvd.broadcast_object({"rank": rank}, root) == {"rank": root}
    assert hvd.allgather_object(rank) == list(range(hvd.size()))


@pytest.mark.mpi(min_size=2)
def test_what_one_rank_has_no_memory_for_is_told_to_all(hvd: Any, monkeypatch: pytest.MonkeyPatch) -> None:

    def none_left(*arguments: Any, **keywords: Any) -> Any:
        raise MemoryError("none left")

    mine = {"large": jnp.arange(100_000.0) + hvd.rank(), "small": jnp.arange(3) + hvd.rank()}
    with monkeypatch.context() as patch:
        if hvd.rank() == 1:
            patch.setattr(np, "concatenate", none_left)
        with pytest.raises(MemoryError if hvd.rank() == 1 else MismatchError, match="none left"):
            hvd.broadcast_parameters(mine)
    assert hvd.broadcast_parameters(mine)["small"].tolist() == [0, 1, 2]


@pytest.mark.mpi(min_size=2)
def test_another_model_on_one_rank(hvd: Any) -> None:
    with pytest.raises(MismatchError, match=r"params\['w'\].*\(3,\).*\(4,\)"):
        hvd.broadcast_parameters({"w": jnp.ones(4 if hvd.rank() == 1 else 3)})
    with pytest.raises(MismatchError, match="root_rank"):
        hvd.broadcast_parameters({"w": jnp.ones(3)}, root_rank=hvd.rank() % 2)
    with pytest.raises(InvalidTypeError, match=r"params\['name'\]"):
        hvd.broadcast_parameters({"name": "resnet"})
    assert float(hvd.allreduce(jnp.float32(1), op=hvd.Sum)) == hvd.size()


def test_wrong_optimizers(hvd: Any) -> None:
    with pytest.raises(InvalidTypeError, match="init and update"):
        hvd.DistributedOptimizer(0.1)
    sgd = hvd.distributed_gradients()
    with pytest.raises(InvalidArgumentError, match="backward_passes_per_step"):
        hvd.DistributedOptimizer(sgd, backward_passes_per_step=0)
    with pytest.raises(InvalidArgumentError, match="predivide"):
        hvd.DistributedOptimizer(sgd, op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(InvalidArgumentError, match=r"value: expected op=Average, .*distributed_gradients"):
        hvd.DistributedOptimizer(sgd, op=hvd.Sum).update(jnp.ones(2), None, value=1.0)
    twice = hvd.DistributedOptimizer(sgd, backward_passes_per_step=2)
    with pytest.raises(InvalidArgumentError, match=r"value_fn: expected backward_passes_per_step=1, got 2"):
        twice.update(jnp.ones(2), twice.init(jnp.ones(2)), value_fn=jnp.sum)


def test_without_optax(hvd: Any) -> None:
    """In a process of its own, where it cannot be imported."""
    if hvd.rank():
        return
    program = """
import sys
sys.modules["optax"] = None
import jax.numpy as jnp
import collectives.jax as hvd
hvd.init()
optimizer = hvd.DistributedOptimizer(hvd.distributed_gradients(), backward_passes_per_step=2)
state = optimizer.init({"w": jnp.ones(3)})
for expected in (0.0, 2.0):
    updates, state = optimizer.update({"w": jnp.ones(3)}, state)
    assert float(updates["w"][0]) == expected
"""
    launched = ("OMPI_", "PMI", "PRTE_", "_COLLECTIVES", "MPI")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(launched)}
    subprocess.run([sys.executable, "-c", program], env=inherited, check=True, timeout=100)
