"""Float arithmetic: f32, f64, f16, bf16 and their packed pairs.

Each format loads registers into float32 (or float64) arrays, and stores results rounded once. Approximate functions
(``ex2.approx`` and the like) return the correctly rounded value: the hardware's error bound allows it.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from . import rounding as rd
from .decode import Decoder, Mods, full, getter, op
from .rounding import F32, F64, U16, U32, U64, flush32
from .syntax import UINT, WIDTH, Ins

ROUNDINGS = ("rn", "rz", "rm", "rp")
PACKED = ("f16x2", "bf16x2", "f32x2")


def element(t: str) -> str:
    """The type of one element of a packed type."""
    return t[:-2] if t in PACKED else t


def load(t: str, bits: Any) -> Any:
    """Register bits of an unpacked type to float32 (float64 for f64)."""
    if t == "f32":
        return bits.view(F32)
    if t == "f16":
        return rd.f16_to_f32(bits)
    if t == "bf16":
        return rd.bf16_to_f32(bits)
    return bits.view(F64)


def lanes(t: str, bits: np.ndarray) -> np.ndarray:
    """A register array as an array of its elements: (n, 32) words to (n, 64) halves for packed types."""
    if t in PACKED:
        return np.ascontiguousarray(bits).view(UINT[WIDTH[element(t)]])
    return bits


def words(t: str, bits: np.ndarray) -> np.ndarray:
    """Inverse of `lanes`."""
    return np.ascontiguousarray(bits).view(UINT[WIDTH[t]]) if t in PACKED else bits


def finish(t: str, x: np.ndarray, ftz: bool, sat: bool, relu: bool = False, mode: str = "rn") -> np.ndarray:
    """A result (float32, or float64 when one more rounding is due) to register bits."""
    if sat:
        x = np.where(np.isnan(x), x.dtype.type(0), np.clip(x, x.dtype.type(0), x.dtype.type(1)))
    if relu:
        x = np.where(x < 0, x.dtype.type(0), x)
        x = np.where(x == 0, x.dtype.type(0), x)
    if t == "f32":
        bits = rd.canonical32(x if x.dtype == F32 else rd.to_f32(x, mode))
        return flush32(bits) if ftz else bits
    if t == "f64":
        return x.view(U64)
    if x.dtype == F64:
        x = rd.to_f32_odd(x)
    if t == "f16":
        bits = rd.f32_to_f16(x, mode)
        return rd.flush16(bits) if ftz else bits
    return rd.f32_to_bf16(x, mode)


def flushed(t: str, bits: Any, ftz: bool) -> Any:
    if not ftz:
        return bits
    return flush32(bits) if t == "f32" else rd.flush16(bits) if t == "f16" else bits


def fma64(a: Any, b: Any, c: Any) -> np.ndarray:
    """a * b + c of float64 rounded once (exact fractions: slow, and rare in kernels)."""
    a, b, c = np.broadcast_arrays(a, b, c)
    out = np.asarray(a * b + c).copy()
    good = np.isfinite(out) & (a != 0) & (b != 0)
    for at in zip(*np.nonzero(good), strict=True):
        exact = Fraction(float(a[at])) * Fraction(float(b[at])) + Fraction(float(c[at]))
        if exact:
            out[at] = float(exact)
    return out


def elementwise(d: Decoder, ins: Ins, t: str, fn: Callable, count: int, out: int | None = None) -> Callable:
    """`fn` on element bits (packed registers split first), result in element bits."""
    d.count(ins, count + 1)
    width = WIDTH[t]
    args = [d.src(ins, a, width, "f" if t in ("f32", "f64") else "b") for a in ins.args[1:]]
    slot = d.dst(ins, ins.args[0], width)
    if t not in PACKED:
        return d.alu(ins, fn, slot, args, UINT[width])
    # A constant operand of a packed type must be spread over threads before it is split.
    u = UINT[width]
    getters = [getter(a) for a in args]
    spread = [
        a if isinstance(a, int) else (lambda g, get=get: full(get(g), g, u))
        for a, get in zip(args, getters, strict=True)
    ]
    if not any(isinstance(a, int) for a in spread):
        return d.alu(ins, lambda *xs: words(t, fn(*[lanes(t, x) for x in xs])), slot, spread, u)
    return d.alu(ins, lambda *xs: words(t, fn(*[lanes(t, x) for x in xs])), slot, spread, u)


def options(d: Decoder, ins: Ins, m: Mods, t: str) -> tuple[str, bool, bool, bool]:
    mode = m.choice(*ROUNDINGS, default="rn")
    ftz, sat, relu = m.flag("ftz"), m.flag("sat"), m.flag("relu")
    m.end()
    e = element(t)
    if (
        (mode != "rn" and e in ("f16", "bf16"))
        or (ftz and e in ("bf16", "f64"))
        or (sat and e in ("bf16", "f64"))
        or (relu and e not in ("f16", "bf16"))
    ):
        raise d.refuse(ins, f"{ins.op} is not known")
    return mode, ftz, sat, relu


def binary(d: Decoder, ins: Ins, m: Mods, t: str) -> Callable:
    """add, sub, mul."""
    if ins.parts[0] != "mul":
        # Mixed precision: add.f32.f16 takes a narrow first operand (sm_100).
        mixed = [p for p in m.left if p in ("f32", "f16", "bf16")]
        if mixed:
            raise d.refuse(ins, f"{ins.op} is not known")
    mode, ftz, sat, relu = options(d, ins, m, t)
    e = element(t)
    fn = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[ins.parts[0]]

    def run(a: Any, b: Any) -> np.ndarray:
        x, y = load(e, flushed(e, a, ftz)), load(e, flushed(e, b, ftz))
        if mode == "rn" or e != "f32":
            if mode != "rn":
                return directed64(fn, x, y, mode).view(U64)
            return finish(e, np.asarray(fn(x, y)), ftz, sat, relu)
        x, y = x.astype(F64), y.astype(F64)
        exact = x * y if fn is np.multiply else rd.sum_odd(x, y if fn is np.add else -y)
        r = rd.to_f32(exact, mode)
        if mode == "rm" and fn is not np.multiply:
            # An exact zero of two unlike signs is -0 when rounding down.
            r = np.where((exact == 0) & (np.signbit(x) != np.signbit(y if fn is np.add else -y)), F32(-0.0), r)
        return finish(e, r, ftz, sat)

    return elementwise(d, ins, t, run, 2)


def directed64(fn: Callable, x: Any, y: Any, mode: str) -> np.ndarray:
    """One float64 operation in a directed mode, through exact fractions."""
    x, y = np.broadcast_arrays(x, y)
    r = np.asarray(fn(x, y))
    rest = np.zeros(r.shape)
    for at in zip(*np.nonzero(np.isfinite(r)), strict=True):
        p, q = Fraction(float(x[at])), Fraction(float(y[at]))
        exact = p * q if fn is np.multiply else p + q if fn is np.add else p - q
        rest[at] = (exact > Fraction(float(r[at]))) * 1.0 - (exact < Fraction(float(r[at]))) * 1.0
    return rd.direct(r, rest, mode)


def ternary(d: Decoder, ins: Ins, m: Mods, t: str) -> Callable:
    """fma, and mad of floats, which is the same on every architecture here."""
    mode, ftz, sat, relu = options(d, ins, m, t)
    e = element(t)
    if e == "f64" and mode != "rn":
        raise d.refuse(ins, f"{ins.op} is not known")

    def run(a: Any, b: Any, c: Any) -> np.ndarray:
        x, y, z = (load(e, flushed(e, v, ftz)) for v in (a, b, c))
        if e == "f32":
            return finish(e, rd.fma32(x, y, z, mode), ftz, sat)
        if e == "f64":
            return fma64(x, y, z).view(U64)
        # Both products are exact in float64; the sum is rounded to odd, so that the last rounding is the only one.
        exact = rd.sum_odd(x.astype(F64) * y.astype(F64), z.astype(F64))
        return finish(e, exact, ftz, sat, relu)

    return elementwise(d, ins, t, run, 3)


@op("fma")
def _fma(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    if t not in ("f32", "f64", "f16", "bf16", *PACKED):
        raise d.refuse(ins, f"{ins.op} is not known")
    return ternary(d, ins, m, t)


def divide(d: Decoder, ins: Ins, m: Mods, t: str) -> Callable:
    kind = m.choice("approx", "full", *ROUNDINGS, default="rn")
    ftz = m.flag("ftz")
    m.end()
    if ins.parts[0] != "div" or t not in ("f32", "f64"):
        raise d.refuse(ins, f"{ins.op} is not known")

    def run(a: Any, b: Any) -> np.ndarray:
        x, y = load(t, flushed(t, a, ftz)), load(t, flushed(t, b, ftz))
        r = np.asarray(x / y)
        if kind in ("rz", "rm", "rp"):
            if t == "f64":
                raise NotImplementedError
            rest = np.sign(x.astype(F64) - r.astype(F64) * y.astype(F64)) * np.sign(y.astype(F64))
            r = rd.direct(r, np.where(np.isfinite(r), rest, 0), kind)
        return finish(t, r, ftz, False)

    if t == "f64" and kind != "rn":
        raise d.refuse(ins, f"{ins.op} is not known")
    return elementwise(d, ins, t, run, 2)


def minmax(d: Decoder, ins: Ins, m: Mods, t: str) -> Callable:
    """min and max: a NaN loses against a number (unless .NaN), and -0 is less than +0."""
    ftz, keep_nan, xorsign = m.flag("ftz"), m.flag("NaN"), m.flag("xorsign")
    absolute = m.flag("abs")
    m.end()
    if absolute != xorsign:
        raise d.refuse(ins, f"{ins.op} is not known")
    e = element(t)
    largest = ins.parts[0] == "max"
    width = WIDTH[e]
    u = UINT[width].type
    top = u(1 << width - 1)
    nan_bits = (
        {"f32": u(0x7FFFFFFF), "f16": u(0x7FFF), "bf16": u(0x7FFF)}.get(e, u((1 << width - 1) - 1))
        if e != "f64"
        else u(0x7FFFFFFFFFFFFFFF)
    )
    infinity = (
        {"f32": u(0x7F800000), "f16": u(0x7C00), "bf16": u(0x7F80)}.get(e, u(0))
        if e != "f64"
        else u(0x7FF0000000000000)
    )

    def two(a: Any, b: Any) -> np.ndarray:
        a, b = flushed(e, a, ftz), flushed(e, b, ftz)
        sign = (a ^ b) & top
        if absolute:
            a, b = a & ~top, b & ~top
        a_nan, b_nan = (a & ~top) > infinity, (b & ~top) > infinity
        # Bits in order of value: negatives flipped, positives above them, so that -0 < +0.
        ka = np.where(a & top, ~a, a | top)
        kb = np.where(b & top, ~b, b | top)
        pick_a = ka >= kb if largest else ka <= kb
        out = np.where(pick_a, a, b)
        out = np.where(a_nan, b, np.where(b_nan, a, out))
        if absolute:
            out = out | sign
        both = (a_nan | b_nan) if keep_nan else (a_nan & b_nan)
        return np.where(both, nan_bits, out)

    count = len(ins.args) - 1
    if count == 3:
        return elementwise(d, ins, t, lambda a, b, c: two(two(a, b), c), 3)
    return elementwise(d, ins, t, two, 2)


def sign(d: Decoder, ins: Ins, m: Mods, t: str) -> Callable:
    """neg and abs change the sign bit alone."""
    ftz = m.flag("ftz")
    m.end()
    e = element(t)
    width = WIDTH[e]
    top = UINT[width].type(1 << width - 1)
    negate = ins.parts[0] == "neg"
    return elementwise(d, ins, t, lambda a: flushed(e, a, ftz) ^ top if negate else flushed(e, a, ftz) & ~top, 1)


def comparison(d: Decoder, ins: Ins, m: Mods, t: str, name: str) -> Callable:
    """A float comparison on register bits; for packed types on (n, 64) halves."""
    ftz = m.flag("ftz")
    e = element(t)
    ordered = {"eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}

    def compare(a: Any, b: Any) -> np.ndarray:
        if t in PACKED:
            if np.ndim(a) == 0 or np.ndim(b) == 0:
                a, b = np.broadcast_arrays(a, b)
            a, b = lanes(t, a), lanes(t, b)
        x, y = load(e, flushed(e, a, ftz)), load(e, flushed(e, b, ftz))
        if name in ordered:
            return ordered[name](x, y)
        nan = np.isnan(x) | np.isnan(y)
        if name == "ne":
            return (x != y) & ~nan
        if name == "num":
            return ~nan
        if name == "nan":
            return nan
        if name == "neu":
            return (x != y) | nan
        if name.endswith("u") and name[:-1] in ordered:
            return ordered[name[:-1]](x, y) | nan
        raise d.refuse(ins, f".{name} compares integers")

    if name in ("lo", "ls", "hi", "hs"):
        raise d.refuse(ins, f".{name} compares integers")
    return compare


UNARY: dict[str, Callable] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "rcp": lambda x: 1.0 / x,
    "sqrt": np.sqrt,
}


@op(*UNARY)
def _unary(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    name = ins.parts[0]
    how = m.choice("approx", *ROUNDINGS, default="rn")
    ftz = m.flag("ftz")
    m.end()
    e = element(t)
    narrow = name in ("ex2", "tanh")
    if t not in (("f32", "f16", "bf16", "f16x2", "bf16x2") if narrow else ("f32", "f64")) or (
        how != "approx" and name not in ("rcp", "sqrt")
    ):
        raise d.refuse(ins, f"{ins.op} is not known")
    if t == "f64" and how not in ("approx", "rn"):
        raise d.refuse(ins, f"{ins.op} is not known")
    fn = UNARY[name]

    def run(a: Any) -> np.ndarray:
        x = load(e, flushed(e, a, ftz))
        if e == "f64":
            return finish(e, np.asarray(fn(x)), False, False)
        wide = np.asarray(fn(x.astype(F64)))
        if name == "rsqrt":
            wide = np.where(x == 0, np.copysign(np.inf, x), wide)
        if how in ("rz", "rm", "rp"):
            r = wide.astype(F32)
            back = r.astype(F64)
            rest = np.sign(x - back * back) if name == "sqrt" else np.sign(1.0 - back * x) * np.sign(x)
            return finish(e, rd.direct(r, np.where(np.isfinite(r), rest, 0), how), ftz, False)
        return finish(e, wide, ftz, False)

    return elementwise(d, ins, t, run, 1)


@op("copysign")
def _copysign(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    m.end()
    top = UINT[WIDTH[t]].type(1 << WIDTH[t] - 1)
    return elementwise(d, ins, t, lambda a, b: (b & ~top) | (a & top), 2)


@op("testp")
def _testp(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    t = m.type()
    what = m.choice("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    m.end()
    if t not in ("f32", "f64"):
        raise d.refuse(ins, f"{ins.op} is not known")
    tiny = np.finfo(F32 if t == "f32" else F64).tiny

    def test(a: Any) -> np.ndarray:
        x = load(t, a)
        if what == "finite":
            return np.isfinite(x)
        if what == "infinite":
            return np.isinf(x)
        if what == "number":
            return ~np.isnan(x)
        if what == "notanumber":
            return np.isnan(x)
        if what == "normal":
            return np.isfinite(x) & (np.abs(x) >= tiny)
        return (x != 0) & (np.abs(x) < tiny)

    d.count(ins, 2)
    return d.alu(ins, test, d.dst(ins, ins.args[0], 1), [d.src(ins, ins.args[1], WIDTH[t], "f")], bool)


__all__ = [
    "U16",
    "U32",
    "binary",
    "comparison",
    "divide",
    "element",
    "finish",
    "flush32",
    "load",
    "minmax",
    "sign",
    "ternary",
]
