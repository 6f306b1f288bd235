"""Point-to-point messages of one world: sending, receiving, and waiting for either.

They take no part in negotiation rounds. A thread that waits advances the endpoint (`collectives.transport`); while
nobody waits, and something is unfinished, a background thread does now and then, so that a message also moves while the
program computes or is in a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collectives.base.errors import CollectivesError, InvalidArgumentError, in_words
from collectives.engine.delivery import Delivery
from collectives.engine.engine import Engine
from collectives.engine.handles import Handle
from collectives.engine.message_describer import MessageDescriber
from collectives.engine.message_handles import MessageHandle, Posted
from collectives.engine.message_waits import MessageWaits
from collectives.tensors.result_pool import ResultPool
from collectives.transport.base import Array
from collectives.transport.group import Group
from collectives.transport.point_to_point import AtOnce, Outgoing

_NEITHER: tuple[Outgoing | bool, bool] = (False, False)


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
        describer: of messages, for errors.
        send, abandon, advance, drives, held: see `Delivery`.
        wait_for: see `MessageWaits`.
        in_background: see `MessageThread.wake`.
    """

    def __init__(
        self, group: Group, engine: Engine, pool: ResultPool, timeout: float, fail: Callable[[str], None]
    ) -> None:
        self.in_flight = engine.in_flight
        self.describer = MessageDescriber(group.rank, group.ranks)
        self._engine, self._context = engine, engine.context
        self._fail = fail
        self._delivery = delivery = Delivery(group, engine, pool, self.describer, fail)
        self._waits = MessageWaits(group, engine, delivery, self.describer, timeout, fail)
        self.send, self.abandon = delivery.send, delivery.abandon
        self.advance, self.drives, self.held = delivery.advance, delivery.drives, delivery.held
        self._attempt = delivery.attempt
        self.wait_for, self.in_background = self._waits.wait_for, self._waits.background.wake

    def receive(self, posted: Posted) -> None:
        """`Delivery.receive`."""
        self._delivery.receive(posted)
        if posted.done and not self._delivery.idle():  # such as a word for the sender, for which there was no room
            self.in_background()

    # ---- within one call

    def send_at_once(self, array: Array, peer: int, tag: int) -> Outgoing | bool:
        """`AtOnce.send`: whether it was sent, or what is yet to be waited for. Raises nothing of its own."""
        at_once = self._at_once()
        try:
            return at_once is not None and self._attempt(self._send, at_once, array, peer, tag)
        except BaseException as error:
            self._fail_for(error)
            raise

    def _send(self, at_once: AtOnce, array: Array, peer: int, tag: int) -> Outgoing | bool:
        message = at_once.send(peer, tag, array)
        if type(message) is Outgoing:
            self._delivery.note(message)
        return message

    def receive_at_once(self, array: Array, source: int, tag: int) -> bool:
        """`AtOnce.receive`. Returns whether it was received; raises nothing of its own."""
        at_once = self._at_once()
        return at_once is not None and self._attempt(self._receive, at_once, array, source, tag)

    def _at_once(self) -> AtOnce | None:
        """Of the endpoint; None while the timeline shows transfers."""
        return self._delivery.at_once if self._context.timeline is None else None

    def _receive(self, at_once: AtOnce, array: Array, source: int, tag: int) -> bool:
        return self._delivery.matching.is_free(source, tag) and at_once.receive(source, tag, array, self._waits.looks)

    def sendrecv_at_once(
        self, array: Array, peer: int, tag: int, into: Array, source: int, expected: int
    ) -> tuple[Outgoing | bool, bool]:
        """`send_at_once`, and, unless that has returned False, `receive_at_once`."""
        at_once = self._at_once()
        if at_once is None:
            return _NEITHER
        try:
            return self._attempt(self._exchange, at_once, array, peer, tag, into, source, expected) or _NEITHER
        except BaseException as error:
            self._fail_for(error)
            raise

    def _fail_for(self, error: BaseException) -> None:
        """After an interrupt: a message has perhaps begun, which nobody would wait for."""
        self._fail(in_words(self.describer.rank, error))

    def _exchange(
        self, at_once: AtOnce, array: Array, peer: int, tag: int, into: Array, source: int, expected: int
    ) -> tuple[Outgoing | bool, bool]:
        message = self._send(at_once, array, peer, tag)
        if message is False:
            return _NEITHER
        received = self._receive(at_once, into, source, expected)
        if message is not True:
            at_once.confirm(message, self._waits.looks)
        return message, received

    # ---- handles

    def handle_of(
        self, transfer: Outgoing | Posted, deliver: Callable[[Handle], Any], reads: Any = None, writes: Any = None
    ) -> MessageHandle:
        """The handle of a transfer that has not begun.

        Raises:
            InvalidArgumentError: an operation in flight uses the memory.
        """
        handle = MessageHandle(self, transfer, deliver, reads, writes)
        handle.locate()
        transfer.notify = handle.settle
        overlap = self.in_flight.claim(handle)
        if overlap is not None:
            raise InvalidArgumentError(f"rank {self.describer.rank}: {overlap}")
        return handle

    def wait(self, handle: Handle, timeout: float | None = None) -> None:
        """`Driver.wait`."""
        assert isinstance(handle, MessageHandle)
        self.wait_for(handle.transfer, timeout)

    # ---- the end

    @property
    def refusal(self) -> Callable[[], CollectivesError] | None:
        """Makes the error of every further call; None while calls are accepted."""
        return self._engine.refusal

    def after_fork(self) -> None:
        """In a forked child, where calls are refused: leave the endpoint to the parent."""
        self._delivery.after_fork()

    def close(self) -> None:
        """Fail what is unfinished, and release the endpoint. The world refuses calls already, and has left."""
        self._delivery.close()
        self._waits.background.end()
