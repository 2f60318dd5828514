"""What a launch did: instructions, memory requests, sectors, bank conflicts. Counted per warp, as profilers do."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from .syntax import Ins

# Class of an instruction by the first part of its opcode; what is not here is "other".
CLASS = {
    **dict.fromkeys(
        ["add", "sub", "mul", "mad", "div", "rem", "min", "max", "neg", "abs", "mul24", "mad24", "sad", "dp4a", "dp2a"],
        "integer",
    ),
    **dict.fromkeys(
        [
            "and",
            "or",
            "xor",
            "not",
            "cnot",
            "lop3",
            "prmt",
            "bfe",
            "bfi",
            "bfind",
            "shl",
            "shr",
            "shf",
            "popc",
            "clz",
            "brev",
            "bmsk",
            "szext",
            "fns",
        ],
        "logic",
    ),
    **dict.fromkeys(["fma", "ex2", "lg2", "sin", "cos", "tanh", "rcp", "rsqrt", "sqrt", "copysign", "testp"], "float"),
    **dict.fromkeys(["set", "setp", "selp", "slct"], "predicate"),
    **dict.fromkeys(["mov", "cvta", "isspacep", "mapa", "getctarank"], "move"),
    "cvt": "convert",
    **dict.fromkeys(["bra", "brx", "ret", "exit", "trap"], "control"),
    **dict.fromkeys(
        ["bar", "barrier", "membar", "fence", "mbarrier", "griddepcontrol", "setmaxnreg", "nanosleep"], "sync"
    ),
    **dict.fromkeys(["shfl", "vote", "redux", "match", "activemask", "elect"], "warp"),
    **dict.fromkeys(["mma", "wgmma"], "tensor"),
    **dict.fromkeys(["ldmatrix", "stmatrix", "movmatrix"], "matrix"),
    **dict.fromkeys(["atom", "red"], "atomic"),
}
FLOAT_TYPES = ("f16", "bf16", "f16x2", "bf16x2", "f32", "f64", "f32x2")
CLASSES = (
    "integer",
    "logic",
    "float",
    "predicate",
    "move",
    "convert",
    "control",
    "sync",
    "warp",
    "tensor",
    "matrix",
    "atomic",
    "load",
    "store",
    "async",
    "other",
)


def class_of(ins: Ins) -> str:
    """The class an instruction is counted under."""
    base = ins.parts[0]
    if base in ("ld", "ldu"):
        return "load"
    if base == "st":
        return "store"
    if base == "cp":
        return "async"
    if base in ("add", "sub", "mul", "mad", "div", "min", "max", "neg", "abs") and ins.parts[-1] in FLOAT_TYPES:
        return "float"
    return CLASS.get(base, "other")


class Counters:
    """Counters of one launch; every figure is a total over all warps.

    Attributes
    ----------
    instructions : dict of str to int
        Warp instructions by class (:data:`CLASSES`); a guarded instruction counts even where no thread runs it.
    mma : dict of str to int
        Tensor-core instructions by their full opcode.
    global_requests, global_sectors : dict of str to int
        Warp requests to global memory, and 32-byte sectors they touch, for ``"load"``, ``"store"``,
        ``"async"``, ``"atomic"``.
    shared_requests, shared_wavefronts, shared_conflicts : dict of str to int
        Warp requests to shared memory, passes over the banks, and passes beyond the least number possible.
    bytes : dict of str to int
        Bytes that threads moved, by space and direction (``"global load"``).
    dram_bytes : int
        Bytes of distinct 32-byte sectors of global memory touched: what must come from DRAM at least once.
    barriers : int
        Barriers passed, one for each warp that waited.
    divergent : int
        Warp instructions that a part of the warp's lanes ran while the others were elsewhere or had ended.
    warps, blocks : int
        Launched.
    """

    def __init__(self, program: Any) -> None:
        self._program = program
        n = len(program.code)
        self._started = np.zeros(n + 1, np.int64)
        self.by_instruction: dict[str, np.ndarray] = {
            name: np.zeros(n, np.int64)
            for name in (
                "requests",
                "sectors",
                "ideal_sectors",
                "wavefronts",
                "conflicts",
                "bytes",
                "barriers",
                "divergent",
            )
        }
        self.warps = self.blocks = 0
        self.dram_bytes = 0

    def run(self, start: int, end: int, warps: int) -> None:
        """`warps` warps executed instructions start..end-1."""
        self._started[start] += warps
        self._started[end] -= warps

    @property
    def executed(self) -> np.ndarray:
        """Warp instructions executed, by index of instruction."""
        return np.cumsum(self._started)[:-1]

    def _total(self, name: str, base: tuple[str, ...]) -> int:
        column = self.by_instruction[name]
        return int(sum(column[i.index] for i in self._program.code if i.parts[0] in base))

    def _table(self, name: str, space: str) -> dict[str, int]:
        column = self.by_instruction[name]
        out: Counter = Counter()
        for index in np.nonzero(column)[0]:
            ins = self._program.code[index]
            if space_of(ins) == space:
                out[direction_of(ins)] += int(column[index])
        return dict(out)

    @property
    def instructions(self) -> dict[str, int]:
        out: Counter = Counter()
        executed = self.executed
        for ins in self._program.code[:-1]:
            if executed[ins.index]:
                out[class_of(ins)] += int(executed[ins.index])
        return {name: out[name] for name in CLASSES if out[name]}

    @property
    def total_instructions(self) -> int:
        return int(self.executed[:-1].sum())

    @property
    def mma(self) -> dict[str, int]:
        out: Counter = Counter()
        executed = self.executed
        for ins in self._program.code:
            if (ins.parts[0] == "mma" or ins.op.startswith("wgmma.mma_async")) and executed[ins.index]:
                out[ins.op] += int(executed[ins.index])
        return dict(out)

    @property
    def global_requests(self) -> dict[str, int]:
        return self._table("requests", "global")

    @property
    def global_sectors(self) -> dict[str, int]:
        return self._table("sectors", "global")

    @property
    def global_ideal_sectors(self) -> dict[str, int]:
        """Sectors that would hold the same bytes without a gap."""
        return self._table("ideal_sectors", "global")

    @property
    def shared_requests(self) -> dict[str, int]:
        return self._table("requests", "shared")

    @property
    def shared_wavefronts(self) -> dict[str, int]:
        return _add(self._table("wavefronts", "shared"), self._async_shared("wavefronts"))

    @property
    def shared_conflicts(self) -> dict[str, int]:
        return _add(self._table("conflicts", "shared"), self._async_shared("conflicts"))

    def _async_shared(self, name: str) -> dict[str, int]:
        total = self._total(name, ("cp",))
        return {"async": total} if total else {}

    @property
    def bytes(self) -> dict[str, int]:
        out: Counter = Counter()
        column = self.by_instruction["bytes"]
        for index in np.nonzero(column)[0]:
            ins = self._program.code[index]
            out[f"{space_of(ins)} {direction_of(ins)}"] += int(column[index])
        return dict(out)

    @property
    def barriers(self) -> int:
        return int(self.by_instruction["barriers"].sum())

    @property
    def divergent(self) -> int:
        """Warp instructions that a part of the warp's lanes ran while the others were elsewhere or had ended."""
        return int(self.by_instruction["divergent"].sum())

    def rows(self) -> list[tuple[str, str, int]]:
        """Everything as rows (group, name, count)."""
        out: list[tuple[str, str, int]] = [("launch", "blocks", self.blocks), ("launch", "warps", self.warps)]
        out.append(("instructions", "total", self.total_instructions))
        out += [("instructions", k, v) for k, v in self.instructions.items()]
        out.append(("instructions", "divergent (of the total)", self.divergent))
        out += [("tensor", k, v) for k, v in self.mma.items()]
        for name in (
            "global_requests",
            "global_sectors",
            "global_ideal_sectors",
            "shared_requests",
            "shared_wavefronts",
            "shared_conflicts",
            "bytes",
        ):
            out += [(name.replace("_", " "), k, v) for k, v in getattr(self, name).items()]
        out.append(("global sectors", "distinct bytes (DRAM)", self.dram_bytes))
        out.append(("sync", "barriers", self.barriers))
        return out

    def by_line(self, source: bool = False) -> list[dict[str, Any]]:
        """One row for each PTX line executed (or, with `source`, each ``file:line`` of the CUDA source)."""
        executed = self.executed
        rows: dict[Any, dict[str, Any]] = {}
        for ins in self._program.code[:-1]:
            if not executed[ins.index]:
                continue
            key = (self._program.source(ins) or "?") if source else ins.line
            row = rows.setdefault(
                key,
                {
                    "line": key,
                    "text": ins.text if not source else "",
                    "instructions": 0,
                    **dict.fromkeys(self.by_instruction, 0),
                },
            )
            row["instructions"] += int(executed[ins.index])
            for name, column in self.by_instruction.items():
                row[name] += int(column[ins.index])
        return list(rows.values())

    def by_loop(self) -> list[dict[str, Any]]:
        """One row for each loop (a backward branch): its lines, trips of a warp, instructions inside."""
        executed = self.executed
        out = []
        for ins in self._program.code:
            for target in self._program._targets(ins) if ins.parts[0] == "bra" else ():
                if target <= ins.index and executed[ins.index]:
                    body = executed[target : ins.index + 1]
                    tensor = sum(
                        int(executed[i.index])
                        for i in self._program.code[target : ins.index + 1]
                        if class_of(i) == "tensor"
                    )
                    out.append(
                        {
                            "first_line": self._program.code[target].line,
                            "last_line": ins.line,
                            "trips": int(executed[ins.index]),
                            "instructions": int(body.sum()),
                            "tensor": tensor,
                        }
                    )
        return out

    def __str__(self) -> str:
        return "\n".join(f"{group:22} {name:60} {count:>15,}" for group, name, count in self.rows())


def _add(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    return {k: a.get(k, 0) + b.get(k, 0) for k in [*a, *(k for k in b if k not in a)]}


def space_of(ins: Ins) -> str:
    """The memory an instruction's traffic is counted under."""
    if ins.parts[0] in ("ldmatrix", "stmatrix"):
        return "shared"
    for part in ins.parts[1:]:
        if part.startswith("shared") and ins.parts[0] != "cp":
            return "shared"
        if part in ("local", "param"):
            return "local"
    return "global"


def direction_of(ins: Ins) -> str:
    base = ins.parts[0]
    return {"st": "store", "stmatrix": "store", "cp": "async", "atom": "atomic", "red": "atomic"}.get(base, "load")


def sectors_of(address: np.ndarray, active: np.ndarray | None) -> tuple[int, np.ndarray]:
    """Distinct 32-byte sectors of each warp: their number over all warps; and every sector touched (flat)."""
    sector = address >> np.uint64(5)
    if active is not None:
        live = active.any(1)
        sector, active = sector[live], active[live]
        if not sector.size:
            return 0, sector.ravel()
        lead = sector[np.arange(len(sector)), active.argmax(1)]
        sector = np.where(active, sector, lead[:, None])
    if (sector[:, 1:] < sector[:, :-1]).any():
        sector = np.sort(sector, axis=1)
    return int((sector[:, 1:] != sector[:, :-1]).sum()) + len(sector), sector.ravel()


_conflict_cache: dict[tuple[bytes, int], tuple[int, int]] = {}


def wavefronts_of(address: np.ndarray, active: np.ndarray | None, size: int) -> tuple[int, int]:
    """Passes over the 32 banks that a request of `size` bytes a thread takes, and those beyond the least possible.

    A request is served in groups of threads that together name 128 bytes; in a group, each bank gives one word a pass.
    """
    word = (address >> 2).astype(np.int64)
    if active is not None:
        live = active.any(1)
        word, active = word[live], active[live]
        if not len(word):
            return 0, 0
    relative = word - word[:, :1]
    if active is None and (relative == relative[:1]).all():
        key = (relative[0].tobytes(), size)
        found = _conflict_cache.get(key)
        if found is None:
            found = _conflict_cache[key] = _passes(word[:1], None, size)
        return found[0] * len(word), found[1] * len(word)
    return _passes(word, active, size)


def _passes(word: np.ndarray, active: np.ndarray | None, size: int) -> tuple[int, int]:
    rows = len(word)
    words = max(size // 4, 1)
    groups = words
    lanes = 32 // groups
    word = word.reshape(rows * groups, lanes)
    if words > 1:
        word = (word[:, :, None] + np.arange(words)).reshape(rows * groups, -1)
    if active is None:
        used = np.ones(word.shape, bool)
    else:
        used = np.repeat(active.reshape(rows * groups, lanes), words, axis=1)
    live = used.any(1)
    word, used = word[live], used[live]
    lead = word[np.arange(len(word)), used.argmax(1)]
    word = np.sort(np.where(used, word, lead[:, None]), axis=1)
    new = np.ones(word.shape, bool)
    new[:, 1:] = word[:, 1:] != word[:, :-1]
    per_bank = np.zeros((len(word), 32), np.int64)
    np.add.at(per_bank, (np.nonzero(new)[0], word[new] & 31), 1)
    total = int(per_bank.max(1).sum())
    # The least possible: as many passes as the distinct words fill.
    least = int((-(-new.sum(1) // 32)).sum())
    return total, total - least
