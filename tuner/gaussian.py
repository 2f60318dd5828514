"""A Gaussian process on the grid of a space: expected improvement over every candidate that is left.

Optuna's own needs torch, which cupyq does without; on a few thousand candidates and a few hundred trials NumPy is
enough. Rasmussen and Williams, "Gaussian Processes for Machine Learning" (2006), algorithm 2.1; Jones, Schonlau and
Welch, "Efficient Global Optimization" (1998), for the improvement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .candidate import Candidate
from .objective import Outcome
from .pool import Pool

STARTUP = 5
"""Trials drawn at random before there is something to model."""

LENGTHS = (0.25, 0.5, 1.0, 2.0)
"""Correlation lengths tried, in spans of a field; the likeliest is used."""

NOISE = 1e-3
"""Variance of the noise beside that of the times, both of standardized logarithms."""

_erf = np.vectorize(math.erf, otypes=[np.float64])


class GaussianProcess:
    """Proposes the untried candidate with the largest expected improvement of the logarithm of the time."""

    def __init__(self, candidates: Sequence[Candidate], seed: int = 0) -> None:
        self._pool = Pool(candidates)
        self._rng = np.random.default_rng(seed)
        self._seen: list[tuple[int, float]] = []

    def propose(self) -> Candidate | None:
        """Return a candidate not yet tried, or None when there is none left."""
        left = np.flatnonzero(self._pool.untried)
        if left.size == 0:
            return None
        if len(self._seen) < STARTUP:
            return self._pool.candidates[int(self._rng.choice(left))]
        gain = self._expected_improvement(left)
        return self._pool.candidates[int(left[int(gain.argmax())])]

    def skip(self, candidate: Candidate) -> None:
        """Take it off what is left."""
        self._pool.remove(candidate)

    def tell(self, candidate: Candidate, outcome: Outcome) -> None:
        """Learn from an outcome; a failure only takes the candidate off what is left."""
        self._pool.remove(candidate)
        index = self._pool.index.get(candidate)
        if index is not None and outcome.ok and outcome.time_us is not None:
            self._seen.append((index, math.log(outcome.time_us)))

    def _expected_improvement(self, left: np.ndarray) -> np.ndarray:
        places = self._pool.unit_grid()
        seen = np.array([index for index, _ in self._seen])
        times = np.array([value for _, value in self._seen])
        y = (times - times.mean()) / (times.std() or 1.0)
        length = max(LENGTHS, key=lambda value: _log_likelihood(places[seen], y, value))
        cholesky, alpha = _fit(places[seen], y, length)
        across = _matern(places[left], places[seen], length)
        mean = across @ alpha
        half = np.linalg.solve(cholesky, across.T)
        deviation = np.sqrt(np.maximum(1.0 + NOISE - (half**2).sum(axis=0), 1e-12))
        z = (y.min() - mean) / deviation
        return deviation * (z * 0.5 * (1 + _erf(z / math.sqrt(2))) + np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi))


def _matern(a: np.ndarray, b: np.ndarray, length: float) -> np.ndarray:
    """Return the Matern covariance of smoothness 5/2 between the rows of a and of b."""
    squares = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None] - 2 * a @ b.T
    r = np.sqrt(5 * np.maximum(squares, 0)) / length
    return (1 + r + r**2 / 3) * np.exp(-r)


def _fit(x: np.ndarray, y: np.ndarray, length: float) -> tuple[np.ndarray, np.ndarray]:
    covariance = _matern(x, x, length) + NOISE * np.eye(len(x))
    cholesky = np.linalg.cholesky(covariance)
    return cholesky, np.linalg.solve(cholesky.T, np.linalg.solve(cholesky, y))


def _log_likelihood(x: np.ndarray, y: np.ndarray, length: float) -> float:
    cholesky, alpha = _fit(x, y, length)
    return float(-0.5 * y @ alpha - np.log(np.diag(cholesky)).sum())
