"""What a rank asks for, and what is said when the ranks ask for different things.

Every call begins with an agreement: each rank enters it with 47 bits that stand for its whole request. If all are equal,
nothing more is said. If not, the ranks show each other their requests, and every rank raises the same error, before any
tensor has been touched.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from collectives.errors import InvalidArgumentError, MismatchError

_SETTLE_WITHIN = 2.0
_LOOK_AGAIN = 2e-4


@dataclass(frozen=True, slots=True)
class Request:
    """All that must be alike on every rank for a call to make sense.

    Attributes:
        collective: the operation's name, or "invalid" if the rank was given arguments that it had to refuse.
        shape: of the tensor; without the first dimension where ranks may differ in it.
        detail: an "invalid" request's error.
    """

    collective: str
    name: str | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    op: str | None = None
    root: int | None = None
    prescale: float = 1.0
    postscale: float = 1.0
    algorithm: str | None = None
    transport: str | None = None
    detail: str = ""

    def signature(self) -> int:
        """47 bits of a hash over everything but ``detail``."""
        text = repr([getattr(self, f.name) for f in fields(self) if f.name != "detail"])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") & 0x7FFF_FFFF_FFFF

    def describe(self) -> str:
        """One line for people."""
        if self.collective == "invalid":
            return f"refused its arguments: {self.detail}"
        said = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self)[1:] if getattr(self, f.name) not in (f.default, None)]
        return f"{self.collective}({', '.join(said)})"


def mismatch(rank: int, requests: Sequence[Request]) -> MismatchError:
    """The error for ranks that asked for different things: what differs, and what each rank asked for."""
    first = requests[0]
    compared = [f.name for f in fields(Request) if f.name != "detail"]
    differing = [name for name in compared if any(getattr(request, name) != getattr(first, name) for request in requests)]
    names = sorted({request.name for request in requests if request.name})
    subject = f" for tensor {' / '.join(map(repr, names))}" if names else ""
    ranks_by_request: dict[str, list[int]] = {}
    for peer, request in enumerate(requests):
        ranks_by_request.setdefault(request.describe(), []).append(peer)
    lines = [f"  rank {_ranges(ranks)}: {said}" for said, ranks in ranks_by_request.items()]
    return MismatchError(
        f"rank {rank}: the ranks disagree{subject} in {', '.join(differing) or 'their requests'}; no tensor was touched:\n"
        + "\n".join(lines)
        + "\nEvery rank must make the same call with the same arguments, in the same order."
    )


class Turns:
    """Whose call comes next on this rank, when several threads call at once.

    One thread holds the turn and drives the communication; calls are made in the order in which the threads come. That order
    may differ from rank to rank, and then the ranks disagree although every call has its partners. So a disagreement between
    ranks with several calling threads is first settled: the ranks compare what their threads are waiting to do, and a call
    that is waiting on all of them goes first. Calls with equal requests cannot be told apart; give them names.
    """

    def __init__(self) -> None:
        # A lock that knows its owner: an interrupt may come between taking it and giving it back, and must not leave it taken.
        self._lock: Any = threading.RLock()
        self._calling = False
        self._waiting: list[int] = []
        self._chosen: int | None = None
        self._threads: set[int] = set()
        self._last_thread = 0

    def take(self, signature: int) -> None:
        """Wait for the turn. Whoever has it gives it back in bounded time, because all that it waits for is bounded.

        Raises:
            InvalidArgumentError: this thread has the turn already: a signal handler calls a collective within a collective.
        """
        thread = threading.get_ident()
        if thread != self._last_thread:
            self._last_thread = thread
            self._threads.add(thread)
        if self._lock._is_owned():
            self._take_again()
        elif self._lock.acquire(False):
            if self._chosen is None or self._chosen == signature:
                self._calling = True
                return
            self._lock.release()
            self._take_when_chosen(signature)
        else:
            self._take_when_chosen(signature)

    def take_to_leave(self) -> None:
        """Wait for the turn, whatever was chosen to go first; a thread that has it keeps it."""
        self._lock.acquire()
        self._calling = True

    def give(self) -> None:
        """Let the next thread have its turn; nothing, if an interrupt came while this thread waited without it."""
        if self._lock._is_owned():
            self._calling = False
            self._lock.release()

    def held(self) -> bool:
        """Whether this thread has the turn."""
        return bool(self._lock._is_owned())

    def calling(self) -> bool:
        """Whether this thread is in the middle of a call."""
        return self._calling and self.held()

    def _take_again(self) -> None:
        if self._calling:
            raise InvalidArgumentError(
                "a collective was called within a collective of the same thread, from a signal handler or a destructor; "
                "let the handler set a flag, and call afterwards"
            )
        self._calling = True  # an interrupt came just before this thread could give the turn back, or just after it took it

    def agreed(self) -> None:
        """The ranks agreed on the call of the thread that has the turn."""
        self._chosen = None

    def settle(self, rank: int, request: Request, exchange: Callable[[Any], list[Any]]) -> None:
        """After a disagreement, with the turn: return with the turn when the ranks should try again with this call.

        Args:
            exchange: gives every rank every rank's value, in rank order.

        Raises:
            MismatchError: no call is waiting on all ranks, nor is one likely to come.
        """
        signature = request.signature()
        give_up_at = time.monotonic() + _SETTLE_WITHIN
        while True:
            offers = exchange((request, [signature, *self._waiting], len(self._threads) > 1, time.monotonic() > give_up_at))
            common = set.intersection(*(set(waiting) for _, waiting, _, _ in offers))
            if common:
                break
            if not any(several for _, _, several, _ in offers) or any(late for _, _, _, late in offers):
                self._chosen = None
                raise mismatch(rank, [offer[0] for offer in offers])
            time.sleep(_LOOK_AGAIN)
        self._chosen = min(common)
        if self._chosen != signature:
            self.give()
            self._take_when_chosen(signature)

    def _take_when_chosen(self, signature: int) -> None:
        self._waiting.append(signature)
        try:
            while True:
                self._lock.acquire()
                if self._chosen is None or self._chosen == signature:
                    self._calling = True
                    return
                self._lock.release()
                time.sleep(_LOOK_AGAIN)
        finally:
            self._waiting.remove(signature)


def _ranges(ranks: Sequence[int]) -> str:
    """Ranks as people write them: ``0-2, 5``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ", ".join("-".join(map(str, part)) for part in parts)
