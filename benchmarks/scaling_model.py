"""Speed-up, efficiency, and the model T = G/W + C(W) of what was measured.

    W     ranks
    X(W)  items per second of all ranks together, the median of the runs, or the best
    T(W)  seconds of a step: its items / X(W)
    S(W)  speed-up      X(W) / X(W0), W0 the smallest number of ranks; where the work is fixed, that is T(W0) / T(W)
    E(W)  efficiency    (X(W) / W) / (X(W0) / W0): each rank's throughput against each rank's at W0
    C(W)  communication: an all-reduce of the step's bytes, measured by itself; C(1) = 0
    G     what a step computes, in seconds of one rank: fitted, by least squares of T(W) - C(W)

A step's work is divided among the ranks (strong scaling), T = G/W + C(W); or each rank has its own (weak scaling), T =
G + C(W). In a sweep G depends on the value v that is varied: G = g0 + g1 v. Nothing is hidden in this model: a program
that communicates while it computes is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

TOLERANCE = 0.10
"""A fit whose worst point is further off, relative to what was measured, is called bad."""
_LEFT_OUT = (
    "communication that is hidden behind computation, ranks that share caches, memory or cores or wait for each other, "
    "and fewer ranks that take more cores each (OMP_NUM_THREADS)"
)
_R_SQUARED = 0.9
"""A fit of times that differ among themselves is called bad below this."""


@dataclass(frozen=True)
class Point:
    """One configuration's results. Rates in items per second of all ranks together, times in seconds."""

    ranks: int
    rates: tuple[float, ...]
    """Of each run; at least one."""
    work: int | None = None
    """Items of a step of all ranks together."""
    value: str | None = None
    communications: tuple[float, ...] = ()
    """C(W) as it was measured; none: not measured."""
    oversubscribed: bool = False
    """More ranks than cores: they take the cores from each other, so that no model of W workers holds."""
    best: bool = False
    """Whether the quickest run and communication count, not the medians: what disturbs a run only slows it."""

    @property
    def rate(self) -> float:
        return max(self.rates) if self.best else median(self.rates)

    @property
    def step(self) -> float | None:
        """T(W)."""
        return None if self.work is None else self.work / self.rate

    @property
    def communication(self) -> float | None:
        """C(W); 0 for one rank, even if it was not measured for others."""
        if self.ranks == 1:
            return 0.0
        if not self.communications:
            return None
        return min(self.communications) if self.best else median(self.communications)


@dataclass(frozen=True)
class Comparison:
    """A point's speed-up and efficiency."""

    speedup: float
    efficiency: float | None


def compare(point: Point, points: Sequence[Point]) -> Comparison:
    """S(W) and E(W) against the fewest ranks (with the same value).

    A sweep's value that ran on one number of ranks has nothing to be compared with so: there S is its throughput
    against that of the first value, and E = 1 - C/T, the share of a step that is not communication; None where C or T
    is not known.
    """
    alike = [other for other in points if other.value == point.value]
    if point.value is not None and len(alike) == 1:
        step, communication = point.step, point.communication
        share = None if step is None or communication is None else 1 - communication / step
        return Comparison(point.rate / points[0].rate, share)
    first = min(alike, key=lambda other: other.ranks)
    gain = point.rate / first.rate
    return Comparison(gain, gain * first.ranks / point.ranks)


@dataclass(frozen=True)
class Fit:
    """G, and how well the model tells the times that were measured."""

    coefficients: tuple[float, ...]
    """(G,), or (g0, g1) of a sweep; seconds."""
    divided: bool
    """Whether the ranks share the work."""
    points: int
    r_squared: float | None
    """None where it would say nothing: times that hardly differ, weak scaling, no more points than coefficients."""
    worst: float
    """The largest relative error among the points of the fit."""
    problem: str = ""
    """Why the fit is bad or says nothing; empty: it is good."""

    def compute(self, ranks: int, value: str | None = None) -> float:
        """G/W, or G: what a step computes on each rank, in seconds."""
        first, *slope = self.coefficients
        g = first + sum(coefficient * float(value or 0) for coefficient in slope)
        return g / ranks if self.divided else g

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def fit(points: Sequence[Point], divided: bool) -> Fit | str:
    """Fit G by least squares to every point with T, C and cores enough; or return why there is no fit."""
    if all(point.step is None for point in points):
        return "it is not known how many items a step has: give --total, or --batch"
    if not any(point.communications for point in points):
        return (
            "C(W) was not measured: say with --gradient-bytes or --gradient-model what a step all-reduces, for "
            "more than one rank"
        )
    usable = [
        point
        for point in points
        if point.step is not None and point.communication is not None and not point.oversubscribed
    ]
    if not usable:
        return "no configuration with enough cores for its ranks has both a throughput and a measured C(W)"
    values = [point.value for point in usable]
    if any(value is not None and not _is_number(value) for value in values):
        return "the sweep's values are no numbers"
    sweeps = values[0] is not None
    if sweeps and len(set(values)) < 2:
        return "G = g0 + g1 v needs at least two values"
    times = np.array([point.step for point in usable], np.float64)
    shares = np.array([1 / point.ranks if divided else 1.0 for point in usable])
    rows = (
        np.column_stack([shares, shares * np.array([float(value or 0) for value in values])])
        if sweeps
        else shares[:, None]
    )
    communications = np.array([point.communication for point in usable], np.float64)
    coefficients = np.linalg.lstsq(rows, times - communications, rcond=None)[0]
    noise = max((max(point.rates) - min(point.rates)) / point.rate for point in usable)
    return _judge(coefficients, times, rows @ coefficients + communications, divided, noise)


def _judge(coefficients: np.ndarray, times: np.ndarray, modelled: np.ndarray, divided: bool, noise: float) -> Fit:
    errors = (times - modelled) / times
    worst = float(np.abs(errors).max())
    spread = float(((times - times.mean()) ** 2).sum())
    free = len(times) - len(coefficients)
    # R² compares a model with a constant. It says nothing where the times are nearly constant, or G itself is the
    # constant: weak scaling.
    differ = float(np.ptp(times)) > TOLERANCE * float(times.mean()) and (divided or len(coefficients) > 1)
    r_squared = 1 - float(((times - modelled) ** 2).sum()) / spread if free > 0 and differ else None
    problem = ""
    if len(coefficients) == 1 and coefficients[0] <= 0:
        problem = "C(W) alone takes longer than a step: it is hidden behind computation, or not what the program sends"
    elif free <= 0:
        problem = "no more points than unknowns: it fits whatever was measured"
    elif worst > TOLERANCE or (r_squared is not None and r_squared < _R_SQUARED):
        unsteady = (
            f"; the runs of one configuration differ by up to {noise:.0%} (more --repeats, or --best)"
            if noise > TOLERANCE
            else ""
        )
        poor = "" if r_squared is None or r_squared >= _R_SQUARED else f", R² is {r_squared:.2f}"
        problem = f"off by {worst:.0%} at worst{poor}{unsteady}; the model leaves out {_LEFT_OUT}"
    return Fit(tuple(map(float, coefficients)), divided, len(times), r_squared, worst, problem)


def _is_number(text: str) -> bool:
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False


@dataclass(frozen=True)
class RingCost:
    """C(W) as a ring costs it, in seconds: latency (W - 1) + transfer (W - 1)/W."""

    latency: float
    transfer: float

    def __call__(self, ranks: int) -> float:
        return self.latency * (ranks - 1) + self.transfer * (ranks - 1) / ranks


def ring_cost(points: Sequence[Point]) -> RingCost | None:
    """Least squares of the measured C(W), neither part below 0; of a single one all is transfer. None: not measured."""
    measured = [point for point in points if point.ranks > 1 and point.communications and not point.oversubscribed]
    if not measured:
        return None
    ranks = np.array([point.ranks for point in measured], np.float64)
    costs = np.array([point.communication for point in measured], np.float64)
    hops, share = ranks - 1, (ranks - 1) / ranks
    only_transfer = RingCost(0.0, float(share @ costs / (share @ share)))
    if len(set(ranks)) < 2:
        return only_transfer
    latency, transfer = np.linalg.lstsq(np.column_stack([hops, share]), costs, rcond=None)[0]
    if latency < 0:
        return only_transfer
    return (
        RingCost(float(latency), float(transfer))
        if transfer >= 0
        else RingCost(float(hops @ costs / (hops @ hops)), 0.0)
    )


@dataclass(frozen=True)
class Prediction:
    """What the model says of a number of ranks. Nothing here is measured."""

    ranks: int
    step: float
    communication: float
    rate: float
    speedup: float
    efficiency: float


def predict(model: Fit, cost: RingCost, ranks: Sequence[int], points: Sequence[Point]) -> list[Prediction]:
    """Strong or weak scaling to other numbers of ranks, relative to the smallest that was measured."""
    first = min(points, key=lambda point: point.ranks)
    assert first.work is not None
    predictions = []
    for count in ranks:
        communication = cost(count)
        step = model.compute(count) + communication
        rate = (first.work if model.divided else first.work / first.ranks * count) / step
        gain = rate / first.rate
        predictions.append(Prediction(count, step, communication, rate, gain, gain * first.ranks / count))
    return predictions
