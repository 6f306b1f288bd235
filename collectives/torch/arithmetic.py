"""Differentiable operations on torch tensors; implements `collectives.frontends.adjoints.Arithmetic`."""

from __future__ import annotations

from typing import Any

import torch

from collectives.base.reduce_op import Op


class TorchArithmetic:
    """Operations on torch tensors of any device."""

    def flat(self, tensor: Any) -> Any:
        return tensor.reshape(-1)

    def restored(self, tensor: Any, like: Any) -> Any:
        return tensor.to(like.dtype).reshape(like.shape)

    def widened(self, tensor: Any) -> Any:
        return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor

    def cast(self, tensor: Any, like: Any) -> Any:
        return tensor.to(like.dtype)

    def conj(self, tensor: Any) -> Any:
        return tensor.conj()

    def sum(self, tensor: Any) -> Any:
        return tensor.sum(0)

    def extreme(self, tensor: Any, op: Op) -> Any:
        return (tensor == (tensor.amax(0) if op is Op.MAX else tensor.amin(0))).to(tensor.dtype)

    def products_of_others(self, tensor: Any) -> Any:
        ones = torch.ones_like(tensor[:1])
        before = torch.cat([ones, tensor[:-1]]).cumprod(0)
        after = torch.cat([ones, tensor[1:].flip(0)]).cumprod(0).flip(0)
        return before * after

    def dot(self, a: Any, b: Any) -> Any:
        return a @ b

    def nonzero(self, scalar: Any) -> Any:
        return scalar.masked_fill(scalar == 0, 1)
