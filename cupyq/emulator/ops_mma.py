"""mma.sync: tensor-core products on register fragments.

One rule gives every fragment (PTX ISA, "Matrix fragments for mma"): with lane = 4 g + t and e elements in a register,
A register r holds row g + 8 (r & 1) and columns (r >> 1) * 4e + t e ..., B register r holds column g and rows
r * 4e + t e ..., C/D pair p holds row g + 8 p and columns 2t, 2t + 1. So each register of a warp is an 8 x 4e tile.

Numerics. Products are exact. For f32 results the products of one instruction and the accumulator are summed in
float64 (products in ascending k, then c) and rounded once to float32, to nearest even; the hardware's order and
rounding are not specified. f16 accumulators are rounded once to f16. tf32 operands lose their lower 13 bits. Integers
wrap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import rounding as rd
from .decode import Decoder, Mods, op, put
from .group import PARK
from .syntax import UINT, Ins, Vec

U32 = np.uint32
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "e4m3": 8, "e5m2": 8, "f64": 64}
SHAPES = {
    (8, 8, 4): ("f64",),
    (8, 8, 16): ("s8", "u8"),
    (8, 8, 32): ("s4", "u4"),
    (16, 8, 4): ("tf32", "f64"),
    (16, 8, 8): ("f16", "bf16", "tf32", "f64"),
    (16, 8, 16): ("f16", "bf16", "s8", "u8", "f64", "e4m3", "e5m2"),
    (16, 8, 32): ("s8", "u8", "e4m3", "e5m2", "s4", "u4"),
    (16, 8, 64): ("s4", "u4"),
}


def elements(words: np.ndarray, t: str) -> np.ndarray:
    """(n, 32) registers to (n, 8, 4e) values: row = lane / 4, then the elements of its four lanes in order."""
    n = len(words)
    if t == "f16":
        return rd.f16_to_f32(words.view(np.uint16)).reshape(n, 8, 8)
    if t == "bf16":
        return rd.bf16_to_f32(words.view(np.uint16)).reshape(n, 8, 8)
    if t == "tf32":
        return (words & U32(0xFFFFE000)).view(np.float32).reshape(n, 8, 4)
    if t == "f64":
        return words.view(np.float64).reshape(n, 8, 4)
    if t in ("s8", "u8"):
        return words.view(np.int8 if t == "s8" else np.uint8).reshape(n, 8, 16)
    if t in ("s4", "u4"):
        bytes_ = words.view(np.uint8).reshape(n, 8, 16)
        both = np.stack((bytes_ & 15, bytes_ >> 4), axis=-1).reshape(n, 8, 32)
        return (
            np.where(both > 7, both.astype(np.int8) - 16, both.astype(np.int8)).astype(np.int8) if t == "s4" else both
        )
    return rd.f8_table(t).take(words.view(np.uint8)).reshape(n, 8, 16)


def tile_a(registers: list[np.ndarray], m: int, t: str, dtype: Any) -> np.ndarray:
    """A fragment registers to (n, m, k)."""
    tiles = [elements(r, t) for r in registers]
    rows = m // 8
    width = tiles[0].shape[2]
    out = np.empty((len(tiles[0]), m, len(tiles) // rows * width), dtype)
    for r, tile in enumerate(tiles):
        i, j = (r & 1, r >> 1) if rows == 2 else (0, r)
        out[:, 8 * i : 8 * i + 8, j * width : (j + 1) * width] = tile
    return out


def tile_b(registers: list[np.ndarray], t: str, dtype: Any) -> np.ndarray:
    """B fragment registers to (n, 8, k): column-major, so that each column is contiguous."""
    tiles = [elements(r, t) for r in registers]
    width = tiles[0].shape[2]
    out = np.empty((len(tiles[0]), 8, len(tiles) * width), dtype)
    for r, tile in enumerate(tiles):
        out[:, :, r * width : (r + 1) * width] = tile
    return out


def tile_c(registers: list[np.ndarray], m: int, view: Any) -> np.ndarray:
    """Accumulator registers (32 bits an element, or 64) to (n, m, 8)."""
    n = len(registers[0])
    out = np.empty((n, m, 8), view)
    for i in range(m // 8):
        rows = out[:, 8 * i : 8 * i + 8, :].reshape(n, 8, 4, 2)
        for e in range(2):
            rows[:, :, :, e] = registers[2 * i + e].view(view).reshape(n, 8, 4)
    return out


def split_d(tile: np.ndarray, bits: Any) -> list[np.ndarray]:
    """(n, m, 8) to accumulator registers; inverse of `tile_c`."""
    n, m, _ = tile.shape
    out = []
    for i in range(m // 8):
        rows = tile[:, 8 * i : 8 * i + 8, :].reshape(n, 8, 4, 2)
        for e in range(2):
            out.append(np.ascontiguousarray(rows[:, :, :, e]).reshape(n, 32).view(bits))
    return out


@op("mma")
def _mma(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    ct, bt, at, dt = m.type(), m.type(), m.type(), m.type()
    m.drop("sync", "aligned", "row", "col")
    sat = m.flag("satfinite")
    kind = [p for p in m.left if p.startswith(("kind", "sp")) or p == "block_scale"]
    if kind == ["kind::f8f6f4"]:
        m.left.remove("kind::f8f6f4")
    elif kind:
        raise d.refuse(ins, f"{ins.op}: .{kind[0]} is not known")
    shape_name = next((p for p in m.left if p[0] == "m" and p[1:2].isdigit()), "")
    if not shape_name:
        raise d.refuse(ins, f"{ins.op} has no shape")
    m.left.remove(shape_name)
    m.end()
    M, rest = shape_name[1:].split("n")
    N, K = rest.split("k")
    shape = (int(M), int(N), int(K))
    mixed_ok = {at, bt} <= {"s8", "u8"} or {at, bt} <= {"e4m3", "e5m2"} or {at, bt} <= {"s4", "u4"}
    if (
        "row" not in ins.parts
        or "col" not in ins.parts
        or at not in SHAPES.get(shape, ())
        or bt not in SHAPES[shape]
        or (at != bt and not mixed_ok)
    ):
        raise d.refuse(ins, f"{ins.op} is not known")
    integer = at in ("s8", "u8", "s4", "u4")
    legal = ("s32",) if integer else ("f64",) if at == "f64" else ("f32",) if at in ("bf16", "tf32") else ("f16", "f32")
    if ct not in legal or dt not in legal or (sat and not integer):
        raise d.refuse(ins, f"{ins.op} is not known")
    d.count(ins, 4)
    per = 32 // BITS[at] if BITS[at] < 32 else 1
    width = 64 if at == "f64" else 32
    rows = shape[0]
    k_regs = shape[2] // (4 * per)
    a_slots = d.regs(ins, ins.args[1], width, rows // 8 * k_regs)
    b_slots = d.regs(ins, ins.args[2], width, k_regs)
    d_slots = _accumulators(d, ins, ins.args[0], dt, rows)
    c_arg = ins.args[3]
    c_slots = _accumulators(d, ins, c_arg, ct, rows)
    work: Any = np.float64
    # Integer products of bytes and their sums over k <= 64 are exact in float64, and its product uses BLAS.
    guard = d.guard(ins)

    def multiply(g: Any) -> Any:
        if not g.converged(ins):
            return PARK
        a = tile_a([g.get(s) for s in a_slots], rows, at, work)
        b = tile_b([g.get(s) for s in b_slots], bt, work)
        product = np.matmul(a, b.transpose(0, 2, 1))
        for slot, value in zip(
            d_slots, accumulate(product, [g.get(s) for s in c_slots], ct, dt, rows, sat), strict=True
        ):
            put(g, slot, value, guard)
        return None

    return multiply


def _accumulators(d: Decoder, ins: Ins, operand: Any, t: str, rows: int) -> list[int]:
    if not isinstance(operand, Vec):
        raise d.refuse(ins, "an accumulator is a vector of registers")
    return d.regs(ins, operand, 64 if t == "f64" else 32, rows // 8 if t == "f16" else rows // 4)


def accumulate(product: np.ndarray, c: list[np.ndarray], ct: str, dt: str, rows: int, sat: bool) -> list[np.ndarray]:
    """c + product rounded once to the type of d, as registers."""
    n = len(product)
    if ct == "s32":
        total = product.astype(np.int64) + tile_c(c, rows, np.int32)
        if sat:
            total = np.clip(total, -(1 << 31), (1 << 31) - 1)
        return split_d(total.astype(np.int32), U32)
    if ct == "f64":
        return split_d(product + tile_c(c, rows, np.float64), UINT[64])
    if ct == "f16":
        halves = np.concatenate([rd.f16_to_f32(r.view(np.uint16)).reshape(n, 8, 8) for r in c], axis=1)
        total = product + halves
    else:
        total = product + tile_c(c, rows, np.float32)
    if dt == "f16":
        bits = rd.f32_to_f16(rd.to_f32_odd(total))
        return [np.ascontiguousarray(bits[:, 8 * i : 8 * i + 8]).reshape(n, 64).view(U32) for i in range(rows // 8)]
    return split_d(total.astype(np.float32), U32)
