"""Measuring, apart from what is measured on: stopping rules, thrown-away samples, impossible times.

`Timed` is the objective of everything that has a clock, a GPU (`cuda.MeasuredObjective`) and the fake one of the
tests (`fake.FakeDevice`) alike; they supply `prepare`, which makes a `Runner` of a candidate.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from cupyq import roofline
from cupyq.devices import DeviceSpec
from cupyq.errors import ArgumentError
from cupyq.kernels import Problem

from .candidate import Candidate
from .objective import THROTTLED, Outcome
from .sampling import Stopping, collect, estimate, interleave

DRAM_TOLERANCE = 0.98
"""A time may be this share of what the DRAM peak allows: clocks are not known better."""

TENSOR_TOLERANCE = 0.85
"""The same for the tensor peak, whose rate follows a clock that may boost above the catalogue's."""

SEARCH = Stopping(least=10, most=50, width=0.01)
FINAL = Stopping(least=20, most=120, width=0.01)


class Pruned(Exception):
    """A candidate is given up before it runs; the message says why."""


class Runner(Protocol):
    """A candidate, built and ready to be timed."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What an outcome records beside the time: `Outcome` fields by name."""
        ...

    def take(self) -> float | None:
        """Return the time of one launch, microseconds; None for a sample taken while the GPU was throttled."""
        ...

    def close(self) -> None:
        """Free what the runner holds."""
        ...


class Timed:
    """Base of the objectives that measure.

    Parameters
    ----------
    device : DeviceSpec
    search, final : Stopping
        How closely to look while searching, and at the finalists.
    seconds : float
        Most time spent on the samples of one candidate.
    """

    source = "measured"

    def __init__(
        self, device: DeviceSpec, search: Stopping = SEARCH, final: Stopping = FINAL, seconds: float = 5.0
    ) -> None:
        self.device = device
        self.search = search
        self.final = final
        self.seconds = seconds

    def prepare(self, candidate: Candidate, problem: Problem) -> Runner:
        """Build the candidate; raises for whatever is wrong with it."""
        raise NotImplementedError

    def evaluate(self, candidate: Candidate, problem: Problem) -> Outcome:
        """Measure one candidate by itself."""
        try:
            runner = self.prepare(candidate, problem)
        except Pruned as reason:
            return Outcome("pruned", self.source, reason=str(reason))
        except Exception as error:  # noqa: BLE001  (a candidate's fault, whatever it is, is a value: see objective.py)
            return Outcome("failed", self.source, reason=_said(error))
        try:
            found, samples = collect(_limited(runner, self.seconds), self.search)
        except Exception as error:  # noqa: BLE001
            return Outcome("failed", self.source, reason=_said(error))
        finally:
            runner.close()
        if found is None:
            return Outcome("failed", self.source, reason=THROTTLED)
        return self._outcome(candidate, problem, found.median, found.low, found.high, samples, runner.facts)

    def finals(self, candidates: Sequence[Candidate], problem: Problem) -> list[Outcome]:
        """Measure the finalists again, interleaved."""
        runners: dict[int, Runner] = {}
        outcomes: dict[int, Outcome] = {}
        try:
            for i, candidate in enumerate(candidates):
                try:
                    runners[i] = self.prepare(candidate, problem)
                except Exception as error:  # noqa: BLE001
                    outcomes[i] = Outcome("failed", self.source, reason=_said(error))
            takers = [_limited(runner, self.seconds * 4) for runner in runners.values()]
            try:
                rounds = interleave(takers, self.final) if takers else []
            except Exception as error:  # noqa: BLE001
                rounds = []
                outcomes |= {i: Outcome("failed", self.source, reason=_said(error)) for i in runners}
            for i, times in zip(runners, rounds, strict=False):
                outcomes[i] = self._final_outcome(candidates[i], problem, times, runners[i].facts)
        finally:
            for runner in runners.values():
                runner.close()
        return [outcomes[i] for i in range(len(candidates))]

    def _final_outcome(
        self, candidate: Candidate, problem: Problem, times: Sequence[float | None], facts: Mapping[str, Any]
    ) -> Outcome:
        kept = [t for t in times if t is not None]
        if len(kept) < 2:
            return Outcome("failed", self.source, reason=THROTTLED)
        found = estimate(kept)
        return self._outcome(candidate, problem, found.median, found.low, found.high, tuple(times), facts)

    def _outcome(
        self,
        candidate: Candidate,
        problem: Problem,
        median: float,
        low: float,
        high: float,
        samples: tuple[float | None, ...],
        facts: Mapping[str, Any],
    ) -> Outcome:
        outcome = Outcome("complete", self.source, None, median, low, high, samples, **facts)
        reason = impossible(median, candidate, problem, self.device) if outcome.ok else None
        return outcome.failed(reason) if reason else outcome

    def close(self) -> None:
        """Nothing is held beyond a single evaluation."""


def _limited(runner: Runner, seconds: float) -> Any:
    """Return runner.take with an end: a candidate that is slow a thousandfold must not take the whole budget."""
    end = time.monotonic() + seconds
    taken = 0

    def take() -> float | None:
        nonlocal taken
        taken += 1
        if taken > 2 and time.monotonic() > end:
            raise TimeoutError(f"{taken - 1} samples took more than {seconds:g} s")
        return runner.take()

    return take


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def least_time_us(candidate: Candidate, problem: Problem, device: DeviceSpec) -> tuple[float, str]:
    """Return the time that no run can beat with weights coming from DRAM, and what it is bound by.

    Weights once over the DRAM peak, or the operations over the tensor peak of the type that multiplies.
    """
    if candidate.path == "fp16":
        moved = problem.n * problem.k * 2.0
    else:
        moved = roofline.weight_bytes(problem.n, problem.k, problem.bits, problem.group_size)
    multiplies = problem.dtype
    if not problem.weight_only and candidate.path == "fused":
        multiplies = "int8" if problem.op == "w8a8-int8" else "fp8"
    memory = moved / (device.dram_gbps * 1e3) * DRAM_TOLERANCE
    try:
        rate = device.tensor_tops(multiplies)
    except ArgumentError:  # a GPU with no such tensor instruction is bound by its memory alone here
        return memory, "DRAM"
    tensor = roofline.operations(problem.m, problem.n, problem.k) / (rate * 1e6) * TENSOR_TOLERANCE
    return (tensor, "tensor") if tensor > memory else (memory, "DRAM")


def impossible(time_us: float, candidate: Candidate, problem: Problem, device: DeviceSpec) -> str | None:
    """Say why a measured time cannot be true on `device`, or return None."""
    least, bound = least_time_us(candidate, problem, device)
    if time_us >= least:
        return None
    return (
        f"{time_us:.3g} us is impossible: at the {bound} peak of {device.name} it takes {least:.3g} us at least, "
        "so something was measured that is not this product"
    )
