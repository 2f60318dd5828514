"""From raw times to a median with an interval, and when to stop taking more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 300
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A median and the bounds of its bootstrap interval, in the unit of the samples."""

    median: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Half the interval over the median: 0.01 is plus or minus one percent."""
        return (self.high - self.low) / 2 / self.median if self.median else float("inf")


@dataclass(frozen=True)
class Stopping:
    """When a measurement has enough samples.

    Parameters
    ----------
    least, most : int
        Samples.
    width : float
        Stop when half the interval falls below this share of the median.
    """

    least: int = 10
    most: int = 100
    width: float = 0.01


def estimate(samples: Sequence[float] | np.ndarray, seed: int = 0) -> Estimate:
    """Return the median of `samples` with its percentile-bootstrap interval (95 %).

    The seed makes equal samples give equal intervals, so a row in the database can be computed again from its samples.
    """
    values = np.asarray(samples, dtype=np.float64)
    middle = float(np.median(values))
    if values.size < 2 or not np.isfinite(values).all():
        return Estimate(middle, middle, middle)
    picks = np.random.default_rng(seed).integers(values.size, size=(RESAMPLES, values.size))
    medians = np.median(values[picks], axis=1)
    low, high = np.quantile(medians, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(middle, float(low), float(high))


def collect(take: Callable[[], float | None], stopping: Stopping) -> tuple[Estimate | None, tuple[float, ...]]:
    """Take samples until the interval is narrow enough or `stopping.most` were taken.

    Parameters
    ----------
    take : callable
        Returns one time, or None for a sample to throw away (a throttled one): it counts as taken.

    Returns
    -------
    estimate, samples
        The estimate is None when fewer than two samples were kept.
    """
    kept: list[float] = []
    for taken in range(1, stopping.most + 1):
        value = take()
        if value is not None:
            kept.append(value)
        # Looking after every sample would stop at the luckiest moment; every tenth does not.
        if taken >= stopping.least and taken % 10 == 0 and len(kept) >= stopping.least:
            found = estimate(kept)
            if found.width < stopping.width:
                return found, tuple(kept)
    return (estimate(kept) if len(kept) > 1 else None), tuple(kept)


def interleave(
    takers: Sequence[Callable[[], float | None]], stopping: Stopping, seed: int = 0
) -> list[tuple[float | None, ...]]:
    """Take samples of several things round by round, in another order each round, so that drift meets all alike.

    Stops when the interval of every thing's ratio to the first is narrow enough, or after `stopping.most` rounds.

    Returns
    -------
    list of tuple
        Per thing its times, one a round; None where a sample was thrown away.
    """
    rng = np.random.default_rng(seed)
    rounds: list[list[float | None]] = [[] for _ in takers]
    for taken in range(1, stopping.most + 1):
        for index in rng.permutation(len(takers)):
            rounds[index].append(takers[index]())
        if taken >= stopping.least and taken % 10 == 0 and _settled(rounds, stopping.width):
            break
    return [tuple(times) for times in rounds]


def _settled(rounds: Sequence[Sequence[float | None]], width: float) -> bool:
    for times in rounds[1:]:
        ratios = paired_ratios(times, rounds[0])
        if len(ratios) < 2 or estimate(ratios).width >= width:
            return False
    return True


def paired_ratios(times: Sequence[float | None], others: Sequence[float | None]) -> np.ndarray:
    """Return times / others round by round, without rounds in which either is missing."""
    pairs = [(a, b) for a, b in zip(times, others, strict=False) if a is not None and b is not None and b > 0]
    return np.array([a / b for a, b in pairs], dtype=np.float64)
