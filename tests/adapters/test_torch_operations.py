"""The collectives of the PyTorch interface, with torch's types and Horovod's habits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from collectives.base.errors import CollectivesError, MismatchError

REAL = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]
MORE = [torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64]


def _ranks_sum(hvd: Any) -> int:
    return sum(rank + 1 for rank in range(hvd.size()))


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_allreduce_of_every_dtype(hvd: Any, dtype: torch.dtype) -> None:
    base = torch.arange(6).reshape(2, 3)
    x = ((base + 1) * (hvd.rank() + 1)).to(dtype)
    given = x.clone()
    total = ((base + 1) * _ranks_sum(hvd)).to(dtype)
    y = hvd.allreduce(x, op=hvd.Sum)
    assert type(y) is torch.Tensor and y.dtype == dtype and y.shape == x.shape
    assert torch.equal(y, total) and torch.equal(x, given)
    assert torch.equal(hvd.allreduce(x, op=hvd.Max), ((base + 1) * hvd.size()).to(dtype))
    assert torch.equal(hvd.allreduce_(x, op=hvd.Sum), total)
    assert torch.equal(x, total)


@pytest.mark.parametrize("dtype", MORE, ids=str)
def test_allgather_of_every_other_dtype(hvd: Any, dtype: torch.dtype) -> None:
    y = hvd.allgather(torch.tensor([hvd.rank(), 1]).to(dtype))
    assert y.dtype == dtype
    assert torch.equal(y, torch.tensor([[rank, 1] for rank in range(hvd.size())]).reshape(-1).to(dtype))


def test_average_is_the_default_and_average_decides_without_op(hvd: Any) -> None:
    x = torch.full((2,), float(hvd.rank()))
    mean, total = [(hvd.size() - 1) / 2] * 2, [float(sum(range(hvd.size())))] * 2
    assert (
        hvd.allreduce(x).tolist()
        == hvd.allreduce(x, True).tolist()
        == hvd.allreduce(x, op=hvd.Average).tolist()
        == mean
    )
    assert hvd.allreduce(x, False).tolist() == hvd.allreduce(x, average=False).tolist() == total
    assert hvd.synchronize(hvd.allreduce_async(x, False, "by position")).tolist() == total
    assert [y.tolist() for y in hvd.grouped_allreduce([x, x], average=False)] == [total, total]


def test_scale_factors(hvd: Any) -> None:
    x = torch.ones(3, dtype=torch.float64)
    assert hvd.allreduce(x, None, None, hvd.Compression.none, hvd.Sum, 0.5, 3.0).tolist() == [1.5 * hvd.size()] * 3
    assert hvd.allreduce_(x.clone(), op=hvd.Sum, prescale_factor=4.0).tolist() == [4.0 * hvd.size()] * 3


def test_op_together_with_average_is_a_value_error(hvd: Any) -> None:
    for function in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allreduce_async_):
        with pytest.raises(ValueError, match="either average or op"):
            function(torch.ones(1), average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match="either average or op"):
        hvd.grouped_allreduce([torch.ones(1)], average=False, op=hvd.Sum)
    with pytest.raises(TypeError, match="pass op=Sum"):
        hvd.allreduce(torch.ones(1), hvd.Sum)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def test_a_mistake_on_one_rank_is_an_error_on_all(hvd: Any) -> None:
    last = hvd.rank() == hvd.size() - 1
    x = torch.ones(2, requires_grad=True)
    mistakes = [
        lambda wrong: hvd.allreduce(x, average=True if wrong else None, op=hvd.Sum),
        lambda wrong: hvd.allreduce(x, op="sum" if wrong else hvd.Sum),
        lambda wrong: hvd.broadcast(x, 99 if wrong else 0),
        lambda wrong: hvd.alltoall(x.expand(hvd.size(), 2), [99] * hvd.size() if wrong else [1] * hvd.size()),
        lambda wrong: hvd.allgather(x[0] if wrong else x),
        lambda wrong: hvd.reducescatter(x, compression=object() if wrong else hvd.Compression.none),
        lambda wrong: hvd.allreduce(x.to_sparse() if wrong else x),
    ]
    for mistake in mistakes:
        with pytest.raises((ValueError, TypeError) if last else CollectivesError):
            mistake(last)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def test_memory_layouts(hvd: Any) -> None:
    size, rank = hvd.size(), hvd.rank()
    images = torch.arange(48.0).reshape(2, 4, 3, 2).to(memory_format=torch.channels_last) * (rank + 1)
    total = torch.arange(48.0).reshape(2, 4, 3, 2) * _ranks_sum(hvd)
    assert torch.equal(hvd.allreduce(images, op=hvd.Sum), total)
    assert torch.equal(hvd.allreduce_(images, op=hvd.Sum), total) and torch.equal(images, total)
    whole = torch.full((3, 3), float(rank))
    hvd.broadcast_(whole[:, 1], size - 1)
    hvd.allreduce_(whole.t()[2, 1:], op=hvd.Sum)
    ranks = sum(range(size))
    assert whole.tolist() == [[rank, size - 1, rank], [rank, size - 1, ranks], [rank, size - 1, ranks]]
    assert hvd.allreduce(torch.tensor(float(rank)), op=hvd.Max).shape == ()
    assert hvd.allreduce(torch.tensor(2.0), op=hvd.Sum).item() == 2.0 * size
    assert hvd.allreduce(torch.empty(0, 3)).shape == (0, 3)
    conjugated = torch.full((2,), 1 + 1j * (rank + 1)).conj()
    assert hvd.allreduce(conjugated, op=hvd.Sum).tolist() == [complex(size, -_ranks_sum(hvd))] * 2
    with pytest.raises(ValueError, match="do not share memory"):
        hvd.allreduce_(torch.ones(1).expand(3))


def test_parameters_and_leaves(hvd: Any) -> None:
    parameter = torch.nn.Parameter(torch.full((2,), float(hvd.rank())))
    assert hvd.broadcast_(parameter, hvd.size() - 1) is parameter
    assert parameter.tolist() == [hvd.size() - 1.0] * 2 and parameter.requires_grad and parameter.is_leaf
    assert hvd.synchronize(hvd.allreduce_async_(parameter, op=hvd.Sum)) is parameter
    out = hvd.allreduce(parameter.detach())
    assert type(out) is torch.Tensor and not out.requires_grad
    assert type(hvd.allreduce(parameter)) is torch.Tensor


def test_in_place_forms_tell_autograd(hvd: Any) -> None:
    """A tensor that was saved for backward and overwritten since is an error there, not a wrong gradient."""
    forms = [
        lambda t: hvd.allreduce_(t, op=hvd.Sum),
        lambda t: hvd.synchronize(hvd.allreduce_async_(t, op=hvd.Sum)),
        lambda t: hvd.grouped_allreduce_([t], op=hvd.Sum),
        lambda t: hvd.synchronize(hvd.grouped_allreduce_async_([t], op=hvd.Sum)),
        lambda t: hvd.broadcast_(t, 0),
        lambda t: hvd.synchronize(hvd.broadcast_async_(t, 0)),
    ]
    for form in forms:
        x, saved = torch.ones(2, requires_grad=True), torch.full((2,), 2.0)
        y = (x * saved).sum()
        form(saved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
    with torch.inference_mode():
        assert hvd.allreduce_(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def test_groups(hvd: Any) -> None:
    tensors = [
        torch.full((2,), float(hvd.rank())),
        torch.ones(3, dtype=torch.int64),
        torch.ones(1, dtype=torch.bfloat16),
    ]
    expected = [[float(sum(range(hvd.size())))] * 2, [hvd.size()] * 3, [float(hvd.size())]]
    assert [y.tolist() for y in hvd.grouped_allreduce(tensors, op=hvd.Sum)] == expected
    assert [
        y.tolist() for y in hvd.synchronize(hvd.grouped_allreduce_async(tensors, op=hvd.Sum, name="group"))
    ] == expected
    found = hvd.grouped_allreduce_(tensors, op=hvd.Sum)
    assert all(y is x for x, y in zip(tensors, found, strict=True))
    assert [y.tolist() for y in tensors] == expected
    gathered = hvd.grouped_allgather([torch.tensor([hvd.rank()]), torch.ones(hvd.rank())])
    assert gathered[0].tolist() == list(range(hvd.size())) and gathered[1].shape == (sum(range(hvd.size())),)
    assert hvd.synchronize(hvd.grouped_allgather_async((torch.ones(1, 2),)))[0].shape == (hvd.size(), 2)
    with pytest.raises(TypeError, match="list or tuple"):
        hvd.grouped_allreduce(torch.ones(2))


def test_compression(hvd: Any) -> None:
    x = torch.full((3,), 1 + 2**-20, dtype=torch.float32)
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        expected = [(1.0 if compression is not hvd.Compression.none else x[0].item()) * hvd.size()] * 3
        y = hvd.allreduce(x, compression=compression, op=hvd.Sum)
        assert y.dtype == torch.float32 and y.tolist() == pytest.approx(expected, rel=1e-9)
        (z,) = hvd.grouped_allreduce([x], compression=compression, op=hvd.Sum)
        assert torch.equal(y, z)
        rows = hvd.reducescatter(x, compression=compression, op=hvd.Sum)
        assert rows.dtype == torch.float32 and torch.equal(rows, y[: len(rows)])
        assert torch.equal(hvd.grouped_reducescatter([x], None, compression, hvd.Sum)[0], rows)


def test_allgather_and_broadcast(hvd: Any) -> None:
    size, rank = hvd.size(), hvd.rank()
    y = hvd.allgather(torch.full((rank, 2), float(rank)), "rows")
    assert y[:, 0].tolist() == [float(peer) for peer in range(size) for _ in range(peer)]
    assert torch.equal(hvd.synchronize(hvd.allgather_async(torch.tensor([rank]))), torch.arange(size))
    for root in range(size):
        x = torch.full((2,), float(rank))
        assert hvd.broadcast(x, root, f"from {root}").tolist() == [root] * 2
        assert x.tolist() == [rank] * 2
        assert hvd.broadcast_(x, root) is x and x.tolist() == [root] * 2
        handle = hvd.broadcast_async(torch.tensor([rank]), root_rank=root)
        assert hvd.synchronize(handle).item() == root


@pytest.mark.parametrize("kind", [torch.int32, torch.int64, list, np.int32])
def test_alltoall_with_splits(hvd: Any, kind: Any) -> None:
    size, rank = hvd.size(), hvd.rank()
    given = [(rank + peer) % 3 for peer in range(size)]
    splits: Any = (
        given
        if kind is list
        else torch.tensor(given, dtype=kind)
        if isinstance(kind, torch.dtype)
        else np.array(given, kind)
    )
    x = torch.tensor([rank * 10.0 + peer for peer, count in enumerate(given) for _ in range(count)])
    expected = [peer * 10.0 + rank for peer in range(size) for _ in range((rank + peer) % 3)]
    for y, received in (
        hvd.alltoall(x, splits),
        hvd.alltoall(x.clone().requires_grad_(), splits),
        hvd.synchronize(hvd.alltoall_async(x, splits, "rows")),
    ):
        assert y.tolist() == expected
        assert received.tolist() == [(rank + peer) % 3 for peer in range(size)]
        assert received.dtype == (kind if isinstance(kind, torch.dtype) else torch.int32)


def test_alltoall_without_splits(hvd: Any) -> None:
    size, rank = hvd.size(), hvd.rank()
    x = torch.arange(2 * size) + 100 * rank
    expected = [100 * peer + 2 * rank + i for peer in range(size) for i in range(2)]
    assert hvd.alltoall(x).tolist() == expected
    handle = hvd.alltoall_async(x)
    y, received = hvd.synchronize(handle)
    assert y.tolist() == expected and received.tolist() == [2] * size and received.dtype == torch.int32
    assert hvd.poll(handle) and handle()[0] is y
    if size > 1:
        with pytest.raises(ValueError, match="cannot be divided evenly"):
            hvd.alltoall(torch.ones(size + 1))


def test_reducescatter(hvd: Any) -> None:
    size, rank = hvd.size(), hvd.rank()
    x = torch.arange(float(size + 1)) + rank
    shares = [2, *[1] * (size - 1)]
    start = sum(shares[:rank])
    total = [size * i + sum(range(size)) for i in range(start, start + shares[rank])]
    assert hvd.reducescatter(x, op=hvd.Sum).tolist() == total
    assert hvd.reducescatter(x).tolist() == pytest.approx([t / size for t in total])
    assert hvd.reducescatter(x, "scattered", hvd.Compression.none, None).tolist() == pytest.approx(
        [t / size for t in total]
    )
    assert (
        hvd.synchronize(hvd.reducescatter_async(x, None, hvd.Sum, hvd.global_process_set, 2.0, 0.5)).tolist() == total
    )
    pair = hvd.grouped_reducescatter([x, x.int()], op=hvd.Sum)
    assert [y.tolist() for y in pair] == [total, total]
    assert [y.tolist() for y in hvd.synchronize(hvd.grouped_reducescatter_async([x, x], op=hvd.Sum))] == [total, total]


def test_handles(hvd: Any) -> None:
    handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="asked twice")
    first = hvd.synchronize(handle)
    assert hvd.poll(handle) and hvd.synchronize(handle) is first
    x = torch.ones(2)
    assert hvd.synchronize(hvd.allreduce_async_(x, op=hvd.Sum)) is x
    if hvd.size() > 1:
        # Rank 0's stays in flight because the others' comes only after they have met.
        waiting = hvd.allreduce_async(torch.ones(1), name="in flight") if hvd.rank() == 0 else None
        if waiting is not None:
            with pytest.raises(ValueError, match="in flight already"):
                hvd.allreduce_async(torch.ones(1), name="in flight")
        hvd.allreduce(torch.ones(1), name="met")
        hvd.synchronize(waiting or hvd.allreduce_async(torch.ones(1), name="in flight"))


def test_process_sets(hvd: Any) -> None:
    size, rank = hvd.size(), hvd.rank()
    some = hvd.add_process_set(list(range(size))[-2:])
    members = some.ranks
    if some.included():
        x = torch.full((2,), float(rank))
        assert hvd.allreduce(x, op=hvd.Sum, process_set=some).tolist() == [float(sum(members))] * 2
        assert hvd.broadcast(x, size - 1, process_set=some).tolist() == [size - 1.0] * 2
        assert hvd.allgather(x[:1], None, some).tolist() == [float(member) for member in members]
        assert hvd.alltoall(torch.arange(len(members)), process_set=some).tolist() == [some.rank()] * len(members)
        assert len(hvd.reducescatter(torch.ones(len(members)), process_set=some)) == 1
        hvd.barrier(some)
    else:
        with pytest.raises(ValueError, match="not in"):
            hvd.allreduce(torch.ones(1), process_set=some)
    hvd.barrier()
    hvd.remove_process_set(some)


@pytest.mark.mpi(min_size=2)
def test_an_optimizer_of_a_process_set_names_ranks_by_their_numbers_in_the_world(hvd: Any) -> None:
    some = hvd.add_process_set(list(range(hvd.size()))[-2:])
    if some.included():
        here, there = hvd.rank(), sum(some.ranks) - hvd.rank()
        weight = torch.nn.Parameter(torch.zeros(here + 1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), process_set=some)
        weight.sum().backward()
        with pytest.raises(MismatchError, match=rf"^rank {here}: .* rank {here} has .*; rank {there} has "):
            optimizer.step()
        weight.grad = None
        weight.data = torch.zeros(2)
        combine = optimizer.step if here < there else optimizer.synchronize
        weight.sum().backward()
        combine()
        weight.sum().backward()
        with pytest.raises(MismatchError, match=f"^rank {here}: gradients of different steps were combined"):
            combine()
    hvd.barrier()
    hvd.remove_process_set(some)


def test_join(hvd: Any) -> None:
    """Each rank has one batch more than the rank before."""
    sums = [hvd.allreduce(torch.ones(2), op=hvd.Sum, name="batch")[0].item() for _ in range(hvd.rank())]
    assert hvd.join(0) == hvd.size() - 1
    assert sums == [float(hvd.size() - 1 - batch) for batch in range(hvd.rank())]


def test_what_is_no_torch_tensor_is_treated_as_in_the_engine(hvd: Any) -> None:
    y = hvd.allreduce(np.full(2, hvd.rank(), np.float32), op=hvd.Sum)
    assert type(y) is np.ndarray and y.tolist() == [float(sum(range(hvd.size())))] * 2
    assert hvd.allreduce(hvd.rank(), op=hvd.Max) == hvd.size() - 1


def test_tensors_of_the_meta_device_have_nothing_to_send(hvd: Any) -> None:
    """On every rank, and on one, of which the others hear."""
    empty = torch.ones(2, device="meta")
    grouped, rooted = (lambda x: hvd.grouped_allreduce([x])), (lambda x: hvd.broadcast_(x, 0))
    for call in (hvd.allreduce, hvd.allreduce_, hvd.allgather, hvd.alltoall, grouped, rooted):
        with pytest.raises(TypeError, match=r"on meta.*to_empty"):
            call(empty)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    with pytest.raises((TypeError, RuntimeError), match="on meta"):
        hvd.allreduce(empty if hvd.rank() == 0 else torch.ones(2), name="one has none")
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
