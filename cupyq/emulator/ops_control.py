"""Branches, exits, barriers of a CTA or a warp, fences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .decode import Decoder, Mods, full, getter, op, put_where
from .group import PARK
from .machine import BLOCKED, Exit, Goto
from .syntax import Imm, Ins, Neg, Reg

U32 = np.uint32


@op("bra")
def _bra(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    m.drop("uni")
    m.end()
    d.count(ins, 1)
    target = ins.args[0].index
    after = ins.index + 1
    guard = d.guard(ins)
    if guard is None:
        return lambda g: target
    slot, negated = guard

    def branch(g: Any) -> Any:
        p = g.get(slot)
        taken = ~p if negated else p
        if g.mask is None:
            if taken.all():
                return target
            if not taken.any():
                return after
        else:
            inside = taken & g.mask
            if not inside.any():
                return after
            if (inside == g.mask).all():
                return target
        return Goto(np.where(taken, np.int32(target), np.int32(after)))

    return branch


@op("brx")
def _brx(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    m.drop("idx", "uni")
    m.end()
    d.count(ins, 2)
    labels = ins.args[1]
    if not isinstance(labels, list):
        raise d.refuse(ins, "brx needs a .branchtargets list")
    targets = np.array([label.index for label in labels], np.int32)
    get = getter(d.src(ins, ins.args[0], 32))
    guard = d.guard(ins)

    def branch(g: Any) -> Any:
        index = full(get(g), g, U32)
        active = g.active(guard)
        bad = index >= len(targets) if active is None else (index >= len(targets)) & active
        if bad.any():
            row, lane = (int(x[0]) for x in np.nonzero(bad))
            raise g.m.fault(
                "trap",
                f"brx.idx with index {int(index[row, lane])} of {len(targets)} targets",
                ins,
                int(g.warps[row]),
                lane,
            )
        pcs = targets[np.minimum(index, len(targets) - 1)]
        return Goto(pcs if active is None else np.where(active, pcs, np.int32(ins.index + 1)))

    return branch


@op("ret", "exit")
def _exit(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    m.drop("uni")
    m.end()
    guard = d.guard(ins)
    if guard is None:
        return lambda g: Exit(None)

    def leave(g: Any) -> Any:
        active = g.active(guard)
        if active is None:
            return Exit(None)
        return Exit(active) if active.any() else None

    return leave


@op("trap", "brkpt")
def _trap(d: Decoder, ins: Ins) -> Callable:
    guard = d.guard(ins)

    def trap(g: Any) -> None:
        active = g.active(guard)
        if active is None or active.any():
            row, lane = (0, 0) if active is None else (int(x[0]) for x in np.nonzero(active))
            raise g.m.fault(
                "trap", "the kernel trapped" if ins.parts[0] == "trap" else "breakpoint", ins, int(g.warps[row]), lane
            )

    return trap


@op("nanosleep", "pmevent")
def _nothing(d: Decoder, ins: Ins) -> Callable:
    return lambda g: None


@op("membar", "fence")
def _fence(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    known = [
        "cta",
        "gl",
        "sys",
        "gpu",
        "cluster",
        "sc",
        "acq_rel",
        "acquire",
        "release",
        "proxy",
        "alias",
        "async",
        "async::generic",
        "tensormap::generic",
        "async.global",
        "global",
        "shared::cta",
        "shared::cluster",
        "async.shared::cta",
        "mbarrier_init",
        "async::bulk",
        "sync_restrict::shared::cta",
        "sync_restrict::shared::cluster",
    ]
    unknown = [p for p in m.left if p not in known]
    if unknown:
        raise d.refuse(ins, f"{ins.op}: modifier .{unknown[0]} is not known")
    scope = "cta" if "cta" in m.left else "cluster" if "cluster" in m.left else "gpu"
    proxy = "proxy" in m.left
    guard = d.guard(ins)

    def fence(g: Any) -> None:
        race = g.m.race
        if race is not None:
            if proxy:
                race.proxy_fence(g, ins, g.active(guard))
            else:
                race.fence(g, g.active(guard), scope)

    return fence


@op("bar", "barrier")
def _bar(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    if m.flag("cluster"):
        from .ops_cluster import cluster_barrier

        return cluster_barrier(d, ins, m)
    m.drop("cta")
    if m.flag("warp"):
        return _bar_warp(d, ins, m)
    m.flag("aligned")
    kind = m.choice("sync", "arrive", "red")
    if kind == "red":
        return _bar_red(d, ins, m)
    m.end()
    d.count(ins, 1, 2)
    guard = d.guard(ins)
    identity = d.src(ins, ins.args[0], 32)
    count = d.src(ins, ins.args[1], 32) if len(ins.args) > 1 else None
    if kind == "arrive" and count is None:
        raise d.refuse(ins, "bar.arrive needs a count of threads")
    wait = kind == "sync"
    aligned = ins.parts[0] == "bar" or "aligned" in ins.parts

    def barrier(g: Any) -> Any:
        active = g.active(guard)
        if active is not None and guard is not None:
            if not active.any():
                return None
            part = active.any(1) & ~((active | ~g.live()).all(1))
            if part.any() and aligned:
                row = int(part.argmax())
                raise g.m.fault(
                    "sync",
                    f"{ins.parts[0]}.{kind} is executed by {int(active[row].sum())} lanes of a warp only",
                    ins,
                    int(g.warps[row]),
                    int(active[row].argmax()),
                )
            raise g.m.fault("sync", "a guarded barrier that some warps skip is not modelled", ins, int(g.warps[0]), 0)
        if aligned and not g.converged(ins):
            return PARK
        return g.m.barrier(g, ins, _value(identity, g), None if count is None else _value(count, g), wait)

    return barrier


def _value(arg: Any, g: Any) -> Any:
    """A barrier operand: one number, or one for each warp."""
    if isinstance(arg, int):
        value = g.get(arg)
    elif callable(arg):
        value = full(arg(g), g, U32)
    else:
        return int(arg)
    per_warp = value[:, 0] if g.mask is None else value[np.arange(g.n), g.mask.argmax(1)]
    if (per_warp == per_warp[0]).all():
        return int(per_warp[0])
    return per_warp


def _bar_red(d: Decoder, ins: Ins, m: Mods) -> Callable:
    """Barrier with a reduction of a predicate over its threads."""
    t = m.type()
    kind = m.choice("popc", "and", "or")
    m.flag("aligned")
    m.end()
    d.count(ins, 3, 4)
    slot = d.dst(ins, ins.args[0], 1 if t == "pred" else 32)
    identity = d.src(ins, ins.args[1], 32)
    count = d.src(ins, ins.args[2], 32) if len(ins.args) == 4 else None
    last = ins.args[-1]
    if not isinstance(last, (Reg, Neg)):
        raise d.refuse(ins, "the last operand is no predicate")
    get = getter(d.src(ins, last, 1))

    def barrier(g: Any) -> Any:
        if not g.converged(ins):
            return PARK
        value = np.ascontiguousarray(full(get(g), g, bool))
        return g.m.barrier(
            g, ins, _value(identity, g), None if count is None else _value(count, g), True, (value, slot, kind, None)
        )

    return barrier


def _bar_warp(d: Decoder, ins: Ins, m: Mods) -> Callable:
    m.drop("sync")
    m.end()
    d.count(ins, 1)
    named = member_mask(d, ins, ins.args[0])

    def sync(g: Any) -> Any:
        if g.mask is None and named is None:
            return None
        lanes = None if named is None else named(g)
        if not check_members(g, ins, lanes, None):
            return PARK
        return None

    return sync


def member_mask(d: Decoder, ins: Ins, operand: Any) -> Callable | None:
    """The lanes a membermask operand names, as (n, 32) bool; None for the constant of all lanes."""
    if isinstance(operand, Imm) and (int(operand.value) & 0xFFFFFFFF) == 0xFFFFFFFF:
        return None
    get = getter(d.src(ins, operand, 32))
    lanes = np.arange(32, dtype=U32)

    def named(g: Any) -> np.ndarray:
        value = full(get(g), g, U32)
        return (
            (value >> lanes & U32(1)).astype(bool)
            if g.mask is None
            else (_own_mask(value, g) >> lanes & U32(1)).astype(bool)
        )

    return named


def _own_mask(value: np.ndarray, g: Any) -> np.ndarray:
    """Each warp's mask as its first executing lane holds it (lanes of one warp may run with masks of their own)."""
    lead = value[np.arange(g.n), g.mask.argmax(1)][:, None]
    same = (value == lead) | ~g.mask
    return np.where(same, lead, value)


def check_members(g: Any, ins: Ins, named: np.ndarray | None, active: np.ndarray | None) -> bool:
    """The sync check of a member mask, then the wait for the lanes it names. False: parked."""
    acting = active if active is not None else g.mask
    if named is None and acting is None:
        return True
    if named is not None and "sync" in g.m.checks:
        absent = ~named if acting is None else acting & ~named
        if absent.any():
            row, lane = (int(x[0]) for x in np.nonzero(absent))
            raise g.m.fault(
                "sync",
                f"{ins.parts[0]}.sync by a lane that its member mask does not name",
                ins,
                int(g.warps[row]),
                lane,
            )
    if acting is None:
        return True
    need = g.live() if named is None else g.live() & named
    missing = (need & ~acting).any(1) & acting.any(1)
    if not missing.any():
        return True
    if active is not None and (g.mask is None or not (need & ~g.mask & missing[:, None]).any()):
        if "sync" in g.m.checks:
            row = int(missing.argmax())
            raise g.m.fault(
                "sync",
                f"{ins.parts[0]}.sync names lanes that its guard keeps away",
                ins,
                int(g.warps[row]),
                int(acting[row].argmax()),
            )
        return True
    g.m.park(g, missing, ins.index)
    return False


@op("griddepcontrol")
def _griddep(d: Decoder, ins: Ins) -> Callable:
    """Dependent launches: the launch before has always finished here."""
    m = Mods(ins)
    m.choice("launch_dependents", "wait")
    m.end()
    return lambda g: None


@op("setmaxnreg")
def _setmaxnreg(d: Decoder, ins: Ins) -> Callable:
    m = Mods(ins)
    m.choice("inc", "dec")
    m.drop("sync", "aligned")
    m.type()
    m.end()
    d.count(ins, 1)
    if not isinstance(ins.args[0], Imm) or not 24 <= ins.args[0].value <= 256 or ins.args[0].value % 8:
        raise d.refuse(ins, "setmaxnreg takes a multiple of 8 from 24 to 256")

    def run(g: Any) -> Any:
        return None if g.converged(ins) else PARK

    return run


__all__ = ["BLOCKED", "check_members", "member_mask", "put_where"]
