"""The driver of an elastic job in one of its members: whom it welcomes, whom it takes for dead, and its successors."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from collectives.launch.elastic_driver import Driver
from collectives.launch.elastic_hosts import AnyHosts
from collectives.launch.elastic_terms import Rules, Set
from collectives.transport.backoff import poll
from collectives.transport.stores import event_log
from collectives.worlds.elastic_owner import Heard, Owner

PATIENCE = 20.0
OWN = ["127.0.0.1", 1]


class Server:
    """The store, as its owner sees it."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self.forgotten: set[str] = set()
        self.closed = threading.Event()
        self._news = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._news:
            self._values[key] = value
            self._news.notify_all()

    def drop(self, prefix: str) -> None:
        with self._news:
            self._values = {key: value for key, value in self._values.items() if not key.startswith(prefix)}

    def forget(self, key: str) -> None:
        with self._news:
            self.forgotten.add(key)
            self._values.pop(key, None)

    def close(self) -> None:
        self.closed.set()

    def get(self, key: str) -> Any:
        with self._news:
            assert self._news.wait_for(lambda: key in self._values, PATIENCE), f"no {key} in {self._values}"
            return json.loads(self._values[key])

    def has(self, key: str) -> bool:
        return key in self._values


class Members:
    """What members say to an owner, and what they are answered."""

    def __init__(self, owner: Owner, heard: Heard, server: Server) -> None:
        self.owner, self._heard, self._server = owner, heard, server
        self._questions: dict[int, int] = {}

    def hear(self, key: str, value: Any = None) -> None:
        self._heard.put((f"elastic/{key}", None if value is None else json.dumps(value).encode()))

    def knock(self, token: str, rank: int | None, size: int | None) -> None:
        place = {"host": f"host of {token}", "address": OWN if rank == 0 else [token, 2]}
        self.hear(f"knock/{token}", {"rank": rank, "size": size, **place})

    def welcomed(self, token: str) -> Any:
        return self._server.get(f"elastic/welcome/{token}")

    def is_welcomed(self, token: str) -> bool:
        return self._server.has(f"elastic/welcome/{token}")

    def say(self, member: int, what: str, generation: int = 0) -> None:
        self._questions[member] = question = self._questions.get(member, 0) + 1
        thing = {"what": what, "generation": generation, "host": "somewhere", "address": [str(member), 2]}
        self.hear(f"said/{member}/{question}", thing)

    def answer(self, member: int) -> Any:
        return self._server.get(f"elastic/answer/{member}/{self._questions[member]}")

    def event(self, number: int) -> Any:
        return self._server.get(f"elastic/event/{number}")

    def ends(self, member: int) -> None:
        """Its connection ends, on which it has beaten."""
        self.hear(f"beat/{member}")


@pytest.fixture
def make() -> Iterator[Callable[..., Members]]:
    def make(begin: Callable[[Owner], None], **rules: Any) -> Members:
        heard: Heard = SimpleQueue()
        server = Server()
        rules = {"grace": PATIENCE, "elastic_timeout": 600.0, "majority": True, **rules}
        owner = Owner(server, heard, OWN, rules)  # type: ignore[arg-type]
        begin(owner)
        threading.Thread(target=owner.run, daemon=True).start()
        return Members(owner, heard, server)

    yield make


def generation_1(make: Callable[..., Members], size: int, **rules: Any) -> Members:
    members = make(lambda owner: owner.begin(size), **rules)
    for rank in range(size):
        members.knock(f"rank{rank}", rank, size)
        assert members.welcomed(f"rank{rank}") == {"member": rank}
        members.say(rank, "here")
    for rank in range(size):
        assert members.answer(rank)["members"] == list(range(size))
        members.say(rank, "runs")
    return members


def test_newcomers_wait_for_the_first_generation(make: Callable[..., Members]) -> None:
    members = make(lambda owner: owner.begin(2))
    members.knock("new", None, None)
    members.knock("wrong", 1, 3)
    assert "the job begins with 3 ranks according to rank 1 on host of wrong" in members.welcomed("wrong")["refused"]
    for rank in (1, 0):
        assert not members.is_welcomed("new")
        members.knock(f"rank{rank}", rank, 2)
        members.say(rank, "here")
    roll = members.answer(0)
    assert roll["members"] == [0, 1] and roll["addresses"] == [OWN, ["rank1", 2]] and roll["unused"] == 2
    assert members.welcomed("new") == {"member": 2}
    members.say(2, "here")
    assert members.answer(2)["alone"]
    members.knock("again", 1, 2)
    assert members.welcomed("again") == {"member": 3}


def test_who_has_closed_its_connection_is_left_out_and_told_when_it_comes_again(make: Callable[..., Members]) -> None:
    members = generation_1(make, 3)
    members.ends(2)
    for rank in (0, 1):
        members.say(rank, "ended", 1)
    assert members.answer(0)["members"] == [0, 1]
    members.say(2, "ended", 1)
    assert "continues without member 2, because it closed its connection" in members.answer(2)["give_up"]


def test_silence_is_a_death(make: Callable[..., Members]) -> None:
    members = generation_1(make, 2, grace=0.2, majority=False)
    members.say(0, "ended", 1)
    assert members.answer(0)["members"] == [0]
    members.say(1, "ended", 1)
    assert "no sign of life for 0.2 s" in members.answer(1)["give_up"] or "in time" in members.answer(1)["give_up"]


def test_a_successor_goes_on_from_the_roll(make: Callable[..., Members]) -> None:
    roll = {
        "generation": 4,
        "members": [0, 2, 3],
        "born": [1, 1, 4],
        "hosts": ["a", "b", "c"],
        "addresses": [["0", 2], OWN, ["3", 2]],
        "unused": 5,
    }
    members = make(lambda owner: owner.resume(roll, {0: "does not answer"}))
    members.say(2, "ended", 4)
    # Member 3 has seen a later generation, which the dead owner has formed, and so has newcomer 4.
    members.say(3, "ended", 5)
    members.say(4, "ended", 5)
    answer = members.answer(3)
    assert answer["generation"] > 5 and answer["members"][:2] == [2, 3] and answer["born"][:2] == [1, 4]
    members.knock("new", None, None)
    assert members.welcomed("new") == {"member": 105}


def test_who_comes_where_the_job_is_not_any_more_is_sent_there(make: Callable[..., Members]) -> None:
    members = make(lambda owner: owner.begin(3))
    members.knock("rank0", 0, 3)
    members.say(0, "here")
    members.knock("new", None, None)
    members.hear("moved/to", ["node2", 77])
    for answer in (members.answer(0), members.welcomed("new")):
        assert answer == {"moved": ["node2", 77]}
    members.knock("late", 1, 3)
    assert members.welcomed("late") == {"moved": ["node2", 77]}


def test_an_owner_that_was_stopped_sends_newcomers_to_where_the_others_are(make: Callable[..., Members]) -> None:
    """And does not keep them, nor go there itself as long as most are with it."""
    members = generation_1(make, 3)
    members.hear("moved/to", ["node2", 77])
    members.knock("first", None, None)
    assert members.welcomed("first") == {"member": 3}
    members.say(3, "here")
    assert members.answer(3)["alone"]
    members.say(3, "ready")
    for rank in (1, 2):
        members.ends(rank)
    members.say(0, "ended", 1)

    def is_sent() -> bool:
        members.hear("moved/to", ["node2", 77])  # as it is set again and again
        return members._server.has("elastic/answer/0/3")

    assert poll(is_sent, PATIENCE)
    members.knock("second", None, None)
    for answer in (members.answer(0), members.answer(3), members.welcomed("second")):
        assert answer == {"moved": ["node2", 77]}


def test_the_failure_of_a_first_rank_ends_the_job_where_all_are_needed(make: Callable[..., Members]) -> None:
    members = make(lambda owner: owner.begin(3), smallest=3)
    members.knock("early", None, None)
    for rank in (0, 1):
        members.knock(f"rank{rank}", rank, 3)
        members.say(rank, "here")
    members.ends(1)
    assert "members 1 died before" in members.answer(0)["give_up"]
    assert "refused" in members.welcomed("early")


def test_a_first_rank_that_fails_is_left_out_and_comes_back_as_a_newcomer(make: Callable[..., Members]) -> None:
    members = make(lambda owner: owner.begin(3))
    for rank in (0, 1):
        members.knock(f"rank{rank}", rank, 3)
        members.say(rank, "here")
    members.ends(1)
    assert members.event(1)["event"] == "died"
    members.knock("again", 1, 3)
    members.knock("rank2", 2, 3)
    members.say(2, "here")
    assert members.answer(0)["members"] == members.answer(2)["members"] == [0, 2]
    assert members.welcomed("again") == {"member": 3}


@pytest.mark.parametrize(
    ("size", "living", "newcomers", "goes_on"),
    [(3, 2, 0, True), (3, 1, 0, False), (3, 1, 5, False), (2, 1, 0, False), (2, 1, 1, True), (4, 2, 0, False)],
)
def test_a_generation_needs_a_majority(size: int, living: int, newcomers: int, goes_on: bool) -> None:
    driver = Driver(Rules(majority=True, grace=1.0, elastic_timeout=50.0), 0.0, lambda: 0.0, AnyHosts())
    for number in range(size):
        driver.came(number, "host", 0.0)
    for number in range(size):
        driver.said(number, 1, {"what": "here"}, 0.0)
        driver.said(number, 2, {"what": "runs"}, 0.0)
    for number in range(size, size + newcomers):
        driver.came(number, "host", 0.0)
        driver.said(number, 1, {"what": "here"}, 0.0)
        driver.said(number, 2, {"what": "ready"}, 0.0)
    for number in range(living):
        driver.said(number, 3, {"what": "ended"}, 1.0)
    driver.tick(2.5)  # who has not ended the generation is killed
    driver.tick(9.0)
    assert (driver.generation, len(driver.ranks)) == ((2, living + newcomers) if goes_on else (1, size))
    answers = [action for action in driver.tick(60.0) if isinstance(action, Set) and "give_up" in action.value]
    assert len(answers) == (0 if goes_on else living + newcomers)
    if not goes_on:
        assert f"{living} of the {size} members of generation 1 are no majority" in str(answers[0].value)


ODD = [
    ("x", b""),
    ("elastic/knock", b"{}"),
    ("elastic/beat/x", b""),
    ("elastic/said/0/1/2", b"{"),
    ("elastic/said/0", b"{}"),
    ("elastic/said/0/9", b"{}"),
    ("elastic/said/0/9", b'["here"]'),
    ("elastic/knock/odd", b'{"rank": 0}'),
    ("elastic/knock/odd", b"\xff"),
    ("elastic/said/" + "9" * 5000 + "/1", b"{}"),
]


def test_what_no_member_says_is_left_out(make: Callable[..., Members]) -> None:
    members = make(lambda owner: owner.begin(2))
    for key, value in ODD:
        members._heard.put((key, value))
    for rank in range(2):
        members.knock(f"rank{rank}", rank, 2)
        members.say(rank, "here")
    assert members.answer(1)["members"] == [0, 1]


def test_an_owner_that_cannot_decide_serves_no_more(
    make: Callable[..., Members], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the others turn to a successor."""
    members = generation_1(make, 2)

    def fail(now: float) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(members.owner._driver, "tick", fail)
    assert members._server.closed.wait(PATIENCE)


def test_the_store_forgets_what_was_answered(make: Callable[..., Members]) -> None:
    members = generation_1(make, 2)
    members.knock("new", None, None)
    assert members.welcomed("new") == {"member": 2}
    members.say(2, "here")
    assert members.answer(2)["alone"]
    forgotten = members._server.forgotten
    assert {"elastic/knock/new", "elastic/welcome/new", "elastic/welcome/rank1"} <= forgotten
    members.ends(2)
    members.say(0, "ended", 1)
    members.say(1, "ended", 1)
    members.answer(0)
    assert poll(lambda: "elastic/beat/2" in forgotten, PATIENCE)


def test_the_oldest_events_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "KEPT", 3)
    server = Server()
    log = event_log.EventLog(server)  # type: ignore[arg-type]
    for number in range(1, 6):
        log.append(b"%d" % number)
    assert server._values == {
        "elastic/events": b"5",
        **{f"elastic/event/{number}": b"%d" % number for number in (3, 4, 5)},
    }
