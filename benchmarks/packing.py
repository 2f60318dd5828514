"""Seconds that quantizing, packing and unpacking a layer take on the host: the median of a few runs.

python benchmarks/packing.py
python benchmarks/packing.py --k 8192 --n 28672 --runs 3
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import numpy as np

import cupyq


def seconds(work: Callable[[], Any], runs: int) -> float:
    """Return the median time of `work`, after a first run that is not counted."""
    work()
    taken = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


@click.command(help=__doc__.splitlines()[0])
@click.option("--k", default=4096, show_default=True, help="Input features.")
@click.option("--n", default=14336, show_default=True, help="Output features.")
@click.option("--runs", default=5, show_default=True, help="Runs of each, of which the median is shown.")
def main(k: int, n: int, runs: int) -> None:
    """Print a line for each scheme."""
    w = np.random.default_rng(0).standard_normal((k, n), dtype=np.float32)
    click.echo(f"{k} x {n}, seconds: quantize, pack, unpack")
    for scheme in ("w2a16", "w4a16", "w8a16", "w8a8-int8", "w8a8-fp8", "w8a8-fp8-block"):
        qw = cupyq.quantize(w, scheme)
        codes, scales, zeros = cupyq.unpack(qw)
        options = {"scheme": scheme, "group_size": qw.group_size if qw.weight_only else None}
        times = (
            seconds(lambda scheme=scheme: cupyq.quantize(w, scheme), runs),
            seconds(lambda a=(codes, scales, zeros), of=options: cupyq.pack(*a, **of), runs),
            seconds(lambda qw=qw: cupyq.unpack(qw), runs),
        )
        click.echo(f"{scheme:15}" + "".join(f"{value:9.3f}" for value in times))


if __name__ == "__main__":
    main()
