"""Looking up one problem, as the dispatcher does on a user's product: by sqlite3 alone, in a few milliseconds."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cupyq.db import lookup, place, presets, schema, staleness
from cupyq.db.environment import Environment
from cupyq.db.found import Found
from cupyq.errors import DatabaseError


class DatabaseWarning(UserWarning):
    """The tuning database cannot be used, and cupyq goes on without it."""


_warned: set[str] = set()


def open_or_none(path: Path | str | None = None, *, environment: Environment | None = None) -> Reader | None:
    """Open the database for looking up; None when there is none, or, with one warning a file, when it cannot be read.

    A user's matmul must not fail because of a damaged tuning database: the caller goes on with its defaults.
    """
    path = place.default_path() if path is None else Path(path)
    try:
        if not path.exists():
            return None
        return Reader(path, environment or Environment.here())
    except (DatabaseError, OSError) as error:
        if str(path) not in _warned:
            _warned.add(str(path))
            warnings.warn(f"{error}; cupyq uses its default kernels", DatabaseWarning, stacklevel=2)
        return None


class Reader:
    """A tuning database that is only asked about problems; a context manager; safe to share between threads.

    A reader that is carried into a forked process opens the file anew there.

    Parameters
    ----------
    path : Path or str
        The file, or ":memory:".
    environment : Environment
        What staleness is judged by.
    presets : bool
        Let the presets that cupyq ships answer where the file has nothing as good.
    """

    def __init__(self, path: Path | str, environment: Environment, presets: bool = True) -> None:
        self.path = path
        self.environment = environment
        self._abandoned: list[Any] = []
        self._generated: dict[str, bool] = {}  # source hash -> the library here generates it
        self._presets = presets
        self._open()

    def _open(self) -> None:
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._db: Any = self._connect()

    def _connect(self) -> Any:
        """Return the connection."""
        path = Path(self.path).expanduser().absolute()
        with place.translated(path):
            connection = place.read_only(path)
            try:
                if schema.check(connection, path) == schema.SCHEMA_VERSION:
                    return connection
            except BaseException:
                connection.close()
                raise
            connection.close()
        from cupyq.db import connect  # an older file is brought up to date in memory, which takes sqlite-utils

        return connect.connect(path, readonly=True)

    def close(self) -> None:
        """Close the file; SQLite folds the write-ahead log into it when nobody else has it open."""
        self._db.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path}>"

    @contextlib.contextmanager
    def reading(self) -> Iterator[Any]:
        """Give the block the connection, alone among threads, with SQLite's errors as DatabaseError."""
        if os.getpid() != self._pid and str(self.path) != place.MEMORY:
            # SQLite connections do not survive a fork, and not even closing this one here is allowed.
            self._abandoned.append(self._db)
            self._open()
        with self._lock, place.translated(self.path):
            yield self._db

    def lookup(
        self, device: Any, problem: Any, band: int | None = None, *, paths: Iterable[str] = ("fused", "dequant")
    ) -> Found | None:
        """Return the best row for exactly this device, problem and band, or None.

        Measured rows come before predicted ones, rows that are not stale before stale ones. A preset answers where
        the file has no row, or only a stale prediction. For a card of this machine, predictions made for its entry in
        the catalogue count as its own.

        Parameters
        ----------
        device : DeviceSpec
        problem : kernels.Problem
            Its m gives the band, unless `band` does.
        band : int, optional
            End of the band.
        paths : iterable of str
            Which paths may answer; "fp16" is the yardstick and has to be asked for.
        """
        asked = lookup.Question(device, problem, band, paths := tuple(paths))
        with self.reading() as db:
            found = lookup.exact(db, asked, self._judge)
        if self._presets and (found is None or (found.source == "predicted" and found.stale)):
            preset = presets.lookup(device, problem, asked.place[2], paths, self._generates)
            if preset is not None and (found is None or not preset.stale):
                return preset
        return found

    def nearest(
        self, device: Any, problem: Any, band: int | None = None, *, paths: Iterable[str] = ("fused", "dequant"),
        limit: int = 8,
    ) -> list[Found]:  # fmt: skip
        """Return rows of other shapes or bands for the same device, op, types and groups, nearest first.

        Measured and not stale only: a guess from afar is no better than the predictor. The config of each was legal
        for its own shape; check it against this one.
        """
        asked = lookup.Question(device, problem, band, paths)
        with self.reading() as db:
            return lookup.nearest(db, asked, limit, self._judge)

    def paths(self, device: Any, problem: Any, band: int | None = None) -> dict[str, Found]:
        """Return the best row of each path that has one: what fused, dequant and fp16 cost here, side by side."""
        found = {path: self.lookup(device, problem, band, paths=(path,)) for path in ("fused", "dequant", "fp16")}
        return {path: row for path, row in found.items() if row is not None}

    def _judge(self, row: Mapping[str, Any]) -> str:
        return staleness.because(row, self.environment, self._generates)

    def _generates(self, source_hash: str, config: Mapping[str, Any], problem: Mapping[str, Any]) -> bool:
        """Return whether this process's library still generates the source of that hash; asked once a hash."""
        generate = self.environment.source_hash
        if source_hash not in self._generated:
            self._generated[source_hash] = generate is not None and generate(config, problem) == source_hash
        return self._generated[source_hash]
