"""Bounded waiting for MPI: requests are posted and tested, and calls without that form run in a separate thread.

An interrupt, a failed peer or the bound ends a wait, never the call itself: a rank that goes on after an exception does
not leave its peers inside a call of MPI.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from collectives.base.bounded_call import Call
from collectives.base.errors import CollectiveTimeoutError, TransportError
from collectives.transport import backoff

if TYPE_CHECKING:
    from mpi4py import MPI

_SPINS = 200
_FIRST_NAP, _LONGEST_NAP = 20e-6, 0.01
_TESTS = 8
"""Tests of a request between two naps: Open MPI looks at a connection that is not established yet in every eighth only,
and a connection takes several looks on both ends."""
_FAILURE_SHOWS_WITHIN = 1.0
"""Seconds that the death of a peer may take to show after MPI has reported an error because of it."""

_under_way: dict[Hashable, Call[Any]] = {}
"""Calls whose results are not in use yet, by key; the next `Waiter.call` with a key continues that call."""


class Waiter:
    """Waits for MPI within a bound: spins, then waits as `collectives.transport.backoff` does.

    Args:
        rank: this rank's number in messages.

    Attributes:
        check: called between two tests of a request; an exception from it ends the wait.
    """

    def __init__(self, rank: int, timeout: float) -> None:
        self._rank, self._timeout = rank, timeout
        self._calls: list[Call[Any]] = []
        """Calls without a key whose results no caller has received."""
        self.check: Callable[[], object] = lambda: None

    def wait(self, request: MPI.Request, what: str) -> None:
        """Wait until the request is complete; ``what`` names the event in errors.

        Raises:
            CollectiveTimeoutError: it did not complete in time.
            RankFailedError: from `check`.
            TransportError: MPI reported an error, and every peer is alive.
        """
        self.until(request.Test, what)

    def until(self, done: Callable[[], bool], what: str) -> None:
        """`wait` until ``done()``, which calls MPI."""
        from mpi4py import MPI

        try:
            if not done():
                self._wait(done, what)
        except MPI.Exception as error:
            self._explain(error, what)

    def call(self, function: Callable[[], Any], what: str, key: Hashable = None) -> Any:
        """Call a function that blocks inside MPI, in a thread of its own, and return its result.

        Args:
            function: blocks at most until every rank calls it too.
            key: identifies the call: until `forget`, another `call` with this key waits for the same one, so that an
                exception here does not put this rank out of step with its peers. None: the call is made once.

        Raises:
            CollectiveTimeoutError, RankFailedError, TransportError: as `wait`.
        """
        call = _under_way.get(key) if key is not None else None
        if call is None:
            call = Call(function)
            if key is not None:
                _under_way[key] = call
            else:
                self._calls.append(call)
        call.start()
        self._wait(lambda: call.finished, what)
        if call.error is not None:
            forget(key)
            self._explain(call.error, what)
        if key is None:
            self._calls.remove(call)
        return call.result

    @property
    def busy(self) -> bool:
        """Whether a call without a key may have left something pending: no thread waits for it, or it failed."""
        return bool(self._calls)

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        for _ in range(_SPINS):
            if done():
                return
        backoff.wait(
            done,
            lambda deep: self.check(),
            self._timeout,
            lambda: (
                f"rank {self._rank}: waited {self._timeout:g} s for {what}; see what the other ranks are doing, "
                f"or raise COLLECTIVES_TIMEOUT [R22]"
            ),
        )

    def _explain(self, error: BaseException, what: str) -> None:
        """Raise the cause of an error of MPI: a rank that failed, or MPI itself."""
        backoff.poll(self.check, _FAILURE_SHOWS_WITHIN)
        raise TransportError(
            f"rank {self._rank}: MPI failed while this rank waited for {what}: {error} [N14]"
        ) from error


def forget(key: Hashable) -> None:
    """Mark the result of a call as in use: the next `Waiter.call` with this key makes a new call."""
    _under_way.pop(key, None)


def barrier_then(barrier: Callable[[], MPI.Request], function: Callable[[], Any], within: float = math.inf) -> Any:
    """Run ``function`` once every rank has entered the barrier; sleeps until then, where a blocking call of MPI would
    occupy a core. CollectiveTimeoutError: ``within`` seconds have passed."""
    request = barrier()
    begun = time.monotonic()
    while not any(request.Test() for _ in range(_TESTS)):
        waited = time.monotonic() - begun
        if waited > within:
            raise CollectiveTimeoutError(f"not every rank came to the barrier within {within:g} s [R23]")
        # MPI does not notify: poll, less and less often, because a rank may never arrive.
        time.sleep(min(max(_FIRST_NAP, waited / 50), _LONGEST_NAP))
    return function()
