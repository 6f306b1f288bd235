"""The command that runs every GPU check, without a GPU: parts are bounded, leave nothing behind, and what they say is
kept."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import runner
from benchmarks.gpu.figures import Figure
from benchmarks.gpu.parts import GROUPS, parts
from benchmarks.gpu.runner import FAILED, PASSED, SKIPPED, TIMED_OUT, Outcome, Part, run_all, run_part

ROOT = Path(__file__).resolve().parents[2]

# Three processes: one in the part's group, one in a group of its own as an MPI launcher makes them, one in a session of
# its own; none heeds SIGTERM.
HANG = """
import os, pathlib, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
others = [
    subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, **apart)
    for apart in ({"preexec_fn": os.setpgrp}, {"start_new_session": True})
]
for other in others:
    other.stdout.readline()
print("hanging", flush=True)
pathlib.Path(sys.argv[1]).write_text(" ".join(str(pid) for pid in (os.getpid(), *(other.pid for other in others))))
signal.pause()
"""

PUBLISH = """
from benchmarks.gpu.figures import Figure, publish
figures = [Figure("speed", 90.0, "%", least=85), Figure("time", 70.0, "us", most=60), Figure("size", 1.0, "B")]
publish(figures, more=[1, 2])
print("the last line")
"""


def program(name: str, text: str, *arguments: str, timeout: float = 20.0) -> Part:
    return Part(name, [sys.executable, "-c", text, *arguments], timeout, {"PYTHONPATH": str(ROOT)})


def eventually(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def gone(pids: list[int]) -> bool:
    """Whether none of these processes runs; a zombie does not."""

    def runs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
        except OSError:
            return False

    return not any(runs(pid) for pid in pids)


def pids_in(file: Path) -> list[int]:
    eventually(lambda: file.exists() and len(file.read_text().split()) == 3, "the hanging part did not start")
    return [int(word) for word in file.read_text().split()]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_TO_TIDY_UP", 0.3)
    monkeypatch.setattr(runner, "_TO_DUMP", 1.0)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_a_hang_costs_one_part_and_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    told: list[Outcome] = []
    hanging, next_one = program("hanging", HANG, str(file), timeout=3), program("next", "print('done')")
    outcomes = run_all([hanging, next_one], 60, tmp_path, told.append)
    assert [outcome.status for outcome in outcomes] == [TIMED_OUT, PASSED]
    assert outcomes == told
    assert "hanging" in outcomes[0].detail and 3 <= outcomes[0].seconds < 15
    assert gone(pids_in(file))


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("raise ValueError('seven')", FAILED, "exit code 1: ValueError: seven"),
        ("raise SystemExit(3)", FAILED, "exit code 3"),
        ("from benchmarks.gpu.figures import skip; skip('no such thing')", SKIPPED, "no such thing"),
        ("print('SKIPPED [2] tests/x.py:3: no driver'); print('===== 2 skipped in 0.1s =====')", SKIPPED, "no driver"),
        ("print('===== 1 passed, 2 skipped in 0.1s =====')", PASSED, "1 passed, 2 skipped"),
        (
            "print('E   AssertionError: inner'); print('mpirun says a lot'); raise SystemExit(1)",
            FAILED,
            "AssertionError: inner",
        ),
    ],
)
def test_what_becomes_of_a_part(tmp_path: Path, text: str, status: str, said: str) -> None:
    outcome = run_part(program("part", text), 20, tmp_path)
    assert outcome.status == status and said in outcome.detail, outcome
    assert outcome.good is (status != FAILED)


def test_what_cannot_run_says_why(tmp_path: Path) -> None:
    absent = Part("absent", ["no-such-program"], 5)
    needing = Part("needing", ["true"], 5, needs="no-such-program")
    outcomes = run_all([absent, needing], 60, tmp_path, lambda outcome: None)
    assert [outcome.status for outcome in outcomes] == [FAILED, SKIPPED]
    assert all("no-such-program" in outcome.detail for outcome in outcomes)


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    text = (
        "import sys; from pathlib import Path; from benchmarks.gpu import runner; runner._TO_TIDY_UP = 0.3;"
        "folder = Path(sys.argv[1]); part = runner.Part('hanging', [sys.executable, '-c', sys.argv[2], str(folder / "
        "'pids')], 60);"
        "runner.run_all([part], 60, folder, lambda outcome: None)"
    )
    run = subprocess.Popen([sys.executable, "-c", text, str(tmp_path), HANG], cwd=ROOT)
    pids = pids_in(tmp_path / "pids")
    run.send_signal(signal.SIGTERM)
    assert run.wait(20) == 128 + signal.SIGTERM
    assert gone(pids)


def test_a_rank_that_waits_in_vain_ends_before_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = "import os; print(os.environ['COLLECTIVES_TIMEOUT'])"
    monkeypatch.delenv("COLLECTIVES_TIMEOUT", raising=False)
    assert run_part(program("part", shown), 20, tmp_path).detail == "20"
    assert all(part.timeout > 20 for part in parts())
    monkeypatch.setenv("COLLECTIVES_TIMEOUT", "7")
    assert run_part(program("part", shown), 20, tmp_path).detail == "7"


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {"date": "today", "problem": None, "cupy": "14.2.0"}
    output, logs = tmp_path / "new", tmp_path / "logs"
    logs.mkdir()
    status = command.check([program("good", "print('fine')"), program("published", PUBLISH)], 60, output, logs, found)
    assert status == 1, "a bar was missed"
    content = json.loads((output / "gpu-check.json").read_text())
    assert content["cupy"] == "14.2.0" and content["date"] == "today"
    assert [(part["name"], part["status"]) for part in content["parts"]] == [("good", PASSED), ("published", PASSED)]
    assert content["parts"][1]["result"]["figures"][0] == {**Figure("speed", 90.0, "%", least=85).as_dict()}
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:3] == ["published", "time", "70.00"] and line.endswith("NO") for line in lines), lines
    assert command.check([program("good", "print('fine')")], 60, output, logs, found) == 0
    assert command.check([program("bad", "raise SystemExit(1)")], 60, output, logs, found) == 1


def test_every_part_is_there_and_bounded() -> None:
    found = parts()
    names = [part.name for part in found]
    assert len(set(names)) == len(names) and not set(names) & set(GROUPS)
    assert all(set(members) < set(names) for members in GROUPS.values())
    for part in found:
        assert 0 < part.timeout <= 90
        for command_line in filter(None, (part.command, part.rehearsal)):
            words = list(command_line)
            modules = [words[place + 1] for place, word in enumerate(words) if word == "-m"]
            assert modules and all(importlib.util.find_spec(module) for module in modules), part
            assert all((ROOT / word).exists() for word in words if word.endswith(".py")), part
