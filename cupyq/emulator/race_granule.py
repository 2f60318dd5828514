"""How finely memory must be watched: the shortest access that a program makes to it."""

from __future__ import annotations

from typing import Any

from .syntax import WIDTH, Ins


def access_bytes(ins: Ins) -> int | None:
    """Bytes of the shortest granule an instruction touches, or None where it touches no memory."""
    base = ins.parts[0]
    if base in ("ldmatrix", "stmatrix"):
        return 16
    if base == "cp":
        return 4
    if base in ("ld", "st", "atom", "red", "ldu") and ins.parts[-1] in WIDTH:
        return max(WIDTH[ins.parts[-1]] // 8, 1)
    if base in ("mbarrier", "wgmma"):
        return 8
    return None


def granule(program: Any, shared: bool) -> int:
    """The shortest access of a program to shared, or to global, memory: 1, 2 or 4 bytes."""
    least = 4
    for ins in program.code:
        size = access_bytes(ins)
        if size is None or "param" in ins.parts or "local" in ins.parts:
            continue
        names_shared = any(p.startswith("shared") for p in ins.parts)
        names_global = "global" in ins.parts or "const" in ins.parts
        if (shared and names_global and not names_shared) or (not shared and names_shared and not names_global):
            continue
        least = min(least, size)
    return least
