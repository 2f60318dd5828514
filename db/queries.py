"""Questions that people ask: best, trials, devices, pareto, each narrowed by the same filters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
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

    def passes(self, row: Mapping[str, Any], names: Iterable[str] | None = None) -> bool:
        """Return whether a row would be among those wanted, by the columns named; by those of `best` when None."""
        wanted = {name: getattr(self, name) for name in names or (*_SHAPE, "stale")}
        if wanted.get("band") is not None:
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


def beside(
    rows: list[dict[str, Any]], others: list[dict[str, Any]], limit: int | None, key: Sequence[str] = _BEST_KEY
) -> list[dict[str, Any]]:
    """Return rows and those of `others` that are for keys of their own, ordered by the key."""
    known = {tuple(row[name] for name in key) for row in rows}
    added = [row for row in others if tuple(row[name] for name in key) not in known]
    return sorted([*rows, *added], key=lambda row: tuple(row[name] for name in key))[:limit]


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
