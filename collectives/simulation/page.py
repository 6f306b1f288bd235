"""A predicted step as a page: one HTML file with its drawings as SVG, which loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .2rem .8rem; border-bottom: 1px solid #ddd }
th { text-align: left; font-weight: 600 } td.number { text-align: right; font-variant-numeric: tabular-nums }
div { overflow-x: auto } svg { width: 100%; min-width: 36rem; height: auto }
text { font: 12px system-ui, sans-serif; fill: #222 }
"""
_WIDTH, _LABEL, _ROW = 860, 300, 22
_COLOURS = ("#0072B2", "#E69F00")


def page(content: Mapping[str, Any]) -> str:
    """The page of what `collectives simulate step` has found (`collectives.tools.simulate.document`)."""
    title = f"A step on {content['ranks']} ranks of {content['cluster']}"
    now, changes = content["step"], [(row["what"], row) for row in content["changes"]]
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>',
            f"<style>{_STYLE}</style><h1>{escape(title)}</h1>",
            f"<p>{1e3 * now['step']:.2f} ms a step, of which {1e3 * now['exposed']:.2f} ms wait for the gradients: ",
            f"{now['efficiency']:.1%} of the speed of ranks that need not communicate.</p>",
            f"<p>Figures of the cluster: {escape(content['source'])}.</p>",
            "<h2>By number of ranks</h2><p>Milliseconds of a step: computing, and what communication adds.</p>",
            _bars([(f"{row['ranks']} ranks", row) for row in content["scaling"]]),
            "<h2>What would change it</h2>",
            _bars(changes),
            _table([("as it is", now), *changes]),
            "<p>Predicted, not measured. Left out: cores and memory shared with computing, the optimizer, jitter.</p>",
            "</html>",
        ]
    )


def _bars(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """A bar of two parts for each step: computing, and the rest."""
    longest = max(row["step"] for _, row in rows)
    scale = (_WIDTH - _LABEL - 90) / longest
    drawn = []
    for number, (label, row) in enumerate(rows):
        top, left = number * _ROW, float(_LABEL)
        drawn.append(f'<text x="{_LABEL - 8}" y="{top + 15}" text-anchor="end">{escape(label)}</text>')
        for part, colour in zip((row["compute"], row["step"] - row["compute"]), _COLOURS, strict=True):
            width = max(0.0, part) * scale
            drawn.append(
                f'<rect x="{left:.1f}" y="{top + 3}" width="{width:.1f}" height="{_ROW - 6}" fill="{colour}"/>'
            )
            left += width
        drawn.append(f'<text x="{left + 6:.1f}" y="{top + 15}">{1e3 * row["step"]:.2f} ms</text>')
    return f'<div><svg viewBox="0 0 {_WIDTH} {len(rows) * _ROW + 4}" role="img">{"".join(drawn)}</svg></div>'


def _table(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    heading = ("change", "step", "communication", "exposed", "buckets", "efficiency")
    lines = ["<div><table><tr>" + "".join(f"<th>{name}</th>" for name in heading) + "</tr>"]
    for label, row in rows:
        times = (f"{1e3 * row[key]:.2f} ms" for key in heading[1:4])
        cells = (*times, str(row["buckets"]), f"{row['efficiency']:.1%}")
        numbers = "".join(f'<td class="number">{cell}</td>' for cell in cells)
        lines.append(f"<tr><td>{escape(label)}</td>{numbers}</tr>")
    return "".join([*lines, "</table></div>"])
