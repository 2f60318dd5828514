"""Which kernel runs a problem on a device, and why: the ladder of answers, from measured to safe.

1. a measured row of the database for exactly this problem and band;
2. the nearest measured row, at most `MAX_DISTANCE` octaves away in N, K and M together;
3. a measured row for exactly this problem, made by another kernel source, driver or NVRTC (stale);
4. a predicted row for exactly this problem;
5. the predictor's closed form, over `shortlist`;
6. the kernels' own default; or, where no kernel of cupyq runs, CuPy's operations on dequantized weights.

A row counts only if its config is legal for the real M. The database can be missing, damaged, or of another version:
then the ladder starts lower, and nothing else changes.
"""

from __future__ import annotations

import sqlite3
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import bands, kernels
from .devices import DeviceSpec
from .devices import resolve as resolve_device
from .errors import ArgumentError, CupyqError
from .kernels import Problem, dequant, quantize_activations
from .weights import QuantizedWeight

EXACT = "exact measured row"
NEAREST = "nearest measured row"
STALE = "exact measured row, stale"
PREDICTED = "exact predicted row"
CLOSED_FORM = "predictor"
DEFAULT = "default"

MAX_DISTANCE = 3.0
"""Octaves (\\|log2\\| of the ratios of N, K and band, summed) up to which another shape's row is better than none."""

PATH_TITLES = {
    "fused": "one kernel on packed weights",
    "dequant": "dequantize, then cuBLAS",
    "dense": "CuPy's operations on dequantized weights",
    "fp16": "cuBLAS on weights that were never quantized",
}

# What a damaged database, or one of another version, can raise. A product must not fail of it.
_DATABASE_FAULTS = (
    CupyqError, sqlite3.Error, OSError, ImportError, ArithmeticError, AttributeError, LookupError, TypeError,
    ValueError,
)  # fmt: skip
_CACHED_CHOICES = 4096


class UntunedWarning(UserWarning):
    """A problem has no measured row for this device; the message holds the command that makes one."""


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
        Which step of the ladder answered.
    time_us : float or None
        What the row or the predictor says it takes, microseconds.
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


_lock = threading.Lock()
_choices: dict[tuple[int, Problem], Choice] = {}  # by the device's id: a spec has too many fields to hash each time
_store: tuple[Path, Any] | None = None
_warned: set[Any] = set()


def reset() -> None:
    """Forget every choice, open database and warning given: after tuning, new rows count at once."""
    global _store
    with _lock:
        _choices.clear()
        _warned.clear()
        if _store is not None:
            _store[1].close()
        _store = None


def choose(problem: Problem, device: DeviceSpec) -> Choice:
    """Return how `problem` is computed on `device`; remembered until :func:`reset`.

    Parameters
    ----------
    problem : kernels.Problem
        With M >= 1.
    device : DeviceSpec
    """
    found = _choices.get((id(device), problem))
    if found is None or found.device is not device:
        found = _climb_down(problem, device)
        with _lock:
            if len(_choices) >= _CACHED_CHOICES:
                _choices.clear()
            _choices[id(device), problem] = found
    return found


# --- the ladder -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pick:
    path: str
    config: kernels.Config | None
    time_us: float | None
    row: Any = None


def _climb_down(problem: Problem, device: DeviceSpec) -> Choice:
    rungs = []
    for name, pick, verdict in _ladder(problem, device):
        rungs.append(Rung(name, verdict, pick is not None))
        if pick is not None:
            return Choice(problem, device, pick.path, pick.config, name, pick.time_us, pick.row, tuple(rungs))
    raise AssertionError("the last rung always answers")


def _ladder(problem: Problem, device: DeviceSpec) -> Iterator[tuple[str, _Pick | None, str]]:
    """Yield (rung, what it offers or None, why) in order; stops being asked at the first offer."""
    row, near, trouble = _rows(problem, device)
    pick, why = _use(row, problem, device)
    measured = row is not None and row.source == "measured"
    exact = {
        EXACT: measured and not row.stale,
        STALE: measured and row.stale,
        PREDICTED: row is not None and not measured,
    }
    none = trouble or "none in the database"
    yield (EXACT, pick, why) if exact[EXACT] else (EXACT, None, f"stale: {row.stale_because}" if exact[STALE] else none)
    yield (NEAREST, *_nearest(near, problem, device, trouble))
    yield (STALE, pick, f"{why}; changed since: {row.stale_because}") if exact[STALE] else (STALE, None, none)
    yield (PREDICTED, pick, why) if exact[PREDICTED] else (PREDICTED, None, none)
    yield (CLOSED_FORM, *_predicted(problem, device))
    yield (DEFAULT, *_default(problem, device))


def _use(row: Any, problem: Problem, device: DeviceSpec) -> tuple[_Pick | None, str]:
    """Turn a row into a pick, or say why it cannot run."""
    if row is None:
        return None, ""
    try:
        config = kernels.from_dict(row.config)
        reason = kernels.check(config, problem, device)
    except (CupyqError, TypeError, ValueError) as error:  # of another version, or not written by cupyq
        return None, f"its config cannot be read: {error}"
    if reason is not None:
        return None, f"cannot run M={problem.m}: {reason}"
    what = "predicted" if row.source == "predicted" else "measured"
    return _Pick(row.path, config, row.time_us, row), f"{row.time_us:.4g} us {what} at M={row.m}, trial {row.uid[:12]}"


def _nearest(near: list[Any], problem: Problem, device: DeviceSpec, trouble: str | None) -> tuple[_Pick | None, str]:
    refused = ""
    for row in near:
        where = f"N={row.n}, K={row.k}, M={row.m}, {row.distance:.2g} octaves away"
        if row.distance > MAX_DISTANCE:
            return None, refused or f"the nearest, {where}, is further than {MAX_DISTANCE:g} octaves"
        pick, why = _use(row, problem, device)
        if pick is not None:
            return _Pick(pick.path, pick.config, None, row), f"{where}: {why}"
        refused = f"{where}: {why}"
    return None, refused or trouble or "none in the database"


def shortlist(problem: Problem, device: DeviceSpec) -> list[tuple[str, kernels.Config]]:
    """Return the (path, config) pairs that the predictor is asked about when nothing is tuned: legal ones only."""
    pairs: list[tuple[str, kernels.Config]] = [("fused", kernels.default(problem, device))]
    if problem.weight_only:
        pairs.append(("dequant", dequant.default(problem)))
    return [(path, config) for path, config in pairs if kernels.check(config, problem, device) is None]


def _predicted(problem: Problem, device: DeviceSpec) -> tuple[_Pick | None, str]:
    """Ask the predictor about the shortlist."""
    try:
        from . import predictor

        times = [
            (predictor.predict(config if path == "fused" else path, problem, device).time_us, path, config)
            for path, config in shortlist(problem, device)
        ]
    except _DATABASE_FAULTS as error:
        return None, f"cannot answer: {error}"
    if not times:
        return None, "no kernel to ask about"
    times.sort(key=lambda item: item[0])
    said = ", ".join(f"{path} {time_us:.4g} us" for time_us, path, _ in times)
    time_us, path, config = times[0]
    return _Pick(path, config, time_us), f"predicted: {said}"


def _default(problem: Problem, device: DeviceSpec) -> tuple[_Pick, str]:
    config = kernels.default(problem, device)
    reason = device.refusal or kernels.check(config, problem, device) or _helper_reason(problem, device)
    if reason is None:
        return _Pick("fused", config, None), "the kernels' own choice for this shape and device"
    return _Pick("dense", None, None), f"no kernel runs here ({reason}); weights are dequantized by CuPy"


def _helper_reason(problem: Problem, device: DeviceSpec) -> str | None:
    if problem.weight_only:
        return None
    return kernels.check(quantize_activations.default(problem), problem, device)


# --- the database -----------------------------------------------------------------------------------------------------


def _rows(problem: Problem, device: DeviceSpec) -> tuple[Any, list[Any], str | None]:
    """Return (exact row or None, nearest rows, what is wrong with the database or None)."""
    paths = ("fused", "dequant") if problem.weight_only else ("fused",)
    try:
        store = open_store()
        if store is None:
            return None, [], "there is no database"
        return store.lookup(device, problem, paths=paths), store.nearest(device, problem, paths=paths), None
    except _DATABASE_FAULTS as error:
        _warn_database(error)
        return None, [], f"the database cannot be used: {error}"


def open_store() -> Any:
    """Return the tuning database, opened for reading once a process, or None when there is none."""
    global _store
    from . import db

    path = db.default_path()
    if _store is not None and _store[0] == path:
        return _store[1]
    store = db.open_or_none(path)
    if store is not None:
        with _lock:
            _store = (path, store)
    return store


def _warn_database(error: BaseException) -> None:
    if ("database", str(error)) not in _warned:
        _warned.add(("database", str(error)))
        warnings.warn(
            f"the tuning database cannot be used ({error}); cupyq chooses its kernels without it",
            RuntimeWarning,
            stacklevel=2,
        )


# --- what users read --------------------------------------------------------------------------------------------------


def tune_command(problem: Problem, device: DeviceSpec, every_band: bool = False) -> str:
    """Return the shell command that measures (or, for a GPU that is not here, predicts) this problem.

    `every_band` leaves M out, so that all bands are tuned.
    """
    words = [f"python -m cupyq.tune --op {problem.op} --k {problem.k} --n {problem.n}"]
    if not every_band:
        words.append(f"--m {problem.m}")
    if problem.weight_only:
        words.append(f"--group-sizes={problem.group_size}")
        if not problem.symmetric:
            words.append("--asymmetric")
    if problem.dtype != "float16":
        words.append(f"--dtype {problem.dtype}")
    if not device.live:
        words.append(f"--device {device.name}")
    return " ".join(words)


def warn_untuned(choice: Choice) -> None:
    """Warn, once for each weight's shape and device, that no measured row stands behind a choice."""
    if choice.tuned:
        return
    problem = choice.problem
    key = (choice.device, problem.with_m(1))
    with _lock:
        if key in _warned:
            return
        _warned.add(key)
    warnings.warn(
        f"{describe(problem)} is not tuned for {choice.device.title} (M={problem.m} goes by: {choice.rung}). "
        f"It works; to make it fast, run: {tune_command(problem, choice.device, every_band=True)}",
        UntunedWarning,
        stacklevel=2,
    )


def describe(problem: Problem) -> str:
    """Say in words what a problem is, M excepted."""
    parts = [problem.op, f"K={problem.k}", f"N={problem.n}"]
    if problem.weight_only:
        parts.append("one group a column" if problem.group_size == -1 else f"group_size={problem.group_size}")
        parts.append("symmetric" if problem.symmetric else "asymmetric")
        if problem.scale_dtype != problem.dtype:
            parts.append(f"{problem.scale_dtype} scales")
    return f"{', '.join(parts)}, {problem.dtype}"


@dataclass(frozen=True)
class Explanation:
    """Which kernel runs a problem, and why not another. `print` it.

    Attributes
    ----------
    choice : Choice
    others : tuple of str
        What is known of the paths not taken, a sentence each.
    command : str
        The shell command that tunes this problem.
    """

    choice: Choice
    others: tuple[str, ...]
    command: str

    def __str__(self) -> str:
        choice, problem = self.choice, self.choice.problem
        band = bands.of(problem.m)
        upper = "and above" if band == bands.OPEN_END else f"to {band}"
        here = f"CUDA device {choice.device.ordinal}" if choice.device.live else "not in this machine"
        lines = [
            f"{describe(problem)}, M={problem.m} (band {bands.lower_end(band)} {upper})",
            f"on {choice.device.title} ({choice.device.name}, {choice.device.compute_capability}, {here})",
            "",
            f"path    {choice.path}: {PATH_TITLES[choice.path]}",
            f"config  {choice.config if choice.config is not None else 'none'}",
            f"from    {choice.rung}" + ("" if choice.time_us is None else f", {choice.time_us:.4g} us"),
            "",
            "order of answers:",
        ]
        names = [EXACT, NEAREST, STALE, PREDICTED, CLOSED_FORM, DEFAULT]
        said = {rung.name: rung for rung in choice.rungs}
        for number, name in enumerate(names, 1):
            rung = said.get(name)
            mark = ">" if rung is not None and rung.taken else " "
            lines.append(f"{mark} {number}. {name}: {'not needed' if rung is None else rung.verdict}")
        if self.others:
            lines += ["", "other paths:", *(f"  {other}" for other in self.others)]
        if not choice.tuned:
            lines += ["", f"tune it with: {self.command}"]
        return "\n".join(lines)


def explain(
    m: int,
    qw: QuantizedWeight | Problem,
    device: DeviceSpec | str | int | None = None,
    *,
    dtype: str = "float16",
) -> Explanation:
    """Say which kernel multiplies M tokens by a weight on a device, from which row, and why not another.

    Parameters
    ----------
    m : int
        Tokens, at least 1.
    qw : QuantizedWeight or kernels.Problem
        A problem's own M and dtype are replaced by `m` and kept, respectively.
    device : DeviceSpec, str or int, optional
        A spec, a catalogue name, or the ordinal of a card here. Default: where `qw` lives, else CuPy's current device.
    dtype : str
        "float16" or "bfloat16": of the activations.

    Returns
    -------
    Explanation
        Its text is `str` of it.

    Raises
    ------
    UnknownDevice, NoDevice, NotInstalled
        No such device; or none was named and this machine has none.
    """
    if isinstance(qw, QuantizedWeight):
        problem = Problem.of(m, qw, dtype)
        device = qw.device if device is None else device
    elif isinstance(qw, Problem):
        problem = qw.with_m(m)
    else:
        raise ArgumentError(f"qw must be a QuantizedWeight or a kernels.Problem, got {type(qw).__name__}")
    bands.of(problem.m)  # M = 0 launches nothing
    spec = resolve_device(device)
    choice = choose(problem, spec)
    return Explanation(choice, tuple(_others(choice)), tune_command(problem, spec))


def _others(choice: Choice) -> Iterator[str]:
    """Yield what the database, or else the predictor, knows of the paths that were not taken."""
    try:
        store = open_store()
        rows = {} if store is None else store.paths(choice.device, choice.problem)
    except _DATABASE_FAULTS as error:
        _warn_database(error)
        rows = {}
    paths = ("fused", "dequant", "fp16") if choice.problem.weight_only else ("fused", "fp16")
    for path in paths:
        if path == choice.path:
            continue
        row = rows.get(path)
        if row is not None:
            said = f"{row.time_us:.4g} us {row.source}" + (f" (stale: {row.stale_because})" if row.stale else "")
        else:
            said = _predicted_path(path, choice)
        yield f"{path} ({PATH_TITLES[path]}): {said}"


def _predicted_path(path: str, choice: Choice) -> str:
    try:
        from . import predictor

        return f"{predictor.predict(path, choice.problem, choice.device).time_us:.4g} us predicted"
    except _DATABASE_FAULTS as error:
        return f"unknown: {error}"
