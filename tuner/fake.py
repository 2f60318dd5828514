"""A GPU that is not there: true times, noise, drift, throttling and every way to go wrong, all programmable.

It stands in for the real thing wherever the tuner's own behaviour is tested, and in replays of recorded tables.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupyq.devices import DeviceSpec
from cupyq.kernels import Problem

from .candidate import Candidate
from .measure import FINAL, SEARCH, Timed
from .sampling import Stopping

FAULTS = ("raise", "compile", "hang", "crash", "exit", "nan", "inf", "zero", "wrong")
"""What a candidate can be made to do: raise when launched or when compiled, never return, die of a segmentation
fault, leave the process, give a time that is none, or compute something else."""


@dataclass
class FakeDevice(Timed):
    """An objective with a programmable clock.

    Parameters
    ----------
    device : DeviceSpec
        What it pretends to be.
    times_us : callable or mapping
        (candidate, problem) -> true time; or candidate key -> true time.
    noise : float
        Relative standard deviation of one sample.
    drift : callable, optional
        Number of samples taken so far -> factor on every time.
    throttled : callable, optional
        Number of samples taken so far -> whether the GPU is throttled: such samples are slow, and thrown away.
    faults : mapping
        Candidate key -> one of `FAULTS`.
    seed : int
    """

    device: DeviceSpec
    times_us: Callable[[Candidate, Problem], float] | Mapping[str, float]
    noise: float = 0.0
    drift: Callable[[int], float] = lambda taken: 1.0
    throttled: Callable[[int], bool] = lambda taken: False
    faults: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    search: Stopping = SEARCH
    final: Stopping = FINAL
    seconds: float = 5.0
    source: str = "measured"

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self.taken = 0
        self.measured: list[str] = []

    def true_time(self, candidate: Candidate, problem: Problem) -> float:
        """Return the time without noise."""
        if callable(self.times_us):
            return self.times_us(candidate, problem)
        return self.times_us[candidate.key]

    def prepare(self, candidate: Candidate, problem: Problem) -> FakeRunner:
        """Build the runner, or fail as told."""
        fault = self.faults.get(candidate.key)
        self.measured.append(candidate.key)
        if fault == "compile":
            raise RuntimeError("NVRTC refused the kernel (as told)")
        return FakeRunner(self, self.true_time(candidate, problem), fault)

    def sample(self, time_us: float) -> float | None:
        """Return one noisy sample of a true time; None while throttled."""
        self.taken += 1
        if self.throttled(self.taken):
            return None
        factor = self.drift(self.taken) * float(np.exp(self.noise * self._rng.standard_normal()))
        return time_us * factor


class FakeRunner:
    """A candidate on the fake device."""

    def __init__(self, device: FakeDevice, time_us: float, fault: str | None) -> None:
        self.device = device
        self.time_us = time_us
        self.fault = fault
        self.facts: dict[str, Any] = {"cache": "cold", "launch": "graph"}

    def take(self) -> float | None:
        """Return one sample, or commit the fault."""
        if self.fault == "raise":
            raise RuntimeError("an illegal memory access was encountered (as told)")
        if self.fault == "hang":
            _hang()
        if self.fault == "crash":
            ctypes.string_at(0)  # a real segmentation fault
        if self.fault == "exit":
            os._exit(3)
        if self.fault in ("nan", "inf", "zero"):
            return {"nan": float("nan"), "inf": float("inf"), "zero": 0.0}[self.fault]
        return self.device.sample(self.time_us)

    def close(self) -> None:
        """Nothing is held."""


def _hang() -> None:
    never = threading.Event()
    while not never.wait(3600):
        time.sleep(0)


class FakeVerifier:
    """A verifier that knows beforehand which candidates compute something else.

    Parameters
    ----------
    wrong : set of str
        Keys of the candidates that fail.
    """

    def __init__(self, wrong: frozenset[str] | set[str] = frozenset()) -> None:
        self.wrong = wrong
        self.asked: list[str] = []

    def verify(self, candidate: Candidate, problem: Problem) -> Any:
        """Return what was decided beforehand."""
        from .verify import Verification

        del problem
        self.asked.append(candidate.key)
        if candidate.key in self.wrong:
            return Verification(False, 7.0, "at (0, 0) got nan, want 1 (as told)", "told")
        return Verification(True, 0.25, None, "told")
