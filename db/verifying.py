"""Checking stored trials again: run the kernel, compare, write down what came out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cupyq.db.queries import Filters
from cupyq.errors import CupyqError, NotInstalled, VerificationError

if TYPE_CHECKING:
    from cupyq.db.store import Store

#: Takes a trial as `Store.candidates` gives it (with the device's `spec`), runs its kernel, and returns the largest
#: error against the reference. Raises VerificationError when the output is wrong, another CupyqError when the trial
#: cannot be run here.
VerifyRow = Callable[[Mapping[str, Any]], "float | None"]


def verify_trials(store: Store, filters: Filters, only_best: bool, verify_row: VerifyRow) -> list[dict[str, Any]]:
    """Check the complete trials that pass the filters, store each outcome, and return one row a trial.

    A wrong output makes the trial failed. A trial that cannot be run here (a config that this version refuses) keeps
    its state; its row says why.

    Raises
    ------
    NotInstalled
        If what running kernels needs is missing: the same for every trial, so it is said once.
    """
    rows = []
    for trial in store.candidates(filters, only_best):
        ok, error, reason = _outcome(trial, verify_row)
        if ok is not None:
            store.set_verified(trial["id"], ok, error, reason)
        rows.append({**trial, "ok": bool(ok), "error": error, "reason": reason})
    return rows


def _outcome(trial: Mapping[str, Any], verify_row: VerifyRow) -> tuple[bool | None, float | None, str | None]:
    """Return (right, error, reason); None instead of right or wrong where the trial could not be run."""
    try:
        error = verify_row(trial)
    except VerificationError as wrong:
        return False, None, str(wrong)
    except NotInstalled:
        raise
    except CupyqError as hindrance:
        return None, None, f"not run: {hindrance}"
    if error is not None and not math.isfinite(error):
        return False, None, f"the error against the reference is {error}"
    return True, error, None
