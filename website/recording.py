"""Record a training from which a rank is killed, as a picture that moves: ``python -m website.recording``.

It runs ``examples/numpy_elastic.py``, kills rank 1 after a third of the steps, and writes what was printed, with the
pauses between the lines, to ``docs/pictures/killed-rank.svg``. One CSS animation moves the lines up; it begins just
before the rank is killed. Where reduced motion is preferred, the lines around that moment stand still.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "pictures" / "killed-rank.svg"
COMMAND = "collectivesrun -np 3 --min-np 2 python examples/numpy_elastic.py"
KILLED_AFTER = "step  7"
ROWS, ROW, WIDTH = 14, 18, 940
"""Lines that are seen at once, and pixels."""
REST = 4.0
"""Seconds that the last line is seen before it begins again."""
STILL = 9
"""Lines after the kill that the still has."""

SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-labelledby="title">
<title id="title">A rank of three is killed; the loss of the other two goes on, and a new rank joins</title>
<style>
rect {{ fill: #fff; stroke: #d0d7de }}
text {{ fill: #1f2328; font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre }}
.note {{ fill: #656d76 }}
.kill {{ fill: #cf222e; font-weight: bold }}
.input {{ font-weight: bold }}
@media (prefers-color-scheme: dark) {{
rect {{ fill: #0d1117; stroke: #30363d }}
text {{ fill: #e6edf3 }}
.note {{ fill: #8d96a0 }}
.kill {{ fill: #ff7b72 }}
}}
g g {{ transform: translateY({still}px); animation: lines {seconds:.2f}s step-end -{begin:.2f}s infinite }}
@keyframes lines {{
{keyframes}
}}
@media (prefers-reduced-motion: reduce) {{ g g {{ animation: none }} }}
</style>
<rect x="0.5" y="0.5" width="{right}" height="{bottom}" rx="6"/>
<clipPath id="screen"><rect y="5" width="{width}" height="{screen}"/></clipPath>
<g clip-path="url(#screen)"><g>
{lines}
</g></g>
</svg>
"""


def record(*options: str) -> list[tuple[float, str, str]]:
    """Run the job, and kill rank 1.

    Args:
        options: further ones of the example.

    Returns:
        The lines: seconds since the start, a class of the style, the text.
    """
    begin = time.monotonic()
    lines = [(0.0, "input", f"$ {COMMAND}")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    words = COMMAND.replace("collectivesrun", f"{sys.executable} -m collectives.launch").replace(
        " python ", f" {sys.executable} "
    )
    job = subprocess.Popen(
        [*words.split(), *options],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert job.stdout
    victim = 0
    for line in job.stdout:
        lines.append((time.monotonic() - begin, "" if line.startswith("[") else "note", line.rstrip()))
        if match := re.search(r"rank 1 is process (\d+)", line):
            victim = victim or int(match[1])
        if KILLED_AFTER in line:
            lines.append((time.monotonic() - begin, "kill", f"$ kill -KILL {victim}        # rank 1, from elsewhere"))
            os.kill(victim, signal.SIGKILL)
    if job.wait() != 0:
        raise SystemExit(f"exit code {job.returncode}:\n" + "\n".join(text for _, _, text in lines))
    return lines


def picture(lines: list[tuple[float, str, str]]) -> str:
    seconds = lines[-1][0] + REST
    places = [ROW * (min(ROWS, len(lines)) - number) for number in range(1, len(lines) + 1)]
    steps = [(100 * at / seconds, place) for (at, _, _), place in zip(lines, places, strict=True)]
    height = ROWS * ROW + 14
    kill = next(number for number, (_, kind, _) in enumerate(lines) if kind == "kill")
    return SVG.format(
        width=WIDTH,
        height=height,
        screen=ROWS * ROW,
        right=WIDTH - 1,
        bottom=height - 1,
        still=places[min(kill + STILL, len(lines) - 1)],
        seconds=seconds,
        begin=lines[max(0, kill - 2)][0],
        keyframes="\n".join(f"{percent:.2f}% {{ transform: translateY({place}px) }}" for percent, place in steps),
        lines="\n".join(
            f'<text x="12" y="{number * ROW}" class="{kind}">{escape(text)}</text>'
            for number, (_, kind, text) in enumerate(lines, 1)
        ),
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(record()))
