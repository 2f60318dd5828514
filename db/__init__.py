"""The tuning database: one SQLite file of every trial, from which the best kernel of each problem is read.

>>> import cupyq.db
>>> with cupyq.db.open() as store:               # doctest: +SKIP
...     store.best(op="w4a16", n=4096, k=4096)
"""

from cupyq.db.connect import default_path
from cupyq.db.environment import Environment
from cupyq.db.exchange import Report
from cupyq.db.housekeeping import Prune
from cupyq.db.queries import Filters
from cupyq.db.records import Found, Trial
from cupyq.db.store import DatabaseWarning, Store, open_or_none
from cupyq.db.store import open_store as open  # noqa: A004  (read as cupyq.db.open, like gzip.open)

__all__ = [
    "DatabaseWarning",
    "Environment",
    "Filters",
    "Found",
    "Prune",
    "Report",
    "Store",
    "Trial",
    "default_path",
    "open",
    "open_or_none",
]
