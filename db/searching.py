"""Finding a fast config by the predictor's closed form without asking about every one: descent, field by field.

A sweep of one problem's space takes about a second, and presets hold tens of thousands of problems. Descent from what
was good for problems like it takes some milliseconds and is off by a few percent at most, and the predictor by
more.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cupyq import bands, kernels, predictor
from cupyq.devices import DeviceSpec
from cupyq.errors import CupyqError
from cupyq.kernels import Config, Problem

# Fields that trade against each other: moving one alone is rarely worth it, moving all at once often is.
_TOGETHER = ("block_m", "warp_tokens", "strips", "warps_n", "warps_k")

Domain = Mapping[str, Sequence[Any]]
"""Field of a config -> the values that occur among legal configs."""


def domain(problem: Problem, device: DeviceSpec) -> Domain:
    """Return what each field of a fused config may be on a device, for problems like this one whatever their M."""
    found: dict[str, dict[Any, None]] = {}
    for m in (1, bands.OPEN_END):
        for config in kernels.configs(problem.with_m(m), device):
            for name, value in vars(config).items():
                found.setdefault(name, {})[value] = None
    return {name: list(values) for name, values in found.items() if len(values) > 1}


def legal(config: Config, problem: Problem, device: DeviceSpec) -> bool:
    """Return whether a config runs everywhere in the band of `problem`, whose M is the upper end."""
    lower = problem.with_m(bands.lower_end(bands.of(problem.m)))
    return kernels.check(config, problem, device) is None and kernels.check(config, lower, device) is None


class Search:
    """The closed form's times of one problem on one device, asked for once each.

    Parameters
    ----------
    problem : Problem
        With M the upper end of its band.
    device : DeviceSpec

    Attributes
    ----------
    times : dict of Config to float
        Microseconds; infinite for what cannot run.
    """

    def __init__(self, problem: Problem, device: DeviceSpec) -> None:
        self.problem, self.device = problem, device
        self.times: dict[Config, float] = {}

    def time(self, config: Config) -> float:
        """Return the predicted microseconds of a config."""
        known = self.times.get(config)
        if known is None:
            known = self.times[config] = self._ask(config)
        return known

    def _ask(self, config: Config) -> float:
        try:
            if not legal(config, self.problem, self.device):
                return float("inf")
            return float(predictor.predict(config, self.problem, self.device).time_us)
        except CupyqError:
            return float("inf")

    def descend(self, starts: Iterable[Config], fields: Domain, wide: bool) -> list[Config]:
        """Return every config that was asked about and can run, fastest first.

        Parameters
        ----------
        starts : iterable of Config
            The fastest of them is where the descent starts.
        fields : Domain
        wide : bool
            Where no single field helps any more, try all combinations of those that trade against each other.
        """
        best = min(starts, key=self.time)
        while True:
            better = min(self._neighbours(best, fields), key=self.time, default=best)
            if wide and self.time(better) >= self.time(best):
                better = min(self._combinations(best, fields), key=self.time, default=best)
            if self.time(better) >= self.time(best):
                break
            best = better
        found = [config for config, time_us in self.times.items() if time_us < float("inf")]
        return sorted(found, key=self.time)

    def _neighbours(self, config: Any, fields: Domain) -> Iterable[Config]:
        return (
            dataclasses.replace(config, **{name: value})
            for name, values in fields.items()
            for value in values
            if value != getattr(config, name)
        )

    def _combinations(self, config: Any, fields: Domain) -> Iterable[Config]:
        names = [name for name in _TOGETHER if name in fields]
        for values in itertools.product(*(fields[name] for name in names)):
            yield dataclasses.replace(config, **dict(zip(names, values, strict=True)))
