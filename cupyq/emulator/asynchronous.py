"""cp.async: copies that land when their thread waits for them, and not before."""

from __future__ import annotations

from typing import Any

import numpy as np

from .memory import IN_FLIGHT, SHIFT, WRITTEN


class Batch:
    """What one execution of a cp.async instruction started."""

    __slots__ = ("data", "group", "ins", "position", "serial", "size", "threads", "warps")

    def __init__(
        self, ins: Any, threads: np.ndarray, group: np.ndarray, position: np.ndarray, size: int, data: np.ndarray
    ) -> None:
        self.ins, self.threads, self.group, self.position, self.size, self.data = (
            ins,
            threads,
            group,
            position,
            size,
            data,
        )
        self.warps = _bits(threads >> 5)


def _bits(warps: np.ndarray) -> int:
    """Return a set of warps as the bits of an integer, which Python intersects faster than NumPy starts."""
    return sum(1 << warp for warp in set(warps.tolist()))


class AsyncCopies:
    """The cp.async copies in flight of a wave. Groups are counted for each thread."""

    def __init__(self, m: Any) -> None:
        self.m = m
        self.committed = np.zeros(m.W * 32, np.int64)
        self.batches: list[Batch] = []
        self.serial = 0

    def start(
        self, g: Any, ins: Any, active: np.ndarray | None, position: np.ndarray, size: int, data: np.ndarray
    ) -> None:
        """`data` (one cell a thread) will be written at `position` of the wave's shared memory."""
        m = self.m
        threads = g.flat_threads(active)
        if m.shared.marks is not None:
            marks = m.shared.marks[size]
            marks[position >> SHIFT[size]] = np.frombuffer(bytes([IN_FLIGHT]) * size, marks.dtype)[0]
        if m.race is not None:
            m.race.async_start(g, ins, active, position, size)
        batch = Batch(ins, threads, self.committed[threads].copy(), position, size, data)
        batch.serial = self.serial
        self.serial += 1
        self.batches.append(batch)

    def commit(self, g: Any, active: np.ndarray | None) -> None:
        self.committed[g.flat_threads(active)] += 1

    def wait(self, g: Any, active: np.ndarray | None, pending: int | None) -> None:
        """Complete all but the latest `pending` groups of each active thread (None: everything, committed or not)."""
        if not self.batches:
            return
        everyone = active is None and g.rows is None
        limit = self.committed - (pending if pending is not None else -1)
        warps = -1
        if not everyone:
            here = np.zeros(len(limit), bool)
            here[g.flat_threads(active)] = True
            limit = np.where(here, limit, -1)
            warps = _bits(g.warps)
        self.batches = [b for b in self.batches if not b.warps & warps or not self._take(b, b.group < limit[b.threads])]

    def land_threads(self, threads: np.ndarray, before: int) -> None:
        """Complete the copies that these threads started before the batch numbered `before`."""
        here = np.zeros(len(self.committed), bool)
        here[threads] = True
        self.batches = [b for b in self.batches if b.serial >= before or not self._take(b, here[b.threads])]

    def _take(self, batch: Batch, done: np.ndarray) -> bool:
        """Land the copies of a batch that are `done`; whether none is left."""
        if done.all():
            self._land(batch, slice(None))
            return True
        if done.any():
            self._land(batch, done)
            keep = ~done
            parts = (batch.threads, batch.group, batch.position, batch.data)
            batch.threads, batch.group, batch.position, batch.data = (x[keep] for x in parts)
            batch.warps = _bits(batch.threads >> 5)
        return False

    def _land(self, batch: Batch, which: Any) -> None:
        m = self.m
        position, data, size = batch.position[which], batch.data[which], batch.size
        cells = position >> SHIFT[size]
        m.shared.cells[size][cells] = data
        if m.shared.marks is not None:
            marks = m.shared.marks[size]
            marks[cells] = np.frombuffer(bytes([WRITTEN]) * size, marks.dtype)[0]
        if m.race is not None:
            m.race.async_land(batch.ins, batch.threads[which], position, size)
        m.progress()
