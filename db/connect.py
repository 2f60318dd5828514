"""Opening the file through sqlite-utils: schema brought up to date, how writers wait for each other."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from sqlite_utils import Database

from cupyq.db import migrations, place, schema
from cupyq.db.place import MEMORY, translated
from cupyq.errors import DatabaseError

#: File systems on which SQLite's shared-memory index (WAL) is not shared between machines.
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "fuse.sshfs", "lustre", "beegfs", "gpfs", "ceph"}


def connect(path: Path | str, *, readonly: bool) -> Database:
    """Open the file, bring its schema up to date and return the connection.

    Parameters
    ----------
    path : Path or str
        The SQLite file, or ":memory:". A missing file and its folders are made unless `readonly`.
    readonly : bool
        Never write to the file, nor need to be allowed to. (Where it may, SQLite leaves its -wal and -shm beside a file
        in WAL mode.) A file with an older schema is brought up to date in a copy in memory.

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


def _writer(path: Path) -> Database:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatabaseError(
            f"the folder {path.parent} cannot be made ({error.strerror}); name a file elsewhere with $CUPYQ_DB or --db"
        ) from error
    connection = place.link(path, "mode=rwc")
    try:
        db = _wrap(connection)
        schema.check(db, path)
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
    deadline = time.monotonic() + place.BUSY_SECONDS
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
    db = _wrap(place.read_only(path))
    try:
        version = schema.check(db, path)
        if version == schema.SCHEMA_VERSION:
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
