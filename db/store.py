"""The store: one open database file, and everything the tuner and the command lines ask of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cupyq.db import crossing, exchange, housekeeping, place, queries, views
from cupyq.db.environment import Environment
from cupyq.db.queries import Filters
from cupyq.db.reader import DatabaseWarning, open_or_none
from cupyq.db.writer import Writer
from cupyq.errors import ArgumentError, DatabaseError

__all__ = ["DatabaseError", "DatabaseWarning", "Store", "open_or_none", "open_store"]


def open_store(
    path: Path | str | None = None,
    readonly: bool = False,
    *,
    environment: Environment | None = None,
    presets: bool = True,
) -> Store:
    """Open the tuning database.

    Parameters
    ----------
    path : Path or str, optional
        The SQLite file, or ":memory:"; `default_path()` when None. Made, with its folders, unless `readonly`.
    readonly : bool
        Never write: works on read-only files and folders, and brings older schemas up to date in memory only.
    environment : Environment, optional
        What staleness is judged by; `Environment.here()` when None.
    presets : bool
        Let `lookup` answer from the presets that cupyq ships where the file has nothing as good.

    Raises
    ------
    DatabaseError
        If the file is missing (`readonly`), damaged, of something else, or cannot be written. It is left as it is.
    SchemaTooNew
        If a newer cupyq wrote the file.
    """
    path = place.default_path() if path is None else path
    return Store(path, readonly, environment or Environment.here(), presets)


class Store(Writer):
    """An open tuning database. Made by `cupyq.db.open`; a context manager; safe to share between threads.

    A store that is carried into a forked process opens the file anew there.

    Attributes
    ----------
    path : Path or str
        The file, or ":memory:".
    readonly : bool
        Whether writing raises DatabaseError.
    environment : Environment
        What staleness is judged by, and what new trials record.
    """

    def __enter__(self) -> Store:
        return self

    # Questions

    def best(self, filters: Filters | None = None, *, presets: bool = False, **named: Any) -> list[dict[str, Any]]:
        """Return the rows of `best` that pass the filters, staleness judged by this process's environment.

        Parameters
        ----------
        filters : Filters, optional
            Or its fields by name: `store.best(op="w4a16", n=4096)`.
        presets : bool
            Add the rows of the presets that cupyq ships, where the file has none for the same key.

        Returns
        -------
        list of dict
            The columns of the view; `config` as a dict, `symmetric` and `stale` as bool.
        """
        filters = _filters(filters, named)
        with self.reading() as db:
            rows = queries.best(db, filters, self._judged(db))
        if not presets or not self._presets:
            return rows
        from cupyq.db import preset_rows

        return queries.beside(rows, preset_rows.best(filters, self._generates), filters.limit)

    def trials(self, filters: Filters | None = None, **named: Any) -> list[dict[str, Any]]:
        """Return every trial that passes the filters, newest first, with its device and problem."""
        with self.reading() as db:
            return queries.trials(db, _filters(filters, named))

    def stale(self) -> dict[int, str]:
        """Return the ids of stale trials, and what makes each stale."""
        with self.reading() as db:
            sql = views.judged("SELECT trial_id, stale_because FROM eligible WHERE stale")
            return dict(db.execute(sql, self._judged(db)).fetchall())

    def candidates(self, filters: Filters, only_best: bool = False) -> list[dict[str, Any]]:
        """Return complete trials that ran a kernel of ours, oldest first, with `spec` of the device, for checking."""
        with self.reading() as db:
            return queries.candidates(db, filters, self._judged(db) if only_best else None)

    def devices(self) -> list[dict[str, Any]]:
        """Return every device with its numbers of trials, `spec` as a dict."""
        with self.reading() as db:
            return queries.devices(db)

    def crossover(self, filters: Filters | None = None, *, presets: bool = False, **named: Any) -> list[dict[str, Any]]:
        """Return, per device and weights' shape, the band from which others beat the fused kernel; see `crossing`.

        With `presets`, also from the presets that cupyq ships, where the file has no row for the same key.
        """
        filters = _filters(filters, named)
        with self.reading() as db:
            rows = crossing.crossover(db, filters, self._judged(db))
        if not presets or not self._presets:
            return rows
        from cupyq.db import preset_rows

        pairs = crossing.of_presets(filters, preset_rows.curves(filters, self._generates))
        return queries.beside(rows, crossing.crossings(pairs), filters.limit, crossing.KEY)

    def pareto(self, filters: Filters | None = None, **named: Any) -> list[dict[str, Any]]:
        """Return, per device, shape and band, the group sizes that no other beats in both time and error."""
        with self.reading() as db:
            return queries.pareto(db, _filters(filters, named), self._judged(db))

    # Files

    def export(self, filters: Filters | None = None, *, best: bool = False, **named: Any) -> Iterator[dict[str, Any]]:
        """Yield each finished trial with its device, problem and study as one JSON-ready dict; see `exchange`."""
        with self.reading() as db:
            chosen = _filters(filters, named)
            judged = self._judged(db) if best else None
            yield from exchange.export(db, chosen, judged)

    def load(self, lines: Iterable[Mapping[str, Any] | str], origin: str | None = None) -> exchange.Report:
        """Add what `export` gave, all or nothing; trials that are here already are left alone."""
        with self.writing() as db:
            report = exchange.load(self, db, lines, origin)
            self.declare()
            return report

    def merge(self, other: Store | Path | str) -> exchange.Report:
        """Add the trials of another database; merging twice adds nothing."""
        if isinstance(other, Store):
            return self.load(other.export(), origin=str(other.path))
        with Store(Path(other), True, self.environment, presets=False) as opened:
            return self.load(opened.export(), origin=str(other))

    def conflicts(self) -> list[dict[str, Any]]:
        """Return what merging found to differ: trial uid, origin, found_at, and `differs`: column -> [ours, theirs]."""
        with self.reading() as db:
            return queries.conflicts(db)

    def prune(self, what: housekeeping.Prune) -> int:
        """Delete trials and return how many, or, for a dry run, would be."""
        with contextlib.ExitStack() as stack:
            db = stack.enter_context(self.reading() if what.dry_run else self.writing())
            return housekeeping.prune(db, what, self._judged(db))

    def vacuum(self) -> None:
        """Give the space of deleted rows back to the file system."""
        with self.reading() as db:
            housekeeping.vacuum(db)


def _filters(filters: Filters | None, named: Mapping[str, Any]) -> Filters:
    if filters is not None and named:
        raise ArgumentError("filters and fields by name were both given; one of them is accepted")
    return filters if filters is not None else Filters(**named)
