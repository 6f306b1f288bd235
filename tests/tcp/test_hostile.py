"""Hostile connections to every port of a running job; `python -m tests.trials.hostile` makes 10,000 of them."""

from __future__ import annotations

import gc
import socket
from datetime import timedelta
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from collectives.base.config import Config
from collectives.transport.stores.store import Store, StoreServer
from collectives.transport.tcp import listener
from collectives.transport.tcp.authentication import Verification, make_key
from collectives.transport.tcp.service import Service
from tests.support.launching.processes import KEY
from tests.trials import tampering
from tests.trials.hostile import ATTACKS, Attacker, Refusal, besiege, record, start_job


def test_nobody_gets_into_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "PROVE_WITHIN", 1.0)  # the ranks inherit it
    report = besiege(start_job(2, Config(timeout=30, local_size=1)), KEY, 300)
    assert report.counts.keys() == ATTACKS.keys() and report.counts.total() == 300


@pytest.mark.parametrize(
    "name", ["none", "words, a bit", "words, pickle", "heart, invented", "store, old", "data, a bit"]
)
def test_what_is_changed_between_two_ranks_is_not_used(name: str, tmp_path: Path) -> None:
    """`python -m tests.trials.tampering` has more of it."""
    attack = tampering.ATTACKS[name]
    print(tampering.attacked(name, partial(tampering.on_path, attack, tmp_path), tmp_path, attack.borne))


def store_with_service(server: StoreServer) -> Store:
    return Store(*server.address, KEY, 20, Service())


@pytest.mark.parametrize("kind", ["torch's", "own"])
def test_who_reaches_the_store_gets_between_no_ranks(kind: str, tmp_path: Path) -> None:
    """It says where rank 0 listens, and is not believed; it was, and relayed connections that were then trusted."""
    service = Service()
    try:
        if kind == "own":
            server = StoreServer(service, "127.0.0.1", 0, KEY)
            store_of: Any = partial(store_with_service, server)
        else:
            torch = pytest.importorskip("torch.distributed")
            limit = timedelta(seconds=20)
            served = torch.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
            store_of = partial(torch.TCPStore, "127.0.0.1", served.port, None, False, limit, wait_for_workers=False)
        said = tampering.attacked("an address", partial(tampering.through_store, tmp_path, store_of), tmp_path)
        assert "offer/0 in the store at which the ranks meet (an abused store) was not signed" in said
    finally:
        service.close()


def test_refused_connections_leave_no_cycles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory stays as it is under a flood, although the garbage collector comes seldom."""
    monkeypatch.setattr(listener, "PROVE_WITHIN", 0.3)
    service, key = Service(), make_key()
    server = listener.Listener(service, "127.0.0.1", 0, key, lambda hello, sock: sock.close())
    try:
        attacker = Attacker(
            [server.address],
            Random(0),
            [record(service, server.address, key, b"recorded")],
            tmp_path / "canary",
        )
        gc.collect()
        gc.disable()
        for _ in range(100):
            attacker.attack()
        attacker.finish()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert attacker.counts.keys() == ATTACKS.keys()
        assert not [one for one in gc.garbage if isinstance(one, socket.socket | BaseException | Verification)]
    finally:
        gc.set_debug(0)
        gc.enable()
        gc.garbage.clear()
        server.close()
        service.close()


def test_who_gets_in_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is proved here: replays are let in, and the attacker says so."""
    service, key = Service(), make_key()
    monkeypatch.setattr("hmac.compare_digest", lambda one, other: True)
    server = listener.Listener(service, "127.0.0.1", 0, key, lambda hello, sock: sock.close())
    try:
        recorded = [record(service, server.address, key, b"recorded")]
        attacker = Attacker([server.address], Random(0), recorded, tmp_path / "canary")
        monkeypatch.setattr("tests.trials.hostile.ATTACKS", {"replay": ATTACKS["replay"]})
        with pytest.raises(Refusal, match=r"replay at .*: got 32 bytes beyond greeting and nonce"):
            attacker.attack()
    finally:
        server.close()
        service.close()
