"""Keeping the file small: deleting trials that nobody will need, giving space back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from sqlite_utils import Database

from cupyq.db import views
from cupyq.db.queries import TRIAL_FILTERS, Filters
from cupyq.db.values import moment
from cupyq.errors import ArgumentError


@dataclass(frozen=True)
class Prune:
    """Which trials to delete. A trial goes when any of the reasons below holds and every filter passes.

    Parameters
    ----------
    stale : bool
        Stale trials, the first-ranked ones too.
    failed : bool
        Failed and pruned trials. Their configs can then be tried again.
    older_than : float, optional
        Days since the trial ended.
    keep : int, optional
        All but so many best-ranked trials of each device, problem, path and source.
    samples : bool
        Delete raw samples instead of trials.
    filters : Filters
        Narrow all of the above.
    dry_run : bool
        Count only.
    """

    stale: bool = False
    failed: bool = False
    older_than: float | None = None
    keep: int | None = None
    samples: bool = False
    filters: Filters = field(default_factory=Filters)
    dry_run: bool = False


def prune(db: Database, what: Prune, facts: Mapping[str, Any]) -> int:
    """Delete what `what` says and return how many trials that touches.

    Rows that rank first, and running trials, stay, unless they are stale and stale ones are to go.
    Devices, problems and studies that nothing refers to any more go too.
    """
    if what.keep is not None and what.keep < 1:
        raise ArgumentError(f"keep is {what.keep}; 1 or more is accepted")
    reasons, parameters = _reasons(what)
    if not reasons and not what.samples:
        raise ArgumentError("nothing to prune was named; stale, failed, older_than, keep or samples is accepted")
    where, filtered = what.filters.where(TRIAL_FILTERS)
    if what.samples:
        reasons = ["t.samples IS NOT NULL"] if not reasons else [f"t.samples IS NOT NULL AND ({' OR '.join(reasons)})"]
    sql = f"""
        SELECT t.id FROM trial t JOIN device d ON d.id = t.device_id JOIN problem p ON p.id = t.problem_id
        WHERE t.state <> 'running' AND {where} AND ({" OR ".join(reasons)})
    """
    ids = [row["id"] for row in db.query(views.judged(sql), {**facts, **parameters, **filtered})]
    if ids and not what.dry_run:
        action = "UPDATE trial SET samples = NULL" if what.samples else "DELETE FROM trial"
        db.conn.executemany(f"{action} WHERE id = ?", [(trial_id,) for trial_id in ids])
        _drop_unused(db)
    return len(ids)


def _reasons(what: Prune) -> tuple[list[str], dict[str, Any]]:
    first = f"t.id NOT IN ({views.FIRSTS})"
    reasons: list[str] = []
    parameters: dict[str, Any] = {}
    if what.stale:
        reasons.append("t.id IN (SELECT trial_id FROM eligible WHERE stale)")
    if what.failed:
        reasons.append("t.state IN ('failed', 'pruned')")
    if what.older_than is not None:
        since = datetime.now(timezone.utc) - timedelta(days=what.older_than)
        parameters["since"] = moment("since", since)
        reasons.append(f"(coalesce(t.finished_at, t.started_at) < :since AND {first})")
    if what.keep is not None:
        parameters["keep"] = what.keep
        ranked = f"""
            SELECT trial_id FROM (SELECT trial_id, row_number() OVER (
                PARTITION BY device, op, dtype, scale_dtype, n, k, group_size, symmetric, band, path, source
                ORDER BY {views.ORDER}) AS place FROM eligible) WHERE place > :keep
        """
        reasons.append(f"t.id IN ({ranked})")
    return reasons, parameters


def _drop_unused(db: Database) -> None:
    unused_study = "state <> 'running' AND id NOT IN (SELECT study_id FROM trial WHERE study_id IS NOT NULL)"
    db.execute(f"DELETE FROM study WHERE {unused_study}")
    for table in ("problem", "device"):
        used = f"SELECT {table}_id FROM trial UNION SELECT {table}_id FROM study WHERE {table}_id IS NOT NULL"
        db.execute(f"DELETE FROM {table} WHERE id NOT IN ({used})")
    db.execute(
        "DELETE FROM current WHERE kind = 'source_hash' AND value NOT IN "
        "(SELECT source_hash FROM trial WHERE source_hash IS NOT NULL)"
    )


def vacuum(db: Database) -> None:
    """Rewrite the file without its free pages and fold the write-ahead log into it."""
    db.vacuum()
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
