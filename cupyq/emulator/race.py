"""The race checker: two warps touch the same bytes, one of them writes, and nothing orders them.

Which accesses are ordered is a matter of barriers, mbarriers, and releases that are acquired (`clocks`), not of the
order in which the emulator happened to run them. A granule is the shortest access of the program to that memory. Lanes
of one warp are not checked against each other.
"""

from __future__ import annotations

from typing import Any

from .race_global import GlobalHistory
from .race_granule import granule
from .race_shared import SharedRaces

__all__ = ["GlobalHistory", "RaceChecker"]


class RaceChecker(SharedRaces):
    """The checker of one wave of a launch."""

    def __init__(self, m: Any, history: GlobalHistory) -> None:
        super().__init__(m, history, granule(m.program, True))
