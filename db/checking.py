"""Whether the presets that ship are what making them now would give, asked of a few rows: the rest takes minutes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

from cupyq import devices, kernels
from cupyq.db import making, presets
from cupyq.db.searching import Search, domain, legal
from cupyq.devices import DeviceSpec
from cupyq.kernels import Problem

MENDING = "make presets (or: python -m cupyq.db presets)"
"""The command that makes every preset current."""

WORSE = 0.05
"""A search of its own may beat a preset by this share: both stop short of the whole space."""

_TIMES_AGREE = 2e-3  # of four digits, and of what floats differ by


def check(name: str, sample: int = 3) -> list[str]:
    """Say what is not current in one device's presets; an empty list if nothing is.

    Parameters
    ----------
    name : str
        Of a device that has presets.
    sample : int
        Rows whose kernel is compiled and whose time is predicted again; at one of them the space is searched again.
        The kernels' sources, and whether configs are legal, are checked in every row.
    """
    shipped = presets.read(name)
    if shipped is None:
        return [f"there are no presets for {name}"]
    device = devices.get(name)
    rows = list(shipped.rows())
    said = list(_of_every_row(rows, device))
    if not said:
        chosen = random.Random(name).sample(rows, min(sample, len(rows)))
        made = making.Kernels()
        for number, row in enumerate(chosen):
            said += _of_one_row(row, device, made, again=number == 0)
    return [f"preset {name}: {sentence}; mend it with: {MENDING}" for sentence in said]


def _of_every_row(rows: Sequence[presets.Row], device: DeviceSpec) -> Iterator[str]:
    hashes: dict[tuple[str, str], str] = {}
    for row in rows:
        problem = Problem(**row.problem)
        where = f"{problem}"
        try:
            config = kernels.from_dict(row.found.config)
        except ValueError as error:
            yield f"{where}: {error}"
            return
        if not legal(config, problem, device):
            yield f"{where}: {config} is not legal any more"
            return
        key = (config.template, config.instance(problem))
        if key not in hashes:
            hashes[key] = kernels.source_hash(config, problem)
        if hashes[key] != row.source_hash:
            yield f"{where}: the kernel's source has changed since"
            return


def _of_one_row(row: presets.Row, device: DeviceSpec, made: making.Kernels, again: bool) -> Iterator[str]:
    problem, config = Problem(**row.problem), kernels.from_dict(row.found.config)
    if row.found.path == "dequant":
        time_us = making.dequantizing(problem, device)[1]
    else:
        time_us = making.full_model(config, problem, device, made)
    if not math.isclose(time_us, row.found.time_us, rel_tol=_TIMES_AGREE):
        yield f"{problem}: {config} was predicted to take {row.found.time_us} us, and now {time_us:.4g} us"
        return
    if again and row.found.path == "fused":
        search = Search(problem, device)
        found = search.descend([config, kernels.default(problem, device)], domain(problem, device), wide=True)[0]
        other = making.full_model(found, problem, device, made)
        if other < time_us * (1 - WORSE):
            yield f"{problem}: {config} takes {time_us:.4g} us, and {found} would take {other:.4g} us"
