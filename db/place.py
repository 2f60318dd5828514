"""Where the file is, what SQLite's errors mean, and reading it with Python's sqlite3 alone.

The dispatcher goes this way on a user's first product, so nothing here imports sqlite-utils: that would take longer
than all the rest.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from cupyq.errors import DatabaseError

MEMORY = ":memory:"

#: Seconds that a statement waits for another process's lock before it fails.
BUSY_SECONDS = 60.0


def default_path() -> Path:
    """Return the file that cupyq uses when none is named: `$CUPYQ_DB`, else `tuning.db` in the user's data folder."""
    named = os.environ.get("CUPYQ_DB", "").strip()
    if named:
        return Path(named).expanduser()
    import platformdirs

    return platformdirs.user_data_path("cupyq", appauthor=False) / "tuning.db"


@contextlib.contextmanager
def translated(path: object) -> Iterator[None]:
    """Turn what SQLite raises inside the block into a DatabaseError that names the file and says what to do."""
    try:
        yield
    except sqlite3.Error as error:
        raise DatabaseError(_sentence(path, error)) from error


def _sentence(path: object, error: sqlite3.Error) -> str:
    said = str(error)
    if "not a database" in said:
        return f"{path} is not an SQLite database; it is left as it is (name another file with $CUPYQ_DB or --db)"
    if "malformed" in said or "file is encrypted" in said:
        return f"{path} is damaged ({said}); it is left as it is (restore a copy, or name another file with $CUPYQ_DB)"
    if "locked" in said or "busy" in said:
        return f"{path} is locked by another process since more than {BUSY_SECONDS:.0f} s"
    if "readonly" in said:
        return f"{path} cannot be written ({said}); name a file that can be with $CUPYQ_DB or --db"
    if "unable to open" in said:
        return f"{path} cannot be opened ({said}); name another file with $CUPYQ_DB or --db"
    if "full" in said or "disk I/O" in said:
        return f"{path} cannot take more rows ({said}); nothing was half written"
    return f"{path}: {said}"


def link(path: Path, query: str) -> sqlite3.Connection:
    """Open the file with the parameters of SQLite's URI syntax."""
    # as_uri quotes spaces, '?', '#', '%' and letters outside ASCII, which SQLite would read as URI syntax.
    # A store guards its connection with a lock, so threads may take turns on it.
    return sqlite3.connect(f"{path.as_uri()}?{query}", uri=True, timeout=BUSY_SECONDS, check_same_thread=False)


def read_only(path: Path) -> sqlite3.Connection:
    """Open an existing file for reading, also where neither it nor its folder can be written.

    Raises
    ------
    DatabaseError
        If it is missing.
    """
    if not path.is_file():
        raise DatabaseError(f"there is no database at {path}; `python -m cupyq.tune` makes one")
    connection = link(path, "mode=ro")
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return connection
    except sqlite3.OperationalError as error:
        connection.close()
        if "unable to open" not in str(error) and "readonly" not in str(error):
            raise
    # A file in WAL mode needs two helper files beside it, which a folder without write access refuses. `immutable`
    # reads the file alone: right here, because nobody who is stopped by the same folder can be changing it.
    return link(path, "mode=ro&immutable=1")
