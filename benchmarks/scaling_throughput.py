"""Throughput out of what a program printed, by the user's regular expression or those of well-known programs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median

TAKE: dict[str, Callable[[Sequence[float]], float]] = {
    "median": median,
    "last": lambda figures: figures[-1],
    "mean": mean,
    "max": max,
    "sum": sum,
}
"""Which figure counts, where a run prints several; ``sum``: each rank prints its own once."""

_SECONDS = {"seconds": 1.0, "milliseconds": 1e-3, "microseconds": 1e-6}
"""Names that a group of a pattern may have: it then holds the time of a step instead of a throughput."""

_SCALES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
_UNITS = {"img": "images", "image": "images"}
_NUMBER = r"(?P<rate>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)"
_UNIT = r"(?P<unit>img|images?|samples?|examples?|sequences?|tokens?|records?|items?)\s*/\s*s(?:ec(?:ond)?)?\b"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x08\r]")


@dataclass(frozen=True)
class Pattern:
    """Where a throughput is found. Group ``rate``, or the first one, holds it; see ``_SECONDS`` for times of a step."""

    regex: re.Pattern[str]
    per_rank: bool = False
    """Whether the figure is one rank's, and not that of all ranks together."""


def _known(text: str, per_rank: bool = False) -> Pattern:
    return Pattern(re.compile(text, re.IGNORECASE), per_rank)


KNOWN = (
    # Horovod's synthetic benchmarks, and ours: "Total img/sec on 2 GPU(s): 240.1 +-3.2"; tf_cnn_benchmarks: "total
    # images/sec: 240.1".
    _known(rf"total {_UNIT}[^:=\n]*[:=]\s*{_NUMBER}"),
    # "Img/sec per GPU: 120.0 +-1.6", and before that "Iter #3: 120.4 img/sec per GPU".
    _known(rf"{_UNIT} per \w+\s*[:=]\s*{_NUMBER}", per_rank=True),
    _known(rf"(?<![\w.]){_NUMBER}\s*{_UNIT} per \w+", per_rank=True),
    # "images/sec: 240.1", "throughput (samples/s) = 240.1".
    _known(rf"{_UNIT}\s*\)?\s*[:=]\s*{_NUMBER}"),
    # "240.1 samples/s".
    _known(rf"(?<![\w.]){_NUMBER}\s*{_UNIT}"),
    # Keras's line at the end of an epoch: "45/45 - 1s - 12ms/step", with or without a bar in it.
    _known(
        r"(?<!\d)(?P<steps>\d+)/(?P=steps)(?!\d)[^\n]*?(?<![\w.])(?P<time>\d+(?:\.\d+)?)(?P<scale>ns|us|µs|μs|ms|s)/step"
    ),
)
"""Tried one after the other, whatever the case of letters; the first that is found anywhere counts alone."""


def user_pattern(text: str, per_rank: bool) -> Pattern:
    """The user's pattern; ValueError if it is no regular expression, or has no group that holds the figure."""
    try:
        regex = re.compile(text)
    except re.error as error:
        raise ValueError(f"expected a regular expression, got {text!r} ({error})") from None
    if not regex.groups:
        raise ValueError(f"expected a group around the figure, such as 'images/sec: ([\\d.]+)', got {text!r}")
    return Pattern(regex, per_rank)


@dataclass(frozen=True)
class Reading:
    """The figures of one run, as they were printed."""

    figures: tuple[float, ...]
    per_rank: bool
    times: bool
    """Whether the figures are seconds per step, and not items per second."""
    unit: str = ""
    """What is counted, as far as the output tells; empty: it does not."""
    pattern: str = field(default="", compare=False)

    def rate(self, take: str, ranks: int, work: int | None) -> float:
        """Items per second of all ranks together; ``work`` is how many items a step of all ranks together has.

        Raises:
            ValueError: the program prints times, and it is not known how much is done in such a time.
        """
        choose = TAKE[take]
        if self.times:
            if work is None:
                raise ValueError(
                    "the program prints the time of a step; say with --total or --batch how many items a step has"
                )
            return work / choose(self.figures)
        # Each rank's own figures, added up, are those of all ranks already.
        return choose(self.figures) * (ranks if self.per_rank and take != "sum" else 1)


def read(text: str, patterns: Sequence[Pattern]) -> Reading:
    """Find the figures in a run's output. Colours, backspaces and carriage returns of progress bars do not matter.

    Raises:
        ValueError: no pattern is found, or a figure is not a number above 0.
    """
    # A carriage return begins a line anew: what stood there before is a line of its own.
    plain = _ESCAPES.sub(lambda match: "\n" if match.group() == "\r" else "", text)
    for pattern in patterns:
        matches = list(pattern.regex.finditer(plain))
        if matches:
            figures, times = zip(*map(_figure, matches), strict=True)
            word = matches[0].groupdict().get("unit")
            return Reading(figures, pattern.per_rank, times[0], _plural(word) if word else "", pattern.regex.pattern)
    if len(patterns) == 1:
        raise ValueError(f"no throughput in the output: --pattern {patterns[0].regex.pattern!r} is not in it")
    raise ValueError(
        "no throughput in the output; give --pattern with a group around the figure, such as 'images/sec: ([\\d.]+)'"
    )


def _plural(word: str) -> str:
    word = word.lower()
    return _UNITS.get(word) or (word if word.endswith("s") else f"{word}s")


def _figure(match: re.Match[str]) -> tuple[float, bool]:
    """The number of a match, and whether it is a time of a step, in seconds."""
    groups = match.groupdict()
    if "time" in groups and "scale" in groups:
        return _positive(groups["time"], match) * _SCALES[groups["scale"].lower()], True
    for name, scale in _SECONDS.items():
        if name in groups:
            return _positive(groups[name], match) * scale, True
    return _positive(groups["rate"] if "rate" in groups else match.group(1), match), False


def _positive(text: str | None, match: re.Match[str]) -> float:
    try:
        number = float((text or "").replace(",", ""))
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError(f"expected a number above 0 in the pattern's group, got {text!r} in {match.group()!r}")
    return number
