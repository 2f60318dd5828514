"""Adversarial inputs for one launch: magnitudes far apart, cancelling rows, extreme codes, ragged edges, guard rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyq import reference
from cupyq.kernels import Config, DequantConfig, Problem
from cupyq.kernels.problem import NUMPY_DTYPES
from cupyq.weights import BLOCK, QuantizedWeight, pack

GUARD = 8
"""Rows before and after the output that a launch must leave as they were."""


STRIPES = 5
"""CTAs of stripes in a small launch, whose tiles are four."""


@dataclass(frozen=True)
class Inputs:
    """One launch's inputs.

    Attributes
    ----------
    problem : Problem
        With the small M, N and K that are launched.
    qw : QuantizedWeight
    x : (M, K) array of the problem's dtype
        Activations; for 8-bit schemes before quantization.
    codes, x_scale : arrays or None
        8-bit schemes: quantized activations and the scale of each token; None where the kernel quantizes x itself.
    bias : (N,) array
    """

    problem: Problem
    qw: QuantizedWeight
    x: np.ndarray
    codes: np.ndarray | None
    x_scale: np.ndarray | None
    bias: np.ndarray

    @property
    def kernel_x(self) -> np.ndarray:
        """What the fused kernel reads as x."""
        return self.x if self.codes is None else self.codes


def small_launch(cfg: Config, problem: Problem) -> tuple[Config, Problem]:
    """Return the smallest launch of the same kernel that meets everything `cfg` meets on `problem`.

    Tokens and output features: one whole tile and a ragged one, so that interior and edge code both run; N keeps the
    divisibility that selects the kernel's instance. K: the real one, unless it is so long that the pipeline goes round
    more than once in each CTA; then as many stages as that takes, with the real K's remainder in the last. A grid of
    stripes is cut to five, which then cross the borders of the four tiles.
    """
    if isinstance(cfg, DequantConfig):
        stage, least = 64 * cfg.units, 3
        m, n = 1, 16 * cfg.warps + (24 if problem.n % 8 == 0 else 21)
    else:
        stage = cfg.block_k  # type: ignore[attr-defined]
        least = cfg.split_k * (cfg.stages + 2)  # type: ignore[attr-defined]
        m = cfg.block_m + 3  # type: ignore[attr-defined]
        n = cfg.block_n + (20 if problem.n % 4 == 0 else 21)  # type: ignore[attr-defined]
        if getattr(cfg, "ctas", 0):
            cfg = replace(cfg, ctas=min(cfg.ctas, STRIPES))  # type: ignore[attr-defined, type-var]
            least = -(-least * STRIPES // 4)
    k = problem.k
    if -(-k // stage) > least:
        k = (least - 1) * stage + (k % stage or stage)
    return cfg, replace(problem, m=m, n=n, k=k)


def adversarial(problem: Problem, seed: int = 0, quantized: bool = True) -> Inputs:
    """Return inputs that a wrong kernel is unlikely to survive.

    Weights: every code occurs; scales differ from group to group by up to 2**10; zero points take their extremes.
    Tokens take turns: ordinary; large with alternating signs; tiny; zero but for one entry; huge values that cancel
    around ones (a sum kept in 16 bits loses them); zero.

    `quantized` says whether the kernel of an 8-bit scheme takes codes, rather than x itself.
    """
    rng = np.random.default_rng(seed)
    dtype = NUMPY_DTYPES[problem.dtype]
    m, n, k = problem.m, problem.n, problem.k
    qw = _weight(problem, rng)
    x = np.zeros((m, k), dtype=np.float32)
    for row in range(m):
        x[row] = _token(row % 6, k, rng)
    x = x.astype(dtype)
    bias = (rng.standard_normal(n) * 0.5).astype(dtype)
    codes = x_scale = None
    if quantized and problem.op in reference.LARGEST_CODE:
        codes, x_scale = reference.quantize_activations(x, problem.op)
    return Inputs(problem, qw, x, codes, x_scale, bias)


def _token(kind: int, k: int, rng: np.random.Generator) -> np.ndarray:
    ordinary = rng.standard_normal(k)
    if kind == 0:
        return ordinary
    if kind == 1:
        return 30 * np.abs(ordinary) * (1 - 2 * (np.arange(k) % 2))
    if kind == 2:
        return ordinary * 2.0**-12
    if kind == 3:
        one = np.zeros(k)
        one[rng.integers(k)] = 3
        return one
    if kind == 4:
        ones = np.ones(k)
        ones[0], ones[-1] = 2048, -2048
        return ones
    return np.zeros(k)


def _weight(problem: Problem, rng: np.random.Generator) -> QuantizedWeight:
    n, k, groups = problem.n, problem.k, problem.groups
    if problem.weight_only:
        top = 2**problem.bits - 1
        codes: Any = rng.integers(0, top + 1, size=(k, n), dtype=np.uint8)
        exponents = rng.integers(-10, 1, size=(groups, n)).astype(np.float32)
        sizes = np.exp2(exponents) * rng.uniform(1, 2, size=(groups, n)) / 2 ** (problem.bits - 1)
        zeros = None
        if not problem.symmetric:
            extremes = np.array([0, 1, top // 2, top // 2 + 1, top - 1, top], dtype=np.uint8)
            zeros = rng.choice(extremes, size=(groups, n))
        scales = sizes.astype(NUMPY_DTYPES[problem.scale_dtype])
        return pack(codes, scales, zeros, scheme=problem.op, group_size=problem.group_size)
    if problem.op == "w8a8-int8":
        codes = rng.integers(-128, 128, size=(k, n)).astype(np.int8)
    else:
        codes = rng.integers(0, 256, size=(k, n)).astype(np.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0x7E  # e4m3 has no infinity, and these two patterns are NaN
    shape = (groups, n) if problem.group_size == -1 else (groups, -(-n // BLOCK))
    scales = (np.exp2(rng.integers(-6, 1, size=shape).astype(np.float32)) / 512).astype(np.float32)
    return pack(codes, scales, scheme=problem.op, group_size=None if problem.group_size == -1 else problem.group_size)


def guarded(shape: tuple[int, int], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return (a NaN-filled array with guard rows, the view of it that is the output)."""
    whole = np.full((shape[0] + 2 * GUARD, shape[1]), np.nan, dtype=dtype)
    return whole, whole[GUARD : GUARD + shape[0]]
