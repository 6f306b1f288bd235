"""What rank 0 prints: nccl-tests' table, the comparison of the contestants, and the lines around them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

from collectives.tools.bench.cli import NCCL_TYPES
from collectives.tools.bench.collective import FLOOR, IN_PLACE, OUT_OF_PLACE, Collective
from collectives.tools.bench.measure import OURS, Record

_NCCL_NAME = {numpy: nccl for nccl, numpy in NCCL_TYPES.items()}


def header(collective: Collective, iterations: int, warmup: int) -> str:
    """The lines above the rows: what the columns mean, and the columns."""
    side = f"{'time':>10}{'algbw':>8}{'busbw':>8}{'#wrong':>7}"
    units = f"{'(us)':>10}{'(GB/s)':>8}{'(GB/s)':>8}{'':>7}"
    return (
        f"# time: median of {iterations} calls after {warmup} untimed; a call lasts until its slowest rank has "
        f"returned\n"
        f"# limit: one memcpy of {collective.limit_text}, timed in turn with the calls (median); % of limit = memcpy "
        f"/ call\n"
        "#\n"
        f"#{'':50}{OUT_OF_PLACE:^34} {IN_PLACE:^34}{'limit':>12}{'% of limit':>14}\n"
        f"#{'size':>12}{'count':>13}{'type':>11}{'redop':>8}{'root':>6}{side} {side}{'time':>12}{'out':>8}{'in':>6}\n"
        f"#{'(B)':>12}{'(elements)':>13}{'':25}{units} {units}{'(us)':>12}{'(%)':>8}{'(%)':>6}"
    )


def row(out: Record | None, inside: Record | None) -> str:
    """One line of the table from its two halves; a half that the collective does not have is N/A."""
    either = out or inside
    assert either is not None
    limit = next((record.limit for record in (out, inside) if record and record.limit), None)
    return (
        f" {either.size:>12}{either.count:>13}{_type(either):>11}"
        f"{either.op:>8}{either.root:>6}{_side(out)} {_side(inside)}"
        f"{'N/A' if limit is None else _time(limit):>12}{_percent(out):>8}{_percent(inside):>6}"
    )


def _side(record: Record | None) -> str:
    if record is None or record.time is None:
        return f"{'N/A':>10}{'N/A':>8}{'N/A':>8}{'N/A':>7}"
    wrong = "N/A" if record.wrong is None else str(record.wrong)
    return f"{_time(record.time.median):>10}{record.algbw:>8.2f}{record.busbw:>8.2f}{wrong:>7}"


def _time(microseconds: float) -> str:
    return f"{microseconds:.2f}" if microseconds < 1e4 else f"{microseconds:.0f}"


def _percent(record: Record | None) -> str:
    return "N/A" if record is None or record.percent_of_limit is None else f"{record.percent_of_limit:.0f}"


def comparison(records: Sequence[Record]) -> str:
    """The second table: every contestant of every row, and its calls against our neighbouring ones."""
    width = max(len(record.contestant) for record in records)
    lines = [
        "#",
        "# the contestants, taking turns call by call; x ours = its time / our time in the same round (above 1: ours "
        "is faster)",
        f"#{'size':>12}{'type':>11}{'redop':>8}  {'mode':<14}{'contestant':<{width}}{'time':>11}{'p25':>10}{'p75':>10}"
        f"{'busbw':>9}{'#wrong':>8}{'x ours':>9}{'p25':>8}{'p75':>8}{'% limit':>9}",
    ]
    previous: tuple[object, ...] = ()
    for record in records:
        if record.time is None:
            continue
        row_of = (record.size, record.dtype, record.op, record.mode)
        if previous and row_of != previous:
            lines.append("")
        previous = row_of
        ratio = f"{'-':>9}{'-':>8}{'-':>8}"
        if record.ratio is not None:
            ratio = f"{_ratio(record.ratio.median):>9}{_ratio(record.ratio.p25):>8}{_ratio(record.ratio.p75):>8}"
        lines.append(
            f" {record.size:>12}{_type(record):>11}{record.op:>8}  {record.mode:<14}{record.contestant:<{width}}"
            f"{_time(record.time.median):>11}{_time(record.time.p25):>10}{_time(record.time.p75):>10}{record.busbw:>9.2f}"
            f"{'N/A' if record.wrong is None else record.wrong:>8}{ratio}{_percent(record):>9}"
        )
    return "\n".join([*lines, "#", *_means(records)])


def _means(records: Sequence[Record]) -> list[str]:
    """One line a contestant and mode: the geometric mean of its ratios over all rows."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for record in records:
        if record.ratio is not None and record.ratio.median > 0 and record.contestant != FLOOR:
            ratios.setdefault((record.contestant, record.mode), []).append(record.ratio.median)
    return [
        f"# {contestant}, {mode}: {_ratio(geometric_mean(values))} x ours (geometric mean of {len(values)} rows)"
        for (contestant, mode), values in ratios.items()
    ]


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0f}"


def _type(record: Record) -> str:
    return _NCCL_NAME.get(record.dtype, record.dtype)


def closing(records: Sequence[Record]) -> str:
    """nccl-tests' last lines: the wrong values of all contestants, and our mean bus bandwidth."""
    checked = [record.wrong for record in records if record.wrong is not None]
    ours = [record.busbw for record in records if record.contestant == OURS and record.time is not None]
    total = sum(checked)
    verdict = f"{total} {'FAILED' if total else 'OK'}" if checked else "not checked"
    return f"# Out of bounds values : {verdict}\n# Avg bus bandwidth    : {sum(ours) / len(ours) if ours else 0.0:g}\n#"
