"""Opening the file: where it is, how writers wait for each other, how readers get by without write access."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import platformdirs
from sqlite_utils import Database

from cupyq.db import migrations
from cupyq.errors import DatabaseError

MEMORY = ":memory:"

#: Seconds that a statement waits for another process's lock before it fails.
BUSY_SECONDS = 60.0

#: File systems on which SQLite's shared-memory index (WAL) is not shared between machines.
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "fuse.sshfs", "lustre", "beegfs", "gpfs", "ceph"}


def default_path() -> Path:
    """Return the file that cupyq uses when none is named: `$CUPYQ_DB`, else `tuning.db` in the user's data folder."""
    named = os.environ.get("CUPYQ_DB", "").strip()
    if named:
        return Path(named).expanduser()
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


def connect(path: Path | str, *, readonly: bool) -> Database:
    """Open the file, bring its schema up to date and return the connection.

    Parameters
    ----------
    path : Path or str
        The SQLite file, or ":memory:". A missing file and its folders are made unless `readonly`.
    readonly : bool
        Touch nothing: neither the file, nor its folder. A file with an older schema is brought up to date in a
        copy in memory.

    Raises
    ------
    DatabaseError
        If the file is missing (`readonly`), damaged, of something else, or cannot be written.
    SchemaTooNew
        If a newer cupyq wrote it.
    """
    with translated(path):
        if str(path) == MEMORY:
            db = _wrap(sqlite3.connect(MEMORY, check_same_thread=False))
            migrations.migrate(db, path)
            return db
        path = Path(path).expanduser().absolute()
        return _reader(path) if readonly else _writer(path)


def _wrap(connection: sqlite3.Connection) -> Database:
    # Plugins of sqlite-utils are the user's own business; a matmul must not run them.
    db = Database(connection, execute_plugins=False, recursive_triggers=False)
    db.execute("PRAGMA foreign_keys = ON")
    return db


def _link(path: Path, query: str) -> sqlite3.Connection:
    # as_uri quotes spaces, '?', '#', '%' and letters outside ASCII, which SQLite would read as URI syntax.
    # One Store guards its connection with a lock, so threads may take turns on it.
    return sqlite3.connect(f"{path.as_uri()}?{query}", uri=True, timeout=BUSY_SECONDS, check_same_thread=False)


def _writer(path: Path) -> Database:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatabaseError(
            f"the folder {path.parent} cannot be made ({error.strerror}); name a file elsewhere with $CUPYQ_DB or --db"
        ) from error
    connection = _link(path, "mode=rwc")
    try:
        db = _wrap(connection)
        migrations.check(db, path)
        _use_wal(db, path)
        # A killed process loses nothing; a power cut may lose the last rows but never damages the file.
        db.execute("PRAGMA synchronous = NORMAL")
        with writing(db):
            migrations.migrate(db, path)
    except BaseException:
        connection.close()
        raise
    return db


def _use_wal(db: Database, path: Path) -> None:
    """Switch to write-ahead logging, so that readers never wait; on network file systems keep the rollback journal."""
    if _file_system(path) in _NETWORK:
        return
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            db.enable_wal()
            return
        except sqlite3.OperationalError as error:
            # Switching needs the file for itself, and SQLite does not wait for that with its busy timeout.
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _file_system(path: Path) -> str:
    """Return the type of the file system that holds `path`, as Linux names it; "" where that cannot be told."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    folder, kind, longest = path.parent.resolve(), "", -1
    for line in mounts:
        point, this_kind = line.split(" ")[1:3]
        point = point.replace("\\040", " ")
        if len(point) > longest and folder.is_relative_to(point):
            kind, longest = this_kind, len(point)
    return kind


def _reader(path: Path) -> Database:
    if not path.is_file():
        raise DatabaseError(f"there is no database at {path}; `python -m cupyq.tune` makes one")
    db = _wrap(_read_only(path))
    try:
        version = migrations.check(db, path)
        if version == migrations.SCHEMA_VERSION:
            return db
        copy = sqlite3.connect(MEMORY, check_same_thread=False)
        db.conn.backup(copy)
    except BaseException:
        db.close()
        raise
    db.close()
    modern = _wrap(copy)
    migrations.migrate(modern, path)
    modern.execute("PRAGMA query_only = ON")
    return modern


def _read_only(path: Path) -> sqlite3.Connection:
    connection = _link(path, "mode=ro")
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return connection
    except sqlite3.OperationalError as error:
        connection.close()
        if "unable to open" not in str(error) and "readonly" not in str(error):
            raise
    # A file in WAL mode needs two helper files beside it, which a folder without write access refuses. `immutable`
    # reads the file alone: right here, because nobody who is stopped by the same folder can be changing it.
    return _link(path, "mode=ro&immutable=1")


@contextlib.contextmanager
def writing(db: Database) -> Iterator[Database]:
    """Run the block as one transaction that takes the write lock first; nested blocks are savepoints.

    A transaction that begins by reading and writes later fails at once when another process wrote in between,
    whatever the busy timeout; taking the lock first makes it wait instead.
    """
    if db.conn.in_transaction:
        with db.atomic():
            yield db
        return
    db.conn.execute("BEGIN IMMEDIATE")
    try:
        with db.atomic():
            yield db
        db.conn.execute("COMMIT")
    except BaseException:
        # A rollback that fails too (the disk is gone) must not hide the first error.
        with contextlib.suppress(sqlite3.Error):
            db.rollback()
        raise
