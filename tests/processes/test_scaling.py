"""A scaling study with real ranks: every run is started, read, kept and bounded; what fails is shown, and the rest is
analysed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from collectives.launch.cli import cores
from tests.support.launching.mpirun import Result, python_for, run_command

WORKER = """
import sys
import collectives as hvd
hvd.init()
batch, task = int(sys.argv[1]), sys.argv[2]
if hvd.size() > 1 and task == "crash" and hvd.rank() == 1:
    raise KeyError("no such sample")
total = hvd.allreduce(batch, op=hvd.Sum)
if hvd.rank() == 0:
    print(f"Total img/sec on {hvd.size()} CPU(s): {10 * total * hvd.size():.1f} +-0.1")
"""
"""Claims 10 batches a second on each of its ranks, and so a perfect scaling that no machine disturbs, twice over if
work is fixed."""


def study(tmp_path: Path, mode: str, *words: str, task: str = "work", expect: int = 0) -> tuple[Result, Path]:
    """Run a study of the worker."""
    worker, output = tmp_path / "worker.py", tmp_path / "output"
    worker.write_text(WORKER)
    python = str(python_for("openmpi"))
    command = [python, "-m", "benchmarks.scaling", mode, *words, "--output", str(output)]
    return run_command([*command, "--", python, str(worker), "{batch}", task], expect=expect, timeout=120), output


def test_strong_scaling_from_the_command_to_the_files(tmp_path: Path) -> None:
    gradients = ["--gradient-bytes", "64K", "--gradient-tensors", "2"]
    result, output = study(tmp_path, "strong", "-np", "1,2", "--total", "64", "--repeats", "1", *gradients)
    content = json.loads((output / "scaling.json").read_text())
    runs = [(run["kind"], run["repeat"], run["ranks"]) for run in content["runs"]]
    c, t = "communication", "throughput"
    assert runs == [(t, 1, 1), (t, 1, 2), (c, 1, 2)]
    assert all(run["status"] == 0 and Path(run["log"]).is_file() for run in content["runs"])
    assert [run["figures"] for run in content["runs"] if run["kind"] == t] == [[640.0], [1280.0]]
    one, two = content["points"]
    assert (one["step"], two["step"]) == pytest.approx((0.1, 0.05))
    assert (two["speedup"], two["efficiency"]) == pytest.approx((2.0, 1.0))
    (measured,) = [run["seconds_per_step"] for run in content["runs"] if run["kind"] == c]
    assert one["communication"] == 0 < two["communication"] == pytest.approx(measured)
    assert content["settings"]["gradient_bytes"] == [65536] and content["unit"] == "images"
    assert "Open MPI" in content["machine"]["mpi"]
    expected = "# model T = G/W + C(W), G = " if cores() > 1 else "the machine is oversubscribed"
    assert expected in result.output, str(result)
    if find_spec("matplotlib"):
        assert {"scaling.png", "scaling.svg"} < {file.name for file in output.iterdir()}


def test_a_failed_run_is_shown_and_the_others_are_analysed(tmp_path: Path) -> None:
    result, output = study(tmp_path, "weak", "-np", "1,2", "--batch", "8", "--repeats", "2", task="crash", expect=1)
    assert "error: 2 ranks, run 1: exit status 1" in result.output and "KeyError: 'no such sample'" in result.output, (
        str(result)
    )
    assert "2 ranks, run 2" not in result.output, "what has failed is not tried again"
    content = json.loads((output / "scaling.json").read_text())
    assert [(point["ranks"], point["rates"]) for point in content["points"]] == [(1, [80.0, 80.0])]
    assert [run.get("problem") for run in content["runs"]] == [None, "exit status 1", None]
