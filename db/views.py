"""The ranking, written once in SQL: as views for any SQLite tool, and as a query for readers with facts of their own.

`eligible` lists the trials that may be used at all and says of each whether it is stale; `best` keeps the first of
each device, op, dtype, n, k, group_size, symmetric and band. Both read the names `current` and `eligible` without
saying where these live, so `WITH current AS (...)` in front of the same text judges staleness by other values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlite_utils import Database

BEST_COLUMNS = (
    "device", "compute_capability", "op", "dtype", "n", "k", "group_size", "symmetric", "band", "path", "config",
    "time_us", "time_low_us", "time_high_us", "speedup_vs_fp16", "error", "source", "stale", "trials",
)  # fmt: skip

#: Which trials t may be used at all.
USABLE = "t.state = 'complete' AND t.verified = 1 AND t.time_us IS NOT NULL AND t.cache IS NOT 'warm'"

# The rule is written a second time in `staleness`, for who looks up one problem: change both.
# A fact that either side does not know is not compared: a laptop without a driver can still read a server's rows.
ELIGIBLE = f"""
SELECT *, stale_because <> '' AS stale FROM (
    SELECT t.id AS trial_id, t.uid, t.study_id, t.device_id, d.label AS device, d.compute_capability,
        p.op, p.dtype, p.scale_dtype, p.m, p.n, p.k, p.group_size, p.symmetric, p.band,
        t.path, t.config, t.chosen, t.time_us, t.time_low_us, t.time_high_us, t.error, t.quantization_error, t.source,
        rtrim(
            CASE WHEN t.source_hash IS NOT NULL
                  AND t.source_hash NOT IN (SELECT value FROM current WHERE kind = 'source_hash')
                  AND EXISTS (SELECT 1 FROM current WHERE kind = 'library')
                 THEN 'kernel source, ' ELSE '' END
            || CASE WHEN CAST(t.driver_version AS INTEGER)
                         <> (SELECT CAST(value AS INTEGER) FROM current WHERE kind = 'driver_version')
                    THEN 'driver, ' ELSE '' END
            || CASE WHEN t.nvrtc_version <> (SELECT value FROM current WHERE kind = 'nvrtc_version')
                    THEN 'NVRTC, ' ELSE '' END,
            ', ') AS stale_because
    FROM trial t JOIN device d ON d.id = t.device_id JOIN problem p ON p.id = t.problem_id
    WHERE {USABLE}
)
"""

#: How two usable trials of one problem are ordered. A time at a smaller M of the band says less of the band's end,
#: and what a study chose after measuring its finalists side by side beats the luckiest single trial.
ORDER = "source = 'measured' DESC, stale, m DESC, chosen DESC, time_us, trial_id"

# fp16 is the yardstick, not a way to run quantized weights, so it has no place of its own. Its time depends on neither
# the op nor the groups; it counts only beside a time of the same kind (measured or predicted) at the same M.
BEST = f"""
SELECT r.device, r.compute_capability, r.op, r.dtype, r.n, r.k, r.group_size, r.symmetric, r.band, r.path, r.config,
    r.time_us, r.time_low_us, r.time_high_us,
    (SELECT f.time_us FROM eligible f
     WHERE f.path = 'fp16' AND f.device = r.device AND f.dtype = r.dtype AND f.n = r.n AND f.k = r.k AND f.m = r.m
       AND f.source = r.source
     ORDER BY f.stale, f.chosen DESC, f.time_us LIMIT 1) / r.time_us AS speedup_vs_fp16,
    r.error, r.source, r.stale,
    (SELECT count(*) FROM trial t JOIN problem p ON p.id = t.problem_id
     WHERE t.device_id = r.device_id AND t.state <> 'running' AND p.op = r.op AND p.dtype = r.dtype AND p.n = r.n
       AND p.k = r.k AND p.group_size = r.group_size AND p.symmetric = r.symmetric AND p.band = r.band) AS trials
FROM (
    SELECT *, row_number() OVER (
        PARTITION BY device, op, dtype, n, k, group_size, symmetric, band ORDER BY {ORDER}
    ) AS place
    FROM eligible WHERE path <> 'fp16'
) r
WHERE r.place = 1
"""

#: Ids of the trials that rank first: what `best` shows, and the yardstick (fp16) and the fallbacks beside it, so that
#: keeping these keeps every answer that the database gives. One a path and source.
FIRSTS = f"""
SELECT trial_id FROM (
    SELECT trial_id, row_number() OVER (
        PARTITION BY device, op, dtype, scale_dtype, n, k, group_size, symmetric, band, path, source ORDER BY {ORDER}
    ) AS place
    FROM eligible
) WHERE place = 1
"""

# The reader's own facts in place of the table `current`; :sources is a JSON list of source hashes.
_CURRENT = """
SELECT 'driver_version' AS kind, :driver_version AS value WHERE :driver_version IS NOT NULL
UNION ALL SELECT 'nvrtc_version', :nvrtc_version WHERE :nvrtc_version IS NOT NULL
UNION ALL SELECT 'library', :library WHERE :library IS NOT NULL
UNION ALL SELECT 'source_hash', value FROM json_each(:sources)
"""


def create(db: Database) -> None:
    """Make the views `eligible` and `best`, replacing older ones."""
    for name, sql in (("eligible", ELIGIBLE), ("best", BEST)):
        db.execute(f"DROP VIEW IF EXISTS {name}")
        db.execute(f"CREATE VIEW {name} AS {sql}")


def judged(sql: str, *, best: bool = False) -> str:
    """Return `sql` with `eligible` (and `best`) decided by the parameters that `Environment.parameters` gives."""
    named = [f"current(kind, value) AS ({_CURRENT})", f"eligible AS ({ELIGIBLE})"]
    if best:
        named.append(f"best AS ({BEST})")
    return f"WITH {', '.join(named)} {sql}"
