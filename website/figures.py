"""Draw the two figures of the README that come from other places: ``python -m website.figures``.

``first-figure.svg`` has bars for the row of 64 MiB in docs/peers.md; ``ring.svg`` shows the rounds of a ring, one after
the other, as `collectives.tools.drawing` draws them. Where reduced motion is preferred, the first round stands still.
"""

from __future__ import annotations

import re
from pathlib import Path

from collectives.tools import drawing

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-labelledby="title">
<title id="title">{title}</title>
<style>
svg {{ color: #1f2328; --collectives-ink: #1f2328 }}
text {{ fill: currentColor; font: 13px system-ui, sans-serif }}
.ours {{ fill: #0072b2 }}
.theirs {{ fill: #9aa2ab }}
@media (prefers-color-scheme: dark) {{
svg {{ color: #e6edf3 }}
.ours {{ fill: #4da3e0 }}
.theirs {{ fill: #6e7681 }}
}}
{style}</style>
"""
FRAME = """\
svg svg text { font: 11px system-ui, sans-serif; text-anchor: middle; dominant-baseline: central }
.on { fill: var(--collectives-ink) }
.cell { fill: none; stroke: currentColor; stroke-opacity: .35 }
.new { stroke-opacity: 1; stroke-width: 2.5 }
.arrow { fill: none; stroke-width: 2 }
"""
SECONDS = 1.5
"""That a round is seen."""


def milliseconds() -> dict[str, float]:
    """By contestant: the time of an all-reduce of 64 MiB, 2 ranks on one host, from docs/peers.md."""
    page = (ROOT / "docs" / "peers.md").read_text()
    section = page.split("### allreduce, 2 ranks\n")[1]
    names, row = (re.search(rf"^\| {first} \|(.*) \|$", section, re.MULTILINE) for first in ("bytes", "64M"))
    assert names and row
    mapped, *ratios = (float(cell.replace(",", "")) for cell in row[1].split("|"))
    contestants = [name.strip() for name in names[1].split("|")][1:]
    times = {"ours, mapped": mapped, **{name: mapped * ratio for name, ratio in zip(contestants, ratios, strict=True)}}
    return {name: time / 1000 for name, time in times.items()}


def bars() -> str:
    times = milliseconds()
    shown = {
        "collectives, mapped memory": times["ours, mapped"],
        "collectives, any array": times["ours, private"],
        **{name: times[name] for name in ("Open MPI", "MPICH", "gloo")},
    }
    title = "All-reduce of 64 MiB float32, 2 ranks on one host, milliseconds (shorter is better)"
    lines = [HEAD.format(width=700, height=152, title=title, style=""), f'<text x="0" y="14">{title}</text>']
    for number, (name, time) in enumerate(shown.items()):
        y, length = 26 + 25 * number, 400 * time / max(shown.values())
        kind = "ours" if name.startswith("collectives") else "theirs"
        lines += [
            f'<text x="0" y="{y + 14}">{name}</text>',
            f'<rect class="{kind}" x="200" y="{y}" width="{length:.0f}" height="19" rx="2"/>',
            f'<text x="{208 + length:.0f}" y="{y + 14}">{time:.1f}</text>',
        ]
    return "\n".join([*lines, "</svg>\n"])


def ring() -> str:
    page = drawing.page_element("allreduce", "ring", 4)
    panels = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    captions = [re.sub("<.*?>", "", caption) for caption in re.findall(r"<p>(.*?)</p></li>", page)]
    count = len(captions)
    style = FRAME + (
        f".frame {{ visibility: hidden; animation: frame {count * SECONDS}s step-end infinite }}\n"
        f"@keyframes frame {{ 0% {{ visibility: visible }} {100 / count:.3f}%, 100% {{ visibility: hidden }} }}\n"
        "@media (prefers-reduced-motion: reduce) { .frame { animation: none } .still { visibility: visible } }\n"
    )
    title = "A ring all-reduce of four ranks: who sends which chunk in each round, and what each rank holds afterwards"
    lines = [HEAD.format(width=560, height=270, title=title, style=style)]
    for number, caption in enumerate(captions):
        circle, matrix = panels[2 * number : 2 * number + 2]
        kind, delay = "frame still" if number == 1 else "frame", (number - 1) % count * SECONDS
        lines += [
            f'<g class="{kind}" style="animation-delay: {delay}s">',
            circle.replace("<svg ", '<svg x="0" y="0" ', 1),
            matrix.replace("<svg ", '<svg x="290" y="50" ', 1),
            f'<text x="0" y="262">{caption}</text>',
            "</g>",
        ]
    return "\n".join([*lines, "</svg>\n"])


FIGURES = {"first-figure.svg": bars, "ring.svg": ring}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        (PICTURES / name).write_text(draw())
