"""mbarrier instructions, and cp.async.mbarrier.arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .decode import Decoder, Mods, full, getter, op, put_where
from .memory import SHARED_WINDOW, SHIFT, shared_index
from .ops_memory import ONES, address_of
from .syntax import Imm, Ins, Mem, Reg, Sink

U32, U64 = np.uint32, np.uint64
IGNORED = ("shared", "shared::cta", "shared::cluster", "b64", "release", "acquire", "relaxed", "cta", "cluster")


def positions(g: Any, ins: Ins, address: np.ndarray, active: Any, size: int = 8) -> np.ndarray:
    """Byte positions of shared addresses (plain, cluster or generic) of the active threads."""
    flat = g.flat(address, active)
    if flat.dtype == U64 and len(flat) and int(flat.max()) >= SHARED_WINDOW:
        flat = flat & U64(0xFFFFFFFF)
    return shared_index(g, ins, flat, active, size, False)


def slots_of(g: Any, ins: Ins, position: np.ndarray, active: Any) -> np.ndarray:
    m = g.m
    slots = m.mbar().slot_of[position >> 3]
    if (slots < 0).any():
        at = int(np.argmax(slots < 0))
        from .memory import fault

        where = int(position[at]) % m.shared.stride
        raise fault(g, ins, "sync", f"no mbarrier is initialized at shared address {where}", active, at, where)
    if m.race is not None:
        near = position // m.shared.stride == m.cta_of_warp[g.flat_warps(active)]
        if near.all():
            m.race.check_shared(g, ins, position, active, 8, False, True, False)
    return slots


def _arrive_checked(g: Any, ins: Ins, slots: np.ndarray, counts: np.ndarray, active: Any, release: bool = True) -> None:
    try:
        g.m.mbar().arrive(slots, counts, g.flat_warps(active), release)
    except OverflowError as e:
        from .memory import fault

        at = int(np.argmax(slots == e.args[0]))
        raise fault(g, ins, "sync", "more threads arrive at an mbarrier than its phase expects", active, at) from None


@op("mbarrier")
def _mbarrier(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    what = m.left.pop(0) if m.left else ""
    builder = {
        "init": _init, "inval": _inval, "arrive": _arrive, "arrive_drop": _arrive, "test_wait": _wait,
        "try_wait": _wait,
        "expect_tx": _tx, "complete_tx": _tx, "pending_count": _pending,
    }.get(what)  # fmt: skip
    if builder is None:
        raise d.refuse(ins, f"mbarrier.{what} is not known")
    return builder(d, ins, m, what)


def _init(d: Decoder, ins: Ins, m: Mods, what: str) -> Callable:
    m.drop(*IGNORED)
    m.end()
    d.count(ins, 2)
    get, count = address_of(d, ins, ins.args[0]), getter(d.src(ins, ins.args[1], 32))
    guard = d.guard(ins)

    def init(g: Any) -> None:
        active = g.active(guard)
        if active is not None and not active.any():
            return
        mach = g.m
        position = positions(g, ins, get(g), active)
        counts = g.flat(full(count(g), g, U32), active).astype(np.int64)
        if (counts < 1).any() or (counts >= 1 << 20).any():
            raise mach.fault("sync", f"mbarrier.init with a count of {int(counts[0])}", ins, int(g.warps[0]), 0)
        if mach.race is not None:
            mach.race.check_shared(g, ins, position, active, 8, True, False, False)
        if mach.shared.marks is not None:
            mach.shared.marks[8][position >> SHIFT[8]] = ONES[8]
        mach.mbar().init(position, counts)
        mach.progress()

    return init


def _inval(d: Decoder, ins: Ins, m: Mods, what: str) -> Callable:
    m.drop(*IGNORED)
    m.end()
    get = address_of(d, ins, ins.args[0])
    guard = d.guard(ins)

    def invalidate(g: Any) -> None:
        active = g.active(guard)
        if active is None or active.any():
            g.m.mbar().invalidate(positions(g, ins, get(g), active))

    return invalidate


def _arrive(d: Decoder, ins: Ins, m: Mods, what: str) -> Callable:
    expect = m.flag("expect_tx")
    m.flag("noComplete")
    release = "relaxed" not in m.left
    m.drop(*IGNORED)
    m.end()
    drop = what == "arrive_drop"
    args = list(ins.args)
    state = None
    if not isinstance(args[0], Mem):
        state = None if isinstance(args[0], Sink) else d.dst(ins, args[0], 64)
        args.pop(0)
    get = address_of(d, ins, args[0])
    amount = getter(d.src(ins, args[1], 32)) if len(args) > 1 else None
    if expect and amount is None:
        raise d.refuse(ins, "arrive.expect_tx needs a count of bytes")
    guard = d.guard(ins)

    def arrive(g: Any) -> None:
        active = g.active(guard)
        if active is not None and not active.any():
            return
        mach = g.m
        bars = mach.mbar()
        slots = slots_of(g, ins, positions(g, ins, get(g), active), active)
        phase = bars.phase[slots].astype(U64)
        value = None if amount is None else g.flat(full(amount(g), g, U32), active).astype(np.int64)
        if expect:
            np.add.at(bars.bytes, slots, value)
        counts = np.ones(len(slots), np.int64) if expect or value is None else value
        if drop:
            np.subtract.at(bars.count, slots, counts)
        _arrive_checked(g, ins, slots, counts, active, release)
        mach.progress()
        if state is not None:
            out = np.zeros(g.shape, U64)
            if active is None:
                out = phase.reshape(g.shape)
            else:
                out[active] = phase
            put_where(g, state, out, active)

    return arrive


def _wait(d: Decoder, ins: Ins, m: Mods, what: str) -> Callable:
    parity = m.flag("parity")
    m.drop(*IGNORED)
    m.end()
    d.count(ins, 3, 4)
    slot = d.dst(ins, ins.args[0], 1)
    get = address_of(d, ins, ins.args[1])
    value = getter(d.src(ins, ins.args[2], 32 if parity else 64))
    guard = d.guard(ins)

    def wait(g: Any) -> None:
        active = g.active(guard)
        if active is not None and not active.any():
            return
        mach = g.m
        bars = mach.mbar()
        slots = slots_of(g, ins, positions(g, ins, get(g), active), active)
        want = g.flat(full(value(g), g, U32 if parity else U64), active).astype(np.int64)
        if mach.rng is not None and bars.queue and mach.rng.random() < 0.3:
            bars.deliver([bars.queue[int(mach.rng.integers(len(bars.queue)))][0]])

        def look() -> np.ndarray:
            return bars.passed(slots, want) if parity else bars.phase[slots] > want

        done = look()
        if not done.all() and bars.deliver(np.unique(slots[~done])):
            done = look()
        if not done.all():
            mach.polled(g)
        if done.any():
            bars.acquire(slots[done], g.flat_warps(active)[done])
        out = np.zeros(g.shape, bool)
        if active is None:
            out = done.reshape(g.shape)
        else:
            out[active] = done
        put_where(g, slot, out, active)

    return wait


def _tx(d: Decoder, ins: Ins, m: Mods, what: str) -> Callable:
    m.drop(*IGNORED)
    m.end()
    d.count(ins, 2)
    get, amount = address_of(d, ins, ins.args[0]), getter(d.src(ins, ins.args[1], 32))
    guard = d.guard(ins)
    sign = 1 if what == "expect_tx" else -1

    def change(g: Any) -> None:
        active = g.active(guard)
        if active is not None and not active.any():
            return
        slots = slots_of(g, ins, positions(g, ins, get(g), active), active)
        for slot, value in zip(slots, g.flat(full(amount(g), g, U32), active), strict=True):
            g.m.mbar().add_bytes(int(slot), sign * int(value))
        g.m.progress()

    return change


def _pending(d: Decoder, ins: Ins, m: Mods, what: str) -> Callable:
    raise d.refuse(ins, "mbarrier.pending_count is not known")


def async_arrive(d: Decoder, ins: Ins, m: Mods) -> Callable:
    """``cp.async.mbarrier.arrive``: arrives when the thread's cp.async copies so far have landed."""
    m.drop("mbarrier", "arrive")
    keep = m.flag("noinc")
    m.drop(*IGNORED)
    m.end()
    d.count(ins, 1)
    get = address_of(d, ins, ins.args[0])
    guard = d.guard(ins)

    def arrive(g: Any) -> None:
        active = g.active(guard)
        if active is not None and not active.any():
            return
        mach = g.m
        bars = mach.mbar()
        slots = slots_of(g, ins, positions(g, ins, get(g), active), active)
        if not keep:
            np.add.at(bars.pending, slots, 1)
        threads, warps = g.flat_threads(active), g.flat_warps(active)
        serial = mach.copies.serial
        for slot in np.unique(slots):
            mine = slots == slot

            def land(
                slot: int = int(slot), threads: np.ndarray = threads[mine], warps: np.ndarray = warps[mine]
            ) -> None:
                mach.copies.land_threads(threads, serial)
                bars.arrive(np.full(len(warps), slot), np.ones(len(warps), np.int64), warps)

            bars.queue.append((int(slot), land))

    return arrive


__all__ = ["Imm", "Reg", "async_arrive", "positions", "slots_of"]
