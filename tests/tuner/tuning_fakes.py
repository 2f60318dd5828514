"""What the tuner's tests share: a device, a problem, times that no physical limit contradicts."""

from __future__ import annotations

from cupyq import devices
from cupyq.kernels import Problem
from cupyq.tuner.candidate import Candidate
from cupyq.tuner.fake import FakeDevice
from cupyq.tuner.sampling import Stopping

DEVICE = devices.get("rtx-4090")
PROBLEM = Problem("w4a16", 16, 512, 512)
QUICK = Stopping(least=5, most=5)


def steady(candidate: Candidate, problem: Problem) -> float:
    """Give every candidate a time of its own that no physical limit contradicts: 100 us and a little by its key."""
    del problem
    return {"fp16": 400.0, "dequant": 500.0}.get(candidate.path, 100.0) * (1 + sum(map(ord, candidate.key)) % 97 / 97)


def in_order(candidates, problem):
    """Rank candidates as they come: a predictor that knows nothing."""
    del problem
    return list(candidates)


def make_fake(faults: dict[str, str]) -> FakeDevice:
    """Make a fake GPU in a worker's process."""
    return FakeDevice(DEVICE, steady, faults=faults, search=QUICK, final=QUICK)


def make_nothing() -> FakeDevice:
    """Fail to set up, as a GPU that is lost does."""
    raise RuntimeError("no CUDA-capable device is detected")
