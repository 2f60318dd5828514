"""The watched process, with real faults in it: an exception, a hang, a segmentation fault, an exit."""

from __future__ import annotations

import time

import pytest
from tuning_fakes import DEVICE, PROBLEM, in_order, make_fake, make_nothing, steady

from cupyq import kernels
from cupyq.tuner.fake import FakeVerifier
from cupyq.tuner.one_problem import Settings
from cupyq.tuner.space import Space
from cupyq.tuner.study import Tuner
from cupyq.tuner.worker import WorkerObjective

FUSED = Space(PROBLEM, DEVICE).fused


@pytest.fixture
def worker():
    """Return a maker of workers around fake GPUs, and end them all afterwards."""
    made = []

    def make(faults, seconds=2.0, function=make_fake):
        objective = WorkerObjective(function, () if function is make_nothing else (faults,), seconds=seconds)
        made.append(objective)
        return objective

    yield make
    for objective in made:
        objective.close()


def test_faults_cost_one_trial_and_a_new_process(worker):
    """e2: illegal store, endless loop, segfault, exit: failed with a reason, and the next one is measured."""
    faults = {FUSED[0].key: "raise", FUSED[2].key: "hang", FUSED[4].key: "crash", FUSED[6].key: "exit"}
    objective = worker(faults)
    outcomes = [objective.evaluate(candidate, PROBLEM) for candidate in FUSED[:8]]
    assert [outcome.state for outcome in outcomes] == ["failed", "complete"] * 4
    reasons = [outcome.reason for outcome in outcomes[::2]]
    assert "illegal memory access" in reasons[0]
    assert reasons[1] == "hung: no answer in 2 s, so its process was ended"
    assert reasons[2] == "its process died of SIGSEGV"
    assert reasons[3] == "its process left with status 3"
    assert objective.started == 5
    for candidate, outcome in zip(FUSED[1:8:2], outcomes[1::2], strict=True):
        assert outcome.time_us == pytest.approx(steady(candidate, PROBLEM))


def test_a_finalist_that_faults_does_not_take_the_others_along(worker):
    objective = worker({FUSED[1].key: "crash"})
    outcomes = objective.finals(FUSED[:3], PROBLEM)
    assert [outcome.state for outcome in outcomes] == ["complete", "failed", "complete"]
    assert "SIGSEGV" in outcomes[1].reason
    assert len(outcomes[0].samples_us) == len(outcomes[2].samples_us) == 5


def test_a_compile_error_needs_no_new_process(worker):
    objective = worker({FUSED[0].key: "nan"})
    assert objective.evaluate(FUSED[0], PROBLEM).state == "failed"
    assert objective.evaluate(FUSED[1], PROBLEM).ok
    assert objective.started == 1


def test_a_gpu_that_is_gone_is_a_reason_not_a_crash(worker):
    outcome = worker({}, function=make_nothing).evaluate(FUSED[0], PROBLEM)
    assert (outcome.state, outcome.reason) == ("failed", "its process left with status 1")


def test_a_tuning_run_survives_all_of_it(worker, store, few):
    few(8)
    order = sorted(Space(PROBLEM, DEVICE).fused, key=lambda c: steady(c, PROBLEM))
    objective = worker({order[0].key: "crash", order[1].key: "hang", order[2].key: "raise"}, seconds=1.0)
    tuner = Tuner(store, DEVICE, objective, FakeVerifier(), in_order, Settings())
    started = time.monotonic()
    [result] = tuner.run([PROBLEM]).problems
    assert result.winner.candidate == order[3]
    failed = {str(row["config"]): row["reason"] for row in store.trials(state="failed")}
    assert set(failed) == {str(dict(sorted(kernels.to_dict(c.config).items()))) for c in order[:3]}
    assert time.monotonic() - started < 60


def test_closing_ends_the_process(worker):
    objective = worker({})
    objective.evaluate(FUSED[0], PROBLEM)
    process = objective._process
    objective.close()
    assert not process.is_alive()
    objective.close()
