"""Combining gradients while the backward pass runs: hooks submit a bucket when its last gradient is complete.

    backward       autograd completes a parameter's gradient -> its hook -> the bucket is complete -> it is submitted
    synchronize    the remaining buckets are submitted; wait; the results are in ``parameter.grad``

Where that would only slow down the backward pass, complete buckets are gathered, and all of them are submitted in
``synchronize`` (`holds_back`).

The contents of buckets are equal on all ranks, from the last parameter to the first, which is about the order of the
backward pass (as in S. Li et al., "PyTorch Distributed", VLDB 2020). Ranks may fill buckets in different orders: these
are matched by name. Where an optimizer has its parameters in another order than on another rank, as those of a set, all
ranks take that of the first: they compare their orders in the first step of a world, before anything is submitted.

A parameter may have a gradient on some ranks only. Each rank adds to the `Tally` the number of gradients that were not
submitted in its backward pass, because they are missing, or sparse for the first time. If there are any, the ranks
compare their gradients: a parameter that no rank has used keeps ``grad = None``, zeros replace a gradient that only
other ranks have, and a gradient that is sparse on some rank and dense on none becomes sparse on every rank.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from collectives.base.errors import InvalidArgumentError, RecoverableError
from collectives.base.exclusion import exclusive, give_back
from collectives.base.reduce_op import Op
from collectives.elastic import retry
from collectives.frontends.gradient_options import GradientOptions
from collectives.schedules.registry import REPRODUCIBLE
from collectives.torch import gradient_agreement
from collectives.torch.buckets import GradientBucket, SparseBucket, ViewedBucket, arrange
from collectives.torch.gradient_agreement import Tally
from collectives.torch.gradient_slot import DENSE, GradientSlot, install_hook, may_thaw, remove_hooks, take_over
from collectives.torch.guard import Guard, compiles, grad_of, graph_task, in_backward_elsewhere
from collectives.torch.kept_gradients import KeptGradients
from collectives.worlds.runtime import world_of
from collectives.worlds.world import World


class BackwardReducer:
    """Combines the gradients of some parameters over the ranks during the backward pass.

    Args:
        named: the parameters, with names that are alike on all ranks.
        options: how they are combined; ``name`` is the prefix of all operations' names.
        groups: parameters whose gradients are combined together.
        as_views: gradients live in their buckets.

    Attributes:
        begun: a backward pass has begun since the last `synchronize`.
        combined: the gradients are combined, and have been neither applied nor reset.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Any]],
        options: GradientOptions,
        groups: Sequence[Sequence[Any]] = (),
        as_views: bool = False,
    ) -> None:
        self.begun = self.combined = False
        self._last = False  # the last backward pass has begun: complete gradients are in flight
        self._options = options
        self._passes = options.backward_passes_per_step
        self._keeps_order = options.algorithm == REPRODUCIBLE and self._passes > 1
        self._as_views = as_views
        self._counting: Any = threading.RLock()  # autograd has one thread for each GPU
        self._lock = threading.RLock()  # several threads may read gradients
        self._thread = 0  # that runs the backward pass
        self._task = -1  # autograd's number of the latest backward pass
        self._begun_passes = 0
        self._slots: list[GradientSlot] = []
        self._frozen: list[GradientSlot] = []
        self._buckets: list[GradientBucket] = []
        self._tally = Tally()
        self._kept = KeptGradients()
        self._holds_back = False
        self._in_order = False
        self._results: list[weakref.ref[Any]] = []
        self._newer: weakref.WeakSet[Any] = weakref.WeakSet()
        """Newer reducers and optimizers of some of the parameters."""
        self._guard = Guard(self.combine_for_read, self.refuse)
        self._ordered_in: weakref.ref[World] | None = None  # the world whose ranks have agreed on the order
        self._hooks: list[Any] = []
        weakref.finalize(self, remove_hooks, self._hooks, self._guard)
        self.add(named, groups)

    def add(self, named: Sequence[tuple[str, Any]], groups: Sequence[Sequence[Any]] = ()) -> None:
        """Add parameters. Frozen ones get hooks too, and buckets in the first `synchronize` in which they require
        gradients."""
        take_over((param for _, param in named), self)
        slots = [
            GradientSlot(name, param, self._passes) for name, param in named if param.requires_grad or may_thaw(param)
        ]
        for slot in slots:
            if not slot.param.requires_grad:
                self._frozen.append(slot)
            self._hooks.append(install_hook(slot, weakref.ref(self)))
            self._guard.add(slot.param)
        self._arrange([slot for slot in slots if slot.param.requires_grad], groups)

    def _arrange(self, slots: list[GradientSlot], groups: Sequence[Sequence[Any]] = ()) -> None:
        place = {id(slot.param): slot for slot in slots}
        wanted = [[place[id(param)] for param in group if id(param) in place] for group in groups]
        self._slots += slots
        self._buckets += arrange(slots, [group for group in wanted if group], self._options, self._as_views)

    @property
    def _world(self) -> World:
        return world_of(self._options.process_set)

    @property
    def _rank(self) -> int:
        """This rank's number in messages."""
        return self._world.ranks[self._world.rank]

    def leave_to(self, newer: Any) -> None:
        """Combine nothing but gradients in flight as long as ``newer`` exists."""
        self._newer.add(newer)
        if not self._last:
            self._guard.disarm()
            self._reset()

    def wait_for(self, passes: int) -> None:
        """Submit gradients after this many backward passes from now on."""
        if self._options.algorithm == REPRODUCIBLE:
            self._options.check_tree(passes)
            self._keeps_order = passes > 1
        self._passes = passes
        for slot in (*self._slots, *self._frozen):
            slot.leave_tree()
            slot.passes = slot.left = passes

    # ---- backward

    def arrived(self, slot: GradientSlot) -> None:
        """Note that a backward pass has completed a gradient; called by its hook."""
        if self._keeps_order and slot.left > 0 and not self._newer:
            if self.combined:
                self._begin_again()
            slot.add_to_tree()
        if self._last and slot.left == 1:  # the frequent case: the rest costs as much as a small gradient
            slot.left = 0
            if not slot.deferred:
                self._complete(slot)
            return
        if self._newer:
            if self._last:
                raise InvalidArgumentError(
                    f"gradient of {slot.name!r}: it is still in flight from an earlier DistributedOptimizer; call "
                    "that optimizer's step() before the next backward pass, or make the new optimizer after that "
                    "step() [F21]"
                )
            return  # that combines it
        if self.combined:
            self._begin_again()
        self.begun = True
        slot.left -= 1
        if slot.left < 0:
            raise AssertionError(
                f"gradient of {slot.name!r}: expected at most {self._passes} backward passes "
                "(backward_passes_per_step) before optimizer.step() or synchronize(), got one more; raise "
                "backward_passes_per_step to accumulate gradients locally. If several reentrant checkpoints share "
                "this layer, one pass counts several times: pass use_reentrant=False to them [F22]"
            )
        alone = True
        # Losses that share no parameter have a backward pass each, so the last pass may be another parameter's.
        if not self._last and (self._pass() >= self._passes or not slot.left):
            alone = slot.is_last_hook()  # hooks behind ours run in this pass all the same
            for other in self._slots:
                other.put_hook_last()
            self._in_order = self._ordered_in is not None and self._ordered_in() is self._world
            self._holds_back = not self._in_order or holds_back(self._world)
            self._last = True
        self._thread = threading.get_ident()
        self._guard.arm()
        if not slot.left and alone:  # else a later hook may change the gradient: `synchronize` submits it
            self._complete(slot)

    def _pass(self) -> int:
        """The number of this backward pass since the last `synchronize`; passes of reentrant checkpoints count."""
        task = graph_task()
        if task != self._task:
            self._task = task
            self._begun_passes += 1
        return self._begun_passes

    def _complete(self, slot: GradientSlot) -> None:
        """Submit or gather the slot's bucket if this was its last missing gradient."""
        if self._steps() is not None:
            self._kept.keep(slot)
        bucket = slot.bucket
        if bucket is None or slot.deferred:
            return  # deferred, or frozen until now: `synchronize` submits it
        if slot.place is not None:
            slot.place.move()  # now, while the processor's caches hold it
        try:  # as `exclusively`, without a call
            with self._counting:
                bucket.pending -= 1
                complete = not bucket.pending
        finally:
            if self._counting._is_owned():
                give_back(self._counting)
        if complete and self._may_submit(bucket):
            self._send(bucket)

    def _send(self, bucket: GradientBucket) -> None:
        """Submit a bucket, or gather it if it leaves with others."""
        if self._holds_back and bucket.may_wait:
            bucket.gather()
            return
        if not self._in_order:
            return  # `synchronize` submits it
        try:
            bucket.submit()
        except RecoverableError:
            if self._steps() is None:
                raise  # else `synchronize` finds it not submitted, and fails where the step can be repeated

    def _may_submit(self, bucket: GradientBucket) -> bool:
        """Whether a bucket may be submitted: the ranks must first agree on a gradient that turns out to be sparse."""
        dense_so_far = [(slot, grad_of(slot.param)) for slot in bucket.slots if not slot.sparse_dim]
        sparse = [slot for slot, grad in dense_so_far if grad is not None and grad.is_sparse]
        if self._options.sparse_as_dense:
            for slot in sparse:
                slot.densify()
            return True
        return not sparse

    def _begin_again(self) -> None:
        """Handle a backward pass that follows gradients that were combined and not applied.

        Where they are still there, it adds this rank's gradients to the combined ones: right for means only, and not
        by the fixed tree.
        """
        self.combined = False
        kept = {id(grad) for result in self._results if (grad := result()) is not None}
        for slot in self._slots:
            if id(grad_of(slot.param)) in kept:
                option = "algorithm='reproducible'" if self._keeps_order else f"op={self._options.op.name}"
                raise AssertionError(
                    f"gradient of {slot.name!r}: a backward pass came after the gradients were combined (by reading "
                    f"one, or by optimizer.synchronize()) and before optimizer.step() or zero_grad(): with {option}, "
                    "combining them again would give a wrong result; read gradients after the last backward pass, "
                    "and raise backward_passes_per_step to accumulate locally [F23]"
                )

    # ---- step

    @exclusive
    def combine_for_read(self, copies: bool) -> None:
        """Combine all gradients, because the program reads one, or ``copies`` its parameter."""
        if not self._guard.armed:
            return  # another thread has combined them meanwhile
        if not self._last and (copies or compiles()):
            return  # they are this rank's own yet, and a further pass may follow
        if in_backward_elsewhere(self._thread):
            raise InvalidArgumentError(
                "parameter.grad: another thread read a gradient during a backward pass, while gradients are in "
                "flight and incomplete; read gradients in the thread that trains, between backward() and "
                "optimizer.step(), and pass copies to other threads [F24]"
            )
        self.synchronize(reads=True)

    def refuse(self, param: Any) -> None:
        """Refuse a hook's access, in the backward pass, to a gradient that was submitted."""
        submitted = [slot for bucket in self._buckets if bucket.in_flight for slot in bucket.slots]
        for slot in submitted:
            if slot.param is param:
                raise InvalidArgumentError(
                    f"gradient of {slot.name!r}: a hook used it during the backward pass, after it was sent to the "
                    "other ranks; read it in a hook of its own parameter, or after the backward pass [F25]"
                )

    @exclusive
    def synchronize(self, reads: bool = False, applies: bool = False) -> None:
        """Submit the remaining buckets, and wait until all gradients are combined.

        Args:
            reads: the program reads a gradient.
            applies: the program applies the gradients without having read them.

        Raises:
            MismatchError, RankFailedError, InvalidArgumentError: as for `collectives.allreduce`, or a gradient was
                changed while it was in flight. All operations are complete by then, and the next step begins anew.
        """
        if self._newer and not self.begun:
            raise InvalidArgumentError(
                f"optimizer of {(*self._slots, *self._frozen)[0].name!r}: step() was called on an earlier "
                "DistributedOptimizer of these parameters, which combines no gradients while a newer one exists; "
                "call step() on the newest one, or delete that [F26]"
            )
        if self.combined:  # another thread has combined them
            return
        for slot in self._slots if self._keeps_order else ():
            slot.leave_tree()
        steps = self._steps()
        if steps is None:
            self._combine(reads, applies)
            return
        for slot in self._slots:
            if slot.bucket is None or not slot.bucket.in_flight:
                self._kept.keep(slot)

        combined = self._tally.combined
        try:
            steps.carry_out(
                self._options.name, lambda _: self._combine(reads, applies), lambda: self._restore(combined)
            )
        finally:
            self._kept.forget()

    def _steps(self) -> retry.Steps | None:
        return retry.steps(self._options.process_set, self._options.op)

    def _restore(self, combined: int) -> None:
        """Make gradients this rank's own again, which were combined, or partly; ``combined``: how often they were
        before. Ranks that have not come to it yet combine them for the first time."""
        self.combined, self.begun = False, True
        self._tally.combined = combined
        self._kept.restore(self._slots, self._as_views)

    def _combine(self, reads: bool, applies: bool) -> None:
        self._guard.disarm()
        self._thaw()
        try:
            first = _first_error([self._order])
            deferred = [
                bucket for bucket in self._buckets if bucket.deferred and not any(slot.left for slot in bucket.slots)
            ]
            first = _first_error(
                [functools.partial(self._send, bucket) for bucket in deferred if self._may_submit(bucket)], first
            )
            first = _first_error([lambda: self._count(reads, applies and not self.begun)], first)
            if not self._tally.same_layouts:
                first = _first_error(
                    [lambda: gradient_agreement.disagree(self._world, self._options.name, self._buckets)], first
                )
            else:
                first = _first_error([bucket.submit for bucket in self._buckets if bucket.gathered], first)
                if first is not None or not self._tally.all_submitted:
                    first = _first_error([self._compare], first)
            _run_all([*(bucket.finish for bucket in self._buckets), lambda: self._tally.check(self._rank)], first)
            self._settle()
        finally:
            self._reset()
            self._tally.combined += 1
        self.combined = True
        if self._options.op is not Op.AVERAGE or self._keeps_order:
            self._results = [weakref.ref(slot.param.grad) for slot in self._slots if slot.param.grad is not None]

    def _order(self) -> None:
        """Have the parameters in one order on all ranks; once in a world."""
        world = self._world
        if self._ordered_in is None or self._ordered_in() is not world:
            order = gradient_agreement.agree_on_order(world, self._options.name, [slot.name for slot in self._slots])
            if order is not None:
                for slot in self._slots:
                    slot.sparse_dim = 0
                    if slot.empty:
                        slot.param.grad = None
                slots, self._slots, self._buckets = sorted(self._slots, key=lambda slot: order[slot.name]), [], []
                self._arrange(slots)
            self._ordered_in = weakref.ref(world)
        self._in_order = True

    def split(self) -> None:
        """Divide combined sums by the number of ranks, so that they may be added to and combined again."""
        if self.combined:
            self.combined = False
            if self._options.op is Op.SUM:
                gradients = [slot.param.grad for slot in self._slots if slot.param.grad is not None]
                with torch.no_grad():
                    torch._foreach_div_(gradients, self._world.size)

    def any_in_flight(self) -> bool:
        """Whether any rank has gradients that are complete and not combined. A collective call."""
        return bool(self._world.allreduce(int(self._last), op=Op.MAX, name=f"{self._options.name}gradients in flight"))

    def end_step(self) -> None:
        """Note that gradients were applied or reset."""
        self.combined = False
        self._tally.combined = 0

    def drop(self) -> None:
        """Wait for operations in flight, and begin anew."""
        self._guard.disarm()
        self.end_step()
        # Of ranks that gather buckets and ranks that do not, all must submit the same.
        first = _first_error([bucket.submit for bucket in self._buckets if bucket.gathered])
        self._reset()
        self._kept.forget()
        _run_all([bucket.finish for bucket in self._buckets], first)

    def reset_views(self) -> None:
        """Set gradients that are views of their buckets to zeros, for autograd to add to."""
        for bucket in self._buckets:
            if isinstance(bucket, ViewedBucket):
                bucket.reset()

    def mean(self, number: float) -> float:
        """The mean of a number over the ranks. A collective call."""
        return float(self._world.allreduce(number, name=f"{self._options.name}loss"))

    def _thaw(self) -> None:
        thawed = [slot for slot in self._frozen if slot.param.requires_grad]
        if thawed:
            self._frozen = [slot for slot in self._frozen if not slot.param.requires_grad]
            self._arrange(thawed)

    def _count(self, reads: bool, idle: bool) -> None:
        remaining = [bucket for bucket in self._buckets if not bucket.in_flight]
        for bucket in remaining:
            bucket.refit()
        missing = sum(len(bucket.slots) for bucket in remaining)
        layout = sum(bucket.fingerprint for bucket in self._buckets)
        self._tally.sum(self._world, f"{self._options.name}gradients missing", missing, reads, idle, layout)

    def _compare(self) -> None:
        """Agree on which gradients exist and which are sparse, and submit the remaining buckets."""
        gradient_agreement.agree_on_kinds(self._world, self._options.name, self._slots)
        for slot in self._slots:
            if slot.sparse_dim:
                continue
            if 0 < slot.kind < DENSE and not self._options.sparse_as_dense:
                self._make_room(slot)
            elif slot.param.grad is not None and slot.param.grad.is_sparse:
                slot.densify()
        remaining = [
            bucket for bucket in self._buckets if not bucket.in_flight and any(slot.kind for slot in bucket.slots)
        ]
        refuse_swapped = functools.partial(gradient_agreement.refuse_swapped, self._slots)
        _run_all([*(bucket.submit for bucket in remaining), refuse_swapped])

    def _make_room(self, slot: GradientSlot) -> None:
        """Give a gradient that turned out to be sparse a bucket of its own."""
        slot.sparse_dim = slot.kind
        old = slot.bucket
        assert old is not None
        rest = [other for other in old.slots if other is not slot]
        new: list[GradientBucket] = [SparseBucket([slot], self._options)]
        if rest:
            new.append(type(old)(rest, self._options))
        at = self._buckets.index(old)
        self._buckets[at : at + 1] = new

    def _settle(self) -> None:
        """Make gradients what one process would have: None of unused parameters, sparse where they were sparse."""
        for slot in self._slots:
            if slot.kind == 0:
                slot.param.grad = None
            elif self._options.sparse_as_dense and (dims := slot.was_sparse or slot.kind % DENSE):
                slot.param.grad = slot.param.grad.to_sparse(dims)

    def _reset(self) -> None:
        for slot in (*self._slots, *self._frozen):
            slot.left, slot.was_sparse, slot.kind = self._passes, 0, DENSE
            slot.subtrees.clear()
        for bucket in self._buckets:
            bucket.pending = len(bucket.slots)
        self.begun = self._last = False
        self._begun_passes = 0


def holds_back(world: World) -> bool:
    """Whether buckets wait for the end of the backward pass: all ranks are on one host, where each has one core.

    There a background thread would take turns with the backward pass on that core, and there is no network latency to
    hide: every round would only cost two context switches.
    """
    if not world.planner.placement.one_host:
        return False
    # Ranks are bound to cores of their own, or share those of the host.
    cores = os.cpu_count() or 1
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return min(own, cores // world.local_size) <= 1


def _first_error(functions: Sequence[Callable[[], Any]], first: Exception | None = None) -> Exception | None:
    """Run all functions. Returns the first error of any."""
    for function in functions:
        try:
            function()
        except Exception as error:
            first = first or error
    return first


def _run_all(functions: Sequence[Callable[[], Any]], first: Exception | None = None) -> None:
    """Run all functions. Raises the first error, of any or from before."""
    first = _first_error(functions, first)
    if first is not None:
        raise first
