"""Copies of this rank's own gradients, to combine them again where ranks have died (`collectives.elastic.retry`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from collectives.torch.gradient_slot import GradientSlot
from collectives.torch.guard import grad_of


class KeptGradients:
    """The gradients of one step, as the backward pass has left them. The memory is used again by the next step."""

    def __init__(self) -> None:
        self._copies: dict[GradientSlot, Any] = {}
        self._kept: set[GradientSlot] = set()

    def keep(self, slot: GradientSlot) -> None:
        """Copy a gradient that is complete."""
        grad = grad_of(slot.param)
        if grad is None:
            return
        copy: Any = self._copies.get(slot)
        if _alike(copy, grad):
            with torch.no_grad():
                copy.copy_(grad)
        else:
            self._copies[slot] = grad.detach().clone()
        self._kept.add(slot)

    def restore(self, slots: Iterable[GradientSlot], as_views: bool) -> None:
        """Make the parameters' gradients what they were; ``as_views``: which stay where they are."""
        with torch.no_grad():
            for slot in slots:
                grad, copy = slot.param.grad, self._copies[slot] if slot in self._kept else None
                if _alike(copy, grad):
                    grad.copy_(copy)
                elif copy is None and as_views and grad is not None:
                    grad.zero_()
                else:
                    slot.param.grad = None if copy is None else copy.clone()

    def forget(self) -> None:
        """End the step."""
        self._kept.clear()


def _alike(copy: Any, grad: Any) -> bool:
    """Whether one tensor can be copied into the other."""
    if copy is None or grad is None:
        return False
    kinds = [(each.layout, each.dtype, each.shape, each.device) for each in (copy, grad)]
    return kinds[0] == kinds[1] and copy.layout is torch.strided
