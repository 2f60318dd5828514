"""What the dispatcher asks: exact rows, near rows, the paths side by side."""

import dataclasses

import pytest
from db_values import A100, H100, PROBLEM

from cupyq import devices
from cupyq.errors import ArgumentError

LIVE_H100 = dataclasses.replace(
    H100, live=True, ordinal=0, memory_bytes=85_029_158_912, dram_gbps=3352.32, title="NVIDIA H100 80GB HBM3"
)


def test_the_exact_row(fresh_db, add):
    add(10.0, tile=7, time_low_us=9.0, time_high_us=11.0, error=0.25)
    uid = fresh_db.trials()[0]["uid"]
    found = fresh_db.lookup(H100, PROBLEM.with_m(9))
    assert dataclasses.asdict(found) == {
        "path": "fused", "config": {"tile": 7}, "source": "measured", "stale_because": "", "distance": 0.0,
        "time_us": 10.0, "time_low_us": 9.0, "time_high_us": 11.0, "error": 0.25, "op": "w4a16", "dtype": "float16",
        "scale_dtype": "float16", "m": 16, "n": 4096, "k": 8192, "group_size": 128, "symmetric": True, "band": 16,
        "device": "h100-sxm", "uid": uid, "preset": False,
    }  # fmt: skip
    assert not found.stale


@pytest.mark.parametrize(
    "change",
    [
        {"op": "w8a8-int8"}, {"n": 4104}, {"k": 8208}, {"group_size": 64}, {"symmetric": False}, {"dtype": "bfloat16"},
        {"scale_dtype": "bfloat16"}, {"m": 17}, {"m": 8},
    ],
    ids=str,
)  # fmt: skip
def test_a_row_of_another_problem_is_never_exact(fresh_db, add, change):
    add()
    assert fresh_db.lookup(H100, dataclasses.replace(PROBLEM, **change)) is None


def test_a_row_of_another_device_is_never_exact(fresh_db, add):
    add()
    assert fresh_db.lookup(A100, PROBLEM) is None
    assert fresh_db.lookup(dataclasses.replace(H100, sms=16), PROBLEM) is None
    assert fresh_db.nearest(A100, PROBLEM.with_m(32)) == []


def test_an_old_row_answers_but_says_that_it_is_stale(fresh_db, add):
    add(1.0, tile=1, source_hash="old", driver_version="12.4")
    found = fresh_db.lookup(H100, PROBLEM)
    assert (found.stale, found.stale_because) == (True, "kernel source, driver")
    add(9.0, tile=2)
    assert fresh_db.lookup(H100, PROBLEM).config == {"tile": 2}


def test_fp16_answers_only_when_asked_for(fresh_db, add):
    add(1.0, path="fp16", config=None)
    assert fresh_db.lookup(H100, PROBLEM) is None
    assert fresh_db.lookup(H100, PROBLEM, paths=["fp16"]).time_us == 1.0
    add(5.0)
    add(4.0, path="dequant")
    assert {path: found.time_us for path, found in fresh_db.paths(H100, PROBLEM).items()} == {
        "fused": 5.0, "dequant": 4.0, "fp16": 1.0,
    }  # fmt: skip


def test_a_card_uses_predictions_for_its_catalogue_entry_but_no_measurements(fresh_db, add):
    assert LIVE_H100.identity != H100.identity
    assert devices.match(LIVE_H100) == H100
    add(5.0, tile=1, source="predicted")
    add(4.0, tile=2, source="measured")
    found = fresh_db.lookup(LIVE_H100, PROBLEM)
    assert (found.source, found.config) == ("predicted", {"tile": 1})
    add(9.0, tile=3, device=LIVE_H100)
    assert fresh_db.lookup(LIVE_H100, PROBLEM).config == {"tile": 3}


def test_near_rows_come_with_their_distance_in_octaves(fresh_db, add):
    add(1.0, tile=1, problem=dataclasses.replace(PROBLEM, n=8192))
    add(2.0, tile=2, problem=dataclasses.replace(PROBLEM, n=8192, k=4096))
    add(3.0, tile=3, problem=PROBLEM.with_m(128))
    add(4.0, tile=4, problem=PROBLEM.with_m(128))
    found = fresh_db.nearest(H100, PROBLEM)
    assert [(row.config["tile"], row.distance) for row in found] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert [row.config["tile"] for row in fresh_db.nearest(H100, PROBLEM, limit=1)] == [1]


def test_near_rows_are_measured_and_current(fresh_db, add):
    other = PROBLEM.with_m(32)
    add(source="predicted", problem=other)
    add(source_hash="old", problem=other)
    add(problem=PROBLEM)
    assert fresh_db.nearest(H100, PROBLEM) == []


@pytest.mark.parametrize(
    "change", [{"group_size": 64}, {"symmetric": False}, {"dtype": "bfloat16"}, {"op": "w8a8-fp8"}], ids=str
)
def test_near_means_the_same_types_and_groups(fresh_db, add, change):
    add(problem=dataclasses.replace(PROBLEM, n=8192, **change))
    assert fresh_db.nearest(H100, PROBLEM) == []


def test_what_is_no_device_or_problem_is_refused_by_name(fresh_db):
    with pytest.raises(ArgumentError, match="device is 'h100'"):
        fresh_db.lookup("h100", PROBLEM)
    with pytest.raises(ArgumentError, match="problem is 5"):
        fresh_db.lookup(H100, 5)
