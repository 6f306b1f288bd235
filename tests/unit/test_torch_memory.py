"""Torch's tensors in memory that peers can map."""

from __future__ import annotations

import gc
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import collectives.torch as hvd  # noqa: E402
from collectives.base.errors import InvalidArgumentError, InvalidTypeError  # noqa: E402
from collectives.tensors.arena import arena  # noqa: E402

DTYPES = ["bool", "uint8", "int64", "float16", "bfloat16", "float32", "complex64", "float8_e4m3fn"]


@pytest.mark.parametrize("size", [(5,), (3, 4), ([2, 3],), (torch.Size([4, 1]),), ((),)])
@pytest.mark.parametrize("dtype", [None, *DTYPES])
def test_tensors_are_as_torchs(size: Any, dtype: str | None) -> None:
    kind = dtype and getattr(torch, dtype)
    for made, expected in (
        (hvd.empty(*size, dtype=kind), torch.empty(*size, dtype=kind)),
        (hvd.zeros(*size, dtype=kind), torch.zeros(*size, dtype=kind)),
    ):
        assert type(made) is torch.Tensor and made.dtype == expected.dtype and made.shape == expected.shape
        assert made.is_contiguous() and made.is_leaf and not made._is_view() and made.data_ptr() % 64 == 0
        assert arena.locate(made.data_ptr(), made.numel() * made.element_size())
    assert torch.equal(made.to(torch.complex64), expected.to(torch.complex64))


def test_tensors_without_elements() -> None:
    assert hvd.empty(0).shape == (0,) and hvd.zeros(3, 0, dtype=torch.int8).shape == (3, 0)


def test_empty_like_takes_shape_and_dtype_and_not_the_strides() -> None:
    like = hvd.empty_like(torch.ones(3, 4, dtype=torch.bfloat16).t())
    assert like.shape == (4, 3) and like.dtype == torch.bfloat16 and like.is_contiguous() and hvd.is_mapped(like)
    assert hvd.empty_like(like, dtype=torch.int32).dtype == torch.int32
    assert hvd.empty_like(torch.empty(3, device="meta"), device="cpu").shape == (3,)


def test_views_and_parameters_count() -> None:
    tensor = hvd.zeros(10, 10)
    assert hvd.is_mapped(tensor[2:4]) and hvd.is_mapped(tensor.view(-1)) and hvd.is_mapped(torch.nn.Parameter(tensor))
    assert not hvd.is_mapped(tensor.t()) and not hvd.is_mapped(torch.zeros(3))


def test_autograd_records_operations_on_them() -> None:
    tensor = hvd.zeros(3, requires_grad=True)
    (tensor * 2).sum().backward()
    assert tensor.is_leaf and tensor.grad.tolist() == [2.0] * 3
    assert hvd.empty_like(tensor, requires_grad=True).requires_grad and not hvd.empty(2).requires_grad
    with pytest.raises(RuntimeError):
        hvd.empty(2, dtype=torch.int8, requires_grad=True)


def test_memory_lives_as_long_as_the_last_view() -> None:
    tensor = hvd.zeros(1 << 16)
    view, address = tensor[5:], tensor.data_ptr()
    del tensor
    gc.collect()
    others = [hvd.empty(1 << 16) for _ in range(3)]
    for other in others:
        other.fill_(1)
    assert not view.any() and address not in [other.data_ptr() for other in others]


def test_mistakes_are_named() -> None:
    for device in ("cuda", "cuda:1", "meta", torch.device("meta")):
        with pytest.raises(InvalidArgumentError, match="device: expected cpu"):
            hvd.empty(3, device=device)
    with pytest.raises(InvalidArgumentError, match="device: expected cpu, got meta"):
        hvd.empty_like(torch.empty(3, device="meta"))
    with pytest.raises(InvalidTypeError, match=r"input: expected a .*Tensor, got a list"):
        hvd.empty_like([1.0])
    with pytest.raises(InvalidArgumentError, match="size: expected dimensions of 0 or more"):
        hvd.zeros(3, -1)
    for size in ((), (2.5,), ("3",), ((1, None),)):
        with pytest.raises(InvalidTypeError, match="size: expected ints"):
            hvd.empty(*size)
    with pytest.raises(InvalidTypeError, match="dtype: expected a"):
        hvd.empty(3, dtype=float)


def test_the_default_device_does_not_count() -> None:
    with torch.device("meta"):
        assert hvd.is_mapped(hvd.zeros(3)) and hvd.zeros(0).device.type == "cpu"
