"""One entry of a module made ready to run: calls expanded, labels resolved, registers given slots, opcodes bound.

Registers of PTX are in single-assignment form and count in the thousands. Each slot is an array over every thread of
a wave, so slots are shared by registers that are never live together (a linear scan over live intervals).
"""

from __future__ import annotations

from typing import Any

from . import decode
from .faults import UnsupportedPTX
from .parser import Function, Module
from .syntax import Imm, Ins, Mem, Neg, Pair, Reg, Sink, Sym, Variable, Vec

# Opcodes whose first operand is no destination.
NO_DESTINATION = frozenset(
    [
        "st",
        "red",
        "bar",
        "barrier",
        "membar",
        "fence",
        "cp",
        "bra",
        "brx",
        "ret",
        "exit",
        "trap",
        "brkpt",
        "prefetch",
        "prefetchu",
        "setmaxnreg",
        "griddepcontrol",
        "stmatrix",
        "discard",
        "applypriority",
        "nanosleep",
        "call",
        "pmevent",
        "tensormap",
        "wgmma",
        "mbarrier",
        "multimem",
    ]
)
CONTROL = frozenset(("bra", "brx", "ret", "exit", "trap"))
MAX_INLINE = 200_000  # instructions after expanding calls


class Special:
    """A special register such as ``%tid.x`` used as an operand."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


class Address:
    """The address of a variable plus a constant."""

    __slots__ = ("offset", "variable")

    def __init__(self, variable: Variable, offset: int) -> None:
        self.variable, self.offset = variable, offset

    def __repr__(self) -> str:
        return f"{self.variable.name}+{self.offset}"


class Label:
    """A branch target: the index of an instruction."""

    __slots__ = ("index", "name")

    def __init__(self, name: str) -> None:
        self.name, self.index = name, -1


def destinations(ins: Ins) -> tuple[list[Reg], bool]:
    """Registers that the instruction writes, and whether its first operand is also read."""
    base = ins.parts[0]
    if not ins.args:
        return [], True
    first = ins.args[0]
    if base == "mbarrier":
        if ins.parts[1] in ("arrive", "arrive_drop", "test_wait", "try_wait", "pending_count") and not isinstance(
            first, Mem
        ):
            return _registers(first), False
        return [], True
    if base in ("bar", "barrier") and "red" in ins.parts:
        return _registers(first), False
    if base == "wgmma":
        return (_registers(first), True) if ins.parts[1] == "mma_async" else ([], True)
    if base in NO_DESTINATION:
        return [], True
    if isinstance(first, (Mem, Imm)):
        return [], True
    return _registers(first), False


def _registers(operand: Any) -> list[Reg]:
    if isinstance(operand, Reg):
        return [operand]
    if isinstance(operand, Vec):
        return [r for item in operand.items for r in _registers(item)]
    if isinstance(operand, Pair):
        return _registers(operand.first) + _registers(operand.second)
    if isinstance(operand, Neg):
        return _registers(operand.reg)
    if isinstance(operand, Mem):
        regs = _registers(operand.base)
        for coordinate in operand.coords or ():
            regs += _registers(coordinate)
        return regs
    return []


class Program:
    """An entry, ready to launch.

    Attributes
    ----------
    code : list of Ins
        Instructions in order, calls expanded.
    ops : list of callables
        ``ops[i](group)`` executes ``code[i]``.
    slots : list of int
        Width in bits of each register slot.
    """

    def __init__(self, module: Module, entry: str) -> None:
        function = module.functions.get(entry)
        if function is None or function.kind != "entry" or not function.defined:
            names = sorted(n for n, f in module.functions.items() if f.kind == "entry" and f.defined)
            raise UnsupportedPTX(f"no entry {entry!r}; this PTX has {', '.join(names) or 'none'}")
        self.module, self.entry, self.function = module, entry, function
        self.target = module.target
        digits = "".join(c for c in self.target if c.isdigit())
        self.arch = int(digits) if digits else 0
        self.code: list[Ins] = []
        self.params: dict[str, tuple[int, int]] = {}
        self.param_bytes = 0
        self.frame_bytes = 0
        self.frame: dict[Variable, int] = {}
        self.shared: dict[Variable, int] = {}
        self.dynamic: list[Variable] = []
        self.device: dict[str, Variable] = {}
        self._pending: list[tuple[Label, list[int], Any]] = []
        self._lay_out_parameters()
        self._expand(function, {}, {}, ())
        for label, where, index in self._pending:
            label.index = where[index] if index < len(where) else len(self.code)
        end = Ins(
            "exit",
            None,
            [],
            self.code[-1].line if self.code else function.line,
            "(end of the entry)",
            None,
            function.scope,
        )
        self.code.append(end)
        for index, ins in enumerate(self.code):
            ins.index = index
        self._place_shared()
        self._find_blocks()
        self._allocate()
        self.specials: dict[str, int] = {}
        self.smallest_access: dict[str, int] = {}
        self.ops = decode.build_all(self)
        self._segments: dict[int, tuple] = {}

    # ---- linking

    def _lay_out_parameters(self) -> None:
        offset = 0
        for variable in self.function.params:
            offset = -(-offset // variable.align) * variable.align
            self.params[variable.name] = (offset, variable.size)
            offset += variable.size
        self.param_bytes = offset

    def _expand(self, function: Function, registers: dict, variables: dict, stack: tuple[str, ...]) -> None:
        """Append the body of `function`; names of `variables` stand for the caller's parameters."""
        if function.name in stack:
            raise UnsupportedPTX(f"recursive call of {function.name}", function.line)
        stack = (*stack, function.name)
        where: list[int] = []
        inlined = len(stack) > 1
        exits: list[Label] = []
        for ins in function.body:
            where.append(len(self.code))
            if len(self.code) > MAX_INLINE:
                raise UnsupportedPTX(f"more than {MAX_INLINE} instructions after expanding calls", ins.line)
            base = ins.parts[0]
            if base == "call":
                self._call(ins, registers, variables, stack, inlined)
                continue
            guard = ins.guard
            if guard is not None and inlined:
                guard = (self._fresh(guard[0], registers), guard[1])
            if base == "ret" and inlined:
                label = Label("return")
                exits.append(label)
                self.code.append(Ins("bra", guard, [label], ins.line, ins.text, ins.loc, ins.scope))
                continue
            args = [self._resolve(a, ins, where, registers, variables, inlined) for a in ins.args]
            self.code.append(Ins(ins.op, guard, args, ins.line, ins.text, ins.loc, ins.scope))
        # A label may stand at the very end of the body.
        where.append(len(self.code))
        for label in exits:
            self._pending.append((label, [len(self.code)], 0))

    def _call(self, ins: Ins, registers: dict, variables: dict, stack: tuple[str, ...], inlined: bool) -> None:
        vectors = [a for a in ins.args if isinstance(a, Vec)]
        names = [a for a in ins.args if isinstance(a, Sym)]
        if len(names) != 1 or any(p not in ("call", "uni") for p in ins.parts):
            raise UnsupportedPTX("this form of call is not known", ins.line, ins.text)
        callee = self.module.functions.get(names[0].name)
        if names[0].name == "__assertfail":
            guard = ins.guard and (self._fresh(ins.guard[0], registers) if inlined else ins.guard[0], ins.guard[1])
            self.code.append(Ins("trap", guard, [], ins.line, ins.text, ins.loc, ins.scope))
            return
        if callee is None or not callee.defined:
            raise UnsupportedPTX(f"call of {names[0].name}, which has no body here", ins.line, ins.text)
        returns = vectors[0].items if callee.returns else []
        passed = (
            (vectors[1].items if len(vectors) > 1 else []) if callee.returns else (vectors[0].items if vectors else [])
        )
        if len(returns) != len(callee.returns) or len(passed) != len(callee.params):
            raise UnsupportedPTX("the call does not fit the function's parameters", ins.line, ins.text)
        inner: dict = {}
        for formal, actual in zip(callee.returns + callee.params, list(returns) + list(passed), strict=True):
            if not isinstance(actual, Sym):
                raise UnsupportedPTX("call with registers as arguments is not known", ins.line, ins.text)
            inner[formal] = self._instance(self._find(actual, ins), variables)
        skip = None
        if ins.guard is not None:
            reg = self._fresh(ins.guard[0], registers) if inlined else ins.guard[0]
            skip = Label("after call")
            self.code.append(Ins("bra", (reg, not ins.guard[1]), [skip], ins.line, ins.text, ins.loc, ins.scope))
        self._expand(callee, {}, inner, stack)
        if skip is not None:
            self._pending.append((skip, [len(self.code)], 0))

    @staticmethod
    def _fresh(reg: Reg, registers: dict) -> Reg:
        found = registers.get(reg)
        if found is None:
            found = registers[reg] = Reg(reg.name, reg.width)
        return found

    @staticmethod
    def _instance(variable: Variable, variables: dict) -> Variable:
        """The copy of a function's local or param variable that belongs to this expansion."""
        if variable.space not in ("local", "param"):
            return variable
        found = variables.get(variable)
        if found is None:
            found = variables[variable] = Variable(variable.name, variable.space, variable.size, variable.align)
        return found

    def _find(self, symbol: Sym, ins: Ins) -> Variable:
        scope = symbol.scope
        while scope is not None:
            found = scope.names.get(symbol.name)
            if isinstance(found, Variable):
                return found
            scope = scope.parent
        found = self.module.variables.get(symbol.name)
        if found is None:
            raise UnsupportedPTX(f"{symbol.name} is not declared", ins.line, ins.text)
        return found

    def _resolve(self, arg: Any, ins: Ins, where: list[int], registers: dict, variables: dict, inlined: bool) -> Any:
        kind = type(arg)
        if kind is Reg:
            return self._fresh(arg, registers) if inlined else arg
        if kind is Imm or kind is Sink:
            return arg
        if kind is Mem:
            coords = arg.coords and [self._resolve(c, ins, where, registers, variables, inlined) for c in arg.coords]
            return Mem(self._resolve(arg.base, ins, where, registers, variables, inlined), arg.offset, coords)
        if kind is Vec:
            return Vec([self._resolve(a, ins, where, registers, variables, inlined) for a in arg.items])
        if kind is Pair:
            return Pair(*(self._resolve(a, ins, where, registers, variables, inlined) for a in (arg.first, arg.second)))
        if kind is Neg:
            return Neg(self._resolve(arg.reg, ins, where, registers, variables, inlined))
        if kind is Sym:
            return self._symbol(arg, ins, where, variables)
        raise UnsupportedPTX(f"cannot read the operand {arg!r}", ins.line, ins.text)

    def _symbol(self, arg: Sym, ins: Ins, where: list[int], variables: dict) -> Any:
        if ins.parts[0] in ("bra", "brx"):
            scope = arg.scope
            while scope is not None:
                if arg.name in scope.labels:
                    label = Label(arg.name)
                    self._pending.append((label, where, scope.labels[arg.name]))
                    return label
                if arg.name in scope.tables:
                    labels = []
                    for name in scope.tables[arg.name]:
                        labels.append(self._symbol(Sym(name, 0, arg.scope), ins, where, variables))
                    return labels
                scope = scope.parent
            raise UnsupportedPTX(f"no label {arg.name}", ins.line, ins.text)
        if arg.name[0] == "%":
            if arg.name in decode.SPECIAL_WIDTH:
                return Special(arg.name)
            raise UnsupportedPTX(f"{arg.name} is not declared, and no special register known", ins.line, ins.text)
        if arg.name == "WARP_SZ":
            return Imm(32)
        variable = self._find(arg, ins)
        if variable.space == "param" and variable.name in self.params and variable in self.function.params:
            return Address(variable, arg.offset)
        variable = self._instance(variable, variables)
        if variable.space in ("local", "param"):
            if variable not in self.frame:
                at = -(-self.frame_bytes // variable.align) * variable.align
                self.frame[variable] = at
                self.frame_bytes = at + variable.size
        elif variable.space == "shared":
            self.shared.setdefault(variable, -1)
        else:
            self._reach(variable)
        return Address(variable, arg.offset)

    def _reach(self, variable: Variable) -> None:
        if variable.name in self.device:
            return
        self.device[variable.name] = variable
        for _, value in variable.init or ():
            if isinstance(value, Sym):
                target = self.module.variables.get(value.name)
                if target is None:
                    raise UnsupportedPTX(f"initializer names {value.name}, which is not declared", variable.line)
                if target.space in ("global", "const"):
                    self._reach(target)

    def _place_shared(self) -> None:
        """Static variables first, then the dynamic part; sm_90 and later keep the first KiB for themselves."""
        at = 1024 if self.arch >= 90 else 0
        self.shared_start = at
        for variable in self.shared:
            if variable.size:
                at = -(-at // variable.align) * variable.align
                self.shared[variable] = at
                at += variable.size
        self.static_shared = at - self.shared_start
        align = max([16] + [v.align for v in self.shared if not v.size])
        at = -(-at // align) * align
        self.dynamic_start = at
        for variable in self.shared:
            if not variable.size:
                self.shared[variable] = at
                self.dynamic.append(variable)

    # ---- control flow

    def _find_blocks(self) -> None:
        leaders = {0}
        for ins in self.code:
            base = ins.parts[0]
            if base in CONTROL:
                leaders.add(ins.index + 1)
            if base in ("bra", "brx"):
                for target in self._targets(ins):
                    leaders.add(target)
        self.leaders = sorted(x for x in leaders if x < len(self.code))
        starts = self.leaders
        self.block_end: dict[int, int] = dict(zip(starts, [*starts[1:], len(self.code)], strict=True))
        ends = [0] * len(self.code)
        for s, e in self.block_end.items():
            for i in range(s, e):
                ends[i] = e
        self.ends = ends

    @staticmethod
    def _targets(ins: Ins) -> list[int]:
        out = []
        for arg in ins.args:
            if isinstance(arg, Label):
                out.append(arg.index)
            elif isinstance(arg, list):
                out += [label.index for label in arg]
        return out

    def _successors(self, last: Ins) -> list[int]:
        base = last.parts[0]
        out = self._targets(last) if base in ("bra", "brx") else []
        falls = base not in ("ret", "exit", "bra", "brx") or last.guard is not None
        if falls and last.index + 1 < len(self.code):
            out.append(last.index + 1)
        return out

    def _allocate(self) -> None:
        """Liveness by backward data flow (sets as big integers), then slots by linear scan."""
        number: dict[Reg, int] = {}
        regs: list[Reg] = []
        effects: list[tuple[int, int]] = []
        for ins in self.code:
            written, first_read = destinations(ins)
            uses = 0
            for arg in ins.args if first_read else ins.args[1:]:
                for reg in _registers(arg):
                    if reg not in number:
                        number[reg] = len(regs)
                        regs.append(reg)
                    uses |= 1 << number[reg]
            if ins.guard is not None:
                reg = ins.guard[0]
                if reg not in number:
                    number[reg] = len(regs)
                    regs.append(reg)
                uses |= 1 << number[reg]
            kills = 0
            for reg in written:
                if reg not in number:
                    number[reg] = len(regs)
                    regs.append(reg)
                kills |= 1 << number[reg]
            # A guarded write leaves the old value in other threads: the register stays live across it.
            effects.append((uses, kills if ins.guard is None else -kills - 1 if kills else 0))
        use_def = {}
        for start, end in self.block_end.items():
            use = define = 0
            for i in range(start, end):
                uses, kills = effects[i]
                use |= uses & ~define
                if kills > 0:
                    define |= kills
            use_def[start] = (use, define)
        live_in = dict.fromkeys(self.block_end, 0)
        live_out = dict.fromkeys(self.block_end, 0)
        predecessors: dict[int, list[int]] = {s: [] for s in self.block_end}
        for start, end in self.block_end.items():
            for succ in self._successors(self.code[end - 1]):
                predecessors[succ].append(start)
        work = list(reversed(self.leaders))
        queued = set(work)
        while work:
            start = work.pop(0)
            queued.discard(start)
            use, define = use_def[start]
            new = use | (live_out[start] & ~define)
            if new != live_in[start] or new == 0:
                live_in[start] = new
                for p in predecessors[start]:
                    merged = live_out[p] | new
                    if merged != live_out[p]:
                        live_out[p] = merged
                        if p not in queued:
                            queued.add(p)
                            work.append(p)
        first = [len(self.code)] * len(regs)
        last = [-1] * len(regs)

        def touch(bits: int, at: int) -> None:
            while bits:
                low = bits & -bits
                i = low.bit_length() - 1
                if at < first[i]:
                    first[i] = at
                if at > last[i]:
                    last[i] = at
                bits ^= low

        for start, end in self.block_end.items():
            touch(live_in[start], start)
            touch(live_out[start], end)
            for i in range(start, end):
                uses, kills = effects[i]
                # A written register must not share a slot with one that the same instruction reads: an operation with
                # several results writes some before it has read all.
                touch(uses, i)
                touch(kills if kills >= 0 else -kills - 1, i)
        order = sorted(range(len(regs)), key=first.__getitem__)
        free: dict[int, list[int]] = {}
        active: list[tuple[int, int, int]] = []  # (last, slot, width), a heap
        self.slots: list[int] = []
        import heapq

        for i in order:
            reg = regs[i]
            while active and active[0][0] < first[i]:
                _, slot, width = heapq.heappop(active)
                free.setdefault(width, []).append(slot)
            pool = free.get(reg.width)
            if pool:
                slot = pool.pop()
            else:
                slot = len(self.slots)
                self.slots.append(reg.width)
            reg.slot = slot
            heapq.heappush(active, (last[i], slot, reg.width))
        entry_live = live_in[0]
        self.undefined = [regs[i] for i in range(len(regs)) if entry_live >> i & 1]

    def segment(self, pc: int) -> tuple[tuple, int]:
        """The operations from `pc` to the end of its block, and the index after them."""
        found = self._segments.get(pc)
        if found is None:
            end = self.ends[pc]
            found = self._segments[pc] = (tuple(self.ops[pc:end]), end)
        return found

    def source(self, ins: Ins) -> str:
        """``file:line`` of the CUDA source of an instruction, or an empty string."""
        if ins.loc is None:
            return ""
        return f"{self.module.files.get(ins.loc[0], '?')}:{ins.loc[1]}"
