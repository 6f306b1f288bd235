"""What a scaling study prints, and its JSON file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

from benchmarks.scaling_model import Fit, Point, Prediction, RingCost, compare, fit, predict, ring_cost
from benchmarks.scaling_plan import STRONG, SWEEP, WEAK
from collectives.tools.bench import report

DEFINITIONS = {
    "throughput": "items per second of all ranks together, the median of the runs, or the best with --best",
    "step": "T(W) = items of a step of all ranks together / throughput",
    "speedup": "S(W) = throughput(W) / throughput(W0), W0 the fewest ranks (with the same value); "
    "where a sweep's value ran on one number of ranks: its throughput / that of the first value",
    "efficiency": "E(W) = S(W) W0 / W; where a sweep's value ran on one number of ranks: 1 - C/T",
    "communication": "C(W), the all-reduce of a step's gradients, measured by itself under the same launcher; C(1) = 0",
    "model": "T = G/W + C(W) where the ranks share a step's work, T = G + C(W) where each has its own; G by least "
    "squares of T - C; "
    "in a sweep over v, G = g0 + g1 v",
}


@dataclass(frozen=True)
class Study:
    """A study's results, and what follows from them."""

    mode: str
    command: tuple[str, ...]
    unit: str
    divided: bool
    points: tuple[Point, ...]
    fit: Fit | str
    cost: RingCost | None
    predictions: tuple[Prediction, ...] = field(default=())

    @property
    def formula(self) -> str:
        return "T = G/W + C(W)" if self.divided else "T = G + C(W)"

    def modelled(self, point: Point) -> float | None:
        """The model's T of a point."""
        if isinstance(self.fit, str) or point.communication is None:
            return None
        return self.fit.compute(point.ranks, point.value) + point.communication


def analyse(
    mode: str, command: Sequence[str], unit: str, divided: bool, points: Sequence[Point], further: Sequence[int]
) -> Study:
    """Fit the model, and predict ``further`` numbers of ranks of strong or weak scaling where there is a fit.

    Unless any are named, these are 2, 4 and 8 times the most ranks that had cores of their own.
    """
    model, cost = fit(points, divided), ring_cost(points)
    predictions: list[Prediction] = []
    if mode != SWEEP and not isinstance(model, str) and cost is not None:
        fitted = {point.ranks for point in points if not point.oversubscribed}
        wanted = further or [max(fitted) * factor for factor in (2, 4, 8)]
        predictions = predict(model, cost, sorted(set(wanted) - fitted), points)
    return Study(mode, tuple(command), unit, divided, tuple(points), model, cost, tuple(predictions))


def text(study: Study, runs: int) -> str:
    """The table, the model, and the predictions."""
    sweeps = study.mode == SWEEP
    width = max([8, *(len(point.value or "") for point in study.points)])
    turns = f"{'best' if study.points[0].best else 'median'} of {runs} runs in turn" if runs > 1 else "1 run"
    heads = {
        STRONG: "strong scaling, the work divided among the ranks",
        WEAK: "weak scaling, the work of each rank fixed",
        SWEEP: "sweep over {value}",
    }
    lines = [
        f"# {heads[study.mode]}: {shlex.join(study.command)}",
        f"# {study.unit}/s: of all ranks together, {turns}, smallest and largest; step: items / throughput",
        f"# {_against(study)}",
        f"# C: the gradients' all-reduce, measured by itself; model: {study.formula}; error: (step - model) / step",
        f"#{'value' if sweeps else '':>{width if sweeps else 0}}{'ranks':>6}{'items/step':>12}{study.unit + '/s':>14}"
        f"{'min':>11}{'max':>11}{'step ms':>11}{'speed-up':>10}{'efficiency':>12}{'C ms':>10}{'model ms':>11}"
        f"{'error':>8}",
    ]
    for point in study.points:
        gain, modelled, step = compare(point, study.points), study.modelled(point), point.step
        error = "-" if modelled is None or step is None else f"{(step - modelled) / step:+.1%}"
        name = f"{point.value:>{width}}" if sweeps else ""
        lines.append(
            f" {name}{point.ranks:>6}{_count(point.work):>12}{point.rate:>14,.1f}{min(point.rates):>11,.1f}"
            f"{max(point.rates):>11,.1f}"
            f"{_milliseconds(step):>11}{gain.speedup:>10.2f}{_percent(gain.efficiency):>12}"
            f"{_milliseconds(point.communication):>10}"
            f"{_milliseconds(modelled):>11}{error:>8}" + (" *" if point.oversubscribed else "")
        )
    if any(point.oversubscribed for point in study.points):
        lines.append("# * more ranks than cores: shown beside the model, but not part of its fit")
    return "\n".join([*lines, *_model(study), *_predictions(study)])


def _model(study: Study) -> list[str]:
    model = study.fit
    if isinstance(model, str):
        return [f"# no model: {model}"]
    if len(model.coefficients) == 2:
        fixed, slope = model.coefficients
        formula = f"G = {fixed * 1e3:.3f} ms + {slope * 1e3:.6g} ms x value"
    else:
        formula = f"G = {model.coefficients[0] * 1e3:.3f} ms"
    r_squared = "" if model.r_squared is None else f", R² {model.r_squared:.4f}"
    verdict = "BAD FIT: " + model.problem.replace("; ", "\n# ") if model.problem else "good fit"
    return [
        f"# model {study.formula}, {formula}; least squares over {model.points} points{r_squared}, largest error "
        f"{model.worst:.1%}",
        f"# {verdict}",
    ]


def _predictions(study: Study) -> list[str]:
    if not study.predictions or study.cost is None or isinstance(study.fit, str):
        return []
    doubt = ", by a model that fits badly" if study.fit.problem else ""
    lines = [
        f"# PREDICTED, not measured{doubt}; C(W) = {study.cost.latency * 1e3:.3f} ms (W-1) + "
        f"{study.cost.transfer * 1e3:.3f} ms (W-1)/W, "
        "a ring's cost through the measured C:",
    ]
    for prediction in study.predictions:
        lines.append(
            f"#{prediction.ranks:>6}{'':>12}{prediction.rate:>14,.1f}{'':>22}{prediction.step * 1e3:>11.3f}"
            f"{prediction.speedup:>10.2f}"
            f"{prediction.efficiency:>12.1%}"
            f"{prediction.communication * 1e3:>10.3f}  predicted"
        )
    return lines


def _against(study: Study) -> str:
    """What speed-up and efficiency refer to."""
    if study.mode != SWEEP:
        first = min(point.ranks for point in study.points)
        return (
            f"speed-up: throughput / that of {first} rank{'s' if first > 1 else ''}; efficiency: speed-up x "
            f"{first} / ranks"
        )
    if any(point.value == other.value and point is not other for point in study.points for other in study.points):
        return "speed-up: throughput / that of the value's fewest ranks; efficiency: speed-up x fewest / ranks"
    return "speed-up: throughput / that of the first value; efficiency: 1 - C / step"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


def _count(number: int | None) -> str:
    return "-" if number is None else str(number)


def document(study: Study, settings: dict[str, Any], runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Everything that was asked, run and found, ready for ``json.dump``."""
    results = []
    for point in study.points:
        modelled, step = study.modelled(point), point.step
        results.append(
            {
                **asdict(point),
                "rate": point.rate,
                "step": step,
                **asdict(compare(point, study.points)),
                "communication": point.communication,
                "modelled": modelled,
                "residual": None if modelled is None or step is None else step - modelled,
            }
        )
    return {
        "benchmark": "scaling",
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "mode": study.mode,
        "command": list(study.command),
        "settings": settings,
        "machine": report.machine(),
        "units": {"rate": f"{study.unit}/s", "times": "seconds"},
        "unit": study.unit,
        "divided": study.divided,
        "definitions": DEFINITIONS,
        "points": results,
        "fit": {"reason": study.fit} if isinstance(study.fit, str) else study.fit.as_dict(),
        "communication": None if study.cost is None else asdict(study.cost),
        "predictions": [asdict(prediction) for prediction in study.predictions],
        "runs": list(runs),
    }
