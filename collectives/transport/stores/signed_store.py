"""A client of a store in which values are JSON, and signed where the job has a key.

The store is not trusted: its values are never unpickled. A signature is an HMAC over the value's key in the store and
over its text. So a value that a process without the job's key has invented, or has moved from another key, is refused.
One that was at the same key before is not: the reader of a value knows what makes it new.
"""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from collectives.base.errors import CollectivesError, MismatchError, RankFailedError, TransportError
from collectives.transport.backoff import Backoff

_SHORTEST = 1e-3
"""Seconds of a wait; to some stores 0 means for ever."""
FIRST_NAP, LONGEST_NAP = 2e-3, 0.1
"""Seconds between two looks at a store."""
_SIGNED = b"sha256 "
"""Begins a value that has an HMAC, which follows in hexadecimal; no JSON begins so."""


class KeyValueStore(Protocol):
    """What a rendezvous needs of a store; torch's have it."""

    def set(self, key: str, value: Any, /) -> Any:
        """Set a key to bytes."""

    def get(self, key: str, /) -> Any:
        """The bytes of a key; waits until there are any."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> Any:
        """Wait until all keys are set; raises after the timeout."""


class SignedStore:
    """One rank's client; ``key`` and ``how`` as of `store_exchange.StoreExchange`.

    Attributes:
        server: which process of rank 0 serves the store; empty if none does, None if that is unknown.

    Raises:
        TransportError: from every method: the store failed, and it is not known that rank 0 serves it.
        RankFailedError: from every method: the store failed, which rank 0 serves.
    """

    def __init__(self, store: KeyValueStore, key: bytes | None, rank: int, how: str) -> None:
        self.server: str | None = None
        self._store, self._key, self._rank, self._how = store, key, rank, how

    def set(self, key: str, value: Any) -> None:
        text = json.dumps(value).encode()
        if self._key is not None:
            text = b"%b%b %b" % (_SIGNED, _signature(self._key, key, text), text)
        try:
            self._store.set(key, text)
        except Exception as error:
            raise self._failed(error) from error

    def get(self, key: str) -> Any:
        """The value of a key that is there. MismatchError: it was not signed with the job's key."""
        signature, text = _divided(self._read(key))
        if signature and self._key is None:
            raise MismatchError(
                f"rank {self._rank}: COLLECTIVES_KEY is set on some ranks, but not on rank {self._rank}; set it on "
                "all ranks, or on none [S41]"
            )
        if self._key is not None and not hmac.compare_digest(signature, _signature(self._key, key, text)):
            raise MismatchError(
                f"rank {self._rank}: {key} in the store at which the ranks meet ({self._how}) was not signed with "
                "this job's key: COLLECTIVES_KEY differs or is missing on some rank, or another process writes to "
                "that store; set the same COLLECTIVES_KEY on all ranks [S42]"
            )
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._failed(error) from error

    def find(self, key: str) -> Any:
        """The value of a key; None if there is none. Raises as `get`."""
        return self.get(key) if self.has([key]) else None

    def find_unverified(self, key: str) -> Any:
        """The value of a key, its signature unchecked; None if there is none, or it is no JSON."""
        try:
            return json.loads(_divided(self._read(key))[1]) if self.has([key]) else None
        except (ValueError, RecursionError):
            return None

    def has(self, keys: Sequence[str], within: float = 0.0) -> bool:
        """Whether all keys are there, within some seconds."""
        begun, backoff = time.monotonic(), Backoff(FIRST_NAP)
        check = getattr(self._store, "check", None)
        try:
            if check is None:
                self._store.wait(list(keys), timedelta(seconds=max(within, _SHORTEST)))
                return True
            # torch's TCPStore prints two lines for every wait that is not fulfilled.
            while not check(list(keys)):
                if time.monotonic() > begun + within:
                    return False
                backoff.nap(LONGEST_NAP)
            return True
        except RankFailedError:  # of a store that knows its clients
            raise
        except Exception as error:
            if check is None and (isinstance(error, TimeoutError) or time.monotonic() >= begun + within):
                return False
            raise self._failed(error) from error

    def _read(self, key: str) -> bytes:
        try:
            return bytes(self._store.get(key))
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> CollectivesError:
        failed = f"the store at which the ranks meet ({self._how}) failed: {error}"
        if self.server:
            return RankFailedError(
                f"rank {self._rank}: rank 0 ({self.server}) has ended in init(), or its host or network is down; see "
                f"its output; {failed} [S27]"
            )
        hint = "; if rank 0 serves it, see the end of rank 0's output" if self.server is None else ""
        return TransportError(f"rank {self._rank}: {failed}{hint}")


def _signature(job_key: bytes, key: str, text: bytes) -> bytes:
    return hmac.digest(job_key, b"in a store\0%b\0%b" % (key.encode(), text), "sha256").hex().encode()


def _divided(value: bytes) -> tuple[bytes, bytes]:
    """The signature of a value, empty if it has none, and its text."""
    if not value.startswith(_SIGNED):
        return b"", value
    signature, _, text = value[len(_SIGNED) :].partition(b" ")
    return signature, text
