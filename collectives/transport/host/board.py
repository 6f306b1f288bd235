"""The board: a page of 64-bit words per rank, in memory that all ranks of a host share.

Each rank writes its own page only and reads those of its peers:

    progress   number of step groups that the rank has finished, counted over its whole life
    token      the call that the rank has entered: 47 bits of signature, 16 bits of call number; two places that
               alternate, because a peer may enter the next call before this rank has read the present one, but never
               the next but one
    words      numbers that travel with a token (addresses, counts); two places as well
    state      alive, left or failed, and the traceback of the failure
    gone       whether the rank has left, also after a failure
    broken     the call in whose middle the rank failed, so that a peer that enters it later does not take part
    pieces     a table of the rank's pieces of mapped memory (`collectives.transport.host.mapped_memory`)

A rank that waits for a peer spins briefly, then waits as `collectives.transport.backoff` does, within a bound and
checking its peers' states. Stores that precede a word's are visible to a reader of that word: x86-64 keeps stores in
order, other processors need `fence`.
"""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from collectives.base.config import setting_of
from collectives.base.errors import RankFailedError
from collectives.transport import backoff

ALIVE, LEFT, FAILED = 0, 1, 2

_PROGRESS, _STATE, _TEXT_LENGTH, _TOKEN, _BROKEN, _GONE, _WORDS = 0, 1, 3, 4, 6, 7, 8
_TEXT_BYTES = 16 << 10
PIECES = 256
"""Entries of a rank's table of pieces."""
PIECE_WORDS = 4
"""Words of an entry: the piece's number, descriptor, bytes, and address in the owner's process."""
CALL_MASK = 0xFFFF
"""A token is a signature of 47 bits shifted by 16, and the call's number under this mask: never 0, the state of a fresh
page."""
_DEATH_SHOWS_WITHIN = 1.0
_CAUSE_SHOWS_WITHIN = 0.2


def _fence_by_lock() -> None:
    with threading.Lock():  # of its own: an interrupt leaves nothing that another thread waits for
        pass


fence: Callable[[], None] | None = None if platform.machine().lower() in ("x86_64", "amd64") else _fence_by_lock
"""A memory barrier where the processor may reorder stores (a lock's acquire and release make one), else None."""


def max_words(size: int) -> int:
    """The most words that travel with a token: a few numbers per rank, or two addresses for each of 1,024 tensors, and
    one word of them all."""
    return max(size + 4, 2049)


def board_bytes(size: int) -> int:
    """Bytes of one rank's page in a group of ``size`` ranks, a multiple of 4,096."""
    return -(-(_word_bytes(size) + _TEXT_BYTES) // 4096) * 4096


class Board:
    """One rank's view of the pages. Not thread-safe: only the thread that drives the rank's communication uses it.

    Args:
        pages: one writable buffer of `board_bytes` per rank of the group; None for ranks on other hosts.
        timeout: seconds that a wait may last while the peers are alive.
        spins: looks before the core is yielded; few where ranks outnumber cores.
        processes: each rank's process, whose death shows in the process table; empty where ranks are threads.
    """

    def __init__(
        self,
        pages: Sequence[memoryview | None],
        rank: int,
        *,
        timeout: float,
        spins: int,
        pause: Callable[[], object] = backoff.yield_core,
        processes: Sequence[int] = (),
    ) -> None:
        self.rank = rank
        self.size = len(pages)
        self.names: Sequence[int] = range(self.size)
        """The ranks' numbers in messages."""
        self.peers = tuple(p for p, page in enumerate(pages) if page is not None and p != rank)
        self.seen = [0] * self.size
        """Each peer's progress as last read, so that it need not be read again."""
        self.also_check: Callable[[], None] | None = None
        """Called now and then during a wait: raises for failures that the board does not show."""
        self._words: list[Any] = [None if page is None else page[: _word_bytes(self.size)].cast("q") for page in pages]
        self._texts = [None if page is None else page[_word_bytes(self.size) :] for page in pages]
        self._own_words = self._words[rank]
        self._peer_words = [self._words[peer] for peer in self.peers]
        self._timeout = timeout
        self._spins = spins
        self._looks = range(spins)
        self.relax = pause
        """Yields the core to other ranks and threads."""
        self._processes = processes
        self._slots = (_WORDS, _WORDS + max_words(self.size))
        self._pieces = _WORDS + 2 * max_words(self.size)
        self.call = 0
        """The number of the present call."""
        self._token = self._count = 0

    def advance(self, progress: int) -> None:
        """Announce that this rank has finished its first ``progress`` step groups."""
        if fence is not None:
            fence()
        self._own_words[_PROGRESS] = progress

    def wait(self, peer: int, progress: int) -> None:
        """Wait until ``peer`` has reached ``progress``.

        Raises:
            RankFailedError: a rank has failed, or the peer has left or died.
            CollectiveTimeoutError: the peer did not arrive in time.
        """
        words = self._words[peer]
        for _ in range(self._spins):
            seen = words[_PROGRESS]
            if seen >= progress:
                self.seen[peer] = seen
                return
        self._wait_long(peer, lambda: bool(words[_PROGRESS] >= progress))
        self.seen[peer] = words[_PROGRESS]

    def enter(self, signature: int, words: Sequence[int] | memoryview = ()) -> None:
        self.call = call = self.call + 1
        self._token = token = signature << 16 | (call & CALL_MASK)
        self._count = len(words)
        own_words = self._own_words
        parity = call & 1
        if words:
            at = self._slots[parity]
            if type(words) is memoryview:
                own_words[at : at + len(words)] = words
            else:
                for word in words:
                    own_words[at] = word
                    at += 1
        if fence is not None:
            fence()
        own_words[_TOKEN + parity] = token

    def look(self, *, spin: bool = True) -> bool | None:
        """Whether every peer entered the present call with the same token; None while one is missing, after a short
        spin."""
        same = True
        spins = self._spins if spin else 1
        call, token = self.call, self._token
        at = _TOKEN + (call & 1)
        for peer in self.peers:
            words = self._words[peer]
            for _ in range(spins):
                if words[at] == token:
                    break
            else:
                peer_word = words[at]
                if peer_word & CALL_MASK != call & CALL_MASK:
                    return None
                same = same and peer_word == token
            if words[_BROKEN] == call:
                self.check()
        return same

    def enter_and_look(self, signature: int, words: Sequence[int] | memoryview = ()) -> bool | None:
        """`enter`, then `look`; both are written out for few words or none, and peers that are there: then one word is
        all that this rank reads of each."""
        if fence is not None or type(words) is memoryview:
            self.enter(signature, words)
            return self.look()
        self.call = call = self.call + 1
        self._token = token = signature << 16 | (call & CALL_MASK)
        self._count = len(words)
        own_words, at = self._own_words, self._slots[call & 1]
        for word in words:
            own_words[at] = word
            at += 1
        at = _TOKEN + (call & 1)
        own_words[at] = token
        for peer_words in self._peer_words:
            if peer_words[at] != token:
                for _ in self._looks:
                    if peer_words[at] == token:
                        break
                else:
                    return self.look(spin=False)
            if peer_words[_BROKEN] == call:
                self.check()
        return True

    def missing(self, *, upcoming: bool = False) -> list[int]:
        """The peers that have not entered the present call; or the one after it, if ``upcoming``."""
        call = self.call + upcoming
        at = _TOKEN + (call & 1)
        return [peer for peer in self.peers if self._words[peer][at] & CALL_MASK != call & CALL_MASK]

    def has_entered(self, peer: int, upcoming: bool = False) -> bool:
        return peer not in self.missing(upcoming=upcoming)

    def await_entries(self) -> bool:
        """`look`, and wait for the peers that are missing. Raises as `wait`."""
        same = self.look()
        if same is not None:
            return same
        for peer in self.missing():
            self._wait_long(peer, partial(self.has_entered, peer))
        return bool(self.look())

    def tells(self, expected: Sequence[tuple[int, int, int]]) -> bool:
        words, at = self._words, self._slots[self.call & 1]
        for peer, first, second in expected:
            peer_words = words[peer]
            if peer_words[at] != first or peer_words[at + 1] != second:
                return False
        return True

    def words_of(self, peer: int) -> Sequence[int]:
        at = self._slots[self.call & 1]
        words: Sequence[int] = self._words[peer][at : at + self._count]
        return words

    def announce_piece(self, place: int, entry: Sequence[int]) -> None:
        """Write an entry of this rank's table of pieces; peers see it in the calls that this rank enters later."""
        at = self._pieces + place * PIECE_WORDS
        for word in entry:
            self._own_words[at] = word
            at += 1

    def piece_of(self, peer: int, place: int) -> tuple[int, ...]:
        """An entry of ``peer``'s table."""
        at = self._pieces + place * PIECE_WORDS
        return tuple(self._words[peer][at : at + PIECE_WORDS])

    def process_of(self, peer: int) -> int:
        return self._processes[peer] if self._processes else os.getpid()

    def mark(self, state: int, text: str = "", broken: int = 0) -> None:
        """Announce this rank's state and the reason; ``broken`` is the call that it failed in. A rank that has failed
        remains FAILED when it leaves."""
        if state == LEFT:
            self._own_words[_GONE] = 1
            if self._own_words[_STATE] == FAILED:
                return
        data = text.encode("utf-8", "replace")[-_TEXT_BYTES:]
        page = self._texts[self.rank]
        assert page is not None
        page[: len(data)] = data
        self._own_words[_TEXT_LENGTH] = len(data)
        if fence is not None:
            fence()
        self._own_words[_STATE] = state
        if broken:
            self._own_words[_BROKEN] = broken

    def state_of(self, peer: int) -> int:
        """ALIVE, LEFT or FAILED; a process that has ended without leaving has failed."""
        state = self.marked(peer)
        return FAILED if state == ALIVE and self._died(peer) else state

    def marked(self, peer: int) -> int:
        """`state_of`, without a look at the process: what ``peer`` itself has announced."""
        state: int = self._words[peer][_STATE]
        return state

    def is_gone(self, peer: int) -> bool:
        """Whether ``peer`` has left, also after a failure, or its process has ended."""
        return bool(self._words[peer][_GONE]) or self._died(peer)

    def text_of(self, peer: int) -> str:
        """The reason that ``peer`` gave with its state; may be empty."""
        page = self._texts[peer]
        assert page is not None
        return bytes(page[: self._words[peer][_TEXT_LENGTH]]).decode("utf-8", "replace")

    def release(self) -> None:
        """Release the pages, so that their memory can be unmapped."""
        for view in [*self._words, *self._texts]:
            if view is not None:
                view.release()

    def check(
        self, waiting_for: int | None = None, arrived: Callable[[], bool] | None = None, processes: bool = True
    ) -> None:
        """Raise RankFailedError if a peer has failed, or if the awaited one has left without having arrived."""
        for peer in self.peers:
            state = self.state_of(peer) if processes else self._words[peer][_STATE]
            if state == FAILED:
                raise self._failure_of(peer)
            if state == LEFT and peer == waiting_for and not (arrived and arrived()):
                raise RankFailedError(
                    f"rank {self.names[self.rank]}: rank {self.names[peer]} has shut down or ended while this rank "
                    "waits for it; every rank must make the same calls before it leaves [R15]"
                )

    def explain(self, peer: int, gone: bool) -> None:
        """Raise RankFailedError if access to ``peer``'s memory failed because the peer ended; return if it is alive.
        ``gone``: its process has ended, which the process table may list until its parent reaps it."""
        self.check(peer)
        if gone:
            raise self._failure_of(peer)
        backoff.poll(lambda: self.check(peer), _DEATH_SHOWS_WITHIN)

    def _failure_of(self, peer: int) -> RankFailedError:
        """The error for a peer that has failed, or for the one that is the cause of its failure. Raises the network's
        instead where that comes soon: it knows whether a rank elsewhere is the cause, and tells the ranks elsewhere of
        a death before they hear that this rank has failed because of it."""

        def is_consequence(other: int) -> bool:
            return RankFailedError.__name__ in self.text_of(other)

        def has_cause() -> bool:
            nonlocal peer
            if self.also_check is not None:
                self.also_check()
            failed = [other for other in self.peers if self.state_of(other) == FAILED]
            peer = min([peer, *failed], key=is_consequence)
            return not is_consequence(peer)

        if is_consequence(peer):
            backoff.poll(has_cause, _CAUSE_SHOWS_WITHIN)
        text = self.text_of(peer)
        if not text and self.also_check is not None:
            backoff.poll(self.also_check, _DEATH_SHOWS_WITHIN)
        detail = f":\n{text}" if text else " (it died without an error message)"
        return RankFailedError(f"rank {self.names[self.rank]}: rank {self.names[peer]} has failed [R5]{detail}")

    def _died(self, peer: int) -> bool:
        return bool(self._processes) and not _process_lives(self._processes[peer])

    def _wait_long(self, peer: int, arrived: Callable[[], bool]) -> None:
        def check(deep: bool) -> None:
            self.check(peer, arrived, processes=deep)
            if self.also_check is not None:
                self.also_check()

        backoff.wait(
            arrived,
            check,
            self._timeout,
            lambda: (
                f"rank {self.names[self.rank]}: waited {self._timeout:g} s for rank {self.names[peer]}, which is "
                f"alive but has not made the same call; see what it is doing, or raise {setting_of(self._timeout)} "
                "[R21]"
            ),
            pause=self.relax,
        )


def _word_bytes(size: int) -> int:
    return 8 * (_WORDS + 2 * max_words(size) + PIECES * PIECE_WORDS)


def _process_lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        # The process table lists a process that has ended until its parent waits for it, which may never happen.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except ProcessLookupError:
        return False
    except OSError:  # another user's process, or a system without such files
        return True
