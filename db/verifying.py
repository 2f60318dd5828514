"""Checking stored trials again: run the kernel, compare, write down what came out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cupyq import devices
from cupyq.db.queries import Filters
from cupyq.devices import DeviceSpec
from cupyq.errors import CupyqError, NotInstalled

if TYPE_CHECKING:
    from cupyq.db.store import Store

#: Takes a trial as `Store.trials` gives it and the device to check it for, and returns an object with `ok`, `error`
#: and `reason`. Raises NotInstalled when nothing can be checked here, another CupyqError when this trial cannot.
VerifyRow = Callable[[Mapping[str, Any], DeviceSpec], Any]


def verify_trials(store: Store, filters: Filters, only_best: bool, verify_row: VerifyRow) -> list[dict[str, Any]]:
    """Check the complete trials that pass the filters, store each outcome, and return one row a trial.

    A wrong output makes the trial failed. A trial that cannot be run here (a config that this version refuses) keeps
    its state; its row says why.
    """
    rows = []
    here = {spec.identity: spec for spec in _live()}
    for trial in store.candidates(filters, only_best):
        spec = _spec(trial["spec"])
        device = here.get(spec.identity, spec)
        try:
            found = verify_row(trial, device)
        except NotInstalled:
            raise  # the same for every trial: say it once, with the command that mends it
        except CupyqError as hindrance:
            rows.append({**trial, "ok": False, "error": None, "reason": f"not run: {hindrance}"})
            continue
        error = found.error if found.error is not None and math.isfinite(found.error) else None
        store.set_verified(trial["id"], found.ok, error, found.reason)
        rows.append({**trial, "ok": found.ok, "error": error, "reason": found.reason})
    return rows


def _live() -> list[DeviceSpec]:
    return [devices.live(ordinal) for ordinal in range(devices.live_count())]


def _spec(fields: Mapping[str, Any]) -> DeviceSpec:
    """Return the stored spec; fields that this version does not know are left out."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(DeviceSpec):
        if field.name in fields:
            value = fields[field.name]
            values[field.name] = tuple(value) if isinstance(value, list) else value
    return DeviceSpec(**values)
