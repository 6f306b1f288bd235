"""The plot of bus bandwidth against size: ``collectives bench plot RESULTS.json PICTURE.png`` draws it again."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from collectives.tools.bench.cli import Parser
from collectives.tools.bench.collective import FLOOR
from collectives.tools.bench.measure import OURS

# Okabe and Ito's palette: told apart with every kind of colour vision, and in print.
_COLOURS = ("#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5C00", "#B0B000")
_OUR_COLOUR = "#0072B2"
_MARKERS = "sD^vP*X"
_LIMIT = "limit (memcpy)"
INK, GREY, _PALE = "#222222", "#888888", "#D9D9D9"
_DARK = f"""@media (prefers-color-scheme: dark) {{
svg, [style*="fill: {INK}"] {{ fill: #e6edf3 !important }}
[style*="fill: #ffffff"] {{ fill: none !important }}
[style*="stroke: {_PALE.lower()}"] {{ stroke: #444c56 !important }}
}}"""
"""Colours of an SVG on a dark page."""


def plot(content: dict[str, Any], file: Path) -> tuple[Path, Path]:
    """Draw what `collectives.tools.bench.report.document` returned; returns the `pictures`."""
    from matplotlib.ticker import FuncFormatter

    records = [record for record in content["records"] if record["time"]]
    modes = list(dict.fromkeys(record["mode"] for record in records))
    size = (2.2 + 4.9 * max(1, len(modes)), 4.9)
    with drawing(file, max(1, len(modes)), size, _title(content, records), sharey=True) as (figure, panels):
        styles = _styles(records)
        handles: dict[str, Any] = {}
        for axes, mode in zip(panels, modes, strict=False):
            for (dtype, op, contestant), points in _lines(records, mode).items():
                label = _label(records, dtype, op, contestant)
                (handles[label],) = axes.plot(
                    *zip(*sorted(points), strict=True), label=label, **styles[dtype, op, contestant]
                )
            axes.set_title(mode, fontsize=10, loc="left")
            axes.set_xlabel("size")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_bytes(value)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            tidy(axes, "both")
        panels[0].set_ylabel("bus bandwidth (GB/s)")
        if handles:
            # The limit is the legend's last entry, even after contestants that appear only in the second panel.
            handles = dict(sorted(handles.items(), key=lambda item: item[0].startswith(_LIMIT)))
            figure.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False)
    return pictures(file)


def pictures(file: Path) -> tuple[Path, Path]:
    """The two files that are drawn: the suffix is replaced, as PNG and SVG are both written."""
    return file.with_suffix(".png"), file.with_suffix(".svg")


@contextmanager
def drawing(
    file: Path, panels: int, size: tuple[float, float], title: str, **options: Any
) -> Iterator[tuple[Any, Sequence[Any]]]:
    """A figure and its panels, side by side; written afterwards."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: dict[Any, Any] = {
        "font.size": 10,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": GREY,
        "svg.hashsalt": "collectives",
    }
    with matplotlib.rc_context(style):
        figure, grid = pyplot.subplots(1, panels, figsize=size, squeeze=False, layout="constrained", **options)
        yield figure, grid[0]
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        png, svg = pictures(file)
        figure.savefig(png, dpi=160)
        figure.savefig(svg, metadata={"Date": None})
        svg.write_text(svg.read_text().replace("</style>", f"\n{_DARK}</style>", 1))
        pyplot.close(figure)


def tidy(axes: Any, grid: str) -> None:
    """Pale lines behind the data along the axes ``grid``, and no frame."""
    axes.grid(True, which="major", axis=grid, color=_PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0)
    axes.spines[["top", "right"]].set_visible(False)


def _lines(records: list[dict[str, Any]], mode: str) -> dict[tuple[str, str, str], list[tuple[float, float]]]:
    """The points (bytes, GB/s) of every line of one panel."""
    lines: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for record in records:
        if record["mode"] == mode and record["busbw"] > 0:
            lines.setdefault((record["dtype"], record["op"], record["contestant"]), []).append(
                (record["size"], record["busbw"])
            )
    return lines


def _styles(records: list[dict[str, Any]]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Colour tells the contestant, the dash the dtype and operation; ours is thick, the limit thin and grey."""
    contestants = list(dict.fromkeys(record["contestant"] for record in records))
    kinds = list(dict.fromkeys((record["dtype"], record["op"]) for record in records))
    others = [contestant for contestant in contestants if contestant not in (OURS, FLOOR)]
    dashes = ["-", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5))]
    styles = {}
    for contestant in contestants:
        for place, kind in enumerate(kinds):
            if contestant == OURS:
                look: dict[str, Any] = {
                    "color": _OUR_COLOUR,
                    "linewidth": 2.4,
                    "marker": "o",
                    "markersize": 5,
                    "zorder": 4,
                }
            elif contestant == FLOOR:
                look = {"color": GREY, "linewidth": 1.2, "marker": "", "zorder": 2}
            else:
                index = others.index(contestant)
                marker = _MARKERS[index % len(_MARKERS)]
                look = {
                    "color": _COLOURS[index % len(_COLOURS)],
                    "linewidth": 1.6,
                    "marker": marker,
                    "markersize": 4.5,
                    "zorder": 3,
                }
            dash = (0, (6, 3)) if contestant == FLOOR and len(kinds) == 1 else dashes[place % len(dashes)]
            styles[(*kind, contestant)] = {**look, "linestyle": dash}
    return styles


def _label(records: list[dict[str, Any]], dtype: str, op: str, contestant: str) -> str:
    """What the legend says: no more than what tells the lines apart."""
    name = _LIMIT if contestant == FLOOR else contestant
    several_types = len({record["dtype"] for record in records}) > 1
    several_ops = len({record["op"] for record in records}) > 1
    return " ".join([name, *([dtype] if several_types else []), *([op] if several_ops else [])])


def _title(content: dict[str, Any], records: list[dict[str, Any]]) -> str:
    kinds = sorted({(record["dtype"], record["op"]) for record in records})
    what = " ".join(word for word in kinds[0] if word != "none") if len(kinds) == 1 else ""
    machine = content["machine"]
    where = ", ".join(word for word in (machine["mpi"], machine["processor"]) if word)
    return f"{content['benchmark']} {what}".strip() + f", {content['ranks']} ranks\n{where}"


def short_bytes(value: float) -> str:
    """A size as an axis shows it: 64K, 16M."""
    for power, unit in ((30, "G"), (20, "M"), (10, "K")):
        if value >= 1 << power:
            return f"{value / (1 << power):g}{unit}"
    return f"{value:g}"


def redraw(
    program: str,
    what: str,
    draw: Callable[[dict[str, Any], Path], tuple[Path, Path]],
    arguments: Sequence[str] | None = None,
) -> None:
    """The program that draws a JSON file again."""
    flags = Parser(prog=program, description=f"Draw {what}, as PNG and as SVG.")
    flags.add_argument("results", type=Path, help=what)
    flags.add_argument("picture", type=Path, help="where to draw; .png and .svg are both written")
    options = flags.parse_args(arguments)
    flags.check_drawing()
    try:
        written = draw(json.loads(options.results.read_text()), options.picture)
    except (OSError, ValueError, KeyError) as error:
        print(f"{program}: error: cannot draw {options.results}: {type(error).__name__}: {error} [U4]", file=sys.stderr)
        sys.exit(2)
    print(*written)
