"""The engine: takes operations on, brings the ranks together, and carries the operations out.

    submit   any thread, any time: the operation gets a handle and waits in the inbox
    drive    whoever leads (`collectives.engine.progress`) goes from round to round (`collectives.engine.coordinator`) until what it waits for is done

A blocking call while nothing is in flight is a round of its own, without a handle: the same round, the same numbers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from collectives.base.config import Config
from collectives.base.errors import (
    CollectivesError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    RankFailedError,
    in_words,
)
from collectives.engine.context import Context, Statistics
from collectives.engine.coordinator import MASK, NUMBER, Rounds
from collectives.engine.handles import Handle
from collectives.engine.negotiation import Request
from collectives.engine.overlaps import InFlight
from collectives.engine.progress import quick_switches
from collectives.engine.request_cache import CachedRequest
from collectives.engine.stall import LOOK_EVERY, StallInspector
from collectives.engine.tasks import One
from collectives.tensors.arrays import view
from collectives.transport.base import Array

_ACKNOWLEDGE_WITHIN = 1.0
"""Seconds; fewer than the rank whose failure it is gives the others until it ends the job (`collectives.failures`)."""
_YIELDS = 200
_NAP, _LONGEST_NAP, _LAZY_NAP = 20e-6, 1e-3, 2e-3
_LAZY_AFTER = 1.0
_MOST_SHOWN = 5
"""Operations in flight that an error names."""

_abandoned: list[Any] = []
"""What a failed call may still touch on behalf of a peer or MPI: never freed."""


class Engine(Rounds):
    """The engine of one world. Methods may be called from any thread.

    Args:
        in_flight: the memory of this rank's operations in flight; all others as for `Rounds`.
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
        super().__init__(context, config, names, make_neutral, ranks_are_threads)
        self._timeout = config.timeout
        self._stall = StallInspector(self._rank, config.stall_warning, config.stall_shutdown)
        self._solos = self._solo_bytes = 0
        self.in_flight = in_flight
        self._using_memory = in_flight.operations
        self._obstacles: set[str] = set()
        """Why a blocking call cannot be carried out without a handle at present."""

    # ---- submission
    # ------------------------------------------------------------------------------------------------------------------

    def submit(self, handle: Handle) -> Handle:
        """Take an operation on; returns at once.

        Raises:
            InvalidArgumentError: an operation of this name is in flight already, or one that writes memory that this
                one uses, or uses memory that this one writes; it goes on.
        """
        self._enqueue(handle)
        if not self._work.is_set():
            self._wake()
        return handle

    def run(
        self,
        entry: CachedRequest,
        source: Array,
        out: Array,
        deliver: Callable[[Handle], Any] | None = None,
        keep: Any = None,
        handle: Handle | None = None,
    ) -> Handle | None:
        """Carry out an operation and return when it is done.

        Args:
            deliver, keep: of its handle, which is made only if it needs one; ``keep`` begins with the view of the
                tensor.
            handle: or the handle itself.

        Returns:
            The handle, complete, or None if the operation was carried out without one.
        """
        if not entry.simple or not self._lead.acquire(False):
            return self._run_with_handle(handle or _handle(entry, source, out, deliver, keep))
        # Looked at with the lead: until then another thread may have left something behind that goes first.
        busy = self._pending or self._inbox or self._followers or self._obstacles or self._chosen or self._using_memory
        if busy or self._leading or self._open is not None:
            self._lead.release()
            return self._run_with_handle(handle or _handle(entry, source, out, deliver, keep))
        self._leading = True
        try:
            if threading.current_thread() is not self._last_caller:
                self._note_caller()
            name, token = entry.name, entry.signature
            if name is None:
                token = (token + self._unnamed * NUMBER) & MASK
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
                    # Somebody is missing, or has proposed something else: from here on it is an operation like any
                    # other.
                    handle = handle or _handle(entry, source, out, deliver, keep)
                    handle.locate()
                    handle.engine = self
                    # For other threads to see. The round is entered: it is too late to refuse what one of them may have
                    # claimed meanwhile.
                    self.in_flight.claim(handle)
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
            if not same:
                self._give_lead()
        except BaseException:
            if self._names_in_flight.get(entry.name or "", self) is _RESERVED:
                del self._names_in_flight[entry.name or ""]
            self._give_lead()
            raise
        if same:
            self._leading = False
            self._lead.release()
            if self._lead._is_owned():
                self._give_lead()  # an earlier call was interrupted just after it had taken the lead
            if self._followers or self._inbox:
                self._hand_over()  # other threads have submitted something, or wait
            return None
        if handle is not None:
            self.wait(handle)
        return handle

    def _settle_solo(self, entry: CachedRequest) -> None:
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
        try:
            if name is not None:
                first = self._names_in_flight.setdefault(name, handle)
                if first is not handle:
                    if first is None or first.entry.request.collective != "invalid":
                        self._refuse_duplicate(name)
                    self._names_in_flight[name] = (
                        handle  # the mark of a refused call goes first; this one comes after it
                    )
            if threading.current_thread() is not self._last_caller:
                self._note_caller()
            overlap = self.in_flight.claim(handle)
            if overlap is not None:
                self._refuse_overlap(handle, overlap)
            self._inbox.append(handle)
        except BaseException:
            self._withdraw(handle)
            raise
        if self.refusal is not None:  # meanwhile, and whoever refused may have looked into the inbox before
            handle.fail(self.refusal())  # type: ignore[unreachable]

    def _withdraw(self, handle: Handle) -> None:
        """An interrupt may have come before the operation was submitted, or just after: then it goes on."""
        if handle in self._inbox or handle in self._later or self._pending.get(handle.key) is handle:
            return
        self.in_flight.operations.pop(handle.claim, None)
        if self._names_in_flight.get(handle.entry.request.name or "") is handle:
            del self._names_in_flight[handle.entry.request.name or ""]

    def _refuse_duplicate(self, name: str) -> NoReturn:
        first = self._names_in_flight.get(name)
        what = (
            f" ({first.entry.request.describe()}{', submitted at ' + first.where if first.where else ''})"
            if first
            else ""
        )
        raise InvalidArgumentError(
            f"rank {self._rank}: tensor {name!r}: an operation of this name is in flight already{what}; synchronize "
            f"it first, or give "
            f"this one another name"
        )

    def _refuse_overlap(self, handle: Handle, why: str) -> NoReturn:
        """Which tensors share memory is known to this rank alone: the others learn of it by a mark in place of the
        operation."""
        name = handle.entry.request.name
        if name is not None:
            self._names_in_flight.pop(name, None)
        error = InvalidArgumentError(f"rank {self._rank}: {why}")
        self.submit(
            Handle(
                self.context.entries.plain("invalid", name, detail=f"InvalidArgumentError: {why}"),
                _NO_ARRAY,
                _NO_ARRAY,
                _no_result,
            )
        )
        raise error

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

    # ---- waiting, driving
    # ------------------------------------------------------------------------------------------------------------

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
                try:
                    if self._stopping:
                        time.sleep(_NAP)  # whoever stops the engine wants the lead
                    if self._lead.acquire(False):
                        self._leading = True
                        self._guarded(lambda: self._drive(handle, deadline))
                    else:
                        self._follow(handle, deadline)
                finally:
                    self._give_lead()
                if deadline is not None and not handle.done and time.monotonic() >= deadline:
                    raise CollectiveTimeoutError(
                        f"rank {self._rank}: {handle.name}: not done after {timeout:g} s; it goes on, and "
                        f"synchronize may be called again"
                    )
        finally:
            self._give_lead()  # once more: an interrupt may have come just before it was given
            if deadline is None and handle in self._awaited:
                self._awaited.remove(handle)
            self._hand_over()

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

    def drive_in_background(self) -> None:
        """Drive while there is work and nobody waits; called by the background thread."""
        while (
            (self._pending or self._inbox)
            and self.refusal is None
            and not self._followers
            and self._lead.acquire(False)
        ):
            self._leading = True
            try:
                with quick_switches():
                    self._guarded(lambda: self._drive(None, None))
            except BaseException:
                return  # every handle in flight carries the error
            finally:
                self._give_lead()

    def _guarded(self, act: Callable[[], None]) -> None:
        """Do something that only a failure in mid-call can end with an error."""
        try:
            act()
        except BaseException as error:
            self._break(error, self._open)
            raise

    def _drive(self, handle: Handle | None, deadline: float | None) -> None:
        """Go on until the handle is done or its time is over; in the background, until there is no work, or somebody
        waits."""
        begun = time.monotonic()
        while True:
            if self.refusal is not None:
                raise self.refusal()
            if handle is not None and handle.done:
                return
            if handle is None and (self._followers or not (self._pending or self._inbox)):
                return
            if handle is not None and self._stopping:
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
                begun = time.monotonic()
            else:
                self._disagree()

    def _pause_until(
        self, ready: Callable[[], bool], handle: Handle | None, deadline: float | None, begun: float
    ) -> bool:
        """Wait until ``ready()``, in ever longer naps; False if the time is over or, in the background, if somebody
        waits."""
        control = self._control
        for _ in range(_YIELDS if handle is not None else 1):
            if ready():
                return True
            control.relax()
        started = looked = time.monotonic()
        nap = _NAP
        timeline = self.context.timeline
        missing: list[int] = []
        while not ready():
            now = time.monotonic()
            if timeline is not None and self._open is not None:
                missing = control.missing() or missing  # the last ones that were waited for
            if deadline is not None and now >= deadline:
                return False
            if self._stopping or (handle is None and self._followers):
                return False
            if handle is not None and handle.done:
                return True
            deep = now - looked > LOOK_EVERY / 2
            try:
                control.check(deep=deep, upcoming=self._open is None)
            except RankFailedError as error:
                if "\n" not in str(error):  # else it ends with the failure itself, which says enough
                    error.args = (f"{error}{self._waiting()}",)
                raise
            if deep:
                looked = now
                if self.refusal is not None:  # by a thread that does not lead, as when work on a GPU was aborted
                    raise self.refusal()
                self._inspect(handle, deadline, now - begun)
            # Peers write memory, and nobody rings: a look now and then costs 2.6 % of a core while a rank is late.
            time.sleep(nap if deadline is None else min(nap, max(0.0, deadline - now)))
            nap = min(nap * 1.2, _LONGEST_NAP if now - started < _LAZY_AFTER else _LAZY_NAP)
        if timeline is not None:
            ended = time.monotonic()
            if ended - started > 1e-4:
                timeline.span(
                    "engine", "wait for other ranks", started, ended, missing=[self._names[p] for p in missing]
                )
        return True

    def _waiting(self) -> str:
        """What is in flight, for the message of an error that ends it."""
        open_here = self._open[0] if self._open is not None else ()
        waiting = list(open_here or self._pending.values())
        if not waiting:
            return ""
        shown = [
            f"{handle.title}{f', submitted at {handle.where}' if handle.where else ''}"
            for handle in waiting[:_MOST_SHOWN]
        ]
        more = f"; and {len(waiting) - _MOST_SHOWN} more" if len(waiting) > _MOST_SHOWN else ""
        return f"\nrank {self._rank} was waiting for {'; '.join(shown)}{more}"

    def _inspect(self, handle: Handle | None, deadline: float | None, waited: float) -> None:
        """Has anything waited for too long?"""
        self._stall.look(self._pending.values(), self._missing)
        if self._open is None and not self._told_stuck and self._is_stuck():
            self._restless = True
        if handle is not None and deadline is None and waited > self._timeout:
            missing = self._missing(handle)
            who = (
                f"rank {', '.join(map(str, missing))}, which is alive"
                if len(missing) == 1
                else f"ranks {missing or '(not known)'}, alive,"
            )
            raise CollectiveTimeoutError(
                f"rank {self._rank}: {handle.name}: waited {self._timeout:g} s for {who} but did not come; "
                f"see what it is doing, or raise COLLECTIVES_TIMEOUT"
            )

    # ---- the end
    # ------------------------------------------------------------------------------------------------------------------

    def _break(self, error: BaseException, kept: Any) -> None:
        """After a failure in mid-call: keep what peers may touch, tell them, and refuse all further calls."""
        refused = self.refusal
        if refused is not None and not (self._pending or self._inbox):
            return
        keeping = (kept, list(self._pending.values()), self)
        _abandoned.append(keeping)
        if refused is not None:
            self.refuse(refused)  # fails what is in flight: whoever told this world to refuse did not lead
            return
        text = in_words(self._rank, error)
        self.refuse(
            lambda: RankFailedError(
                f"rank {self._rank}: this world has failed in an earlier call and cannot be used: {text}"
            ),
            error if isinstance(error, (RankFailedError, CollectiveTimeoutError)) else None,
        )
        self._control.fail(text, in_call=True)
        deadline = time.monotonic() + _ACKNOWLEDGE_WITHIN
        while not self._control.acknowledged():
            if time.monotonic() > deadline:
                return
            time.sleep(1e-3)  # the peers acknowledge on the board, which can only be looked at
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
        self._work.set()  # the background thread ends

    def change(self, threshold: int, cycle_time: float) -> None:
        """Other settings from now on; every rank changes them between the same two rounds."""
        self.threshold, self.cycle = threshold, cycle_time * 1e-3
        self._batches.clear()

    def release(self) -> None:
        """Let go of what looks into shared memory, so that it can be unmapped."""
        self._batches.clear()
        self.context.release()

    def abandon(self) -> bool:
        """Leave for good, with the lead; whether a round was open, so that peers may count on this rank already: then
        it has failed."""
        if self._open is None or self.refusal is not None:
            return False
        names = ", ".join(handle.name for handle in self._open[0]) or "join"
        self._break(
            RankFailedError(f"rank {self._rank} left while operations were in flight: {names}; synchronize them first"),
            self._open,
        )
        return True

    def after_fork(self, refusal: Callable[[], CollectivesError]) -> None:
        """In a forked child: there is no background thread, and locks may be taken by threads that do not exist."""
        self._make_locks()
        self.refusal = refusal
        self.hinder("refusal")


def _handle(
    entry: CachedRequest, source: Array, out: Array, deliver: Callable[[Handle], Any] | None, keep: Any
) -> Handle:
    """The handle of a blocking call that needs one after all."""
    if keep is None:
        return Handle(entry, source, out, deliver or _no_result)
    if out is source:
        return Handle(entry, source, out, deliver or _no_result, keep, writes=keep[0])
    return Handle(entry, source, out, deliver or _no_result, keep, reads=keep[0], writes=view(out))


def _no_result(handle: Handle) -> None:
    """Of an operation that gives nothing back."""


_NO_ARRAY: Any = ()
_RESERVED = None
"""In place of the handle of a named operation that is carried out without one."""
