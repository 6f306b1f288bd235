"""Gradients in memory that the other ranks of a host map, so that they are combined in place.

Autograd allocates gradients anew in each step, in private memory. As soon as it has completed one, the values are
copied into the arena, and the gradient gets that memory: it remains the same tensor object, with a storage of its own
size. The copy reads what is still in the processor's caches, and the next gradient reuses the private memory.

    autograd     writes a gradient into private memory
    move         copies it to its place in the arena, where the tensor lies from then on
    all-reduce   reads and writes the ranks' gradients where they lie
    zero_grad    drops the tensor; the place is free for the next step's gradient

The program can observe nothing but the time. A gradient that anything besides its parameter refers to (the tensor, a
view of it, an array, its storage) stays where it is. If an earlier step's gradient is still referred to, or another
process may use it (a forked child, or one that received it through torch's shared memory), the next one gets a new
place.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from collectives.tensors.arena import arena
from collectives.torch import memory
from collectives.torch.guard import grad_of

Holders = tuple[int, ...]
"""Numbers of references, which are compared with those of a tensor that nothing else holds."""


class GradientPlace:
    """The place in the arena of one parameter's gradients, step after step."""

    __slots__ = ("_address", "_forks", "_param", "_refused", "_storage", "_tensor")

    def __init__(self, param: Any) -> None:
        self._param = param
        self._refused = False
        self._tensor: Any = None
        """A tensor at that place, to which nothing else refers."""
        self._storage: Any = None
        self._address = self._forks = -1

    def move(self) -> None:
        """Move the parameter's gradient here, unless the program could observe it."""
        if self._refused or self.holds_gradient() or holders_of_gradient(self._param) != _ALONE:
            return
        grad, place = grad_of(self._param), self._tensor
        if not _movable(grad):
            return
        if (
            place is None
            or place.dtype is not grad.dtype
            or place.shape != grad.shape
            or self._forks != arena.forks
            or place.data_ptr() != self._address  # moved by share_memory_: a process may read the earlier gradient
            or self.holders_of_earlier() != _UNUSED
        ):
            block = arena.empty(grad.nbytes, np.uint8)
            self.renew(memory.over(block, grad.shape, grad.dtype))
            place = self._tensor
            if not arena.locate(self._address, place.nbytes):
                self._refused = True
                self._tensor = self._storage = None
                return
        with torch.no_grad():
            place.copy_(grad)
        grad.data = place

    def renew(self, tensor: Any) -> None:
        """Use the memory of a tensor, to which nothing else refers, for the next gradient."""
        self._tensor, self._storage, self._address = tensor, tensor.untyped_storage(), tensor.data_ptr()
        self._forks = arena.forks

    def holds_gradient(self) -> bool:
        """Whether the gradient lies here already: it was moved before, or autograd has added to it."""
        grad = grad_of(self._param)
        return grad is not None and grad.layout is torch.strided and grad.data_ptr() == self._address

    def holders_of_earlier(self) -> Holders:
        """What holds an earlier gradient that lies here, or its memory."""
        return torch._C._storage_Use_Count(self._storage._cdata), sys.getrefcount(self._storage)


def holders_of_gradient(param: Any) -> Holders:
    """What holds a parameter's gradient, or its memory; empty if there is none, or it is not dense."""
    grad = grad_of(param)
    if grad is None or grad.layout is not torch.strided:
        return ()
    storage = grad.untyped_storage()
    return (
        sys.getrefcount(grad),
        grad._use_count(),
        torch._C._storage_Use_Count(storage._cdata),
        sys.getrefcount(storage),
    )


def _movable(grad: Any) -> bool:
    """Whether a gradient is numbers in host memory, in C order."""
    return (
        type(grad) is torch.Tensor
        and grad.layout is torch.strided
        and grad.is_cpu
        and grad.is_contiguous()
        and not (grad.requires_grad or grad.is_neg() or grad.is_conj() or grad.is_inference())
        and grad.numel() > 0
    )


def _counts() -> tuple[Holders, Holders]:
    """The numbers of references where nothing else holds a gradient or a place; they depend on the versions of torch
    and Python."""
    param = torch.zeros(1, requires_grad=True)
    param.grad = torch.zeros(1)
    place = GradientPlace(param)
    place.renew(torch.zeros(1))
    return holders_of_gradient(param), place.holders_of_earlier()


_ALONE, _UNUSED = _counts()
