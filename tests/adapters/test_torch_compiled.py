"""Collectives in functions compiled as one graph: same results and gradients as without, nothing dropped, nothing
exchanged."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from collectives import MismatchError  # noqa: E402
from collectives.base.reduce_op import Op  # noqa: E402
from collectives.torch.compiled import untraced  # noqa: E402

EFFECTS = hasattr(torch.library, "_register_effectful_op")
REDUCTIONS = (Op.SUM, Op.AVERAGE, Op.MIN, Op.MAX, Op.PRODUCT)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def compile_whole(function: Callable[..., Any], backend: Any = "aot_eager", **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend=backend, fullgraph=True, **options)  # type: ignore[no-any-return]


def same_as_eager(inputs: Sequence[Any], function: Callable[..., Any], weight: float) -> None:
    """Of a function that gives a list of tensors: equal results, and equal gradients of all inputs for a loss that
    differs per rank."""
    found = []
    for run in (function, compile_whole(function)):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        results = run(*leaves)
        loss = sum(
            (result.double() * torch.arange(1.0, result.numel() + 1).reshape(result.shape)).sum() for result in results
        )
        (weight * loss).backward()
        found.append(([result.detach() for result in results], [leaf.grad for leaf in leaves]))
    torch.testing.assert_close(found[1][0], found[0][0])
    torch.testing.assert_close(found[1][1], found[0][1])


class Halved:
    """A compressor of the user's own."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor.to(torch.float16), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        return tensor.to(context)


def test_reductions_and_their_gradients(hvd: Any) -> None:
    torch.manual_seed(hvd.rank())
    factors = {"prescale_factor": 0.5, "postscale_factor": 3.0}

    def function(*xs: Any) -> list[Any]:
        results = [
            hvd.allreduce(x.sin(), op=op, **factors) for x, op in zip(xs[:6], (*REDUCTIONS, Op.ADASUM), strict=True)
        ]
        return results + [
            hvd.reducescatter(x.sin(), op=op, **factors) for x, op in zip(xs[6:], REDUCTIONS, strict=True)
        ]

    same_as_eager([torch.rand(5, 3, dtype=torch.float64) + 0.5 for _ in range(11)], function, weight=1.0 + hvd.rank())


def test_moves_and_their_gradients(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(rank)
    splits = torch.arange(size) + (1 if rank == 0 else 0)

    def function(a: Any, b: Any, c: Any, d: Any) -> list[Any]:
        return [
            hvd.allgather(a.sin(), "rows"),
            hvd.alltoall(b.sin()),
            hvd.alltoall(c.sin(), splits)[0],
            hvd.broadcast(d.sin(), size - 1, "root"),
        ]

    inputs = [torch.rand(rank + 1, 2), torch.rand(2 * size, 3), torch.rand(int(splits.sum()), 3), torch.rand(3)]
    same_as_eager(inputs, function, weight=1.0 + rank)


def test_received_splits_are_a_result(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    x = torch.full((size * (rank + 1), 1), float(rank))
    for splits in ([rank + 1] * size, torch.full((size,), rank + 1, dtype=torch.int64)):
        rows, received = compile_whole(lambda x, splits=splits: hvd.alltoall(x, splits))(x)
        assert received.dtype is getattr(splits, "dtype", torch.int32)
        assert received.tolist() == [source + 1 for source in range(size)]
        assert rows.flatten().tolist() == [float(source) for source in range(size) for _ in range(source + 1)]


def test_groups(hvd: Any) -> None:
    torch.manual_seed(hvd.rank())
    same_as_eager(
        [torch.rand(4, 2), torch.rand(4)],
        lambda a, b: [
            *hvd.grouped_allreduce([a.sin(), b.cos()], name="pair"),
            *hvd.grouped_allreduce([a.sin(), b.cos()], op=hvd.Max),
            *hvd.grouped_allgather([a.sin(), b]),
            *hvd.grouped_reducescatter([a.sin(), b]),
        ],
        weight=1.0 + hvd.rank(),
    )


def test_compression_and_arguments_by_position(hvd: Any) -> None:
    torch.manual_seed(hvd.rank())
    same_as_eager(
        [torch.rand(6), torch.rand(6), torch.rand(6), torch.rand(6)],
        lambda a, b, c, d: [
            hvd.allreduce(a, compression=hvd.Compression.fp16),
            hvd.allreduce(b, None, "all", hvd.Compression.bf16, hvd.Sum, 0.5, 3.0),
            hvd.allreduce(b, average=False),
            hvd.allreduce(c, compression=Halved),
            hvd.grouped_allreduce([d], compression=Halved)[0],
            hvd.reducescatter(d, op=hvd.Sum, compression=hvd.Compression.fp16),
        ],
        weight=1.0 + hvd.rank(),
    )


def test_one_function_for_several_process_sets(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    even, alone = hvd.add_process_set(range(0, size, 2)), hvd.add_process_set([0])

    @compile_whole
    def function(x: Any, ranks: Any) -> Any:
        return hvd.reducescatter(hvd.allreduce(x, op=Op.SUM, process_set=ranks), op=Op.SUM, process_set=ranks)

    x = torch.full((4,), rank + 1.0)
    for group, members in ((hvd.global_process_set, range(size)), (even, range(0, size, 2)), (alone, [0])):
        if rank in members:
            expected = len(members) * sum(member + 1.0 for member in members)
            rows = len(np.array_split(range(4), len(members))[list(members).index(rank)])
            assert function(x, group).tolist() == [expected] * rows
    hvd.remove_process_set(even)
    hvd.remove_process_set(alone)


def uneven(hvd: Any) -> Callable[..., Any]:
    def function(x: Any, reads: bool) -> Any:
        first = hvd.allreduce(x, op=Op.SUM, name="first")
        second = hvd.allreduce(x * 2, op=Op.SUM, name="second")
        third = hvd.allgather(x * 3, name="third")
        return second + first + third.sum() if reads else x

    return function


def test_what_only_one_rank_reads_is_carried_out_by_all(hvd: Any) -> None:
    rank, total = hvd.rank(), hvd.size() * (hvd.size() - 1) / 2
    result = compile_whole(uneven(hvd))(torch.full((2,), float(rank)), rank == 0)
    assert result.tolist() == ([9 * total] * 2 if rank == 0 else [float(rank)] * 2)


def test_unnamed_operations_keep_the_order_of_the_program(hvd: Any) -> None:
    # Operations of one shape, which would pair up wrongly without a complaint; ranks differ in what depends on what.
    rank, size = hvd.rank(), hvd.size()

    def function(x: Any) -> Any:
        parts = [hvd.allreduce(x * factor, op=Op.SUM) for factor in (1, 10, 100, 1000)]
        return parts[rank % 4] if rank else torch.stack(parts)

    result = compile_whole(function)(torch.ones(3))
    factors = [1, 10, 100, 1000] if rank == 0 else [[1, 10, 100, 1000][rank % 4]]
    assert result.reshape(-1, 3).tolist() == [[float(size * factor)] * 3 for factor in factors]


def test_different_shapes_of_one_graph(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    graphs: list[Any] = []

    def count(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def function(x: Any) -> Any:
        return hvd.reducescatter(hvd.allreduce(x, op=Op.SUM), op=Op.SUM), hvd.allgather(x)

    run = compile_whole(function, backend=count, dynamic=True)
    for rows in (3, 4, 7, 8):
        part, everything = run(torch.full((rows, 2), float(rank)))
        assert part.shape == (len(np.array_split(range(rows), size)[rank]), 2)
        assert everything[:, 0].tolist() == [float(source) for source in range(size) for _ in range(rows)]
    assert len(graphs) == 1


def test_compiled_again_for_another_shape(hvd: Any) -> None:
    run = compile_whole(lambda x: (hvd.allreduce(x, op=Op.SUM) ** 2).sum(), dynamic=False)
    for rows in (2, 3, 2):
        x = torch.ones(rows, requires_grad=True)
        run(x).backward()
        assert x.grad.tolist() == [2.0 * hvd.size() ** 2] * rows


def test_in_place(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    x, y, z = torch.full((3,), float(rank)), torch.full((2,), float(rank)), torch.full((1,), float(rank))

    def function(x: Any, y: Any, z: Any) -> Any:
        hvd.broadcast_(y, size - 1)
        hvd.grouped_allreduce_([z], op=Op.SUM)
        return hvd.allreduce_(x, op=Op.MAX) + 1

    assert compile_whole(function)(x, y, z).tolist() == [float(size)] * 3
    assert x.tolist() == [size - 1.0] * 3 and y.tolist() == [size - 1.0] * 2 and z.tolist() == [size * (size - 1) / 2]


def test_asynchronous_forms_end_a_graph(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()

    begin, wait = untraced(hvd.allreduce_async), untraced(hvd.synchronize)

    def function(x: Any) -> Any:
        handle = begin(x * 2, op=Op.SUM, name="later")
        return wait(handle) + x.sin()

    expected = torch.full((2,), size * (size - 1.0)) + torch.full((2,), float(rank)).sin()
    torch.testing.assert_close(torch.compile(function, backend="aot_eager")(torch.full((2,), float(rank))), expected)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a graph ends here"):
        compile_whole(function)(torch.ones(2))


def test_a_mismatch_is_raised_and_the_next_call_works(hvd: Any) -> None:
    run = compile_whole(lambda x: hvd.allreduce(x, op=Op.SUM, name="clash"), dynamic=False)
    if hvd.size() > 1:
        with pytest.raises(MismatchError, match="clash"):
            run(torch.ones(2 + hvd.rank()))
    assert run(torch.ones(2)).tolist() == [hvd.size()] * 2


def test_operators_are_what_torch_expects(hvd: Any) -> None:
    size = hvd.size()
    x = torch.rand(2 * size, 3, requires_grad=True)
    reduces, where = ("average", None, 1.0, 1.0), (0, None, None)
    samples: dict[str, tuple[Any, ...]] = {
        "allreduce": (x, *reduces, None, *where),
        "grouped_allreduce": ([x, x * 2], *reduces, None, *where),
        "reducescatter": (x, *reduces, 2, *where),
        "allgather": (x, None, None, *where),
        "broadcast": (x, 0, None, *where),
        "alltoall": (x, None, None, None, size, *where),
    }
    adjoints = {
        "allgather": ([x.detach()], [], "allgather", None, None, 1.0, 1.0, 2, 0, 0),
        "broadcast": ([x.detach()], [], "broadcast", None, None, 1.0, 1.0, None, 0, 0),
        "allreduce": ([x.detach()], [x.detach()], "allreduce", "max", None, 1.0, 1.0, None, 0, 0),
        "reducescatter": ([x.detach()[:2]], [x.detach()], "reducescatter", "max", None, 1.0, 1.0, 2 * size, 0, 0),
    }
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for name, arguments in [*samples.items(), *(("adjoint", arguments) for arguments in adjoints.values())]:
        results = torch.library.opcheck(getattr(torch.ops.collectives, name).default, arguments, test_utils=checks)
        assert set(results.values()) == {"SUCCESS"}, (name, results)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler, and there is no g++ here")
def test_inductor(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    if size > 2:
        pytest.skip("every rank starts a C++ compiler: two ranks show it")

    def function(x: Any, w: Any) -> Any:
        mean, rows = hvd.allreduce(x @ w, name="mean"), hvd.allgather(x, "rows")
        return mean.square() + rows.sum() if rank == 0 or not EFFECTS else mean.square()

    x, w = torch.full((2, 3), rank + 1.0), torch.ones(3, 2, requires_grad=True)
    # Without what takes longest: to precompile headers, and to find out what vectors this processor has.
    cheaply = {"cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": False}
    config = torch._inductor.config
    with config.patch({key: value for key, value in cheaply.items() if hasattr(config, key.partition(".")[0])}):
        result = compile_whole(function, backend="inductor")(x, w)
        result.sum().backward()
    average = (size + 1) / 2
    gathered = 3 * size * (size + 1) if rank == 0 or not EFFECTS else 0
    torch.testing.assert_close(result.detach(), torch.full((2, 2), (3 * average) ** 2 + gathered))
    # Every rank's loss has the mean in it, squared: 2 * mean, summed over the ranks, times this rank's share of the
    # mean.
    torch.testing.assert_close(w.grad, torch.full((3, 2), 2 * 2 * 3 * average * (rank + 1)))
