"""Collectives on JAX arrays and pytrees: eager and compiled give the same, of every dtype, and new arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import collectives
from collectives.base.errors import InvalidArgumentError, InvalidTypeError, MismatchError

pytestmark = pytest.mark.timeout(120)

DTYPES = ("bool", "int8", "uint16", "int32", "float16", "bfloat16", "float32", "complex64")


def of_rank(rank: int, shape: tuple[int, ...] = (5, 3), dtype: Any = jnp.float32) -> Any:
    """Numbers that differ on every rank and in every place, and that sum exactly."""
    numbers = jnp.arange(int(np.prod(shape))).reshape(shape) % 7 + 3 * rank + 1
    return (numbers % 2 == 0) if dtype == "bool" else numbers.astype(dtype)


def each(function: Any) -> list[Any]:
    """The function as it is, and compiled."""
    return [function, jax.jit(function)]


def same(found: Any, expected: Any) -> None:
    assert jax.tree_util.tree_structure(found) == jax.tree_util.tree_structure(expected)
    for one, other in zip(jax.tree_util.tree_leaves(found), jax.tree_util.tree_leaves(expected), strict=True):
        assert isinstance(one, jax.Array)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_of_every_dtype(hvd: Any, dtype: str) -> None:
    everyone = np.stack([np.asarray(of_rank(rank, dtype=dtype)) for rank in range(hvd.size())])
    expected = everyone.any(0) if dtype == "bool" else sum(everyone[1:], everyone[0])
    for run in each(lambda x: hvd.allreduce(x, op=hvd.Sum)):
        same(run(of_rank(hvd.rank(), dtype=dtype)), jnp.asarray(expected))


def test_every_reduction(hvd: Any) -> None:
    everyone = np.stack([np.asarray(of_rank(rank)) for rank in range(hvd.size())])
    reductions = {hvd.Average: np.mean, hvd.Sum: np.sum, hvd.Min: np.min, hvd.Max: np.max, hvd.Product: np.prod}
    for op, reduce in reductions.items():
        for run in each(lambda x, op=op: hvd.allreduce(x, op=op, prescale_factor=2.0, postscale_factor=0.5)):
            expected = 0.5 * reduce(2.0 * everyone, axis=0)
            np.testing.assert_allclose(run(of_rank(hvd.rank())), expected, rtol=1e-6)
    adasum = collectives.allreduce(np.asarray(of_rank(hvd.rank())), op=hvd.Adasum)
    for run in each(lambda x: hvd.allreduce(x, op=hvd.Adasum)):
        np.testing.assert_array_equal(run(of_rank(hvd.rank())), adasum)
    same(hvd.allreduce(of_rank(hvd.rank()), average=False), jnp.asarray(everyone.sum(0)))


@pytest.mark.parametrize("ordered", (True, False))
def test_a_pytree_is_one_call_and_keeps_its_structure(hvd: Any, ordered: bool) -> None:

    def tree(rank: int) -> Any:
        small = [of_rank(rank, (length,)) for length in (1, 3, 4)]
        return {
            "small": small,
            "none": None,
            "large": of_rank(rank, (300, 70)),
            "int": of_rank(rank, (2, 2), jnp.int32),
            "0-d": small[0][0],
        }

    expected = jax.tree_util.tree_map(
        lambda *leaves: sum(leaves[1:], leaves[0]), *[tree(rank) for rank in range(hvd.size())]
    )
    for run in each(lambda t: hvd.allreduce(t, op=hvd.Sum, name="tree", ordered=ordered)):
        mine = tree(hvd.rank())
        for _ in range(2):
            same(run(mine), expected)
        same(mine, tree(hvd.rank()))  # nothing was written into what was passed
        hvd.barrier()
        before = collectives.world().statistics.rounds
        same(run(mine), expected)
        assert collectives.world().statistics.rounds - before <= (1 if hvd.size() > 1 else 0)
    same(
        hvd.grouped_allreduce([of_rank(hvd.rank()), of_rank(hvd.rank()) * 2], op=hvd.Max)[1],
        of_rank(hvd.size() - 1) * 2,
    )


def test_numpy_arrays_and_numbers_are_leaves(hvd: Any) -> None:
    size = hvd.size()
    tree = [np.arange(3, dtype=np.float64) + hvd.rank(), 2.5, 2, True, np.float32(3)]
    expected = [
        sum(np.arange(3) + rank for rank in range(size)).astype(np.float32),
        np.float32(2.5 * size),
        np.int32(2 * size),
        True,
    ]
    found = hvd.allreduce(tree, op=hvd.Sum)
    for one, other in zip(found, [*expected, np.float32(3 * size)], strict=True):
        assert isinstance(one, jax.Array)
        np.testing.assert_array_equal(one, other)
    same(jax.jit(lambda: hvd.allreduce(tree, op=hvd.Sum))(), found)  # constants of a program


def test_results_are_arrays_of_their_own(hvd: Any) -> None:
    """Memory is not given to another result, or written to, while JAX has it: results of many sizes, kept and compared
    later."""
    sizes = [1, 1000, 5000, 300_000, 300_000]
    kept = [hvd.allreduce(jnp.full(size, float(step + hvd.rank())), op=hvd.Max) for step in range(4) for size in sizes]
    views = [jnp.reshape(each, (1, -1)) for each in kept]
    for place, (one, view) in enumerate(zip(kept, views, strict=True)):
        assert (np.asarray(one) == place // len(sizes) + hvd.size() - 1).all()
        assert (np.asarray(view) == place // len(sizes) + hvd.size() - 1).all()


def test_the_operand_of_a_compiled_call_stays(hvd: Any) -> None:
    """The call replaces its operand in place; XLA copies what the program goes on to use, and what it was given."""
    rank = hvd.rank()
    total = sum(np.arange(20_000.0) + each for each in range(hvd.size()))

    @jax.jit
    def both(x: Any) -> Any:
        y = x * 1
        return x, y, hvd.allreduce(y, op=hvd.Sum), hvd.allreduce([x, x + 0], op=hvd.Sum), hvd.broadcast(y, 0)

    x = jnp.arange(20_000.0) + rank
    for _ in range(3):
        same_x, y, summed, group, root = both(x)
        for one in (x, same_x, y):
            np.testing.assert_array_equal(one, np.arange(20_000.0) + rank)
        for one in (summed, *group):
            np.testing.assert_array_equal(one, total)
        np.testing.assert_array_equal(root, np.arange(20_000.0))


def test_rows(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    everyone = [of_rank(each) for each in range(size)]
    uneven = [of_rank(each, (each + 1, 2)) for each in range(size)]
    rows = [each + 1 for each in range(size)]
    for gather, scatter in zip(each(hvd.allgather), each(lambda x: hvd.reducescatter(x, op=hvd.Sum)), strict=True):
        same(gather(everyone[rank]), jnp.concatenate(everyone))
        same(
            gather({"a": everyone[rank], "b": [everyone[rank] * 2]}),
            {"a": jnp.concatenate(everyone), "b": [jnp.concatenate(everyone) * 2]},
        )
        same(scatter(everyone[rank]), jnp.array_split(sum(everyone), size)[rank])
        same(scatter([everyone[rank]])[0], jnp.array_split(sum(everyone), size)[rank])
    same(hvd.allgather(uneven[rank]), jnp.concatenate(uneven))
    for gather in each(lambda x: hvd.allgather(x, rows=rows)):
        same(gather(uneven[rank]), jnp.concatenate(uneven))
    same(hvd.grouped_allgather([uneven[rank]])[0], jnp.concatenate(uneven))
    same(hvd.grouped_reducescatter([everyone[rank]], op=hvd.Sum)[0], jnp.array_split(sum(everyone), size)[rank])


def test_broadcast(hvd: Any) -> None:
    rank, root = hvd.rank(), hvd.size() - 1
    for run in each(lambda x: hvd.broadcast(x, root)):
        same(
            run({"a": of_rank(rank), "b": of_rank(rank, (2,), "bool")}),
            {"a": of_rank(root), "b": of_rank(root, (2,), "bool")},
        )
        same(run(of_rank(rank, (), "bfloat16")), of_rank(root, (), "bfloat16"))


def test_alltoall(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    mine = jnp.arange(2 * size) + 100 * rank
    for run in each(hvd.alltoall):
        same(run(mine), jnp.concatenate([jnp.arange(2 * rank, 2 * rank + 2) + 100 * peer for peer in range(size)]))
    splits = list(range(size))  # rank r gets r rows of everybody
    mine = jnp.arange(sum(splits)) + 100 * rank
    expected = jnp.concatenate([jnp.arange(rank) + rank * (rank - 1) // 2 + 100 * peer for peer in range(size)])
    found, received = hvd.alltoall(mine, splits)
    same([found, received], [expected, jnp.full(size, rank, jnp.int32)])
    found, received = jax.jit(lambda x: hvd.alltoall(x, splits, rows=[rank] * size))(mine)
    same([found, received], [expected, jnp.full(size, rank, jnp.int32)])


def test_compression(hvd: Any) -> None:

    class Halved(hvd.Compression.none):  # type: ignore[misc,name-defined]
        @staticmethod
        def compress(tensor: Any) -> tuple[Any, Any]:
            return tensor / 2, tensor.dtype

        @staticmethod
        def decompress(tensor: Any, context: Any) -> Any:
            return (tensor * 2).astype(context)

    x = of_rank(hvd.rank())
    total = sum(of_rank(rank) for rank in range(hvd.size()))
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16, Halved):
        for run in each(lambda t, c=compression: hvd.allreduce(t, op=hvd.Sum, compression=c)):
            same(run([x, x * 2]), [total, total * 2])
            same(run(x), total)
        for run in each(lambda t, c=compression: hvd.reducescatter(t, op=hvd.Sum, compression=c)):
            same(run(x), jnp.array_split(total, hvd.size())[hvd.rank()])


@pytest.mark.mpi(min_size=2)
def test_process_sets(hvd: Any) -> None:
    last = hvd.add_process_set([hvd.size() - 2, hvd.size() - 1])
    if last.included():
        for run in each(
            lambda x: (
                hvd.allreduce(x, op=hvd.Sum, process_set=last),
                hvd.broadcast(x, hvd.size() - 1, process_set=last),
            )
        ):
            total, root = run(of_rank(hvd.rank()))
            same(total, of_rank(hvd.size() - 2) + of_rank(hvd.size() - 1))
            same(root, of_rank(hvd.size() - 1))
    else:
        with pytest.raises(InvalidArgumentError, match="not in"):
            hvd.allreduce(of_rank(0), process_set=last)
    hvd.barrier()
    hvd.remove_process_set(last)


def test_eager_and_compiled_calls_keep_the_programs_order(hvd: Any) -> None:
    """Nothing here waits for a result: an eager call must not overtake a compiled one of the same shape."""
    step = jax.jit(lambda x: hvd.allreduce(jnp.cumsum(x), op=hvd.Max))
    other = jax.jit(lambda x: (hvd.barrier(), hvd.allreduce(x * 3, op=hvd.Max))[1])
    x = jnp.full(100_000, 1.0 + hvd.rank())
    for _ in range(5):
        compiled, eager, second = step(x), hvd.allreduce(x * 2, op=hvd.Max), other(x)
        assert float(compiled[0]) == hvd.size()
        assert float(eager[0]) == 2 * hvd.size()
        assert float(second[0]) == 3 * hvd.size()


@pytest.mark.parametrize("ordered", (True, False))
def test_independent_calls_of_one_program_do_not_change_places(hvd: Any, ordered: bool) -> None:
    """Also those of one name, in one function."""

    @jax.jit
    def program(xs: Any) -> Any:
        inner = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Max))
        return [inner(x * weight) for weight, x in enumerate(xs) if ordered], [
            hvd.allreduce(x, op=hvd.Max, name="of one name", ordered=ordered) for x in xs
        ]

    xs = [jnp.full(4096, float(10 * place + hvd.rank())) for place in range(12)]
    for _ in range(5):
        weighted, plain = program(xs)
        top = [10 * place + hvd.size() - 1 for place in range(12)]
        assert [float(each[0]) for each in plain] == top
        assert [float(each[0]) for each in weighted] == [weight * each for weight, each in enumerate(top) if ordered]


@pytest.mark.skipif(jax.__version_info__ < (0, 5), reason="64-bit types are a context of their own")
def test_wide_types(hvd: Any) -> None:
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        for dtype in ("float64", "int64", "complex128"):
            for run in each(lambda x: hvd.allreduce([x, x[0]], op=hvd.Sum)):
                everyone = [of_rank(rank, dtype=dtype) for rank in range(hvd.size())]
                same(run(everyone[hvd.rank()])[0], sum(everyone[1:], everyone[0]))


class Foreign:
    """Another framework's tensor, which can do nothing but DLPack; on the meta device not even that."""

    def __init__(self, array: Any, device: str = "cpu") -> None:
        self.array, self.device = array, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def test_other_frameworks_tensors(hvd: Any) -> None:
    for tree in ({"a": Foreign(np.full((2, 3), hvd.rank(), np.float32).T)}, {"a": jnp.full((3, 2), float(hvd.rank()))}):
        found = hvd.allreduce(tree, op=hvd.Max)["a"]
        assert isinstance(found, jax.Array) and found.tolist() == [[hvd.size() - 1.0] * 2] * 3
    fixed = np.arange(3.0, dtype=np.float32)
    fixed.flags.writeable = False
    for array in (np.arange(6.0, dtype=np.float32)[::2] / 2, fixed):  # JAX takes neither by itself
        assert hvd.allreduce(Foreign(array), op=hvd.Max).tolist() == [0.0, 1.0, 2.0]
    constant = Foreign(np.arange(2.0, dtype=np.float32))
    assert jax.jit(lambda x: hvd.allreduce([x, constant])[1])(jnp.ones(1)).tolist() == [0.0, 1.0]


# ---- mistakes


def refusals(hvd: Any) -> dict[str, tuple[type[Exception], str, Any]]:
    x = jnp.ones(4)
    gone = x + 1
    gone.delete()
    return {
        "no array": (InvalidTypeError, r"\['a'\]\[1\].*str", lambda: hvd.allreduce({"a": [x, "text"]})),
        "no elements": (
            InvalidTypeError,
            r"\['a'\].* on meta.*to_empty",
            lambda: hvd.allreduce({"a": Foreign(np.ones(1), "meta")}),
        ),
        "random keys": (InvalidTypeError, "key_data", lambda: hvd.allreduce(jax.random.key(0))),
        "deleted": (InvalidArgumentError, "deleted", lambda: hvd.allreduce(gone)),
        "dtype": (InvalidTypeError, "float8", lambda: hvd.allreduce(x.astype(jnp.float8_e4m3fn))),
        "average and op": (InvalidArgumentError, "average", lambda: hvd.allreduce(x, average=True, op=hvd.Sum)),
        "nameless": (InvalidArgumentError, "name", lambda: hvd.allreduce(x, ordered=False)),
        "a root": (InvalidArgumentError, "root_rank", lambda: hvd.broadcast(x, 99)),
        "0-d": (InvalidArgumentError, "0-d", lambda: hvd.allgather(jnp.float32(1))),
        "rows": (InvalidArgumentError, "rows", lambda: hvd.allgather(x, rows=[5] * hvd.size())),
        "splits": (InvalidArgumentError, "splits", lambda: hvd.alltoall(x, splits=[3] * hvd.size())),
        "splits in jit": (
            InvalidArgumentError,
            "rows",
            lambda: jax.jit(lambda x: hvd.alltoall(x, [4] + [0] * (hvd.size() - 1)))(x),
        ),
        "no list": (InvalidTypeError, "list", lambda: hvd.grouped_allreduce(x)),
        "Adasum in vmap": (
            InvalidArgumentError,
            "Adasum",
            lambda: jax.vmap(lambda x: hvd.allreduce(x, op=hvd.Adasum))(x[None]),
        ),
        "join in jit": (InvalidArgumentError, "jit", lambda: jax.jit(lambda x: (hvd.join(), x)[1])(x)),
        "objects in jit": (InvalidArgumentError, "jit", lambda: jax.jit(lambda x: (hvd.broadcast_object(1), x)[1])(x)),
        "parameters in jit": (InvalidArgumentError, "jit", lambda: jax.jit(hvd.broadcast_parameters)(x)),
    }


def test_refusals(hvd: Any) -> None:
    for what, (kind, text, call) in refusals(hvd).items():
        with pytest.raises(kind, match=text):
            call()
        assert float(hvd.allreduce(jnp.float32(hvd.rank()), op=hvd.Max)) == hvd.size() - 1, what


@pytest.mark.mpi(min_size=2)
def test_one_rank_refuses_and_all_hear_of_it(hvd: Any) -> None:
    with pytest.raises((InvalidTypeError, MismatchError), match=r"float8|refused"):
        hvd.allreduce(jnp.ones(3, jnp.float8_e4m3fn if hvd.rank() == 0 else jnp.float32))
    assert float(hvd.allreduce(jnp.float32(1), op=hvd.Sum)) == hvd.size()


@pytest.mark.parametrize("ordered", (True, False))
@pytest.mark.mpi(min_size=2)
def test_a_mismatch_is_an_error_on_every_rank(hvd: Any, ordered: bool) -> None:
    mine = jnp.ones(3 + hvd.rank() % 2)
    with pytest.raises(MismatchError, match="shape"):
        hvd.allreduce(mine, name="eager mismatch")
    with pytest.raises(drifted(), match=r"MismatchError: rank .* disagree .*shape"):
        jax.block_until_ready(jax.jit(lambda x: hvd.allreduce(x, name="compiled mismatch", ordered=ordered))(mine))
    # Tensors that are packed, and of the same length together.
    pair = [jnp.ones(2 + hvd.rank() % 2), jnp.ones(3 - hvd.rank() % 2)]
    with pytest.raises(drifted(), match="MismatchError"):
        jax.block_until_ready(jax.jit(lambda t: hvd.allreduce(t, name="packed mismatch", ordered=ordered))(pair))
    with pytest.raises(drifted(), match=r"MismatchError.*rows"):
        jax.block_until_ready(jax.jit(hvd.allgather)(jnp.ones(3 + hvd.rank())))
    assert float(hvd.allreduce(jnp.float32(1), op=hvd.Sum)) == hvd.size()
    assert float(jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))(jnp.float32(1))) == hvd.size()


@pytest.mark.mpi(min_size=2)
def test_a_program_that_has_failed_in_flight_is_nothing_to_later_calls(hvd: Any) -> None:
    x = jnp.ones((600 + hvd.rank() % 2, 600))
    with pytest.raises(drifted(), match="MismatchError"):
        failing = jax.jit(lambda x: hvd.allreduce(x @ x.T, name="fails in flight"))(x)  # raises in old versions of JAX
        assert float(hvd.allreduce(jnp.float32(1), op=hvd.Sum)) == hvd.size()
        jax.block_until_ready(failing)
    assert float(jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))(jnp.float32(1))) == hvd.size()


def drifted() -> Any:
    """What JAX raises when a compiled program fails."""
    return getattr(jax.errors, "JaxRuntimeError", RuntimeError)


def test_a_program_of_another_world_is_refused(hvd: Any) -> None:
    from dataclasses import replace

    from collectives.jax.collective_call import CollectiveCall, deserialize

    call = CollectiveCall("allreduce", hvd.size(), hvd.rank(), op="sum", parts=(((2,), (3, 1)),), rows=((1, 2),))
    assert deserialize(call.serialize([((5,), np.dtype(np.float32))])) == call
    with pytest.raises(InvalidArgumentError, match="clear_caches"):
        replace(call, size=hvd.size() + 1).run([np.ones(5, np.float32)])


def test_join(hvd: Any) -> None:
    for step in range(2 + hvd.rank()):
        total = hvd.allreduce(jnp.ones(3), op=hvd.Sum)
        assert float(total[0]) == sum(2 + rank > step for rank in range(hvd.size()))
    assert hvd.join() == hvd.size() - 1


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("collective", ["grouped_allreduce", "grouped_allgather", "grouped_reducescatter"])
def test_a_group_of_no_tensors_on_one_rank_is_an_error_on_every_rank(hvd: Any, collective: str, compiled: bool) -> None:
    tensors = [jnp.ones((6, 2))] if hvd.rank() else []
    call = jax.jit(getattr(hvd, collective)) if compiled else getattr(hvd, collective)
    assert jax.block_until_ready(call([])) == []
    if hvd.size() > 1:
        with pytest.raises(drifted() if compiled else MismatchError, match="disagree"):
            jax.block_until_ready(call(tensors))
            jax.effects_barrier()  # the results of no tensors are there before the call is over
    same(hvd.allreduce({"a": jnp.ones(2)}), {"a": jnp.ones(2)})


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_is_moved_in_programs_too(hvd: Any, dtype: str) -> None:
    rank, size = hvd.rank(), hvd.size()
    x = jnp.full((size, 2), rank + 1.0).astype(dtype)
    for run in (lambda function: function, jax.jit):
        gathered = run(lambda x: hvd.allgather(x[:1]))(x)
        assert gathered.dtype == x.dtype and gathered[:, 0].tolist() == [source + 1.0 for source in range(size)]
        assert run(lambda x: hvd.broadcast(x, size - 1))(x).tolist() == [[float(size)] * 2] * size
        assert run(lambda x: hvd.alltoall(x))(x)[:, 1].tolist() == [source + 1.0 for source in range(size)]
