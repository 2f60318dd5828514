"""Shifts, logic, and instructions on bit fields."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from .decode import Decoder, Mods, full, getter, op, put
from .ops_integer import I32, U32, U64, integer_type, simple
from .syntax import SINT, UINT, WIDTH, Imm, Ins


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

    return simple(d, ins, funnel, 32, 3)


@op("and", "or", "xor")
def _logic(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    m.end()
    fn = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[ins.parts[0]]
    width = WIDTH[t]
    if t not in ("pred", "b16", "b32", "b64"):
        raise d.refuse(ins, f"{ins.parts[0]} with type .{t} is not known")
    return simple(d, ins, fn, width, 2)


@op("not", "cnot")
def _not(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    m.end()
    width = WIDTH[t]
    if t not in ("pred", "b16", "b32", "b64"):
        raise d.refuse(ins, f"{ins.parts[0]} with type .{t} is not known")
    if ins.parts[0] == "cnot":
        return simple(d, ins, lambda a: (a == 0).astype(UINT[width]), width, 1)
    return simple(d, ins, np.invert, width, 1)


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
    """A function of three words for a truth table: split on one input, f = f0 ^ (x & (f0 ^ f1)), the cheapest one."""
    best: tuple[int, Callable] | None = None
    for pivot in range(3):
        f0 = f1 = 0
        for row in range(4):
            bits = [row >> 1 & 1, row & 1]
            for value in (0, 1):
                full_bits = [*bits[:pivot], value, *bits[pivot:]]
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
    getters = [getter(d.src(ins, a, 32)) for a in ins.args[1:4]]
    guard, slot = d.guard(ins), d.dst(ins, ins.args[0], 32)

    def call(g: Any) -> None:
        put(g, slot, full(fn(*[get(g) for get in getters]), g, U32), guard)

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
    return simple(d, ins, permute, 32, 3)


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

    return simple(d, ins, bmsk if ins.parts[0] == "bmsk" else szext, 32, 2)


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
        return simple(d, ins, brev, width, 1)
    if name == "popc":
        return simple(d, ins, lambda a: np.bitwise_count(a).astype(U32), width, 1, out=32)
    if name == "clz":
        return simple(d, ins, lambda a: clz(a, width), width, 1, out=32)

    def bfind(a: Any) -> np.ndarray:
        if kind == "s":
            a = np.where(a.view(SINT[width]) < 0, ~a, a)
        n = clz(a, width)
        at = n if amount else U32(width - 1) - n
        return np.where(n == width, U32(0xFFFFFFFF), at)

    return simple(d, ins, bfind, width, 1, out=32)


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

    return simple(d, ins, find, 32, 3)
