"""What a candidate costs: one interface, whoever answers (the predictor, a GPU, a recorded table, a fake).

A failure is a value here: an `Outcome` with a state and a reason, never an exception that ends a tuning run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cupyq.kernels import Problem

from .candidate import Candidate

THROTTLED = "every sample was taken while the GPU was throttled"
"""The reason of a trial that says nothing of its candidate: it is tried again when the run goes on."""


@dataclass(frozen=True)
class Outcome:
    """What came of evaluating one candidate.

    Attributes
    ----------
    state : {"complete", "pruned", "failed"}
        "pruned": given up before it ran (it spills, needs too much); "failed": it crashed, hung, or gave no time.
    source : {"measured", "predicted"}
    reason : str or None
        Why it is not complete; for a complete one, a remark.
    time_us, low_us, high_us : float or None
        Median and the bounds of its interval, microseconds.
    samples_us : tuple of float or None
        Raw times of single measurements, microseconds; None for one that was thrown away.
    parts : mapping or None
        What a predicted time is made of, microseconds.
    registers, spill_bytes, shared_bytes : int or None
        Of the compiled kernel.
    clock_mhz, power_w, temperature_c : float or None
        Of the GPU meanwhile.
    cache, launch : str or None
        "cold" or "warm"; "graph" or "eager".
    """

    state: str
    source: str
    reason: str | None = None
    time_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    samples_us: tuple[float | None, ...] = ()
    parts: Mapping[str, float] | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    cache: str | None = None
    launch: str | None = None

    def __post_init__(self) -> None:
        if self.state == "complete" and not valid_time(self.time_us):
            object.__setattr__(self, "state", "failed")
            object.__setattr__(self, "reason", self.reason or f"the time is {self.time_us}, not a positive number")
            object.__setattr__(self, "time_us", None)

    @property
    def ok(self) -> bool:
        """Whether there is a time."""
        return self.state == "complete"

    def failed(self, reason: str) -> Outcome:
        """Return this outcome as failed, for `reason`."""
        return replace(self, state="failed", reason=reason)


def valid_time(time_us: float | None) -> bool:
    """Return whether `time_us` can be a time: a positive, finite number."""
    return time_us is not None and math.isfinite(time_us) and time_us > 0


class Objective(Protocol):
    """Evaluates candidates. `source` says what its times are, and is stored with each."""

    source: str

    def evaluate(self, candidate: Candidate, problem: Problem) -> Outcome:
        """Return what one look at the candidate gives. Never raises for a fault of the candidate."""
        ...

    def finals(self, candidates: Sequence[Candidate], problem: Problem) -> list[Outcome]:
        """Look at the finalists again, as closely as this objective can and alike for all; one outcome each.

        Objectives that measure interleave them, so that entry i of every `samples_us` was taken at the same moment.
        """
        ...

    def close(self) -> None:
        """Let go of what the objective holds (a worker, memory of a GPU)."""
        ...


class ReplayObjective:
    """Answers from a recorded table: for comparing search strategies without a GPU.

    Parameters
    ----------
    times_us : mapping
        Candidate key -> time; a candidate that is not in it fails.
    source : str
        What the recorded times were.
    """

    def __init__(self, times_us: Mapping[str, float], source: str = "predicted") -> None:
        self.times_us = times_us
        self.source = source
        self.asked: list[str] = []

    def evaluate(self, candidate: Candidate, problem: Problem) -> Outcome:
        """Return the recorded time."""
        del problem
        self.asked.append(candidate.key)
        time_us = self.times_us.get(candidate.key)
        if time_us is None:
            return Outcome("failed", self.source, reason="the recorded table does not have it")
        return Outcome("complete", self.source, time_us=time_us)

    def finals(self, candidates: Sequence[Candidate], problem: Problem) -> list[Outcome]:
        """Return the recorded times again."""
        return [self.evaluate(candidate, problem) for candidate in candidates]

    def close(self) -> None:
        """Nothing is held."""
