"""Faults that users of such libraries reported, ruled out in the PTX of the default W4A16 kernels."""

from __future__ import annotations

import numpy as np
import pytest

import cupyq
from cupyq import kernels, reference
from cupyq.kernels import Problem, W4A16Config
from emulated import DTYPES, activations, check_product, launch, weights

ARCH = "sm_80"


def product(m, n, k, group_size=64, symmetric=False, dtype="float16", **options):
    qw = cupyq.quantize(weights(k, n), "w4a16", group_size=group_size, symmetric=symmetric)
    prob = Problem("w4a16", m, n, k, group_size, symmetric, dtype)
    return check_product(kernels.default(prob, ARCH), prob, activations(m, k, dtype), qw, arch=ARCH, **options)


@pytest.mark.parametrize("m", [*range(1, 18), 31, 33, 63, 65, 127, 129, 329])
def test_ragged_m(m):
    product(m, 40, 136)


@pytest.mark.parametrize("k", [16, 48, 136, pytest.param(10944, marks=pytest.mark.slow)])
@pytest.mark.parametrize("n", [1, 7, 8, 24, 64, 72, 127, 192])
def test_ragged_n_and_k(n, k):
    product(5, n, k, 16 if k < 64 else 64)


@pytest.mark.parametrize("m", [65_537, pytest.param(1_048_561, marks=pytest.mark.slow)])
def test_huge_m(m):
    """More rows than the second dimension of a grid holds."""
    qw = cupyq.quantize(weights(32, 8), "w4a16", group_size=32)
    x = np.zeros((m, 32), np.float16)
    x[-2:] = activations(2, 32, "float16")
    prob = Problem("w4a16", m, 8, 32, 32)
    cfg = kernels.default(prob, ARCH)
    out = launch(cfg, prob, x, qw, arch=ARCH, checks=()).out
    limit = reference.bound(x[-2:], qw, "float16", scaled_weights=cfg.scale == "weights")
    assert (out[:-2] == 0).all()
    comparison = reference.compare(out[-2:], reference.matmul(x[-2:], qw), limit)
    assert comparison.ok, str(comparison)


@pytest.mark.parametrize("amplitude", [0.0, 1e-6])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_group_of_almost_nothing_is_finite(amplitude, symmetric, dtype):
    k, n = 256, 24
    w = weights(k, n)
    w[64:128] *= amplitude
    qw = cupyq.quantize(w, "w4a16", group_size=64, symmetric=symmetric)
    x = np.zeros((9, k), DTYPES[dtype])
    x[:8] = activations(8, k, dtype)
    x[8, 64:128] = 1
    prob = Problem("w4a16", 9, n, k, 64, symmetric, dtype)
    run = check_product(kernels.default(prob, ARCH), prob, x, qw, arch=ARCH)
    assert np.isfinite(run.out.astype(float)).all()
    if amplitude == 0:
        assert (run.out[8] == 0).all()


@pytest.mark.parametrize("group_size", [32, 64, 128, 256, -1])
@pytest.mark.parametrize("m", [1, 16, 33, 64])
def test_scales_that_double_from_group_to_group(group_size, m):
    """A group size other than the one asked for is then wrong by a factor."""
    k, n = 512, 40
    groups = 1 if group_size == -1 else k // group_size
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (k, n)).astype(np.uint8)
    scales = np.repeat(2.0 ** (np.arange(groups)[:, None] - 10), n, axis=1).astype(np.float16)
    qw = cupyq.pack(codes, scales, scheme="w4a16", group_size=group_size)
    prob = Problem("w4a16", m, n, k, group_size)
    check_product(kernels.default(prob, ARCH), prob, activations(m, k, "float16"), qw, arch=ARCH)


@pytest.mark.slow
@pytest.mark.parametrize("split_k", [1, 2, 3, 4, 6, 8])
def test_a_hundred_runs_have_the_same_bits(split_k):
    k, n, m = 1024, 40, 11
    qw = cupyq.quantize(weights(k, n), "w4a16", group_size=64)
    x = activations(m, k, "float16")
    prob = Problem("w4a16", m, n, k, 64)
    cfg = W4A16Config(16, 2, 1, 2, 64, 3, split_k)
    assert kernels.check(cfg, prob, ARCH) is None
    assert len({launch(cfg, prob, x, qw, arch=ARCH, checks=(), seed=seed).out.tobytes() for seed in range(100)}) == 1
