"""Bulk copies: cp.async.bulk, tensor copies (TMA), and tensormap.replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .decode import Decoder, Mods, full, getter, op
from .memory import IN_FLIGHT, REGION_BITS, SHARED_WINDOW, WRITTEN, Allocation
from .ops_mbarrier import positions, slots_of
from .ops_memory import address_of
from .syntax import Imm, Ins, Mem, Vec
from .tensormap import BYTES, OFFSET, Decoded, swizzle

U8, U32, U64 = np.uint8, np.uint32, np.uint64
DROPPED = ("tile", "L2::cache_hint", "cta_group::1", "mbarrier::complete_tx::bytes", "bulk_group")


class OneThread:
    """One issuing thread of a bulk copy: where faults and races are attributed to."""

    def __init__(self, g: Any, ins: Ins, warp: int, lane: int) -> None:
        self.m, self.ins, self.warp, self.lane = g.m, ins, warp, lane

    def fault(self, kind: str, message: str, address: int | None = None, argument: int | None = None) -> Exception:
        return self.m.fault(kind, message, self.ins, self.warp, self.lane, address, argument)


def allocation_at(t: OneThread, address: int, size: int, write: bool) -> Allocation:
    """The allocation that holds a range of global memory."""
    found = t.m.memory.regions.get(address >> REGION_BITS)
    if found is None or address < found.start or address + size > found.end or found.freed:
        words, argument = t.m.memory.describe(address)
        raise t.fault(
            "memory", f"bulk {'write' if write else 'read'} of {size} bytes out of bounds: {words}", address, argument
        )
    if write and not found.writable:
        words, argument = t.m.memory.describe(address)
        raise t.fault("memory", f"bulk write in a read-only array: {words}", address, argument)
    return found


def threads(g: Any, active: Any) -> list[tuple[int, int, int, int]]:
    """(flat index, row, warp, lane) of the active threads."""
    mask = np.ones(g.shape, bool) if active is None else active
    rows, lanes = np.nonzero(mask)
    return [(i, int(r), int(g.warps[r]), int(lane)) for i, (r, lane) in enumerate(zip(rows, lanes, strict=True))]


def shared_range(t: OneThread, position: int, size: int, align: int) -> np.ndarray:
    """16-byte cells of a range of shared memory, checked."""
    shared = t.m.shared
    where = position % shared.stride
    if where % align or where + size > shared.end:
        what = f"is no multiple of {align}" if where % align else "ends outside shared memory"
        raise t.fault("memory", f"bulk copy of {size} bytes at shared address {where}, which {what}", where)
    return np.arange(position >> 4, position + size >> 4)


def start_write(t: OneThread, cells: np.ndarray) -> None:
    """Shared cells that a bulk copy is about to fill."""
    m = t.m
    if m.shared.shadow is not None:
        m.shared.shadow.reshape(-1, 16)[cells] = IN_FLIGHT
    if m.race is not None:
        n = len(cells)
        m.race.agent_access(t.ins, np.full(n, t.warp), cells << 4, np.full(n, m.race.bulk_column), True)


def land_write(m: Any, cells: np.ndarray, data: np.ndarray, slot: int) -> None:
    m.shared.data.reshape(-1, 16)[cells] = data
    if m.shared.shadow is not None:
        m.shared.shadow.reshape(-1, 16)[cells] = WRITTEN
    if m.race is not None:
        column = m.race.bulk_column
        done = m.race.agent_done(cells << 4, np.full(len(cells), column), True)
        bars = m.mbar()
        bars.clock[slot, column] = max(bars.clock[slot, column], done)


def read_cells(t: OneThread, cells: np.ndarray) -> None:
    """Shared cells that a bulk copy is about to read."""
    m = t.m
    if m.shared.shadow is not None:
        good = (m.shared.shadow.reshape(-1, 16)[cells] == WRITTEN).all(1)
        if not good.all():
            where = (int(cells[int(good.argmin())]) << 4) % m.shared.stride
            raise t.fault(
                "init",
                f"a bulk copy reads shared address {where}, where nothing has been written (or is still in flight)",
                where,
            )
    if m.race is not None:
        n = len(cells)
        m.race.agent_access(t.ins, np.full(n, t.warp), cells << 4, np.full(n, m.race.bulk_column), False)


def count_rows(m: Any, ins: Ins, allocation: Allocation, starts: np.ndarray, length: int, size: int) -> None:
    """Sectors of rows of global memory."""
    c = m.counters.by_instruction
    first = starts >> 5
    width = int(((starts + length - 1 >> 5) - first).max()) + 1 if len(starts) else 0
    touched = np.unique(
        (first[:, None] + np.arange(width))[(first[:, None] + np.arange(width)) <= (starts + length - 1 >> 5)[:, None]]
    )
    allocation.sectors[touched - (allocation.start >> 5)] = True
    c["requests"][ins.index] += 1
    c["sectors"][ins.index] += len(touched)
    c["ideal_sectors"][ins.index] += -(-length * len(starts) // 32)
    c["bytes"][ins.index] += size


class Box:
    """One box of a tensor: the part that lies inside it, as strided views of global memory."""

    def __init__(self, t: OneThread, raw: bytes, coords: list[int], write: bool) -> None:
        self.map = tm = Decoded(raw)
        if tm.problem:
            raise t.fault("memory", f"tensor copy: {tm.problem}")
        if len(coords) != tm.rank:
            raise t.fault("memory", f"tensor copy with {len(coords)} coordinates of a tensor of rank {tm.rank}")
        low = [max(c, 0) for c in coords]
        high = [min(c + b, d) for c, b, d in zip(coords, tm.box, tm.dims, strict=True)]
        self.empty = any(h <= lo for lo, h in zip(low, high, strict=True))
        self.shape = (*tuple(tm.box[::-1][:-1]), tm.box[0] * tm.element)
        if self.empty:
            return
        start = tm.address + sum(lo * s for lo, s in zip(low, tm.strides, strict=True))
        extent = [h - lo for lo, h in zip(low, high, strict=True)]
        size = sum((e - 1) * s for e, s in zip(extent, tm.strides, strict=True)) + tm.element
        self.allocation = allocation_at(t, start, size, write)
        inside = [slice(lo - c, h - c) for lo, h, c in zip(low, high, coords, strict=True)]
        inner = slice(inside[0].start * tm.element, inside[0].stop * tm.element)
        self.inside = (*inside[:0:-1], inner)
        shape = (*extent[:0:-1], extent[0] * tm.element)
        self.view = np.ndarray(
            shape, U8, self.allocation.buffer, start - self.allocation.start, (*tm.strides[:0:-1], 1)
        )
        self.length = shape[-1]
        starts = np.array([start], np.int64)
        for e, s in zip(extent[1:], tm.strides[1:], strict=True):
            starts = (starts[:, None] + np.arange(e) * s).ravel()
        self.starts = starts

    def load(self) -> np.ndarray:
        """The box's bytes as (n, 16), zero where it sticks out."""
        out = np.zeros(self.shape, U8)
        if not self.empty:
            out[self.inside] = self.view
        return out.reshape(-1, 16)

    def store(self, data: np.ndarray) -> None:
        if not self.empty:
            self.view[...] = data.reshape(self.shape)[self.inside]


def map_bytes(t: OneThread, address: int) -> bytes:
    found = allocation_at(t, address, BYTES, False)
    if address % 64:
        raise t.fault("memory", f"the tensor map at {address:#x} is no multiple of 64 bytes", address)
    at = address - found.start
    return found.buffer[at : at + BYTES].tobytes()


def bulk(d: Decoder, ins: Ins, m: Mods) -> Callable:
    """cp.async.bulk and its groups."""
    m.drop("bulk")
    guard = d.guard(ins)
    if m.flag("commit_group"):
        m.end()
        return lambda g: g.m.bulk().commit(g, g.active(guard))
    if m.flag("wait_group"):
        m.flag("read")
        m.end()
        if not isinstance(ins.args[0], Imm):
            raise d.refuse(ins, "wait_group takes a number")
        pending = int(ins.args[0].value)
        return lambda g: g.m.bulk().wait(g, g.active(guard), pending)
    if m.flag("prefetch"):
        return lambda g: None
    tensor = m.flag("tensor")
    multicast = m.flag("multicast::cluster")
    hint = "L2::cache_hint" in m.left
    m.drop(*DROPPED)
    rank = next((int(p[0]) for p in m.left if len(p) == 2 and p[1] == "d" and p[0].isdigit()), 0)
    m.left = [p for p in m.left if p != f"{rank}d"]
    route = tuple(m.left)
    m.left = []
    args = list(ins.args)
    if hint:
        args.pop()
    if route in (("shared::cluster", "global"), ("shared::cta", "global")):
        return _load(d, ins, args, tensor, multicast, guard)
    if route == ("global", "shared::cta"):
        return _store(d, ins, args, tensor, guard)
    if route == ("shared::cluster", "shared::cta") and not tensor:
        return _across(d, ins, args, guard)
    raise d.refuse(ins, f"{ins.op} is not known")


def _coordinates(d: Decoder, ins: Ins, mem: Mem) -> list[Callable]:
    if not isinstance(mem, Mem) or not mem.coords or not isinstance(mem.coords[0], Vec) or len(mem.coords) != 1:
        raise d.refuse(ins, "a tensor copy needs {coordinates} (im2col is not known)")
    return [getter(d.src(ins, c, 32)) for c in mem.coords[0].items]


def _load(d: Decoder, ins: Ins, args: list, tensor: bool, multicast: bool, guard: Any) -> Callable:
    """Global to shared, complete on an mbarrier."""
    mask_of = getter(d.src(ins, args.pop(), 16)) if multicast else None
    d_expected = 3 if tensor else 4
    if len(args) != d_expected:
        raise d.refuse(ins, f"{ins.op} is not known with {len(args)} operands")
    target = address_of(d, ins, args[0])
    source = address_of(d, ins, args[1]) if not tensor else address_of(d, ins, Mem(args[1].base, args[1].offset))
    coords = _coordinates(d, ins, args[1]) if tensor else []
    size_of = None if tensor else getter(d.src(ins, args[2], 32))
    barrier = address_of(d, ins, args[-1])

    def start(g: Any) -> None:
        active = g.active(guard)
        if active is not None and not active.any():
            return
        m = g.m
        place = positions(g, ins, target(g), active, 16)
        bars_at = positions(g, ins, barrier(g), active, 8)
        slots_of(g, ins, bars_at, active)
        address = g.flat(source(g).astype(U64), active)
        where = [g.flat(full(c(g), g, U32), active).view(np.int32) for c in coords]
        sizes = None if size_of is None else g.flat(full(size_of(g), g, U32), active)
        masks = None if mask_of is None else g.flat(full(mask_of(g), g, np.uint16), active)
        for i, _, warp, lane in threads(g, active):
            t = OneThread(g, ins, warp, lane)
            box = None
            if tensor:
                box = Box(t, map_bytes(t, int(address[i])), [int(c[i]) for c in where], False)
                size = box.map.bytes
            else:
                size = int(sizes[i])
                if size % 16 or int(address[i]) % 16:
                    raise t.fault(
                        "memory", f"bulk copy of {size} bytes from {int(address[i]):#x}: both must be multiples of 16"
                    )
                found = allocation_at(t, int(address[i]), size, False)
            if box is not None and not box.empty:
                count_rows(m, ins, box.allocation, box.starts, box.length, size)
            elif box is None:
                count_rows(m, ins, found, np.array([int(address[i])]), size, size)
            cta = int(place[i]) // m.shared.stride
            targets = [cta]
            if masks is not None:
                first = int(m.cta_of_warp[warp]) // m.cluster_size * m.cluster_size
                targets = [first + r for r in range(m.cluster_size) if int(masks[i]) >> r & 1]
            for other in targets:
                shift = (other - cta) * m.shared.stride
                position = int(place[i]) + shift
                cells = shared_range(t, position, size, 128 if tensor else 16)
                if box is not None:
                    cells = swizzle(cells << 4, box.map.swizzle) >> 4
                start_write(t, cells)
                slot = int(m.mbar().slot_of[int(bars_at[i]) + shift >> 3])
                if slot < 0:
                    raise t.fault("sync", "the mbarrier of a multicast copy is not initialized in every CTA")

                def land(
                    cells: np.ndarray = cells,
                    box: Any = box,
                    slot: int = slot,
                    size: int = size,
                    at: int = int(address[i]),
                    t: OneThread = t,
                ) -> None:
                    data = box.load() if box is not None else _bytes(t, at, size)
                    land_write(m, cells, data, slot)
                    m.mbar().add_bytes(slot, -size)

                m.mbar().queue.append((slot, land))

    return start


def _bytes(t: OneThread, address: int, size: int) -> np.ndarray:
    found = allocation_at(t, address, size, False)
    at = address - found.start
    return found.buffer[at : at + size].reshape(-1, 16)


def _store(d: Decoder, ins: Ins, args: list, tensor: bool, guard: Any) -> Callable:
    """Shared to global, complete with the thread's bulk group."""
    if len(args) != (2 if tensor else 3):
        raise d.refuse(ins, f"{ins.op} is not known with {len(args)} operands")
    target = address_of(d, ins, args[0]) if not tensor else address_of(d, ins, Mem(args[0].base, args[0].offset))
    coords = _coordinates(d, ins, args[0]) if tensor else []
    source = address_of(d, ins, args[1])
    size_of = None if tensor else getter(d.src(ins, args[2], 32))

    def start(g: Any) -> None:
        active = g.active(guard)
        if active is not None and not active.any():
            return
        m = g.m
        place = positions(g, ins, source(g), active, 16)
        address = g.flat(target(g).astype(U64), active)
        where = [g.flat(full(c(g), g, U32), active).view(np.int32) for c in coords]
        sizes = None if size_of is None else g.flat(full(size_of(g), g, U32), active)
        for i, _, warp, lane in threads(g, active):
            t = OneThread(g, ins, warp, lane)
            if tensor:
                box = Box(t, map_bytes(t, int(address[i])), [int(c[i]) for c in where], True)
                size = box.map.bytes
                cells = swizzle(shared_range(t, int(place[i]), size, 128) << 4, box.map.swizzle) >> 4
                if not box.empty:
                    count_rows(m, ins, box.allocation, box.starts, box.length, size)
                    if m.race is not None:
                        m.race.bulk_global(t, box.allocation, box.starts, box.length)
                write: Callable = box.store
            else:
                size = int(sizes[i])
                if size % 16 or int(address[i]) % 16:
                    raise t.fault(
                        "memory", f"bulk copy of {size} bytes to {int(address[i]):#x}: both must be multiples of 16"
                    )
                found = allocation_at(t, int(address[i]), size, True)
                cells = shared_range(t, int(place[i]), size, 16)
                count_rows(m, ins, found, np.array([int(address[i])]), size, size)
                if m.race is not None:
                    m.race.bulk_global(t, found, np.array([int(address[i])]), size)

                def write(
                    data: np.ndarray, found: Any = found, at: int = int(address[i]) - found.start, size: int = size
                ) -> None:
                    found.buffer[at : at + size] = data.reshape(-1)

            read_cells(t, cells)
            m.bulk().add(warp * 32 + lane, cells, write)

    return start


def _across(d: Decoder, ins: Ins, args: list, guard: Any) -> Callable:
    """Shared memory of one CTA to that of another of the cluster."""
    if len(args) != 4:
        raise d.refuse(ins, f"{ins.op} is not known with {len(args)} operands")
    target, source, barrier = (address_of(d, ins, args[i]) for i in (0, 1, 3))
    size_of = getter(d.src(ins, args[2], 32))

    def start(g: Any) -> None:
        active = g.active(guard)
        if active is not None and not active.any():
            return
        m = g.m
        place, origin = positions(g, ins, target(g), active, 16), positions(g, ins, source(g), active, 16)
        slots = slots_of(g, ins, positions(g, ins, barrier(g), active, 8), active)
        sizes = g.flat(full(size_of(g), g, U32), active)
        for i, _, warp, lane in threads(g, active):
            t = OneThread(g, ins, warp, lane)
            size, slot = int(sizes[i]), int(slots[i])
            cells, origins = shared_range(t, int(place[i]), size, 16), shared_range(t, int(origin[i]), size, 16)
            start_write(t, cells)

            def land(
                cells: np.ndarray = cells, origins: np.ndarray = origins, slot: int = slot, size: int = size
            ) -> None:
                land_write(m, cells, m.shared.data.reshape(-1, 16)[origins], slot)
                m.mbar().add_bytes(slot, -size)

            m.mbar().queue.append((slot, land))

    return start


class BulkStores:
    """Bulk copies out of shared memory: they read, and write, when their thread waits for their group."""

    def __init__(self, m: Any) -> None:
        self.m = m
        self.committed: dict[int, int] = {}
        self.items: list[tuple[int, int, np.ndarray, Callable]] = []

    def add(self, thread: int, cells: np.ndarray, write: Callable) -> None:
        self.items.append((thread, self.committed.get(thread, 0), cells, write))

    def commit(self, g: Any, active: Any) -> None:
        if self.items:
            for thread in g.flat_threads(active):
                self.committed[int(thread)] = self.committed.get(int(thread), 0) + 1

    def wait(self, g: Any, active: Any, pending: int) -> None:
        if not self.items:
            return
        here = {int(t) for t in g.flat_threads(active)}
        left = []
        for item in self.items:
            thread, group, cells, write = item
            if thread in here and group < self.committed.get(thread, 0) - pending:
                self.finish(thread >> 5, cells, write)
            else:
                left.append(item)
        self.items = left

    def finish(self, warp: int, cells: np.ndarray, write: Callable) -> None:
        m = self.m
        write(m.shared.data.reshape(-1, 16)[cells])
        if m.race is not None:
            column = m.race.bulk_column
            done = m.race.agent_done(cells << 4, np.full(len(cells), column), False)
            m.race.agent_known(np.array([warp]), np.array([column]), done)
        m.progress()

    def finish_all(self) -> None:
        """At the end of the CTA what was never waited for still completes."""
        for thread, _, cells, write in self.items:
            self.finish(thread >> 5, cells, write)
        self.items = []


@op("tensormap")
def _tensormap(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    if m.flag("cp_fenceproxy"):
        return _cp_fenceproxy(d, ins)
    if not m.flag("replace"):
        raise d.refuse(ins, f"{ins.op} is not known")
    m.drop("tile", "b1024")
    width = {"b32": 32, "b64": 64}[m.choice("b32", "b64")]
    space = m.choice("global", "shared::cta", default="generic")
    field = m.choice(*OFFSET)
    m.end()
    ordinal = 0
    if field in ("box_dim", "element_stride", "global_dim", "global_stride"):
        if not isinstance(ins.args[1], Imm):
            raise d.refuse(ins, "the ordinal must be a number")
        ordinal = int(ins.args[1].value)
    value = getter(d.src(ins, ins.args[-1], width))
    get = address_of(d, ins, ins.args[0])
    guard = d.guard(ins)
    at = OFFSET[field] + ordinal * (8 if field == "global_stride" else 4)
    size = width // 8

    def replace(g: Any) -> None:
        active = g.active(guard)
        if active is not None and not active.any():
            return
        values = g.flat(full(value(g), g, U32 if width == 32 else U64), active)
        if space == "global":
            address = g.flat(get(g), active)
            for i, _, warp, lane in threads(g, active):
                t = OneThread(g, ins, warp, lane)
                found = allocation_at(t, int(address[i]), BYTES, True)
                start = int(address[i]) - found.start + at
                found.buffer[start : start + size] = np.frombuffer(values[i : i + 1].tobytes(), U8)
            return
        place = positions(g, ins, get(g), active, 16)
        for i in range(len(place)):
            start = int(place[i]) + at
            g.m.shared.data[start : start + size] = np.frombuffer(values[i : i + 1].tobytes(), U8)
            if g.m.shared.shadow is not None:
                g.m.shared.shadow[start : start + size] = WRITTEN

    return replace


def _cp_fenceproxy(d: Decoder, ins: Ins) -> Callable:
    """Copy a tensor map from shared to global memory, one for the warp."""
    target, source = address_of(d, ins, ins.args[0]), address_of(d, ins, ins.args[1])
    guard = d.guard(ins)

    def copy(g: Any) -> None:
        active = g.active(guard)
        if active is not None and not active.any():
            return
        place = positions(g, ins, source(g), active, 16)
        address = g.flat(target(g).astype(U64), active)
        done = set()
        for i, row, warp, lane in threads(g, active):
            if row in done:
                continue
            done.add(row)
            t = OneThread(g, ins, warp, lane)
            found = allocation_at(t, int(address[i]), BYTES, True)
            at = int(address[i]) - found.start
            found.buffer[at : at + BYTES] = g.m.shared.data[int(place[i]) : int(place[i]) + BYTES]

    return copy


__all__ = ["SHARED_WINDOW", "BulkStores", "bulk"]
