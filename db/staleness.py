"""Why one row is stale: the rule of `views.ELIGIBLE`, for who looks up one problem and wants to know of few rows.

The views judge a whole file at once, which asks the library for the source of every config in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from cupyq.db import identity
from cupyq.db.environment import Environment

Generates = Callable[[str, Mapping[str, Any], Mapping[str, Any]], bool]


def because(row: Mapping[str, Any], here: Environment, generates: Generates) -> str:
    """Return what changed since a row was written ("kernel source", "driver", "NVRTC"), "" for nothing.

    Parameters
    ----------
    row : mapping
        Columns of `trial`, and those of its problem.
    here : Environment
        A fact that either side does not know is not compared; one that the row lacks is not even asked for.
    generates : callable
        (source hash, config, problem) -> whether the library here still generates that source.
    """
    reasons = []
    source, driver, nvrtc = row["source_hash"], row["driver_version"], row["nvrtc_version"]
    if source is not None and here.source_hash is not None:
        made = generates(source, json.loads(row["config"]), identity.problem_fields(dict(row)))
        if not made and here.library is not None:
            reasons.append("kernel source")
    if driver is not None and here.driver_version is not None and _major(driver) != _major(here.driver_version):
        reasons.append("driver")
    if nvrtc is not None and here.nvrtc_version not in (None, nvrtc):
        reasons.append("NVRTC")
    return ", ".join(reasons)


def _major(version: str) -> str:
    return version.split(".")[0]
