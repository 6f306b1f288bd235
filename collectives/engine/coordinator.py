"""Negotiation rounds: how the ranks agree on the next list of operations, and carry it out.

    propose    this rank enters a round with its list, as one number, and prepares the list's first task
    agreed     all ranks proposed the same list: it is carried out, and its handles complete
    compare    they did not: the ranks compare what they have (`negotiation`), and propose next what all have

A rank without work does not enter a round, and waiting for it blocks nothing: a round is polled. All methods are for
the driving thread (`collectives.engine.progress`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from collectives.base.config import Config
from collectives.base.errors import OutOfMemoryError, TransportError
from collectives.engine import negotiation
from collectives.engine.batches import Batch
from collectives.engine.callers import Callers
from collectives.engine.context import Context
from collectives.engine.handles import Handle
from collectives.engine.negotiation import Frame, Key, Ledger, Request
from collectives.engine.submissions import Submissions, submitted_at
from collectives.engine.tasks import HostTask

LIST_BYTES = 32 << 20
"""Bytes at which a list of new operations is complete: enough for throughput, few enough to begin early."""
MASK = 0x7FFF_FFFF_FFFF
_CHAIN, NUMBER = 0x5851_F42D_4C95_7F2D, 0x2545_F491_4F6C_DD1D
"""Odd multipliers that hash a list into one number, which depends on the order and on the number of the first unnamed
operation."""
_JOINED = Request("joined").signature()
_COMPARE = Request("compare").signature()
_MOST_BATCHES = 512
_MOST_CACHED = 1 << 16
"""Cache entries whose bits fit into the words that a rank enters a round with."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 50e-6, 2e-3


class Coordinator:
    """The negotiation rounds of one rank; arguments as of `collectives.engine.engine.Engine`.

    Attributes:
        open: the list of the round that this rank has entered, and its batch; without a batch, this rank entered with a
            token that says that it has joined or lacks memory; None between two rounds.
        chosen: what all ranks propose next.
        joining: the handle of `join`, while this rank contributes neutral elements.
        threshold: bytes at which a bucket, and a list, ends.
        on_batch: called after every batch with the batch, its handles and the first submission's time, between the
            same two rounds on every rank.
        timeline_cycles: whether the timeline marks every round.
    """

    def __init__(
        self,
        context: Context,
        config: Config,
        names: Sequence[int],
        make_neutral: Callable[[Request], Handle],
        submissions: Submissions,
        callers: Callers,
    ) -> None:
        self.context = context
        self.control = context.control
        self.ledger = Ledger(context.size, min(config.cache_capacity, _MOST_CACHED))
        self.names = names
        self.threshold = config.fusion_threshold
        self.open: tuple[list[Handle], Batch | None] | None = None
        self.chosen: list[tuple[Key, Request]] = []
        self.joining: Handle | None = None
        self.on_batch: Callable[[Batch, Sequence[Handle], float], None] | None = None
        self.timeline_cycles = False
        self._rank = names[context.rank]
        self._make_neutral = make_neutral
        self._submissions = submissions
        self._callers = callers
        self._frames: Sequence[Frame] = ()
        self._batches: dict[int, Batch] = {}
        self._not_before = 0.0
        self._pause = _SHORTEST_PAUSE
        self._proposed_at = 0.0
        self._compare_again = False
        """Whether this rank enters a round only to tell the others that it is stuck."""
        self._out_of_memory = self._peers_unmapped = False
        """Whether device memory was refused to this rank, which therefore asks its peers to unmap theirs; and whether
        they have done so since it last prepared a list."""
        self._told_stuck = self._told_joining = False
        self._joined: set[int] = set()

    # ---- proposing

    def has_reason_to_propose(self) -> bool:
        """Whether this rank has something to say to the others, or another rank has entered the next round."""
        submissions = self._submissions
        if submissions.inbox or submissions.fresh or self.chosen or self._compare_again:
            return True
        if self.joining is not None and not submissions.pending and not self._told_joining:
            return True
        return time.monotonic() >= self._not_before and self.control.called()

    def propose(self) -> bool:
        """Enter the next round if there is a reason to. Returns whether it was entered."""
        submissions = self._submissions
        submissions.collect()
        pending = submissions.pending
        if self.chosen:
            handles = [pending.get(key) or self._neutral(key, request) for key, request in self.chosen]
            if self._joined:
                self._unbind(handles)
        elif submissions.fresh:
            handles = submissions.next_list(min(self.threshold, LIST_BYTES))
        elif not self.has_reason_to_propose():
            return False
        else:
            handles = list(pending.values())
        self._compare_again = False
        self.context.joined = self.joining is not None and not pending
        if not handles:
            if self.joining is None:
                return False
            self._told_joining = True
            self.open = ([], None)
            self.control.enter(_JOINED)
            return True
        if len(handles) == 1 and self._attempt(handles[0]):
            return True
        batch = self._batch(handles)
        first = next((handle.key for handle in handles if type(handle.key) is int), 0)
        assert isinstance(first, int)
        try:
            words = batch.prepare(_flat(handles))
            self._peers_unmapped = False
        except OutOfMemoryError:
            if self._peers_unmapped:
                raise
            # Final only when no peer maps memory that this rank has freed: the ranks compare, unmap, and propose the
            # same again.
            self._peers_unmapped = self._out_of_memory = True
            self.open = (handles, None)
            self.control.enter(negotiation.OUT_OF_MEMORY)
            return True
        self._proposed_at = time.monotonic()
        # Set before the peers can see the token, so that an interrupt always finds what was entered.
        self.open = (handles, batch)
        self.control.enter((batch.chain + first * NUMBER) & MASK, words)
        return True

    def _attempt(self, handle: Handle) -> bool:
        """Enter the round with a single operation and, if every rank is there, carry it out at once, as a blocking call
        does. Returns whether the round was entered, which only a task with a `HostTask.attempt` can do."""
        entry, key = handle.entry, handle.key
        task = entry.step
        if task is None or self.context.timeline is not None or self.on_batch is not None:
            return False
        if task.epoch != self.context.planner.epoch:
            task.bind()
        if task.attempt is None:
            return False
        self.open = ([handle], None)
        token = (entry.signature + key * NUMBER) & MASK if isinstance(key, int) else entry.signature
        if not task.attempt(token, handle.source, handle.out):
            self.open = ([handle], self._batch([handle]))
            return True
        self.open = None
        self.context.statistics.count_alone(1, entry.nbytes)
        if entry.name is not None:
            self.context.statistics.count_step(entry)
        self.settle(key, task)
        self._carried_out([handle])
        return True

    def settle(self, key: Key, task: Any) -> None:
        """Note in the ledger that the only operation of a list was carried out."""
        ledger, entry = self.ledger, task.entry
        if ledger.news:
            ledger.settle(key)
        if type(key) is str and task.generation != ledger.generation:
            ledger.remember(((key, entry.request, entry.signature),))
            task.generation = ledger.generation

    def enter_alone(self, handle: Handle) -> None:
        """Continue a round that was entered with one operation and without a handle, which it turned out to need."""
        self._submissions.add_first(handle)
        self.open = ([handle], self._batch([handle]))

    def _batch(self, handles: Sequence[Handle]) -> Batch:
        """The tasks of a list, cached by the hash of its signatures."""
        chain = 0
        for handle in handles:
            chain = (chain * _CHAIN + handle.entry.signature) & MASK
        entries = [handle.entry for handle in _flat(handles)]
        batch = self._batches.get(chain)
        if batch is None or batch.entries != entries:
            if len(self._batches) >= _MOST_BATCHES:
                for old in list(self._batches)[: _MOST_BATCHES // 2]:
                    del self._batches[old]
            batch = self._batches[chain] = Batch(self.context, entries, self.threshold, chain)
        return batch

    def forget_batches(self) -> None:
        """Drop the cached tasks, because settings change."""
        self._batches.clear()

    def release(self) -> None:
        """Drop all tasks, because windows are about to be unmapped."""
        for batch in self._batches.values():
            for task, _ in batch.tasks:
                if isinstance(task, HostTask):
                    task.release()
        self._batches.clear()
        self.open = None

    def _neutral(self, key: Key, request: Request) -> Handle:
        """What this rank contributes to an operation of the others after it has joined."""
        handle = self._make_neutral(replace(request, persistent=None))
        handle.key = key
        if type(key) is int:
            for member in handle.members:
                member.key = key
            self._count_unnamed(key)
        return handle

    def _unbind(self, handles: Sequence[Handle]) -> None:
        """Carry out persistent operations as ordinary ones, because this rank or another has joined: what it
        contributes does not lie in the memory that the operation is bound to."""
        for handle in handles:
            if handle.entry.binding is not None:
                handle.entry.binding.unbind(handle)

    def _count_unnamed(self, number: int) -> None:
        self._submissions.unnamed = max(self._submissions.unnamed, number + 1)

    # ---- all ranks have entered the round

    def carry_out(self) -> None:
        """Carry out the list that all ranks have proposed."""
        assert self.open is not None
        handles, batch = self.open
        statistics = self.context.statistics
        statistics.rounds += 1
        statistics.unanimous += 1
        if self._out_of_memory:
            self.compare()
            return
        if batch is None:
            self.open = None
            self._all_joined()
            return
        if self.context.timeline is not None:
            self._record_agreement(handles)
        submitted = min(handle.submitted for handle in handles) if self.on_batch is not None else 0.0
        batch.run(_flat(handles))
        self.open = None
        ledger = self.ledger
        if ledger.news:
            for handle in handles:
                ledger.settle(handle.key)
        if batch.generation != ledger.generation:
            ledger.remember([(handle.key, handle.entry.request, handle.entry.signature) for handle in handles])
            # A list longer than the cache has evicted its own first entries.
            batch.generation = ledger.generation if len(handles) <= ledger.capacity else -1
        self._carried_out(handles)
        if self.on_batch is not None:
            self.on_batch(batch, handles, submitted)

    def _carried_out(self, handles: Sequence[Handle]) -> None:
        """Complete the operations of a list, after which there is something to say at once."""
        self.chosen = []
        self._pause, self._not_before = _SHORTEST_PAUSE, 0.0
        self._callers.made_progress()
        self._complete(handles)

    def compare(self) -> None:
        """Compare what all ranks have submitted, after proposals that differ, and choose what all of them have."""
        submissions, control = self._submissions, self.control
        if self.open is not None and self.open[1] is not None:
            self.open[1].withdraw()
        self.open = None
        self.chosen = []
        submissions.collect()
        statistics = self.context.statistics
        statistics.rounds += 1
        statistics.compared += 1
        submissions.fresh.clear()
        bits, untold = 0, []
        for handle in submissions.pending.values():
            position = self.ledger.position(handle.key, handle.entry.signature)
            if position is not None:
                bits |= 1 << position
            elif not handle.told:
                untold.append(handle)
        joined = self.joining is not None and not submissions.pending
        self._told_stuck = stuck = self._is_stuck()
        own_frame = Frame(bits, bool(untold), joined, stuck, self._out_of_memory)
        if not control.agree(_COMPARE, own_frame.to_words(self.ledger.capacity)):
            raise TransportError(
                f"rank {self._rank}: some ranks compare what they have submitted and others do not, so something "
                "between the hosts alters the data of the ranks; check the network, and what could write to these "
                "connections [N6]"
            )
        frames = [
            own_frame if peer == self.context.rank else Frame.from_words(control.words_of(peer))
            for peer in range(self.context.size)
        ]
        self._out_of_memory = False
        if any(frame.out_of_memory for frame in frames):
            self.context.make_room()
        news: Sequence[Sequence[tuple[Key, Request]]] = ()
        if any(frame.news for frame in frames):
            statistics.exchanged += 1
            news = control.exchange([(handle.key, handle.entry.request) for handle in untold])
            for handle in untold:
                handle.told = True
        self._frames = frames
        self._joined = {peer for peer, frame in enumerate(frames) if frame.joined}
        response = self.ledger.respond(frames, news)
        for key, requests in response.refused:
            self._refuse(key, negotiation.mismatch(self._rank, requests, self.names))
        for key, request in response.ready:
            absent = negotiation.absent(self._rank, request, self._joined, self.names)
            if absent is not None:
                self._refuse(key, absent)
            else:
                self.chosen.append((key, request))
        if self.chosen or response.refused:
            self._pause, self._not_before = _SHORTEST_PAUSE, 0.0
        elif all(frame.stuck or frame.joined for frame in frames) and not all(frame.joined for frame in frames):
            self._resolve_deadlock()
        else:
            self._rest()

    def _rest(self) -> None:
        """Postpone the next round after one that decided nothing, with exponential back-off."""
        self._not_before = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _complete(self, handles: Sequence[Handle], error: BaseException | None = None) -> None:
        self._told_stuck = False  # a rank that is still stuck must say so again
        self._submissions.complete(handles, error)
        if self._callers.followers:
            self._callers.notify()

    def _refuse(self, key: Key, error: Exception) -> None:
        self.ledger.settle(key)
        handle = self._submissions.pending.get(key)
        if handle is not None:
            self._complete([handle], error)
        elif type(key) is int:
            self._count_unnamed(key)

    # ---- ranks that have joined

    def begin_join(self, handle: Handle) -> None:
        """Contribute neutral elements from here on, until all ranks have joined; ``handle`` completes then."""
        self._told_joining = False
        self.joining = handle

    def end_join(self) -> None:
        self.joining = None
        self.context.joined = False

    def _all_joined(self) -> None:
        assert self.joining is not None
        every = set(range(self.context.size))
        self.joining.keep = self.names[max(every - self._joined or every)]  # the last rank to join
        self._joined = set()
        handle, self.joining = self.joining, None
        handle.finish()
        if self._callers.followers:
            self._callers.notify()

    # ---- ranks that wait for each other

    def _is_stuck(self) -> bool:
        if self._submissions.inbox:
            self._callers.made_progress()
            return False
        return self._callers.stuck()

    def tell_if_stuck(self) -> None:
        """Have the ranks compare again if this rank has become stuck since it last told them."""
        if self.open is None and not self._told_stuck and self._is_stuck():
            self._compare_again = True

    def _resolve_deadlock(self) -> None:
        """Every rank waits, and no operation that they wait for is submitted by all: these fail on every rank."""
        submissions, ledger = self._submissions, self.ledger
        awaited = [handle for handle in self._callers.awaited if submissions.pending.get(handle.key) is handle]
        waits = [(handle.key, f"{handle.entry.request.describe()}{submitted_at(handle)}") for handle in awaited]
        answers = self.control.exchange((waits, submissions.unnamed))
        every = [rank_waits for rank_waits, _ in answers]
        asking = {key: ledger.asking(key, self._frames) for rank_waits in every for key, _ in rank_waits}
        if any(type(key) is int for key in asking):
            # Only some ranks have used up a number for an unnamed operation: all continue with the highest.
            submissions.unnamed = max(unnamed for _, unnamed in answers)
        for key in asking:
            ledger.settle(key)
        error = negotiation.deadlock(self._rank, every, asking, self.names)
        self._complete([submissions.pending[key] for key in asking if key in submissions.pending], error)
        self._rest()

    # ---- what messages and the timeline say

    def missing(self, handle: Handle) -> list[int]:
        """The ranks that are known not to have submitted an operation, as messages call them."""
        if self.open is not None:
            not_here = self.control.missing()
            if not_here:
                return [self.names[peer] for peer in not_here]
        tellers, position = self.ledger.told(handle.key), self.ledger.position(handle.key, handle.entry.signature)
        return [
            self.names[peer]
            for peer, frame in enumerate(self._frames)
            if not (
                peer in tellers
                or (position is not None and frame.bits >> position & 1)
                or frame.joined
                or peer == self.context.rank
            )
        ]

    def _record_agreement(self, handles: Sequence[Handle]) -> None:
        timeline = self.context.timeline
        assert timeline is not None
        now = time.monotonic()
        scope = str(self.names)
        for handle in handles:
            timeline.async_span("queue", handle.name, handle.submitted, max(handle.submitted, self._proposed_at))
            timeline.async_span(
                "negotiate", handle.name, handle.submitted, now, collective=handle.entry.request.collective
            )
            for member in handle.members or (handle,):
                timeline.tick(scope, member.row, handle.submitted)
                if self.context.rank == 0:
                    timeline.phase(scope, member.row, f"NEGOTIATE_{member.phase}", handle.submitted, now)
        if self.timeline_cycles:
            timeline.mark("CYCLE_START", now)


def _flat(handles: Sequence[Handle]) -> Sequence[Handle]:
    """The handles, with the members of grouped operations in place of the groups."""
    for handle in handles:
        if handle.members:
            return [member for handle in handles for member in (handle.members or (handle,))]
    return handles
