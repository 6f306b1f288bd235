"""Calling a function on ranks: what is looked at before any is started; and ``collectives.run``, which is the
launcher's."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import site
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import collectives
from collectives import launch
from collectives.base.errors import InvalidArgumentError, MissingDependencyError
from collectives.launch import api, run


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)


@pytest.mark.parametrize(
    ("options", "np", "message"),
    [
        (["--bogus"], 2, "unknown option '--bogus'"),
        (["-H", "h1:1"], 2, "-np 2: the hosts have slots for only 1 of these"),
        (["--cycle-time-ms=x"], 2, "--cycle-time-ms"),
        ([], 0, "expected a number of ranks"),
    ],
)
def test_options_are_looked_at(options: list[str], np: int, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        run(len, ("abc",), np=np, options=options)


def test_a_result_stands_at_its_ranks_place_whoever_is_lost(tmp_path: Path) -> None:
    """Members 4, 1 and 3 were ranks 0 to 2 at last; 1 was lost near the end, 2 had finished before."""
    events = [
        {"event": "generation", "members": [1, 2, 4]},
        {"event": "generation", "members": [4, 1, 3]},
        {"event": "died", "member": 1},
        {"event": "done", "failed": []},
    ]
    (tmp_path / api.EVENTS).write_text("".join(f"{json.dumps(event)}\n" for event in events))
    for member in (2, 3, 4):
        (tmp_path / api.RESULT.format(member)).write_bytes(pickle.dumps(f"of {member}"))
    assert api.of_elastic_job(tmp_path, 0) == ["of 4", None, "of 3", "of 2"]


def test_what_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="cannot pickle the function or its arguments"):
        run(len, (threading.Lock(),))


def test_without_cloudpickle_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(MissingDependencyError, match="pip install cloudpickle"):
        run(len, ("abc",))


def test_the_ranks_search_where_the_program_does_but_for_its_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    library = os.path.dirname(os.__file__)
    own = [library, os.path.join(library, "lib-dynload"), *site.getsitepackages()]
    monkeypatch.setattr(sys, "path", ["", *own, str(tmp_path / "gone"), os.sep, ""])
    assert api.search_path() == [str(tmp_path), os.sep]


@pytest.mark.parametrize(
    ("numbers", "ranks"), [({}, 1), ({"np": 2}, 2), ({"num_proc": 3}, 3), ({"np": 4, "num_proc": 4}, 4), ({"np": 0}, 0)]
)
def test_the_number_of_ranks_has_two_names(
    numbers: dict[str, int], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(launch, "run", lambda *args, **kwargs: seen.append((args, kwargs)) or ["returned"])
    assert collectives.run(len, ["abc"], timeout=5, **numbers) == ["returned"]
    assert seen == [((len, ["abc"], None), {"np": ranks, "options": (), "executable": None, "timeout": 5})]


def test_elastic_jobs_need_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(launch, "run", lambda *args, **kwargs: seen.append(kwargs))
    collectives.run(len, ["abc"], min_np=1, max_np=3)
    collectives.run(len, ["abc"], np=2, host_discovery_script="find")
    names = ("np", "min_np", "max_np", "host_discovery_script")
    assert [[kwargs.get(name) for name in names] for kwargs in seen] == [[None, 1, 3, None], [2, None, None, "find"]]


def test_two_numbers_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="np=2 and num_proc=3"):
        collectives.run(len, ["abc"], np=2, num_proc=3)


def test_nothing_that_the_launcher_takes_is_missing() -> None:
    assert set(inspect.signature(launch.run).parameters) | {"num_proc"} == set(
        inspect.signature(collectives.run).parameters
    )
