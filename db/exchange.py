"""Moving trials between files: one JSON object a trial, complete in itself, the same trial wherever it goes.

A line holds `schema`, `device` (its identity and spec), `problem`, `study` (or null) and `trial`. Studies and trials
carry a `uid` made where they were recorded, so that reading the same lines twice adds nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlite_utils import Database

from cupyq import devices
from cupyq.db import identity, tables, views
from cupyq.db.queries import JOINED, TRIAL_FILTERS, Filters
from cupyq.db.records import PATHS, PHASES, SOURCES
from cupyq.db.schema import SCHEMA_VERSION
from cupyq.db.values import choice, moment, now, number, text
from cupyq.errors import ArgumentError, DatabaseError, SchemaTooNew

if TYPE_CHECKING:
    from cupyq.db.store import Store


@dataclass(frozen=True)
class Report:
    """What reading lines came to: trials added, trials that were here already, trials here with other content."""

    added: int = 0
    known: int = 0
    conflicts: int = 0


_DEVICE = ("name", "title", *identity.DEVICE_KEY, "spec")
_STUDY = ("uid", "name", "state", "reason", "weights", "settings", "cupyq_version", "started_at", "finished_at")
_JSON = {"spec", "settings", "config", "samples", "parts"}
_NOT_MOVED = {"id", "study_id", "device_id", "problem_id", "origin"}
# What may differ between two copies of one trial without either being wrong: it is decided anew in each file.
_LOCAL = {"chosen"}


def _trial_columns(db: Database) -> list[str]:
    return [column.name for column in db.table("trial").columns if column.name not in _NOT_MOVED]


def export(db: Database, filters: Filters, judged: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Yield finished trials, oldest first; with `judged` (see `Environment.parameters`) those that rank first only.

    Trials that are still running are left out: they have nothing to say yet.
    """
    columns = [f"d.{name} AS d_{name}" for name in _DEVICE]
    columns += [f"p.{name} AS p_{name}" for name in identity.PROBLEM_KEY]
    columns += [f"s.{name} AS s_{name}" for name in _STUDY]
    columns += [f"t.{name} AS t_{name}" for name in _trial_columns(db)]
    where, parameters = filters.where(TRIAL_FILTERS)
    sql = f"SELECT {', '.join(columns)} FROM {JOINED} WHERE {where} AND t.state <> 'running'"
    if judged is not None:
        sql = views.judged(f"{sql} AND t.id IN ({views.FIRSTS})")
        parameters = {**judged, **parameters}
    # Read at once: a lazy cursor would hold its read lock while whoever takes the lines writes elsewhere.
    for row in list(db.query(f"{sql} ORDER BY t.id{filters.limited}", parameters)):
        yield _line(row)


def _line(row: Mapping[str, Any]) -> dict[str, Any]:
    def part(prefix: str) -> dict[str, Any]:
        named = {name[2:]: value for name, value in row.items() if name.startswith(prefix)}
        return {n: json.loads(v) if n in _JSON and isinstance(v, str) else v for n, v in named.items()}

    study = part("s_")
    return {
        "schema": SCHEMA_VERSION,
        "device": part("d_"),
        "problem": identity.problem_fields(part("p_")),
        "study": study if study["uid"] is not None else None,
        "trial": part("t_"),
    }


# What `compact` leaves out, empty columns aside: it can be had again, or is of use where it was recorded only.
_BULKY = {"samples", "parts", "started_at"}


def compact(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of `export` without its study, raw samples, parts of a prediction, and what is empty.

    The device loses what the catalogue has of it. `load` reads such lines all the same.
    """
    kept = {part: line[part] for part in ("schema", "device", "problem", "trial")}
    kept["trial"] = {name: v for name, v in line["trial"].items() if v is not None and name not in _BULKY}
    if line["device"]["spec"] == _listed_spec(line["device"]):
        kept["device"] = {name: value for name, value in line["device"].items() if name != "spec"}
    return kept


def _listed_spec(device: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what the catalogue has of a device that a line names; None where it has none of that identity."""
    listed = devices.CATALOGUE.get(device["name"])
    if listed is None:
        return None
    row = identity.device_row(listed)
    same = all(row[name] == device[name] for name in identity.DEVICE_KEY)
    return json.loads(row["spec"]) if same else None


def load(store: Store, db: Database, lines: Iterable[Mapping[str, Any] | str], origin: str | None) -> Report:
    """Add lines of `export` to the database; the caller holds the transaction, so it is all of them or none.

    Raises
    ------
    DatabaseError
        If a line is no JSON or lacks a part (the study may be missing); the message counts lines from 1.
    SchemaTooNew
        If a newer cupyq wrote a line.
    """
    added = known = conflicts = 0
    columns = _trial_columns(db)
    for count, line in enumerate(lines, start=1):
        if isinstance(line, str) and not line.strip():
            continue
        try:
            parts = json.loads(line) if isinstance(line, str) else line
            outcome = _add(store, db, parts, columns, origin)
        except SchemaTooNew as error:
            raise SchemaTooNew(f"line {count}: {error}") from error
        except (ArgumentError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise DatabaseError(f"line {count} is not a trial as `export` writes it: {error!s}") from error
        added += outcome == "added"
        known += outcome == "known"
        conflicts += outcome == "conflict"
    return Report(added, known, conflicts)


def _add(store: Store, db: Database, parts: Mapping[str, Any], columns: list[str], origin: str | None) -> str:
    if int(parts["schema"]) > SCHEMA_VERSION:
        raise SchemaTooNew(f"schema {parts['schema']} is newer than {SCHEMA_VERSION}: update cupyq")
    row = _checked(parts["trial"], columns)
    device = {"spec": _listed_spec(parts["device"]) or {}, **parts["device"]}
    row["device_id"] = store.add_device_row({name: device[name] for name in _DEVICE})
    row["problem_id"] = store.problem_id(parts["problem"])
    mine = next(iter(db.query("SELECT * FROM trial WHERE uid = ?", [row["uid"]])), None)
    if mine is not None:
        differs = {name: [mine[name], row[name]] for name in row if name not in _LOCAL and mine[name] != row[name]}
        if differs:
            fields = {"trial_id": mine["id"], "origin": origin, "differs": text(differs), "found_at": now()}
            db.execute(
                "INSERT OR IGNORE INTO conflict (trial_id, origin, differs, found_at) "
                "VALUES (:trial_id, :origin, :differs, :found_at)",
                fields,
            )
        return "conflict" if differs else "known"
    row["study_id"] = _study_id(db, parts, row, origin)
    tables.insert(db, "trial", {**row, "origin": origin})
    return "added"


def _checked(trial: Mapping[str, Any], columns: list[str]) -> dict[str, Any]:
    """Return the columns of a trial out of a line; an unknown one is an error, a missing optional one is NULL."""
    unknown = sorted(set(trial) - set(columns))
    if unknown:
        raise ArgumentError(f"trial has {', '.join(unknown)}; columns of table trial are accepted")
    row = {name: trial.get(name) for name in columns}
    for name, accepted in (("path", PATHS), ("source", SOURCES), ("phase", PHASES)):
        row[name] = choice(name, row[name], accepted)
    row["state"] = choice("state", row["state"], ("complete", "pruned", "failed"))
    row["uid"] = str(trial["uid"])
    for name in ("time_us", "time_low_us", "time_high_us", "error", "quantization_error"):
        row[name] = number(name, row[name])
    for name in ("started_at", "finished_at"):
        row[name] = moment(name, row[name])
    for name in ("verified", "chosen"):
        row[name] = int(bool(row[name]))
    for name in _JSON & set(columns):
        row[name] = None if row[name] is None else text(row[name])
    return row


def _study_id(db: Database, parts: Mapping[str, Any], row: Mapping[str, Any], origin: str | None) -> int | None:
    study = parts.get("study")
    if study is None:
        return None
    known = tables.row_id(db, "study", {"uid": study["uid"]})
    if known is not None:
        return known
    fields = {name: study.get(name) for name in _STUDY}
    fields["settings"] = text(fields["settings"] or {})
    # Whatever the study was doing there, nobody goes on with it here.
    fields["state"] = "interrupted" if fields["state"] == "running" else fields["state"]
    links = {"device_id": row["device_id"], "problem_id": row["problem_id"]}
    return tables.insert(db, "study", {**fields, **links, "origin": origin or "elsewhere"})
