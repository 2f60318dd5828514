"""mbarrier objects, and the queue of bulk copies that complete on them.

A phase ends when no arrival is pending and the count of bytes is zero; the count may be below zero for a while (bytes
that came before they were announced). A copy lands when somebody polls the barrier it signals, or earlier when warps
are shuffled by a seed: whoever reads without having waited finds bytes in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


class Mbarriers:
    """All mbarriers of a wave, by their byte position in its shared memory."""

    def __init__(self, m: Any) -> None:
        self.m = m
        self.slot_of = np.full(len(m.shared.data) >> 3, -1, np.int32)
        self.n = 0
        columns = m.race.columns if m.race is not None else 1
        self._resize(64, columns)
        self.queue: list[tuple[int, Callable[[], None]]] = []  # (slot signalled, what to do)
        self.far: dict[int, np.ndarray] = {}
        self.far_done: dict[int, np.ndarray] = {}

    def _resize(self, n: int, columns: int) -> None:
        def grow(name: str, shape: tuple) -> None:
            new = np.zeros(shape, np.int64)
            old = getattr(self, name, None)
            if old is not None:
                new[: len(old)] = old
            setattr(self, name, new)

        for name in ("phase", "pending", "count", "bytes"):
            grow(name, (n,))
        for name in ("clock", "clock_done", "proxied", "proxied_done"):
            grow(name, (n, columns))

    def init(self, position: np.ndarray, count: np.ndarray) -> None:
        for at, expected in zip(position >> 3, count, strict=True):
            slot = int(self.slot_of[at])
            if slot < 0:
                slot = self.n
                self.n += 1
                if slot == len(self.phase):
                    self._resize(2 * slot, self.clock.shape[1])
                self.slot_of[at] = slot
            self.phase[slot] = 0
            self.pending[slot] = self.count[slot] = int(expected)
            self.bytes[slot] = 0
            for table in (self.clock, self.clock_done, self.proxied, self.proxied_done):
                table[slot] = 0

    def invalidate(self, position: np.ndarray) -> None:
        self.slot_of[position >> 3] = -1

    def advance(self, slot: int) -> None:
        """End the phase if it is complete."""
        if self.pending[slot] == 0 and self.bytes[slot] == 0:
            self.phase[slot] += 1
            self.pending[slot] = self.count[slot]
            self.clock_done[slot] = self.clock[slot]
            self.proxied_done[slot] = self.proxied[slot]
            if slot in self.far:
                self.far_done[slot] = self.far.pop(slot)
            self.m.progress()

    def arrive(self, slots: np.ndarray, counts: np.ndarray, warps: np.ndarray, release: bool = True) -> None:
        """Each entry is one thread that arrives `counts` times."""
        race = self.m.race
        if race is not None and release:
            np.maximum.at(self.clock, slots, race.present(warps))
            if race.proxied is not None:
                np.maximum.at(self.proxied, slots, race.proxied[warps])
            if self.m.cluster_size > 1:
                for slot, warp in {(int(s), int(w)) for s, w in zip(slots, warps, strict=True)}:
                    known = race.snapshot(warp)
                    old = self.far.get(slot)
                    self.far[slot] = known if old is None else np.maximum(old, known)
            race.tick()
        for slot in np.unique(slots):
            left = int(counts[slots == slot].sum())
            while left:
                step = min(left, int(self.pending[slot]))
                if step == 0:
                    raise OverflowError(int(slot))
                self.pending[slot] -= step
                left -= step
                self.advance(int(slot))

    def add_bytes(self, slot: int, amount: int) -> None:
        self.bytes[slot] += amount
        self.advance(slot)

    def passed(self, slots: np.ndarray, parity: np.ndarray) -> np.ndarray:
        """Whether the phase of this parity has ended."""
        return (self.phase[slots] & 1) != (parity & 1)

    def acquire(self, slots: np.ndarray, warps: np.ndarray) -> None:
        """Warps saw a phase end: they know what all who arrived knew."""
        race = self.m.race
        if race is None:
            return
        np.maximum.at(race.clock, warps, self.clock_done[slots])
        if race.proxied is not None:
            np.maximum.at(race.proxied, warps, self.proxied_done[slots])
        if self.far_done:
            for slot, warp in {(int(s), int(w)) for s, w in zip(slots, warps, strict=True)}:
                if slot in self.far_done:
                    race.learn(warp, self.far_done[slot])
        race.clock[race.own] = race.clock[race.own].max()
        race.refresh(np.unique(warps))

    def deliver(self, slots: Any = None) -> bool:
        """Land the copies that signal these barriers (None: all); whether there were any."""
        if not self.queue:
            return False
        wanted = None if slots is None else {int(s) for s in slots}
        ready = [item for item in self.queue if wanted is None or item[0] in wanted]
        if ready:
            self.queue = [item for item in self.queue if wanted is not None and item[0] not in wanted]
            for _, land in ready:
                land()
            self.m.progress()
        return bool(ready)
