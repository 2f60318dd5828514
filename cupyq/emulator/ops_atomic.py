"""atom and red: threads at one address take turns, in the order of their lanes (or shuffled, with a seed)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import rounding as rd
from .decode import Decoder, Mods, full, getter, op, put_where
from .memory import CELL, LOCAL_ID, REGION_BITS, SHARED_ID, SHIFT, WRITTEN, check_global, check_written, shared_index
from .ops_memory import CACHE, ONES, SCOPES, SPACES, _count_global, _count_shared, address_of, plain_space
from .syntax import SINT, UINT, WIDTH, Ins, Sink, Vec

U32, U64 = np.uint32, np.uint64


def _float_op(fn: Callable, t: str) -> Callable:
    """An operation on the bits of f16, bf16 (and pairs), f32 or f64 cells."""
    if t in ("f32", "f64"):
        dtype = np.float32 if t == "f32" else np.float64
        return lambda old, new: fn(old.view(dtype), new.view(dtype)).view(old.dtype)

    def narrow(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        x, y = np.ascontiguousarray(old).view(np.uint16), np.ascontiguousarray(new).view(np.uint16)
        if t.startswith("bf16"):
            out = rd.f32_to_bf16(fn(rd.bf16_to_f32(x), rd.bf16_to_f32(y)))
        else:
            out = rd.f32_to_f16(fn(rd.f16_to_f32(x), rd.f16_to_f32(y)))
        return out.view(old.dtype)

    return narrow


def operation(d: Decoder, ins: Ins, name: str, t: str) -> Callable:
    """old, new -> what is stored."""
    floating = "f" in t
    if name == "add":
        return _float_op(np.add, t) if floating else np.add
    if name in ("min", "max"):
        fn = np.minimum if name == "min" else np.maximum
        if floating:
            return _float_op(np.fmin if name == "min" else np.fmax, t)
        if t[0] == "s":
            s = SINT[WIDTH[t]]
            return lambda old, new: fn(old.view(s), new.view(s)).view(old.dtype)
        return fn
    if floating:
        raise d.refuse(ins, f"{ins.op} is not known")
    if name == "inc":
        return lambda old, new: np.where(old >= new, old.dtype.type(0), old + old.dtype.type(1))
    if name == "dec":
        return lambda old, new: np.where((old == 0) | (old > new), new, old - old.dtype.type(1))
    return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "exch": lambda old, new: new}[name]


@op("atom", "red")
def _atom(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    if m.left[:1] == ["async"]:
        from .ops_cluster import red_async

        return red_async(d, ins, m)
    t = m.type()
    vector = int(m.choice("v2", "v4", "v8", default="v1")[1])
    space = plain_space(m.choice(*SPACES, default="generic"))
    order = m.choice("relaxed", "acquire", "release", "acq_rel", default="relaxed")
    scope = m.choice(*SCOPES, default="gpu")
    name = m.choice("add", "min", "max", "inc", "dec", "cas", "exch", "and", "or", "xor")
    m.drop("noftz", *CACHE)
    hint = m.flag("L2::cache_hint")
    m.end()
    returns = ins.parts[0] == "atom"
    args = list(ins.args)
    if hint:
        args.pop()
    expected = (2 if returns else 1) + (2 if name == "cas" else 1)
    if len(args) != expected or t not in WIDTH or WIDTH[t] > 64:
        raise d.refuse(ins, f"this form of {ins.parts[0]} is not known")
    width = WIDTH[t]
    get = address_of(d, ins, args[1 if returns else 0])
    kind = "f" if t in ("f32", "f64") else "b"
    operand = args[2 if returns else 1]
    sources = [getter(d.src(ins, x, width, kind)) for x in (operand.items if isinstance(operand, Vec) else [operand])]
    swap = getter(d.src(ins, args[3 if returns else 2], width, kind)) if name == "cas" else None
    slots: list = [None] * len(sources)
    if returns:
        targets = args[0].items if isinstance(args[0], Vec) else [args[0]]
        slots = [None if isinstance(x, Sink) else d.dst(ins, x, width) for x in targets]
    if len(sources) != vector or len(slots) != vector:
        raise d.refuse(ins, f"this form of {ins.parts[0]} is not known")
    fn = operation(d, ins, name, t) if name != "cas" else None
    guard = d.guard(ins)
    u = UINT[width]
    size = width // 8
    model = f"atomic.{order}.{scope}"

    def atomic(g: Any) -> None:
        active = g.active(guard)
        if active is not None and not active.any():
            return
        mach = g.m
        mach.polled(g)
        base = get(g)
        for i, source in enumerate(sources):
            address = base + base.dtype.type(i * size) if i else base
            new = g.flat(full(source(g), g, u), active)
            other = g.flat(full(swap(g), g, u), active) if swap is not None else None
            old = _perform(g, ins, space, address, active, size, new, other, fn, model, u)
            if slots[i] is not None:
                out = np.zeros(g.shape, u)
                if active is None:
                    out = old.reshape(g.shape)
                else:
                    out[active] = old
                put_where(g, slots[i], out, active)

    return atomic


def _perform(
    g: Any,
    ins: Ins,
    space: str,
    address: np.ndarray,
    active: Any,
    size: int,
    new: np.ndarray,
    other: Any,
    fn: Any,
    model: str,
    u: Any,
) -> np.ndarray:
    """Run the operation on every active thread's cell in turn; returns the old values, flat."""
    m = g.m
    flat = g.flat(address, active)
    if space == "generic":
        region = (flat >> U64(REGION_BITS)).astype(np.int64)
        if (region == SHARED_ID).all():
            space, flat, address = "shared", flat & U64(0xFFFFFFFF), address & U64(0xFFFFFFFF)
        elif (region >= SHARED_ID).any() and not (region == region[0]).all():
            raise m.fault(
                "memory",
                "an atomic to both shared and global memory in one instruction is not modelled",
                ins,
                int(g.warps[0]),
                0,
            )
        elif (region == LOCAL_ID).any():
            raise m.fault("memory", "an atomic to local memory", ins, int(g.warps[0]), 0)
        else:
            space = "global"
    if space == "shared":
        position = shared_index(g, ins, flat, active, size, True)
        _count_shared(g, ins, address, active, size)
        if m.shared.marks is not None:
            check_written(g, ins, m.shared, "shared", position, size, active, m.shared.stride)
            m.shared.marks[size][position >> SHIFT[size]] = ONES[size]
        old, sequence = take_turns(m, m.shared.cells[size], position >> SHIFT[size], new, other, fn)
        if m.race is not None:
            m.race.shared_access(g, ins, position, active, size, True, model, sequence)
        return old
    flat = flat.astype(U64)
    parts = check_global(g, ins, flat, size, active, True)
    _count_global(g, ins, address, active, size, parts)
    old = np.empty(len(flat), u)
    sequences = []
    for allocation, selection in parts:
        cells, start = allocation.view(size)
        which = slice(None) if selection is None else selection
        index = ((flat[which] - U64(start)) >> U64(SHIFT[size])).view(np.int64)
        old[which], sequence = take_turns(m, cells, index, new[which], None if other is None else other[which], fn)
        sequences.append(sequence if selection is None else selection[sequence])
    if m.race is not None:
        m.race.global_access(g, ins, flat, parts, active, size, True, model, np.concatenate(sequences))
    return old


def take_turns(
    m: Any, cells: np.ndarray, index: np.ndarray, new: np.ndarray, other: np.ndarray | None, fn: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Apply `fn` (or compare-and-swap) cell by cell; each pass serves one thread of every distinct cell.

    Returns the old values, and the threads in the order in which they were served.
    """
    n = len(index)
    order = np.argsort(index, kind="stable") if m.rng is None else np.lexsort((m.rng.random(n), index))
    ordered = index[order]
    start = np.ones(n, bool)
    start[1:] = ordered[1:] != ordered[:-1]
    first = np.maximum.accumulate(np.where(start, np.arange(n), 0))
    rank = np.arange(n) - first
    old = np.empty(n, new.dtype)
    changed = False
    passes = np.argsort(rank, kind="stable")
    bounds = np.concatenate(([0], np.cumsum(np.bincount(rank))))
    for r in range(len(bounds) - 1):
        which = order[passes[bounds[r] : bounds[r + 1]]]
        at = index[which]
        before = cells[at]
        old[which] = before
        after = np.where(before == new[which], other[which], before) if other is not None else fn(before, new[which])
        changed |= bool((after != before).any())
        cells[at] = after
    if changed:
        m.progress()
    return old, order[passes]


__all__ = ["CELL", "WRITTEN"]
