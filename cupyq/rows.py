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
    """Return the tuning database, opened for reading once a process; where there is none, presets in memory.

    A file that appears later is seen by the next problem that is looked up.
    """
    global _store
    import cupyq.db as db

    path = db.default_path()
    with _lock:
        if _store is not None and _store[0] == path and (_store[1] or not path.exists()):
            return _store[2]
        there = path.exists()
        store = db.open_or_none(path) or db.open(":memory:")
        _store = (path, there, store)
        return store


def find(problem: Problem, device: DeviceSpec) -> tuple[Any, list[Any], str | None]:
    """Return (exact row or None, nearest rows, why there can be no other row or None)."""
    paths = ("fused", "dequant") if problem.weight_only else ("fused",)
    try:
        store = open_store()
        missing = None
        if _store is not None and _store[2] is store and not _store[1]:
            missing = "there is no database"
        return store.lookup(device, problem, paths=paths), store.nearest(device, problem, paths=paths), missing
    except FAULTS as error:
        _warn(error)
        return None, [], f"the database cannot be used: {error}"


def by_path(problem: Problem, device: DeviceSpec) -> dict[str, Any]:
    """Return the best row of each path that has one."""
    try:
        return dict(open_store().paths(device, problem))
    except FAULTS as error:
        _warn(error)
        return {}


def _warn(error: BaseException) -> None:
    if str(error) not in _warned:
        _warned.add(str(error))
        warnings.warn(
            f"the tuning database cannot be used ({error}); cupyq chooses its kernels without it",
            RuntimeWarning,
            stacklevel=3,
        )


def said(row: Any) -> str:
    """Say what a row holds: its time, where that is from, and for which M."""
    shipped = ", a preset" if getattr(row, "preset", False) else ""
    return f"{row.time_us:.4g} us {row.source} at M={row.m}{shipped}, trial {row.uid[:12]}"
