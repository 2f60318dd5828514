"""Every instantiation of the fused kernels' templates that some GPU may be given, and what is asked of each.

An instantiation is a choice of template arguments: a shape of block, with split-K or stripes, and what the problem adds
to it (bits of a code, groups, zero points, types, edges). All of the first are run for the plain problem, and once more
with the second drawn, since the product of both is about a million kernels.
"""

from __future__ import annotations

import hashlib
import random
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from cupyq import compiler, devices, emulator, kernels
from cupyq.db import presets
from cupyq.kernels import Config, Problem
from cupyq.kernels.problem import GROUP_SIZES
from cupyq.tuner.inputs import small_launch
from cupyq.tuner.verify import Verifier

GPUS = {
    "sm_75": "t4",
    "sm_80": "a100-sxm",
    "sm_86": "rtx-3090",
    "sm_87": "orin-agx-64",
    "sm_89": "rtx-4090",
    "sm_90": "h100-sxm",
    "sm_100": "b200",
    "sm_120": "rtx-5090",
}
SEEDS = {arch: (1, 2, 3) if arch in ("sm_80", "sm_90") else (1,) for arch in GPUS}
"""Schedules of the emulator in which a kernel runs, by what it is compiled for."""

PLAIN = {
    "w4a16": Problem("w4a16", 512, 4096, 4096, 128),
    "w8a8-int8": Problem("w8a8-int8", 512, 4096, 4096),
    "w8a8-fp8": Problem("w8a8-fp8", 512, 4096, 4096),
    "w8a8-fp8-block": Problem("w8a8-fp8-block", 512, 4096, 4096),
}
"""M: tall enough for every tile, and all M share a kernel."""


PRESETS = sorted(presets.folder().glob("*.jsonl"))
"""Named here, since tests do without them (see conftest)."""

Small = Callable[[Config, Problem], tuple[Config, Problem]]
"""Reduces a launch to a small one of the same kernel."""


@dataclass
class Instantiation:
    """One choice of template arguments.

    Attributes
    ----------
    problem : Problem
    configs : dict of str to Config
        By the archs on which it is legal.
    """

    problem: Problem
    configs: dict[str, Config] = field(default_factory=dict)


def number(*of: Any) -> int:
    """Return a number that looks drawn, but is the same every time."""
    return zlib.crc32(repr(of).encode())


def every(problems: Iterable[Problem], archs: Iterable[str] = GPUS) -> list[Instantiation]:
    """Return every instantiation that is legal for one of the problems on one of the archs, in a fixed order.

    Splits of K are no template argument: each takes one or two.
    """
    found: dict[str, Instantiation] = {}
    for prob, arch in product(problems, archs):
        device = devices.get(GPUS[arch])
        for cfg in kernels.configs(prob, device):
            if getattr(cfg, "split_k", 1) > 2:
                continue
            one = found.setdefault(cfg.instance(prob), Instantiation(prob))
            if arch not in one.configs or number(cfg) < number(one.configs[arch]):
                one.configs[arch] = cfg
    return [found[text] for text in sorted(found)]


def problems_like(plain: Problem) -> Iterator[Problem]:
    """Yield problems of the same family, with everything that selects another instantiation."""
    edges = [(n, k) for n in (4096, 4095) for k in (4096, 4104, 4097)]
    if plain.weight_only:
        types = [(x, scale) for x in ("float16", "bfloat16") for scale in ("float16", "bfloat16")]
        for op, group, symmetric, (dtype, scale_dtype), (n, k) in product(
            ("w2a16", "w4a16", "w8a16"), GROUP_SIZES, (True, False), types, edges
        ):
            yield Problem(op, plain.m, n, k, group, symmetric, dtype, scale_dtype)
    else:
        for dtype, (n, k) in product(("float16", "bfloat16"), edges):
            yield Problem(plain.op, plain.m, n, k, plain.group_size, True, dtype)


def thinned(one: Instantiation) -> Instantiation:
    """Return the same with a single one of the archs whose source is that of sm_80 as well, but for sm_90."""
    shared = [arch for arch in one.configs if arch not in ("sm_75", "sm_80", "sm_90")]
    dropped = [arch for arch in shared if arch != shared[number(*one.configs.values()) % len(shared)]]
    return Instantiation(one.problem, {arch: cfg for arch, cfg in one.configs.items() if arch not in dropped})


def drawn(one: Instantiation, others: list[Problem]) -> Instantiation:
    """Return the same shape of block for another problem, drawn among those where it is legal."""
    shape = next(iter(one.configs.values()))
    for prob in random.Random(number(shape)).sample(others, len(others)):
        legal = {arch: cfg for arch, cfg in one.configs.items() if kernels.check(cfg, prob, GPUS[arch]) is None}
        if legal:
            return Instantiation(prob, legal)
    return one


def shipped() -> list[Instantiation]:
    """Return the kernels of the presets, those with and without split-K apart, in a fixed order."""
    found: dict[tuple[str, bool], Instantiation] = {}
    for file in PRESETS:
        arch = devices.get(file.stem).arch
        for row in presets.Preset(file.stem, file.read_text()).rows():
            cfg, prob = kernels.from_dict(row.found.config), Problem(**{"m": 1, **row.problem})
            key = cfg.instance(prob), getattr(cfg, "split_k", 1) > 1
            one = found.setdefault(key, Instantiation(prob, {arch: cfg}))
            one.configs.setdefault(arch, next(iter(one.configs.values())))
    return [found[key] for key in sorted(found)]


def body(ptx: str) -> str:
    """Return a hash of the instructions alone: the same for archs that get the same ones."""
    return hashlib.sha256(re.sub(r"//.*", "", ptx.partition(".address_size")[2]).encode()).hexdigest()


def half(cfg: Config, problem: Problem) -> tuple[Config, Problem]:
    """Return a launch of the same kernel with one whole tile and one ragged: of tokens, or of output features.

    Half of what `tuner.inputs.small_launch` runs, which has both; K is as there, once and more round the pipeline.
    """
    cfg, reduced = small_launch(cfg, problem)
    if number(cfg, problem) % 2:
        reduced = replace(reduced, n=reduced.n - 32)
    else:
        reduced = reduced.with_m(cfg.block_m - 3)
    if getattr(cfg, "ctas", 0):
        cfg = replace(cfg, ctas=min(3, cfg.tiles(reduced) * cfg.k_tiles(reduced)))
    return cfg, reduced


def faults(one: Instantiation, small: Small = half, spills: bool = True) -> Iterator[str]:
    """Yield what is wrong with a kernel, compiled for its archs, and run once for those with the same instructions.

    `spills` says whether a spill is wrong.
    """
    schedules: dict[str, tuple[str, set[int]]] = {}
    for arch in sorted(one.configs, key=lambda arch: -len(SEEDS[arch])):
        cfg, problem = small(one.configs[arch], one.problem)
        if cfg.instance(problem) != one.configs[arch].instance(one.problem):
            yield f"{cfg} for {problem}: the small launch is of another kernel"
        compiled = compiler.compile_kernel(cfg, problem, arch)
        if spills and compiled.spill_bytes:
            yield f"{cfg} for {problem} on {arch}: {compiled.spill_bytes} bytes of spills"
        schedules.setdefault(body(compiled.ptx), (arch, set()))[1].update(SEEDS[arch])
    for arch, seeds in schedules.values():
        cfg, problem = small(one.configs[arch], one.problem)
        for fault in run(cfg, problem, arch, sorted(seeds)):
            yield f"{cfg} for {problem} on {arch}: {fault}"


def run(cfg: Config, problem: Problem, arch: str, seeds: Iterable[int]) -> Iterator[str]:
    """Yield what is wrong with a launch: by the verifier, by the bits in each schedule, by bank conflicts."""
    results: set[bytes] = set()
    conflicts = set()
    for seed in seeds:

        def launch(cfg: Config, problem: Problem, call: kernels.Call, arch: str, seed: int = seed) -> None:
            compiled = compiler.compile_kernel(cfg, problem, arch)
            counters = emulator.launch(
                compiled.ptx, call.entry, call.grid, call.block, call.args, call.shared_bytes, seed=seed
            ).counters
            results.add(call.out.tobytes())
            conflicts.add(loop_conflicts(counters))

        outcome = Verifier(devices.get(GPUS[arch]), launch=launch).verify_as_is(cfg, problem)
        if not outcome.ok:
            yield f"schedule {seed}: {outcome.reason}"
    if len(results) > 1:
        yield "bits depend on the schedule"
    if conflicts - {0}:
        yield f"{max(conflicts)} bank conflicts in the main loop"


def loop_conflicts(counters: Any) -> int:
    """Return the passes over the banks beyond the least, in the innermost loop with tensor instructions."""
    loops = [range(loop["first_line"], loop["last_line"] + 1) for loop in counters.by_loop() if loop["tensor"]]
    inner = [lines for lines in loops if not any(set(other) < set(lines) for other in loops)]
    return sum(row["conflicts"] for row in counters.by_line() if any(row["line"] in lines for lines in inner))
