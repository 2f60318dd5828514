"""What NVRTC makes of the default kernels: registers, spills, shared memory and CTAs, per architecture and batch.

    python benchmarks/static.py
    python benchmarks/static.py --op w8a8-int8 --shape 8192x8192

Needs no GPU. Every time that it prints is predicted.
"""

from __future__ import annotations

import sys

import click
from rich import box
from rich.console import Console
from rich.table import Table

from cupyq import compiler, devices, kernels, predictor

# One device for each architecture that has kernels.
DEVICES = ("t4", "a100-sxm", "rtx-3090", "rtx-4090", "h100-sxm", "b200", "rtx-5090")


@click.command()
@click.option("--op", type=click.Choice(["w4a16", "w8a8-int8", "w8a8-fp8"]), default="w4a16", show_default=True)
@click.option("--shape", default="4096x4096", show_default=True, metavar="KxN")
@click.option("--batches", default="1,16,64,256", show_default=True, metavar="M,...")
def main(op: str, shape: str, batches: str) -> None:
    """Compile the default kernel of each architecture and batch, and print what it takes."""
    k, n = (int(part) for part in shape.split("x"))
    table = Table(title=f"default kernels, {op}, {k} x {n}", box=box.SIMPLE_HEAD)
    for heading in ("device", "M", "tile M x N", "stages", "registers", "spills", "shared KiB", "CTAs", "pred. us"):
        table.add_column(heading, justify="left" if heading == "device" else "right", no_wrap=True)
    spilled, refused = 0, []
    for name in DEVICES:
        device = devices.get(name)
        for m in (int(part) for part in batches.split(",")):
            problem = kernels.Problem(op, m=m, n=n, k=k, group_size=128 if op == "w4a16" else -1)
            config = kernels.default(problem, device)
            if reason := kernels.check(config, problem, device):
                refused.append(f"{name}: {reason}")
                break
            compiled = compiler.compile_kernel(config, problem, arch=device.arch)
            launch = config.launch(problem)
            time_us = predictor.predict(config, problem, device, compiled).time_us
            spilled += compiled.spill_bytes
            table.add_row(
                name,
                str(m),
                f"{config.block_m} x {config.block_n}",
                str(config.stages),
                str(compiled.registers),
                str(compiled.spill_bytes),
                f"{(launch.shared_bytes + compiled.shared_bytes) / 1024:.1f}",
                str(launch.grid[0]),
                f"{time_us:.1f}",
            )
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table)
    console.print("\n".join(refused), highlight=False)
    if spilled:
        raise click.ClickException(f"{spilled} bytes of registers spill to memory")


if __name__ == "__main__":
    main()
