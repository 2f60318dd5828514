"""One study on several machines: who tries what is settled in Optuna's storage on PostgreSQL.

A worker claims a candidate before it tries it: under a lock of the study it reads all trials, chooses a candidate that
none of them has, and writes it down. A claim lives as long as its worker's heartbeat; that of a worker which died is
given away once more, and never a third time, for it may be what the worker died of. Raw samples stay in each machine's
own database: `python -m cupyq.db merge` joins those.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import platform
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from cupyq import kernels
from cupyq.db.environment import Environment
from cupyq.devices import DeviceSpec
from cupyq.errors import ArgumentError, DatabaseError, NotInstalled
from cupyq.kernels import Problem

from .candidate import Candidate, from_row, source_hash, stable_key
from .objective import Outcome
from .samplers import import_optuna

T = TypeVar("T")

HEARTBEAT_SECONDS = 10
GRACE_SECONDS = 60
"""A worker that was not heard of for so long is taken for dead, and what it was trying is given away."""

LOSSES = 2
"""A candidate that so many workers died of, or were stopped at, is not tried again."""

PATIENCE_SECONDS = (1, 2, 4, 8, 15)
"""Pauses before a server that does not answer is asked again, and then given up."""

INSTALL = 'pip install "cupyq[postgresql]"'
FORMAT = 1
"""Part of every study's identity: goes up when trials of two versions of the tuner cannot be compared."""

_SETUP_LOCK = 0x63757079  # one lock for making Optuna's tables, whatever the study
_LOST = "the workers that tried it were lost or stopped"


@dataclass(frozen=True)
class Entry:
    """What the shared study knows of one candidate.

    Attributes
    ----------
    key : str
        Of the candidate, also where this version cannot read it.
    candidate : Candidate or None
    outcome : Outcome or None
        None while somebody tries it.
    """

    key: str
    candidate: Candidate | None
    outcome: Outcome | None


def identity(device: DeviceSpec, problem: Problem, source: str, environment: Environment) -> dict[str, Any]:
    """Return everything that makes trials comparable; two workers share a study exactly when all of it is equal.

    The same facts as make a row of the database stale: kernel sources, NVRTC, the driver's major version; and the
    device's identity, every field of the problem (M is its band), and whether times are measured or predicted.
    """
    default = Candidate("fused", kernels.default(problem, device))
    return {
        "format": FORMAT,
        "source": source,
        "device": list(device.identity),
        "problem": dataclasses.asdict(problem),
        "kernels": environment.library,
        "default_source": source_hash(default, problem),
        "nvrtc": environment.nvrtc_version,
        "driver": environment.driver_version and environment.driver_version.split(".")[0],
    }


def study_name(device: DeviceSpec, facts: dict[str, Any]) -> str:
    """Return a name for people that ends in a digest of all facts."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]
    p = facts["problem"]
    what = f"{p['op']} {p['k']}x{p['n']} g{p['group_size']} M<={p['m']} {p['dtype']}"
    return f"cupyq: {what}, {device.name}, {facts['source']}, {digest}"


def checked_url(url: str) -> str:
    """Return the URL of a PostgreSQL database with the driver to use.

    Raises
    ------
    ArgumentError
        It is of another database, or no URL.
    NotInstalled
        SQLAlchemy or the driver is missing.
    """
    scheme, colon, rest = url.partition("://")
    base, _, driver = scheme.partition("+")
    if base == "sqlite":
        raise ArgumentError(
            "storage: SQLite locks its whole file and not at all on many network folders, so it is no store for "
            "several writers; accepted: postgresql://USER@HOST/DATABASE"
        )
    if base not in ("postgresql", "postgres") or not colon:
        raise ArgumentError(f"storage: {base or url!r} is no PostgreSQL; accepted: postgresql://USER@HOST/DATABASE")
    if not driver:
        driver = next((name for name in ("psycopg", "psycopg2") if importlib.util.find_spec(name)), "")
    needed = [name for name in ("sqlalchemy", driver or "psycopg") if not importlib.util.find_spec(name)]
    if needed:
        raise NotInstalled(f"--storage needs {' and '.join(needed)}: {INSTALL}")
    return f"postgresql+{driver}://{rest}"


class Storage:
    """Optuna's storage on a PostgreSQL database.

    Parameters
    ----------
    url : str
        postgresql://USER:PASSWORD@HOST/DATABASE
    heartbeat_seconds, grace_seconds : int
        How often a worker says that it lives, and for how long it may be silent.

    Raises
    ------
    ArgumentError, NotInstalled
        As `checked_url`.
    DatabaseError
        It cannot be reached, or does not let us make Optuna's tables. The message never holds the password.
    """

    def __init__(
        self, url: str, heartbeat_seconds: int = HEARTBEAT_SECONDS, grace_seconds: int = GRACE_SECONDS
    ) -> None:
        url = checked_url(url)
        import sqlalchemy

        self.optuna = import_optuna()
        try:
            parsed = sqlalchemy.make_url(url)
        except (sqlalchemy.exc.ArgumentError, ValueError):  # no number where the port should be
            raise ArgumentError("storage is no URL; accepted: postgresql://USER@HOST/DATABASE") from None
        self.shown = parsed.set(query={}).render_as_string(hide_password=True)
        # Heartbeats are compared as the sessions' local time; a database without an encoding would answer in bytes.
        arguments = {
            "connect_timeout": 20, "application_name": "cupyq.tune", "options": "-c timezone=UTC",
            "client_encoding": "utf8",
        }  # fmt: skip
        engine = {
            "pool_pre_ping": True,
            "connect_args": {name: value for name, value in arguments.items() if name not in parsed.query},
        }
        with self.translated(RuntimeError), warnings.catch_warnings():  # tables of an Optuna that does not fit this one
            warnings.simplefilter("ignore", self.optuna.exceptions.ExperimentalWarning)
            setup = sqlalchemy.create_engine(url, **engine)
            try:
                with setup.begin() as connection:  # PostgreSQL lets two processes make one table, and fails one of them
                    _lock(connection, _SETUP_LOCK)
                    self.rdb = self.optuna.storages.RDBStorage(
                        url, engine, heartbeat_interval=heartbeat_seconds, grace_period=grace_seconds
                    )
            finally:
                setup.dispose()
        self.heartbeat_seconds = heartbeat_seconds

    def study(self, device: DeviceSpec, problem: Problem, source: str, environment: Environment) -> SharedStudy:
        """Return the study of a problem, made where nobody has begun it."""
        facts = identity(device, problem, source, environment)
        with self.translated():
            name = study_name(device, facts)
            study = self.optuna.create_study(
                storage=self.rdb, study_name=name, direction="minimize", load_if_exists=True
            )
            if "identity" not in study.user_attrs:
                study.set_user_attr("identity", facts)
        return SharedStudy(self, study, source)

    @contextlib.contextmanager
    def translated(self, *more: type[Exception]) -> Iterator[None]:
        """Turn what SQLAlchemy and Optuna raise, and errors of `more` classes, into DatabaseError."""
        import sqlalchemy

        try:
            yield
        except (sqlalchemy.exc.SQLAlchemyError, self.optuna.exceptions.OptunaError, *more) as error:
            # Optuna wraps SQLAlchemy's error and SQLAlchemy the driver's, which alone says what happened.
            cause: BaseException = error
            while (deeper := getattr(cause, "orig", None) or cause.__cause__) is not None:
                cause = deeper
            said = " ".join(str(cause).split()) or type(cause).__name__
            raise DatabaseError(f"the shared study in {self.shown} cannot be used: {said}") from None

    def patiently(self, ask: Callable[[], T]) -> T:
        """Return ask(), asked again for a while where the server cannot be reached: it may only be restarting."""
        import sqlalchemy

        passing = (sqlalchemy.exc.OperationalError, self.optuna.exceptions.StorageInternalError)
        with self.translated():
            for seconds in PATIENCE_SECONDS:
                try:
                    return ask()
                except passing:
                    time.sleep(seconds)
            return ask()

    def close(self) -> None:
        """Let go of the connections."""
        self.rdb.remove_session()
        self.rdb.engine.dispose()


def _lock(connection: Any, key: int) -> None:
    """Hold a lock of the database until the transaction ends, which a worker's death ends as well."""
    from sqlalchemy import text

    # A machine that loses power holds the lock until the server notices; this is when.
    connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = '60s'"))
    connection.execute(text("SET LOCAL lock_timeout = '300s'"))
    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": key})


class SharedStudy:
    """The trials of one problem on all machines.

    Attributes
    ----------
    running : int
        Candidates that others tried when it was last asked.
    count : int
        Distinct candidates in the study then.
    """

    def __init__(self, storage: Storage, study: Any, source: str) -> None:
        self.storage = storage
        self.source = source
        self.running = self.count = 0
        self._study = study
        self._rdb = storage.rdb
        self._id = storage.rdb.get_study_id_from_name(study.study_name)
        self._states = storage.optuna.trial.TrialState
        digest = hashlib.sha256(study.study_name.encode()).digest()
        self._lock_key = int.from_bytes(digest[:8], "big", signed=True)

    def read(self) -> list[Entry]:
        """Return what the study knows, oldest first, without claiming anything."""
        with self.storage.translated():
            return self._read()[0]

    def join(self, looks: Iterable[tuple[Candidate, Outcome]]) -> list[Entry]:
        """Add what this machine tried by itself, so that nobody tries it again; return what the study knows then."""
        with self.storage.translated(), self._alone():
            known = {trial.user_attrs.get("key") for trial in self._trials()}
            for candidate, outcome in looks:
                if candidate.key not in known:
                    self._create(candidate, outcome)
            return self._read()[0]

    def claim(
        self, budget: int, note: Callable[[Sequence[Entry]], None], choose: Callable[[], Candidate | None]
    ) -> Claim | None:
        """Claim what to try next.

        Parameters
        ----------
        budget : int
            Distinct candidates that the study as a whole tries.
        note : callable
            Hears of everything the study knows, before `choose` is called.
        choose : callable
            Returns a candidate that the study does not have, and the same again until it was claimed; None when there
            is none.

        Returns
        -------
        Claim or None
            None where the budget is used up or nothing is left; `running` says whether others are still at it.
        """
        return self.storage.patiently(lambda: self._claim(budget, note, choose))

    def _claim(
        self, budget: int, note: Callable[[Sequence[Entry]], None], choose: Callable[[], Candidate | None]
    ) -> Claim | None:
        with self._alone() as still_alone:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", self.storage.optuna.exceptions.ExperimentalWarning)
                self.storage.optuna.storages.fail_stale_trials(self._study)
            entries, lost, begun = self._read()
            note(entries)
            if begun is not None:  # whoever wrote it down died before it could say that it lives
                return self._begin(*begun)
            candidate = lost
            if candidate is None and self.count < budget:
                candidate = choose()
            if candidate is None:
                return None
            still_alone()
            trial = self._begin(candidate, self._create(candidate))
            self.running += 1
            return trial

    def _read(self) -> tuple[list[Entry], Candidate | None, tuple[Candidate, int] | None]:
        """Return the entries, a candidate lost that may be tried again, and one written down but not begun."""
        by_key: dict[str, list[Any]] = {}
        for trial in self._trials():
            if "key" in trial.user_attrs:
                by_key.setdefault(trial.user_attrs["key"], []).append(trial)
        entries: list[Entry] = []
        again: Candidate | None = None
        begun: tuple[Candidate, int] | None = None
        for key, trials in by_key.items():
            candidate = from_row(trials[0].user_attrs)
            told = next((t for t in trials if "outcome" in t.user_attrs), None)
            waiting = next((t for t in trials if t.state == self._states.WAITING), None)
            if told is not None:
                entries.append(Entry(key, candidate, Outcome(**told.user_attrs["outcome"])))
            elif any(t.state == self._states.RUNNING for t in trials):
                entries.append(Entry(key, candidate, None))
            elif waiting is not None and candidate is not None:
                number = self._rdb.get_trial_id_from_study_id_trial_number(self._id, waiting.number)
                begun = begun or (candidate, number)
            elif len(trials) < LOSSES and candidate is not None:
                again = again or candidate
            else:
                entries.append(Entry(key, candidate, Outcome("failed", self.source, reason=_LOST)))
        self.count = len(by_key)
        self.running = sum(entry.outcome is None for entry in entries)
        return entries, again, begun

    def _trials(self) -> list[Any]:
        return self._study.get_trials(deepcopy=False)

    def _create(self, candidate: Candidate, outcome: Outcome | None = None) -> int:
        config = None if candidate.config is None else kernels.to_dict(candidate.config)
        attributes = {
            "key": stable_key(candidate.path, config), "path": candidate.path, "config": config,
            "worker": platform.node(),
        }  # fmt: skip
        if outcome is not None:
            attributes["outcome"] = _as_dict(outcome)
        # Whole numbers are parameters, for Optuna's dashboard; words are not: their choices may change with a version.
        whole = {n: v for n, v in candidate.tunables.items() if isinstance(v, int) and not isinstance(v, bool)}
        template = self.storage.optuna.trial.create_trial(
            state=self._states.WAITING if outcome is None else _state(outcome, self._states),
            value=outcome.time_us if outcome is not None and outcome.ok else None,
            params=whole,
            distributions={n: self.storage.optuna.distributions.IntDistribution(-(2**31), 2**31) for n in whole},
            user_attrs=attributes,
        )
        return self._rdb.create_new_trial(self._id, template)

    def _begin(self, candidate: Candidate, trial_id: int) -> Claim:
        # In this order: a trial that runs without a heartbeat would never be taken for dead.
        self._rdb.record_heartbeat(trial_id)
        self._rdb.set_trial_state_values(trial_id, self._states.RUNNING)
        return Claim(self.storage, trial_id, candidate)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[Callable[[], None]]:
        """Hold the study's lock; gives a function that raises where the server has taken it back."""
        from sqlalchemy import text

        with self._rdb.engine.begin() as connection:
            _lock(connection, self._lock_key)
            yield lambda: connection.execute(text("SELECT 1"))


class Claim:
    """A candidate that is this worker's to try; a context manager, in which a heartbeat keeps it so.

    Attributes
    ----------
    candidate : Candidate
    """

    def __init__(self, storage: Storage, trial_id: int, candidate: Candidate) -> None:
        self.candidate = candidate
        self._storage = storage
        self._trial_id = trial_id
        self._told = False
        self._stop = threading.Event()
        self._beats = threading.Thread(target=self._beat, daemon=True, name="cupyq-heartbeat")

    def __enter__(self) -> Claim:
        self._beats.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._beats.join(5)
        if not self._told:  # Ctrl-C, most likely: others need not wait until the heartbeat is missed
            with contextlib.suppress(DatabaseError):
                self._end(self._storage.optuna.trial.TrialState.FAIL, None)

    def finish(self, outcome: Outcome) -> bool:
        """Tell all workers what came of it; return False where it was given away meanwhile, and the outcome with it."""
        states = self._storage.optuna.trial.TrialState
        self._told = True
        return self._end(_state(outcome, states), outcome)

    def _end(self, state: Any, outcome: Outcome | None) -> bool:
        rdb = self._storage.rdb

        def write() -> bool:
            try:
                if outcome is not None:
                    rdb.set_trial_user_attr(self._trial_id, "outcome", _as_dict(outcome))
                values = [outcome.time_us] if outcome is not None and outcome.ok else None
                return bool(rdb.set_trial_state_values(self._trial_id, state, values))
            except self._storage.optuna.exceptions.UpdateFinishedTrialError:
                return False

        return self._storage.patiently(write)

    def _beat(self) -> None:
        try:
            while not self._stop.wait(self._storage.heartbeat_seconds):
                with contextlib.suppress(DatabaseError), self._storage.translated():  # the next beat may get through
                    self._storage.rdb.record_heartbeat(self._trial_id)
        finally:
            self._storage.rdb.remove_session()


def _state(outcome: Outcome, states: Any) -> Any:
    return {"complete": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}[outcome.state]


def _as_dict(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome without its raw samples, as JSON takes it."""
    whole = dataclasses.asdict(dataclasses.replace(outcome, samples_us=(), parts=None))
    return {name: value for name, value in whole.items() if value is not None and name not in ("samples_us", "parts")}
