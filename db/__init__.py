"""The tuning database: one SQLite file of every trial, from which the best kernel of each problem is read.

>>> import cupyq.db
>>> with cupyq.db.open() as store:               # doctest: +SKIP
...     store.best(op="w4a16", n=4096, k=4096)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cupyq.db.environment import Environment
    from cupyq.db.exchange import Report
    from cupyq.db.found import Found
    from cupyq.db.housekeeping import Prune
    from cupyq.db.place import default_path
    from cupyq.db.queries import Filters
    from cupyq.db.reader import DatabaseWarning, Reader, open_or_none
    from cupyq.db.records import Trial
    from cupyq.db.store import Store
    from cupyq.db.store import open_store as open  # noqa: A004  (read as cupyq.db.open, like gzip.open)

__all__ = [
    "DatabaseWarning",
    "Environment",
    "Filters",
    "Found",
    "Prune",
    "Reader",
    "Report",
    "Store",
    "Trial",
    "default_path",
    "open",
    "open_or_none",
]

# Found on first use, because a user's first product needs few of them: name -> where it is defined.
_LAZY = {
    "DatabaseWarning": "reader.DatabaseWarning",
    "Environment": "environment.Environment",
    "Filters": "queries.Filters",
    "Found": "found.Found",
    "Prune": "housekeeping.Prune",
    "Reader": "reader.Reader",
    "Report": "exchange.Report",
    "Store": "store.Store",
    "Trial": "records.Trial",
    "default_path": "place.default_path",
    "open": "store.open_store",
    "open_or_none": "reader.open_or_none",
}
_MODULES = {
    "connect", "environment", "exchange", "identity", "migrations", "presets", "queries", "reader", "records", "store",
    "views",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module, _, attribute = _LAZY[name].partition(".")
        value = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
