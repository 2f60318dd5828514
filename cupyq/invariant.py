"""One config and one split of K for every M, so that the bits of a row of y do not depend on its neighbours.

A kernel adds up a row's products in an order that its config settles: warps along k, k of a stage, the split. Another
config for another batch therefore rounds otherwise, and so do stripes, which cut K where M says. One config, without
stripes, serves a weight whatever M is. cuBLAS, whose order nobody states, is left out.

Candidates are what the ladder would choose for each band, stripes replaced by the nearest split, and the same with
other splits; the predictor says which of them loses least over all bands, in the geometric mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from . import bands, kernels, ladder, rows
from .devices import DeviceSpec
from .errors import IllegalConfig
from .kernels import Problem
from .ladder import INVARIANT, Choice, Rung

Choose = Callable[[Problem, DeviceSpec], Choice]
_SPLITS = (1, 2, 3, 4, 6, 8)


def config_for(problem: Problem, device: DeviceSpec, choose: Choose) -> Choice:
    """Return the choice for M = 1 that serves every M.

    Parameters
    ----------
    problem : kernels.Problem
        Its M does not matter.
    device : DeviceSpec
    choose : callable
        The free choice: (problem, device) -> Choice.

    Raises
    ------
    IllegalConfig
        No kernel of cupyq runs this problem here, or none serves every band.
    """
    free = {band: choose(problem.with_m(band), device) for band in bands.ends()}
    if all(choice.path == "dense" for choice in free.values()):
        why = free[1].rungs[-1].verdict if free[1].rungs else "dense"
        raise IllegalConfig(f"batch_invariant=True needs a kernel of cupyq for {problem.op} on {device.title}: {why}")
    origins = _candidates(free, problem, device)
    legal = [config for config in origins if _serves_every_band(config, problem, device)]
    if not legal:
        raise IllegalConfig(f"batch_invariant=True: no config of {problem.op} on {device.title} serves every band")
    config, verdict = _least_loss(legal, problem, device)
    origin = origins[config]
    return Choice(
        problem.with_m(1), device, "fused", config, INVARIANT, None, origin.row, (Rung(INVARIANT, verdict, True),)
    )


def applied(found: Choice, problem: Problem) -> Choice:
    """Return the one config's choice for a real M; `IllegalConfig` where not even a grid can count its tiles."""
    config, device = found.config, found.device
    assert config is not None
    reason = kernels.check(config, problem, device)
    if reason is not None:
        raise IllegalConfig(f"batch_invariant=True: the config of every M cannot run M={problem.m}: {reason}")
    return replace(found, problem=problem, time_us=_time(config, problem.with_m(ladder.stand_in(problem.m)), device))


def cost(fixed: Choice, free: Choice) -> str:
    """Say what the fixed config costs at this M, both times from the predictor so that they compare."""
    own = free.config if free.path == "fused" else free.path
    at = fixed.problem.with_m(ladder.stand_in(fixed.problem.m))
    mine, other = _time(fixed.config, at, fixed.device), _time(own, at, fixed.device)
    if mine is None or other is None:
        return "not known: the predictor cannot answer"
    if fixed.config == free.config:
        return f"none at M={at.m}: a choice for this M alone is the same config, {mine:.4g} us predicted"
    return (
        f"{mine:.4g} us against {other:.4g} us for {free.path} chosen for M={at.m} alone, "
        f"{mine / other:.2f} times as long (both predicted)"
    )


def _candidates(free: dict[int, Choice], problem: Problem, device: DeviceSpec) -> dict[kernels.Config, Choice]:
    """Return config -> the choice it comes from, measured ones first."""
    found: dict[kernels.Config, Choice] = {}
    for choice in sorted(free.values(), key=lambda c: c.source != "measured"):
        config = choice.config
        if choice.path != "fused":
            config, choice = kernels.default(choice.problem, device), replace(choice, row=None)
        for settled in _without_stripes(config, choice.problem):
            for split in (settled.split_k, *_SPLITS):
                found.setdefault(replace(settled, split_k=split), choice)
    return found


def _without_stripes(config: Any, problem: Problem) -> Iterator[Any]:
    """Yield the config with a split of K that M has no say in."""
    if not getattr(config, "ctas", 0):
        yield config
        return
    nearest = config.ctas / max(1, config.tiles(problem))
    split = min(_SPLITS, key=lambda s: abs(math.log2(s / max(1.0, nearest))))
    yield replace(config, ctas=0, split_k=split)


def _serves_every_band(config: kernels.Config, problem: Problem, device: DeviceSpec) -> bool:
    return all(kernels.check(config, problem.with_m(m), device) is None for band in bands.ends() for m in {1, band})


def _least_loss(configs: list[Any], problem: Problem, device: DeviceSpec) -> tuple[Any, str]:
    """Return the config that loses least against the best of them at each band, and how that was found."""
    times = {c: [_time(c, problem.with_m(band), device) for band in bands.ends()] for c in configs}
    known = {c: [math.log(t) for t in row if t is not None] for c, row in times.items()}
    if any(len(row) < len(bands.ends()) for row in known.values()):
        return configs[0], f"the first of {len(configs)} configs that serve every band; the predictor cannot answer"
    best = [min(column) for column in zip(*known.values(), strict=True)]
    losses = {c: sum(t - least for t, least in zip(row, best, strict=True)) / len(best) for c, row in known.items()}
    winner = min(configs, key=lambda c: losses[c])
    return winner, (
        f"of {len(configs)} configs that serve every band the one that loses least over all of them, "
        f"{math.exp(losses[winner]):.2f} times the best of each in the geometric mean, predicted"
    )


def _time(config: Any, problem: Problem, device: DeviceSpec) -> float | None:
    try:
        from . import predictor

        return float(predictor.predict(config, problem, device).time_us)
    except rows.FAULTS:
        return None
