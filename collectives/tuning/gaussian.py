"""Gaussian-process regression in NumPy: what a few noisy measurements say about settings that were never measured.

A point is a matrix: a row for each parameter, and in it the coordinates of the parameter's value. The covariance of two
points x and y is a Matérn 5/2, m, of their distances, each parameter's divided by a length of its own, in two parts:

    k(x, y) = 0.3 * mean over parameters p of m(|x_p - y_p| / length_p)
              + 0.7 * m(root of the sum over p of (|x_p - y_p| / length_p)^2)

The first part says that a parameter has an effect of its own, whatever the others are: what was learnt about it at one
place holds everywhere, so that a dozen measurements say something in six dimensions. The second leaves room for
parameters that depend on each other. A long length says that a parameter hardly matters.

Sources: Rasmussen and Williams, Gaussian Processes for Machine Learning (2006), algorithm 2.1; Duvenaud, Nickisch and
Rasmussen, Additive Gaussian Processes (2011); Jones, Schonlau and Welch, Efficient Global Optimization (1998), for the
expected improvement.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import erf, log, pi, sqrt
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]

_LENGTHS = (0.3, 0.6, 1.2, 2.4)
_USUAL_LENGTH = 0.8
_ALONE = 0.3
"""What of the variance is left to the parameters' own effects. More of it stops looking for combinations too early."""
_SWEEPS = 2
_JITTER = 1e-9
"""Added to the variances, so that a point measured twice does not make the matrix singular where no noise is
assumed."""


def distances(a: Array, b: Array) -> Array:
    """Each parameter's distance between every point of ``a`` and every point of ``b``: (points of a, points of b,
    parameters)."""
    return np.asarray(np.linalg.norm(a[:, None] - b[None], axis=-1))


def covariance(apart: Array, lengths: Array) -> Array:
    """Covariances of points that are these `distances` apart; 1 where they are the same."""
    scaled = apart / lengths
    together = np.linalg.norm(scaled, axis=-1)
    return np.asarray(_ALONE * _matern(scaled).mean(axis=-1) + (1 - _ALONE) * _matern(together))


def _matern(distance: Array) -> Array:
    scaled = sqrt(5) * distance
    return np.asarray((1 + scaled + scaled**2 / 3) * np.exp(-scaled))


class Process:
    """A Gaussian process that has seen measurements.

    Lengths and noise are fitted: a coordinate search over a few values of each takes those that make the measurements
    most likely. Lengths far from the usual one must earn it (a log-normal prior), because few measurements cannot tell
    many lengths.

    Args:
        points: (measurements, parameters, coordinates); what was measured twice is there twice.
        values: one for each measurement. They are standardised here: the prior has the values' own mean and variance.
        noises: the standard deviations of the noise that are considered, in standard deviations of the values.
    """

    def __init__(self, points: Array, values: Array, noises: Sequence[float]) -> None:
        self._points = points
        self._apart = distances(points, points)
        self._centre = float(values.mean())
        self._scale = float(values.std()) or 1.0
        self._standard = (values - self._centre) / self._scale
        self.lengths = np.full(points.shape[1], _USUAL_LENGTH)
        self.noise = noises[0]
        self._fit(noises)
        self._factor = self._cholesky(self.lengths, self.noise)
        self._white = np.linalg.solve(self._factor, self._standard)

    def predict(self, points: Array) -> tuple[Array, Array]:
        """The mean and the standard deviation, noise left out, that the values at ``points`` are believed to have."""
        towards = covariance(distances(self._points, points), self.lengths)
        known = np.linalg.solve(self._factor, towards)
        spread = np.sqrt(np.maximum(1 - (known**2).sum(axis=0), 0))
        return self._centre + self._scale * (known.T @ self._white), self._scale * spread

    def _fit(self, noises: Sequence[float]) -> None:
        best = -np.inf
        for _ in range(_SWEEPS):
            for noise in noises:
                likelihood = self._likelihood(self.lengths, noise)
                if likelihood > best:
                    best, self.noise = likelihood, noise
            for parameter, length in product(range(len(self.lengths)), _LENGTHS):
                lengths = self.lengths.copy()
                lengths[parameter] = length
                likelihood = self._likelihood(lengths, self.noise)
                if likelihood > best:
                    best, self.lengths = likelihood, lengths

    def _likelihood(self, lengths: Array, noise: float) -> float:
        """The logarithm of the measurements' likelihood times the prior of the lengths, but for a constant."""
        factor = self._cholesky(lengths, noise)
        white = np.linalg.solve(factor, self._standard)
        prior = sum(log(length / _USUAL_LENGTH) ** 2 for length in lengths.tolist())
        return -0.5 * float(white @ white) - float(np.log(np.diag(factor)).sum()) - 0.5 * prior

    def _cholesky(self, lengths: Array, noise: float) -> Array:
        return np.asarray(
            np.linalg.cholesky(covariance(self._apart, lengths) + (noise**2 + _JITTER) * np.eye(len(self._points)))
        )


def expected_improvement(mean: Array, spread: Array, best: float) -> Array:
    """By how much a normal variable is expected to exceed ``best``, where falling short counts as nothing."""
    spread = np.maximum(spread, 1e-12)
    z = (mean - best) / spread
    below = np.array([0.5 * (1 + erf(value / sqrt(2))) for value in z.tolist()])
    return np.asarray(spread * (z * below + np.exp(-0.5 * z**2) / sqrt(2 * pi)))
