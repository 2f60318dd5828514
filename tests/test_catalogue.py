"""Over the catalogue: kernels of every family under all four checks of the emulator, in shuffled schedules."""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest

import cupyq
from cupyq import kernels, reference
from cupyq.kernels import DequantConfig, Problem, QuantizeActivationsConfig
from emulated import activations, check_product, launch, weights

SEEDS = range(5)


def sample(prob: Problem, arch: str, count: int) -> list:
    """A few legal configs, the same ones every time."""
    return random.Random(zlib.crc32(repr((prob, arch)).encode())).sample(list(kernels.configs(prob, arch)), count)


def weight_only(op: str, arch: str, dtype: str, symmetric: bool, group_size: int, count: int, seeds) -> None:
    m, n, k = 19, 136, 584
    prob = Problem(op, m, n, k, group_size, symmetric, dtype)
    qw = cupyq.quantize(weights(k, n), op, group_size=group_size, symmetric=symmetric)
    x = activations(m, k, dtype)
    for cfg in [kernels.default(prob, arch), *sample(prob, arch, count)]:
        results = {check_product(cfg, prob, x, qw, arch=arch, seed=seed).out.tobytes() for seed in seeds}
        assert len(results) == 1, f"{cfg}: bits depend on the schedule"


def eight_bits(op: str, arch: str, count: int, seeds) -> None:
    m, n, k = 19, 136, 584
    prob = Problem(op, m, n, k)
    qw = cupyq.quantize(weights(k, n), op)
    x = activations(m, k, "float16")
    codes, x_scale = reference.quantize_activations(x, op)
    want = reference.matmul(codes, qw, x_scale=x_scale)
    limit = reference.bound(codes, qw, "float16", x_scale=x_scale)
    defaults = [kernels.default(prob, arch, fused=fused) for fused in (False, True)]
    for cfg in [*defaults, *sample(prob, arch, count)]:
        results = set()
        for seed in seeds:
            given, scale = (x, None) if cfg.fused else (codes, x_scale)
            run = launch(cfg, prob, given, qw, x_scale=scale, arch=arch, seed=seed)
            comparison = reference.compare(run.out, want, limit)
            assert comparison.ok, f"{cfg}: {comparison}"
            results.add(run.out.tobytes())
        assert len(results) == 1, f"{cfg}: bits depend on the schedule"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_few_configs_in_two_schedules(arch):
    weight_only("w4a16", arch, "float16", False, 64, 1, (None, 1))
    eight_bits("w8a8-int8", arch, 1, (None, 1))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", ["w2a16", "w4a16", "w8a16"])
def test_weight_only_kernels_in_five_schedules(op, arch, dtype):
    for group_size, symmetric in ((128, True), (32, False), (-1, False)):
        weight_only(op, arch, dtype, symmetric, group_size, 3, SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "arch"), [("w8a8-int8", "sm_80"), ("w8a8-int8", "sm_90"), ("w8a8-fp8", "sm_89"),
                                          ("w8a8-fp8", "sm_90")])  # fmt: skip
def test_w8a8_kernels_in_five_schedules(op, arch):
    eight_bits(op, arch, 5, SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_75", "sm_86", "sm_87", "sm_89", "sm_100", "sm_120"])
def test_other_archs_in_one_schedule(arch):
    weight_only("w4a16", arch, "float16", False, 128, 4, (1,))
    eight_bits("w8a8-int8", arch, 4, (1,))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_helper_kernels_in_five_schedules(arch):
    prob = Problem("w4a16", 1, 136, 520, 64, False)
    qw = cupyq.quantize(weights(520, 136), "w4a16", group_size=64, symmetric=False)
    want = cupyq.dequantize(qw).astype(np.float16)
    x = activations(9, 520, "float16")
    codes, scales = reference.quantize_activations(x, "w8a8-int8")
    for seed in SEEDS:
        assert (launch(DequantConfig(), prob, None, qw, arch=arch, seed=seed).out == want).all()
        for cfg in kernels.helper_configs("quantize_activations", Problem("w8a8-int8", 9, 136, 520), arch):
            if cfg == QuantizeActivationsConfig(cfg.threads, cfg.pieces):  # plain: a scale a token
                run = launch(cfg, Problem("w8a8-int8", 9, 136, 520), x, arch=arch, seed=seed)
                assert (run.out[:, :520] == codes).all()
                assert (run.call.x_scale == scales).all()
