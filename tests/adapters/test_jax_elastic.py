"""The state of pytrees, on several ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from collectives import elastic
from collectives.base.errors import InvalidTypeError, MismatchError, RecoverableError
from collectives.elastic import retry
from collectives.jax.compat import committed
from collectives.jax.eager import wait_for_effects


class Moments(NamedTuple):
    """As in an optimizer's state."""

    count: Any
    mean: Any


def state_of(hvd: Any, rank: int, rows: int = 3) -> Any:
    params = {"w": jnp.full((rows, 2), rank, jnp.bfloat16), "b": [jnp.float32(rank), None]}
    return hvd.elastic.JaxState(
        params=params,
        moments=Moments(np.int32(rank), jax.tree.map(jnp.ones_like, params)),
        key=jax.random.key(rank),
        host=np.full(4, rank),
        step=rank,
    )


def seen(state: Any) -> Any:
    return (
        state.params["w"].tolist(),
        float(state.params["b"][0]),
        int(state.moments.count),
        jax.random.key_data(state.key).tolist(),
        state.host.tolist(),
        state.step,
    )


def test_all_ranks_get_the_state_of_rank_0_and_return_to_it(hvd: Any) -> None:
    state, wanted = state_of(hvd, hvd.rank()), seen(state_of(hvd, 0))
    structure, host = jax.tree.structure((state.params, state.moments)), state.host
    state.sync()
    assert seen(state) == wanted and state.host is host
    assert jax.tree.structure((state.params, state.moments)) == structure
    assert isinstance(state.moments, Moments) and state.params["w"].dtype == jnp.bfloat16
    assert isinstance(state.params["b"][0], jax.Array)

    donating = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    state.params = donating(state.params)
    state.key = jax.random.split(state.key)[0]
    state.host += 1
    state.step += 1
    assert seen(state) != wanted
    state.restore()
    assert seen(state) == wanted and state.host is host

    state.params = donating(state.params)
    state.commit()
    committed = seen(state)
    state.params = donating(state.params)
    state.params = donating(state.params)
    state.restore()
    assert seen(state) == committed


def test_a_newcomer_receives_from_all_others(hvd: Any) -> None:
    newcomer = hvd.rank() == hvd.size() - 1
    state = state_of(hvd, hvd.rank())
    state.sync()
    state.step = 7
    state.params["w"] += 1
    state.commit()
    wanted = seen(state)
    if newcomer:
        state = state_of(hvd, 5)
    state.sync()
    assert seen(state) == wanted


def test_arrays_stay_where_the_program_has_put_them(hvd: Any) -> None:
    last = jax.devices()[-1]
    state = hvd.elastic.JaxState(there=jax.device_put(jnp.ones(3) * hvd.rank(), last), here=jnp.ones(3))
    state.sync()
    assert state.there.devices() == {last} and committed(state.there) and not committed(state.here)
    assert (state.there + state.here).tolist() == [1, 1, 1]


def test_a_tree_of_another_shape_is_named(hvd: Any) -> None:
    last = hvd.size() - 1
    state = state_of(hvd, hvd.rank(), 3 + (hvd.rank() == last))
    with pytest.raises(MismatchError) as caught:
        state.sync()
    text = "state: attribute moments.mean['w'] is not the same on every rank: bfloat16 of shape (3, 2) on rank"
    assert text in str(caught.value)
    assert f"bfloat16 of shape (4, 2) on rank {last}" in str(caught.value)
    assert state.step == hvd.rank()


def test_a_sharded_array_is_refused(hvd: Any) -> None:
    devices = jax.devices()[:2]
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(devices), "x"), jax.sharding.PartitionSpec("x"))
    with pytest.raises(InvalidTypeError, match="sharded over 2"):
        hvd.elastic.JaxState(params=jax.device_put(jnp.ones(4), sharding))


def test_arrays_that_were_donated_are_not_waited_for(hvd: Any) -> None:
    state = hvd.elastic.JaxState(params={"w": jnp.zeros(3)})
    jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)(state.params)
    assert state.params["w"].is_deleted()
    state.check_host_updates()


def test_no_call_is_made_for_a_function_that_begins_anew(hvd: Any) -> None:
    compiled = jax.jit(hvd.allgather)
    compiled(jnp.ones(3)).block_until_ready()
    with retry.retrying(True) as steps:
        steps.renewed = True
        for call in (hvd.allreduce, hvd.allgather):
            with pytest.raises(RecoverableError, match="starts again"):
                call(jnp.ones(3))
        with pytest.raises(Exception, match=r"RecoverableError: .* starts again"):
            compiled(jnp.ones(3)).block_until_ready()
    wait_for_effects()


@pytest.mark.parametrize("compiled", [False, True])
def test_values_that_are_divided_by_a_number_of_ranks_are_not_combined_again(hvd: Any, compiled: bool) -> None:
    def calls(x: Any) -> Any:
        how = {"sum": {"op": hvd.Sum}, "half": {"postscale_factor": 0.5}, "mean": {}}
        return [hvd.allreduce(x, name=name, **options) for name, options in how.items()]

    with retry.retrying(True) as steps:
        jax.block_until_ready((jax.jit(calls) if compiled else calls)(jnp.ones(3)))
    assert steps._left == {"mean": 1}


def test_each_rank_deals_its_own_samples_and_a_newcomer_takes_new_trees(hvd: Any) -> None:
    sampler, newcomer = elastic.ElasticSampler(range(4 * hvd.size()), shuffle=False), hvd.rank() == hvd.size() - 1
    state = hvd.elastic.JaxState(params={"w": jnp.zeros(2)}, best=None, sampler=sampler)
    if hvd.size() > 1 and newcomer:
        state._synced = False
    else:
        state._synced, state.best = True, {"w": jnp.full(2, 3.0)}
    state.sync()
    assert state.sampler is sampler and list(sampler) == list(range(hvd.rank(), 4 * hvd.size(), hvd.size()))
    assert state.best["w"].tolist() == [3.0, 3.0]
