"""Scaling: the runs that are planned, the figures that are read, the model that is fitted, and what is told of it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import scaling_launch
from benchmarks.scaling import shared_cores
from benchmarks.scaling_launch import run
from benchmarks.scaling_model import Fit, Point, RingCost, compare, fit, predict, ring_cost
from benchmarks.scaling_options import parser, settings_of
from benchmarks.scaling_plan import Work, cases, order
from benchmarks.scaling_report import Study, analyse, document, text
from benchmarks.scaling_throughput import KNOWN, Reading, read, user_pattern

TRAIN = ("python", "train.py", "--batch-size", "{batch}")
SECONDS = st.floats(1e-4, 1e2)


# ---- the plan --------------------------------------------------------------------------------------------------------


def test_which_runs_are_planned() -> None:
    plan = cases("strong", TRAIN, (1, 2, 4), Work(total=64))
    assert [(case.ranks, case.work, case.command[-1]) for case in plan] == [(1, 64, "64"), (2, 64, "32"), (4, 64, "16")]
    plan = cases("weak", ("{per_rank}", "{total}", "{ranks}"), (1, 3), Work(batch=8))
    assert [(case.work, case.command) for case in plan] == [(8, ("8", "8", "1")), (24, ("8", "24", "3"))]
    plan = cases(
        "sweep", ("x", "--n={value}", "{batch}"), (1, 2), Work(batch=4), [("3", 1), ("5", None)], gradients=(10, 20)
    )
    assert [(case.value, case.ranks, case.work, case.gradients) for case in plan] == [
        *(("3", 1, 4, 10), ("5", 1, 4, 20), ("5", 2, 8, 20))
    ]
    assert plan[-1].command == ("x", "--n=5", "4") and plan[-1].label == "5, 2 ranks"
    plan = cases("sweep", ("{value}",), (2,), Work(batch_is_value=True), [("8", 1), ("16", None)])
    assert [(case.ranks, case.work) for case in plan] == [(1, 8), (2, 32)]
    with pytest.raises(ValueError, match="100 items cannot be divided evenly among 3 or 8 ranks; 96 and 120 can"):
        cases("strong", TRAIN, (1, 2, 3, 8), Work(total=100))


@given(st.integers(1, 12))
def test_configurations_take_turns(count: int) -> None:
    """In as many repeats as there are configurations, each is once in each place."""
    rounds = order(count, count)
    assert all(sorted(indices) == list(range(count)) for indices in (*rounds, *zip(*rounds, strict=True)))


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("", "mode"),
        ("strong -- x", "-np"),
        ("strong -np 0 -- x", "'0'"),
        ("strong -np 1,2 --total 64", "put it behind --"),
        ("strong -np 1 -- x {batch}", "{batch}: give --total"),
        ("strong -np 1 --batch 4 -- x", "argument --batch: strong"),
        ("weak -np 1 --total 4 -- x", "argument --total: weak"),
        ("weak -np 1 --batch value -- x", "argument --batch: 'value' is for a sweep"),
        ("sweep -np 1 -- x {value}", "argument --values: a sweep needs"),
        ("sweep -np 1 --values 8,8 -- x {value}", "different values"),
        ("weak -np 1 --pattern ([ -- x", "expected a regular expression"),
        ("weak -np 1 --per-rank -- x", "argument --per-rank: it says what --pattern finds"),
        ("weak -np 1 --gradient-bytes 1M --gradient-model mlp -- x", "--gradient-bytes and --gradient-model"),
        ("weak -np 8 --launch=-Ha:4 -- x", "the hosts have slots for only 4 of these (a:4)"),
        ("weak -np 1 --launch=-np=3 -- x", "-np=3 cannot be given here"),
    ],
)
def test_a_mistake_is_named(
    line: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        settings_of(parser(), line.split())
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert named in shown.err and shown.err.count("error:") == 1 and shown.out == ""


def test_oversubscription_is_told_unless_the_hosts_are_named(tmp_path: Path) -> None:
    for launch, told in ((), 1), (("--launch=-H a:2,b:2",), 0):
        words = ["weak", "-np", "1,4", *launch, "--output", str(tmp_path), "--", "x"]
        assert len(shared_cores(*settings_of(parser(), words), 2)) == told


# ---- what programs print ---------------------------------------------------------------------------------------------

HOROVOD = """\
Number of GPUs: 2
Iter #0: 120.5 img/sec per GPU
Iter #1: 119.5 img/sec per GPU
Img/sec per GPU: 120.0 +-1.0
Total img/sec on 2 GPU(s): 240.0 +-2.0
"""
KERAS_BAR = (
    "Epoch 1/2\n\x1b[1m 1/45\x1b[0m \x1b[37m━━━━\x1b[0m \x1b[1m1:02\x1b[0m 1s/step - loss: 2.3\r"
    "\x1b[1m45/45\x1b[0m \x1b[32m━━━━\x1b[0m\x1b[37m\x1b[0m \x1b[1m1s\x1b[0m 20ms/step - accuracy: 0.5 - loss: 1.0\n"
    "Epoch 2/2\n\x1b[1m45/45\x1b[0m \x1b[32m━━━━\x1b[0m \x1b[1m1s\x1b[0m 10ms/step - accuracy: 0.9 - loss: 0.5\n"
)


@pytest.mark.parametrize(
    ("text", "figures", "per_rank", "times", "unit"),
    [
        (HOROVOD, (240.0,), False, False, "images"),
        (HOROVOD.rpartition("Total")[0], (120.0,), True, False, "images"),
        (HOROVOD.partition("Img/sec per")[0], (120.5, 119.5), True, False, "images"),
        ("1\timages/sec: 11.0 +/- 0.0 (jitter = 0.0)\t7.6\ntotal images/sec: 23.5\n", (23.5,), False, False, "images"),
        ("images/sec: 1,234.5", (1234.5,), False, False, "images"),
        ("epoch 3: throughput (samples/s) = 1e3", (1000.0,), False, False, "samples"),
        ("300 tokens/second\n100 tokens/second\n", (300.0, 100.0), False, False, "tokens"),
        ("[1,0]<stdout>:Total img/sec on 2 CPU(s): 50 +-1.0", (50.0,), False, False, "images"),
        (KERAS_BAR, (0.020, 0.010), False, True, ""),
        ("44/45 - 1s - 350us/step\n45/45 - 2s - 2s/step - loss: 1.0", (2.0,), False, True, ""),
    ],
)
def test_what_programs_print(text: str, figures: tuple[float, ...], per_rank: bool, times: bool, unit: str) -> None:
    reading = read(text, KNOWN)
    assert reading.figures == pytest.approx(figures)
    assert (reading.per_rank, reading.times, reading.unit) == (per_rank, times, unit)


@pytest.mark.parametrize("text", ["", "images/sec", "images/sec: nan", "3.5 it/s", "1/45 - 10ms/step"])
def test_nothing_found(text: str) -> None:
    with pytest.raises(ValueError, match="no throughput in the output; give --pattern"):
        read(text, KNOWN)


def test_the_users_pattern() -> None:
    reading = read("rank 0 did 10 things\nrank 0 did 30 things\n", [user_pattern(r"did (\d+) things", per_rank=True)])
    assert reading.figures == (10, 30) and reading.per_rank
    assert read("4.0 ms", [user_pattern(r"(?P<milliseconds>[\d.]+) ms", False)]).figures == pytest.approx([0.004])
    with pytest.raises(ValueError, match=r"expected a number above 0 .*'fast'"):
        read("rate=fast;", [user_pattern("rate=(.*);", per_rank=False)])


def test_which_of_several_figures_counts() -> None:
    reading = Reading((10.0, 20.0, 60.0), per_rank=False, times=False)
    takes = {"median": 20.0, "last": 60.0, "mean": 30.0, "max": 60.0, "sum": 90.0}
    assert {take: reading.rate(take, 3, None) for take in takes} == takes
    assert Reading((10.0, 20.0, 30.0), per_rank=True, times=False).rate("median", 3, None) == 60
    assert Reading((0.5,), per_rank=False, times=True).rate("median", 4, 64) == 128


# ---- the model -------------------------------------------------------------------------------------------------------


def made(g: float, cost: RingCost, divided: bool, ranks: tuple[int, ...] = (1, 2, 4, 8), work: int = 64) -> list[Point]:
    """Points that obey the model to the last digit."""
    points = []
    for count in ranks:
        items = work if divided else work * count
        step = (g / count if divided else g) + cost(count)
        points.append(Point(count, (items / step,), items, None, () if count == 1 else (cost(count),)))
    return points


def fitted(points: list[Point], divided: bool) -> Fit:
    found = fit(points, divided)
    assert isinstance(found, Fit), found
    return found


def test_speedup_and_efficiency_refer_to_the_fewest_ranks() -> None:
    points = [Point(4, (60.0, 90.0, 50.0)), Point(1, (20.0,))]
    assert (compare(points[0], points).speedup, compare(points[0], points).efficiency) == (3, 0.75)
    assert compare(points[1], points).speedup == 1
    both = [
        Point(ranks, (rate,), value=value)
        for ranks, rate, value in ((1, 10.0, "a"), (2, 15.0, "a"), (1, 40.0, "b"), (2, 80.0, "b"))
    ]
    assert [compare(point, both).efficiency for point in both] == [1, 0.75, 1, 1]


@given(SECONDS, st.floats(0, 1), st.floats(0, 1), st.booleans())
def test_the_fit_finds_the_g_that_was_put_in(g: float, latency: float, transfer: float, divided: bool) -> None:
    model = fitted(made(g, RingCost(latency * g, transfer * g), divided), divided)
    assert model.coefficients == pytest.approx((g,), rel=1e-9)
    assert model.worst < 1e-9 and model.problem == ""
    assert model.r_squared is None or model.r_squared > 1 - 1e-9
    assert model.compute(4) == pytest.approx(g / 4 if divided else g)


@given(SECONDS, SECONDS, st.booleans())
def test_a_sweeps_g_is_a_line(fixed: float, slope: float, divided: bool) -> None:
    points = []
    for value in (1, 2, 5):
        for ranks in (1, 2):
            step = (fixed + slope * value) / (ranks if divided else 1) + 0.01 * (ranks - 1)
            points.append(Point(ranks, (8 / step,), 8, str(value), (0.01,) if ranks > 1 else ()))
    model = fitted(points, divided)
    assert model.coefficients == pytest.approx((fixed, slope), rel=1e-5, abs=1e-5 * max(fixed, slope))


@given(SECONDS, SECONDS)
def test_a_rings_cost_is_found_again(latency: float, transfer: float) -> None:
    found = ring_cost(made(1.0, RingCost(latency, transfer), divided=True))
    assert found is not None
    assert [found(ranks) for ranks in (1, 2, 64)] == pytest.approx(
        [0, *map(RingCost(latency, transfer), (2, 64))], rel=1e-6
    )


@pytest.mark.parametrize("divided", [True, False])
def test_a_prediction_is_what_the_measurement_would_be(divided: bool) -> None:
    cost = RingCost(0.002, 0.1)
    points = made(1.0, cost, divided, ranks=(2, 4, 8))
    (found,) = predict(fitted(points, divided), cost, [32], points)
    (true,) = made(1.0, cost, divided, ranks=(32,))
    expected = compare(true, [*points, true])
    assert (found.step, found.rate, found.communication) == pytest.approx((true.step, true.rate, cost(32)))
    assert (found.speedup, found.efficiency) == pytest.approx((expected.speedup, expected.efficiency))


@pytest.mark.parametrize("divided", [True, False])
def test_a_bad_fit_is_called_bad(divided: bool) -> None:
    points = made(1.0, RingCost(0.01, 0.1), divided)
    last = points[-1]
    assert last.work and last.step
    slow = Point(last.ranks, (last.work / (last.step * 2),), last.work, None, last.communications)
    assert fitted([*points[:-1], slow], divided).problem.startswith("off by ")
    crowded = Point(16, (1.0,), 64, None, (5.0,), oversubscribed=True)
    assert fit([*points, crowded], divided) == fit(points, divided), "ranks that share cores do not bend the fit"


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([Point(1, (5.0,)), Point(2, (9.0,), communications=(0.1,))], "how many items a step has"),
        ([Point(1, (5.0,), 8), Point(2, (9.0,), 8)], "C(W) was not measured"),
        ([Point(4, (5.0,), 8, None, (0.1,), oversubscribed=True)], "enough cores"),
        ([Point(2, (5.0,), 8, "wide", (0.1,)), Point(2, (5.0,), 8, "3", (0.1,))], "no numbers"),
        ([Point(2, (10.0,), 8, None, (0.1,))], "no more points than unknowns"),
        ([Point(2, (10.0,), 8, None, (3.0,)), Point(4, (10.0,), 8, None, (4.0,))], "takes longer than a step"),
    ],
)
def test_why_there_is_no_fit(points: list[Point], said: str) -> None:
    found = fit(points, True)
    assert said in (found if isinstance(found, str) else found.problem)


# ---- runs and reports ------------------------------------------------------------------------------------------------


def test_a_run_is_told_with_all_that_it_printed(tmp_path: Path) -> None:
    program = "import os, sys; print(os.environ['SAID']); sys.exit('no more')"
    outcome = run([sys.executable, "-c", program], tmp_path / "log", 60, {"SAID": "hello"})
    assert (outcome.status, outcome.problem) == (1, "exit status 1")
    assert outcome.output == "hello\nno more\n" == outcome.log.read_text()
    outcome = run(["/there/is/none"], tmp_path / "log", 60)
    assert outcome.status == 127 and "/there/is/none" in outcome.output


def test_when_its_time_is_up_the_whole_group_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling_launch, "_GRACE", 0.1)
    outcome = run(["sh", "-c", "trap '' TERM; sleep 100 & echo $!; wait; wait"], tmp_path / "log", 1)
    assert outcome.status is None and outcome.problem.startswith("not finished after ")
    (child,) = map(int, outcome.output.split())
    end = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.01)


def strong(**changes: Any) -> Study:
    """Points of which 4 ranks share cores, and the model fits the others: G = 1 s."""
    points = [
        Point(1, (64.0, 63.0, 65.0), 64),
        Point(2, (64 / 0.55,), 64, None, (0.05,)),
        Point(4, (60.0,), 64, None, (0.2,), oversubscribed=True),
    ]
    return analyse("strong", ("train", "{batch}"), "images", True, points, **{"further": (), **changes})


def test_the_table_and_its_predictions() -> None:
    found = strong()
    lines = text(found, 3).splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    assert rows[:3] == [
        ["1", "64", "64.0", "63.0", "65.0", "1000.000", "1.00", "100.0%", "0.000", "1000.000", "+0.0%"],
        ["2", "64", "116.4", "116.4", "116.4", "550.000", "1.82", "90.9%", "50.000", "550.000", "+0.0%"],
        ["4", "64", "60.0", "60.0", "60.0", "1066.667", "0.94", "23.4%", "200.000", "450.000", "+57.8%", "*"],
    ]
    assert "# good fit" in lines and any("G = 1000.000 ms; least squares over 2 points" in line for line in lines)
    assert [prediction.ranks for prediction in found.predictions] == [4, 8, 16]
    assert sum("  predicted" in line for line in lines) == 3
    assert [prediction.ranks for prediction in strong(further=(2, 6)).predictions] == [6]
    points = [Point(1, (64.0,), 64), Point(2, (64.0,), 64, None, (0.05,))]
    shown = text(analyse("strong", ("x",), "images", True, points, ()), 1)
    assert "# BAD FIT: off by " in shown and "PREDICTED, not measured, by a model that fits badly; " in shown
    shown = text(analyse("weak", ("x",), "items", False, [Point(1, (5.0,)), Point(2, (9.0,))], ()), 1)
    assert "# no model: it is not known how many items a step has" in shown and "PREDICTED" not in shown


def sweep(*points: Point) -> Study:
    return analyse("sweep", ("x",), "items", False, points, ())


@pytest.mark.slow
@pytest.mark.parametrize(
    "study",
    [
        sweep(*[Point(n, (5.0 * n,), 8 * n, v, (0.1,)[: n - 1]) for v in ("1", "2") for n in (1, 2)]),
        sweep(Point(2, (5.0,), 8, "wide"), Point(2, (4.0,), 8, "deep")),
    ],
)
def test_every_kind_of_study_can_be_drawn(study: Study, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.scaling_plot import plot

    content = json.loads(json.dumps(document(study, {}, [])))
    written = plot(content, tmp_path / "scaling.png")
    assert [file.name for file in written] == ["scaling.png", "scaling.svg"]
    assert written[0].read_bytes().startswith(b"\x89PNG") and os.path.getsize(written[0]) > 10_000
