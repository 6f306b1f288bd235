"""Pictures of algorithms, from the schedules that the engine executes.

A picture has a frame for each round: on a circle of ranks who sends which chunks to whom, and beside it, rank by rank,
what each chunk holds afterwards. It is HTML with inline SVG and needs nothing from elsewhere. Without scripts all
frames are in a row; a script of a few lines shows one at a time, with buttons and arrow keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, cos, hypot, pi, sin

from collectives.base.errors import InvalidArgumentError
from collectives.schedules import registry
from collectives.schedules.algorithm import Algorithm
from collectives.schedules.proof.verify import held_values
from collectives.schedules.schedule import Schedule, Step, StepKind

MOST_RANKS = 16
"""Ranks of a picture; more cannot be told apart."""

_STYLE = """\
.collectives-steps{margin:1em 0;font:14px/1.5 system-ui,sans-serif;color:inherit}
.collectives-steps ol{display:flex;gap:2em;margin:0;padding:0;list-style:none;overflow-x:auto}
.collectives-steps li{flex:none;max-width:100%;margin:0;padding:0}
.collectives-steps[data-on] li:not(.now){display:none}
.collectives-steps .panels{display:flex;flex-wrap:wrap;gap:1em 2em;align-items:center}
.collectives-steps svg{max-width:100%;height:auto}
.collectives-steps svg text{fill:currentColor;font:11px system-ui,sans-serif;text-anchor:middle;\
dominant-baseline:central}
.collectives-steps svg .on{fill:var(--collectives-ink,#111)}
.collectives-steps .cell{fill:none;stroke:currentColor;stroke-opacity:.35}
.collectives-steps .new{stroke-opacity:1;stroke-width:2.5}
.collectives-steps .arrow{fill:none;stroke-width:2}
.collectives-steps button{font:inherit;color:inherit;background:none;border:1px solid;border-radius:4px;\
padding:.2em .8em;margin-right:.5em;cursor:pointer}
.collectives-steps button:disabled{opacity:.4;cursor:default}
@media (prefers-reduced-motion:no-preference){.collectives-steps[data-on] .arrow{stroke-dasharray:6 4;\
animation:collectives-flow .6s linear infinite}}
@keyframes collectives-flow{to{stroke-dashoffset:-10}}"""

_SCRIPT = """\
document.querySelectorAll(".collectives-steps:not([data-on])").forEach(function(box){
var frames=box.querySelectorAll("li"),now=0,bar=document.createElement("p");
function show(to){now=Math.max(0,Math.min(frames.length-1,to));
frames.forEach(function(frame,k){frame.classList.toggle("now",k===now)});
back.disabled=now===0;on.disabled=now===frames.length-1}
function button(text,by){var made=document.createElement("button");made.type="button";made.textContent=text;
made.onclick=function(){show(now+by)};bar.append(made);return made}
var back=button("\\u25c0 Back",-1),on=button("Next \\u25b6",1);
box.addEventListener("keydown",function(event){
var to={ArrowLeft:now-1,ArrowRight:now+1,Home:0,End:frames.length-1}[event.key];
if(to!==undefined){show(to);event.preventDefault()}});
box.prepend(bar);box.dataset.on="";box.querySelector("ol").setAttribute("aria-live","polite");show(0)});"""


def page_element(collective: str, algorithm: str, size: int) -> str:
    """An algorithm as a page element to step through.

    Args:
        collective: such as "allreduce".
        algorithm: its name in the registry, or in `collectives.register_algorithm`.
        size: ranks, 1 to 16; of an algorithm that distinguishes hosts, on two hosts. A broadcast's root is rank 0.

    Returns:
        HTML without blank lines, to be put into a page as it is, more than once if need be.

    Raises:
        InvalidArgumentError: the collective has no such schedule, or not for so many ranks.

    Example:
        >>> "6 rounds" in page_element("allreduce", "ring", 4)
        True
    """
    schedules = _schedules(collective, algorithm, size)
    history = held_values(schedules)
    frames = []
    for number, held in enumerate(history):
        steps = [schedule.rounds[number - 1] if number else () for schedule in schedules]
        title = f"round {number - 1}" if number else "start"
        caption = f"<strong>{title.capitalize()}</strong>: {_words(steps) if number else 'what each rank contributes'}"
        panels = _circle(steps, title) + _matrix(schedules[0], held, history[number - 1] if number else held, title)
        frames.append(f'<li><div class="panels">{panels}</div><p>{caption}</p></li>')
    label = escape(f"{collective} by {algorithm}, {_count(size, 'rank')}, {_count(len(history) - 1, 'round')}")
    return (
        f'<div class="collectives-steps" role="group" tabindex="0" aria-label="{label}">\n<style>\n{_STYLE}\n</style>\n'
        f"<p><strong>{label}</strong></p>\n<ol>\n" + "\n".join(frames) + f"\n</ol>\n</div>\n<script>\n{_SCRIPT}\n"
        "</script>\n"
    )


def page(collective: str, algorithm: str, size: int) -> str:
    """`page_element` as a page of its own; arguments and errors as there."""
    title = escape(f"{collective} by {algorithm}, {_count(size, 'rank')}")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{title}</title>\n<style>:root{{color-scheme:light dark}}body{{margin:1em}}</style>\n"
        f"{page_element(collective, algorithm, size)}</html>\n"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _find(collective: str, name: str) -> Algorithm:
    offered = [each.name for each in with_schedules() if each.collective == collective]
    if name not in offered:
        raise InvalidArgumentError(
            f"algorithm={name!r}: expected an algorithm of {collective}: {', '.join(offered) or 'none has a schedule'} "
            "[U43]"
        )
    return registry.find(collective, name)


def with_schedules() -> list[Algorithm]:
    """All algorithms that have schedules, by collective."""
    entries = (
        registry.find(collective, name)
        for collective in registry.COLLECTIVES
        for name in dict.fromkeys((*registry.on_host(collective), *registry.on_gpu(collective)))
    )
    return [algorithm for algorithm in entries if not algorithm.native]


def _schedules(collective: str, name: str, size: int) -> list[Schedule]:
    algorithm = _find(collective, name)
    if not 1 <= size <= MOST_RANKS:
        raise InvalidArgumentError(f"size={size}: expected 1 to {MOST_RANKS} ranks in a picture [U44]")
    middle = ceil(size / 2) if algorithm.spans_hosts and size > 1 else size
    hosts = [range(middle)] + [range(middle, size)] * (middle < size)
    if algorithm.why_not(hosts):
        raise InvalidArgumentError(algorithm.why_not(hosts))
    return [algorithm.schedules(hosts)(rank) for rank in range(size)]


def _colour(rank: int, size: int, lightness: int) -> str:
    return f"hsl({360 * rank // size} 65% {lightness}%)"


def _span(step: Step) -> str:
    return str(step.chunk) if step.span == 1 else f"{step.chunk}\u2013{step.chunk + step.span - 1}"


def _words(steps: Sequence[Sequence[Step]]) -> str:
    """A round in words, sender by sender."""
    sends = [
        f"{rank} \u2192 {step.peer} chunk {_span(step)}"
        for rank, own in enumerate(steps)
        for step in own
        if step.kind is StepKind.SEND
    ]
    copies = [str(rank) for rank, own in enumerate(steps) if any(step.kind is StepKind.COPY for step in own)]
    return "; ".join([*sends, *([f"own contribution copied by {', '.join(copies)}"] if copies else [])]) or "nothing"


def _circle(steps: Sequence[Sequence[Step]], title: str) -> str:
    """The ranks on a circle, and an arrow for each pair that exchanges chunks."""
    size, centre, radius, node = len(steps), 120.0, 96.0, 15.0 if len(steps) <= 8 else 11.0
    at = [
        (centre + radius * sin(2 * pi * rank / size), centre - radius * cos(2 * pi * rank / size))
        for rank in range(size)
    ]
    chunks: dict[tuple[int, int], list[str]] = {}
    for rank, own in enumerate(steps):
        for step in own:
            if step.kind is StepKind.SEND:
                chunks.setdefault((rank, step.peer), []).append(_span(step))
    parts = []
    for (sender, receiver), spans in chunks.items():
        (x, y), (to_x, to_y) = at[sender], at[receiver]
        length = hypot(to_x - x, to_y - y)
        along, across = ((to_x - x) / length, (to_y - y) / length), ((y - to_y) / length, (to_x - x) / length)
        bend = min(14.0, length / 6)  # so that the arrows of both directions are apart
        middle = [(a + b) / 2 + bend * n for a, b, n in zip(at[sender], at[receiver], across, strict=True)]
        start = (x + (node + 2) * along[0] + bend / 3 * across[0], y + (node + 2) * along[1] + bend / 3 * across[1])
        tip = (to_x - (node + 4) * along[0] + bend / 3 * across[0], to_y - (node + 4) * along[1] + bend / 3 * across[1])
        turn = hypot(tip[0] - middle[0], tip[1] - middle[1])
        ahead = ((tip[0] - middle[0]) / turn, (tip[1] - middle[1]) / turn)
        wings = [
            (tip[0] - 8 * ahead[0] + side * 4 * ahead[1], tip[1] - 8 * ahead[1] - side * 4 * ahead[0])
            for side in (1, -1)
        ]
        colour = _colour(sender, size, 50)
        parts.append(
            f'<path class="arrow" stroke="{colour}" d="M{_point(start)}Q{_point(middle)} {_point(tip)}"/>'
            f'<path fill="{colour}" d="M{_point(tip)}L{_point(wings[0])}L{_point(wings[1])}z"/>'
        )
        if len(chunks) <= 2 * size:
            beside = [0.55 * a + 0.45 * m + 11 * n for a, m, n in zip(start, middle, across, strict=True)]
            parts.append(f'<text x="{beside[0]:.0f}" y="{beside[1]:.0f}">{",".join(spans)}</text>')
    for rank, (x, y) in enumerate(at):
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{node}" fill="{_colour(rank, size, 72)}"/>'
            f'<text class="on" x="{x:.1f}" y="{y:.1f}">{rank}</text>'
        )
    label = escape(f"{title}, who sends which chunk: {_words(steps)}")
    return f'<svg role="img" aria-label="{label}" viewBox="0 0 240 240" width="240" height="240">{"".join(parts)}</svg>'


def _point(at: Sequence[float]) -> str:
    return f"{at[0]:.1f} {at[1]:.1f}"


def _matrix(schedule: Schedule, held: Sequence[dict[int, int]], before: Sequence[dict[int, int]], title: str) -> str:
    """What each rank holds of each chunk: a stripe for each contribution; what the round has changed is framed."""
    size, chunks = schedule.size, schedule.chunks
    reduces = schedule.collective in ("allreduce", "reducescatter")
    stripes = size if reduces else 1
    stripe = max(2.0, min(13.0 if reduces else 26.0, 400 / chunks / stripes))
    width, height, left, top = stripe * stripes, 24, 48, 22
    parts = ['<text x="22" y="10">chunk</text>'] + [
        f'<text x="{left + (chunk + 0.5) * width:.0f}" y="10">{chunk}</text>' for chunk in range(chunks) if width >= 14
    ]
    words = []
    for rank in range(size):
        y = top + rank * (height + 4)
        parts.append(f'<text x="22" y="{y + height / 2}">rank {rank}</text>')
        for chunk in range(chunks):
            x, bits = left + chunk * width, held[rank].get(chunk, 0)
            sources = [source for source in range(size) if bits >> source & 1]
            for source in sources:
                place = x + (source * stripe if reduces else 0)
                parts.append(
                    f'<rect x="{place:.1f}" y="{y}" width="{stripe:.1f}" height="{height}" '
                    f'fill="{_colour(source, size, 72)}"/>'
                )
                if stripe >= 9:
                    middle = place + stripe / 2
                    parts.append(f'<text class="on" x="{middle:.1f}" y="{y + height / 2}">{source}</text>')
            new = " new" * (bits != before[rank].get(chunk, 0))
            parts.append(f'<rect class="cell{new}" x="{x + 1:.1f}" y="{y}" width="{width - 2:.1f}" height="{height}"/>')
            if sources:
                words.append(f"rank {rank} chunk {chunk}: {' '.join(map(str, sources))}")
    wide, high = left + chunks * width + 2, top + size * (height + 4)
    label = escape(f"{title}, whose contributions each rank holds: {'; '.join(words)}")
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {wide:.0f} {high}" width="{wide:.0f}" height="{high}">'
        f"{''.join(parts)}</svg>"
    )
