"""The hosts of an elastic job, as a script prints them: whatever it does, the launcher goes on."""

from __future__ import annotations

import queue
import time

import pytest

from collectives.launch import discovery
from collectives.launch.discovery import Discovery, Found, run_script
from collectives.launch.hosts import Host


def test_hosts_and_slots() -> None:
    found = run_script("printf 'a:2\\n\\n b \\n[::1]:3\\n'; echo warning >&2", 4)
    assert found == (Host("a", 2), Host("b", 4), Host("[::1]", 3))
    assert run_script("true", 1) == ()
    assert run_script("printf 'a:0\\nb:1\\n[::1]:0 # drained\\nc slots = 00\\nd0\\n'", 4) == (
        Host("b", 1),
        Host("d0", 4),
    )


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo a:1; echo no such thing >&2; exit 3", "the script ended with exit code 3: no such thing"),
        ("/no/such/script", "the script ended with exit code 127"),
        ("echo 'a:x'", "the script printed something other than hosts: line:1: expected 'host slots=4' or 'host:4'"),
        ("printf 'a\\na:2\\n'", "the script printed something other than hosts: line: expected each host once"),
        ("head -c 200000000 /dev/urandom", "the script printed more than 1 MiB"),
        ("kill -9 $$", "the script ended with exit code -9"),
    ],
)
def test_a_problem_is_named(script: str, problem: str) -> None:
    found = run_script(script, 1)
    assert isinstance(found, str) and found.startswith(problem)


@pytest.mark.parametrize("script", ["sleep 60", "sleep 60 & sleep 60", "exec >&- 2>&-; sleep 60"])
def test_a_script_that_hangs_is_ended(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "RUN_WITHIN", 0.2)
    begin = time.monotonic()
    assert run_script(script, 1) == "the script did not end within 0.2 s"
    assert time.monotonic() - begin < 20


def test_a_function_that_raises_is_told_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "EVERY", 0.0)
    told: queue.Queue[Found] = queue.Queue()
    failures = iter([KeyError("NodeID"), OSError("no route")])

    def look() -> Found:
        for failure in failures:
            raise failure
        return (Host("a"),)

    watching = Discovery(look, told.put)
    try:
        words = ["it raised KeyError: 'NodeID'", "it raised OSError: no route"]
        assert [told.get(timeout=10) for _ in range(3)] == [*words, (Host("a"),)]
    finally:
        watching.close()
    watching._thread.join(10)


def test_news_alone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "EVERY", 0.0)
    looks = iter([(Host("a"),), (Host("a"),), "broken", "broken", (Host("a"),), (Host("b"),)])
    told: queue.Queue[Found] = queue.Queue()
    done: queue.Queue[None] = queue.Queue()

    def look() -> Found:
        found = next(looks, None)
        if found is None:
            done.put(None)
            return (Host("b"),)
        return found

    watching = Discovery(look, told.put)
    done.get(timeout=10)
    watching.close()
    watching._thread.join(10)
    assert not watching._thread.is_alive()
    assert [told.get(timeout=10) for _ in range(4)] == [(Host("a"),), "broken", (Host("a"),), (Host("b"),)]
    assert told.empty()
