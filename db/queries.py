"""Questions that people ask: best, trials, devices, crossover, pareto, each narrowed by the same filters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlite_utils import Database

from cupyq import bands
from cupyq.db import views
from cupyq.db.values import integer


@dataclass(frozen=True)
class Filters:
    """Which rows are wanted; None means any.

    Parameters
    ----------
    device : str, optional
        Name or label of the device.
    op, dtype, path, source, state : str, optional
        Values of the columns of those names. `best` and the curves hold complete trials only, whatever `state` says.
    n, k, group_size : int, optional
        The weights' shape (K, N) and grouping.
    symmetric, stale : bool, optional
        `stale` narrows `best` only.
    band : int, optional
        Any number of tokens; it stands for the band that holds it.
    study : int, optional
        Id of a study; narrows `trials` only.
    limit : int, optional
        Most rows to return.
    """

    device: str | None = None
    op: str | None = None
    dtype: str | None = None
    n: int | None = None
    k: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    band: int | None = None
    path: str | None = None
    source: str | None = None
    state: str | None = None
    stale: bool | None = None
    study: int | None = None
    limit: int | None = None

    def where(self, columns: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
        """Return the SQL condition on the named columns (filter -> SQL expression) and its parameters."""
        terms, parameters = ["1"], {}
        for name, column in columns.items():
            value = getattr(self, name)
            if value is None:
                continue
            if name == "device":
                value = str(value)
                terms.append(f"(:f_device IN ({column}, (SELECT name FROM device WHERE label = {column})))")
            else:
                if name in ("n", "k", "group_size", "study", "symmetric", "stale"):
                    value = integer(name, value)
                elif name == "band":
                    value = bands.of(value)
                terms.append(f"{column} = :f_{name}")
            parameters[f"f_{name}"] = value
        return " AND ".join(terms), parameters

    def passes(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row of `best` would be among those wanted."""
        wanted = {name: getattr(self, name) for name in (*_SHAPE, "stale")}
        if wanted["band"] is not None:
            wanted["band"] = bands.of(wanted["band"])
        return all(value is None or row[name] == value for name, value in wanted.items())

    @property
    def limited(self) -> str:
        """The LIMIT clause."""
        return "" if self.limit is None else f" LIMIT {int(self.limit)}"


_SHAPE = ("device", "op", "dtype", "n", "k", "group_size", "symmetric", "band", "path", "source")
_SORTED = "device, op, dtype, k, n, group_size, symmetric, band"


def _same(names: Iterable[str]) -> dict[str, str]:
    return {name: name for name in names}


def tidy(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with its JSON columns parsed and its 0/1 columns as bool."""
    tidied = dict(row)
    for name in ("config", "samples", "parts", "spec", "settings", "differs"):
        if isinstance(tidied.get(name), str):
            tidied[name] = json.loads(tidied[name])
    for name in ("symmetric", "stale", "verified", "chosen"):
        if tidied.get(name) is not None:
            tidied[name] = bool(tidied[name])
    return tidied


def best(db: Database, filters: Filters, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return rows of the view `best`, staleness judged by `facts` (see `Environment.parameters`)."""
    where, parameters = filters.where(_same((*_SHAPE, "stale")))
    sql = views.judged(f"SELECT * FROM best WHERE {where} ORDER BY {_SORTED}{filters.limited}", best=True)
    return [tidy(row) for row in db.query(sql, {**facts, **parameters})]


_BEST_KEY = ("device", "op", "dtype", "k", "n", "group_size", "symmetric", "band")


def beside(rows: list[dict[str, Any]], others: list[dict[str, Any]], limit: int | None) -> list[dict[str, Any]]:
    """Return rows of `best` and those of `others` that are for keys of their own, in the order of `best`."""
    known = {tuple(row[name] for name in _BEST_KEY) for row in rows}
    added = [row for row in others if tuple(row[name] for name in _BEST_KEY) not in known]
    return sorted([*rows, *added], key=lambda row: tuple(row[name] for name in _BEST_KEY))[:limit]


_TRIAL_COLUMNS = """
    t.id, t.uid, d.label AS device, d.compute_capability, p.op, p.dtype, p.scale_dtype, p.m, p.n, p.k, p.group_size,
    p.symmetric, p.band, t.path, t.config, t.state, t.reason, t.source, t.verified, t.chosen, t.phase, t.time_us,
    t.time_low_us, t.time_high_us, t.error, t.quantization_error, t.samples, t.cache, t.launch, t.source_hash,
    t.nvrtc_version, t.driver_version, t.cupy_version, t.cupyq_version, t.registers, t.spill_bytes, t.shared_bytes,
    t.clock_mhz, t.power_w, t.temperature_c, t.parts, s.name AS study, t.origin, t.started_at, t.finished_at
"""
JOINED = """
    trial t JOIN device d ON d.id = t.device_id JOIN problem p ON p.id = t.problem_id
    LEFT JOIN study s ON s.id = t.study_id
"""
TRIAL_FILTERS = {
    "device": "d.label", "op": "p.op", "dtype": "p.dtype", "n": "p.n", "k": "p.k", "group_size": "p.group_size",
    "symmetric": "p.symmetric", "band": "p.band", "path": "t.path", "source": "t.source", "state": "t.state",
    "study": "t.study_id",
}  # fmt: skip


def trials(db: Database, filters: Filters) -> list[dict[str, Any]]:
    """Return every trial, newest first."""
    where, parameters = filters.where(TRIAL_FILTERS)
    sql = f"SELECT {_TRIAL_COLUMNS} FROM {JOINED} WHERE {where} ORDER BY t.id DESC{filters.limited}"
    return [tidy(row) for row in db.query(sql, parameters)]


def candidates(db: Database, filters: Filters, judged: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return complete trials with a config, oldest first; with `judged` those that rank first only."""
    where, parameters = filters.where(TRIAL_FILTERS)
    sql = f"SELECT {_TRIAL_COLUMNS}, d.spec FROM {JOINED} WHERE {where} AND t.state = 'complete' AND t.path <> 'fp16'"
    if judged is not None:
        sql = views.judged(f"{sql} AND t.id IN ({views.FIRSTS})")
        parameters = {**judged, **parameters}
    return [tidy(row) for row in db.query(f"{sql} ORDER BY t.id{filters.limited}", parameters)]


def conflicts(db: Database) -> list[dict[str, Any]]:
    """Return what merging found to differ, oldest first."""
    rows = db.query(
        "SELECT c.id, t.uid, c.origin, c.differs, c.found_at "
        "FROM conflict c JOIN trial t ON t.id = c.trial_id ORDER BY c.id"
    )
    return [tidy(row) for row in rows]


def devices(db: Database) -> list[dict[str, Any]]:
    """Return every device with how many trials and of which kind it has."""
    rows = db.query("""
        SELECT d.label AS device, d.title, d.compute_capability, d.sms, d.l2_bytes, d.shared_per_sm, d.memory_gib,
            d.dram_gbps, count(t.id) AS trials, coalesce(sum(t.source = 'measured'), 0) AS measured,
            coalesce(sum(t.source = 'predicted'), 0) AS predicted, max(t.finished_at) AS last_trial, d.spec
        FROM device d LEFT JOIN trial t ON t.device_id = d.id GROUP BY d.id ORDER BY d.label
    """)
    return [tidy(row) for row in rows]


# The best usable trial of each path, source and band. Stale rows take part, ranked last, like everywhere else.
_CURVES = f"""
SELECT * FROM (
    SELECT *, row_number() OVER (
        PARTITION BY device, op, dtype, n, k, group_size, symmetric, band, path, source ORDER BY {views.ORDER}
    ) AS place
    FROM eligible
) WHERE place = 1
"""


def crossover(db: Database, filters: Filters, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return, per device, op, dtype, shape, groups and source, from which band on another path beats fused.

    Returns
    -------
    list of dict
        device, op, dtype, n, k, group_size, symmetric, source; `crossover`: the smallest band at which dequant or
        fp16 is faster than fused, None if there is none among the bands compared; `winner`, `fused_us`, `other_us`
        there; `first_band`, `last_band`, `bands`: what was compared; `stale`: whether any row of it is.
    """
    names = [name for name in _SHAPE if name not in ("band", "path")]
    where, parameters = filters.where(_same(names))
    # fp16 depends neither on the op nor on the groups: one row serves every problem of the same shape.
    sql = f"""
        SELECT f.device, f.op, f.dtype, f.n, f.k, f.group_size, f.symmetric, f.source, f.band, f.time_us AS fused_us,
            o.path AS other, min(o.time_us) AS other_us, max(f.stale, o.stale) AS stale
        FROM ({_CURVES}) f JOIN ({_CURVES}) o
            ON o.device = f.device AND o.dtype = f.dtype AND o.n = f.n AND o.k = f.k AND o.band = f.band
            AND o.m = f.m AND o.source = f.source
            AND (o.path = 'fp16' OR (o.path = 'dequant' AND o.op = f.op AND o.group_size = f.group_size
                                     AND o.symmetric = f.symmetric))
        WHERE f.path = 'fused'
        GROUP BY f.trial_id
        ORDER BY f.band
    """
    rows = db.query(views.judged(f"SELECT * FROM ({sql}) WHERE {where}"), {**facts, **parameters})
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    key = [names.index(name) for name in ("device", "op", "dtype", "k", "n", "group_size", "symmetric", "source")]
    ordered = sorted(groups.items(), key=lambda item: [item[0][i] for i in key])
    return [tidy({**dict(zip(names, values, strict=True)), **_crossing(rows)}) for values, rows in ordered][
        : filters.limit
    ]


def _crossing(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return where one curve over bands (ascending) is first beaten."""
    beaten = next((row for row in rows if row["other_us"] < row["fused_us"]), None)
    return {
        "crossover": beaten["band"] if beaten else None,
        "winner": beaten["other"] if beaten else "fused",
        "fused_us": beaten["fused_us"] if beaten else None,
        "other_us": beaten["other_us"] if beaten else None,
        "first_band": rows[0]["band"],
        "last_band": rows[-1]["band"],
        "bands": len(rows),
        "stale": any(row["stale"] for row in rows),
    }


def pareto(db: Database, filters: Filters, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows that no other row of the same device, dtype, shape, band, source and weights beats in both.

    Both are the time and the error of quantization. Ops and group sizes compete with each other; rows without a
    quantization error do not take part.
    """
    names = [name for name in _SHAPE if name not in ("group_size", "symmetric", "op", "path")]
    where, parameters = filters.where(_same(_SHAPE))
    sql = """
        SELECT c.device, c.op, c.dtype, c.n, c.k, c.group_size, c.symmetric, c.band, c.path, c.config, c.time_us,
            c.quantization_error, s.weights, c.source, c.stale
        FROM eligible c LEFT JOIN study s ON s.id = c.study_id
        WHERE c.quantization_error IS NOT NULL AND c.path <> 'fp16'
    """
    found = db.query(views.judged(f"SELECT * FROM ({sql}) WHERE {where}"), {**facts, **parameters})
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in found:
        groups.setdefault((*(row[name] for name in names), row["weights"] or ""), []).append(row)
    fronts = [row for key in sorted(groups) for row in front(groups[key])]
    return [tidy(row) for row in fronts][: filters.limit]


def front(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows that no other beats in both time_us and quantization_error, fastest first."""
    kept: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda row: (row["time_us"], row["quantization_error"])):
        if not kept or row["quantization_error"] < kept[-1]["quantization_error"]:
            kept.append(row)
    return kept
