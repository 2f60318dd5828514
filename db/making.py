"""Making the presets: for the catalogue's devices and the layers of common models, what the full model thinks best.

Dispatch without a row searches by the closed form for some milliseconds. A preset knows more: the search was longer,
the kernels chosen were compiled for the device's architecture, so that registers are true and none spills, and each was
verified in the emulator. Problems share kernels: one that is there already is kept where another would gain less than
`TIE`, which is below what the model resolves.
"""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from cupyq import bands, compiler, devices, kernels, predictor
from cupyq.db import presets
from cupyq.db.environment import Environment
from cupyq.db.searching import Domain, Search, domain
from cupyq.devices import DeviceSpec
from cupyq.errors import ArgumentError, CompileError, CupyqError, DatabaseError, IllegalConfig, VerificationError
from cupyq.kernels import Config, Problem, dequant
from cupyq.tuner.candidate import Candidate
from cupyq.tuner.inputs import small_launch
from cupyq.tuner.verify import Verifier
from cupyq.tuner.workloads import MODELS, model_shapes

TIE = 0.04
"""A kernel that gains less than this share on one that is there already is not worth another kernel."""

LOOKS = 2
"""Configs of one problem that are compiled at most."""

WIDE = (1, 16, 64, 256, 1024, 8192)
"""Bands at which the search may be wide; the others start from what these found."""

WIDE_SHAPES, WIDE_EVERY = 8, 4
"""The search is wide for so many first shapes, and for one in so many after: by then good starts are known."""

SAMPLED, SAMPLED_BANDS = 1280, (16, 256)
"""Shapes whose K + N is a multiple of the first are compared with the default: that takes kernels nobody else needs."""

# (op, group size, symmetric): what checkpoints of these models hold: GPTQ, AWQ, and both kinds of W8A8.
VARIANTS = (("w4a16", 128, True), ("w4a16", 128, False), ("w8a8-int8", -1, True), ("w8a8-fp8", -1, True))


def problems(shapes: Iterable[tuple[int, int]] | None = None) -> list[Problem]:
    """Return the problems that presets hold, with M = 1: every variant of each (K, N); those of all built-in models."""
    if shapes is None:
        shapes = sorted({shape for model in MODELS for shape in model_shapes(model)})
    return [Problem(op, 1, n, k, group, symmetric) for op, group, symmetric in VARIANTS for k, n in shapes]


def digest(package: str) -> str:
    """Return a hash of the Python files of a package, to say what a preset was made by."""
    files = sorted((f for f in resources.files(package).iterdir() if f.name.endswith(".py")), key=lambda f: f.name)
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:16]


# --- kernels ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiled:
    """What of a compiled kernel the predictor looks at, and what tells it from others.

    Attributes
    ----------
    registers, spill_bytes : int
    source_hash : str
    ptx_hash : str
        Of the PTX without its header: architectures that get the same instructions share it.
    """

    registers: int
    spill_bytes: int
    source_hash: str
    ptx_hash: str


class Kernels:
    """The kernels of one architecture, each compiled once, whatever the problem and the card."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Compiled | None] = {}

    def get(self, config: Config, problem: Problem, device: DeviceSpec) -> Compiled | None:
        """Return a kernel that compiles without spills; None for any other."""
        key = (config.template, config.instance(problem))
        if key not in self._known:
            self._known[key] = _compile(config, problem, device)
        return self._known[key]

    def known(self, config: Config, problem: Problem) -> bool:
        """Return whether a config's kernel is there already."""
        return self._known.get((config.template, config.instance(problem))) is not None


def _compile(config: Config, problem: Problem, device: DeviceSpec) -> Compiled | None:
    try:
        made = compiler.compile_kernel(config, problem, device.arch)
    except (CompileError, IllegalConfig):
        return None
    if made.spill_bytes:
        return None
    body = re.sub(r"//.*", "", made.ptx.partition(".address_size")[2])
    ptx_hash = hashlib.sha256(body.encode()).hexdigest()
    return Compiled(made.registers, made.spill_bytes, kernels.source_hash(config, problem), ptx_hash)


class Use(NamedTuple):
    """A kernel as a preset uses it, to be verified once for all devices with the same PTX, and each way to share K."""

    device: str
    config: Config
    problem: Problem


def _use_key(config: Any, made: Compiled) -> tuple[str, bool, bool]:
    """Return what makes two uses one to the verifier: the instructions, and how CTAs share K, by splits or stripes."""
    return made.ptx_hash, getattr(config, "split_k", 1) > 1, getattr(config, "ctas", 0) > 0


def verify(use: Use) -> str | None:
    """Say what is wrong with a kernel's results in the emulator, None if nothing is."""
    path = "dequant" if isinstance(use.config, kernels.DequantConfig) else "fused"
    outcome = Verifier(devices.get(use.device)).verify(Candidate(path, use.config), use.problem)
    return None if outcome.ok else f"{use.config} for {use.problem} on {use.device}: {outcome.reason}"


# --- one device -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """The presets of one device.

    Attributes
    ----------
    device : str
    text : str
        The file.
    rows : int
    gain : float
        Geometric mean of the default config's time over the preset's, both by the full model, on some shapes.
    uses : dict of tuple to Use
        What is to be verified, by what makes two of them the same.
    seconds : float
    """

    device: str
    text: str
    rows: int
    gain: float
    uses: dict[tuple[Any, ...], Use]
    seconds: float


class Maker:
    """Chooses kernels for one device.

    Parameters
    ----------
    device : DeviceSpec
    made : Kernels
        Of the device's architecture.
    """

    def __init__(self, device: DeviceSpec, made: Kernels) -> None:
        self.device, self.made = device, made
        self._winners: dict[Problem, dict[Config, None]] = {}  # by kind of problem: its shape does not matter
        self._domains: dict[str, Domain] = {}
        self._shapes: dict[Problem, dict[tuple[int, int], int]] = {}
        self.gains: list[float] = []
        self.uses: dict[tuple[Any, ...], Use] = {}

    def entries(self, problem: Problem) -> list[list[tuple[dict[str, Any], str, float]]]:
        """Return what `presets.Writing.add` takes: for each band the kernels and their times."""
        found: dict[int, Any] = {}
        for band in sorted(bands.ends(), key=lambda end: (end not in WIDE, end)):
            found[band] = list(self._band(problem.with_m(band)))
        return [found[band] for band in bands.ends()]

    def _band(self, problem: Problem) -> Iterator[tuple[dict[str, Any], str, float]]:
        fused = self.best(problem)
        if fused is None:
            return
        yield self._entry(*fused, problem)
        if problem.weight_only:
            config, time_us = dequantizing(problem, self.device)
            if time_us < fused[1] and self.made.get(config, problem, self.device) is not None:
                yield self._entry(config, time_us, problem)

    def _entry(self, config: Config, time_us: float, problem: Problem) -> tuple[dict[str, Any], str, float]:
        made = self.made.get(config, problem, self.device)
        assert made is not None  # or it would not have been chosen
        self.uses.setdefault(_use_key(config, made), Use(self.device.name, config, problem))
        return kernels.to_dict(config), made.source_hash, rounded(time_us)

    def best(self, problem: Problem) -> tuple[Config, float] | None:
        """Return the (config, microseconds) of the fused kernel for one band, by compiled kernels; None for none."""
        kind = replace(problem, m=1, n=4096, k=4096)
        winners = self._winners.setdefault(kind, {})
        if problem.op not in self._domains:
            self._domains[problem.op] = domain(kind, self.device)
        shapes = self._shapes.setdefault(kind, {})
        place = shapes.setdefault((problem.n, problem.k), len(shapes))
        wide = problem.m in WIDE and (place < WIDE_SHAPES or place % WIDE_EVERY == 0)
        default = kernels.default(problem, self.device) if problem.m in WIDE or not winners else None
        search = Search(problem, self.device)
        starts = [*winners] if default is None else [default, *winners]
        ranked = search.descend(starts, self._domains[problem.op], wide)
        chosen = self._choose(ranked, problem)
        if chosen is not None:
            winners[chosen[0]] = None
            sampled = problem.m in SAMPLED_BANDS and (problem.n + problem.k) % SAMPLED == 0
            if default is not None and sampled:
                self._compare(default, chosen[1], problem)
        return chosen

    def _compare(self, default: Config, time_us: float, problem: Problem) -> None:
        """Note how the default, its kernel compiled too, compares."""
        of_default = self._full(default, problem)
        if of_default < math.inf:
            self.gains.append(of_default / time_us)

    def _choose(self, ranked: Sequence[Config], problem: Problem) -> tuple[Config, float] | None:
        """Return the fastest by the full model: of the kernels that are there already, then of the front runners."""
        times = {config: self._full(config, problem) for config in ranked if self.made.known(config, problem)}
        by_time = sorted(times, key=lambda config: times[config])
        usable = (config for config in by_time if times[config] < math.inf and self._verifiable(config, problem))
        best = next(usable, None)
        looks = 0
        for config in ranked:
            if config in times:
                continue
            if best is not None:
                promised = predictor.predict(config, problem, self.device).time_us
                if looks == LOOKS or promised > times[best] * (1 - TIE):
                    break  # ranked by the closed form: those behind promise still less
            looks += 1
            if not self._verifiable(config, problem):
                continue
            times[config] = self._full(config, problem)
            if times[config] < (math.inf if best is None else times[best] * (1 - TIE)):
                best = config
        return None if best is None else (best, times[best])

    def _verifiable(self, config: Config, problem: Problem) -> bool:
        """Return whether a kernel will be verified already, or can be: the verifier's smaller launch may be illegal."""
        made = self.made.get(config, problem, self.device)
        if made is None:
            return False
        return _use_key(config, made) in self.uses or kernels.check(*small_launch(config, problem), self.device) is None

    def _full(self, config: Config, problem: Problem) -> float:
        return full_model(config, problem, self.device, self.made)


def full_model(config: Config, problem: Problem, device: DeviceSpec, made: Kernels) -> float:
    """Return the predicted microseconds of a config with its kernel compiled; infinite where that may not be used."""
    compiled = made.get(config, problem, device)
    if compiled is None:
        return math.inf
    try:
        return float(predictor.predict(config, problem, device, compiled=compiled).time_us)
    except CupyqError:  # compiled, a block of it needs more registers than an SM has
        return math.inf


def dequantizing(problem: Problem, device: DeviceSpec) -> tuple[Config, float]:
    """Return the config that dequantizes, and the predicted microseconds of that and the dense product after it."""
    config = dequant.default(problem)
    return config, float(predictor.predict(config, problem, device).time_us)


def rounded(time_us: float) -> float:
    """Return a time as presets hold it: four digits."""
    return float(f"{time_us:.4g}")


def make_one(name: str, of: Sequence[Problem], made: Kernels) -> Made:
    """Return the presets of one device of the catalogue."""
    start = time.perf_counter()
    device = devices.get(name)
    here = Environment.here()
    facts = {
        "cupyq": here.cupyq_version,
        "nvrtc": here.nvrtc_version,
        "made": {"kernels": here.library, "predictor": digest("cupyq.predictor"), "by": digest("cupyq.db")},
    }
    writing, maker, rows = presets.Writing(name, facts), Maker(device, made), 0
    for problem in of:
        if kernels.check(kernels.default(problem, device), problem, device) is not None:
            continue  # no kernel of this op runs there
        entries = maker.entries(problem)
        writing.add(problem, entries)
        rows += sum(len(entry) for entry in entries)
    gain = math.exp(sum(map(math.log, maker.gains)) / max(1, len(maker.gains)))
    seconds = time.perf_counter() - start
    return Made(name, writing.text(), rows, gain, maker.uses, seconds)


# --- all of them ------------------------------------------------------------------------------------------------------


def device_names() -> list[str]:
    """Return the devices of the catalogue that kernels can be made for."""
    return [name for name in devices.names() if devices.get(name).refusal is None]


def make(
    names: Sequence[str] | None,
    folder: Path,
    shapes: Iterable[tuple[int, int]] | None = None,
    jobs: int | None = None,
    told: Callable[[str], object] = lambda said: None,
) -> list[Made]:
    """Write the presets of devices into a folder, a file a device; if a kernel turns out wrong, none.

    Parameters
    ----------
    names : sequence of str, optional
        Of the catalogue; all of them by default.
    folder : Path
    shapes : iterable of (K, N), optional
        Layers; those of every built-in model by default.
    jobs : int, optional
        Processes; one a processor by default.
    told : callable
        Hears, in a line, of each step that is done.

    Raises
    ------
    ArgumentError, UnknownDevice, IllegalConfig
        A device is of no use here.
    VerificationError
        A kernel computes something else than it should; the message says which.
    DatabaseError
        The folder cannot be written.
    """
    chosen = device_names() if names is None else list(dict.fromkeys(devices.get(name).name for name in names))
    if not chosen:
        raise ArgumentError("no device was named; a name of the catalogue is accepted")
    by_arch: dict[str, list[str]] = {}
    for name in chosen:
        devices.get(name).require_kernels()
        by_arch.setdefault(devices.get(name).arch, []).append(name)
    of, finished = problems(shapes), []
    # Devices of one architecture share their kernels, and so a process; the longest go first.
    groups = sorted(by_arch.values(), key=len, reverse=True)
    with _processes(jobs) as pool:
        for group in as_completed([pool.submit(_group, names, of) for names in groups]):
            for made in group.result():
                told(f"{made.device}: {made.rows} rows; the default takes {made.gain:.3f} times as long, predicted")
                finished.append(made)
        uses = list({key: use for made in finished for key, use in made.uses.items()}.values())
        wrong = [said for said in pool.map(verify, uses, chunksize=8) if said is not None]
    if wrong:
        raise VerificationError(f"{len(wrong)} of {len(uses)} kernels are wrong, so nothing is written: {wrong[0]}")
    told(f"{len(uses)} kernels verified in the emulator")
    for made in finished:
        _write(folder, made)
    return finished


def _processes(jobs: int | None) -> ProcessPoolExecutor:
    # Not forked: threads of BLAS, and NVRTC, do not survive that everywhere.
    return ProcessPoolExecutor(jobs or os.cpu_count() or 1, mp_context=multiprocessing.get_context("spawn"))


def _group(names: Sequence[str], of: Sequence[Problem]) -> list[Made]:
    made = Kernels()
    return [make_one(name, of, made) for name in names]


def _write(folder: Path, made: Made) -> None:
    target = folder / presets.file_of(made.device).name
    fresh = target.with_suffix(".new")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fresh.write_text(made.text, encoding="utf-8")
        os.replace(fresh, target)
    except OSError as error:
        raise DatabaseError(f"{target} cannot be written ({error.strerror})") from error
