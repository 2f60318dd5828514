"""Clusters: their barrier, addresses in other CTAs' shared memory, and stores that complete on an mbarrier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .decode import Decoder, Mods, full, getter, op
from .group import PARK
from .memory import CELL, CLUSTER_SHIFT, IN_FLIGHT, SHARED_WINDOW, SHIFT
from .ops_mbarrier import positions, slots_of
from .ops_memory import ONES, address_of
from .syntax import UINT, WIDTH, Imm, Ins, Vec

U32, U64 = np.uint32, np.uint64


class ClusterBarriers:
    """The hardware barrier of each cluster: arrive, then wait for the phase that was arrived in."""

    def __init__(self, m: Any) -> None:
        self.m = m
        self.cluster_of_warp = m.cta_of_warp // m.cluster_size
        self.phase = np.zeros(int(self.cluster_of_warp.max()) + 1, np.int64)
        self.arrived = np.zeros(m.W, bool)
        self.joined = np.zeros(m.W, np.int64)

    def arrive(self, g: Any, ins: Ins) -> None:
        if self.arrived[g.warps].any():
            at = int(g.warps[int(self.arrived[g.warps].argmax())])
            raise self.m.fault("sync", "barrier.cluster.arrive twice with no wait between", ins, at, 0)
        self.arrived[g.warps] = True
        self.joined[g.warps] = self.phase[self.cluster_of_warp[g.warps]]
        self.m.progress()
        self.complete(np.unique(self.cluster_of_warp[g.warps]))

    def complete(self, clusters: np.ndarray) -> None:
        for cluster in clusters:
            members = np.nonzero(self.cluster_of_warp == cluster)[0]
            live = members[self.m.lane_live(members).any(1)]
            if len(live) and self.arrived[live].all():
                self.phase[cluster] += 1
                self.arrived[members] = False
                if self.m.race is not None:
                    self.m.race.barrier(0, live)
                self.m.progress()

    def waiting(self, g: Any) -> bool:
        clusters = self.cluster_of_warp[g.warps]
        if (self.phase[clusters] > self.joined[g.warps]).all():
            return False
        self.complete(np.unique(clusters))
        return not (self.phase[clusters] > self.joined[g.warps]).all()


def cluster_barrier(d: Decoder, ins: Ins, m: Mods) -> Callable:
    what = m.choice("arrive", "wait")
    m.drop("release", "acquire", "relaxed", "aligned")
    m.end()
    d.count(ins, 0)

    def arrive(g: Any) -> Any:
        if not g.converged(ins):
            return PARK
        g.m.counters.by_instruction["barriers"][ins.index] += g.n
        g.m.cluster().arrive(g, ins)
        return None

    def wait(g: Any) -> Any:
        if not g.converged(ins):
            return PARK
        if g.m.cluster().waiting(g):
            g.m.polled(g)
            return ins.index
        return None

    return arrive if what == "arrive" else wait


@op("mapa")
def _mapa(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    space = m.choice("shared::cluster", default="generic")
    m.end()
    d.count(ins, 3)
    width = WIDTH[t]
    u = UINT[width].type
    window = SHARED_WINDOW if space == "generic" and width == 64 else 0
    a, rank = d.src(ins, ins.args[1], width), d.src(ins, ins.args[2], 32)

    def place(a: Any, rank: Any) -> Any:
        return u(window) + ((rank.astype(u) + u(1)) << u(CLUSTER_SHIFT)) + (a & u((1 << CLUSTER_SHIFT) - 1))

    return d.alu(ins, place, d.dst(ins, ins.args[0], width), [a, rank], UINT[width])


@op("getctarank")
def _getctarank(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    m.drop("shared::cluster")
    m.end()
    d.count(ins, 2)
    get = getter(d.src(ins, ins.args[1], WIDTH[t]))
    slot = d.dst(ins, ins.args[0], 32)

    def rank(g: Any) -> None:
        field = ((full(get(g), g) & UINT[WIDTH[t]].type(0xFFFFFFFF)) >> UINT[WIDTH[t]].type(CLUSTER_SHIFT)).astype(U32)
        own = g.special("%cluster_ctarank")
        g.put(slot, np.where(field == 0, own, field - U32(1)))

    return rank


def st_async(d: Decoder, ins: Ins, m: Mods) -> Callable:
    """A store to shared memory of the cluster that counts its bytes on an mbarrier."""
    t = m.type()
    vector = int(m.choice("v2", "v4", default="v1")[1])
    m.drop("async", "weak", "shared::cluster", "mbarrier::complete_tx::bytes")
    m.end()
    d.count(ins, 3)
    width = WIDTH[t]
    size = width // 8 * vector
    items = ins.args[1].items if isinstance(ins.args[1], Vec) else [ins.args[1]]
    if len(items) != vector or size not in CELL:
        raise d.refuse(ins, f"{ins.op} is not known")
    getters = [getter(d.src(ins, x, width, t[0])) for x in items]
    target, barrier = address_of(d, ins, ins.args[0]), address_of(d, ins, ins.args[2])
    guard = d.guard(ins)

    def store(g: Any) -> None:
        active = g.active(guard)
        if active is not None and not active.any():
            return
        mach = g.m
        position = positions(g, ins, target(g), active, size)
        slots = slots_of(g, ins, positions(g, ins, barrier(g), active, 8), active)
        parts = np.empty((g.n, 32, vector), UINT[width])
        for i, get in enumerate(getters):
            parts[:, :, i] = get(g)
        cells = g.flat(parts.reshape(g.n, -1).view(CELL[size]), active)
        if mach.shared.marks is not None:
            marks = mach.shared.marks[size]
            marks[position >> SHIFT[size]] = np.frombuffer(bytes([IN_FLIGHT]) * size, marks.dtype)[0]
        for slot in np.unique(slots):
            mine = slots == slot

            def land(
                slot: int = int(slot), at: np.ndarray = position[mine] >> SHIFT[size], data: np.ndarray = cells[mine]
            ) -> None:
                mach.shared.cells[size][at] = data
                if mach.shared.marks is not None:
                    mach.shared.marks[size][at] = ONES[size]
                mach.mbar().add_bytes(slot, -size * len(at))

            mach.mbar().queue.append((int(slot), land))

    return store


def red_async(d: Decoder, ins: Ins, m: Mods) -> Callable:
    raise d.refuse(ins, "red.async is not known")


__all__ = ["ClusterBarriers", "Imm", "cluster_barrier", "red_async", "st_async"]
