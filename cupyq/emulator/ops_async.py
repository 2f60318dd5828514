"""cp.async, its groups, and the door to bulk copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import counters as count
from .decode import Decoder, Mods, full, getter, op
from .memory import CELL, SHIFT, shared_index
from .ops_memory import address_of, load_cells
from .syntax import Imm, Ins, Reg

U32, U64 = np.uint32, np.uint64


@op("cp")
def _cp(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    if m.left[:1] != ["async"]:
        raise d.refuse(ins, f"{ins.op} is not known")
    m.left.pop(0)
    if m.left[:1] == ["bulk"]:
        from .ops_tensor import bulk

        return bulk(d, ins, m)
    guard = d.guard(ins)
    if m.left[:1] == ["mbarrier"]:
        from .ops_mbarrier import async_arrive

        return async_arrive(d, ins, m)
    if m.flag("commit_group"):
        m.end()
        return lambda g: g.m.copies.commit(g, g.active(guard))
    if m.flag("wait_all"):
        m.end()
        return lambda g: g.m.copies.wait(g, g.active(guard), None)
    if m.flag("wait_group"):
        m.end()
        if len(ins.args) != 1 or not isinstance(ins.args[0], Imm):
            raise d.refuse(ins, "wait_group takes a number")
        pending = int(ins.args[0].value)
        return lambda g: g.m.copies.wait(g, g.active(guard), pending)
    return _cp_async(d, ins, m)


def _cp_async(d: Decoder, ins: Ins, m: Mods) -> Callable:
    cache = m.choice("ca", "cg")
    m.drop("shared", "shared::cta", "global", "L2::64B", "L2::128B", "L2::256B")
    hint = m.flag("L2::cache_hint")
    m.end()
    args = list(ins.args)
    if hint:
        args.pop()
    if (
        not 3 <= len(args) <= 4
        or not isinstance(args[2], Imm)
        or args[2].value not in (4, 8, 16)
        or (cache == "cg" and args[2].value != 16)
    ):
        raise d.refuse(ins, "cp.async copies 4, 8 or 16 bytes (.cg: 16)")
    size = int(args[2].value)
    destination, source = address_of(d, ins, args[0]), address_of(d, ins, args[1])
    guard = d.guard(ins)
    amount = ignore = None
    if len(args) == 4:
        if isinstance(args[3], Reg) and args[3].width == 1:
            ignore = getter(d.src(ins, args[3], 1))
        else:
            amount = getter(d.src(ins, args[3], 32))
    shift = SHIFT[size]

    def start(g: Any) -> None:
        active = g.active(guard)
        if active is not None and not active.any():
            return
        mach = g.m
        target = destination(g)
        position = shared_index(g, ins, g.flat(target, active), active, size, True)
        _count_async_shared(g, ins, target, active, size)
        if ignore is not None:
            bytes_ = np.where(full(ignore(g), g, bool), 0, size)
        elif amount is not None:
            bytes_ = full(amount(g), g, U32).astype(np.int64)
        else:
            bytes_ = None
        address = source(g)
        if bytes_ is None or (bytes_ == size).all():
            cells = _fetch(g, ins, address, active, size, shift)
        else:
            # Nothing of the source is touched beyond src-size; the rest of the destination becomes zero.
            cells = np.zeros(g.shape, CELL[size])
            for have in np.unique(bytes_ if active is None else bytes_[active]):
                if have == 0:
                    continue
                some = bytes_ == have if active is None else (bytes_ == have) & active
                raw = cells.view(np.uint8).reshape(g.n, 32, size)
                if have >= size:
                    raw[some] = _fetch(g, ins, address, some, size, shift).view(np.uint8).reshape(g.n, 32, size)[some]
                else:
                    for byte in range(int(have)):
                        raw[some, byte] = _fetch(g, ins, address + U64(byte), some, 1, 0)[some]
        mach.copies.start(g, ins, active, position, size, g.flat(cells, active))

    return start


def _fetch(g: Any, ins: Ins, address: np.ndarray, active: np.ndarray | None, size: int, shift: int) -> np.ndarray:
    return load_cells(g, ins, "global", address, active, size)


def _count_async_shared(g: Any, ins: Ins, address: np.ndarray, active: np.ndarray | None, size: int) -> None:
    c = g.m.counters.by_instruction
    wave, extra = count.wavefronts_of(address, active, size)
    c["wavefronts"][ins.index] += wave
    c["conflicts"][ins.index] += extra
