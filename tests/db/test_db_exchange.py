"""Export, import, merge: the same trials in another file, once, whoever sends them and however often."""

import dataclasses
import json

import pytest
from db_values import A100, H100, HERE, PROBLEM, adder

import cupyq.db
from cupyq.db import Report
from cupyq.errors import DatabaseError, SchemaTooNew


@pytest.fixture
def other(tmp_path):
    with cupyq.db.open(tmp_path / "other.db", environment=HERE) as store:
        yield store


def _told(store):
    """Return every trial without what is local to a file."""
    rows = [{**row, "id": None, "origin": None} for row in store.trials()]
    return sorted(rows, key=lambda row: row["uid"])


@pytest.fixture
def full(fresh_db, add):
    study = fresh_db.start_study("s", H100, PROBLEM, weights="layer.0", settings={"seed": 1})
    add(1.0, study=study, samples_us=[1.0, 1.5], parts={"dram": 0.5}, quantization_error=0.1)
    add(None, tile=2, study=study, state="failed", reason="hang", verified=False)
    add(2.0, device=A100, source="predicted", source_hash="old")
    add(3.0, device=dataclasses.replace(H100, sms=16), problem=PROBLEM.with_m(64))


def test_export_and_import_bring_everything_over(fresh_db, full, other):
    lines = [json.dumps(line) for line in fresh_db.export()]
    assert other.load(lines, origin="elsewhere") == Report(added=4)
    assert _told(other) == _told(fresh_db)
    assert other.best() == fresh_db.best()
    assert [row["origin"] for row in other.trials()] == ["elsewhere"] * 4
    (study,) = other.studies()
    assert (study["name"], study["state"], study["weights"], study["settings"], study["origin"]) == (
        "s", "interrupted", "layer.0", {"seed": 1}, "elsewhere",
    )  # fmt: skip


def test_one_line_whole(fresh_db, add):
    add(1.5, error=0.25)
    (line,) = fresh_db.export()
    assert line.keys() == {"schema", "device", "problem", "study", "trial"}
    assert (line["schema"], line["study"]) == (cupyq.db.migrations.SCHEMA_VERSION, None)
    assert line["problem"] == dataclasses.asdict(PROBLEM)
    assert [line["device"][name] for name in cupyq.db.identity.DEVICE_KEY] == list(H100.identity)
    assert (line["trial"]["config"], line["trial"]["time_us"], line["trial"]["error"]) == ({"tile": 1}, 1.5, 0.25)


def test_a_compact_line_says_the_same_in_less(fresh_db, full, other):
    lines = [cupyq.db.exchange.compact(line) for line in fresh_db.export()]
    assert len(json.dumps(lines)) < 0.6 * len(json.dumps(list(fresh_db.export())))
    assert other.load(lines) == Report(added=4)
    without = {"study": None, "samples": None, "parts": None}
    assert [{**row, **without} for row in _told(other)] == [{**row, **without} for row in _told(fresh_db)]
    assert other.best() == fresh_db.best()
    assert [row["spec"] for row in other.devices()] == [row["spec"] for row in fresh_db.devices()]


def test_merging_twice_or_in_a_circle_adds_nothing(fresh_db, full, other):
    assert other.merge(fresh_db.path) == Report(added=4)
    assert other.merge(fresh_db) == Report(known=4)
    assert fresh_db.merge(other) == Report(known=4)
    assert len(fresh_db.trials()) == 4


def test_two_files_become_their_sum(fresh_db, full, other):
    adder(other)(0.5, problem=PROBLEM.with_m(1))
    assert other.merge(fresh_db) == Report(added=4)
    assert len(other.trials()) == 5
    assert len(other.devices()) == 3


def test_a_running_trial_stays_where_it_runs(fresh_db, other):
    fresh_db.start_trial(cupyq.db.Trial(device=H100, problem=PROBLEM, source="measured"))
    assert other.merge(fresh_db) == Report()


def test_merged_rows_are_judged_by_this_machine(fresh_db, full, other):
    newer = dataclasses.replace(HERE, driver_version="14.0", library="2", source_hash=lambda config, problem: "v2")
    with cupyq.db.open(other.path, environment=newer) as here:
        here.merge(fresh_db)
        assert {row["stale"] for row in here.best()} == {True}
    with cupyq.db.open(":memory:", environment=HERE) as here:
        here.merge(fresh_db)
        assert {row["time_us"]: row["stale"] for row in here.best()} == {1.0: False, 2.0: True, 3.0: False}


def test_the_best_of_each_can_be_exported_alone(fresh_db, add):
    add(1.0, tile=1)
    add(2.0, tile=2)
    add(5.0, path="fp16", config=None)
    add(0.5, tile=3, source="predicted")
    lines = fresh_db.export(best=True)
    assert sorted(line["trial"]["time_us"] for line in lines) == [0.5, 1.0, 5.0]


def _changed(line, part, **change):
    return {**line, part: {**line[part], **change}}


BAD = [
    (lambda line: "{", "line 2 is not a trial"),
    (lambda line: "7", "line 2 is not a trial"),
    (lambda line: {**line, "trial": None}, "line 2 is not a trial"),
    (lambda line: {name: line[name] for name in ("schema", "trial")}, "line 2 .*device"),
    (lambda line: _changed(line, "trial", source="guessed"), "line 2 .*source is 'guessed'"),
    (lambda line: _changed(line, "trial", speed=3), "line 2 .*trial has speed"),
    (lambda line: _changed(line, "trial", time_us="fast"), "line 2 .*time_us is 'fast'"),
    (lambda line: _changed(line, "trial", time_us=-1), "CHECK"),
    (lambda line: _changed(line, "problem", m=0), "line 2 .*m is 0"),
]


@pytest.mark.parametrize(("spoil", "said"), BAD, ids=range(len(BAD)))
def test_a_bad_line_adds_nothing_at_all(fresh_db, full, other, spoil, said):
    good, bad, *_ = fresh_db.export()
    with pytest.raises(DatabaseError, match=said):
        other.load([good, spoil(bad)])
    assert (other.trials(), other.devices(), other.studies()) == ([], [], [])


def test_a_line_of_a_newer_schema_is_refused(fresh_db, full, other):
    (line, *_) = fresh_db.export()
    with pytest.raises(SchemaTooNew, match="line 1: schema 99"):
        other.load([{**line, "schema": 99}])


def test_an_infinite_time_in_a_line_is_no_time(fresh_db, add, other):
    add(1.0)
    (line,) = fresh_db.export()
    other.load([json.dumps(line).replace('"time_us": 1.0', '"time_us": Infinity')])
    assert [(row["time_us"]) for row in other.trials()] == [None]
    assert other.best() == []


def test_the_same_trial_with_other_content_is_a_conflict_and_ours_stays(fresh_db, add, other):
    add(1.0)
    other.merge(fresh_db)
    fresh_db.set_verified(1, False, reason="checked again")
    assert other.merge(fresh_db) == Report(conflicts=1)
    assert other.merge(fresh_db) == Report(conflicts=1)
    assert other.trials()[0]["state"] == "complete"
    (conflict,) = other.conflicts()
    assert (conflict["uid"], conflict["origin"]) == (other.trials()[0]["uid"], str(fresh_db.path))
    assert conflict["differs"] == {
        "state": ["complete", "failed"], "verified": [1, 0], "reason": [None, "checked again"],
    }  # fmt: skip


def test_what_each_file_chooses_is_its_own_business(fresh_db, add, other):
    add(1.0)
    other.merge(fresh_db)
    other.choose(1)
    assert other.merge(fresh_db) == Report(known=1)
    assert other.trials()[0]["chosen"]


def test_a_damaged_file_is_not_merged(tmp_path, fresh_db):
    (tmp_path / "bad.db").write_text("no database " * 100)
    with pytest.raises(DatabaseError, match=r"bad\.db is not an SQLite database"):
        fresh_db.merge(tmp_path / "bad.db")
