"""The buckets in which gradients are combined.

    GroupedBucket     large gradients, combined in place by a grouped operation; on one host they are moved into memory
                      that its ranks map (`collectives.torch.gradient_memory`)
    PackedBucket      small gradients, copied into one tensor by one call of torch, and the results back by another:
                      that takes less time than a call for each
    DeferredBucket    tiny gradients, packed likewise, and submitted only when the program waits
    ViewedBucket      gradients that are views of one tensor: autograd adds to it, the engine combines it, no copies
    SparseBucket      one sparse gradient, gathered

Hooks of the parameters submit a bucket once all of its gradients are complete, during the backward pass; or gather it,
where all buckets leave when the program waits (`collectives.torch.backward_reducer.holds_back`).

A bucket is laid out for the dtypes, shapes and devices of its gradients, and again when these have changed: by
``model.double()``, ``grad_dtype``, a resized parameter.

The memory of a gradient in flight belongs to the engine. Reading it through its parameter waits for it
(`collectives.torch.guard`). A change through a tensor kept from an earlier step is refused afterwards: torch's version
counter shows it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from collectives.base.errors import InvalidArgumentError
from collectives.frontends.gradient_options import GradientOptions
from collectives.tensors.compression import Compression, is_built_in
from collectives.torch import memory
from collectives.torch.gradient_memory import GradientPlace
from collectives.torch.gradient_slot import GradientSlot
from collectives.torch.guard import grad_of
from collectives.torch.sparse import sparse_allreduce_async
from collectives.worlds.runtime import world_of

TINY = 4 << 10
"""Bytes up to which a gradient is deferred: waking the background thread would take longer than combining it."""
SMALL = 64 << 10
"""Bytes up to which a gradient is packed. Above, the copies take longer than the Python code that packing saves."""
PACKED_BYTES = 1 << 20
"""Bytes of small gradients that share a bucket: enough to make the cost of a call small, and few enough to overlap with
the backward pass."""
GROUPED_BYTES = 16 << 20
"""Bytes of other gradients that share a bucket. Submitting each separately makes fusion depend on timing and
invalidates cached plans."""

Layout = list[tuple[torch.dtype, torch.Size, torch.device]]
"""Of several gradients."""


class GradientBucket:
    """Gradients that are submitted together.

    Attributes:
        name: of the operation.
        deferred: submitted in `synchronize`, and not in the backward pass.
        may_wait: its gradients may be gathered before they are submitted: they are in host memory.
        gathered: its gradients must not be changed any more, and have not been submitted.
        pending: the number of gradients that are not complete yet.
        missing: slots without a gradient on this rank; zeros stand in for it.
        handle: of the operation in flight, or None.
        layout: dtype, shape and device of each gradient.
        fingerprint: a checksum of `describe`.
    """

    deferred = False

    def __init__(self, slots: Sequence[GradientSlot], options: GradientOptions) -> None:
        self.slots = list(slots)
        first, last = self.slots[0].name, self.slots[-1].name
        self.name = first if len(self.slots) == 1 else f"{first} to {last}, {len(self.slots)} gradients"
        self.options = options
        self.pending = len(self.slots)
        self.missing: list[GradientSlot] = []
        self.handle: Any = None
        self.gathered = False
        self._keywords: dict[str, Any] = {
            "op": options.op,
            "name": options.name + self.name,
            "compression": options.compression,
            **options.factors,
        }
        self._params = [slot.param for slot in self.slots]
        self._gradients: list[Any] = []
        self._versions: list[int] = []
        self._addresses: list[int] = []
        for slot in self.slots:
            slot.bucket, slot.deferred = self, self.deferred
        self.layout: Layout = []
        self.refit()

    @property
    def in_flight(self) -> bool:
        return self.gathered or self.handle is not None

    def lay_out(self, layout: Layout) -> None:
        """Prepare for gradients of these dtypes, shapes and devices."""
        self.layout = layout
        self.may_wait = all(device.type == "cpu" for _, _, device in layout)
        self.fingerprint = zlib.crc32(repr(self.describe()).encode())

    def describe(self) -> list[str]:
        """The properties of each gradient that must be equal on all ranks; strides only where it is not copied."""
        return [
            f"{slot.name!r}, of {dtype} and shape {tuple(shape)}, combined as {self.name!r}"
            for slot, (dtype, shape, _) in zip(self.slots, self.layout, strict=True)
        ]

    def refit(self) -> list[Any]:
        """Lay out again if the parameters' gradients, present or future, do not have the bucket's layout. Returns the
        gradients, None where there is none."""
        gradients = [grad_of(param) for param in self._params]
        layout = [
            (slot.dtype, slot.param.shape, slot.param.device) if grad is None else (grad.dtype, grad.shape, grad.device)
            for slot, grad in zip(self.slots, gradients, strict=True)
        ]
        if layout != self.layout:
            self.lay_out(layout)
        return gradients

    def gather(self) -> None:
        """Take the gradients from the program, to combine them later."""
        gradients = self.refit()
        self.missing = [slot for slot, grad in zip(self.slots, gradients, strict=True) if grad is None]
        for at, grad in enumerate(gradients):
            if grad is None:
                gradients[at] = torch.zeros_like(self._params[at], dtype=self.slots[at].dtype, requires_grad=False)
            elif grad.requires_grad:
                gradients[at] = grad.detach()  # of backward(create_graph=True)
        self._gradients = gradients
        self.pack(gradients)
        self._versions = [grad._version for grad in gradients]
        self._addresses = [grad.data_ptr() for grad in gradients]
        self.gathered = True

    def submit(self) -> None:
        """Begin to combine the gradients."""
        if not self.gathered:
            self.gather()
        self.gathered = False
        self.handle = self.begin(self._gradients)

    def finish(self) -> None:
        """Wait for the operation in flight, if there is one, and store the results; also those of other gradients
        before an error about one that the program has changed."""
        handle, self.handle, self.gathered = self.handle, None, False
        if handle is not None:
            handle.wait()
            refusal = self._look_for_changes()
            for slot in self.missing:
                slot.param.grad = self._gradients[self.slots.index(slot)]
            self.unpack(self._gradients)
            self._gradients = []
            if refusal is not None:
                raise refusal

    def pack(self, gradients: list[Any]) -> None:
        """Copy the gradients into the memory in which they are combined, if that is not their own."""

    def begin(self, gradients: list[Any]) -> Any:
        """Submit an operation that combines the gradients."""
        raise NotImplementedError

    def unpack(self, gradients: list[Any]) -> None:
        """Copy the results into the gradients, if they are in other memory."""

    def _look_for_changes(self) -> InvalidArgumentError | None:
        for slot, grad, version, address in zip(
            self.slots, self._gradients, self._versions, self._addresses, strict=True
        ):
            now = slot.param.grad
            if (now is None or now.data_ptr() != address) and slot not in self.missing:
                return _refusal(slot, "dropped")
            if grad._version != version:
                return _refusal(slot, "changed")
        return None


def _refusal(slot: GradientSlot, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"gradient of {slot.name!r}: it was {what} between backward() and optimizer.synchronize(), while it was in "
        "flight, through a tensor obtained earlier; read it as parameter.grad, which waits for it, or call "
        "optimizer.synchronize() first [F27]"
    )


class GroupedBucket(GradientBucket):
    """Gradients combined in place by a grouped operation."""

    def __init__(self, slots: Sequence[GradientSlot], options: GradientOptions) -> None:
        super().__init__(slots, options)
        nbytes = sum(slot.nbytes for slot in self.slots)
        if (
            options.compression is Compression.none
            and all(param.is_cpu for param in self._params)
            and world_of(options.process_set).planner.locates_tensors(nbytes)
        ):
            for slot in self.slots:
                slot.place = slot.place or GradientPlace(slot.param)

    def gather(self) -> None:
        for slot in self.slots:
            if slot.place is not None:
                slot.place.move()
        super().gather()

    def begin(self, gradients: list[Any]) -> Any:
        return world_of(self.options.process_set).grouped_allreduce_async_(gradients, **self._keywords)


class PackedBucket(GradientBucket):
    """Small gradients, copied into one tensor for each dtype and device, and back."""

    def lay_out(self, layout: Layout) -> None:
        alike: dict[Any, list[int]] = {}
        for at, (dtype, _, device) in enumerate(layout):
            alike.setdefault((dtype, device), []).append(at)
        self.flats: list[Any] = []
        self.views: list[Any] = [None] * len(layout)
        for (dtype, device), members in alike.items():
            counts = [layout[at][1].numel() for at in members]
            zeros = memory.zeros if device.type == "cpu" else torch.zeros
            flat = zeros(sum(counts), dtype=dtype, device=device)
            for at, piece in zip(members, flat.split(counts), strict=True):
                self.views[at] = self._shaped(piece, self._params[at], layout[at][1])
            self.flats.append(flat)
        super().lay_out(layout)

    def _shaped(self, piece: Any, param: Any, shape: Any) -> Any:
        """A view of a flat tensor with a gradient's shape; in C order, as other ranks' parameters may have other
        strides."""
        return piece.view(shape)

    def pack(self, gradients: list[Any]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.views, gradients)

    def begin(self, gradients: list[Any]) -> Any:
        world = world_of(self.options.process_set)
        if len(self.flats) == 1:
            return world.allreduce_async_(self.flats[0], **self._keywords)
        return world.grouped_allreduce_async_(self.flats, **self._keywords)

    def unpack(self, gradients: list[Any]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(gradients, self.views)


class DeferredBucket(PackedBucket):
    """Tiny gradients, submitted together when the program waits."""

    deferred = True


class ViewedBucket(PackedBucket):
    """Gradients that are views of one tensor; their strides are alike on all ranks.

    The parameters get aliases of the views: the program may move a gradient elsewhere, as ``p.grad.data = other`` does.
    """

    def __init__(self, slots: Sequence[GradientSlot], options: GradientOptions) -> None:
        super().__init__(slots, options)
        for at, slot in enumerate(self.slots):
            if slot.param.grad is None:
                slot.blank = self._aliases[at]
            else:
                self.views[at].copy_(slot.param.grad.detach())
            slot.param.grad = self._aliases[at]

    def lay_out(self, layout: Layout) -> None:
        super().lay_out(layout)
        self._aliases = [view.view(view.shape) for view in self.views]
        self._places = [view.data_ptr() for view in self.views]

    def describe(self) -> list[str]:
        return [
            f"{line} with strides {view.stride()}" for line, view in zip(super().describe(), self.views, strict=True)
        ]

    def pack(self, gradients: list[Any]) -> None:
        moved = [at for at, grad in enumerate(gradients) if not self._lies_in_place(grad, at)]
        if moved:
            with torch.no_grad():
                torch._foreach_copy_([self.views[at] for at in moved], [gradients[at] for at in moved])
        empty = [slot for slot in self.slots if slot.empty and slot not in self.missing]
        for at in moved:
            gradients[at] = self._alias(at)
            if self.slots[at] not in self.missing:
                self._params[at].grad = gradients[at]
        self.missing += empty
        for slot in self.slots:
            slot.blank = None

    def unpack(self, gradients: list[Any]) -> None:
        pass  # the results are in the views

    def _lies_in_place(self, grad: Any, at: int) -> bool:
        return grad.data_ptr() == self._places[at] and bool(grad.is_set_to(self.views[at]))

    def _alias(self, at: int) -> Any:
        """A tensor for the parameter: always the same, unless the program has moved it elsewhere."""
        if not self._lies_in_place(self._aliases[at], at):
            self._aliases[at] = self.views[at].view(self.views[at].shape)
        return self._aliases[at]

    def _shaped(self, piece: Any, param: Any, shape: Any) -> Any:
        """With the parameter's strides if these have no gaps, as autograd's gradients have."""
        return piece.as_strided(shape, torch.empty_like(param, device="meta").stride(), piece.storage_offset())

    def reset(self) -> None:
        """Set the parameters' gradients, which are None, to zeros for autograd to add to."""
        for flat in self.flats:
            flat.zero_()
        try:
            self._assign()
        except RuntimeError:  # torch refuses gradients that do not go with a parameter's dtype, shape and device
            self.refit()
            self._assign()

    def _assign(self) -> None:
        for at, slot in enumerate(self.slots):
            slot.param.grad = slot.blank = self._alias(at)


class SparseBucket(GradientBucket):
    """One sparse gradient: every rank's indices and values are gathered and added up."""

    def lay_out(self, layout: Layout) -> None:
        super().lay_out(layout)
        self.may_wait = False

    def submit(self) -> None:
        (slot,), (grad,) = self.slots, self.refit()
        self.missing = [slot] if grad is None else []
        if grad is None:
            indices = torch.empty((slot.sparse_dim, 0), dtype=torch.int64, device=slot.param.device)
            values = torch.empty((0, *slot.param.shape[slot.sparse_dim :]), dtype=slot.dtype, device=slot.param.device)
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
    slots: Sequence[GradientSlot], groups: Sequence[Sequence[GradientSlot]], options: GradientOptions, as_views: bool
) -> list[GradientBucket]:
    """Buckets for the gradients of parameters, in the order in which the backward pass is likely to fill them; each of
    the groups is a bucket."""
    buckets: list[GradientBucket] = [GroupedBucket(group, options) for group in groups]
    grouped = {id(slot) for group in groups for slot in group}
    filling: dict[Any, list[GradientSlot]] = {}
    for slot in reversed(slots):
        if id(slot) in grouped:
            continue
        bucket_type = _bucket_type(slot, options, as_views)
        key = (bucket_type,) if bucket_type is GroupedBucket else (bucket_type, slot.dtype, slot.param.device)
        members = filling.setdefault(key, [])
        most = PACKED_BYTES if bucket_type in (PackedBucket, DeferredBucket) else GROUPED_BYTES
        if members and sum(member.nbytes for member in members) + slot.nbytes > most:
            buckets.append(bucket_type(members, options))
            members = filling[key] = []
        members.append(slot)
    return [*buckets, *(bucket_type(members, options) for (bucket_type, *_), members in filling.items())]


def _bucket_type(slot: GradientSlot, options: GradientOptions, as_views: bool) -> type[GradientBucket]:
    # A compressor of the user's sees each gradient by itself.
    if not is_built_in(options.compression):
        return GroupedBucket
    if as_views:
        return ViewedBucket
    if slot.nbytes <= TINY:
        return DeferredBucket
    return PackedBucket if slot.nbytes <= SMALL else GroupedBucket
