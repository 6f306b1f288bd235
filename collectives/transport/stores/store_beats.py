"""Beats of the ranks that meet at a store: before they are connected, nothing else shows that one has died.

A rank that waits in `init` beats five times per timeout: it sets a key of its own anew. It watches the next two ranks,
so that each is watched by two, and the store has little to do. Silence is counted in the beats of the rank that
watches: a rank that was itself stopped takes no other for dead.

A store may have kept the last beat of an earlier attempt. So the silence of a rank counts only if it has beaten since
this rank watches, or if its beat has the nonce of an offer that this rank knows. A rank also beats when it agrees to
what rank 0 proposes: by then all have come, and watch.
"""

from __future__ import annotations

import time
from collections.abc import Container
from typing import Any

from collectives.transport.stores.signed_store import SignedStore

_KEY = "collectives/beat"
_BEATS = 5
"""Beats per timeout."""


class _Watched:
    """A rank that is watched: its last beat, whether that is new, and this rank's own beats since then."""

    def __init__(self, last: Any) -> None:
        self.last = last
        self.is_new = False
        self.silent = 0


class StoreBeats:
    """One rank's beats, and those that it watches.

    Args:
        timeout: seconds of silence after which a rank counts as dead.
        beat: what this rank's beats have, a nonce among it.
    """

    def __init__(self, store: SignedStore, rank: int, size: int, timeout: float, beat: dict[str, Any]) -> None:
        self._store, self._rank, self._beat = store, rank, beat
        self._next_ranks = {(rank + 1) % size, (rank + 2) % size} - {rank}
        self._interval = timeout / _BEATS
        self._number = 0
        self._next = 0.0
        self._watched: dict[int, _Watched] = {}

    def look(self, nonces: Container[str]) -> tuple[int, dict[str, Any]] | None:
        """Beat, and look at the others, if it is time for that; ``nonces`` are those of the offers that this rank
        knows. Returns a rank that has died, and its last beat; None if there is none."""
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + self._interval
        self.beat()
        for rank in self._next_ranks:
            beat = self._store.find(f"{_KEY}/{rank}")
            watched = self._watched.setdefault(rank, _Watched(beat))
            if beat != watched.last:
                watched.last, watched.is_new, watched.silent = beat, True, 0
            elif beat is not None and beat["number"]:
                watched.silent += 1  # the first of them comes right after the beat
                if watched.silent > _BEATS and (watched.is_new or beat["nonce"] in nonces):
                    return rank, beat
        return None

    def beat(self) -> None:
        self._number += 1
        self._set(self._number)

    def end(self) -> None:
        """Say that this rank beats no more, and lives."""
        self._set(0)

    def _set(self, number: int) -> None:
        self._store.set(f"{_KEY}/{self._rank}", {**self._beat, "number": number})
