"""Times per row: a table and a plot; and how many deaths every cell of the matrix has had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.chaos.deaths import COLUMNS, ENDS, GRADIENTS, HOST_ENDS, ROWS
from benchmarks.chaos.judge import Admission, Times
from collectives.tools.bench.plot import GREY, INK, drawing, pictures, tidy
from collectives.tools.bench.report import machine

MEASURES = ("detect", "end", "form", "first_step", "total")
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7")


@dataclass
class Result:
    """What was found out.

    Attributes:
        deaths: planned ones; those that lead to them (``triggers``) come on top.
        problems: by job.
    """

    deaths: int = 0
    triggers: int = 0
    jobs: int = 0
    seconds: float = 0.0
    times: list[Times] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    problems: dict[str, list[str]] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Everything, ready for ``json.dump``."""
        return {"benchmark": "chaos", "machine": machine(), "unit": "s", **asdict(self)}


def _values(times: Sequence[Times], measure: str) -> list[float]:
    return [value for one in times if (value := getattr(one, measure)) is not None]


def _pair(values: Sequence[float]) -> str:
    return f"{median(values):7.3f} {max(values):7.3f}" if values else f"{'-':>7} {'-':>7}"


def table(result: Result) -> str:
    """Median and worst per row, of the deaths after which the survivors went on alone; then the matrix."""
    lines = [
        f"# {'seconds: median and worst':<26}{'n':>5}" + "".join(f"{name.replace('_', ' '):>17}" for name in MEASURES)
    ]
    rows = {row: [one for one in result.times if one.row == row] for row in (*ROWS, *HOST_ENDS, *ENDS)}
    for row, times in rows.items():
        if times:
            alone = [one for one in times if one.shrinks]
            parts = "".join(f"  {_pair(_values(alone, measure))}" for measure in MEASURES)
            lines.append(f"  {row:<26}{len(times):>5}{parts}")
    waited = [one for one in result.times if not one.shrinks]
    if waited:
        parts = "".join(f"  {_pair(_values(waited, measure))}" for measure in MEASURES)
        lines.append(f"  {'any, waits for newcomers':<26}{len(waited):>5}{parts}")
    if result.admissions:
        transfers, pauses = ([getattr(one, name) for one in result.admissions] for name in ("transfer", "pause"))
        lines.append(
            f"# newcomers admitted {len(result.admissions)} times: transfer {_pair(transfers)}, pause {_pair(pauses)}"
        )
    columns = (*COLUMNS, GRADIENTS)
    lines += ["#", "# deaths " + "".join(f"{column:>12}" for column in columns)]
    for row in ROWS:
        counts = (sum((one.row, one.column) == (row, column) for one in result.times) for column in columns)
        lines.append(f"  {row:<10}" + "".join(f"{count or '.':>11} " for count in counts).rstrip())
    wrong = sum(map(bool, result.problems.values()))
    lines.append(
        f"# {result.deaths} deaths, and {result.triggers} that led to them, in {result.jobs} jobs and "
        f"{result.seconds:.0f} s; {wrong} jobs wrong"
    )
    return "\n".join(lines)


def plot(result: Result, file: Path) -> tuple[Path, Path]:
    """Draw the times of every death, one line a row."""
    rows = [row for row in (*ROWS, *HOST_ENDS) if any(one.row == row and one.total is not None for one in result.times)]
    title = f"Elastic jobs: from a death to the next step, {result.deaths} deaths, up to 4 ranks"
    with drawing(file, len(MEASURES), (3.0 * len(MEASURES), 0.5 * len(rows) + 1.8), title, sharey=True) as (_, panels):
        for axes, measure, colour in zip(panels, MEASURES, _COLOURS, strict=True):
            for place, row in enumerate(rows):
                values = _values([one for one in result.times if one.row == row and one.shrinks], measure)
                axes.plot(values, [place] * len(values), "o", color=colour, alpha=0.35, markersize=5, markeredgewidth=0)
                if values:
                    axes.plot([median(values)], [place], "|", color=INK, markersize=14, markeredgewidth=1.6)
            axes.set_xscale("log")
            axes.set_title(measure.replace("_", " "), fontsize=10, loc="left")
            axes.set_xlabel("seconds")
            axes.set_yticks(range(len(rows)), rows)
            axes.set_ylim(len(rows) - 0.5, -0.5)
            axes.axvline(1.0, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))
            tidy(axes, "x")
    return pictures(file)
