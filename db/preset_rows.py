"""Presets as rows of `best` and as curves, for people: the dispatcher goes by `presets` alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cupyq import devices, predictor
from cupyq.db import identity, presets
from cupyq.db.queries import Filters
from cupyq.db.staleness import Generates
from cupyq.errors import CupyqError
from cupyq.kernels import Problem


def best(filters: Filters, generates: Generates) -> list[dict[str, Any]]:
    """Return the rows of every preset that pass the filters, with the columns of the view `best`."""
    return [row for row in _rows(filters, generates) if filters.passes(row)][: filters.limit]


def curves(filters: Filters, generates: Generates) -> Iterator[dict[str, Any]]:
    """Yield the fused row of each problem and band of the filters' device, and as `dense` the other paths' times."""
    for name in presets.names() if filters.device is None else [filters.device]:
        shipped = presets.read(name)
        if shipped is None:
            continue
        device = devices.get(name)
        spec = identity.device_row(device)["spec"]
        for row in shipped.rows():
            if row.found.path != "fused":
                continue
            problem = Problem(**row.problem)
            paths = ("dequant", "fp16") if problem.weight_only else ("fp16",)
            yield {
                **row.problem, "device": name, "band": row.found.band, "source": row.found.source, "spec": spec,
                "time_us": row.found.time_us, "stale": not generates(row.source_hash, row.found.config, row.problem),
                "dense": {path: predictor.predict(path, problem, device).time_us for path in paths},
            }  # fmt: skip


def _rows(filters: Filters, generates: Generates) -> Iterator[dict[str, Any]]:
    for name in presets.names() if filters.device is None else [filters.device]:
        shipped = presets.read(name)
        if shipped is None:
            continue
        fastest: dict[tuple[Any, ...], presets.Row] = {}
        for row in shipped.rows():
            key = tuple(row.problem.values())
            if key not in fastest or row.found.time_us < fastest[key].found.time_us:
                fastest[key] = row
        for row in fastest.values():
            yield _as_best(row, generates)


def _as_best(row: presets.Row, generates: Generates) -> dict[str, Any]:
    found = row.found
    device = devices.get(found.device)
    try:
        yardstick = predictor.predict("fp16", Problem(**row.problem), device).time_us
    except CupyqError:
        yardstick = None
    return {
        "device": found.device, "compute_capability": device.compute_capability, "op": found.op, "dtype": found.dtype,
        "n": found.n, "k": found.k, "group_size": found.group_size, "symmetric": found.symmetric, "band": found.band,
        "path": found.path, "config": found.config, "time_us": found.time_us, "time_low_us": None,
        "time_high_us": None, "speedup_vs_fp16": None if yardstick is None else yardstick / found.time_us,
        "error": None, "source": found.source,
        "stale": not generates(row.source_hash, found.config, row.problem), "trials": 0,
    }  # fmt: skip
