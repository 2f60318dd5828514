"""The W8A8 kernel and the quantization of activations, run in the emulator."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import cupyq
from cupyq import kernels, reference
from cupyq.kernels import Problem, QuantizeActivationsConfig, W8A8Config
from emulated import DTYPES, activations, launch, weights

SMALL = W8A8Config(block_m=32, warp_tokens=16, strips=2, warps_n=2, warps_k=1, warp_k=64, stages=3, split_k=1)


def product(
    m: int,
    n: int,
    k: int,
    op: str = "w8a8-int8",
    dtype: str = "float16",
    cfg: W8A8Config = SMALL,
    bias: np.ndarray | None = None,
    arch: str = "sm_89",
    **options: object,
):
    qw = cupyq.quantize(weights(k, n), op)
    prob = Problem(op, m, n, k, dtype=dtype)
    codes, x_scale = reference.quantize_activations(activations(m, k, dtype), op)
    run = launch(cfg, prob, codes, qw, x_scale=x_scale, bias=bias, arch=arch, **options)
    want = reference.matmul(codes, qw, bias, x_scale=x_scale)
    limit = reference.bound(codes, qw, dtype, bias, x_scale=x_scale)
    comparison = reference.compare(run.out, want, limit)
    assert comparison.ok, f"{cfg} {prob}: {comparison}"
    return run


OPS = ("w8a8-int8", "w8a8-fp8")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("m", [1, 3, 8, 17, 65])
def test_ragged_shapes(op, dtype, m):
    product(m, 72, 200, op, dtype)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "cfg",
    [
        W8A8Config(8, 8, 1, 2, 1, 64, 2, 1),
        W8A8Config(8, 8, 4, 1, 4, 64, 4, 2),
        W8A8Config(16, 16, 2, 1, 2, 128, 3, 1),
        W8A8Config(64, 16, 2, 1, 2, 64, 3, 3),
        W8A8Config(64, 64, 4, 2, 1, 64, 2, 1),
        W8A8Config(128, 32, 4, 2, 1, 64, 3, 1),
        W8A8Config(256, 64, 2, 1, 1, 128, 2, 1),
    ],
    ids=repr,
)
def test_every_kind_of_tile(op, cfg):
    product(cfg.block_m + 3, cfg.block_n + 24, 3 * cfg.block_k + 40, op, cfg=cfg)


@pytest.mark.parametrize("n", [1, 7, 24, 127])
def test_ragged_n(n):
    product(5, n, 80)


@pytest.mark.parametrize("k", [1, 15, 16, 31, 33, 63, 136])
@pytest.mark.parametrize("op", OPS)
def test_ragged_k(k, op):
    product(5, 24, k, op)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("op", OPS)
def test_every_arch(arch, op):
    prob = Problem(op, 40, 72, 264)
    if kernels.check(SMALL, prob, arch) is not None:
        assert (op, arch < "sm_89") == ("w8a8-fp8", True)
        return
    run = product(40, 72, 264, op, cfg=kernels.default(prob, arch), arch=arch)
    assert run.compiled.spill_bytes == 0


@pytest.mark.parametrize("split_k", [1, 2, 4])
def test_bias_and_splits(split_k):
    product(9, 40, 512, cfg=dataclasses.replace(SMALL, split_k=split_k), bias=np.linspace(-9, 9, 40).astype(np.float16))


def test_int8_sums_are_exact_to_the_last_bit():
    # 2049 * 127 * 127: a float32 sum could not hold it; the scale undoes it exactly.
    k = 2049
    qw = cupyq.pack(
        np.full((k, 16), 127, np.int8), np.full((1, 16), 2.0**-15, np.float32), scheme="w8a8-int8", group_size=-1
    )
    codes = np.full((2, k), 127, np.int8)
    run = launch(
        SMALL, Problem("w8a8-int8", 2, 16, k, dtype="bfloat16"), codes, qw, x_scale=np.ones(2, np.float32), arch="sm_80"
    )
    assert (run.out == np.float32(33_048_321 / 2**15).astype(DTYPES["bfloat16"])).all()


@pytest.mark.parametrize(
    ("x_scale", "w_scale"), [(1e-3, 1e-3), (1e3, 1e-9), (1e-9, 1e3), (1e30, 1e-36), (2.0**-100, 2.0**85)]
)
def test_scales_neither_overflow_nor_vanish_on_the_way(x_scale, w_scale):
    k = 4096
    qw = cupyq.pack(
        np.full((k, 16), 127, np.int8), np.full((1, 16), w_scale, np.float32), scheme="w8a8-int8", group_size=-1
    )
    codes = np.full((1, k), 127, np.int8)
    scale = np.full(1, x_scale, np.float32)
    cfg = W8A8Config(8, 8, 1, 2, 2, 128, 3, 1)
    run = launch(cfg, Problem("w8a8-int8", 1, 16, k, dtype="bfloat16"), codes, qw, x_scale=scale, arch="sm_80")
    want = float(np.float32(x_scale)) * float(np.float32(w_scale)) * 127 * 127 * k
    assert abs(run.out.astype(np.float64) / want - 1).max() < 2.0**-8


def test_a_k_whose_sum_could_overflow_is_refused():
    assert "overflow" in kernels.check(SMALL, Problem("w8a8-int8", 1, 16, 131_073), "sm_80")
    assert kernels.check(SMALL, Problem("w8a8-int8", 1, 16, 131_072), "sm_80") is None


# --- quantize_activations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("k", [1, 7, 8, 72, 200, 2000])
def test_codes_and_scales_equal_the_reference(op, dtype, k):
    x = activations(5, k, dtype)
    x[2] = 0
    x[3] *= np.float32(1000).astype(x.dtype)
    prob = Problem(op, 5, 16, k, dtype=dtype)
    want, want_scale = reference.quantize_activations(x, op)
    for cfg in (QuantizeActivationsConfig(64, 2), QuantizeActivationsConfig(128, 2)):
        run = launch(cfg, prob, x, arch="sm_89")
        assert (run.call.x_scale == want_scale).all()
        assert (run.out[:, :k].view(np.uint8) == want.view(np.uint8)).all()
        assert not run.out[:, k:].any()


def test_rows_that_are_not_finite_show_in_the_scale():
    x = activations(4, 64, "float16")
    x[0, 3], x[1, 5], x[2, 7] = np.nan, np.inf, -np.inf
    run = launch(QuantizeActivationsConfig(64, 2), Problem("w8a8-int8", 4, 16, 64), x, arch="sm_80")
    scale = run.call.x_scale
    assert np.isnan(scale[0])
    assert np.isinf(scale[1:3]).all()
    assert np.isfinite(scale[3])


def test_tiny_activations_get_a_normal_scale():
    x = np.full((1, 64), np.float32(2.0**-130)).astype(DTYPES["bfloat16"])
    run = launch(QuantizeActivationsConfig(64, 2), Problem("w8a8-int8", 1, 16, 64, dtype="bfloat16"), x, arch="sm_80")
    assert run.call.x_scale[0] >= 2.0**-126


def test_a_zero_row_gives_zeros_and_leaves_the_others():
    x = activations(4, 256, "float16")
    x[2] = 0
    for op in OPS:
        qw = cupyq.quantize(weights(256, 24), op)
        prob = Problem(op, 4, 24, 256)
        quantized = launch(QuantizeActivationsConfig(64, 2), prob, x, arch="sm_89")
        run = launch(SMALL, prob, quantized.out, qw, x_scale=quantized.call.x_scale, arch="sm_89")
        assert (run.out[2] == 0).all()
        others = [0, 1, 3]
        alone = launch(
            SMALL, prob.with_m(3), quantized.out[others], qw, x_scale=quantized.call.x_scale[others], arch="sm_89"
        )
        assert (alone.out == run.out[others]).all()
