"""What goes into the database: a trial, checked and turned into the columns of its table."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cupyq.db.environment import Environment, major_minor
from cupyq.db.values import choice, integer, moment, number, plain, text
from cupyq.errors import ArgumentError

PATHS = ("fused", "dequant", "fp16")
SOURCES = ("measured", "predicted")
STATES = ("running", "complete", "pruned", "failed")
PHASES = ("search", "final", "check")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One config tried on one problem and device, with what came of it.

    Parameters
    ----------
    device : DeviceSpec
        Where it ran, or was predicted for.
    problem : kernels.Problem
        What it computed; the band follows from its m.
    source : {"measured", "predicted"}
        Where the time comes from. The two are never mixed up.
    path : {"fused", "dequant", "fp16"}
        The kernel on packed weights; dequantize + cuBLAS; plain 16-bit cuBLAS, the yardstick.
    config : config dataclass or dict, optional
        The tunables, with "family" when a dict. None for `fp16`.
    state : {"running", "complete", "pruned", "failed"}
        A complete trial whose time is NaN, infinite or not positive is stored as failed, with that as its reason.
    reason : str, optional
        Why it was pruned or failed.
    time_us, time_low_us, time_high_us : float, optional
        Median and the bounds of its interval, microseconds.
    samples_us : sequence of float, optional
        Raw times, microseconds.
    verified : bool
        The output matched the float64 reference. Only verified trials are ever used.
    error, quantization_error : float, optional
        Largest error against the reference; error of the quantization on the weights that the study names.
    study : int, optional
        From `Store.start_study`.
    phase : {"search", "final", "check"}
        First measurement, repeated measurement of a finalist, or the check at a band's lower end.
    chosen : bool
        The study's winner; see `Store.choose`.
    cache : {"cold", "warm"}, optional
        A warm time is kept but never ranked: a model's weights come from memory.
    launch : {"graph", "eager"}, optional
        How the launches were issued.
    source_hash, nvrtc_version, driver_version, cupy_version, cupyq_version : str, optional
        What produced it; where None, the store's environment fills it in.
    registers, spill_bytes, shared_bytes : int, optional
        Of the compiled kernel.
    clock_mhz, power_w, temperature_c : float, optional
        Of the GPU while it ran.
    parts : dict of float, optional
        What a predicted time is made of, microseconds.
    started_at, finished_at : datetime or ISO 8601 str, optional
        With a time zone.
    """

    device: Any
    problem: Any
    source: str
    path: str = "fused"
    config: Any = None
    state: str = "complete"
    reason: str | None = None
    time_us: float | None = None
    time_low_us: float | None = None
    time_high_us: float | None = None
    samples_us: Sequence[float] | None = None
    verified: bool = False
    error: float | None = None
    quantization_error: float | None = None
    study: int | None = None
    phase: str = "search"
    chosen: bool = False
    cache: str | None = None
    launch: str | None = None
    source_hash: str | None = None
    nvrtc_version: str | None = None
    driver_version: str | None = None
    cupy_version: str | None = None
    cupyq_version: str | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    parts: Mapping[str, float] | None = None
    started_at: datetime | str | None = None
    finished_at: datetime | str | None = None


def config_dict(config: Any) -> dict[str, Any]:
    """Return a config as a plain dict with its "family"; {} for None.

    Raises
    ------
    ArgumentError
        If it is neither a dict nor a dataclass.
    """
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return plain(config)
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        family = getattr(config, "family", None)
        return plain({**({"family": family} if family else {}), **dataclasses.asdict(config)})
    raise ArgumentError(f"config is {config!r}; a config dataclass or a dict is accepted")


_REALS = (
    "time_us", "time_low_us", "time_high_us", "error", "quantization_error", "clock_mhz", "power_w", "temperature_c",
)  # fmt: skip
_INTEGERS = ("registers", "spill_bytes", "shared_bytes")


def trial_row(trial: Trial, environment: Environment, problem: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of table `trial`, the references to other tables excepted.

    Raises
    ------
    ArgumentError
        If a field holds what its column does not accept.
    """
    row: dict[str, Any] = {
        "uid": uuid.uuid4().hex,
        "path": choice("path", trial.path, PATHS),
        "config": text(config_dict(trial.config)),
        "phase": choice("phase", trial.phase, PHASES),
        "state": choice("state", trial.state, STATES),
        "reason": None if trial.reason is None else str(trial.reason),
        "source": choice("source", trial.source, SOURCES),
        "verified": int(bool(trial.verified)),
        "chosen": int(bool(trial.chosen)),
        "cache": None if trial.cache is None else choice("cache", trial.cache, ("cold", "warm")),
        "launch": None if trial.launch is None else choice("launch", trial.launch, ("graph", "eager")),
        "samples": None if trial.samples_us is None else text(trial.samples_us),
        "parts": None if trial.parts is None else text(trial.parts),
        "started_at": moment("started_at", trial.started_at),
        "finished_at": moment("finished_at", trial.finished_at),
    }
    row.update({name: number(name, getattr(trial, name)) for name in _REALS})
    row.update({name: integer(name, getattr(trial, name)) for name in _INTEGERS})
    row.update(_objective(trial, row))
    row.update(_versions(trial, environment, config_dict(trial.config), problem))
    return row


def _objective(trial: Trial, row: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that change because the time is no time: it is dropped and the trial cannot be used."""
    if trial.state != "complete" or (row["time_us"] is not None and row["time_us"] > 0):
        return {} if row["time_us"] is None or row["time_us"] > 0 else {"time_us": None}
    said = f"the time is {trial.time_us}, not a positive finite number of microseconds"
    return {"time_us": None, "state": "failed", "chosen": 0, "reason": row["reason"] or said}


def _versions(trial: Trial, here: Environment, config: dict[str, Any], problem: Mapping[str, Any]) -> dict[str, Any]:
    source_hash = trial.source_hash
    if source_hash is None and config and here.source_hash is not None:
        source_hash = here.source_hash(config, problem)
    # A prediction depends on no driver; and cuBLAS, not NVRTC, compiled what a plain product runs.
    driver = here.driver_version if trial.source == "measured" else None
    nvrtc = here.nvrtc_version if trial.path != "fp16" else None
    return {
        "source_hash": source_hash,
        "nvrtc_version": major_minor(trial.nvrtc_version) or nvrtc,
        "driver_version": trial.driver_version or driver,
        "cupy_version": trial.cupy_version or here.cupy_version,
        "cupyq_version": trial.cupyq_version or here.cupyq_version,
    }
