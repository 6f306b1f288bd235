"""All-reduce of sparse tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def _own(hvd: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of shape (5, 2), hybrid: rows that overlap between neighbouring ranks, one of them twice."""
    rank = hvd.rank()
    indices = torch.tensor([[rank % 5, (rank + 1) % 5, rank % 5]])
    values = torch.tensor([[1, 2], [3, 4], [10, 20]]) * (rank + 1)
    return torch.sparse_coo_tensor(indices, values.to(dtype), (5, 2))


def _dense_sum(hvd: Any, tensor: torch.Tensor) -> torch.Tensor:
    return hvd.allreduce(tensor.to_dense(), op=hvd.Sum)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64], ids=str)
def test_sum(hvd: Any, dtype: torch.dtype) -> None:
    x = _own(hvd, dtype)
    handle = hvd.sparse_allreduce_async(x, "sparse", hvd.Sum)
    y = hvd.synchronize(handle)
    assert y.layout is torch.sparse_coo and y.shape == x.shape and y.dtype == dtype
    assert y.sparse_dim() == 1 and y._indices().dtype == torch.int64
    assert torch.equal(y.to_dense(), _dense_sum(hvd, x))
    assert y._nnz() == 2 * hvd.size()  # each rank's duplicates have been added before they travelled
    assert x._nnz() == 3 and not x.is_coalesced()


def test_handles_can_be_called(hvd: Any) -> None:
    x = _own(hvd)
    handle = hvd.sparse_allreduce_async(x, name="called", op=hvd.Average)
    y = handle()
    assert hvd.poll(handle) and handle() is y and hvd.synchronize(handle) is y
    torch.testing.assert_close(y.to_dense(), _dense_sum(hvd, x) / hvd.size())


def test_integers_are_averaged_as_dense_ones(hvd: Any) -> None:
    x = _own(hvd, torch.int64)
    y = hvd.synchronize(hvd.sparse_allreduce_async(-x, "integers", hvd.Average))
    assert y.dtype == torch.int64
    assert torch.equal(y.to_dense(), hvd.allreduce(-x.to_dense(), op=hvd.Average))


def test_ranks_without_nonzeros(hvd: Any) -> None:
    x = _own(hvd) if hvd.rank() == hvd.size() - 1 else torch.zeros_like(_own(hvd))
    y = hvd.synchronize(hvd.sparse_allreduce_async(x, "mostly nothing", hvd.Sum))
    assert y._nnz() == 2 and torch.equal(y.to_dense(), _dense_sum(hvd, x))
    nothing = hvd.synchronize(hvd.sparse_allreduce_async(torch.zeros_like(x), "nothing", hvd.Average))
    assert nothing._nnz() == 0 and nothing.shape == (5, 2) and nothing.sparse_dim() == 1


def test_several_sparse_dimensions(hvd: Any) -> None:
    rank = hvd.rank()
    x = torch.zeros(3, 4, 2)
    x[rank % 3, rank % 4, 1] = rank + 1
    x[0, 0, 0] = 1
    for sparse_dim in (1, 2, 3):
        y = hvd.synchronize(hvd.sparse_allreduce_async(x.to_sparse(sparse_dim), f"{sparse_dim} dimensions", hvd.Sum))
        assert y.sparse_dim() == sparse_dim
        assert torch.equal(y.to_dense(), hvd.allreduce(x, op=hvd.Sum))


def test_shapes_beyond_32_bits(hvd: Any) -> None:
    far = 2**33 + hvd.rank()
    x = torch.sparse_coo_tensor(torch.tensor([[far, 2**33 - 1]]), torch.tensor([1.0, 2.0]), (2**34,))
    y = hvd.synchronize(hvd.sparse_allreduce_async(x, "far", hvd.Sum)).coalesce()
    assert y.indices()[0].tolist() == [2**33 - 1, *(2**33 + rank for rank in range(hvd.size()))]
    assert y.values().tolist() == [2.0 * hvd.size(), *[1.0] * hvd.size()]


def test_in_a_process_set_and_unnamed(hvd: Any) -> None:
    some = hvd.add_process_set([hvd.size() - 1])
    if some.included():
        x = _own(hvd)
        y = hvd.synchronize(hvd.sparse_allreduce_async(x, None, hvd.Average, some))
        assert torch.equal(y.to_dense(), x.to_dense())
    hvd.remove_process_set(some)


def test_refusals(hvd: Any) -> None:
    for op in (hvd.Max, hvd.Adasum, None):
        with pytest.raises(ValueError, match="Average or Sum"):
            hvd.sparse_allreduce_async(_own(hvd), "refused", op)
    with pytest.raises(TypeError, match="sparse COO"):
        hvd.sparse_allreduce_async(torch.ones(2), "refused", hvd.Sum)
    if hvd.size() > 1:
        wrong = hvd.sparse_allreduce_async(
            _own(hvd, torch.float64 if hvd.rank() else torch.float32), "mismatched", hvd.Sum
        )
        with pytest.raises(RuntimeError, match=r"disagree on .* for tensor 'mismatched'"):
            hvd.synchronize(wrong)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
