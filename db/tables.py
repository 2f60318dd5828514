"""Single-table steps that the store is built of: finding a row by its key, adding one, the table `current`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sqlite_utils import Database

FACTS = ("driver_version", "nvrtc_version", "library")


def row_id(db: Database, table: str, key: Mapping[str, Any]) -> int | None:
    """Return the id of the newest row whose columns equal `key` (None matches NULL), or None."""
    where = " AND ".join(f"{name} IS :{name}" for name in key)
    row = db.execute(f"SELECT id FROM {table} WHERE {where} ORDER BY id DESC LIMIT 1", dict(key)).fetchone()
    return row[0] if row else None


def insert(db: Database, table: str, row: Mapping[str, Any]) -> int:
    """Add a row and return its id. A column that the table does not have is an error, never a new column."""
    names = ", ".join(row)
    values = ", ".join(f":{name}" for name in row)
    added = db.execute(f"INSERT INTO {table} ({names}) VALUES ({values})", dict(row)).lastrowid
    assert added is not None  # an INSERT that did not raise has a row id
    return added


def studies(db: Database) -> list[dict[str, Any]]:
    """Return every study, oldest first."""
    rows = db.query("SELECT * FROM study ORDER BY id")
    return [{**row, "settings": json.loads(row["settings"])} for row in rows]


def configs_tried(db: Database, study: int) -> list[dict[str, Any]]:
    """Return what a study has tried so far, in order."""
    columns = "id, uid, path, config, phase, state, reason, source, verified, time_us, quantization_error"
    rows = db.query(f"SELECT {columns} FROM trial WHERE study_id = ? ORDER BY id", [study])
    return [{**row, "config": json.loads(row["config"]), "verified": bool(row["verified"])} for row in rows]


def declared(db: Database, kind: str) -> list[str]:
    """Return the values of one kind in table `current`."""
    return [value for (value,) in db.execute("SELECT value FROM current WHERE kind = ? ORDER BY value", [kind])]


def is_current(db: Database, facts: Mapping[str, Any]) -> bool:
    """Return whether table `current` states exactly these facts (`Environment.parameters`), source hashes apart."""
    stated = dict(db.execute("SELECT kind, value FROM current WHERE kind <> 'source_hash'"))
    return stated == {name: facts[name] for name in FACTS if facts[name] is not None}


def write_current(db: Database, facts: Mapping[str, Any]) -> None:
    """Make table `current` state these facts and the hashes in facts["sources"]."""
    rows = [(name, facts[name]) for name in FACTS if facts[name] is not None]
    rows += [("source_hash", value) for value in json.loads(facts["sources"])]
    db.execute("DELETE FROM current")
    db.conn.executemany("INSERT INTO current VALUES (?, ?)", rows)


def source_hashes(db: Database) -> set[str]:
    """Return every source hash that a trial has."""
    return {value for (value,) in db.execute("SELECT DISTINCT source_hash FROM trial WHERE source_hash IS NOT NULL")}


def generated_by(db: Database, source_hash: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config and the problem (columns of its table) of one trial that has this source hash."""
    row = next(
        db.query(
            "SELECT t.config, p.* FROM trial t JOIN problem p ON p.id = t.problem_id WHERE t.source_hash = ? LIMIT 1",
            [source_hash],
        )
    )
    return json.loads(row["config"]), row
