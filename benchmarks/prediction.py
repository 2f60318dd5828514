"""Published against predicted: how far the predictor is off on Marlin's curves, and the fit of its constants.

    python benchmarks/prediction.py                errors per curve and plots in docs/img/
    python benchmarks/prediction.py --fit          fit the constants again and print them
    python benchmarks/prediction.py --rotate       fit on other choices of five curves: is the error luck?
    python benchmarks/prediction.py --new-gpu      fit without any curve of a GPU, then predict that GPU
    python benchmarks/prediction.py --regret       how far what the closed form chooses is from the full model's best

Everything called predicted here is computed without a GPU; published values were read off others' charts.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from cupyq import compiler, devices, kernels
from cupyq.devices import DeviceSpec
from cupyq.kernels import Config, Problem
from cupyq.ladder import shortlist
from cupyq.predictor import fastest, predict
from cupyq.predictor.constants import CONSTANTS, Constants
from cupyq.predictor.published import Curve, curves, predicted_curve

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "img"

# One curve a GPU, sizes from small to large: what is fitted sees launch-bound and bandwidth-bound products alike.
FITTED = ("a10 18432 x 73728", "a100-sxm 4096²", "rtx-3090 8192²", "rtx-4090 16384²", "h100-sxm 32768²")

# Fitted constants with their priors, (mean, deviation): a fit on ratios alone would drift to senseless values. Sources:
# device copies reach 0.90 to 0.93 of DRAM; a published H100 kernel streams weights at 0.79; mma.sync reaches at most
# 3/4 of wgmma's rate; launches timed by events cost 4 to 6 us together with the fill. Exponents are wide open.
PRIORS: dict[str, tuple[float, float]] = {
    "stream.8.0": (0.83, 0.05),
    "stream.8.6": (0.88, 0.05),
    "stream.8.9": (0.85, 0.05),
    "stream.9.0": (0.79, 0.04),
    "mma_sync": (0.75, 0.08),
    "fused_tensor": (0.9, 0.05),
    "sustained_clock": (1.08, 0.05),
    "dense_stream": (0.92, 0.02),
    "dense_tensor": (0.92, 0.06),
    "overlap": (4.0, 2.0),
    "dense_overlap": (4.0, 2.0),
    "event_launch_us": (4.3, 1.0),
    "reduce_step_us": (0.7, 0.4),
    "reduce_bytes_per_clock": (25.0, 10.0),
    "flush_share": (0.6, 0.25),
}
NOISE = 0.08  # relative error expected of a point where the formula holds
OUTLIER = 0.2  # beyond this, errors count linearly


def with_values(values: dict[str, float]) -> Constants:
    """Return the constants with some replaced; "stream.8.0" is the entry for compute capability 8.0."""
    stream = dict(CONSTANTS.stream)
    plain = {}
    for name, value in values.items():
        if name.startswith("stream."):
            major, minor = name.split(".")[1:]
            stream[int(major), int(minor)] = value
        else:
            plain[name] = value
    return dataclasses.replace(CONSTANTS, stream=stream, **plain)


def errors(curve: Curve, constants: Constants = CONSTANTS) -> np.ndarray:
    """Return predicted / published - 1 for each batch of a curve."""
    return np.array(predicted_curve(curve, constants)) / np.array(curve.speedups) - 1


def loss(values: dict[str, float], fitted: Iterable[Curve]) -> float:
    """Return the negative log posterior: robust errors of the fitted curves, and the priors."""
    if any(not value > 0 for value in values.values()):
        return math.inf
    constants = with_values(values)
    off = np.concatenate([np.abs(np.log1p(errors(curve, constants))) for curve in fitted])
    points = np.where(off < OUTLIER, off**2, 2 * OUTLIER * off - OUTLIER**2).sum() / NOISE**2
    return float(points + sum(((value - PRIORS[name][0]) / PRIORS[name][1]) ** 2 for name, value in values.items()))


def nelder_mead(
    function: Callable[[np.ndarray], float], start: np.ndarray, steps: np.ndarray, rounds: int
) -> np.ndarray:
    """Minimize by Nelder and Mead's simplex (Computer Journal 7, 1965), restarted around the best point found."""
    best = np.array(start)
    for restart in range(3):
        simplex = [best, *(best + steps[i] * np.eye(len(best))[i] / (restart + 1) for i in range(len(best)))]
        values = [function(point) for point in simplex]
        for _ in range(rounds):
            order = np.argsort(values)
            simplex, values = [simplex[i] for i in order], [values[i] for i in order]
            centre = np.mean(simplex[:-1], axis=0)
            trial = 2 * centre - simplex[-1]
            value = function(trial)
            if value < values[0]:
                far = 3 * centre - 2 * simplex[-1]
                far_value = function(far)
                trial, value = (far, far_value) if far_value < value else (trial, value)
            elif value >= values[-2]:
                near = (centre + (trial if value < values[-1] else simplex[-1])) / 2
                near_value = function(near)
                if near_value >= min(value, values[-1]):
                    simplex = [simplex[0], *((point + simplex[0]) / 2 for point in simplex[1:])]
                    values = [values[0], *(function(point) for point in simplex[1:])]
                    continue
                trial, value = near, near_value
            simplex[-1], values[-1] = trial, value
        best = simplex[int(np.argmin(values))]
    return best


def fit(fitted: Sequence[Curve], rounds: int = 600, names: Sequence[str] = tuple(PRIORS)) -> dict[str, float]:
    """Return the constants (of these names) that explain the fitted curves best, priors included."""
    start = np.array([PRIORS[name][0] for name in names])
    steps = np.array([PRIORS[name][1] for name in names])
    found = nelder_mead(lambda x: loss(dict(zip(names, x, strict=True)), fitted), start, steps, rounds)
    return dict(zip(names, map(float, found), strict=True))


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation, ties at their mean rank."""

    def ranks(values: Sequence[float]) -> np.ndarray:
        array = np.asarray(values)
        return np.array([(array < v).sum() + ((array == v).sum() - 1) / 2 for v in array])

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def summary(chosen: Iterable[Curve], constants: Constants) -> tuple[float, float, float]:
    """Return median, nine-in-ten and largest absolute relative error over all points of the curves."""
    off = np.abs(np.concatenate([errors(curve, constants) for curve in chosen]))
    return float(np.median(off)), float(np.quantile(off, 0.9)), float(off.max())


def path_regret(chosen: Iterable[Curve], constants: Constants) -> tuple[float, float]:
    """Return the mean and the largest time lost by choosing fused or fp16 from the prediction, as a share."""
    lost = []
    for curve in chosen:
        for real, guess in zip(curve.speedups, predicted_curve(curve, constants), strict=True):
            lost.append(max(real, 1.0) / (real if guess >= 1 else 1.0) - 1)
    return float(np.mean(lost)), float(max(lost))


def pooled_rank_correlation(chosen: Iterable[Curve], constants: Constants) -> float:
    """Return the rank correlation over all points of the curves together; flat stretches of one curve rank noise."""
    pairs = [pair for curve in chosen for pair in zip(curve.speedups, predicted_curve(curve, constants), strict=True)]
    return rank_correlation([real for real, _ in pairs], [guess for _, guess in pairs])


def table(constants: Constants, fitted_labels: Iterable[str] = FITTED) -> str:
    """Return the Markdown table of docs/prediction.md."""
    fitted_labels = set(fitted_labels)
    batches = curves()[0].batches
    lines = [
        "| curve | | " + " | ".join(map(str, batches)) + " | median error | rank correlation | fp16 faster from M |",
        "|---|---|" + "---|" * len(batches) + "---|---|---|",
    ]
    for curve in sorted(curves(), key=lambda c: c.label not in fitted_labels):
        guess = predicted_curve(curve, constants)
        off = np.abs(errors(curve, constants))
        kind = "fitted" if curve.label in fitted_labels else "held out"
        cross = " / ".join(str(value or "> 128") for value in (curve.crossover(), curve.crossover(guess)))
        cells = " | ".join(f"{p:.2f} / {q:.2f}" for p, q in zip(curve.speedups, guess, strict=True))
        rank = rank_correlation(curve.speedups, guess)
        lines.append(f"| {curve.label} | {kind} | {cells} | {100 * np.median(off):.1f} % | {rank:.2f} | {cross} |")
    return "\n".join(lines)


def split(fitted_labels: Iterable[str]) -> tuple[list[Curve], list[Curve]]:
    """Return the curves to fit on and those held out."""
    wanted = set(fitted_labels)
    everything = curves()
    return [c for c in everything if c.label in wanted], [c for c in everything if c.label not in wanted]


def labels_by_gpu() -> dict[str, list[str]]:
    """Return the labels of the curves of each GPU."""
    by_gpu: dict[str, list[str]] = {}
    for curve in curves():
        by_gpu.setdefault(curve.device.name.partition("@")[0], []).append(curve.label)
    return by_gpu


def rotate() -> None:
    """Fit on every other choice of five curves and print the errors on the eight held out."""
    found = []
    for choice in rotations():
        fitted, held = split(choice)
        median, most, worst = summary(held, with_values(fit(fitted, 250)))
        found.append((median, most, worst))
        print(f"{', '.join(choice)}: held out {median:.1%} median, {most:.1%} nine in ten, {worst:.1%} worst")
    for name, values in zip(("median", "nine in ten", "worst"), zip(*found, strict=True), strict=True):
        print(
            f"{name} over {len(found)} choices: {min(values):.1%} to {max(values):.1%}, mostly {np.median(values):.1%}"
        )


def new_gpus() -> None:
    """Fit without any curve of a GPU, and print the errors on all of its curves: what an unknown GPU may expect."""
    for gpu, labels in labels_by_gpu().items():
        held, fitted = split(labels)
        cc = held[0].device.cc
        names = list(PRIORS)
        known = any(curve.device.cc == cc for curve in fitted)
        if not known:  # what is not in the table at all gets what any unknown architecture gets
            names.remove(f"stream.{cc[0]}.{cc[1]}")
        constants = with_values(fit(fitted, names=names))
        if not known:
            constants = dataclasses.replace(constants, stream={k: v for k, v in constants.stream.items() if k != cc})
        median, most, worst = summary(held, constants)
        _, lost = path_regret(held, constants)
        print(
            f"{gpu}, fitted without it: {median:.1%} median, {most:.1%} nine in ten, {worst:.1%} worst; "
            f"fused or fp16 by the prediction costs {lost:.1%} at most"
        )


def rotations() -> list[tuple[str, ...]]:
    """Return the choices of five curves, one a GPU, with no two of the square A100 and H100 sizes alike."""
    by_gpu = labels_by_gpu()
    return [
        choice
        for choice in itertools.product(*by_gpu.values())
        if choice[1].split()[1] != choice[-1].split()[1]  # A100 and H100
    ]


class Regret(NamedTuple):
    """How far a choice by the closed form is from the best of all legal configs, by the full model, of one problem.

    The closed form estimates registers; the full model compiles a kernel and takes its registers and spills.

    Attributes
    ----------
    configs : int
        Legal fused configs.
    compiled : int
        Kernels that had to be compiled to be sure.
    closed : float
        Regret of the config that the closed form says is fastest, all legal ones asked: 0.03 is 3 %.
    quick : float
        Regret of what `predictor.fastest` finds, which asks about some hundred of them only.
    dispatch : float
        Regret of what dispatch takes where nothing is tuned: the closed form, asked about its shortlist.
    asked : int
        Candidates in that shortlist.
    seconds : float
        Time to ask the closed form about all legal configs.
    """

    device: str
    problem: Problem
    configs: int
    compiled: int
    closed: float
    quick: float
    dispatch: float
    asked: int
    seconds: float


# Registers that no kernel goes below: with them and no spills, the full model's time is a bound from below, for more
# CTAs on an SM never make a prediction slower. So only configs whose bound is below the best need to be compiled.
LEAST_COMPILED = SimpleNamespace(registers=24, spill_bytes=0)
COMPILED_AT_MOST = 40


def regret(problem: Problem, device: DeviceSpec, at_most: int = COMPILED_AT_MOST) -> Regret:
    """Return the regret of the closed form's choices, against all legal configs by the full model.

    Exact while at most `at_most` kernels have to be compiled for it; else an upper bound, for what was not compiled
    then counts with its bound from below.
    """
    configs = list(kernels.configs(problem, device))
    full: dict[Config, float] = {}

    def compiled_us(cfg: Config) -> float:
        if cfg not in full:
            kernel = compiler.compile_kernel(cfg, problem, device.arch)
            full[cfg] = predict(cfg, problem, device, compiled=kernel).time_us
        return full[cfg]

    started = time.perf_counter()
    asked = [predict(cfg, problem, device).time_us for cfg in configs]
    seconds = time.perf_counter() - started
    chosen = compiled_us(configs[int(np.argmin(asked))])
    bounds = sorted(
        (predict(cfg, problem, device, compiled=LEAST_COMPILED).time_us, i) for i, cfg in enumerate(configs)
    )
    best = chosen
    for bound, i in bounds:
        if bound >= best:
            break
        if len(full) >= at_most:
            best = bound
            break
        best = min(best, compiled_us(configs[i]))
    count = len(full)
    found = fastest(problem, device)
    assert found is not None  # a default config is legal in all the cases here
    quick = compiled_us(found.config) / best - 1
    pairs = shortlist(problem, device)
    path, cfg = min(pairs, key=lambda p: predict(p[1] if p[0] == "fused" else p[0], problem, device).time_us)
    taken = compiled_us(cfg) if path == "fused" else predict(path, problem, device).time_us
    dequant = predict("dequant", problem, device).time_us if problem.weight_only else math.inf
    off = taken / min(best, dequant) - 1
    return Regret(device.name, problem, len(configs), count, chosen / best - 1, quick, off, len(pairs), seconds)


REGRET_DEVICES = ("a100-sxm", "a10", "rtx-4090", "h100-sxm", "h200-sxm")
REGRET_SHAPES = ((4096, 4096), (4096, 28672), (14336, 4096), (8192, 10240))  # (K, N)
REGRET_BATCHES = (1, 16, 64, 256, 2048)
REGRET_OPS = ("w4a16", "w8a8-int8")


def regret_cases() -> list[tuple[DeviceSpec, Problem]]:
    """Return the problems of the table: the shapes of two common models, small, middle and large batches."""
    return [
        (devices.get(name), Problem(op, m, n, k, 128))
        for name in REGRET_DEVICES
        for op in REGRET_OPS
        for k, n in REGRET_SHAPES
        for m in REGRET_BATCHES
    ]


def regret_table(found: Sequence[Regret]) -> str:
    """Return the Markdown table of docs/prediction.md: a line a device and op."""
    lines = [
        "| device | op | problems | configs each | all asked: mean | worst | `fastest`: mean | worst "
        "| shortlist: mean | worst |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[Regret]] = {}
    for entry in found:
        groups.setdefault((entry.device, entry.problem.op), []).append(entry)
    for (device, op), entries in groups.items():
        counts = [entry.configs for entry in entries]
        cells = []
        for values in zip(*((e.closed, e.quick, e.dispatch) for e in entries), strict=True):
            cells += [f"{100 * np.mean(values):.1f} %", f"{100 * max(values):.1f} %"]
        lines.append(f"| {device} | {op} | {len(entries)} | {min(counts)} to {max(counts)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def regrets() -> None:
    """Print the table of regrets, and each problem whose regret misses the bar of 3 %."""
    found = []
    for device, problem in regret_cases():
        found.append(regret(problem, device))
        entry = found[-1]
        for name, value in (("closed form", entry.closed), ("fastest", entry.quick)):
            if value > REGRET_BAR:
                p = entry.problem
                print(f"{name}: {entry.device} {p.op} {p.k}x{p.n} M={p.m}: {value:.1%}", flush=True)
    print(regret_table(found))
    rate = sum(entry.seconds for entry in found) / sum(entry.configs for entry in found)
    choices = {
        "closed form, all asked": [e.closed for e in found],
        "predictor.fastest": [e.quick for e in found],
        "dispatch's shortlist": [e.dispatch for e in found],
    }
    for name, values in choices.items():
        over = sum(value > REGRET_BAR for value in values)
        print(
            f"{name}: {np.mean(values):.2%} on average, {max(values):.1%} at worst, {over} of {len(values)} above 3 %"
        )
    print(
        f"{sum(e.compiled for e in found)} kernels compiled to be sure; the closed form takes "
        f"{1000 * rate:.3f} s for 1,000 configs"
    )


REGRET_BAR = 0.03


def image_name(curve: Curve) -> str:
    """Return the file name of a curve's plot."""
    plain = curve.label.replace("²", "").replace(" x ", "x")
    return "prediction-" + "".join(c if c.isalnum() else "-" for c in plain) + ".png"


def plot(curve: Curve, constants: Constants, kind: str) -> Path:
    """Draw one curve, published and predicted, into docs/img/."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.2, 3.2), dpi=100)
    axes.plot(curve.batches, curve.speedups, "o-", color="#1b6ca8", label="published")
    axes.plot(curve.batches, predicted_curve(curve, constants), "s--", color="#d1495b", label="predicted")
    axes.axhline(1.0, color="0.6", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(curve.batches, [str(m) for m in curve.batches])
    axes.set_ylim(0, 4.3)
    axes.set_xlabel("batch M")
    axes.set_ylabel("speed-up over fp16")
    axes.set_title(f"{curve.label}, Marlin, g128 ({kind})", fontsize=10)
    axes.legend(frameon=False, fontsize=9)
    axes.grid(alpha=0.25)
    figure.tight_layout()
    IMAGES.mkdir(parents=True, exist_ok=True)
    path = IMAGES / image_name(curve)
    figure.savefig(path, metadata={"Software": None})
    pyplot.close(figure)
    return path


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="fit the constants again and print them")
    parser.add_argument("--rotate", action="store_true", help="fit on other choices of five curves")
    parser.add_argument("--new-gpu", action="store_true", help="fit without a GPU's curves, then predict them")
    parser.add_argument("--regret", action="store_true", help="the closed form's choices against the full model's best")
    parser.add_argument("--no-plots", action="store_true", help="print only")
    options = parser.parse_args()

    constants = CONSTANTS
    if options.rotate:
        rotate()
        return
    if options.new_gpu:
        new_gpus()
        return
    if options.regret:
        regrets()
        return
    if options.fit:
        values = fit(split(FITTED)[0])
        for name, value in values.items():
            print(f"{name:24} {value:8.4f}   prior {PRIORS[name][0]} +- {PRIORS[name][1]}")
        constants = with_values(values)
    print(table(constants))
    fitted, held = split(FITTED)
    for kind, chosen in (("fitted", fitted), ("held out", held)):
        median, most, worst = summary(chosen, constants)
        mean_lost, most_lost = path_regret(chosen, constants)
        print(
            f"{kind}: {len(chosen)} curves, predicted with {median:.1%} median error, nine in ten within {most:.1%}, "
            f"worst {worst:.1%}; rank correlation {pooled_rank_correlation(chosen, constants):.2f}; "
            f"fused or fp16 by the prediction costs {mean_lost:.2%} on average, {most_lost:.1%} at most"
        )
    if not options.no_plots:
        for kind, chosen in (("fitted", fitted), ("held out", held)):
            for curve in chosen:
                path = plot(curve, constants, kind)
                print(f"{path.name}: {path.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
