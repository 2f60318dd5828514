"""Races in shared memory.

For each granule the last write, and the last read of every warp, are kept with their times; a new access must come
after all of them that conflict with it. An access to what an asynchronous copy is still writing, or reading, is a race
whoever makes it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from .clocks import ATOMIC, FOREVER, TIME_SHIFT
from .memory import CELL, SHIFT, first_lane
from .race_global import GlobalRaces
from .syntax import Ins

U32 = np.uint32
# The records of one access move as one element: 4 bytes for each of its granules.
WIDE = {n: np.dtype(f"V{n}") for n in (32, 64, 128)} | {n: CELL[n] for n in (4, 8, 16)}
KEPT = 384  # accesses remembered to name the other line of a race
COLUMN = ATOMIC - 1


class SharedRaces(GlobalRaces):
    """Checks of accesses to shared memory."""

    def __init__(self, m: Any, history: Any, granule: int) -> None:
        super().__init__(m, history)
        self.granule = granule
        self.shift = SHIFT[granule]
        self.granules = len(m.shared.data) >> self.shift
        self.writes = np.zeros(self.granules, U32)
        self.latest_read = np.zeros(self.granules, U32)
        self.reads = np.zeros(self.granules * self.columns, U32)
        sizes = WIDE
        self.write_cells = {s: self.writes.view(WIDE[s]) for s in sizes}
        self.latest_cells = {s: self.latest_read.view(WIDE[s]) for s in sizes}
        self.read_cells = {s: self.reads.view(WIDE[s]) for s in sizes}
        self.recent: deque = deque(maxlen=KEPT)
        self.lane_warp = np.repeat(self.local_warp, 32)

    def shared_access(
        self,
        g: Any,
        ins: Ins,
        position: np.ndarray,
        active: np.ndarray | None,
        size: int,
        write: bool,
        order: str,
        sequence: np.ndarray | None = None,
    ) -> None:
        atomic = order != "weak"
        self.check_shared(g, ins, position, active, size, write, atomic, False)
        if atomic:
            self.synchronize(g, "shared", position, active, order, sequence, write, not write or ins.parts[0] == "atom")

    def _lanes(self, g: Any, active: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Warp of the wave, and warp of the CTA, of each active thread."""
        if active is None and g.rows is None:
            return np.repeat(g.warps, 32), self.lane_warp
        warps = g.flat_warps(active)
        return warps, self.local_warp[warps]

    def check_shared(
        self, g: Any, ins: Ins, position: np.ndarray, active: Any, size: int, write: bool, atomic: bool, flies: bool
    ) -> None:
        """Check one access of each active thread, and record it; one that `flies` is not complete yet."""
        warps, local = self._lanes(g, active)
        shift = SHIFT[size]
        k = size >> self.shift
        wide = 4 * k
        cells = position >> shift
        packed = self.write_cells[wide].take(cells).view(U32).reshape(-1, k)
        known = ((self.least[warps] + 1) << TIME_SHIFT).clip(0, 0xFFFFFFFF).astype(U32)[:, None]
        late = packed >= known
        if self.agents:
            late |= (packed & U32(COLUMN)) >= self.per_cta
        if late.any():
            self._against_writes(g, ins, position, active, warps, local, packed, late, write, atomic)
        if write:
            last = self.latest_cells[wide].take(cells).view(U32).reshape(-1, k)
            late = last > np.minimum(self.least[warps], 0xFFFFFFFF).astype(U32)[:, None]
            if late.any():
                self._against_reads(g, ins, position, active, warps, local, late, range(self.per_cta))
            if self.agents:
                everywhere = np.ones((len(position), k), bool)
                agents = range(self.per_cta, self.columns)
                self._against_reads(g, ins, position, active, warps, local, everywhere, agents)
            stamp = ((FOREVER if flies else self.now) << TIME_SHIFT) | (ATOMIC if atomic else 0)
            mark = np.repeat((local | stamp).astype(U32), k).view(WIDE[wide])
            self.write_cells[wide][cells] = mark
            if not atomic:
                back = self.write_cells[wide].take(cells).view(U32).reshape(-1, k)[:, 0]
                other = back != mark.view(U32).reshape(-1, k)[:, 0]
                if other.any():
                    at = int(other.argmax())
                    self.report(g, ins, active, at, int(position[at]), True, int(back[at]) & COLUMN, ins, True)
        else:
            if atomic:
                return
            stamp = np.full(k, self.now, U32).view(WIDE[wide])[0]
            self.latest_cells[wide][cells] = stamp
            self.read_cells[wide][cells + local * (self.granules // k)] = stamp
        self.recent.append((ins, position, warps, size, write))

    def _against_writes(
        self, g: Any, ins: Ins, position: Any, active: Any, warps: Any, local: Any, packed: Any, late: Any, write: bool,
        atomic: bool,
    ) -> None:  # fmt: skip
        rows, columns = np.nonzero(late)
        value = packed[rows, columns]
        writer = (value & U32(COLUMN)).astype(np.int64)
        when = (value >> U32(TIME_SHIFT)).astype(np.int64)
        bad = (writer != local[rows]) & (self.clock[warps[rows], writer] < when)
        if atomic:
            bad &= (value & U32(ATOMIC)) == 0
        if bad.any():
            i = int(bad.argmax())
            at = int(rows[i])
            where = int(position[at]) + int(columns[i]) * self.granule
            self.report(g, ins, active, at, where, write, int(writer[i]), None, True, bool(when[i] == FOREVER))

    def _against_reads(
        self, g: Any, ins: Ins, position: Any, active: Any, warps: Any, local: Any, late: Any, readers: Any
    ) -> None:
        rows, columns = np.nonzero(late)
        cell = (position[rows] >> self.shift) + columns
        for s in readers:
            when = self.reads[cell + s * self.granules].astype(np.int64)
            bad = (local[rows] != s) & (when > self.clock[warps[rows], s])
            if bad.any():
                i = int(bad.argmax())
                at = int(rows[i])
                where = int(position[at]) + int(columns[i]) * self.granule
                self.report(g, ins, active, at, where, True, s, None, False, bool(when[i] >= FOREVER))

    def report(
        self, g: Any, ins: Ins, active: Any, flat: int, position: int, write: bool, rival: int, rival_ins: Ins | None,
        rival_wrote: bool, in_flight: bool = False,
    ) -> None:  # fmt: skip
        """Raise the fault of the thread at index `flat` of the active ones."""
        warp, lane = first_lane(g, active, flat)
        self.report_warp(ins, warp, lane, position, write, rival, rival_ins, rival_wrote, in_flight)

    def name_of(self, column: int) -> str:
        if column < self.per_cta:
            return f"warp {column} of the block"
        if column == self.columns - 1 and self.has_bulk:
            return "a bulk copy"
        return f"wgmma of warpgroup {column - self.per_cta} of the block"

    def report_warp(
        self, ins: Ins, warp: int, lane: int, position: int, write: bool, rival: int, rival_ins: Ins | None,
        rival_wrote: bool, in_flight: bool = False,
    ) -> None:  # fmt: skip
        m = self.m
        cta, where = divmod(position, m.shared.stride)
        if rival_ins is None:
            rival_ins = self._find(position, cta * self.per_cta + rival, rival, rival_wrote)
        verb = "writes" if write else "reads"
        if rival_wrote:
            did = "is still writing" if in_flight else "wrote"
        else:
            did = "is still reading" if in_flight else "read"
        line = f" at line {rival_ins.line} `{rival_ins.text}`" if rival_ins is not None else ""
        message = (
            f"warp {warp % self.per_cta} {verb} shared address {where}, which {self.name_of(rival)} {did}{line} "
            "with nothing to order the two"
        )
        raise m.fault("race", message, ins, warp, lane, where)

    def _find(self, position: int, warp: int, column: int, wrote: bool) -> Ins | None:
        """The instruction of a remembered access; `warps` of an agent's accesses is its column."""
        for ins, places, warps, size, write in reversed(self.recent):
            if write != wrote:
                continue
            here = (places <= position) & (position < places + size)
            mine = warps == -column if np.ndim(warps) == 0 else warps == warp
            if (here & mine).any():
                return ins
        return None

    # ---- cp.async

    def async_start(self, g: Any, ins: Ins, active: np.ndarray | None, position: np.ndarray, size: int) -> None:
        self.check_shared(g, ins, position, active, size, True, False, True)

    def async_land(self, ins: Ins, threads: np.ndarray, position: np.ndarray, size: int) -> None:
        local = self.local_warp[threads >> 5]
        k = size >> self.shift
        mark = np.repeat((local | (self.now << TIME_SHIFT)).astype(U32), k).view(WIDE[4 * k])
        self.write_cells[4 * k][position >> SHIFT[size]] = mark

    # ---- asynchronous agents: bulk copies and wgmma. `warps` issues; `column` stands for the agent.

    def agent_access(self, ins: Ins, warps: np.ndarray, position: np.ndarray, column: np.ndarray, write: bool) -> None:
        """An agent starts to read or write cells of 16 bytes: checked against what the issuing warps know."""
        k = 16 >> self.shift
        cells = position >> 4
        packed = self.write_cells[4 * k].take(cells).view(U32).reshape(-1, k)
        when, writer = (packed >> U32(TIME_SHIFT)).astype(np.int64), (packed & U32(COLUMN)).astype(np.int64)
        mine = writer == self.local_warp[warps][:, None]
        bad = ~mine & (self.clock[warps[:, None], writer] < when)
        if bad.any():
            i, j = (int(x[0]) for x in np.nonzero(bad))
            self.report_warp(
                ins,
                int(warps[i]),
                0,
                int(position[i]) + j * self.granule,
                write,
                int(writer[i, j]),
                None,
                True,
                int(when[i, j]) == FOREVER,
            )
        if not write:
            # What an ordinary store (or cp.async) wrote must have passed a proxy fence.
            plain = (writer < self.per_cta) & (when > 0) & (self.proxied[warps[:, None], writer] < when)
            if plain.any():
                i, j = (int(x[0]) for x in np.nonzero(plain))
                where = int(position[i]) + j * self.granule
                cta = where // self.m.shared.stride
                by = self._find(where, cta * self.per_cta + int(writer[i, j]), int(writer[i, j]), True)
                line = f" at line {by.line} `{by.text}`" if by is not None else ""
                message = (
                    f"the async proxy reads shared address {where % self.m.shared.stride}, "
                    f"which warp {int(writer[i, j])} "
                    f"wrote{line} with no fence.proxy.async between"
                )
                raise self.m.fault("race", message, ins, int(warps[i]), 0, where % self.m.shared.stride)
            self.reads.reshape(self.columns, -1)[column[:, None], (cells * k)[:, None] + np.arange(k)] = FOREVER
        else:
            base = (cells * k)[:, None] + np.arange(k)
            for s in range(self.columns):
                when = self.reads[base + s * self.granules].astype(np.int64)
                bad = (when > self.clock[warps, s][:, None]) & (s != self.local_warp[warps])[:, None]
                if bad.any():
                    i, j = (int(x[0]) for x in np.nonzero(bad))
                    late = int(when[i, j]) >= FOREVER
                    self.report_warp(
                        ins, int(warps[i]), 0, int(position[i]) + j * self.granule, True, s, None, False, late
                    )
            mark = np.repeat((column | (FOREVER << TIME_SHIFT)).astype(U32), k).view(WIDE[4 * k])
            self.write_cells[4 * k][cells] = mark
        self.recent.append((ins, position, np.int64(-int(column[0])), 16, write))

    def agent_done(self, position: np.ndarray, column: np.ndarray, write: bool) -> int:
        """What the agent started is complete; returns the time to be known by whoever waits for it."""
        k = 16 >> self.shift
        cells = position >> 4
        if write:
            mark = np.repeat((column | (self.now << TIME_SHIFT)).astype(U32), k).view(WIDE[4 * k])
            self.write_cells[4 * k][cells] = mark
        else:
            self.reads.reshape(self.columns, -1)[column[:, None], (cells * k)[:, None] + np.arange(k)] = self.now
        done = self.now
        self.tick()
        return done

    def agent_known(self, warps: np.ndarray, columns: np.ndarray, time: Any) -> None:
        """Warps waited for an agent's work up to `time`."""
        self.clock[warps, columns] = np.maximum(self.clock[warps, columns], time)
