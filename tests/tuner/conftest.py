"""A fake GPU, a small space, and a tuner over both."""

from __future__ import annotations

import itertools

import pytest
from tuning_fakes import DEVICE, QUICK, in_order, steady

from cupyq import db, kernels
from cupyq.tuner import space
from cupyq.tuner.fake import FakeDevice, FakeVerifier
from cupyq.tuner.one_problem import Settings
from cupyq.tuner.study import Tuner


@pytest.fixture
def store():
    with db.open(":memory:") as opened:
        yield opened


@pytest.fixture
def few(monkeypatch):
    """Cut the fused space of any problem to its first legal configs, the default among them."""

    def cut(count):
        everything = kernels.configs

        def some(problem, device):
            default = kernels.default(problem, device)
            rest = (cfg for cfg in everything(problem, device) if cfg != default)
            return iter([default, *itertools.islice(rest, count - 1)])

        monkeypatch.setattr(space.kernels, "configs", some)

    return cut


@pytest.fixture
def make(store):
    """Build a tuner on a fake device; keywords go to `FakeDevice` and `Settings`."""

    def build(times_us=steady, *, wrong=(), trials=None, sampler="auto", seconds=None, progress=None, seed=0, **fake):
        fake.setdefault("search", QUICK)
        fake.setdefault("final", QUICK)
        device = FakeDevice(DEVICE, times_us, **fake)
        settings = Settings(trials, sampler, seed)
        more = {} if progress is None else {"progress": progress}
        return Tuner(store, DEVICE, device, FakeVerifier(set(wrong)), in_order, settings, seconds, **more)

    return build
