"""What comes out of the database for a problem: one row, and how far it can be trusted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Found:
    """A row that answers for a problem: what to run, and how far it can be trusted.

    `distance` is 0 for the exact shape and band, else the octaves between the stored shape and the asked one:
    |log2(n/n')| + |log2(k/k')| + |log2(band/band')|. `stale_because` names what changed since ("kernel source",
    "driver", "NVRTC", joined by commas), and is "" for a row that is not stale.
    """

    path: str
    config: dict[str, Any]
    source: str
    stale_because: str
    distance: float
    time_us: float
    time_low_us: float | None
    time_high_us: float | None
    error: float | None
    op: str
    dtype: str
    scale_dtype: str
    m: int
    n: int
    k: int
    group_size: int
    symmetric: bool
    band: int
    device: str
    uid: str
    preset: bool = False

    @property
    def stale(self) -> bool:
        """Whether something that the time depends on has changed since."""
        return bool(self.stale_because)
