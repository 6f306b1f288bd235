"""Persistent operations: requests that are bound, once, to the memory of every rank.

A persistent operation has a request of its own, with a number that all ranks have agreed on, so that it meets nothing
but itself. Its arrays stay, and so do their addresses, which the ranks exchange when it is made: a start enters its
round with the token alone, and its task has nothing to look up.

While a rank has joined, the operation is carried out as the ordinary one that it was made from: the neutral elements of
that rank are not where the operation is bound to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from collectives.engine.batches import Batch
from collectives.engine.context import Context, address
from collectives.engine.handles import Handle
from collectives.engine.host_handles import EMPTY
from collectives.engine.request_cache import CachedRequest
from collectives.engine.tasks import HostTask, OneTensor, Task, Words, exchanged_rows
from collectives.transport.base import Array

Addresses = Sequence[tuple[int, int]]
"""Of every rank's input and output."""


class Bound:
    """The request, the task and the handles of one persistent operation; a `collectives.engine.request_cache.Binding`.

    Args:
        context: of the world.
        template: a handle of the ordinary operation, which is not submitted; of a gather, `place_gathered` has placed
            its result.
        number: the operation's, equal on every rank.
        result: what every start returns.
        addresses: for each tensor those of every rank.
        rows: for each tensor the rows of every rank, or of every pair of ranks, if it is gathered.
        threshold: the bytes at which a bucket ends, at present.

    Attributes:
        entry: the request.
        source, out: the arrays; of a grouped operation tuples of them.
    """

    def __init__(
        self,
        context: Context,
        template: Handle,
        number: int,
        result: Any,
        addresses: Sequence[Addresses],
        rows: Sequence[tuple[int, ...]],
        threshold: Callable[[], int],
    ) -> None:
        self._template = template
        self._result = result
        self._parts = template.members or (template,)
        for part in self._parts:
            _fix(part)
        self.source: Any = template.source
        self.out: Any = template.out
        bound = [
            self._bind(context, part, number, its_rows, its_addresses)
            for part, its_rows, its_addresses in zip(self._parts, rows, addresses, strict=True)
        ]
        if not template.members:
            (self.entry,) = self._entries = bound
            return
        self.source, self.out = tuple(part.source for part in self._parts), tuple(part.out for part in self._parts)
        self.entry = template.entry.persistent(number, self)
        self.entry.simple, self.entry.nbytes = True, sum(part.entry.nbytes for part in self._parts)
        members = [
            Handle(entry, part.source, part.out, _nothing) for entry, part in zip(bound, self._parts, strict=True)
        ]
        self.entry.step = BoundGroup(context, self.entry, members, threshold)
        self._entries = [self.entry, *(entry for entry in bound if entry.binding is self)]

    def _bind(
        self, context: Context, part: Handle, number: int, rows: tuple[int, ...], addresses: Addresses
    ) -> CachedRequest:
        """The request of one tensor: in a group the ordinary one, if the tensor is fused with others."""
        ordinary = part.entry
        if ordinary.fuses_with is not None and part is not self._template:
            return ordinary
        plan = functools.partial(context.entries.plan_for_rows, ordinary, rows) if rows else None
        entry = ordinary.persistent(number, self, plan)
        entry.step, entry.simple = BoundTensor(context, entry, addresses), True
        return entry

    def handle(self) -> Handle:
        made = self._template
        handle = Handle(self.entry, self.source, self.out, self._deliver, self, reads=made.reads, writes=made.writes)
        handle.extents = made.extents
        return handle

    def unbind(self, handle: Handle) -> None:
        handle.entry = self._template.entry
        handle.members = [
            Handle(part.entry, part.source, part.out, part.deliver, part.keep) for part in self._template.members
        ]
        for place, member in enumerate(handle.members):
            member.place, member.key = place, handle.key

    def run_alone(self, scale: Callable[[CachedRequest, Array, Array], None]) -> None:
        """Carry it out in a world of one rank; ``scale`` copies and scales."""
        for part in self._parts:
            scale(part.entry, part.source, part.out)

    def release(self) -> None:
        """Drop the plans, which refer to windows and to the peers' memory."""
        for entry in self._entries:
            entry.release()

    def free(self) -> None:
        """Drop the plans and the tensors; it is not started any more. The engine may still know the request."""
        for entry in self._entries:
            if entry.step is not None:
                entry.step.forget()
            entry.release()
        self._parts, self._result, self.source, self.out = (), None, EMPTY, EMPTY
        del self._template

    def _deliver(self, handle: Handle) -> Any:
        return self._result


class Rebuilt:
    """A persistent operation whose tensors cannot be bound: every start makes the ordinary handle anew. A `Binding`.

    Args:
        template: a handle of the ordinary operation.
        number: the operation's, equal on every rank.
    """

    def __init__(self, template: Handle, number: int) -> None:
        self._ordinary = template.entry
        self.entry = template.entry.persistent(number, self)

    def adopt(self, handle: Handle) -> Handle:
        """Make an ordinary handle one of this operation."""
        handle.entry = self.entry
        return handle

    def handle(self) -> Handle:
        raise AssertionError("every start of this operation brings its handle")

    def unbind(self, handle: Handle) -> None:
        handle.entry = self._ordinary

    def release(self) -> None:
        """Drop the plans, which refer to windows."""
        self.entry.release()


class BoundTensor(OneTensor):
    """A persistent operation on one tensor, or one of a group's.

    Args:
        context, entry: as of `OneTensor`.
        addresses: of every rank's tensor.
    """

    def __init__(self, context: Context, entry: CachedRequest, addresses: Addresses) -> None:
        super().__init__(context, entry)
        self._addresses = list(addresses)
        self._input_at, self._output_at = self._addresses[context.rank]

    def bind(self) -> None:
        super().bind()
        plan = self._plan
        if plan is not None and plan.needs_addresses and self.bound is None:
            self.bound = self._place, self._run_in_place

    def prepare(self, source: Array, out: Array) -> Words:
        self._plan = plan = self.entry.plan()
        if plan is None or not plan.needs_addresses:
            return super().prepare(source, out)
        self.description = plan.description
        return self._place(source, out)

    def run(self) -> None:
        plan = self._plan
        if plan is None or not plan.needs_addresses:
            super().run()
        else:
            self._run_in_place()

    def forget(self) -> None:
        """Drop the plan."""
        self.attempt = self.bound = self._plan = None

    def _place(self, source: Array, out: Array) -> Words:
        """Have the executor read and write the arrays, whose addresses all ranks know."""
        state = self._state
        state.input, state.output, state.input_at, state.output_at = source, out, self._input_at, self._output_at
        return ()

    def _run_in_place(self) -> None:
        plan, state = self._plan, self._state
        assert plan is not None
        state.addresses[:] = self._addresses
        self._context.run_plan(plan, False, self.entry.warns)
        self._clear_arrays()


class BoundGroup(HostTask):
    """A persistent grouped operation: its buckets are made once for each state of the planner.

    Args:
        context, entry: as of `HostTask`.
        members: a handle of each tensor, which is not submitted.
        threshold: the bytes at which a bucket ends, at present.

    Attributes:
        bound, epoch, generation: as of `OneTensor`.
    """

    description = "group"

    def __init__(
        self, context: Context, entry: CachedRequest, members: Sequence[Handle], threshold: Callable[[], int]
    ) -> None:
        super().__init__(context, entry)
        self._members = members
        self._threshold = threshold
        self.bound = self.prepare, self.run
        self.epoch = self.generation = -1
        self._parts: list[tuple[Task, list[Handle]]] = []

    def bind(self) -> None:
        """Make the buckets."""
        batch = Batch(self._context, [member.entry for member in self._members], self._threshold(), self.token)
        self._parts = [(task, [self._members[number] for number in numbers]) for task, numbers in batch.tasks]
        self.epoch = self._context.planner.epoch

    def prepare(self, source: Any, out: Any) -> Words:
        """Prepare the first bucket."""
        if self.epoch != self._context.planner.epoch:
            self.bind()
        if not self._parts:
            return ()
        task, members = self._parts[0]
        return task.prepare_handles(members)

    def run(self) -> None:
        """Carry out every bucket; all ranks have prepared the first."""
        for position, (task, members) in enumerate(self._parts):
            if position:
                self._context.meet(task.token, task.prepare_handles(members))
            task.run_handles(members)

    def forget(self) -> None:
        """Drop the buckets and the tensors."""
        self._members, self._parts = (), []

    def prepare_handles(self, handles: Sequence[Handle]) -> Words:
        return self.prepare(handles[0].source, handles[0].out)

    def run_handles(self, handles: Sequence[Handle]) -> None:
        self.run()


def place_gathered(context: Context, part: Handle, counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Make the result of an allgather or an all-to-all whose rows are fixed.

    Args:
        context: of the world.
        part: its handle; holds the result from here on.
        counts: the rows that each rank sends: to all, or to each receiver.

    Returns:
        The rows of every rank, or of every pair of ranks by sender.
    """
    request = part.entry.request
    received, rows = exchanged_rows(request.collective, counts, context.rank)
    out = context.pool.empty((sum(received), *(request.shape or ())), part.entry.dtype)
    part.keep = (part.keep, out, received)
    part.out = out.reshape(-1)
    return rows


def _fix(part: Handle) -> None:
    """Give a handle arrays of its own, of the same memory: the program may change the shape or the dtype of its own."""
    in_place = part.out is part.source
    part.source = part.source.view()
    part.out = part.source if in_place else part.out.view()


def addresses_of(part: Handle) -> tuple[int, int]:
    """The addresses of a handle's input and output."""
    at = address(part.source)
    return at, at if part.out is part.source else address(part.out)


def _nothing(handle: Handle) -> None:
    """Members have no result of their own."""
