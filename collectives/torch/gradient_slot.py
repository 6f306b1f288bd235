"""A parameter among those whose gradients are combined: its hook, its bucket, and the state of its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from collectives.torch.gradient_memory import GradientPlace
from collectives.torch.guard import grad_of

if TYPE_CHECKING:
    from collectives.torch.buckets import GradientBucket

DENSE = 255
"""The `GradientSlot.kind` of a dense gradient."""


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

    def densify(self) -> None:
        """Make a sparse gradient dense."""
        grad = grad_of(self.param)
        self.was_sparse = grad.sparse_dim()
        self.param.grad = grad.to_dense()
