"""launch: arguments in, counters out."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyq.errors import ArgumentError

from .counters import Counters
from .machine import Machine
from .memory import DeviceMemory, place_arrays
from .parser import Module, parse
from .program import Program
from .syntax import WIDTH, Sym
from .tensormap import TensorMap

CHECKS = ("memory", "race", "init", "sync")
WAVE_BYTES = 700 << 20  # memory the registers and shared memory of one wave may take
WAVE_WARPS = 2048
_modules: OrderedDict[str, Module] = OrderedDict()
_programs: OrderedDict[tuple[str, str], Program] = OrderedDict()
_KEEP = 48


def load(ptx: str, entry: str | None = None) -> Program:
    """Parse and decode PTX; an instruction that the emulator does not know is refused here.

    Parameters
    ----------
    ptx : str
        PTX text.
    entry : str, optional
        Name of the entry; may be left out where the text has one.
    """
    if isinstance(ptx, bytes):
        ptx = ptx.decode()
    if not isinstance(ptx, str):
        raise ArgumentError(f"ptx must be a str, got {type(ptx).__name__}")
    key = hashlib.sha256(ptx.encode()).hexdigest()
    module = _modules.get(key)
    if module is None:
        module = _modules[key] = parse(ptx)
        while len(_modules) > _KEEP:
            _modules.popitem(last=False)
    if entry is None:
        entries = [n for n, f in module.functions.items() if f.kind == "entry"]
        if len(entries) != 1:
            raise ArgumentError(f"entry must be named: this PTX has {', '.join(entries) or 'none'}")
        entry = entries[0]
    found = _programs.get((key, entry))
    if found is None:
        found = _programs[key, entry] = Program(module, entry)
        while len(_programs) > _KEEP:
            _programs.popitem(last=False)
    return found


class Result:
    """What a launch returns.

    Attributes
    ----------
    counters : Counters
    """

    def __init__(self, counters: Counters) -> None:
        self.counters = counters

    def __repr__(self) -> str:
        return f"Result({self.counters.total_instructions} warp instructions in {self.counters.blocks} blocks)"


def launch(
    ptx: str,
    entry: str | None,
    grid: Sequence[int] | int,
    block: Sequence[int] | int,
    args: Sequence[Any],
    shared_bytes: int = 0,
    checks: Sequence[str] = CHECKS,
    seed: int | None = None,
    *,
    cluster: Sequence[int] | int | None = None,
    max_steps: int = 5_000_000,
    sms: int = 132,
) -> Result:
    """Run one kernel launch on the CPU and watch it.

    Parameters
    ----------
    ptx : str
        PTX text, as NVRTC or Triton makes it.
    entry : str
        Name of the kernel; None where the text has one only.
    grid, block : int or tuple of up to 3 int
        As in a CUDA launch.
    args : sequence
        One for each kernel parameter: a NumPy array is a device pointer to its bytes and is written in place; a NumPy
        scalar (or int or float) is passed by value; a TensorMap or bytes fills a parameter of that size.
    shared_bytes : int
        Dynamic shared memory, bytes.
    checks : sequence of str
        Which of ``"memory"``, ``"race"``, ``"init"``, ``"sync"`` are on. Bounds are always checked.
    seed : int, optional
        Shuffle the order in which warps run, and atomics are served. A correct kernel gives the same results (up to the
        order of float atomics).
    cluster : int or tuple, optional
        Cluster size in CTAs, unless the kernel declares one.
    max_steps : int
        Scheduler steps after which a launch counts as hung.
    sms : int
        What ``%nsmid`` says.

    Returns
    -------
    Result

    Raises
    ------
    EmulatorFault
        The kernel did something wrong; see its attributes.
    UnsupportedPTX
        The PTX holds something unknown. Raised before anything runs.
    """
    return Launch(load(ptx, entry), grid, block, args, shared_bytes, checks, seed, cluster, max_steps, sms).run()


def _triple(value: Any, name: str) -> tuple[int, int, int]:
    items = [value] if isinstance(value, (int, np.integer)) else list(value)
    if not 1 <= len(items) <= 3 or any(not isinstance(x, (int, np.integer)) or x < 1 for x in items):
        raise ArgumentError(f"{name} must be one to three positive integers, got {value!r}")
    x, y, z = [int(i) for i in items] + [1] * (3 - len(items))
    return x, y, z


class Launch:
    """One launch: checked arguments, device memory, and the waves that run its CTAs."""

    def __init__(
        self, program: Program, grid: Any, block: Any, args: Sequence[Any], shared_bytes: int, checks: Sequence[str],
        seed: int | None, cluster: Any, max_steps: int, sms: int,
    ) -> None:  # fmt: skip
        self.program = program
        self.grid, self.block = _triple(grid, "grid"), _triple(block, "block")
        self.threads = self.block[0] * self.block[1] * self.block[2]
        attributes = program.function.attributes
        if self.threads > 1024:
            raise ArgumentError(f"block {self.block} has {self.threads} threads, at most 1024 run on a GPU")
        for key in ("reqntid", "maxntid"):
            if key in attributes:
                limit = int(np.prod(attributes[key]))
                if self.threads > limit or (key == "reqntid" and self.threads != limit):
                    raise ArgumentError(
                        f"block {self.block} has {self.threads} threads, the kernel declares .{key} {attributes[key]}"
                    )
        unknown = [c for c in checks if c not in CHECKS]
        if unknown:
            raise ArgumentError(f"checks: {unknown[0]!r} is none of {CHECKS}")
        self.checks = frozenset(checks)
        self.shared_bytes = int(shared_bytes)
        if self.shared_bytes < 0 or program.dynamic_start + self.shared_bytes > 256 << 10:
            raise ArgumentError(f"shared_bytes {shared_bytes}: a block has at most 227 KiB")
        declared = attributes.get("reqnctapercluster")
        self.cluster = _triple(declared or cluster or 1, "cluster")
        self.cluster_size = int(np.prod(self.cluster))
        if any(g % c for g, c in zip(self.grid, self.cluster, strict=True)):
            raise ArgumentError(f"grid {self.grid} is no multiple of the cluster {self.cluster}")
        self.seed, self.max_steps, self.sms = seed, max_steps, sms
        self.counters = Counters(program)
        self.memory = DeviceMemory()
        self.symbols: dict[str, int] = {}
        self.race_state: Any = None
        self._place_variables()
        self._place_arguments(list(args))

    def block_index(self, cta: int) -> tuple[int, int, int]:
        """blockIdx of a CTA; those of one cluster follow each other."""
        cx, cy, cz = self.cluster
        gx, gy = self.grid[0] // cx, self.grid[1] // cy
        which, inside = divmod(cta, self.cluster_size)
        ix, iy, iz = inside % cx, inside // cx % cy, inside // (cx * cy)
        return (which % gx * cx + ix, which // gx % gy * cy + iy, which // (gx * gy) * cz + iz)

    def _place_variables(self) -> None:
        pending = []
        for name, variable in self.program.device.items():
            buffer = np.zeros(-(-variable.size // 8) * 8, np.uint8)[: variable.size]
            placed = self.memory.add(buffer, f"variable {name}", variable.space != "const")
            self.symbols[name] = placed.start
            pending.append((variable, buffer))
        for variable, buffer in pending:
            at = 0
            for element, value in variable.init or ():
                size = WIDTH[element] // 8
                if isinstance(value, Sym):
                    value = self.symbols[value.name] + value.offset
                if at + size > variable.size:
                    raise ArgumentError(f"the initializer of {variable.name} is longer than the variable")
                buffer[at : at + size] = np.frombuffer(int(value).to_bytes(size, "little"), np.uint8)
                at += size

    def _place_arguments(self, args: list) -> None:
        params = self.program.params
        if len(args) != len(params):
            raise ArgumentError(f"args: {len(args)} given, {self.program.entry} has {len(params)} parameters")
        held = [(i, a.array if isinstance(a, TensorMap) else a) for i, a in enumerate(args)]
        arrays = [(i, a) for i, a in held if isinstance(a, np.ndarray)]
        addresses = place_arrays(self.memory, arrays)
        block = np.zeros(max(self.program.param_bytes, 8), np.uint8)
        for index, (arg, (name, (offset, size))) in enumerate(zip(args, params.items(), strict=True)):
            block[offset : offset + size] = self._bytes(index, arg, name, size, addresses)
        self.param_bytes = block
        placed = self.memory.add(block, "the parameters", False)
        self.param_address = placed.start

    def _bytes(self, index: int, arg: Any, name: str, size: int, addresses: dict[int, int]) -> np.ndarray:
        where = f"args[{index}] ({name})"
        if isinstance(arg, np.ndarray):
            if size != 8:
                raise ArgumentError(f"{where}: an array is a pointer of 8 bytes, the parameter has {size}")
            return np.frombuffer(addresses[index].to_bytes(8, "little"), np.uint8)
        if arg is None and size == 8:
            return np.zeros(8, np.uint8)
        if isinstance(arg, TensorMap):
            raw = arg.encode(addresses[index])
            if size != len(raw):
                raise ArgumentError(f"{where}: a tensor map has {len(raw)} bytes, the parameter {size}")
            return np.frombuffer(raw, np.uint8)
        if isinstance(arg, (bytes, bytearray)):
            if len(arg) != size:
                raise ArgumentError(f"{where}: {len(arg)} bytes given, the parameter has {size}")
            return np.frombuffer(bytes(arg), np.uint8)
        if isinstance(arg, np.generic):
            if arg.dtype.itemsize != size:
                raise ArgumentError(f"{where}: {arg.dtype} has {arg.dtype.itemsize} bytes, the parameter has {size}")
            return np.frombuffer(arg.tobytes(), np.uint8)
        if isinstance(arg, bool):
            return np.frombuffer(int(arg).to_bytes(size, "little"), np.uint8)
        if isinstance(arg, int):
            if not -(1 << 8 * size - 1) <= arg < 1 << 8 * size:
                raise ArgumentError(f"{where}: {arg} does not fit {size} bytes")
            return np.frombuffer((arg & (1 << 8 * size) - 1).to_bytes(size, "little"), np.uint8)
        if isinstance(arg, float) and size in (4, 8):
            return np.frombuffer((np.float32 if size == 4 else np.float64)(arg).tobytes(), np.uint8)
        raise ArgumentError(f"{where}: {type(arg).__name__} is not accepted; pass a NumPy array or scalar")

    def make_race(self, machine: Machine) -> Any:
        from .race import RaceChecker

        if self.race_state is None:
            from .race import GlobalHistory

            self.race_state = GlobalHistory(self)
        return RaceChecker(machine, self.race_state)

    def wave_size(self) -> int:
        """CTAs that run together: as many as fit the memory bound, whole clusters."""
        program = self.program
        warps = -(-self.threads // 32)
        registers = sum(max(w, 8) // 8 for w in program.slots) * warps * 32
        shared = (program.dynamic_start + self.shared_bytes) * (2 + (1 + warps if "race" in self.checks else 0))
        frame = program.frame_bytes * 2 * warps * 32
        each = registers + shared + frame + 4096
        count = max(1, min(WAVE_WARPS // warps, WAVE_BYTES // each))
        return max(self.cluster_size, count // self.cluster_size * self.cluster_size)

    def run(self) -> Result:
        total = self.grid[0] * self.grid[1] * self.grid[2]
        wave = self.wave_size()
        # Waves of equal size, in whole clusters: the last one would else be nearly empty.
        clusters = -(-total // self.cluster_size)
        per_wave = max(wave // self.cluster_size, 1)
        waves = -(-clusters // per_wave)
        wave = -(-clusters // waves) * self.cluster_size
        self.counters.blocks = total
        self.counters.warps = total * -(-self.threads // 32)
        with np.errstate(all="ignore"):
            first = 0
            while first < total:
                count = min(wave, total - first)
                Machine(self, first, count).run()
                first += count
        self.counters.dram_bytes = 32 * sum(
            int(a.sectors.sum()) for a in self.memory.regions.values() if a.label != "the parameters"
        )
        return Result(self.counters)
