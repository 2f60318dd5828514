"""The choice of a winner among finalists: paired with the default, so that drift cancels, and never on luck alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .candidate import Candidate
from .objective import Outcome
from .sampling import estimate, paired_ratios

FINALISTS = 6
MARGIN = 0.10
"""A candidate within this share of the fastest may still be the fastest: single looks are that uncertain."""

TIE = 0.01
"""Two predictions that differ by less say nothing: the model resolves no better."""


@dataclass(frozen=True)
class Ranked:
    """A finalist beside the default.

    Attributes
    ----------
    ratio, ratio_low, ratio_high : float
        Its time over the default's, with the interval; infinite without a default to compare with.
    """

    candidate: Candidate
    outcome: Outcome
    ratio: float
    ratio_low: float
    ratio_high: float

    @property
    def better_than_default(self) -> bool:
        """Whether it beats the default by more than the interval."""
        return self.ratio_high < 1


def finalists(
    looks: Sequence[tuple[Candidate, Outcome]], limit: int = FINALISTS, margin: float = MARGIN
) -> list[Candidate]:
    """Return the candidates worth a second look, fastest first: those within `margin` of the fastest, at most `limit`.

    The second fastest always is one, so that something is left when the fastest turns out wrong.
    """
    complete = sorted((look for look in looks if look[1].ok), key=lambda look: (look[1].time_us, look[0].key))
    if not complete:
        return []
    fastest = complete[0][1].time_us or 0.0
    near = [c for c, outcome in complete if (outcome.time_us or 0.0) <= fastest * (1 + margin)]
    return (near if len(near) > 1 else [c for c, _ in complete[:2]])[:limit]


def rank(looks: Sequence[tuple[Candidate, Outcome]], default: Candidate | None) -> list[Ranked]:
    """Order finalists by how they stand to the default, fastest first.

    A candidate that does not beat the default by more than the interval comes after it: a change has to pay.

    Parameters
    ----------
    looks : sequence of (candidate, outcome)
        From `Objective.finals`; entry i of every `samples_us` was taken in the same round.
    default : Candidate or None
        Among them; None, or without a time of its own, when there is nothing to compare with.
    """
    complete = [(c, o) for c, o in looks if o.ok]
    base = next((o for c, o in complete if c == default), None)
    ranked = [_compare(candidate, outcome, base) for candidate, outcome in complete]
    if base is None:
        return sorted(ranked, key=lambda r: (r.outcome.time_us or 0.0, r.candidate.key))

    def order(entry: Ranked) -> tuple[int, float, str]:
        if entry.candidate == default:
            return 1, 0.0, entry.candidate.key
        return (0 if entry.better_than_default else 2), entry.ratio, entry.candidate.key

    return sorted(ranked, key=order)


def _compare(candidate: Candidate, outcome: Outcome, base: Outcome | None) -> Ranked:
    if base is None or base.time_us is None or outcome.time_us is None:
        return Ranked(candidate, outcome, float("inf"), float("inf"), float("inf"))
    if outcome is base:
        return Ranked(candidate, outcome, 1.0, 1.0, 1.0)
    ratios = paired_ratios(outcome.samples_us, base.samples_us)
    if len(ratios) >= 2:
        found = estimate(ratios)
        return Ranked(candidate, outcome, found.median, found.low, found.high)
    # Predictions have no samples; what they have in common (clocks, DRAM, launch) cancels in the ratio.
    ratio = outcome.time_us / base.time_us
    return Ranked(candidate, outcome, ratio, ratio * (1 - TIE), ratio * (1 + TIE))
