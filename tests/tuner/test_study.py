"""The search as a whole, on a fake GPU: what is tried, what wins, what a fault does, how a run goes on."""

from __future__ import annotations

import pytest
from tuning_fakes import DEVICE, PROBLEM, QUICK, steady

from cupyq import kernels
from cupyq.errors import TuningError
from cupyq.tuner.candidate import Candidate
from cupyq.tuner.fake import FAULTS
from cupyq.tuner.space import Space
from cupyq.tuner.study import Silent


def searched(store):
    return [row for row in store.trials() if row["phase"] == "search"]


def keys(rows):
    return [(row["path"], tuple(sorted(row["config"].items()))) for row in rows]


def test_the_fastest_of_a_small_space_wins(make, store, few):
    few(12)
    [result] = make().run([PROBLEM]).problems
    fastest = min(Space(PROBLEM, DEVICE).fused, key=lambda c: steady(c, PROBLEM))
    assert result.winner.candidate == fastest
    [row] = store.best()
    assert (row["config"], row["source"], row["band"]) == (kernels.to_dict(fastest.config), "measured", 16)
    assert row["time_us"] == pytest.approx(steady(fastest, PROBLEM))


def test_a_small_space_is_swept_without_a_duplicate(make, store, few):
    """e10: so many points, so many trials, all distinct; a second run adds none."""
    few(12)
    make().run([PROBLEM])
    rows = searched(store)
    fused = [row for row in rows if row["path"] == "fused"]
    assert len(fused) == len(set(keys(fused))) == 12
    assert len(rows) == len(set(keys(rows))) == 12 + 9 + 1, "with every dequant config and the yardstick"
    again = make().run([PROBLEM])
    assert (again.new_trials, again.problems[0].resumed) == (0, True)
    assert len(store.trials()) == len(rows) + sum(row["phase"] != "search" for row in store.trials())


def test_a_resumed_run_finds_what_the_first_found(make, few):
    few(12)
    [first] = make().run([PROBLEM]).problems
    [second] = make().run([PROBLEM]).problems
    assert second.winner.candidate == first.winner.candidate
    assert {path: c.candidate for path, c in second.by_path.items()} == {
        path: c.candidate for path, c in first.by_path.items()
    }
    assert second.winner.outcome.time_us == pytest.approx(first.winner.outcome.time_us)


@pytest.mark.parametrize("sampler", ["sweep", "random", "tpe", "greedy"])
def test_more_trials_go_on_where_the_last_run_stopped(make, store, sampler):
    make(trials=8, sampler=sampler).run([PROBLEM])
    assert len(searched(store)) == 8
    make(trials=20, sampler=sampler).run([PROBLEM])
    rows = searched(store)
    assert len(rows) == len(set(keys(rows))) == 20


def test_changed_choices_on_resume_work(make, store, few, monkeypatch):
    """e10: a field loses choices and gains others between two runs with Optuna."""
    make(trials=10, sampler="tpe").run([PROBLEM])
    everything = list(kernels.configs(PROBLEM, DEVICE))
    default = kernels.default(PROBLEM, DEVICE)
    less = [cfg for cfg in everything if cfg.stages in (3, 4) and cfg.strips != 2] + [default]
    monkeypatch.setattr("cupyq.tuner.space.kernels.configs", lambda problem, device: iter(less))
    make(trials=20, sampler="tpe").run([PROBLEM])
    rows = searched(store)
    assert len(rows) == len(set(keys(rows))) == 20


@pytest.mark.parametrize("trials", [1, 2, 20])
def test_the_default_is_always_evaluated(make, store, trials):
    make(trials=trials).run([PROBLEM])
    default = kernels.to_dict(kernels.default(PROBLEM, DEVICE))
    assert default in [row["config"] for row in searched(store)]
    assert len(searched(store)) == trials


def test_the_yardsticks_are_measured_too(make):
    [result] = make(trials=8).run([PROBLEM]).problems
    assert set(result.by_path) == {"fused", "dequant", "fp16"}
    assert result.speedup_vs_fp16 == pytest.approx(steady(Candidate("fp16"), PROBLEM) / result.winner.outcome.time_us)


def test_the_path_itself_is_a_choice(make, store):
    """Where dequantizing first is faster, that is what the row says."""
    slow_fused = lambda c, p: 900.0 if c.path == "fused" else steady(c, p)  # noqa: E731
    [result] = make(slow_fused, trials=8).run([PROBLEM]).problems
    assert result.winner.candidate.path == "dequant"
    assert [row["path"] for row in store.best()] == ["dequant"]


def test_a_wrong_kernel_never_wins(make, store, few):
    """e1: the fastest writes half its output; the next best is tried, and the row says what was wrong."""
    few(6)
    order = sorted(Space(PROBLEM, DEVICE).fused, key=lambda c: steady(c, PROBLEM))
    [result] = make(wrong=[c.key for c in order[:2]]).run([PROBLEM]).problems
    assert result.winner.candidate == order[2]
    assert [c for c, _ in result.rejected] == order[:2]
    for candidate in order[:2]:
        rows = [row for row in store.trials() if row["config"] == kernels.to_dict(candidate.config)]
        assert [(row["state"], row["verified"]) for row in rows] == [("failed", False)] * 2, "both looks at it"
        assert all("got nan" in row["reason"] for row in rows)
    assert [row["config"] for row in store.best()] == [kernels.to_dict(order[2].config)]


def test_all_wrong_is_said_and_writes_no_best_row(make, store, few):
    few(4)
    space = Space(PROBLEM, DEVICE)
    with pytest.raises(TuningError, match=r"no candidate can be used.*wrong"):
        make(wrong=[c.key for c in (*space.fused, *space.dequant)]).run([PROBLEM])
    assert store.best() == []


@pytest.mark.parametrize("fault", ["raise", "compile", "nan", "inf", "zero"])
def test_a_fault_costs_one_trial(make, store, few, fault):
    """e2, e3, e12: the faulty trial is kept with its reason, the next one is measured, the fastest sound one wins."""
    few(6)
    order = sorted(Space(PROBLEM, DEVICE).fused, key=lambda c: steady(c, PROBLEM))
    assert fault in FAULTS
    [result] = make(faults={order[0].key: fault}).run([PROBLEM]).problems
    assert result.winner.candidate == order[1]
    [row] = [row for row in store.trials() if row["config"] == kernels.to_dict(order[0].config)]
    assert row["state"] == "failed"
    assert row["reason"]


@pytest.mark.parametrize("fault", ["raise", "nan"])
def test_nothing_valid_is_said_and_writes_no_best_row(make, store, few, fault):
    """e3, e12: all fail -> a clear error, no best row, every trial kept."""
    few(3)
    space = Space(PROBLEM, DEVICE)
    every = (*space.fused, *space.dequant, space.fp16)
    with pytest.raises(TuningError, match=r"none of 13 trials gave a time: .*\(13x\)"):
        make(faults={c.key: fault for c in every}).run([PROBLEM])
    assert store.best() == []
    assert len(store.trials(state="failed")) == 13


def test_a_failed_trial_is_never_retried(make, store, few):
    few(6)
    broken = Space(PROBLEM, DEVICE).fused[3]
    make(faults={broken.key: "raise"}, trials=8).run([PROBLEM])
    tuner = make(trials=40)
    tuner.run([PROBLEM])
    assert broken.key not in tuner.objective.measured


def test_one_bad_problem_does_not_end_the_run(make):
    class Half(Exception):
        pass

    def times(candidate, problem):
        if problem.m == 16:
            raise Half("no time for this one")
        return steady(candidate, problem)

    result = make(times, trials=4).run([PROBLEM, PROBLEM.with_m(64)])
    assert [r.winner is None for r in result.problems] == [True, False]
    assert "no time for this one" in result.problems[0].reason


def test_impossible_times_are_refused(make, few):
    """A time above the DRAM peak is a measuring fault, not a winner."""
    few(4)
    order = list(Space(PROBLEM, DEVICE).fused)
    times = lambda c, p: 0.05 if c == order[2] else steady(c, p)  # noqa: E731
    [result] = make(times).run([PROBLEM]).problems
    assert result.winner.candidate != order[2]
    assert result.states["failed"] == 1


def test_a_throttled_gpu_gives_no_sample(make, few):
    few(2)
    tuner = make(throttled=lambda taken: True)
    with pytest.raises(TuningError, match="throttled"):
        tuner.run([PROBLEM])


def test_what_was_throttled_is_tried_again_by_the_next_run(make, store, few):
    """Unlike other failures: it says nothing of the candidate."""
    few(6)
    hot = make(throttled=lambda taken: 10 < taken < 40)
    hot.run([PROBLEM])
    lost = [row for row in searched(store) if row["reason"] and "throttled" in row["reason"]]
    assert len(lost) > 2
    cool = make()
    [result] = cool.run([PROBLEM]).problems
    assert result.new_trials == len(lost)
    assert result.states["failed"] == 0
    fastest = min(Space(PROBLEM, DEVICE).fused, key=lambda c: steady(c, PROBLEM))
    assert result.winner.candidate == fastest
    assert make().run([PROBLEM]).new_trials == 0


def test_ctrl_c_keeps_what_is_done(make, store):
    class Impatient:
        seen = 0

        def begin(self, problems, settings): ...
        def problem(self, problem): ...
        def done(self, result): ...

        def trial(self, problem, candidate, outcome):
            self.seen += 1
            if self.seen == 12:
                raise KeyboardInterrupt

    problems = [PROBLEM, PROBLEM.with_m(64)]
    result = make(trials=8, progress=Impatient()).run(problems)
    assert result.interrupted
    assert [r.problem.m for r in result.problems] == [16]
    assert len(searched(store)) == 12
    assert [study["state"] for study in store.studies()] == ["finished", "interrupted"]
    assert [row["band"] for row in store.best()] == [16]
    finished = make(trials=8).run(problems)
    assert (finished.new_trials, len(store.best())) == (4, 2)


def test_the_budget_of_seconds_ends_the_search_not_the_choice(make, store, monkeypatch):
    class Clock(Silent):
        """A clock that goes on by ten seconds a trial."""

        now = 0.0

        def monotonic(self):
            return self.now

        def trial(self, problem, candidate, outcome):
            self.now += 10

    clock = Clock()
    monkeypatch.setattr("cupyq.tuner.study.time", clock)
    monkeypatch.setattr("cupyq.tuner.one_problem.time", clock)
    problems = [PROBLEM, PROBLEM.with_m(64)]
    result = make(seconds=100, trials=50, progress=clock).run(problems)
    assert [r.new_trials for r in result.problems] == [5, 5], "an equal share each"
    assert [row["band"] for row in store.best()] == [16, 64]
    clock.now = 0.0
    late = make(seconds=5, trials=50, progress=clock).run([PROBLEM.with_m(1), PROBLEM.with_m(2)])
    assert (late.out_of_time, [r.problem.m for r in late.problems]) == (True, [1]), "what is begun is finished"


def test_the_lower_end_of_the_band_is_checked_once(make, store):
    make(trials=4).run([PROBLEM])
    make(trials=6, search=QUICK).run([PROBLEM])
    checks = [row for row in store.trials() if row["phase"] == "check"]
    assert checks
    assert {(row["m"], row["band"]) for row in checks} == {(9, 16)}
    assert len(keys(checks)) == len(set(keys(checks)))


def test_predicted_and_measured_never_share_a_study(make, store):
    make(trials=4).run([PROBLEM])
    predicted = make(trials=4)
    predicted.objective.source = "predicted"
    predicted.run([PROBLEM])
    assert sorted(study["name"] for study in store.studies()) == ["tune, measured", "tune, predicted"]
    assert {row["source"] for row in store.trials()} == {"measured", "predicted"}
    assert [row["source"] for row in store.best()] == ["measured"]


def test_an_older_kernels_trials_may_be_tried_again(make, store, few, monkeypatch):
    """A row of another kernel source is stale: a start for tuning, not a reason to skip the config."""
    few(4)
    make().run([PROBLEM])
    before = len(searched(store))
    monkeypatch.setattr("cupyq.kernels.source_hash", lambda cfg, problem: "another")
    result = make().run([PROBLEM])
    assert result.new_trials == before - 1, "all but plain cuBLAS, whose source is not ours"
