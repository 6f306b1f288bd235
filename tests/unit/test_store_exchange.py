"""Exchanges through a store: of one's own and of torch's, first and later attempts, and who is missing."""

from __future__ import annotations

import concurrent.futures
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from collectives.base.config import Config
from collectives.base.errors import (
    CollectiveTimeoutError,
    InvalidArgumentError,
    MismatchError,
    RankFailedError,
    TransportError,
)
from collectives.transport.stores.store import Store, StoreServer
from collectives.transport.stores.store_exchange import StoreExchange
from collectives.transport.tcp import tcp_groups
from collectives.transport.tcp.authentication import make_key
from collectives.transport.tcp.mesh import Mesh
from collectives.transport.tcp.service import Service


class LocalStore:
    """A store for the threads of one process, with nothing but what an exchange needs."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.calls = 0
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self.calls += 1
            self.values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            self.calls += 1
            assert key in self.values, "an exchange gets nothing that may not be there"
            return self.values[key]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self._changed:
            self.calls += 1
            if not self._changed.wait_for(lambda: all(key in self.values for key in keys), timeout.total_seconds()):
                raise RuntimeError(f"timeout: {keys}")


@pytest.fixture
def pool() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(16) as made:
        yield made


@pytest.fixture(params=["local", "own", "torch-hash", "torch-tcp", "torch-file"])
def clients(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    """Makes clients of one store."""
    if request.param == "local":
        store = LocalStore()
        yield lambda: store
    elif request.param == "own":
        service, key = Service(), make_key()
        server = StoreServer(service, "127.0.0.1", 0, key)
        yield lambda: Store(*server.address, key, 20, service)
        service.close()
    else:
        torch = pytest.importorskip("torch.distributed")
        if request.param == "torch-hash":
            hashed = torch.HashStore()
            yield lambda: hashed
        elif request.param == "torch-file":
            yield lambda: torch.FileStore(str(tmp_path / "store"), -1)
        else:
            limit = timedelta(seconds=20)
            tcp = torch.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
            yield lambda: torch.PrefixStore(
                "p", torch.TCPStore("127.0.0.1", tcp.port, None, False, limit, wait_for_workers=False)
            )


def test_all_ranks_get_all_values(clients: Callable[[], Any], pool: concurrent.futures.ThreadPoolExecutor) -> None:
    def of_a_rank(rank: int, size: int) -> list[Any]:
        exchange = StoreExchange(clients(), rank, size, 20, "here")
        return [exchange({"rank": rank, "text": "ä"}), exchange([rank, None, 1.5])]

    for size in (1, 2, 5):  # each leaves its values in the store, and so does each time
        for _ in range(2):
            for said in pool.map(of_a_rank, range(size), [size] * size):
                assert said[0] == [{"rank": rank, "text": "ä"} for rank in range(size)]
                assert said[1] == [[rank, None, 1.5] for rank in range(size)]


def test_the_first_exchange_polls_nothing(pool: concurrent.futures.ThreadPoolExecutor) -> None:
    store, size = LocalStore(), 8
    exchanges = [StoreExchange(store, rank, size, 20, "here") for rank in range(size)]
    list(pool.map(lambda exchange: exchange(0), exchanges))
    assert store.calls <= 22 * size


def test_a_rank_whose_attempt_failed_comes_again(pool: concurrent.futures.ThreadPoolExecutor) -> None:
    """Whichever rank it is, while the others still wait in their first."""
    for again in range(3):
        store = LocalStore()
        late = (again + 1) % 3

        def attempt(rank: int, timeout: float, store: LocalStore = store) -> list[Any]:
            return StoreExchange(store, rank, 3, timeout, "here")(f"{rank} {timeout}")

        waiting = pool.submit(attempt, (again + 2) % 3, 20)
        with pytest.raises(CollectiveTimeoutError, match=f"rank {again}: waited 0.2 s for"):
            attempt(again, 0.2)
        with pytest.raises(CollectiveTimeoutError):
            attempt(again, 0.1)
        joining = [pool.submit(attempt, again, 19), pool.submit(attempt, late, 20)]
        expected = [f"{rank} {19 if rank == again else 20}" for rank in range(3)]
        assert all(join.result(20) == expected for join in (waiting, *joining))


def test_an_offer_that_is_replaced_once_it_was_proposed(pool: concurrent.futures.ThreadPoolExecutor) -> None:
    """Rank 1 gives up between its offer and its agreement; neither rank 0 nor rank 2 goes on with what it offered."""

    class Slow(LocalStore):
        """In which rank 1's agreement never arrives the first time."""

        refused = threading.Event()

        def set(self, key: str, value: bytes) -> None:
            if key.endswith("agreed/1") and not self.refused.is_set():
                self.refused.set()
                raise RuntimeError("interrupted")
            super().set(key, value)

    store = Slow()
    others = [pool.submit(StoreExchange(store, rank, 3, 20, "here"), "old") for rank in (0, 2)]
    with pytest.raises(TransportError, match=r"rank 1: the store at which .* \(here\) failed: interrupted"):
        StoreExchange(store, 1, 3, 20, "here")("old")
    assert not any(other.done() for other in others)
    assert StoreExchange(store, 1, 3, 20, "here")("new") == ["old", "new", "old"]
    assert [other.result(20) for other in others] == [["old", "new", "old"]] * 2


def test_an_exchange_that_is_concluded_without_a_rank_that_has_come_again(
    pool: concurrent.futures.ThreadPoolExecutor,
) -> None:
    """Rank 1 has agreed, gives up, and comes again just before rank 0 concludes: it does not wait there alone."""

    class Slow(LocalStore):
        """In which rank 0 concludes when rank 1 has come for the second time."""

        offers = 0
        again = threading.Event()

        def set(self, key: str, value: bytes) -> None:
            if key.endswith("concluded"):
                assert self.again.wait(20)
            super().set(key, value)
            self.offers += key.endswith("first/offer/1")
            if self.offers == 2:
                self.again.set()

    store = Slow()
    zero = StoreExchange(store, 0, 2, 20, "here")
    concluded = pool.submit(zero, 0)
    with pytest.raises(CollectiveTimeoutError):
        StoreExchange(store, 1, 2, 0.5, "here")("old")
    begun = pool.submit(StoreExchange(store, 1, 2, 20, "here"), "new")
    assert concluded.result(20) == [0, "old"]
    with pytest.raises(RankFailedError, match=r"rank 0: rank 1 has begun init.. again"):
        zero(1)
    assert StoreExchange(store, 0, 2, 20, "here")(2) == [2, "new"] == begun.result(20)


def test_the_missing_ranks_are_named(clients: Callable[[], Any], pool: concurrent.futures.ThreadPoolExecutor) -> None:
    def attempt(rank: int) -> str:
        with pytest.raises(CollectiveTimeoutError) as caught:
            StoreExchange(clients(), rank, 5, 0.3, "the place")(None)
        return str(caught.value)

    for rank, text in zip((0, 1, 3), pool.map(attempt, (0, 1, 3)), strict=True):
        assert text.startswith(f"rank {rank}: waited 0.3 s for ranks 2, 4 of 5 to call init() (the place)")


def test_the_missing_ranks_of_a_later_init_are_named(pool: concurrent.futures.ThreadPoolExecutor) -> None:
    store = LocalStore()
    list(pool.map(lambda rank: StoreExchange(store, rank, 3, 20, "here")(0), range(3)))

    def attempt(rank: int) -> str:
        with pytest.raises(CollectiveTimeoutError) as caught:
            StoreExchange(store, rank, 3, 0.3 if rank else 0.5, "here")(None)
        return str(caught.value)

    assert "rank 1: waited 0.3 s for ranks 0, 2 of 3" in attempt(1)
    texts = list(pool.map(attempt, range(2)))
    assert "for rank 2 of 3" in texts[0] and "for rank 2 of 3" in texts[1]


def test_two_processes_of_one_rank_are_found(pool: concurrent.futures.ThreadPoolExecutor) -> None:
    store = LocalStore()
    same = []
    for _ in range(2):  # both before the others: an exchange that is concluded without one of them tells it nothing
        store.values.pop("collectives/first/offer/1", None)
        same.append(pool.submit(StoreExchange(store, 1, 3, 20, "here"), None))
        while "collectives/first/offer/1" not in store.values:
            time.sleep(0.001)
    first = pool.submit(StoreExchange(store, 0, 3, 20, "here"), None)
    last = pool.submit(StoreExchange(store, 2, 3, 20, "here"), None)
    errors = [error for error in (one.exception(20) for one in same) if error is not None]
    assert len(errors) == 1 and isinstance(errors[0], InvalidArgumentError)
    assert "two processes claim to be rank 1 of here" in str(errors[0])
    assert first.result(20) == last.result(20) == [None] * 3


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2, 3), (4, 4, 3, 3)])
def test_ranks_that_disagree_about_their_number_learn_it_at_once(
    sizes: Sequence[int], pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    """Whoever comes first, and whatever an earlier attempt has left behind."""
    for first in (rank for rank, size in enumerate(sizes) if sizes.count(size) <= len(sizes) / 2):
        store = LocalStore()
        with pytest.raises(CollectiveTimeoutError):
            StoreExchange(store, 0, 7, 0.01, "here")(None)
        joining = {first: pool.submit(StoreExchange(store, first, sizes[first], 20, "here"), None)}
        while f'"size": {sizes[first]}' not in store.values["collectives/first/size"].decode():
            time.sleep(0.001)
        begun = {rank: StoreExchange(store, rank, size, 20, "here") for rank, size in enumerate(sizes)}
        joining.update((rank, pool.submit(begun[rank], None)) for rank in begun if rank != first)
        for rank, one in joining.items():
            text = str(one.exception(5))
            named = re.findall(r"rank (\d) \(process \d+ on \S+\) says that there are (\d) ranks", text)
            assert text.startswith(f"rank {rank}: ") and len(named) == 2, text
            assert all(sizes[int(other)] == int(size) for other, size in named) and named[0][1] != named[1][1], text
        again = [StoreExchange(store, rank, 3, 20, "here") for rank in range(3)]
        assert list(pool.map(lambda exchange: exchange(1), again)) == [[1] * 3] * 3


def test_a_rank_that_fails_between_two_exchanges_leaves_nobody_waiting(
    pool: concurrent.futures.ThreadPoolExecutor,
) -> None:
    store = LocalStore()
    exchanges = [StoreExchange(store, rank, 3, 20, "here") for rank in range(3)]
    list(pool.map(lambda exchange: exchange(0), exchanges))
    waiting = [pool.submit(exchange, 1) for exchange in exchanges[:2]]
    exchanges[2].leave(InvalidArgumentError("no such interface"))
    for rank, one in enumerate(waiting):
        with pytest.raises(RankFailedError, match=f"rank {rank}: rank 2 failed in init.*no such interface"):
            one.result(20)
    # What they have left does not disturb the next attempts, be it of fewer ranks.
    for size in (3, 2):
        again = [StoreExchange(store, rank, size, 20, "here") for rank in range(size)]
        for _ in range(2):
            assert list(pool.map(lambda exchange: exchange(2), again)) == [[2] * size] * size
            again[0].look_for_failures()


def test_an_attempt_that_nobody_has_joined_hides_no_failure_before_it(
    pool: concurrent.futures.ThreadPoolExecutor,
) -> None:
    """A rank is interrupted again as soon as it has come again, before the others have looked."""
    store = LocalStore()
    exchanges = [StoreExchange(store, rank, 2, 20, "here") for rank in range(2)]
    list(pool.map(lambda exchange: exchange(0), exchanges))
    exchanges[0].leave(KeyboardInterrupt("first"))
    again = StoreExchange(store, 0, 2, 0.1, "here")
    with pytest.raises(CollectiveTimeoutError) as raised:
        again(0)
    again.leave(raised.value)
    with pytest.raises(RankFailedError, match=r"rank 1: rank 0 failed in init.*first"):
        exchanges[1].look_for_failures()


def test_a_rank_that_fails_before_it_has_connected_leaves_nobody_waiting(
    pool: concurrent.futures.ThreadPoolExecutor,
) -> None:
    store = LocalStore()
    exchanges = [StoreExchange(store, rank, 2, 20, "here") for rank in range(2)]

    def fail() -> None:
        mesh = Mesh(exchanges[1], 1, None)
        exchanges[1].leave(KeyboardInterrupt())
        mesh.close()

    failed = pool.submit(fail)
    with pytest.raises(RankFailedError, match=r"rank 0: rank 1 failed in init.*KeyboardInterrupt"):
        tcp_groups.connect(exchanges[0], 0, None, Config(timeout=20), exchanges[0].look_for_failures)
    failed.result(20)


@pytest.mark.parametrize("again", range(3))
def test_a_rank_that_begins_again_between_two_exchanges(
    again: int, pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    """Its process was killed, and started again; the others call again once they have noticed."""
    store = LocalStore()
    exchanges = [StoreExchange(store, rank, 3, 20, "here") for rank in range(3)]
    list(pool.map(lambda exchange: exchange(0), exchanges))
    waiting = {rank: pool.submit(exchanges[rank], 1) for rank in range(3) if rank != again}
    begun = pool.submit(StoreExchange(store, again, 3, 20, "here"), 2)
    for rank, one in waiting.items():
        with pytest.raises(RankFailedError, match=f"rank {rank}: rank {again} has begun init.. again"):
            one.result(20)
    others = [pool.submit(StoreExchange(store, rank, 3, 20, "here"), 2) for rank in waiting]
    assert [one.result(20) for one in (begun, *others)] == [[2, 2, 2]] * 3


def test_a_rank_that_dies_as_soon_as_the_others_have_come(pool: concurrent.futures.ThreadPoolExecutor) -> None:
    """It came first, so that its first beat may be of an earlier attempt."""

    class Fatal(LocalStore):
        """In which rank 1 ends without a word when it is about to agree."""

        def set(self, key: str, value: bytes) -> None:
            if key.endswith("agreed/1"):
                raise RuntimeError("killed")
            super().set(key, value)

    store = Fatal()
    exchanges = {rank: StoreExchange(store, rank, 3, 20, "here", peer_timeout=2.0) for rank in (1, 0, 2)}
    killed = pool.submit(exchanges.pop(1), 1)
    while "collectives/beat/1" not in store.values:
        time.sleep(0.001)
    others = {rank: pool.submit(exchange, rank) for rank, exchange in exchanges.items()}
    assert "killed" in str(killed.exception(20))
    for rank, one in others.items():
        with pytest.raises(RankFailedError, match=rf"rank {rank}: rank 1 failed in init.*has been silent for 2 s"):
            one.result(30)


@pytest.mark.parametrize("rank", range(2))
def test_a_store_that_fails_is_an_error_at_once(rank: int) -> None:
    """Others than rank 0 do not know yet whether rank 0 served it, and has ended."""

    class Broken(LocalStore):
        def wait(self, keys: list[str], timeout: timedelta) -> None:
            raise RuntimeError("the store's process has ended")

    with pytest.raises(TransportError, match=f"rank {rank}: the store at which the ranks meet.*has ended") as raised:
        StoreExchange(Broken(), rank, 2, 20, "here")(None)
    assert ("if rank 0 serves it" in str(raised.value)) == (rank != 0)


class Abused(LocalStore):
    """A store to which somebody else writes, too, without the job's key."""

    def __init__(self, forge: Callable[[str, bytes], bytes]) -> None:
        super().__init__()
        self._forge = forge

    def set(self, key: str, value: bytes) -> None:
        super().set(key, self._forge(key, value))


FORGERIES: dict[str, Callable[[bytes], bytes]] = {
    "unsigned": lambda value: value.split(b" ", 2)[2],
    "changed": lambda value: value.replace(b"127.0.0.1", b"127.0.0.2").replace(b'"number": "', b'"number": "0'),
    "another key's": lambda value: b"sha256 " + b"0" * 64 + b" " + value.split(b" ", 2)[2],
    "junk": lambda value: b"sha256 \xff",
}


@pytest.mark.parametrize("kind", ["offer/2", "list", "proposed", "agreed/1", "concluded", "offer/0"])
@pytest.mark.parametrize("how", FORGERIES)
def test_a_value_that_somebody_else_has_written_is_refused(
    kind: str, how: str, pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    """On every rank, with the reason; none goes on with it, and none waits for those that have raised."""

    def forge(key: str, value: bytes) -> bytes:
        forged = FORGERIES[how](value) if key.endswith(kind) and b"refused" not in value else value
        changed.append(forged != value)
        return forged

    changed: list[bool] = []
    store, key = Abused(forge), make_key()
    exchanges = [StoreExchange(store, rank, 3, 3.0, "here", key) for rank in range(3)]
    joining = [pool.submit(exchange, ["127.0.0.1", rank]) for rank, exchange in enumerate(exchanges)]
    if how == "changed" and kind in ("proposed", "agreed/1", "concluded"):
        assert all(join.result(10) for join in joining) and not any(changed)  # nothing of it was changed
        return
    refused = [join.exception(10) for join in joining]
    assert any(changed)
    if kind == "concluded":  # rank 0 has all that it waits for
        assert joining[0].result() and refused.pop(0) is None
    for error in refused:
        assert isinstance(error, MismatchError), error
        assert f"{kind} in the store" in str(error) and "was not signed with this job's key" in str(error)


def test_a_rank_that_comes_again_does_not_meet_its_own_refusal(pool: concurrent.futures.ThreadPoolExecutor) -> None:
    """Rank 0 has refused a beat of rank 1's, which was told; it comes again before rank 1 does."""
    abused, key = [True], make_key()
    store = Abused(lambda name, value: b"junk" if name.endswith("beat/1") and abused else value)
    exchanges = {rank: StoreExchange(store, rank, 2, 20, "here", key) for rank in (1, 0)}
    joining = {1: pool.submit(exchanges[1], 1)}
    while "collectives/beat/1" not in store.values:
        time.sleep(0.001)
    joining[0] = pool.submit(exchanges[0], 0)
    errors = {rank: one.exception(10) for rank, one in joining.items()}
    assert all(isinstance(error, MismatchError) and "beat/1 in the store" in str(error) for error in errors.values())
    abused.clear()
    for rank, error in errors.items():
        assert error is not None
        exchanges[rank].leave(error)
    with pytest.raises(CollectiveTimeoutError, match="for rank 1 of 2"):
        StoreExchange(store, 0, 2, 0.3, "here", key)(0)
    again = [pool.submit(StoreExchange(store, rank, 2, 20, "here", key), rank) for rank in range(2)]
    assert [one.result(20) for one in again] == [[0, 1]] * 2


def test_a_value_that_was_moved_from_another_place_is_refused(pool: concurrent.futures.ThreadPoolExecutor) -> None:
    """As of another rank, or of an earlier exchange."""
    key, first = make_key(), LocalStore()
    list(pool.map(lambda rank: StoreExchange(first, rank, 2, 20, "here", key)(rank), range(2)))
    for moved in ("collectives/first/offer/0", "collectives/first/list"):
        store = Abused(
            lambda name, value, moved=moved: first.values[moved] if name.endswith("offer/1") else value  # type: ignore[misc]
        )
        joining = [pool.submit(StoreExchange(store, rank, 2, 3.0, "here", key), rank) for rank in range(2)]
        for join in joining:
            assert "was not signed with this job's key" in str(join.exception(10))


@pytest.mark.parametrize("kind", ["offer/1", "list", "proposed", "agreed/1", "concluded"])
def test_a_value_of_an_earlier_job_of_the_same_key_is_not_used(
    kind: str, pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    """Which an attacker has kept, and puts where it has been: no rank goes on with it."""
    key, earlier = make_key(), LocalStore()
    list(pool.map(lambda rank: StoreExchange(earlier, rank, 2, 20, "here", key)(f"old {rank}"), range(2)))
    kept = earlier.values[f"collectives/first/{kind}"]
    store = Abused(lambda name, value: kept if name == f"collectives/first/{kind}" else value)
    joining = [pool.submit(StoreExchange(store, rank, 2, 0.5, "here", key), f"new {rank}") for rank in range(2)]
    for join in joining:
        error = join.exception(10)
        if error is None:
            assert join.result() == ["new 0", "new 1"]
        else:
            assert isinstance(error, CollectiveTimeoutError | InvalidArgumentError), error


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("following", [lambda place: "first", lambda place: f"{place}0"], ids=["circle", "endless"])
def test_concluded_exchanges_without_an_end_are_an_error(rank: int, following: Callable[[str], str]) -> None:
    """Without a key anybody who can write to the store may lead the ranks from exchange to exchange for ever."""

    class Leading(LocalStore):
        def wait(self, keys: list[str], timeout: timedelta) -> None:
            for key in keys:
                place, name = key.split("/")[1:3]
                if name == "concluded":
                    self.values[key] = json.dumps(following(place)).encode()
            super().wait(keys, timeout)

    with pytest.raises(TransportError, match=f"rank {rank}: .*another process writes to that store"):
        StoreExchange(Leading(), rank, 2, 0.2, "here")(None)


@pytest.mark.parametrize("without", [0, 1, 2])
def test_a_rank_without_the_key_is_an_error_on_all_ranks(
    without: int, pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    store, key = LocalStore(), make_key()
    keys = [None if rank == without else key for rank in range(3)]
    joining = [pool.submit(StoreExchange(store, rank, 3, 5.0, "here", keys[rank]), rank) for rank in range(3)]
    for join in joining:
        error = join.exception(10)
        assert isinstance(error, MismatchError) and "COLLECTIVES_KEY" in str(error)
