"""What the environment says to a member of an elastic job that no launcher of ours has started."""

from __future__ import annotations

import json
import threading
from asyncio import CancelledError
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any

import pytest

from collectives.base import logging
from collectives.base.config import Config, unknown
from collectives.base.errors import InvalidArgumentError, TransportError
from collectives.base.exclusion import attempted
from collectives.transport.backoff import poll
from collectives.transport.stores import event_log
from collectives.transport.stores.store import StoreServer
from collectives.transport.tcp.service import Service
from collectives.worlds import elastic_members
from collectives.worlds.elastic_members import from_environment

KEY = "ab" * 32
BASE = {"COLLECTIVES_ELASTIC": "1", "COLLECTIVES_RENDEZVOUS": "tcp://node1:29400", "COLLECTIVES_KEY": KEY}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (None, None, 1, None, True, 600.0, "")),
        ({"COLLECTIVES_RANK": "1", "COLLECTIVES_SIZE": "3"}, (1, 3, 1, None, True, 600.0, "")),
        ({"COLLECTIVES_SIZE": "3"}, (None, None, 1, None, True, 600.0, "")),
        ({"COLLECTIVES_RANK": "3", "COLLECTIVES_SIZE": "3"}, (None, None, 1, None, True, 600.0, "")),
        (
            {"COLLECTIVES_MIN_SIZE": "2", "COLLECTIVES_MAX_SIZE": "4", "COLLECTIVES_ELASTIC_TIMEOUT": "9"},
            (None, None, 2, 4, True, 9.0, ""),
        ),
        ({"COLLECTIVES_QUORUM": "any"}, (None, None, 1, None, False, 600.0, "")),
    ],
)
def test_settings(variables: dict[str, str], expected: Any) -> None:
    job: Any = from_environment(BASE | variables)
    assert tuple(job._settings) == expected
    assert unknown(BASE | variables) == []
    job._service.close()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("COLLECTIVES_RENDEZVOUS", "", "COLLECTIVES_RENDEZVOUS='': expected tcp://host:port"),
        ("COLLECTIVES_RANK", "one", "COLLECTIVES_RANK='one'"),
        ("COLLECTIVES_MIN_SIZE", "0", "COLLECTIVES_MIN_SIZE='0': expected a number of ranks"),
        ("COLLECTIVES_MAX_SIZE", "many", "COLLECTIVES_MAX_SIZE='many'"),
        ("COLLECTIVES_QUORUM", "half", '"majority" or "any"'),
        ("COLLECTIVES_ELASTIC_TIMEOUT", "soon", "expected a number of seconds"),
    ],
)
def test_what_is_wrong_is_named(name: str, value: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        from_environment(BASE | {name: value})


def test_an_unknown_host_is_waited_for_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    said = threading.Event()

    def await_name(host: str, seconds: float) -> None:
        assert said.wait(20)
        raise OSError("Name or service not known")

    monkeypatch.setattr(elastic_members, "await_name", await_name)
    monkeypatch.setattr(logging, "SAY_EVERY", 0.01)
    monkeypatch.setattr(logging.logger, "warning", lambda *words: said.set())
    job: Any = from_environment(BASE | {"COLLECTIVES_RANK": "1", "COLLECTIVES_SIZE": "2"})
    words = (
        r"rank 1: waited 600 s for the host name in .*//node1:29400 to resolve: Name .* set COLLECTIVES_RENDEZVOUS to"
    )
    with pytest.raises(TransportError, match=words):
        job._listen_at_own_address(Config())
    job._service.close()


def test_the_connection_to_a_former_store_is_closed_once_no_thread_waits_there() -> None:
    service, connected, closed = Service(), threading.Event(), threading.Event()
    server, other = (
        StoreServer(
            service, "127.0.0.1", 0, bytes.fromhex(KEY), lambda *said: connected.set(), lambda key: closed.set()
        )
        for _ in range(2)
    )
    job: Any = from_environment(BASE | {"COLLECTIVES_RENDEZVOUS": f"tcp://127.0.0.1:{server.address[1]}"})
    job._lease, former = 20.0, job._store
    with ThreadPoolExecutor(1) as waiter:
        job.say("here")
        value = waiter.submit(former.get, "later")
        assert poll(lambda: attempted(former._lock, 0.0, bool, 1) is None, 20)  # until it waits
        job._meet_at(*other.address)
        server.set("later", b"value")
        assert value.result(20) == b"value" and closed.wait(20)
        connected.clear()
        job.say("runs")
        assert connected.is_set()
    job._store.close()
    for one in (server, other, service, job._service):
        one.close()


def test_a_successor_does_not_listen_in_the_name_of_another_host() -> None:
    """Newcomers would not find it there: it has to tell rank 0, once that is started again."""
    job: Any = from_environment(BASE | {"COLLECTIVES_RENDEZVOUS": "tcp://192.0.2.1:29400"})
    job._server = job._serve("127.0.0.1", 0)
    try:
        assert not job._listens_at_rendezvous()
    finally:
        job._server.close()
        job._service.close()


@contextmanager
def members(number: int) -> Iterator[list[Any]]:
    """Members of a generation, each of which listens where it would serve the store."""
    jobs: list[Any] = [from_environment(BASE) for _ in range(number)]
    roll = {"members": list(range(number)), "born": [1] * number, "generation": 1, "unused": number}
    try:
        for member, job in enumerate(jobs):
            job.member, job.generation, job._lease = member, 1, 20.0
            job._server = job._serve("127.0.0.1", 0)
            job._announced = job._server.address
        roll |= {"hosts": ["here"] * number, "addresses": [job._announced for job in jobs]}
        for job in jobs:
            job._roll = roll
            job._meet_at(*jobs[0]._announced)
        yield jobs
    finally:
        for job in jobs:
            job._store.close()
            job._service.close()


def test_the_first_member_that_lives_is_turned_to() -> None:
    with members(3) as (first, second, third):
        first._server.close()
        first._service.close()
        assert second._turn(0.0) and second._owner is not None and second._address == second._announced
        assert third._turn(0.0) and third._owner is None and third._address == second._announced


def test_a_member_that_was_stopped_does_not_succeed_while_a_later_one_has() -> None:
    """It would have newcomers wait for a generation that the others have left."""
    with members(3) as (first, second, third):
        first._server.close()
        first._service.close()
        third._succeed(third._roll, {0: "does not answer", 1: "does not answer"})
        assert poll(lambda: "elastic/events" in third._server._values, 20)
        assert second._turn(0.0) and second._owner is None and second._address == third._announced


@pytest.mark.parametrize("how", ["beat", "decide"])
def test_a_member_that_is_not_heard_any_more_does_not_wait(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For ever, that is, as long as the store is served."""

    def fail() -> None:
        raise RuntimeError("can't start new thread")

    with members(2) as (first, second):
        second._store = second._store_at(*first._announced, waits=0.02)
        if how == "beat":
            monkeypatch.setattr(second, "_beat", fail)
        else:
            second._owner = second._make_owner()
            monkeypatch.setattr(second._owner, "_decide", fail)
        threading.Thread(target=second._keep, daemon=True).start()
        with pytest.raises(
            TransportError, match=r"and failed|can no longer send heartbeats: RuntimeError: can't start"
        ):
            second.ready(Config())


def test_a_notice_that_cannot_be_taken_ends_nothing() -> None:
    """The next one may say that the others wait for this member."""
    deaths: SimpleQueue[str] = SimpleQueue()
    with members(2) as (first, second):
        second.on_death = lambda generation, why: deaths.put(f"{generation}: {why}")
        notices = [{"generation": 1}, [], {"generation": 1, "over": "member 0 died", "died": True}]
        for number, notice in enumerate(notices, 1):
            first._server.set(f"elastic/notice/{number}", json.dumps(notice).encode())

        def listen() -> None:
            with suppress(CancelledError):  # the test's end
                second._listen("notice", second._take_notice)

        threading.Thread(target=listen, daemon=True).start()
        assert deaths.get(timeout=20) == "1: member 0 died"


def test_who_is_late_goes_on_with_the_oldest_event_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "KEPT", 2)
    with members(2) as (first, second):
        log = event_log.EventLog(first._server)
        assert second._oldest_event(second._store, 0) == 0
        for number in range(5):
            log.append(b"%d" % number)
        assert poll(lambda: first._server._values.get("elastic/events") == b"5", 20)
        assert [second._oldest_event(second._store, number) for number in (0, 4)] == [3, 4]
