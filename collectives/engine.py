"""The engine: brings the ranks' operations together and carries them out, one round after the other.

    submit   any thread, any time: the operation gets a handle and waits in the inbox
    propose  this rank enters a round with all that is new, as one number, and prepares the first bucket
    agree    all ranks proposed the same: it is carried out, and the handles complete
             they did not: the ranks compare what they have (`negotiation`); what all have is proposed next

A rank without work does not enter a round, and nobody's wait for it blocks anything: it is a look at memory, now and then.

**The thread that waits, drives.** One thread leads at a time. A thread that waits for a handle takes the lead if nobody has it, and
otherwise follows: it sleeps until its handle is done or the lead is free. A background thread leads only while nobody waits; it is
woken by work, lets operations gather for one cycle, and sleeps without using any CPU when there is none.

A blocking call while nothing is in flight is a round of its own, without a handle: the same round, the same numbers.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from collectives import negotiation
from collectives.config import Config
from collectives.entries import Entry
from collectives.errors import CollectivesError, CollectiveTimeoutError, InvalidArgumentError, MismatchError, RankFailedError
from collectives.handles import Handle
from collectives.negotiation import Frame, Key, Ledger, Request
from collectives.stall import LOOK_EVERY, StallInspector
from collectives.tasks import Batch, Context, One, Statistics
from collectives.transport.base import Array

_MASK = 0x7FFF_FFFF_FFFF
_CHAIN, _NUMBER = 0x5851_F42D_4C95_7F2D, 0x2545_F491_4F6C_DD1D
"""Odd multipliers that make one number of a list: its order counts, and so does the number of its first unnamed operation."""
_JOINED = Request("joined").signature()
_COMPARE = Request("compare").signature()
_MOST_BATCHES = 512
_LIST_BYTES = 32 << 20
"""Bytes at which a list of new operations is complete: enough to be quick, few enough to begin early."""
_MOST_CYCLES = 20
"""Cycles for which the background thread waits while operations keep coming."""

_ACKNOWLEDGE_WITHIN = 2.0
_YIELDS = 200
_NAP, _LONGEST_NAP, _LAZY_NAP = 20e-6, 1e-3, 2e-3
_LAZY_AFTER = 1.0
_STUCK_AFTER = 5.0
"""Seconds without progress after which threads that have never called a collective no longer count as those that might."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 50e-6, 2e-3
_SWITCH_INTERVAL = 2e-4

_abandoned: list[Any] = []
"""What a failed call may still touch on behalf of a peer or MPI: never freed."""


class Engine:
    """The rounds of one world. Methods may be called from any thread.

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
        self.context = context
        self.refusal: Callable[[], CollectivesError] | None = None
        self.threshold = config.fusion_threshold
        self.cycle = config.cycle_time * 1e-3
        self.on_batch: Callable[[Batch, Sequence[Handle], float], None] | None = None
        """Called after every batch, by the leader, between the same two rounds on every rank; with the first submission's time."""
        self.timeline_cycles = False
        self._config = config
        self._control = context.control
        self._names = names
        self._rank = names[context.rank]
        self._make_neutral = make_neutral
        self._ranks_are_threads = ranks_are_threads
        self._ledger = Ledger(context.size, config.cache_capacity)
        self._stall = StallInspector(self._rank, config.stall_warning, config.stall_shutdown)
        self._inbox: deque[Handle] = deque()
        self._names_in_flight: dict[str, Handle | None] = {}
        self._pending: dict[Key, Handle] = {}
        self._fresh: list[Handle] = []
        self._later: list[Handle] = []
        """Operations whose name is taken by the mark of a call that was refused."""
        self._unnamed = 0
        self._open: tuple[list[Handle], Batch | None] | None = None
        self._chosen: list[tuple[Key, Request]] = []
        self._frames: Sequence[Frame] = ()
        self._batches: dict[int, Batch] = {}
        self._not_before = 0.0
        self._pause = _SHORTEST_PAUSE
        self._restless = False
        """Whether the ranks should compare again, because this one has nothing more to do but wait."""
        self._told_stuck = False
        self._stuck_since: float | None = None
        self._told_of_joining = False
        self._join: Handle | None = None
        self._already_joined: set[int] = set()
        self._solos = self._solo_bytes = 0
        self._obstacles: set[str] = set()
        """Why a blocking call cannot be carried out without a handle at present."""
        self._make_locks()
        _engines.add(self)

    def _make_locks(self) -> None:
        # Knows its owner: an interrupt may come between taking it and giving it back, and must not leave it taken.
        self._lead: Any = threading.RLock()
        self._leading = False
        self._bell = threading.Condition()
        self._followers = 0
        self._awaited: list[Handle] = []
        self._callers: set[int] = set()
        self._last_caller = 0
        self._work = threading.Event()
        self._background: threading.Thread | None = None

    # ---- submission ----------------------------------------------------------------------------------------------------------

    def submit(self, handle: Handle) -> Handle:
        """Take an operation on; returns at once.

        Raises:
            InvalidArgumentError: an operation of this name is in flight already; it goes on.
        """
        self._enqueue(handle)
        if not self._work.is_set():
            self._wake()
        return handle

    def run(
        self,
        entry: Entry,
        source: Array,
        out: Array,
        deliver: Callable[[Handle], Any] | None = None,
        keep: Any = None,
        handle: Handle | None = None,
    ) -> Handle | None:
        """Carry out an operation and return when it is done.

        Args:
            deliver, keep: of its handle, which is made only if it needs one.
            handle: or the handle itself.

        Returns:
            The handle, complete, or None if the operation was carried out without one.
        """
        if self._pending or self._inbox or self._followers or self._obstacles or not entry.simple or not self._lead.acquire(False):
            return self._run_with_handle(handle or Handle(entry, source, out, deliver or _no_result, keep))
        if self._leading or self._open is not None:
            self._lead.release()
            return self._run_with_handle(handle or Handle(entry, source, out, deliver or _no_result, keep))
        self._leading = True
        try:
            caller = threading.get_ident()
            if caller != self._last_caller:
                self._note_caller()
            name, token = entry.name, entry.signature
            if name is None:
                token = (token + self._unnamed * _NUMBER) & _MASK
            elif self._names_in_flight.setdefault(name, _RESERVED) is not _RESERVED:
                self._refuse_duplicate(name)
            one: One | None = entry.step
            if one is None:
                one = entry.step = One(self.context, entry)
            try:
                control = self._control
                control.enter(token, one.prepare(source, out))
                same = control.look()
                if same:
                    one.run(source, out)
                    self._solos += 1
                    self._solo_bytes += entry.nbytes
                    if name is None:
                        self._unnamed += 1
                    else:
                        del self._names_in_flight[name]
                    if self._ledger.changes_with(name, token):
                        self._settle_solo(entry)
                else:
                    # Somebody is missing, or has proposed something else: from here on it is an operation like any other.
                    handle = handle or Handle(entry, source, out, deliver or _no_result, keep)
                    handle.locate()
                    handle.engine = self
                    if name is not None:
                        self._names_in_flight[name] = handle
                    self._inbox.appendleft(handle)
                    self._collect()
                    self._open = ([handle], self._batch([handle]))
            except BaseException as error:
                self._break(error, (source, out))
                raise
            if same is False:
                self._guarded(self._disagree)
        except BaseException:
            self._give_lead()
            raise
        if same:
            self._leading = False
            self._lead.release()
            if self._followers:
                self._ring()  # type: ignore[unreachable]  # other threads count themselves
            return None
        self._give_lead()
        if handle is not None:
            self.wait(handle)
        return handle

    def _settle_solo(self, entry: Entry) -> None:
        if entry.name is None:
            self._ledger.settle(self._unnamed - 1)
        else:
            self._ledger.settle(entry.name)
            self._ledger.remember(((entry.name, entry.request, entry.signature),))

    def _run_with_handle(self, handle: Handle) -> Handle:
        if self.leads():
            self._refuse_within()
        handle.locate()
        self._enqueue(handle)
        self.wait(handle)
        return handle

    def _enqueue(self, handle: Handle) -> None:
        if self.refusal is not None:
            raise self.refusal()
        name = handle.entry.request.name
        handle.engine = self
        if name is not None:
            first = self._names_in_flight.setdefault(name, handle)
            if first is not handle:
                if first is None or first.entry.request.collective != "invalid":
                    self._refuse_duplicate(name)
                self._names_in_flight[name] = handle  # the mark of a refused call goes first; this one comes after it
        if threading.get_ident() != self._last_caller:
            self._note_caller()
        self._inbox.append(handle)

    def _refuse_duplicate(self, name: str) -> NoReturn:
        first = self._names_in_flight.get(name)
        what = f" ({first.entry.request.describe()}{', submitted at ' + first.where if first.where else ''})" if first else ""
        raise InvalidArgumentError(
            f"rank {self._rank}: tensor {name!r}: an operation of this name is in flight already{what}; synchronize it first, or give "
            f"this one another name"
        )

    def _note_caller(self) -> None:
        self._last_caller = threading.get_ident()
        self._callers.add(self._last_caller)

    def hinder(self, reason: str, yes: bool = True) -> None:
        """From now on (or no longer) every operation needs a handle, because somebody wants to know of it."""
        (self._obstacles.add if yes else self._obstacles.discard)(reason)

    @property
    def statistics(self) -> Statistics:
        """What was done so far; a copy."""
        counted, alone = self.context.statistics.copy(), self._solos
        counted.rounds += alone
        counted.unanimous += alone
        counted.tensors += alone
        counted.buckets += alone
        counted.bytes_reduced += self._solo_bytes
        return counted

    # ---- waiting -----------------------------------------------------------------------------------------------------------------

    def wait(self, handle: Handle, timeout: float | None = None) -> None:
        """Return when the handle is done; drive the engine meanwhile, or let whoever drives it do so.

        Raises:
            CollectiveTimeoutError: ``timeout`` seconds have passed; the operation goes on.
            InvalidArgumentError: this thread drives the engine already: a signal handler waits within a collective.
        """
        if self.leads():
            self._refuse_within()
        deadline = None if timeout is None else time.monotonic() + timeout
        if deadline is None:
            self._awaited.append(handle)
        try:
            while not handle.done:
                if self._lead.acquire(False):
                    self._leading = True
                    try:
                        self._guarded(lambda: self._drive(handle, deadline))
                    finally:
                        self._give_lead()
                else:
                    self._follow(handle, deadline)
                if deadline is not None and not handle.done and time.monotonic() >= deadline:
                    raise CollectiveTimeoutError(
                        f"rank {self._rank}: {handle.name}: not done after {timeout:g} s; it goes on, and synchronize may be called again"
                    )
        finally:
            if deadline is None and handle in self._awaited:
                self._awaited.remove(handle)
            self._hand_over()

    def leads(self) -> bool:
        """Whether this thread is in the middle of a call."""
        return self._leading and bool(self._lead._is_owned())

    def _refuse_within(self) -> NoReturn:
        raise InvalidArgumentError(
            "a collective was called within a collective of the same thread, from a signal handler or a destructor; "
            "let the handler set a flag, and call afterwards"
        )

    def _give_lead(self) -> None:
        lead = self._lead
        if lead._is_owned():
            self._leading = False
            lead.release()
            while lead._is_owned():  # an interrupt came just after the lead had been taken
                lead.release()
        if self._followers:
            self._ring()

    def _ring(self) -> None:
        with self._bell:
            self._bell.notify_all()

    def _follow(self, handle: Handle, deadline: float | None) -> None:
        """Sleep until the handle is done, the lead is free, or the time is over."""
        with self._bell:
            self._followers += 1
            try:
                # Counted first, looked second: whoever gives the lead away after this look sees the follower and rings.
                if handle.done:
                    return
                if self._lead.acquire(False):
                    self._lead.release()
                    return
                left = 1.0 if deadline is None else max(0.0, min(1.0, deadline - time.monotonic()))
                self._bell.wait(left)
            finally:
                self._followers -= 1

    def _hand_over(self) -> None:
        """This thread waits no longer: if there is work left, somebody else must drive."""
        if (self._pending or self._inbox) and self.refusal is None:
            if self._followers:
                self._ring()
            else:
                self._wake()

    # ---- the background thread -----------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._background is None:
            with self._bell:
                if self._background is None:
                    self._background = threading.Thread(
                        target=_run_background, args=(weakref.ref(self), self._work), name=f"collectives rank {self._rank}", daemon=True
                    )
                    weakref.finalize(self, self._work.set)
                    self._background.start()
        self._work.set()

    def gather(self) -> None:
        """Let operations gather for a cycle, and for some more while they keep coming and do not fill a list."""
        for _ in range(_MOST_CYCLES):
            if not self.cycle or self._followers:
                return
            before = len(self._inbox)
            time.sleep(self.cycle)
            waiting = list(self._inbox)
            if len(waiting) <= before or sum(handle.entry.nbytes for handle in waiting) >= min(self.threshold, _LIST_BYTES):
                return

    def drive_in_background(self) -> None:
        """Drive while there is work and nobody waits; called by the background thread."""
        while (self._pending or self._inbox) and self.refusal is None and not self._followers and self._lead.acquire(False):
            self._leading = True
            try:
                with _quick_switches():
                    self._guarded(lambda: self._drive(None, None))
            except BaseException:
                return  # every handle in flight carries the error
            finally:
                self._give_lead()

    # ---- rounds, by whoever leads ----------------------------------------------------------------------------------------------------

    def _guarded(self, act: Callable[[], None]) -> None:
        """Do something that only a failure in mid-call can end with an error."""
        try:
            act()
        except BaseException as error:
            self._break(error, self._open)
            raise

    def _drive(self, handle: Handle | None, deadline: float | None) -> None:
        """Go on until the handle is done or its time is over; in the background, until there is no work, or somebody waits."""
        begun = time.monotonic()
        while True:
            if self.refusal is not None:
                raise self.refusal()
            if handle is not None and handle.done:
                return
            if handle is None and (self._followers or not (self._pending or self._inbox)):
                return
            if self._open is None:
                self._collect()
                if not self._propose():
                    if not self._pause_until(self._something_to_do, handle, deadline, begun):
                        return
                    continue
            same = self._control.look()
            if same is None:
                if not self._pause_until(lambda: self._control.look(spin=False) is not None, handle, deadline, begun):
                    return
                same = self._control.look()
            if same:
                self._carry_out()
            else:
                self._disagree()

    def _collect(self) -> None:
        """Take in what was submitted, in the order of submission."""
        while self._inbox:
            handle = self._inbox.popleft()
            name = handle.entry.request.name
            if name is not None:
                handle.key = name
            else:
                handle.key = self._unnamed
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
        words = batch.prepare(_flat(handles))
        # Before it can be seen by the peers: whatever happens from here on, it is known what was entered.
        self._open = (handles, batch)
        self._control.enter((batch.chain + first * _NUMBER) & _MASK, words)
        return True

    def _cut(self) -> list[Handle]:
        """What is new, in lists that end where their bytes add up and not where the time has run out.

        So the lists are the same on every rank and in every step, whoever is ahead, and all ranks propose what they have planned before.
        """
        limit, filled = min(self.threshold, _LIST_BYTES), 0
        for number, handle in enumerate(self._fresh):
            filled += handle.entry.nbytes
            if filled >= limit:
                return self._fresh[: number + 1]
        return list(self._fresh)

    def _batch(self, handles: Sequence[Handle]) -> Batch:
        """The tasks of a list, from the cache if it has been there before."""
        chain = 0
        for handle in handles:
            chain = (chain * _CHAIN + handle.entry.signature) & _MASK
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
        mine = Frame(bits, bool(untold), joined, stuck)
        control, size, rank = self._control, self.context.size, self.context.rank
        control.agree(_COMPARE, mine.to_words(self._ledger.capacity))
        frames = [mine if peer == rank else Frame.from_words(control.words_of(peer)) for peer in range(size)]
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
        handle = self._pending.get(key)
        if handle is not None:
            self._complete([handle], error)
        elif type(key) is int:
            self._unnamed = max(self._unnamed, key + 1)

    def _orphaned(self, request: Request) -> MismatchError:
        assert request.root is not None
        return MismatchError(
            f"rank {self._rank}: {request.describe()}: the root, rank {self._names[request.root]}, has joined and has no tensor to give; "
            f"broadcast before a rank can run out of data"
        )

    # ---- ranks that wait for each other --------------------------------------------------------------------------------------------

    def _is_stuck(self) -> bool:
        """Whether every thread that could submit something waits for an operation."""
        alive = {thread.ident: thread for thread in threading.enumerate()}
        self._callers &= alive.keys()
        if self._inbox or not self._awaited or len(self._callers) > len(self._awaited):
            self._stuck_since = None
            return False
        if self._stuck_since is None:
            self._stuck_since = time.monotonic()
        if self._ranks_are_threads:
            return True
        # A thread that has never called anything might; a timer, and a thread that the process does not wait for, hardly.
        others = any(not (i in self._callers or t.daemon or isinstance(t, threading.Timer)) for i, t in alive.items())
        return not others or time.monotonic() - self._stuck_since > _STUCK_AFTER

    def _deadlock(self) -> None:
        """Every rank waits, and nothing can come of it."""
        mine = [handle for handle in self._awaited if handle.key in self._pending]
        told = self._control.exchange(([(handle.key, handle.entry.request) for handle in mine], self._unnamed))
        waiting = [keys for keys, _ in told]
        for peer, keys in enumerate(waiting):
            for key, _ in keys:
                self._ledger.forget(key, peer)
        # Some have used up a number for an unnamed operation, and some have not: all go on with the same.
        self._unnamed = max(unnamed for _, unnamed in told)
        error = negotiation.deadlock(self._rank, [[request for _, request in keys] for keys in waiting], self._names)
        self._complete(mine, error)

    def join(self) -> int:
        """Contribute neutral elements to what the others do until all have joined; the last rank to join."""
        if self.refusal is not None:
            raise self.refusal()
        if self.leads():
            self._refuse_within()
        if self._join is not None:
            raise InvalidArgumentError(f"rank {self._rank}: join() was called while another thread is in join()")
        handle = Handle(self.context.entries.plain("join"), _NO_ARRAY, _NO_ARRAY, lambda handle: handle.keep)
        handle.engine = self
        handle.key = "join"
        self._told_of_joining = False
        self._join = handle
        self.hinder("join")
        try:
            self.wait(handle)
        finally:
            self._join = None
            self.hinder("join", False)
            self.context.joined = False
        if handle.error is not None:
            raise handle.error
        return int(handle.result)

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
            self._unnamed = max(self._unnamed, key + 1)
        return handle

    # ---- waiting for other ranks --------------------------------------------------------------------------------------------------

    def _pause_until(self, ready: Callable[[], bool], handle: Handle | None, deadline: float | None, begun: float) -> bool:
        """Wait until ``ready()``, in ever longer naps; False if the time is over or, in the background, if somebody waits."""
        control = self._control
        for _ in range(_YIELDS if handle is not None else 1):
            if ready():
                return True
            control.relax()
        started = looked = time.monotonic()
        nap = _NAP
        timeline = self.context.timeline
        while not ready():
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return False
            if handle is None and self._followers:
                return False
            if handle is not None and handle.done:
                return True
            deep = now - looked > LOOK_EVERY / 2
            control.check(deep=deep, upcoming=self._open is None)
            if deep:
                looked = now
                self._inspect(handle, deadline, now - begun)
            time.sleep(nap if deadline is None else min(nap, max(0.0, deadline - now)))
            nap = min(nap * 1.2, _LONGEST_NAP if now - started < _LAZY_AFTER else _LAZY_NAP)
        if timeline is not None:
            ended = time.monotonic()
            if ended - started > 1e-4:
                timeline.span("engine", "wait for other ranks", started, ended, missing=[self._names[p] for p in control.missing()])
        return True

    def _inspect(self, handle: Handle | None, deadline: float | None, waited: float) -> None:
        """Has anything waited for too long?"""
        self._stall.look(self._pending.values(), self._missing)
        if self._open is None and not self._told_stuck and self._is_stuck():
            self._restless = True
        if handle is not None and deadline is None and waited > self._config.timeout:
            missing = self._missing(handle)
            who = (
                f"rank {', '.join(map(str, missing))}, which is alive" if len(missing) == 1 else f"ranks {missing or '(not known)'}, alive,"
            )
            raise CollectiveTimeoutError(
                f"rank {self._rank}: {handle.name}: waited {self._config.timeout:g} s for {who} but did not come; "
                f"see what it is doing, or raise COLLECTIVES_TIMEOUT"
            )

    def _missing(self, handle: Handle) -> list[int]:
        """The ranks that are known not to have submitted an operation."""
        if self._open is not None:
            not_here = self._control.missing()
            if not_here:
                return [self._names[peer] for peer in not_here]
        told, position = self._ledger.told(handle.key), self._ledger.position(handle.key, handle.entry.signature)
        missing = []
        for peer, frame in enumerate(self._frames):
            has = peer in told or (position is not None and frame.bits >> position & 1) or frame.joined or peer == self.context.rank
            if not has:
                missing.append(self._names[peer])
        return missing

    def _record_agreement(self, handles: Sequence[Handle]) -> None:
        timeline = self.context.timeline
        assert timeline is not None
        now = time.monotonic()
        for handle in handles:
            timeline.async_span("negotiate", handle.name, handle.submitted, now, collective=handle.entry.request.collective)
        if self.timeline_cycles:
            timeline.mark("cycle", now)

    # ---- the end -------------------------------------------------------------------------------------------------------------------

    def _break(self, error: BaseException, kept: Any) -> None:
        """After a failure in mid-call: keep what peers may touch, tell them, and refuse all further calls."""
        if self.refusal is not None:
            return
        keeping = (kept, list(self._pending.values()), self)
        _abandoned.append(keeping)
        text = f"{type(error).__name__}: {error}"
        self.refuse(
            lambda: RankFailedError(f"rank {self._rank}: this world has failed in an earlier call and cannot be used: {text}"),
            error if isinstance(error, (RankFailedError, CollectiveTimeoutError)) else None,
        )
        self._control.fail(text, in_call=True)
        deadline = time.monotonic() + _ACKNOWLEDGE_WITHIN
        while not self._control.acknowledged():
            if time.monotonic() > deadline:
                return
            time.sleep(1e-3)
        if not getattr(self.context.group.messages, "busy", False):
            _abandoned[:] = [entry for entry in _abandoned if entry is not keeping]

    def refuse(self, refusal: Callable[[], CollectivesError], error: CollectivesError | None = None) -> None:
        """From now on every call is refused; what is in flight fails, with ``error`` or the same refusal."""
        self.refusal = refusal
        self.hinder("refusal")
        while self._inbox:
            handle = self._inbox.popleft()
            handle.fail(error or refusal())
        for handle in [*self._pending.values(), *self._later]:
            handle.fail(error or refusal())
        self._pending.clear()
        self._names_in_flight.clear()
        if self._join is not None:
            self._join.fail(error or refusal())
        self._ring()

    def change(self, threshold: int, cycle_time: float) -> None:
        """Other settings from now on; every rank changes them between the same two rounds."""
        self.threshold, self.cycle = threshold, cycle_time * 1e-3
        self._batches.clear()

    def release(self) -> None:
        """Let go of what looks into shared memory, so that it can be unmapped."""
        self._batches.clear()
        self.context.release()

    @contextlib.contextmanager
    def paused(self, within: float = -1) -> Iterator[None]:
        """Take the lead from whoever has it, between two rounds; without it after ``within`` seconds."""
        with self._bell:
            self._followers += 1  # the background thread gives way to followers
        try:
            taken = self._lead.acquire(timeout=within)
        finally:
            with self._bell:
                self._followers -= 1
        if taken:
            self._leading = True
        try:
            yield
        finally:
            self._give_lead()

    def abandon(self) -> bool:
        """Leave for good, with the lead; whether a round was open, so that peers may count on this rank already: then it has failed."""
        if self._open is None or self.refusal is not None:
            return False
        names = ", ".join(handle.name for handle in self._open[0]) or "join"
        self._break(RankFailedError(f"rank {self._rank} left while operations were in flight: {names}; synchronize them first"), self._open)
        return True

    def after_fork(self, refusal: Callable[[], CollectivesError]) -> None:
        """In a forked child: there is no background thread, and locks may be taken by threads that do not exist."""
        self._make_locks()
        self.refusal = refusal
        self.hinder("refusal")


def _flat(handles: Sequence[Handle]) -> Sequence[Handle]:
    """The members of groups in place of the groups."""
    if not any(handle.members for handle in handles):
        return handles
    return [member for handle in handles for member in (handle.members or (handle,))]


def _run_background(reference: weakref.ref[Engine], work: threading.Event) -> None:
    """The background thread; it does not keep its engine alive."""
    while True:
        work.wait()
        work.clear()
        engine = reference()
        if engine is None or engine.refusal is not None:
            return
        engine.gather()
        engine.drive_in_background()
        del engine


_interval_users = 0
_interval_before = 0.0
_interval_lock = threading.Lock()


@contextlib.contextmanager
def _quick_switches() -> Iterator[None]:
    """While a background thread works: NumPy gives the interpreter lock away for every block, and waits for it to come back.

    A thread that computes in Python keeps it for 5 ms by default, hundreds of times longer than a block takes.
    """
    global _interval_users, _interval_before
    with _interval_lock:
        if _interval_users == 0:
            _interval_before = sys.getswitchinterval()
            sys.setswitchinterval(min(_SWITCH_INTERVAL, _interval_before))
        _interval_users += 1
    try:
        yield
    finally:
        with _interval_lock:
            _interval_users -= 1
            if _interval_users == 0:
                sys.setswitchinterval(_interval_before)


def _no_result(handle: Handle) -> None:
    """Of an operation that gives nothing back."""


_NO_ARRAY: Any = ()
_RESERVED = None
"""In place of the handle of a named operation that is carried out without one."""
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
