"""Recipes of JAX and Optax, on the ranks' shares of every batch, and in one process on the whole batches.

The rows of "Recipes" in docs/horovod.md; `tests.adapters.shares` says how the two runs are compared.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from collectives.engine import adasum
from tests.adapters.shares import CLASSES, FEATURES, ROWS, STEPS, One, X, Y, compare, mine, recipe_of, share

optax = pytest.importorskip("optax")
pytestmark = pytest.mark.timeout(120)
Result = dict[str, Any]
HIDDEN = 4


@pytest.fixture(scope="module", autouse=True)
def quickly_compiled() -> Iterator[None]:
    """Most of the time would go into compiling."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def parameters(seed: int) -> Any:
    draw = np.random.default_rng(seed)

    def array(*shape: int) -> Any:
        return draw.normal(size=shape).astype(np.float32)

    return {"hidden": {"w": array(FEATURES, HIDDEN), "b": array(HIDDEN)}, "out": {"w": array(HIDDEN, CLASSES)}}


def output_of(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"]) @ params["out"]["w"]


def loss_of(hvd: Any) -> Any:
    def loss(params: Any, x: Any, y: Any) -> Any:
        return jnp.square(output_of(params, x) - y).mean(-1).sum() * hvd.size() / ROWS

    return loss


recipe = recipe_of(2e-5, 2e-6)


def momentum(rate: Any = 0.1) -> Any:
    return optax.sgd(rate, momentum=0.9)


def steps_of(hvd: Any, first: int = 0, last: int = STEPS) -> list[Any]:
    """This rank's numbers and targets of these steps."""
    parts = (mine(hvd, part).astype(np.float32) for part in (X, Y))
    return list(zip(*parts, strict=True))[first:last]


def begin(hvd: Any, optimizer: Any, seed: int = 0) -> Any:
    """Every rank begins otherwise, and gets what rank 0 has."""
    params = jax.device_put(parameters(seed + hvd.rank()))
    return hvd.broadcast_parameters((params, jax.jit(optimizer.init)(params)), root_rank=0)


def step_of(hvd: Any, optimizer: Any, loss: Any = None) -> Any:
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        grads = jax.grad(loss or loss_of(hvd))(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def named(*trees: Any) -> Result:
    """The arrays of pytrees."""
    leaves = jax.tree_util.tree_flatten_with_path(trees)[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def steps(hvd: Any, step: Any, carry: Any, feeds: Any = None) -> Any:
    for feed in steps_of(hvd) if feeds is None else feeds:
        carry = step(*carry, *feed)
    return carry


def trained(hvd: Any, optimizer: Any, loss: Any = None, **options: Any) -> Result:
    optimizer = hvd.DistributedOptimizer(optimizer, **options)
    return named(steps(hvd, jax.jit(step_of(hvd, optimizer, loss)), begin(hvd, optimizer)))


# ---- compiled steps -------------------------------------------------------------------------------------------------


@recipe
def test_chain(hvd: Any) -> Result:
    """Clipping, weight decay and a schedule behind the exchange."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.05, 2, 4)
    return trained(hvd, optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(rate)))


@recipe
def test_exchange_in_a_chain(hvd: Any) -> Result:
    alone = optax.identity() if isinstance(hvd, One) else hvd.distributed_gradients()
    optimizer = optax.chain(alone, optax.clip_by_global_norm(0.05), momentum())
    params, state = steps(hvd, jax.jit(step_of(hvd, optimizer)), begin(hvd, optimizer))
    return named(params, state[1:])


@recipe
def test_value_and_grad(hvd: Any) -> Result:
    optimizer = momentum()
    transform = jax.value_and_grad if isinstance(hvd, One) else hvd.value_and_grad

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        _, grads = transform(loss_of(hvd))(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return named(steps(hvd, step, begin(hvd, optimizer)))


test_matched_by_name = recipe(lambda hvd: trained(hvd, momentum(), ordered=False))
test_multi_steps_inside = recipe(lambda hvd: trained(hvd, optax.MultiSteps(momentum(), 2)))


@recipe
def test_plateau(hvd: Any) -> Result:
    """The rate falls by the loss, which each rank gives for its own rows."""
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.5)
    optimizer = hvd.DistributedOptimizer(optax.chain(momentum(), plateau))

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(loss_of(hvd))(params, x, y)
        updates, state = optimizer.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    params, state = steps(hvd, step, begin(hvd, optimizer))
    assert state[1].scale < 1
    return named((params, state))


@recipe
def test_line_search(hvd: Any) -> Result:
    """Each evaluation is of all rows; the first step of each search is too long."""
    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=15)
    optimizer = hvd.DistributedOptimizer(optax.lbfgs(learning_rate=8.0, memory_size=2, linesearch=search))

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        def value_of(params: Any) -> Any:
            return loss_of(hvd)(params, x, y)

        value, grads = jax.value_and_grad(value_of)(params)
        how = {"value": value, "grad": grads, "value_fn": value_of}
        updates, state = optimizer.update(grads, state, params, **how)
        return optax.apply_updates(params, updates), state

    return named(steps(hvd, step, begin(hvd, optimizer))[0])


@recipe
def test_donated_buffers(hvd: Any) -> Result:
    """The step writes parameters and state where they are."""
    optimizer = hvd.DistributedOptimizer(momentum())
    carry = jax.jit(lambda tree: jax.tree_util.tree_map(jnp.array, tree))(begin(hvd, optimizer))
    step = jax.jit(step_of(hvd, optimizer), donate_argnums=(0, 1))
    for feed in steps_of(hvd):
        given = carry[0]["hidden"]["w"]
        carry = step(*carry, *feed)
        assert given.is_deleted()
    return named(carry)


@recipe
def test_local_devices(hvd: Any) -> Result:
    """A rank with two devices has its rows divided among them; steps are compiled as a whole, and in part."""
    devices = np.array(jax.devices()[:2])
    if len(devices) < 2:
        pytest.skip("needs two devices; XLA_FLAGS=--xla_force_host_platform_device_count=2")
    if jax.__version_info__ < (0, 5, 3):
        pytest.skip("collectives in programs for several devices need JAX 0.5.3")
    mesh = jax.sharding.Mesh(devices, ("rows",))
    divided, whole = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in (("rows",), ()))
    ends = np.round(ROWS * np.cumsum(range(hvd.size() + 1)) / sum(range(hvd.size() + 1))).astype(int)  # all even
    rows = slice(ends[hvd.rank()], ends[hvd.rank() + 1])
    feeds = jax.device_put(
        [(x[rows].astype(np.float32), y[rows].astype(np.float32)) for x, y in zip(X, Y, strict=True)], divided
    )
    optimizer = hvd.DistributedOptimizer(momentum())
    carry = steps(
        hvd, jax.jit(step_of(hvd, optimizer)), jax.device_put(begin(hvd, optimizer), whole), feeds[: STEPS // 2]
    )
    grads_of = jax.jit(jax.grad(loss_of(hvd)), out_shardings=whole)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        updates, state = optimizer.update(grads_of(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    carry = steps(hvd, step, carry, feeds[STEPS // 2 :])
    assert all(leaf.sharding.is_equivalent_to(whole, leaf.ndim) for leaf in jax.tree_util.tree_leaves(carry))
    return named(carry)


def scanned(hvd: Any, **options: Any) -> Result:
    """All steps in one program."""
    optimizer = hvd.DistributedOptimizer(momentum(), **options)
    step = step_of(hvd, optimizer)
    run = jax.jit(lambda carry, *feeds: jax.lax.scan(lambda carry, feed: (step(*carry, *feed), None), carry, feeds)[0])
    return named(run(begin(hvd, optimizer), *(mine(hvd, part).astype(np.float32) for part in (X, Y))))


test_scan = recipe(scanned)
test_scan_matched_by_name = recipe(lambda hvd: scanned(hvd, ordered=False))


@recipe
def test_vmap_of_the_step(hvd: Any) -> Result:
    """Two models at once: the collective of both is one."""
    optimizer = hvd.DistributedOptimizer(momentum())
    members = [parameters(hvd.rank()), parameters(hvd.rank() + 10)]
    params = hvd.broadcast_parameters(jax.tree_util.tree_map(lambda *each: np.stack(each), *members), root_rank=0)
    step = jax.jit(jax.vmap(step_of(hvd, optimizer), in_axes=(0, 0, None, None)))
    return named(steps(hvd, step, (params, jax.jit(jax.vmap(optimizer.init))(params))))


@recipe
def test_batch_normalisation(hvd: Any) -> Result:
    """A batch normalisation over all ranks' rows: the loss goes through two collectives, and so does its gradient."""
    add = (lambda value: value) if isinstance(hvd, One) else (lambda value: hvd.allreduce(value, op=hvd.Sum))

    def loss(params: Any, x: Any, y: Any) -> Any:
        hidden = x @ params["hidden"]["w"]
        mean = add(hidden.sum(0)) / ROWS
        variance = add(jnp.square(hidden - mean).sum(0)) / ROWS
        normal = jnp.tanh((hidden - mean) / jnp.sqrt(variance + 1e-3) + params["hidden"]["b"])
        return jnp.square(normal @ params["out"]["w"] - y).mean(-1).sum() / ROWS

    return trained(hvd, momentum(), loss, **({} if isinstance(hvd, One) else {"op": hvd.Sum}))


@recipe
def test_contrastive_loss(hvd: Any) -> Result:
    """Each row is told from all rows of all ranks; the gradient comes back to the rank that has the row."""
    rows = [share(hvd.size(), rank) for rank in range(hvd.size())]
    own = rows[hvd.rank()]

    def loss(params: Any, x: Any, y: Any) -> Any:
        queries, keys = output_of(params, x), jnp.tanh(output_of(params, y @ jnp.ones((CLASSES, FEATURES))))
        logits = queries @ hvd.allgather(keys, name="keys", rows=[part.stop - part.start for part in rows]).T
        return optax.softmax_cross_entropy_with_integer_labels(logits, np.arange(own.start, own.stop)).sum() / ROWS

    return trained(hvd, momentum(), loss, **({} if isinstance(hvd, One) else {"op": hvd.Sum}))


# ---- precision ------------------------------------------------------------------------------------------------------


@recipe
def test_apply_if_finite(hvd: Any) -> Result:
    """In the second step the last row, which one rank has, overflows: no rank takes that step."""
    optimizer = hvd.DistributedOptimizer(optax.apply_if_finite(momentum(), 3))
    targets = Y.astype(np.float32)
    targets[1, -1] = np.inf
    feeds = [(x, y) for (x, _), y in zip(steps_of(hvd), mine(hvd, targets), strict=True)]
    params, state = steps(hvd, jax.jit(step_of(hvd, optimizer)), begin(hvd, optimizer), feeds)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree_util.tree_leaves(params))
    assert int(state.total_notfinite) == 1
    return named((params, state))


def test_bfloat16(hvd: Any) -> None:
    """The one process goes through the ranks' shares one by one, since halves are rounded where a product ends."""
    size = hvd.size()

    def trained(hvd: Any, parts: list[slice]) -> Result:
        optimizer = hvd.DistributedOptimizer(momentum())

        @jax.jit
        def step(params: Any, state: Any, x: Any, y: Any) -> Any:
            def loss(params: Any, rows: slice) -> Any:
                small = jax.tree_util.tree_map(lambda leaf: leaf.astype(jnp.bfloat16), params)
                found = output_of(small, x[rows].astype(jnp.bfloat16)).astype(jnp.float32)
                return jnp.square(found - y[rows]).mean(-1).sum() * size / ROWS

            every = [jax.grad(loss)(params, rows) for rows in parts]
            grads = jax.tree_util.tree_map(lambda *each: sum(each) / len(parts), *every)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        feeds = zip(X.astype(np.float32), Y.astype(np.float32), strict=True)
        return named(steps(hvd, step, begin(hvd, optimizer), feeds))

    shares = [share(size, rank) for rank in range(size)]
    compare(trained(hvd, [shares[hvd.rank()]]), trained(One(size), shares), 1e-3, 1e-4)


@recipe
def test_join(hvd: Any) -> Result:
    """13 rows dealt out one by one, two to a batch: some ranks have more batches, and the last one is short."""
    size, batch = hvd.ranks if isinstance(hvd, One) else hvd.size(), 2
    rows = [part.reshape(-1, part.shape[-1])[:13].astype(np.float32) for part in (X, Y)]
    optimizer = hvd.DistributedOptimizer(momentum())

    def loss(params: Any, x: Any, y: Any) -> Any:
        return jnp.square(output_of(params, x) - y).mean(-1).sum() / batch / (size if isinstance(hvd, One) else 1)

    params, state = begin(hvd, optimizer)
    step = jax.jit(step_of(hvd, optimizer, loss))
    for _ in range(2):
        if isinstance(hvd, One):
            for first in range(0, 13, batch * size):
                params, state = step(params, state, *(part[first : first + batch * size] for part in rows))
            continue
        own = [part[hvd.rank() :: size] for part in rows]
        for first in range(0, len(own[0]), batch):
            params, state = step(params, state, *(part[first : first + batch] for part in own))
        params, state = hvd.broadcast_parameters((params, state), root_rank=hvd.join())
    return named((params, state))


@recipe
def test_checkpoint(hvd: Any, folder: Path) -> Result:
    """Rank 0 alone saves and loads; the others begin with something else, and get what it has."""
    optimizer = hvd.DistributedOptimizer(optax.adam(optax.exponential_decay(0.02, 1, 0.7)))
    params, state = begin(hvd, optimizer)
    step = jax.jit(step_of(hvd, optimizer))
    for feed in steps_of(hvd, last=2):
        params, state = step(params, state, *feed)
    if not isinstance(hvd, One):
        file = folder / "checkpoint"
        if hvd.rank() == 0:
            file.write_bytes(pickle.dumps(jax.device_get((params, state))))
        fresh = parameters(hvd.rank() + 20)
        restored = pickle.loads(file.read_bytes()) if hvd.rank() == 0 else (fresh, optimizer.init(fresh))
        params, state = hvd.broadcast_parameters(restored, root_rank=0)
    for feed in steps_of(hvd, first=2):
        params, state = step(params, state, *feed)
    return named((params, state))


def passes(hvd: Any, optimizer: Any) -> None:
    """Gradients of two passes are averaged on the rank before they travel; the one process takes both at once."""
    one = One(hvd.size())
    found, _ = steps(hvd, jax.jit(step_of(hvd, optimizer)), begin(hvd, optimizer))
    feeds = steps_of(one)
    both = [tuple(map(np.concatenate, zip(*pair, strict=True))) for pair in zip(feeds[::2], feeds[1::2], strict=True)]
    step = jax.jit(step_of(one, momentum(), lambda *given: loss_of(one)(*given) / 2))
    wanted, _ = steps(one, step, begin(one, momentum()), both)
    compare(named(found), named(wanted), 2e-5, 2e-6)


def test_several_passes(hvd: Any) -> None:
    options = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    passes(hvd, hvd.DistributedOptimizer(momentum(), **options))


def test_multi_steps_outside(hvd: Any) -> None:
    passes(hvd, optax.MultiSteps(hvd.DistributedOptimizer(momentum()), 2))


def test_adasum(hvd: Any) -> None:
    """The one process lets an optimizer act for each rank's share, and combines what they do as the paper says."""
    size, one = hvd.size(), One(hvd.size())
    found = trained(hvd, optax.sgd(0.1), op=hvd.Adasum)
    params, state = begin(one, optax.sgd(0.1))
    grads_of = jax.jit(jax.grad(loss_of(hvd)))

    def combined(leaf: Any, *grads: Any) -> Any:
        return leaf + adasum.reference([np.ravel(-0.1 * np.asarray(grad)) for grad in grads]).reshape(leaf.shape)

    for x, y in zip(X.astype(np.float32), Y.astype(np.float32), strict=True):
        every = [grads_of(params, x[rows], y[rows]) for rows in (share(size, rank) for rank in range(size))]
        params = jax.tree_util.tree_map(combined, params, *every)
    compare(found, named((params, state)), 2e-5, 2e-6)
