"""The autotuner: settings that move more bytes per second, found from a few noisy samples while training goes on.

A sample is the bytes per second over some steps of training under the settings in force. The search, with ``samples``
of them:

1. *Screen*: every algorithm once, all else as at the start. Algorithms differ most, and one says nothing about another.
2. *Search*: a Gaussian process (`gaussian`) is fitted to the logarithms of the scores, so that a factor of two counts
   the same everywhere; the settings with the largest expected improvement on the best are sampled next.
3. *Confirm*, a fifth of the samples: settings that were tried and may still be the best are sampled again, because the
   best of many noisy samples is mostly a lucky one. The result has the best posterior mean, not the best sample.

All ranks feed their tuner the same scores and arrive at the same settings: the random candidates depend on the number
of samples only, values come from a grid, and differences within rounding count as equal. As ranks on unlike processors
might still differ, every rank adopts rank 0's proposal; a tuner that only adopts and observes stays in step.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from collectives.base.errors import InvalidArgumentError
from collectives.base.interchange import exchangeable
from collectives.tuning.gaussian import Array, Process, expected_improvement

KIB, MIB = 1 << 10, 1 << 20

_SEED = 1
_NOISES = (0.05, 0.1, 0.2, 0.4)
_RANDOM_CANDIDATES = 60
_CONFIRM_SHARE = 0.2
_EQUAL = 1e-6
"""Relative differences below this are rounding, which may differ between processors."""


@exchangeable
@dataclass(frozen=True, slots=True)
class TunedSettings:
    """The settings that the tuner may change."""

    fusion_threshold: int = 128 * MIB
    """The most bytes that are fused into one operation."""
    segment: int = 0
    """Bytes of a segment per chunk; 0: the planner's choice."""
    window: int = 512 * KIB
    """Bytes up to which blocks go through windows; above, the peers' memory is read directly."""
    one_shot: int = 32 * KIB
    """Bytes up to which an all-reduce is one-shot."""
    algorithm: str = "auto"
    """The algorithm for every operation that has it; ``auto``: the planner's choice."""
    cycle_time: float = 1.0
    """Milliseconds for which operations may gather."""

    def __str__(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


def _powers(low: int, high: int) -> tuple[int, ...]:
    return tuple(1 << power for power in range(low.bit_length() - 1, high.bit_length()))


_LEVELS: dict[str, tuple[Any, ...]] = {
    "fusion_threshold": _powers(64 * KIB, 256 * MIB),
    "segment": (0, *_powers(64 * KIB, 4 * MIB)),
    "window": _powers(64 * KIB, 8 * MIB),
    "one_shot": _powers(4 * KIB, 4 * MIB),
    "cycle_time": (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 25.0),
}


class SearchSpace:
    """The search space: a grid of levels for every parameter that is not fixed.

    Args:
        fixed: parameters that keep their values, by name.
        algorithms: the levels of the algorithm, in the same order on every rank.

    Raises:
        InvalidArgumentError: ``fixed`` names an unknown parameter.
    """

    def __init__(self, fixed: Mapping[str, Any] | None = None, algorithms: Sequence[str] = ("auto",)) -> None:
        self.fixed = dict(fixed or {})
        parameters = {"algorithm": tuple(algorithms), **_LEVELS}
        if unknown := sorted(self.fixed.keys() - parameters.keys()):
            raise InvalidArgumentError(
                f"autotune: there is no parameter {unknown[0]!r}; expected one of {', '.join(parameters)} [U20]"
            )
        self.levels = {
            name: levels for name, levels in parameters.items() if name not in self.fixed and len(levels) > 1
        }
        self._coordinates = max(2, len(algorithms))

    def admit(self, settings: TunedSettings) -> TunedSettings:
        """The settings with the fixed parameters put in. Sizes and times need not be levels.

        Raises:
            InvalidArgumentError: the algorithm is not a level.
        """
        settings = replace(settings, **self.fixed)
        if settings.algorithm not in self.levels.get("algorithm", (settings.algorithm,)):
            expected = ", ".join(self.levels["algorithm"])
            raise InvalidArgumentError(
                f"autotune: cannot start with algorithm {settings.algorithm!r}; expected one of {expected} [U21]"
            )
        return settings

    def encode(self, several: Sequence[TunedSettings]) -> Array:
        """The settings as points, an array of shape (settings, parameters, coordinates): sizes and times lie between 0
        and 1 on a log scale; the distance of any two algorithms is 1."""
        points = np.zeros((len(several), len(self.levels), self._coordinates))
        for point, settings in zip(points, several, strict=True):
            for row, (name, levels) in zip(point, self.levels.items(), strict=True):
                value = getattr(settings, name)
                if name == "algorithm":
                    row[levels.index(value)] = math.sqrt(0.5)
                elif name == "segment" and value == 0:
                    row[:2] = 0.5, 0.5  # the planner's own: likely a middling size, at a distance from all levels
                else:
                    low, high = levels[levels[0] == 0], levels[-1]
                    row[0] = math.log(min(max(value, low), high) / low) / math.log(high / low)
        return points

    def changes(self, settings: TunedSettings) -> Iterator[TunedSettings]:
        """All settings that differ from these in one parameter."""
        for name, levels in self.levels.items():
            for value in levels:
                if value != getattr(settings, name):
                    yield replace(settings, **{name: value})

    def draw(self, random: np.random.Generator, settings: TunedSettings) -> TunedSettings:
        """Random settings of the grid; fixed parameters are taken from ``settings``."""
        return replace(settings, **{name: levels[random.integers(len(levels))] for name, levels in self.levels.items()})


class Tuner:
    """Proposes settings from the scores of those sampled before.

    From ``start`` until `done`: `observe` the score of `settings`, `propose` the next, `adopt` what rank 0 proposed.
    When it is done, `propose` returns the best, to be adopted for good. A change of settings makes new plans: do not
    time the steps that make them.

    Measured on the cost models of ``tests/unit/test_search.py`` (a 102 MB model, all six parameters, five algorithms,
    10 % noise, 24 runs each from the worst algorithm with 1 MiB buckets, at 7 to 22 % of the best), these end within
    10 % of the best:

    - on one host: 18 of 24 runs after 20 samples, all after 30; across a network, and overlapped with the computation:
      all after 20;
    - with a narrow optimum in four parameters: 8 after 20, 12 after 30, 16 after 40 (the median of all at 95 % of the
      best);
    - with the threshold, the algorithm and the cycle time only, on all but the last: all 72 runs after 20 samples.

    Where one sample in twenty shows a third of the true score, 40 samples end within 10 % in 23, 23, 24 and, for the
    narrow optimum, 10 of 24 runs; the worst ends at 41 % of the best. A proposal takes 5 to 9 ms.

    Args:
        start: the settings in force at first.
        warmup: samples of the start that are discarded.
        samples: samples that count, the start's included.
        noise: the largest standard deviation considered as noise, as a share of the standard deviation of all
            logarithms of scores.
        log: path of a CSV file with a line for each sample and a last one for the result; "": none. For one rank only.
    """

    def __init__(
        self,
        space: SearchSpace,
        start: TunedSettings,
        *,
        warmup: int = 3,
        samples: int = 20,
        noise: float = 0.8,
        log: str = "",
    ) -> None:
        self.space = space
        self.settings = space.admit(start)
        """The settings in force."""
        self._warmup = warmup
        self.samples = samples
        """The samples that count."""
        self._confirm = max(1, round(_CONFIRM_SHARE * samples))
        self._noises = (*(level for level in _NOISES if level < noise), noise)
        self._tried: list[TunedSettings] = []
        self._scores: list[float] = []
        self._process: Process | None = None
        self._log = _Log(log) if log else None
        if self.done:
            self._conclude()

    @property
    def done(self) -> bool:
        """Whether all samples are taken, or there is nothing to choose."""
        return not self.space.levels or len(self._tried) >= self.samples

    @property
    def phase(self) -> str:
        """What the next sample is: "warm-up sample", or "sample 3 of 20"."""
        return "warm-up sample" if self._warmup else f"sample {self.taken + 1} of {self.samples}"

    @property
    def taken(self) -> int:
        """Samples that count so far."""
        return len(self._tried)

    @property
    def best(self) -> TunedSettings:
        """The settings tried with the best posterior mean."""
        different = self._different()
        if len(different) < 2:
            return different[0] if different else self.settings
        return different[_first_of_the_largest(self._predict(different)[0])]

    def observe(self, score: float) -> None:
        """Record the score of the settings in force, in bytes per second; ignored unless positive and finite."""
        if self.done or not (0 < score < math.inf):
            return
        if self._warmup:
            self._warmup -= 1
            self._record("warmup", self.settings, score)
            return
        phase = "confirm" if self._confirming else "search"
        self._tried.append(self.settings)
        self._scores.append(math.log(score))
        self._process = None
        self._record(phase, self.settings, score)
        if len(self._tried) == self.samples:
            self._conclude()

    def propose(self) -> TunedSettings:
        """The settings to sample next, or the best when it is done; the same for every call between two samples."""
        if self.done:
            return self.best
        if not self._tried:
            return self.settings
        if self._confirming:
            return self._most_promising()
        for algorithm in self.space.levels.get("algorithm", ()):
            if all(settings.algorithm != algorithm for settings in self._tried):
                return replace(self._tried[0], algorithm=algorithm)
        return self._most_improving()

    def adopt(self, settings: TunedSettings) -> None:
        """Set the settings in force, to which the next score belongs."""
        self.settings = settings

    @property
    def _confirming(self) -> bool:
        return len(self._tried) >= self.samples - self._confirm

    def _different(self) -> list[TunedSettings]:
        return list(dict.fromkeys(self._tried))

    def _predict(self, settings: Sequence[TunedSettings]) -> tuple[Array, Array]:
        """Posterior mean and standard deviation of the logarithms of these settings' scores."""
        if self._process is None:
            self._process = Process(self.space.encode(self._tried), np.array(self._scores), self._noises)
        return self._process.predict(self.space.encode(settings))

    def _most_promising(self) -> TunedSettings:
        """The settings tried with the largest upper confidence bound: a high mean, or an uncertain one."""
        different = self._different()
        mean, spread = self._predict(different)
        return different[_first_of_the_largest(mean + spread)]

    def _most_improving(self) -> TunedSettings:
        """The untried settings with the largest expected improvement on the best: searched uphill from changes of the
        best and from random settings."""
        different = self._different()
        top = float(self._predict(different)[0].max())
        best = self.best
        random = np.random.default_rng((_SEED, len(self._tried)))
        drawn = [self.space.draw(random, best) for _ in range(_RANDOM_CANDIDATES)]
        candidates = [*self.space.changes(best), *drawn]
        chosen, most = None, 0.0
        while candidates := [settings for settings in dict.fromkeys(candidates) if settings not in different]:
            expected = expected_improvement(*self._predict(candidates), top)
            first = _first_of_the_largest(expected)
            if chosen is not None and expected[first] <= most * (1 + _EQUAL):
                break
            chosen, most = candidates[first], float(expected[first])
            candidates = list(self.space.changes(chosen))
        return chosen or self._most_promising()

    def _record(self, phase: str, settings: TunedSettings, score: float) -> None:
        if self._log:
            self._log.write(phase, settings, score, self.best_score)

    @property
    def best_score(self) -> float:
        """The posterior mean of the best settings' score; 0 before the first sample."""
        return math.exp(float(self._predict([self.best])[0][0])) if self._tried else 0.0

    def end(self, settings: TunedSettings) -> None:
        """End the log of a search that is not done: with the settings that were in force, or the best so far."""
        if self._log:
            self._log.write("ended", self.best if self._tried else settings, self.best_score, self.best_score)

    def _conclude(self) -> None:
        if self._log:
            self._log.write("done", self.best, self.best_score, self.best_score)


def _first_of_the_largest(values: Array) -> int:
    largest = values.max()
    return int(np.argmax(values >= largest - _EQUAL * abs(largest)))


class _Log:
    """A CSV file: step, phase, the settings, their score, and the posterior mean of the best so far."""

    def __init__(self, path: str) -> None:
        self._path = Path(path).absolute()
        self._step = 0
        self._write("w", ["step", "phase", *(field.name for field in fields(TunedSettings)), "score", "best"])

    def write(self, phase: str, settings: TunedSettings, score: float, best: float) -> None:
        self._step += phase not in ("done", "ended")
        self._write("a", [self._step, phase, *astuple(settings), f"{score:.6g}", f"{best:.6g}"])

    def _write(self, mode: str, row: Sequence[object]) -> None:
        """Write one line. The file is opened for each, so that nothing is left to be flushed or closed."""
        with self._path.open(mode, newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerow(row)
