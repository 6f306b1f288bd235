"""The process before each rank, without MPI: output, exit codes, signals, records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from collectives.launch import rank


def start(run_dir: Path, program: str, output: str = "", width: int = 1, as_horovod: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-S", rank.__file__, str(run_dir), output, str(width), as_horovod, sys.executable, "-c", program]
    environment = {"PATH": os.environ["PATH"], "PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_a_good_rank_leaves_no_record(tmp_path: Path) -> None:
    process = start(tmp_path, "import sys; print('out'); print('err', file=sys.stderr)")
    assert process.communicate(timeout=60) == ("out\n", "err\n")
    assert process.returncode == 0 and not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize(
    ("end", "code"),
    [("raise ValueError('x')", 1), ("sys.exit(3)", 3), ("os._exit(5)", 5), ("os.kill(os.getpid(), 9)", 137), ("os.abort()", 134)],
)
def test_a_failing_rank_leaves_one(end: str, code: int, tmp_path: Path) -> None:
    process = start(tmp_path, f"import os, sys\nprint('last words', file=sys.stderr, flush=True)\n{end}")
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == code
    entry = json.loads((tmp_path / "end-3.json").read_text())
    assert (entry["rank"], entry["code"]) == (3, code)
    assert (tmp_path / "stderr-3").read_text() == errors and errors.startswith("last words\n")


def test_all_of_stderr_is_passed_on_and_the_last_of_it_kept(tmp_path: Path) -> None:
    process = start(tmp_path, "import sys\nfor n in range(200_000): print(n, 'x' * 20, file=sys.stderr)\nsys.exit(1)")
    errors = process.communicate(timeout=60)[1]
    assert errors.count("\n") == 200_000
    kept = (tmp_path / "stderr-3").read_bytes().decode()
    assert rank.KEPT <= len(kept) <= 10 * rank.KEPT and errors.endswith(kept)


def test_a_process_that_holds_stderr_open_is_not_waited_for(tmp_path: Path) -> None:
    heir = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(120)'])"
    program = f"import subprocess, sys\nprint({heir}.pid)\nsys.exit(4)"
    process = start(tmp_path, program)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert process.wait(timeout=30) == 4
    os.kill(pid, 9)
    process.communicate(timeout=30)


def test_signals_reach_the_rank(tmp_path: Path) -> None:
    program = "import signal, sys\nsignal.signal(signal.SIGUSR1, lambda *a: sys.exit(6))\nprint('ready', flush=True)\nsignal.pause()"
    process = start(tmp_path, program)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(rank.signal.SIGUSR1)
    process.communicate(timeout=60)
    assert process.returncode == 6


def test_a_run_directory_that_is_not_there_costs_nothing_but_the_record(tmp_path: Path) -> None:
    process = start(tmp_path / "on another host", "import sys; print('shown', file=sys.stderr); sys.exit(3)")
    assert process.communicate(timeout=60)[1] == "shown\n" and process.returncode == 3


def test_a_program_that_cannot_run_is_named(tmp_path: Path) -> None:
    command = [sys.executable, rank.__file__, str(tmp_path), "", "1", "", "/no/such/program"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 127 and "cannot run '/no/such/program': No such file" in shown.stderr


@pytest.mark.parametrize(("as_horovod", "told"), [("1", {"RANK": "3", "SIZE": "8", "LOCAL_RANK": "1"}), ("", {})])
def test_a_rank_is_told_its_place_in_horovods_words(as_horovod: str, told: dict[str, str], tmp_path: Path) -> None:
    program = "import json, os; print(json.dumps({name[8:]: text for name, text in os.environ.items() if name.startswith('HOROVOD_')}))"
    assert json.loads(start(tmp_path, program, as_horovod=as_horovod).communicate(timeout=60)[0]) == told


def test_output_is_written_to_files_as_well(tmp_path: Path) -> None:
    program = "import sys\nfor n in range(20_000): print(n, 'x' * 20)\nprint('err', file=sys.stderr)\nsys.exit(2)"
    process = start(tmp_path, program, str(tmp_path / "out"), width=3)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and output.count("\n") == 20_000 and errors == "err\n"
    assert (tmp_path / "out" / "rank.003" / "stdout").read_text() == output
    assert (tmp_path / "out" / "rank.003" / "stderr").read_text() == errors == (tmp_path / "stderr-3").read_text()


def test_files_that_cannot_be_written_are_said_and_change_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    process = start(tmp_path, "print('out')", str(tmp_path / "file"))
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and output == "out\n"
    assert [line.partition(": ")[2].partition(" '")[0] for line in errors.splitlines()] == ["cannot write"] * 2
