"""Gradients on their way: hooks that notice when a gradient is there, and let a bucket leave when its last one is.

    backward       autograd has finished the gradient of a parameter -> its hook -> the bucket is complete -> it leaves
    synchronize    what is left leaves; wait; the results are where the optimizer looks, in ``parameter.grad``

What a bucket holds is settled beforehand and alike on all ranks, from the last parameter to the first, which is about
the order of the backward pass (as in S. Li et al., "PyTorch Distributed", VLDB 2020). In which order buckets fill up
may differ: they are matched by name.

A parameter without a gradient on one rank may have one on another, and only there is it known whether it is sparse.
Each rank says how many gradients have not left in its backward pass, being missing or sparse for the first time, in the
*tally*, which is summed in every step. Only where there are any do the ranks compare what each of them has. What nobody
has used then keeps ``grad = None`` and does not travel, zeros travel where somebody has a gradient, and one that is
sparse somewhere and dense nowhere is sparse on every rank.

The tally also shows whether all ranks are in the same step: a rank that has combined its gradients more often than the
others (because it alone has read them between two backward passes) would otherwise combine them with those of another
step. And whether a rank without a backward pass comes with its ``step()`` only, while others have read gradients: what
they do to them, such as clipping, it would not do.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from collectives.base.errors import InvalidArgumentError, MismatchError
from collectives.base.reduce_op import Op
from collectives.frontends.gradient_options import GradientOptions
from collectives.runtime import world_of
from collectives.torch.buckets import Bucket, Slot, Sparse, Viewed, arrange
from collectives.torch.compiled import untraced
from collectives.torch.guard import Guard, grad_of, graph_task, in_backward_elsewhere
from collectives.world import World

_DENSE = 255
"""What a rank says of a dense gradient where the ranks compare; of a sparse one its sparse dimensions, of none 0."""


class Reducer:
    """Combines the gradients of some parameters over the ranks while the backward pass goes on.

    Args:
        named: the parameters, with names that are alike on all ranks.
        options: how they are combined; ``name`` goes before the names of all operations.
        groups: parameters whose gradients are combined together.
        as_views: gradients live in their buckets.

    Attributes:
        begun: a backward pass has begun since the last `synchronize`.
        combined: the gradients are those of all ranks, and have neither been applied nor reset.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Any]],
        options: GradientOptions,
        groups: Sequence[Sequence[Any]] = (),
        as_views: bool = False,
    ) -> None:
        self.begun = self.combined = False
        self._rounds = 0  # of `synchronize` since gradients were last applied or reset
        self._options = options
        self._passes = options.backward_passes_per_step
        self._as_views = as_views
        self._lock = threading.Lock()  # autograd has one thread for each GPU
        self._turn = threading.RLock()  # of threads that synchronize
        self._thread = 0  # of the backward pass
        self._task = -1  # of autograd's, the backward pass that was seen last
        self._begun_passes = 0
        self._slots: list[Slot] = []
        self._frozen: list[Slot] = []
        self._buckets: list[Bucket] = []
        self._tally = np.zeros(6, np.int64)
        self._results: list[weakref.ref[Any]] = []
        self._guard = Guard(self.join, self.refuse)
        self._hooks: list[Any] = []
        weakref.finalize(self, _remove, self._hooks, self._guard)
        self.add(named, groups)

    def add(self, named: Sequence[tuple[str, Any]], groups: Sequence[Sequence[Any]] = ()) -> None:
        """Take on further parameters. Frozen ones are watched, and get their buckets in `synchronize` once they require
        gradients."""
        slots = [Slot(name, param, self._passes) for name, param in named if param.requires_grad or _may_thaw(param)]
        for slot in slots:
            frozen = not slot.param.requires_grad
            if frozen:
                self._frozen.append(slot)
                slot.param.requires_grad_(True)  # else torch takes no hook
            handle = slot.param.register_post_accumulate_grad_hook(_hook(weakref.ref(self), slot))
            if frozen:
                slot.param.requires_grad_(False)
            slot.hook = handle.id
            self._hooks.append(handle)
            self._guard.add(slot.param)
        self._arrange([slot for slot in slots if slot.param.requires_grad], groups)

    def _arrange(self, slots: list[Slot], groups: Sequence[Sequence[Any]] = ()) -> None:
        """Make buckets for further slots."""
        place = {id(slot.param): slot for slot in slots}
        wanted = [[place[id(param)] for param in group if id(param) in place] for group in groups]
        self._slots += slots
        self._buckets += arrange(slots, [group for group in wanted if group], self._options, self._as_views)

    @property
    def _world(self) -> World:
        return world_of(self._options.process_set)

    def wait_for(self, passes: int) -> None:
        """From now on gradients leave after so many backward passes."""
        self._passes = passes
        for slot in (*self._slots, *self._frozen):
            slot.passes = slot.left = passes

    # ---- backward
    # -----------------------------------------------------------------------------------------------------------------

    def arrived(self, slot: Slot) -> None:
        """A backward pass has finished a gradient; called by its hook.

        Raises:
            AssertionError: it has left already.
        """
        if self._guard.armed and slot.left == 1:  # as nearly all: what follows costs as much as a small gradient
            slot.left = 0
            if not slot.late:
                self._complete(slot)
            return
        if self.combined:
            self._begin_again()
        self.begun = True
        slot.left -= 1
        if slot.left < 0:
            raise AssertionError(
                f"gradient of {slot.name!r}: expected at most {self._passes} backward passes "
                f"(backward_passes_per_step) before "
                f"optimizer.step() or synchronize(), got one more; raise backward_passes_per_step to accumulate "
                f"gradients "
                f"locally. One pass counts several times for a layer that several reentrant checkpoints share: pass "
                f"use_reentrant=False to them"
            )
        alone = True
        # The last pass may be another parameter's: losses that share none have a pass each.
        if not self._guard.armed and (self._pass() >= self._passes or not slot.left):
            alone = slot.is_last_hook()  # torch runs what follows it all the same
            for other in self._slots:
                other.put_hook_last()
            self._thread = threading.get_ident()
            self._guard.arm()
        if (
            not slot.left and alone
        ):  # else a hook that may change the gradient is yet to come: it leaves in `synchronize`
            self._complete(slot)

    def _pass(self) -> int:
        """The number of this backward pass since the last `synchronize`; those of reentrant checkpoints count, too."""
        task = graph_task()
        if task != self._task:
            self._task = task
            self._begun_passes += 1
        return self._begun_passes

    def _complete(self, slot: Slot) -> None:
        """A gradient may leave: with its bucket, once that has all of them."""
        bucket = slot.bucket
        if bucket is None or slot.late:
            return  # it was frozen until now, or is late, and leaves in `synchronize`
        with self._lock:
            bucket.pending -= 1
            complete = not bucket.pending
        if complete and self._may_leave(bucket):
            bucket.submit()

    def _may_leave(self, bucket: Bucket) -> bool:
        """Whether no gradient of a bucket has turned out to be sparse: the ranks have to agree on that first."""
        dense_so_far = [(slot, grad_of(slot.param)) for slot in bucket.slots if not slot.sparse_dim]
        sparse = [slot for slot, grad in dense_so_far if grad is not None and grad.is_sparse]
        if self._options.sparse_as_dense:
            for slot in sparse:
                self._densify(slot)
            return True
        return not sparse

    def _begin_again(self) -> None:
        """A backward pass follows gradients that are combined, and were not applied.

        Where they are still there, it adds this rank's part to what all ranks have: right for means, not for sums.
        """
        self.combined = False
        kept = {id(grad) for result in self._results if (grad := result()) is not None}
        for slot in self._slots:
            if id(grad_of(slot.param)) in kept:
                raise AssertionError(
                    f"gradient of {slot.name!r}: expected no backward pass between reading gradients or "
                    f"optimizer.synchronize(), "
                    f"which combine them, and optimizer.step() or zero_grad(): with op={self._options.op.name} it would "
                    f"combine them "
                    f"again; read them after the last backward pass, and raise backward_passes_per_step to "
                    f"accumulate locally"
                )

    @staticmethod
    def _densify(slot: Slot) -> None:
        grad = grad_of(slot.param)
        slot.was_sparse = grad.sparse_dim()
        slot.param.grad = grad.to_dense()

    # ---- step
    # ------------------------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Somebody reads a gradient in flight.

        Raises:
            InvalidArgumentError: while another thread runs a backward pass, whose gradients are not complete.
        """
        with self._turn:
            if not self._guard.armed:
                return  # another thread has combined them meanwhile, and may have applied them
            if in_backward_elsewhere(self._thread):
                raise InvalidArgumentError(
                    "parameter.grad: expected it to be read by the thread that trains, or when no backward pass is "
                    "under way: "
                    "gradients are in flight and not complete; read them there, between backward() and "
                    "optimizer.step(), and hand "
                    "over copies"
                )
            self.synchronize(reads=True)

    def refuse(self, param: Any) -> None:
        """A hook reads or sets the gradient of a parameter in the backward pass.

        Raises:
            InvalidArgumentError: it has left.
        """
        for bucket in self._buckets:
            if bucket.handle is not None:
                for slot in bucket.slots:
                    if slot.param is param:
                        raise InvalidArgumentError(
                            f"gradient of {slot.name!r}: expected it to be left alone within the backward pass, when "
                            f"it has left for the "
                            f"other ranks; read it in a hook of its own parameter, or after the backward pass"
                        )

    def synchronize(self, reads: bool = False, applies: bool = False) -> None:
        """Let everything leave that has not, and wait until all gradients are combined.

        Args:
            reads: because the program reads a gradient.
            applies: because it applies them, and has not asked for them before.

        Raises:
            MismatchError, RankFailedError, InvalidArgumentError: as for `collectives.allreduce`, or a gradient was
                changed on its way. All others are waited for first, and the next step begins anew.
        """
        with self._turn:
            if not self.combined:  # by another thread
                self._combine(reads, applies)

    def _combine(self, reads: bool, applies: bool) -> None:
        self._guard.disarm()
        self._thaw()
        try:
            late = [bucket for bucket in self._buckets if bucket.late and not any(slot.left for slot in bucket.slots)]
            first = _first_error([bucket.submit for bucket in late if self._may_leave(bucket)])
            first = _first_error([lambda: self._count(reads, applies and not self.begun)], first)
            if first is not None or self._tally[0]:
                first = _first_error([self._compare], first)
            first = _first_error([*(bucket.finish for bucket in self._buckets), self._look_for_other_steps], first)
            if first is not None:
                raise first
            self._settle()
        finally:
            self._reset()
            self._rounds += 1
        self.combined = True
        if self._options.op in (Op.SUM, Op.PRODUCT):
            self._results = [weakref.ref(slot.param.grad) for slot in self._slots if slot.param.grad is not None]

    def split(self) -> None:
        """Turn combined gradients into this rank's part of them, so that combining what is added to them is right."""
        if self.combined:
            self.combined = False
            if self._options.op is Op.SUM:
                gradients = [slot.param.grad for slot in self._slots if slot.param.grad is not None]
                with torch.no_grad():
                    torch._foreach_div_(gradients, self._world.size)

    def any_in_flight(self) -> bool:
        """Whether gradients are complete on any rank, and not combined yet; asked by all ranks."""
        return bool(
            self._world.allreduce(int(self._guard.armed), op=Op.MAX, name=f"{self._options.name}gradients in flight")
        )

    def end_step(self) -> None:
        """Gradients have been applied or reset."""
        self.combined = False
        self._rounds = 0

    def drop(self) -> None:
        """Wait for what is on its way, and begin anew."""
        self._guard.disarm()
        self.end_step()
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
        return float(self._world.allreduce(number, name=f"{self._options.name}loss"))

    def _thaw(self) -> None:
        thawed = [slot for slot in self._frozen if slot.param.requires_grad]
        if thawed:
            self._frozen = [slot for slot in self._frozen if not slot.param.requires_grad]
            self._arrange(thawed)

    def _count(self, reads: bool, idle: bool) -> None:
        """Sum the tally: gradients that have not left, ranks, their rounds, these squared, and ranks that read, and
        that are idle.

        A joined rank adds zeros.
        """
        staying = sum(len(bucket.slots) for bucket in self._buckets if bucket.handle is None)
        self._tally[:] = staying, 1, self._rounds, self._rounds * self._rounds, reads, idle
        self._world.allreduce_(self._tally, op=Op.SUM, name=f"{self._options.name}gradients missing")

    def _compare(self) -> None:
        """Find out what all ranks have, and let the remaining buckets leave."""
        kinds = np.array([_kind(slot) for slot in self._slots], np.uint8)
        self._world.allreduce_(kinds, op=Op.MAX, name=f"{self._options.name}gradients used")
        for slot, kind in zip(self._slots, kinds.tolist(), strict=True):
            slot.kind = kind
            if slot.sparse_dim:
                continue
            if 0 < kind < _DENSE and not self._options.sparse_as_dense:
                self._make_room(slot, kind)
            elif slot.param.grad is not None and slot.param.grad.is_sparse:
                self._densify(slot)
        staying = [
            bucket for bucket in self._buckets if bucket.handle is None and any(slot.kind for slot in bucket.slots)
        ]
        first = _first_error([bucket.submit for bucket in staying])
        if first is not None:
            raise first

    def _make_room(self, slot: Slot, sparse_dim: int) -> None:
        """A gradient has turned out to be sparse."""
        slot.sparse_dim = sparse_dim
        old = slot.bucket
        assert old is not None
        rest = [other for other in old.slots if other is not slot]
        new: list[Bucket] = [Sparse([slot], slot.name, self._options)]
        if rest:
            new.append(type(old)(rest, old.name, self._options))
        at = self._buckets.index(old)
        self._buckets[at : at + 1] = new

    def _settle(self) -> None:
        """Gradients as they would be in one process: None where nobody has used the parameter, sparse where they
        were."""
        for slot in self._slots:
            if slot.kind == 0:
                slot.param.grad = None
            elif self._options.sparse_as_dense and (dims := slot.was_sparse or slot.kind % _DENSE):
                slot.param.grad = slot.param.grad.to_sparse(dims)

    def _look_for_other_steps(self) -> None:
        _, ranks, rounds, squares, reading, idle = self._tally.tolist()
        if ranks * squares != rounds * rounds:
            raise MismatchError(
                f"rank {self._world.rank}: gradients were combined with those of another step on another rank, which "
                f"has combined "
                f"them more or less often since its last step (here: {self._rounds} times before); call "
                f"optimizer.step() and "
                f"synchronize(), and read gradients between two backward passes, equally often on every rank"
            )
        if reading and idle:
            raise MismatchError(
                f"rank {self._world.rank}: {reading} of {ranks} ranks read gradients before optimizer.step(), where "
                f"{idle} had no backward "
                f"pass, and came in optimizer.step() only: what the others do to gradients, such as clipping, would "
                f"not be done there; "
                f"call optimizer.synchronize() on every rank before gradients are read, or optimizer.step() on none that has no data"
            )

    def _reset(self) -> None:
        for slot in (*self._slots, *self._frozen):
            slot.left, slot.was_sparse, slot.kind = self._passes, 0, _DENSE
        for bucket in self._buckets:
            bucket.pending = len(bucket.slots)
        self.begun = False
        self._begun_passes = 0


def _hook(reducer: weakref.ref[Reducer], slot: Slot) -> Callable[[Any], None]:
    """A parameter's hook. It does not keep the reducer alive: a new optimizer may have taken its place."""

    @untraced
    def hook(param: Any) -> None:
        there = reducer()
        if there is not None:
            there.arrived(slot)

    return hook


def _may_thaw(param: Any) -> bool:
    """Whether a frozen parameter can ever require gradients."""
    return (param.is_floating_point() or param.is_complex()) and not param.is_inference()


def _remove(hooks: list[Any], guard: Guard) -> None:
    guard.disarm()
    for hook in hooks:
        hook.remove()


def _kind(slot: Slot) -> int:
    """What this rank says of a gradient where the ranks compare."""
    if slot.empty:
        return 0
    grad = slot.param.grad
    return int(grad.sparse_dim()) if grad.is_sparse else slot.sparse_dim or slot.was_sparse or _DENSE


def _first_error(acts: Sequence[Callable[[], Any]], first: Exception | None = None) -> Exception | None:
    """Do all; the first error of any."""
    for act in acts:
        try:
            act()
        except Exception as error:
            first = first or error
    return first
