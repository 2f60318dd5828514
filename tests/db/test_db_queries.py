"""Filters, crossover, Pareto fronts, pruning."""

import dataclasses

import pytest
from db_values import A100, H100, PROBLEM

import cupyq.db
from cupyq.db import Filters, Prune
from cupyq.errors import ArgumentError


@pytest.fixture
def mixed(add):
    add(1.0)
    add(2.0, device=A100)
    add(3.0, problem=dataclasses.replace(PROBLEM, op="w8a8-int8"))
    add(4.0, problem=dataclasses.replace(PROBLEM, n=8192, k=4096))
    add(5.0, problem=dataclasses.replace(PROBLEM, group_size=-1, symmetric=False))
    add(6.0, problem=PROBLEM.with_m(100), source="predicted")
    add(7.0, problem=dataclasses.replace(PROBLEM, dtype="bfloat16"), path="dequant")


@pytest.mark.parametrize(
    ("filters", "times"),
    [
        ({}, {1, 2, 3, 4, 5, 6, 7}), ({"device": "a100-sxm"}, {2}), ({"device": "none"}, set()),
        ({"op": "w8a8-int8"}, {3}), ({"n": 8192}, {4}), ({"k": 4096, "n": 8192}, {4}), ({"group_size": -1}, {3, 5}),
        ({"symmetric": False}, {5}), ({"band": 128}, {6}), ({"band": 65}, {6}), ({"band": 64}, set()),
        ({"source": "predicted"}, {6}), ({"path": "dequant"}, {7}), ({"dtype": "bfloat16"}, {7}),
        ({"op": "w4a16", "device": "h100-sxm", "band": 16, "path": "fused", "dtype": "float16"}, {1, 4, 5}),
    ],
    ids=str,
)  # fmt: skip
def test_filters(fresh_db, mixed, filters, times):
    assert {row["time_us"] for row in fresh_db.best(**filters)} == times
    assert {row["time_us"] for row in fresh_db.trials(Filters(**filters))} == times
    assert {line["trial"]["time_us"] for line in fresh_db.export(**filters)} == times


def test_filters_come_in_one_way(fresh_db):
    with pytest.raises(ArgumentError, match="one of them"):
        fresh_db.best(Filters(op="w4a16"), n=1)


def test_trials_are_newest_first_and_limited(fresh_db, mixed):
    assert [row["time_us"] for row in fresh_db.trials(limit=3)] == [7.0, 6.0, 5.0]


def test_a_filter_is_a_value_and_no_sql(fresh_db, mixed):
    assert fresh_db.best(device="' OR 1=1 --") == []


CROSSING = {"fused": (10, 20, 40, 160), "dequant": (50, 50, 60, 100), "fp16": (40, 41, 42, 90)}


def test_crossover_is_the_first_band_where_another_path_is_faster(fresh_db, add):
    for path, times in CROSSING.items():
        for m, time_us in zip((1, 16, 64, 256), times, strict=True):
            add(time_us, path=path, problem=PROBLEM.with_m(m))
    assert fresh_db.crossover() == [
        {
            "device": "h100-sxm", "op": "w4a16", "dtype": "float16", "n": 4096, "k": 8192, "group_size": 128,
            "symmetric": True, "source": "measured", "crossover": 256, "winner": "fp16", "fused_us": 160.0,
            "other_us": 90.0, "against": {"dequant": 256, "fp16": 256}, "ideal": {"dequant": None, "fp16": 295.4},
            "first_band": 1, "last_band": 256, "bands": 4, "stale": False,
        }
    ]  # fmt: skip


def test_w8a8_is_a_rival_that_does_not_decide_the_crossover(fresh_db, add):
    eight = dataclasses.replace(PROBLEM, op="w8a8-int8", group_size=-1)
    for m, four, other, fp16 in ((1, 10, 20, 40), (64, 30, 20, 41), (256, 90, 40, 80)):
        add(four, problem=PROBLEM.with_m(m))
        add(other, problem=eight.with_m(m))
        add(fp16, path="fp16", problem=PROBLEM.with_m(m))
    first, second = fresh_db.crossover()
    assert (first["op"], first["crossover"], first["winner"]) == ("w4a16", 256, "fp16")
    assert first["against"] == {"fp16": 256, "w8a8-int8": 64}
    assert first["ideal"] == {"fp16": 295.4, "w8a8-int8": 147.7}
    assert (second["op"], second["crossover"], second["against"]) == ("w8a8-int8", None, {"fp16": None})
    assert second["ideal"] == {"fp16": None}


def test_a_device_of_another_age_has_no_ideal(fresh_db, add):
    add(10.0)
    add(5.0, path="fp16")
    with fresh_db.writing() as db:
        db.execute("UPDATE device SET spec = '{}'")
    assert [(row["crossover"], row["ideal"]) for row in fresh_db.crossover()] == [(16, {"fp16": None})]


def test_no_crossover_among_the_bands_compared(fresh_db, add):
    add(10.0)
    add(20.0, path="dequant")
    (row,) = fresh_db.crossover()
    assert (row["crossover"], row["winner"], row["bands"]) == (None, "fused", 1)


def test_crossover_never_compares_a_prediction_with_a_measurement(fresh_db, add):
    add(10.0)
    add(1.0, path="fp16", source="predicted")
    assert fresh_db.crossover() == []
    add(2.0, source="predicted")
    (row,) = fresh_db.crossover()
    assert (row["source"], row["crossover"], row["other_us"]) == ("predicted", 16, 1.0)


def test_crossover_compares_equal_batches_only(fresh_db, add):
    add(10.0, problem=PROBLEM.with_m(16))
    add(1.0, path="fp16", problem=PROBLEM.with_m(9))
    assert fresh_db.crossover() == []


def test_one_fp16_row_serves_every_group_size_but_a_dequant_row_does_not(fresh_db, add):
    for group_size in (32, 128):
        add(10.0, problem=dataclasses.replace(PROBLEM, group_size=group_size))
    add(5.0, path="fp16")
    add(4.0, path="dequant")
    rows = fresh_db.crossover()
    assert [(row["group_size"], row["winner"]) for row in rows] == [(32, "fp16"), (128, "dequant")]


def test_pareto_keeps_what_nothing_beats_in_both(fresh_db, add):
    study = fresh_db.start_study("groups", H100, weights="layer.0")
    for group_size, time_us, error in ((32, 12.0, 0.01), (64, 11.0, 0.02), (128, 10.0, 0.03), (256, 10.5, 0.04)):
        problem = dataclasses.replace(PROBLEM, group_size=group_size)
        add(time_us, problem=problem, quantization_error=error, study=study)
    rows = fresh_db.pareto()
    assert [(row["group_size"], row["time_us"]) for row in rows] == [(128, 10.0), (64, 11.0), (32, 12.0)]
    assert list(rows[0]) == [
        "device", "op", "dtype", "n", "k", "group_size", "symmetric", "band", "path", "config", "time_us",
        "quantization_error", "weights", "source", "stale",
    ]  # fmt: skip


def test_pareto_fronts_of_different_weights_stay_apart(fresh_db, add):
    for weights, time_us, error in (("layer.0", 10.0, 0.1), ("layer.1", 9.0, 0.01)):
        add(time_us, quantization_error=error, study=fresh_db.start_study("s", weights=weights))
    assert [row["weights"] for row in fresh_db.pareto()] == ["layer.0", "layer.1"]


def _tiles(store):
    return sorted(row["config"]["tile"] for row in store.trials())


@pytest.mark.parametrize(
    ("what", "left"),
    [
        ({"failed": True}, [1, 2, 3]), ({"stale": True}, [1, 2, 4]), ({"keep": 1}, [1, 4]), ({"keep": 2}, [1, 2, 4]),
        ({"older_than": 0}, [1]), ({"older_than": 1}, [1, 2, 3, 4]), ({"failed": True, "keep": 1}, [1]),
        ({"keep": 1, "filters": Filters(op="w8a8-int8")}, [1, 2, 3, 4]),
    ],
    ids=str,
)  # fmt: skip
def test_prune(fresh_db, add, what, left):
    add(1.0, tile=1)
    add(2.0, tile=2)
    add(0.5, tile=3, source_hash="old")
    add(None, tile=4, state="failed", reason="hang")
    before = fresh_db.best()
    gone = 4 - len(left)
    assert (fresh_db.prune(Prune(**what, dry_run=True)), _tiles(fresh_db)) == (gone, [1, 2, 3, 4])
    assert (fresh_db.prune(Prune(**what)), _tiles(fresh_db)) == (gone, left)
    assert [row["config"] for row in fresh_db.best()] == [row["config"] for row in before]


def test_prune_leaves_a_running_trial(fresh_db, add):
    add(None, state="running", verified=False, samples_us=[1.0], finished_at="2020-01-01T00:00:00Z")
    assert fresh_db.prune(Prune(older_than=1, failed=True)) == fresh_db.prune(Prune(samples=True)) == 0


def test_prune_takes_along_what_nothing_refers_to(fresh_db, add):
    study = fresh_db.start_study("s", A100, PROBLEM)
    add(None, device=A100, state="failed", reason="hang", study=study)
    fresh_db.finish_study(study)
    fresh_db.prune(Prune(failed=True))
    assert (fresh_db.trials(), fresh_db.devices(), fresh_db.studies()) == ([], [], [])


def test_prune_samples_keeps_the_trials(fresh_db, add):
    add(samples_us=[1.0, 2.0])
    assert fresh_db.prune(Prune(samples=True)) == 1
    assert [(row["samples"], row["time_us"]) for row in fresh_db.trials()] == [(None, 10.0)]


def test_prune_wants_to_know_what(fresh_db):
    with pytest.raises(ArgumentError, match="nothing to prune"):
        fresh_db.prune(Prune())
    with pytest.raises(ArgumentError, match="keep is 0"):
        fresh_db.prune(Prune(keep=0))


def test_vacuum_gives_space_back(tmp_path, fresh_db, add):
    for _ in range(50):
        add(samples_us=[0.5] * 5000)
    fresh_db.vacuum()
    before = (tmp_path / "fresh.db").stat().st_size
    fresh_db.prune(Prune(samples=True))
    fresh_db.vacuum()
    assert (tmp_path / "fresh.db").stat().st_size < before / 5


def test_an_environment_of_this_machine_can_be_made():
    here = cupyq.db.Environment.here()
    assert here.cupyq_version is not None
    assert here.library is not None
    assert here is cupyq.db.Environment.here()
