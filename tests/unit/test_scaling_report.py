"""Scaling: one run's bounds, the table, the JSON file, and the plot."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import scaling_launch
from benchmarks.scaling_launch import run
from benchmarks.scaling_model import Point
from benchmarks.scaling_report import Study, analyse, document, text


def test_a_run_is_told_with_all_that_it_printed(tmp_path: Path) -> None:
    program = "import os, sys; print(os.environ['SAID']); sys.exit('no more')"
    outcome = run([sys.executable, "-c", program], tmp_path / "log", 60, {"SAID": "hello"})
    assert (outcome.status, outcome.problem) == (1, "exit status 1")
    assert outcome.output == "hello\nno more\n" == outcome.log.read_text()
    assert outcome.tail().endswith("hello\nno more") and outcome.tail().startswith("$ ")
    assert run([sys.executable, "-c", "pass"], tmp_path / "log", 60).problem == ""


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    outcome = run(["/there/is/none"], tmp_path / "log", 60)
    assert outcome.status == 127 and "/there/is/none" in outcome.output == outcome.log.read_text().strip()


def test_a_long_output_is_cut_but_kept(tmp_path: Path) -> None:
    outcome = run([sys.executable, "-c", "for i in range(100): print('line', i)"], tmp_path / "log", 60)
    lines = outcome.tail().splitlines()
    assert lines[1] == f"... (60 more lines in {tmp_path / 'log'})"
    assert lines[2:] == [f"line {number}" for number in range(60, 100)]


def test_when_its_time_is_up_the_whole_group_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling_launch, "_GRACE", 0.1)
    outcome = run(["sh", "-c", "trap '' TERM; sleep 100 & echo $!; wait; wait"], tmp_path / "log", 2)
    assert outcome.status is None and outcome.problem.startswith("not finished after ")
    (child,) = map(int, outcome.output.split())
    end = time.monotonic() + 10
    while _runs(child) and time.monotonic() < end:
        time.sleep(0.01)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def strong(**changes: Any) -> Study:
    """Points of which 4 ranks share cores, and the model fits the others: G = 1 s."""
    points = [
        Point(1, (64.0, 63.0, 65.0), 64),
        Point(2, (64 / 0.55,), 64, None, (0.05,)),
        Point(4, (60.0,), 64, None, (0.2,), oversubscribed=True),
    ]
    return analyse("strong", ("train", "{batch}"), "images", True, points, **{"further": (), **changes})


def test_the_table() -> None:
    lines = text(strong(), 3).splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    assert rows == [
        ["1", "64", "64.0", "63.0", "65.0", "1000.000", "1.00", "100.0%", "0.000", "1000.000", "+0.0%"],
        ["2", "64", "116.4", "116.4", "116.4", "550.000", "1.82", "90.9%", "50.000", "550.000", "+0.0%"],
        ["4", "64", "60.0", "60.0", "60.0", "1066.667", "0.94", "23.4%", "200.000", "450.000", "+57.8%", "*"],
    ]
    heads = next(
        line
        for line in lines
        if "ranks" in line and "speed-up " in line and "efficiency " in line and "model ms" in line
    )
    assert len(heads) == len(next(line for line in lines if line.startswith("      1")))
    assert "# * more ranks than cores: shown beside the model, but not part of its fit" in lines
    assert "# good fit" in lines
    assert any("G = 1000.000 ms; least squares over 2 points" in line for line in lines)


def test_predictions_are_marked_and_begin_after_what_was_measured_with_enough_cores() -> None:
    found = strong()
    assert [prediction.ranks for prediction in found.predictions] == [4, 8, 16]
    shown = text(found, 3)
    assert shown.count("  predicted") == 3 and "# PREDICTED, not measured; C(W) = " in shown
    assert [prediction.ranks for prediction in strong(further=(2, 6)).predictions] == [6]


def test_a_bad_fit_says_so_and_so_do_its_predictions() -> None:
    points = [Point(1, (64.0,), 64), Point(2, (64.0,), 64, None, (0.05,))]
    shown = text(analyse("strong", ("x",), "images", True, points, ()), 1)
    assert "# BAD FIT: off by " in shown
    assert "# PREDICTED, not measured, by a model that fits badly; " in shown
    assert "good fit" not in shown


def test_without_a_model_the_reason_is_told() -> None:
    shown = text(analyse("weak", ("x",), "items", False, [Point(1, (5.0,)), Point(2, (9.0,))], ()), 1)
    assert "# no model: it is not known how many items a step has" in shown
    assert "PREDICTED" not in shown


def test_a_sweep_has_values_and_no_predictions() -> None:
    points = [Point(2, (16 / (0.1 + 0.1 * value),), 16, str(value), (0.1,)) for value in (1, 2, 3)]
    found = analyse("sweep", ("x", "{value}"), "images", False, points, ())
    shown = text(found, 1)
    assert "G = 0.000 ms + 100 ms x value" in shown.replace("G = -0.000", "G = 0.000")
    assert "efficiency: 1 - C / step" in shown
    assert [line.split()[0] for line in shown.splitlines() if not line.startswith("#")] == ["1", "2", "3"]
    assert found.predictions == ()


def test_the_document_holds_everything() -> None:
    runs = [{"kind": "throughput", "figures": (64.0,)}]
    content = json.loads(json.dumps(document(strong(), {"repeats": 3}, runs)))
    assert content["benchmark"] == "scaling" and content["mode"] == "strong" and content["settings"] == {"repeats": 3}
    assert content["runs"] == [{"kind": "throughput", "figures": [64.0]}]
    first, second, third = content["points"]
    assert first["rates"] == [64.0, 63.0, 65.0] and first["communication"] == 0
    assert second["modelled"] == pytest.approx(0.55) and second["residual"] == pytest.approx(0, abs=1e-12)
    assert third["oversubscribed"] and third["efficiency"] == pytest.approx(60 / 64 / 4)
    assert content["fit"]["coefficients"] == pytest.approx([1.0]) and len(content["predictions"]) == 3
    assert set(content["definitions"]) >= {"speedup", "efficiency", "model"}


STUDIES = {
    "strong": strong(),
    "weak": analyse(
        "weak", ("x", "$a$"), "items", False, [Point(1, (5.0,), 8), Point(2, (9.0, 8.0), 16, None, (0.1,))], ()
    ),
    "only throughputs": analyse("weak", ("x",), "items", False, [Point(1, (5.0,)), Point(3, (9.0,))], ()),
    "one point": analyse("strong", ("x",), "items", True, [Point(2, (5.0,), 8, None, (0.1,))], ()),
    "sweep": analyse(
        "sweep",
        ("x",),
        "items",
        False,
        [Point(n, (5.0 * n,), 8 * n, v, (0.1,)[: n - 1]) for v in ("1", "2") for n in (1, 2)],
        (),
    ),
    "sweep of words": analyse(
        "sweep", ("x",), "items", False, [Point(2, (5.0,), 8, "wide"), Point(2, (4.0,), 8, "deep")], ()
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_every_kind_of_study_can_be_drawn(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.scaling_plot import plot

    content = json.loads(json.dumps(document(STUDIES[name], {}, [])))
    written = plot(content, tmp_path / "scaling.png")
    assert [file.name for file in written] == ["scaling.png", "scaling.svg"]
    assert written[0].read_bytes().startswith(b"\x89PNG") and os.path.getsize(written[0]) > 10_000
