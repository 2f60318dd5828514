"""The facts of a report: one JSON-ready dict, gathered from the tuning database and the roofline.

The page embeds exactly these facts, `--json` prints them, and the plots draw them, so the three cannot disagree.
Nothing here is measured or predicted anew; every time says which of the two it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cupyq import bands, roofline
from cupyq.db import Store, identity
from cupyq.db.queries import JOINED, front
from cupyq.devices import DeviceSpec
from cupyq.errors import ArgumentError, CupyqError

#: Of the dict that `gather` returns; raised when a key changes its meaning.
FORMAT = 1

#: What a curve of the speed-up chart has in common.
SERIES = ("device", "op", "dtype", "k", "n", "group_size", "symmetric", "source")

#: Columns of one trial in `studies[...]["trials"]`.
TRIAL_COLUMNS = ("id", "path", "phase", "state", "source", "time_us", "chosen", "reason")

# Bits of a weight, and what the tensor cores compute in.
_OPS = {
    "w2a16": (2, "float16"), "w4a16": (4, "float16"), "w8a16": (8, "float16"),
    "w8a8-int8": (8, "int8"), "w8a8-fp8": (8, "fp8"), "w8a8-fp8-block": (8, "fp8"),
}  # fmt: skip


def gather(store: Store, device: str | None = None) -> dict[str, Any]:
    """Return everything that a report shows.

    Parameters
    ----------
    store : Store
        An open tuning database.
    device : str, optional
        Label of the only device to report on; all of them by default.

    Returns
    -------
    dict
        Of JSON types only. `devices`, `best`, `series`, `crossover`, `pareto`, `studies` are lists of dicts; times are
        in microseconds, shapes K x N. `generated_at` is now, or $SOURCE_DATE_EPOCH where that is set.

    Raises
    ------
    ArgumentError
        The database has no such device.
    """
    known = store.devices()
    if device is not None and device not in [row["device"] for row in known]:
        labels = ", ".join(row["device"] for row in known) or "none"
        raise ArgumentError(f"device is {device!r}; the database has {labels}")
    chosen = [row for row in known if device in (None, row["device"])]
    specs = {row["device"]: identity.spec_of(row["spec"]) for row in chosen}
    trials = _trials(store, set(specs))
    best = [_best_row(row, specs[row["device"]]) for row in store.best() if row["device"] in specs]
    return {
        "format": FORMAT,
        "generated_at": _now(),
        "database": str(store.path) if str(store.path) == ":memory:" else Path(store.path).name,
        "judged_by": {
            "cupyq": store.environment.cupyq_version,
            "nvrtc": store.environment.nvrtc_version,
            "driver": store.environment.driver_version,
        },
        "conflicts": len(store.conflicts()),
        "devices": [_device(row, specs[row["device"]], trials) for row in chosen],
        "best": best,
        "series": _series(best, specs),
        "crossover": [_crossing(row, specs[row["device"]]) for row in store.crossover() if row["device"] in specs],
        "pareto": _pareto(store, trials),
        "studies": _studies(store, trials),
    }


def ideal(spec: DeviceSpec | None, row: Mapping[str, Any], m: int) -> float | None:
    """Return the roofline's speed-up over fp16 of a row's op, shape and groups at batch M; None where it has none.

    Ratio of two `roofline.ideal_time_us`: fp16 weights, and weights of the op's bits with their scales (16 bits a
    group, 8 more for a zero point; those of W8A8 are too few to count), each on the tensor cores that the op uses.
    """
    if spec is None or row["op"] not in _OPS:
        return None
    bits, compute = _OPS[row["op"]]
    try:
        groups = -1 if row["op"].startswith("w8a8") else row["group_size"]
        stored = roofline.effective_bits(bits, groups, zero_bits=0 if row["symmetric"] else 8)
        shape = (m, row["n"], row["k"])
        return roofline.ideal_time_us(spec, *shape, 16) / roofline.ideal_time_us(spec, *shape, stored, compute)
    except (CupyqError, TypeError, ZeroDivisionError):  # a card without that tensor rate, or one that was never known
        return None


def _now() -> str:
    """Return the time of the report, ISO 8601 in UTC; $SOURCE_DATE_EPOCH makes reports reproducible."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    moment = datetime.fromtimestamp(int(epoch), timezone.utc) if epoch.isdigit() else datetime.now(timezone.utc)
    return moment.isoformat(timespec="seconds")


def _trials(store: Store, labels: set[str]) -> list[dict[str, Any]]:
    """Return every finished trial of these devices, oldest first, with only what a report needs."""
    sql = f"""
        SELECT t.id, t.study_id, d.label AS device, p.op, p.dtype, p.m, p.n, p.k, p.group_size, p.symmetric, p.band,
            t.path, t.phase, t.state, t.source, t.time_us, t.chosen, t.verified, t.reason, t.quantization_error,
            t.cupyq_version, t.cupy_version, t.nvrtc_version, t.driver_version, t.origin, t.clock_mhz, t.finished_at,
            CASE WHEN t.quantization_error IS NOT NULL THEN t.config END AS config, t.cache
        FROM {JOINED} WHERE t.state <> 'running' ORDER BY t.id
    """
    with store.reading() as db:
        rows = [row for row in db.query(sql) if row["device"] in labels]
    for row in rows:
        row["symmetric"] = bool(row["symmetric"])
    return rows


def _device(row: dict[str, Any], spec: DeviceSpec | None, trials: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return what identifies a device, and what its rows were made with."""
    mine = [trial for trial in trials if trial["device"] == row["device"]]
    names = ("source", "cupyq_version", "cupy_version", "nvrtc_version", "driver_version", "origin")
    made: dict[tuple[Any, ...], int] = {}
    for trial in mine:
        # The full path of a merged file is nobody's business but its owner's.
        key = tuple(_base(trial[name]) if name == "origin" else trial[name] for name in names)
        made[key] = made.get(key, 0) + 1
    clocks = [trial["clock_mhz"] for trial in mine if trial["clock_mhz"] is not None]
    facts = {name: value for name, value in row.items() if name != "spec"}
    return {
        **facts,
        "fp16_tflops": None if spec is None else spec.fp16_tflops,
        "ridge_batch": None if spec is None or not spec.dram_gbps else roofline.ridge_batch(spec),
        "unsure": [] if spec is None else list(spec.unsure),
        "clock_mhz": [min(clocks), max(clocks)] if clocks else None,
        "made_with": [
            {**dict(zip(names, key, strict=True)), "trials": count}
            for key, count in sorted(made.items(), key=lambda item: [str(part) for part in item[0]])
        ],
    }


def _base(origin: str | None) -> str | None:
    return None if origin is None else origin.replace("\\", "/").rsplit("/", 1)[-1]


def _best_row(row: dict[str, Any], spec: DeviceSpec | None) -> dict[str, Any]:
    limit = ideal(spec, row, row["band"])
    speedup = row["speedup_vs_fp16"]
    return {
        **row,
        "ideal": limit,
        "of_ideal": None if limit is None or speedup is None else speedup / limit,
    }


def _series(best: Iterable[dict[str, Any]], specs: Mapping[str, DeviceSpec | None]) -> list[dict[str, Any]]:
    """Return the curves: speed-up per band for each device, op, dtype, shape, groups and source, and the ideal's."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in best:
        if row["speedup_vs_fp16"] is not None:
            groups.setdefault(tuple(row[name] for name in SERIES), []).append(row)
    found = []
    for key, rows in groups.items():
        head = dict(zip(SERIES, key, strict=True))
        points = [
            {"band": r["band"], "speedup": r["speedup_vs_fp16"], "path": r["path"], "stale": r["stale"],
             "time_us": r["time_us"], "ideal": r["ideal"]}
            for r in rows
        ]  # fmt: skip
        curve = [[m, ideal(specs[head["device"]], head, m)] for m in _batches()]
        found.append({**head, "points": points, "ideal": [p for p in curve if p[1] is not None]})
    return found


def _batches() -> list[int]:
    """Return three batches an octave over all bands: enough for the ideal's corner to look like one."""
    return sorted({round(2 ** (step / 3)) for step in range(3 * (len(bands.ends()) - 1) + 1)})


def _crossing(row: dict[str, Any], spec: DeviceSpec | None) -> dict[str, Any]:
    limit = None if spec is None or not spec.dram_gbps else roofline.crossover_batch(spec)
    return {**row, "roofline": limit}


_PARETO = ("device", "dtype", "k", "n", "band", "weights", "source")
_CHOICE = ("op", "group_size", "symmetric")


def _pareto(store: Store, trials: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return time against quantization error, the fastest usable trial of each op and grouping; which no other beats.

    Bands, sources and the weights that the error was taken on are not compared with each other.
    """
    weights = {study["id"]: study["weights"] for study in store.studies()}
    stale = store.stale()
    fastest: dict[tuple[Any, ...], dict[tuple[Any, ...], dict[str, Any]]] = {}
    for trial in trials:
        usable = trial["state"] == "complete" and trial["verified"] and trial["time_us"] and trial["cache"] != "warm"
        if not usable or trial["quantization_error"] is None or trial["path"] == "fp16":
            continue
        row = {**trial, "weights": weights.get(trial["study_id"]), "stale": trial["id"] in stale}
        chosen = fastest.setdefault(tuple(row[name] for name in _PARETO), {})
        key = tuple(row[name] for name in _CHOICE)
        # As everywhere, a stale time counts only where there is no other.
        if key not in chosen or (row["stale"], row["time_us"]) < (chosen[key]["stale"], chosen[key]["time_us"]):
            chosen[key] = row
    found = []
    for key in sorted(fastest, key=lambda key: [(isinstance(part, str), part or "") for part in key]):
        rows = sorted(fastest[key].values(), key=lambda row: (row["time_us"], row["quantization_error"]))
        kept = {row["id"] for row in front(rows)}
        points = [
            {
                **{name: row[name] for name in (*_CHOICE, "path", "time_us", "quantization_error", "stale")},
                "front": row["id"] in kept,
            }
            for row in rows
        ]
        found.append({**dict(zip(_PARETO, key, strict=True)), "points": points})
    return found


_PROBLEM = ("device", "op", "dtype", "m", "n", "k", "group_size", "symmetric", "band")
_STUDY = ("name", "state", "reason", "weights", "settings", "started_at", "finished_at")


def _studies(store: Store, trials: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each study with its trials in order; trials that belong to none are gathered by device and problem."""
    known = {study["id"]: study for study in store.studies()}
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for trial in trials:
        groups.setdefault((trial["study_id"], *(trial[name] for name in _PROBLEM)), []).append(trial)
    found = []
    for key, rows in groups.items():
        study = known.get(key[0], {})
        found.append(
            {
                "id": key[0],
                **dict(zip(_PROBLEM, key[1:], strict=True)),
                **{name: study.get(name) for name in _STUDY},
                "trials": [[bool(row[c]) if c == "chosen" else row[c] for c in TRIAL_COLUMNS] for row in rows],
            }
        )
    order = ("device", "op", "dtype", "k", "n", "group_size", "symmetric", "m")
    return sorted(found, key=lambda study: [study[name] for name in order])
