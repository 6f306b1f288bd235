"""Messages between the endpoint and the program's memory: what arrives is matched with a receive and copied there.

One thread at a time uses the endpoint and the matching. A call of the same thread from within, by a signal handler or a
destructor, is refused.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeVar

import numpy as np

from collectives.base import dtypes
from collectives.base.errors import CollectivesError, InvalidArgumentError, MismatchError, TransportError, in_words
from collectives.base.exclusion import attempted, exclusive, exclusively, give_back
from collectives.engine.engine import Engine
from collectives.engine.messages.matching import ANY_SOURCE, ANY_TAG, Matching, Posted
from collectives.tensors.result_pool import ResultPool
from collectives.transport.base import Array
from collectives.transport.group import Group
from collectives.transport.point_to_point import AtOnce, Endpoint, Incoming, Outgoing, Transfer

TRACK = "messages"
"""Of the timeline: a span ``send`` or ``recv`` for each message, from its call until it is done."""
_NEITHER: tuple[Outgoing | bool, bool] = (False, False)
Found = TypeVar("Found")


class Delivery:
    """The endpoint and the matching of one rank. Methods may be called from any thread.

    Args:
        looks: at a ring, before all peers are polled.
        fail: tells the other ranks that this one has failed.

    Attributes:
        matching: of receives and messages.
        unfinished: sends and receives that are not done, in order.
        at_once: of the endpoint, once that has been opened.
    """

    def __init__(self, group: Group, engine: Engine, pool: ResultPool, looks: int, fail: Callable[[str], None]) -> None:
        self.matching: Matching[Posted, Incoming] = Matching()
        self.unfinished: dict[Transfer, None] = {}
        self.at_once: AtOnce | None = None
        self._rank, self._size, self._names = group.rank, group.size, group.ranks
        self._local = frozenset(group.local)
        self._open_endpoint = group.open_endpoint
        self._endpoint: Endpoint | None = None
        self._control = group.control
        self._engine, self._context = engine, engine.context
        self._pool = pool
        self._looks = looks
        self._fail = fail
        self._lock: Any = threading.RLock()
        """Held while the matching, or the endpoint, is used."""

    # ---- sending and receiving

    def begin(self, transfer: Outgoing | Posted) -> None:
        """Begin to send or to receive. To this rank itself a copy is sent, because its receive may be posted later, if
        at all."""
        if self._context.timeline is not None:
            self._record(transfer)
        if isinstance(transfer, Posted):
            self.use(self._receive, transfer)
            return
        if transfer.peer == self._rank:
            transfer.array = transfer.array.copy()
        self.use(self._send, transfer)

    def _send(self, message: Outgoing) -> None:
        if message.peer == self._rank:
            array = message.array
            dtype = dtypes.SUPPORTED[array.dtype]
            self._arrived(Incoming(message.peer, message.tag, dtype, message.shape, array.nbytes, message))
            message.end()
        else:
            self.opened().send(message)
        self._note(message)

    def _receive(self, posted: Posted) -> None:
        if self._size > 1:
            self.opened().poll()  # in the order in which the messages have come
        message = self.matching.post(posted)
        if message is not None:
            self._take(posted, message)
        self._note(posted)

    def _note(self, transfer: Transfer) -> None:
        """Note a transfer that has begun."""
        if not transfer.done:
            self.unfinished[transfer] = None
            transfer.among = self.unfinished

    def opened(self) -> Endpoint:
        """The endpoint, made at its first use."""
        if self._endpoint is None:
            if self._open_endpoint is None:
                raise TransportError(
                    f"rank {self._names[self._rank]}: this world does not support point-to-point messages [N17]"
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
            why = posted.refusal_of(message)
            if why:
                self._refuse(message, why)
                raise MismatchError(self.sentence(posted, why))
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

    @exclusive
    def abandon(self, transfer: Outgoing | Posted, error: BaseException) -> None:
        """Fail a transfer that is waited for no longer. The world fails, unless the other rank has left, where a send
        has begun, or a payload is on its way: the memory may be used again, and the receiver would read it, or the
        endpoint would write there, without knowing."""
        peer = transfer.peer if isinstance(transfer, Outgoing) else self._withdraw(transfer)
        begun = transfer.among is not None and not transfer.done
        lasts = self._engine.refusal is None
        if lasts and begun and peer not in (None, self._rank) and not self._control.has_left(peer):
            self.fail(error)
        transfer.end(error)

    def _withdraw(self, posted: Posted) -> int | None:
        """Have a receive take no message; returns the source of the one that it takes already."""
        self.matching.withdraw(posted)
        return None if posted.message is None else posted.message.source

    # ---- within one call

    def send_at_once(self, array: Array, peer: int, tag: int) -> Outgoing | bool:
        """`AtOnce.send`: whether it was sent, or what is yet to be waited for. Raises nothing of its own."""
        at_once = self.at_once
        if at_once is None or peer not in self._local or self._context.timeline is not None:  # which shows transfers
            return False
        try:
            return self.attempt(self._send_at_once, at_once, array, peer, tag)
        except BaseException as error:
            self.fail(error)
            raise

    def _send_at_once(self, at_once: AtOnce, array: Array, peer: int, tag: int) -> Outgoing | bool:
        message = at_once.send(peer, tag, array)
        if type(message) is Outgoing:
            self._note(message)
        return message

    def receive_at_once(self, array: Array, source: int, tag: int) -> bool:
        """`AtOnce.receive`. Returns whether it was received; raises nothing of its own."""
        at_once = self.at_once
        if at_once is None or source not in self._local or self._context.timeline is not None:
            return False
        return self.attempt(self._receive_at_once, at_once, array, source, tag)

    def _receive_at_once(self, at_once: AtOnce, array: Array, source: int, tag: int) -> bool:
        return self.matching.is_free(source, tag) and at_once.receive(source, tag, array, self._looks)

    def sendrecv_at_once(
        self, array: Array, peer: int, tag: int, into: Array, source: int, expected: int
    ) -> tuple[Outgoing | bool, bool]:
        """`send_at_once`, and, unless that has returned False, `receive_at_once`."""
        at_once = self.at_once
        if at_once is None or self._context.timeline is not None:
            return _NEITHER
        try:
            return self.attempt(self._exchange_at_once, at_once, array, peer, tag, into, source, expected) or _NEITHER
        except BaseException as error:
            self.fail(error)
            raise

    def _exchange_at_once(
        self, at_once: AtOnce, array: Array, peer: int, tag: int, into: Array, source: int, expected: int
    ) -> tuple[Outgoing | bool, bool]:
        message = self._send_at_once(at_once, array, peer, tag)
        if message is False:
            return _NEITHER
        received = self._receive_at_once(at_once, into, source, expected)
        if message is not True:
            at_once.confirm(message, self._looks)
        return message, received

    def confirm(self, message: Outgoing) -> None:
        """See whether a message ends soon, where the endpoint can tell."""
        at_once = self.at_once  # which another thread may close meanwhile
        if at_once is not None:
            self.attempt(at_once.confirm, message, self._looks)

    # ---- one thread at a time

    def use(self, do: Callable[..., Found], *arguments: Any) -> Found:
        """``do(*arguments)``, which uses the endpoint or the matching.

        Raises:
            CollectivesError: calls are refused.
            InvalidArgumentError: this thread uses them already.
        """
        self.refuse_reentry()
        return exclusively(self._lock, self._use, do, arguments)

    def attempt(self, do: Callable[..., Found], *arguments: Any) -> Found | Literal[False]:
        """`use`; False, without a call, where that would raise."""
        lock = self._lock
        if lock._is_owned():
            return False
        try:  # as `exclusively`, without a call
            with lock:
                return False if self._engine.refusal is not None else self._use(do, arguments)
        finally:
            if lock._is_owned():
                give_back(lock)

    def _use(self, do: Callable[..., Found], arguments: Sequence[Any]) -> Found:
        if self._engine.refusal is not None:  # looked at here: another thread may have closed the endpoint
            raise self._engine.refusal()
        try:
            return do(*arguments)
        except CollectivesError:
            raise
        except BaseException as error:  # such as an interrupt: a record may have been handled in part
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Fail the world: what this rank has done with a message is not known."""
        self._fail(in_words(self._names[self._rank], error))

    def drives(self) -> bool:
        """Whether this thread is in the middle of using the endpoint."""
        return bool(self._lock._is_owned())

    def refuse_reentry(self) -> None:
        """Raise InvalidArgumentError if this thread is in the middle of using the endpoint."""
        if self.drives():
            raise InvalidArgumentError(
                "a signal handler or a destructor sent, received or waited for a message while the same thread was "
                "doing so; set a flag there, and send or receive later [W27]"
            )

    def advance(self) -> None:
        """Advance whatever can be advanced; does nothing while another thread does, and once calls are refused."""
        endpoint = self._endpoint
        if endpoint is not None:
            attempted(self._lock, 0.0, self._advance, endpoint)

    def _advance(self, endpoint: Endpoint) -> None:
        if self._engine.refusal is None:
            self._use(endpoint.poll, ())

    def idle(self) -> bool:
        """Whether there is nothing to advance."""
        return not self.unfinished and (self._endpoint is None or not self._endpoint.busy)

    # ---- what is said of a transfer

    def describe(self, transfer: Transfer) -> str:
        """A transfer in the text of an error: ``recv from rank 2, tag 5``."""
        kind, peer, tag, _ = _said_of(transfer)
        whom = "any rank" if peer == ANY_SOURCE else f"rank {self._names[peer]}"
        return f"{kind} {'to' if kind == 'send' else 'from'} {whom}, {'any tag' if tag == ANY_TAG else f'tag {tag}'}"

    def sentence(self, transfer: Transfer, text: str) -> str:
        """The text of an error: ``rank 1: recv from rank 2, tag 5: ...``."""
        return f"rank {self._names[self._rank]}: {self.describe(transfer)}: {text}"

    def check_refused(self, message: Outgoing) -> None:
        """Raise MismatchError if the receiver has refused a message."""
        if message.refused:
            raise MismatchError(self.sentence(message, f"the receiver has refused it: {message.refused}"))

    def _record(self, transfer: Transfer) -> None:
        """Have the timeline show a transfer that begins now, when it is done."""
        timeline, begun, then = self._context.timeline, time.monotonic(), transfer.notify
        assert timeline is not None

        def note(_: Transfer) -> None:
            kind, peer, tag, nbytes = _said_of(transfer)
            details = {
                "peer": "any" if peer == ANY_SOURCE else self._names[peer],
                "tag": "any" if tag == ANY_TAG else tag,
                "bytes": nbytes,
            }
            if transfer.error is not None:
                details["error"] = type(transfer.error).__name__
            timeline.span(TRACK, kind, begun, time.monotonic(), **details)
            if then is not None:
                then(transfer)

        transfer.notify = note

    # ---- the end

    def held(self) -> AbstractContextManager[object]:
        """A context in which no transfer ends: while the world ends, until the other ranks see that it has, and read
        the memory of sends no more."""
        lock: AbstractContextManager[object] = self._lock
        return lock

    def after_fork(self) -> None:
        """In a forked child, where calls are refused: leave the endpoint to the parent. Threads that do not exist may
        hold the lock."""
        self._lock = threading.RLock()
        self._endpoint = self.at_once = None

    @exclusive
    def close(self) -> None:
        """Fail what is unfinished, and release the endpoint. The world refuses calls already, and has left."""
        for transfer in list(self.unfinished):
            assert self._engine.refusal is not None
            self.abandon(transfer, self._engine.refusal())  # type: ignore[arg-type]  # of these two types
        self.matching = Matching()
        endpoint, self._endpoint, self.at_once = self._endpoint, None, None
        if endpoint is not None:
            endpoint.close()


def _said_of(transfer: Transfer) -> tuple[str, int, int, int]:
    """``send`` or ``recv``, and as far as they are known: the other rank, the tag, and the bytes of the payload."""
    if isinstance(transfer, Outgoing):
        return "send", transfer.peer, transfer.tag, transfer.array.nbytes
    assert isinstance(transfer, Posted)
    message = transfer.message
    if message is None:
        return "recv", transfer.source, transfer.tag, 0
    return "recv", message.source, message.tag, message.nbytes
