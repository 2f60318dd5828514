"""Several GPUs: like ones share the problems, unlike ones each tune them all, one that fails does not stop the rest."""

from __future__ import annotations

import dataclasses

import pytest
from tuning_fakes import DEVICE, PROBLEM, QUICK, in_order, steady

from cupyq import db, devices
from cupyq.errors import TuningError
from cupyq.tuner import fleet
from cupyq.tuner.fake import FakeDevice, FakeVerifier
from cupyq.tuner.one_problem import Settings
from cupyq.tuner.study import Silent, Tuner

TWIN = dataclasses.replace(DEVICE, ordinal=1)
OTHER = devices.get("a100-sxm")
PROBLEMS = [PROBLEM.with_m(m) for m in (1, 2, 4, 8, 16)]


@pytest.fixture
def make(tmp_path):
    with db.open(tmp_path / "tuning.db") as store:

        def build(device, times=steady, progress=None):
            fake = FakeDevice(device, times, search=QUICK, final=QUICK)
            more = {"progress": progress} if progress else {}
            return Tuner(store, device, fake, FakeVerifier(), in_order, Settings(4), **more)

        build.store = store
        yield build


def test_like_gpus_share_and_unlike_ones_do_all():
    assert fleet.shares([DEVICE, OTHER, TWIN], PROBLEMS) == [PROBLEMS[::2], PROBLEMS, PROBLEMS[1::2]]


def test_every_kind_gets_every_row(make):
    results = fleet.run([DEVICE, TWIN, OTHER], PROBLEMS, make)
    assert [(device.name, len(result.problems)) for device, result in results] == [("rtx-4090", 5), ("a100-sxm", 5)]
    rows = make.store.best()
    assert sorted((row["device"], row["band"]) for row in rows) == sorted(
        (name, band) for name in ("rtx-4090", "a100-sxm") for band in (1, 2, 4, 8, 16)
    )


def test_one_lost_gpu_does_not_stop_the_others(make):
    def nothing(candidate, problem):
        raise RuntimeError("fell off the bus")

    results = fleet.run([DEVICE, OTHER], PROBLEMS[:1], lambda d: make(d, nothing if d is OTHER else steady))
    assert [len(result.problems) for _, result in results] == [1, 0]
    with pytest.raises(TuningError, match="fell off the bus"):
        fleet.run([OTHER, dataclasses.replace(OTHER, sms=98)], PROBLEMS[:1], lambda d: make(d, nothing))


def test_stopping_ends_a_run_as_ctrl_c_does(make):
    class Stop(Silent):
        def trial(self, problem, candidate, outcome):
            tuner.stop.set()

    tuner = make(DEVICE, progress=Stop())
    result = tuner.run(PROBLEMS)
    assert (result.interrupted, result.problems) == (True, [])
    assert len(make.store.trials()) == 1
