"""Messages between the endpoint and the program's memory: what arrives is matched with a receive and copied there.

One thread at a time uses the endpoint and the matching. A call of the same thread from within, by a signal handler or a
destructor, is refused.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeVar

import numpy as np

from collectives.base import dtypes
from collectives.base.errors import CollectivesError, InvalidArgumentError, MismatchError, TransportError, in_words
from collectives.engine import message_spans
from collectives.engine.engine import Engine
from collectives.engine.matching import Matching
from collectives.engine.message_describer import MessageDescriber, refusal_of
from collectives.engine.message_handles import Posted
from collectives.tensors.result_pool import ResultPool
from collectives.transport.base import Array
from collectives.transport.group import Group
from collectives.transport.point_to_point import AtOnce, Endpoint, Incoming, Outgoing, Transfer

Found = TypeVar("Found")


class Delivery:
    """The endpoint and the matching of one rank. Methods may be called from any thread.

    Args:
        group: of the ranks.
        engine: of the world.
        pool: where new tensors come from.
        describer: of messages, for errors.
        fail: tells the other ranks that this one has failed.

    Attributes:
        matching: of receives and messages.
        unfinished: sends and receives that are not done, in order.
        at_once: of the endpoint, once that has been opened.
    """

    def __init__(
        self, group: Group, engine: Engine, pool: ResultPool, describer: MessageDescriber, fail: Callable[[str], None]
    ) -> None:
        self.matching: Matching[Posted, Incoming] = Matching()
        self.unfinished: dict[Transfer, None] = {}
        self.at_once: AtOnce | None = None
        self._rank, self._size, self._names = group.rank, group.size, group.ranks
        self._open_endpoint = group.open_endpoint
        self._endpoint: Endpoint | None = None
        self._control = group.control
        self._engine, self._context = engine, engine.context
        self._pool = pool
        self._describer = describer
        self._fail = fail
        self._lock: Any = threading.RLock()
        """Held while the matching, or the endpoint, is used."""
        self._inside = False

    # ---- sending and receiving

    def send(self, message: Outgoing) -> None:
        """Begin to send. To this rank itself a copy is sent, because its receive may be posted later, if at all."""
        if message.peer == self._rank:
            message.array = message.array.copy()
        if self._context.timeline is not None:
            message_spans.record(self._context.timeline, self._names, message)
        self.use(self._send, message)

    def _send(self, message: Outgoing) -> None:
        if message.peer == self._rank:
            array = message.array
            dtype = dtypes.SUPPORTED[array.dtype]
            self._arrived(Incoming(message.peer, message.tag, dtype, message.shape, array.nbytes, message))
            message.end()
        else:
            self.opened().send(message)
        self.note(message)

    def receive(self, posted: Posted) -> None:
        """Begin to receive."""
        if self._context.timeline is not None:
            message_spans.record(self._context.timeline, self._names, posted)
        self.use(self._receive, posted)

    def _receive(self, posted: Posted) -> None:
        if self._size > 1:
            self.opened().poll()  # in the order in which the messages have come
        message = self.matching.post(posted)
        if message is not None:
            self._take(posted, message)
        self.note(posted)

    def note(self, transfer: Transfer) -> None:
        """Note a transfer that has begun, while the endpoint is used."""
        if not transfer.done:
            self.unfinished[transfer] = None
            transfer.among = self.unfinished

    def opened(self) -> Endpoint:
        """The endpoint, made at its first use."""
        if self._endpoint is None:
            if self._open_endpoint is None:
                raise TransportError(
                    f"rank {self._describer.rank}: the ranks of this world have no means of point-to-point messages"
                )
            self._endpoint = self._open_endpoint()
            self.at_once = self._endpoint.at_once
            self._endpoint.arrived = self._arrived
        return self._endpoint

    def _arrived(self, message: Incoming) -> None:
        posted = self.matching.arrive(message)
        if posted is not None:
            self._take(posted, message)

    def _take(self, posted: Posted, message: Incoming) -> None:
        """Receive the payload of a message into the memory of its receive."""
        posted.message = message
        try:
            why = refusal_of(posted, message)
            if why:
                self._refuse(message, why)
                raise MismatchError(self._describer.sentence(posted, why))
            into = posted.into
            if into is None:
                dtype = dtypes.resolve(message.dtype)
                into = posted.into = self._pool.empty(math.prod(message.shape), dtype)
            self._copy(message, into.view(np.uint8))
        except (CollectivesError, MemoryError) as error:
            if not (message.done or isinstance(error, MismatchError)):
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
        else:
            assert self._endpoint is not None
            self._endpoint.receive(message, into)

    def _refuse(self, message: Incoming, why: str) -> None:
        origin = message.payload
        if type(origin) is Outgoing:
            if not origin.done:
                origin.refused = why
        else:
            assert self._endpoint is not None
            self._endpoint.refuse(message, why)

    def abandon(self, transfer: Outgoing | Posted, error: BaseException) -> None:
        """Fail a transfer that is waited for no longer. The world fails, unless the other rank has left, where a send
        has begun, or a payload is on its way: the memory may be used again, and the receiver would read it, or the
        endpoint would write there, without knowing."""
        with self._lock:
            peer = transfer.peer if isinstance(transfer, Outgoing) else self._withdraw(transfer)
            begun = transfer.among is not None and not transfer.done
            if begun and peer not in (None, self._rank) and not (self.ended or self._control.has_left(peer)):
                self._fail(in_words(self._describer.rank, error))
            transfer.end(error)

    def _withdraw(self, posted: Posted) -> int | None:
        """Have a receive take no message; returns the source of the one that it takes already."""
        self.matching.withdraw(posted)
        return None if posted.message is None else posted.message.source

    # ---- one thread at a time

    def use(self, do: Callable[..., Found], *arguments: Any) -> Found:
        """``do(*arguments)``, which uses the endpoint or the matching.

        Raises:
            CollectivesError: calls are refused.
            InvalidArgumentError: this thread uses them already.
        """
        with self._lock:
            if self._engine.refusal is not None:  # looked at here: another thread may have closed the endpoint
                raise self._engine.refusal()
            self.refuse_reentry()
            return self._use(do, arguments)

    def attempt(self, do: Callable[..., Found], *arguments: Any) -> Found | Literal[False]:
        """`use`; False, without a call, where that would raise."""
        with self._lock:
            return False if self._inside or self._engine.refusal is not None else self._use(do, arguments)

    def _use(self, do: Callable[..., Found], arguments: Sequence[Any]) -> Found:
        self._inside = True
        try:
            return do(*arguments)
        except CollectivesError:
            raise
        except BaseException as error:  # such as an interrupt: a record may have been handled in part
            self._fail(in_words(self._describer.rank, error))
            raise
        finally:
            self._inside = False

    def drives(self) -> bool:
        """Whether this thread is in the middle of using the endpoint."""
        return self._inside and bool(self._lock._is_owned())

    def refuse_reentry(self) -> None:
        """Raise InvalidArgumentError if this thread is in the middle of using the endpoint."""
        if self.drives():
            raise InvalidArgumentError(
                "a message was sent, received or waited for within a call of the same thread that does so, from a "
                "signal handler or a destructor; let the handler set a flag, and call afterwards"
            )

    def advance(self) -> None:
        """Advance whatever can be advanced; does nothing while another thread does, and once calls are refused."""
        endpoint = self._endpoint
        if endpoint is not None and not self._inside:
            self.attempt(endpoint.poll)

    def poll(self) -> None:
        """`Endpoint.poll`. Raises as `use`."""
        self.use(lambda: self.opened().poll())

    def idle(self) -> bool:
        """Whether there is nothing to advance."""
        return not self.unfinished and (self._endpoint is None or not self._endpoint.busy)

    # ---- the end

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
        self._endpoint = self.at_once = None

    def close(self) -> None:
        """Fail what is unfinished, and release the endpoint. The world refuses calls already, and has left."""
        with self._lock:
            for transfer in list(self.unfinished):
                assert self._engine.refusal is not None
                self.abandon(transfer, self._engine.refusal())  # type: ignore[arg-type]  # of these two types
            self.matching = Matching()
            endpoint, self._endpoint, self.at_once = self._endpoint, None, None
            if endpoint is not None:
                endpoint.close()
