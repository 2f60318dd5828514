"""Writing: what goes in comes out, as numbers, in microseconds and UTC; studies resume."""

import dataclasses
import json
import multiprocessing
import threading
from datetime import datetime, timedelta, timezone

import numpy as np
import pytest
from db_values import A100, H100, HERE, PROBLEM

import cupyq.db
from cupyq.errors import ArgumentError, DatabaseError


@dataclasses.dataclass(frozen=True)
class Config:
    tile: int = 1
    warps: tuple = (2, 4)
    family = "w4a16_mma"


def test_a_trial_comes_back_whole(fresh_db):
    study = fresh_db.start_study("first", H100, PROBLEM)
    trial_id = fresh_db.add_trial(
        device=H100, problem=PROBLEM, source="measured", config=Config(), time_us=12.5, time_low_us=12.25,
        time_high_us=12.75, samples_us=[12.5, 12.25, 12.75], verified=True, error=0.5, quantization_error=0.125,
        study=study, phase="final", cache="cold", launch="graph", registers=128, spill_bytes=0, shared_bytes=4096,
        clock_mhz=1980.0, power_w=650.0, temperature_c=61.0, parts={"dram": 10.0},
        started_at="2026-01-31T13:00:00+01:00", finished_at="2026-01-31T12:00:01Z",
    )  # fmt: skip
    (row,) = fresh_db.trials()
    uid = row.pop("uid")
    assert len(uid) == 32
    assert row == {
        "id": trial_id, "device": "h100-sxm", "compute_capability": "9.0", "op": "w4a16",
        "dtype": "float16", "scale_dtype": "float16", "m": 16,
        "n": 4096, "k": 8192, "group_size": 128, "symmetric": True, "band": 16, "path": "fused",
        "config": {"family": "w4a16_mma", "tile": 1, "warps": [2, 4]}, "state": "complete", "reason": None,
        "source": "measured", "verified": True, "chosen": False, "phase": "final", "time_us": 12.5,
        "time_low_us": 12.25, "time_high_us": 12.75, "error": 0.5, "quantization_error": 0.125,
        "samples": [12.5, 12.25, 12.75], "cache": "cold", "launch": "graph", "source_hash": "w4a16-1-v1",
        "nvrtc_version": "13.0", "driver_version": "13.0", "cupy_version": "14.0", "cupyq_version": "0.1.0",
        "registers": 128, "spill_bytes": 0, "shared_bytes": 4096, "clock_mhz": 1980.0, "power_w": 650.0,
        "temperature_c": 61.0, "parts": {"dram": 10.0}, "study": "first", "origin": None,
        "started_at": "2026-01-31T12:00:00.000+00:00", "finished_at": "2026-01-31T12:00:01.000+00:00",
    }  # fmt: skip


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.int32, np.uint64, int])
def test_numpy_scalars_land_as_numbers(fresh_db, add, kind):
    add(kind(8), error=kind(2), registers=kind(64), config={"tile": kind(1)}, samples_us=np.array([8, 9], kind))
    (row,) = fresh_db._db.query(
        "SELECT time_us, typeof(time_us) AS t, error, typeof(error) AS e, registers, typeof(registers) AS r, config, "
        "samples FROM trial"
    )
    samples, config = json.loads(row.pop("samples")), json.loads(row.pop("config"))
    assert (samples, config) == ([8, 9], {"tile": 1})
    assert row == {"time_us": 8.0, "t": "real", "error": 2.0, "e": "real", "registers": 64, "r": "integer"}


def test_numpy_integers_in_a_problem_are_the_same_problem(fresh_db):
    numpy_problem = {f.name: getattr(PROBLEM, f.name) for f in dataclasses.fields(PROBLEM)} | {"m": np.int64(16)}
    assert fresh_db.problem_id(numpy_problem) == fresh_db.problem_id(PROBLEM)


@pytest.mark.parametrize("time_us", [float("nan"), float("inf"), -float("inf"), 0.0, -1.0, np.float32("nan"), None])
def test_a_time_that_is_none_fails_the_trial_and_is_null(fresh_db, add, time_us):
    add(time_us, chosen=True)
    (row,) = fresh_db.trials()
    assert (row["state"], row["time_us"], row["chosen"], fresh_db.best()) == ("failed", None, False, [])
    assert row["reason"] == f"the time is {time_us}, not a positive finite number of microseconds"


def test_the_file_itself_refuses_an_infinite_time(fresh_db, add):
    add()
    for value in ("9e999", "'fast'", "-1", "x'00000000'"):
        with pytest.raises(DatabaseError, match="CHECK"), fresh_db.writing() as db:
            db.execute(f"UPDATE trial SET time_us = {value}")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("source", "guessed"), ("path", "cublas"), ("state", "done"), ("phase", "late"), ("cache", "hot"),
        ("launch", "stream"), ("config", 7), ("registers", 1.5), ("error", "small"),
        ("started_at", datetime(2026, 1, 1)), ("finished_at", "yesterday"),
    ],
)  # fmt: skip
def test_a_field_of_another_kind_is_refused_by_name_and_nothing_is_written(fresh_db, add, field, value):
    with pytest.raises(ArgumentError, match=f"{field} is"):
        add(**{field: value})
    assert fresh_db.trials() == []


def test_times_are_written_in_utc(fresh_db, add):
    add(finished_at=datetime(2026, 7, 1, 2, 0, tzinfo=timezone(timedelta(hours=2))))
    assert fresh_db.trials()[0]["finished_at"] == "2026-07-01T00:00:00.000+00:00"


def test_a_trial_is_written_as_running_and_then_replaced(fresh_db):
    trial = cupyq.db.Trial(device=H100, problem=PROBLEM, source="measured", config={"tile": 1})
    trial_id = fresh_db.start_trial(trial)
    assert [(row["state"], row["time_us"]) for row in fresh_db.trials()] == [("running", None)]
    started = fresh_db.trials()[0]["started_at"]
    fresh_db.finish_trial(trial_id, dataclasses.replace(trial, time_us=9.0, verified=True))
    (row,) = fresh_db.trials()
    assert (row["id"], row["state"], row["time_us"], row["started_at"]) == (trial_id, "complete", 9.0, started)


def test_resuming_a_study_fails_what_was_running_and_lists_what_was_tried(fresh_db, add):
    study = fresh_db.start_study("s", H100, PROBLEM, settings={"seed": 3})
    add(7.0, tile=1, study=study)
    add(None, tile=2, study=study, state="pruned", reason="spills", verified=False)
    fresh_db.start_trial(
        cupyq.db.Trial(device=H100, problem=PROBLEM, source="measured", config={"tile": 3}, study=study)
    )
    assert fresh_db.start_study("s", H100, PROBLEM) == study
    tried = [(t["config"], t["state"], t["reason"], t["time_us"]) for t in fresh_db.configs_tried(study)]
    assert tried == [
        ({"tile": 1}, "complete", None, 7.0),
        ({"tile": 2}, "pruned", "spills", None),
        ({"tile": 3}, "failed", "the tuner was stopped while this trial ran", None),
    ]


def test_a_study_of_another_problem_or_device_is_another_study(fresh_db):
    ids = {
        fresh_db.start_study("s", H100, PROBLEM),
        fresh_db.start_study("s", A100, PROBLEM),
        fresh_db.start_study("s", H100, PROBLEM.with_m(32)),
        fresh_db.start_study("s", H100, PROBLEM, weights="layer.0"),
        fresh_db.start_study("s", H100, PROBLEM, resume=False),
    }
    assert len(ids) == 5


def test_a_finished_study(fresh_db):
    study = fresh_db.start_study("s", H100, PROBLEM, settings={"seed": np.int64(3)})
    fresh_db.finish_study(study, "interrupted", "Ctrl-C")
    (row,) = fresh_db.studies()
    assert (row["state"], row["reason"], row["settings"]) == ("interrupted", "Ctrl-C", {"seed": 3})
    assert row["finished_at"] >= row["started_at"]
    with pytest.raises(ArgumentError, match="study is 99"):
        fresh_db.finish_study(99)


def test_a_read_only_store_refuses_to_write(fresh_db, add):
    add()
    with cupyq.db.open(fresh_db.path, readonly=True, environment=HERE) as reader:
        with pytest.raises(DatabaseError, match="read-only"):
            reader.add_trial(device=H100, problem=PROBLEM, source="measured", time_us=1.0)
        assert reader.best() == fresh_db.best() != []


def test_a_failed_write_leaves_nothing_behind(fresh_db, add):
    with pytest.raises(DatabaseError, match="FOREIGN KEY"):
        add(study=12345)
    with fresh_db.reading() as db:
        assert [db.table(name).count for name in ("trial", "device", "problem")] == [0, 0, 0]
    add()
    assert len(fresh_db.trials()) == 1


def test_threads_share_a_store(fresh_db, add):
    threads = [threading.Thread(target=lambda i=i: [add(i + 1.0, tile=i) for _ in range(20)]) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fresh_db.trials()) == 160


def _add_in_child(store, add, queue):
    inherited = store._db
    add(3.0)
    queue.put(store._db is inherited)


def test_a_forked_process_opens_the_file_anew(fresh_db, add):
    add(4.0)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_add_in_child, args=(fresh_db, add, queue))
    child.start()
    assert queue.get(timeout=60) is False
    child.join()
    assert sorted(row["time_us"] for row in fresh_db.trials()) == [3.0, 4.0]
