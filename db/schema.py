"""Which schema a file has, asked before anything else of it: a newer one, and a stranger's file, are refused."""

from __future__ import annotations

from typing import Any, Protocol

from cupyq.errors import DatabaseError, SchemaTooNew

#: Steps of `migrations`; a file says in `meta` (and in `PRAGMA user_version`) how many it has been through.
SCHEMA_VERSION = 3


class Executes(Protocol):
    """A connection of sqlite3, or sqlite-utils' wrapper of one."""

    def execute(self, sql: str, parameters: Any = ..., /) -> Any:
        """Run one statement and return its cursor."""
        ...


def check(db: Executes, path: object) -> int:
    """Return the file's schema version, 0 for an empty file, having refused what is not ours or newer than we are."""
    version = db.execute("PRAGMA user_version").fetchone()[0]
    names = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not names:
        return 0
    if not {"meta", "_sqlite_migrations"} <= names:
        known = ", ".join(sorted(names)[:4])
        raise DatabaseError(f"{path} is an SQLite file of something else (its tables: {known}); it is left as it is")
    row = db.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
    version = max(version, int(row[0]) if row else 0)
    if version > SCHEMA_VERSION:
        raise SchemaTooNew(
            f"{path} has schema {version}, this cupyq knows up to {SCHEMA_VERSION}: update cupyq, "
            "or name another file with $CUPYQ_DB or --db"
        )
    return version


def still_known(db: Executes, path: object) -> None:
    """Raise SchemaTooNew when another process has moved the open file to a newer schema."""
    if db.execute("PRAGMA user_version").fetchone()[0] > SCHEMA_VERSION:
        check(db, path)
