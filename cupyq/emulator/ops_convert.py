"""cvt: between integers and floats, every rounding, saturation and the packed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import rounding as rd
from .decode import Decoder, Mods, extend, full, getter, op, put
from .floats import finish, flushed, load
from .rounding import F16, F32, F64, U16, U32, U64
from .syntax import SINT, UINT, WIDTH, Ins, Reg

INTEGER_ROUNDING = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
FLOAT = ("f16", "bf16", "f32", "f64")


def float_to_int(x: Any, t: str, rounding: str) -> np.ndarray:
    """Rounded and clamped to the type's range. NaN gives 0, for 64-bit results and f64 sources the top bit alone."""
    kind, width = t[0], WIDTH[t]
    wide = np.asarray(x)
    nan = np.isnan(wide)
    from_double = wide.dtype == F64
    wide = INTEGER_ROUNDING[rounding](wide.astype(F64))
    if kind == "s":
        low, high = -(1 << width - 1), (1 << width - 1) - 1
    else:
        low, high = 0, (1 << width) - 1
    dtype = (SINT if kind == "s" else UINT)[width]
    over, under = wide >= float(high + 1) if width == 64 else wide > high, wide < low
    safe = np.where(nan | over | under, 0.0, wide)
    out = safe.astype(dtype)
    out = np.where(over, dtype.type(high), np.where(under, dtype.type(low), out))
    bits = out.view(UINT[width])
    nan_value = (1 << width - 1) if (from_double or width == 64) else 0
    return np.where(nan, UINT[width].type(nan_value), bits)


def int_to_float(a: Any, t: str, out: str, mode: str) -> np.ndarray:
    width = WIDTH[t]
    value = a.view(SINT[width]) if t[0] == "s" else a
    if width < 64:
        exact = value.astype(F64)
        if out == "f64":
            return exact.view(U64)
        if out == "f32":
            return rd.to_f32(exact, mode).view(U32)
        return finish(out, exact, False, False, mode=mode)
    if out == "f64" and mode == "rn":
        return value.astype(F64).view(U64)
    # 64-bit integers do not fit 53 bits: split, and round the sum to odd.
    high = (value >> value.dtype.type(32)).astype(F64) * 4294967296.0
    low = (value & value.dtype.type(0xFFFFFFFF)).astype(F64)
    odd = rd.sum_odd(high, low)
    if out == "f64":
        raise NotImplementedError
    return finish(out, rd.to_f32(odd, mode) if out == "f32" else odd, False, False, mode=mode)


@op("cvt")
def _cvt(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    source = m.type()
    if (
        "x2" in source
        or (m.left and "x2" in m.left[-1])
        or (m.left and m.left[-1] == "tf32")
        or source in ("e4m3", "e5m2", "tf32")
        or "pack" in m.left
    ):
        return _packed(d, ins, m, source)
    target = m.type()
    integer = m.choice(*INTEGER_ROUNDING, default="none")
    mode = m.choice("rn", "rz", "rm", "rp", "rna", default="none")
    ftz, sat, relu, satfinite = m.flag("ftz"), m.flag("sat"), m.flag("relu"), m.flag("satfinite")
    m.end()
    d.count(ins, 2)
    sw, tw = WIDTH[source], WIDTH[target]
    source_float, target_float = source in FLOAT, target in FLOAT
    a = d.src(ins, ins.args[1], sw, "f" if source in ("f32", "f64") else "b")
    if not isinstance(ins.args[0], Reg) or ins.args[0].width < tw:
        raise d.refuse(ins, "the destination is narrower than the result")
    register = ins.args[0].width
    slot = ins.args[0].slot
    if satfinite or mode == "rna":
        raise d.refuse(ins, f"{ins.op} is not known")

    def convert(a: Any) -> np.ndarray:
        if not source_float and not target_float:
            return _int_to_int(a, source, target, sat)
        if source_float and not target_float:
            return float_to_int(load(source, flushed(source, a, ftz)), target, integer if integer != "none" else "rzi")
        if not source_float:
            r = int_to_float(a, source, target, "rn" if mode == "none" else mode)
            return finish(target, load(target, r), False, True) if sat else r
        x = load(source, flushed(source, a, ftz))
        if integer != "none":
            x = INTEGER_ROUNDING[integer](x)
        how = "rn" if mode == "none" else mode
        if target == "f64":
            return finish("f64", x.astype(F64), False, sat)
        if source == "f64":
            x = np.asarray(x)
            if target == "f32":
                x = rd.to_f32(x, how)
        elif source == target:
            return finish(target, np.asarray(x), ftz, sat, relu)
        return finish(target, np.asarray(x), ftz, sat, relu, how)

    if source_float and not target_float and integer == "none":
        raise d.refuse(ins, "float to integer needs an integer rounding")
    if not source_float and target == "f64" and sw == 64 and mode not in ("none", "rn"):
        raise d.refuse(ins, f"{ins.op} is not known")
    kind = target[0] if not target_float else "u"
    return d.alu(ins, lambda a: _own(extend(convert(a), kind, register), a), slot, [a], UINT[register])


def _own(value: np.ndarray, source: Any) -> np.ndarray:
    return value.copy() if value is source or (isinstance(value, np.ndarray) and value.base is not None) else value


def _int_to_int(a: Any, source: str, target: str, sat: bool) -> np.ndarray:
    sw, tw = WIDTH[source], WIDTH[target]
    if sat:
        value = a.view(SINT[sw]) if source[0] == "s" else a
        low, high = (-(1 << tw - 1), (1 << tw - 1) - 1) if target[0] == "s" else (0, (1 << tw) - 1)
        info = np.iinfo(value.dtype)
        low, high = max(low, info.min), min(high, info.max)
        a = np.clip(value, value.dtype.type(low), value.dtype.type(high)).view(a.dtype)
    if tw <= sw:
        return a.astype(UINT[tw])
    return extend(a, source[0], tw)


def _packed(d: Decoder, ins: Ins, m: Mods, source: str) -> Callable:
    """Pairs in one register, e4m3/e5m2, tf32."""
    if m.flag("pack"):
        return _pack_saturating(d, ins, m, source)
    target = m.type()
    mode = m.choice("rn", "rz", "rna", default="rn")
    relu, satfinite, _ftz = m.flag("relu"), m.flag("satfinite"), m.flag("ftz")
    scaled = [p for p in m.left if p.startswith(("scaled", "n2"))]
    if scaled:
        raise d.refuse(ins, f"{ins.op} is not known")
    m.end()
    if target == "tf32" and source == "f32":
        d.count(ins, 2)

        def tf32(a: Any) -> np.ndarray:
            x = np.where(a >> U32(31), U32(0), a) if relu else a
            if mode == "rz":
                out = x & U32(0xFFFFE000)
            elif mode == "rna":
                out = (x + U32(0x1000)) & U32(0xFFFFE000)
            else:
                out = (x + (U32(0xFFF) + (x >> U32(13) & U32(1)))) & U32(0xFFFFE000)
            special = (a & U32(0x7F800000)) == U32(0x7F800000)
            nan = special & (a & U32(0x7FFFFF) != 0)
            return np.where(nan, U32(0x7FFFFFFF), np.where(special, x, out))

        return d.alu(ins, tf32, d.dst(ins, ins.args[0], 32), [d.src(ins, ins.args[1], 32, "f")], U32)
    if target in ("f16x2", "bf16x2") and source == "f32":
        d.count(ins, 3)
        half = rd.f32_to_f16 if target == "f16x2" else rd.f32_to_bf16
        largest = F32(65504.0) if target == "f16x2" else F32(3.3895314e38)

        def pair(a: Any, b: Any) -> np.ndarray:
            # The first source goes to the upper half.
            out = []
            for v in (b, a):
                x = np.asarray(v).view(F32)
                if relu:
                    x = np.where(x <= 0, F32(0), x)
                if satfinite:
                    x = np.clip(x, -largest, largest)
                out.append(half(x, mode).astype(U32))
            return out[0] | out[1] << U32(16)

        return d.alu(ins, pair, d.dst(ins, ins.args[0], 32), [d.src(ins, x, 32, "f") for x in ins.args[1:]], U32)
    if target in ("e4m3x2", "e5m2x2"):
        kind = target[:4]
        if not satfinite or mode != "rn":
            raise d.refuse(ins, f"{ins.op} is not known: .rn.satfinite is the form that exists")
        if source == "f32":
            d.count(ins, 3)

            def narrow(a: Any, b: Any) -> np.ndarray:
                low = rd.f32_to_f8(np.asarray(b).view(F32), kind, relu).astype(U16)
                return low | rd.f32_to_f8(np.asarray(a).view(F32), kind, relu).astype(U16) << U16(8)

            return d.alu(ins, narrow, d.dst(ins, ins.args[0], 16), [d.src(ins, x, 32, "f") for x in ins.args[1:]], U16)
        if source in ("f16x2", "bf16x2"):
            d.count(ins, 2)

            def from_half(a: Any) -> np.ndarray:
                halves = [(a & U32(0xFFFF)).astype(U16), (a >> U32(16)).astype(U16)]
                low, high = (rd.f32_to_f8(load(source[:-2], h), kind, relu).astype(U16) for h in halves)
                return low | high << U16(8)

            return d.alu(ins, from_half, d.dst(ins, ins.args[0], 16), [d.src(ins, ins.args[1], 32)], U16)
    if source in ("e4m3x2", "e5m2x2") and target in ("f16x2", "bf16x2"):
        d.count(ins, 2)
        table = rd.f8_table(source[:4])
        if target == "f16x2":
            bits = np.where(np.isnan(table), U16(0x7FFF), table.astype(F16).view(U16))
        else:
            bits = rd.f32_to_bf16(table)
        bits = np.where((bits >> U16(15)).astype(bool) & (bits != 0x7FFF), U16(0), bits) if relu else bits
        words = bits.astype(U32)
        return d.alu(
            ins,
            lambda a: words[a & U16(255)] | words[a >> U16(8)] << U32(16),
            d.dst(ins, ins.args[0], 32),
            [d.src(ins, ins.args[1], 16)],
            U32,
        )
    raise d.refuse(ins, f"{ins.op} is not known")


def _pack_saturating(d: Decoder, ins: Ins, m: Mods, source: str) -> Callable:
    """``cvt.pack.sat.{u16,s16}.s32`` and ``cvt.pack.sat.{u8,s8}.s32.b32``."""
    third = source == "b32"
    if third:
        source = m.type()
    target = m.type()
    m.drop("sat")
    m.end()
    if source != "s32" or target not in ("u16", "s16", "u8", "s8"):
        raise d.refuse(ins, f"{ins.op} is not known")
    d.count(ins, 4 if third else 3)
    width = WIDTH[target]
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if target[0] == "s" else (0, (1 << width) - 1)
    mask = U32((1 << width) - 1)

    def pack(a: Any, b: Any, c: Any = None) -> np.ndarray:
        x, y = (np.clip(v.view(np.int32), low, high).view(U32) & mask for v in (a, b))
        both = y | x << U32(width)
        return both if c is None else both | c << U32(2 * width)

    return d.alu(ins, pack, d.dst(ins, ins.args[0], 32), [d.src(ins, x, 32) for x in ins.args[1:]], U32)


__all__ = ["float_to_int", "full", "getter", "int_to_float", "put"]
