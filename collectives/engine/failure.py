"""The end of a world: calls are refused, what is in flight fails, the peers are told of a failure in mid-call, and
memory is released when no rank uses it any more."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from collectives.base.errors import CollectivesError, CollectiveTimeoutError, RankFailedError, in_words
from collectives.engine.callers import Callers
from collectives.engine.coordinator import Coordinator
from collectives.engine.submissions import Submissions
from collectives.transport import backoff

_ACKNOWLEDGE_WITHIN = 1.0
"""Seconds; fewer than the rank whose failure it is gives the others until it ends the job
(`collectives.worlds.exit_hooks`)."""

_keeping: set[FailureHandler] = set()
"""Those that keep what a peer may still touch, or have yet to release their world."""


def release_settled() -> None:
    """Give back what worlds that have failed kept for their peers, where these have noticed, left or died since."""
    for handler in list(_keeping):
        handler.settle()


class FailureHandler:
    """Ends the operations of one engine, of the ``rank`` of messages."""

    def __init__(self, coordinator: Coordinator, submissions: Submissions, callers: Callers, rank: int) -> None:
        self._coordinator = coordinator
        self._submissions = submissions
        self._callers = callers
        self._rank = rank
        self._process = os.getpid()
        self._kept: list[Any] = []
        """What failed calls have read and written: a peer that has not noticed the failure may still do so."""
        self._release: Callable[[], object] | None = None

    def refuse(self, refusal: Callable[[], CollectivesError], error: CollectivesError | None = None) -> None:
        """Refuse further calls; what is in flight fails, with ``error`` or with the refusal."""
        self._submissions.refuse(refusal, error)
        joining = self._coordinator.joining
        if joining is not None:
            joining.fail(error or refusal())
        self._callers.notify()
        self._submissions.work.set()  # the background thread ends

    def fail(self, error: BaseException, memory: Any = None) -> None:
        """Handle a failure in mid-call: keep the ``memory`` that peers may use (of the open round, unless given), tell
        them, and refuse further calls."""
        submissions, coordinator = self._submissions, self._coordinator
        refused = submissions.refusal
        if refused is not None and memory is None and not submissions.has_work():
            return
        self._kept.append((memory or coordinator.open, list(submissions.pending.values())))
        _keeping.add(self)
        if refused is not None:
            self.refuse(refused)  # fails what is in flight: the thread that refused calls was not driving
            return
        text = in_words(self._rank, error)
        self.refuse(
            lambda: RankFailedError(
                f"rank {self._rank}: this world has failed in an earlier call and cannot be used [R1]: {text}"
            ),
            error if isinstance(error, (RankFailedError, CollectiveTimeoutError)) else None,
        )
        coordinator.control.fail(text, in_call=True)
        backoff.poll(self.settle, _ACKNOWLEDGE_WITHIN)

    def settle(self) -> bool:
        """Give back what is kept if no peer touches it any more: all have failed, left or died. Returns whether nothing
        is kept."""
        if self._process != os.getpid():  # a forked child's copy, which is the parent's business
            return True
        if self._kept and not self._coordinator.control.acknowledged():
            return False
        try:
            _keeping.remove(self)
        except KeyError:
            return True
        self._kept.clear()
        release, self._release = self._release, None
        if release is not None:
            release()
        return True

    def when_settled(self, release: Callable[[], object]) -> None:
        """Have ``release`` called once no peer touches this rank's memory: now, or when a world begins or ends."""
        self._release = release
        _keeping.add(self)
        release_settled()

    def abandon(self) -> bool:
        """Leave for good; called by the driving thread.

        Returns:
            Whether a round was open, so that peers may count on this rank already: then it has failed.
        """
        opened = self._coordinator.open
        if opened is None or self._submissions.refusal is not None:
            return False
        names = ", ".join(handle.name for handle in opened[0]) or "join"
        self.fail(
            RankFailedError(
                f"rank {self._rank} left while operations were in flight: {names}; synchronize them before it leaves "
                "[R13]"
            )
        )
        return True
