"""Which sampler finds a fast kernel soonest: a replay of recorded tables, with no GPU.

Every legal config of a few problems is predicted once, which gives tables of thousands of times each. The samplers then
search these tables, many times with different seeds, and what counts is regret: how far the best config found after n
trials is above the table's best. Measured tables can be had the same way: `--db FILE` replays the trials that a
database holds instead (problems with at least 200 measured ones).

    python benchmarks/tuner.py --plot docs/img/samplers.png
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from cupyq import db, devices, predictor
from cupyq.errors import CupyqError
from cupyq.kernels import Problem
from cupyq.tuner import samplers
from cupyq.tuner.candidate import Candidate, from_row
from cupyq.tuner.objective import ReplayObjective
from cupyq.tuner.proposals import Proposals
from cupyq.tuner.space import Space

PROBLEMS = (
    ("a100-sxm", Problem("w4a16", 1, 4096, 4096)),
    ("h100-sxm", Problem("w4a16", 16, 6144, 4096)),
    ("rtx-4090", Problem("w4a16", 64, 4096, 14336)),
    ("a100-sxm", Problem("w4a16", 256, 28672, 4096)),
)
NAMES = ("random", "tpe", "gp", "cmaes", "greedy")
LEAST = 200

Recorded = dict[Candidate, float]


def predicted_tables(noise: float, seed: int) -> dict[str, Recorded]:
    """Return a table for each of `PROBLEMS`; noise makes neighbours on the grid differ as measured ones do."""
    rng = np.random.default_rng(seed)
    tables = {}
    for name, problem in PROBLEMS:
        device = devices.get(name)
        table = {}
        for candidate in Space(problem, device).fused:
            try:
                time_us = predictor.predict(candidate.config, problem, device).time_us
            except CupyqError:
                continue
            table[candidate] = time_us * float(np.exp(noise * rng.standard_normal()))
        tables[f"{name} {problem.k}x{problem.n} M={problem.m}"] = table
    return tables


def measured_tables(path: Path) -> dict[str, Recorded]:
    """Return a table for each problem of which the database holds enough measured trials."""
    tables: dict[str, Recorded] = {}
    with db.open(path, readonly=True) as store:
        for row in store.trials(source="measured", path="fused", state="complete"):
            candidate = from_row(row)
            if candidate is not None:
                name = f"{row['device']} {row['k']}x{row['n']} g{row['group_size']} M={row['m']}"
                table = tables.setdefault(name, {})
                table[candidate] = min(row["time_us"], table.get(candidate, float("inf")))
    return {name: table for name, table in tables.items() if len(table) >= LEAST}


def regrets(name: str, table: Mapping[Candidate, float], trials: int, seed: int, ahead: int = 1) -> np.ndarray:
    """Return, after each trial, how far the best so far is above the table's best: 0.1 is 10 %.

    `ahead` candidates are asked for before the first of them is tried, as where kernels are compiled ahead.
    """
    objective = ReplayObjective({candidate.key: time_us for candidate, time_us in table.items()})
    proposals = Proposals((), lambda: samplers.make(name, list(table), seed), lambda: (), depth=ahead)
    best, curve = float("inf"), []
    problem = PROBLEMS[0][1]  # a replay does not ask for it
    for _ in range(trials):
        candidate = proposals.next()
        if candidate is None:
            break
        outcome = objective.evaluate(candidate, problem)
        proposals.tell(candidate, outcome)
        best = min(best, outcome.time_us or float("inf"))
        curve.append(best)
    lowest = min(table.values())
    return np.array(curve + [best] * (trials - len(curve))) / lowest - 1


def study(
    tables: Mapping[str, Recorded], names: Iterable[str], trials: int, seeds: int, ahead: int = 1
) -> dict[str, np.ndarray]:
    """Return per sampler the regrets, (tables x seeds, trials)."""
    curves: dict[str, np.ndarray] = {}
    for name in names:
        rows = [regrets(name, table, trials, seed, ahead) for table in tables.values() for seed in range(seeds)]
        curves[name] = np.array(rows)
    return curves


def draw(curves: Mapping[str, np.ndarray], path: Path, title: str) -> None:
    """Draw the median regret of each sampler over trials, with its quartiles."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, rows in curves.items():
        trials = np.arange(1, rows.shape[1] + 1)
        low, middle, high = np.quantile(rows, (0.25, 0.5, 0.75), axis=0) * 100
        [line] = axes.plot(trials, middle, label=name)
        axes.fill_between(trials, low, high, alpha=0.15, color=line.get_color(), linewidth=0)
    axes.set(
        xlabel="trials", ylabel="regret: % above the best of the table", title=title, yscale="symlog", ylim=(0, None)
    )
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


@click.command()
@click.option(
    "--db", "path", type=click.Path(exists=True, path_type=Path), help="Replay measured trials of a database."
)
@click.option("--trials", default=64, show_default=True)
@click.option("--seeds", default=5, show_default=True)
@click.option("--noise", default=0.03, show_default=True, help="Of predicted tables: spread that no field explains.")
@click.option("--samplers", "names", default=",".join(NAMES), show_default=True)
@click.option("--ahead", default=1, show_default=True, help="Candidates asked for before the first of them is tried.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the curves into this file.")
def main(path: Path | None, trials: int, seeds: int, noise: float, names: str, ahead: int, plot: Path | None) -> None:
    """Compare samplers on recorded tables."""
    source = "predicted" if path is None else "measured"
    tables = predicted_tables(noise, 0) if path is None else measured_tables(path)
    if not tables:
        raise click.ClickException(f"{path} holds no problem with {LEAST} measured trials or more")
    console = Console(width=None if sys.stdout.isatty() else 110)
    for name, table in tables.items():
        console.print(f"{name}: {len(table)} configs, {source}", markup=False, highlight=False)
    marks = sorted({min(trials, mark) for mark in (8, 16, 32, 64, trials)})
    shown = Table(title=f"median regret after n trials, {source} tables, {seeds} seeds each")
    for column in ("sampler", *(f"n = {mark}" for mark in marks), "within 2 %", "time"):
        shown.add_column(column, justify="right")
    curves = {}
    for name in names.split(","):
        started = time.perf_counter()
        curves |= study(tables, [name], trials, seeds, ahead)
        rows, took = curves[name], time.perf_counter() - started
        cells = [f"{np.median(rows[:, mark - 1]):.1%}" for mark in marks]
        shown.add_row(name, *cells, f"{(rows[:, -1] <= 0.02).mean():.0%}", f"{took / len(rows):.2f} s")
    console.print(shown)
    if plot is not None:
        draw(curves, plot, f"samplers on {len(tables)} {source} tables")


if __name__ == "__main__":
    main()
