"""Rounds: what the ranks propose, agree on and carry out, one list of operations after the other; by whoever leads.

    propose  this rank enters a round with all that is new, as one number, and prepares the first bucket
    agree    all ranks proposed the same: it is carried out, and the handles complete
             they did not: the ranks compare what they have (`negotiation`); what all have is proposed next

A rank without work does not enter a round, and nobody's wait for it blocks anything: it is a look at memory, now and
then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from collectives.base.config import Config
from collectives.base.errors import MismatchError, OutOfMemoryError
from collectives.base.logging import logger
from collectives.engine import deadlock, negotiation, stall
from collectives.engine.batches import Batch
from collectives.engine.context import Context
from collectives.engine.handles import Handle
from collectives.engine.negotiation import Frame, Key, Ledger, Request
from collectives.engine.progress import LIST_BYTES, THREAD_NAME, Lead

MASK = 0x7FFF_FFFF_FFFF
_CHAIN, NUMBER = 0x5851_F42D_4C95_7F2D, 0x2545_F491_4F6C_DD1D
"""Odd multipliers that make one number of a list: its order counts, and so does the number of its first unnamed
operation."""
_JOINED = Request("joined").signature()
_COMPARE = Request("compare").signature()
EVERYBODYS = ("add_process_set", "remove_process_set", "start_timeline", "tune", "empty_cache")
"""Operations that a rank which has joined cannot stand in for."""
_MOST_BATCHES = 512
_MOST_CACHED = 1 << 16
"""Entries of the cache whose bits fit into what a round is entered with."""
_STUCK_AFTER, _STUCK_AFTER_AMONG_THREADS = 20.0, 1.0
"""Seconds without progress after which other threads no longer count as those that might call a collective: any, and
those that wait for another thread or are other ranks."""
_LOOK_AROUND_AFTER = 0.1
"""Seconds without progress after which it is worth looking at what other threads do."""
_COMPUTES = 0.1
"""The share of a core above which a thread computes: it may call collectives, or another one that waits for it may,
when it is done."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 50e-6, 2e-3


class Rounds(Lead):
    """The rounds of one engine.

    Args:
        context: what tasks need.
        config: the settings.
        names: the ranks' numbers in messages.
        make_neutral: makes what this rank contributes to an operation when it has joined.
        ranks_are_threads: whether every other thread of this process is another rank, as with the transport of threads.
    """

    def __init__(
        self,
        context: Context,
        config: Config,
        names: Sequence[int],
        make_neutral: Callable[[Request], Handle],
        ranks_are_threads: bool,
    ) -> None:
        super().__init__(names[context.rank], config.cycle_time * 1e-3, config.fusion_threshold)
        self.context = context
        self.on_batch: Callable[[Batch, Sequence[Handle], float], None] | None = None
        """Called after every batch, by the leader, between the same two rounds on every rank; with the first
        submission's time."""
        self.timeline_cycles = False
        self._control = context.control
        self._names = names
        self._make_neutral = make_neutral
        self._ranks_are_threads = ranks_are_threads
        self._ledger = Ledger(context.size, min(config.cache_capacity, _MOST_CACHED))
        self._names_in_flight: dict[str, Handle | None] = {}
        self._pending: dict[Key, Handle] = {}
        """What was submitted here and is not done."""
        self._fresh: list[Handle] = []
        """Of that, what the other ranks have not been told of."""
        self._later: list[Handle] = []
        """Operations whose name is taken by the mark of a call that was refused."""
        self._unnamed = 0
        """Unnamed operations so far; on every rank alike, between two rounds."""
        self._open: tuple[list[Handle], Batch | None] | None = None
        """The round that was entered; without a batch it says that this rank has joined."""
        self._chosen: list[tuple[Key, Request]] = []
        """What all ranks propose next."""
        self._frames: Sequence[Frame] = ()
        self._batches: dict[int, Batch] = {}
        self._not_before = 0.0
        self._pause = _SHORTEST_PAUSE
        self._proposed_at = 0.0
        self._restless = False
        """Whether the ranks should compare again, because this one has nothing more to do but wait."""
        self._starving = self._starved = False
        """Whether the ranks are to release what they have mapped, because this one was refused memory; and whether they
        have."""
        self._told_stuck = False
        self._stuck_since: float | None = None
        self._patience: float | None = None
        """Seconds without progress after which this rank counts as stuck, as its threads are now; None: they were not
        looked at yet."""
        self._used_before: dict[threading.Thread, float] = {}
        """Processor time that other threads had used by ``_stuck_since``."""
        self._told_of_joining = False
        self._join: Handle | None = None
        self._already_joined: set[int] = set()

    def has_work(self) -> bool:
        return bool(self._pending or self._inbox)

    def _collect(self) -> None:
        """Take in what was submitted, in the order of submission."""
        while self._inbox:
            handle = self._inbox.popleft()
            name = handle.entry.request.name
            if name is not None:
                handle.key = name
            else:
                handle.key = self._unnamed
                for member in handle.members:
                    member.key = self._unnamed
                self._unnamed += 1
            if handle.key in self._pending:
                self._later.append(handle)
                continue
            self._pending[handle.key] = handle
            self._fresh.append(handle)

    def _something_to_do(self) -> bool:
        if self._inbox or self._fresh or self._chosen or self._restless:
            return True
        if self._join is not None and not self._pending and not self._told_of_joining:
            return True
        return time.monotonic() >= self._not_before and self._control.called()

    def _propose(self) -> bool:
        """Enter the next round, if there is a reason to."""
        if self._chosen:
            handles = [self._pending.get(key) or self._neutral(key, request) for key, request in self._chosen]
        elif self._fresh:
            handles = self._cut()
        elif not self._something_to_do():
            return False
        else:
            handles = list(self._pending.values())
        self._restless = False
        self.context.joined = self._join is not None and not self._pending
        if not handles:
            if self._join is None:
                return False
            self._told_of_joining = True
            self._open = ([], None)
            self._control.enter(_JOINED)
            return True
        batch = self._batch(handles)
        first = next((handle.key for handle in handles if type(handle.key) is int), 0)
        assert isinstance(first, int)
        try:
            words = batch.prepare(_flat(handles))
            self._starved = False
        except OutOfMemoryError:
            if self._starved:
                raise
            # To be believed only when no rank has memory mapped that this one has freed: the ranks compare, and propose
            # the same again.
            self._starved = self._starving = True
            self._open = (handles, None)
            self._control.enter(negotiation.STARVING)
            return True
        self._proposed_at = time.monotonic()
        # Before it can be seen by the peers: whatever happens from here on, it is known what was entered.
        self._open = (handles, batch)
        self._control.enter((batch.chain + first * NUMBER) & MASK, words)
        return True

    def _cut(self) -> list[Handle]:
        """What is new, in lists that end where their bytes add up and not where the time has run out.

        So the lists are the same on every rank and in every step, whoever is ahead, and all ranks propose what they
        have planned before.
        """
        limit, filled = min(self.threshold, LIST_BYTES), 0
        for number, handle in enumerate(self._fresh):
            filled += handle.entry.nbytes
            if filled >= limit:
                return self._fresh[: number + 1]
        return list(self._fresh)

    def _batch(self, handles: Sequence[Handle]) -> Batch:
        """The tasks of a list, from the cache if it has been there before."""
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

    def _carry_out(self) -> None:
        """All ranks proposed the same."""
        assert self._open is not None
        handles, batch = self._open
        statistics = self.context.statistics
        statistics.rounds += 1
        statistics.unanimous += 1
        if self._starving:
            self._disagree()
            return
        if batch is None:
            self._open = None
            self._everybody_joined()
            return
        timeline = self.context.timeline
        if timeline is not None:
            self._record_agreement(handles)
        submitted = min(handle.submitted for handle in handles) if self.on_batch is not None else 0.0
        batch.run(_flat(handles))
        self._open = None
        self._chosen = []
        self._pause, self._not_before, self._stuck_since = _SHORTEST_PAUSE, 0.0, None
        for handle in handles:
            self._ledger.settle(handle.key)
        if batch.generation != self._ledger.generation:
            self._ledger.remember([(handle.key, handle.entry.request, handle.entry.signature) for handle in handles])
            # A list longer than the cache has pushed its own first entries out.
            batch.generation = self._ledger.generation if len(handles) <= self._ledger.capacity else -1
        self._complete(handles)
        if self.on_batch is not None:
            self.on_batch(batch, handles, submitted)

    def _complete(self, handles: Sequence[Handle], error: BaseException | None = None) -> None:
        pending, in_flight = self._pending, self._names_in_flight
        self._told_stuck = False  # if this rank is stuck still, it must be said again
        for handle in handles:
            key = handle.key
            pending.pop(key, None)
            if type(key) is str and in_flight.get(key) is handle:
                del in_flight[key]
            if error is None:
                handle.finish()
            else:
                handle.fail(error)
        if self._fresh:
            self._fresh = [handle for handle in self._fresh if not handle.done]
        if self._later:
            later, self._later = self._later, []
            self._inbox.extendleft(reversed(later))
        if self._followers:
            self._ring()

    def _disagree(self) -> None:
        """The ranks proposed different lists: compare what all have, and choose what all want."""
        self._open = None
        self._chosen = []
        self._collect()
        statistics = self.context.statistics
        statistics.rounds += 1
        statistics.compared += 1
        self._fresh.clear()
        bits, untold = 0, []
        for handle in self._pending.values():
            position = self._ledger.position(handle.key, handle.entry.signature)
            if position is not None:
                bits |= 1 << position
            elif not handle.told:
                untold.append(handle)
        joined = self._join is not None and not self._pending
        self._told_stuck = stuck = self._is_stuck()
        mine = Frame(bits, bool(untold), joined, stuck, self._starving)
        control, size, rank = self._control, self.context.size, self.context.rank
        control.agree(_COMPARE, mine.to_words(self._ledger.capacity))
        frames = [mine if peer == rank else Frame.from_words(control.words_of(peer)) for peer in range(size)]
        self._starving = False
        if any(frame.starving for frame in frames):
            self.context.make_room()
        news: Sequence[Sequence[tuple[Key, Request]]] = ()
        if any(frame.news for frame in frames):
            statistics.exchanged += 1
            news = control.exchange([(handle.key, handle.entry.request) for handle in untold])
            for handle in untold:
                handle.told = True
        self._frames = frames
        self._already_joined = {peer for peer, frame in enumerate(frames) if frame.joined}
        response = self._ledger.respond(frames, news)
        for key, requests in response.refused:
            self._refuse(key, negotiation.mismatch(self._rank, requests, self._names))
        for key, request in response.ready:
            if request.root is not None and frames[request.root].joined:
                self._refuse(key, self._orphaned(request))
            elif request.collective in EVERYBODYS and self._already_joined:
                self._refuse(key, self._absent(request))
            else:
                self._chosen.append((key, request))
        if self._chosen or response.refused:
            self._pause, self._not_before = _SHORTEST_PAUSE, 0.0
        elif all(frame.stuck or frame.joined for frame in frames) and not all(frame.joined for frame in frames):
            self._deadlock()
        else:
            self._rest()

    def _rest(self) -> None:
        """Nothing came of a round: where it cannot be seen who enters the next, do not hurry there."""
        self._not_before = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _refuse(self, key: Key, error: MismatchError) -> None:
        self._ledger.settle(key)
        handle = self._pending.get(key)
        if handle is not None:
            self._complete([handle], error)
        elif type(key) is int:
            self._unnamed = max(self._unnamed, key + 1)

    def _orphaned(self, request: Request) -> MismatchError:
        assert request.root is not None
        return MismatchError(
            f"rank {self._rank}: {request.describe()}: the root, rank {self._names[request.root]}, has joined and "
            f"has no tensor to give; "
            f"broadcast before a rank can run out of data"
        )

    def _absent(self, request: Request) -> MismatchError:
        joined = ", ".join(str(self._names[peer]) for peer in sorted(self._already_joined))
        return MismatchError(
            f"rank {self._rank}: {request.describe()} needs every rank, but rank {joined} has joined; "
            f"do it before a rank can run out of data"
        )

    # ---- ranks that wait for each other, or have run out of data
    # -------------------------------------------------------------------

    def _is_stuck(self) -> bool:
        """Whether every thread that could submit something waits for an operation, or does nothing for a while."""
        alive = threading.enumerate()
        self._callers.difference_update([caller for caller in list(self._callers) if caller not in alive])
        waiting = sum(not handle.done for handle in self._awaited)  # one whose operation is done goes on in a moment
        if self._inbox or not waiting:
            self._stuck_since = None
            return False
        # A thread that has never called anything might do so at any time; one of our own, or a timer, hardly.
        strangers = {
            thread
            for thread in alive
            if not (
                thread in self._callers or thread.name.startswith(THREAD_NAME) or isinstance(thread, threading.Timer)
            )
        }
        if len(self._callers) <= waiting and not strangers:
            return True
        now = time.monotonic()
        if self._stuck_since is None:
            self._stuck_since, self._patience = now, None
        if self._patience is None and now - self._stuck_since < _LOOK_AROUND_AFTER:
            return False
        parked = stall.parked(alive)
        busy = len(self._callers - parked) > waiting
        others = not self._ranks_are_threads and not strangers <= parked
        patience = _STUCK_AFTER if busy or others else _STUCK_AFTER_AMONG_THREADS
        if patience != self._patience:
            self._stuck_since, self._patience = now, patience
            self._used_before = {thread: stall.processor_seconds(thread) for thread in self._callers | strangers}
        if now - self._stuck_since < patience:
            return False
        # One that has called collectives may wait for a thread that has not, and call again when that one has computed
        # its result.
        watched = self._callers if self._ranks_are_threads else self._callers | strangers
        if (
            len(self._callers) > waiting
            and patience == _STUCK_AFTER
            and self._computes(watched, now - self._stuck_since)
        ):
            self._stuck_since = None
            return False
        return True

    def _computes(self, threads: set[threading.Thread], seconds: float) -> bool:
        """Whether one of these threads has computed for this time, other than the one that drives."""
        others = threads - {threading.current_thread()}
        return any(
            stall.processor_seconds(caller) - self._used_before.get(caller, 0.0) > _COMPUTES * seconds
            for caller in others
        )

    def _deadlock(self) -> None:
        """Every rank waits, and nothing can come of it: fail what the ranks that are behind wait for; all of it, if
        none is known to be."""
        mine = [handle for handle in self._awaited if self._pending.get(handle.key) is handle]
        stacks = deadlock.stacks(type(self).wait.__code__, "handle")
        said = [deadlock.Wait(handle.key, handle.entry.request, stacks.get(id(handle), ())) for handle in mine]
        told = self._control.exchange((said, self._unnamed))
        waits = [theirs for theirs, _ in told]
        ledger, keys = self._ledger, {wait.key for theirs in waits for wait in theirs}
        asking = {key: ledger.asking(key, self._frames) for key in keys}
        passed = {key: ledger.passed(key) for key in keys}
        fails = deadlock.failing(
            waits, asking, passed, {key for key in keys if ledger.knows(key)}, self._already_joined
        )
        for key in fails:
            ledger.give_up(key, [peer for peer, theirs in enumerate(waits) if any(wait.key == key for wait in theirs)])
        if any(type(key) is int for key in fails):
            # Some have used up a number for an unnamed operation, and some have not: all go on with the same.
            self._unnamed = max(unnamed for _, unnamed in told)
        error = deadlock.error(self._rank, waits, asking, fails, self._names)
        failed = [handle for handle in mine if handle.key in fails]
        if len(failed) < len(mine):
            logger.warning("%s", error)
        self._complete(failed, error)
        self._rest()

    def _everybody_joined(self) -> None:
        assert self._join is not None
        latest = set(range(self.context.size)) - self._already_joined or set(range(self.context.size))
        self._already_joined = set()
        self._join.keep = self._names[max(latest)]
        handle, self._join = self._join, None
        handle.finish()
        if self._followers:
            self._ring()

    def _neutral(self, key: Key, request: Request) -> Handle:
        """This rank has joined: its contribution to what the others do."""
        handle = self._make_neutral(request)
        handle.key = key
        if type(key) is int:
            for member in handle.members:
                member.key = key
            self._unnamed = max(self._unnamed, key + 1)
        return handle

    def _missing(self, handle: Handle) -> list[int]:
        """The ranks that are known not to have submitted an operation."""
        if self._open is not None:
            not_here = self._control.missing()
            if not_here:
                return [self._names[peer] for peer in not_here]
        told, position = self._ledger.told(handle.key), self._ledger.position(handle.key, handle.entry.signature)
        missing = []
        for peer, frame in enumerate(self._frames):
            has = (
                peer in told
                or (position is not None and frame.bits >> position & 1)
                or frame.joined
                or peer == self.context.rank
            )
            if not has:
                missing.append(self._names[peer])
        return missing

    def _record_agreement(self, handles: Sequence[Handle]) -> None:
        timeline = self.context.timeline
        assert timeline is not None
        now = time.monotonic()
        scope = str(self._names)
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
    """The members of groups in place of the groups."""
    if not any(handle.members for handle in handles):
        return handles
    return [member for handle in handles for member in (handle.members or (handle,))]
