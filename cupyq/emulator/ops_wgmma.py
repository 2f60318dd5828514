"""wgmma: products of a warpgroup, with operands read from shared memory through descriptors.

Layouts (PTX ISA, "Asynchronous warpgroup level matrix shared memory layout"). A descriptor gives a start address, two
byte offsets (LBO, SBO) and a swizzle. The swizzle's xor applies to the final shared address. Offsets of the 16-byte
piece that holds row r (or column, of B) and byte b of k:

- K-major, swizzle of S bytes: (r / 8) SBO + (r % 8) S + b; LBO is not used.
- K-major, no swizzle: (r / 8) SBO + (r % 8) 16 + (b / 16) LBO.
- MN-major, swizzle of S bytes: (r / (S / 2)) LBO + (k / 8) SBO + (k % 8) S + 2 (r % (S / 2)).
- MN-major, no swizzle: (r / 8) SBO + (k / 8) LBO + 16 (k % 8).

Results are those of `ops_mma`; they are in the registers at once, while shared memory counts as being read until
``wgmma.wait_group``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import rounding as rd
from .decode import Decoder, Mods, full, getter, op
from .group import PARK
from .memory import WRITTEN
from .ops_mma import BITS, elements, tile_a
from .syntax import Imm, Ins, Reg, Vec
from .tensormap import swizzle

U32, U64 = np.uint32, np.uint64
SHAPE_K = {"f16": 16, "bf16": 16, "tf32": 8, "s8": 32, "u8": 32, "e4m3": 32, "e5m2": 32}
MODE = (0, 3, 2, 1)  # the descriptor's swizzle field to the number of bits xored
SPAN = (16, 128, 64, 32)


class WgmmaReads:
    """Shared memory that wgmma operations in flight are reading, by warp."""

    def __init__(self, m: Any) -> None:
        self.m = m
        self.committed = np.zeros(m.W, np.int64)
        self.batches: list[list] = []

    def start(self, ins: Ins, warps: np.ndarray, position: np.ndarray) -> None:
        """`position` is (warps, pieces): byte positions of 16-byte pieces."""
        race = self.m.race
        column = race.per_cta + race.local_warp[warps] // 4
        flat = position.ravel()
        n = position.shape[1]
        race.agent_access(ins, np.repeat(warps, n), flat, np.repeat(column, n), False)
        self.batches.append(
            [warps, self.committed[warps].copy(), flat, np.repeat(column, n), column, np.zeros(len(warps), bool), 0]
        )

    def commit(self, g: Any) -> None:
        self.committed[g.warps] += 1

    def wait(self, g: Any, pending: int) -> None:
        race = self.m.race
        if race is None or not self.batches:
            return
        here = np.zeros(self.m.W, bool)
        here[g.warps] = True
        left = []
        for batch in self.batches:
            warps, group, flat, columns, column, seen, _ = batch
            done = here[warps] & (group < self.committed[warps] - pending) & ~seen
            if done.any():
                batch[5] = seen | done
                # One warp's wait means that the whole group of its warpgroup is complete.
                groups = np.unique(column[done] + self.m.cta_of_warp[warps[done]] * 64)
                mine = np.isin(column + self.m.cta_of_warp[warps] * 64, groups)
                pieces = np.repeat(mine, len(flat) // len(warps))
                batch[6] = race.agent_done(flat[pieces], columns[pieces], False)
                race.agent_known(warps[done], column[done], batch[6])
            if not batch[5].all():
                left.append(batch)
        self.batches = left


@op("wgmma")
def _wgmma(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    m.drop("sync", "aligned")
    what = m.left.pop(0) if m.left else ""
    if what == "fence":
        m.end()
        return lambda g: None if g.converged(ins) else PARK
    if what == "commit_group":
        m.end()

        def commit(g: Any) -> Any:
            if not g.converged(ins):
                return PARK
            g.m.wg().commit(g)
            return None

        return commit
    if what == "wait_group":
        m.end()
        if not isinstance(ins.args[0], Imm):
            raise d.refuse(ins, "wait_group takes a number")
        pending = int(ins.args[0].value)

        def wait(g: Any) -> Any:
            if not g.converged(ins):
                return PARK
            g.m.wg().wait(g, pending)
            return None

        return wait
    if what == "mma_async":
        return _mma_async(d, ins, m)
    raise d.refuse(ins, f"wgmma.{what} is not known")


def descriptor_pieces(d: np.ndarray, rows: int, k: int, bits: int, transposed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Shared addresses of the 16-byte pieces of an operand, one row of them for each descriptor; and bad descriptors.

    K-major: pieces ordered (row, k piece). MN-major: (piece of 8 rows, k).
    """
    start = ((d & U64(0x3FFF)) << U64(4)).astype(np.int64)
    lbo = ((d >> U64(16) & U64(0x3FFF)) << U64(4)).astype(np.int64)[:, None]
    sbo = ((d >> U64(32) & U64(0x3FFF)) << U64(4)).astype(np.int64)[:, None]
    field = (d >> U64(62)).astype(np.int64)
    bad = (d >> U64(49) & U64(7)) != 0
    out = np.empty((len(d), rows * k * bits // 128), np.int64)
    for f in np.unique(field):
        chosen = field == f
        span = SPAN[int(f)]
        lead, stride = lbo[chosen], sbo[chosen]
        if not transposed:
            r, b = (x.ravel() for x in np.meshgrid(np.arange(rows), np.arange(0, k * bits // 8, 16), indexing="ij"))
            if f == 0:
                offset = (r // 8) * stride + (r % 8) * 16 + (b // 16) * lead
            else:
                offset = (r // 8) * stride + (r % 8) * span + b
        else:
            r, kk = (x.ravel() for x in np.meshgrid(np.arange(0, rows, 8), np.arange(k), indexing="ij"))
            if f == 0:
                offset = (r // 8) * stride + (kk // 8) * lead + (kk % 8) * 16
            else:
                half = span // 2
                offset = (r // half) * lead + (kk // 8) * stride + (kk % 8) * span + 2 * (r % half)
        out[chosen] = swizzle(start[chosen][:, None] + offset, MODE[int(f)])
    return out, bad


def _tile(cells: np.ndarray, rows: int, k: int, t: str, transposed: bool) -> np.ndarray:
    """Gathered 16-byte pieces to (n, rows, k) float64."""
    n = len(cells)
    words = cells.view(U32).reshape(n, -1)
    if transposed:
        half = words.view(np.uint16).reshape(n, rows // 8, k, 8)
        value = rd.f16_to_f32(half) if t == "f16" else rd.bf16_to_f32(half)
        return np.ascontiguousarray(value.transpose(0, 1, 3, 2)).reshape(n, rows, k).astype(np.float64)
    # `elements` wants (n, 32) words: groups of eight rows of 4 words; the k extent of a row is 32 bytes, 8 words.
    return elements(np.ascontiguousarray(words.reshape(-1, 32)), t).reshape(n, rows, k).astype(np.float64)


def _mma_async(d: Decoder, ins: Ins, m: Mods) -> Callable:
    bt, at, dt = m.type(), m.type(), m.type()
    sat = m.flag("satfinite")
    shape = m.left.pop(0) if len(m.left) == 1 else ""
    m.end()
    if not shape.startswith("m64n") or at not in SHAPE_K:
        raise d.refuse(ins, f"{ins.op} is not known")
    n_text, k_text = shape[4:].split("k")
    N, K = int(n_text), int(k_text)
    integer = at in ("s8", "u8")
    same = at == bt or {at, bt} <= {"e4m3", "e5m2"} or {at, bt} <= {"s8", "u8"}
    legal = ("s32",) if integer else ("f32",) if at in ("bf16", "tf32") else ("f16", "f32")
    if SHAPE_K[at] != K or not 8 <= N <= 256 or N % 8 or not same or dt not in legal or (sat and not integer):
        raise d.refuse(ins, f"{ins.op} is not known")
    args = ins.args
    halves = dt == "f16"
    d_slots = d.regs(ins, args[0], 32, N // 4 if halves else N // 2)
    a_slots = d.regs(ins, args[1], 32, 4) if isinstance(args[1], Vec) else None
    a_desc = None if a_slots is not None else getter(d.src(ins, args[1], 64))
    b_desc = getter(d.src(ins, args[2], 64))
    rest = list(args[3:])
    expected = 1 if integer else 3 + (0 if BITS[at] != 16 else 2 if a_slots is None else 1)
    if len(rest) not in (expected, expected + 0) and not (integer and len(rest) == 1):
        raise d.refuse(ins, f"{ins.op} takes {expected + 3} operands, got {len(args)}")
    scale_d = getter(d.src(ins, rest[0], 1))
    numbers = []
    for x in rest[1:]:
        if not isinstance(x, Imm):
            raise d.refuse(ins, "scales and transposes must be numbers")
        numbers.append(int(x.value))
    sign_a, sign_b = (numbers[0], numbers[1]) if len(numbers) >= 2 else (1, 1)
    flips = numbers[2:]
    trans_a = bool(flips[0]) if a_slots is None and flips else False
    trans_b = bool(flips[-1]) if flips else False
    if not {sign_a, sign_b} <= {1, -1} or not set(flips) <= {0, 1}:
        raise d.refuse(ins, "scales are 1 or -1, transposes 0 or 1")
    bits = BITS[at]

    def multiply(g: Any) -> Any:
        if not g.converged(ins):
            return PARK
        mach = g.m
        wg = mach.wg()
        warps = g.warps
        if (mach.warps_per_cta % 4) and "sync" in mach.checks:
            raise mach.fault("sync", "wgmma needs warpgroups of four warps", ins, int(warps[0]), 0)
        base = mach.warp_base[warps]
        desc = full(b_desc(g), g, U64)[:, 0]
        # The four warps of a group name the same operand: gather it once.
        keys, first, inverse = np.unique(
            np.stack((base, desc.view(np.int64))), axis=1, return_index=True, return_inverse=True
        )
        inverse = inverse.ravel()
        b = _operand(g, ins, wg, warps[first], desc[first], keys[0], N, K, bt, bits, trans_b)
        if a_slots is not None:
            a = tile_a([g.get(s) for s in a_slots], 16, at, np.float64)
        else:
            desc_a = full(a_desc(g), g, U64)[:, 0]
            rank = (warps % mach.warps_per_cta) % 4
            a = _operand(g, ins, wg, warps, desc_a, base, 64, K, at, bits, trans_a, rank)
        product = np.matmul(a, b[inverse].transpose(0, 2, 1)) if len(keys[0]) > 1 else np.matmul(a, b[0].T)
        if sign_a * sign_b < 0:
            product = -product
        keep = full(scale_d(g), g, bool)[:, 0]
        _accumulate(g, product, keep, d_slots, dt, N, sat)
        return None

    return multiply


def _operand(
    g: Any,
    ins: Ins,
    wg: WgmmaReads,
    warps: np.ndarray,
    desc: np.ndarray,
    base: np.ndarray,
    rows: int,
    k: int,
    t: str,
    bits: int,
    transposed: bool,
    rank: np.ndarray | None = None,
) -> np.ndarray:
    """An operand in shared memory as (n, rows, k); with `rank`, the 16 rows of each warp of its group."""
    m = g.m
    address, bad = descriptor_pieces(desc, rows, k, bits, transposed)
    shared = m.shared
    if bad.any():
        raise m.fault(
            "memory", "a matrix descriptor with a base offset is not modelled", ins, int(warps[int(bad.argmax())]), 0
        )
    if rank is not None:
        per = address.shape[1] // 4
        if transposed:
            address = address.reshape(len(address), rows // 8, k)
            address = np.stack([address[:, 2 * r : 2 * r + 2] for r in range(4)], 1).reshape(len(address), 4, per)
        else:
            address = address.reshape(len(address), 4, per)
        address = address[np.arange(len(rank)), rank]
        rows = 16
    if address.min() < shared.start or address.max() + 16 > shared.end:
        outside = (address < shared.start) | (address + 16 > shared.end)
        i, j = (int(x[0]) for x in np.nonzero(outside))
        raise m.fault(
            "memory",
            f"wgmma reads shared address {int(address[i, j])}, out of bounds",
            ins,
            int(warps[i]),
            0,
            int(address[i, j]),
        )
    position = address + base[:, None]
    cells = position >> 4
    if shared.shadow is not None:
        good = (shared.shadow.reshape(-1, 16)[cells] == WRITTEN).all(2)
        if not good.all():
            i, j = (int(x[0]) for x in np.nonzero(~good))
            state = shared.shadow.reshape(-1, 16)[cells[i, j]]
            what = (
                "while an asynchronous copy to it has not been waited for"
                if (state > WRITTEN).any()
                else "before anything is written there"
            )
            raise m.fault(
                "init",
                f"wgmma reads shared address {int(address[i, j])} {what}",
                ins,
                int(warps[i]),
                0,
                int(address[i, j]),
            )
    if m.race is not None:
        wg.start(ins, warps, position)
    m.counters.by_instruction["bytes"][ins.index] += address.size * 16
    return _tile(shared.cells[16].take(cells), rows, k, t, transposed)


def _accumulate(g: Any, product: np.ndarray, keep: np.ndarray, slots: list[int], dt: str, n: int, sat: bool) -> None:
    """D = D + product in the fragments: each block of eight columns is laid out like an mma accumulator."""
    warps = len(product)
    blocks = product.reshape(warps, 2, 8, n // 8, 4, 2)  # row half, g, block, t, element
    every, none = keep.all(), not keep.any()
    for block in range(n // 8):
        for half in range(2):
            if dt == "f16":
                slot = slots[block * 2 + half]
                total = np.ascontiguousarray(blocks[:, half, :, block]).reshape(warps, 64)
                if not none:
                    old = rd.f16_to_f32(g.get(slot).view(np.uint16)).astype(np.float64)
                    total = total + old if every else np.where(keep[:, None], total + old, total)
                g.put(slot, rd.f32_to_f16(rd.to_f32_odd(total)).view(U32))
                continue
            for e in range(2):
                slot = slots[block * 4 + half * 2 + e]
                value = np.ascontiguousarray(blocks[:, half, :, block, :, e]).reshape(warps, 32)
                kind: Any = np.int32 if dt == "s32" else np.float32
                if not none:
                    total = value + g.get(slot).view(kind)
                    value = total if every else np.where(keep[:, None], total, value)
                if dt == "s32":
                    whole = value.astype(np.int64)
                    whole = np.clip(whole, -(1 << 31), (1 << 31) - 1) if sat else whole
                    g.put(slot, whole.astype(np.int32).view(U32))
                else:
                    g.put(slot, value.astype(np.float32).view(U32))


__all__ = ["Reg", "WgmmaReads", "descriptor_pieces"]
