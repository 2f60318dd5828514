"""What can be said of the kernels without a GPU: instructions, registers, bytes, conflicts, waves, held to their bars.

    python benchmarks/bench_static.py                       tables for sm_80
    python benchmarks/bench_static.py --arch sm_90 --batches 8,16
    python benchmarks/bench_static.py --json > static.json

Instruction counts are of warps, over a whole launch in the emulator (PTX), divided by the packed 32-bit words that a
warp's 32 lanes read; the main loop is the innermost one with the tensor instruction, in PTX and in SASS. None of this
is a time.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import click
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import cupyq
from cupyq import compiler, devices, emulator, kernels, reference
from cupyq.compiler import sass
from cupyq.errors import NotInstalled
from cupyq.kernels import Config, Problem, W4A16Config, dequant, pack, quantize_activations, w4a16
from cupyq.kernels.problem import NUMPY_DTYPES
from cupyq.predictor.constants import CONSTANTS

BATCHES = (1, 8, 16, 32, 64, 128)
PTX_BAR = {8: 18, 16: 20, 32: 24, 64: 29}
SASS_BAR = {8: 14, 16: 16, 32: 20, 64: 25}
MARLIN = {8: 25.0, 16: 25.1, 32: 27.2, 64: 35.2}
"""Marlin's kernel for sm_80, N=K=4096, groups of 128, counted the same way."""
BFLOAT16_MORE, ZEROS_MORE = 4, 1
"""Instructions a word that bfloat16, and zero points, may cost beyond float16 without them."""
DRAM_BAR = 1.02
WAVE_BAR = 0.90

UNDIVIDED = {
    8: W4A16Config(8, 4, 1, 4, 128, 4, 1, "sums"),
    16: W4A16Config(16, 4, 1, 4, 128, 4, 1, "sums"),
    32: W4A16Config(32, 4, 2, 2, 128, 3, 1, "sums"),
    64: W4A16Config(64, 4, 4, 1, 128, 3, 1, "weights"),
}
"""What the template takes where one CTA has all of a tile's K, so that nothing is added up twice: for larger weights.
With 4096 x 4096 these have too few CTAs for the default to choose them, but they are held to the same bars."""

LAYERS = ((4096, 4096), (4096, 14336), (14336, 4096), (8192, 28672), (5120, 27648))
"""(K, N) of layers of language models."""
WAVE_DEVICES = ("a10", "a100-sxm", "h100-sxm", "rtx-5090")
"""GPUs with 72, 108, 132 and 170 SMs."""


@dataclass(frozen=True)
class Row:
    """One kernel, compiled for one arch and run once in the emulator.

    `ptx`, `ptx_loop` and `sass_loop` are warp instructions a packed word; `dram` is distinct bytes of memory touched
    over the ideal, the workspace of split-K left out, whose `workspace` bytes live in L2; `conflicts` are passes over
    the banks beyond the least possible, in the main loop and in the whole kernel.
    """

    arch: str
    kernel: str
    m: int
    config: str
    ptx: float | None
    ptx_loop: float | None
    sass_loop: float | None
    marlin: float | None
    registers: int
    spills: int
    shared: int
    loop_conflicts: int
    conflicts: int
    sectors: float
    dram: float
    workspace: int
    missed: str | None = None

    @property
    def met(self) -> str:
        """ "met", or which bars are not."""
        return "met" if not self.missed else f"not met: {self.missed}"


@dataclass(frozen=True)
class Case:
    """What is counted: a config and the arrays it runs on."""

    kernel: str
    prob: Problem
    cfg: Config
    x: np.ndarray | None
    qw: Any
    options: dict[str, Any]
    words: int  # packed words of the weight; 0 where there is none
    ideal: int  # bytes that must be read and written


def cases(arch: str, k: int, n: int, batches: Iterable[int], kinds: Iterable[str]) -> Iterator[Case]:
    """Yield every family's default config for every batch."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((k, n), dtype=np.float32)
    kinds = set(kinds)
    for kind, dtype, symmetric in (("fp16", "float16", True), ("bf16", "bfloat16", True), ("zeros", "float16", False)):
        if kind not in kinds or (kind == "bf16" and arch == "sm_75"):
            continue
        qw = cupyq.quantize(weight, "w4a16", group_size=128, symmetric=symmetric, scale_dtype=dtype)
        for m in batches:
            prob = Problem("w4a16", m, n, k, 128, symmetric, dtype, dtype)
            x = rng.standard_normal((m, k)).astype(NUMPY_DTYPES[dtype])
            ideal = _stored(qw) + x.nbytes + 2 * m * n
            name = {"fp16": "w4a16", "bf16": "w4a16 bf16", "zeros": "w4a16 zeros"}[kind]
            yield Case(name, prob, kernels.default(prob, arch), x, qw, {}, qw.packed.size, ideal)
        if kind == "fp16":
            for m in batches:
                if m in UNDIVIDED and kernels.check(UNDIVIDED[m], prob.with_m(m), arch) is None:
                    x = rng.standard_normal((m, k)).astype(np.float16)
                    ideal = _stored(qw) + x.nbytes + 2 * m * n
                    yield Case("w4a16 undivided", prob.with_m(m), UNDIVIDED[m], x, qw, {}, qw.packed.size, ideal)
    for op in ("w8a8-int8", "w8a8-fp8"):
        if "w8a8" not in kinds or (op == "w8a8-fp8" and int(arch[3:].rstrip("a")) < 89):
            continue
        qw = cupyq.quantize(weight, op)
        for m in batches:
            prob = Problem(op, m, n, k)
            cfg = kernels.default(prob, arch)
            x, options = rng.standard_normal((m, k)).astype(np.float16), {}
            read = x.nbytes
            if not cfg.fused:
                x, options["x_scale"] = reference.quantize_activations(x, op)
                read = x.nbytes + options["x_scale"].nbytes
            yield Case(op, prob, cfg, x, qw, options, qw.packed.size, _stored(qw) + read + 2 * m * n)
    if "helpers" in kinds:
        yield from _helpers(weight, max(batches))


def _helpers(weight: np.ndarray, m: int) -> Iterator[Case]:
    k, n = weight.shape
    qw = cupyq.quantize(weight, "w4a16", group_size=128)
    prob = Problem("w4a16", 1, n, k)
    yield Case("dequant", prob, dequant.default(prob), None, qw, {}, qw.packed.size, _stored(qw) + 2 * k * n)
    codes = cupyq.unpack(qw)[0]
    yield Case("pack", prob, pack.default(prob), codes, None, {}, qw.packed.size, codes.nbytes + qw.packed.nbytes)
    prob = Problem("w8a8-int8", m, n, k)
    x = np.random.default_rng(1).standard_normal((m, k)).astype(np.float16)
    cfg = quantize_activations.default(prob)
    yield Case("quantize_activations", prob, cfg, x, None, {}, 0, x.nbytes + m * k + 4 * m)


def _stored(qw: Any) -> int:
    return qw.packed.nbytes + qw.scales.nbytes + (0 if qw.zeros is None else qw.zeros.nbytes)


def count(case: Case, arch: str) -> Row:
    """Compile and run one case."""
    cfg, prob = case.cfg, case.prob
    compiled = compiler.compile_kernel(cfg, prob, arch)
    launch = cfg.launch(prob)
    options = dict(case.options)
    if launch.partial_words:
        # Words that no sum of finite products has, so that what was written can be told.
        options["workspace"] = (np.full(launch.partial_words, 0xFFFFFFFF, np.uint32), np.zeros(launch.tiles, np.uint32))
    call = kernels.call(cfg, prob, case.x, case.qw, **options)
    counters = emulator.launch(
        compiled.ptx, call.entry, call.grid, call.block, call.args, call.shared_bytes, checks=()
    ).counters
    workspace = _workspace(*options["workspace"]) if launch.partial_words else 0
    loops = [loop for loop in counters.by_loop() if loop["tensor"]]
    loop = max(loops, key=lambda row: (row["tensor"], -row["instructions"]), default=None)
    mma_per_word = _mma_per_word(case)
    machine = _machine_loop(compiled.cubin) if loop else None
    inside = [row for row in counters.by_line() if loop and loop["first_line"] <= row["line"] <= loop["last_line"]]
    touched, needed = sum(counters.global_sectors.values()), sum(counters.global_ideal_sectors.values())
    return Row(
        arch,
        case.kernel,
        prob.m,
        _short(cfg),
        counters.total_instructions / (case.words / 32) if case.words else None,
        loop["instructions"] / loop["tensor"] * mma_per_word if loop else None,
        machine.instructions / machine.tensor * mma_per_word if machine else None,
        MARLIN.get(prob.m) if case.kernel.startswith("w4a16") and (prob.k, prob.n) == (4096, 4096) else None,
        compiled.registers,
        compiled.spill_bytes,
        launch.shared_bytes + compiled.shared_bytes,
        sum(row["conflicts"] for row in inside),
        sum(counters.shared_conflicts.values()),
        touched / needed,
        (counters.dram_bytes - workspace) / case.ideal,
        workspace,
    )


def _mma_per_word(case: Case) -> float:
    """Products of one word of weights with all tokens: those of the main loop, without the ones that clear sums."""
    if isinstance(case.cfg, W4A16Config):  # a word is 16 x 16 weights, eight tokens a product
        return -(-case.prob.m // case.cfg.block_m) * case.cfg.block_m / 8
    if isinstance(case.cfg, kernels.W8A8Config):  # four words are 16 x 32 weights
        return -(-case.prob.m // case.cfg.block_m) * case.cfg.block_m / 32
    return 0.0


def _machine_loop(cubin: bytes) -> sass.Loop | None:
    try:
        return sass.main_loop(cubin)
    except NotInstalled:
        return None


def _workspace(partials: np.ndarray, arrivals: np.ndarray) -> int:
    """Bytes of whole sectors of the split-K workspace that a launch touched."""
    words = np.pad(partials, (0, -partials.size % 8), constant_values=0xFFFFFFFF).reshape(-1, 8)
    return 32 * int((words != 0xFFFFFFFF).any(axis=1).sum()) + -(-arrivals.nbytes // 32) * 32


def _short(cfg: Config) -> str:
    fields = [value for name, value in kernels.to_dict(cfg).items() if name != "family" and value is not False]
    return " ".join(map(str, fields))


def judged(rows: list[Row]) -> list[Row]:
    """Return the rows with the bars that they miss."""
    plain = {(row.arch, row.m): row for row in rows if row.kernel == "w4a16"}
    return [_judge(row, plain.get((row.arch, row.m))) for row in rows]


def _judge(row: Row, plain: Row | None) -> Row:
    missed = []
    if row.kernel in ("w4a16", "w4a16 undivided") and row.arch == "sm_80":
        for name, value, bar in (("PTX", row.ptx, PTX_BAR), ("SASS", row.sass_loop, SASS_BAR)):
            if value is not None and row.m in bar and value > bar[row.m]:
                missed.append(f"{name} > {bar[row.m]}")
    for kernel, more in (("w4a16 bf16", BFLOAT16_MORE), ("w4a16 zeros", ZEROS_MORE)):
        if row.kernel == kernel and plain is not None and row.m <= 64 and row.ptx > plain.ptx + more:
            missed.append(f"PTX > fp16's + {more}")
    if row.spills:
        missed.append("spills")
    if row.loop_conflicts:
        missed.append("conflicts")
    if row.dram > DRAM_BAR:
        missed.append("DRAM > 1.02")
    return Row(**{**asdict(row), "missed": ", ".join(missed)})


def bytes_in_flight(cfg: W4A16Config, prob: Problem, device: devices.DeviceSpec) -> tuple[float, float]:
    """Return KB of weights and scales that the CTAs of an SM have under way, and what DRAM's latency asks for."""
    compiled = compiler.compile_kernel(cfg, prob, device.arch)
    launch = cfg.launch(prob)
    shared = launch.shared_bytes + compiled.shared_bytes + device.shared_reserved
    registers = -(-compiled.registers // 8) * 8 * cfg.threads
    resident = min(
        device.shared_per_sm // shared,
        device.registers_per_sm // registers,
        device.threads_per_sm // cfg.threads,
        device.blocks_per_sm,
        -(-launch.grid[0] // device.sms),
    )
    stage = cfg.stage_bytes(prob) - 2 * cfg.block_m * cfg.block_k  # activations come from L2
    have = resident * (cfg.stages - 1) * stage
    need = CONSTANTS.dram_latency_us * 1e-6 * device.dram_gbps * 1e9 / device.sms
    return have / 1e3, need / 1e3


@dataclass(frozen=True)
class Sheet:
    """A table before it is drawn; cells are text, and columns in `left` are words."""

    title: str
    columns: tuple[str, ...]
    cells: list[tuple[str, ...]]
    left: tuple[str, ...]

    def rich(self) -> Table:
        """Return the table for a terminal."""
        table = Table(box=box.SIMPLE_HEAD)
        for name in self.columns:
            table.add_column(name, justify="left" if name in self.left else "right", no_wrap=name != "bars")
        for row in self.cells:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """Return the table as Markdown."""
        rule = (("---" if name in self.left else "--:") for name in self.columns)
        lines = [" | ".join(row) for row in (self.columns, rule, *self.cells)]
        return "\n".join(f"| {line} |" for line in lines)


def kernel_sheet(rows: list[Row]) -> Sheet:
    """Return the first table."""
    columns = (
        "arch", "kernel", "M", "config", "PTX", "PTX loop", "SASS loop", "Marlin", "regs", "spills", "shared",
        "conflicts", "sectors", "DRAM", "workspace", "bars",
    )  # fmt: skip
    cells = [
        (
            row.arch,
            row.kernel,
            str(row.m),
            row.config,
            *("" if v is None else f"{v:.1f}" for v in (row.ptx, row.ptx_loop, row.sass_loop, row.marlin)),
            str(row.registers),
            str(row.spills),
            f"{row.shared / 1024:.1f} K",
            f"{row.loop_conflicts}/{row.conflicts}",
            f"{row.sectors:.3f}",
            f"{row.dram:.3f}",
            f"{row.workspace / 1024:.0f} K" if row.workspace else "",
            row.met,
        )
        for row in rows
    ]
    title = "Warp instructions a packed word, shared memory, conflicts (loop/all), sectors and DRAM over the ideal"
    return Sheet(title, columns, cells, ("arch", "kernel", "config", "bars"))


def flight_rows(k: int, n: int, batches: Iterable[int]) -> list[dict[str, Any]]:
    """Return bytes in flight of the default W4A16 config for every GPU of the catalogue with kernels."""
    rows = []
    for name in devices.names():
        device = devices.get(name)
        if not device.runs_kernels:
            continue
        for m in batches:
            prob = Problem("w4a16", m, n, k)
            have, need = bytes_in_flight(kernels.default(prob, device), prob, device)
            rows.append({"device": name, "m": m, "have_kb": have, "need_kb": need, "met": have >= need})
    return rows


def wave_rows(batches: Iterable[int]) -> list[dict[str, Any]]:
    """Return wave efficiency of the default W4A16 config for layers of language models."""
    rows = []
    for k, n in LAYERS:
        for name in WAVE_DEVICES:
            device = devices.get(name)
            for m in batches:
                prob = Problem("w4a16", m, n, k)
                value = w4a16.wave_efficiency(kernels.default(prob, device), prob, device.sms)
                rows.append({"k": k, "n": n, "sms": device.sms, "m": m, "efficiency": value, "met": value >= WAVE_BAR})
    return rows


def flight_sheet(rows: list[dict[str, Any]]) -> Sheet:
    """Return KB in flight by GPU and batch."""
    cells = []
    for device in dict.fromkeys(row["device"] for row in rows):
        mine = [row for row in rows if row["device"] == device]
        have = (f"{row['have_kb']:.1f}{'' if row['met'] else '*'}" for row in mine)
        cells.append((device, f"{mine[0]['need_kb']:.1f}", *have))
    columns = ("device", "need", *(f"M={m}" for m in sorted({row["m"] for row in rows})))
    title = "W4A16: KB of weights in flight an SM, default config; * under the need, latency x bandwidth / SMs"
    return Sheet(title, columns, cells, ("device",))


def wave_sheet(rows: list[dict[str, Any]]) -> Sheet:
    """Return the lowest wave efficiency over the batches, by layer and GPU."""
    counts = list(dict.fromkeys(row["sms"] for row in rows))
    cells = []
    for k, n in LAYERS:
        line = [f"{k} x {n}"]
        for sms in counts:
            low = min((r for r in rows if (r["k"], r["n"], r["sms"]) == (k, n, sms)), key=lambda r: r["efficiency"])
            line.append(f"{low['efficiency']:.3f}" + ("" if low["met"] else f"* (M={low['m']})"))
        cells.append(tuple(line))
    title = f"W4A16: wave efficiency, default config, the lowest over M; * under {WAVE_BAR:.2f}"
    return Sheet(title, ("K x N", *(f"{sms} SMs" for sms in counts)), cells, ("K x N",))


KINDS = ("fp16", "bf16", "zeros", "w8a8", "helpers")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--arch", "archs", default="sm_80", show_default=True, metavar="ARCH,...")
@click.option("--batches", default=",".join(map(str, BATCHES)), show_default=True, metavar="M,...")
@click.option("--shape", default="4096x4096", show_default=True, metavar="KxN", help="Of the first table.")
@click.option("--kinds", default=",".join(KINDS), show_default=True, metavar="KIND,...", help="Of the first table.")
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object.")
@click.option("--csv", "as_csv", is_flag=True, help="The first table as CSV.")
@click.option("--markdown", is_flag=True, help="The tables as Markdown.")
def main(archs: str, batches: str, shape: str, kinds: str, as_json: bool, as_csv: bool, markdown: bool) -> None:
    """Print static figures of every family's default config, and whether they meet their bars."""
    k, n = (int(part) for part in shape.split("x"))
    tokens = [int(part) for part in batches.split(",")]
    chosen = kinds.split(",")
    if unknown := set(chosen) - set(KINDS):
        raise click.BadParameter(f"{', '.join(sorted(unknown))}: accepted are {', '.join(KINDS)}", param_hint="--kinds")
    err = Console(stderr=True)
    rows = []
    for arch in archs.split(","):
        for case in cases(arch, k, n, tokens, chosen):
            if err.is_terminal:
                err.print(f"{arch} {case.kernel} M={case.prob.m}", highlight=False)
            rows.append(count(case, arch))
    rows = judged(rows)
    if as_csv:
        writer = csv.DictWriter(sys.stdout, list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
        return
    flight, waves = flight_rows(k, n, tokens), wave_rows(tokens)
    if as_json:
        kernels_found = [{**asdict(row), "bars": row.met} for row in rows]
        print(json.dumps({"kernels": kernels_found, "bytes_in_flight": flight, "waves": waves}, indent=1))
        return
    sheets = (kernel_sheet(rows), flight_sheet(flight), wave_sheet(waves))
    if markdown:
        print("\n\n".join(f"{sheet.title}:\n\n{sheet.markdown()}" for sheet in sheets))
        return
    console = Console(width=None if sys.stdout.isatty() else 190)
    for sheet in sheets:
        console.print(f"\n{sheet.title}", highlight=False)
        console.print(sheet.rich())


if __name__ == "__main__":
    main()
