"""How a process leaves: each way to end is tried in a process of its own, without MPI."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from collectives.worlds import exit_hooks

PRELUDE = """
import os, sys
from collectives.worlds import exit_hooks
def abort(code):
    print("ABORT", code, flush=True)
    os._exit(code)
alone = lambda: True
before = sys.excepthook, sys.exit
hooks = exit_hooks.Hooks(7, abort, lambda text: print("PUBLISH", repr(text)), os.environ.get("COLLECTIVES_RECORDS"),
                      all_left=lambda: alone(), leave=lambda: print("LEAVE"), grace=0.2)
"""


def ended(program: str, code: int, **environment: str) -> subprocess.CompletedProcess[str]:
    shown = subprocess.run(
        [sys.executable, "-c", PRELUDE + program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), **environment},
    )
    assert shown.returncode == code, shown
    return shown


def test_an_uncaught_exception_is_printed_published_recorded_and_ends_the_job(tmp_path: Path) -> None:
    shown = ended(
        "def deep():\n    raise ValueError('no good')\ndeep()", 1, COLLECTIVES_RECORDS=str(tmp_path / "records")
    )
    assert shown.stderr.rstrip().endswith("ValueError: no good")
    published, left, aborted = shown.stdout.splitlines()
    assert published.startswith("PUBLISH") and "in deep" in published and left == "LEAVE" and aborted == "ABORT 1"
    entry = json.loads((tmp_path / "records").read_text())
    assert entry["code"] == 1 and entry["text"].endswith("ValueError: no good\n") and not entry["consequence"]


@pytest.mark.parametrize(
    ("leaving", "code", "text"),
    [
        ("sys.exit(3)", 3, "sys.exit(3)"),
        ("sys.exit('no data')", 1, "sys.exit(1): no data"),
        ("sys.exit(-1)", 255, "sys.exit(-1)"),
        ("sys.exit(True)", 1, "sys.exit(True)"),
        ("import argparse; argparse.ArgumentParser().parse_args(['--bogus'])", 2, "sys.exit(2)"),
    ],
)
def test_a_failing_sys_exit_ends_the_job(leaving: str, code: int, text: str) -> None:
    assert ended(leaving, code).stdout.splitlines() == [f"PUBLISH {text + chr(10)!r}", "LEAVE", f"ABORT {code}"]


@pytest.mark.parametrize(("rank", "recorded", "times"), [(0, False, 1), (1, False, 0), (0, True, 0)])
def test_without_a_launcher_rank_0_names_the_command_that_explains_the_error(
    rank: int, recorded: bool, times: int, tmp_path: Path
) -> None:
    variables = {"COLLECTIVES_RECORDS": str(tmp_path / "records")} if recorded else {}
    shown = ended(f"hooks._rank = {rank}\nraise ValueError('unequal [M4]:\\n  shapes')", 1, **variables)
    assert shown.stderr.count("\nFor cause and cure: collectives explain M4\n") == times
    assert "collectives explain" not in ended(f"hooks._rank = {rank}\nraise ValueError('[0]')", 1).stderr


def test_sys_exit_from_the_depths_still_runs_what_is_on_the_way() -> None:
    program = "def f():\n    try: sys.exit(4)\n    finally: print('FINALLY')\nf()"
    assert ended(program, 4).stdout.splitlines() == ["FINALLY", "PUBLISH 'sys.exit(4)\\n'", "LEAVE", "ABORT 4"]


@pytest.mark.parametrize(
    "clean",
    [
        "pass",
        "sys.exit()",
        "sys.exit(0)",
        "try: sys.exit(3)\nexcept SystemExit: pass",
        "try: sys.exit(3)\nexcept SystemExit as kept: copy = kept",
        "import threading; t = threading.Thread(target=lambda: sys.exit(9)); t.start(); t.join()",
        "import threading; threading.excepthook = lambda a: None\nt = threading.Thread(target=lambda: 1 / 0); "
        "t.start(); t.join()",
    ],
)
def test_a_clean_exit_leaves(clean: str) -> None:
    shown = ended(clean, 0)
    assert shown.stdout.splitlines() == ["LEAVE"] and shown.stderr == ""


def test_ctrl_c_is_a_failure() -> None:
    assert ended("raise KeyboardInterrupt", 130).stdout.splitlines()[-1] == "ABORT 130"


def test_the_wait_for_the_others_is_bounded_and_over_at_once_when_they_have_left() -> None:
    assert ended("alone = lambda: False\nsys.exit(3)", 3).stdout.splitlines()[-1] == "ABORT 3"
    program = "asked = []\ndef alone():\n    asked.append(1)\n    return len(asked) == 3\nimport atexit\n"
    program += (
        "def abort_now(code):\n    print(len(asked), flush=True)\n    os._exit(code)\nhooks._abort = "
        "abort_now\nsys.exit(3)"
    )
    assert ended(program, 3).stdout.splitlines()[-1] == "3"


@pytest.mark.parametrize("error", ["RankFailedError", "CollectiveTimeoutError"])
def test_a_consequence_is_marked_as_one(error: str, tmp_path: Path) -> None:
    ended(
        f"from collectives.base.errors import {error}\nraise {error}('rank 1 failed')",
        1,
        COLLECTIVES_RECORDS=str(tmp_path / "records"),
    )
    assert json.loads((tmp_path / "records").read_text())["consequence"] is True


def test_an_error_while_telling_the_others_is_shown_and_does_not_stop_the_end() -> None:
    shown = ended("def fail(text): raise OSError('gone')\nhooks._publish = fail\nalone = lambda: 1 / 0\nsys.exit(3)", 3)
    assert "rank 7 failed while telling the other ranks" in shown.stderr and "OSError: gone" in shown.stderr
    assert "rank 7 failed while waiting for the other ranks" in shown.stderr


@pytest.mark.parametrize(("ending", "code"), [("pass", 0), ("sys.exit(3)", 3)])
def test_what_was_printed_is_out_before_the_others_hear_that_this_rank_has_left(ending: str, code: int) -> None:
    program = "hooks._leave = lambda: os.write(1, b'LEFT\\n')\nprint('PRINTED')\n"
    shown = ended(program + ending, code).stdout.splitlines()
    assert shown.index("PRINTED") < shown.index("LEFT")


def test_output_that_was_buffered_is_not_lost() -> None:
    program = "import logging, logging.handlers\ntarget = logging.StreamHandler(sys.stdout)\n"
    program += "logging.getLogger().addHandler(logging.handlers.MemoryHandler(100, target=target))\n"
    program += "logging.getLogger().warning('LOGGED')\nprint('PRINTED')\nsys.exit(3)"
    assert {"LOGGED", "PRINTED"} <= set(ended(program, 3).stdout.splitlines())


def test_hooks_chain_and_are_taken_out_again() -> None:
    program = (
        "assert (sys.excepthook, sys.exit) != before\nhooks.remove()\nhooks.remove()\nassert (sys.excepthook, "
        "sys.exit) == before\n"
    )
    assert ended(program + "sys.exit(3)", 3).stdout == ""
    inner = (
        "outer = sys.excepthook\nsys.excepthook = lambda *a: (print('MINE'), outer(*a))\nhooks.remove()\nraise "
        "ValueError('x')"
    )
    shown = ended(inner, 1)
    assert shown.stdout == "MINE\n" and "ValueError: x" in shown.stderr


def test_install_in_this_process_changes_nothing_for_good() -> None:
    before = sys.excepthook, sys.exit
    hooks = exit_hooks.Hooks(0, lambda code: None, lambda text: None)
    with pytest.raises(SystemExit) as leaving:
        sys.exit(5)
    assert type(leaving.value) is SystemExit and leaving.value.code == 5
    hooks.remove()
    assert (sys.excepthook, sys.exit) == before


FORK = """
import atexit
atexit.register(lambda: print("PARENT HANDLER", os.getpid() == parent, flush=True))
parent = os.getpid()
child = os.fork()
if child == 0:
    print("CHILD", flush=True)
    atexit.register(lambda: print("CHILD HANDLER", flush=True))
    {end}
else:
    print("CODE", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.parametrize(
    ("end", "code"), [("pass", 0), ("sys.exit(4)", 4), ("raise ValueError('x')", 1), ("os._exit(6)", 6)]
)
@pytest.mark.parametrize("removed", [False, True])
def test_a_forked_child_touches_nothing(end: str, code: int, removed: bool) -> None:
    lines = ended(("hooks.remove()\n" if removed else "") + FORK.format(end=end), 0).stdout.splitlines()
    handler = [] if end.startswith("os._exit") else ["CHILD HANDLER"]
    parent_left = [] if removed else ["LEAVE"]
    assert sorted(lines) == sorted(["CHILD", *handler, f"CODE {code}", "PARENT HANDLER True", *parent_left])


def test_multiprocessing_children_work_and_touch_nothing() -> None:
    program = (
        "import multiprocessing\nwith multiprocessing.get_context('fork').Pool(2) as pool: print(pool.map(abs, "
        "[-1, 2]))"
    )
    assert ended(program, 0).stdout.splitlines() == ["[1, 2]", "LEAVE"]


def test_that_a_rank_has_joined_is_told_by_an_empty_line(tmp_path: Path) -> None:
    exit_hooks.tell_joined(None)
    exit_hooks.tell_joined(str(tmp_path / "records"))
    assert (tmp_path / "records").read_bytes() == b"\n"


@pytest.mark.parametrize("full", [False, True])
def test_a_traceback_shows_the_packages_own_frames_on_demand_only(full: bool, tmp_path: Path) -> None:
    program = (
        f"hooks.remove(); hooks = exit_hooks.Hooks(7, abort, print, {str(tmp_path / 'records')!r}, grace=0.2, "
        f"full_tracebacks={full})\nfrom collectives.base.config import Config\n"
        "def program():\n    Config.from_environment({'COLLECTIVES_LOG_LEVEL': 'loud'})\nprogram()"
    )
    shown = ended(program, 1)
    text = json.loads((tmp_path / "records").read_text())["text"]
    for printed in (shown.stderr, text):
        assert "in program" in printed and ("in from_environment" in printed) is full
