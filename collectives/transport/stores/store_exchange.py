"""All ranks' values by all ranks, through a store with nothing but ``set``, ``get`` and ``wait``.

    rank r      offers       sets its value with a nonce
    rank 0      proposes     gathers the offers, and sets the list of all of them with a number of its own
    rank r      agrees       sets the number, if its own nonce is in the list
    rank 0      concludes    sets the number a last time, once all have agreed

The keys of the next exchange, of the same `init` or of a later one, contain this number: a rank that begins follows the
numbers to the exchange that is not concluded. So all ranks meet there, whatever failed before, and no earlier exchange
interferes. A rank whose attempt failed may try again, with a new nonce, while others still wait: a list
with an older offer is not agreed to, and rank 0 proposes another one as soon as it sees the new offer. Each rank makes
some twenty calls of the store, and rank 0 some ten for each rank.

Where the job has a key, every value is signed with it (`signed_store`), and has the nonce or the number that makes it
new: a process that can write to the store can end the job, and no more.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from collectives.base.config import setting_of
from collectives.base.errors import (
    CollectivesError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    MismatchError,
    RankFailedError,
    TransportError,
    in_words,
)
from collectives.transport.backoff import Backoff, poll
from collectives.transport.stores.signed_store import FIRST_NAP, LONGEST_NAP, KeyValueStore, SignedStore
from collectives.transport.stores.store_beats import StoreBeats
from collectives.transport.stores.store_sizes import StatedSizes

_PREFIX = "collectives"
_FIRST = "first"
_LEFT = f"{_PREFIX}/left"
_PIECE = 0.5
"""Longest seconds of a wait in a store, which no interrupt may end."""
_LOOK_EVERY = 0.2
"""Seconds between two looks for ranks that have left."""
_HEARD_WITHIN = 1.5
"""Seconds for which a store is still served when its rank fails: the others wait in pieces, and then look."""


class _KnownError(Exception):
    """A mismatch of which the other ranks need not be told: they have told it, or see it for themselves."""


class StoreExchange:
    """The exchanges of one `init`, each a call of this object. Every rank makes one, and as many calls.

    Args:
        store: of which all ranks have a client.
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
        by = f"process {os.getpid()} on {socket.gethostname()}"
        self._store = SignedStore(store, key, rank, how)
        if rank == 0:
            self._store.server = ""  # no failure is blamed on another process
        self._rank, self._size, self._timeout, self._how = rank, size, timeout, how
        self._serves, self._peer_timeout = serves, peer_timeout
        self._offer = {"nonce": secrets.token_hex(8), "by": by}
        self._beats = StoreBeats(self._store, rank, size, peer_timeout, self._offer)
        self._sizes = StatedSizes(self._store, rank, size, by)
        self._left_before: Any = None
        """Which rank had left when this one came."""
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
            TransportError: the store failed, and it is not known that rank 0 serves it; or its exchanges have no end.
        """
        if self._size == 1:
            return [value]
        self._end = time.monotonic() + self._timeout
        if self._count == 0:
            self._left_before = self._store.find(_LEFT)
        offers: list[dict[str, Any]] = []
        while not offers:
            offers = self._take_part(value)
        self._nonces = [offer["nonce"] for offer in offers]
        self._count += 1
        return [offer["value"] for offer in offers]

    def _take_part(self, value: Any) -> list[dict[str, Any]]:
        """Take part in the exchange that is not concluded. Returns the offers of all ranks; none if the others have
        concluded it with an earlier offer of this rank's."""
        visited = {self._place}
        while (following := self._find("concluded")) is not None:
            if following in visited or time.monotonic() > self._end:
                raise TransportError(
                    f"rank {self._rank}: after {len(visited)} concluded exchanges the store at which the ranks meet "
                    f"({self._how}) still names another one: another process writes to that store; give each job its "
                    "own rendezvous, or set COLLECTIVES_KEY on all ranks [S30]"
                )
            visited.add(following)
            self._place = following
        offer = {**self._offer, "count": self._count, "serves": self._serves, "value": value}
        self._set("offer", offer, self._rank)
        try:
            self._beats.look(self._nonces)
            if self._store.server is None and self._await("offer", [0]):
                self._note_server(self._get("offer", 0))  # at once: it may end any moment
            self._sizes.begin(self._key("size"))
            return self._propose() if self._rank == 0 else self._agree()
        except _KnownError as error:
            raise MismatchError(str(error)) from None
        except MismatchError as error:
            self._refuse(error)
            raise

    def leave(self, error: BaseException) -> None:
        """Tell the ranks that have ended the first exchange that this one will not come, because of an error."""
        with suppress(CollectivesError):  # the store may be what failed
            # Before that no rank waits elsewhere, and what an earlier attempt has told may not be read yet. What
            # another rank's failure has caused was told already.
            if self._agreed and not isinstance(error, RankFailedError):
                why = in_words(self._rank, error)
                self._store.set(_LEFT, {"rank": self._rank, "nonce": self._offer["nonce"], "why": why})
            self._beats.end()
        if self._serves and isinstance(error, CollectivesError):
            poll(lambda: False, _HEARD_WITHIN, 0.05)

    def look_for_failures(self) -> None:
        """Raise RankFailedError if a rank has left since the first exchange; for ranks that wait for it elsewhere."""
        if time.monotonic() > self._looked_at + _LOOK_EVERY:
            self._look()
            self._looked_at = time.monotonic()

    # ---- the protocol

    def _propose(self) -> list[dict[str, Any]]:
        """Rank 0's part."""
        ranks, others, backoff = range(self._size), range(1, self._size), Backoff(FIRST_NAP)
        while not self._await("offer", ranks):
            self._check()
        proposed: list[dict[str, Any]] = []
        number = ""
        while True:
            offers = [self._get("offer", rank) for rank in ranks]
            self._check_number(offers[0])
            if [offer["nonce"] for offer in offers] != [offer["nonce"] for offer in proposed]:
                proposed, number = offers, secrets.token_hex(8)
                self._set("list", {"number": number, "offers": offers})
                self._set("proposed", number)
            self._check_counts(offers)
            if self._await("agreed", others):
                answers = [self._get("agreed", rank) for rank in others]
                if all(one == number for one in answers):
                    # Who was contradicted looks in between.
                    poll(self._compare_sizes, 2 * _PIECE if self._sizes.contradicted else 0.0, LONGEST_NAP)
                    self._agreed = True
                    self._set("concluded", number)
                    return proposed
                for one, offer in zip(answers, offers[1:], strict=True):
                    if (why := _refusal(one, offer["nonce"])) is not None:
                        raise MismatchError(f"rank 0: told by {why}")
            self._check()
            backoff.nap(LONGEST_NAP)

    def _agree(self) -> list[dict[str, Any]]:
        """The part of the other ranks. Returns nothing if the others have concluded the exchange without this rank."""
        backoff = Backoff(FIRST_NAP)
        number, agreed = "", False
        offers: list[dict[str, Any]] = []
        while True:
            if self._await("proposed"):
                proposed = self._get("proposed")
                if proposed != number:
                    listed = self._get("list")
                    if (why := _refusal(listed, self._offer["nonce"])) is not None:
                        raise _KnownError(f"rank {self._rank}: told by {why}")
                    # Otherwise rank 0 is about to propose another number.
                    if listed["number"] == proposed and "offers" in listed:
                        number, offers = proposed, listed["offers"]
                        self._note_server(offers[0])
                        own_offer = offers[self._rank] if len(offers) == self._size else None
                        agreed = own_offer is not None and own_offer["nonce"] == self._offer["nonce"]
                        if agreed:
                            self._beats.beat()  # who has just come cannot know whether the one before is new
                            self._check_counts(offers)
                            self._agreed = True
                            self._set("agreed", number, self._rank)
                if not agreed:
                    self._check_number(self._get("offer", self._rank))
                    if self._find("concluded") is not None:
                        return []
                elif self._await("concluded") and self._get("concluded") == number:
                    return offers
            self._check()
            backoff.nap(LONGEST_NAP)

    def _refuse(self, error: MismatchError) -> None:
        """Tell the ranks that wait for this one that it rejects what the store says."""
        refusal: dict[str, Any] = {"number": secrets.token_hex(8), "refused": str(error)}
        if self._rank == 0:
            stored_offers = [self._store.find_unverified(self._key("offer", rank)) for rank in range(self._size)]
            nonces = [offer.get("nonce") for offer in stored_offers if isinstance(offer, dict)]
            self._set("list", {**refusal, "nonces": nonces})
            self._set("proposed", refusal["number"])
        else:
            self._set("agreed", {**refusal, "nonces": [self._offer["nonce"]]}, self._rank)

    # ---- what ends it

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
            f"raise {setting_of(self._timeout)} [S24]"
        )

    def _missing(self) -> list[int]:
        """The ranks that have not come, as far as the store tells."""
        absent = [rank for rank in range(self._size) if not self._store.has([self._key("offer", rank)])]
        if absent:
            return absent
        number = self._find("proposed")
        if number is None:
            return [0]
        late = [rank for rank in range(1, self._size) if self._find("agreed", rank) != number]
        return [rank for rank in late if rank != self._rank] or [0]

    def _look(self) -> None:
        """Raise if a rank has died, or has left since the first exchange. What was told before this rank came is of an
        earlier attempt."""
        if self._store.server is None:
            self._note_server(self._find("offer", 0))
        dead = self._beats.look(self._nonces)
        if dead is not None:
            rank, beat = dead
            why = (
                f"{beat['by']} has been silent for {self._peer_timeout:g} s: it has died or is stopped, or its host or "
                "network is down (COLLECTIVES_PEER_TIMEOUT sets how long a rank may be silent)"
            )
            self._store.set(_LEFT, {"rank": rank, "nonce": beat["nonce"], "died": True, "why": why})
        left = self._store.find(_LEFT)
        if left is None or not ("died" in left or left["nonce"] in self._nonces) or left == self._left_before:
            return
        raise RankFailedError(
            f"rank {self._rank}: rank {left['rank']} failed in init(): {left['why']}; correct that, and call init() "
            "again on every rank [S28]"
        )

    def _note_server(self, offer: dict[str, Any] | None) -> None:
        """Note from rank 0's offer whether it serves the store."""
        if offer is not None:
            self._store.server = offer["by"] if offer["serves"] else ""

    def _check_number(self, offer: dict[str, Any]) -> None:
        if offer["nonce"] != self._offer["nonce"]:
            raise InvalidArgumentError(
                f"rank {self._rank}: two processes claim to be rank {self._rank} of {self._how}: {offer['by']} and "
                f"this one ({self._offer['by']}); give each process its own rank, and each job its own rendezvous "
                "[S31]"
            )

    def _check_counts(self, offers: list[dict[str, Any]]) -> None:
        """Raise if a rank has begun again after the first exchange. It does not agree, and neither does any other."""
        for rank, offer in enumerate(offers):
            if offer["count"] < self._count:
                raise RankFailedError(
                    f"rank {self._rank}: rank {rank} has begun init() again; call it again on every rank [S29]"
                )

    def _compare_sizes(self) -> None:
        difference = self._sizes.difference()
        if difference:
            raise _KnownError(
                f"rank {self._rank}: {difference} ({self._how}); give every rank the same number, with "
                "COLLECTIVES_SIZE, WORLD_SIZE, or init(size=...) [M19]"
            )

    # ---- the keys of this exchange

    def _key(self, name: str, rank: int | None = None) -> str:
        return "/".join([_PREFIX, self._place, name, *([] if rank is None else [str(rank)])])

    def _set(self, name: str, value: Any, rank: int | None = None) -> None:
        self._store.set(self._key(name, rank), value)

    def _get(self, name: str, rank: int | None = None) -> Any:
        return self._store.get(self._key(name, rank))

    def _find(self, name: str, rank: int | None = None) -> Any:
        return self._store.find(self._key(name, rank))

    def _await(self, name: str, ranks: Sequence[int | None] = (None,)) -> bool:
        """Whether a key, or that of each of these ranks, is there within some time."""
        left = max(0.0, self._end - time.monotonic())
        return self._store.has([self._key(name, rank) for rank in ranks], min(_PIECE, left))


def _refusal(answer: Any, nonce: str) -> str | None:
    """Why a rank has refused what it read in the attempt of which a nonce is; None if it has said something else."""
    return str(answer["refused"]) if isinstance(answer, dict) and nonce in answer.get("nonces", ()) else None
