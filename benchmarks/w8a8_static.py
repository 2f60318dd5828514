"""What ptxas and the emulator say of the W8A8 main loop and of activation quantization: no GPU needed.

Run as ``python benchmarks/w8a8_static.py``; needs ``cupyq[offline]``.
"""

from __future__ import annotations

import click
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import cupyq
from cupyq import compiler, emulator, kernels, reference
from cupyq.compiler import sass
from cupyq.kernels import Problem, W8A8Config

BAR = {(128, 128): 1.6, (64, 64): 2.5}
"""Most warp instructions beside each mma in the main loop, by block."""

SHAPES = (
    W8A8Config(128, 64, 4, 2, 1, 128, 3),
    W8A8Config(128, 64, 4, 2, 1, 64, 3),
    W8A8Config(128, 64, 2, 4, 1, 128, 3),
    W8A8Config(64, 32, 4, 1, 1, 64, 3),
    W8A8Config(64, 32, 2, 2, 1, 128, 3),
)


def cases() -> list[tuple[str, str, W8A8Config]]:
    """Return (op, arch, config) of every row."""
    found = [("w8a8-int8", "sm_80", cfg) for cfg in SHAPES] + [("w8a8-fp8", "sm_89", cfg) for cfg in SHAPES]
    promoted = [W8A8Config(128, 64, 2, 4, 1, 128, 2, promote_k=k) for k in (128, 256)]
    promoted.append(W8A8Config(64, 32, 2, 2, 1, 128, 2, promote_k=256))
    found += [("w8a8-fp8", "sm_89", cfg) for cfg in promoted]
    found += [("w8a8-fp8-block", "sm_89", W8A8Config(128, 32, 4, 2, 1, 128, 3))]
    return found


def measure(op: str, arch: str, cfg: W8A8Config) -> dict[str, object]:
    """Compile one kernel and run two tiles of it in the emulator."""
    prob = Problem(op, 2 * cfg.block_m, cfg.block_n, 8 * cfg.block_k)
    compiled = compiler.compile_kernel(cfg, prob, arch)
    rng = np.random.default_rng(0)
    qw = cupyq.quantize(rng.standard_normal((prob.k, prob.n), dtype=np.float32), op)
    x = rng.standard_normal((prob.m, prob.k)).astype(np.float16)
    codes, x_scale = reference.quantize_activations(x, op)
    call = kernels.call(cfg, prob, codes, qw, x_scale=x_scale)
    ran = emulator.launch(compiled.ptx, call.entry, call.grid, call.block, call.args, call.shared_bytes, checks=())
    counters = ran.counters
    loop = max(counters.by_loop(), key=lambda row: row["tensor"])
    machine = sass.main_loop(compiled.cubin)
    return {
        "sass": machine.overhead,
        "ptx": (loop["instructions"] - loop["tensor"]) / loop["tensor"],
        "conflicts": sum(counters.shared_conflicts.values()),
        "sectors": sum(counters.global_sectors.values()) / sum(counters.global_ideal_sectors.values()),
        "registers": compiled.registers,
        "spills": compiled.spill_bytes,
    }


def quantization(op: str, m: int, k: int) -> tuple[float, float, int]:
    """Return bytes an element that one launch reads and writes, and ptxas's spills."""
    prob = Problem(op, m, 16, k)
    cfg = kernels.quantize_activations.default(prob)
    compiled = compiler.compile_kernel(cfg, prob, "sm_89")
    x = np.random.default_rng(0).standard_normal((m, k)).astype(np.float16)
    call = kernels.call(cfg, prob, x)
    ran = emulator.launch(compiled.ptx, call.entry, call.grid, call.block, call.args, call.shared_bytes, checks=())
    scales = m * 4 * (-(-k // 128) if op == "w8a8-fp8-block" else 1)
    read, written = ran.counters.bytes["global load"], ran.counters.bytes["global store"] - scales
    return read / (m * k), written / (m * k), compiled.spill_bytes


@click.command()
def main() -> None:
    """Print the static figures of W8A8."""
    console = Console(width=120)
    table = Table(title="W8A8 main loop: warp instructions beside each mma", box=box.SIMPLE_HEAD)
    for heading in (
        "op",
        "arch",
        "block",
        "warp k",
        "promote",
        "SASS",
        "PTX",
        "bar",
        "conflicts",
        "sectors",
        "regs",
        "spills",
    ):
        table.add_column(heading, justify="left" if heading in ("op", "arch") else "right", no_wrap=True)
    for op, arch, cfg in cases():
        row = measure(op, arch, cfg)
        bar = BAR[cfg.block_m, cfg.block_n]
        table.add_row(
            op, arch, f"{cfg.block_m}x{cfg.block_n}", str(cfg.warp_k), str(cfg.promote_k), f"{row['sass']:.2f}",
            f"{row['ptx']:.2f}", f"{bar}", str(row["conflicts"]), f"{row['sectors']:.2f}", str(row["registers"]),
            str(row["spills"]),
        )  # fmt: skip
    console.print(table)
    table = Table(title="Activation quantization, float16: bytes an element", box=box.SIMPLE_HEAD)
    for heading in ("op", "M x K", "read", "written", "spills"):
        table.add_column(heading, justify="left" if heading == "op" else "right")
    for op in ("w8a8-int8", "w8a8-fp8", "w8a8-fp8-block"):
        for m, k in ((16, 4096), (4, 16384), (2, 65536)):
            read, written, spills = quantization(op, m, k)
            table.add_row(op, f"{m} x {k}", f"{read:.3f}", f"{written:.3f}", str(spills))
    console.print(table)


if __name__ == "__main__":
    main()
