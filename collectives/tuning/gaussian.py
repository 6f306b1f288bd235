"""Gaussian-process regression in NumPy, for few noisy measurements of several parameters.

A point is a matrix: a row for each parameter with the coordinates of its value. The covariance of two points x and y
has two parts, each a Matérn 5/2 kernel m of their distances, scaled by a length for each parameter:

    k(x, y) = 0.3 * mean over parameters p of m(|x_p - y_p| / length_p)
              + 0.7 * m(root of the sum over p of (|x_p - y_p| / length_p)^2)

The first part models effects of single parameters that do not depend on the others: what was measured at one point
holds everywhere, so that a dozen measurements suffice for an estimate in six dimensions. The second models
interactions. A long length means that a parameter hardly matters.

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
"""The share of the variance of single parameters' effects; with more, the search for combinations ends too early."""
_SWEEPS = 2
_JITTER = 1e-9
"""Added to the variances, so that a point measured twice does not make the matrix singular without noise."""


def distances(a: Array, b: Array) -> Array:
    """Each parameter's distance between all points of ``a`` and ``b``: shape (points of a, points of b, parameters)."""
    return np.asarray(np.linalg.norm(a[:, None] - b[None], axis=-1))


def covariance(apart: Array, lengths: Array) -> Array:
    """Covariances of points at these `distances`; 1 for equal points."""
    scaled = apart / lengths
    together = np.linalg.norm(scaled, axis=-1)
    return np.asarray(_ALONE * _matern(scaled).mean(axis=-1) + (1 - _ALONE) * _matern(together))


def _matern(distance: Array) -> Array:
    scaled = sqrt(5) * distance
    return np.asarray((1 + scaled + scaled**2 / 3) * np.exp(-scaled))


class Process:
    """A Gaussian process conditioned on measurements.

    Lengths and noise maximise the posterior, by a coordinate search over a few values of each. Lengths have a
    log-normal prior, because few measurements do not determine many lengths.

    Args:
        points: shape (measurements, parameters, coordinates); repeated measurements are repeated points.
        values: one for each measurement, standardised here: the prior has their mean and variance.
        noises: the candidates for the standard deviation of the noise, in standard deviations of the values.
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
        """Posterior mean and standard deviation, without noise, of the values at ``points``."""
        towards = covariance(distances(self._points, points), self.lengths)
        solved = np.linalg.solve(self._factor, towards)
        spread = np.sqrt(np.maximum(1 - (solved**2).sum(axis=0), 0))
        return self._centre + self._scale * (solved.T @ self._white), self._scale * spread

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
        """The logarithm of likelihood times prior of the lengths, up to a constant."""
        factor = self._cholesky(lengths, noise)
        white = np.linalg.solve(factor, self._standard)
        prior = sum(log(length / _USUAL_LENGTH) ** 2 for length in lengths.tolist())
        return -0.5 * float(white @ white) - float(np.log(np.diag(factor)).sum()) - 0.5 * prior

    def _cholesky(self, lengths: Array, noise: float) -> Array:
        return np.asarray(
            np.linalg.cholesky(covariance(self._apart, lengths) + (noise**2 + _JITTER) * np.eye(len(self._points)))
        )


def expected_improvement(mean: Array, spread: Array, best: float) -> Array:
    """The expectation of max(0, x - best) for normal variables x of these means and standard deviations."""
    spread = np.maximum(spread, 1e-12)
    z = (mean - best) / spread
    below = np.array([0.5 * (1 + erf(value / sqrt(2))) for value in z.tolist()])
    return np.asarray(spread * (z * below + np.exp(-0.5 * z**2) / sqrt(2 * pi)))
