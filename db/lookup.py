"""What the dispatcher asks: the row for exactly this problem, and rows of shapes near it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from sqlite_utils import Database

from cupyq import devices
from cupyq.db import identity, views
from cupyq.db.records import Found


def _device_condition(db: Database, spec: Any) -> tuple[str, dict[str, Any]]:
    """Return the SQL condition for rows that hold for a device.

    A card of this machine is found again in the catalogue although its memory reads a little smaller; predictions
    made for the entry hold for the card. Measurements hold for the very identity they were taken on.
    """
    own = identity.device_row(spec)
    terms = ["(" + " AND ".join(f"d.{name} = :own_{name}" for name in identity.DEVICE_KEY) + ")"]
    parameters = {f"own_{name}": own[name] for name in identity.DEVICE_KEY}
    listed = devices.match(spec) if getattr(spec, "live", False) else None
    if listed is not None:
        row = identity.device_row(listed)
        same = " AND ".join(f"d.{name} = :listed_{name}" for name in identity.DEVICE_KEY)
        terms.append(f"(e.source = 'predicted' AND {same})")
        parameters |= {f"listed_{name}": row[name] for name in identity.DEVICE_KEY}
    return f"({' OR '.join(terms)})", parameters


def _query(db: Database, condition: str, limit: int, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    sql = f"SELECT e.* FROM eligible e JOIN device d ON d.id = e.device_id WHERE {condition} ORDER BY {views.ORDER}"
    return list(db.query(views.judged(f"{sql} LIMIT {limit}"), dict(parameters)))


def _path_condition(paths: tuple[str, ...]) -> str:
    return "e.path IN (SELECT value FROM json_each(:paths))"


def exact(
    db: Database, spec: Any, key: Mapping[str, Any], band: int, paths: tuple[str, ...], facts: Mapping[str, Any]
) -> Found | None:
    """Return the first usable row for this device, problem (columns of table `problem`) and band, or None."""
    devices_sql, parameters = _device_condition(db, spec)
    same = [name for name in identity.PROBLEM_KEY if name != "m"]
    condition = " AND ".join([devices_sql, _path_condition(paths), "e.band = :band", *(f"e.{c} = :{c}" for c in same)])
    values = {**facts, **parameters, **{c: key[c] for c in same}, "band": band, "paths": json.dumps(paths)}
    rows = _query(db, condition, 1, values)
    return _found(rows[0], 0.0) if rows else None


def nearest(
    db: Database,
    spec: Any,
    key: Mapping[str, Any],
    band: int,
    paths: tuple[str, ...],
    limit: int,
    facts: Mapping[str, Any],
) -> list[Found]:
    """Return the best measured, not stale row of each other shape and band, nearest first."""
    devices_sql, parameters = _device_condition(db, spec)
    same = [name for name in identity.PROBLEM_KEY if name not in ("m", "n", "k")]
    condition = " AND ".join(
        [
            devices_sql,
            _path_condition(paths),
            "e.source = 'measured' AND NOT e.stale",
            "NOT (e.n = :n AND e.k = :k AND e.band = :band)",
            *(f"e.{column} = :{column}" for column in same),
        ]
    )
    values = {**facts, **parameters, **{c: key[c] for c in (*same, "n", "k")}, "band": band, "paths": json.dumps(paths)}
    rows = _query(db, condition, -1, values)
    firsts: dict[tuple[int, int, int], Found] = {}
    for row in rows:
        place = (row["n"], row["k"], row["band"])
        if place not in firsts:
            firsts[place] = _found(row, distance(place, (key["n"], key["k"], band)))
    return sorted(firsts.values(), key=lambda found: (found.distance, found.time_us))[:limit]


def distance(shape: tuple[int, int, int], other: tuple[int, int, int]) -> float:
    """Return the octaves between two (n, k, band): the sum of |log2| of the three ratios."""
    return sum(abs(math.log2(a / b)) for a, b in zip(shape, other, strict=True))


def _found(row: Mapping[str, Any], away: float) -> Found:
    return Found(
        path=row["path"],
        config=json.loads(row["config"]),
        source=row["source"],
        stale_because=row["stale_because"],
        distance=away,
        time_us=row["time_us"],
        time_low_us=row["time_low_us"],
        time_high_us=row["time_high_us"],
        error=row["error"],
        op=row["op"],
        dtype=row["dtype"],
        scale_dtype=row["scale_dtype"],
        m=row["m"],
        n=row["n"],
        k=row["k"],
        group_size=row["group_size"],
        symmetric=bool(row["symmetric"]),
        band=row["band"],
        device=row["device"],
        uid=row["uid"],
    )
