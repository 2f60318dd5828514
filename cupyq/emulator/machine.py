"""The scheduler: which warps run next, how they diverge, wait and meet again.

All warps of a wave of CTAs live in arrays. While they all stand at one instruction nothing but one number says where
they are; when they part, each lane has its own. Of the lanes of a warp the ones at the lowest instruction run first,
so that branches join again; groups that have waited long get a turn, so that spinning on a lock makes progress.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from .asynchronous import AsyncCopies
from .barriers import BLOCKED, EXITED, Barriers
from .faults import EmulatorFault
from .group import PARK, Group
from .memory import LocalMemory, SharedMemory
from .syntax import UINT, Ins

WARP_TURN = 16  # steps a runnable warp waits at most before it gets a turn
LANE_TURN = 512  # the same for lanes of a warp that runs
SPIN_STEPS = 4000  # steps without any change of memory, all warps polling, that mean deadlock


class Goto:
    """A divergent branch: the instruction each lane goes to."""

    __slots__ = ("pcs",)

    def __init__(self, pcs: np.ndarray) -> None:
        self.pcs = pcs


class Exit:
    """Lanes that end (None: all of the group)."""

    __slots__ = ("mask",)

    def __init__(self, mask: np.ndarray | None) -> None:
        self.mask = mask


class Machine(Barriers):
    """One wave of CTAs of a launch."""

    def __init__(self, launch: Any, first: int, count: int) -> None:
        self.launch, self.program, self.memory, self.symbols = launch, launch.program, launch.memory, launch.symbols
        self.counters, self.checks = launch.counters, launch.checks
        self.param_address, self.param_bytes = launch.param_address, launch.param_bytes
        self.cluster_size = launch.cluster_size
        self.first, self.ctas = first, count
        self.launch_ctas = launch.grid[0] * launch.grid[1] * launch.grid[2]
        self.threads = launch.threads
        self.warps_per_cta = -(-self.threads // 32)
        self.W = count * self.warps_per_cta
        self.all_warps = np.arange(self.W)
        self.all_threads = np.arange(self.W * 32)
        self.cta_of_warp = self.all_warps // self.warps_per_cta
        program = self.program
        end = program.dynamic_start + launch.shared_bytes
        self.shared = SharedMemory(count, program.shared_start, end, "init" in self.checks)
        self.local = (
            LocalMemory(self.W * 32, program.frame_bytes, "init" in self.checks) if program.frame_bytes else None
        )
        self.warp_base = self.cta_of_warp * self.shared.stride
        self.lane_base = np.repeat(self.warp_base, 32)
        self.registers: list[np.ndarray] = [np.zeros((self.W, 32), UINT[w]) for w in program.slots]
        for reg in program.undefined:
            if reg.width > 1:
                # Nothing is written there before it may be read: a value that shows in results.
                self.registers[reg.slot] = np.full(
                    (self.W, 32), UINT[reg.width].type(0x7FBADBAD7FBADBAD & ((1 << reg.width) - 1))
                )
        lane = np.arange(self.W * 32).reshape(self.W, 32) % (self.warps_per_cta * 32)
        alive = lane < self.threads
        self.lane_pc = np.where(alive, np.int32(0), EXITED).astype(np.int32)
        self.thread_in_block = lane
        self.parked = np.zeros((self.W, 32), bool)
        self.blocked = np.zeros(self.W, bool)
        self.waits_on = np.full(self.W, -1)
        self.barrier_ins: dict[tuple[int, int], Ins] = {}
        self.arrived = np.zeros((count, 16), np.int64)
        self.barrier_members: dict[tuple[int, int], list[int]] = {}
        self.reductions: dict[tuple[int, int], list] = {}
        self.last_run = np.zeros((self.W, 32), np.int64)
        self.last_poll = np.full(self.W, -1, np.int64)
        self.step = self.last_progress = 0
        self.rng = None if launch.seed is None else np.random.default_rng([launch.seed, first])
        self.uniform: int | None = 0 if alive.all() and self.rng is None else None
        self.copies = AsyncCopies(self)
        self.race = launch.make_race(self) if "race" in self.checks else None
        self._specials: dict[str, np.ndarray] = {}
        self._parts: dict[str, Any] = {}

    # ---- parts that few kernels need

    def mbar(self) -> Any:
        """The wave's mbarriers."""
        return self._part("mbarriers", "Mbarriers")

    def bulk(self) -> Any:
        """Bulk copies out of shared memory."""
        return self._part("ops_tensor", "BulkStores")

    def wg(self) -> Any:
        """wgmma operations in flight."""
        return self._part("ops_wgmma", "WgmmaReads")

    def cluster(self) -> Any:
        """Barriers of clusters."""
        return self._part("ops_cluster", "ClusterBarriers")

    def _part(self, module: str, name: str) -> Any:
        found = self._parts.get(name)
        if found is None:
            found = self._parts[name] = getattr(import_module(f".{module}", __package__), name)(self)
        return found

    def finish(self) -> None:
        """Complete what the kernel never waited for."""
        if "Mbarriers" in self._parts:
            self.mbar().deliver()
        if "BulkStores" in self._parts:
            self.bulk().finish_all()

    # ---- threads by name

    def special(self, name: str) -> np.ndarray:
        if name.startswith(("%clock", "%globaltimer")):
            wide = name in ("%clock64", "%globaltimer")
            value = 0 if name.endswith("_hi") else self.step * 32
            return np.full((self.W, 32), value, np.uint64 if wide else np.uint32)
        found = self._specials.get(name)
        if found is None:
            found = self._specials[name] = self._make_special(name)
        return found

    def _make_special(self, name: str) -> np.ndarray:
        launch = self.launch
        shape = (self.W, 32)
        base, _, axis = name[1:].partition(".")
        bx, by, _bz = launch.block
        a = "xyz".index(axis) if axis else 0
        if base == "tid":
            t = np.minimum(self.thread_in_block, self.threads - 1)
            value = (t % bx, t // bx % by, t // (bx * by))[a]
        elif base == "ntid":
            value = launch.block[a]
        elif base == "nctaid":
            value = launch.grid[a]
        elif base in ("ctaid", "clusterid", "cluster_ctaid"):
            blocks = np.array([launch.block_index(self.first + c) for c in range(self.ctas)])[:, a]
            value = blocks[self.cta_of_warp][:, None]
            if base == "clusterid":
                value = value // launch.cluster[a]
            elif base == "cluster_ctaid":
                value = value % launch.cluster[a]
        elif base == "nclusterid":
            value = launch.grid[a] // launch.cluster[a]
        elif base == "cluster_nctaid":
            value = launch.cluster[a]
        elif base == "cluster_ctarank":
            value = (self.cta_of_warp % self.cluster_size)[:, None]
        elif base == "cluster_nctarank":
            value = self.cluster_size
        elif base == "is_explicit_cluster":
            return np.full(shape, launch.cluster_size > 1)
        elif base == "laneid":
            value = np.arange(32)
        elif base == "warpid":
            value = (self.all_warps % self.warps_per_cta)[:, None]
        elif base == "nwarpid":
            value = self.warps_per_cta
        elif base == "smid":
            value = ((self.cta_of_warp + self.first) % launch.sms)[:, None]
        elif base == "nsmid":
            value = launch.sms
        elif base.startswith("lanemask"):
            one = 1 << np.arange(32, dtype=np.int64)
            value = {"eq": one, "lt": one - 1, "le": 2 * one - 1, "ge": 0x100000000 - one, "gt": 0x100000000 - 2 * one}[
                base[9:]
            ]
        elif base == "dynamic_smem_size":
            value = launch.shared_bytes
        elif base in ("total_smem_size", "aggr_smem_size"):
            value = self.shared.end
        else:
            assert base == "gridid", name
            return np.zeros(shape, np.uint64)
        return np.ascontiguousarray(np.broadcast_to(np.asarray(value), shape)).astype(np.uint32)

    def lane_live(self, rows: np.ndarray) -> np.ndarray:
        if self.uniform is not None:
            return np.ones((len(rows), 32), bool)
        return self.lane_pc[rows] != EXITED

    def fault(
        self,
        kind: str,
        message: str,
        ins: Ins,
        warp: int,
        lane: int,
        address: int | None = None,
        argument: int | None = None,
    ) -> EmulatorFault:
        cta = self.cta_of_warp[warp]
        t = int(self.thread_in_block[warp, lane])
        bx, by, _ = self.launch.block
        thread = (t % bx, t // bx % by, t // (bx * by))
        lines = self.program.module.lines
        text = lines[ins.line - 1] if 0 < ins.line <= len(lines) else ins.text
        if len(text.split(";")) > 2 or not text.strip():
            text = ins.text
        return EmulatorFault(
            kind, message, thread=thread, block=self.launch.block_index(self.first + int(cta)), line=ins.line,
            text=text, source=self.program.source(ins), address=address, argument=argument,
        )  # fmt: skip

    # ---- the loop

    def run(self) -> None:
        """Run every thread of the wave to its end."""
        self._loop()
        self.finish()

    def _loop(self) -> None:
        full = Group(self, None, None)
        program, counters = self.program, self.counters
        limit = self.launch.max_steps
        while True:
            self.step += 1
            if self.step > limit:
                raise self.stuck("limit", f"still running after {limit} scheduler steps (max_steps)")
            pc = self.uniform
            if pc is not None:
                g = full
                if self.step - self.last_progress > SPIN_STEPS and (self.last_poll > self.step - SPIN_STEPS // 2).all():
                    raise self.stuck("deadlock", "every warp polls, and nothing changes")
            else:
                chosen = self.pick()
                if chosen is None:
                    return
                pc, g = chosen
            ops, end = program.segment(pc)
            done = 0
            result = None
            for operation in ops:
                result = operation(g)
                done += 1
                if result is not None:
                    break
            if result is PARK:
                done -= 1
            if done:
                counters.run(pc, pc + done, g.n)
                if g.mask is not None:
                    partial = int((~g.mask.all(1)).sum())
                    if partial:
                        counters.by_instruction["divergent"][pc : pc + done] += partial
            if g.rows is not None:
                g.flush()
            if self.uniform is not None:
                if result is None:
                    self.uniform = end
                    continue
                if type(result) is int:
                    self.uniform = result
                    continue
                if type(result) is Exit and result.mask is None:
                    return
                self.lane_pc[...] = pc
                self.uniform = None
            else:
                self._ran(g)
            if result is None:
                self._settle(g, end)
            elif type(result) is int:
                self._settle(g, result)
            elif type(result) is Goto:
                self._settle(g, result.pcs)
            elif result is PARK or result is BLOCKED:
                self._settle(g, pc + done)
            else:
                self._exit(g, result.mask, pc + done)

    def _ran(self, g: Group) -> None:
        if g.rows is None:
            if g.mask is None:
                self.last_run[...] = self.step
            else:
                self.last_run[g.mask] = self.step
        elif g.mask is None:
            self.last_run[g.rows] = self.step
        else:
            self.last_run[g.rows] = np.where(g.mask, self.step, self.last_run[g.rows])

    def _settle(self, g: Group, pcs: Any) -> None:
        if g.mask is None:
            if g.rows is None:
                self.lane_pc[...] = pcs
            else:
                self.lane_pc[g.rows] = pcs
        elif g.rows is None:
            self.lane_pc = np.where(g.mask, pcs, self.lane_pc).astype(np.int32)
        else:
            self.lane_pc[g.rows] = np.where(g.mask, pcs, self.lane_pc[g.rows])

    def _exit(self, g: Group, mask: np.ndarray | None, after: int) -> None:
        leaving = mask if mask is not None else g.mask if g.mask is not None else np.ones(g.shape, bool)
        pcs = np.where(leaving, EXITED, np.int32(after))
        self._settle(g, pcs)
        # Lanes that wait for the ones that left look again.
        self.parked[g.warps] = False
        self.last_progress = self.step
        touched = np.unique(self.cta_of_warp[g.warps])
        for cta in touched[(self.arrived[touched] > 0).any(1)]:
            for barrier in np.nonzero(self.arrived[cta])[0]:
                self.try_release(int(cta), int(barrier), None)

    def pick(self) -> tuple[int, Group] | None:
        """The next instruction to run and the group of threads that stand there; None when every thread has ended."""
        runnable = (self.lane_pc != EXITED) & ~self.parked
        if self.blocked.any():
            runnable &= ~self.blocked[:, None]
        pcs = np.where(runnable, self.lane_pc, EXITED)
        warp_pc = pcs.min(1)
        pc = int(warp_pc.min())
        if pc == EXITED:
            if (self.lane_pc == EXITED).all():
                return None
            raise self.stuck_waiting()
        if pc == warp_pc.max() and self.rng is None:
            if not self.blocked.any() and not self.parked.any() and (self.lane_pc == pc).all():
                self.uniform = pc
                return pc, Group(self, None, None)
            if self.step % LANE_TURN:
                return pc, self._group(warp_pc == pc, pc)
        if self.step - self.last_progress > SPIN_STEPS + 8 * self.W:
            busy = runnable.any(1)
            if (self.last_poll[busy] > self.step - SPIN_STEPS // 2 - 4 * self.W).all():
                raise self.stuck("deadlock", "every warp that can run polls, and nothing changes")
        if self.rng is not None:
            busy = np.nonzero(warp_pc != EXITED)[0]
            lanes = pcs[self.rng.choice(busy)]
            pc = int(self.rng.choice(lanes[lanes != EXITED])) if self.rng.random() < 0.1 else int(lanes.min())
            here = (pcs == pc).any(1)
            some = here & (self.rng.random(self.W) < 0.5)
            return pc, self._group(some if some.any() else here, pc)
        waiting = np.where(runnable, self.last_run, self.step)
        longest = waiting.max(1) if self.step % LANE_TURN else waiting.min(1)
        longest = np.where(runnable.any(1), longest, self.step)
        oldest = int(longest.argmin())
        if longest[oldest] < self.step - WARP_TURN:
            lanes = pcs[oldest]
            pc = (
                int(lanes.min())
                if self.step % LANE_TURN
                else int(lanes[np.where(runnable[oldest], self.last_run[oldest], self.step).argmin()])
            )
        return pc, self._group((pcs == pc).any(1), pc)

    def _group(self, chosen: np.ndarray, pc: int) -> Group:
        everyone = chosen.all()
        rows = None if everyone else np.nonzero(chosen)[0]
        mask = (self.lane_pc if everyone else self.lane_pc[rows]) == pc
        if self.parked.any():
            if everyone:
                self.parked &= ~mask
            else:
                self.parked[rows] &= ~mask
        return Group(self, rows, None if mask.all() else mask)

    def park(self, g: Group, missing: np.ndarray, index: int) -> None:
        """Lanes of the group's warps named by `missing` wait for other lanes of their warp at instruction `index`.

        Where others wait there already, nobody does: they look again together, and wait together if some still miss.
        """
        rows = g.warps[missing]
        there = self.parked[rows] & (self.lane_pc[rows] == index)
        alone = ~there.any(1)
        self.parked[rows] &= ~there
        self.parked[rows[alone]] |= True if g.mask is None else g.mask[missing][alone]

    def polled(self, g: Group) -> None:
        """The group looked at something another warp may change."""
        self.last_poll[g.warps] = self.step

    def progress(self) -> None:
        self.last_progress = self.step

    # ---- no way on

    def _positions(self) -> tuple[list[str], Ins, int, int]:
        words: list[str] = []
        first: tuple[Ins, int, int] | None = None
        pcs = np.full_like(self.lane_pc, self.uniform) if self.uniform is not None else self.lane_pc
        seen: set = set()
        for warp in range(self.W):
            for pc in np.unique(pcs[warp][pcs[warp] != EXITED]):
                lanes = pcs[warp] == pc
                at = int(pc) - 1 if self.blocked[warp] else int(pc)
                ins = self.program.code[max(at, 0)]
                if first is None:
                    first = (ins, warp, int(lanes.argmax()))
                how = (
                    f"waits at barrier {self.waits_on[warp]}"
                    if self.blocked[warp]
                    else "waits for the other lanes of its warp"
                    if self.parked[warp, lanes].any()
                    else "runs"
                )
                block = self.launch.block_index(self.first + int(self.cta_of_warp[warp]))
                if len(words) < 12:
                    words.append(
                        f"block {block} warp {warp % self.warps_per_cta} ({int(lanes.sum())} lanes) {how} "
                        f"at line {ins.line} `{ins.text}`"
                    )
                seen.add(ins.index)
        assert first is not None
        return words, *first

    def stuck(self, kind: str, what: str) -> EmulatorFault:
        words, ins, warp, lane = self._positions()
        return self.fault(kind, what + ": " + "; ".join(words), ins, warp, lane)

    def stuck_waiting(self) -> EmulatorFault:
        for warp in range(self.W):
            lanes = self.parked[warp] & (self.lane_pc[warp] != EXITED)
            if lanes.any():
                lane = int(lanes.argmax())
                ins = self.program.code[int(self.lane_pc[warp, lane])]
                words, *_ = self._positions()
                what = f"{ins.parts[0]} is executed by {int(lanes.sum())} lanes of the warp, and the others never come"
                return self.fault("sync", what + ": " + "; ".join(words), ins, warp, lane)
        return self.stuck("sync", "no warp can go on")
