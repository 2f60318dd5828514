"""Exact rounding between float formats in NumPy: every mode, with no double rounding.

Sums and products are formed in float64. Where 53 bits cannot hold the exact value it is rounded *to odd* (cut off, and
the last bit set when anything was lost), after which a second rounding to a format two or more bits shorter is right.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

F16, F32, F64 = np.float16, np.float32, np.float64
U16, U32, U64 = np.uint16, np.uint32, np.uint64
INF32 = F32(np.inf)


@lru_cache(maxsize=1)
def _half_table() -> np.ndarray:
    return np.arange(65536, dtype=U16).view(F16).astype(F32)


def f16_to_f32(bits: Any) -> Any:
    """float16 bits to float32 by table: one gather, several times quicker than the software conversion."""
    return _half_table().take(bits)


def bf16_to_f32(bits: Any) -> Any:
    return (bits.astype(U32) << U32(16)).view(F32)


def sum_odd(p: Any, c: Any) -> np.ndarray:
    """p + c of float64, rounded to odd."""
    s = np.asarray(p + c)
    back = s - p
    error = (p - (s - back)) + (c - back)
    lost = (error != 0) & np.isfinite(s) & np.isfinite(error)
    if not lost.any():
        return s
    bits = s.view(U64)
    toward_zero = lost & ((error < 0) != (s < 0))
    bits = bits - toward_zero.astype(U64)
    return (bits | lost.astype(U64)).view(F64)


def to_f32_odd(x: Any) -> np.ndarray:
    """float64 to float32, rounded to odd."""
    x = np.asarray(x)
    r = x.astype(F32)
    back = r.astype(F64)
    lost = back != x
    if not lost.any():
        return r
    lost &= ~np.isnan(x)
    bits = r.view(U32) - (lost & (np.abs(back) > np.abs(x))).astype(U32)
    return (bits | lost.astype(U32)).view(F32)


def to_f32(x: Any, mode: str = "rn") -> np.ndarray:
    """float64 (exact, or rounded to odd) to float32 in mode rn, rz, rm or rp."""
    x = np.asarray(x)
    r = x.astype(F32)
    if mode == "rn":
        return r
    back = r.astype(F64)
    return direct(
        r, np.sign(x - back) if np.isfinite(back).all() else np.where(np.isinf(x), 0, np.sign(x - back)), mode
    )


def direct(r: np.ndarray, rest: np.ndarray, mode: str) -> np.ndarray:
    """Move a nearest-rounded result to the side that `mode` asks for; `rest` has the sign of exact - r."""
    r = np.asarray(r)
    if mode == "rz":
        return np.where(((rest < 0) & (r > 0)) | ((rest > 0) & (r < 0)), np.nextafter(r, r.dtype.type(0)), r)
    if mode == "rm":
        return np.where(rest < 0, np.nextafter(r, r.dtype.type(-np.inf)), r)
    if mode == "rp":
        return np.where(rest > 0, np.nextafter(r, r.dtype.type(np.inf)), r)
    return r


def fma32(a: Any, b: Any, c: Any, mode: str = "rn") -> np.ndarray:
    """a * b + c of float32 rounded once."""
    p = a.astype(F64) * b.astype(F64)
    c = c.astype(F64)
    s = np.asarray(p + c)
    if mode == "rn":
        # The product is exact. A second rounding can only go wrong where the first one landed on a midpoint of two
        # float32 (or among subnormals, whose midpoints lie elsewhere).
        tail = s.view(U64) & U64(0x1FFFFFFF)
        if not ((tail == U64(0x10000000)) | (np.abs(s) < 1.2e-38)).any():
            return s.astype(F32)
    s = sum_odd(p, c)
    return to_f32(s, mode)


def f32_to_bf16(x: np.ndarray, mode: str = "rn") -> np.ndarray:
    """float32 to bfloat16 bits; NaN becomes 0x7fff."""
    bits = np.asarray(x).view(U32)
    if mode == "rn":
        out = (bits + (U32(0x7FFF) + (bits >> U32(16) & U32(1)))) >> U32(16)
    elif mode == "rz":
        out = bits >> U32(16)
    elif mode == "rna":
        out = (bits + U32(0x8000)) >> U32(16)
    else:
        up = (bits >> U32(31)) == (U32(1) if mode == "rm" else U32(0))
        out = (bits + np.where(up & (bits & U32(0xFFFF) != 0), U32(0x10000), U32(0))) >> U32(16)
        out = np.where(np.isinf(x), bits >> U32(16), out)
    return np.where(np.isnan(x), U16(0x7FFF), out.astype(U16))


def f32_to_f16(x: np.ndarray, mode: str = "rn") -> np.ndarray:
    """float32 to float16 bits; NaN becomes 0x7fff."""
    x = np.asarray(x)
    r = x.astype(F16)
    if mode != "rn":
        r = direct(r, np.where(np.isinf(x), 0, np.sign(x - r.astype(F32))), mode)
    bits = r.view(U16)
    nan = np.isnan(x)
    return np.where(nan, U16(0x7FFF), bits) if nan.any() else bits


def f32_to_f8(x: np.ndarray, kind: str, relu: bool = False) -> np.ndarray:
    """float32 to e4m3 or e5m2 bits, nearest even, saturating to the largest finite value; NaN becomes 0x7f."""
    dtype, top = (ml_dtypes.float8_e4m3fn, 448.0) if kind == "e4m3" else (ml_dtypes.float8_e5m2, 57344.0)
    x = np.asarray(x)
    if relu:
        x = np.where(x < 0, F32(0), x)
    out = np.clip(x, F32(-top), F32(top)).astype(dtype).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(0x7F), out)


@lru_cache(maxsize=4)
def f8_table(kind: str) -> np.ndarray:
    """float32 value of every e4m3 or e5m2 byte."""
    dtype = ml_dtypes.float8_e4m3fn if kind == "e4m3" else ml_dtypes.float8_e5m2
    return np.arange(256, dtype=np.uint8).view(dtype).astype(F32)


def flush32(bits: Any) -> Any:
    """float32 bits with subnormals made zero of the same sign."""
    small = (bits & U32(0x7F800000)) == 0
    return np.where(small, bits & U32(0x80000000), bits)


def flush16(bits: Any) -> Any:
    """float16 bits with subnormals made zero of the same sign."""
    small = (bits & U16(0x7C00)) == 0
    return np.where(small, bits & U16(0x8000), bits)


def canonical32(x: np.ndarray) -> np.ndarray:
    """float32 result as bits; every NaN is 0x7fffffff, as on the hardware."""
    bits = np.asarray(x).view(U32)
    nan = np.isnan(x)
    return np.where(nan, U32(0x7FFFFFFF), bits) if nan.any() else bits
