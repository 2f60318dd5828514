"""Integer, logic, predicate and move instructions."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from . import floats
from .decode import Decoder, Mods, full, getter, op, put
from .syntax import SINT, UINT, WIDTH, Imm, Ins, Neg, Pair, Reg, Sink, Vec

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


def _simple(
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
        return _simple(d, ins, _packed16(fn, t[0] == "s"), 32, 2)
    _, width = integer_type(d, ins, t)
    if sat:
        if t != "s32":
            raise d.refuse(ins, ".sat is for .s32")

        def saturating(a: Any, b: Any) -> np.ndarray:
            wide = fn(a.view(I32).astype(I64), b.view(I32).astype(I64))
            return np.clip(wide, -(1 << 31), (1 << 31) - 1).astype(I32).view(U32)

        return _simple(d, ins, saturating, 32, 2)
    return _simple(d, ins, fn, width, 2)


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
    return _simple(d, ins, _mul(kind, width, half), width, 2, out=width * 2 if half == "wide" else width)


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
        return _simple(d, ins, product, 32, 2)
    return _simple(d, ins, lambda a, b, c: product(a, b) + c, 32, 3)


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
        return _simple(d, ins, signed(_div_signed if division else _rem_signed, width), width, 2)
    return _simple(d, ins, _div_unsigned if division else _rem_unsigned, width, 2)


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
        return _simple(d, ins, _packed16(fn, t[0] == "s"), 32, 2)
    kind, width = integer_type(d, ins, t)
    if relu:
        if t != "s32":
            raise d.refuse(ins, ".relu is for .s32")
        base = fn
        fn = lambda a, b: np.maximum(base(a, b), I32(0))  # noqa: E731
    return _simple(d, ins, signed(fn, width) if kind == "s" else fn, width, 2)


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
    return _simple(d, ins, signed(np.negative if ins.parts[0] == "neg" else np.abs, width), width, 1)


def _shift(d: Decoder, ins: Ins, fn: Callable, width: int) -> Callable:
    """Shifts clamp: an amount of the width or more gives all zero (or all sign)."""
    d.count(ins, 3)
    a = d.src(ins, ins.args[1], width)
    b = d.src(ins, ins.args[2], 32)
    u = UINT[width]
    if not isinstance(b, int) and not callable(b):
        amount = u.type(min(int(b), width))
        return d.alu(ins, lambda a: fn(a, amount), d.dst(ins, ins.args[0], width), [a], u)
    if width == 32:
        wrapped = fn
    else:
        limit = U32(width)
        wrapped = lambda a, b: fn(a, np.minimum(b, limit).astype(u))  # noqa: E731
    return d.alu(ins, wrapped, d.dst(ins, ins.args[0], width), [a, b], u)


def _left(a: Any, b: Any) -> Any:
    return np.left_shift(a, b)


def _right_signed(a: Any, b: Any) -> Any:
    s = SINT[a.dtype.itemsize * 8]
    return np.right_shift(a.view(s), np.minimum(b, a.dtype.type(a.dtype.itemsize * 8)).view(s)).view(a.dtype)


@op("shl", "shr")
def _shifts(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    m.end()
    kind, width = integer_type(d, ins, t)
    if ins.parts[0] == "shl":
        return _shift(d, ins, _left, width)
    return _shift(d, ins, _right_signed if kind == "s" else np.right_shift, width)


@op("shf")
def _shf(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    side, mode = m.choice("l", "r"), m.choice("clamp", "wrap")
    m.end()
    if t != "b32":
        raise d.refuse(ins, "shf is for .b32")

    def funnel(a: Any, b: Any, c: Any) -> np.ndarray:
        n = (np.minimum(c, U32(32)) if mode == "clamp" else c & U32(31)).astype(U64)
        both = (b.astype(U64) << U64(32)) | a.astype(U64)
        return ((both << n) >> U64(32) if side == "l" else both >> n).astype(U32)

    return _simple(d, ins, funnel, 32, 3)


@op("and", "or", "xor")
def _logic(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    m.end()
    fn = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[ins.parts[0]]
    width = WIDTH[t]
    if t not in ("pred", "b16", "b32", "b64"):
        raise d.refuse(ins, f"{ins.parts[0]} with type .{t} is not known")
    return _simple(d, ins, fn, width, 2)


@op("not", "cnot")
def _not(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    m.end()
    width = WIDTH[t]
    if t not in ("pred", "b16", "b32", "b64"):
        raise d.refuse(ins, f"{ins.parts[0]} with type .{t} is not known")
    if ins.parts[0] == "cnot":
        return _simple(d, ins, lambda a: (a == 0).astype(UINT[width]), width, 1)
    return _simple(d, ins, np.invert, width, 1)


TWO_VARIABLE: dict[int, tuple[int, Callable]] = {
    0b0000: (0, lambda a, b: U32(0)),
    0b1111: (0, lambda a, b: U32(0xFFFFFFFF)),
    0b1100: (0, lambda a, b: a),
    0b1010: (0, lambda a, b: b),
    0b0011: (1, lambda a, b: ~a),
    0b0101: (1, lambda a, b: ~b),
    0b1000: (1, lambda a, b: a & b),
    0b1110: (1, lambda a, b: a | b),
    0b0110: (1, lambda a, b: a ^ b),
    0b1001: (2, lambda a, b: ~(a ^ b)),
    0b0111: (2, lambda a, b: ~(a & b)),
    0b0001: (2, lambda a, b: ~(a | b)),
    0b0100: (2, lambda a, b: a & ~b),
    0b0010: (2, lambda a, b: ~a & b),
    0b1101: (2, lambda a, b: a | ~b),
    0b1011: (2, lambda a, b: ~a | b),
}


@lru_cache(maxsize=256)
def lop3(table: int) -> Callable:
    """A function of three words for a truth table: split on one input, f = f0 ^ (x & (f0 ^ f1)), cheapest input first."""
    best: tuple[int, Callable] | None = None
    for pivot in range(3):
        f0 = f1 = 0
        for row in range(4):
            bits = [row >> 1 & 1, row & 1]
            for value in (0, 1):
                full_bits = bits[:pivot] + [value] + bits[pivot:]
                index = full_bits[0] << 2 | full_bits[1] << 1 | full_bits[2]
                if table >> index & 1:
                    if value:
                        f1 |= 1 << row
                    else:
                        f0 |= 1 << row
        c0, g0 = TWO_VARIABLE[f0]
        c1, g1 = TWO_VARIABLE[f0 ^ f1]
        cost = c0 + c1 + 2
        if f0 == 0:
            cost -= 1
        if f0 ^ f1 == 0:
            cost = c0
        if best is not None and best[0] <= cost:
            continue

        def make(pivot: int, g0: Callable, g1: Callable, f0: int, change: int) -> Callable:
            def fn(*xs: Any) -> Any:
                x = xs[pivot]
                a, b = (y for i, y in enumerate(xs) if i != pivot)
                if change == 0:
                    return g0(a, b) | U32(0)
                both = x & g1(a, b) if change != 0b1111 else x
                return both | U32(0) if f0 == 0 else g0(a, b) ^ both

            return fn

        best = (cost, make(pivot, g0, g1, f0, f0 ^ f1))
    assert best is not None
    return best[1]


@op("lop3")
def _lop3(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    m.end()
    d.count(ins, 5)
    if t != "b32" or not isinstance(ins.args[4], Imm) or not 0 <= ins.args[4].value <= 255:
        raise d.refuse(ins, "this form of lop3 is not known")
    fn = lop3(int(ins.args[4].value))
    args = [d.src(ins, a, 32) for a in ins.args[1:4]]

    def call(
        g: Any,
        getters: list = [getter(a) for a in args],
        guard: Any = d.guard(ins),
        s: Any = d.dst(ins, ins.args[0], 32),
    ) -> None:
        put(g, s, full(fn(*[get(g) for get in getters]), g, U32), guard)

    return call


@op("prmt")
def _prmt(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    if t != "b32":
        raise d.refuse(ins, "prmt is for .b32")
    mode = m.choice("f4e", "b4e", "rc8", "ecl", "ecr", "rc16", default="index")
    m.end()
    if mode != "index":
        raise d.refuse(ins, f"prmt.{mode} is not known")

    def permute(a: Any, b: Any, c: Any) -> np.ndarray:
        both = a.astype(U64) | (b.astype(U64) << U64(32))
        out = np.zeros(np.broadcast(a, b, c).shape, U32)
        for i in range(4):
            nibble = c >> U32(4 * i) & U32(15)
            byte = (both >> ((nibble & U32(7)) * U32(8)).astype(U64)).astype(U32) & U32(255)
            sign = np.where(nibble & U32(8), np.where(byte & U32(128), U32(255), U32(0)), byte)
            out |= sign << U32(8 * i)
        return out

    selector = ins.args[3] if len(ins.args) == 4 else None
    if isinstance(selector, Imm):
        nibbles = [int(selector.value) >> 4 * i & 15 for i in range(4)]
        args = [d.src(ins, a, 32) for a in ins.args[1:3]]

        def fixed(a: Any, b: Any) -> np.ndarray:
            out: Any = U32(0)
            used: dict[int, Any] = {}
            for i, nibble in enumerate(nibbles):
                source, at = (a, b)[nibble >> 2 & 1], nibble & 3
                # Bytes that keep their distance move together: one shift and one mask for the run.
                if nibble & 8:
                    byte = (source.view(I32) << I32(24 - 8 * at) >> I32(31)).view(U32) & U32(255 << 8 * i)
                    out = out | byte
                else:
                    key = (nibble >> 2 & 1) * 16 + (i - at)
                    used.setdefault(key, [source, i - at, 0])[2] |= 255 << 8 * i
            for source, distance, mask in used.values():
                moved = (
                    source << U32(8 * distance)
                    if distance > 0
                    else source >> U32(-8 * distance)
                    if distance < 0
                    else source
                )
                out = out | (moved & U32(mask))
            return out

        return d.alu(ins, fixed, d.dst(ins, ins.args[0], 32), args, U32)
    return _simple(d, ins, permute, 32, 3)


@op("bfe")
def _bfe(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    m.end()
    kind, width = integer_type(d, ins, t, 32, 64)
    u = UINT[width].type

    def extract(a: Any, pos: Any, length: Any) -> np.ndarray:
        pos = (pos & U32(255)).astype(u)
        length = (length & U32(255)).astype(u)
        top = np.minimum(length, u(width))
        keep = np.where(top >= u(width), ~u(0), (u(1) << np.minimum(top, u(width - 1))) - u(1))
        field = np.right_shift(a, pos) & keep
        if kind != "s":
            return field
        # The sign is bit min(pos + len - 1, msb) of the source; it fills everything above what was taken.
        sign_at = np.minimum(pos + length - u(1), u(width - 1))
        sign = np.where(length == 0, u(0), np.right_shift(a, sign_at) & u(1))
        have = np.minimum(length, np.where(pos >= u(width), u(0), u(width) - np.minimum(pos, u(width))))
        fill = np.where(have >= u(width), u(0), ~u(0) << np.minimum(have, u(width - 1)))
        return np.where(sign == u(1), field | fill, field)

    d.count(ins, 4)
    a = d.src(ins, ins.args[1], width)
    rest = [d.src(ins, x, 32) for x in ins.args[2:]]
    if all(not isinstance(r, int) and not callable(r) for r in rest):
        pos, length = (int(r) & 255 for r in rest)
        if length > 0 and pos + length <= width:
            s = SINT[width]
            up, down = width - pos - length, width - length
            if kind == "s":
                quick = lambda a: (a.view(s) << s.type(up) >> s.type(down)).view(UINT[width])  # noqa: E731
            else:
                mask = u((1 << length) - 1)
                quick = lambda a: a >> u(pos) & mask  # noqa: E731
            return d.alu(ins, quick, d.dst(ins, ins.args[0], width), [a], UINT[width])
    return d.alu(ins, extract, d.dst(ins, ins.args[0], width), [a, *rest], UINT[width])


@op("bfi")
def _bfi(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    m.end()
    _, width = integer_type(d, ins, t, 32, 64)
    u = UINT[width].type

    def insert(a: Any, b: Any, pos: Any, length: Any) -> np.ndarray:
        pos = (pos & U32(255)).astype(u)
        length = np.minimum((length & U32(255)).astype(u), u(width))
        ones = np.where(length >= u(width), ~u(0), (u(1) << np.minimum(length, u(width - 1))) - u(1))
        mask = np.left_shift(ones, pos)
        return (b & ~mask) | (np.left_shift(a, pos) & mask)

    d.count(ins, 5)
    args = [d.src(ins, x, width) for x in ins.args[1:3]] + [d.src(ins, x, 32) for x in ins.args[3:]]
    return d.alu(ins, insert, d.dst(ins, ins.args[0], width), args, UINT[width])


@op("bmsk", "szext")
def _mask_ops(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    mode = m.choice("clamp", "wrap")
    m.end()

    def bmsk(a: Any, b: Any) -> np.ndarray:
        if mode == "wrap":
            a, b = a & U32(31), b & U32(31)
        a, b = np.minimum(a, U32(32)).astype(U64), np.minimum(b, U32(32)).astype(U64)
        return ((((U64(1) << b) - U64(1)) << a) & U64(0xFFFFFFFF)).astype(U32)

    def szext(a: Any, n: Any) -> np.ndarray:
        n = n & U32(31) if mode == "wrap" else np.minimum(n, U32(32))
        up = U32(32) - n
        if t == "s32":
            shifted = np.left_shift(a, up)
            return np.where(n == 0, U32(0), _right_signed(shifted, np.minimum(up, U32(31))))
        return np.where(n == 0, U32(0), np.right_shift(np.left_shift(a, up), up))

    return _simple(d, ins, bmsk if ins.parts[0] == "bmsk" else szext, 32, 2)


def clz(a: np.ndarray, width: int) -> np.ndarray:
    if width == 32:
        exponent = (np.asarray(a).astype(np.float64).view(U64) >> U64(52)).astype(U32)
        return np.where(a == 0, U32(32), U32(1023 + 31) - exponent)
    high, low = (a >> U64(32)).astype(U32), a.astype(U32)
    return np.where(high != 0, clz(high, 32), U32(32) + clz(low, 32))


def brev(a: np.ndarray) -> np.ndarray:
    width = a.dtype.itemsize * 8
    u = a.dtype.type
    ones = (1 << width) - 1
    step = 1
    while step < width:
        mask = u(ones // ((1 << step) + 1))
        a = (a >> u(step) & mask) | ((a & mask) << u(step))
        step *= 2
    return a


@op("clz", "popc", "brev", "bfind")
def _bits(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    amount = m.flag("shiftamt") if ins.parts[0] == "bfind" else False
    m.end()
    kind, width = integer_type(d, ins, t, 32, 64)
    name = ins.parts[0]
    if name == "brev":
        return _simple(d, ins, brev, width, 1)
    if name == "popc":
        return _simple(d, ins, lambda a: np.bitwise_count(a).astype(U32), width, 1, out=32)
    if name == "clz":
        return _simple(d, ins, lambda a: clz(a, width), width, 1, out=32)

    def bfind(a: Any) -> np.ndarray:
        if kind == "s":
            a = np.where(a.view(SINT[width]) < 0, ~a, a)
        n = clz(a, width)
        at = n if amount else U32(width - 1) - n
        return np.where(n == width, U32(0xFFFFFFFF), at)

    return _simple(d, ins, bfind, width, 1, out=32)


@op("fns")
def _fns(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    m.type()
    m.end()

    def find(mask: Any, base: Any, offset: Any) -> np.ndarray:
        mask, base, offset = np.broadcast_arrays(mask, base, offset)
        out = np.full(mask.shape, U32(0xFFFFFFFF))
        for at in np.ndindex(mask.shape):
            bits, b, n = int(mask[at]), int(base[at]), int(offset[at].view(I32))
            if n == 0:
                found = [b] if bits >> b & 1 else []
            elif n > 0:
                found = [i for i in range(b, 32) if bits >> i & 1][n - 1 : n]
            else:
                found = [i for i in range(b, -1, -1) if bits >> i & 1][-n - 1 : -n]
            if found:
                out[at] = found[0]
        return out

    return _simple(d, ins, find, 32, 3)


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

    return _simple(d, ins, sad, width, 3)


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

    return _simple(d, ins, dot, 32, 3)


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

    return _simple(d, ins, convert, width, 1)


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


__all__ = ["COMPARISONS", "Reg", "clz", "lop3"]
