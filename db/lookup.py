"""What the dispatcher asks: the row for exactly this problem, and rows of shapes near it.

Rows are judged one after the other, best first, until one will do: see `staleness`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from cupyq import devices
from cupyq.db import identity, views
from cupyq.db.found import Found
from cupyq.db.schema import Executes

Judge = Callable[[Mapping[str, Any]], str]
"""A row of `_ROWS` -> what makes it stale, "" for nothing."""

_JOINED = "trial t JOIN problem p ON p.id = t.problem_id JOIN device d ON d.id = t.device_id"
_ROWS = f"""
SELECT t.uid, d.label AS device, p.op, p.m, p.n, p.k, p.group_size, p.symmetric, p.dtype, p.scale_dtype, p.band,
    t.path, t.config, t.time_us, t.time_low_us, t.time_high_us, t.error, t.source, t.source_hash, t.driver_version,
    t.nvrtc_version
FROM {_JOINED} WHERE {views.USABLE}
"""
# `views.ORDER` but for staleness, which `_first` adds.
_ORDER = "ORDER BY t.source = 'measured' DESC, p.m DESC, t.chosen DESC, t.time_us, t.id"


class Question:
    """One problem on one device, as SQL.

    Parameters
    ----------
    spec : DeviceSpec
    problem : kernels.Problem
    band : int or None
        The problem's own when None.
    paths : iterable of str
        Which paths may answer.
    """

    def __init__(self, spec: Any, problem: Any, band: int | None, paths: Iterable[str]) -> None:
        key = identity.problem_row(problem)
        self.place = (key["n"], key["k"], band or key["band"])
        device_sql, self.parameters = _device_condition(spec)
        self.parameters["paths"] = json.dumps(list(paths))
        kind = [name for name in identity.PROBLEM_KEY if name not in ("m", "n", "k")]
        self.parameters |= {name: key[name] for name in kind}
        self.condition = " AND ".join(
            [device_sql, "t.path IN (SELECT value FROM json_each(:paths))", *(f"p.{name} = :{name}" for name in kind)]
        )

    def rows(self, db: Executes, place: tuple[int, int, int], more: str = "") -> Iterator[dict[str, Any]]:
        """Yield the usable rows of one (n, k, band), best first as far as that can be said without judging them."""
        sql = f"{_ROWS} AND p.n = :n AND p.k = :k AND p.band = :band AND {self.condition} {more} {_ORDER}"
        n, k, band = place
        return _dicts(db.execute(sql, {**self.parameters, "n": n, "k": k, "band": band}))


def _device_condition(spec: Any) -> tuple[str, dict[str, Any]]:
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
        terms.append(f"(t.source = 'predicted' AND {same})")
        parameters |= {f"listed_{name}": row[name] for name in identity.DEVICE_KEY}
    return f"({' OR '.join(terms)})", parameters


def _dicts(cursor: Any) -> Iterator[dict[str, Any]]:
    names = [column[0] for column in cursor.description]
    return (dict(zip(names, row, strict=True)) for row in cursor)


def exact(db: Executes, asked: Question, judge: Judge) -> Found | None:
    """Return the first usable row for exactly this device, problem and band, or None."""
    return _first(asked.rows(db, asked.place), asked.place, judge)


def nearest(db: Executes, asked: Question, limit: int, judge: Judge) -> list[Found]:
    """Return the best measured, not stale row of each other shape and band, nearest first."""
    sql = f"""
        SELECT p.n, p.k, p.band, min(t.time_us) FROM {_JOINED}
        WHERE {views.USABLE} AND t.source = 'measured' AND {asked.condition} GROUP BY p.n, p.k, p.band
    """
    places = [((n, k, band), fastest) for n, k, band, fastest in db.execute(sql, asked.parameters)]
    places.sort(key=lambda item: (distance(item[0], asked.place), item[1]))
    found: list[Found] = []
    for place, _ in places:
        if len(found) >= limit and distance(place, asked.place) > found[-1].distance:
            break
        if place == asked.place:
            continue
        row = _first(asked.rows(db, place, "AND t.source = 'measured'"), asked.place, judge)
        if row is not None and not row.stale:
            found.append(row)
    return sorted(found, key=lambda row: (row.distance, row.time_us))[:limit]


def _first(rows: Iterable[Mapping[str, Any]], asked: tuple[int, int, int], judge: Judge) -> Found | None:
    """Return the row that ranks first: measured before predicted, and among these what is not stale before the rest."""
    fallback: tuple[Mapping[str, Any], str] | None = None
    for row in rows:
        if fallback is not None and row["source"] != fallback[0]["source"]:
            break
        why = judge(row)
        if not why:
            return _found(row, "", asked)
        fallback = fallback or (row, why)
    return None if fallback is None else _found(*fallback, asked)


def distance(shape: tuple[int, int, int], other: tuple[int, int, int]) -> float:
    """Return the octaves between two (n, k, band): the sum of |log2| of the three ratios."""
    return sum(abs(math.log2(a / b)) for a, b in zip(shape, other, strict=True))


_SAME = (
    "path", "source", "time_us", "time_low_us", "time_high_us", "error", "op", "dtype", "scale_dtype", "m", "n", "k",
    "group_size", "band", "device", "uid",
)  # fmt: skip


def _found(row: Mapping[str, Any], stale_because: str, asked: tuple[int, int, int]) -> Found:
    return Found(
        **{name: row[name] for name in _SAME},
        config=json.loads(row["config"]),
        symmetric=bool(row["symmetric"]),
        stale_because=stale_because,
        distance=distance((row["n"], row["k"], row["band"]), asked),
    )
