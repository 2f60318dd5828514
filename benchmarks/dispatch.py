"""What dispatch costs on the host: look-ups, plans, first calls, imports, memory. No GPU is needed.

    python benchmarks/dispatch.py            print medians, the bars, and which hold; exit status 1 if one does not
    python benchmarks/dispatch.py --json     the same as one JSON object

A stand-in for CuPy takes the launches and does nothing, so that only host time is left. A plan is compared with the
bare call of the same kernel with the same arguments, on the same stand-in, turn by turn in one run.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import light_cupy
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 150
CALLS = 300
DISTINCT = 100_000


@dataclass(frozen=True)
class Result:
    """One figure beside the bar it has to meet.

    Attributes
    ----------
    what : str
    value : float
        Median, in `unit`.
    bar : float or None
        At most this; None where the figure is only a yardstick.
    unit : str
    """

    what: str
    value: float
    bar: float | None
    unit: str

    @property
    def holds(self) -> bool:
        """Whether the bar is met."""
        return self.bar is None or self.value <= self.bar


def in_turns(*functions: Callable[[], object]) -> list[float]:
    """Return the median microseconds of a call of the first function, and how much more a call of each other takes.

    The others are compared with the first one of the same turn, so that a busy machine slows down both.
    """
    samples: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()
    gc.disable()
    try:
        for _ in range(ROUNDS):
            for function, kept in zip(functions, samples, strict=True):
                start = time.perf_counter()
                for _ in range(CALLS):
                    function()
                kept.append((time.perf_counter() - start) / CALLS * 1e6)
    finally:
        gc.enable()
    first, *others = samples
    over = [statistics.median(b - a for a, b in zip(first, kept, strict=True)) for kept in others]
    return [statistics.median(first), *over]


# --- measures ---------------------------------------------------------------------------------------------------------


def product_costs(cupy: Any, scheme: str, qw: Any) -> list[Result]:
    """Time a plan and `matmul` beside the bare call of their kernels."""
    import cupyq
    from cupyq import launch

    x = cupy.zeros((16, 1024), np.float16)
    launcher = launch.launcher(qw, 16, x.dtype, 0, False)
    plan = cupyq.plan(qw, 16)
    steps = [launcher._fused.step] + ([launcher._quantize.step] if launcher._quantize else [])
    bare = [(s.kernel, s.grid, s.block, tuple(x if a is None else a for a in s.args), s.shared) for s in steps]
    half = np.dtype(np.float16)

    def alone() -> None:
        cupy.empty((16, 1024), half)
        for kernel, grid, block, args, shared in bare:
            kernel(grid, block, args, shared_mem=shared)

    floor, planned, full = in_turns(alone, lambda: plan(x), lambda: cupyq.matmul(x, qw))
    launches = "launch" if len(steps) == 1 else "launches"
    return [
        Result(f"{scheme}: bare call, {len(steps)} {launches} and the result's memory", floor, None, "us"),
        Result(f"{scheme}: plan, over the bare call", planned, 2.0 * len(steps), "us"),
        Result(f"{scheme}: plan / bare call", 1 + planned / floor, None, "x"),
        Result(f"{scheme}: matmul, over the bare call", full, None, "us"),
    ]


def lookups_and_plans() -> list[Result]:
    """Time a repeated look-up, and plans of each scheme beside the bare call of their kernel."""
    cupy = light_cupy.install()
    import cupyq
    from cupyq import devices, dispatch
    from cupyq.kernels import Problem

    device, problem = devices.live(0), Problem("w4a16", 16, 4096, 4096)
    _, lookup = in_turns(lambda: None, lambda: dispatch.choose(problem, device))
    results = [Result("look-up of a problem seen before", lookup, 1.0, "us")]

    w = np.random.default_rng(0).standard_normal((1024, 1024), dtype=np.float32)
    for scheme in ("w4a16", "w8a8-int8"):
        qw = cupyq.quantize(w, scheme).to_cupy()
        results += product_costs(cupy, scheme, qw)
    return results


FIRST_CALL = """
import os, sys, time
import numpy, ml_dtypes
import light_cupy
cupy = light_cupy.install()
import warnings
warnings.simplefilter("ignore")
start = time.perf_counter()
import cupyq
imported = time.perf_counter()
k = n = int(os.environ["SIDE"])
codes = numpy.zeros((k, n), numpy.uint8)
qw = cupyq.pack(codes, numpy.ones((k // 128, n), numpy.float16), scheme="w4a16", group_size=128).to_cupy()
x = cupy.zeros((16, k), numpy.float16)
wide = cupy.zeros((300, k), numpy.float16)
before, before_cpu = time.perf_counter(), time.process_time()
cupyq.matmul(x, qw)
first, first_cpu = time.perf_counter(), time.process_time()
cupyq.matmul(wide, qw)
last = time.perf_counter()
import json
rung = cupyq.explain(16, qw).choice.rung
print(json.dumps([imported - start, first - before, last - first, first_cpu - before_cpu, rung]))
"""
IMPORT = """
import json, sys, time
start = time.perf_counter()
import numpy, ml_dtypes
middle = time.perf_counter()
import cupyq
print(json.dumps([middle - start, time.perf_counter() - middle, "cupy" in sys.modules]))
"""


def in_processes(code: str, folder: str, count: int = 9, **environment: str) -> list[list[Any]]:
    """Run code in fresh interpreters, of which the first one only leaves bytecode, and return what each printed."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    paths = {"PYTHONPATH": str(Path(__file__).parent), "PYTHONPYCACHEPREFIX": str(Path(folder) / "bytecode")}
    found = []
    for _ in range(count + 1):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True, text=True, check=True, cwd=ROOT, env={**inherited, **paths, **environment},
        )  # fmt: skip
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return found[1:]


def tuned_database(path: Path) -> None:
    """Write a database that holds a measured row for the first product and 500 more trials of it."""
    from cupyq import db, devices, kernels

    device, problem = devices.live(0), kernels.Problem("w4a16", 16, 1024, 1024)
    configs = list(itertools.islice(kernels.configs(problem, device), 501))
    with db.open(path) as store, store.writing():
        for number, config in enumerate(configs):
            store.add_trial(
                device=device, problem=problem, source="measured", config=config, time_us=5.0 + number, verified=True
            )


def imports_and_first_calls(folder: str) -> list[Result]:
    """Time `import cupyq` and the first product in fresh processes."""
    runs = in_processes(IMPORT, folder)
    numpy_ms, own_ms = (statistics.median(run[i] for run in runs) * 1e3 for i in (0, 1))
    results = [
        Result("import numpy and ml_dtypes, which cupyq stands on", numpy_ms, None, "ms"),
        Result("import cupyq, beyond these", own_ms, 100.0, "ms"),
        Result("processes in which that imported CuPy", float(sum(run[2] for run in runs)), 0.0, ""),
    ]
    tuned = Path(folder) / "tuned.db"
    tuned_database(tuned)
    none = Path(folder) / "none.db"
    # A side that no preset has, and one that they have as soon as any ship.
    for path, side in ((none, 1024), (none, 4096), (tuned, 1024)):
        runs = in_processes(FIRST_CALL, folder, CUPYQ_DB=str(path), SIDE=str(side))
        first, next_band, cpu = (statistics.median(run[i] for run in runs) * 1e3 for i in (1, 2, 3))
        whence = f"{side}x{side}, " + ("no database" if path is none else "a database of 501 trials")
        # Judged by the processor's time: it waits for nothing, and a busy machine multiplies what a clock shows.
        results += [
            Result(f"first product after import, nothing compiled, {whence}: {runs[0][4]}", cpu, 50.0, "ms"),
            Result("the same by the clock, with whatever else the machine does", first, None, "ms"),
            Result(f"first product of another band, {whence}, by the clock", next_band, None, "ms"),
        ]
    return results


def memory(folder: str) -> list[Result]:
    """Count the bytes that 100,000 distinct M leave behind, after as many again as fill every cache."""
    light_cupy.install()
    os.environ["CUPYQ_DB"] = str(Path(folder) / "none.db")
    import cupyq
    from cupyq import devices, dispatch, launch

    launch.reset()
    devices._read_live.cache_clear()
    qw = cupyq.quantize(np.ones((64, 16), np.float32), "w4a16", group_size=32).to_cupy()
    half = np.dtype(np.float16)
    tracemalloc.start()
    marks, start = [], time.perf_counter()
    for m in range(1, DISTINCT + 1):
        launch.launcher(qw, m, half, 0, False)
        if m in (DISTINCT // 5, DISTINCT):
            gc.collect()
            marks.append(tracemalloc.get_traced_memory()[0])
    elapsed = time.perf_counter() - start
    tracemalloc.stop()
    kept = len(dispatch._choices) + len(launch._launchers[id(qw)])
    return [
        Result(
            f"memory after {DISTINCT:,} distinct M, beyond that after a fifth of them",
            (marks[1] - marks[0]) / 1e6,
            1.0,
            "MB",
        ),
        Result(
            "choices and launchers kept", float(kept), float(dispatch._CACHED_CHOICES + launch._CACHED_LAUNCHERS), ""
        ),
        Result("time of a new M, memory being traced", elapsed / DISTINCT * 1e6, None, "us"),
    ]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--skip-memory", is_flag=True, help="Leave out the 100,000 distinct M, which take a minute.")
def main(as_json: bool, skip_memory: bool) -> None:
    """Measure what dispatch costs on the host; exit status 1 if a bar is missed."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CUPYQ_DB"] = str(Path(folder) / "none.db")
        results = lookups_and_plans() + imports_and_first_calls(folder)
        if not skip_memory:
            results += memory(folder)
    if as_json:
        click.echo(json.dumps([{**vars(result), "holds": result.holds} for result in results], indent=1))
    else:
        width = max(len(result.what) for result in results)
        for result in results:
            bar = "" if result.bar is None else f"  at most {result.bar:g}: {'holds' if result.holds else 'MISSED'}"
            click.echo(f"{result.what:<{width}}  {result.value:>9.3f} {result.unit:<2}{bar}")
    sys.exit(0 if all(result.holds for result in results) else 1)


if __name__ == "__main__":
    main()
