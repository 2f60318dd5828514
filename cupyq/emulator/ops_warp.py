"""Instructions in which the lanes of a warp see each other's registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .decode import Decoder, Mods, full, getter, op, put_where
from .group import PARK
from .ops_control import check_members, member_mask
from .syntax import SINT, UINT, WIDTH, Ins, Neg, Pair, Sink

U32, I32 = np.uint32, np.int32
LANES = np.arange(32, dtype=np.int64)


@op("shfl")
def _shfl(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    if m.type() != "b32" or not m.flag("sync"):
        raise d.refuse(ins, f"{ins.op} is not known")
    mode = m.choice("up", "down", "bfly", "idx")
    m.end()
    d.count(ins, 5)
    target = ins.args[0]
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    slot = d.dst(ins, first, 32)
    flag = d.dst(ins, second, 1) if second is not None else None
    a, b, c = (getter(d.src(ins, x, 32)) for x in ins.args[1:4])
    named = member_mask(d, ins, ins.args[4])
    guard = d.guard(ins)

    def shuffle(g: Any) -> Any:
        active = g.active(guard)
        if not check_members(g, ins, None if named is None else named(g), active if guard is not None else None):
            return PARK
        value = full(a(g), g, U32)
        by = np.asarray(b(g)).astype(np.int64) & 31
        control = np.asarray(c(g)).astype(np.int64)
        clamp, segment = control & 31, control >> 8 & 31
        highest = (LANES & segment) | (clamp & ~segment)
        lowest = LANES & segment
        if mode == "up":
            source = LANES - by
            inside = source >= highest
        elif mode == "down":
            source = LANES + by
            inside = source <= highest
        elif mode == "bfly":
            source = LANES ^ by
            inside = source <= highest
        else:
            source = lowest | (by & ~segment)
            inside = source <= highest
        source, inside = np.broadcast_to(source, g.shape), np.broadcast_to(inside, g.shape)
        source = np.where(inside, source, LANES)
        acting = active if active is not None else g.mask
        if acting is not None and "sync" in g.m.checks:
            asleep = acting & ~np.take_along_axis(acting, source, 1)
            if asleep.any():
                row, lane = (int(x[0]) for x in np.nonzero(asleep))
                raise g.m.fault(
                    "sync",
                    f"shfl.sync reads lane {int(source[row, lane])}, which does not take part",
                    ins,
                    int(g.warps[row]),
                    lane,
                )
        if slot is not None:
            put_where(g, slot, np.take_along_axis(value, source, 1), active)
        if flag is not None:
            put_where(g, flag, inside.copy(), active)
        return None

    return shuffle


def _pack(bits: np.ndarray) -> np.ndarray:
    """(n, 32) bool to one word a warp, spread over its lanes."""
    words = np.packbits(bits, axis=1, bitorder="little").view(U32)
    return np.repeat(words, 32, axis=1)


@op("vote")
def _vote(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    if not m.flag("sync"):
        raise d.refuse(ins, f"{ins.op} is not known")
    kind = m.choice("all", "any", "uni", "ballot")
    m.end()
    d.count(ins, 3)
    slot = d.dst(ins, ins.args[0], WIDTH[t])
    get = getter(d.src(ins, ins.args[1], 1))
    named = member_mask(d, ins, ins.args[2])
    guard = d.guard(ins)

    def vote(g: Any) -> Any:
        active = g.active(guard)
        if not check_members(g, ins, None if named is None else named(g), active if guard is not None else None):
            return PARK
        p = full(get(g), g, bool)
        acting = active if active is not None else g.mask
        present = np.ones(g.shape, bool) if acting is None else acting
        if kind == "ballot":
            value = _pack(p & present)
        else:
            every = (p | ~present).all(1, keepdims=True)
            some = (p & present).any(1, keepdims=True)
            result = every if kind == "all" else some if kind == "any" else every | ~some
            value = np.repeat(result, 32, axis=1)
        put_where(g, slot, value, active)
        return None

    return vote


@op("activemask")
def _activemask(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    m.type()
    m.end()
    slot = d.dst(ins, ins.args[0], 32)
    return lambda g: put_where(g, slot, _pack(np.ones(g.shape, bool) if g.mask is None else g.mask), None)


@op("elect")
def _elect(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    m.drop("sync")
    m.end()
    d.count(ins, 2)
    target = ins.args[0]
    if not isinstance(target, Pair):
        raise d.refuse(ins, "elect sets a lane and a predicate")
    slot = None if isinstance(target.first, Sink) else d.dst(ins, target.first, 32)
    flag = d.dst(ins, target.second, 1)
    named = member_mask(d, ins, ins.args[1])

    def elect(g: Any) -> Any:
        lanes = None if named is None else named(g)
        if not check_members(g, ins, lanes, None):
            return PARK
        present = np.ones(g.shape, bool) if g.mask is None else g.mask
        if lanes is not None:
            present = present & lanes
        leader = present.argmax(1)
        if slot is not None:
            put_where(g, slot, np.repeat(leader[:, None], 32, axis=1).astype(U32), None)
        put_where(g, flag, leader[:, None] == LANES, None)
        return None

    return elect


REDUCTIONS: dict[str, Any] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@op("redux")
def _redux(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    if not m.flag("sync"):
        raise d.refuse(ins, f"{ins.op} is not known")
    kind = m.choice(*REDUCTIONS)
    m.end()
    if t not in ("u32", "s32", "b32") or (t == "b32") != (kind in ("and", "or", "xor")):
        raise d.refuse(ins, f"{ins.op} is not known")
    d.count(ins, 3)
    slot = d.dst(ins, ins.args[0], 32)
    get = getter(d.src(ins, ins.args[1], 32))
    named = member_mask(d, ins, ins.args[2])
    fn = REDUCTIONS[kind]
    dtype = SINT[32] if t == "s32" else UINT[32]
    info = np.iinfo(dtype)
    neutral = {"add": 0, "or": 0, "xor": 0, "and": -1 if t == "s32" else info.max, "min": info.max, "max": info.min}[
        kind
    ]
    guard = d.guard(ins)

    def reduce(g: Any) -> Any:
        active = g.active(guard)
        if not check_members(g, ins, None if named is None else named(g), active if guard is not None else None):
            return PARK
        value = full(get(g), g, U32).view(dtype)
        acting = active if active is not None else g.mask
        if acting is not None:
            value = np.where(acting, value, dtype.type(neutral))
        result = fn.reduce(value, axis=1, dtype=dtype)
        put_where(g, slot, np.repeat(result[:, None], 32, axis=1).view(U32), active)
        return None

    return reduce


@op("match")
def _match(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    m.drop("sync")
    kind = m.choice("any", "all")
    m.end()
    d.count(ins, 3)
    target = ins.args[0]
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    slot = d.dst(ins, first, 32)
    flag = d.dst(ins, second, 1) if second is not None else None
    get = getter(d.src(ins, ins.args[1], WIDTH[t]))
    named = member_mask(d, ins, ins.args[2])

    def match(g: Any) -> Any:
        lanes = None if named is None else named(g)
        if not check_members(g, ins, lanes, None):
            return PARK
        value = full(get(g), g, UINT[WIDTH[t]])
        present = np.ones(g.shape, bool) if g.mask is None else g.mask
        equal = (value[:, :, None] == value[:, None, :]) & present[:, None, :]
        if kind == "any":
            words = np.packbits(equal, axis=2, bitorder="little").view(U32)[:, :, 0]
            put_where(g, slot, np.ascontiguousarray(words), None)
            return None
        lead = present.argmax(1)
        same = ((value == value[np.arange(g.n), lead][:, None]) | ~present).all(1, keepdims=True)
        everyone = _pack(present)
        put_where(g, slot, np.where(same, everyone, U32(0)), None)
        if flag is not None:
            put_where(g, flag, np.repeat(same, 32, axis=1), None)
        return None

    return match


__all__ = ["I32", "Neg"]
