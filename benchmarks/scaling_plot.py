"""A scaling study's plot: ``python -m benchmarks.scaling_plot scaling.json picture.png`` draws it again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from collectives.tools.bench.plot import GREY, INK, drawing, pictures, redraw, tidy

# Okabe and Ito's palette: told apart with every kind of colour vision, and in print.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MODEL = {"color": "#D55E00", "linewidth": 1.6, "linestyle": (0, (5, 2))}


def plot(content: dict[str, Any], file: Path) -> tuple[Path, Path]:
    """Draw what `benchmarks.scaling_report.document` returned; returns the `pictures`."""
    panels: list[Callable[[Any, dict[str, Any]], None]] = [_speedup, _efficiency, _step]
    if content["mode"] == "sweep":
        panels = [_throughput_of_values, _efficiency_of_values, _step_of_values]
    if not any(point["step"] for point in content["points"]):
        del panels[2]
    with drawing(file, len(panels), (4.6 * len(panels) + 0.4, 4.9), _title(content)) as (_, grid):
        for axes, draw in zip(grid, panels, strict=True):
            draw(axes, content)
            tidy(axes, "y")
            if axes.get_yscale() == "linear":
                axes.set_ylim(bottom=0)
            handles, labels = axes.get_legend_handles_labels()
            if handles:
                # Below the picture: there is no corner that is free in every study.
                axes.legend(
                    handles, labels, frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2
                )
    return pictures(file)


def _title(content: dict[str, Any]) -> str:
    command = " ".join(content["command"])
    shown = command if len(command) <= 100 else f"{command[:99]}…"
    fit = content["fit"]
    verdict = "no model: " + fit["reason"].partition(":")[0] if "reason" in fit else _verdict(content)
    # No formulas in it: a command's dollars are dollars.
    kind = "sweep" if content["mode"] == "sweep" else f"{content['mode']} scaling"
    return f"{kind}: {shown}\n{verdict}".replace("$", r"\$")


def _verdict(content: dict[str, Any]) -> str:
    fit = content["fit"]
    formula = "T = G/W + C(W)" if content["divided"] else "T = G + C(W)"
    g = " + ".join(f"{value * 1e3:.4g} ms{' v' * place}" for place, value in enumerate(fit["coefficients"]))
    quality = f"largest error {fit['worst']:.1%}" + ("" if fit["r_squared"] is None else f", R² {fit['r_squared']:.3f}")
    return f"{formula}, G = {g}; {quality}: {'a bad fit' if fit['problem'] else 'a good fit'}"


def _fitted(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The points whose ranks had cores of their own."""
    return [point for point in content["points"] if not point["oversubscribed"]]


def _modelled(content: dict[str, Any]) -> list[tuple[int, float]]:
    """(ranks, model's step), measured and predicted; not of ranks that shared cores, as C did then."""
    steps = [(point["ranks"], point["modelled"]) for point in _fitted(content) if point["modelled"]]
    return sorted(steps + [(point["ranks"], point["step"]) for point in content["predictions"]])


def _ranks_axis(axes: Any, content: dict[str, Any]) -> list[int]:
    """All numbers of ranks, on a logarithmic axis that names each."""
    ranks = sorted({point["ranks"] for point in (*content["points"], *content["predictions"])})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(count) for count in ranks])
    axes.set_xticks([], minor=True)
    axes.set_xlim(ranks[0] / 1.25, ranks[-1] * 1.25)
    axes.set_xlabel("ranks")
    fitted = [point["ranks"] for point in _fitted(content)]
    if content["predictions"] and ranks[-1] > max(fitted):
        begin = (max(fitted) * min(count for count in ranks if count > max(fitted))) ** 0.5
        axes.axvspan(begin, ranks[-1] * 1.25, color="#F3F3F3", zorder=0)
        axes.set_title("model: predicted", fontsize=9, loc="right", color=GREY)
    return ranks


def _relative(content: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """The point that speed-ups refer to, and its ranks."""
    first = min(content["points"], key=lambda point: point["ranks"])
    return first, float(first["ranks"])


Scale = Callable[[float, int], float]
"""(throughput, ranks) -> what is drawn of it."""


def _model_line(axes: Any, content: dict[str, Any], scale: Scale) -> None:
    """The model's throughput at every number of ranks, if there is a model."""
    first, fewest = _relative(content)
    works = {
        count: first["work"] if content["divided"] else first["work"] / fewest * count
        for count, _ in _modelled(content)
    }
    if works:
        line = [scale(works[count] / step, count) for count, step in _modelled(content)]
        axes.plot(list(works), line, label="model", **_MODEL)


def _measured(axes: Any, content: dict[str, Any], scale: Scale) -> None:
    """The measured points, each with a bar from its slowest to its quickest run."""
    for look, points in _looks(content):
        ranks = [point["ranks"] for point in points]
        middle = [scale(point["rate"], point["ranks"]) for point in points]
        low = [value - scale(min(point["rates"]), point["ranks"]) for value, point in zip(middle, points, strict=True)]
        high = [scale(max(point["rates"]), point["ranks"]) - value for value, point in zip(middle, points, strict=True)]
        axes.errorbar(ranks, middle, yerr=(low, high), capsize=3, elinewidth=1.2, **look)


def _looks(content: dict[str, Any]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The measured points by ranks: on a line, and hollow where ranks shared cores."""
    points = sorted(content["points"], key=lambda point: point["ranks"])
    own: dict[str, Any] = {"linewidth": 2.2, "label": "measured"}
    shared: dict[str, Any] = {"linestyle": "", "markerfacecolor": "white", "label": "measured, more ranks than cores"}
    groups = [
        (own, [p for p in points if not p["oversubscribed"]]),
        (shared, [p for p in points if p["oversubscribed"]]),
    ]
    return [({"color": _COLOURS[0], "marker": "o", "zorder": 4, **look}, group) for look, group in groups if group]


def _speedup(axes: Any, content: dict[str, Any]) -> None:
    first, fewest = _relative(content)
    ranks = _ranks_axis(axes, content)
    axes.set_yscale("log", base=2)
    axes.plot(ranks, [count / fewest for count in ranks], color=GREY, linewidth=1.2, label="ideal")
    _measured(axes, content, lambda rate, count: rate / first["rate"])
    _model_line(axes, content, lambda rate, count: rate / first["rate"])
    ticks = sorted({1.0, *(count / fewest for count in ranks)})
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.set_title(
        f"speed-up against {first['ranks']} rank{'s' if first['ranks'] > 1 else ''}", fontsize=10, loc="left"
    )


def _efficiency(axes: Any, content: dict[str, Any]) -> None:
    first, fewest = _relative(content)
    ranks = _ranks_axis(axes, content)

    def share(rate: float, count: int) -> float:
        return float(100 * rate / first["rate"] * fewest / count)

    axes.plot(ranks, [100.0] * len(ranks), color=GREY, linewidth=1.2, label="ideal")
    _measured(axes, content, share)
    _model_line(axes, content, share)
    axes.set_title("efficiency (%)", fontsize=10, loc="left")


def _step(axes: Any, content: dict[str, Any]) -> None:
    """The time of a step: measured, and the model's two parts one upon the other."""
    _ranks_axis(axes, content)
    for look, points in _looks(content):
        axes.plot([point["ranks"] for point in points], [point["step"] * 1e3 for point in points], **look)
    costs = {point["ranks"]: point["communication"] for point in (*_fitted(content), *content["predictions"])}
    if model := _modelled(content):
        ranks, steps = zip(*model, strict=True)
        compute = [(step - costs[count]) * 1e3 for count, step in model]
        axes.fill_between(
            ranks, 0, compute, color="#56B4E9", alpha=0.45, linewidth=0, label="G/W" if content["divided"] else "G"
        )
        axes.fill_between(
            ranks, compute, [step * 1e3 for step in steps], color="#E69F00", alpha=0.5, linewidth=0, label="C(W)"
        )
        axes.plot(ranks, [step * 1e3 for step in steps], label="model", **_MODEL)
    axes.set_title("a step (ms)", fontsize=10, loc="left")


def _series(content: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """A sweep's points by number of ranks, in the order of the values."""
    by_ranks: dict[int, list[dict[str, Any]]] = {}
    for point in content["points"]:
        by_ranks.setdefault(point["ranks"], []).append(point)
    return by_ranks


def _values_axis(axes: Any, content: dict[str, Any]) -> dict[str, float]:
    """Where each value stands: as a number if all are, otherwise one beside the other."""
    values = list(dict.fromkeys(point["value"] for point in content["points"]))
    try:
        places = {value: float(value) for value in values}
    except ValueError:
        places = {value: float(place) for place, value in enumerate(values)}
    axes.set_xticks([places[value] for value in values], values)
    axes.set_xlabel("value")
    return places


def _lines_of_values(axes: Any, content: dict[str, Any], key: str, scale: float) -> None:
    places = _values_axis(axes, content)
    for index, (ranks, points) in enumerate(_series(content).items()):
        line = sorted((places[point["value"]], point[key] * scale) for point in points if point[key] is not None)
        if line:
            label = f"{ranks} rank{'s' if ranks > 1 else ''}"
            axes.plot(
                *zip(*line, strict=True), color=_COLOURS[index % len(_COLOURS)], linewidth=2.0, marker="o", label=label
            )


def _throughput_of_values(axes: Any, content: dict[str, Any]) -> None:
    _lines_of_values(axes, content, "rate", 1.0)
    axes.set_title(f"{content['unit']}/s", fontsize=10, loc="left")


def _efficiency_of_values(axes: Any, content: dict[str, Any]) -> None:
    _lines_of_values(axes, content, "efficiency", 100.0)
    axes.set_title("efficiency (%)", fontsize=10, loc="left")


def _step_of_values(axes: Any, content: dict[str, Any]) -> None:
    _lines_of_values(axes, content, "step", 1e3)
    places = _values_axis(axes, content)
    for index, points in enumerate(_series(content).values()):
        line = sorted(
            (places[point["value"]], point["modelled"] * 1e3) for point in points if point["modelled"] is not None
        )
        if line:
            label = {"label": "model"} if index == 0 else {}
            axes.plot(*zip(*line, strict=True), color=INK, linewidth=1.3, linestyle=(0, (5, 2)), **label)
    axes.set_title("a step (ms)", fontsize=10, loc="left")


if __name__ == "__main__":
    redraw("benchmarks.scaling_plot", "the JSON file of a scaling study", plot)
