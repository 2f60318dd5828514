"""``python -m cupyq.emulator``: run a .ptx or .cu file on the CPU and print what it did, or what it did wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table

from cupyq.errors import ArgumentError, CompileError, CupyqError, NotInstalled

from . import EmulatorFault, TensorMap, launch
from .launch import CHECKS

EXTRA_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


def dtype_of(name: str) -> np.dtype:
    """A dtype by name, those of ml_dtypes too."""
    try:
        return np.dtype(getattr(ml_dtypes, name) if name in EXTRA_DTYPES else name)
    except (TypeError, AttributeError):
        raise ArgumentError(f"dtype {name!r} is not known") from None


def compile_file(path: Path, arch: str, options: tuple[str, ...]) -> str:
    """PTX of a CUDA C++ file, made by NVRTC with line numbers."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as e:
        raise NotInstalled("compiling a .cu file needs NVRTC: pip install 'cupyq[offline]'") from e
    _, program = nvrtc.nvrtcCreateProgram(path.read_bytes(), path.name.encode(), 0, [], [])
    flags = [o.encode() for o in (f"-arch={arch}", "-lineinfo", f"-I{path.parent}", *options)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    if int(status):
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise CompileError(log.decode().rstrip("\0 \n"))
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    return text.decode().rstrip("\0")


def argument(spec: Any, rng: np.random.Generator) -> Any:
    """One argument of the JSON list: a number, null, or an object; see the docs."""
    if spec is None or (isinstance(spec, (int, float)) and not isinstance(spec, bool)):
        return spec
    if not isinstance(spec, dict):
        raise ArgumentError(f"an argument must be a number, null or an object, got {spec!r}")
    if "value" in spec:
        return dtype_of(spec.get("dtype", "int32")).type(spec["value"])
    if "file" in spec:
        array = np.load(spec["file"])
    else:
        dtype, shape = dtype_of(spec.get("dtype", "float32")), tuple(spec.get("shape", ()))
        fill = spec.get("fill", 0)
        if fill == "random":
            integral = np.issubdtype(dtype, np.integer)
            array = (rng.integers(-128, 128, shape) if integral else rng.standard_normal(shape)).astype(dtype)
        elif fill == "arange":
            array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
        elif isinstance(fill, (int, float)):
            array = np.full(shape, fill).astype(dtype)
        else:
            raise ArgumentError(f"fill must be a number, 'random' or 'arange', got {fill!r}")
    if "box" in spec:
        return TensorMap(array, spec["box"], spec.get("swizzle", "none"))
    return array


def numbers(text: str | None, default: Any) -> Any:
    if text is None:
        return default
    try:
        return tuple(int(x) for x in text.replace("x", ",").split(","))
    except ValueError:
        raise ArgumentError(f"expected up to three numbers such as 8,1,1, got {text!r}") from None


def show_rows(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    if not rows:
        console.print(f"{title}: none")
        return
    columns = [c for c in rows[0] if any(r[c] for r in rows) or c == "line"]
    table = Table(title=title)
    for c in columns:
        table.add_column(c.replace("_", " "), justify="left" if c in ("line", "text") else "right")
    for row in rows:
        table.add_row(*(f"{row[c]:,}" if isinstance(row[c], int) and c != "line" else str(row[c]) for c in columns))
    console.print(table)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--args",
    "spec",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON: the launch and its arguments.",
)
@click.option("--entry", help="Kernel to run, where the file has more than one.")
@click.option("--grid", help="Blocks, such as 8 or 8,4.")
@click.option("--block", help="Threads of a block, such as 128.")
@click.option("--shared", type=int, help="Dynamic shared memory, bytes.")
@click.option("--check", "checks", multiple=True, type=click.Choice(CHECKS), help="Checks to run; all by default.")
@click.option("--seed", type=int, help="Shuffle the order in which warps run.")
@click.option("--arch", default="sm_80", show_default=True, help="What a .cu file is compiled for.")
@click.option("--option", "options", multiple=True, help="One more NVRTC option.")
@click.option("--by-line", is_flag=True, help="Counters for each PTX line.")
@click.option("--by-source", is_flag=True, help="Counters for each line of the CUDA source.")
@click.option("--by-loop", is_flag=True, help="Instructions for each loop.")
@click.option("--json", "as_json", is_flag=True, help="Print the counters as JSON.")
def main(
    file: Path, spec: Path | None, entry: str | None, grid: str | None, block: str | None, shared: int | None,
    checks: tuple[str, ...], seed: int | None, arch: str, options: tuple[str, ...], by_line: bool, by_source: bool,
    by_loop: bool, as_json: bool,
) -> None:  # fmt: skip
    """Run a kernel of FILE (.ptx or .cu) on the CPU, with every check on, and print its counters.

    Exit status: 0 when the kernel is clean, 1 when a fault was found, 2 when it could not be run.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=180)
    try:
        said = json.loads(spec.read_text()) if spec else {}
        said = {"args": said} if isinstance(said, list) else said
        ptx = compile_file(file, arch, options) if file.suffix in (".cu", ".cuh") else file.read_text()
        rng = np.random.default_rng(said.get("random_seed", 0))
        args = [argument(a, rng) for a in said.get("args", [])]
        shared_bytes = shared if shared is not None else said.get("shared_bytes", 0)
        result = launch(
            ptx,
            entry or said.get("entry"),
            numbers(grid, said.get("grid", 1)),
            numbers(block, said.get("block", 32)),
            args,
            shared_bytes,
            checks=checks or CHECKS,
            seed=seed,
            cluster=said.get("cluster"),
        )
    except EmulatorFault as fault:
        console.print(f"[bold red]{fault.kind}[/]", end=" ")
        console.print(fault.message, markup=False, highlight=False)
        console.print(f"  thread {fault.thread} of block {fault.block}", highlight=False)
        console.print(f"  PTX line {fault.line}: {fault.text}", markup=False, highlight=False)
        if fault.source:
            console.print(f"  source {fault.source}", markup=False, highlight=False)
        raise SystemExit(1) from None
    except (CupyqError, json.JSONDecodeError, OSError) as e:
        console.print(str(e), markup=False, highlight=False)
        raise SystemExit(2) from None
    for i, (a, s) in enumerate(zip(args, said.get("args", []), strict=True)):
        if isinstance(s, dict) and "save" in s:
            np.save(s["save"], a.array if isinstance(a, TensorMap) else a)
            console.print(f"args[{i}] saved to {s['save']}", highlight=False)
    counters = result.counters
    if as_json:
        out: dict[str, Any] = {}
        for group, name, value in counters.rows():
            out.setdefault(group, {})[name] = value
        click.echo(json.dumps(out, indent=1))
    else:
        table = Table(title=f"{file.name}: no fault found")
        for column in ("", "counter"):
            table.add_column(column)
        table.add_column("count", justify="right")
        last = ""
        for group, name, value in counters.rows():
            table.add_row("" if group == last else group, name, f"{value:,}")
            last = group
        console.print(table)
    if by_line:
        show_rows(console, "by PTX line", counters.by_line())
    if by_source:
        show_rows(console, "by source line", counters.by_line(source=True))
    if by_loop:
        show_rows(console, "by loop", counters.by_loop())


if __name__ == "__main__":
    main()
