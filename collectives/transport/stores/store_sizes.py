"""Agreement about the number of ranks at a store: if ranks disagree, all of them raise at once.

One key has the last *statement*, such as "rank 1 says that there are 3 ranks", with the last one that it is against:

    rank 1 begins      1 says 3
    rank 0 begins      0 says 2, against "1 says 3"       does not raise: rank 1 may be of an earlier attempt, and gone
    rank 1 looks       1 says 3, against "0 says 2"       raises: rank 0 has said so since rank 1 has begun
    rank 0 looks       0 says 2, against "1 says 3"       raises

A further rank that agrees with one of them finds that it is contradicted, and raises too.
"""

from __future__ import annotations

import secrets
from typing import Any

from collectives.transport.stores.signed_store import SignedStore


class StatedSizes:
    """One rank's part; ``by`` is its process, in words."""

    def __init__(self, store: SignedStore, rank: int, size: int, by: str) -> None:
        self._store, self._size = store, size
        self._own = {"rank": rank, "size": size, "by": by}
        self._key = ""
        self._statement: dict[str, Any] = {}
        """The statement that was there when this rank began, or that it has made since."""

    def begin(self, key: str) -> None:
        """State how many ranks there are, unless this key already holds the same number."""
        self._key = key
        self._statement = self._store.find(key) or {}
        if self._statement.get("size") != self._size:
            self._state(against=self._statement)

    @property
    def contradicted(self) -> bool:
        """Whether a process has stated another number, perhaps in an earlier attempt."""
        return "against" in self._statement

    def difference(self) -> str:
        """Who says what, if ranks that are here disagree; empty if they do not."""
        statement = self._store.get(self._key)
        if statement["size"] == self._size and statement.get("against") in (None, self._statement.get("against")):
            return ""
        self._state(against=statement if statement["size"] != self._size else statement["against"])
        return ", and ".join(
            f"rank {each['rank']} ({each['by']}) says that there are {each['size']} ranks"
            for each in (self._statement, self._statement["against"])
        )

    def _state(self, against: dict[str, Any]) -> None:
        """Make a statement, which is not equal to any other."""
        self._statement = {**self._own, "number": secrets.token_hex(8)}
        if against:
            self._statement["against"] = {name: what for name, what in against.items() if name != "against"}
        self._store.set(self._key, self._statement)
