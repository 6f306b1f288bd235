"""Hooks that autograd calls when a parameter's gradient is complete."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from collectives.torch.compiled import untraced
from collectives.torch.gradient_slot import GradientSlot

_REDUCER = "_collectives_reducer"  # attribute of these hooks


def install(slot: GradientSlot, reducer: weakref.ref[Any]) -> Any:
    """Have autograd call ``arrived(slot)`` of a reducer, which the hook does not keep alive; returns torch's handle."""

    @untraced
    def hook(param: Any) -> None:
        living = reducer()
        if living is not None:
            living.arrived(slot)

    setattr(hook, _REDUCER, reducer)
    param, frozen = slot.param, not slot.param.requires_grad
    if frozen:
        param.requires_grad_(True)  # torch refuses hooks otherwise
    handle = param.register_post_accumulate_grad_hook(hook)
    # Autograd may still refer to the hooks of a tensor that torch has swapped for this one.
    param._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks
    if frozen:
        param.requires_grad_(False)
    slot.hook = handle.id
    return handle


def take_over(params: Iterable[Any], newer: Any) -> None:
    """Have the reducers of earlier optimizers leave the parameters that they share with these to ``newer``."""
    for param in params:
        for hook in (param._post_accumulate_grad_hooks or {}).values():
            reference: Callable[[], Any] | None = getattr(hook, _REDUCER, None)
            earlier = None if reference is None else reference()
            if earlier is not None and earlier is not newer:
                earlier.leave_to(newer)


def may_thaw(param: Any) -> bool:
    """Whether a frozen parameter can ever require gradients."""
    return (param.is_floating_point() or param.is_complex()) and not param.is_inference()
