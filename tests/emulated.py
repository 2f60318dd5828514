"""Run a kernel of the catalogue in the emulator, its output filled with NaN and set between guard rows."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from cupyq import compiler, emulator, kernels, reference
from cupyq.kernels import Config, Problem

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
GUARD_ROWS = 8


@dataclass(frozen=True)
class Run:
    """What a launch left behind."""

    out: np.ndarray
    call: kernels.Call
    counters: Any
    compiled: compiler.CompiledKernel


def guarded(shape: tuple[int, int], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return (whole, part): an array of NaN (0x7e for bytes) and the rows of it that a kernel may write."""
    fill = 0x7E if dtype.itemsize == 1 else np.nan
    whole = np.full((shape[0] + 2 * GUARD_ROWS, shape[1]), fill, dtype)
    return whole, whole[GUARD_ROWS : GUARD_ROWS + shape[0]]


def launch(
    cfg: Config,
    prob: Problem,
    x: Any,
    qw: Any = None,
    *,
    arch: str = "sm_80",
    seed: int | None = None,
    checks: tuple[str, ...] = ("memory", "race", "init", "sync"),
    **arguments: Any,
) -> Run:
    """Compile and launch; assert that no guard row was touched."""
    if seed is None and "CUPYQ_TEST_SEED" in os.environ:  # every kernel test again, in another schedule
        seed = int(os.environ["CUPYQ_TEST_SEED"])
    compiled = compiler.compile_kernel(cfg, prob, arch)
    if isinstance(cfg, kernels.QuantizeActivationsConfig):
        shape, dtype = (prob.m, -(-prob.k // 16) * 16), np.dtype(np.int8 if prob.op == "w8a8-int8" else np.uint8)
    elif isinstance(cfg, kernels.DequantConfig):
        shape, dtype = (prob.k, prob.n), DTYPES[prob.dtype]
    else:
        shape, dtype = (prob.m, prob.n), DTYPES[prob.dtype]
    whole, part = guarded(shape, dtype)
    call = kernels.call(cfg, prob, x, qw, out=part, **arguments)
    assert call.out is part
    before = whole.copy()
    result = emulator.launch(
        compiled.ptx, call.entry, call.grid, call.block, call.args, call.shared_bytes, checks=checks, seed=seed
    )
    for rows in (slice(0, GUARD_ROWS), slice(-GUARD_ROWS, None)):
        assert whole[rows].tobytes() == before[rows].tobytes(), "a guard row was written"
    return Run(part, call, result.counters, compiled)


def check_product(
    cfg: Config, prob: Problem, x: np.ndarray, qw: Any, *, bias: np.ndarray | None = None, **options: Any
) -> Run:
    """Launch a fused W4A16 kernel and hold its result against the float64 reference and the bound."""
    run = launch(cfg, prob, x, qw, bias=bias, **options)
    want = reference.matmul(x, qw, bias)
    scaled = getattr(cfg, "scale", "sums") == "weights" and prob.group_size != -1
    limit = reference.bound(x, qw, prob.dtype, bias, scaled_weights=scaled)
    comparison = reference.compare(run.out, want, limit)
    assert comparison.ok, f"{cfg} {prob}: {comparison}"
    return run


def activations(m: int, k: int, dtype: str, seed: int = 0) -> np.ndarray:
    """Return (M, K) normal random activations."""
    return np.random.default_rng(seed).standard_normal((m, k), dtype=np.float32).astype(DTYPES[dtype])


def weights(k: int, n: int, seed: int = 1) -> np.ndarray:
    """Return (K, N) normal random weights."""
    return np.random.default_rng(seed).standard_normal((k, n), dtype=np.float32)


def variant(cfg: Config, **changes: Any) -> Config:
    """Return `cfg` with some tunables changed."""
    return replace(cfg, **changes)  # type: ignore[type-var]
