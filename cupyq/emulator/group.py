"""The threads that execute one instruction together: some warps of a wave, each with a mask of lanes."""

from __future__ import annotations

from typing import Any

import numpy as np


class Group:
    """Warps at the same instruction.

    Attributes
    ----------
    m : Machine
    rows : ndarray or None
        Indices of the warps in the wave; None means every warp, and then registers are used with no copy.
    mask : ndarray or None
        (n, 32) bool, the lanes that execute; None means all.
    """

    __slots__ = ("R", "cache", "dirty", "m", "mask", "n", "rows", "shape", "warps")

    def __init__(self, m: Any, rows: np.ndarray | None, mask: np.ndarray | None) -> None:
        self.m, self.R, self.rows, self.mask = m, m.registers, rows, mask
        self.warps = m.all_warps if rows is None else rows
        self.n = len(self.warps)
        self.shape = (self.n, 32)
        self.cache: dict[int, np.ndarray] = {}
        self.dirty: set[int] = set()

    def get(self, slot: int) -> np.ndarray:
        """A register over the group's warps, (n, 32). Never to be changed in place."""
        if self.rows is None:
            return self.R[slot]
        found = self.cache.get(slot)
        if found is None:
            found = self.cache[slot] = self.R[slot].take(self.rows, axis=0)
        return found

    def put(self, slot: int, value: np.ndarray) -> None:
        """Replace a register in the executing lanes. The group owns `value` from here on."""
        if self.mask is not None:
            value = np.where(self.mask, value, self.get(slot))
        if self.rows is None:
            self.R[slot] = value
        else:
            self.cache[slot] = value
            self.dirty.add(slot)

    def flush(self) -> None:
        """Write what a partial group computed back to the wave's registers."""
        for slot in self.dirty:
            self.R[slot][self.rows] = self.cache[slot]
        self.dirty.clear()
        self.cache.clear()

    def active(self, guard: tuple[int, bool] | None) -> np.ndarray | None:
        """Lanes that execute under a guard: (n, 32) bool, or None where all do."""
        if guard is None:
            return self.mask
        p = self.get(guard[0])
        if guard[1]:
            p = ~p
        if self.mask is not None:
            p = p & self.mask
        elif p.all():
            return None
        return p

    def special(self, name: str) -> np.ndarray:
        """A special register over the group's threads."""
        value = self.m.special(name)
        return value if self.rows is None else value.take(self.rows, axis=0)

    def flat(self, value: np.ndarray, active: np.ndarray | None) -> np.ndarray:
        """The values of the active lanes, one after another."""
        return value.reshape(-1) if active is None else value[active]

    def shared_base(self, active: np.ndarray | None) -> np.ndarray:
        """Byte position of the CTA's shared memory for each active lane."""
        if active is None:
            if self.rows is None:
                return self.m.lane_base
            return np.repeat(self.m.warp_base[self.rows], 32)
        return np.repeat(self.m.warp_base[self.warps], active.sum(1))

    def flat_warps(self, active: np.ndarray | None) -> np.ndarray:
        """Index of the warp of each active lane."""
        if active is None:
            return np.repeat(self.warps, 32)
        return np.repeat(self.warps, active.sum(1))

    def flat_threads(self, active: np.ndarray | None) -> np.ndarray:
        """Index in the wave of each active thread."""
        if active is None and self.rows is None:
            return self.m.all_threads
        threads = (self.warps[:, None] * 32 + np.arange(32)).reshape(self.shape)
        return threads.reshape(-1) if active is None else threads[active]

    def live(self) -> np.ndarray:
        """Lanes of the group's warps that have not exited."""
        return self.m.lane_live(self.warps)

    def converged(self, ins: Any, named: np.ndarray | None = None, active: np.ndarray | None = None) -> bool:
        """Whether every lane that must take part in a ``.sync`` instruction is here.

        `named` is the mask of lanes (None: all that have not exited). Where some are missing the warp's lanes are
        parked here until the others come, or exit; the caller returns `PARK`.
        """
        mask = self.mask if active is None else active
        if mask is None and self.mask is None:
            return True
        if mask is None:
            return True
        need = self.live()
        if named is not None:
            need = need & named
        missing = (need & ~mask).any(1)
        if active is not None and self.mask is not None:
            # Lanes kept away by the instruction's own guard will never come.
            missing = (need & ~self.mask).any(1)
        elif active is not None:
            missing = np.zeros(self.n, bool)
        if not missing.any():
            return True
        self.m.park(self, missing, ins.index)
        return False


PARK = object()
"""What an operation returns when it could not run: lanes it waits for have not come."""
