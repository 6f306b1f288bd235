"""A timeline as one HTML page: lanes over time, and tables of how the time was spent.

    collectives report trace.json report.html
    collectives report trace.json --text

The page is self-contained. Its tables are plain HTML; only the drawing needs the script of ``timeline_page.html``,
which documents the format of its data.
"""

from __future__ import annotations

import heapq
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape, unescape
from pathlib import Path
from typing import Any

from collectives.base.config import in_units
from collectives.base.errors import CollectivesError, InvalidArgumentError
from collectives.engine import timeline
from collectives.launch import timeline_summary as summary
from collectives.launch.timeline_summary import IDLE, KINDS, Span, Trace
from collectives.launch.usage import Parser

_MOST_DRAWN = 100_000
"""Maximum spans in the drawing, and as many async spans and marks, for a page of 5 to 10 MB; the tables count all."""
_MOST_RANKS = 64
_MOST_WAITING = 32
_MOST_TRACKS = 8
_MOST_LEVELS = 4
_MOST_ROWS = 50
_NAMED_TENSORS = 12
_TITLES = {
    "communicate": "communicate",
    "pack": "pack",
    "unpack": "unpack",
    "waiting": "wait for other ranks",
    IDLE: "idle",
}


def write(trace_path: str | os.PathLike[str], html_path: str | os.PathLike[str]) -> None:
    """Draw a report from a trace.

    Raises:
        InvalidArgumentError: the trace cannot be read or holds nothing, or the report cannot be written.
    """
    trace = _read(trace_path)
    try:
        Path(html_path).write_text(page(trace, Path(trace_path).name), encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot write the report {os.fspath(html_path)!r}: {error.strerror} [U15]"
        ) from error


def _read(trace_path: str | os.PathLike[str]) -> Trace:
    try:
        trace = summary.parse(timeline.read(trace_path))
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot read the trace {os.fspath(trace_path)!r}: {error.strerror} [U16]"
        ) from error
    if not trace.names or trace.end <= trace.begin:
        raise InvalidArgumentError(f"the trace {os.fspath(trace_path)!r} has no events of any rank [U17]")
    return trace


def page(trace: Trace, title: str) -> str:
    """Return the page as HTML."""
    drawing, left_out = _drawing(trace)
    # "<" as an escape: a tensor's name cannot end the script element.
    parts = {
        "title": escape(title),
        "findings": _findings(trace),
        "left_out": "".join(f"<p class=note>{escape(line)}</p>" for line in left_out),
        "tables": _tables(trace),
        "data": json.dumps(drawing, separators=(",", ":")).replace("<", "\\u003c"),
    }
    template = Path(__file__).with_name("timeline_page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def text(trace: Trace) -> str:
    """Return the page's summary and tables as plain text."""
    html = _findings(trace) + _tables(trace)
    lines: list[str] = []
    for block in re.findall(r"<p.*?</p>|<h2>.*?</h2>|<table>.*?</table>", html, re.DOTALL):
        rows = [re.findall(r"<t[hd].*?</t[hd]>", row, re.DOTALL) for row in re.findall(r"<tr>.*?</tr>", block)]
        if not rows:
            lines += [*([""] if block.startswith("<h2>") else ()), _plain(block)]
            continue
        columns = [[_plain(cell) for cell in column] for column in zip(*rows, strict=True)]
        columns = [column for column in columns if any(column[1:])]
        widths = [max(map(len, column)) for column in columns]
        for row in zip(*columns, strict=True):
            lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return "\n".join(lines)


def _plain(html: str) -> str:
    return unescape(re.sub(r"<[^>]*>", "", html)).strip()


def _tables(trace: Trace) -> str:
    return _time_table(trace) + _waiting_table(trace) + _fusion_table(trace) + _negotiation_table(trace)


def _findings(trace: Trace) -> str:
    """Return a summary of two or three sentences."""
    length = trace.end - trace.begin
    mean = _mean(summary.shares(trace))
    ranked = ", ".join(
        f"{_TITLES[kind]} {_percent(time, length)}"
        for kind, time in sorted(mean.items(), key=lambda item: -item[1])
        if time
    )
    lines = [
        f"{_count(len(trace.names), 'rank')}, {_time(length)}, {_count(trace.events, 'event')}.",
        f"Mean over the ranks: {ranked}.",
    ]
    if held_up := _sums(summary.waited_for(trace), 1):
        slowest = max(held_up, key=lambda rank: held_up[rank])
        lines.append(f"The others waited longest for rank {slowest}: {_time(held_up[slowest])}, added up over them.")
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def _mean(spent: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    return {kind: sum(times[kind] for times in spent.values()) / len(spent) for kind in _TITLES}


def _sums(waited: Mapping[tuple[int, int], float], which: int) -> dict[int, float]:
    """Add up the waiting times by the waiting rank (0) or the missing one (1)."""
    sums: dict[int, float] = defaultdict(float)
    for pair, time in waited.items():
        sums[pair[which]] += time
    return sums


def _time_table(trace: Trace) -> str:
    spent = summary.shares(trace)
    length = trace.end - trace.begin
    rows = [[_head(trace.names[rank]), *_shares(spent[rank], length)] for rank in trace.ranks[:_MOST_RANKS]]
    if len(spent) > 1:
        rows.append([_head(f"mean of {len(spent)} ranks"), *_shares(_mean(spent), length)])
    note = "Idle: the engine had nothing to do, because the program computed. Percentages are of the whole trace."
    headings = ["rank", "share of the time", *_TITLES.values()]
    return _section("Where the time went", note, headings, rows, len(spent), _MOST_RANKS, "ranks", texts=2)


def _shares(times: Mapping[str, float], length: float) -> list[str]:
    cells = [_number(f"{_time(times[kind])} <small>{_percent(times[kind], length)}</small>") for kind in _TITLES]
    pieces = "".join(
        f'<i class="{kind}" style="width:{100 * times[kind] / length:.2f}%"></i>' for kind in _TITLES if kind != IDLE
    )
    return [f"<td class=wide><span class=bar aria-hidden=true>{pieces}</span></td>", *cells]


def _waiting_table(trace: Trace) -> str:
    waited = summary.waited_for(trace)
    if not waited:
        return "<section><h2>Who waited for whom</h2><p>No rank waited for another.</p></section>"
    of_waiter, of_missing = _sums(waited, 0), _sums(waited, 1)
    waiters, missing_ranks = (
        sorted(heapq.nlargest(_MOST_WAITING, sums, key=lambda rank: sums[rank])) for sums in (of_waiter, of_missing)
    )
    most = max(waited.values())
    rows = []
    for waiter in waiters:
        times = [waited.get((waiter, missing), 0.0) for missing in missing_ranks]
        cells = [
            _number(_time(time), f"--heat:{100 * time / most:.0f}%") if time else "<td class=number>·</td>"
            for time in times
        ]
        rows.append([_head(f"rank {waiter} waited"), *cells, _number(_time(of_waiter[waiter]))])
    sums = [_number(_time(of_missing[missing])) for missing in missing_ranks]
    rows.append([_head("added up"), *sums, _number(_time(sum(waited.values())))])
    note = "A wait for several ranks at once counts for each of them."
    headings = ["", *(f"for rank {missing}" for missing in missing_ranks), "added up"]
    total, what = max(len(of_waiter), len(of_missing)), "ranks, those with the longest waits"
    return _section("Who waited for whom", note, headings, rows, total, _MOST_WAITING, what)


def _fusion_table(trace: Trace) -> str:
    buckets = summary.buckets(trace)
    rows = []
    for bucket in buckets[:_MOST_ROWS]:
        each = bucket.total / bucket.times
        rate = f"{bucket.nbytes / each / 1e3:.2f} GB/s" if bucket.nbytes and each else ""
        cells = (
            str(len(bucket.tensors) or ""),
            in_units(bucket.nbytes) if bucket.nbytes else "",
            str(bucket.times),
            _time(each),
            rate,
        )
        names = f"<td>{escape(bucket.operation)}</td><td class=names>{escape(_some(bucket.tensors))}</td>"
        rows.append([names, *(_number(cell) for cell in cells), _number(_time(bucket.total))])
    note = (
        "Each line is one bucket: the tensors that went together. Times are means over the ranks; what took longest "
        "comes first."
    )
    headings = ["operation", "tensors", "number", "bytes", "times", "each", "bytes per second", "altogether"]
    return _section("What was fused", note, headings, rows, len(buckets), _MOST_ROWS, "buckets", texts=2)


def _negotiation_table(trace: Trace) -> str:
    negotiations = summary.negotiations(trace)
    rows = []
    for entry in negotiations[:_MOST_ROWS]:
        last = next(iter(entry.last.items()), None)
        who = f"rank {last[0]} ({_percent(last[1], sum(entry.last.values()))})" if last else ""
        longest = f"{_time(entry.longest)} <small>on rank {entry.longest_rank}</small>"
        rows.append([_head(entry.tensor), *map(_number, (str(entry.times), _time(entry.mean), longest, who))])
    note = (
        "From a tensor's submission until all ranks had submitted it and agreed. All ranks count; the longest mean "
        "comes first."
    )
    headings = ["tensor", "negotiations", "mean", "longest", "mostly last to submit"]
    return _section("Slowest tensors to agree on", note, headings, rows, len(negotiations), _MOST_ROWS, "tensors")


def _section(
    title: str,
    note: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    total: int,
    most: int,
    what: str,
    texts: int = 1,
) -> str:
    """Return a heading, a note and a table, whose first ``texts`` columns are text and the others numbers."""
    if not rows:
        return f"<section><h2>{title}</h2><p>Nothing was recorded.</p></section>"
    if total > most:
        note += f" Shown: {most} of {total:,} {what}."
    head = "".join(
        f"<th scope=col{'' if index < texts else ' class=number'}>{escape(text)}</th>"
        for index, text in enumerate(headings)
    )
    body = "".join(f"<tr>{''.join(row)}</tr>\n" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"
    # Focusable, so that a table too wide for the window can be scrolled with the keyboard.
    scrolled = f'<div class=scroll tabindex=0 role=region aria-label="{title}">{table}</div>'
    return f"<section><h2>{title}</h2><p class=note>{note}</p>{scrolled}</section>"


def _drawing(trace: Trace) -> tuple[dict[str, Any], list[str]]:
    """Return the data of the drawing, and what it leaves out of the trace."""
    ranks = trace.ranks[:_MOST_RANKS]
    left_out = []
    if len(trace.names) > _MOST_RANKS:
        left_out.append(f"Drawn: the first {_MOST_RANKS} of {len(trace.names):,} ranks.")
    shown = set(ranks)
    names: dict[str, int] = {}  # distinct texts with their numbers: thousands of spans have the same few
    details: dict[str, int] = {}
    lanes = []
    for what, spans in (("spans", trace.spans), ("waiting times", trace.async_spans)):
        drawn = [span for span in spans if span.rank in shown]
        if len(drawn) > _MOST_DRAWN:
            left_out.append(
                f"Drawn: {_MOST_DRAWN:,} of {len(drawn):,} {what}, the engine's and the longest; the tables count all."
            )
            kept = heapq.nlargest(
                _MOST_DRAWN, drawn, key=lambda span: (span.track == summary.ENGINE, span.end - span.begin)
            )
            drawn = sorted(kept, key=lambda span: (span.begin, -span.end))
        lanes += [
            _lane(trace, key, of_lane, names, details, area=spans is trace.async_spans)
            for key, of_lane in _by_track(drawn, left_out)
        ]
    order = {summary.ENGINE: 0, summary.NEGOTIATE: 2}
    lanes.sort(key=lambda lane: (lane["rank"], order.get(lane["track"], 1)))
    # Each rank's marks are thinned out evenly, so that they still show the rhythm.
    step = max(1, -(-sum(len(trace.marks.get(rank, ())) for rank in ranks) // _MOST_DRAWN))
    if step > 1:
        left_out.append(f"Drawn: one of {step} marks.")
    marks = {str(rank): [_since(trace, at) for at in sorted(trace.marks.get(rank, ()))[::step]] for rank in ranks}
    drawing = {
        "duration": round(trace.end - trace.begin, 3),
        "kinds": [*KINDS, "detail"],
        "titles": [*(_TITLES[kind] for kind in KINDS), ""],
        "ranks": [{"rank": rank, "name": trace.names[rank]} for rank in ranks],
        "lanes": lanes,
        "marks": marks,
        "names": list(names),
        "details": list(details),
    }
    return drawing, left_out


def _by_track(spans: Iterable[Span], left_out: list[str]) -> list[tuple[tuple[int, str], list[Span]]]:
    tracks: dict[tuple[int, str], list[Span]] = defaultdict(list)
    for span in spans:
        tracks[span.rank, span.track].append(span)
    kept, of_rank = [], defaultdict[int, int](int)
    for key, members in sorted(tracks.items(), key=lambda item: item[0][1] != summary.ENGINE):
        of_rank[key[0]] += 1
        if of_rank[key[0]] <= _MOST_TRACKS:
            kept.append((key, members))
    if len(kept) < len(tracks):
        left_out.append(f"Drawn: {_MOST_TRACKS} tracks of each rank; {len(tracks) - len(kept):,} more are left out.")
    return kept


def _lane(
    trace: Trace,
    key: tuple[int, str],
    spans: Sequence[Span],
    names: dict[str, int],
    details: dict[str, int],
    *,
    area: bool,
) -> dict[str, Any]:
    """Return one track of one rank by columns; overlapping spans are on several levels. Further texts get numbers."""
    levels, free = [], [float("-inf")] * _MOST_LEVELS
    for span in spans:
        level = next((level for level, end in enumerate(free) if end <= span.begin), _MOST_LEVELS - 1)
        free[level] = max(free[level], span.end)
        levels.append(level)
    rank, track = key
    return {
        "rank": rank,
        "track": track,
        "area": area,
        "begin": [_since(trace, span.begin) for span in spans],
        "length": [round(span.end - span.begin, 3) for span in spans],
        "level": [] if area else levels,
        "kind": [] if area else [KINDS.index(span.kind) if span.kind else len(KINDS) for span in spans],
        "name": [names.setdefault(span.name, len(names)) for span in spans],
        "detail": [details.setdefault(_detail(span.args), len(details)) for span in spans],
    }


def _detail(args: Mapping[str, Any]) -> str:
    shown = []
    for key, value in args.items():
        if key == "bytes" and isinstance(value, int):
            shown.append(f"{in_units(value)}")
        elif isinstance(value, list):
            shown.append(f"{key} ({len(value)}): {_some(value)}" if len(value) > 1 else f"{key}: {_some(value)}")
        else:
            shown.append(f"{key}: {value}")
    return "\n".join(shown)


def _some(values: Sequence[object]) -> str:
    more = f" and {len(values) - _NAMED_TENSORS} more" if len(values) > _NAMED_TENSORS else ""
    return ", ".join(map(str, values[:_NAMED_TENSORS])) + more


def _since(trace: Trace, at: float) -> float:
    return round(at - trace.begin, 3)


def _head(text: str) -> str:
    return f"<th scope=row>{escape(text)}</th>"


def _number(html: str, style: str = "") -> str:
    return f'<td class="number heat" style="{style}">{html}</td>' if style else f"<td class=number>{html}</td>"


def _time(microseconds: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            digits = ".3g" if microseconds < 1e3 * size else ",.0f"
            return f"{microseconds / size:{digits}} {unit}"
    return f"{microseconds:.3g} µs" if microseconds else "0"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if part >= 0.1 * whole else f"{100 * part / whole:.1f} %"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = Parser(prog="collectives report", description="Make a report of a timeline.")
    parser.add_argument("trace", help="the file that COLLECTIVES_TIMELINE or start_timeline named")
    parser.add_argument("report", nargs="?", help="the HTML page to write (default: the trace's name with .html)")
    parser.add_argument("--text", action="store_true", help="print the tables as text, and write no page")
    arguments = parser.parse_args(argv)
    report = arguments.report or str(Path(arguments.trace).with_suffix(".html"))
    try:
        if arguments.text:
            print(text(_read(arguments.trace)))
            return 0
        write(arguments.trace, report)
    except CollectivesError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
