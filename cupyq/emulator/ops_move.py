"""Comparisons, selection, moves, packing, and addresses of memory spaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import floats
from .decode import Decoder, Mods, full, getter, op, put
from .ops_integer import FLOATS, I32, U32, U64, integer_type, simple
from .syntax import SINT, UINT, WIDTH, Ins, Neg, Pair, Sink, Vec

COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def comparison(d: Decoder, ins: Ins, m: Mods, t: str) -> Callable:
    """The comparison named by the modifiers, on unsigned registers of type `t`."""
    name = m.choice(*COMPARISONS, *UNSIGNED, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
    if t in FLOATS:
        return floats.comparison(d, ins, m, t, name)
    if name in UNSIGNED:
        if t[0] == "s":
            raise d.refuse(ins, f".{name} compares unsigned values")
        name = UNSIGNED[name]
    if name not in COMPARISONS:
        raise d.refuse(ins, f".{name} compares floats")
    kind, width = integer_type(d, ins, t)
    fn = COMPARISONS[name]
    if kind == "s" and name not in ("eq", "ne"):
        s = SINT[width]
        return lambda a, b: fn(a.view(s), b.view(s))
    return fn


@op("setp")
def _setp(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    combine = m.choice("and", "or", "xor", default="none")
    compare = comparison(d, ins, m, t)
    m.end()
    d.count(ins, 3 if combine == "none" else 4)
    kind = "f" if t in FLOATS else "b"
    a, b = (d.src(ins, x, WIDTH[t], kind) for x in ins.args[1:3])
    target = ins.args[0]
    if t in ("f16x2", "bf16x2"):
        return _setp_packed(d, ins, compare, a, b, target, combine)
    if combine == "none" and not isinstance(target, Pair):
        return d.alu(ins, compare, d.dst(ins, target, 1), [a, b], bool)
    join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "none": lambda x, y: x}[combine]
    c = getter(d.src(ins, ins.args[3], 1)) if combine != "none" else (lambda g: np.bool_(True))
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    p = d.dst(ins, first, 1)
    q = d.dst(ins, second, 1) if second is not None else None
    ga, gb, guard = getter(a), getter(b), d.guard(ins)

    def run(g: Any) -> None:
        result, other = full(compare(ga(g), gb(g)), g, bool), c(g)
        yes = join(result, other)
        no = join(~result, other) if q is not None else None
        put(g, p, full(yes, g, bool), guard)
        if no is not None:
            put(g, q, full(no, g, bool), guard)

    return run


def _setp_packed(d: Decoder, ins: Ins, compare: Callable, a: Any, b: Any, target: Any, combine: str) -> Callable:
    """Two halves compared into two predicates."""
    if not isinstance(target, Pair):
        raise d.refuse(ins, "a packed comparison sets two predicates")
    p, q = d.dst(ins, target.first, 1), d.dst(ins, target.second, 1)
    join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "none": lambda x, y: x}[combine]
    c = getter(d.src(ins, ins.args[3], 1)) if combine != "none" else (lambda g: np.bool_(True))
    ga, gb, guard = getter(a), getter(b), d.guard(ins)

    def run(g: Any) -> None:
        both = compare(full(ga(g), g, U32), full(gb(g), g, U32)).reshape(*g.shape, 2)
        other = c(g)
        low, high = join(both[..., 0], other), join(both[..., 1], other)
        put(g, p, full(low, g, bool).copy(), guard)
        put(g, q, full(high, g, bool).copy(), guard)

    return run


@op("set")
def _set(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    out = m.type()
    combine = m.choice("and", "or", "xor", default="none")
    compare = comparison(d, ins, m, t)
    m.end()
    if combine != "none" or out not in ("u32", "s32", "f32", "f16", "bf16", "f16x2", "bf16x2"):
        raise d.refuse(ins, "this form of set is not known")
    kind = "f" if t in FLOATS else "b"
    d.count(ins, 3)
    args = [d.src(ins, x, WIDTH[t], kind) for x in ins.args[1:]]
    packed = t in ("f16x2", "bf16x2")
    if packed and out not in ("f16x2", "bf16x2"):
        raise d.refuse(ins, "this form of set is not known")
    width = WIDTH[out]
    one = {
        "f32": U32(0x3F800000),
        "f16": np.uint16(0x3C00),
        "bf16": np.uint16(0x3F80),
        "f16x2": np.uint16(0x3C00),
        "bf16x2": np.uint16(0x3F80),
    }
    yes = one.get(out, U32(0xFFFFFFFF))

    def run(a: Any, b: Any) -> np.ndarray:
        result = np.where(compare(a, b), yes, yes.dtype.type(0))
        return result.view(U32) if packed else result

    return d.alu(ins, run, d.dst(ins, ins.args[0], width), args, UINT[width])


@op("selp")
def _selp(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    m.end()
    d.count(ins, 4)
    width = WIDTH[t]
    kind = "f" if t in FLOATS else "b"
    a, b = (d.src(ins, x, width, kind) for x in ins.args[1:3])
    p = d.src(ins, ins.args[3], 1)
    return d.alu(ins, lambda a, b, p: np.where(p, a, b), d.dst(ins, ins.args[0], width), [a, b, p], UINT[width])


@op("slct")
def _slct(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    ct, t = m.type(), m.type()
    ftz = m.flag("ftz")
    m.end()
    if ct not in ("s32", "f32"):
        raise d.refuse(ins, f"{ins.op} is not known")
    d.count(ins, 4)
    width = WIDTH[t]
    args = [d.src(ins, x, width) for x in ins.args[1:3]] + [d.src(ins, ins.args[3], 32, ct[0])]

    def choose(a: Any, b: Any, c: Any) -> np.ndarray:
        if ct == "s32":
            return np.where(c.view(I32) >= 0, a, b)
        x = floats.flush32(c) if ftz else c
        return np.where(x.view(np.float32) >= 0, a, b)

    return d.alu(ins, choose, d.dst(ins, ins.args[0], width), args, UINT[width])


@op("mov")
def _mov(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    m.end()
    d.count(ins, 2)
    target, source = ins.args
    if isinstance(target, Vec) or isinstance(source, Vec):
        return _pack(d, ins, WIDTH[t], target, source)
    width = WIDTH[t]
    kind = "f" if t in FLOATS else "b"
    if isinstance(source, Neg):
        raise d.refuse(ins, "mov of a negated predicate is not known")
    a = d.src(ins, source, width, kind)
    return d.alu(ins, lambda a: a.copy(), d.dst(ins, target, width), [a], UINT[width])


def _pack(d: Decoder, ins: Ins, width: int, target: Any, source: Any) -> Callable:
    """``mov.b32 {lo, hi}, r`` and ``mov.b32 r, {lo, hi}``: element 0 is the lowest bits."""
    guard = d.guard(ins)
    if isinstance(target, Vec) and isinstance(source, Vec):
        raise d.refuse(ins, "mov between two vectors is not known")
    if isinstance(target, Vec):
        part = width // len(target.items)
        if part not in UINT or part * len(target.items) != width:
            raise d.refuse(ins, "the vector does not fill the register")
        slots = []
        for item in target.items:
            slots.append(None if isinstance(item, Sink) else d.dst(ins, item, part))
        get = getter(d.src(ins, source, width))
        u = UINT[width]

        def unpack(g: Any) -> None:
            value = np.ascontiguousarray(full(get(g), g, u))
            parts = value.view(UINT[part]).reshape(*g.shape, len(slots))
            for i, slot in enumerate(slots):
                if slot is not None:
                    put(g, slot, parts[..., i].copy(), guard)

        return unpack
    part = width // len(source.items)
    if part not in UINT or part * len(source.items) != width:
        raise d.refuse(ins, "the vector does not fill the register")
    getters = [getter(d.src(ins, item, part)) for item in source.items]
    slot = d.dst(ins, target, width)

    def pack(g: Any) -> None:
        out = np.empty((*g.shape, len(getters)), UINT[part])
        for i, get in enumerate(getters):
            out[..., i] = get(g)
        put(g, slot, out.reshape(g.shape[0], -1).view(UINT[width]), guard)

    return pack


@op("cvta")
def _cvta(d: Decoder, ins: Ins) -> Callable:
    """Generic addresses: shared and local memory are windows, global, const and param addresses are generic already."""
    from .memory import LOCAL_WINDOW, SHARED_WINDOW

    m = Mods(ins)
    t = m.type()
    to = m.flag("to")
    space = m.choice("global", "shared", "shared::cta", "shared::cluster", "local", "const", "param", "param::entry")
    m.end()
    width = WIDTH[t]
    if t not in ("u64", "u32"):
        raise d.refuse(ins, f"{ins.op} is not known")
    window = SHARED_WINDOW if space.startswith("shared") else LOCAL_WINDOW if space == "local" else 0
    if width == 32:
        window = 0
    base = UINT[width].type(window)
    if space.startswith("param"):
        d.count(ins, 2)
        get, slot, guard = getter(d.src(ins, ins.args[1], 64)), d.dst(ins, ins.args[0], 64), d.guard(ins)
        return lambda g: put(g, slot, full(get(g), g, U64) + U64(g.m.param_address), guard)

    def convert(a: Any) -> np.ndarray:
        if not window:
            return a.copy()
        return np.where(a == 0, a, a - base) if to and window == LOCAL_WINDOW else a - base if to else a + base

    return simple(d, ins, convert, width, 1)


@op("isspacep")
def _isspacep(d: Decoder, ins: Ins) -> Callable:
    from .memory import window_of

    m = Mods(ins)
    space = m.choice("global", "shared", "shared::cta", "shared::cluster", "local", "const", "param", "param::entry")
    m.end()
    want = {
        "shared::cta": "shared",
        "shared::cluster": "shared",
        "const": "global",
        "param": "global",
        "param::entry": "global",
    }.get(space, space)
    d.count(ins, 2)
    a = d.src(ins, ins.args[1], 64)
    return d.alu(ins, lambda a: window_of(a, want), d.dst(ins, ins.args[0], 1), [a], bool)
