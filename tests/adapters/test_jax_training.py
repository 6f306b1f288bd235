"""Training with JAX: the ranks together do what one process does on their batches, and end with the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import collectives
from collectives.errors import InvalidArgumentError, InvalidTypeError, MismatchError

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]

FEATURES, CLASSES, STEPS = 6, 3, 3


def parameters(seed: int) -> Any:
    numbers = np.random.default_rng(seed)

    def layer(*shape: int) -> Any:
        return jnp.asarray(numbers.standard_normal(shape), jnp.float32), jnp.asarray(np.zeros(shape[-1:], np.float32))

    (w1, b1), (w2, b2) = layer(FEATURES, 8), layer(8, CLASSES)
    return {"hidden": {"w": w1, "b": b1}, "out": {"w": w2, "b": b2, "unused": None}}


def batches(size: int) -> Any:
    """Of all ranks together, for every step."""
    numbers = np.random.default_rng(99)
    x = numbers.standard_normal((STEPS, 6 * 4, FEATURES)).astype(np.float32)[:, : 6 * size]
    return x, numbers.integers(0, CLASSES, (STEPS, 6 * 4)).astype(np.int32)[:, : 6 * size]


def loss_of(p: Any, x: Any, y: Any) -> Any:
    h = jnp.tanh(x @ p["hidden"]["w"] + p["hidden"]["b"])
    logits = h @ p["out"]["w"] + p["out"]["b"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()


def train(optimizer: Any, p: Any, x: Any, y: Any, passes: int = 1) -> Any:
    import optax

    @jax.jit
    def step(p: Any, state: Any, x: Any, y: Any) -> Any:
        for part_x, part_y in zip(jnp.split(x, passes), jnp.split(y, passes), strict=True):
            updates, state = optimizer.update(jax.grad(loss_of)(p, part_x, part_y), state, p)
            p = optax.apply_updates(p, updates)
        return p, state

    state = jax.jit(optimizer.init)(p)
    for number in range(STEPS):
        p, state = step(p, state, x[number], y[number])
    return p


def check(hvd: Any, found: Any, expected: Any, rtol: float = 2e-4) -> None:
    collectives.check_consistency({str(n): np.asarray(leaf) for n, leaf in enumerate(jax.tree_util.tree_leaves(found))})
    assert jax.tree_util.tree_structure(found) == jax.tree_util.tree_structure(expected)
    for one, other in zip(jax.tree_util.tree_leaves(found), jax.tree_util.tree_leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=1e-5)


def mine(hvd: Any, x: Any, passes: int = 1) -> Any:
    """This rank's part of every batch; with several passes its part of each of them."""
    parts = x.reshape(STEPS, passes, hvd.size(), -1, *x.shape[2:])
    return parts[:, :, hvd.rank()].reshape(STEPS, -1, *x.shape[2:])


@pytest.mark.parametrize(("kind", "ordered"), (("sgd", True), ("sgd", False), ("adam", False)))
def test_training_equals_one_process_on_the_global_batch(hvd_jax: Any, kind: str, ordered: bool) -> None:
    optax = pytest.importorskip("optax")
    hvd = hvd_jax
    inner = optax.sgd(0.2, momentum=0.9) if kind == "sgd" else optax.adam(0.02)
    x, y = batches(hvd.size())
    start = hvd.broadcast_parameters(parameters(hvd.rank()), root_rank=0)
    found = train(hvd.DistributedOptimizer(inner, ordered=ordered), start, mine(hvd, x), mine(hvd, y))
    check(hvd, found, train(inner, parameters(0), x, y))


def test_several_passes_for_one_step(hvd_jax: Any) -> None:
    optax = pytest.importorskip("optax")
    hvd = hvd_jax
    x, y = batches(hvd.size())
    inner = optax.adam(0.02)
    expected = train(inner, parameters(0), x, y)
    optimizer = hvd.DistributedOptimizer(inner, backward_passes_per_step=2, average_aggregated_gradients=True)
    found = train(optimizer, parameters(0), mine(hvd, x, 2), mine(hvd, y, 2), passes=2)
    check(hvd, found, expected)
    # Without the average the sum of two passes: twice the gradient, which SGD takes as twice the rate.
    summed = hvd.DistributedOptimizer(optax.sgd(0.1), backward_passes_per_step=2)
    found = train(summed, parameters(0), mine(hvd, x, 2), mine(hvd, y, 2), passes=2)
    check(hvd, found, train(optax.sgd(0.2), parameters(0), x, y))


def test_in_a_chain_and_with_a_divisor_and_compression(hvd_jax: Any) -> None:
    optax = pytest.importorskip("optax")
    hvd = hvd_jax
    x, y = batches(hvd.size())
    chain = optax.chain(hvd.distributed_gradients(gradient_predivide_factor=4.0), optax.clip_by_global_norm(0.1), optax.sgd(0.5))
    expected = train(optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5)), parameters(0), x, y)
    check(hvd, train(chain, parameters(0), mine(hvd, x), mine(hvd, y)), expected)
    halves = hvd.DistributedOptimizer(optax.sgd(0.2), compression=hvd.Compression.fp16)
    check(hvd, train(halves, parameters(0), mine(hvd, x), mine(hvd, y)), train(optax.sgd(0.2), parameters(0), x, y), rtol=5e-2)


def test_adasum_combines_the_steps(hvd_jax: Any) -> None:
    optax = pytest.importorskip("optax")
    hvd = hvd_jax
    gradients = {"w": jnp.arange(4.0) + hvd.rank()}
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.5), op=hvd.Adasum)
    updates, _ = optimizer.update(gradients, optimizer.init(gradients))
    expected = collectives.allreduce(np.asarray(-0.5 * gradients["w"]), op=hvd.Adasum)
    np.testing.assert_allclose(updates["w"], expected, rtol=1e-6)


def test_gradients_of_all_ranks(hvd_jax: Any) -> None:
    hvd = hvd_jax
    x, y = (part[0] for part in batches(hvd.size()))
    p = parameters(0)
    rows = slice(6 * hvd.rank(), 6 * hvd.rank() + 6)
    expected = jax.jit(jax.grad(loss_of))(p, x, y)
    (value, extra), found = jax.jit(hvd.value_and_grad(lambda p, x, y: (loss_of(p, x, y), x.sum()), has_aux=True))(p, x[rows], y[rows])
    np.testing.assert_allclose(value, loss_of(p, x[rows], y[rows]), rtol=1e-5)
    np.testing.assert_allclose(extra, x[rows].sum(), rtol=1e-4)
    check(hvd, found, expected)
    check(hvd, jax.jit(hvd.grad(loss_of, op=hvd.Sum, postscale_factor=1 / hvd.size()))(p, x[rows], y[rows]), expected)
    found, extra = jax.jit(hvd.grad(lambda p, x, y: (loss_of(p, x, y), y), argnums=(0, 1), has_aux=True))(p, x[rows], y[rows])
    np.testing.assert_array_equal(extra, y[rows])
    check(hvd, found[0], expected)


def test_the_same_start(hvd_jax: Any) -> None:
    hvd, rank = hvd_jax, hvd_jax.rank()
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


def test_what_one_rank_has_no_memory_for_is_told_to_all(hvd_jax: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hvd = hvd_jax
    if hvd.size() < 2:
        pytest.skip("needs two ranks")

    def none_left(*arguments: Any, **keywords: Any) -> Any:
        raise MemoryError("none left")

    mine = {"large": jnp.arange(100_000.0) + hvd.rank(), "small": jnp.arange(3) + hvd.rank()}
    with monkeypatch.context() as patch:
        if hvd.rank() == 1:
            patch.setattr(np, "concatenate", none_left)
        with pytest.raises(MemoryError if hvd.rank() == 1 else MismatchError, match="none left"):
            hvd.broadcast_parameters(mine)
    assert hvd.broadcast_parameters(mine)["small"].tolist() == [0, 1, 2]


def test_another_model_on_one_rank(hvd_jax: Any) -> None:
    hvd = hvd_jax
    if hvd.size() < 2:
        pytest.skip("needs two ranks")
    with pytest.raises(MismatchError, match=r"params\['w'\].*\(3,\).*\(4,\)"):
        hvd.broadcast_parameters({"w": jnp.ones(4 if hvd.rank() == 1 else 3)})
    with pytest.raises(MismatchError, match="root_rank"):
        hvd.broadcast_parameters({"w": jnp.ones(3)}, root_rank=hvd.rank() % 2)
    with pytest.raises(InvalidTypeError, match=r"params\['name'\]"):
        hvd.broadcast_parameters({"name": "resnet"})
    assert float(hvd.allreduce(jnp.float32(1), op=hvd.Sum)) == hvd.size()


def test_wrong_optimizers(hvd_jax: Any) -> None:
    hvd = hvd_jax
    with pytest.raises(InvalidTypeError, match="init and update"):
        hvd.DistributedOptimizer(0.1)
    sgd = hvd.distributed_gradients()
    with pytest.raises(InvalidArgumentError, match="backward_passes_per_step"):
        hvd.DistributedOptimizer(sgd, backward_passes_per_step=0)
    with pytest.raises(InvalidArgumentError, match="predivide"):
        hvd.DistributedOptimizer(sgd, op=hvd.Sum, gradient_predivide_factor=2.0)


def test_by_itself_and_on_several_devices(hvd_jax: Any) -> None:
    """In a process of its own, where neither Optax nor another framework can be imported, and JAX finds two devices."""
    if hvd_jax.rank():
        return
    program = """
import sys
for name in ("optax", "torch", "tensorflow", "keras", "mpi4py"):
    sys.modules[name] = None
import jax, jax.numpy as jnp, numpy as np
import collectives.jax as hvd
hvd.init()
optimizer = hvd.DistributedOptimizer(hvd.distributed_gradients(), backward_passes_per_step=2)
state = optimizer.init({"w": jnp.ones(3)})
for expected in (0.0, 2.0):
    updates, state = optimizer.update({"w": jnp.ones(3)}, state)
    assert float(updates["w"][0]) == expected

second = jax.devices()[1]
here = jax.device_put(jnp.arange(4.0), second)
for placed in (hvd.allreduce([here])[0], hvd.broadcast_parameters([here])[0], jax.jit(hvd.allreduce)(here)):
    assert placed.devices() == {second}
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
sharded = jax.device_put(jnp.arange(4.0), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i")))
calls = {
    "one on 2": lambda: hvd.allreduce({"w": sharded}),
    "got one on 2": lambda: hvd.broadcast_parameters({"w": sharded}),
    "more than 1 device": lambda: jax.jit(hvd.allreduce)(sharded),
    "2 devices": lambda: jax.jit(lambda x: hvd.allreduce(x, name="n", ordered=False))(sharded),
}
for text, call in calls.items():
    try:
        call()
    except (TypeError, ValueError) as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)
"""
    launched = ("OMPI_", "PMI", "PRTE_", "_COLLECTIVES", "MPI")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(launched)}
    inherited["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    subprocess.run([sys.executable, "-c", program], env=inherited, check=True, timeout=100)
