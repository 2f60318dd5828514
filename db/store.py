"""The store: one open database file, and everything the tuner, the dispatcher and the command line ask of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from cupyq.db import connect, exchange, housekeeping, identity, lookup, migrations, queries, tables
from cupyq.db import presets as shipped
from cupyq.db.environment import Environment
from cupyq.db.queries import Filters
from cupyq.db.records import Found, Trial, trial_row
from cupyq.db.values import choice, now, number, text
from cupyq.errors import ArgumentError, DatabaseError

STUDY_STATES = ("running", "finished", "interrupted", "failed")


class DatabaseWarning(UserWarning):
    """The tuning database cannot be used, and cupyq goes on without it."""


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
    path = connect.default_path() if path is None else path
    return Store(path, readonly, environment or Environment.here(), presets)


_warned: set[str] = set()


def open_or_none(path: Path | str | None = None, *, environment: Environment | None = None) -> Store | None:
    """Open the database for reading; None when there is none, or, with one warning a file, when it cannot be read.

    A user's matmul must not fail because of a damaged tuning database: the caller goes on with its defaults.
    """
    path = connect.default_path() if path is None else Path(path)
    try:
        if not path.exists():
            return None
        return open_store(path, readonly=True, environment=environment)
    except (DatabaseError, OSError) as error:
        if str(path) not in _warned:
            _warned.add(str(path))
            warnings.warn(f"{error}; cupyq uses its default kernels", DatabaseWarning, stacklevel=2)
        return None


class Store:
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

    def __init__(self, path: Path | str, readonly: bool, environment: Environment, presets: bool = True) -> None:
        self.path = path
        self.readonly = readonly
        self.environment = environment
        self._abandoned: list[Database] = []
        self._generated: dict[str, bool] = {}  # source hash -> the library here generates it
        self._declared = False
        self._presets: dict[str, Store | None] | None = {} if presets else None
        self._open()

    def _open(self) -> None:
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._db = connect.connect(self.path, readonly=self.readonly)

    def close(self) -> None:
        """Close the file; SQLite folds the write-ahead log into it when nobody else has it open."""
        self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Store {self.path}{' (read-only)' if self.readonly else ''}>"

    @contextlib.contextmanager
    def reading(self) -> Iterator[Database]:
        """Give the block the connection, alone among threads, with SQLite's errors as DatabaseError."""
        if os.getpid() != self._pid and str(self.path) != connect.MEMORY:
            # SQLite connections do not survive a fork, and not even closing this one here is allowed.
            self._abandoned.append(self._db)
            self._open()
        with self._lock, connect.translated(self.path):
            yield self._db

    @contextlib.contextmanager
    def writing(self) -> Iterator[Database]:
        """Give the block the connection inside one transaction that holds the write lock; may be nested."""
        if self.readonly:
            raise DatabaseError(f"{self.path} is open read-only; open it with readonly=False to write")
        try:
            with self.reading() as db, connect.writing(db):
                migrations.still_known(db, self.path)
                yield db
        except BaseException:
            self._declared = False  # what was declared may have been rolled back
            raise

    # Identity

    def device_id(self, spec: Any) -> int:
        """Return the id of a DeviceSpec's row, adding the row when its identity is new."""
        row = identity.device_row(spec)
        with self.reading() as db:
            found = tables.row_id(db, "device", {name: row[name] for name in identity.DEVICE_KEY})
            return self.add_device_row(row) if found is None else found

    def add_device_row(self, row: Mapping[str, Any]) -> int:
        """Return the id of a device given as its columns (`identity.device_row`), adding it when it is new."""
        row = {**row, "spec": row["spec"] if isinstance(row["spec"], str) else text(row["spec"])}
        key = {name: row[name] for name in identity.DEVICE_KEY}
        with self.writing() as db:
            found = tables.row_id(db, "device", key)  # another process may have been faster
            if found is not None:
                return found
            taken = {label for (label,) in db.execute("SELECT label FROM device")}
            label = identity.label(row["name"], row, taken)
            return tables.insert(db, "device", {**row, "label": label, "first_seen": now()})

    def problem_id(self, problem: Any) -> int:
        """Return the id of a Problem's row, adding the row when any of its fields is new."""
        row = identity.problem_row(problem)
        with self.reading() as db:
            found = tables.row_id(db, "problem", {name: row[name] for name in identity.PROBLEM_KEY})
            if found is not None:
                return found
            with self.writing():
                found = tables.row_id(db, "problem", {name: row[name] for name in identity.PROBLEM_KEY})
                return tables.insert(db, "problem", row) if found is None else found

    # Studies

    def start_study(
        self,
        name: str,
        device: Any = None,
        problem: Any = None,
        *,
        weights: str | None = None,
        settings: Mapping[str, Any] | None = None,
        resume: bool = True,
    ) -> int:
        """Start a study, or go on with the newest of the same name, device and problem, and return its id.

        Trials that the study left running when it was killed are marked failed, with that as their reason.

        Parameters
        ----------
        name : str
            For people and for resuming.
        device, problem : DeviceSpec, kernels.Problem, optional
            What it tunes.
        weights : str, optional
            Whose weights the quantization error is taken on; Pareto fronts are drawn per weights.
        settings : dict, optional
            Sampler, seed, budget and the like; kept as JSON.
        resume : bool
            False starts a new one whatever there is.
        """
        with self.writing() as db:
            key = {
                "name": str(name),
                "device_id": None if device is None else self.device_id(device),
                "problem_id": None if problem is None else self.problem_id(problem),
                "weights": weights,
                "origin": None,
            }
            study = tables.row_id(db, "study", key) if resume else None
            if study is None:
                fresh = {"uid": uuid.uuid4().hex, "started_at": now(), "cupyq_version": self.environment.cupyq_version}
                return tables.insert(
                    db, "study", {**key, **fresh, "state": "running", "settings": text(settings or {})}
                )
            db.execute("UPDATE study SET state = 'running', reason = NULL, finished_at = NULL WHERE id = ?", [study])
            db.execute(
                "UPDATE trial SET state = 'failed', reason = 'the tuner was stopped while this trial ran', "
                "finished_at = ? WHERE study_id = ? AND state = 'running'",
                [now(), study],
            )
            return study

    def finish_study(self, study: int, state: str = "finished", reason: str | None = None) -> None:
        """Mark a study finished, interrupted or failed."""
        row = {"state": choice("state", state, STUDY_STATES), "reason": reason, "finished_at": now()}
        self._update("study", study, row)

    def studies(self) -> list[dict[str, Any]]:
        """Return every study, oldest first, `settings` as a dict."""
        with self.reading() as db:
            return tables.studies(db)

    def configs_tried(self, study: int) -> list[dict[str, Any]]:
        """Return path, config, state, reason and time_us of each trial of a study, in order, running ones included.

        Whoever resumes the study tries none of these again.
        """
        with self.reading() as db:
            return tables.configs_tried(db, study)

    # Trials

    def record(self, trial: Trial) -> int:
        """Write one trial and return its id.

        What is None among its versions and its source hash is filled in from the store's environment. A time that
        is not finite and positive makes the trial failed.

        Raises
        ------
        ArgumentError
            If a field holds what is not accepted.
        DatabaseError
            If it cannot be written; then nothing of it is.
        """
        problem = identity.problem_row(trial.problem)
        row = trial_row(trial, self.environment, identity.problem_fields(problem))
        row["finished_at"] = row["finished_at"] or (None if row["state"] == "running" else now())
        with self.writing() as db:
            row["device_id"] = self.device_id(trial.device)
            row["problem_id"] = self.problem_id(trial.problem)
            row["study_id"] = None if trial.study is None else int(trial.study)
            trial_id = tables.insert(db, "trial", row)
            self._declare(row, identity.problem_fields(problem))
            return trial_id

    def add_trial(self, **fields: Any) -> int:
        """Write one trial given as the fields of `Trial`, and return its id."""
        return self.record(Trial(**fields))

    def start_trial(self, trial: Trial) -> int:
        """Write a trial as running before it runs, so that a crash leaves a trace, and return its id."""
        return self.record(dataclasses.replace(trial, state="running", started_at=trial.started_at or now()))

    def finish_trial(self, trial_id: int, trial: Trial) -> None:
        """Replace what `start_trial` wrote by what came of it."""
        problem = identity.problem_row(trial.problem)
        row = trial_row(trial, self.environment, identity.problem_fields(problem))
        row["finished_at"] = row["finished_at"] or now()
        for kept in ("uid", *(["started_at"] if row["started_at"] is None else [])):
            del row[kept]
        with self.writing():
            self._update("trial", trial_id, row)
            self._declare(row, identity.problem_fields(problem))

    def choose(self, trial_id: int) -> None:
        """Mark a trial as its study's winner: among the rows of its problem it ranks before unchosen ones.

        Other trials of the same device, problem and source stop being chosen.
        """
        with self.writing() as db:
            db.execute(
                "UPDATE trial SET chosen = 0 WHERE chosen = 1 AND (device_id, problem_id, source) = "
                "(SELECT device_id, problem_id, source FROM trial WHERE id = ?)",
                [trial_id],
            )
            self._update("trial", trial_id, {"chosen": 1})

    def set_verified(self, trial_id: int, ok: bool, error: float | None = None, reason: str | None = None) -> None:
        """Store the outcome of checking a trial's output again; one that fails is never used any more."""
        row: dict[str, Any] = {"verified": int(ok), "error": number("error", error)}
        if not ok:
            row |= {"state": "failed", "chosen": 0, "reason": reason or "its output differs from the reference"}
        self._update("trial", trial_id, row)

    def _update(self, table: str, row_id: int, row: Mapping[str, Any]) -> None:
        with self.writing() as db:
            setting = ", ".join(f"{name} = :{name}" for name in row)
            if db.execute(f"UPDATE {table} SET {setting} WHERE id = :row_id", {**row, "row_id": row_id}).rowcount != 1:
                raise ArgumentError(f"{table} is {row_id}; the database has none of that id")

    # Staleness

    def declare(self) -> None:
        """Write what this process runs into table `current`, by which any SQLite tool sees `best.stale` decided.

        The first trial that a store records, and importing and merging, do this by themselves.
        """
        with self.writing() as db:
            tables.write_current(db, self._judged(db))
            self._declared = True

    def _declare(self, row: Mapping[str, Any], problem: Mapping[str, Any]) -> None:
        """Keep table `current` right after one trial was written.

        Where two versions of cupyq write by turns, the one that began last is the current one: they must not take
        the table from each other at every trial.
        """
        with self.reading() as db:
            if not self._declared:
                self.declare()
                return
            mine = tables.is_current(db, self.environment.parameters("[]"))
            source_hash = row["source_hash"]
            if mine and source_hash and self._generates(source_hash, json.loads(row["config"]), problem):
                db.execute("INSERT OR IGNORE INTO current VALUES ('source_hash', ?)", [source_hash])

    def _generates(self, source_hash: str, config: Mapping[str, Any], problem: Mapping[str, Any]) -> bool:
        """Return whether this process's library still generates the source of that hash; asked once a hash."""
        generate = self.environment.source_hash
        if source_hash not in self._generated:
            self._generated[source_hash] = generate is not None and generate(config, problem) == source_hash
        return self._generated[source_hash]

    def _judged(self, db: Database) -> dict[str, str | None]:
        """Return the parameters by which the queries judge staleness: this process's facts, not the file's."""
        library = self.environment.library
        if library is not None and tables.declared(db, "library") == [library]:
            # The same library has vouched for these already, in this process or another.
            self._generated.update(dict.fromkeys(tables.declared(db, "source_hash"), True))
        stored = tables.source_hashes(db)
        for source_hash in stored - self._generated.keys():
            config, problem = tables.generated_by(db, source_hash)
            self._generates(source_hash, config, identity.problem_fields(problem))
        return self.environment.parameters(text(sorted(hash_ for hash_ in stored if self._generated[hash_])))

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
        if not presets or self._presets is None:
            return rows
        stores = [store for name in shipped.names() if (store := self._preset(name)) is not None]
        return queries.beside(rows, [row for store in stores for row in store.best(filters)], filters.limit)

    def _preset(self, name: str) -> Store | None:
        if self._presets is None:
            return None
        with self._lock:
            if name not in self._presets:
                self._presets[name] = shipped.read(name, self.environment)
            return self._presets[name]

    def trials(self, filters: Filters | None = None, **named: Any) -> list[dict[str, Any]]:
        """Return every trial that passes the filters, newest first, with its device and problem."""
        with self.reading() as db:
            return queries.trials(db, _filters(filters, named))

    def candidates(self, filters: Filters, only_best: bool = False) -> list[dict[str, Any]]:
        """Return complete trials that ran a kernel of ours, oldest first, with `spec` of the device, for checking."""
        with self.reading() as db:
            return queries.candidates(db, filters, self._judged(db) if only_best else None)

    def devices(self) -> list[dict[str, Any]]:
        """Return every device with its numbers of trials, `spec` as a dict."""
        with self.reading() as db:
            return queries.devices(db)

    def crossover(self, filters: Filters | None = None, **named: Any) -> list[dict[str, Any]]:
        """Return, per device and weights' shape, the band from which another path beats the fused kernel."""
        with self.reading() as db:
            return queries.crossover(db, _filters(filters, named), self._judged(db))

    def pareto(self, filters: Filters | None = None, **named: Any) -> list[dict[str, Any]]:
        """Return, per device, shape and band, the group sizes that no other beats in both time and error."""
        with self.reading() as db:
            return queries.pareto(db, _filters(filters, named), self._judged(db))

    def lookup(
        self, device: Any, problem: Any, band: int | None = None, *, paths: Iterable[str] = ("fused", "dequant")
    ) -> Found | None:
        """Return the best row for exactly this device, problem and band, or None.

        Measured rows come before predicted ones, rows that are not stale before stale ones. A preset answers where
        the file has no row, or only a stale prediction. For a card of this
        machine, predictions made for its entry in the catalogue count as its own.

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
        with self.reading() as db:
            key = identity.problem_row(problem)
            paths = tuple(paths)
            found = lookup.exact(db, device, key, band or key["band"], paths, self._judged(db))
        if found is None or (found.source == "predicted" and found.stale):
            store = self._preset(shipped.name_of(device))
            preset = None if store is None else store.lookup(device, problem, band, paths=paths)
            if preset is not None and (found is None or not preset.stale):
                return dataclasses.replace(preset, preset=True)
        return found

    def nearest(
        self, device: Any, problem: Any, band: int | None = None, *, paths: Iterable[str] = ("fused", "dequant"),
        limit: int = 8,
    ) -> list[Found]:  # fmt: skip
        """Return rows of other shapes or bands for the same device, op, types and groups, nearest first.

        Measured and not stale only: a guess from afar is no better than the predictor. The config of each was legal
        for its own shape; check it against this one.
        """
        with self.reading() as db:
            key = identity.problem_row(problem)
            return lookup.nearest(db, device, key, band or key["band"], tuple(paths), limit, self._judged(db))

    def paths(self, device: Any, problem: Any, band: int | None = None) -> dict[str, Found]:
        """Return the best row of each path that has one: what fused, dequant and fp16 cost here, side by side."""
        found = {path: self.lookup(device, problem, band, paths=(path,)) for path in ("fused", "dequant", "fp16")}
        return {path: row for path, row in found.items() if row is not None}

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
