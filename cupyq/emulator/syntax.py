"""The pieces PTX statements are made of: operands, registers, scopes, instructions."""

from __future__ import annotations

from typing import Any

import numpy as np

# Width in bits of every type an operand may have. Packed pairs count as one register of 32 bits.
WIDTH = {
    "pred": 1,
    **{f"{kind}{bits}": bits for kind in "bus" for bits in (8, 16, 32, 64)},
    "b128": 128,
    "f16": 16,
    "bf16": 16,
    "f16x2": 32,
    "bf16x2": 32,
    "s16x2": 32,
    "u16x2": 32,
    "f32": 32,
    "tf32": 32,
    "f64": 64,
    "f32x2": 64,
    "e4m3": 8,
    "e5m2": 8,
    "e4m3x2": 16,
    "e5m2x2": 16,
}
UINT = {
    1: np.dtype(bool),
    8: np.dtype(np.uint8),
    16: np.dtype(np.uint16),
    32: np.dtype(np.uint32),
    64: np.dtype(np.uint64),
}
SINT = {8: np.dtype(np.int8), 16: np.dtype(np.int16), 32: np.dtype(np.int32), 64: np.dtype(np.int64)}


class Reg:
    """One virtual register of one thread; `slot` is where the machine keeps it."""

    __slots__ = ("name", "slot", "uid", "width")
    count = 0

    def __init__(self, name: str, width: int) -> None:
        self.name, self.width, self.slot = name, width, -1
        Reg.count += 1
        self.uid = Reg.count

    def __repr__(self) -> str:
        return self.name


class Imm:
    """A literal: `value` is an int or a decimal float; `bits` is 32 or 64 where it was written as 0f... or 0d..."""

    __slots__ = ("bits", "value")

    def __init__(self, value: int | float, bits: int = 0) -> None:
        self.value, self.bits = value, bits

    def __repr__(self) -> str:
        return repr(self.value)


class Sym:
    """The address of a variable, or a label, or a special register: a bare name."""

    __slots__ = ("name", "offset", "scope")

    def __init__(self, name: str, offset: int = 0, scope: Any = None) -> None:
        self.name, self.offset, self.scope = name, offset, scope

    def __repr__(self) -> str:
        return self.name + (f"+{self.offset}" if self.offset else "")


class Mem:
    """An address in square brackets: base + offset, and the coordinates that tensor copies add."""

    __slots__ = ("base", "coords", "offset")

    def __init__(self, base: Any, offset: int, coords: list | None = None) -> None:
        self.base, self.offset, self.coords = base, offset, coords

    def __repr__(self) -> str:
        return f"[{self.base!r}+{self.offset}]"


class Vec:
    """Several registers in braces."""

    __slots__ = ("items",)

    def __init__(self, items: list) -> None:
        self.items = items

    def __repr__(self) -> str:
        return "{" + ", ".join(map(repr, self.items)) + "}"


class Pair:
    """Two destinations joined by a bar: ``d|p``."""

    __slots__ = ("first", "second")

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


class Neg:
    """A predicate taken negated: ``!p``."""

    __slots__ = ("reg",)

    def __init__(self, reg: Any) -> None:
        self.reg = reg


class Sink:
    """The destination ``_``: the result is thrown away."""

    __slots__ = ()


SINK = Sink()


class Ins:
    """One instruction. `parts` is the opcode split at its dots; `guard` is (Reg, negated) or None."""

    __slots__ = ("args", "guard", "index", "line", "loc", "op", "parts", "scope", "text")

    def __init__(self, op: str, guard: Any, args: list, line: int, text: str, loc: Any, scope: Any) -> None:
        self.op, self.guard, self.args, self.line, self.text, self.loc, self.scope = (
            op,
            guard,
            args,
            line,
            text,
            loc,
            scope,
        )
        self.parts = tuple(op.split("."))
        self.index = -1

    def __repr__(self) -> str:
        return self.text


class Scope:
    """The names one pair of braces declares."""

    __slots__ = ("labels", "names", "parent", "ranges", "tables")

    def __init__(self, parent: Scope | None = None) -> None:
        self.parent = parent
        self.names: dict[str, Any] = {}
        self.ranges: dict[str, tuple[int, int]] = {}
        self.labels: dict[str, int] = {}
        self.tables: dict[str, list[str]] = {}


class Variable:
    """A variable in memory: `space` is shared, global, const, local or param."""

    __slots__ = ("align", "extern", "init", "line", "name", "size", "space")

    def __init__(
        self, name: str, space: str, size: int, align: int, init: Any = None, line: int = 0, extern: bool = False
    ):
        self.name, self.space, self.size, self.align, self.init, self.line = name, space, size, align, init, line
        self.extern = extern
