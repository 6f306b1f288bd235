"""The store at which ranks meet: what clients see of each other, who is refused, and whom nobody harms."""

from __future__ import annotations

import concurrent.futures
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from queue import SimpleQueue

import pytest

from collectives.base.errors import CollectiveTimeoutError, InvalidArgumentError, TransportError
from collectives.transport.stores import store as module
from collectives.transport.stores.store import MOST_VALUE, Store, StoreServer
from collectives.transport.tcp.authentication import Verification, make_key
from collectives.transport.tcp.listener import dial
from collectives.transport.tcp.service import Service

KEY = make_key()


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.close()


@pytest.fixture
def server(service: Service) -> Iterator[StoreServer]:
    made = StoreServer(service, "127.0.0.1", 0, KEY)
    yield made
    made.close()


@pytest.fixture
def client(server: StoreServer, service: Service) -> Iterator[Callable[..., Store]]:
    made: list[Store] = []

    def make(timeout: float = 10.0) -> Store:
        made.append(Store(*server.address, KEY, timeout, service))
        return made[-1]

    yield make
    for store in made:
        store.close()


def test_what_one_client_sets_another_gets(client: Callable[..., Store]) -> None:
    one, other = client(), client()
    one.set("a", b"\x00\xff")
    one.set("b", b"")
    other.wait(["a", "b"])
    assert (other.get("a"), other.get("b")) == (b"\x00\xff", b"")
    one.set("a", b"new")
    assert other.get("a") == b"new"


def test_the_process_that_serves_hears_sets_and_drops(service: Service) -> None:
    heard: list[tuple[str, bytes]] = []
    server = StoreServer(service, "127.0.0.1", 0, KEY, lambda key, value: heard.append((key, value)))
    one, other = Store(*server.address, KEY, 10.0, service), Store(*server.listen("127.0.0.1"), KEY, 10.0, service)
    try:
        one.set("a/1", b"1")
        server.set("a/2", b"2")
        server.set("b", b"3")
        assert heard == [("a/1", b"1")]
        assert [other.get(key) for key in ("a/1", "a/2", "b")] == [b"1", b"2", b"3"]
        server.drop("a/")
        assert other.get("b") == b"3"
        for key in ("a/1", "a/2"):
            with pytest.raises(CollectiveTimeoutError):
                other.wait([key], timedelta(seconds=0.01))
    finally:
        one.close()
        other.close()
        server.close()


def test_the_process_that_serves_learns_whose_connection_has_ended(service: Service) -> None:
    lost: SimpleQueue[str] = SimpleQueue()
    server = StoreServer(service, "127.0.0.1", 0, KEY, lost=lost.put)
    clients = [Store(*server.address, KEY, 10.0, service) for _ in range(3)]
    try:
        clients[0].set("beat/0", b"")
        clients[1].set("a", b"")
        clients[1].set("beat/1", b"")
        clients[2].wait(["a"])
        for client in (clients[2], clients[1]):
            client.close()
        assert lost.get(timeout=10) == "beat/1"  # who has set nothing is not told of
        clients[0].close()
        assert lost.get(timeout=10) == "beat/0"
    finally:
        server.close()


def test_a_large_value_arrives(client: Callable[..., Store]) -> None:
    value = bytes(range(256)) * (MOST_VALUE // 256)
    client().set("large", value)
    assert client().get("large") == value


def test_clients_wait_for_what_comes_later(client: Callable[..., Store]) -> None:
    setter, clients = client(), [client() for _ in range(5)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        values = [pool.submit(one.get, "late") for one in clients]
        both = pool.submit(client().wait, ["later", "late"])
        assert not any(value.done() for value in values)
        setter.set("late", b"here")
        assert [value.result(10) for value in values] == [b"here"] * 5
        assert not both.done()
        setter.set("later", b"")
        both.result(10)


def test_a_long_wait_is_several_requests(client: Callable[..., Store], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WAIT_AT_ONCE", 0.01)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        value = pool.submit(client().get, "late")
        with pytest.raises(concurrent.futures.TimeoutError):
            value.result(0.1)
        client().set("late", b"here")
        assert value.result(10) == b"here"


def test_a_wait_is_bounded_and_names_the_keys(client: Callable[..., Store]) -> None:
    one = client(timeout=0.05)
    one.set("a", b"1")
    with pytest.raises(CollectiveTimeoutError, match=r"0\.05 s for a, missing"):
        one.wait(["a", "missing"])
    with pytest.raises(CollectiveTimeoutError, match=r"0\.01 s for missing"):
        one.wait(["missing"], timedelta(seconds=0.01))
    with pytest.raises(CollectiveTimeoutError, match="missing"):
        one.get("missing")
    one.wait(["a"], timedelta(0))
    assert one.get("a") == b"1"  # the answers of the earlier requests are not taken for this one's


def test_keys_and_values_have_bounds(client: Callable[..., Store], monkeypatch: pytest.MonkeyPatch) -> None:
    one = client()
    for key, value in (("k" * 1025, b""), ("two\nlines", b""), ("a", bytes(MOST_VALUE + 1))):
        with pytest.raises(InvalidArgumentError, match="expected a key"):
            one.set(key, value)
    monkeypatch.setattr(module, "MOST_KEYS", 2)
    monkeypatch.setattr(module, "MOST_BYTES", 102)
    one.set("a", bytes(50))
    one.set("b", bytes(50))
    for key in ("c", "a"):
        with pytest.raises(TransportError, match="full: 2 keys, 102 bytes"):
            one.set(key, bytes(51))
    one.set("a", bytes(10))
    one.set("a", bytes(50))


def test_a_client_without_the_key_is_refused(server: StoreServer, service: Service) -> None:
    stranger = Store(*server.address, make_key(), 5, service)
    try:
        with pytest.raises(TransportError, match="refused"):
            stranger.connect()
        with pytest.raises(TransportError, match="refused"):
            stranger.set("a", b"")
    finally:
        stranger.close()


def test_half_open_and_slow_clients_harm_nobody(
    server: StoreServer, service: Service, client: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FRAME_WITHIN", 0.2)
    silent = socket.create_connection(server.address)
    hello = f"store {server.address[1]}".encode()
    socks = [service.run(dial(service, *server.address, KEY, hello), 10) for _ in range(3)]
    half, endless, unknown = socks
    half.send(b"s")
    endless.send(module._REQUEST.pack(b"s", 1.0, 1, 100) + b"a")
    unknown.send(module._REQUEST.pack(b"s", 1.0, MOST_VALUE + 1, 100))
    one = client()
    one.set("a", b"1")
    assert one.get("a") == b"1"
    for sock in (endless, unknown):
        sock.setblocking(True)
        sock.settimeout(10)
        assert sock.recv(1) == b""
    for sock in (silent, *socks):
        sock.close()


def test_a_connection_that_is_passed_on_from_another_port_is_closed(server: StoreServer, service: Service) -> None:
    """Proofs of both sides do not help somebody who listens on a port where ranks look for the store."""
    with service.run(dial(service, *server.address, KEY, f"store {server.address[1] + 1}".encode()), 10) as passed_on:
        passed_on.settimeout(10)
        assert passed_on.recv(1) == b""


def test_a_lost_connection_is_made_anew(server: StoreServer, client: Callable[..., Store]) -> None:
    one = client()
    one.set("a", b"1")
    assert one._sock is not None
    one._sock.shutdown(socket.SHUT_RDWR)
    assert one.get("a") == b"1"


def test_a_server_that_falls_silent_is_not_dialled_again(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has had the time that an answer may take."""
    dialled, dial_server, awake = [], Store._dial, threading.Event()
    monkeypatch.setattr(Store, "_dial", lambda store, seconds: dialled.append(store) or dial_server(store, seconds))
    silent = Service()
    server = StoreServer(silent, "127.0.0.1", 0, KEY, lambda key, value: key == "late" and awake.wait(20))
    store = Store(*server.address, KEY, 10.0, service, answers_within=0.5)
    store.set("early", b"1")
    with pytest.raises(TransportError, match=r"no answer within 0\.5 s"):
        store.set("late", b"2")
    assert len(dialled) == 1
    awake.set()
    store.set("early", b"3")
    store.close()
    server.close()
    silent.close()


def test_dropped_connections_and_huge_answers(service: Service) -> None:
    """A server that drops a connection because it has too many is dialled again; an answer has a bound."""
    with socket.create_server(("127.0.0.1", 0)) as flooded, concurrent.futures.ThreadPoolExecutor(1) as pool:
        flooded.settimeout(20)
        store = Store(*flooded.getsockname()[:2], KEY, 10.0, service)
        asking = pool.submit(store.get, "key")
        sock, _ = flooded.accept()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        sock, _ = flooded.accept()
        with sock:
            verification = Verification(KEY)
            sock.sendall(verification.greeting)
            while verification.missing:
                verification.take(sock.recv(verification.missing))
            sock.sendall(verification.proof + struct.pack("<cI", b"d", MOST_VALUE + 1))
            with pytest.raises(TransportError, match=f"announced an answer of {MOST_VALUE + 1} bytes"):
                asking.result(20)
        store.close()


def test_an_ended_server_is_named(client: Callable[..., Store], server: StoreServer, service: Service) -> None:
    one = client()
    one.set("a", b"1")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client().get, "late")
        server.close()
        for ended in (waiting.result, lambda seconds: one.get("a")):
            with pytest.raises(TransportError, match=rf"127\.0\.0\.1:{server.address[1]} does not answer"):
                ended(10)
