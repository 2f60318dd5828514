"""Writing: devices and problems, studies, trials, and what the file says is current. Each call is one transaction."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from cupyq.db import connect, identity, schema, tables
from cupyq.db.environment import Environment
from cupyq.db.reader import Reader
from cupyq.db.records import Trial, trial_row
from cupyq.db.values import choice, now, number, text
from cupyq.errors import ArgumentError, DatabaseError

STUDY_STATES = ("running", "finished", "interrupted", "failed")


class Writer(Reader):
    """A tuning database that trials are written to, through sqlite-utils.

    Parameters
    ----------
    path : Path or str
        The file, or ":memory:".
    readonly : bool
        Writing raises DatabaseError.
    environment : Environment
        What staleness is judged by, and what new trials record.
    presets : bool
        See `Reader`.
    """

    def __init__(self, path: Path | str, readonly: bool, environment: Environment, presets: bool = True) -> None:
        self.readonly = readonly
        self._declared = False
        super().__init__(path, environment, presets)

    def _connect(self) -> Database:
        return connect.connect(self.path, readonly=self.readonly)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path}{' (read-only)' if self.readonly else ''}>"

    @contextlib.contextmanager
    def writing(self) -> Iterator[Database]:
        """Give the block the connection inside one transaction that holds the write lock; may be nested."""
        if self.readonly:
            raise DatabaseError(f"{self.path} is open read-only; open it with readonly=False to write")
        try:
            with self.reading() as db, connect.writing(db):
                schema.still_known(db, self.path)
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
