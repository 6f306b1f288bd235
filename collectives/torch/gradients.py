"""Gradients on their way: hooks that notice when a gradient is there, and let a bucket leave when its last one is.

    backward       autograd has finished the gradient of a parameter -> its hook -> the bucket is complete -> it leaves
    synchronize    what is left leaves; wait; the results are where the optimizer looks, in ``parameter.grad``

What a bucket holds is settled beforehand and alike on all ranks, from the last parameter to the first, which is about the order of the
backward pass (as in S. Li et al., "PyTorch Distributed", VLDB 2020). In which order buckets fill up may differ: they are matched by name.

A parameter without a gradient on one rank may have one on another. Such a rank contributes zeros, and says so in the *tally*, one number
that is summed over the ranks in every step. Only where the tally is not zero do the ranks compare which parameters nobody has used: those
keep ``grad = None``, as on a single process, and the optimizer leaves them alone.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.reduction import Op
from collectives.runtime import world_of
from collectives.torch.buckets import Bucket, Late, Slot, Sparse, Viewed, Way, arrange
from collectives.torch.compiled import untraced
from collectives.world import World


class Reducer:
    """Combines the gradients of some parameters over the ranks while the backward pass goes on.

    Args:
        named: the parameters, with names that are alike on all ranks.
        way: how they are combined.
        passes: backward passes until the gradients leave.
        groups: of parameters whose gradients travel together.
        as_views: gradients live in their buckets.
        sparse_as_dense: sparse gradients become dense in order to travel, and sparse again.

    Attributes:
        begun: a backward pass has begun since the last `synchronize`.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Any]],
        way: Way,
        passes: int = 1,
        groups: Sequence[Sequence[Any]] = (),
        as_views: bool = False,
        sparse_as_dense: bool = False,
    ) -> None:
        self.begun = False
        self._way = way
        self._passes = passes
        self._as_views = as_views
        self._sparse_as_dense = sparse_as_dense
        self._lock = threading.Lock()  # autograd has one thread for each GPU
        self._slots: list[Slot] = []
        self._frozen: list[tuple[str, Any]] = []
        self._buckets: list[Bucket] = []
        self._tally = np.zeros(1, np.int64)
        self._hooks: list[Any] = []
        weakref.finalize(self, _remove, self._hooks)
        self.add(named, groups)

    def add(self, named: Sequence[tuple[str, Any]], groups: Sequence[Sequence[Any]] = ()) -> None:
        """Take on further parameters. Frozen ones are noted, and taken on by `synchronize` once they require gradients."""
        self._frozen += [(name, param) for name, param in named if not param.requires_grad]
        slots = [Slot(name, param, self._passes) for name, param in named if param.requires_grad]
        place = {id(slot.param): slot for slot in slots}
        wanted = [[place[id(param)] for param in group if id(param) in place] for group in groups]
        self._slots += slots
        self._buckets += arrange(slots, [group for group in wanted if group], self._way, self._as_views)
        for slot in slots:
            if not slot.bucket.late or slot is slot.bucket.slots[0]:  # one of a late bucket's notices that a backward pass has gone by
                self._hooks.append(slot.param.register_post_accumulate_grad_hook(_hook(weakref.ref(self), slot)))

    @property
    def _world(self) -> World:
        return world_of(self._way.process_set)

    def wait_for(self, passes: int) -> None:
        """From now on gradients leave after so many backward passes."""
        self._passes = passes
        for slot in self._slots:
            slot.passes = slot.left = passes

    # ---- backward -----------------------------------------------------------------------------------------------------------------

    def arrived(self, slot: Slot) -> None:
        """A backward pass has finished a gradient; called by its hook.

        Raises:
            AssertionError: it has left already.
        """
        self.begun = True
        slot.left -= 1
        if slot.left:
            if slot.left < 0:
                raise AssertionError(
                    f"gradient of {slot.name!r}: expected at most {self._passes} backward passes (backward_passes_per_step) before "
                    f"optimizer.step() or synchronize(), got one more; raise backward_passes_per_step to accumulate gradients locally"
                )
            return
        if slot.param.grad.is_sparse is not (slot.sparse_dim > 0):
            self._change_layout(slot)
        bucket = slot.bucket
        if isinstance(bucket, Late):
            bucket.note()
            return
        with self._lock:
            bucket.pending -= 1
            complete = not bucket.pending
        if complete:
            bucket.submit()

    def _change_layout(self, slot: Slot) -> None:
        """A gradient has turned out to be sparse, or dense."""
        grad = slot.param.grad
        if grad.is_sparse and self._sparse_as_dense:
            slot.was_sparse = grad.sparse_dim()
            slot.param.grad = grad.to_dense()
            return
        slot.sparse_dim = grad.sparse_dim() if grad.is_sparse else 0
        old = slot.bucket
        at = self._buckets.index(old)
        rest = [other for other in old.slots if other is not slot]
        new: list[Bucket] = [Sparse([slot], slot.name, self._way)] if grad.is_sparse else arrange([slot], [], self._way, self._as_views)
        if rest:
            kept = type(old)(rest, old.name, self._way)
            kept.pending = old.pending - 1
            new.append(kept)
        self._buckets[at : at + 1] = new

    # ---- step -----------------------------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Let everything leave that has not, and wait until all gradients are combined.

        Raises:
            MismatchError, RankFailedError, InvalidArgumentError: as for `collectives.allreduce`, or a gradient was changed on its way. All
                others are waited for first, and the next step begins anew.
        """
        self._thaw()
        late = [slot for bucket in self._buckets if bucket.late for slot in bucket.slots]
        for slot in [slot for slot in late if (grad := slot.param.grad) is not None and grad.is_sparse]:
            self._change_layout(slot)  # it has no hook that would have
        try:
            first = _first_error([bucket.submit for bucket in self._buckets if bucket.handle is None])
            self._tally[0] = sum(len(bucket.missing) for bucket in self._buckets)
            counting = self._world.allreduce_async_(self._tally, op=Op.SUM, name=f"{self._way.label}gradients missing")
            first = _first_error([*(bucket.finish for bucket in self._buckets), counting.wait], first)
            if counting.error is None and self._tally[0]:
                self._settle_unused()
            if first is not None:
                raise first
            self._make_sparse()
        finally:
            self._reset()

    def drop(self) -> None:
        """Wait for what is on its way, and begin anew."""
        first = _first_error([bucket.finish for bucket in self._buckets])
        self._reset()
        if first is not None:
            raise first

    def lay_out(self) -> None:
        """Zeros for the gradients that live in their buckets, for autograd to add to."""
        for bucket in self._buckets:
            if isinstance(bucket, Viewed):
                bucket.lay_out()

    def mean(self, number: float) -> float:
        """The mean of a number over the ranks."""
        return float(self._world.allreduce(number, name=f"{self._way.label}loss"))

    def _thaw(self) -> None:
        thawed = [(name, param) for name, param in self._frozen if param.requires_grad]
        if thawed:
            self._frozen = [(name, param) for name, param in self._frozen if not param.requires_grad]
            self.add(thawed)

    def _settle_unused(self) -> None:
        missing = {id(slot) for bucket in self._buckets for slot in bucket.missing}
        used = np.array([id(slot) not in missing for slot in self._slots], np.uint8)
        self._world.allreduce_(used, op=Op.MAX, name=f"{self._way.label}gradients used")
        for slot, anywhere in zip(self._slots, used, strict=True):
            if not anywhere:
                slot.param.grad = None

    def _make_sparse(self) -> None:
        for slot in self._slots:
            if slot.was_sparse and slot.param.grad is not None:
                slot.param.grad = slot.param.grad.to_sparse(slot.was_sparse)

    def _reset(self) -> None:
        for slot in self._slots:
            slot.left, slot.was_sparse = self._passes, 0
        for bucket in self._buckets:
            bucket.pending = len(bucket.slots)
        self.begun = False


def _hook(reducer: weakref.ref[Reducer], slot: Slot) -> Callable[[Any], None]:
    """A parameter's hook. It does not keep the reducer alive: a new optimizer may have taken its place."""

    @untraced
    def hook(param: Any) -> None:
        there = reducer()
        if there is not None:
            there.arrived(slot)

    return hook


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _first_error(acts: Sequence[Callable[[], Any]], first: Exception | None = None) -> Exception | None:
    """Do all; the first error of any."""
    for act in acts:
        try:
            act()
        except Exception as error:
            first = first or error
    return first
