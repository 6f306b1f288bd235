"""Waiting for a point-to-point message, and noticing that it cannot come."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from collectives.base.errors import (
    CollectivesError,
    CollectiveTimeoutError,
    RankFailedError,
    TransportError,
    in_words,
)
from collectives.engine.delivery import Delivery
from collectives.engine.engine import Engine
from collectives.engine.message_describer import MessageDescriber
from collectives.engine.message_handles import Posted
from collectives.engine.message_thread import MessageThread
from collectives.transport import backoff
from collectives.transport.backoff import YIELDS, Backoff
from collectives.transport.group import Group
from collectives.transport.point_to_point import Outgoing

_LOOKS = 400
"""Looks at the ring from which a message is expected, before all peers are polled: some 20 microseconds; where every
rank of the host has a core."""
_SPINS = 50
"""Polls before the core is yielded; likewise."""
_FAILURE_SHOWS_WITHIN = 1.0
"""Seconds that the death of a rank may take to show after the network has reported an error because of it."""
_LAST_MESSAGES_WITHIN = 1.0
"""Seconds that the last messages of a rank on another host may take longer than the news that it has left."""


class MessageWaits:
    """The waits of one rank's threads. A thread that waits advances the endpoint.

    Args:
        group: of the ranks.
        engine: of the world.
        delivery: of the rank.
        describer: of messages, for errors.
        timeout: seconds that a wait may last while all ranks are alive.
        fail: tells the other ranks that this one has failed.

    Attributes:
        looks: at a ring, before all peers are polled.
        background: advances the endpoint while no thread waits.
    """

    def __init__(
        self,
        group: Group,
        engine: Engine,
        delivery: Delivery,
        describer: MessageDescriber,
        timeout: float,
        fail: Callable[[str], None],
    ) -> None:
        has_cores = len(group.local) <= (os.cpu_count() or 1)
        self.looks, self._spins = (_LOOKS, _SPINS) if has_cores else (1, 1)
        self._rank, self._size, self._names = group.rank, group.size, group.ranks
        self._local = frozenset(group.local)
        self._left: dict[int, float] = {}
        """By the source of receives: since when all ranks that it may be are known to have left."""
        self._control = group.control
        self._engine = engine
        self._delivery = delivery
        self._describer = describer
        self._timeout = timeout
        self._fail = fail
        self._waiting = 0
        """Threads that wait, and therefore advance the endpoint."""
        self.background = MessageThread(self, describer.rank)

    def wait_for(self, transfer: Outgoing | Posted, timeout: float | None = None) -> None:
        """Return when a transfer is done. Its error is not raised.

        Raises:
            CollectiveTimeoutError: ``timeout`` seconds have passed; the transfer goes on.
            InvalidArgumentError: this thread uses the endpoint already: a signal handler waits within a call.
        """
        self._delivery.refuse_reentry()
        try:
            self._wait_for(transfer, timeout)
        except TransportError as error:
            found: CollectivesError = error
            try:
                # A rank's death may show in the network before it shows elsewhere.
                backoff.poll(self._engine.look_for_failures, _FAILURE_SHOWS_WITHIN)
            except CollectivesError as failure:
                found = failure
            self._delivery.abandon(transfer, found)

    def _wait_for(self, transfer: Outgoing | Posted, timeout: float | None) -> None:
        delivery = self._delivery
        advance, relax, at_once = delivery.advance, self._control.relax, delivery.at_once
        self._waiting += 1
        try:
            if at_once is not None and isinstance(transfer, Outgoing):  # which another thread may close meanwhile
                delivery.attempt(at_once.confirm, transfer, self.looks)
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
                    text = f"not done after {timeout:g} s; it goes on, and synchronize may be called again"
                    raise CollectiveTimeoutError(self._describer.sentence(transfer, text))
                if deadline is None and pause.now - pause.begun > self._timeout:
                    self._time_out(transfer)
                pause.nap(until=deadline)
        finally:
            self._waiting -= 1
            if not delivery.idle():
                self.background.wake()

    def _inspect(self, transfer: Outgoing | Posted) -> None:
        """Fail a transfer if the world has ended, a rank has failed, or the ranks that it needs have left."""
        try:
            self._engine.look_for_failures()
            peer = transfer.peer if isinstance(transfer, Outgoing) else transfer.source
            peers = [peer] if peer >= 0 else [other for other in range(self._size) if other != self._rank]
            if peer == self._rank or not peers or not all(self._control.has_left(other) for other in peers):
                return
            self._delivery.poll()  # what they sent before they left
            now = time.monotonic()
            if not (self._local.issuperset(peers) or now - self._left.setdefault(peer, now) > _LAST_MESSAGES_WITHIN):
                return
            if not transfer.done:
                who = "every other rank has" if peer < 0 else f"rank {self._names[peer]} has"
                text = f"{who} shut down or ended; every message needs a send and a recv"
                raise RankFailedError(self._describer.sentence(transfer, text))
        except CollectivesError as error:
            self._delivery.abandon(transfer, error)

    def _time_out(self, transfer: Outgoing | Posted) -> None:
        if isinstance(transfer, Outgoing):
            missing = "the receiver is alive, but has not called recv for it"
        else:
            waiting = ", ".join(
                f"from rank {self._names[message.source]} with tag {message.tag}"
                for message in self._delivery.matching.unexpected()[:5]
            )
            who = "no other rank" if transfer.source < 0 else "the sender is alive, but"
            missing = f"{who} has sent none; messages that wait for a recv: {waiting or 'none'}"
        text = f"waited {self._timeout:g} s: {missing}; see what the ranks are doing, or raise COLLECTIVES_TIMEOUT"
        error = CollectiveTimeoutError(self._describer.sentence(transfer, text))
        self._fail(in_words(self._describer.rank, error))
        self._delivery.abandon(transfer, error)

    # ---- in the background

    @property
    def ended(self) -> bool:
        """Whether calls are refused, so that there is nothing more to advance."""
        return self._delivery.ended

    def idle(self) -> bool:
        """Whether there is nothing to advance."""
        return self._delivery.idle()

    def look(self, deep: bool) -> None:
        """Advance, unless a thread that waits does; with ``deep`` also look at the other ranks' states."""
        if self._waiting:
            return
        try:
            self._delivery.advance()
            if deep:
                for transfer in list(self._delivery.unfinished):
                    self._inspect(transfer)  # type: ignore[arg-type]  # of these two types
        except Exception as error:
            for transfer in list(self._delivery.unfinished):
                self._delivery.abandon(transfer, error)  # type: ignore[arg-type]  # as above
