"""Loads and stores of every space, ldmatrix and stmatrix, cp.async, prefetch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import counters as count
from .decode import Decoder, Mods, extend, full, getter, op, put_where
from .memory import (
    CELL,
    LOCAL_ID,
    REGION_BITS,
    SHARED_ID,
    SHIFT,
    WRITTEN,
    check_global,
    check_written,
    local_index,
    shared_index,
)  # fmt: skip
from .syntax import UINT, WIDTH, Imm, Ins, Mem, Reg, Sink, Vec

U32, U64 = np.uint32, np.uint64
CACHE = [
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "nc",
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L1::evict_first",
    "L1::evict_last",
    "L1::no_allocate",
    "L2::64B",
    "L2::128B",
    "L2::256B",
    "L2::evict_last",
    "L2::evict_normal",
    "L2::evict_first",
]
SCOPES = ("cta", "cluster", "gpu", "sys")
SPACES = (
    "global",
    "shared",
    "shared::cta",
    "shared::cluster",
    "local",
    "const",
    "param",
    "param::entry",
    "param::func",
)
ONES = {size: np.frombuffer(bytes([WRITTEN]) * size, CELL[size])[0] for size in CELL}


def address_of(d: Decoder, ins: Ins, mem: Any, width: int | None = None) -> Callable:
    """A callable giving the addresses of a memory operand over the group (uint32 or uint64, (n, 32))."""
    from .program import Address

    if not isinstance(mem, Mem):
        raise d.refuse(ins, f"{mem!r} is no address")
    base, offset = mem.base, mem.offset
    if isinstance(base, Reg):
        if base.width not in (32, 64):
            raise d.refuse(ins, f"an address in the {base.width}-bit register {base.name}")
        slot = base.slot
        if not offset:
            return lambda g: g.get(slot)
        constant = UINT[base.width].type(offset & ((1 << base.width) - 1))
        return lambda g: g.get(slot) + constant
    if isinstance(base, Imm):
        return lambda g: full(U64(offset & (2**64 - 1)), g, U64)
    if isinstance(base, Address):
        get = getter(d.src(ins, Address(base.variable, base.offset + offset), 64))
        return lambda g: full(get(g), g, U64)
    raise d.refuse(ins, f"{mem!r} is no address")


def _count_global(g: Any, ins: Ins, address: np.ndarray, active: np.ndarray | None, size: int, parts: list) -> None:
    c = g.m.counters.by_instruction
    index = ins.index
    threads = g.n * 32 if active is None else int(active.sum())
    sectors, _ = count.sectors_of(address, active)
    c["requests"][index] += g.n if active is None else int(active.any(1).sum())
    c["sectors"][index] += sectors
    c["ideal_sectors"][index] += -(-threads * size // 32)
    c["bytes"][index] += threads * size
    flat = g.flat(address, active)
    for allocation, selection in parts:
        chosen = flat if selection is None else flat[selection]
        first = U64(allocation.start >> 5)
        allocation.sectors[((chosen >> U64(5)) - first).view(np.int64)] = True


def _count_shared(g: Any, ins: Ins, address: np.ndarray, active: np.ndarray | None, size: int) -> None:
    c = g.m.counters.by_instruction
    index = ins.index
    wave, extra = count.wavefronts_of(address, active, size)
    c["requests"][index] += g.n if active is None else int(active.any(1).sum())
    c["wavefronts"][index] += wave
    c["conflicts"][index] += extra
    c["bytes"][index] += (g.n * 32 if active is None else int(active.sum())) * size


def _scatter_back(raw: np.ndarray, g: Any, active: np.ndarray | None) -> np.ndarray:
    """Flat cells of the active lanes as (n, 32) cells, zero elsewhere."""
    if active is None:
        return raw.reshape(g.shape)
    out = np.zeros(g.shape, raw.dtype)
    out[active] = raw
    return out


def load_cells(
    g: Any, ins: Ins, space: str, address: np.ndarray, active: np.ndarray | None, size: int, order: str = "weak"
) -> np.ndarray:
    """Read one cell of `size` bytes for each thread: (n, 32) cells."""
    if active is not None and not active.any():
        return np.zeros(g.shape, CELL[size])
    if space == "generic":
        region = (address >> U64(REGION_BITS)).astype(np.int64)
        seen = region if active is None else region[active]
        low, high = int(seen.min()), int(seen.max())
        if low == high or high < SHARED_ID:
            kind = "shared" if low == SHARED_ID else "local" if low == LOCAL_ID else "global"
            return load_cells(
                g, ins, kind, address & U64(0xFFFFFFFF) if low >= SHARED_ID else address, active, size, order
            )
        out = np.zeros(g.shape, CELL[size])
        for kind, wanted in (
            ("shared", region == SHARED_ID),
            ("local", region == LOCAL_ID),
            ("global", region < SHARED_ID),
        ):
            part = wanted if active is None else wanted & active
            if part.any():
                cells = load_cells(
                    g, ins, kind, address & U64(0xFFFFFFFF) if kind != "global" else address, part, size, order
                )
                out[part] = cells[part]
        return out
    m = g.m
    flat = g.flat(address, active)
    shift = SHIFT[size]
    if space == "global":
        flat = flat.astype(U64) if flat.dtype != U64 else flat
        parts = check_global(g, ins, flat, size, active, False)
        _count_global(g, ins, address, active, size, parts)
        if m.race is not None:
            m.race.global_access(g, ins, flat, parts, active, size, False, order)
        if len(parts) == 1:
            cells, start = parts[0][0].view(size)
            raw = cells.take(((flat - U64(start)) >> U64(shift)).view(np.int64))
        else:
            raw = np.empty(len(flat), CELL[size])
            for allocation, selection in parts:
                cells, start = allocation.view(size)
                raw[selection] = cells.take(((flat[selection] - U64(start)) >> U64(shift)).view(np.int64))
        return _scatter_back(raw, g, active)
    if space == "shared":
        position = shared_index(g, ins, flat, active, size, False)
        _count_shared(g, ins, address, active, size)
        if m.shared.marks is not None:
            check_written(g, ins, m.shared, "shared", position, size, active, m.shared.stride)
        if m.race is not None:
            m.race.shared_access(g, ins, position, active, size, False, order)
        return _scatter_back(m.shared.cells[size].take(position >> shift), g, active)
    position = local_index(g, ins, flat, active, size, False)
    m.counters.by_instruction["bytes"][ins.index] += len(flat) * size
    if m.local.marks is not None:
        check_written(g, ins, m.local, "local", position, size, active, m.local.frame)
    return _scatter_back(m.local.cells[size].take(position >> shift), g, active)


def store_cells(
    g: Any, ins: Ins, space: str, address: np.ndarray, active: np.ndarray | None, data: np.ndarray, order: str = "weak"
) -> None:
    """Write one cell for each thread; `data` is (n, 32) cells. Of threads that write one place the last one wins."""
    if active is not None and not active.any():
        return
    size = data.dtype.itemsize
    if space == "generic":
        region = (address >> U64(REGION_BITS)).astype(np.int64)
        seen = region if active is None else region[active]
        low, high = int(seen.min()), int(seen.max())
        if low == high or high < SHARED_ID:
            kind = "shared" if low == SHARED_ID else "local" if low == LOCAL_ID else "global"
            store_cells(g, ins, kind, address & U64(0xFFFFFFFF) if low >= SHARED_ID else address, active, data, order)
            return
        for kind, wanted in (
            ("shared", region == SHARED_ID),
            ("local", region == LOCAL_ID),
            ("global", region < SHARED_ID),
        ):
            part = wanted if active is None else wanted & active
            if part.any():
                store_cells(g, ins, kind, address & U64(0xFFFFFFFF) if kind != "global" else address, part, data, order)
        return
    m = g.m
    m.progress()
    flat = g.flat(address, active)
    values = g.flat(data, active)
    shift = SHIFT[size]
    if space == "global":
        flat = flat.astype(U64) if flat.dtype != U64 else flat
        parts = check_global(g, ins, flat, size, active, True)
        _count_global(g, ins, address, active, size, parts)
        if m.race is not None:
            m.race.global_access(g, ins, flat, parts, active, size, True, order)
        for allocation, selection in parts:
            cells, start = allocation.view(size)
            chosen = flat if selection is None else flat[selection]
            cells[((chosen - U64(start)) >> U64(shift)).view(np.int64)] = (
                values if selection is None else values[selection]
            )
        return
    if space == "shared":
        position = shared_index(g, ins, flat, active, size, True)
        _count_shared(g, ins, address, active, size)
        if m.race is not None:
            m.race.shared_access(g, ins, position, active, size, True, order)
        cells = position >> shift
        if m.shared.marks is not None:
            m.shared.marks[size][cells] = ONES[size]
        m.shared.cells[size][cells] = values
        return
    position = local_index(g, ins, flat, active, size, True)
    m.counters.by_instruction["bytes"][ins.index] += len(flat) * size
    cells = position >> shift
    if m.local.marks is not None:
        m.local.marks[size][cells] = ONES[size]
    m.local.cells[size][cells] = values


def memory_mods(d: Decoder, ins: Ins, m: Mods) -> tuple[str, str, int, str, str]:
    """Space, type, vector length, memory order and scope of a load or store."""
    t = m.type()
    vector = int(m.choice("v2", "v4", "v8", default="v1")[1])
    space = m.choice(*SPACES, default="generic")
    order = m.choice("weak", "volatile", "relaxed", "acquire", "release", "mmio", default="weak")
    scope = m.choice(*SCOPES, default="sys" if order == "volatile" else "gpu")
    m.drop(*CACHE)
    m.flag("L2::cache_hint")
    m.flag("unified")
    m.end()
    if t not in WIDTH or t == "pred" or (WIDTH[t] == 128 and vector > 1):
        raise d.refuse(ins, f"{ins.op} is not known")
    return space, t, vector, order, scope


def plain_space(space: str) -> str:
    return "shared" if space.startswith("shared") else "global" if space in ("const", "param::entry") else space


def _wide(d: Decoder, ins: Ins, t: str, operand: Any) -> tuple[int, list]:
    """Element width and registers of a transfer; .b128 moves as two halves."""
    items = operand.items if isinstance(operand, Vec) else [operand]
    return WIDTH[t], items


@op("ld", "ldu")
def _ld(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    space, t, vector, order, scope = memory_mods(d, ins, m)
    d.count(ins, 2, 3)
    width, items = _wide(d, ins, t, ins.args[0])
    if width == 128:
        raise d.refuse(ins, "registers of 128 bits are not known")
    if len(items) != vector:
        raise d.refuse(ins, f"{len(items)} registers where {vector} belong")
    size = width // 8 * vector
    if size not in CELL:
        raise d.refuse(ins, f"an access of {size} bytes is not known")
    slots = []
    for item in items:
        if isinstance(item, Sink):
            slots.append((None, width))
        elif isinstance(item, Reg) and item.width >= width:
            slots.append((item.slot, item.width))
        else:
            raise d.refuse(ins, f"{item!r} cannot hold {width} bits")
    kind = "s" if t[0] == "s" else "u"
    guard = d.guard(ins)
    mem = ins.args[1]
    if space in ("param", "param::entry", "param::func"):
        quick = _param(d, ins, mem, width, slots, kind, guard)
        if quick is not None:
            return quick
        from .program import Address

        base = mem.base if isinstance(mem, Mem) else None
        in_frame = isinstance(base, Address) and base.variable in d.program.frame
        space = "local" if in_frame or space == "param::func" else "kernel parameters"
    space = plain_space(space)
    get = address_of(d, ins, mem)
    if space == "kernel parameters":
        space = "global"
        offset_of = get
        get = lambda g: offset_of(g).astype(U64) + U64(g.m.param_address)  # noqa: E731
    element = UINT[width]
    polls = order in ("volatile", "relaxed", "acquire", "mmio")
    model = "weak" if order == "weak" else f"{order}.{scope}"

    def load(g: Any) -> None:
        active = g.active(guard)
        if polls:
            g.m.polled(g)
        cells = load_cells(g, ins, space, get(g), active, size, model)
        if vector == 1:
            put_where(g, slots[0][0], extend(cells.view(element), kind, slots[0][1]), active)
            return
        parts = cells.view(element).reshape(g.n, 32, vector)
        for i, (slot, register) in enumerate(slots):
            if slot is not None:
                put_where(g, slot, extend(np.ascontiguousarray(parts[:, :, i]), kind, register), active)

    return load


def _param(d: Decoder, ins: Ins, mem: Any, width: int, slots: list, kind: str, guard: Any) -> Callable | None:
    """``ld.param`` of a named kernel parameter: the same value for every thread."""
    from .program import Address

    if (
        not (isinstance(mem, Mem) and isinstance(mem.base, Address) and mem.base.variable.name in d.program.params)
        or mem.base.variable in d.program.frame
    ):
        return None
    at, size = d.program.params[mem.base.variable.name]
    offset = mem.base.offset + mem.offset
    step = width // 8
    if offset < 0 or offset + step * len(slots) > size:
        raise d.refuse(ins, f"reads past the end of {mem.base.variable.name} ({size} bytes)")
    element = UINT[width]

    def load(g: Any) -> None:
        active = g.active(guard)
        for i, (slot, register) in enumerate(slots):
            if slot is None:
                continue
            start = at + offset + i * step
            value = extend(g.m.param_bytes[start : start + step].view(element), kind, register)
            put_where(g, slot, np.full(g.shape, value[0]), active)

    return load


@op("st")
def _st(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    if m.left[:1] == ["async"]:
        from .ops_cluster import st_async

        return st_async(d, ins, m)
    space, t, vector, order, scope = memory_mods(d, ins, m)
    d.count(ins, 2, 3)
    width, items = _wide(d, ins, t, ins.args[1])
    if len(items) != vector or width == 128:
        raise d.refuse(ins, f"{len(items)} registers where {vector} belong")
    size = width // 8 * vector
    if size not in CELL:
        raise d.refuse(ins, f"an access of {size} bytes is not known")
    if space in ("const", "param::entry"):
        raise d.refuse(ins, f"a store to .{space}")
    if space.startswith("param"):
        space = "local"
    space = plain_space(space)
    kind = "f" if t in ("f32", "f64") else "b"
    getters = [getter(d.src(ins, item, width, kind)) for item in items]
    get = address_of(d, ins, ins.args[0])
    guard = d.guard(ins)
    element = UINT[width]
    model = "weak" if order == "weak" else f"{order}.{scope}"
    cell = CELL[size]

    def store(g: Any) -> None:
        active = g.active(guard)
        if vector == 1:
            data = full(getters[0](g), g, element).view(cell)
        else:
            parts = np.empty((g.n, 32, vector), element)
            for i, value in enumerate(getters):
                parts[:, :, i] = value(g)
            data = parts.reshape(g.n, -1).view(cell)
        store_cells(g, ins, space, get(g), active, data, model)

    return store


@op("createpolicy")
def _createpolicy(d: Decoder, ins: Ins) -> Callable:
    """Cache policies change nothing that is modelled; the register gets a fixed pattern."""
    slot = d.dst(ins, ins.args[0], 64)
    guard = d.guard(ins)
    return lambda g: put_where(g, slot, np.full(g.shape, U64(0x12F0000000000000)), g.active(guard))


@op("prefetch", "prefetchu", "applypriority", "discard")
def _prefetch(d: Decoder, ins: Ins) -> Callable:
    if ins.parts[0] == "discard":
        raise d.refuse(ins, "discard makes memory undefined; it is not known")
    return lambda g: None
