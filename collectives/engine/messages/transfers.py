"""Point-to-point messages until they are done: their handles, waiting for them, and noticing that one cannot come.

A thread that waits advances the endpoint; while no thread waits, and something is unfinished, a background thread does
now and then, so that a message also moves while the program computes or is in a collective.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from collectives.base import interrupts
from collectives.base.config import setting_of
from collectives.base.errors import (
    CollectivesError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    RankFailedError,
    TransportError,
)
from collectives.base.wake_up import WakeUp
from collectives.engine.callers import THREAD_NAME
from collectives.engine.engine import Engine
from collectives.engine.handles import Handle, Result
from collectives.engine.messages.delivery import Delivery
from collectives.engine.messages.matching import Posted
from collectives.engine.stall import Wait
from collectives.tensors.result_pool import ResultPool
from collectives.transport import backoff
from collectives.transport.backoff import YIELDS, Backoff
from collectives.transport.group import Group
from collectives.transport.point_to_point import Outgoing, Transfer

_LOOKS = 400
"""Looks at the ring from which a message is expected, before all peers are polled: some 20 microseconds; where every
rank of the host has a core."""
_SPINS = 50
"""Polls before the core is yielded; likewise."""
_FAILURE_SHOWS_WITHIN = 1.0
"""Seconds that the death of a rank may take to show after the network has reported an error because of it."""
_LAST_MESSAGES_WITHIN = 1.0
"""Seconds that the last messages of a rank on another host may take longer than the news that it has left."""
_FIRST_PAUSE, _LONGEST_PAUSE = 100e-6, 2e-3
"""Seconds between two looks of the background thread."""
_LOOK_EVERY = 0.1
"""Seconds between two looks of the background thread at the other ranks' states."""


@dataclass(slots=True, eq=False)
class Status:
    """What is told of a message that was received.

    Attributes:
        source: the rank that sent it, among all ranks, also within a process set.
        tag: its tag.
        shape: of the tensor that was sent.
        dtype: the name of its dtype.
        count: its number of elements.
    """

    source: int = -1
    tag: int = -1
    shape: tuple[int, ...] = ()
    dtype: str = ""
    count: int = 0


@dataclass(frozen=True, slots=True)
class _Request:
    """Stands in a handle where an operation of all ranks has its request."""

    collective: str
    name: str
    root = None
    op = None

    def describe(self) -> str:
        return self.name


class MessageHandle(Handle[Result]):
    """A message from `isend` or `irecv` until its result is fetched; the endpoint works on its ``transfer``."""

    __slots__ = ("_owner", "transfer")

    def __init__(
        self,
        owner: Transfers,
        transfer: Outgoing | Posted,
        deliver: Callable[[Handle], Any],
        reads: Any = None,
        writes: Any = None,
    ) -> None:
        name = owner.delivery.describe(transfer)
        entry: Any = SimpleNamespace(request=_Request(name.partition(" ")[0], name))
        super().__init__(entry, None, None, deliver, reads=reads, writes=writes)
        self.engine = self._owner = owner
        self.transfer = transfer

    @property
    def title(self) -> str:
        return self.name

    def settle(self, transfer: Transfer) -> None:
        """Complete the handle of a transfer that is done."""
        if transfer.error is None:
            self.finish()
        else:
            self.fail(transfer.error)

    def poll(self) -> bool:
        """Whether the message is complete, so that `wait` returns at once."""
        if not self.done:
            self._owner.delivery.advance()
        return super().poll()

    @property
    def status(self) -> Status:
        """Of a receive that is done: what it has received."""
        if isinstance(self.transfer, Outgoing):
            raise InvalidArgumentError(
                f"status: {self.name} is a send, and only a receive has a status; ask the handle of the receive [A33]"
            )
        return self._owner.status_of(self.transfer)


class Transfers:
    """The messages of one rank. Methods may be called from any thread.

    Args:
        timeout: seconds that a wait may last while all ranks are alive.
        fail: tells the other ranks that this one has failed.

    Attributes:
        delivery: what begins and what arrives.
        in_flight: the memory of this rank's operations in flight.
    """

    def __init__(
        self, group: Group, engine: Engine, pool: ResultPool, timeout: float, fail: Callable[[str], None]
    ) -> None:
        has_cores = len(group.local) <= (os.cpu_count() or 1)
        self._spins = _SPINS if has_cores else 1
        self.delivery = Delivery(group, engine, pool, _LOOKS if has_cores else 1, fail)
        self.in_flight = engine.in_flight
        self._rank, self._size, self._names = group.rank, group.size, group.ranks
        self._local = frozenset(group.local)
        self._left: dict[int, float] = {}
        """By the source of receives: since when all ranks that it may be are known to have left."""
        self._control = group.control
        self._engine = engine
        self._timeout = timeout
        self._awaited: list[Outgoing | Posted] = []
        """What threads wait for, which therefore advance the endpoint."""
        self._work = WakeUp()
        self._thread: threading.Thread | None = None

    # ---- from the beginning to the end

    def begin(self, transfer: Outgoing | Posted) -> None:
        """Begin to send or to receive, unless that has begun."""
        has_begun = transfer.done or transfer.among is not None
        if has_begun:
            return
        self.delivery.begin(transfer)
        if transfer.done and not self.delivery.idle():  # such as a word for the sender, for which there was no room
            self.in_background()

    def complete(self, transfer: Outgoing | Posted) -> None:
        """Begin a transfer, unless it has begun, and wait for it. Raises its error."""
        try:
            self.begin(transfer)
            if not transfer.done:
                self.wait_for(transfer)
        except BaseException as error:  # an interrupt: a later message must not be received for this call
            self.delivery.abandon(transfer, error)
            raise
        if transfer.error is not None:
            raise transfer.error

    def start(
        self,
        transfer: Outgoing | Posted,
        deliver: Callable[[Handle], Any],
        fence: Any = None,
        reads: Any = None,
        writes: Any = None,
    ) -> MessageHandle:
        """Begin a transfer, and return its handle, of which the other arguments are.

        Raises:
            InvalidArgumentError: an operation in flight uses the memory.
        """
        try:
            handle: MessageHandle = MessageHandle(self, transfer, deliver, reads, writes)
            handle.locate()
            handle.fence = fence
            transfer.notify = handle.settle
            overlap = self.in_flight.claim(handle)
            if overlap is not None:
                raise InvalidArgumentError(f"rank {self._names[self._rank]}: {overlap}")
            self.begin(transfer)
        except BaseException as error:
            self.delivery.abandon(transfer, error)  # its memory is free again
            raise
        if not transfer.done:
            self.in_background()
        return handle

    def status_of(self, posted: Posted, status: Status | None = None) -> Status:
        """What a receive that is done has received."""
        status = status or Status()
        message = posted.message
        if message is None:
            raise InvalidArgumentError(self.delivery.sentence(posted, "nothing has been received yet [W29]"))
        status.source, status.tag = self._names[message.source], message.tag
        status.shape, status.dtype, status.count = message.shape, message.dtype, math.prod(message.shape)
        return status

    # ---- waiting

    def wait(self, handle: Handle, timeout: float | None = None) -> None:
        """`Driver.wait`."""
        assert isinstance(handle, MessageHandle)
        self.wait_for(handle.transfer, timeout)

    def wait_for(self, transfer: Outgoing | Posted, timeout: float | None = None) -> None:
        """Return when a transfer is done. Its error is not raised.

        Raises:
            CollectiveTimeoutError: ``timeout`` seconds have passed; the transfer goes on.
            InvalidArgumentError: this thread uses the endpoint already: a signal handler waits within a call.
        """
        self.delivery.refuse_reentry()
        try:
            self._wait_for(transfer, timeout)
        except TransportError as error:
            cause: CollectivesError = error
            try:
                # A rank's death may show in the network before it shows elsewhere.
                backoff.poll(self._engine.look_for_failures, _FAILURE_SHOWS_WITHIN)
            except CollectivesError as failure:
                cause = failure
            self.delivery.abandon(transfer, cause)
        finally:
            self._forget(transfer)  # once more: an interrupt may have come as `_wait_for` was about to

    def _wait_for(self, transfer: Outgoing | Posted, timeout: float | None) -> None:
        delivery = self.delivery
        advance, relax = delivery.advance, self._control.relax
        try:
            self._awaited.append(transfer)
            if isinstance(transfer, Outgoing):
                delivery.confirm(transfer)
                if transfer.done:
                    return
            for _ in range(self._spins):
                advance()
                if transfer.done:
                    return
            for _ in range(YIELDS):
                relax()
                advance()
                if transfer.done:
                    return
            pause = Backoff()
            deadline = None if timeout is None else pause.begun + timeout
            while True:
                deep = pause.look()
                advance()
                if transfer.done:
                    return
                if deep:
                    self._inspect(transfer)
                if deadline is not None and pause.now >= deadline:
                    text = f"not complete after {timeout:g} s; it continues, so call synchronize again [R30]"
                    raise CollectiveTimeoutError(delivery.sentence(transfer, text))
                if deadline is None and pause.now - pause.begun > self._timeout:
                    self._time_out(transfer)
                pause.nap(until=deadline)
        finally:
            self._forget(transfer)
            if not delivery.idle():
                self.in_background()

    def _forget(self, transfer: Outgoing | Posted) -> None:
        """Count a transfer as waited for no longer."""
        if transfer in self._awaited:
            self._awaited.remove(transfer)

    def awaited(self) -> Wait | None:
        """A transfer that a thread of this rank waits for; any thread may ask."""
        for transfer in list(self._awaited):
            peer = transfer.peer if isinstance(transfer, Outgoing) else transfer.source
            return Wait(self.delivery.describe(transfer), "", None, [self._names[peer]] if peer >= 0 else [])
        return None

    def _inspect(self, transfer: Outgoing | Posted) -> None:
        """Fail a transfer if the world has ended, a rank has failed, or the ranks that it needs have left."""
        delivery = self.delivery
        try:
            self._engine.look_for_failures()
            peer = transfer.peer if isinstance(transfer, Outgoing) else transfer.source
            peers = [peer] if peer >= 0 else [other for other in range(self._size) if other != self._rank]
            if peer == self._rank or not peers or not all(self._control.has_left(other) for other in peers):
                return
            delivery.use(lambda: delivery.opened().poll())  # what they sent before they left
            now = time.monotonic()
            if not (self._local.issuperset(peers) or now - self._left.setdefault(peer, now) > _LAST_MESSAGES_WITHIN):
                return
            if not transfer.done:
                who = "every other rank has" if peer < 0 else f"rank {self._names[peer]} has"
                text = f"{who} shut down or ended; every message needs a send and a recv [R14]"
                raise RankFailedError(delivery.sentence(transfer, text))
        except CollectivesError as error:
            delivery.abandon(transfer, error)

    def _time_out(self, transfer: Outgoing | Posted) -> None:
        delivery = self.delivery
        if isinstance(transfer, Outgoing):
            missing = "the receiver is alive but has not called recv for it"
        else:
            waiting = ", ".join(
                f"from rank {self._names[message.source]} with tag {message.tag}"
                for message in delivery.matching.unexpected()[:5]
            )
            who = "no other rank has" if transfer.source < 0 else "the sender is alive but has not"
            missing = f"{who} sent a matching message; messages that wait for a recv: {waiting or 'none'}"
        remedy = f"see what the ranks are doing, or raise {setting_of(self._timeout)}"
        text = f"waited {self._timeout:g} s: {missing}; {remedy} [R18]"
        error = CollectiveTimeoutError(delivery.sentence(transfer, text))
        delivery.fail(error)
        delivery.abandon(transfer, error)

    # ---- in the background

    def in_background(self) -> None:
        """Have the background thread, which is started if need be, advance what is unfinished while no thread waits."""
        if self._thread is None:
            with interrupts.deferred():
                weakref.finalize(self, self._work.set)
                thread = threading.Thread(
                    target=_run_background,
                    args=(weakref.ref(self), self._work),
                    name=f"{THREAD_NAME} {self._names[self._rank]}, messages",
                    daemon=True,
                )
                thread.start()
                self._thread = thread
        if not self._work.is_set():
            self._work.set()

    def look(self, deep: bool) -> None:
        """Advance, unless a thread that waits does; with ``deep`` also look at the other ranks' states."""
        if self._awaited:
            return
        delivery = self.delivery
        try:
            delivery.advance()
            if deep:
                for transfer in list(delivery.unfinished):
                    self._inspect(transfer)  # type: ignore[arg-type]  # of these two types
        except Exception as error:
            for transfer in list(delivery.unfinished):
                delivery.abandon(transfer, error)  # type: ignore[arg-type]  # as above

    # ---- the end

    @property
    def refusal(self) -> Callable[[], CollectivesError] | None:
        """Makes the error of every further call; None while calls are accepted."""
        return self._engine.refusal

    def close(self) -> None:
        """Fail what is unfinished, and release the endpoint. The world refuses calls already, and has left."""
        self.delivery.close()
        self._work.set()  # the background thread ends


def _run_background(reference: weakref.ref[Transfers], work: WakeUp) -> None:
    """The background thread; it keeps its world alive only while it looks."""
    pause, looked = _FIRST_PAUSE, 0.0
    while True:
        work.wait()
        transfers = reference()
        if transfers is None or transfers.refusal is not None:
            return
        if transfers.delivery.idle():
            pause = _FIRST_PAUSE
            del transfers
            continue
        work.set()  # look again
        now = time.monotonic()
        deep = now - looked > _LOOK_EVERY
        if deep:
            looked = now
        transfers.look(deep)
        del transfers
        time.sleep(pause)  # rings and connections do not notify: they are looked at, less and less often
        pause = min(pause * 1.2, _LONGEST_PAUSE)
