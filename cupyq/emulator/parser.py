"""PTX text to functions of instructions, with every name resolved to the scope that declares it.

Labels and registers repeat per ``{}`` scope (inline assembly does so), ``::`` is no label, and braces after the first
word of a statement are a vector or an initializer and open no scope.
"""

from __future__ import annotations

import re
import struct

from .faults import UnsupportedPTX
from .syntax import SINK, WIDTH, Imm, Ins, Mem, Neg, Pair, Reg, Scope, Sym, Variable, Vec

# Comments go first (newlines kept, so that lines still count), then the text is cut into these pieces.
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
PIECE = re.compile(r'"[^"\n]*"|[;{}\n]|[^;{}\n"]+')
LABEL = re.compile(r"\s*([A-Za-z_$%][\w$]*)\s*:(?!:)")
LINE_DIRECTIVES = (".version", ".target", ".address_size", ".file", ".loc")
INSTRUCTION = re.compile(r"(?:@(!?)\s*([%\w$]+)\s+)?([a-z_][\w.:]*)\s*(.*)$", re.S)
OPERAND = re.compile(r"\[[^\]]*\]|\{[^}]*\}|\([^)]*\)|[^,\s\[\]{}()][^,\[\]{}()]*")
NUMBER = re.compile(
    r"[-+~]?(?:0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|\d+\.\d*(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\d+U?)$"
)
MEMORY = re.compile(r"\[\s*([^\s+\-,\]]+|-?\d\w*)\s*((?:[+-]\s*-?\s*\w+\s*)*)\s*(?:,(.*))?\]$", re.S)
NUMBERED = re.compile(r"(.*?)(0|[1-9]\d*)$")
VARIABLE = re.compile(r"\.(b8|b16|b32|b64|b128|u8|u16|u32|u64|s8|s16|s32|s64|f16|bf16|f32|f64|f16x2|bf16x2)$")
MAX_DECLARED = 1 << 24  # registers one declaration may name; beyond it the text is broken


class Function:
    """One ``.entry`` or ``.func`` with its instructions, parameters and launch bounds."""

    def __init__(self, name: str, kind: str, line: int) -> None:
        self.name, self.kind, self.line = name, kind, line
        self.params: list[Variable] = []
        self.returns: list[Variable] = []
        self.body: list[Ins] = []
        self.scope = Scope()
        self.variables: dict[str, Variable] = {}
        self.attributes: dict[str, tuple[int, ...]] = {}
        self.defined = False


class Module:
    """A parsed PTX text: target, module-level variables, functions, and the files that ``.loc`` numbers."""

    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        self.target = ""
        self.version = ""
        self.variables: dict[str, Variable] = {}
        self.functions: dict[str, Function] = {}
        self.files: dict[int, str] = {}


def parse(text: str) -> Module:
    """Parse PTX text; :class:`UnsupportedPTX` names the line that cannot be read."""
    return _Parser(text).run()


def number(text: str) -> Imm:
    """A PTX literal as an :class:`Imm`."""
    sign = 1
    invert = False
    t = text
    while t and t[0] in "+-~":
        if t[0] == "-":
            sign = -sign
        elif t[0] == "~":
            invert = True
        t = t[1:].strip()
    low = t[:2].lower()
    if low == "0f" and len(t) == 10:
        bits = int(t[2:], 16)
        return Imm(bits ^ (0x80000000 if sign < 0 else 0), 32)
    if low == "0d" and len(t) == 18:
        bits = int(t[2:], 16)
        return Imm(bits ^ (1 << 63 if sign < 0 else 0), 64)
    if low not in ("0x", "0b") and ("." in t or "e" in t.lower()):
        return Imm(sign * float(t))
    t = t.rstrip("U")
    if low == "0x":
        value = int(t[2:], 16)
    elif low == "0b":
        value = int(t[2:], 2)
    elif len(t) > 1 and t[0] == "0":
        value = int(t, 8)
    else:
        value = int(t)
    value *= sign
    return Imm(~value if invert else value)


class _Parser:
    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise UnsupportedPTX(f"ptx must be a str, got {type(text).__name__}")
        self.text = COMMENT.sub(lambda m: "\n" * m.group().count("\n"), text.rstrip("\0 \n"))
        self.module = Module(text)
        self.function: Function | None = None
        self.scope: Scope | None = None
        self.loc: tuple[int, int] | None = None
        self.line = 1
        self.depth = 0
        self.open_section = False

    def fail(self, what: str, text: str = "") -> UnsupportedPTX:
        line = min(self.line, len(self.module.lines))
        return UnsupportedPTX(what, line, text or (self.module.lines[line - 1] if line else ""))

    def run(self) -> Module:
        statement: list[str] = []
        first_line = 1
        inner = 0  # depth of braces inside the statement being read: vectors and initializers
        line = 1
        skipping = 0
        for match in PIECE.finditer(self.text):
            piece = match.group()
            if piece == "\n":
                line += 1
                if statement and not inner and self.depth + skipping >= 0:
                    head = statement[0]
                    if head.startswith(LINE_DIRECTIVES):
                        self.line = first_line
                        self.line_directive("".join(statement))
                        statement = []
                        continue
                if statement:
                    statement.append(" ")
                continue
            if skipping:
                skipping += piece == "{"
                skipping -= piece == "}"
                continue
            if piece == ";":
                if inner:
                    raise self.fail("';' inside braces")
                self.line = first_line
                self.statement("".join(statement).strip())
                statement = []
                continue
            if piece == "{":
                if statement and self.opens_body(statement):
                    self.line = first_line
                    self.header("".join(statement).strip())
                    statement = []
                    self.depth += 1
                    continue
                if statement and statement[0].startswith(".section"):
                    statement = []
                    skipping = 1
                    continue
                if not statement and not inner:
                    if self.function is None:
                        raise self.fail("'{' outside a function")
                    self.scope = Scope(self.scope)
                    self.depth += 1
                    continue
                inner += 1
                statement.append(piece)
                continue
            if piece == "}":
                if inner:
                    inner -= 1
                    statement.append(piece)
                    continue
                self.line = line
                if "".join(statement).strip():
                    raise self.fail("a statement has no ';'", "".join(statement))
                statement = []
                self.close()
                continue
            if not statement:
                piece = self.labels(piece, line)
                if not piece:
                    continue
                first_line = line
            statement.append(piece)
        rest = "".join(statement).strip()
        self.line = first_line
        if rest.startswith(LINE_DIRECTIVES):
            self.line_directive(rest)
        elif rest:
            raise self.fail("the text ends inside a statement", rest)
        if self.depth:
            self.line = line
            raise self.fail("the text ends inside a function")
        if not self.module.target:
            raise self.fail("no .target: this is not PTX")
        return self.module

    def opens_body(self, statement: list[str]) -> bool:
        if self.depth:
            return False
        text = "".join(statement)
        return bool(re.search(r"\.(entry|func)\b", text)) and "=" not in text

    def labels(self, piece: str, line: int) -> str:
        """Take labels off the front of a statement; returns what follows them."""
        while True:
            stripped = piece.lstrip()
            if not stripped:
                return ""
            match = LABEL.match(stripped)
            if match is None or self.function is None:
                return stripped
            name = match.group(1)
            assert self.scope is not None
            if name in self.scope.labels:
                self.line = line
                raise self.fail(f"label {name} is declared twice")
            self.scope.labels[name] = len(self.function.body)
            piece = stripped[match.end() :]
            rest = piece.strip()
            if rest.startswith((".branchtargets", ".callprototype", ".calltargets")):
                return f"{rest.split(None, 1)[0]} {name} : {rest.split(None, 1)[1] if ' ' in rest else ''}"

    def close(self) -> None:
        if self.function is None or self.scope is None:
            raise self.fail("'}' without '{'")
        self.depth -= 1
        if self.depth == 0:
            self.function.defined = True
            self.function = None
            self.scope = None
        else:
            self.scope = self.scope.parent

    def line_directive(self, text: str) -> None:
        words = text.split()
        if words[0] == ".loc":
            if len(words) > 2 and words[1].isdigit() and words[2].isdigit():
                self.loc = (int(words[1]), int(words[2]))
        elif words[0] == ".target":
            self.module.target = words[1].rstrip(",") if len(words) > 1 else ""
        elif words[0] == ".version":
            self.module.version = words[1] if len(words) > 1 else ""
        elif words[0] == ".file":
            match = re.match(r'\.file\s+(\d+)\s+"([^"]*)"', text)
            if match:
                self.module.files[int(match.group(1))] = match.group(2)

    # ---- declarations

    def header(self, text: str) -> None:
        """Everything before the body of an .entry or .func."""
        match = re.match(
            r"(?:\.(?:visible|weak|extern|common)\s+)*\.(entry|func)\s*((?:\.attribute\s*\([^)]*\)|\.noreturn)\s*)*"
            r"(\([^)]*\))?\s*([A-Za-z_$%][\w$]*)\s*(\(.*?\))?(.*)$",
            text,
            re.S,
        )
        if match is None:
            raise self.fail("cannot read this function header", text)
        kind, _, returns, name, params, rest = match.groups()
        function = Function(name, kind, self.line)
        function.params = self.parameters(params or "()")
        function.returns = self.parameters(returns or "()")
        for key, values in re.findall(
            r"\.(maxntid|reqntid|minnctapersm|maxnreg|maxclusterrank|reqnctapercluster)\s+([\d\s,]+)", rest
        ):
            function.attributes[key] = tuple(int(v) for v in re.findall(r"\d+", values))
        self.module.functions[name] = function
        self.function, self.scope = function, function.scope
        for variable in function.params + function.returns:
            function.variables[variable.name] = variable
            function.scope.names[variable.name] = variable
        self.loc = None

    def parameters(self, text: str) -> list[Variable]:
        out = []
        for part in text.strip()[1:-1].split(","):
            if part.strip():
                out.append(self.variable(part.strip(), "param"))
        return out

    def variable(self, text: str, space: str | None = None) -> Variable:
        """One variable declaration: ``.shared .align 16 .b8 name[64] = {...}``."""
        head, _, init = text.partition("=")
        match = re.match(
            r"((?:\.[\w:]+(?:\s+(?=\d)\d+)?\s*)+)\s*([A-Za-z_$%][\w$]*)\s*((?:\[[^\]]*\]\s*)*)$", head.strip(), re.S
        )
        if match is None:
            raise self.fail("cannot read this declaration", text)
        words = re.findall(r"\.([\w:]+)(?:\s+(\d+))?", match.group(1))
        align, element, extern = 0, None, False
        for word, argument in words:
            if word == "align":
                align = int(argument)
            elif word == "reg":
                space = "param" if space == "param" else "reg"
                # A .func may take its parameters in registers.
            elif word in ("param", "shared", "global", "const", "local"):
                space = space or word
            elif "." + word and VARIABLE.match("." + word):
                element = word
            elif word == "extern":
                extern = True
            elif word not in ("visible", "weak", "common", "ptr", "managed", "volatile") and not word.startswith(
                "attribute"
            ):
                raise self.fail(f".{word} is not known in a declaration", text)
        if element is None or space is None or space == "reg":
            raise self.fail("cannot read this declaration", text)
        size = WIDTH[element] // 8
        unit = size
        extents = re.findall(r"\[\s*(\d*)\s*\]", match.group(3))
        for extent in extents:
            size *= int(extent) if extent else 0
        name = match.group(2)
        init = init.strip()
        if init and extents and extents[0] == "":
            size = unit * (init.count(",") + 1)
        if size > 1 << 31:
            raise self.fail(f"variable {name} has {size} bytes", text)
        return Variable(
            name, space, size, align or unit, self.initializer(init, element) if init else None, self.line, extern
        )

    def initializer(self, text: str, element: str) -> list:
        flat = text.replace("{", " ").replace("}", " ")
        out: list = []
        for item in flat.split(","):
            word = item.strip()
            if not word:
                continue
            if NUMBER.match(word):
                imm = number(word)
                out.append((element, self.literal_bits(imm, element)))
            else:
                match = re.match(r"(?:generic\(\s*)?([A-Za-z_$%][\w$]*)\)?\s*(?:\+\s*(\d+))?$", word)
                if match is None:
                    raise self.fail("cannot read this initializer", text)
                out.append((element, Sym(match.group(1), int(match.group(2) or 0))))
        return out

    @staticmethod
    def literal_bits(imm: Imm, element: str) -> int:
        if isinstance(imm.value, float):
            code = {"f32": ("f", "I"), "f64": ("d", "Q")}.get(element)
            if code is None:
                raise UnsupportedPTX(f"a decimal fraction initializes .{element}")
            return struct.unpack("<" + code[1], struct.pack("<" + code[0], imm.value))[0]
        return int(imm.value) & ((1 << WIDTH[element]) - 1)

    def registers(self, text: str) -> None:
        match = re.match(r"\.reg\s*((?:\.\w+\s*)+)\s+(.*)$", text, re.S)
        if match is None:
            raise self.fail("cannot read this register declaration", text)
        kinds = match.group(1).replace(".", " ").split()
        lanes = 1
        if kinds[0] in ("v2", "v4"):
            raise self.fail("vector registers are not known", text)
        width = WIDTH.get(kinds[-1])
        if width is None or len(kinds) != 1 or width == 128:
            raise self.fail(f"register type .{' .'.join(kinds)} is not known", text)
        assert self.scope is not None
        assert lanes == 1
        for part in match.group(2).split(","):
            name = part.strip()
            ranged = re.match(r"([A-Za-z_$%][\w$]*?)<\s*(\d+)\s*>$", name)
            if ranged:
                count = int(ranged.group(2))
                if count > MAX_DECLARED:
                    raise self.fail(f"{count} registers in one declaration", text)
                self.scope.ranges[ranged.group(1)] = (count, width)
            elif re.match(r"[A-Za-z_$%][\w$]*$", name):
                if name in self.scope.names:
                    raise self.fail(f"{name} is declared twice", text)
                self.scope.names[name] = Reg(name, width)
            else:
                raise self.fail("cannot read this register declaration", text)

    # ---- statements

    def statement(self, text: str) -> None:
        if not text:
            return
        if text[0] == ".":
            self.directive(text)
            return
        if self.function is None:
            raise self.fail("an instruction outside a function", text)
        match = INSTRUCTION.match(text)
        if match is None:
            raise self.fail("cannot read this statement", text)
        negated, guard_name, op, rest = match.groups()
        guard = None
        if guard_name:
            reg = self.lookup(guard_name)
            if not isinstance(reg, Reg) or reg.width != 1:
                raise self.fail(f"the guard {guard_name} is no predicate register", text)
            guard = (reg, bool(negated))
        args = [self.operand(t.strip()) for t in self.split(rest, text)] if rest else []
        ins = Ins(op, guard, args, self.line, text, self.loc, self.scope)
        self.function.body.append(ins)

    def split(self, rest: str, text: str) -> list[str]:
        items = []
        depth = start = 0
        for at, char in enumerate(rest):
            if char in "[{(":
                depth += 1
            elif char in "]})":
                depth -= 1
            elif char == "," and depth == 0:
                items.append(rest[start:at])
                start = at + 1
        items.append(rest[start:])
        if depth or any(not item.strip() for item in items):
            raise self.fail("cannot read the operands", text)
        return items

    def operand(self, text: str):
        first = text[0]
        if first == "%" or first == "$" or first.isalpha() or first == "_":
            if "|" in text:
                a, b = text.split("|")
                return Pair(self.operand(a.strip()), self.operand(b.strip()))
            if text == "_":
                return SINK
            found = self.lookup(text)
            if found is None or isinstance(found, Variable):
                match = re.match(r"([A-Za-z_$%][\w$.]*)\s*(?:\+\s*(\d+))?$", text)
                if match is None:
                    raise self.fail(f"cannot read the operand {text}")
                return Sym(match.group(1), int(match.group(2) or 0), self.scope)
            return found
        if first == "[":
            return self.memory(text)
        if first == "{":
            return Vec([self.operand(t.strip()) for t in text[1:-1].split(",") if t.strip()])
        if first == "(":
            return Vec([self.operand(t.strip()) for t in text[1:-1].split(",") if t.strip()])
        if first == "!":
            return Neg(self.operand(text[1:].strip()))
        if NUMBER.match(text):
            return number(text)
        if first == "-" and len(text) > 1 and not text[1].isdigit():
            raise self.fail(f"cannot read the operand {text}")
        raise self.fail(f"cannot read the operand {text}")

    def memory(self, text: str) -> Mem:
        match = MEMORY.match(text)
        if match is None:
            raise self.fail(f"cannot read the address {text}")
        base_text, sums, rest = match.groups()
        base = self.operand(base_text)
        offset = 0
        for sign, value in re.findall(r"([+-])\s*(-?\s*\w+)", sums):
            value = value.replace(" ", "")
            if not NUMBER.match(value):
                raise self.fail(f"cannot read the address {text}")
            amount = int(number(value).value)
            offset += amount if sign == "+" else -amount
        if isinstance(base, Imm):
            offset += int(base.value)
        coords = None
        if rest is not None:
            coords = [self.operand(t.strip()) for t in self.split(rest, text)]
        return Mem(base, offset, coords)

    def lookup(self, name: str):
        scope = self.scope
        while scope is not None:
            found = scope.names.get(name)
            if found is not None:
                return found
            match = NUMBERED.match(name)
            if match and match.group(1) in scope.ranges:
                count, width = scope.ranges[match.group(1)]
                if int(match.group(2)) < count:
                    reg = scope.names[name] = Reg(name, width)
                    return reg
            scope = scope.parent
        return None

    def directive(self, text: str) -> None:
        word = text.split(None, 1)[0]
        if word == ".reg":
            self.registers(text)
        elif word == ".pragma":
            pass  # hints such as "nounroll": no meaning for the result
        elif word == ".branchtargets":
            match = re.match(r"\.branchtargets\s+(\S+)\s*:\s*(.*)$", text, re.S)
            if match is None or self.scope is None:
                raise self.fail("cannot read .branchtargets", text)
            self.scope.tables[match.group(1)] = [t.strip() for t in match.group(2).split(",")]
        elif word in (".callprototype", ".calltargets"):
            raise self.fail("indirect calls are not known", text)
        elif re.search(r"\.(entry|func)\b", text.split("(")[0]):
            name = re.search(r"([A-Za-z_$%][\w$]*)\s*\([^()]*\)\s*(?:\.\w+\s*)*$", text)
            if name and name.group(1) not in self.module.functions:
                self.module.functions[name.group(1)] = Function(name.group(1), "func", self.line)
        elif word in (".alias",):
            raise self.fail(".alias is not known", text)
        else:
            shared_list = [text]
            for declaration in shared_list:
                variable = self.variable(declaration)
                if self.function is not None and self.scope is not None:
                    self.scope.names[variable.name] = variable
                    if variable.space != "param":
                        self.function.variables[variable.name] = variable
                else:
                    self.module.variables[variable.name] = variable
