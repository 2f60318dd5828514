"""What a tuning run shows: a progress bar on a terminal, plain lines elsewhere, tables at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from cupyq import kernels
from cupyq.kernels import Problem

from .candidate import Candidate
from .objective import Outcome
from .one_problem import TRIALS, Settings
from .results import Crossover, ProblemResult, RunResult, crossovers


def describe(problem: Problem) -> str:
    """Return a problem in a few words: what, K x N, groups, M."""
    groups = "" if not problem.weight_only else f" g{'K' if problem.group_size == -1 else problem.group_size}"
    zeros = "" if problem.symmetric else " asym"
    return f"{problem.op} {problem.k}x{problem.n}{groups}{zeros} M<={problem.m}"


def microseconds(time_us: float | None) -> str:
    """Return a time with three significant digits and its unit."""
    if time_us is None:
        return "-"
    if time_us >= 1e5:
        return f"{time_us / 1e3:.0f} ms"
    if time_us >= 1e3:
        return f"{time_us / 1e3:.3g} ms"
    return f"{time_us:.3g} us"


def tunables(candidate: Candidate) -> str:
    """Return a config in the shortest words that still tell it from others."""
    cfg = candidate.config
    if isinstance(cfg, kernels.W4A16Config):
        split = f" stripes {cfg.ctas}" if cfg.ctas else f" split {cfg.split_k}" if cfg.split_k > 1 else ""
        return (
            f"{cfg.block_m}x{cfg.block_n}x{cfg.block_k} warps {cfg.warps_n}x{cfg.warps_k} "
            f"stages {cfg.stages}{split} scale {cfg.scale}"
        )
    if isinstance(cfg, kernels.W8A8Config):
        split = f" split {cfg.split_k}" if cfg.split_k > 1 else ""
        return (
            f"{cfg.block_m}x{cfg.block_n}x{cfg.block_k} warps {cfg.block_m // cfg.warp_tokens}x{cfg.warps_n}"
            f"x{cfg.warps_k} stages {cfg.stages}{split}"
        )
    if isinstance(cfg, kernels.DequantConfig):
        return f"dequant warps {cfg.warps} units {cfg.units} + cuBLAS"
    return str(candidate)


class Lines:
    """Progress as plain lines, one a problem."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._started = time.monotonic()
        self._count = self._done = 0

    def begin(self, problems: Sequence[Problem], settings: Settings) -> None:
        """Say how much there is to do."""
        self._count = len(problems)
        each = f"{settings.trials or TRIALS} trials each"
        self._say(f"{len(problems)} problems, {each}")

    def problem(self, problem: Problem) -> None:
        """Say nothing until its end."""

    def trial(self, problem: Problem, candidate: Candidate, outcome: Outcome) -> None:
        """Say nothing: a log of thousands of trials helps nobody, and the database has them."""

    def done(self, result: ProblemResult) -> None:
        """Say what came of a problem."""
        self._done += 1
        elapsed = time.monotonic() - self._started
        eta = elapsed / self._done * (self._count - self._done)
        self._say(f"[{self._done}/{self._count}] {_sentence(result)} (ETA {eta:.0f} s)")

    def _say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, highlight=False, markup=False)


def _sentence(result: ProblemResult) -> str:
    what = describe(result.problem)
    winner = result.winner
    if winner is None:
        return f"{what}: no winner: {result.reason}"
    trials = f"{result.new_trials} trials" if result.new_trials else f"{result.trials} trials, known"
    speedup = result.speedup_vs_fp16
    versus = f", {speedup:.2f}x fp16" if speedup else ""
    source = winner.outcome.source
    return f"{what}: {winner.candidate.path} {microseconds(winner.outcome.time_us)} {source}{versus}, {trials}"


class Bar:
    """Progress as a bar with trials, best time and ETA; a context manager."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("trials  best {task.fields[best]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task: Any = None
        self._best: float | None = None
        self._per_problem = TRIALS
        self._of_problem = 0

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, problems: Sequence[Problem], settings: Settings) -> None:
        """Draw the bar."""
        self._per_problem = settings.trials or TRIALS
        self._task = self._progress.add_task("tuning", total=len(problems) * self._per_problem, best="-")

    def problem(self, problem: Problem) -> None:
        """Name the problem whose turn it is."""
        self._best, self._of_problem = None, 0
        self._progress.update(self._task, description=describe(problem), best="-")

    def trial(self, problem: Problem, candidate: Candidate, outcome: Outcome) -> None:
        """Move on by a trial."""
        self._of_problem += 1
        quantized = candidate.path != "fp16"
        if outcome.ok and quantized and (self._best is None or (outcome.time_us or 0) < self._best):
            self._best = outcome.time_us
        step = 1 if self._of_problem <= self._per_problem else 0
        best = "-" if self._best is None else f"{microseconds(self._best)} {outcome.source}"
        self._progress.update(self._task, advance=step, best=best)

    def done(self, result: ProblemResult) -> None:
        """Move to the problem's end, also where fewer trials did."""
        self._progress.update(self._task, advance=max(0, self._per_problem - self._of_problem))
        if result.winner is None:
            self._progress.console.print(f"{describe(result.problem)}: no winner: {result.reason}", markup=False)


def winners_table(results: Sequence[ProblemResult], source: str) -> Table:
    """Return the table of winners."""
    table = Table(title=f"winners: times and ratios {source}")
    table.add_column("op")
    table.add_column("K x N", justify="right")
    table.add_column("group", justify="right")
    table.add_column("M up to", justify="right")
    table.add_column("path")
    table.add_column("config", overflow="fold")
    for name in (f"time, {source}", "vs fp16", "vs default"):
        table.add_column(name, justify="right")
    for result in results:
        problem, winner = result.problem, result.winner
        shape = [problem.op, f"{problem.k} x {problem.n}", _group(problem), str(problem.m)]
        if winner is None:
            table.add_row(*shape, "-", result.reason or "", "-", "-", "-")
            continue
        table.add_row(
            *shape,
            winner.candidate.path,
            tunables(winner.candidate),
            microseconds(winner.outcome.time_us),
            _times(result.speedup_vs_fp16),
            _times(result.speedup_vs_default),
        )
    return table


def crossover_table(found: Sequence[Crossover], source: str) -> Table:
    """Return the table of crossover batches."""
    table = Table(title=f"where the fused kernel stops paying, times {source}")
    table.add_column("op")
    table.add_column("K x N", justify="right")
    table.add_column("group", justify="right")
    table.add_column("crossover", justify="right")
    table.add_column("faster from there")
    for name in (f"fused, {source}", f"other, {source}"):
        table.add_column(name, justify="right")
    for entry in found:
        where = f"M in {entry.band // 2 + 1}..{entry.band}" if entry.band else f"none up to M={entry.bands[-1]}"
        table.add_row(
            entry.problem.op,
            f"{entry.problem.k} x {entry.problem.n}",
            _group(entry.problem),
            where,
            {"dequant": "dequant + cuBLAS", "fp16": "fp16 cuBLAS"}.get(entry.winner or "", entry.winner or "fused"),
            microseconds(entry.fused_us),
            microseconds(entry.other_us),
        )
    return table


def pareto_table(front: Sequence[Mapping[str, Any]], weights: str) -> Table:
    """Return the table of what no other way beats in both time and quantization error, per shape and band."""
    table = Table(title=f"time against quantization error on {weights}: nothing else is better in both")
    for name in ("K x N", "M up to", "op", "group", "time", "error"):
        table.add_column(name, justify="right")
    for row in front:
        group = "K" if row["group_size"] == -1 else str(row["group_size"])
        table.add_row(
            f"{row['k']} x {row['n']}",
            str(row["band"]),
            row["op"] + ("" if row["symmetric"] else " asym"),
            group,
            f"{microseconds(row['time_us'])} {row['source']}",
            f"{row['quantization_error']:.4f}",
        )
    return table


def summary(run: RunResult, source: str, path: object) -> str:
    """Return the run in one line."""
    states = ", ".join(f"{count} {state}" for state, count in sorted(run.states.items())) or "none"
    known = sum(1 for result in run.problems if result.resumed)
    parts = [f"{len(run.problems)} problems in {run.seconds:.1f} s", f"{run.new_trials} new trials", f"all: {states}"]
    elsewhere = sum(result.elsewhere for result in run.problems)
    if elsewhere:
        parts.append(f"{elsewhere} elsewhere")
    if known:
        parts.append(f"{known} problems were known")
    if any(r.winner is not None and r.winner.verification is None for r in run.problems):
        parts.append("winners not verified, so nothing uses them before `python -m cupyq.db verify` has")
    rejected = sum(len(result.rejected) for result in run.problems)
    if rejected:
        parts.append(f"{rejected} candidates were wrong and rejected")
    if run.interrupted:
        parts.append("interrupted: what is done is kept, the same command goes on")
    if run.out_of_time:
        parts.append("out of time: the same command goes on")
    return f"{source} times in {path}: " + "; ".join(parts)


def show(console: Console, run: RunResult, source: str, path: object) -> None:
    """Print the tables and the summary."""
    if run.problems:
        console.print(winners_table(run.problems, source))
    found = crossovers(run.problems)
    if found:
        console.print(crossover_table(found, source))
    console.print(summary(run, source, path), soft_wrap=True, highlight=False, markup=False)


def as_json(run: RunResult, device: str, source: str) -> dict[str, Any]:
    """Return the run as one JSON-ready dict."""
    return {
        "device": device,
        "source": source,
        "seconds": run.seconds,
        "interrupted": run.interrupted,
        "out_of_time": run.out_of_time,
        "new_trials": run.new_trials,
        "trials": dict(run.states),
        "problems": [_problem_json(result) for result in run.problems],
        "crossover": [
            {
                "op": entry.problem.op,
                "k": entry.problem.k,
                "n": entry.problem.n,
                "group_size": entry.problem.group_size,
                "crossover": entry.band,
                "winner": entry.winner or "fused",
                "fused_us": entry.fused_us,
                "other_us": entry.other_us,
                "bands": list(entry.bands),
                "source": source,
            }
            for entry in crossovers(run.problems)
        ],
    }


def _problem_json(result: ProblemResult) -> dict[str, Any]:
    problem, winner = result.problem, result.winner
    row: dict[str, Any] = {
        "op": problem.op,
        "k": problem.k,
        "n": problem.n,
        "group_size": problem.group_size,
        "symmetric": problem.symmetric,
        "dtype": problem.dtype,
        "band": problem.m,
        "trials": result.trials,
        "new_trials": result.new_trials,
        "elsewhere": result.elsewhere,
        "rejected": len(result.rejected),
        "reason": result.reason,
    }
    if winner is not None:
        row |= {
            "path": winner.candidate.path,
            "config": {} if winner.candidate.config is None else kernels.to_dict(winner.candidate.config),
            "time_us": winner.outcome.time_us,
            "time_low_us": winner.outcome.low_us,
            "time_high_us": winner.outcome.high_us,
            "source": winner.outcome.source,
            "verified": winner.verification is not None,
            "error": None if winner.verification is None else winner.verification.error,
            "speedup_vs_fp16": result.speedup_vs_fp16,
            "speedup_vs_default": result.speedup_vs_default,
            "paths_us": {path: choice.outcome.time_us for path, choice in result.by_path.items()},
        }
    return row


def _group(problem: Problem) -> str:
    return "K" if problem.group_size == -1 else str(problem.group_size)


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"
