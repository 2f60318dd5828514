"""A candidate: one way to compute a problem, which is a path and, but for plain cuBLAS, a kernel's config."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cupyq import kernels
from cupyq.errors import ArgumentError

PATHS = ("fused", "dequant", "fp16")


@dataclass(frozen=True)
class Candidate:
    """A path and its config.

    Attributes
    ----------
    path : {"fused", "dequant", "fp16"}
        The kernel on packed weights; dequantize, then cuBLAS; plain 16-bit cuBLAS on weights that were never quantized.
    config : Config or None
        Tunables of the kernel of ours that the path runs; None for "fp16", which runs none.
    """

    path: str
    config: kernels.Config | None = None

    def __post_init__(self) -> None:
        if self.path not in PATHS:
            raise ArgumentError(f"path={self.path!r} is unknown; accepted: {', '.join(PATHS)}")
        if (self.path == "fp16") != (self.config is None):
            raise ArgumentError(f"path={self.path!r} with config={self.config!r}; only 'fp16' goes without a config")

    @functools.cached_property
    def key(self) -> str:
        """Text that is equal exactly for equal candidates, in this process and in any other."""
        return stable_key(self.path, None if self.config is None else {"family": self.config.family, **self.tunables})

    @functools.cached_property
    def tunables(self) -> dict[str, Any]:
        """The config's fields by name; empty for "fp16"."""
        # Configs are flat, so their own dict is what dataclasses.asdict would copy field by field.
        return {} if self.config is None else dict(vars(self.config))

    def __str__(self) -> str:
        if self.config is None:
            return "fp16 cuBLAS"
        fields = " ".join(f"{name}={value}" for name, value in self.tunables.items())
        return f"{self.path} {fields}"


def stable_key(path: str, config: Mapping[str, Any] | None) -> str:
    """Return `Candidate.key` of a path and a config's dict, also for configs that this version cannot read."""
    return path + " " + json.dumps(dict(config or {}), sort_keys=True, separators=(",", ":"))


def from_row(row: Mapping[str, Any]) -> Candidate | None:
    """Return the candidate of a database row (`path`, `config`); None when this version cannot read its config."""
    try:
        return Candidate(row["path"], kernels.from_dict(row["config"]) if row["config"] else None)
    except ArgumentError:
        return None


def source_hash(candidate: Candidate, problem: kernels.Problem) -> str | None:
    """Return the hash of the kernel source that the candidate runs; None where the kernel is not ours."""
    return None if candidate.config is None else kernels.source_hash(candidate.config, problem)
