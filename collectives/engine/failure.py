"""The end of a world: calls are refused, what is in flight fails, and the peers are told of a failure in mid-call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collectives.base.errors import CollectivesError, CollectiveTimeoutError, RankFailedError, in_words
from collectives.engine.callers import Callers
from collectives.engine.coordinator import Coordinator
from collectives.engine.submissions import Submissions
from collectives.transport import backoff

_ACKNOWLEDGE_WITHIN = 1.0
"""Seconds; fewer than the rank whose failure it is gives the others until it ends the job (`collectives.failures`)."""

_abandoned: list[Any] = []
"""Memory that a failed call may still use on behalf of a peer or MPI: never freed."""


class FailureHandler:
    """Ends the operations of one engine.

    Args:
        coordinator, submissions, callers: of the engine.
        rank: as messages call it.
    """

    def __init__(self, coordinator: Coordinator, submissions: Submissions, callers: Callers, rank: int) -> None:
        self._coordinator = coordinator
        self._submissions = submissions
        self._callers = callers
        self._rank = rank

    def refuse(self, refusal: Callable[[], CollectivesError], error: CollectivesError | None = None) -> None:
        """Refuse further calls; what is in flight fails, with ``error`` or with the refusal."""
        self._submissions.refuse(refusal, error)
        joining = self._coordinator.joining
        if joining is not None:
            joining.fail(error or refusal())
        self._callers.notify()
        self._submissions.work.set()  # the background thread ends

    def fail(self, error: BaseException, memory: Any = None) -> None:
        """Handle a failure in mid-call: keep the memory that peers may use, tell them, and refuse further calls.

        Args:
            error: what ended the call.
            memory: what the call has read and written; of the open round, unless given.
        """
        submissions, coordinator = self._submissions, self._coordinator
        refused = submissions.refusal
        if refused is not None and memory is None and not submissions.has_work():
            return
        keeping = (memory or coordinator.open, list(submissions.pending.values()), coordinator)
        _abandoned.append(keeping)
        if refused is not None:
            self.refuse(refused)  # fails what is in flight: the thread that refused calls was not driving
            return
        text = in_words(self._rank, error)
        self.refuse(
            lambda: RankFailedError(
                f"rank {self._rank}: this world has failed in an earlier call and cannot be used: {text}"
            ),
            error if isinstance(error, (RankFailedError, CollectiveTimeoutError)) else None,
        )
        control = coordinator.control
        control.fail(text, in_call=True)
        if not backoff.poll(control.acknowledged, _ACKNOWLEDGE_WITHIN):
            return
        if not getattr(coordinator.context.group.messages, "busy", False):
            _abandoned[:] = [kept for kept in _abandoned if kept is not keeping]

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
            RankFailedError(f"rank {self._rank} left while operations were in flight: {names}; synchronize them first")
        )
        return True
