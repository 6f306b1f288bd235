"""Gradients through the collectives, over ranks: compared with finite differences of the sum of all ranks' losses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.adapters import differences

Function = Callable[..., Sequence[Any]]


def _generator(hvd: Any, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * seed + hvd.rank())


def _number(hvd: Any, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Distinct on every rank, and away from zero."""
    drawn = torch.randn(shape, generator=_generator(hvd, seed + 1), dtype=dtype)
    return drawn + torch.sgn(drawn) / 2


def _loss(outputs: Sequence[Any], weights: Sequence[Any]) -> Any:
    return sum((weight.conj() * y).real.sum() for weight, y in zip(weights, outputs, strict=True))


def check(hvd: Any, function: Function, *inputs: torch.Tensor, process_set: Any = None, again: bool = False) -> None:
    """Compare what backward gives with central differences.

    Args:
        function: of the inputs; a sequence of outputs.
        inputs: this rank's, in float64 or complex128.
        process_set: whose ranks call this.
        again: the function itself asks for gradients.
    """
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    weights = [_number(hvd, *y.shape, seed=77 + i, dtype=y.dtype) for i, y in enumerate(outputs)]
    assert all(y.requires_grad for y in outputs)
    found = [gradient.numpy() for gradient in torch.autograd.grad(_loss(outputs, weights), leaves)]

    def loss(moved: list[Any]) -> float:
        tensors = [torch.from_numpy(x).requires_grad_(again) for x in moved]
        return float(_loss(function(*tensors), weights).detach())

    differences.compare(found, [x.numpy() for x in inputs], loss, 4, 1e-5 if again else 1e-6, process_set)


OPS = ("Sum", "Average", "Min", "Max", "Product", "Adasum")


@pytest.mark.parametrize("op", OPS)
def test_allreduce(hvd: Any, op: str) -> None:
    """By itself, scaled and named, and in a group."""
    how = {"op": getattr(hvd, op)}

    def function(x: Any, y: Any) -> Sequence[Any]:
        scaled = hvd.allreduce(x, name=f"scaled {op}", prescale_factor=0.5, postscale_factor=-3.0, **how)
        return [hvd.allreduce(x, **how), scaled, *hvd.grouped_allreduce([x, y], **how)]

    check(hvd, function, _number(hvd, 2, 3), _number(hvd, 2, 1, seed=1))


def test_allreduce_of_noncontiguous_and_scalar_tensors(hvd: Any) -> None:
    check(hvd, lambda x: [hvd.allreduce(x.t(), average=False)], _number(hvd, 2, 3))
    check(hvd, lambda x: [hvd.allreduce(x, op=hvd.Product)], _number(hvd))


def test_allreduce_of_complex_tensors(hvd: Any) -> None:
    for op in (hvd.Average, hvd.Product):
        check(
            hvd,
            lambda x, op=op: [hvd.allreduce(x, op=op, prescale_factor=2.0)],
            _number(hvd, 2, dtype=torch.complex128),
        )


def test_product_with_zeros(hvd: Any) -> None:
    x = torch.tensor([2.0, 3.0, 0.0, 5.0], dtype=torch.float64) + hvd.rank()
    x[1] = 0.0 if hvd.rank() == 0 else 2.0
    x[2] = 0.0  # on every rank: with three ranks or more no gradient is left
    check(hvd, lambda x: [hvd.allreduce(x, op=hvd.Product)], x)
    leaf = x.clone().requires_grad_()
    hvd.allreduce(leaf, op=hvd.Product).sum().backward()
    assert leaf.grad[1].item() == (hvd.size() * 2.0 ** (hvd.size() - 1) if hvd.rank() == 0 else 0.0)
    assert torch.isfinite(leaf.grad).all()


def test_equal_extremes_share_the_gradient(hvd: Any) -> None:
    size, rank = hvd.size(), hvd.rank()
    # The first is equal everywhere, the second largest on rank 0 alone, the third on all ranks but the last.
    x = torch.tensor(
        [1.0, 5.0 if rank == 0 else 2.0, 0.0 if rank == size - 1 and size > 1 else 3.0], dtype=torch.float64
    )
    leaf = x.requires_grad_()
    hvd.allreduce(leaf, op=hvd.Max).mul(torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    sharers = max(size - 1, 1)
    expected = [1.0, 2.0 * size if rank == 0 else 0.0, 0.0 if rank == size - 1 and size > 1 else 3.0 * size / sharers]
    torch.testing.assert_close(leaf.grad, torch.tensor(expected, dtype=torch.float64))


def test_adasum_with_a_vector_of_zeros(hvd: Any) -> None:
    leaf = (torch.zeros(3, dtype=torch.float64) if hvd.rank() == 0 else _number(hvd, 3)).requires_grad_()
    hvd.allreduce(leaf, op=hvd.Adasum).sum().backward()
    assert torch.isfinite(leaf.grad).all()
    if hvd.size() == 2 and hvd.rank() == 1:  # adasum(0, b) = b
        assert leaf.grad.tolist() == [2.0] * 3


def test_allgather(hvd: Any) -> None:
    """Of rows that are equally many or not, by themselves and in a group."""
    check(
        hvd,
        lambda x, y, z: [hvd.allgather(x), hvd.allgather(y), *hvd.grouped_allgather([x, y, z], name="gathered")],
        _number(hvd, 2),
        _number(hvd, (2 * hvd.rank()) % 3, 2, seed=1),
        _number(hvd, 1, 3, seed=2),
    )


def test_broadcast(hvd: Any) -> None:
    for root in range(hvd.size()):
        check(hvd, lambda x, root=root: [hvd.broadcast(x, root)], _number(hvd, 3))


@pytest.mark.parametrize("kind", ["none", "list", "tensor"])
def test_alltoall(hvd: Any, kind: str) -> None:
    size, rank = hvd.size(), hvd.rank()
    if kind == "none":
        check(hvd, lambda x: [hvd.alltoall(x)], _number(hvd, size * (rank % 2 + 1), 2))  # ranks differ in rows
        return
    given = [(rank + peer) % 3 for peer in range(size)]
    splits = given if kind == "list" else torch.tensor(given, dtype=torch.int32)
    check(hvd, lambda x: [hvd.alltoall(x, splits)[0]], _number(hvd, sum(given)))


@pytest.mark.parametrize("op", OPS[:-1])
def test_reducescatter(hvd: Any, op: str) -> None:
    how = {"op": getattr(hvd, op)}
    check(
        hvd,
        lambda x, y: [
            hvd.reducescatter(x, prescale_factor=2.0, postscale_factor=0.25, **how),
            *hvd.grouped_reducescatter([x, y], **how),
        ],
        _number(hvd, hvd.size() + 1, 2),
        _number(hvd, hvd.size(), seed=1),
    )


def test_in_a_process_set(hvd: Any) -> None:
    some = hvd.add_process_set(list(range(hvd.size()))[-2:])
    if some.included():

        def function(x: Any, rows: Any) -> Sequence[Any]:
            return [
                hvd.allreduce(x, process_set=some),
                hvd.broadcast(x, hvd.size() - 1, process_set=some),
                hvd.allgather(rows, process_set=some),
                hvd.reducescatter(x, op=hvd.Min, process_set=some),
            ]

        check(hvd, function, _number(hvd, 3), _number(hvd, hvd.rank() + 1, seed=1), process_set=some)
    hvd.remove_process_set(some)


@pytest.mark.parametrize("op", ["Sum", "Product", "Max", "Adasum"])
def test_differentiated_twice(hvd: Any, op: str) -> None:
    def gradient(x: Any) -> Sequence[Any]:
        y = hvd.allreduce(x, op=getattr(hvd, op))
        return torch.autograd.grad((y**3 * (1 + hvd.rank())).sum(), x, create_graph=True)

    check(hvd, gradient, _number(hvd, 3), again=True)


def test_the_others_differentiated_twice(hvd: Any) -> None:
    def through(run: Callable[[Any], Any]) -> Function:
        return lambda x: torch.autograd.grad((run(x) ** 3).sum(), x, create_graph=True)

    rank, size = hvd.rank(), hvd.size()
    check(hvd, through(lambda x: hvd.allgather(x)), _number(hvd, rank + 1), again=True)
    check(hvd, through(lambda x: hvd.broadcast(x, size - 1)), _number(hvd, 2), again=True)
    check(hvd, through(lambda x: hvd.alltoall(x, [1] * size)[0]), _number(hvd, size), again=True)
    check(hvd, through(lambda x: hvd.reducescatter(x, op=hvd.Average)), _number(hvd, 3), again=True)
    check(hvd, through(lambda x: hvd.reducescatter(x, op=hvd.Product)), _number(hvd, 3), again=True)


def test_halves(hvd: Any) -> None:
    size, rank = hvd.size(), hvd.rank()
    for dtype in (torch.float16, torch.bfloat16):
        for op in (hvd.Sum, hvd.Average, hvd.Max, hvd.Product, hvd.Adasum):
            x = torch.full((3,), 1.0 + rank, dtype=dtype, requires_grad=True)
            y = hvd.allreduce(x, op=op)
            y.sum().backward()
            assert x.grad.dtype == y.dtype == dtype
            if op is hvd.Sum:
                assert x.grad.tolist() == [size] * 3
            if op is hvd.Max:
                assert x.grad.tolist() == [size if rank == size - 1 else 0] * 3


def test_gradients_travel_compressed(hvd: Any) -> None:
    fine = 1 + 2**-20  # which float16 rounds away
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        x = torch.full((4,), fine * (hvd.rank() + 1), requires_grad=True)
        y = hvd.allreduce(x, op=hvd.Sum, compression=compression)
        total = hvd.size() * (hvd.size() + 1) / 2
        assert y.dtype == torch.float32 and y.tolist() == [total] * 4
        (y * fine).sum().backward()
        assert x.grad.dtype == torch.float32 and x.grad.tolist() == [float(hvd.size())] * 4
        z = hvd.reducescatter(x, op=hvd.Sum, compression=compression)
        assert z.tolist() == [total] * len(z)
        z.sum().backward()
        assert x.grad.tolist() == [hvd.size() + 1.0] * 4


class Rooted:
    """Travels as its square root: a compressor that autograd has to look into."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        return tensor.sqrt(), None

    @staticmethod
    def decompress(tensor: Any, context: None) -> Any:
        return tensor**2


def test_through_a_compressor_of_the_callers(hvd: Any) -> None:
    check(hvd, lambda x: [hvd.allreduce(x, op=hvd.Sum, compression=Rooted)], _number(hvd, 3).abs())
    check(
        hvd,
        lambda *xs: hvd.grouped_allreduce(list(xs), compression=Rooted),
        _number(hvd, 2).abs(),
        _number(hvd, 1).abs(),
    )
    check(hvd, lambda x: [hvd.reducescatter(x, compression=Rooted())], _number(hvd, 3).abs())
    plain = hvd.allreduce(torch.full((2,), 4.0), op=hvd.Sum, compression=Rooted)
    assert plain.tolist() == [4.0 * hvd.size() ** 2] * 2


def test_a_group_of_which_only_some_have_gradients(hvd: Any) -> None:
    whole = torch.arange(3) + hvd.rank()
    x, constant = torch.ones(2, requires_grad=True), torch.ones(2)
    sums = hvd.grouped_allreduce([whole, x, constant], op=hvd.Sum)
    assert sums[0].tolist() == [hvd.size() * i + sum(range(hvd.size())) for i in range(3)]
    assert not sums[0].requires_grad
    sums[1].sum().backward()
    assert x.grad.tolist() == [hvd.size()] * 2
    gathered = hvd.grouped_allgather([whole, x])
    gathered[1].sum().backward()
    assert x.grad.tolist() == [2 * hvd.size()] * 2


def test_ranks_need_not_agree_on_which_tensors_need_gradients(hvd: Any) -> None:
    """A group in which each rank has another one frozen."""
    pair = [torch.ones(2, requires_grad=(hvd.rank() + i) % 2 == 0) for i in range(2)]
    sum(y.sum() for y in hvd.grouped_allreduce(pair, op=hvd.Sum)).backward()
    for i, x in enumerate(pair):
        assert (x.grad is not None) == ((hvd.rank() + i) % 2 == 0)
        assert x.grad is None or x.grad.tolist() == [hvd.size()] * 2


def test_each_output_of_a_group_may_have_a_backward_pass_of_its_own(hvd: Any) -> None:
    """As with Horovod, although a graph is kept for one pass."""
    xs = [torch.full((hvd.size(),), float(i), requires_grad=True) for i in range(2)]
    for function in (hvd.grouped_allreduce, hvd.grouped_reducescatter, hvd.grouped_allgather):
        how = {} if function is hvd.grouped_allgather else {"op": hvd.Sum}
        for weight, y in enumerate(function(xs, **how), start=1):
            (weight * y).sum().backward()
        factor = 1 if function is hvd.grouped_reducescatter else hvd.size()
        for weight, x in enumerate(xs, start=1):
            assert x.grad is not None and x.grad.tolist() == [weight * factor] * hvd.size()
            x.grad = None


def test_no_graph_where_none_is_wanted(hvd: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not hvd.allreduce(x).requires_grad
        assert not hvd.grouped_allgather([x])[0].requires_grad
    assert not hvd.allreduce(torch.ones(2)).requires_grad
    assert not hvd.synchronize(hvd.allreduce_async(x)).requires_grad
    whole = torch.ones(2, dtype=torch.int64)
    assert not hvd.broadcast(whole, 0).requires_grad


def test_backward_passes_pair_up_by_name(hvd: Any) -> None:
    """Two at a time, in threads that begin in different orders on different ranks."""
    xs = [torch.full((2,), float(i + 1), requires_grad=True) for i in range(2)]
    ys = [hvd.allreduce(x, op=hvd.Sum) for x in xs]
    started = threading.Event()

    def run(i: int, waits: bool) -> None:
        if waits:
            started.wait(20)
        else:
            ys[i].register_hook(lambda gradient: started.set())
        (ys[i].sum() * (i + 1) * (hvd.rank() + 1)).backward()

    first = hvd.rank() % 2
    threads = [threading.Thread(target=run, args=(i, i != first)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    total = hvd.size() * (hvd.size() + 1) / 2
    for i, x in enumerate(xs):
        assert x.grad.tolist() == [total * (i + 1)] * 2


def test_an_output_that_one_rank_leaves_out(hvd: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    first, second = hvd.allreduce(x, op=hvd.Sum), hvd.allreduce(2 * x, op=hvd.Sum)
    with pytest.raises(RuntimeError, match="gradient"):
        # Rank 0's only gradient is of the first; the others begin with the second.
        (first if hvd.rank() == 0 else first + second).sum().backward()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


# ---- Horovod's, where COLLECTIVES_GRADIENTS says so


def given(hvd: Any, rank: int, *shape: int) -> torch.Tensor:
    """A tensor of a rank's, known to all."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank + 5), dtype=torch.float64) + rank


COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


def back(compiled: bool, function: Callable[[Any], Any], x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        (torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function)(leaf).backward(
            gradient
        )
    assert leaf.grad is not None
    return leaf.grad


@COMPILED
def test_horovods_gradient_of_allgather_and_broadcast_is_the_mean(hvd: Any, as_horovod: None, compiled: bool) -> None:
    size, rank = hvd.size(), hvd.rank()
    for rows in ([1] * size, [(2 * peer) % 3 for peer in range(size)])[compiled:]:  # compiling takes seconds
        gradients = [given(hvd, peer, sum(rows), 2) for peer in range(size)]
        found = back(compiled, hvd.allgather, torch.ones(rows[rank], 2, dtype=torch.float64), gradients[rank])
        torch.testing.assert_close(found, (sum(gradients) / size)[sum(rows[:rank]) :][: rows[rank]])
    gradients = [given(hvd, peer, 3) for peer in range(size)]
    found = back(compiled, lambda x: hvd.broadcast(x, size - 1), torch.ones(3, dtype=torch.float64), gradients[rank])
    torch.testing.assert_close(found, sum(gradients) / size * (rank == size - 1))


@COMPILED
@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_horovods_gradient_of_reducescatter_is_size_times_the_adjoint(
    hvd: Any, as_horovod: None, op: str, compiled: bool
) -> None:
    size, rank = hvd.size(), hvd.rank()
    gradients = [given(hvd, peer, 2) for peer in range(size)]
    how = {"op": getattr(hvd, op), "prescale_factor": 0.5, "postscale_factor": 3.0}
    found = back(compiled, lambda x: hvd.reducescatter(x, **how), given(hvd, rank, 2 * size), gradients[rank])
    torch.testing.assert_close(found, torch.cat(gradients) * 1.5 * (size if op == "Sum" else 1))


@pytest.mark.parametrize(("op", "compiled"), [*((op, False) for op in OPS), ("Average", True), ("Max", True)])
def test_horovods_gradient_of_allreduce_is_reduced_by_the_same_operation(
    hvd: Any, as_horovod: None, op: str, compiled: bool
) -> None:
    how = {"op": getattr(hvd, op), "prescale_factor": 0.5, "postscale_factor": 3.0}
    gradient = given(hvd, hvd.rank(), 4)
    found = back(compiled, lambda x: hvd.allreduce(x, **how), given(hvd, hvd.rank() + 9, 4), gradient)
    torch.testing.assert_close(found, hvd.allreduce(gradient, **how))


def test_horovods_gradients_of_groups(hvd: Any, as_horovod: None) -> None:
    size, rank = hvd.size(), hvd.rank()
    x = torch.ones(size, requires_grad=True)
    sum(y.sum() for y in hvd.grouped_allgather([x, x])).backward()
    assert x.grad.tolist() == [2.0] * size
    sum(y.sum() for y in hvd.grouped_reducescatter([x, x], op=hvd.Sum)).backward()
    assert x.grad.tolist() == [2.0 + 2.0 * size] * size
    sum(((rank + 1) * y).sum() for y in hvd.grouped_allreduce([x, x], op=hvd.Max)).backward()
    assert x.grad.tolist() == [2.0 + 4.0 * size] * size


def test_horovods_gradients_in_a_process_set(hvd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    some = hvd.add_process_set(range(hvd.size())[-2:])
    if some.included():
        monkeypatch.setattr(some.world(), "config", replace(some.world().config, gradients="horovod"))
        x = torch.ones(2, requires_grad=True)
        hvd.allgather(x, process_set=some).sum().backward()
        assert x.grad.tolist() == [1.0] * 2
        hvd.broadcast(x, hvd.size() - 1, process_set=some).sum().backward()
        assert x.grad.tolist() == [1.0 + (hvd.rank() == hvd.size() - 1)] * 2
    hvd.remove_process_set(some)


def test_horovods_gradient_of_a_gradient(hvd: Any, as_horovod: None) -> None:
    """Of allgather: the mean, whose own adjoint is exact, and then the mean once more."""
    x = torch.full((1,), 2.0, requires_grad=True)
    (first,) = torch.autograd.grad((hvd.allgather(x) ** 2).sum(), x, create_graph=True)
    assert first.tolist() == [4.0]
    first.sum().backward()
    assert x.grad.item() == pytest.approx(2.0 / hvd.size())
