"""Which kernel runs a problem on a device, and why; remembered, explained, and warned of where nothing is tuned.

The answers come from the ladder (`cupyq.ladder`), a band at a time; with ``batch_invariant=True`` one config serves
every M (`cupyq.invariant`).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from . import bands, invariant, kernels, ladder, rows
from .devices import DeviceSpec
from .devices import resolve as resolve_device
from .errors import ArgumentError
from .kernels import Problem
from .ladder import (
    CLOSED_FORM,
    DEFAULT,
    EXACT,
    INVARIANT,
    MAX_DISTANCE,
    NEAREST,
    PREDICTED,
    RUNGS,
    STALE,
    Choice,
    Rung,
    shortlist,
)
from .rows import open_store
from .weights import QuantizedWeight

__all__ = [
    "CLOSED_FORM", "DEFAULT", "EXACT", "INVARIANT", "MAX_DISTANCE", "NEAREST", "PREDICTED", "STALE", "Choice",
    "Explanation", "Rung", "UntunedWarning", "choose", "choose_invariant", "describe", "explain", "open_store", "reset",
    "shortlist", "tune_command", "warn_untuned",
]  # fmt: skip

PATH_TITLES = {
    "fused": "one kernel on packed weights",
    "dequant": "dequantize, then cuBLAS",
    "dense": "CuPy's operations on dequantized weights",
    "fp16": "cuBLAS on weights that were never quantized",
}

_CACHED_CHOICES = 4096


class UntunedWarning(UserWarning):
    """A problem has no measured row for this device; the message holds the command that makes one."""


_Key = tuple[int, Problem]  # by the device's id: a spec has too many fields to hash each time
_lock = threading.Lock()
_choices: dict[_Key, Choice] = {}
_bands: dict[_Key, Choice] = {}  # what the ladder says at the upper end of each band
_invariant: dict[_Key, Choice] = {}  # by problems of M = 1; never dropped before `reset`, or bits could change
_warned: set[Any] = set()


def reset() -> None:
    """Forget every choice, open database and warning given: after tuning, new rows count at once."""
    with _lock:
        for memory in (_choices, _bands, _invariant):
            memory.clear()
        _warned.clear()
        rows.reset()


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
        found = _of_band(problem, device)
        _remember(_choices, (id(device), problem), found)
    return found


def _of_band(problem: Problem, device: DeviceSpec) -> Choice:
    """Return the answer of the problem's band where it is legal for the real M, else the real M's own."""
    end = problem.with_m(ladder.stand_in(problem.m))
    found = _bands.get((id(device), end))
    if found is None or found.device is not device:
        found = ladder.climb_down(end, device)
        _remember(_bands, (id(device), end), found)
    if end.m == problem.m:
        return found
    if found.config is not None and kernels.check(found.config, problem, device) is not None:
        return ladder.climb_down(problem, device)
    return replace(found, problem=problem)


def choose_invariant(problem: Problem, device: DeviceSpec) -> Choice:
    """Return how `problem` is computed with the one config that serves every M.

    Raises
    ------
    IllegalConfig
        No kernel of cupyq runs this problem here.
    """
    key = (id(device), problem.with_m(1))
    found = _invariant.get(key)
    if found is None or found.device is not device:
        made = invariant.config_for(problem, device, choose)
        with _lock:
            found = _invariant[key] = made
    return invariant.applied(found, problem)


def _remember(memory: dict[_Key, Choice], key: _Key, choice: Choice) -> None:
    with _lock:
        if len(memory) >= _CACHED_CHOICES:
            memory.clear()
        memory[key] = choice


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
    if choice.tuned or (choice.rung == INVARIANT and choice.row is not None and choice.row.source == "measured"):
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
    cost : str or None
        With batch_invariant=True: what one config for every M costs here.
    """

    choice: Choice
    others: tuple[str, ...]
    command: str
    cost: str | None = None

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
            f"from    {choice.rung}"
            + ("" if choice.time_us is None else f", {choice.time_us:.4g} us {choice.source}")
            + (", preset" if choice.preset else ""),
        ]
        if self.cost is not None:
            lines += [f"chosen  {choice.rungs[0].verdict}", f"cost    {self.cost}"]
        else:
            lines += ["", "order of answers:"]
        said = {rung.name: rung for rung in choice.rungs}
        for number, name in enumerate(RUNGS if self.cost is None else (), 1):
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
    batch_invariant: bool = False,
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
    batch_invariant : bool
        Explain the one config that serves every M (see `matmul`), with what it costs at this M.

    Returns
    -------
    Explanation
        Its text is `str` of it.

    Raises
    ------
    UnknownDevice, NoDevice, NotInstalled
        No such device; or none was named and this machine has none.
    IllegalConfig
        `batch_invariant`, and no kernel of cupyq runs the problem on the device.
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
    free = choose(problem, spec)
    choice = choose_invariant(problem, spec) if batch_invariant else free
    cost = invariant.cost(choice, free) if batch_invariant else None
    return Explanation(choice, tuple(_others(choice)), tune_command(problem, spec), cost)


def _others(choice: Choice) -> Iterator[str]:
    """Yield what the database, or else the predictor, knows of the paths that were not taken."""
    found = rows.by_path(choice.problem, choice.device)
    paths = ("fused", "dequant", "fp16") if choice.problem.weight_only else ("fused", "fp16")
    for path in paths:
        if path == choice.path:
            continue
        row = found.get(path)
        if row is not None:
            notes = ["a preset"] * row.preset + [f"stale: {row.stale_because}"] * row.stale
            said = f"{row.time_us:.4g} us {row.source}" + (f" ({'; '.join(notes)})" if notes else "")
        else:
            said = _predicted_path(path, choice)
        yield f"{path} ({PATH_TITLES[path]}): {said}"


def _predicted_path(path: str, choice: Choice) -> str:
    try:
        from . import predictor

        at = choice.problem.with_m(ladder.stand_in(choice.problem.m))
        return f"{predictor.predict(path, at, choice.device).time_us:.4g} us predicted"
    except rows.FAULTS as error:
        return f"unknown: {error}"
