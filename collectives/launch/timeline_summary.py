"""Statistics of a timeline: how each rank spent its time, which operations were fused, and which ranks waited.

Pure functions of a trace's events. Times are in microseconds, as in the trace. The engine records

    span "engine"            pack, unpack, "wait for ranks [1]" with ``missing``; others are communication, with
                             ``bytes`` and ``tensors``
    span "messages"          "send" or "recv", with ``peer``, ``tag`` and ``bytes``: drawn
    span on other tracks     details, such as the rounds of a schedule: drawn, but not counted again
    async span "negotiate"   a tensor, from its submission until all ranks have agreed on it
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from collectives.engine import timeline

_NUMBER = re.compile(r" number \d+(?=(\[\d+\])?, unnamed$)")
"""The number in an unnamed operation's name, which differs between calls that are counted together."""

ENGINE, NEGOTIATE = "engine", "negotiate"
KINDS = ("waiting", "pack", "unpack", "communicate")
"""The engine's activities. Of nested spans, the first of these counts, which is the most specific."""
IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Span:
    """A time span of one rank. ``track`` is that of a span, or the category of an async span."""

    rank: int
    track: str
    name: str
    begin: float
    end: float
    args: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """One of ``KINDS``; empty on other tracks than the engine's."""
        if self.track != ENGINE:
            return ""
        if "missing" in self.args:
            return "waiting"
        return self.name if self.name in KINDS else "communicate"


@dataclass(slots=True)
class Trace:
    """The events of a trace by kind, sorted by time; ``begin`` and ``end`` are its first and last times."""

    spans: list[Span] = field(default_factory=list)
    async_spans: list[Span] = field(default_factory=list)
    marks: dict[int, list[float]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    events: int = 0
    begin: float = 0.0
    end: float = 0.0

    @property
    def ranks(self) -> list[int]:
        return sorted(self.names)


@dataclass(frozen=True, slots=True)
class OperationTotals:
    """An operation and the tensors that were fused in it: its number of executions and total time per rank."""

    operation: str
    tensors: tuple[str, ...]
    nbytes: int
    times: int
    total: float


@dataclass(frozen=True, slots=True)
class Negotiation:
    """The negotiation times of a tensor, over all ranks and steps; ``last``: how often each rank submitted it last.

    ``last`` is empty if the ranks did not submit it equally often, because submissions cannot be matched then.
    """

    tensor: str
    times: int
    mean: float
    longest: float
    longest_rank: int
    last: Mapping[int, int]


def parse(events: Iterable[Mapping[str, Any]]) -> Trace:
    """Parse the events of a trace; incomplete events, and those that never end, are left out."""
    trace = Trace()
    open_spans: dict[tuple[int, object, object], Mapping[str, Any]] = {}
    for event in events:
        if isinstance(event.get("pid"), int) and event["pid"] >= timeline.FIRST_ROW:
            # The rows of tensors, for readers of Horovod's timelines, repeat the ranks' own tracks.
            continue
        trace.events += 1
        try:
            _take(trace, open_spans, event)
        except (KeyError, TypeError, ValueError):
            continue
    trace.spans.sort(key=lambda span: (span.begin, -span.end))
    trace.async_spans.sort(key=lambda span: (span.begin, -span.end))
    everything = trace.spans + trace.async_spans
    moments = [at for marks in trace.marks.values() for at in marks]
    trace.begin = min([*moments, *(span.begin for span in everything)], default=0.0)
    trace.end = max([*moments, *(span.end for span in everything)], default=0.0)
    for rank in {*trace.marks, *(span.rank for span in everything)}:
        trace.names.setdefault(rank, f"rank {rank}")
    return trace


def _take(
    trace: Trace, open_spans: dict[tuple[int, object, object], Mapping[str, Any]], event: Mapping[str, Any]
) -> None:
    phase, rank = event["ph"], int(event["pid"])
    args = _arguments(event)
    if phase == "M":
        if event["name"] == "process_name":
            trace.names[rank] = str(args["name"])
        return
    at = float(event["ts"])
    if phase == "X":
        # Rounded to the nanosecond, as written, so that adjacent spans do not overlap by a rounding error.
        end = round(at + float(event["dur"]), 3)
        trace.spans.append(Span(rank, str(event["cat"]), str(event["name"]), at, end, args))
    elif phase == "i":
        trace.marks.setdefault(rank, []).append(at)
    elif phase == "b":
        open_spans[rank, event["cat"], event["id"]] = event
    elif phase == "e":
        begun = open_spans.pop((rank, event["cat"], event["id"]))
        span = Span(rank, str(event["cat"]), str(begun["name"]), float(begun["ts"]), at, _arguments(begun))
        trace.async_spans.append(span)


def _arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def shares(trace: Trace) -> dict[int, dict[str, float]]:
    """Return how each rank spent its time, by ``KINDS`` and ``IDLE``; for every rank the sum is the trace's length."""
    of_rank: dict[int, list[Span]] = {rank: [] for rank in trace.ranks}
    for span in trace.spans:
        if span.kind:
            of_rank[span.rank].append(span)
    return {rank: _shares(spans, trace.end - trace.begin) for rank, spans in of_rank.items()}


def _shares(spans: Sequence[Span], length: float) -> dict[str, float]:
    changes = sorted([(span.begin, 1, span.kind) for span in spans] + [(span.end, -1, span.kind) for span in spans])
    spent = dict.fromkeys(KINDS, 0.0)
    active = dict.fromkeys(KINDS, 0)
    before = 0.0
    for at, change, kind in changes:
        current = next((kind_at_work for kind_at_work in KINDS if active[kind_at_work] > 0), None)
        if current:
            spent[current] += at - before
        active[kind] += change
        before = at
    return {**spent, IDLE: max(0.0, length - sum(spent.values()))}


def waited_for(trace: Trace) -> dict[tuple[int, int], float]:
    """Return the time that a rank waited for another, by (waiting, missing). Waiting for two ranks counts for both."""
    waits: dict[tuple[int, int], float] = defaultdict(float)
    for span in trace.spans:
        if span.kind == "waiting":
            for missing in _ranks(span.args["missing"]):
                waits[span.rank, missing] += span.end - span.begin
    return dict(waits)


def _ranks(value: object) -> list[int]:
    return [rank for rank in value if isinstance(rank, int)] if isinstance(value, list) else []


def buckets(trace: Trace) -> list[OperationTotals]:
    """Return the operations by name, fused tensors and bytes, in descending order of their total time."""
    groups: dict[tuple[str, tuple[str, ...], int], list[Span]] = defaultdict(list)
    for span in trace.spans:
        if span.kind == "communicate":
            tensors = span.args.get("tensors")
            names = tuple(_NUMBER.sub("", str(tensor)) for tensor in tensors) if isinstance(tensors, list) else ()
            nbytes = span.args.get("bytes")
            groups[span.name, names, nbytes if isinstance(nbytes, int) else 0].append(span)
    totals = []
    for (operation, names, nbytes), spans in groups.items():
        ranks = len({span.rank for span in spans})
        total = sum(span.end - span.begin for span in spans) / ranks
        # Rounded up: the count of the rank that was furthest when the trace ended.
        totals.append(OperationTotals(operation, names, nbytes, -(-len(spans) // ranks), total))
    return sorted(totals, key=lambda bucket: -bucket.total)


def negotiations(trace: Trace) -> list[Negotiation]:
    """Return the negotiation times of tensors, in descending order of their means."""
    groups: dict[str, list[Span]] = defaultdict(list)
    for span in trace.async_spans:
        if span.track == NEGOTIATE:
            groups[_NUMBER.sub("", span.name)].append(span)
    summaries = []
    for tensor, spans in groups.items():
        longest = max(spans, key=lambda span: span.end - span.begin)
        mean = sum(span.end - span.begin for span in spans) / len(spans)
        summaries.append(Negotiation(tensor, len(spans), mean, longest.end - longest.begin, longest.rank, _last(spans)))
    return sorted(summaries, key=lambda negotiation: -negotiation.mean)


def _last(spans: Iterable[Span]) -> dict[int, int]:
    """Count how often each rank was the last to submit a tensor; the n-th submissions of all ranks are compared."""
    of_rank: dict[int, list[float]] = defaultdict(list)
    for span in spans:
        of_rank[span.rank].append(span.begin)
    if len(of_rank) < 2 or len({len(begins) for begins in of_rank.values()}) > 1:
        return {}
    counted: dict[int, int] = defaultdict(int)
    ranks = list(of_rank)
    for submitted in zip(*of_rank.values(), strict=True):
        counted[max(zip(submitted, ranks, strict=True))[1]] += 1
    return dict(sorted(counted.items(), key=lambda item: -item[1]))
