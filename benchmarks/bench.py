"""Time the kernels on the GPU of this machine, as the tuner does: cold weights, CUDA graphs, medians with intervals.

    python benchmarks/bench.py
    python benchmarks/bench.py --shapes 4096x14336,8192x28672 --batches 1,16,128 --json

Of each problem: the default config, what the tuning database holds for this GPU (`python -m cupyq.tune` fills it),
dequantizing followed by cuBLAS, and plain 16-bit cuBLAS. Without a GPU there is nothing to print, and no number is.
"""

from __future__ import annotations

import csv
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import click
from rich import box
from rich.console import Console
from rich.table import Table

from cupyq import devices, dispatch, kernels
from cupyq.devices import DeviceSpec
from cupyq.errors import ArgumentError, CupyqError
from cupyq.kernels import Problem, dequant
from cupyq.tuner import workloads
from cupyq.tuner.candidate import Candidate
from cupyq.tuner.measure import Timed

OPS = ("w4a16", "w2a16", "w8a16", "w8a8-int8", "w8a8-fp8")


@dataclass(frozen=True)
class Row:
    """One way of computing one problem; times in microseconds, with the bounds of the median's 95 % interval."""

    k: int
    n: int
    m: int
    what: str
    config: str
    time_us: float | None
    low_us: float | None
    high_us: float | None
    gbps: float | None  # of packed weights
    speedup: float | None  # over plain 16-bit cuBLAS
    reason: str | None


def candidates(problem: Problem, device: DeviceSpec) -> dict[str, Candidate]:
    """Return what is measured of a problem, by name."""
    found = {"default": Candidate("fused", kernels.default(problem, device))}
    choice = dispatch.choose(problem, device)
    if choice.config is not None and choice.row is not None:
        found["tuned"] = Candidate(choice.path, choice.config)
    if problem.weight_only:
        found["dequant"] = Candidate("dequant", dequant.default(problem))
    found["cuBLAS"] = Candidate("fp16")
    return {
        name: candidate
        for name, candidate in found.items()
        if candidate.config is None or kernels.check(candidate.config, problem, device) is None
    }


def measure(problem: Problem, device: DeviceSpec, objective: Timed) -> list[Row]:
    """Measure the candidates of a problem, interleaved, so that drift meets all alike."""
    named = candidates(problem, device)
    outcomes = dict(zip(named, objective.finals(list(named.values()), problem), strict=True))
    plain = outcomes["cuBLAS"].time_us if outcomes["cuBLAS"].ok else None
    rows = []
    for name, outcome in outcomes.items():
        time_us = outcome.time_us if outcome.ok else None
        rows.append(
            Row(
                problem.k,
                problem.n,
                problem.m,
                name,
                str(named[name]),
                time_us,
                outcome.low_us if outcome.ok else None,
                outcome.high_us if outcome.ok else None,
                problem.n * problem.k * problem.bits / 8e3 / time_us if time_us and name != "cuBLAS" else None,
                plain / time_us if time_us and plain else None,
                outcome.reason,
            )
        )
    return rows


def table(rows: Sequence[Row], title: str) -> Table:
    """Return the rows as a table for a terminal."""
    drawn = Table(title=title, box=box.SIMPLE_HEAD)
    for name in ("K x N", "M", "what", "config", "us", "low", "high", "GB/s", "x cuBLAS"):
        drawn.add_column(name, justify="left" if name in ("K x N", "what", "config") else "right")
    for row in rows:
        figures = (row.time_us, row.low_us, row.high_us, row.gbps, row.speedup)
        text = ("" if v is None else f"{v:.0f}" if i == 3 else f"{v:.2f}" for i, v in enumerate(figures))
        config = row.config if row.reason is None else f"{row.config}: {row.reason}"
        drawn.add_row(f"{row.k} x {row.n}", str(row.m), row.what, config, *text)
    return drawn


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--shapes", default="4096x4096,4096x14336,14336x4096", show_default=True, metavar="KxN,...")
@click.option("--batches", default="1,8,16,32,64,128,256", show_default=True, metavar="M,...")
@click.option("--op", type=click.Choice(OPS), default="w4a16", show_default=True)
@click.option("--dtype", type=click.Choice(["float16", "bfloat16"]), default="float16", show_default=True)
@click.option("--group-size", type=int, default=128, show_default=True)
@click.option("--seconds", type=float, default=5.0, show_default=True, help="Most time for the samples of one config.")
@click.option("--json", "as_json", is_flag=True)
@click.option("--csv", "as_csv", is_flag=True)
def main(
    shapes: str, batches: str, op: str, dtype: str, group_size: int, seconds: float, as_json: bool, as_csv: bool
) -> None:
    """Measure default and tuned configs, dequantizing with cuBLAS, and plain cuBLAS on this machine's GPU."""
    try:
        device = devices.live()
        device.require_kernels()
        problems = [
            Problem(op, int(m), n, k, group_size if op in kernels.problem.WEIGHT_ONLY else -1, True, dtype)
            for k, n in workloads.parse_shapes(shapes)
            for m in batches.split(",")
        ]
    except CupyqError as error:
        kind = "" if isinstance(error, ArgumentError) else "nothing to measure: "
        raise click.ClickException(f"{kind}{error}") from None
    from cupyq.tuner.cuda import MeasuredObjective  # asks for CuPy when it is made

    warnings.simplefilter("ignore", dispatch.UntunedWarning)  # that nothing is tuned shows in the table
    objective = MeasuredObjective(device)
    objective.seconds = seconds
    try:
        rows = [row for problem in problems for row in measure(problem, device, objective)]
    finally:
        objective.close()
    if as_json:
        print(json.dumps({"device": device.title, "rows": [asdict(row) for row in rows]}, indent=1))
    elif as_csv:
        writer = csv.DictWriter(sys.stdout, list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(table(rows, f"{device.title}, {op}, {dtype}"))


if __name__ == "__main__":
    main()
