"""Presets answer beside the file, are never part of it, and are never anything but verified predictions."""

import dataclasses
import json

import pytest
from db_values import A100, H100, HERE, PROBLEM, adder

import cupyq.db
from cupyq import devices, kernels
from cupyq.db import presets
from cupyq.errors import DatabaseError


@pytest.fixture
def fresh_db(tmp_path):
    with cupyq.db.open(tmp_path / "fresh.db", environment=HERE) as store:
        yield store


PRESET = {"source": "predicted", "tile": 77, "time_us": 50.0}


@pytest.fixture
def ship(tmp_path, monkeypatch):
    """Write a preset file for the H100 with the given trials; return its path."""
    folder = tmp_path / "presets"
    folder.mkdir()
    monkeypatch.setattr(presets, "folder", lambda: folder)

    def ship(*trials, name="h100-sxm"):
        with cupyq.db.open(":memory:", environment=HERE) as store:
            for fields in trials:
                adder(store)(**fields)
            lines = [json.dumps(line) for line in store.export()]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        return folder / f"{name}.jsonl"

    return ship


def test_a_preset_answers_where_the_file_has_nothing(ship, fresh_db):
    ship(PRESET)
    found = fresh_db.lookup(H100, PROBLEM)
    assert (found.preset, found.source, found.config, found.stale) == (True, "predicted", {"tile": 77}, False)
    live = dataclasses.replace(H100, live=True, ordinal=0, memory_bytes=85_029_158_912, title="NVIDIA H100 80GB HBM3")
    assert fresh_db.lookup(live, PROBLEM).preset
    assert fresh_db.lookup(A100, PROBLEM) is None
    assert fresh_db.lookup(H100, PROBLEM.with_m(64)) is None


@pytest.mark.parametrize(
    ("own", "preset"),
    [
        ({"source": "measured"}, False), ({"source": "predicted"}, False),
        ({"source": "measured", "source_hash": "old"}, False), ({"source": "predicted", "source_hash": "old"}, True),
    ],
    ids=str,
)  # fmt: skip
def test_a_row_of_the_file_comes_first_unless_it_is_a_stale_prediction(ship, fresh_db, add, own, preset):
    ship(PRESET)
    add(99.0, **own)
    assert fresh_db.lookup(H100, PROBLEM).preset is preset


def test_a_stale_preset_is_no_better_than_a_stale_row(ship, fresh_db, add):
    ship({**PRESET, "source_hash": "old"})
    assert fresh_db.lookup(H100, PROBLEM).stale
    add(99.0, source="predicted", source_hash="older")
    assert not fresh_db.lookup(H100, PROBLEM).preset


def test_presets_are_no_part_of_the_file(ship, fresh_db, add):
    ship(PRESET, {**PRESET, "problem": PROBLEM.with_m(64)})
    add(10.0)
    assert [row["time_us"] for row in fresh_db.best()] == [10.0]
    assert [row["time_us"] for row in fresh_db.best(presets=True)] == [10.0, 50.0]
    assert [row["time_us"] for row in fresh_db.best(presets=True, band=64)] == [50.0]
    assert len(fresh_db.trials()) == len(list(fresh_db.export())) == 1


def test_presets_can_be_left_out(ship, fresh_db):
    ship(PRESET)
    with cupyq.db.open(fresh_db.path, environment=HERE, presets=False) as store:
        assert store.lookup(H100, PROBLEM) is None
        assert store.best(presets=True) == []


def test_a_preset_file_is_read_when_its_device_is_asked_about(ship, fresh_db):
    ship(PRESET)
    ship(name="a100-sxm").write_text("nonsense\n")
    assert fresh_db.lookup(H100, PROBLEM).preset
    with pytest.raises(DatabaseError, match="preset a100-sxm, line 1, is no trial"):
        fresh_db.lookup(A100, PROBLEM)


@pytest.mark.parametrize(
    "fields", [{"source": "measured"}, {"verified": False}, {"state": "pruned"}, {"device": A100}], ids=str
)
def test_a_preset_is_a_verified_prediction_for_its_device_or_an_error(ship, fresh_db, fields):
    ship({**PRESET, **fields})
    with pytest.raises(DatabaseError, match="preset h100-sxm, line 1, is no verified prediction"):
        fresh_db.lookup(H100, PROBLEM)


@pytest.mark.parametrize("name", presets.names())
def test_the_presets_that_ship_are_legal_and_current(name):
    """Runs once for each file of db/presets; there is no such file until the tuner has written one."""
    store = presets.read(name, cupyq.db.Environment.here())
    assert store is not None
    for row in store.best():
        problem = kernels.Problem(
            row["op"], row["band"], row["n"], row["k"], row["group_size"], row["symmetric"], row["dtype"]
        )
        assert kernels.check(kernels.from_dict(row["config"]), problem, devices.get(name)) is None, row
        assert not row["stale"], row
