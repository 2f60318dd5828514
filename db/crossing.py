"""Crossover: the batch from which the fused kernel stops paying, against each rival, beside what the roofline says.

Rivals of a weight-only kernel are dequantizing and cuBLAS (`dequant`), cuBLAS on weights that were never quantized
(`fp16`), and the W8A8 kernels on the same shape, by the name of their op; a W8A8 kernel's is `fp16`. The first two take
the same weights, so they decide `crossover` and `winner`: dispatch could go their way. W8A8 takes weights quantized
otherwise, and is listed under `against` alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cupyq import roofline
from cupyq.db import identity, views
from cupyq.db.queries import Filters
from cupyq.db.schema import Executes
from cupyq.devices import DeviceSpec
from cupyq.kernels.problem import WEIGHT_ONLY

KEY = ("device", "op", "dtype", "k", "n", "group_size", "symmetric", "source")
"""What one row is about."""

_SAME_WEIGHTS = ("dequant", "fp16")

_WEIGHT_ONLY = ", ".join(f"'{op}'" for op in WEIGHT_ONLY)
# The best usable trial of each path, source and band. Stale rows take part, ranked last, like everywhere else.
_CURVES = f"""
SELECT * FROM (
    SELECT *, row_number() OVER (
        PARTITION BY device, op, dtype, n, k, group_size, symmetric, band, path, source ORDER BY {views.ORDER}
    ) AS place
    FROM eligible
) WHERE place = 1
"""
# fp16 depends neither on the op nor on the groups: one row serves every problem of the same shape.
_PAIRS = f"""
SELECT f.device, f.op, f.dtype, f.n, f.k, f.group_size, f.symmetric, f.source, f.band, f.time_us AS fused_us,
    CASE o.path WHEN 'fused' THEN o.op ELSE o.path END AS rival, o.time_us AS other_us,
    max(f.stale, o.stale) AS stale, d.spec
FROM curves f JOIN device d ON d.id = f.device_id JOIN curves o
    ON o.device = f.device AND o.dtype = f.dtype AND o.n = f.n AND o.k = f.k AND o.band = f.band
    AND o.m = f.m AND o.source = f.source
    AND (o.path = 'fp16' OR (o.path = 'dequant' AND o.op = f.op AND o.group_size = f.group_size
                             AND o.symmetric = f.symmetric)
         OR (o.path = 'fused' AND f.op IN ({_WEIGHT_ONLY}) AND o.op NOT IN ({_WEIGHT_ONLY})))
WHERE f.path = 'fused'
"""


def crossover(db: Executes, filters: Filters, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return, per device, op, dtype, shape, groups and source, from which band on others beat fused.

    Returns
    -------
    list of dict
        The key's columns; `crossover`: the smallest band at which dequant or fp16 is faster than fused, None if there
        is none among the bands compared; `winner`, `fused_us`, `other_us` there; `against`: each rival that was
        compared -> the band from which it is faster, None for never; `ideal`: the same rivals -> the batch at which the
        roofline lets them catch up, None for never; `first_band`, `last_band`, `bands`: what was compared; `stale`:
        whether any row of it is.
    """
    where, parameters = filters.where({name: name for name in KEY})
    cursor = db.execute(
        views.judged(f"SELECT * FROM (WITH curves AS ({_CURVES}) {_PAIRS}) WHERE {where}"), {**facts, **parameters}
    )
    names = [column[0] for column in cursor.description]
    return crossings((dict(zip(names, row, strict=True)) for row in cursor), filters.limit)


def crossings(pairs: Iterable[Mapping[str, Any]], limit: int | None = None) -> list[dict[str, Any]]:
    """Return the rows of `crossover` from pairs of times: the key, band, fused_us, rival, other_us, stale and spec."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for pair in pairs:
        groups.setdefault(tuple(pair[name] for name in KEY), []).append(pair)
    rows = (_crossing(dict(zip(KEY, key, strict=True)), groups[key]) for key in sorted(groups))
    return list(rows)[:limit]


def _crossing(key: Mapping[str, Any], pairs: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return where one curve over bands is first beaten, by whom, and where the roofline has it beaten."""
    pairs = sorted(pairs, key=lambda pair: (pair["band"], pair["other_us"]))
    bands = sorted({pair["band"] for pair in pairs})
    rivals = sorted({pair["rival"] for pair in pairs})
    beaten = [pair for pair in pairs if pair["other_us"] < pair["fused_us"]]
    first = next((pair for pair in beaten if pair["rival"] in _SAME_WEIGHTS), None)
    spec = identity.spec_of(pairs[0]["spec"])
    return {
        **{name: bool(key[name]) if name == "symmetric" else key[name] for name in KEY},
        "crossover": first["band"] if first else None,
        "winner": first["rival"] if first else "fused",
        "fused_us": first["fused_us"] if first else None,
        "other_us": first["other_us"] if first else None,
        "against": {rival: next((p["band"] for p in beaten if p["rival"] == rival), None) for rival in rivals},
        "ideal": {rival: None if spec is None else ideal(rival, key["op"], spec) for rival in rivals},
        "first_band": bands[0],
        "last_band": bands[-1],
        "bands": len(bands),
        "stale": any(pair["stale"] for pair in pairs),
    }


def ideal(rival: str, op: str, device: DeviceSpec) -> float | None:
    """Return the batch M at which the roofline lets a rival catch up with a fused kernel, None for never.

    A weight-only kernel computes at the fp16 rate, and is bound by it from its own, low ridge on. fp16, which reads 2
    bytes a weight, catches up at its ridge, and W8A8, which reads 1, at half of that; beyond it multiplies faster.
    Dequantizing first moves more bytes and multiplies at the same rate; and fp16 never beats W8A8.
    """
    if op not in WEIGHT_ONLY or rival == "dequant" or not device.dram_gbps:
        return None
    return round(roofline.ridge_batch(device, 16 if rival == "fp16" else 8), 1)


def of_presets(filters: Filters, rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the pairs of preset rows (`preset_rows.curves`), the dense paths by the predictor, for `crossings`."""
    fused: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        place = tuple(row[name] for name in ("device", "dtype", "n", "k", "band"))
        fused.setdefault(place, {})[f"{row['op']} {row['group_size']} {row['symmetric']}"] = row
    for there in fused.values():
        for row in there.values():
            if not filters.passes(row, KEY):
                continue
            rivals = {name: (time_us, False) for name, time_us in row["dense"].items()}
            if row["op"] in WEIGHT_ONLY:
                others = (other for other in there.values() if other["op"] not in WEIGHT_ONLY)
                rivals |= {other["op"]: (other["time_us"], other["stale"]) for other in others}
            for rival, (other_us, stale) in rivals.items():
                key = {name: row[name] for name in (*KEY, "band", "spec")}
                yield {
                    **key, "fused_us": row["time_us"], "rival": rival, "other_us": other_us,
                    "stale": row["stale"] or stale,
                }  # fmt: skip
