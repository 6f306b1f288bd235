"""The buckets in which gradients travel.

    Grouped    large gradients, combined where they are: the engine reads the peers' memory, so that packing would only cost
    Packed     small ones, for which Python costs more than bytes: one call of torch copies them into one tensor, one brings them back
    Late       tiny ones, packed likewise
    Viewed     gradients that live in one tensor for good: autograd adds to it, the engine combines it, and nothing is copied
    Sparse     one sparse gradient, gathered

A bucket leaves when the hooks of its parameters have told that all gradients are there, while the backward pass goes
on; one of tiny gradients, which is late, when somebody waits.

A gradient in flight belongs to the engine. Reading it through its parameter waits for it (`guard`). A change through a
tensor kept from an earlier step is refused when it is back: torch's version counter shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from collectives.base.errors import InvalidArgumentError
from collectives.frontends.gradient_options import GradientOptions
from collectives.runtime import world_of
from collectives.tensors.compression import BUILT_IN
from collectives.torch.guard import grad_of
from collectives.torch.sparse import sparse_allreduce_async

TINY = 4 << 10
"""Bytes up to which a gradient is late: waking the background thread for it would take longer than the gradient."""
SMALL = 64 << 10
"""Bytes up to which a gradient is packed. Above, what packing copies takes longer than what it saves in Python."""
PACKED = 1 << 20
"""Bytes of small gradients that share a bucket: enough to make the cost of a call small, and early enough on its way to
overlap."""
LARGE = 16 << 20
"""Bytes of all other gradients that share a bucket. Were each to leave by itself, the engine would take those together
that happen to come close to each other, differently in every step, and plan anew."""


class Slot:
    """A parameter's place in a bucket.

    Attributes:
        bucket: None for a parameter that was frozen until now.
        left: backward passes until its gradient may leave, of ``passes``.
        late: its bucket is.
        hook: the number of its hook.
        blank: the gradient stands there as zeros because it lives in a bucket: until a backward pass adds to it, there
            is none.
        sparse_dim: of a sparse gradient, as the ranks have agreed; 0 of a dense one, or where none has been seen yet.
        was_sparse: the gradient became dense in order to travel, and had so many sparse dimensions.
        kind: what the ranks have of it in this step: 0 for none, else its sparse dimensions, or 255 for dense.
    """

    __slots__ = (
        "blank",
        "bucket",
        "hook",
        "kind",
        "late",
        "left",
        "name",
        "param",
        "passes",
        "sparse_dim",
        "was_sparse",
    )

    def __init__(self, name: str, param: Any, passes: int) -> None:
        self.name = name
        self.param = param
        self.passes = self.left = passes
        self.bucket: Bucket | None = None
        self.hook: int
        self.blank = self.late = False
        self.sparse_dim = self.was_sparse = 0
        self.kind = 255

    @property
    def nbytes(self) -> int:
        return int(self.param.numel() * self.param.element_size())

    def is_last_hook(self) -> bool:
        """Whether no hook of the program's follows ours, as one that was registered later does."""
        return bool(next(reversed(self.param._post_accumulate_grad_hooks)) == self.hook)

    def put_hook_last(self) -> None:
        """Have the program's hooks see the gradient before it leaves."""
        if not self.is_last_hook():
            hooks = self.param._post_accumulate_grad_hooks
            hooks[self.hook] = hooks.pop(self.hook)

    @property
    def empty(self) -> bool:
        """Whether this rank has no gradient."""
        return self.param.grad is None or (self.blank and self.left == self.passes)


class Bucket:
    """Gradients that leave together.

    Args:
        slots: their places.
        name: of the operation.
        options: how they are combined; ``name`` goes before the names of all operations.

    Attributes:
        late: it leaves in `synchronize`, and not in the backward pass.
        pending: how many gradients are missing until it may leave.
        missing: what has none on this rank, so that zeros travel in its place.
        handle: of the operation in flight, or None.
    """

    late = False

    def __init__(self, slots: Sequence[Slot], name: str, options: GradientOptions) -> None:
        self.slots = list(slots)
        self.name = name
        self.options = options
        self.pending = len(self.slots)
        self.missing: list[Slot] = []
        self.handle: Any = None
        self._keywords: dict[str, Any] = {
            "op": options.op,
            "name": options.name + name,
            "compression": options.compression,
            **options.factors,
        }
        self._params = [slot.param for slot in self.slots]
        self._gradients: list[Any] = []
        self._versions: list[int] = []
        for slot in self.slots:
            slot.bucket, slot.late = self, self.late

    def submit(self) -> None:
        """The gradients leave."""
        gradients = [grad_of(param) for param in self._params]
        self.missing = [slot for slot, grad in zip(self.slots, gradients, strict=True) if grad is None]
        for at, grad in enumerate(gradients):
            if grad is None:
                gradients[at] = torch.zeros_like(self._params[at], requires_grad=False)
            elif grad.requires_grad:
                gradients[at] = grad.detach()  # of backward(create_graph=True)
        self._gradients = gradients
        self.handle = self.begin(gradients)
        self._versions = [grad._version for grad in gradients]

    def finish(self) -> None:
        """Wait until they are back. Does nothing if none are on their way.

        Raises:
            InvalidArgumentError: the program has changed or dropped a gradient that was on its way; all others are
                back.
        """
        handle, self.handle = self.handle, None
        if handle is not None:
            handle.wait()
            refusal = self._look_for_changes()
            for slot in self.missing:
                slot.param.grad = self._gradients[self.slots.index(slot)]
            self.unpack(self._gradients)
            self._gradients = []
            if refusal is not None:
                raise refusal

    def begin(self, gradients: list[Any]) -> Any:
        """The handle of an operation that combines the gradients."""
        raise NotImplementedError

    def unpack(self, gradients: list[Any]) -> None:
        """The operation is done: bring the results into the gradients, if they are not there."""

    def _look_for_changes(self) -> InvalidArgumentError | None:
        for slot, grad, version in zip(self.slots, self._gradients, self._versions, strict=True):
            now = slot.param.grad
            if now is not grad and slot not in self.missing and (now is None or now.data_ptr() != grad.data_ptr()):
                return _refusal(slot, "dropped")
            if grad._version != version:
                return _refusal(slot, "changed")
        return None


def _refusal(slot: Slot, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"gradient of {slot.name!r}: expected it to be left alone from backward() to optimizer.synchronize(), but it "
        f"was {what} in "
        f"between, through a tensor kept from before; read it as parameter.grad, which waits for it, or call "
        f"optimizer.synchronize() first"
    )


class Grouped(Bucket):
    """Gradients that complete together, each combined where it is."""

    def begin(self, gradients: list[Any]) -> Any:
        return world_of(self.options.process_set).grouped_allreduce_async_(gradients, **self._keywords)


class Packed(Bucket):
    """Small gradients of one dtype and device, copied into one tensor and back."""

    def __init__(self, slots: Sequence[Slot], name: str, options: GradientOptions) -> None:
        super().__init__(slots, name, options)
        first = self.slots[0].param
        self.flat = torch.zeros(sum(slot.param.numel() for slot in self.slots), dtype=first.dtype, device=first.device)
        pieces = self.flat.split([slot.param.numel() for slot in self.slots])
        self.views = [_shaped(piece, slot.param) for piece, slot in zip(pieces, self.slots, strict=True)]

    def begin(self, gradients: list[Any]) -> Any:
        with torch.no_grad():
            torch._foreach_copy_(self.views, gradients)
        return world_of(self.options.process_set).allreduce_async_(self.flat, **self._keywords)

    def unpack(self, gradients: list[Any]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(gradients, self.views)


class Late(Packed):
    """Tiny gradients, which leave together when the program waits."""

    late = True


class Viewed(Packed):
    """Gradients of one dtype and device that live in one tensor."""

    def __init__(self, slots: Sequence[Slot], name: str, options: GradientOptions) -> None:
        super().__init__(slots, name, options)
        for slot, view in zip(self.slots, self.views, strict=True):
            slot.blank = slot.param.grad is None
            if not slot.blank:
                view.copy_(slot.param.grad.detach())
            slot.param.grad = view

    def begin(self, gradients: list[Any]) -> Any:
        strangers = [at for at, (grad, view) in enumerate(zip(gradients, self.views, strict=True)) if grad is not view]
        if strangers:  # somebody has set them to None, so that autograd has made new ones
            with torch.no_grad():
                torch._foreach_copy_([self.views[at] for at in strangers], [gradients[at] for at in strangers])
        for at in strangers:
            gradients[at] = self.views[at]
            if self.slots[at] not in self.missing:
                self._params[at].grad = self.views[at]
            self.slots[at].blank = False
        self.missing += [slot for slot in self.slots if slot.blank and slot.left == slot.passes]
        for slot in self.slots:
            slot.blank = False
        return world_of(self.options.process_set).allreduce_async_(self.flat, **self._keywords)

    def unpack(self, gradients: list[Any]) -> None:
        """They are there."""

    def lay_out(self) -> None:
        """Zeros in the parameters' gradients, for autograd to add to."""
        self.flat.zero_()
        for slot, view in zip(self.slots, self.views, strict=True):
            slot.blank = True
            slot.param.grad = view


class Sparse(Bucket):
    """One sparse gradient: every rank's indices and values are gathered, and added up."""

    def submit(self) -> None:
        slot = self.slots[0]
        grad = grad_of(slot.param)
        self.missing = [slot] if grad is None else []
        if grad is None:
            indices = torch.empty((slot.sparse_dim, 0), dtype=torch.int64, device=slot.param.device)
            values = torch.empty(
                (0, *slot.param.shape[slot.sparse_dim :]), dtype=slot.param.dtype, device=slot.param.device
            )
            grad = torch.sparse_coo_tensor(indices, values, slot.param.shape, check_invariants=False)
        elif not grad.is_sparse:
            grad = grad.to_sparse(slot.sparse_dim)
        self.handle = sparse_allreduce_async(
            grad, name=self._keywords["name"], op=self.options.op, process_set=self.options.process_set
        )

    def finish(self) -> None:
        handle, self.handle = self.handle, None
        if handle is not None:
            self.slots[0].param.grad = handle()


def arrange(
    slots: Sequence[Slot], groups: Sequence[Sequence[Slot]], options: GradientOptions, as_views: bool
) -> list[Bucket]:
    """Buckets for gradients, in the order in which the backward pass is likely to fill them.

    Args:
        slots: in the order of the parameters.
        groups: of some of them that are to travel together.
        as_views: gradients live in their buckets.
    """
    buckets: list[Bucket] = [_bucket(Grouped, group, options) for group in groups]
    grouped = {id(slot) for group in groups for slot in group}
    filling: dict[Any, list[Slot]] = {}
    for slot in reversed(slots):
        if id(slot) in grouped:
            continue
        kind = _kind(slot, options, as_views)
        which = kind if kind is Grouped else (kind, slot.param.dtype, slot.param.device)
        members = filling.setdefault(which, [])
        if members and sum(member.nbytes for member in members) + slot.nbytes > (
            PACKED if kind in (Packed, Late) else LARGE
        ):
            buckets.append(_bucket(kind, members, options))
            members = filling[which] = []
        members.append(slot)
    return [
        *buckets,
        *(_bucket(_kind(members[0], options, as_views), members, options) for members in filling.values()),
    ]


def _kind(slot: Slot, options: GradientOptions, as_views: bool) -> type[Bucket]:
    # A compressor of the user's sees each gradient by itself.
    if not any(options.compression is known for known in BUILT_IN):
        return Grouped
    if as_views:
        return Viewed
    if slot.nbytes <= TINY:
        return Late
    return Packed if slot.nbytes <= SMALL else Grouped


def _bucket(kind: type[Bucket], slots: Sequence[Slot], options: GradientOptions) -> Bucket:
    name = slots[0].name if len(slots) == 1 else f"{slots[0].name} to {slots[-1].name}, {len(slots)} gradients"
    return kind(slots, name, options)


def _shaped(piece: Any, param: Any) -> Any:
    """A piece of a flat tensor with the parameter's shape, and its layout where that has no gaps: as autograd lays
    gradients out."""
    return piece.as_strided(param.shape, torch.empty_like(param, device="meta").stride(), piece.storage_offset())
