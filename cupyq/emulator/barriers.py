"""The 16 hardware barriers of every CTA: bar.sync, bar.arrive, bar.red."""

from __future__ import annotations

from typing import Any

import numpy as np

from .group import Group
from .syntax import Ins

EXITED = np.int32(2**31 - 1)  # the instruction a lane stands at once it has ended


class Blocked:
    """The warps wait at a barrier; they go on at the next instruction when it opens."""


BLOCKED = Blocked()


class Barriers:
    """The part of a machine that holds warps at barriers and lets them go."""

    counters: Any
    program: Any
    race: Any
    checks: frozenset
    uniform: int | None
    warps_per_cta: int
    threads: int
    lane_pc: np.ndarray
    thread_in_block: np.ndarray
    cta_of_warp: np.ndarray
    blocked: np.ndarray
    waits_on: np.ndarray
    arrived: np.ndarray
    barrier_ins: dict[tuple[int, int], Ins]
    barrier_members: dict[tuple[int, int], list[int]]
    reductions: dict[tuple[int, int], list]
    registers: list[np.ndarray]
    last_progress: int
    step: int
    fault: Any

    def barrier(self, g: Group, ins: Ins, identity: Any, count: Any, wait: bool, reduce: Any = None) -> Any:
        """Warps of the group arrive at a barrier of their CTA; returns None when they pass at once."""
        self.counters.by_instruction["barriers"][ins.index] += g.n
        if (
            self.uniform is not None
            and np.ndim(identity) == 0
            and (count is None or int(count) == self.warps_per_cta * 32)
            and wait
            and reduce is None
        ):
            if self.race is not None:
                self.race.barrier_all()
            return None
        self.last_progress = self.step
        if self.uniform is not None:
            self.lane_pc[...] = ins.index
            self.uniform = None
            g = Group(self, None, g.mask)
        ids = np.broadcast_to(np.asarray(identity).reshape(-1, 1)[:, 0] if np.ndim(identity) else identity, (g.n,))
        lanes = (
            g.mask.sum(1)
            if g.mask is not None and "aligned" not in ins.parts and ins.parts[0] == "barrier"
            else np.full(g.n, 32)
        )
        keys = set()
        for i, warp in enumerate(g.warps):
            cta, b = int(self.cta_of_warp[warp]), int(ids[i])
            if not 0 <= b < 16:
                raise self.fault("sync", f"barrier {b} where 0 to 15 exist", ins, int(warp), 0)
            key = (cta, b)
            first = self.barrier_ins.get(key)
            if (
                self.arrived[key]
                and count is None
                and first is not None
                and first.index != ins.index
                and "sync" in self.checks
            ):
                raise self.fault(
                    "sync",
                    f"barrier {b} is reached at line {ins.line} by this warp while others of the block wait "
                    f"at line {first.line}",
                    ins,
                    int(warp),
                    0,
                )
            self.barrier_ins[key] = ins
            self.arrived[key] += int(lanes[i])
            self.barrier_members.setdefault(key, []).append(int(warp))
            if wait:
                self.waits_on[warp] = b
                self.blocked[warp] = True
            keys.add(key)
        if reduce is not None:
            for cta, b in keys:
                mine = (self.cta_of_warp[g.warps] == cta) & (ids == b)
                self.reductions.setdefault((cta, b), []).append(
                    (g.warps[mine], reduce[0][mine], g.mask[mine] if g.mask is not None else None, reduce[1:])
                )
        g.flush()
        for cta, b in keys:
            self.try_release(cta, b, None if count is None else int(np.max(count)))
        return BLOCKED

    def try_release(self, cta: int, b: int, count: int | None) -> None:
        """Open a barrier when enough threads have come. With no count, every warp of the CTA that still lives must."""
        key = (cta, b)
        if count is None:
            ins = self.barrier_ins[key]
            if len(ins.args) > 1 and ("red" not in ins.parts or len(ins.args) > 3):
                return
            rows = slice(cta * self.warps_per_cta, (cta + 1) * self.warps_per_cta)
            live = self.lane_pc[rows] != EXITED
            count = (
                int(live.any(1).sum()) * 32
                if not ("barrier" in ins.parts[0] and "aligned" not in ins.parts)
                else int(live.sum())
            )
        if count == 0 or self.arrived[key] < count:
            return
        members = np.array(self.barrier_members.pop(key))
        if self.race is not None:
            self.race.barrier(cta, members)
        self.arrived[key] = 0
        for rows, _, mask, (slot, kind, _) in self.reductions.get(key, ()):
            value = self._reduced(self.reductions[key], kind)
            old = self.registers[slot][rows]
            new = np.full(old.shape, value).astype(old.dtype)
            self.registers[slot][rows] = new if mask is None else np.where(mask, new, old)
        self.reductions.pop(key, None)
        waiting = members[self.waits_on[members] == b]
        self.blocked[waiting] = False
        self.waits_on[waiting] = -1

    def _reduced(self, parts: list, kind: str) -> int:
        total, seen, every = 0, False, True
        for rows, value, mask, _ in parts:
            live = self.thread_in_block[rows] < self.threads
            if mask is not None:
                live = live & mask
            total += int((value & live).sum())
            seen |= bool((value & live).any())
            every &= bool((value | ~live).all())
        return total if kind == "popc" else int(seen) if kind == "or" else int(every)
