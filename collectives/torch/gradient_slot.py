"""A parameter whose gradients are combined: its bucket, the state of its gradient, and the hook that autograd calls
when that is complete."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from collectives.base.errors import InvalidArgumentError
from collectives.torch.compiled import untraced
from collectives.torch.gradient_memory import GradientPlace
from collectives.torch.guard import Guard, grad_of
from collectives.worlds.local_world import bound

if TYPE_CHECKING:
    from collectives.torch.buckets import GradientBucket

DENSE = 255
"""The `GradientSlot.kind` of a dense gradient."""
_REDUCER = "_collectives_reducer"  # attribute of our hooks


class GradientSlot:
    """A parameter's place in a bucket.

    Attributes:
        bucket: None for a parameter that was frozen until now.
        left: backward passes, of ``passes``, until its gradient may be submitted.
        deferred: whether its bucket is.
        hook: the number of its hook.
        hooked: the address of the tensor that has the hook, in torch's C++; the parameter may get another one.
        place: memory of the arena that its gradients are moved to; None if they stay where autograd has put them.
        blank: the zeros of its bucket that the parameter has got as its gradient, for autograd to add to; None once the
            bucket has taken the gradient. While they are zeros, the gradient counts as missing.
        sparse_dim: the agreed number of sparse dimensions; 0 of a dense gradient, or while none has been seen.
        was_sparse: the number of sparse dimensions of a gradient that was made dense to be combined, else 0.
        subtrees: the sums of the passes so far, by the fixed tree: of the passes that each one bit of their number
            counts, the largest first.
        kind: the ranks' gradient in this step: 0 for none, else its number of sparse dimensions, or `DENSE`.
    """

    def __init__(self, name: str, param: Any, passes: int) -> None:
        self.name = name
        self.param = param
        self.hooked = param._cdata
        self.passes = self.left = passes
        self.bucket: GradientBucket | None = None
        self.hook: int
        self.place: GradientPlace | None = None
        self.blank: Any = None
        self.deferred = False
        self.subtrees: list[Any] = []
        self.sparse_dim = self.was_sparse = 0
        self.kind = DENSE

    @property
    def nbytes(self) -> int:
        return int(self.param.numel() * self.dtype.itemsize)

    @property
    def dtype(self) -> Any:
        """Of the gradient that autograd would make now."""
        return getattr(self.param, "grad_dtype", None) or self.param.dtype

    def is_last_hook(self) -> bool:
        """Whether no hook of the program follows ours."""
        return bool(next(reversed(self.param._post_accumulate_grad_hooks)) == self.hook)

    def put_hook_last(self) -> None:
        """Have the program's hooks run before the gradient is submitted."""
        if not self.is_last_hook():
            hooks = self.param._post_accumulate_grad_hooks
            hooks[self.hook] = hooks.pop(self.hook)

    @property
    def empty(self) -> bool:
        """Whether this rank has no gradient."""
        grad = grad_of(self.param)
        return grad is None or (grad is self.blank and self.left == self.passes and not grad.any())

    def add_to_tree(self) -> None:
        """Take the gradient of one pass, and leave the sum of all passes after the last one, a power of two."""
        grad = grad_of(self.param)
        if grad.layout is not torch.strided:
            raise InvalidArgumentError(
                f"gradient of {self.name!r}: algorithm='reproducible' with several backward passes needs dense "
                f"gradients, got layout {grad.layout}; make the layer's gradient dense (sparse=False) [A82]"
            )
        carried = self.passes - self.left
        while carried & 1:
            grad, carried = self.subtrees.pop().add_(grad), carried >> 1
        if self.left == 1:
            self.param.grad = grad
        else:
            self.subtrees.append(grad)
            self.param.grad = None

    def leave_tree(self) -> None:
        """Sum what there is, where fewer passes than expected had a gradient."""
        if self.subtrees:
            grad = self.subtrees.pop()
            while self.subtrees:
                grad = self.subtrees.pop().add_(grad)
            self.param.grad = grad

    def densify(self) -> None:
        """Make a sparse gradient dense."""
        grad = grad_of(self.param)
        self.was_sparse = grad.sparse_dim()
        self.param.grad = grad.to_dense()


# ---- hooks


def install_hook(slot: GradientSlot, reducer: weakref.ref[Any]) -> Any:
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
    handle = param.register_post_accumulate_grad_hook(bound(hook))  # on a GPU, autograd's own threads call hooks
    # Autograd may still refer to the hooks of a tensor that torch has swapped for this one.
    param._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks
    if frozen:
        param.requires_grad_(False)
    slot.hook = handle.id
    return handle


def remove_hooks(hooks: Iterable[Any], guard: Guard) -> None:
    """Leave the parameters as they were."""
    guard.disarm()
    for hook in hooks:
        hook.remove()


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


def numbered(group: int, params: Sequence[Any]) -> list[tuple[str, Any]]:
    """The parameters of one of an optimizer's groups, with names for those that the program has not named."""
    return [(f"allreduce.noname.{group}.{number}", param) for number, param in enumerate(params)]
