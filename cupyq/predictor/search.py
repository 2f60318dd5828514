"""The fastest config by the closed form, found by asking about a few hundred of the thousands that are legal.

Best first on the grid of a family's tunables: what is the fastest so far is expanded to all configs that differ from it
in one field, or in two that trade with each other. Asking about every legal config takes up to a second; this takes
some tens of milliseconds, less than compiling what it finds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any

from cupyq import kernels
from cupyq.devices import DeviceSpec
from cupyq.errors import ArgumentError, IllegalConfig
from cupyq.kernels import Config, Problem, W4A16Config, W8A8Config, w4a16, w8a8

from .constants import CONSTANTS, Constants
from .paths import predict

STEPS = 16
"""Configs expanded. More take longer and miss less: docs/prediction.md has the regret with this many."""

# Pairs of fields of which one may double while the other halves: a step in either alone changes the work of a CTA.
_TRADES = (
    ("warps_n", "warps_k"), ("strips", "warps_n"), ("block_m", "warp_tokens"), ("warps_k", "warp_k"),
    ("warps_k", "split_k"), ("block_m", "strips"),
)  # fmt: skip


@dataclass(frozen=True)
class Fastest:
    """What the search came to.

    Attributes
    ----------
    config : Config
    time_us : float
        Predicted.
    asked : int
        Predictions that it took.
    """

    config: Config
    time_us: float
    asked: int


def fastest(
    problem: Problem, device: DeviceSpec, steps: int = STEPS, constants: Constants = CONSTANTS
) -> Fastest | None:
    """Return the config of the fused kernel that the closed form takes to be the fastest, or one nearly as fast.

    Parameters
    ----------
    problem : Problem
        M = 0 launches nothing.
    device : DeviceSpec
    steps : int
        Configs expanded.
    constants : Constants

    Returns
    -------
    Fastest or None
        None where no kernel runs. How far it is from the fastest of all legal configs: docs/prediction.md.
    """
    times: dict[Config, float] = {}
    waiting: list[tuple[float, int, Config]] = []

    def ask(configs: Iterable[Config]) -> None:
        for cfg in configs:
            if cfg not in times:
                try:
                    times[cfg] = predict(cfg, problem, device, constants=constants).time_us
                except (IllegalConfig, ArgumentError):
                    times[cfg] = float("inf")
                    continue
                heappush(waiting, (times[cfg], len(times), cfg))

    # Best first: expand the fastest that was not expanded yet. A single descent gets caught where one field alone
    # cannot improve, for waves of CTAs make the time jump.
    default = kernels.default(problem, device)
    ask([default, *_spread(default, problem, device)])
    expanded: set[Config] = set()
    while waiting and len(expanded) < steps:
        best = heappop(waiting)[2]
        if _alike(best) not in expanded:
            expanded.add(_alike(best))
            ask(_neighbours(best, problem, device))
    best = min(times, key=times.__getitem__)
    if times[best] == float("inf"):
        return None
    return Fastest(best, times[best], sum(time != float("inf") for time in times.values()))


def _alike(cfg: Any) -> Config:
    """Return what stands for all configs that differ in the depth of the pipeline only: their neighbours are alike."""
    return replace(cfg, stages=0)


def _axes(cfg: Config) -> dict[str, tuple[Any, ...]]:
    family: Any = w4a16 if isinstance(cfg, W4A16Config) else w8a8
    axes = {
        "block_m": family.BLOCK_M, "strips": family.STRIPS, "warps_n": family.WARPS, "warps_k": family.WARPS,
        "warp_k": family.WARP_K, "stages": family.STAGES,
    }  # fmt: skip
    if isinstance(cfg, W4A16Config):
        return {**axes, "scale": family.SCALE}
    return {**axes, "warp_tokens": family.WARP_TOKENS, "fused": (False, True)}


def _grids(cfg: Config, device: DeviceSpec) -> Iterator[dict[str, int]]:
    """Yield the ways to share a product among CTAs, as fields of a config."""
    if isinstance(cfg, W4A16Config):
        yield from ({"split_k": split, "ctas": 0} for split in w4a16.SPLIT_K)
        yield from ({"split_k": 1, "ctas": device.sms * some} for some in (1, 2, 3))
    else:
        yield from ({"split_k": split} for split in w8a8.SPLIT_K)


def _neighbours(cfg: Any, problem: Problem, device: DeviceSpec) -> Iterator[Config]:
    for name, values in _axes(cfg).items():
        yield from (replace(cfg, **{name: value}) for value in values if value != getattr(cfg, name))
    yield from (replace(cfg, **grid) for grid in _grids(cfg, device))
    for one, other in _TRADES:
        for up, down in ((one, other), (other, one)):
            if hasattr(cfg, up) and hasattr(cfg, down) and getattr(cfg, down) > 1:
                yield replace(cfg, **{up: getattr(cfg, up) * 2, down: getattr(cfg, down) // 2})


def _spread(default: Any, problem: Problem, device: DeviceSpec) -> Iterator[Config]:
    """Yield a few dozen configs far from each other: heights of tile around the default's, few and many warps."""
    heights = [size for size in _axes(default)["block_m"] if size <= max(8, 2 * problem.m)][-4:]
    grids: Iterable[dict[str, int]] = [{"split_k": 1}, {"split_k": 4}]
    if isinstance(default, W4A16Config):
        grids = [{"split_k": 1, "ctas": 0}, {"split_k": 4, "ctas": 0}, {"split_k": 1, "ctas": device.sms}]
    for height in heights:
        for strips, warps_n, warps_k in ((4, 2, 2), (4, 1, 4), (2, 4, 1), (1, 4, 2)):
            for grid in grids:
                cfg = replace(
                    default, block_m=height, strips=strips, warps_n=warps_n, warps_k=warps_k, stages=3, **grid
                )
                if isinstance(cfg, W8A8Config):
                    yield replace(cfg, warp_tokens=min(height, 32), fused=False)
                    yield replace(cfg, warp_tokens=min(height, 16), fused=True)
                else:
                    yield cfg
