"""Beats through a store: whose silence counts, and whose does not."""

from __future__ import annotations

import time

import pytest

from collectives.transport.stores.signed_store import SignedStore
from collectives.transport.stores.store_beats import StoreBeats
from tests.unit.test_store_exchange import LocalStore

SIZE, TIMEOUT = 4, 5.0


class Store:
    """A store, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._store = LocalStore()
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def rank(self, rank: int, nonce: str = "new") -> StoreBeats:
        store = SignedStore(self._store, None, rank, "here")
        return StoreBeats(store, rank, SIZE, TIMEOUT, {"nonce": f"{nonce} {rank}"})


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    return Store(monkeypatch)


def test_a_rank_that_falls_silent_has_died(store: Store) -> None:
    zero, one, two = (store.rank(rank) for rank in range(3))
    silent_since = 20.0
    while True:
        for beats in (zero, one, two):
            if beats is two and store.now >= silent_since:
                continue
            dead = beats.look(())
            if dead is not None:
                assert dead[0] == 2 and dead[1]["nonce"] == "new 2"
                assert TIMEOUT <= store.now - silent_since <= TIMEOUT + 2
                return
        store.now += 0.5
        assert store.now < 60


@pytest.mark.parametrize("known", [True, False])
def test_a_beat_that_was_there_before_counts_only_with_a_known_nonce(store: Store, known: bool) -> None:
    """It may be of an earlier attempt, whose process is to come again."""
    store.rank(1, "old").look(())
    zero = store.rank(0)
    found = []
    for _ in range(20):
        found.append(zero.look(("old 1",) if known else ()))
        store.now += 1
    assert any(found) == known


def test_a_rank_that_beats_no_more_but_lives_has_not_died(store: Store) -> None:
    zero, one = store.rank(0), store.rank(1)
    for second in range(30):
        if second < 5:
            one.look(())
        if second == 5:
            one.end()
        assert zero.look(("new 1",)) is None
        store.now += 1


def test_a_rank_that_was_stopped_itself_blames_nobody(store: Store) -> None:
    zero, one = store.rank(0), store.rank(1)
    for _ in range(10):
        one.look(())
        assert zero.look(()) is None
        store.now += 10 * TIMEOUT
