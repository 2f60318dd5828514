"""ldmatrix, stmatrix and movmatrix: 8x8 tiles between shared memory and fragments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .decode import Decoder, Mods, full, getter, op, put_where
from .group import PARK
from .memory import CELL
from .ops_memory import address_of, load_cells, store_cells
from .syntax import Ins

U32 = np.uint32


@op("ldmatrix", "stmatrix")
def _matrix(d: Decoder, ins: Ins) -> Callable:
    """8x8 tiles of 16-bit elements: lanes 8i..8i+7 name the rows of tile i; lane l has 2(l%4) and +1 of row l/4."""
    m = Mods(ins)
    m.drop("sync", "aligned", "shared", "shared::cta")
    tiles = int(m.choice("x1", "x2", "x4")[1])
    trans = m.flag("trans")
    m.drop("m8n8", "b16")
    m.end()
    loads = ins.parts[0] == "ldmatrix"
    d.count(ins, 2)
    slots = d.regs(ins, ins.args[0] if loads else ins.args[1], 32, tiles)
    get = address_of(d, ins, ins.args[1] if loads else ins.args[0])
    if ins.guard is not None:
        guard = d.guard(ins)
    else:
        guard = None
    lanes = np.zeros(32, bool)
    lanes[: tiles * 8] = True

    def tile_mask(g: Any) -> np.ndarray | None:
        return None if tiles == 4 else np.broadcast_to(lanes, g.shape)

    def check(g: Any) -> Any:
        active = g.active(guard)
        if not g.converged(ins, None, active):
            return PARK
        return active

    def skip(g: Any, active: Any) -> tuple[Any, Any]:
        """Warps whose guard is false everywhere do nothing."""
        rows = tile_mask(g)
        if active is None:
            return rows, None
        whole = active.any(1)
        return (np.broadcast_to(whole[:, None], g.shape) if rows is None else rows & whole[:, None]), active

    def load(g: Any) -> Any:
        active = check(g)
        if active is PARK:
            return PARK
        rows, keep = skip(g, active)
        cells = load_cells(g, ins, "shared", get(g), rows, 16)
        halves = cells.view(np.uint16).reshape(g.n, 4, 8, 8)
        if trans:
            halves = np.ascontiguousarray(halves.transpose(0, 1, 3, 2))
        words = halves.view(U32).reshape(g.n, 4, 32)
        for i, slot in enumerate(slots):
            put_where(g, slot, np.ascontiguousarray(words[:, i]), keep)
        return None

    def store(g: Any) -> Any:
        active = check(g)
        if active is PARK:
            return PARK
        rows, _ = skip(g, active)
        words = np.zeros((g.n, 4, 32), U32)
        for i, slot in enumerate(slots):
            words[:, i] = g.get(slot)
        halves = words.view(np.uint16).reshape(g.n, 4, 8, 8)
        if trans:
            halves = np.ascontiguousarray(halves.transpose(0, 1, 3, 2))
        store_cells(g, ins, "shared", get(g), rows, halves.reshape(g.n, 256).view(CELL[16]))
        return None

    return load if loads else store


@op("movmatrix")
def _movmatrix(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    m.drop("sync", "aligned", "m8n8", "trans", "b16")
    m.end()
    d.count(ins, 2)
    a = d.src(ins, ins.args[1], 32)
    slot = d.dst(ins, ins.args[0], 32)
    get = getter(a)

    def move(g: Any) -> Any:
        if not g.converged(ins):
            return PARK
        halves = full(get(g), g, U32).view(np.uint16).reshape(g.n, 8, 8)
        put_where(g, slot, np.ascontiguousarray(halves.transpose(0, 2, 1)).reshape(g.n, 64).view(U32), None)
        return None

    return move
