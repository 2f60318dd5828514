"""Races in global memory: within a CTA, between CTAs, and between waves.

An array that the launch never writes costs a log of its reads alone. From its first write on, each granule has its last
write and last reader; where several warps have read a granule, the log says which.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .clocks import Clocks
from .memory import SHIFT, first_lane
from .race_granule import granule
from .syntax import Ins


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


class GlobalRaces(Clocks):
    """Checks of accesses to global memory."""

    def ordered(self, warps: np.ndarray, others: np.ndarray, times: np.ndarray) -> np.ndarray:
        """Whether accesses of warps `others` (of the launch) at `times` come before what `warps` (of the wave) do."""
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
            f"{verb} {words}, which warp {rival % self.per_cta} of block {block} {did}{line} "
            "with nothing to order the two",
            ins,
            warp,
            lane,
            address,
            argument,
        )

    def bulk_global(self, t: Any, allocation: Any, starts: np.ndarray, length: int) -> None:
        """A bulk copy writes rows of global memory; charged to the warp that issued it."""
        history = self.history
        shadow = history.shadow(allocation)
        step = history.granule
        first = allocation.start >> history.shift
        cells = (((starts[:, None] + np.arange(0, length, step)) >> history.shift) - first).ravel()
        warps = np.full(len(cells), t.warp)
        for others, times, wrote in ((shadow.w_warp, shadow.w_time, True), (shadow.r_warp, shadow.r_time, False)):
            rival = np.where(others[cells] == -2, -1, others[cells])
            good = self.ordered(warps, rival, times[cells])
            if not good.all():
                i = int(good.argmin())
                words, argument = self.m.memory.describe((int(cells[i]) + first) << history.shift)
                cta, warp = divmod(int(rival[i]), self.per_cta)
                who = f"warp {warp} of block {self.m.launch.block_index(cta)}"
                did = "wrote" if wrote else "read"
                raise t.fault(
                    "race",
                    f"a bulk copy writes {words}, which {who} {did} with nothing to order the two",
                    None,
                    argument,
                )
        shadow.w_warp[cells], shadow.w_time[cells] = t.warp + self.first_warp, self.now
        shadow.w_atomic[cells], shadow.w_ins[cells] = False, t.ins.index
