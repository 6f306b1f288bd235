"""Collectives under JAX's transformations: derivatives of any order, vmap, control flow, rematerialisation, nested
compilation."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import collectives.jax as public
from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.engine import adasum

pytestmark = pytest.mark.timeout(120)

ROWS = 5


def of_rank(rank: int, rows: int = ROWS) -> Any:
    """Different on every rank and in every place; extremes are shared here and there."""
    numbers = np.sin(np.arange(rows * 2.0) * (1.7 + rank)) + 1.5
    numbers[0] = 2.5
    return jnp.asarray(numbers.reshape(rows, 2), jnp.float32)


def weights(rank: int, shape: tuple[int, ...]) -> Any:
    """What a rank makes of its result, so that the ranks' losses differ."""
    return np.cos(np.arange(float(np.prod(shape))) + rank).reshape(shape).astype(np.float32)


def adasum_of(xs: list[Any]) -> Any:
    xs = list(xs)
    for level in adasum.tree(len(xs)):
        for left, right in level:
            a, b = xs[left], xs[right]
            dot = jnp.vdot(a, b)
            xs[left] = (1 - dot / (2 * jnp.vdot(a, a))) * a + (1 - dot / (2 * jnp.vdot(b, b))) * b
    return xs[0]


Model = Callable[[list[Any], int], Any]


CALLS: dict[str, tuple[Callable[[Any], Any], Model]] = {
    "sum": (
        lambda x: public.allreduce(x, op=public.Sum, prescale_factor=0.5, postscale_factor=3.0),
        lambda xs, r: jnp.stack(xs).sum(0) * 1.5,
    ),
    "average": (public.allreduce, lambda xs, r: jnp.stack(xs).mean(0)),
    "min": (lambda x: public.allreduce(x, op=public.Min), lambda xs, r: jnp.stack(xs).min(0)),
    "max": (
        lambda x: public.allreduce(x, op=public.Max, prescale_factor=2.0),
        lambda xs, r: jnp.stack(xs).max(0) * 2,
    ),
    "product": (lambda x: public.allreduce(x, op=public.Product), lambda xs, r: jnp.stack(xs).prod(0)),
    "adasum": (lambda x: public.allreduce(x, op=public.Adasum), lambda xs, r: adasum_of(xs)),
    "reducescatter": (
        lambda x: public.reducescatter(x, op=public.Sum),
        lambda xs, r: jnp.array_split(jnp.stack(xs).sum(0), len(xs))[r],
    ),
    "reducescatter average": (
        lambda x: public.reducescatter(x, postscale_factor=2.0),
        lambda xs, r: jnp.array_split(jnp.stack(xs).mean(0) * 2, len(xs))[r],
    ),
    "reducescatter max": (
        lambda x: public.reducescatter(x, op=public.Max),
        lambda xs, r: jnp.array_split(jnp.stack(xs).max(0), len(xs))[r],
    ),
    "allgather": (public.allgather, lambda xs, r: jnp.concatenate(xs)),
    "broadcast": (lambda x: public.broadcast(x, public.size() - 1), lambda xs, r: xs[-1]),
    "alltoall": (
        lambda x: public.alltoall(
            x, [ROWS] + [0] * (public.size() - 1), rows=[ROWS * (public.rank() == 0)] * public.size()
        )[0],
        lambda xs, r: jnp.concatenate(xs) if r == 0 else xs[0][:0],
    ),
}
"""Each collective, and what one process would make of every rank's tensor for one of them."""


@pytest.mark.parametrize("name", CALLS)
def test_derivatives(hvd: Any, name: str) -> None:
    """Against one process that has every rank's tensor: the sum of the ranks' losses, differentiated by what is this
    rank's."""
    rank, size = hvd.rank(), hvd.size()
    run, model = CALLS[name]

    def loss(x: Any) -> Any:
        y = run(jnp.sin(x))
        return (weights(rank, y.shape) * y**2).sum()

    def of_all(mine: Any) -> Any:
        xs = [jnp.sin(mine if other == rank else of_rank(other)) for other in range(size)]
        results = [model(xs, other) for other in range(size)]
        return sum((weights(other, y.shape) * y**2).sum() for other, y in enumerate(results))

    x = of_rank(rank)
    expected = jax.jit(jax.grad(of_all))(x)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), expected, rtol=2e-5, atol=1e-5)
    if name in ("sum", "max"):  # eager, where each operation is compiled by itself
        np.testing.assert_allclose(jax.grad(loss)(x), expected, rtol=2e-5, atol=1e-5)

    def second_of_all(direction: list[Any]) -> Any:
        """The second derivative by this rank's tensor and along every rank's direction."""

        def gradient(*xs: Any) -> Any:
            def total(mine: Any) -> Any:
                everyone = [jnp.sin(mine if other == rank else xs[other]) for other in range(size)]
                results = [model(everyone, other) for other in range(size)]
                return sum((weights(other, y.shape) * y**2).sum() for other, y in enumerate(results))

            return jax.grad(total)(xs[rank])

        return jax.jvp(gradient, [of_rank(other) for other in range(size)], direction)[1]

    directions = [weights(other, (ROWS, 2)) for other in range(size)]
    found = jax.jit(lambda x: jax.jvp(jax.grad(loss), [x], [directions[rank]])[1])(x)
    np.testing.assert_allclose(found, jax.jit(second_of_all)(directions), rtol=2e-4, atol=2e-4)


def test_reverse_over_reverse(hvd: Any) -> None:
    x = of_rank(hvd.rank())
    total = sum(of_rank(rank) for rank in range(hvd.size()))
    # sum over ranks of sum((sum of x)^3): the gradient is 3 n s^2; the sum over ranks of its sum has the gradient 6 n^2
    # s
    gradient = jax.grad(lambda x: (hvd.allreduce(x, op=hvd.Sum) ** 3).sum())
    second = jax.jit(jax.grad(lambda x: gradient(x).sum()))
    np.testing.assert_allclose(jax.jit(gradient)(x), 3 * hvd.size() * total**2, rtol=1e-5)
    np.testing.assert_allclose(second(x), 6 * hvd.size() ** 2 * total, rtol=1e-5)


def test_gradients_of_uneven_rows_and_of_a_part_of_a_group(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    rows = [other + 1 for other in range(size)]
    x = of_rank(rank, rank + 1)
    for run in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        gradient = run(lambda x: (weights(rank, (sum(rows), 2)) * hvd.allgather(x, rows=rows)).sum())(x)
        start = sum(rows[:rank])
        expected = sum(weights(other, (sum(rows), 2)) for other in range(size))[start : start + rank + 1]
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)

        def of_some(x: Any) -> Any:
            a, _, c = hvd.allreduce([x, jnp.arange(3), jnp.ones(2)], op=hvd.Sum)
            return (a**2).sum() + c.sum()

        x0 = of_rank(rank)
        np.testing.assert_allclose(run(of_some)(x0), 2 * size * sum(of_rank(other) for other in range(size)), rtol=1e-5)


def test_complex_gradients(hvd: Any) -> None:
    x = of_rank(hvd.rank()) + 1j * of_rank(hvd.rank() + 7)
    total = sum(of_rank(rank) + 1j * of_rank(rank + 7) for rank in range(hvd.size()))
    expected = hvd.size() * jax.grad(lambda s: jnp.abs(s).sum())(total)
    np.testing.assert_allclose(
        jax.jit(jax.grad(lambda x: jnp.abs(hvd.allreduce(x, op=hvd.Sum)).sum()))(x), expected, rtol=1e-5
    )


def test_vmap(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    batch = jnp.stack([of_rank(rank), of_rank(rank) * 2, of_rank(rank) * 3])
    for name in ("sum", "max", "reducescatter", "allgather", "broadcast", "alltoall"):
        run, model = CALLS[name]
        expected = np.stack([model([of_rank(other) * scale for other in range(size)], rank) for scale in (1, 2, 3)])
        np.testing.assert_allclose(jax.vmap(run)(batch), expected, rtol=1e-5)
        last = jax.jit(jax.vmap(run, in_axes=-1, out_axes=-1))(jnp.moveaxis(batch, 0, -1))
        np.testing.assert_allclose(jnp.moveaxis(last, -1, 0), expected, rtol=1e-5)
    per_example = jax.jit(jax.vmap(jax.grad(lambda x: (hvd.allreduce(x, op=hvd.Sum) ** 2).sum())))(batch)
    total = sum(of_rank(other) for other in range(size))
    np.testing.assert_allclose(per_example, jnp.stack([2 * size * total * scale for scale in (1, 2, 3)]), rtol=1e-5)


@pytest.mark.parametrize("ordered", (True, False))
def test_control_flow(hvd: Any, ordered: bool) -> None:
    rank, size = hvd.rank(), hvd.size()
    x = jnp.arange(3.0) + rank
    mean = jnp.arange(3.0) + (size - 1) / 2

    def average(x: Any) -> Any:
        return hvd.allreduce(x, name="of control flow", ordered=ordered)

    def scanned(x: Any) -> Any:
        return jax.lax.scan(lambda c, k: (average(c) * k, c.sum()), x, jnp.array([1.0, 2.0, 3.0]))[0]

    np.testing.assert_allclose(jax.jit(scanned)(x), 6 * mean, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: scanned(x).sum()))(x), jnp.full(3, 6.0), rtol=1e-6)
    looped = jax.jit(lambda x: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, average(c[1]) + 1), (0, x)))
    np.testing.assert_allclose(looped(x)[1], mean + 2, rtol=1e-6)
    branch = jax.jit(lambda p, x: jax.lax.cond(p, average, lambda x: x, x))
    np.testing.assert_allclose(branch(True, x), mean, rtol=1e-6)
    np.testing.assert_allclose(branch(False, x), x)


@pytest.mark.parametrize("ordered", (True, False))
def test_rematerialisation_nesting_and_own_derivatives(hvd: Any, ordered: bool) -> None:
    size = hvd.size()
    x = of_rank(hvd.rank())
    total = sum(jnp.sin(of_rank(rank)) for rank in range(size))
    expected = size * jnp.cos(total) * jnp.cos(x)

    def block(x: Any) -> Any:
        return jnp.sin(jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum, name="of a block", ordered=ordered))(jnp.sin(x)))

    for way in (block, jax.checkpoint(block), jax.jit(jax.checkpoint(block))):
        np.testing.assert_allclose(jax.jit(jax.grad(lambda x, f=way: f(x).sum()))(x), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(jax.grad(lambda x: jax.checkpoint(block)(x).sum())(x), expected, rtol=1e-4, atol=1e-5)

    @jax.custom_vjp
    def own(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum, name="own", ordered=ordered)

    own.defvjp(
        lambda x: (own(x), x), lambda x, g: (hvd.allreduce(g * x, op=hvd.Sum, name="own back", ordered=ordered),)
    )
    np.testing.assert_allclose(
        jax.jit(jax.grad(lambda x: own(x).sum()))(x), sum(of_rank(rank) for rank in range(size)), rtol=1e-5
    )


def test_a_constant_inside_of_a_program_is_not_reduced_while_tracing(hvd: Any) -> None:
    outside = jnp.ones(3) * hvd.rank()
    program = jax.jit(lambda: hvd.allreduce(outside, op=hvd.Sum))
    assert "collective" in str(jax.make_jaxpr(program)())
    for _ in range(2):
        assert float(program()[0]) == sum(range(hvd.size()))


def test_a_result_that_nobody_reads_is_still_reduced(hvd: Any) -> None:
    """Or a rank that needs it would wait for one that does not."""

    @jax.jit
    def program(x: Any) -> Any:
        summed = hvd.allreduce(x, op=hvd.Sum)
        return summed if hvd.rank() == 0 else x

    result = program(jnp.ones(3))
    assert float(result[0]) == (hvd.size() if hvd.rank() == 0 else 1)


# ---- several devices of a rank


def _devices() -> Any:
    if jax.local_device_count() < 2:
        pytest.skip("needs XLA_FLAGS=--xla_force_host_platform_device_count=2")
    return jax.sharding.Mesh(np.array(jax.local_devices()[:2]), ("i",))


def _devices_of_a_program() -> Any:
    if jax.__version_info__ < (0, 5, 3):
        pytest.skip("collectives in programs for several devices need JAX 0.5.3")
    return _devices()


def _on(mesh: Any, array: Any, *axes: str) -> Any:
    return jax.device_put(array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)))


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("axes", [(), ("i",)], ids=["replicated", "sharded"])
def test_a_program_for_several_devices_combines_whole_arrays(hvd: Any, ordered: bool, axes: tuple[str, ...]) -> None:
    mesh = _devices_of_a_program()
    mine = _on(mesh, jnp.arange(4.0) + hvd.rank(), *axes)
    ranks = hvd.size()

    @jax.jit
    def program(x: Any) -> Any:
        total = hvd.allreduce(x * 2, op=hvd.Sum, name=f"several {axes}", ordered=ordered)
        looped = jax.lax.fori_loop(0, 2, lambda _, y: hvd.allreduce(y, op=hvd.Max), x)
        return total, total.sum() + x.sum(), looped, jax.grad(lambda x: (hvd.allreduce(x, op=hvd.Sum) ** 2).sum())(x)

    wanted = np.arange(4.0) * ranks + ranks * (ranks - 1) / 2
    for _ in range(2):
        total, mixed, looped, gradient = program(mine)
        np.testing.assert_allclose(np.asarray(total), 2 * wanted)
        assert float(mixed) == 2 * wanted.sum() + 6 + 4 * hvd.rank()
        np.testing.assert_allclose(np.asarray(looped), np.arange(4.0) + ranks - 1)
        np.testing.assert_allclose(np.asarray(gradient), 2 * ranks * wanted)
        assert total.is_fully_replicated and len(total.devices()) == 2
        mine = mine + 0 * total  # lies where other arrays of the program do


@pytest.mark.parametrize("ordered", [True, False])
def test_a_failure_in_a_program_for_several_devices(hvd: Any, ordered: bool) -> None:
    """Every device of every rank fails; none waits for another until XLA ends the process."""
    mesh = _devices_of_a_program()

    @jax.jit
    def program(x: Any) -> Any:
        return (
            x + hvd.allreduce(x[: 2 + 2 * (hvd.rank() % 2)], name=f"fails on several {ordered}", ordered=ordered).sum()
        )

    for _ in range(2):
        with pytest.raises(
            getattr(jax.errors, "JaxRuntimeError", RuntimeError), match=r"MismatchError: rank .* disagree .*shape"
        ):
            program(_on(mesh, jnp.arange(4.0), "i")).block_until_ready()
    assert float(hvd.allreduce(jnp.float32(1), op=hvd.Sum)) == hvd.size()
    good = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum, name="good", ordered=ordered))
    assert good(_on(mesh, jnp.arange(4.0), "i")).tolist() == [hvd.size() * each for each in range(4)]


def test_arrays_on_several_devices_outside_of_a_program(hvd: Any) -> None:
    mesh = _devices()
    replicated = hvd.allreduce(_on(mesh, jnp.ones(4) * hvd.rank()), op=hvd.Max)
    assert np.asarray(replicated).tolist() == [hvd.size() - 1.0] * 4 and len(replicated.devices()) == 2
    second = jax.local_devices()[1]
    here = jax.device_put(jnp.arange(4.0), second)
    for placed in (hvd.allreduce([here])[0], hvd.broadcast_parameters([here])[0], jax.jit(hvd.allreduce)(here)):
        assert placed.devices() == {second}
    advice = r".* collectives\.jax .* jax\.device_put"
    for call, told in ((hvd.allreduce, advice), (hvd.broadcast_parameters, "")):
        with pytest.raises(InvalidTypeError, match=f"sharded over 2{told}"):
            call({"w": _on(mesh, jnp.ones(4), "i")})
    assert float(hvd.allreduce(jnp.float32(1), op=hvd.Sum)) == hvd.size()


def test_pmap_and_shard_map_are_told_what_to_do(hvd: Any) -> None:
    mesh = _devices_of_a_program()
    shard_map = getattr(jax, "shard_map", None) or importlib.import_module("jax.experimental.shard_map").shard_map
    spec = jax.sharding.PartitionSpec("i")
    mapped = shard_map(lambda x: hvd.allreduce(x), mesh=mesh, in_specs=spec, out_specs=spec)
    for call in (jax.pmap(lambda x: hvd.allreduce(x), devices=jax.local_devices()[:2]), jax.jit(mapped)):
        with pytest.raises(
            InvalidArgumentError, match=r"inside pmap or shard_map over 2 devices.*y\[0\] .* within jax\.jit"
        ):
            call(jnp.ones((2, 3)))
    assert float(hvd.allreduce(jnp.float32(1), op=hvd.Sum)) == hvd.size()


def test_what_is_advised_instead_of_a_call_inside_of_pmap_and_shard_map_works(hvd: Any) -> None:
    mesh = _devices_of_a_program()
    shard_map = getattr(jax, "shard_map", None) or importlib.import_module("jax.experimental.shard_map").shard_map
    spec = jax.sharding.PartitionSpec("i")
    parts = jnp.arange(6.0).reshape(2, 3) * (hvd.rank() + 1)
    factor = hvd.size() * (hvd.size() + 1) / 2
    mean = jax.pmap(lambda x: jax.lax.pmean(x, "i"), axis_name="i", devices=jax.local_devices()[:2])(parts)
    for call in (hvd.allreduce, jax.jit(hvd.allreduce, static_argnames="op")):
        assert np.asarray(call(mean[0], op=hvd.Sum)).tolist() == [1.5 * factor, 2.5 * factor, 3.5 * factor]
    mapped = jax.jit(shard_map(lambda x: x + 0, mesh=mesh, in_specs=spec, out_specs=spec))
    for whole in (jax.pmap(lambda x: x + 0, devices=jax.local_devices()[:2])(parts), mapped(parts)):
        with pytest.raises(InvalidTypeError, match=r"sharded over 2 .*jax\.jit"):
            hvd.allreduce(whole, op=hvd.Sum)
        total = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))(whole)
        assert np.asarray(total).tolist() == (np.arange(6.0).reshape(2, 3) * factor).tolist()
    one = jax.pmap(lambda x: hvd.allreduce(x, op=hvd.Sum), devices=jax.local_devices()[:1])(parts[:1])
    assert np.asarray(one).tolist() == [[0.0, factor, 2 * factor]]
