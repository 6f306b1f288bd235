"""The engine: takes operations, negotiates them with the other ranks, and carries them out.

    submissions    the operations that were submitted and are not complete        any thread
    progress       which thread drives, and how threads wait                      one thread at a time
    coordinator    negotiation rounds: propose, compare, agree, carry out         the driving thread
    failure        the end: calls are refused, and what is in flight fails        the driving thread

A blocking call while nothing is in flight skips the first two: `Engine.run` enters the round itself, without a handle.
On the wire it is the round that it would be with one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from collectives.base.config import Config
from collectives.base.errors import CollectivesError, InvalidArgumentError
from collectives.engine.batches import Batch
from collectives.engine.callers import Callers
from collectives.engine.context import Context, Statistics
from collectives.engine.coordinator import MASK, NUMBER, Coordinator
from collectives.engine.failure import FailureHandler
from collectives.engine.handles import EMPTY, Handle, no_result
from collectives.engine.located import one_tensor
from collectives.engine.negotiation import Request
from collectives.engine.overlaps import InFlight
from collectives.engine.progress import Progress
from collectives.engine.request_cache import CachedRequest
from collectives.engine.rows import GatheredRows, Rows
from collectives.engine.stall import Wait
from collectives.engine.submissions import WITHOUT_HANDLE, Submissions
from collectives.engine.tasks import OneTensor
from collectives.tensors.arrays import View, view
from collectives.transport.backoff import YIELDS
from collectives.transport.base import Array


class Engine:
    """The engine of one world. Methods may be called from any thread.

    Args:
        names: the ranks' numbers in messages.
        make_neutral: makes this rank's contribution to an operation once it has joined.
        ranks_are_threads: whether every other thread of this process is another rank.
    """

    def __init__(
        self,
        context: Context,
        config: Config,
        names: Sequence[int],
        make_neutral: Callable[[Request], Handle],
        ranks_are_threads: bool,
        in_flight: InFlight,
    ) -> None:
        self.context = context
        self.in_flight = in_flight
        self._rank = rank = names[context.rank]
        self._callers = Callers(ranks_are_threads)
        self._submissions = submissions = Submissions(rank, in_flight)
        self._coordinator = Coordinator(context, config, names, make_neutral, submissions, self._callers)
        self._failure = FailureHandler(self._coordinator, submissions, self._callers, rank)
        self._progress = Progress(self._coordinator, submissions, self._callers, self._failure, config, rank)
        self._solos = self._solo_bytes = 0
        # What `run`, `submit` and their callers read in every call, without the look-ups in between.
        self.wait, self.guarded, self.drives = self._progress.wait, self._progress.guarded, self._progress.drives
        self.paused, self.await_background = self._progress.paused, self._progress.await_background
        self.refuse, self.abandon = self._failure.refuse, self._failure.abandon
        self.when_settled, self.bound_stalls = self._failure.when_settled, self._progress.bound_stalls
        self._acquire, self._release = self._progress.lock.acquire, self._progress.lock.release
        self._owns, self._work_is_set = self._progress.lock._is_owned, submissions.work.is_set
        self._enter_and_look = context.control.enter_and_look
        self._pending, self._inbox, self._names = submissions.pending, submissions.inbox, submissions.names
        self._obstacles = submissions.obstacles
        self._using_memory = in_flight.operations
        self._ledger = self._coordinator.ledger
        self._planner = context.planner
        self._statistics = context.statistics

    # ---- submission

    def submit(self, handle: Handle, wake: bool = True) -> Handle:
        """Start an operation; returns at once. Unless ``wake``, the caller waits for it or wakes the background thread.

        Raises:
            InvalidArgumentError: an operation of this name is in flight, or one that shares memory with this one, which
                one of the two writes; that one goes on.
        """
        handle.engine = self
        if not self._callers.here.noted:
            self._callers.note()
        overlap = self._submissions.add(handle)
        if overlap is not None:
            self._refuse_overlap(handle, overlap)
        if wake and not self._work_is_set():
            self._progress.wake()
        return handle

    def run(
        self,
        entry: CachedRequest,
        source: Array,
        out: Any,
        deliver: Callable[[Handle], Any] | None = None,
        keep: Any = None,
        handle: Handle | None = None,
    ) -> Handle | None:
        """Carry out an operation and return when it is done.

        Args:
            entry: the request.
            source, out: 1-D arrays of its dtype; of an allgather or all-to-all, what the result is put into.
            deliver, keep: of its handle, which is made only if it needs one; ``keep`` begins with the view of the
                tensor, or with the tensor itself if that is an array of which no view has been made.
            handle: or the handle itself.

        Returns:
            The handle, complete; None if the operation was carried out without one.
        """
        coordinator, submissions = self._coordinator, self._submissions
        progress, callers = self._progress, self._callers
        idle = False
        try:  # around everything between the lock's acquisition and its release: see `collectives.base.exclusion`
            if (entry.simple or type(out) is GatheredRows) and self._acquire(False):
                # Checked with the lock held: until then another thread may have left something that goes first.
                idle = not (
                    self._pending
                    or self._inbox
                    or self._obstacles
                    or self._using_memory
                    or callers.followers
                    or coordinator.chosen
                    or progress.driving
                    or coordinator.open is not None
                )
                if not idle:
                    self._release()
            if idle:
                progress.driving = True
                if not callers.here.noted:
                    callers.note()
                name, token = entry.name, entry.signature
                if name is None:
                    token = (token + submissions.unnamed * NUMBER) & MASK
                elif self._names.setdefault(name, WITHOUT_HANDLE) is not WITHOUT_HANDLE:
                    submissions.refuse_duplicate(name)
                try:
                    task: OneTensor | Rows | None = entry.step
                    if task is None or task.epoch != self._planner.epoch:
                        task = self._bind(entry)
                    attempt = task.attempt
                    if attempt is not None:
                        same = attempt(token, source, out)
                    else:
                        same = self._enter_and_look(token, task.prepare(source, out))
                        if same:
                            task.run()
                    if same is None:
                        same = self._await_late_ranks()
                        if same:
                            task.run()
                    if same:
                        self._solos += 1
                        self._solo_bytes += entry.nbytes
                        if name is None:
                            submissions.unnamed += 1
                        else:
                            del self._names[name]
                            statistics = self._statistics  # as `count_step`, without a call
                            if entry.last_step == statistics.steps:
                                statistics.steps += 1
                            entry.last_step = statistics.steps
                        if self._ledger.news or (name is not None and task.generation != self._ledger.generation):
                            coordinator.settle(name if name is not None else submissions.unnamed - 1, task)
                    else:
                        # A rank is missing, or has proposed something else: continue as an operation with a handle.
                        handle = handle or self._handle(entry, source, out, deliver, keep)
                        handle.locate()
                        handle.engine = self
                        coordinator.enter_alone(handle)
                except BaseException as error:
                    self._failure.fail(error, (source, out))
                    raise
                if same is False:
                    progress.guarded(coordinator.compare)
                if same:
                    progress.driving = False
                    self._release()
                    if self._owns():
                        progress.release()  # an earlier call was interrupted twice
                else:
                    progress.release()
        except BaseException:  # such as an interrupt
            if idle:
                if self._names.get(entry.name or "", self) is WITHOUT_HANDLE:
                    del self._names[entry.name or ""]
                progress.release()
            elif not progress.driving:
                progress.release()
            raise
        if not idle:
            return self._run_with_handle(handle or self._handle(entry, source, out, deliver, keep))
        if same:
            if callers.followers or self._inbox:
                progress.hand_over()  # other threads have submitted something, or wait
            return None
        if handle is not None:
            self.wait(handle)
        return handle

    def _await_late_ranks(self) -> bool | None:
        """`Control.look` for as long as a wait only yields the core: ranks that are a little late need no handle."""
        control, same = self.context.control, None
        for _ in range(YIELDS):
            control.relax()
            same = control.look(spin=False)
            if same is not None:
                break
        return same

    def _bind(self, entry: CachedRequest) -> OneTensor | Rows:
        """The task of a blocking call, bound to the plan that is in force."""
        task: OneTensor | Rows = entry.step or one_tensor(self.context, entry)
        entry.step = task
        task.bind()
        return task

    def _handle(
        self, entry: CachedRequest, source: Array, out: Any, deliver: Callable[[Handle], Any] | None, keep: Any
    ) -> Handle:
        """The handle of a blocking call that needs one after all."""
        if type(out) is GatheredRows:
            return out.handle()
        if entry.binding is not None:
            return entry.binding.handle()
        if keep is None:
            return Handle(entry, source, out, deliver or no_result)
        if type(keep[0]) is not View:
            keep = (view(keep[0], writable=out is source), *keep[1:])
        if out is not source:
            return Handle(entry, source, out, deliver or no_result, keep, reads=keep[0], writes=view(out))
        if entry.request.root == self.context.rank:
            return Handle(entry, source, out, deliver or no_result, keep, reads=keep[0])
        return Handle(entry, source, out, deliver or no_result, keep, writes=keep[0])

    def _run_with_handle(self, handle: Handle) -> Handle:
        self._progress.refuse_reentry()
        handle.locate()
        self.submit(handle, wake=False)
        self.wait(handle)
        return handle

    def _refuse_overlap(self, handle: Handle, why: str) -> NoReturn:
        """Only this rank knows which of its tensors share memory: tell the others by a mark in place of the
        operation."""
        mark = self.context.entries.plain("invalid", handle.entry.request.name, detail=f"InvalidArgumentError: {why}")
        self.submit(Handle(mark, EMPTY, EMPTY, no_result))
        raise InvalidArgumentError(f"rank {self._rank}: {why}")

    # ---- joining

    def join(self) -> int:
        """Contribute neutral elements to the others' operations until all have joined. Returns the last to join."""
        if self.refusal is not None:
            raise self.refusal()
        self._progress.refuse_reentry()
        if self._coordinator.joining is not None:
            raise InvalidArgumentError(
                f"rank {self._rank}: join() was called while another thread is in join(); call it from one thread [W24]"
            )
        handle = Handle(self.context.entries.plain("join"), EMPTY, EMPTY, lambda handle: handle.keep)
        handle.engine = self
        handle.key = "join"
        self._coordinator.begin_join(handle)
        self.set_obstacle("join")
        try:
            self.wait(handle)
        finally:
            self.set_obstacle("join", False)
            self._coordinator.end_join()
        if handle.error is not None:
            raise handle.error
        return int(handle.result)

    def look_for_failures(self) -> None:
        """Raise RankFailedError if a rank has failed; for a wait outside of rounds. Does nothing while another thread
        drives, which looks itself."""
        if self.refusal is not None:
            raise self.refusal()
        progress = self._progress
        if not self._acquire(False):
            return
        try:
            if not progress.driving:
                self.context.control.check(deep=True)
        finally:
            if progress.driving:  # by this thread, from whose call this one comes
                self._release()
            else:
                progress.release()
                progress.hand_over()

    # ---- settings and counters

    @property
    def threshold(self) -> int:
        """Bytes at which a bucket ends."""
        return self._coordinator.threshold

    def set_obstacle(self, reason: str, present: bool = True) -> None:
        """Disable the handle-free path of `run` for ``reason``; if not ``present``, withdraw the reason."""
        (self._obstacles.add if present else self._obstacles.discard)(reason)

    def change(self, threshold: int, cycle_time: float) -> None:
        """Change settings; every rank does so between the same two rounds. ``cycle_time`` is in milliseconds."""
        self._coordinator.threshold, self._progress.cycle = threshold, cycle_time * 1e-3
        self._coordinator.forget_batches()

    def on_batch(self, callback: Callable[[Batch, Sequence[Handle], float], None] | None) -> None:
        """Have ``callback(batch, handles, submitted)`` called after every batch, between the same two rounds on every
        rank; ``submitted`` is when the first operation was. None: no more."""
        self._coordinator.on_batch = callback

    def mark_cycles(self, yes: bool) -> None:
        """Mark every round in the timeline, or no longer."""
        self._coordinator.timeline_cycles = yes

    @property
    def statistics(self) -> Statistics:
        """The counters so far; a copy."""
        counted = self.context.statistics.copy()
        counted.count_alone(self._solos, self._solo_bytes)
        return counted

    def oldest(self) -> Wait | None:
        """The operation of this rank that has been in flight for longest; any thread may ask."""
        handles = [handle for handle in (*self._pending.values(), *self._inbox) if not handle.done]
        if not handles:
            return None
        handle = min(handles, key=lambda handle: handle.submitted)
        return Wait(handle.title, handle.where, handle.submitted, self._coordinator.missing(handle))

    # ---- the end

    @property
    def refusal(self) -> Callable[[], CollectivesError] | None:
        """Makes the error of every further call; None while calls are accepted."""
        return self._submissions.refusal

    def refuse_calls(self, refusal: Callable[[], CollectivesError]) -> None:
        """Refuse further calls, unless they are refused already; what is in flight goes on."""
        self._obstacles.add("refusal")
        self._submissions.refusal = self._submissions.refusal or refusal

    def release(self) -> None:
        """Drop what refers to shared memory, so that it can be unmapped."""
        self._coordinator.release()
        self.context.release()

    def after_fork(self, refusal: Callable[[], CollectivesError]) -> None:
        """In a forked child: there is no background thread, and threads that do not exist may hold locks."""
        self._progress.reset()
        self._acquire, self._release = self._progress.lock.acquire, self._progress.lock.release
        self._owns, self._work_is_set = self._progress.lock._is_owned, self._submissions.work.is_set
        self._obstacles.add("refusal")
        self._submissions.refusal = refusal  # of a failed world too: a child must not speak for its parent
