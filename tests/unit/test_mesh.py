"""Authenticated connections between processes: who gets in, who is refused, and what a refusal says."""

from __future__ import annotations

import asyncio
import concurrent.futures
import hmac
import json
import os
import select
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
from collectives.transport.tcp import listener, network
from collectives.transport.tcp.authentication import Verification, make_key
from collectives.transport.tcp.listener import MOST_UNPROVED, Listener, dial
from collectives.transport.tcp.mesh import Inbox, Links, Mesh
from collectives.transport.tcp.service import Service

KEY = make_key()
HAS_IPV6 = any("::1" in known for known in network.addresses().values())
needs_ipv6 = pytest.mark.skipif(not HAS_IPV6, reason="this host has no IPv6 address, not even ::1")


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


Meshes = Callable[..., list[Mesh]]


@pytest.fixture
def meshes() -> Iterator[Meshes]:
    """Makes the meshes of so many ranks, which are closed at the end; ``seen``: an exchange as a rank has it."""
    made: list[Mesh] = []

    def make(ranks: int, key: bytes | None = None, seen: Any = lambda rank, told: told, **options: Any) -> list[Mesh]:
        with concurrent.futures.ThreadPoolExecutor(ranks) as pool:
            joining = [
                pool.submit(Mesh, seen(rank, told), rank, key, **options) for rank, told in enumerate(exchanges(ranks))
            ]
            made.extend(mesh := [one.result(20) for one in joining])
        return mesh

    yield make
    for mesh in made:
        mesh.close()


@pytest.mark.parametrize("keys", [(None, KEY), (KEY, None)])
def test_a_key_that_not_all_ranks_were_given_is_refused(keys: tuple[bytes | None, bytes | None]) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        joining = [pool.submit(Mesh, exchange, rank, keys[rank]) for rank, exchange in enumerate(exchanges(2))]
        for rank, mesh in enumerate(joining):
            with pytest.raises(
                MismatchError, match=f"rank {rank}: COLLECTIVES_KEY is set .* not on rank {keys.index(None)}"
            ):
                mesh.result(20)


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.close()


def test_ranks_open_channels_to_each_other_in_any_order(meshes: Meshes) -> None:
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
        for done in [pool.submit(opens, mesh) for mesh in meshes(4)]:
            done.result(20)


def test_ranks_of_one_host_listen_on_loopback_alone(meshes: Meshes) -> None:
    ranks = meshes(2, KEY)
    assert {host for mesh in ranks for host, _ in mesh.addresses} == {network.LOOPBACK}


def test_a_rank_that_fails_to_join_listens_no_more() -> None:
    """Also while its exception is kept: a peer that dials is refused, and does not wait for an answer."""
    said: list[Any] = []

    def exchange(value: Any) -> list[Any]:
        said.append(value)
        if len(said) == 2:
            raise ZeroDivisionError
        return [value]

    with pytest.raises(ZeroDivisionError) as kept:
        Mesh(exchange, 0, None)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(said[1])
    assert kept


def test_connections_that_nobody_awaits_are_served(meshes: Meshes) -> None:
    ranks = meshes(2, KEY)
    links = [Links(mesh, "group", range(2), 10) for mesh in ranks]
    arrived: concurrent.futures.Future[int] = concurrent.futures.Future()
    early = links[0].dial(1, "post")
    links[1].serve("post", lambda peer, sock: arrived.set_result(peer))
    assert arrived.result(10) == 0
    early.close()


def test_connections_are_taken_while_others_begin_to_be_served() -> None:
    inbox, served = Inbox("job", 0), []

    class Channel(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            taken = inbox.take(1, "words", 0.0)  # as another thread does between two steps of `serve`
            if taken is not None:
                taken.close()
            return super().__eq__(other)

    for peer, channel in ((1, "words"), (1, Channel("post")), (2, "post")):
        inbox._arrived[peer, channel] = socket.socket()

    def serve(peer: int, sock: socket.socket) -> None:
        sock.close()
        served.append(peer)

    inbox.serve("post", serve)
    assert served == [1, 2]


def test_a_rank_that_has_ended_and_one_that_does_not_come_are_named(
    monkeypatch: pytest.MonkeyPatch, meshes: Meshes
) -> None:
    ranks = meshes(2, KEY)
    monkeypatch.setattr("collectives.transport.tcp.mesh._REFUSED_WITHIN", 0.1)
    with pytest.raises(CollectiveTimeoutError, match=r"rank 0: waited 0.1 s for a connection from rank 1 on"):
        ranks[0].open(1, "words", 0.1)
    ranks[0].close()
    with pytest.raises(RankFailedError, match=r"rank 1: rank 0 on .* has ended: no process listens at 127\.0\.0\.1:"):
        ranks[1].open(0, "words", 10)


def test_a_dial_is_bounded_where_the_network_s_thread_stands_still(
    monkeypatch: pytest.MonkeyPatch, meshes: Meshes
) -> None:
    monkeypatch.setattr("collectives.transport.tcp.mesh.DIAL_WITHIN", 0.01)
    ranks, gate = meshes(2), threading.Event()
    ranks[1].service.call(gate.wait, 20)
    with pytest.raises(CollectiveTimeoutError, match=r"rank 1: waited 0.05 s for a connection to rank 0 on "):
        ranks[1].dial(0, "words", 0.05)
    gate.set()


def test_the_check_of_a_wait_ends_it(meshes: Meshes) -> None:
    ranks = meshes(2, KEY)

    def fails() -> None:
        raise RankFailedError("rank 1 has failed")

    with pytest.raises(RankFailedError, match="rank 1 has failed"):
        ranks[0].open(1, "words", 10, fails)


def test_another_key_is_refused_on_both_sides(service: Service) -> None:
    admitted: list[bytes] = []
    server = Listener(service, network.LOOPBACK, 0, KEY, lambda hello, sock: admitted.append(hello))
    with pytest.raises(TransportError, match="has refused this connection: its key is different"):
        service.run(dial(service, *server.address, make_key(), b"hello"), 10)
    service.run(dial(service, *server.address, KEY, b"mine"), 10).close()
    assert admitted == [b"mine"]
    server.close()


def test_a_listener_that_ends_refuses_nobody(service: Service) -> None:
    """A rank that gives up `init` closes its listener while others dial: they must look for its notice, or try again,
    and not take the end for a refusal of their key."""
    listening = Listener(service, "127.0.0.1", 0, KEY, lambda hello, sock: sock.close())
    with socket.create_connection(listening.address, timeout=10) as dialling:
        assert dialling.recv(64)
        listening.close()
        with pytest.raises(ConnectionResetError):
            dialling.recv(64)


def test_a_listener_of_another_kind_is_named(service: Service) -> None:
    with socket.create_server((network.LOOPBACK, 0)) as other:
        dialling = service.start(dial(service, *other.getsockname()[:2], KEY, b"hello"))
        sock, _ = other.accept()
        with sock:
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            with pytest.raises(TransportError, match="is not collectives"):
                dialling.wait(10)
                dialling.result()


def test_a_listener_that_does_not_hold_the_key_is_refused(service: Service) -> None:
    """It says all that a listener says, in place of a rank."""
    with socket.create_server((network.LOOPBACK, 0)) as other:
        dialling = service.start(dial(service, *other.getsockname()[:2], KEY, b"hello"))
        sock, _ = other.accept()
        with sock:
            sock.sendall(Verification(KEY).greeting)
            assert sock.recv(71, socket.MSG_WAITALL)
            sock.sendall(os.urandom(32))
            with pytest.raises(TransportError, match="does not have this job's key"):
                dialling.wait(10)
                dialling.result()


def connected(address: tuple[str, int], source: str) -> socket.socket:
    """A connection that has been greeted, and says nothing."""
    sock = socket.create_connection(address, 10, (source, 0))
    greeted(sock)
    return sock


def greeted(sock: socket.socket) -> bytes:
    """What a listener says first; fewer bytes if the connection ends."""
    data = b""
    with suppress(ConnectionError):
        while len(data) < 46 and (part := sock.recv(46 - len(data))):
            data += part
    return data


def proof_of(greeting: bytes, hello: bytes) -> bytes:
    """What the side that dials answers."""
    theirs, mine = greeting[-32:], bytes(32)
    proof = hmac.digest(KEY, b"dials\0" + theirs + mine + hello, "sha256")
    return mine + struct.pack("<H", len(hello)) + hello + proof


def test_a_crowd_pushes_out_none_but_its_own(service: Service) -> None:
    """However slow a process of the job is."""
    server = Listener(service, "127.0.0.1", 0, KEY, lambda hello, sock: sock.close())
    slow = socket.create_connection(server.address, 10)
    greeting = greeted(slow)
    crowd = [connected(server.address, "127.0.0.2") for _ in range(3 * MOST_UNPROVED)]
    slow.sendall(proof_of(greeting, b"mine"))
    assert len(slow.recv(100)) == 32  # the listener's own proof: it has let this one in
    for sock in (slow, *crowd):
        sock.close()
    server.close()


def test_a_flood_leaves_time_for_what_else_the_service_does(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Listener(service, "127.0.0.1", 0, KEY, lambda hello, sock: sock.close())
    turns, stopped, ready = [0], threading.Event(), threading.Event()
    accepted_in: list[int] = []

    def turn() -> None:
        turns[0] += 1
        if not stopped.is_set():
            service.loop.call_soon(turn)

    def verification(key: bytes) -> Verification:
        accepted_in.append(turns[0])
        return Verification(key)

    monkeypatch.setattr(listener, "Verification", verification)
    service.call(ready.wait)
    service.call(turn)
    crowd = [socket.create_connection(server.address, 10) for _ in range(20)]
    ready.set()
    assert all(len(greeted(sock)) == 46 for sock in crowd)
    stopped.set()
    assert len(set(accepted_in)) == 20, f"connections were accepted in the turns {accepted_in} of the loop"
    for sock in crowd:
        sock.close()
    server.close()


def test_a_rank_whose_connections_are_dropped_dials_until_it_gets_in(
    monkeypatch: pytest.MonkeyPatch, meshes: Meshes
) -> None:
    monkeypatch.setattr("collectives.transport.tcp.mesh._REFUSED_WITHIN", 0.0)
    monkeypatch.setattr("collectives.transport.tcp.mesh._ANSWER_WITHIN", 0.0)
    ranks = meshes(2, KEY)
    with socket.create_server(("127.0.0.1", 0)) as flooded:
        flooded.settimeout(20)
        ranks[1].addresses = [flooded.getsockname()[:2], ranks[1].addresses[1]]
        dialling = ranks[1].service.start(ranks[1].reach(0, "words", 60.0))
        for when in ("before the greeting", "after it", "after the proof"):
            sock, _ = flooded.accept()
            verification = Verification(KEY)
            if when != "before the greeting":
                sock.sendall(verification.greeting)
            if when == "after the proof":
                take(sock, verification)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        sock, _ = flooded.accept()
        with sock:
            verification = Verification(KEY)
            sock.sendall(verification.greeting)
            take(sock, verification)
            sock.sendall(verification.proof)
            dialling.wait(10)
            dialling.result().close()


def take(sock: socket.socket, verification: Verification) -> None:
    """Have a proof verified."""
    while verification.missing:
        verification.take(sock.recv(verification.missing))


def test_a_rank_that_drops_every_connection_is_named(monkeypatch: pytest.MonkeyPatch, meshes: Meshes) -> None:
    ranks = meshes(2, KEY)

    async def dropped(*arguments: object) -> socket.socket:
        raise ConnectionResetError("reset")

    monkeypatch.setattr("collectives.transport.tcp.mesh.dial", dropped)
    with pytest.raises(TransportError, match=r"rank 1: rank 0 on .* has dropped every connection .* for 0\.1 s"):
        ranks[1].dial(0, "words", 0.1)


def receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(4096)
    except ConnectionError:
        return b""


def test_a_connection_that_is_passed_on_to_another_rank_is_closed(meshes: Meshes) -> None:
    """Proofs of both sides do not help somebody who listens in place of a rank, and passes on what it hears."""
    ranks = meshes(3, KEY)
    ranks[2].addresses = [ranks[0].addresses[0]] * 2 + [ranks[2].addresses[2]]
    with ranks[2].dial(1, "words", 10) as passed_on:
        passed_on.settimeout(10)
        assert passed_on.recv(1) == b""
    assert ranks[0].inbox.take(2, "words", 0.0) is None


def test_a_connection_that_was_dialled_elsewhere_is_closed(meshes: Meshes) -> None:
    """Somebody who has a rank dial another address passes on what it hears, proofs of both sides and all."""
    ranks = meshes(2, KEY)
    with socket.create_server(("127.0.0.1", 0)) as relay:
        address, ranks[1].addresses = ranks[1].addresses[0], [relay.getsockname(), ranks[1].addresses[1]]
        passing_on = threading.Thread(target=pass_on, args=(relay, address))
        passing_on.start()
        with ranks[1].dial(0, "words", 10) as passed_on:
            passed_on.settimeout(10)
            assert passed_on.recv(1) == b""
        passing_on.join(10)
    assert ranks[0].inbox.take(1, "words", 0.0) is None


def pass_on(relay: socket.socket, address: tuple[str, int]) -> None:
    """Pass one connection on to an address, both ways, until it ends there."""
    near, _ = relay.accept()
    with near, socket.create_connection(address) as far:
        ends = {near: far, far: near}
        while True:
            for source in select.select(list(ends), [], [], 10)[0]:
                data = source.recv(4096)
                if not data:
                    return
                ends[source].sendall(data)


def test_a_forked_child_holds_no_connection_open(meshes: Meshes) -> None:
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


def test_an_interface_is_named_by_name_address_or_network() -> None:
    loopback = next(name for name, known in network.addresses().items() if network.LOOPBACK in known)
    for wanted in (loopback, network.LOOPBACK, "127.0.0.0/8", f"none, {loopback}"):
        assert network.address_of(wanted) == network.LOOPBACK
    if HAS_IPV6:
        assert network.address_of("fd12:3456::/32, ::1/128") == network.address_of("::1") == "::1"
    with pytest.raises(InvalidArgumentError, match=r"network interface 'ib7': expected the name, address or network"):
        network.address_of("ib7")


def test_loopback_leads_to_no_other_host() -> None:
    elsewhere = ["elsewhere", "elsewhere", {"eth0": ["192.0.2.7"]}, "", "", True]
    with pytest.raises(InvalidArgumentError, match=r"rank 0: .*=127\.0\.0\.0/8: 127\.0\.0\.1 is loopback"):
        Mesh(lambda value: [value, elsewhere], 0, KEY, interface="127.0.0.0/8")


def test_containers_that_share_the_network_of_their_machine_meet_at_loopback(meshes: Meshes) -> None:
    """They count as hosts, because they share no memory, and each has the other's addresses."""

    def told(rank: int, exchange: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
        def tell(value: Any) -> list[Any]:
            inside = isinstance(value[0], str) and len(value) > 2
            return exchange([f"container{rank}", *value[1:]] if inside else value)

        return tell

    ranks = meshes(2, KEY, seen=told)
    assert ranks[0].hosts == ("container0", "container1")
    assert {host for host, _ in ranks[0].addresses} == {network.LOOPBACK}
    ranks[1].dial(0, "words", 10).close()


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


@needs_ipv6
def test_ranks_reach_each_other_by_ipv6(monkeypatch: pytest.MonkeyPatch, meshes: Meshes) -> None:
    monkeypatch.setattr("collectives.transport.tcp.mesh._REFUSED_WITHIN", 0.0)
    ranks = meshes(2, KEY, interface="::1")
    assert {host for host, _ in ranks[0].addresses} == {"::1"}
    near = ranks[1].dial(0, "words", 10)
    far = ranks[0].open(1, "words", 10)
    near.sendall(b"hello")
    far.setblocking(True)
    assert far.recv(100) == b"hello"
    near.close()
    far.close()
    ranks[0].close()
    with pytest.raises(RankFailedError, match=r"no process listens at \[::1\]:\d+ "):
        ranks[1].dial(0, "words", 10)


@needs_ipv6
def test_each_address_of_a_name_is_tried(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host's name may lead to an address at which a process does not listen."""
    admitted: list[bytes] = []
    server = Listener(service, "127.0.0.1", 0, KEY, lambda hello, sock: admitted.append(hello))
    found = [*socket.getaddrinfo("::1", 0, type=socket.SOCK_STREAM), *socket.getaddrinfo("127.0.0.1", 0)]
    port = server.address[1]
    of_name = [(*info[:2], 0, "", (info[4][0], port, *info[4][2:])) for info in found[:2]]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: of_name)
    service.run(dial(service, "node1", port, KEY, b"mine"), 10).close()
    assert admitted == [b"mine"]
    server.close()


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
