"""Presets answer beside the file, are never part of it, and only what is asked for is read."""

import dataclasses
import json

import pytest
from db_values import A100, H100, HERE, PROBLEM, generated

import cupyq.db
from cupyq import bands
from cupyq.db import presets
from cupyq.errors import DatabaseError


@pytest.fixture
def fresh_db(tmp_path):
    with cupyq.db.open(tmp_path / "fresh.db", environment=HERE) as store:
        yield store


def written(tiles, name="h100-sxm", source_hash=None, problem=PROBLEM):
    """Return the text of a preset of one problem with a tile for each of some bands."""
    preset = presets.Writing(name, {"cupyq": "0.1.0"})
    configs = {band: {"tile": tile} for band, tile in tiles.items()}
    entries = {
        band: [(config, source_hash or generated(config, {"op": problem.op}), 50.0)] for band, config in configs.items()
    }
    preset.add(problem, [entries.get(band, []) for band in bands.ends()])
    return preset.text()


@pytest.fixture
def ship(tmp_path, monkeypatch):
    """Write a preset file with a tile for each of some bands of PROBLEM; return its path."""
    folder = tmp_path / "presets"
    folder.mkdir()
    monkeypatch.setattr(presets, "folder", lambda: folder)

    def ship(tiles, name="h100-sxm", **fields):
        (folder / f"{name}.jsonl").write_text(written(tiles, name, **fields))
        return folder / f"{name}.jsonl"

    return ship


def test_a_preset_answers_where_the_file_has_nothing(ship, fresh_db):
    ship({16: 77})
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
    ship({16: 77})
    add(99.0, **own)
    assert fresh_db.lookup(H100, PROBLEM).preset is preset


def test_a_stale_preset_is_no_better_than_a_stale_row(ship, fresh_db, add):
    ship({16: 77}, source_hash="old")
    assert fresh_db.lookup(H100, PROBLEM).stale
    add(99.0, source="predicted", source_hash="older")
    assert not fresh_db.lookup(H100, PROBLEM).preset


def test_presets_are_no_part_of_the_file(ship, fresh_db, add):
    ship({16: 77, 64: 77})
    add(10.0)
    assert [row["time_us"] for row in fresh_db.best()] == [10.0]
    assert [row["time_us"] for row in fresh_db.best(presets=True)] == [10.0, 50.0]
    assert [row["time_us"] for row in fresh_db.best(presets=True, band=64)] == [50.0]
    assert len(fresh_db.trials()) == len(list(fresh_db.export())) == 1


def test_presets_can_be_left_out(ship, fresh_db):
    ship({16: 77})
    with cupyq.db.open(fresh_db.path, environment=HERE, presets=False) as store:
        assert store.lookup(H100, PROBLEM) is None
        assert store.best(presets=True) == []


def test_a_preset_file_is_read_when_its_device_is_asked_about(ship, fresh_db):
    ship({16: 77})
    ship({}, name="a100-sxm").write_text("nonsense\n")
    assert fresh_db.lookup(H100, PROBLEM).preset
    with pytest.raises(DatabaseError, match="preset a100-sxm, line 1, is no JSON object"):
        fresh_db.lookup(A100, PROBLEM)


@pytest.mark.parametrize(
    ("find", "put", "said"),
    [
        ('"device":"h100-sxm"', '"device":"a100-sxm"', "preset h100-sxm is for 'a100-sxm'"),
        ('"preset":1', '"preset":2', "format 2; 1 is accepted"),
        ("[0,50.0]", "[1,50.0]", "line 2, is no row of a preset: IndexError"),
        ("[0,50.0]", "[0,-50.0]", "line 2, is no row of a preset: .*a time of -50.0 us"),
        ("[0,50.0]", "[0,50.0],[0,50.0]", "line 2, is no row of a preset: ValueError"),
    ],
)
def test_a_damaged_preset_is_an_error_that_names_the_line(ship, fresh_db, find, put, said):
    path = ship({16: 77})
    assert find in path.read_text()
    path.write_text(path.read_text().replace(find, put))
    with pytest.raises(DatabaseError, match=said):
        fresh_db.lookup(H100, PROBLEM)


def test_only_the_line_of_the_problem_is_parsed(ship, fresh_db, monkeypatch):
    path = ship({16: 77})
    other = [written({16: 5}, problem=dataclasses.replace(PROBLEM, n=n)).splitlines()[1] for n in range(1, 500)]
    path.write_text(path.read_text() + "\n".join(other) + "\n")
    parsed = []
    real = presets.Preset._parsed
    monkeypatch.setattr(presets.Preset, "_parsed", lambda self, line, n: parsed.append(n) or real(self, line, n))
    assert fresh_db.lookup(H100, dataclasses.replace(PROBLEM, n=300)).config == {"tile": 77}
    assert parsed == [1, 302]
    assert fresh_db.lookup(H100, dataclasses.replace(PROBLEM, n=1000)) is None
    assert parsed == [1, 302]


def test_the_faster_path_answers_and_each_can_be_asked_for(ship, fresh_db):
    path = ship({16: 77})
    lines = path.read_text().splitlines()
    header = json.loads(lines[0])
    header["configs"].append({"family": "dequant", "tile": 8})
    header["kernels"].append([1, "w4a16-8-v1"])
    path.write_text(json.dumps(header) + "\n" + lines[1].replace("[0,50.0]", "[0,50.0,1,40.0]") + "\n")
    found = fresh_db.lookup(H100, PROBLEM)
    assert (found.path, found.time_us, found.stale) == ("dequant", 40.0, False)
    assert fresh_db.lookup(H100, PROBLEM, paths=("fused",)).time_us == 50.0
    assert fresh_db.lookup(H100, PROBLEM, paths=("fp16",)) is None
    both = fresh_db.paths(H100, PROBLEM)
    assert {name: row.time_us for name, row in both.items()} == {"fused": 50.0, "dequant": 40.0}
    assert [(row["path"], row["time_us"]) for row in fresh_db.best(presets=True)] == [("dequant", 40.0)]
