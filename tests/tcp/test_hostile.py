"""Hostile connections to every port of a running job; `python -m tests.hostile` makes 10,000 of them."""

from __future__ import annotations

import gc
import socket
from pathlib import Path
from random import Random

import pytest

from collectives.base.config import Config
from collectives.transport import listener
from collectives.transport.authentication import Verification, make_key
from collectives.transport.service import Service
from tests.hostile import ATTACKS, Attacker, Refusal, besiege, record, start_job
from tests.processes import KEY


def test_nobody_gets_into_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "PROVE_WITHIN", 1.0)  # the ranks inherit it
    report = besiege(start_job(2, Config(timeout=30, local_size=1)), KEY, 300)
    assert report.counts.keys() == ATTACKS.keys() and report.counts.total() == 300


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
        monkeypatch.setattr("tests.hostile.ATTACKS", {"replay": ATTACKS["replay"]})
        with pytest.raises(Refusal, match=r"replay at .*: got 32 bytes beyond greeting and nonce"):
            attacker.attack()
    finally:
        server.close()
        service.close()
