"""Authenticated connections between processes: who gets in, who is refused, and what a refusal says."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from collectives.base.errors import (
    CollectiveTimeoutError,
    InvalidArgumentError,
    MismatchError,
    RankFailedError,
    TransportError,
)
from collectives.transport import listener, network
from collectives.transport.authentication import make_key
from collectives.transport.listener import MOST_UNPROVED, Listener, dial
from collectives.transport.mesh import Mesh
from collectives.transport.service import Service

KEY = make_key()
HAS_IPV6 = any("::1" in known for known in network.addresses().values())


def exchanges(ranks: int) -> list[Callable[[Any], list[Any]]]:
    """An exchange for each of several threads, by JSON as a store's."""
    barrier, slots = threading.Barrier(ranks, timeout=20), [""] * ranks

    def of(rank: int) -> Callable[[Any], list[Any]]:
        def exchange(value: Any) -> list[Any]:
            slots[rank] = json.dumps(value)
            barrier.wait()
            said = [json.loads(text) for text in slots]
            barrier.wait()
            return said

        return exchange

    return [of(rank) for rank in range(ranks)]


def meshes(ranks: int, key: bytes | None = None) -> list[Mesh]:
    with concurrent.futures.ThreadPoolExecutor(ranks) as pool:
        joining = [pool.submit(Mesh.join, exchange, rank, key) for rank, exchange in enumerate(exchanges(ranks))]
        return [mesh.result() for mesh in joining]


@pytest.mark.parametrize("keys", [(None, KEY), (KEY, None)])
def test_a_key_that_not_all_ranks_were_given_is_refused(keys: tuple[bytes | None, bytes | None]) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        joining = [pool.submit(Mesh.join, exchange, rank, keys[rank]) for rank, exchange in enumerate(exchanges(2))]
        for rank, mesh in enumerate(joining):
            with pytest.raises(
                MismatchError, match=f"rank {rank}: COLLECTIVES_KEY is set .* not on {keys.index(None)}"
            ):
                mesh.result(20)


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.close()


def test_ranks_open_channels_to_each_other_in_any_order() -> None:
    ranks = meshes(4)
    try:

        def opens(mesh: Mesh) -> None:
            order = [peer for peer in range(4) if peer != mesh.rank]
            for channel in ("first", "second"):
                socks = {peer: mesh.open(peer, channel, 10) for peer in (order if mesh.rank % 2 else order[::-1])}
                for peer, sock in socks.items():
                    sock.sendall(f"{channel} {mesh.rank} to {peer}".encode())
                for peer, sock in socks.items():
                    sock.setblocking(True)
                    assert sock.recv(100).decode() == f"{channel} {peer} to {mesh.rank}"
                    sock.close()

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(opens, mesh) for mesh in ranks]:
                done.result(20)
    finally:
        for mesh in ranks:
            mesh.close()


def test_ranks_of_one_host_listen_on_loopback_alone() -> None:
    ranks = meshes(2, KEY)
    assert {host for mesh in ranks for host, _ in mesh.addresses} == {network.LOOPBACK}
    for mesh in ranks:
        mesh.close()


def test_connections_that_nobody_awaits_are_served_with_their_channel() -> None:
    ranks = meshes(2, KEY)
    arrived: concurrent.futures.Future[tuple[int, str]] = concurrent.futures.Future()
    early = ranks[0].dial(1, "post/early", 10)
    ranks[1].serve("post/", lambda peer, channel, sock: arrived.set_result((peer, channel)))
    assert arrived.result(10) == (0, "post/early")
    early.close()
    for mesh in ranks:
        mesh.close()


def test_a_rank_that_has_ended_and_one_that_does_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = meshes(2, KEY)
    monkeypatch.setattr("collectives.transport.mesh._REFUSED_WITHIN", 0.1)
    with pytest.raises(CollectiveTimeoutError, match=r"rank 0: waited 0.1 s for a connection from rank 1 on"):
        ranks[0].open(1, "words", 0.1)
    ranks[0].close()
    with pytest.raises(RankFailedError, match=r"rank 1: rank 0 on .* has ended: nobody listens at 127\.0\.0\.1:"):
        ranks[1].open(0, "words", 10)
    ranks[1].close()


def test_the_check_of_a_wait_ends_it() -> None:
    ranks = meshes(2, KEY)

    def fails() -> None:
        raise RankFailedError("rank 1 has failed")

    with pytest.raises(RankFailedError, match="rank 1 has failed"):
        ranks[0].open(1, "words", 10, fails)
    for mesh in ranks:
        mesh.close()


def test_another_key_is_refused_on_both_sides(service: Service) -> None:
    admitted: list[bytes] = []
    server = Listener(service, network.LOOPBACK, 0, KEY, lambda hello, sock: admitted.append(hello))
    with pytest.raises(TransportError, match="has refused this one: its key is another"):
        service.run(dial(service, *server.address, make_key(), b"hello"), 10)
    service.run(dial(service, *server.address, KEY, b"mine"), 10).close()
    assert admitted == [b"mine"]
    server.close()


def test_a_listener_of_another_kind_is_named(service: Service) -> None:
    with socket.create_server((network.LOOPBACK, 0)) as other:
        dialling = service.start(dial(service, *other.getsockname()[:2], KEY, b"hello"))
        sock, _ = other.accept()
        with sock:
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            with pytest.raises(TransportError, match="no process of collectives"):
                dialling.wait(10)
                dialling.result()


def test_random_bytes_replays_and_crowds_get_nowhere(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "PROVE_WITHIN", 1.0)
    admitted: list[bytes] = []
    server = Listener(service, network.LOOPBACK, 0, KEY, lambda hello, sock: admitted.append(hello))
    recorded = struct.pack("<32sH5s32s", os.urandom(32), 5, b"hello", os.urandom(32))
    half_open = [socket.create_connection(server.address) for _ in range(MOST_UNPROVED + 20)]
    for attack in (b"", os.urandom(500), recorded, b"\xff" * 40, b"\0" * 34):
        with socket.create_connection(server.address) as sock:
            sock.settimeout(10)
            with suppress(OSError):  # it may be refused before it has said all
                sock.sendall(attack)
                sock.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda sock=sock: receive(sock), b""))  # type: ignore[misc]
            assert len(answer) <= 46  # the greeting and a nonce: nothing of the job
    service.run(dial(service, *server.address, KEY, b"mine"), 10).close()
    assert admitted == [b"mine"]
    for sock in half_open:
        sock.settimeout(10)
        while receive(sock):
            pass
        sock.close()
    server.close()


def receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(4096)
    except ConnectionError:
        return b""


def test_a_forked_child_holds_no_connection_open() -> None:
    ranks = meshes(2, KEY)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(ranks[0].open, 1, "words", 10)
        mine = ranks[1].open(0, "words", 10)
        theirs = other.result(10)
    ends, child_ends = socket.socketpair()
    child = os.fork()
    if child == 0:
        child_ends.recv(1)  # until the parent has seen the end of the connection
        os._exit(0)
    try:
        theirs.close()
        mine.settimeout(10)
        assert mine.recv(1) == b""
    finally:
        ends.send(b"x")
        os.waitpid(child, 0)
        for mesh in ranks:
            mesh.close()


def test_an_interface_is_named_by_name_address_or_network() -> None:
    loopback = next(name for name, known in network.addresses().items() if network.LOOPBACK in known)
    for wanted in (loopback, network.LOOPBACK, "127.0.0.0/8", f"none, {loopback}"):
        assert network.address_of(wanted) == network.LOOPBACK
    if HAS_IPV6:
        assert network.address_of("fd12:3456::/32, ::1/128") == network.address_of("::1") == "::1"
    with pytest.raises(InvalidArgumentError, match=r"network interface 'ib7': expected the name, address or network"):
        network.address_of("ib7")


def test_loopback_leads_to_no_other_host() -> None:
    elsewhere = ["elsewhere", {"eth0": ["192.0.2.7"]}, "", "", True]
    with pytest.raises(InvalidArgumentError, match=r"rank 0: .*=127\.0\.0\.0/8: 127\.0\.0\.1 is loopback"):
        Mesh.join(lambda value: [value, elsewhere], 0, KEY, interface="127.0.0.0/8")


def test_addresses_that_several_hosts_have_lead_nowhere() -> None:
    bridge, near = {"docker0": ["172.17.0.1", "fd00::1"]}, network.addresses()
    mine = network.address_towards("192.0.2.7")
    both = {"eth0": ["192.0.2.7", "2001:db8::7"]}
    assert network.choose(["here", "there"], [bridge | near, bridge | both], 0) == mine
    with pytest.raises(TransportError, match=r"no network interface of .* leads to the other hosts"):
        network.choose(["here", "there"], [bridge, bridge], 0)


def test_hosts_of_which_some_have_no_ipv4_use_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    offers = [{"eth0": [f"192.0.2.{host}", f"2001:db8::{host}"]} for host in (1, 2)] + [{"eth0": ["2001:db8::3"]}]
    monkeypatch.setattr(network, "address_towards", lambda other: "2001:db8::1" if ":" in other else "192.0.2.1")
    assert network.choose(["one", "two"], offers[:2], 0) == "192.0.2.1"
    assert network.choose(["one", "two", "three"], offers, 0) == "2001:db8::1"


def test_a_service_ends_with_what_it_runs() -> None:
    service, ended = Service(), threading.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    service.start(forever())
    service.close()
    assert ended.is_set()
