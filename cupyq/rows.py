"""The rows that dispatch goes by: those of the user's database and, behind it, the presets that cupyq ships.

Before there is a database the presets stand alone. A database that is damaged, locked or of another version is warned
of once, and costs nothing but its rows.
"""

from __future__ import annotations

import sqlite3
import threading
import warnings
from pathlib import Path
from typing import Any

from .devices import DeviceSpec
from .errors import CupyqError
from .kernels import Problem

# What a damaged database, or one of another version, can raise. A product must not fail of it.
FAULTS = (
    CupyqError, sqlite3.Error, OSError, ImportError, ArithmeticError, AttributeError, LookupError, TypeError,
    ValueError,
)  # fmt: skip

_lock = threading.RLock()
_store: tuple[Path, bool, Any] | None = None  # where, whether a file was there, what was opened
_warned: set[str] = set()


def reset() -> None:
    """Close the database and forget the warnings given of it."""
    global _store
    with _lock:
        if _store is not None:
            _store[2].close()
        _store = None
        _warned.clear()


def open_store() -> Any:
    """Return the tuning database, opened for looking up once a process; where there is none, the presets alone.

    A file that appears later is seen by the next problem that is looked up.
    """
    global _store
    from cupyq.db import place, presets

    path = place.default_path()
    with _lock:
        if _store is not None and _store[0] == path and (_store[1] or not path.exists()):
            return _store[2]
        there = path.exists()
        store = (_read(path) if there else None) or presets.Alone()
        _store = (path, there, store)
        return store


def _read(path: Path) -> Any:
    from cupyq.db import reader  # only where there is a file: this takes as long as all the rest of looking up

    return reader.open_or_none(path)


def find(problem: Problem, device: DeviceSpec) -> tuple[Any, str | None]:
    """Return (the row for exactly this problem or None, why there can be no other or None)."""
    try:
        store = open_store()
        missing = None
        if store.path is None:  # presets alone
            missing = "the database cannot be used" if _store is not None and _store[1] else "there is no database"
        return store.lookup(device, problem, paths=_paths(problem)), missing
    except FAULTS as error:
        return None, _fault(error)


def near(problem: Problem, device: DeviceSpec) -> tuple[list[Any], str | None]:
    """Return (measured rows of other shapes and bands, nearest first; why there can be no others or None)."""
    try:
        return open_store().nearest(device, problem, paths=_paths(problem)), None
    except FAULTS as error:
        return [], _fault(error)


def _paths(problem: Problem) -> tuple[str, ...]:
    return ("fused", "dequant") if problem.weight_only else ("fused",)


def by_path(problem: Problem, device: DeviceSpec) -> dict[str, Any]:
    """Return the best row of each path that has one."""
    try:
        return dict(open_store().paths(device, problem))
    except FAULTS as error:
        _fault(error)
        return {}


def _fault(error: BaseException) -> str:
    """Warn of what keeps the database from being used, once, and return it in words."""
    if str(error) not in _warned:
        _warned.add(str(error))
        warnings.warn(
            f"the tuning database cannot be used ({error}); cupyq chooses its kernels without it",
            RuntimeWarning,
            stacklevel=3,
        )
    return f"the database cannot be used: {error}"


def said(row: Any) -> str:
    """Say what a row holds: its time, where that is from, and for which M."""
    where = "a preset" if row.preset else f"trial {row.uid[:12]}"
    return f"{row.time_us:.4g} us {row.source} at M={row.m}, {where}"
