"""Point-to-point messages of one world: sending, receiving, and waiting for either.

They take no part in negotiation rounds. A thread that waits advances the endpoint (`collectives.transport`); while
nobody waits, and something is unfinished, a background thread does now and then, so that a message also moves while the
program computes or is in a collective.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from collectives.base import dtypes
from collectives.base.errors import (
    CollectivesError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    MismatchError,
    RankFailedError,
    TransportError,
    in_words,
)
from collectives.base.wake_up import WakeUp
from collectives.engine.callers import THREAD_NAME
from collectives.engine.engine import Engine
from collectives.engine.handles import Handle
from collectives.engine.matching import ANY_SOURCE, ANY_TAG, Matching
from collectives.engine.message_handles import MessageHandle, Posted, Status
from collectives.tensors.result_pool import ResultPool
from collectives.transport import backoff
from collectives.transport.backoff import YIELDS, Backoff
from collectives.transport.base import Array
from collectives.transport.group import Group
from collectives.transport.point_to_point import AtOnce, Endpoint, Incoming, Outgoing, Transfer

_SPINS = 50
"""Looks before the core is yielded, where every rank of the host has a core."""
_FAILURE_SHOWS_WITHIN = 1.0
"""Seconds that the death of a rank may take to show after the network has reported an error because of it."""
_LAST_MESSAGES_WITHIN = 1.0
"""Seconds that the last messages of a rank on another host may take longer than the news that it has left."""
_FIRST_PAUSE, _LONGEST_PAUSE = 100e-6, 2e-3
"""Seconds between two looks of the background thread."""
_LOOK_EVERY = 0.1
"""Seconds between two looks of the background thread at the other ranks' states."""


class PointToPoint:
    """The messages of one rank. Methods may be called from any thread.

    Args:
        group: of the ranks.
        engine: of the world.
        pool: where new tensors come from.
        timeout: seconds that a wait may last while all ranks are alive.
        fail: tells the other ranks that this one has failed.

    Attributes:
        in_flight: the memory of this rank's operations in flight.
    """

    def __init__(
        self, group: Group, engine: Engine, pool: ResultPool, timeout: float, fail: Callable[[str], None]
    ) -> None:
        self.in_flight = engine.in_flight
        self._rank, self._size, self._names = group.rank, group.size, group.ranks
        self._local = frozenset(group.local)
        self._left: dict[int, float] = {}
        """By the source of receives: since when all ranks that it may be are known to have left."""
        self._open_endpoint = group.open_endpoint
        self._endpoint: Endpoint | None = None
        self._at_once: AtOnce | None = None
        self._control = group.control
        self._engine = engine
        self._pool = pool
        self._timeout = timeout
        self._spins = _SPINS if len(group.local) <= (os.cpu_count() or 1) else 1
        self._looks = 400 if self._spins > 1 else 1
        self._fail = fail
        self._matching: Matching[Posted, Incoming] = Matching()
        self._unfinished: dict[Transfer, None] = {}
        """Sends and receives that are not done, in order."""
        self._lock: Any = threading.RLock()
        """Held while the matching, or the endpoint, is used."""
        self._inside = False
        self._waiting = 0
        """Threads that wait, and therefore advance the endpoint."""
        self._work = WakeUp()
        self._background: threading.Thread | None = None

    # ---- sending and receiving

    def send_at_once(self, array: Array, peer: int, tag: int) -> bool:
        """`AtOnce.send`. Returns whether it was sent; raises nothing of its own."""
        at_once = self._at_once
        return at_once is not None and self._try(at_once.send, peer, tag, array)

    def receive_at_once(self, array: Array, source: int, tag: int) -> bool:
        """`AtOnce.receive`. Returns whether it was received; raises nothing of its own."""
        return self._at_once is not None and self._try(self._receive_at_once, source, tag, array)

    def _receive_at_once(self, source: int, tag: int, array: Array) -> bool:
        at_once = self._at_once
        return (
            at_once is not None
            and self._matching.is_free(source, tag)
            and at_once.receive(source, tag, array, self._looks)
        )

    def _try(self, attempt: Callable[..., bool], *arguments: Any) -> bool:
        """Use the endpoint as by `_exclusive`; returns False where that would raise."""
        with self._lock:
            if self._inside or self._engine.refusal is not None:
                return False
            self._inside = True
            try:
                return attempt(*arguments)
            except Exception:
                raise
            except BaseException as error:  # as in `_exclusive`
                self._fail(in_words(self._names[self._rank], error))
                raise
            finally:
                self._inside = False

    def send(self, message: Outgoing) -> None:
        """Begin to send."""
        with self._exclusive():
            if message.peer == self._rank:
                array = message.array
                dtype = dtypes.SUPPORTED[array.dtype]
                self._arrived(Incoming(message.peer, message.tag, dtype, message.shape, array.nbytes, message))
            else:
                self._opened().send(message)
            self._note(message)

    def receive(self, posted: Posted) -> None:
        """Begin to receive."""
        with self._exclusive():
            endpoint = self._opened() if self._size > 1 else None
            if endpoint is not None:
                endpoint.poll()  # in the order in which the messages have come
            message = self._matching.post(posted)
            if message is not None:
                self._take(posted, message)
            self._note(posted)

    def _note(self, transfer: Transfer) -> None:
        """Note a transfer that has begun."""
        if not transfer.done:
            self._unfinished[transfer] = None
            transfer.among = self._unfinished

    def handle_of(
        self, transfer: Outgoing | Posted, deliver: Callable[[Handle], Any], reads: Any = None, writes: Any = None
    ) -> MessageHandle:
        """The handle of a transfer that has not begun.

        Raises:
            InvalidArgumentError: an operation in flight uses the memory.
        """
        handle = MessageHandle(self, transfer, deliver, reads, writes)
        handle.locate()
        overlap = self.in_flight.claim(handle)
        if overlap is not None:
            raise InvalidArgumentError(f"rank {self._names[self._rank]}: {overlap}")
        transfer.notify = handle.settle
        return handle

    def _opened(self) -> Endpoint:
        """The endpoint, made at its first use."""
        if self._endpoint is None:
            if self._open_endpoint is None:
                raise TransportError(
                    f"rank {self._names[self._rank]}: the ranks of this world have no means of point-to-point messages"
                )
            self._endpoint = self._open_endpoint()
            self._at_once = self._endpoint.at_once
            self._endpoint.arrived = self._arrived
        return self._endpoint

    def _arrived(self, message: Incoming) -> None:
        posted = self._matching.arrive(message)
        if posted is not None:
            self._take(posted, message)

    def _take(self, posted: Posted, message: Incoming) -> None:
        """Receive the payload of a message into the memory of its receive."""
        posted.message = message
        try:
            why = _refusal(posted, message)
            if why:
                self._refuse(message, why)
                raise MismatchError(f"rank {self._names[self._rank]}: {self.describe(posted)}: {why}")
            into = posted.into
            if into is None:
                dtype = dtypes.resolve(message.dtype)
                into = posted.into = self._pool.empty(math.prod(message.shape), dtype)
            self._copy(message, into.view(np.uint8))
        except Exception as error:
            if not (message.done or isinstance(error, MismatchError)):  # such as for lack of memory
                self._refuse(message, f"{type(error).__name__}: {error}")
            posted.end(error)
            return
        if message.done:
            posted.end(message.error)
        else:
            message.notify = lambda message: posted.end(message.error)

    def _copy(self, message: Incoming, into: Array) -> None:
        origin = message.payload
        if type(origin) is Outgoing:  # of this rank
            into[: message.nbytes] = origin.array.view(np.uint8)
            message.end()
            origin.end()
        else:
            assert self._endpoint is not None
            self._endpoint.receive(message, into)

    def _refuse(self, message: Incoming, why: str) -> None:
        origin = message.payload
        if type(origin) is Outgoing:
            origin.refused = why
            origin.end()
        else:
            assert self._endpoint is not None
            self._endpoint.refuse(message, why)

    def abandon(self, transfer: Outgoing | Posted, error: BaseException) -> None:
        """Fail a transfer that is waited for no longer. A send fails the world unless its receiver has left: its memory
        may be used again, and the receiver would read it without knowing."""
        with self._lock:
            if isinstance(transfer, Posted):
                self._matching.withdraw(transfer)
            elif not (
                transfer.done or transfer.peer == self._rank or self.ended or self._control.has_left(transfer.peer)
            ):
                self._fail(in_words(self._names[self._rank], error))
            transfer.end(error)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Use the matching and the endpoint.

        Raises:
            CollectivesError: calls are refused.
            InvalidArgumentError: this thread uses them already.
        """
        with self._lock:
            if self._engine.refusal is not None:  # looked at here: another thread may have closed the endpoint
                raise self._engine.refusal()
            self._refuse_reentry()
            self._inside = True
            try:
                yield
            except Exception:
                raise
            except BaseException as error:  # an interrupt: a record may have been handled in part
                self._fail(in_words(self._names[self._rank], error))
                raise
            finally:
                self._inside = False

    def drives(self) -> bool:
        """Whether this thread is in the middle of using the endpoint."""
        return self._inside and bool(self._lock._is_owned())

    def _refuse_reentry(self) -> None:
        if self.drives():
            raise InvalidArgumentError(
                "a message was sent, received or waited for within a call of the same thread that does so, from a "
                "signal handler or a destructor; let the handler set a flag, and call afterwards"
            )

    # ---- progress

    def advance(self) -> None:
        """Advance whatever can be advanced; does nothing while another thread does, and once calls are refused."""
        endpoint = self._endpoint
        if endpoint is None or self.ended or not self._lock.acquire(False):
            return
        try:
            if not self._inside and endpoint is self._endpoint:
                self._inside = True
                try:
                    endpoint.poll()
                except Exception:
                    raise
                except BaseException as error:  # as in `_exclusive`
                    self._fail(in_words(self._names[self._rank], error))
                    raise
                finally:
                    self._inside = False
        finally:
            self._lock.release()

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
        self._refuse_reentry()
        try:
            self._wait_for(transfer, timeout)
        except TransportError as error:
            found: CollectivesError = error
            try:
                # A rank's death may show in the network before it shows elsewhere.
                backoff.poll(self._engine.look_for_failures, _FAILURE_SHOWS_WITHIN)
            except CollectivesError as failure:
                found = failure
            self.abandon(transfer, found)

    def _wait_for(self, transfer: Outgoing | Posted, timeout: float | None) -> None:
        advance, relax = self.advance, self._control.relax
        self._waiting += 1
        try:
            if self._at_once is not None and isinstance(transfer, Outgoing):
                self._try(self._at_once.confirm, transfer, self._looks)
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
                    raise CollectiveTimeoutError(
                        f"rank {self._names[self._rank]}: {self.describe(transfer)}: not done after {timeout:g} s; it "
                        f"goes on, and synchronize may be called again"
                    )
                if deadline is None and pause.now - pause.begun > self._timeout:
                    self._time_out(transfer)
                pause.nap(until=deadline)
        finally:
            self._waiting -= 1
            if not self.idle():
                self.in_background()

    def _inspect(self, transfer: Outgoing | Posted) -> None:
        """Fail a transfer if the world has ended, a rank has failed, or the ranks that it needs have left."""
        try:
            self._engine.look_for_failures()
            peer = transfer.peer if isinstance(transfer, Outgoing) else transfer.source
            peers = [peer] if peer >= 0 else [other for other in range(self._size) if other != self._rank]
            if peer == self._rank or not peers or not all(self._control.has_left(other) for other in peers):
                return
            with self._exclusive():
                self._opened().poll()  # what they sent before they left
            now = time.monotonic()
            if not (self._local.issuperset(peers) or now - self._left.setdefault(peer, now) > _LAST_MESSAGES_WITHIN):
                return
            if not transfer.done:
                who = "every other rank has" if peer < 0 else f"rank {self._names[peer]} has"
                raise RankFailedError(
                    f"rank {self._names[self._rank]}: {self.describe(transfer)}: {who} shut down or ended; every "
                    f"message needs a send and a recv"
                )
        except CollectivesError as error:
            self.abandon(transfer, error)

    def _time_out(self, transfer: Outgoing | Posted) -> None:
        if isinstance(transfer, Outgoing):
            missing = "the receiver is alive, but has not called recv for it"
        else:
            waiting = ", ".join(
                f"from rank {self._names[message.source]} with tag {message.tag}"
                for message in self._matching.unexpected()[:5]
            )
            who = "no other rank" if transfer.source < 0 else "the sender is alive, but"
            missing = f"{who} has sent none; messages that wait for a recv: {waiting or 'none'}"
        rank = self._names[self._rank]
        text = (
            f"{self.describe(transfer)}: waited {self._timeout:g} s: {missing}; see what the ranks are doing, or raise "
            f"COLLECTIVES_TIMEOUT"
        )
        error = CollectiveTimeoutError(f"rank {rank}: {text}")
        self._fail(in_words(rank, error))
        self.abandon(transfer, error)

    # ---- the background thread

    def in_background(self) -> None:
        """Have unfinished transfers advanced while no thread waits."""
        if self._work.is_set():
            return
        self._work.set()
        if self._background is None:
            thread = threading.Thread(
                target=_run_background,
                args=(weakref.ref(self), self._work),
                name=f"{THREAD_NAME} {self._names[self._rank]}, messages",
                daemon=True,
            )
            weakref.finalize(self, self._work.set)
            self._background = thread
            thread.start()

    def idle(self) -> bool:
        """Whether there is nothing to advance."""
        return not self._unfinished and (self._endpoint is None or not self._endpoint.busy)

    def look_in_background(self, deep: bool) -> None:
        """Advance, unless a thread that waits does; with ``deep`` also look at the other ranks' states."""
        if self._waiting:
            return
        try:
            self.advance()
            if deep:
                for transfer in list(self._unfinished):
                    self._inspect(transfer)  # type: ignore[arg-type]  # of these two types
        except Exception as error:
            for transfer in list(self._unfinished):
                self.abandon(transfer, error)  # type: ignore[arg-type]  # as above

    # ---- the end

    @property
    def refusal(self) -> Callable[[], CollectivesError] | None:
        """Makes the error of every further call; None while calls are accepted."""
        return self._engine.refusal

    @property
    def ended(self) -> bool:
        """Whether calls are refused, so that there is nothing more to advance."""
        return self._engine.refusal is not None

    def held(self) -> AbstractContextManager[object]:
        """A context in which no transfer ends: while the world ends, until the other ranks see that it has, and read
        the memory of sends no more."""
        lock: AbstractContextManager[object] = self._lock
        return lock

    def after_fork(self) -> None:
        """In a forked child, where calls are refused: leave the endpoint to the parent. Threads that do not exist may
        hold the lock."""
        self._lock = threading.RLock()
        self._inside = False
        self._endpoint = self._at_once = None

    def close(self) -> None:
        """Fail what is unfinished, and release the endpoint. The world refuses calls already, and has left."""
        with self._lock:
            for transfer in list(self._unfinished):
                assert self._engine.refusal is not None
                self.abandon(transfer, self._engine.refusal())  # type: ignore[arg-type]  # as above
            self._matching = Matching()
            endpoint, self._endpoint, self._at_once = self._endpoint, None, None
            if endpoint is not None:
                endpoint.close()
        self._work.set()

    # ---- words

    def describe(self, transfer: Transfer) -> str:
        """A transfer in messages: ``recv from rank 2, tag 5``."""
        if isinstance(transfer, Outgoing):
            return f"send to rank {self._names[transfer.peer]}, tag {transfer.tag}"
        assert isinstance(transfer, Posted)
        message = transfer.message
        source = transfer.source if message is None else message.source
        tag = transfer.tag if message is None else message.tag
        whom = "any rank" if source == ANY_SOURCE else f"rank {self._names[source]}"
        return f"recv from {whom}, {'any tag' if tag == ANY_TAG else f'tag {tag}'}"

    def status_of(self, posted: Posted, status: Status | None = None) -> Status:
        """What a receive that is done has received."""
        status = status or Status()
        message = posted.message
        if message is None:
            raise InvalidArgumentError(
                f"rank {self._names[self._rank]}: {self.describe(posted)}: nothing has been received yet"
            )
        status.source, status.tag = self._names[message.source], message.tag
        status.shape, status.dtype, status.count = message.shape, message.dtype, math.prod(message.shape)
        return status

    def check_refused(self, message: Outgoing) -> None:
        """Raise MismatchError if the receiver has refused a message."""
        if message.refused:
            raise MismatchError(
                f"rank {self._names[self._rank]}: {self.describe(message)}: the receiver has refused it: "
                f"{message.refused}"
            )


def _refusal(posted: Posted, message: Incoming) -> str:
    """Why a receive cannot take a message; empty if it can."""
    if posted.dtype is not None and posted.dtype != message.dtype:
        expected = f"elements of {posted.dtype}"
    elif posted.shape is not None and posted.shape != message.shape:
        expected = f"shape {posted.shape}"
    elif posted.into is not None and message.nbytes > posted.into.nbytes:
        expected = f"at most {posted.into.size} elements"
    else:
        return ""
    count = math.prod(message.shape)
    return f"expected {expected}, got a message of {count} elements of {message.dtype}, shape {message.shape}"


def _run_background(reference: weakref.ref[PointToPoint], work: WakeUp) -> None:
    """The background thread; it keeps its world alive only while it looks."""
    pause, looked = _FIRST_PAUSE, 0.0
    while True:
        work.wait()
        messages = reference()
        if messages is None or messages.ended:
            return
        if messages.idle():
            pause = _FIRST_PAUSE
            del messages
            continue
        work.set()  # look again
        now = time.monotonic()
        deep = now - looked > _LOOK_EVERY
        if deep:
            looked = now
        messages.look_in_background(deep)
        del messages
        time.sleep(pause)  # rings and connections do not notify: they are looked at, less and less often
        pause = min(pause * 1.2, _LONGEST_PAUSE)
