"""The search space of one problem on one device: every legal candidate, and why the others are not."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cupyq import bands, kernels
from cupyq.devices import DeviceSpec
from cupyq.errors import TuningError

from .candidate import Candidate

SWEEP_LIMIT = 200
"""Spaces of at most this many legal fused configs are swept whole; a sampler would only add luck."""


@dataclass(frozen=True)
class Space:
    """Every legal candidate of a problem.

    Attributes
    ----------
    problem : Problem
        With M the upper end of its band.
    device : DeviceSpec
    """

    problem: kernels.Problem
    device: DeviceSpec

    @functools.cached_property
    def fused(self) -> tuple[Candidate, ...]:
        """Legal configs of the fused kernel that are worth a look, in a fixed order, the default first."""
        default = self.default
        found = [default] if default is not None else []
        found += [
            candidate
            for cfg in kernels.configs(self.problem, self.device)
            if (candidate := Candidate("fused", cfg)) != default
        ]
        return tuple(found)

    @functools.cached_property
    def dequant(self) -> tuple[Candidate, ...]:
        """Legal configs of the dequantizing kernel; none for 8-bit weights, whose dense product is "fp16"."""
        if not self.problem.weight_only:
            return ()
        found = kernels.helper_configs("dequant", self.problem, self.device)
        return tuple(Candidate("dequant", cfg) for cfg in found)

    @functools.cached_property
    def fp16(self) -> Candidate:
        """The yardstick: plain cuBLAS on 16-bit weights."""
        return Candidate("fp16")

    @functools.cached_property
    def default(self) -> Candidate | None:
        """The config used when nothing is tuned; None where it is not legal (no kernel runs here)."""
        cfg = kernels.default(self.problem, self.device)
        return Candidate("fused", cfg) if kernels.check(cfg, self.problem, self.device) is None else None

    @functools.cached_property
    def small(self) -> bool:
        """Whether the fused space is swept whole."""
        legal = kernels.configs(self.problem, self.device)
        return next(itertools.islice(legal, SWEEP_LIMIT, None), None) is None  # without counting a large one to its end

    def __len__(self) -> int:
        return len(self.fused) + len(self.dequant) + 1

    def __contains__(self, candidate: object) -> bool:
        return candidate in self._all

    @functools.cached_property
    def _all(self) -> frozenset[Candidate]:
        return frozenset((*self.fused, *self.dequant, self.fp16))

    def refusal(self, candidate: Candidate) -> str | None:
        """Say why `candidate` is illegal somewhere in the problem's band, or return None.

        A config is stored for a whole band, so it has to be legal at the band's lower end as well.
        """
        if candidate.config is None:
            return None
        lower = bands.lower_end(bands.of(max(1, self.problem.m)))
        for problem in (self.problem, self.problem.with_m(lower)):
            reason = kernels.check(candidate.config, problem, self.device)
            if reason is not None:
                return reason
        return None

    def legal(self, candidates: Iterable[Candidate | None]) -> list[Candidate]:
        """Return those of `candidates` that are legal here, each once, in order."""
        kept: dict[str, Candidate] = {}
        for candidate in candidates:
            if candidate is not None and candidate.key not in kept and self.refusal(candidate) is None:
                kept[candidate.key] = candidate
        return list(kept.values())

    def require_fused(self) -> None:
        """Raise TuningError with the kernel's own reason when no fused config is legal."""
        if next(kernels.configs(self.problem, self.device), None) is None:
            cfg = kernels.default(self.problem, self.device)
            reason = kernels.check(cfg, self.problem, self.device)
            raise TuningError(f"no kernel of {self.problem.op} runs on {self.device.name}: {reason}")


def neighbours(store: Any, device: DeviceSpec, problem: kernels.Problem, limit: int = 4) -> list[Candidate]:
    """Return candidates that won on shapes and bands near `problem` in the database, nearest first.

    They may be illegal for `problem`: pass them through `Space.legal`.
    """
    from .candidate import from_row

    found = store.nearest(device, problem, limit=limit)
    rows = [{"path": row.path, "config": row.config} for row in found]
    return [candidate for row in rows if (candidate := from_row(row)) is not None]
