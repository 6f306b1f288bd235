"""A batch: one list of operations that the ranks agree on, divided into tasks.

It is cached under the list's hash: when the same list comes again, nothing is planned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from collectives import fusion
from collectives.base.errors import OutOfMemoryError
from collectives.base.reduce_op import Op
from collectives.engine.buckets import Bucket, BufferBucket, LocatedBucket
from collectives.engine.context import Context
from collectives.engine.handles import Handle
from collectives.engine.located import one_tensor
from collectives.engine.negotiation import OUT_OF_MEMORY
from collectives.engine.request_cache import CachedRequest
from collectives.engine.tasks import AdasumTensor, Task, Words
from collectives.plan.planner import LARGE_TENSOR, PACKED_TENSOR, Choice
from collectives.plan.program import Medium

if TYPE_CHECKING:
    from collectives.engine.timeline import Timeline

_ALONE_FROM = 256 << 10
"""Bytes from which a tensor gains nothing from being copied into a buffer with others."""
_BUFFER_BYTES = 16 << 20
"""The most bytes of one such buffer."""


class Batch:
    """The tasks of one list of operations.

    Args:
        entries: the requests, with the members of grouped operations in place of the groups.
        threshold: the most bytes of a bucket.
        located_bucket: makes the buckets whose tensors may be reduced where they lie.

    Attributes:
        chain: the list's hash.
        tasks: each with the positions of its operations in the list.
        generation: the ledger's, when its cache last knew all these requests.
    """

    def __init__(
        self,
        context: Context,
        entries: Sequence[CachedRequest],
        threshold: int,
        chain: int,
        located_bucket: Callable[[Context, Sequence[CachedRequest], Choice], Task] = LocatedBucket,
    ) -> None:
        self._context = context
        self._located_bucket = located_bucket
        self.entries = entries
        self.chain = chain
        self.generation = -1
        self.tasks: list[tuple[Task, tuple[int, ...]]] = []
        context.statistics.plans_made += len(entries) > 1
        keys = [entry.fuses_with for entry in entries]
        for members in fusion.plan(keys, [entry.nbytes for entry in entries], threshold):
            self._plan(members)
        self.nbytes = sum(entry.nbytes for entry in entries)
        self._bytes = [sum(entries[number].nbytes for number in members) for _, members in self.tasks]
        self._first_named = next((entry for entry in entries if entry.name is not None), None)

    def _plan(self, members: tuple[int, ...]) -> None:
        entries, context = [self.entries[number] for number in members], self._context
        first = entries[0]
        if first.on_device:
            self.tasks += [(task, tuple(members[at] for at in part)) for task, part in context.device_tasks(entries)]
            return
        if len(entries) == 1:
            self.tasks.append((self._alone(first), members))
            return
        choice = self._choose(entries)
        if len(context.group.hosts) > 1 or choice.medium is not Medium.WINDOW or choice.native:
            small = self._set_apart(members, _ALONE_FROM)
            self._copy_together(small)
        elif context.entries.locates_bucket(first, sum(each.nbytes for each in entries), len(entries)):
            by_bytes = [(self.entries[number].nbytes, number) for number in members]
            self._add([number for nbytes, number in by_bytes if nbytes >= LARGE_TENSOR], self._located_bucket)
            self._add(
                [number for nbytes, number in by_bytes if PACKED_TENSOR < nbytes < LARGE_TENSOR], self._located_bucket
            )
            self._add([number for nbytes, number in by_bytes if nbytes <= PACKED_TENSOR], Bucket)
        else:
            self._add(self._set_apart(members, LARGE_TENSOR), Bucket)

    def _set_apart(self, members: tuple[int, ...], least: int) -> tuple[int, ...]:
        """Make a task of each tensor of ``least`` bytes or more. Returns the others."""
        small = tuple(number for number in members if self.entries[number].nbytes < least)
        self.tasks += [(self._alone(self.entries[number]), (number,)) for number in members if number not in small]
        return small

    def _add(self, members: Sequence[int], bucket: Callable[[Context, Sequence[CachedRequest], Choice], Task]) -> None:
        """Make a task of tensors: a bucket, or that of the only one."""
        entries = [self.entries[number] for number in members]
        if len(entries) > 1:
            self.tasks.append((bucket(self._context, entries, self._choose(entries)), tuple(members)))
        elif entries:
            self.tasks.append((self._alone(entries[0]), tuple(members)))

    def _choose(self, entries: Sequence[CachedRequest]) -> Choice:
        return self._context.entries.choose_fused(entries[0], sum(each.nbytes for each in entries), len(entries))

    def _copy_together(self, members: Sequence[int]) -> None:
        """Divide small tensors among buffers of at most ``_BUFFER_BYTES``."""
        nbytes = [self.entries[number].nbytes for number in members]
        for part in fusion.plan([0] * len(members), nbytes, _BUFFER_BYTES):
            entries = [self.entries[members[at]] for at in part]
            alone = len(part) == 1
            task = self._alone(entries[0]) if alone else BufferBucket(self._context, entries, self._choose(entries))
            self.tasks.append((task, tuple(members[at] for at in part)))

    def _alone(self, entry: CachedRequest) -> Task:
        context = self._context
        if entry.binding is not None and entry.step is not None:
            bound: Task = entry.step
            return bound
        if entry.op is Op.ADASUM and entry.moves:
            return AdasumTensor(context, entry)
        # The very object that a blocking call has prepared, if it could not be carried out without a handle.
        entry.step = entry.step or one_tensor(context, entry)
        task: Task = entry.step
        return task

    def prepare(self, handles: Sequence[Handle]) -> Words:
        """Prepare the first task. Returns the words to enter the round with."""
        if not self.tasks:
            return ()
        task, members = self.tasks[0]
        timeline, begun = self._context.timeline, time.monotonic()
        words = task.prepare_handles([handles[number] for number in members])
        if timeline is not None and task.packs:
            timeline.span("engine", "pack", begun, time.monotonic())
        return words

    def withdraw(self) -> None:
        """Undo `prepare`: the list is not carried out now."""
        if self.tasks:
            self.tasks[0][0].withdraw()

    def run(self, handles: Sequence[Handle]) -> None:
        """Carry out every task; all ranks have entered the round."""
        context = self._context
        timeline = context.timeline
        for position, (task, members) in enumerate(self.tasks):
            task_handles = handles if len(self.tasks) == 1 else [handles[number] for number in members]
            if timeline is not None:
                self._run_timed(timeline, position, task, task_handles)
                continue
            if position:
                self._meet(task, task_handles)
            task.run_handles(task_handles)
        statistics = context.statistics
        statistics.tensors += len(handles)
        statistics.buckets += len(self.tasks)
        statistics.bytes_reduced += self.nbytes
        packed = sum(nbytes for (task, _), nbytes in zip(self.tasks, self._bytes, strict=True) if task.packs)
        statistics.bytes_packed += packed
        if self._first_named is not None:
            statistics.count_step(self._first_named)  # as a list's other names, this one comes once a step

    def _meet(self, task: Task, handles: Sequence[Handle], prepared: Callable[[], object] = lambda: None) -> None:
        """Prepare a task other than the first, call ``prepared``, and meet the other ranks.

        A rank that is refused memory enters with the token `OUT_OF_MEMORY` instead; then all ranks unmap device memory
        and meet again.
        """
        context = self._context
        token = task.token
        try:
            words = task.prepare_handles(handles)
        except OutOfMemoryError:
            token, words = OUT_OF_MEMORY, ()
        prepared()
        if not context.control.agree(token, words) or token == OUT_OF_MEMORY:
            context.make_room()
            context.meet(task.token, task.prepare_handles(handles))

    def _run_timed(self, timeline: Timeline, position: int, task: Task, handles: Sequence[Handle]) -> None:
        """Meet for a task and run it, recording where the time goes."""
        begun = time.monotonic()
        if position:
            packed = begun

            def note() -> None:
                nonlocal packed
                packed = time.monotonic()
                if task.packs:
                    timeline.span("engine", "pack", begun, packed)

            self._meet(task, handles, note)
            begun = time.monotonic()
            timeline.span("engine", "wait", packed, begun)
        self._context.executor.trace = lambda name, at, until: timeline.span("rounds", name, at, until)
        try:
            task.run_handles(handles)
        finally:
            self._context.executor.trace = None
        request = handles[0].entry.request
        how = task.description or type(task).__name__.lower()
        ended = time.monotonic()
        timeline.span(
            "engine",
            f"{request.collective}: {how}",
            begun,
            ended,
            tensors=[handle.name for handle in handles],
            # Of a gather, known only once it is done.
            bytes=sum(handle.entry.nbytes or getattr(handle.out, "nbytes", 0) for handle in handles),
        )
        if self._context.rank == 0:
            scope = str(self._context.group.ranks)
            for handle in handles:
                request = handle.entry.request
                timeline.phase(
                    scope,
                    handle.row,
                    handle.phase,
                    begun,
                    ended,
                    dtype=request.dtype,
                    shape=str(list(request.shape or ())),
                )
