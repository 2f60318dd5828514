"""From an instruction to a callable: operand access, modifiers, and the table of opcodes.

Every builder consumes all modifiers of its opcode; one that is left over is refused with the line it stands on, so
nothing is ever executed that was only half understood.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from .faults import UnsupportedPTX
from .syntax import SINT, UINT, WIDTH, Imm, Ins, Neg, Reg, Sink, Vec

# Width of every special register known.
TRIPLES = ["tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid"]
WORDS = [
    "laneid",
    "warpid",
    "nwarpid",
    "smid",
    "nsmid",
    "clock",
    "clock_hi",
    "lanemask_eq",
    "lanemask_le",
    "lanemask_lt",
    "lanemask_ge",
    "lanemask_gt",
    "dynamic_smem_size",
    "total_smem_size",
    "aggr_smem_size",
    "cluster_ctarank",
    "cluster_nctarank",
    "globaltimer_lo",
    "globaltimer_hi",
]
SPECIAL_WIDTH = {
    **{f"%{name}.{axis}": 32 for name in TRIPLES for axis in "xyz"},
    **{f"%{name}": 32 for name in WORDS},
    **dict.fromkeys(("%clock64", "%globaltimer", "%gridid"), 64),
    "%is_explicit_cluster": 1,
}

BUILDERS: dict[str, Callable] = {}


def op(*names: str) -> Callable:
    """Register the builder of one or more opcodes."""

    def register(builder: Callable) -> Callable:
        for name in names:
            BUILDERS[name] = builder
        return builder

    return register


class Mods:
    """The modifiers of an opcode, taken one by one."""

    def __init__(self, ins: Ins) -> None:
        self.ins = ins
        self.left = list(ins.parts[1:])

    def flag(self, name: str) -> bool:
        if name in self.left:
            self.left.remove(name)
            return True
        return False

    def choice(self, *names: str, default: str | None = None) -> str:
        for name in self.left:
            if name in names:
                self.left.remove(name)
                return name
        if default is None:
            raise UnsupportedPTX(f"{self.ins.op} lacks one of .{', .'.join(names)}", self.ins.line, self.ins.text)
        return default

    def drop(self, *names: str) -> None:
        """Take modifiers that change nothing the emulator models (cache hints, alignment promises)."""
        self.left = [m for m in self.left if m not in names]

    def type(self) -> str:
        """The last modifier, which must be a type."""
        if not self.left or self.left[-1] not in WIDTH:
            raise UnsupportedPTX(f"{self.ins.op} has no known type", self.ins.line, self.ins.text)
        return self.left.pop()

    def end(self) -> None:
        if self.left:
            raise UnsupportedPTX(f"{self.ins.op}: modifier .{self.left[0]} is not known", self.ins.line, self.ins.text)


def constant(imm: Imm, width: int, kind: str = "b") -> Any:
    """An immediate as a NumPy unsigned scalar of `width` bits; `kind` is the type's letter (f for floats)."""
    value = imm.value
    if width == 1:
        return np.bool_(value != 0)
    if isinstance(value, float):
        if kind != "f" or width not in (32, 64):
            value = int(value)
        else:
            code = "<f" if width == 32 else "<d"
            value = int.from_bytes(struct.pack(code, value), "little")
    elif imm.bits and imm.bits != width:
        if kind == "f" or imm.bits > width:
            single = imm.bits == 32
            number = struct.unpack("<f" if single else "<d", value.to_bytes(imm.bits // 8, "little"))[0]
            if width == 64:
                value = int.from_bytes(struct.pack("<d", number), "little")
            elif width == 32:
                value = int(np.float32(number).view(np.uint32))
            else:
                raise ValueError
        # A 32-bit pattern in a wider untyped operand is zero-extended.
    elif kind == "f" and not imm.bits and width in (32, 64) and isinstance(value, int):
        return UINT[width].type(
            int(np.float32(value).view(np.uint32)) if width == 32 else int(np.float64(value).view(np.uint64))
        )
    return UINT[width].type(value & ((1 << width) - 1))


class Decoder:
    """Builds the callables of one program."""

    def __init__(self, program: Any) -> None:
        self.program = program

    def refuse(self, ins: Ins, what: str) -> UnsupportedPTX:
        return UnsupportedPTX(what, ins.line, ins.text)

    def count(self, ins: Ins, least: int, most: int | None = None) -> None:
        most = least if most is None else most
        if not least <= len(ins.args) <= most:
            expected = str(least) if least == most else f"{least} to {most}"
            raise self.refuse(ins, f"{ins.op} takes {expected} operands, got {len(ins.args)}")

    # ---- operands

    def src(self, ins: Ins, operand: Any, width: int, kind: str = "b") -> Any:
        """An operand of `width` bits: an int (slot), a NumPy scalar (constant), or a callable of the group."""
        from .program import Address, Special

        if isinstance(operand, Reg):
            if operand.width == width:
                return operand.slot
            if operand.width > width > 1:
                slot, dtype = operand.slot, UINT[width]
                return lambda g: g.get(slot).astype(dtype)
            raise self.refuse(ins, f"{operand.name} has {operand.width} bits where {width} are read")
        if isinstance(operand, Imm):
            try:
                return constant(operand, width, kind)
            except (ValueError, OverflowError):
                raise self.refuse(ins, f"cannot read {operand!r} as {width} bits") from None
        if isinstance(operand, Neg):
            inner = self.src(ins, operand.reg, 1)
            if width != 1 or not isinstance(inner, int):
                raise self.refuse(ins, "'!' before an operand that is no predicate")
            return lambda g: ~g.get(inner)
        if isinstance(operand, Special):
            name, own = operand.name, SPECIAL_WIDTH[operand.name]
            if own == width:
                return lambda g: g.special(name)
            if 1 in (own, width):
                raise self.refuse(ins, f"{name} has {own} bits where {width} are read")
            dtype = UINT[width]
            return lambda g: g.special(name).astype(dtype)
        if isinstance(operand, Address):
            if width not in (32, 64):
                raise self.refuse(ins, f"the address {operand!r} in an operand of {width} bits")
            variable, offset, dtype = operand.variable, operand.offset, UINT[width]
            space = variable.space
            if space == "shared":
                return dtype.type(self.program.shared[variable] + offset)
            if variable in self.program.frame:
                return dtype.type(self.program.frame[variable] + offset)
            if space == "param":
                # An address in param space; cvta.param, or ld.param, adds where the parameters lie.
                return dtype.type(self.program.params[variable.name][0] + offset)
            name = variable.name
            return lambda g: dtype.type(g.m.symbols[name] + offset)
        raise self.refuse(ins, f"cannot use {operand!r} as a source")

    def dst(self, ins: Ins, operand: Any, width: int, wider: bool = False) -> int | None:
        """Slot of a destination of `width` bits; None for the sink."""
        if isinstance(operand, Sink):
            return None
        if not isinstance(operand, Reg):
            raise self.refuse(ins, f"cannot use {operand!r} as a destination")
        if operand.width != width and not (wider and operand.width > width):
            raise self.refuse(ins, f"{operand.name} has {operand.width} bits, the result {width}")
        return operand.slot

    def regs(self, ins: Ins, operand: Any, width: int, count: int | None = None) -> list[int]:
        """Slots of a vector of registers."""
        items = operand.items if isinstance(operand, Vec) else [operand]
        if count is not None and len(items) != count:
            raise self.refuse(ins, f"{len(items)} registers where {count} belong")
        out = []
        for item in items:
            if not isinstance(item, Reg) or item.width != width:
                raise self.refuse(ins, f"{item!r} is no register of {width} bits")
            out.append(item.slot)
        return out

    def guard(self, ins: Ins) -> tuple[int, bool] | None:
        return None if ins.guard is None else (ins.guard[0].slot, ins.guard[1])

    # ---- closures

    def alu(self, ins: Ins, fn: Callable, d: int | None, args: list, dtype: Any) -> Callable:
        """``d = fn(*args)`` in every active thread. `fn` returns a fresh array of `dtype`."""
        if d is None:
            return lambda g: None
        if not any(isinstance(a, int) for a in args):
            inner = fn
            dt = np.dtype(dtype)

            def fn(*values: Any, inner: Callable = inner) -> np.ndarray:
                raise AssertionError

            getters = [getter(a) for a in args]
            guard = self.guard(ins)

            def fill(g: Any) -> None:
                value = inner(*[get(g) for get in getters])
                array = np.empty(g.shape, dt)
                array[...] = value
                put(g, d, array, guard)

            return fill
        guard = self.guard(ins)
        if guard is None:
            if len(args) == 1:
                (a,) = args
                return lambda g: g.put(d, fn(g.get(a)))
            if len(args) == 2:
                a, b = args
                if isinstance(a, int) and isinstance(b, int):
                    return lambda g: g.put(d, fn(g.get(a), g.get(b)))
                if isinstance(a, int) and not callable(b):
                    return lambda g: g.put(d, fn(g.get(a), b))
            if len(args) == 3 and all(isinstance(x, int) for x in args):
                a, b, c = args
                return lambda g: g.put(d, fn(g.get(a), g.get(b), g.get(c)))
            getters = [getter(a) for a in args]
            if len(args) == 2:
                ga, gb = getters
                return lambda g: g.put(d, fn(ga(g), gb(g)))
            if len(args) == 3:
                ga, gb, gc = getters
                return lambda g: g.put(d, fn(ga(g), gb(g), gc(g)))
            return lambda g: g.put(d, fn(*[get(g) for get in getters]))
        getters = [getter(a) for a in args]
        slot, negated = guard

        def guarded(g: Any) -> None:
            value = fn(*[get(g) for get in getters])
            p = g.get(slot)
            g.put(d, np.where(p, g.get(d), value) if negated else np.where(p, value, g.get(d)))

        return guarded


def getter(arg: Any) -> Callable:
    """A callable of the group for any form that `Decoder.src` returns."""
    if isinstance(arg, int):
        return lambda g: g.get(arg)
    if callable(arg):
        return arg
    return lambda g: arg


def full(value: Any, g: Any, dtype: Any = None) -> np.ndarray:
    """`value` as an array over the group's threads."""
    if isinstance(value, np.ndarray) and value.shape == g.shape:
        return value
    array = np.empty(g.shape, dtype if dtype is not None else np.asarray(value).dtype)
    array[...] = value
    return array


def put(g: Any, d: int | None, value: np.ndarray, guard: tuple[int, bool] | None) -> None:
    """Write a result under the instruction's guard."""
    if d is None:
        return
    if guard is not None:
        p = g.get(guard[0])
        value = np.where(p, g.get(d), value) if guard[1] else np.where(p, value, g.get(d))
    g.put(d, value)


def put_where(g: Any, d: int | None, value: np.ndarray, active: np.ndarray | None) -> None:
    """Write a result in the threads of `active` (None: all of the group)."""
    if d is None:
        return
    g.put(d, value if active is None else np.where(active, value, g.get(d)))


def extend(value: np.ndarray, kind: str, width: int) -> np.ndarray:
    """Unsigned values of a narrow type to `width` bits: sign-extended for kind 's', else zero-extended."""
    have = value.dtype.itemsize * 8
    if have == width:
        return value
    if kind == "s":
        return value.view(SINT[have]).astype(SINT[width]).view(UINT[width])
    return value.astype(UINT[width])


def build_all(program: Any) -> list[Callable]:
    """The callables of every instruction of a program; an unknown one is refused here, before anything runs."""
    from . import load_all

    load_all()
    decoder = Decoder(program)
    out = []
    for ins in program.code:
        builder = BUILDERS.get(ins.parts[0])
        if builder is None:
            raise UnsupportedPTX(f"instruction {ins.parts[0]} is not known to the emulator", ins.line, ins.text)
        out.append(builder(decoder, ins))
    return out
