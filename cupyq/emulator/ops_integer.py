"""Integer, logic, predicate and move instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import floats
from .decode import Decoder, Mods, op
from .syntax import SINT, UINT, WIDTH, Imm, Ins

U32, I32, U64, I64 = np.uint32, np.int32, np.uint64, np.int64
FLOATS = ("f16", "bf16", "f16x2", "bf16x2", "f32", "f64", "f32x2")


def signed(fn: Callable, width: int) -> Callable:
    """Run `fn` on signed views of unsigned registers."""
    s, u = SINT[width], UINT[width]
    return lambda *xs: fn(*[x.view(s) for x in xs]).view(u)


def _abs_u(x: np.ndarray) -> np.ndarray:
    """Magnitude of signed values as unsigned, right for the most negative one too."""
    u = UINT[x.dtype.itemsize * 8]
    return np.where(x < 0, (-x).view(u), x.view(u))


def _div_signed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = np.asarray(a), np.asarray(b)
    q = _abs_u(a) // np.maximum(_abs_u(b), 1)
    q = np.where((a < 0) ^ (b < 0), np.negative(q), q)
    return np.where(b == 0, np.array(-1, a.dtype).view(q.dtype), q).view(a.dtype)


def _rem_signed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = np.asarray(a), np.asarray(b)
    r = _abs_u(a) % np.maximum(_abs_u(b), 1)
    r = np.where(a < 0, np.negative(r), r)
    return np.where(b == 0, a.view(r.dtype), r).view(a.dtype)


def _div_unsigned(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    one = a.dtype.type(1)
    return np.where(b == 0, ~(a ^ a), a // np.maximum(b, one))


def _rem_unsigned(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(b == 0, a, a % np.maximum(b, a.dtype.type(1)))


def mul_hi_u64(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    m, s = U64(0xFFFFFFFF), U64(32)
    a0, a1, b0, b1 = a & m, a >> s, b & m, b >> s
    low = a0 * b0
    mid = a1 * b0 + (low >> s)
    mid2 = a0 * b1 + (mid & m)
    return a1 * b1 + (mid >> s) + (mid2 >> s)


def _mul(kind: str, width: int, half: str) -> Callable:
    """lo, hi or wide product of two registers of `width` bits."""
    if half == "lo":
        return lambda a, b: a * b
    if half == "wide":
        if kind == "s":
            s, u, n = SINT[width * 2], UINT[width * 2], SINT[width]
            return lambda a, b: (a.view(n).astype(s) * b.view(n).astype(s)).view(u)
        u = UINT[width * 2]
        return lambda a, b: a.astype(u) * b.astype(u)
    if width == 64:
        if kind == "u":
            return mul_hi_u64

        def high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            h = mul_hi_u64(a, b)
            zero = U64(0)
            return h - np.where(a.view(I64) < 0, b, zero) - np.where(b.view(I64) < 0, a, zero)

        return high
    wide = _mul(kind, width, "wide")
    shift = UINT[width * 2].type(width)
    return lambda a, b: (wide(a, b) >> shift).astype(UINT[width])


def integer_type(d: Decoder, ins: Ins, t: str, *allowed: int) -> tuple[str, int]:
    kind, width = t[0], WIDTH[t]
    if t not in (f"b{width}", f"u{width}", f"s{width}") or width not in (allowed or (16, 32, 64)):
        raise d.refuse(ins, f"{ins.parts[0]} with type .{t} is not known")
    return kind, width


def simple(
    d: Decoder, ins: Ins, fn: Callable, width: int, count: int, kind: str = "b", out: int | None = None
) -> Callable:
    d.count(ins, count + 1)
    out = out or width
    return d.alu(ins, fn, d.dst(ins, ins.args[0], out), [d.src(ins, a, width, kind) for a in ins.args[1:]], UINT[out])


def _packed16(fn: Callable, signed_: bool) -> Callable:
    dt = np.dtype(np.int16 if signed_ else np.uint16)
    return lambda *xs: fn(*[np.atleast_1d(x).view(dt) if np.ndim(x) == 0 else x.view(dt) for x in xs]).view(U32)


@op("add", "sub")
def _add(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    fn = np.add if ins.parts[0] == "add" else np.subtract
    if t in FLOATS:
        return floats.binary(d, ins, m, t)
    sat = m.flag("sat")
    m.end()
    if t in ("u16x2", "s16x2"):
        if any(isinstance(a, Imm) for a in ins.args):
            raise d.refuse(ins, "an immediate in a packed operation is not known")
        return simple(d, ins, _packed16(fn, t[0] == "s"), 32, 2)
    _, width = integer_type(d, ins, t)
    if sat:
        if t != "s32":
            raise d.refuse(ins, ".sat is for .s32")

        def saturating(a: Any, b: Any) -> np.ndarray:
            wide = fn(a.view(I32).astype(I64), b.view(I32).astype(I64))
            return np.clip(wide, -(1 << 31), (1 << 31) - 1).astype(I32).view(U32)

        return simple(d, ins, saturating, 32, 2)
    return simple(d, ins, fn, width, 2)


@op("mul")
def _mul_op(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    if t in FLOATS:
        return floats.binary(d, ins, m, t)
    half = m.choice("lo", "hi", "wide")
    m.end()
    kind, width = integer_type(d, ins, t)
    if half == "wide" and width == 64:
        raise d.refuse(ins, "mul.wide of 64 bits is not known")
    return simple(d, ins, _mul(kind, width, half), width, 2, out=width * 2 if half == "wide" else width)


@op("mad")
def _mad(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    if t in FLOATS:
        return floats.ternary(d, ins, m, t)
    half = m.choice("lo", "hi", "wide")
    m.end()
    kind, width = integer_type(d, ins, t)
    out = width * 2 if half == "wide" else width
    if out > 64:
        raise d.refuse(ins, "mad.wide of 64 bits is not known")
    product = _mul(kind, width, half)
    d.count(ins, 4)
    a, b = (d.src(ins, x, width) for x in ins.args[1:3])
    c = d.src(ins, ins.args[3], out)
    return d.alu(ins, lambda a, b, c: product(a, b) + c, d.dst(ins, ins.args[0], out), [a, b, c], UINT[out])


@op("mul24", "mad24")
def _mul24(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    half = m.choice("lo", "hi")
    m.end()
    if t not in ("u32", "s32"):
        raise d.refuse(ins, f"{ins.parts[0]} with type .{t} is not known")

    def product(a: Any, b: Any) -> np.ndarray:
        if t == "s32":
            x = (a.view(I32) << I32(8) >> I32(8)).astype(I64) * (b.view(I32) << I32(8) >> I32(8)).astype(I64)
        else:
            x = (a & U32(0xFFFFFF)).astype(I64) * (b & U32(0xFFFFFF)).astype(I64)
        return ((x if half == "lo" else x >> I64(16)) & I64(0xFFFFFFFF)).astype(U32)

    if ins.parts[0] == "mul24":
        return simple(d, ins, product, 32, 2)
    return simple(d, ins, lambda a, b, c: product(a, b) + c, 32, 3)


@op("div", "rem")
def _div(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    division = ins.parts[0] == "div"
    if t in FLOATS:
        return floats.divide(d, ins, m, t)
    m.end()
    kind, width = integer_type(d, ins, t)
    if kind == "s":
        return simple(d, ins, signed(_div_signed if division else _rem_signed, width), width, 2)
    return simple(d, ins, _div_unsigned if division else _rem_unsigned, width, 2)


@op("min", "max")
def _minmax(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    if t in FLOATS:
        return floats.minmax(d, ins, m, t)
    relu = m.flag("relu")
    m.end()
    fn = np.minimum if ins.parts[0] == "min" else np.maximum
    if t in ("u16x2", "s16x2"):
        base = fn
        if relu:
            fn = lambda a, b: np.maximum(base(a, b), np.int16(0))  # noqa: E731
        return simple(d, ins, _packed16(fn, t[0] == "s"), 32, 2)
    kind, width = integer_type(d, ins, t)
    if relu:
        if t != "s32":
            raise d.refuse(ins, ".relu is for .s32")
        base = fn
        fn = lambda a, b: np.maximum(base(a, b), I32(0))  # noqa: E731
    return simple(d, ins, signed(fn, width) if kind == "s" else fn, width, 2)


@op("neg", "abs")
def _neg(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    if t in FLOATS:
        return floats.sign(d, ins, m, t)
    m.end()
    kind, width = integer_type(d, ins, t)
    if kind != "s":
        raise d.refuse(ins, f"{ins.parts[0]} with type .{t} is not known")
    return simple(d, ins, signed(np.negative if ins.parts[0] == "neg" else np.abs, width), width, 1)


@op("sad")
def _sad(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    m.end()
    kind, width = integer_type(d, ins, t)
    s = SINT[width]

    def sad(a: Any, b: Any, c: Any) -> np.ndarray:
        less = a.view(s) < b.view(s) if kind == "s" else a < b
        return c + np.where(less, b - a, a - b)

    return simple(d, ins, sad, width, 3)


@op("dp4a", "dp2a")
def _dot(d: Decoder, ins: Ins) -> Callable:
    """Four (or two) byte products added to a 32-bit accumulator."""
    m = Mods(ins)
    bt, at = m.type(), m.type()
    half = m.choice("lo", "hi") if ins.parts[0] == "dp2a" else ""
    m.end()
    if {at, bt} - {"u32", "s32"}:
        raise d.refuse(ins, f"{ins.op} is not known")

    def piece(x: Any, t: str, bits: int, i: int) -> np.ndarray:
        up, down = I32(32 - bits * (i + 1)), I32(32 - bits)
        return x.view(I32) << up >> down if t == "s32" else ((x >> U32(bits * i)) & U32((1 << bits) - 1)).view(I32)

    def dot(a: Any, b: Any, c: Any) -> np.ndarray:
        total = c.view(I32)
        if ins.parts[0] == "dp4a":
            for i in range(4):
                total = total + piece(a, at, 8, i) * piece(b, bt, 8, i)
        else:
            for i in range(2):
                total = total + piece(a, at, 16, i) * piece(b, bt, 8, i + (2 if half == "hi" else 0))
        return total.view(U32)

    return simple(d, ins, dot, 32, 3)
