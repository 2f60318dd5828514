"""The ladder of answers to which kernel runs a problem on a device, from measured to safe.

1. a measured row of the database for exactly this problem and band;
2. the nearest measured row, at most `MAX_DISTANCE` octaves away in N, K and M together;
3. a measured row for exactly this problem, made by another kernel source, driver or NVRTC (stale);
4. a predicted row for exactly this problem;
5. the predictor's closed form, over `shortlist`;
6. the kernels' own default; or, where no kernel of cupyq runs, CuPy's operations on dequantized weights.

A row counts only if its config is legal for the real M. The database can be missing, damaged, or of another version:
then the ladder starts lower, and nothing else changes. All M of a band get one answer, that of the band's upper end,
where rows are tuned; what is worked out afresh for an M is only whether the answer is legal there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import kernels, rows
from .devices import DeviceSpec
from .errors import CupyqError
from .kernels import Problem, dequant, quantize_activations
from .kernels.w8a8 import FUSED_M

EXACT = "exact measured row"
NEAREST = "nearest measured row"
STALE = "exact measured row, stale"
PREDICTED = "exact predicted row"
CLOSED_FORM = "predictor"
DEFAULT = "default"
RUNGS = (EXACT, NEAREST, STALE, PREDICTED, CLOSED_FORM, DEFAULT)
INVARIANT = "one config for every M"

MAX_DISTANCE = 3.0
"""Octaves (\\|log2\\| of the ratios of N, K and band, summed) up to which another shape's row is better than none."""


@dataclass(frozen=True)
class Rung:
    """One step of the ladder: its name, what came of it in words, and whether it was taken."""

    name: str
    verdict: str
    taken: bool = False


@dataclass(frozen=True)
class Choice:
    """How a problem is computed on a device.

    Attributes
    ----------
    problem : kernels.Problem
    device : DeviceSpec
    path : str
        "fused", "dequant", or "dense" where no kernel of cupyq runs.
    config : kernels.Config or None
        Of the fused or the dequantizing kernel; None for "dense".
    rung : str
        Which step of the ladder answered; `INVARIANT` where results do not depend on M.
    time_us : float or None
        What the row or the predictor says it takes, microseconds, at the upper end of M's band.
    row : db.Found or None
        The database row behind it.
    rungs : tuple of Rung
        Every step down to the one taken.
    """

    problem: Problem
    device: DeviceSpec
    path: str
    config: kernels.Config | None
    rung: str
    time_us: float | None
    row: Any
    rungs: tuple[Rung, ...]

    @property
    def tuned(self) -> bool:
        """Whether a measured row for exactly this problem and band answered, and nothing changed since."""
        return self.rung == EXACT

    @property
    def source(self) -> str | None:
        """Where `time_us` comes from: "measured" or "predicted"; None where there is no time."""
        if self.time_us is None:
            return None
        return "predicted" if self.row is None else str(self.row.source)

    @property
    def preset(self) -> bool:
        """Whether the row behind it is one that cupyq ships, not one of the user's database."""
        return self.row is not None and bool(getattr(self.row, "preset", False))


SEARCH_STEPS = 8
"""Configs that the predictor's search expands where nothing is tuned. Twice as many gain 0.04 % in the geometric mean,
by the predictor itself, and a first product would wait 7 ms longer for them."""

_HELPERS = ("quantize_activations", "pack")

# --- the ladder -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pick:
    path: str
    config: kernels.Config | None
    time_us: float | None
    row: Any = None


def stand_in(m: int) -> int:
    """Return the M that answers for `m`: the upper end of its band or, in the open one, the next power of two."""
    return min(1 << (m - 1).bit_length(), 2**31 - 1)


def climb_down(problem: Problem, device: DeviceSpec) -> Choice:
    """Return the answer of the first rung that has one for exactly this M."""
    rungs = []
    for name, pick, verdict in _ladder(problem, device):
        rungs.append(Rung(name, verdict, pick is not None))
        if pick is not None:
            return Choice(problem, device, pick.path, pick.config, name, pick.time_us, pick.row, tuple(rungs))
    raise AssertionError("the last rung always answers")


def _ladder(problem: Problem, device: DeviceSpec) -> Iterator[tuple[str, _Pick | None, str]]:
    """Yield (rung, what it offers or None, why) in order; stops being asked at the first offer."""
    row, trouble = rows.find(problem, device)
    pick, why = _use(row, problem, device)
    measured = row is not None and row.source == "measured"
    exact = {
        EXACT: measured and not row.stale,
        STALE: measured and row.stale,
        PREDICTED: row is not None and not measured,
    }
    none = trouble or "none in the database"
    yield (EXACT, pick, why) if exact[EXACT] else (EXACT, None, f"stale: {row.stale_because}" if exact[STALE] else none)
    yield (NEAREST, *_nearest(problem, device, trouble))
    yield (STALE, pick, f"{why}; changed since: {row.stale_because}") if exact[STALE] else (STALE, None, none)
    changed = f"; changed since: {row.stale_because}" if row is not None and row.stale else ""
    yield (PREDICTED, pick, why + changed) if exact[PREDICTED] else (PREDICTED, None, none)
    yield (CLOSED_FORM, *_predicted(problem, device))
    yield (DEFAULT, *_default(problem, device))


def _use(row: Any, problem: Problem, device: DeviceSpec) -> tuple[_Pick | None, str]:
    """Turn a row into a pick, or say why it cannot run."""
    if row is None:
        return None, ""
    try:
        config = kernels.from_dict(row.config)
        reason = _refusal(config, row.path, problem, device)
    except (CupyqError, TypeError, ValueError) as error:  # of another version, or not written by cupyq
        return None, f"its config cannot be read: {error}"
    if reason is not None:
        return None, f"cannot run M={problem.m}: {reason}"
    return _Pick(row.path, config, row.time_us, row), rows.said(row)


def _refusal(config: kernels.Config, path: str, problem: Problem, device: DeviceSpec) -> str | None:
    """Say why a row's config cannot take its path, or None."""
    if (path == "dequant") != isinstance(config, kernels.DequantConfig) or config.family in _HELPERS:
        return f"path {path} has no {config.family} config"
    reason = kernels.check(config, problem, device)
    if reason is None and path == "fused" and not getattr(config, "fused", False):
        reason = _helper_reason(problem, device)
    return reason


def _nearest(problem: Problem, device: DeviceSpec, trouble: str | None) -> tuple[_Pick | None, str]:
    refused = ""
    near, fault = rows.near(problem, device) if trouble is None else ([], None)
    for row in near:
        where = f"N={row.n}, K={row.k}, M={row.m}, {row.distance:.2g} octaves away"
        if row.distance > MAX_DISTANCE:
            return None, refused or f"the nearest, {where}, is further than {MAX_DISTANCE:g} octaves"
        pick, why = _use(row, problem, device)
        if pick is not None:
            return _Pick(pick.path, pick.config, None, row), f"{where}: {why}"
        refused = f"{where}: {why}"
    return None, refused or trouble or fault or "none in the database"


def shortlist(problem: Problem, device: DeviceSpec) -> list[tuple[str, kernels.Config]]:
    """Return the (path, config) pairs that the predictor is asked about when nothing is tuned: legal ones only.

    The first is what the predictor itself finds fastest of the fused kernel's configs.
    """
    from . import predictor

    found = predictor.fastest(problem, device, SEARCH_STEPS)
    best = kernels.default(problem, device) if found is None else found.config
    pairs: list[tuple[str, kernels.Config]] = [("fused", best)]
    if problem.weight_only:
        pairs.append(("dequant", dequant.default(problem)))
    elif problem.m <= FUSED_M:  # activations quantized in the kernel, or in a launch before it
        pairs.append(("fused", kernels.default(problem, device, fused=not getattr(best, "fused", False))))
    return [(path, config) for path, config in pairs if kernels.check(config, problem, device) is None]


def _predicted(problem: Problem, device: DeviceSpec) -> tuple[_Pick | None, str]:
    """Ask the predictor about the shortlist."""
    try:
        from . import predictor

        times = [
            (predictor.predict(config if path == "fused" else path, problem, device).time_us, path, config)
            for path, config in shortlist(problem, device)
        ]
    except rows.FAULTS as error:
        return None, f"cannot answer: {error}"
    if not times:
        return None, "no kernel to ask about"
    times.sort(key=lambda item: item[0])
    said = ", ".join(f"{_named(path, config)} {time_us:.4g} us" for time_us, path, config in times)
    time_us, path, config = times[0]
    return _Pick(path, config, time_us), f"predicted at M={problem.m}: {said}"


def _named(path: str, config: kernels.Config) -> str:
    """Return a path's name; of W8A8 both kinds are on the shortlist."""
    if not isinstance(config, kernels.W8A8Config):
        return path
    return "one launch" if config.fused else "two launches"


def _default(problem: Problem, device: DeviceSpec) -> tuple[_Pick, str]:
    config = kernels.default(problem, device)
    reason = device.refusal or kernels.check(config, problem, device)
    if reason is None and not getattr(config, "fused", False):
        reason = _helper_reason(problem, device)
    if reason is None:
        return _Pick("fused", config, None), "the kernels' own choice for this shape and device"
    return _Pick("dense", None, None), f"no kernel runs here ({reason}); weights are dequantized by CuPy"


def _helper_reason(problem: Problem, device: DeviceSpec) -> str | None:
    if problem.weight_only:
        return None
    return kernels.check(quantize_activations.default(problem), problem, device)
