"""The view `best`: its columns, who ranks first, what is stale, and that any SQLite tool sees the same."""

import dataclasses
import sqlite3

import pytest
from db_values import A100, H100, HERE, PROBLEM, generated

import cupyq.db
from cupyq.errors import DatabaseError

COLUMNS = [
    "device", "compute_capability", "op", "dtype", "n", "k", "group_size", "symmetric", "band", "path", "config",
    "time_us", "time_low_us", "time_high_us", "speedup_vs_fp16", "error", "source", "stale", "trials",
]  # fmt: skip


def plain_sqlite(store, sql="SELECT * FROM best"):
    """Read with Python's sqlite3 alone, as any other tool would."""
    connection = sqlite3.connect(store.path)
    connection.row_factory = sqlite3.Row
    rows = [dict(row) for row in connection.execute(sql)]
    connection.close()
    return rows


def test_one_whole_row(fresh_db, add):
    add(10.0, tile=1, time_low_us=9.5, time_high_us=10.5, error=0.01)
    add(12.0, tile=2)
    add(None, tile=3, state="failed", verified=False)
    add(40.0, path="fp16", config=None)
    add(None, tile=4, state="running", verified=False)
    assert plain_sqlite(fresh_db) == [
        {
            "device": "h100-sxm", "compute_capability": "9.0", "op": "w4a16", "dtype": "float16", "n": 4096, "k": 8192,
            "group_size": 128, "symmetric": 1, "band": 16, "path": "fused", "config": '{"tile":1}', "time_us": 10.0,
            "time_low_us": 9.5, "time_high_us": 10.5, "speedup_vs_fp16": 4.0, "error": 0.01, "source": "measured",
            "stale": 0, "trials": 4,
        }
    ]  # fmt: skip
    assert list(plain_sqlite(fresh_db)[0]) == COLUMNS


def test_the_store_returns_what_the_view_holds(fresh_db, add):
    add(10.0)
    add(8.0, problem=PROBLEM.with_m(64))
    add(9.0, source_hash="old", problem=PROBLEM.with_m(128))
    loose = [{**row, "config": None} for row in fresh_db.best()]
    assert loose == [{**row, "config": None} for row in plain_sqlite(fresh_db)]
    assert [list(row) for row in loose] == [COLUMNS] * 3


@pytest.mark.parametrize(
    "unusable",
    [
        {"verified": False}, {"state": "pruned"}, {"state": "failed"}, {"state": "running"}, {"cache": "warm"},
        {"time_us": float("nan")}, {"time_us": float("inf")}, {"path": "fp16"},
    ],
)  # fmt: skip
def test_only_usable_rows_rank(fresh_db, add, unusable):
    add(**{"time_us": 1.0, "tile": 1, **unusable})
    assert fresh_db.best() == plain_sqlite(fresh_db) == []
    add(10.0, tile=2)
    assert [row["config"] for row in fresh_db.best()] == [{"tile": 2}]


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({"time_us": 5.0}, {"time_us": 6.0}),
        ({"source": "measured", "time_us": 9.0}, {"source": "predicted", "time_us": 1.0}),
        ({"source": "measured", "source_hash": "old", "time_us": 9.0}, {"source": "predicted", "time_us": 1.0}),
        ({"time_us": 9.0}, {"source_hash": "old", "time_us": 1.0}),
        ({"time_us": 9.0}, {"driver_version": "12.8", "time_us": 1.0}),
        ({"time_us": 9.0}, {"nvrtc_version": "12.8", "time_us": 1.0}),
        ({"time_us": 9.0}, {"problem": PROBLEM.with_m(9), "time_us": 1.0}),
        ({"time_us": 9.0, "chosen": True}, {"time_us": 8.9}),
        ({"time_us": 5.0, "path": "dequant"}, {"time_us": 6.0, "path": "fused"}),
    ],
)
@pytest.mark.parametrize("better_first", [True, False])
def test_who_ranks_first(fresh_db, add, better, worse, better_first):
    for fields in (better, worse) if better_first else (worse, better):
        add(**{"tile": 1 if fields is better else 2, **fields})
    for rows in (fresh_db.best(), plain_sqlite(fresh_db)):
        assert [(row["time_us"], row["trials"]) for row in rows] == [(better["time_us"], 2)]


KEY_CHANGES = [
    {"op": "w8a8-int8"}, {"n": 4104}, {"k": 8208}, {"group_size": 64}, {"symmetric": False}, {"dtype": "bfloat16"},
    {"m": 17},
]  # fmt: skip


@pytest.mark.parametrize("change", [*KEY_CHANGES, {"m": 15}, {"scale_dtype": "bfloat16"}], ids=str)
def test_every_field_of_a_problem_is_part_of_its_key(fresh_db, change):
    assert fresh_db.problem_id(PROBLEM) != fresh_db.problem_id(dataclasses.replace(PROBLEM, **change))


@pytest.mark.parametrize("change", KEY_CHANGES, ids=str)
def test_another_problem_has_a_row_of_its_own(fresh_db, add, change):
    add(10.0)
    add(5.0, problem=dataclasses.replace(PROBLEM, **change))
    assert sorted(row["time_us"] for row in fresh_db.best()) == [5.0, 10.0]


DEVICE_CHANGES = [
    {"cc": (9, 1)}, {"sms": 66}, {"l2_bytes": 25 << 20}, {"shared_per_sm": 100 << 10}, {"memory_bytes": 40 << 30},
    {"dram_gbps": 2000.0},
]  # fmt: skip


@pytest.mark.parametrize("change", DEVICE_CHANGES, ids=str)
def test_another_device_of_the_same_name_has_rows_of_its_own(fresh_db, add, change):
    add(10.0)
    add(5.0, device=dataclasses.replace(H100, **change))
    assert sorted(row["time_us"] for row in fresh_db.best()) == [5.0, 10.0]
    assert len({row["device"] for row in fresh_db.best()}) == 2
    assert len(fresh_db.best(device="h100-sxm")) == 2


def test_the_key_of_a_device_is_its_identity():
    row = cupyq.db.identity.device_row(H100)
    assert tuple(row[name] for name in cupyq.db.identity.DEVICE_KEY) == H100.identity


@pytest.mark.parametrize(
    "change",
    [{"name": "h100"}, {"title": "H100"}, {"live": True, "ordinal": 3}, {"memory_bytes": H100.memory_bytes - 10**6}],
    ids=str,
)
def test_what_does_not_make_another_device(fresh_db, change):
    assert fresh_db.device_id(H100) == fresh_db.device_id(dataclasses.replace(H100, **change))


def test_the_label_tells_a_slice_from_its_card(fresh_db):
    for spec in (H100, dataclasses.replace(H100, sms=16, memory_bytes=10 << 30), A100):
        fresh_db.device_id(spec)
    assert [row["device"] for row in fresh_db.devices()] == ["a100-sxm", "h100-sxm", "h100-sxm (16 SMs, 10 GiB)"]


@pytest.mark.parametrize(
    ("yardstick", "speedup"),
    [
        ({}, 4.0),
        ({"problem": dataclasses.replace(PROBLEM, group_size=32, symmetric=False)}, 4.0),
        ({"problem": dataclasses.replace(PROBLEM, op="w8a8-int8")}, 4.0),
        ({"source": "predicted"}, None),
        ({"device": A100}, None),
        ({"problem": PROBLEM.with_m(15)}, None),
        ({"problem": dataclasses.replace(PROBLEM, dtype="bfloat16")}, None),
        ({"problem": dataclasses.replace(PROBLEM, n=8192)}, None),
        ({"verified": False}, None),
    ],
)
def test_speedup_is_against_a_fp16_time_of_the_same_kind(fresh_db, add, yardstick, speedup):
    add(10.0)
    add(**{"time_us": 40.0, "path": "fp16", "config": None, **yardstick})
    (row,) = [row for row in fresh_db.best() if row["op"] == "w4a16" and row["path"] == "fused"]
    assert row["speedup_vs_fp16"] == speedup


@pytest.mark.parametrize(
    ("reader", "why"),
    [
        ({}, ""),
        ({"driver_version": "13.2"}, ""),
        ({"driver_version": "14.0"}, "driver"),
        ({"nvrtc_version": "13.1"}, "NVRTC"),
        ({"library": "library-2", "source_hash": lambda config, problem: "v2"}, "kernel source"),
        ({"library": "library-2", "source_hash": lambda config, problem: None}, "kernel source"),
        ({"library": "library-2"}, ""),
        ({"driver_version": None, "nvrtc_version": None, "library": None, "source_hash": None}, ""),
        ({"driver_version": "14.0", "nvrtc_version": "12.0"}, "driver, NVRTC"),
    ],
)
def test_the_reader_decides_what_is_stale(fresh_db, add, reader, why):
    add()
    environment = dataclasses.replace(HERE, **reader)
    with cupyq.db.open(fresh_db.path, readonly=True, environment=environment) as store:
        assert [row["stale"] for row in store.best()] == [bool(why)]
        assert store.lookup(H100, PROBLEM).stale_because == why
        assert len(store.best(stale=bool(why))) == 1
    assert plain_sqlite(fresh_db)[0]["stale"] == 0, "a reader must not change what the file says"


def test_a_writer_with_other_kernels_makes_the_view_say_stale(fresh_db, add):
    add(5.0, tile=1)
    newer = dataclasses.replace(
        HERE, library="library-2", source_hash=lambda c, p: "v2" if c["tile"] == 1 else generated(c, p)
    )
    add(6.0, tile=2, problem=PROBLEM.with_m(1))
    with cupyq.db.open(fresh_db.path, environment=newer) as store:
        store.declare()
    stale = {row["config"]: row["stale"] for row in plain_sqlite(fresh_db)}
    assert stale == {'{"tile":1}': 1, '{"tile":2}': 0}
    with cupyq.db.open(fresh_db.path, environment=newer) as store:
        store.add_trial(device=H100, problem=PROBLEM, source="measured", verified=True, config={"tile": 1}, time_us=7.0)
    assert [(row["time_us"], row["stale"]) for row in plain_sqlite(fresh_db)] == [(6.0, 0), (7.0, 0)]


def test_a_row_without_a_kernel_has_no_kernel_source_that_could_change(fresh_db, add):
    add(path="dequant", config=None)
    assert (fresh_db.trials()[0]["source_hash"], fresh_db.best()[0]["stale"]) == (None, False)
    assert plain_sqlite(fresh_db)[0]["stale"] == 0


def test_what_is_current_is_stated_again_after_a_transaction_was_undone(fresh_db, add):
    with pytest.raises(DatabaseError, match="FOREIGN KEY"), fresh_db.writing():
        _ = add(), add(study=12345)
    assert plain_sqlite(fresh_db, "SELECT * FROM current") == []
    add()
    assert {row["kind"] for row in plain_sqlite(fresh_db, "SELECT * FROM current")} == {
        "driver_version", "nvrtc_version", "library", "source_hash",
    }  # fmt: skip


def test_a_prediction_depends_on_no_driver(fresh_db, add):
    add(source="predicted")
    assert fresh_db.trials()[0]["driver_version"] is None
    with cupyq.db.open(fresh_db.path, environment=dataclasses.replace(HERE, driver_version="99.0")) as store:
        assert [row["stale"] for row in store.best()] == [False]


def test_choosing_moves_the_choice(fresh_db, add):
    first, second = add(10.0, tile=1), add(9.9, tile=2)
    fresh_db.choose(first)
    assert fresh_db.best()[0]["config"] == {"tile": 1}
    fresh_db.choose(second)
    assert [row["id"] for row in fresh_db.trials() if row["chosen"]] == [second]
    assert fresh_db.best()[0]["config"] == {"tile": 2}


def test_a_trial_that_fails_its_check_is_used_no_more(fresh_db, add):
    trial_id = add(1.0, tile=1, chosen=True)
    add(5.0, tile=2)
    fresh_db.set_verified(trial_id, False, reason="half of y was not written")
    assert [row["config"] for row in fresh_db.best()] == [{"tile": 2}]
    assert fresh_db.trials()[1]["reason"] == "half of y was not written"
