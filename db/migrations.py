"""The schema and its history: forward only, each step one transaction, a newer file is refused."""

from __future__ import annotations

from sqlite_utils import Database, Migrations

from cupyq.db import views
from cupyq.db.schema import SCHEMA_VERSION, check
from cupyq.db.values import now

migrations = Migrations("cupyq")

_TABLES = """
CREATE TABLE meta (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
);
CREATE TABLE current (
    -- What the last writer of this file ran: driver_version, nvrtc_version, library, and one source_hash per
    -- kernel source that its library still generates. `best` decides `stale` against this.
    kind TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (kind, value)
);
CREATE TABLE device (
    id INTEGER PRIMARY KEY,
    label TEXT NOT NULL UNIQUE,          -- the name, made unique: two identities may share a name
    name TEXT NOT NULL,                  -- for people; no part of the identity
    title TEXT,
    compute_capability TEXT NOT NULL,
    sms INTEGER NOT NULL,
    l2_bytes INTEGER NOT NULL,
    shared_per_sm INTEGER NOT NULL,      -- bytes
    memory_gib INTEGER NOT NULL,         -- rounded: drivers reserve a little more or less of it
    dram_gbps INTEGER NOT NULL,          -- rounded, 1e9 bytes per second
    spec TEXT NOT NULL,                  -- JSON, everything known of the device
    first_seen TEXT NOT NULL,
    UNIQUE (compute_capability, sms, l2_bytes, shared_per_sm, memory_gib, dram_gbps)
);
CREATE TABLE problem (
    id INTEGER PRIMARY KEY,
    op TEXT NOT NULL,
    m INTEGER NOT NULL CHECK (typeof(m) = 'integer' AND m >= 1),
    n INTEGER NOT NULL CHECK (typeof(n) = 'integer'),
    k INTEGER NOT NULL CHECK (typeof(k) = 'integer'),
    group_size INTEGER NOT NULL CHECK (typeof(group_size) = 'integer'),
    symmetric INTEGER NOT NULL CHECK (symmetric IN (0, 1)),
    dtype TEXT NOT NULL,
    scale_dtype TEXT NOT NULL,
    band INTEGER NOT NULL,               -- the end of the band that holds m
    UNIQUE (op, m, n, k, group_size, symmetric, dtype, scale_dtype)
);
CREATE TABLE study (
    id INTEGER PRIMARY KEY,
    uid TEXT NOT NULL UNIQUE,            -- the same study in every file it is merged into
    name TEXT NOT NULL,
    device_id INTEGER REFERENCES device(id),
    problem_id INTEGER REFERENCES problem(id),
    state TEXT NOT NULL CHECK (state IN ('running', 'finished', 'interrupted', 'failed')),
    reason TEXT,
    weights TEXT,                        -- whose weights quantization_error was taken on
    settings TEXT NOT NULL DEFAULT '{}', -- JSON: sampler, seed, budget, ...
    cupyq_version TEXT,
    origin TEXT,                         -- the file it was merged from; NULL when recorded here
    started_at TEXT NOT NULL,
    finished_at TEXT
);
CREATE TABLE trial (
    id INTEGER PRIMARY KEY,
    uid TEXT NOT NULL UNIQUE,            -- the same trial in every file it is merged into
    study_id INTEGER REFERENCES study(id),
    device_id INTEGER NOT NULL REFERENCES device(id),
    problem_id INTEGER NOT NULL REFERENCES problem(id),
    path TEXT NOT NULL CHECK (path IN ('fused', 'dequant', 'fp16')),
    config TEXT NOT NULL,                -- JSON with sorted keys
    phase TEXT NOT NULL CHECK (phase IN ('search', 'final', 'check')),
    state TEXT NOT NULL CHECK (state IN ('running', 'complete', 'pruned', 'failed')),
    reason TEXT,                         -- why it was pruned, failed or has no time
    source TEXT NOT NULL CHECK (source IN ('measured', 'predicted')),
    verified INTEGER NOT NULL DEFAULT 0 CHECK (verified IN (0, 1)),
    chosen INTEGER NOT NULL DEFAULT 0 CHECK (chosen IN (0, 1)),
    time_us REAL CHECK (time_us IS NULL OR (typeof(time_us) = 'real' AND time_us > 0 AND time_us < 9e999)),
    time_low_us REAL,                    -- bootstrap interval of the median
    time_high_us REAL,
    samples TEXT,                        -- JSON, raw times in microseconds
    error REAL,                          -- largest error against the float64 reference
    quantization_error REAL,             -- on the weights that the study names
    cache TEXT CHECK (cache IN ('cold', 'warm')),
    launch TEXT CHECK (launch IN ('graph', 'eager')),
    source_hash TEXT,                    -- of the generated kernel source
    nvrtc_version TEXT,
    driver_version TEXT,
    cupy_version TEXT,
    cupyq_version TEXT,
    registers INTEGER,
    spill_bytes INTEGER,
    shared_bytes INTEGER,
    clock_mhz REAL,
    power_w REAL,
    temperature_c REAL,
    parts TEXT,                          -- JSON, what a predicted time is made of, in microseconds
    origin TEXT,                         -- the file it was merged from; NULL when recorded here
    started_at TEXT,
    finished_at TEXT
);
CREATE INDEX trial_problem ON trial (problem_id, device_id);
CREATE INDEX trial_study ON trial (study_id);
CREATE INDEX trial_source ON trial (source_hash);
CREATE INDEX problem_shape ON problem (n, k, band);
"""


@migrations()
def tables(db: Database) -> None:
    """Lay the tables."""
    db.executescript(_TABLES)


@migrations()
def ranking(db: Database) -> None:
    """Lay the views `eligible` and `best`."""
    views.create(db)


@migrations()
def conflicts(db: Database) -> None:
    """Lay the table of what merging found to differ."""
    db.executescript("""
CREATE TABLE conflict (
    -- A trial that came with other content than ours has. Ours stays; this is what the other file said.
    id INTEGER PRIMARY KEY,
    trial_id INTEGER NOT NULL REFERENCES trial(id) ON DELETE CASCADE,
    origin TEXT,                         -- the file it came from
    differs TEXT NOT NULL,               -- JSON: column -> [ours, theirs], when they met
    found_at TEXT NOT NULL,
    UNIQUE (trial_id, differs)
);
""")


def migrate(db: Database, path: object) -> None:
    """Apply the steps that the file has not been through."""
    if check(db, path) == SCHEMA_VERSION:
        return
    with db.atomic():
        migrations.apply(db)
        db.execute("INSERT OR IGNORE INTO meta VALUES ('created_at', ?)", [now()])
        db.execute("INSERT OR REPLACE INTO meta VALUES ('schema_version', ?)", [str(SCHEMA_VERSION)])
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
