"""One rule, written twice: the views judge a whole file in SQL, looking up judges a row in Python. They must agree."""

import dataclasses
import itertools

import pytest
from db_values import H100, HERE, PROBLEM, adder

import cupyq.db

SOURCES = (None, "w4a16-1-v1", "old")
DRIVERS = (None, "13.0", "13.2", "12.8")
NVRTCS = (None, "13.0", "12.9")


@pytest.mark.parametrize(
    "here",
    [
        HERE, cupyq.db.Environment(), dataclasses.replace(HERE, driver_version="13.1"),
        dataclasses.replace(HERE, driver_version=None), dataclasses.replace(HERE, nvrtc_version=None),
        dataclasses.replace(HERE, nvrtc_version="12.9"), dataclasses.replace(HERE, library=None),
        dataclasses.replace(HERE, source_hash=None),
        dataclasses.replace(HERE, source_hash=lambda config, problem: None),
    ],
    ids=str,
)  # fmt: skip
def test_looking_up_and_the_views_agree_on_what_is_stale(tmp_path, here):
    bare = cupyq.db.Environment()  # so that None stays None
    with cupyq.db.open(tmp_path / "t.db", environment=bare) as store:
        for m, facts in enumerate(itertools.product(SOURCES, DRIVERS, NVRTCS), start=1):
            source, driver, nvrtc = facts
            adder(store)(
                1.0, problem=dataclasses.replace(PROBLEM, n=m), source_hash=source, driver_version=driver,
                nvrtc_version=nvrtc,
            )  # fmt: skip
    with cupyq.db.open(tmp_path / "t.db", readonly=True, environment=here, presets=False) as store:
        with store.reading() as db:
            sql = cupyq.db.views.judged("SELECT n, stale_because FROM eligible")
            by_views = dict(db.execute(sql, store._judged(db)).fetchall())
        looked_up = {n: store.lookup(H100, dataclasses.replace(PROBLEM, n=n)).stale_because for n in by_views}
    assert len(by_views) == len(SOURCES) * len(DRIVERS) * len(NVRTCS)
    assert looked_up == by_views


@pytest.mark.parametrize(
    ("rows", "first"),
    [
        ([(5.0, "measured", "old"), (9.0, "measured", None), (1.0, "predicted", None)], 9.0),
        ([(5.0, "measured", "old"), (4.0, "measured", "older"), (1.0, "predicted", None)], 4.0),
        ([(5.0, "predicted", "old"), (6.0, "predicted", None)], 6.0),
        ([(5.0, "predicted", "old"), (4.0, "predicted", "older")], 4.0),
    ],
)
def test_looking_up_and_the_view_best_rank_alike(fresh_db, add, rows, first):
    for time_us, source, source_hash in rows:
        add(time_us, source=source, source_hash=source_hash)
    assert fresh_db.lookup(H100, PROBLEM).time_us == fresh_db.best()[0]["time_us"] == first


def test_sources_are_generated_only_as_far_as_needed(fresh_db, add):
    asked = []
    fresh_db.environment = dataclasses.replace(
        HERE, source_hash=lambda config, problem: asked.append(config["tile"]) or HERE.source_hash(config, problem)
    )
    fresh_db._generated.clear()
    for tile in range(50):
        add(1.0 + tile, tile=tile, source_hash=f"w4a16-{tile}-v1")
    asked.clear()
    fresh_db._generated.clear()
    assert fresh_db.lookup(H100, PROBLEM).time_us == 1.0
    assert asked == [0]
