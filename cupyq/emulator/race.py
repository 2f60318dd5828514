"""The race checker: two warps touch the same bytes, one of them writes, and nothing orders them.

Time counts synchronizing events of a launch. Every warp knows, for each other warp, up to which time that warp's
accesses come before its own (a vector clock); a barrier makes its warps know each other's present, a release carries a
warp's knowledge to whoever acquires it. For each granule of memory the last write and the last read of every warp are
kept, so a race is found whatever the schedule was. A granule is the shortest access of the program to that memory.

Lanes of one warp are not checked against each other.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from .memory import CELL, SHIFT, first_lane
from .syntax import WIDTH, Ins

U32 = np.uint32
WARP_BITS = 6
TIME_SHIFT = WARP_BITS + 1  # a packed write is time, atomic flag, warp of the CTA
ATOMIC = 1 << WARP_BITS
FOREVER = (1 << 32 - TIME_SHIFT) - 1  # the time of what is still in flight: ordered before nothing
AGENT = 32  # the "warp" that stands for bulk copies
KEPT = 384  # accesses remembered to name the other line of a race


def access_bytes(ins: Ins) -> int | None:
    """Bytes of the shortest granule an instruction touches, or None where it touches no memory."""
    base = ins.parts[0]
    if base in ("ldmatrix", "stmatrix"):
        return 16
    if base == "cp":
        return 4
    if base in ("ld", "st", "atom", "red", "ldu") and ins.parts[-1] in WIDTH:
        return max(WIDTH[ins.parts[-1]] // 8, 1)
    if base in ("mbarrier", "wgmma"):
        return 8
    return None


def granule(program: Any, shared: bool) -> int:
    """The shortest access of a program to shared, or to global, memory: 1, 2 or 4 bytes."""
    least = 4
    for ins in program.code:
        size = access_bytes(ins)
        if size is None or "param" in ins.parts or "local" in ins.parts:
            continue
        names_shared = any(p.startswith("shared") for p in ins.parts)
        names_global = "global" in ins.parts or "const" in ins.parts
        if (shared and names_global and not names_shared) or (not shared and names_shared and not names_global):
            continue
        least = min(least, size)
    return least


class Shadow:
    """Last write and last reader of each granule of one allocation that the launch writes."""

    __slots__ = ("r_time", "r_warp", "w_atomic", "w_ins", "w_time", "w_warp")

    def __init__(self, n: int) -> None:
        self.w_time, self.r_time = np.zeros(n, np.int32), np.zeros(n, np.int32)
        self.w_warp, self.r_warp = np.full(n, -1, np.int32), np.full(n, -1, np.int32)  # -2: several readers
        self.w_atomic = np.zeros(n, bool)
        self.w_ins = np.zeros(n, np.int32)


class GlobalHistory:
    """What every wave of a launch did to global memory."""

    def __init__(self, launch: Any) -> None:
        self.now = 1
        self.launch = launch
        self.granule = granule(launch.program, False)
        self.shift = SHIFT[self.granule]
        self.warps = launch.grid[0] * launch.grid[1] * launch.grid[2] * -(-launch.threads // 32)
        self.logs: dict[int, list[tuple]] = {}
        self.published: dict[Any, np.ndarray] = {}

    def shadow(self, allocation: Any) -> Shadow:
        """The allocation's record, made from the log of its reads at its first write."""
        if allocation.shadow is None:
            n = (allocation.end - 1 >> self.shift) - (allocation.start >> self.shift) + 1
            made = allocation.shadow = Shadow(n)
            for cells, warps, time, _, _ in self.logs.get(id(allocation), ()):
                note_read(made, cells, warps[:, None] if cells.ndim == 2 else warps, time)
        return allocation.shadow


def note_read(shadow: Shadow, cells: np.ndarray, warps: np.ndarray, time: int) -> None:
    before = shadow.r_warp[cells]
    warps = np.broadcast_to(warps, cells.shape)
    shadow.r_warp[cells] = warps
    mixed = ((before != -1) & (before != warps)) | (shadow.r_warp[cells] != warps)
    if mixed.any():
        shadow.r_warp[cells[mixed]] = -2
    shadow.r_time[cells] = time


class RaceChecker:
    """Vector clocks and shared-memory history of one wave."""

    def __init__(self, m: Any, history: GlobalHistory) -> None:
        self.m, self.history = m, history
        self.per_cta = m.warps_per_cta
        self.columns = self.per_cta + 1  # the last one stands for bulk copies
        self.local_warp = m.all_warps % self.per_cta
        self.first_warp = m.first * self.per_cta
        self.clock = np.zeros((m.W, self.columns), np.int64)
        self.own = (m.all_warps, self.local_warp)
        self.clock[self.own] = FOREVER
        self.least = np.zeros(m.W, np.int64)  # what a warp knows of every other one
        self.agent_used = False
        self._refresh(slice(None))
        self.beyond: dict[int, np.ndarray] = {}  # knowledge of other CTAs' warps, by warp, once there is any
        self.collected: dict[int, np.ndarray] = {}  # seen by relaxed reads, known after the next fence
        self.fence_clock = np.zeros((m.W, self.columns), np.int64)
        self.fence_beyond: dict[int, np.ndarray] = {}
        self.fence_kind = np.zeros(m.W, np.int8)  # 0 none, 1 cta, 2 wider
        # Shared memory.
        self.granule = granule(m.program, True)
        self.shift = SHIFT[self.granule]
        self.granules = len(m.shared.data) >> self.shift
        self.writes = np.zeros(self.granules, U32)
        self.latest_read = np.zeros(self.granules, U32)
        self.reads = np.zeros(self.granules * self.per_cta, U32)
        self.write_cells = {s: self.writes.view(CELL[s]) for s in (4, 8, 16, 32)}
        self.latest_cells = {s: self.latest_read.view(CELL[s]) for s in (4, 8, 16, 32)}
        self.read_cells = {s: self.reads.view(CELL[s]) for s in (4, 8, 16, 32)}
        self.recent: deque = deque(maxlen=KEPT)
        self.lane_warp = np.repeat(self.local_warp, 32)

    @property
    def now(self) -> int:
        return self.history.now

    def tick(self) -> None:
        self.history.now += 1
        if self.history.now >= FOREVER - 1:
            raise OverflowError("too many synchronizing events in one launch")

    def _refresh(self, rows: Any) -> None:
        self.least[rows] = self.clock[rows][:, : self.columns if self.agent_used else self.per_cta].min(1)

    # ---- barriers and fences

    def barrier_all(self) -> None:
        """Every warp of every CTA passed a barrier of its CTA."""
        if self.agent_used:
            agent = self.clock[:, -1].reshape(-1, self.per_cta).max(1)
        self.clock[:, : self.per_cta] = self.now
        self.clock[self.own] = FOREVER
        if self.agent_used:
            self.clock[:, -1] = np.repeat(agent, self.per_cta)
        if self.beyond or self.collected:
            for cta in range(self.m.ctas):
                self._share(range(cta * self.per_cta, (cta + 1) * self.per_cta))
        if self.fence_kind.any():
            by_cta = self.fence_clock.reshape(-1, self.per_cta, self.columns)
            by_cta[...] = by_cta.max(1, keepdims=True)
            kinds = self.fence_kind.reshape(-1, self.per_cta)
            kinds[...] = kinds.max(1, keepdims=True)
        self.tick()
        self._refresh(slice(None))

    def barrier(self, cta: int, members: np.ndarray) -> None:
        """The warps `members` of one CTA met at a barrier."""
        rows = self.clock[members]
        rows[np.arange(len(members)), self.local_warp[members]] = 0
        joined = rows.max(0)
        joined[self.local_warp[members]] = self.now
        self.clock[members] = joined
        self.clock[members, self.local_warp[members]] = FOREVER
        if self.beyond or self.collected:
            self._share(members)
        if self.fence_kind[members].any():
            # What one warp fenced before the barrier is visible beyond the CTA when another one, after the barrier,
            # tells of it.
            self.fence_clock[members] = self.fence_clock[members].max(0)
            self.fence_kind[members] = self.fence_kind[members].max()
        self.tick()
        self._refresh(members)

    def _share(self, members: Any) -> None:
        for table in (self.beyond, self.collected, self.fence_beyond):
            have = [table[int(w)] for w in members if int(w) in table]
            if have:
                joined = np.maximum.reduce(have)
                for w in members:
                    table[int(w)] = joined

    def fence(self, g: Any, active: np.ndarray | None, scope: str) -> None:
        """What relaxed reads saw is known from here; what later relaxed writes show carries what is known here."""
        warps = g.warps if active is None else g.warps[active.any(1)]
        if self.collected:
            for w in warps:
                seen = self.collected.pop(int(w), None)
                if seen is not None:
                    self.learn(int(w), seen)
        self.fence_clock[warps] = self.clock[warps]
        self.fence_clock[warps, self.local_warp[warps]] = self.now
        self.fence_kind[warps] = 1 if scope == "cta" else 2
        for w in warps:
            if int(w) in self.beyond:
                self.fence_beyond[int(w)] = self.beyond[int(w)]
        self.tick()

    def proxy_fence(self, g: Any, ins: Ins, active: np.ndarray | None) -> None:
        from .proxy import fenced

        fenced(self.m, g, active)

    def snapshot(self, warp: int, clock: np.ndarray | None = None, beyond: Any = None) -> np.ndarray:
        """All that a warp knows, over the warps of the launch."""
        cta = int(self.m.cta_of_warp[warp])
        base = self.first_warp + cta * self.per_cta
        out = np.zeros(self.history.warps + self.m.launch_ctas, np.int64)
        if clock is None:
            clock = self.clock[warp].copy()
            clock[self.local_warp[warp]] = self.now
            beyond = self.beyond.get(warp)
        if beyond is not None:
            out[:] = beyond
        out[base : base + self.per_cta] = np.maximum(out[base : base + self.per_cta], clock[:-1])
        at = self.history.warps + self.m.first + cta
        out[at] = max(out[at], clock[-1])
        return out

    def learn(self, warp: int, known: np.ndarray) -> None:
        """A warp takes over what a release it acquired knew."""
        cta = int(self.m.cta_of_warp[warp])
        base = self.first_warp + cta * self.per_cta
        mine = self.clock[warp]
        mine[:-1] = np.maximum(mine[:-1], known[base : base + self.per_cta])
        mine[-1] = max(mine[-1], known[self.history.warps + self.m.first + cta])
        mine[self.local_warp[warp]] = FOREVER
        self._refresh(np.array([warp]))
        old = self.beyond.get(warp)
        self.beyond[warp] = known if old is None else np.maximum(old, known)

    def synchronize(
        self,
        g: Any,
        space: str,
        flat: np.ndarray,
        active: np.ndarray | None,
        order: str,
        sequence: np.ndarray | None,
        write: bool,
        read: bool,
    ) -> None:
        """Release and acquire through one location, thread by thread in the order they were served."""
        published = self.history.published
        releases = "release" in order or "acq_rel" in order
        acquires = "acquire" in order or "acq_rel" in order
        scope_cta = order.endswith(".cta")
        warps = g.flat_warps(active)
        if not releases and not (write and self.fence_kind[g.warps].any()) and not published:
            return
        steps = range(len(flat)) if sequence is None else sequence
        seen: set = set()
        released = False
        for i in steps:
            warp = int(warps[i])
            where = (space, int(flat[i]))
            if sequence is None and (warp, where) in seen:
                continue
            seen.add((warp, where))
            near = (*where, int(self.m.cta_of_warp[warp]) + self.m.first)
            if read:
                for key in (where, near):
                    known = published.get(key)
                    if known is None:
                        continue
                    if acquires:
                        self.learn(warp, known)
                    else:
                        old = self.collected.get(warp)
                        self.collected[warp] = known if old is None else np.maximum(old, known)
            if write:
                kind = int(self.fence_kind[warp])
                if releases:
                    shown, narrow = self.snapshot(warp), scope_cta
                    released = True
                elif kind:
                    shown, narrow = self.snapshot(warp, self.fence_clock[warp], self.fence_beyond.get(warp)), kind == 1
                else:
                    continue
                key = near if narrow else where
                old = published.get(key)
                published[key] = shown if old is None else np.maximum(old, shown)
        if released:
            self.tick()

    # ---- shared memory

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
        self.check_shared(g, ins, position, active, size, write, atomic, None)
        if atomic:
            self.synchronize(g, "shared", position, active, order, sequence, write, not write or ins.parts[0] == "atom")

    def _lanes(self, g: Any, active: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Warp of the wave, and warp of the CTA, of each active thread."""
        if active is None and g.rows is None:
            return np.repeat(g.warps, 32), self.lane_warp
        warps = g.flat_warps(active)
        return warps, self.local_warp[warps]

    def check_shared(
        self,
        g: Any,
        ins: Ins,
        position: np.ndarray,
        active: np.ndarray | None,
        size: int,
        write: bool,
        atomic: bool,
        time: int | None,
    ) -> None:
        """Check one access of each active thread, and record it (at `time` instead of now: still in flight)."""
        warps, local = self._lanes(g, active)
        shift = SHIFT[size]
        k = size >> self.shift
        wide = 4 * k
        cells = position >> shift
        packed = self.write_cells[wide].take(cells).view(U32).reshape(-1, k)
        known = ((self.least[warps] + 1) << TIME_SHIFT).clip(0, 0xFFFFFFFF).astype(U32)
        late = packed >= known[:, None]
        if late.any():
            self._against_writes(g, ins, position, active, size, warps, local, packed, late, write, atomic)
        if write:
            last = self.latest_cells[wide].take(cells).view(U32).reshape(-1, k)
            late = last > np.minimum(self.least[warps], 0xFFFFFFFF).astype(U32)[:, None]
            if late.any():
                self._against_reads(g, ins, position, active, size, warps, local, late)
            stamp = ((FOREVER if time is not None else self.now) << TIME_SHIFT) | (ATOMIC if atomic else 0)
            mark = np.repeat((local | stamp).astype(U32), k).view(CELL[wide])
            self.write_cells[wide][cells] = mark
            if not atomic:
                back = self.write_cells[wide].take(cells)
                other = back.view(U32).reshape(-1, k)[:, 0] != mark.view(U32).reshape(-1, k)[:, 0]
                if other.any():
                    at = int(other.argmax())
                    rival = int(back.view(U32).reshape(-1, k)[at, 0]) & (ATOMIC - 1)
                    self.report(g, ins, active, at, position[at], "shared", True, rival, ins, True)
        else:
            if atomic:
                return
            stamp = np.full(k, self.now, U32).view(CELL[wide])[0]
            self.latest_cells[wide][cells] = stamp
            self.read_cells[wide][cells + local * (self.granules // k)] = stamp
        self.recent.append((ins, position, warps, size, write))

    def _against_writes(
        self,
        g: Any,
        ins: Ins,
        position: Any,
        active: Any,
        size: int,
        warps: Any,
        local: Any,
        packed: Any,
        late: Any,
        write: bool,
        atomic: bool,
    ) -> None:
        rows, columns = np.nonzero(late)
        value = packed[rows, columns]
        writer = (value & U32(ATOMIC - 1)).astype(np.int64)
        when = (value >> U32(TIME_SHIFT)).astype(np.int64)
        column = np.where(writer == AGENT, self.per_cta, writer)
        bad = (writer != local[rows]) & (self.clock[warps[rows], column] < when)
        if atomic:
            bad &= (value & U32(ATOMIC)) == 0
        if bad.any():
            i = int(bad.argmax())
            at = int(rows[i])
            where = int(position[at]) + int(columns[i]) * self.granule
            self.report(
                g, ins, active, at, where, "shared", write, int(writer[i]), None, True, bool(when[i] == FOREVER)
            )

    def _against_reads(
        self, g: Any, ins: Ins, position: Any, active: Any, size: int, warps: Any, local: Any, late: Any
    ) -> None:
        rows, columns = np.nonzero(late)
        cell = (position[rows] >> self.shift) + columns
        for s in range(self.per_cta):
            when = self.reads[cell + s * self.granules].astype(np.int64)
            bad = (local[rows] != s) & (when > self.clock[warps[rows], s])
            if bad.any():
                i = int(bad.argmax())
                at = int(rows[i])
                where = int(position[at]) + int(columns[i]) * self.granule
                self.report(g, ins, active, at, where, "shared", True, s, None, False, bool(when[i] >= FOREVER))

    def report(
        self,
        g: Any,
        ins: Ins,
        active: Any,
        flat: int,
        position: int,
        space: str,
        write: bool,
        rival: int,
        rival_ins: Ins | None,
        rival_wrote: bool,
        in_flight: bool = False,
    ) -> None:
        m = self.m
        warp, lane = first_lane(g, active, flat)
        where = int(position) % m.shared.stride
        if rival_ins is None:
            rival_ins = self._find(int(position), int(m.cta_of_warp[warp]) * self.per_cta + rival, rival_wrote)
        who = "a bulk copy" if rival == AGENT else f"warp {rival}"
        verb = "writes" if write else "reads"
        did = (
            ("is still writing" if in_flight else "wrote")
            if rival_wrote
            else ("is still reading" if in_flight else "read")
        )
        line = f" at line {rival_ins.line} `{rival_ins.text}`" if rival_ins is not None else ""
        raise m.fault(
            "race",
            f"warp {warp % self.per_cta} {verb} shared address {where}, which {who} of the block {did}{line} with no barrier between",
            ins,
            warp,
            lane,
            where,
        )

    def _find(self, position: int, warp: int, wrote: bool) -> Ins | None:
        for ins, places, warps, size, write in reversed(self.recent):
            if write == wrote and (
                warps is None or ((warps == warp) & (places <= position) & (position < places + size)).any()
            ):
                if warps is None and not ((places <= position) & (position < places + size)).any():
                    continue
                return ins
        return None

    # ---- cp.async

    def async_start(self, g: Any, ins: Ins, active: np.ndarray | None, position: np.ndarray, size: int) -> None:
        self.check_shared(g, ins, position, active, size, True, False, FOREVER)

    def async_land(self, ins: Ins, threads: np.ndarray, position: np.ndarray, size: int) -> None:
        local = self.local_warp[threads >> 5]
        k = size >> self.shift
        mark = np.repeat((local | (self.now << TIME_SHIFT)).astype(U32), k).view(CELL[4 * k])
        self.write_cells[4 * k][position >> SHIFT[size]] = mark

    # ---- global memory

    def ordered(self, warps: np.ndarray, others: np.ndarray, times: np.ndarray) -> np.ndarray:
        """Whether accesses of warps `others` (of the launch) at `times` come before what `warps` (of the wave) do now."""
        mine = warps + self.first_warp
        good = (others < 0) | (others == mine)
        if good.all():
            return good
        same = ~good & (others // self.per_cta == mine // self.per_cta)
        if same.any():
            good[same] = self.clock[warps[same], others[same] % self.per_cta] >= times[same]
        far = ~good & ~same
        if far.any() and self.beyond:
            at = np.nonzero(far)[0]
            for warp in np.unique(warps[at]):
                known = self.beyond.get(int(warp))
                if known is not None:
                    chosen = at[warps[at] == warp]
                    good[chosen] = known[others[chosen]] >= times[chosen]
        return good

    def global_access(
        self,
        g: Any,
        ins: Ins,
        flat: np.ndarray,
        parts: list,
        active: np.ndarray | None,
        size: int,
        write: bool,
        order: str,
        sequence: np.ndarray | None = None,
    ) -> None:
        history = self.history
        atomic = order != "weak"
        k = max(size >> history.shift, 1)
        all_warps = np.repeat(g.warps, 32) if active is None else g.flat_warps(active)
        for allocation, selection in parts:
            if not allocation.writable:
                continue
            chosen, warps = (flat, all_warps) if selection is None else (flat[selection], all_warps[selection])
            cells = ((chosen >> np.uint64(history.shift)) - np.uint64(allocation.start >> history.shift)).astype(
                np.int32
            )
            if allocation.shadow is None and not write:
                wide = cells[:, None] + np.arange(k, dtype=np.int32) if k > 1 else cells
                if not atomic:
                    self._log(allocation, wide, warps, ins)
                continue
            shadow = history.shadow(allocation)
            if k > 1:
                cells = (cells[:, None] + np.arange(k, dtype=np.int32)).ravel()
                warps = np.repeat(warps, k)
            mine = (warps + self.first_warp).astype(np.int32)
            good = self.ordered(warps, shadow.w_warp[cells], shadow.w_time[cells])
            if atomic:
                good |= shadow.w_atomic[cells]
            if not good.all():
                self._report_global(
                    g,
                    ins,
                    active,
                    selection,
                    int(good.argmin()),
                    k,
                    allocation,
                    cells,
                    write,
                    int(shadow.w_warp[cells[good.argmin()]]),
                    history.launch.program.code[int(shadow.w_ins[cells[good.argmin()]])],
                    True,
                )
            if not write:
                if not atomic:
                    note_read(shadow, cells, mine, self.now)
                    self._log(allocation, cells, warps, ins)
                continue
            readers = shadow.r_warp[cells]
            if (readers != -1).any():
                good = self.ordered(warps, np.where(readers == -2, -1, readers), shadow.r_time[cells])
                if not good.all():
                    i = int(good.argmin())
                    self._report_global(
                        g,
                        ins,
                        active,
                        selection,
                        i,
                        k,
                        allocation,
                        cells,
                        True,
                        int(readers[i]),
                        self._reader(allocation, int(cells[i]), int(readers[i])),
                        False,
                    )
                several = np.nonzero(readers == -2)[0]
                if len(several):
                    self._several(g, ins, active, selection, k, allocation, cells, warps, several)
            shadow.w_warp[cells], shadow.w_time[cells], shadow.w_atomic[cells], shadow.w_ins[cells] = (
                mine,
                self.now,
                atomic,
                ins.index,
            )
            if not atomic:
                clash = shadow.w_warp[cells] != mine
                if clash.any():
                    i = int(clash.argmax())
                    self._report_global(
                        g,
                        ins,
                        active,
                        selection,
                        i,
                        k,
                        allocation,
                        cells,
                        True,
                        int(shadow.w_warp[cells[i]]),
                        ins,
                        True,
                    )
        if atomic:
            self.synchronize(g, "global", flat, active, order, sequence, write, not write or ins.parts[0] == "atom")

    def _log(self, allocation: Any, cells: np.ndarray, warps: np.ndarray, ins: Ins) -> None:
        mine = (warps + self.first_warp).astype(np.int32)
        self.history.logs.setdefault(id(allocation), []).append((cells, mine, self.now, ins.index, None))

    def _reader(self, allocation: Any, cell: int, warp: int) -> Ins | None:
        for cells, warps, _, index, _ in reversed(self.history.logs.get(id(allocation), [])):
            hit = (cells == cell).any(1) if cells.ndim == 2 else cells == cell
            if (hit & (warps == warp)).any():
                return self.history.launch.program.code[index]
        return None

    def _several(
        self,
        g: Any,
        ins: Ins,
        active: Any,
        selection: Any,
        k: int,
        allocation: Any,
        cells: np.ndarray,
        warps: np.ndarray,
        several: np.ndarray,
    ) -> None:
        """Granules that more than one warp has read: go through the log for each reader."""
        order = np.argsort(cells[several], kind="stable")
        keys = cells[several][order]
        for logged, readers, time, index, _ in self.history.logs.get(id(allocation), ()):
            flat = logged.ravel()
            at = np.searchsorted(keys, flat)
            at[at == len(keys)] = 0
            hit = np.nonzero(keys[at] == flat)[0]
            if not len(hit):
                continue
            who = np.repeat(readers, logged.shape[1])[hit] if logged.ndim == 2 else readers[hit]
            writer = several[order[at[hit]]]
            good = self.ordered(warps[writer], who, np.full(len(hit), time))
            if not good.all():
                i = int(good.argmin())
                self._report_global(
                    g,
                    ins,
                    active,
                    selection,
                    int(writer[i]),
                    k,
                    allocation,
                    cells,
                    True,
                    int(who[i]),
                    self.history.launch.program.code[index],
                    False,
                )

    def _report_global(
        self,
        g: Any,
        ins: Ins,
        active: Any,
        selection: Any,
        at: int,
        k: int,
        allocation: Any,
        cells: np.ndarray,
        write: bool,
        rival: int,
        rival_ins: Ins | None,
        rival_wrote: bool,
    ) -> None:
        m = self.m
        i = at // k
        flat = i if selection is None else int(np.asarray(selection)[i])
        warp, lane = first_lane(g, active, flat)
        address = (int(cells[at]) + (allocation.start >> self.history.shift)) << self.history.shift
        words, argument = m.memory.describe(max(address, allocation.start))
        block = m.launch.block_index(rival // self.per_cta)
        line = f" at line {rival_ins.line} `{rival_ins.text}`" if rival_ins is not None else ""
        verb, did = "writes" if write else "reads", "wrote" if rival_wrote else "read"
        raise m.fault(
            "race",
            f"{verb} {words}, which warp {rival % self.per_cta} of block {block} {did}{line} with nothing to order the two",
            ins,
            warp,
            lane,
            address,
            argument,
        )
