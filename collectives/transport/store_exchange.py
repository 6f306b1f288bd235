"""All ranks' values by all ranks, through a store with nothing but ``set``, ``get`` and ``wait``.

    rank r      offers       sets its value with a nonce
    rank 0      proposes     gathers the offers, and sets the list of all of them with a number of its own
    rank r      agrees       sets the number, if its own nonce is in the list
    rank 0      concludes    sets the number a last time, once all have agreed

The number is where the keys of the next exchange lie, of the same `init` or of a later one: who begins follows the
numbers to the exchange that is not concluded. So all meet there, whoever has failed in which, and nothing of an earlier
exchange is in the way. A rank whose attempt failed may try again, with a new nonce, while others still wait: a list
with an older offer is not agreed to, and rank 0 proposes another one as soon as it sees the new offer. Each rank makes
some twenty calls of the store, and rank 0 some ten for each rank.

Values travel as JSON: the store may be anybody's, and what it says is not unpickled. Where the job has a key, each
value has an HMAC over its own key in the store, which says exchange, kind and rank, and over its text, with the nonce
or the number that makes it new. So whoever can write to the store can end the job, and not more:

    a value that is made up, or moved from another key    has no HMAC of this key: every rank raises
    an older value of the same key                        has a nonce or a number that no rank waits for
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

from collectives.base import interrupts
from collectives.base.errors import (
    CollectivesError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    MismatchError,
    RankFailedError,
    TransportError,
    in_words,
)
from collectives.transport import backoff
from collectives.transport.store_beats import StoreBeats

_PREFIX = "collectives"
_FIRST = "first"
_LEFT, _BEAT = f"{_PREFIX}/left", f"{_PREFIX}/beat"
_PIECE = 0.5
"""Longest seconds of a wait in a store, which no interrupt may end."""
_FIRST_NAP, _LONGEST_NAP, _GROWTH = 2e-3, 0.1, 1.5
_AT_ONCE = 0.0
"""Seconds for a key that is there, or is not."""
_SHORTEST = 1e-3
"""Seconds of a wait; to some stores 0 means for ever."""
_LOOK_EVERY = 0.2
"""Seconds between two looks for ranks that have left."""
_HEARD_WITHIN = 1.5
"""Seconds for which a store is still served when its rank fails: the others wait in pieces, and then look."""
_SIGNED = b"sha256 "
"""Begins a value that has an HMAC, which follows in hexadecimal; no JSON begins so."""


class _SizesDifferError(Exception):
    """Ranks disagree about their number."""


class KeyValueStore(Protocol):
    """What a rendezvous needs of a store; torch's have it."""

    def set(self, key: str, value: Any, /) -> Any:
        """Set a key to bytes."""

    def get(self, key: str, /) -> Any:
        """The bytes of a key; waits until there are any."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> Any:
        """Wait until all keys are set; raises after the timeout."""


class StoreExchange:
    """The exchanges of one `init`, each a call of this object. Every rank makes one, and as many calls.

    Args:
        store: of which all ranks have a client.
        rank, size: of this process.
        timeout: seconds.
        how: where the ranks meet; for messages.
        key: the job's, with which values are signed; None where the ranks have none yet.
        peer_timeout: seconds of silence after which a rank counts as dead.
        serves: whether this process serves the store, which then ends with it.
    """

    def __init__(
        self,
        store: KeyValueStore,
        rank: int,
        size: int,
        timeout: float,
        how: str,
        key: bytes | None = None,
        *,
        peer_timeout: float = 10.0,
        serves: bool = False,
    ) -> None:
        self._store = store
        self._job_key = key
        self._rank, self._size, self._timeout, self._how = rank, size, timeout, how
        self._serves, self._peer_timeout = serves, peer_timeout
        self._offer = {"nonce": secrets.token_hex(8), "by": f"process {os.getpid()} on {socket.gethostname()}"}
        self._beats = StoreBeats(
            *(rank, size, peer_timeout, self._offer),
            lambda peer: self._found_at(f"{_BEAT}/{peer}"),
            lambda beat: self._set(f"{_BEAT}/{rank}", beat),
        )
        self._server: str | None = None
        """Which process of rank 0 serves the store; empty if it does not, None if that is unknown."""
        self._left_before: Any = None
        """Which rank had left when this one came."""
        self._sizes: dict[str, Any] = {}
        """What was said about the number of ranks when this exchange began."""
        self._agreed = False
        """Whether the others may have ended the first exchange."""
        self._nonces: list[str] = []
        self._count = 0
        self._place = _FIRST
        self._end = 0.0
        self._looked_at = 0.0

    def __call__(self, value: Any) -> list[Any]:
        """Give a value that JSON can carry, and get those of all ranks.

        Raises:
            CollectiveTimeoutError: not every rank came; names those that did not.
            RankFailedError: a rank has died, or has left after the first exchange.
            InvalidArgumentError: another process has this rank's number.
            MismatchError: a value was not signed with this job's key, or the ranks disagree about their number.
            TransportError: the store failed, and it is not known that rank 0 serves it.
        """
        if self._size == 1:
            return [value]
        self._end = time.monotonic() + self._timeout
        while (following := self._found("concluded")) is not None:
            self._place = following
        if self._count == 0:
            self._left_before = self._found_at(_LEFT)
        offer = {**self._offer, "count": self._count, "serves": self._serves, "value": value}
        self._set(self._key("offer", self._rank), offer)
        try:
            self._beats.look(self._nonces)
            if self._rank != 0 and self._server is None and self._arrived([self._key("offer", 0)]):
                self._note_server(self._get(self._key("offer", 0)))  # at once: it may end any moment
            self._say_size()
            offers = self._propose() if self._rank == 0 else self._agree()
        except _SizesDifferError as error:
            raise MismatchError(str(error)) from None  # which all ranks see for themselves
        except MismatchError as error:
            self._refuse(error)
            raise
        self._nonces = [offer["nonce"] for offer in offers]
        self._count += 1
        return [offer["value"] for offer in offers]

    def _say_size(self) -> None:
        """Say how many ranks there are, unless somebody has said the same."""
        self._sizes = self._found("size") or {}
        if self._sizes.get("size") != self._size:
            self._contradict(self._sizes)

    def _contradict(self, said: dict[str, Any]) -> None:
        """Say how many ranks there are, to those who wait for a rank that has said something else, if there is one."""
        known = {"other": {name: what for name, what in said.items() if name != "other"}} if said else {}
        new = {"number": secrets.token_hex(8)}  # others may have seen the same of this rank before
        self._sizes = {**self._offer, "rank": self._rank, "size": self._size, **new, **known}
        self._set(self._key("size"), self._sizes)

    def _compare_sizes(self) -> None:
        """Raise if ranks disagree about their number. Whoever spoke before this rank may have been in an earlier
        attempt, but who has contradicted it or another rank since then is here, and hears the same of this rank."""
        said = self._get(self._key("size"))
        if said["size"] == self._size and said.get("other") in (None, self._sizes.get("other")):
            return
        self._contradict(said if said["size"] != self._size else said["other"])
        one, other = (
            f"rank {each['rank']} ({each['by']}) says that there are {each['size']} ranks"
            for each in (self._sizes, self._sizes["other"])
        )
        raise _SizesDifferError(
            f"rank {self._rank}: {one}, and {other} ({self._how}); give every rank the same number, with "
            "COLLECTIVES_SIZE, WORLD_SIZE, or init(size=...)"
        )

    def _refuse(self, error: MismatchError) -> None:
        """Tell the ranks that wait for this one that it does not believe what the store says."""
        refusal: dict[str, Any] = {"number": secrets.token_hex(8), "refused": str(error)}
        if self._rank == 0:
            nonces = [self._nonce_of(rank) for rank in range(self._size)]
            self._set(self._key("list"), {**refusal, "nonces": nonces})
            self._set(self._key("proposed"), refusal["number"])
        else:
            self._set(self._key("agreed", self._rank), {**refusal, "nonces": [self._offer["nonce"]]})

    def _nonce_of(self, rank: int) -> str:
        """The nonce that a rank's offer has, whoever has signed it; empty if there is none, or it is no offer."""
        key = self._key("offer", rank)
        with suppress(ValueError, KeyError, TypeError):
            if self._arrived([key], _AT_ONCE):
                return str(json.loads(_divided(self._read(key))[1])["nonce"])
        return ""

    def _check_refusal(self, said: Any, nonce: str) -> None:
        """Raise if a rank has refused what it read in the attempt of which a nonce is."""
        if isinstance(said, dict) and nonce in said.get("nonces", ()):
            raise MismatchError(f"rank {self._rank}: told by another rank: {said['refused']}")

    def leave(self, error: BaseException) -> None:
        """Tell the ranks that have ended the first exchange, and wait for this one, that it will not come because of an
        error."""
        with suppress(CollectivesError):  # the store may be what failed
            # Before that nobody waits elsewhere, and what an earlier attempt has told may not be read yet. What another
            # rank's failure has caused was told already.
            if self._agreed and not isinstance(error, RankFailedError):
                why = in_words(self._rank, error)
                self._set(_LEFT, {"rank": self._rank, "nonce": self._offer["nonce"], "why": why})
            self._beats.end()
        if self._serves and isinstance(error, CollectivesError):
            backoff.poll(lambda: False, _HEARD_WITHIN, 0.05)

    def look_for_failures(self) -> None:
        """Raise RankFailedError if a rank has left since the first exchange; for ranks that wait for it elsewhere."""
        if time.monotonic() > self._looked_at + _LOOK_EVERY:
            self._look()
            self._looked_at = time.monotonic()

    def _look(self) -> None:
        """Raise if a rank has died, or has left since the first exchange. What was told before this rank came is of an
        earlier attempt."""
        if self._server is None and self._rank != 0:
            self._note_server(self._found("offer", 0))
        dead = self._beats.look(self._nonces)
        if dead is not None:
            rank, beat = dead
            why = (
                f"{beat['by']} has been silent for {self._peer_timeout:g} s: it has died or is stopped, or its host or "
                "network is down (COLLECTIVES_PEER_TIMEOUT sets how long a rank may be silent)"
            )
            self._set(_LEFT, {"rank": rank, "nonce": beat["nonce"], "died": True, "why": why})
        left = self._found_at(_LEFT)
        if left is None or not ("died" in left or left["nonce"] in self._nonces) or left == self._left_before:
            return
        raise RankFailedError(
            f"rank {self._rank}: rank {left['rank']} failed in init(): {left['why']}; mend that, and call init() again "
            "on every rank"
        )

    def _note_server(self, offer: dict[str, Any] | None) -> None:
        """Note from rank 0's offer whether it serves the store."""
        if offer is not None:
            self._server = offer["by"] if offer["serves"] else ""

    def _propose(self) -> list[dict[str, Any]]:
        """Rank 0's part."""
        offered = [self._key("offer", rank) for rank in range(self._size)]
        agreed = [self._key("agreed", rank) for rank in range(1, self._size)]
        naps = _Naps()
        while not self._arrived(offered):
            self._check()
        proposed: list[dict[str, Any]] = []
        number = ""
        while True:
            offers = [self._get(key) for key in offered]
            self._check_number(offers[0])
            if [offer["nonce"] for offer in offers] != [offer["nonce"] for offer in proposed]:
                proposed, number = offers, secrets.token_hex(8)
                self._set(self._key("list"), {"number": number, "offers": offers})
                self._set(self._key("proposed"), number)
            self._check_counts(offers)
            if self._arrived(agreed):
                said = [self._get(key) for key in agreed]
                if all(one == number for one in said):
                    # Who was contradicted looks in between.
                    backoff.poll(self._compare_sizes, 2 * _PIECE if "other" in self._sizes else 0.0, _LONGEST_NAP)
                    self._agreed = True
                    self._set(self._key("concluded"), number)
                    return proposed
                for one, offer in zip(said, offers[1:], strict=True):
                    self._check_refusal(one, offer["nonce"])
            self._check()
            naps.nap()

    def _agree(self) -> list[dict[str, Any]]:
        """The part of the other ranks."""
        naps = _Naps()
        number, agreed = "", False
        offers: list[dict[str, Any]] = []
        while True:
            if self._arrived([self._key("proposed")]):
                proposed = self._get(self._key("proposed"))
                if proposed != number:
                    found = self._get(self._key("list"))
                    self._check_refusal(found, self._offer["nonce"])
                    if found["number"] == proposed and "offers" in found:  # else rank 0 is about to propose another one
                        number, offers = proposed, found["offers"]
                        self._note_server(offers[0])
                        mine = offers[self._rank] if len(offers) == self._size else None
                        agreed = mine is not None and mine["nonce"] == self._offer["nonce"]
                        if agreed:
                            self._check_counts(offers)
                            self._agreed = True
                            self._set(self._key("agreed", self._rank), number)
                if not agreed:
                    self._check_number(self._get(self._key("offer", self._rank)))
                elif self._arrived([self._key("concluded")]) and self._get(self._key("concluded")) == number:
                    return offers
            self._check()
            naps.nap()

    def _check_number(self, offer: dict[str, Any]) -> None:
        """Raise if this rank's offer was replaced."""
        if offer["nonce"] != self._offer["nonce"]:
            raise InvalidArgumentError(
                f"rank {self._rank}: {offer['by']} calls itself rank {self._rank} of {self._how}, as this process "
                f"({self._offer['by']}) does: give each process a rank of its own, and each job a place of its own"
            )

    def _check_counts(self, offers: list[dict[str, Any]]) -> None:
        """Raise if a rank has begun again after the first exchange. It does not agree, and neither does any other."""
        for rank, offer in enumerate(offers):
            if offer["count"] < self._count:
                raise RankFailedError(
                    f"rank {self._rank}: rank {rank} has begun init() again; call it again on every rank"
                )

    def _check(self) -> None:
        """Raise if a rank has left, if the ranks disagree about their number, or if the time is over."""
        self._look()
        self._compare_sizes()
        if time.monotonic() <= self._end:
            return
        missing = self._missing()
        named = ", ".join(str(rank) for rank in missing[:16]) + (", ..." if len(missing) > 16 else "")
        raise CollectiveTimeoutError(
            f"rank {self._rank}: waited {self._timeout:g} s for rank{'s' * (len(missing) > 1)} {named} of {self._size} "
            f"to call init() ({self._how}); see what {'they are' if len(missing) > 1 else 'it is'} doing, or "
            "raise COLLECTIVES_TIMEOUT"
        )

    def _missing(self) -> list[int]:
        """The ranks that have not come, as far as the store tells."""
        absent = [rank for rank in range(self._size) if not self._arrived([self._key("offer", rank)], _AT_ONCE)]
        if absent:
            return absent
        number = self._found("proposed")
        if number is None:
            return [0]
        late = [rank for rank in range(1, self._size) if self._found("agreed", rank) != number]
        return [rank for rank in late if rank != self._rank] or [0]

    def _key(self, name: str, rank: int | None = None) -> str:
        return "/".join([_PREFIX, self._place, name, *([] if rank is None else [str(rank)])])

    def _found(self, name: str, rank: int | None = None) -> Any:
        """The value of a key of this exchange; None if there is none."""
        return self._found_at(self._key(name, rank))

    def _found_at(self, key: str) -> Any:
        """The value of a key; None if there is none."""
        return self._get(key) if self._arrived([key], _AT_ONCE) else None

    def _set(self, key: str, value: Any) -> None:
        text = json.dumps(value).encode()
        if self._job_key is not None:
            text = b"%b%b %b" % (_SIGNED, self._signature(key, text), text)
        try:
            self._store.set(key, text)
        except Exception as error:
            raise self._failed(error) from error

    def _get(self, key: str) -> Any:
        """The value of a key that is there.

        Raises:
            MismatchError: it was not signed with the job's key.
        """
        signature, text = _divided(self._read(key))
        if signature and self._job_key is None:
            raise MismatchError(
                f"rank {self._rank}: COLLECTIVES_KEY is set on some ranks, but not on {self._rank}: set it on all, or "
                "on none"
            )
        if self._job_key is not None and not hmac.compare_digest(signature, self._signature(key, text)):
            raise MismatchError(
                f"rank {self._rank}: {key} in the store at which the ranks meet ({self._how}) was not signed with this "
                "job's key: COLLECTIVES_KEY is another one on some rank, or is not set there, or somebody else writes "
                "to that store"
            )
        try:
            return json.loads(text)
        except ValueError as error:
            raise self._failed(error) from error

    def _read(self, key: str) -> bytes:
        try:
            return bytes(self._store.get(key))
        except Exception as error:
            raise self._failed(error) from error

    def _signature(self, key: str, text: bytes) -> bytes:
        assert self._job_key is not None
        return hmac.digest(self._job_key, b"in a store\0%b\0%b" % (key.encode(), text), "sha256").hex().encode()

    def _arrived(self, keys: Sequence[str], seconds: float = _PIECE) -> bool:
        """Whether all keys are there within some seconds."""
        begun = time.monotonic()
        seconds = max(0.0, min(seconds, self._end - begun))
        check = getattr(self._store, "check", None)
        try:
            if check is None:
                self._store.wait(list(keys), timedelta(seconds=max(seconds, _SHORTEST)))
                return True
            # torch's TCPStore prints two lines for every wait that is not fulfilled.
            naps = _Naps()
            while not check(list(keys)):
                if time.monotonic() > begun + seconds:
                    return False
                naps.nap()
            return True
        except Exception as error:
            if check is None and (isinstance(error, TimeoutError) or time.monotonic() >= begun + seconds):
                return False
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> CollectivesError:
        failed = f"the store at which the ranks meet ({self._how}) failed: {error}"
        if self._server and self._rank != 0:
            return RankFailedError(
                f"rank {self._rank}: rank 0 ({self._server}) has ended in init(), or its host or network is down; see "
                f"its output; {failed}"
            )
        return TransportError(f"rank {self._rank}: {failed}")


def _divided(value: bytes) -> tuple[bytes, bytes]:
    """The signature of a value, empty if it has none, and its text."""
    if not value.startswith(_SIGNED):
        return b"", value
    signature, _, text = value[len(_SIGNED) :].partition(b" ")
    return signature, text


class _Naps:
    """Sleeps of increasing length."""

    def __init__(self) -> None:
        self._seconds = _FIRST_NAP

    def nap(self) -> None:
        interrupts.check()
        time.sleep(self._seconds)
        self._seconds = min(_GROWTH * self._seconds, _LONGEST_NAP)
