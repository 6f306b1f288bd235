"""The command ``collectives``: its table of commands, mistakes that are said before anything starts, and one
benchmark on ranks that it starts."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from collectives.base import launchers
from collectives.tools import demo
from collectives.tools.bench import cli
from collectives.tools.bench.ranks import launchers_variable
from collectives.tools.command import COMMANDS, main

ROOT = Path(__file__).parents[2]


def collectives(*words: str, cwd: Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "collectives.tools", *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def test_every_command_is_there_and_documented(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "tools.md").read_text()
    assert main([]) == main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, (module, line) in COMMANDS.items():
        assert callable(importlib.import_module(module).main)
        assert re.search(rf"^  {name} +{re.escape(line)}$", shown, re.MULTILINE) and f"| `{name}` |" in page


def test_help_imports_nothing_of_the_commands() -> None:
    program = """
import sys
from collectives.tools.command import main
main(["--help"])
assert not [name for name in sys.modules if name.startswith(("numpy", "collectives.launch", "collectives.tools.bench"))]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_reader_that_has_left_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "collectives.tools", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench", "circle"], "expected allreduce, .* or plot, got 'circle'"),
        (["bench", "-np", "2"], "got ''"),
        (["bench", "allreduce", "-np"], "-np: expected a value"),
        (["bench", "--np-min", "2", "allreduce"], "unknown option '--np-min'"),
        (["report", "none.json"], "cannot read the trace 'none.json': No such file"),
        (["plan", "-np", "2", "--size", "large"], "--size: .*large"),
        (["status-of-all"], "unknown command 'status-of-all'; expected run, bench"),
    ],
)
def test_mistakes_are_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench", "allreduce", "-np", "2", "--root", "0"], "unrecognized arguments: --root"),
        (["bench", "broadcast", "--peers", "mpi"], "unrecognized arguments: --peers"),
        (["bench", "alltoall", "-b", "4x"], "-b/--minbytes"),
        (["bench", "alltoall", "--plot", "x.png"], "drawing needs matplotlib: pip install 'pycollectives"),
        (["bench", "plot", "none.json", "x.png"], "drawing needs matplotlib"),
    ],
)
def test_a_wrong_flag_starts_nothing(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_a_picture_needs_a_benchmarks_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "bad.json").write_text("{}")
    assert "bad.json" in collectives("bench", "plot", "bad.json", "x.png", cwd=tmp_path, expect=2).stderr


def test_who_has_started_this_process() -> None:
    assert launchers_variable({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None, "a job's script is no rank"
    assert launchers_variable({"SLURM_PROCID": "0", "SLURM_STEP_ID": "1"}) == "SLURM_PROCID"
    assert launchers_variable({"RANK": "0"}) == "RANK" and launchers_variable({}) is None
    assert launchers.rank({"RANK": "3", "WORLD_SIZE": "4"}) == 3, "torchrun's, whose other ranks say nothing"


def test_another_number_of_ranks_than_the_launchers_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    message = collectives("bench", "allreduce", "-np", "4", cwd=tmp_path, expect=2).stderr
    assert "expected -np 1, got -np 4: a launcher has already started the ranks (RANK is set)" in message


def test_the_plan_of_one_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-np", "8", "--size", "3M"]) == 0
    rows = capsys.readouterr().out.splitlines()[3:]
    assert len(rows) == 5 and all(re.match(r"[a-z]+ +3 MiB ", row) for row in rows)


def test_the_demos_training_is_in_a_checkout_and_in_a_wheel() -> None:
    tomllib = pytest.importorskip("tomllib")
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    example = demo.example()
    assert example.is_file() and f"examples/{example.name}" in wheel["only-include"]
    assert wheel["sources"]["examples"] == "collectives/tools"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["allreduce", "alltoall"])
def test_a_benchmark_starts_its_ranks_without_mpi(name: str, tmp_path: Path) -> None:
    flags = [
        "-b",
        "4",
        "-e",
        "4K",
        "-f",
        "32",
        "-n",
        "2",
        "-w",
        "1",
        "-d",
        "float,int32,half",
        "--persistent",
        "-np",
        "2",
        "--json",
        "results.json",
    ]
    shown = collectives("bench", "--launcher", "ssh", name, *flags, cwd=tmp_path).stdout
    assert "2 ranks, 2 on this host" in shown and "# no MPI" in shown
    assert "# Out of bounds values : 0 OK" in shown and shown.count("# Avg bus bandwidth") == 1
    assert json.loads((tmp_path / "results.json").read_text())["ranks"] == 2


@pytest.mark.slow
def test_wrong_values_are_counted_on_ranks_without_mpi(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("""
import collectives
original = collectives.broadcast_
def spoiled(tensor, root, **options):
    original(tensor, root, **options)
    tensor[0] += collectives.rank()
    return tensor
collectives.broadcast_ = spoiled
""")
    command = ["env", f"PYTHONPATH={tmp_path}:{ROOT}", sys.executable, "-m", "collectives.tools", "bench"]
    command += ["--launcher", "ssh", "broadcast", *["-b", "4K", "-e", "4K", "-n", "1", "-w", "0"]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "# Out of bounds values : 1 FAILED" in done.stdout, done.stdout + done.stderr
