"""The W8A8 kernel and the quantization of activations, run in the emulator."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

import cupyq
from cupyq import devices, kernels, reference
from cupyq.compiler import compile_kernel, sass
from cupyq.errors import ArgumentError
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
BANDS = tuple(2**i for i in range(14))


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


def test_bfloat16_is_refused_on_turing():
    prob = Problem("w8a8-int8", 1, 16, 64, dtype="bfloat16")
    assert "bfloat16 needs compute capability 8.0" in kernels.check(SMALL, prob, "sm_75")


def test_a_k_whose_sum_could_overflow_is_refused():
    assert "overflow" in kernels.check(SMALL, Problem("w8a8-int8", 1, 16, 131_073), "sm_80")
    assert kernels.check(SMALL, Problem("w8a8-int8", 1, 16, 131_072), "sm_80") is None


@pytest.mark.parametrize("m", [*range(1, 18), 31, 33, 63, 127, 129])
def test_ragged_m(m):  # b2
    product(m, 40, 136, cfg=SMALL)


@pytest.mark.parametrize("m", [65_537, pytest.param(1_048_561, marks=pytest.mark.slow)])
def test_huge_m(m):  # b4
    run = product(m, 8, 32, cfg=W8A8Config(128, 64, 1, 1, 1, 64, 2), checks=())
    assert np.isfinite(run.out[-1]).all()


def test_k_of_131072_is_exact():  # a12
    k = 131_072
    qw = cupyq.pack(np.full((k, 16), 127, np.int8), np.full((1, 16), 2.0**-15, np.float32), scheme="w8a8-int8")
    codes = np.full((1, k), -128, np.int8)
    cfg = W8A8Config(8, 8, 1, 1, 4, 128, 3)
    prob = Problem("w8a8-int8", 1, 16, k, dtype="bfloat16")
    run = launch(cfg, prob, codes, qw, x_scale=np.ones(1, np.float32), arch="sm_80", checks=())
    assert (run.out == np.float32(-128 * 127 * k / 2**15).astype(DTYPES["bfloat16"])).all()


def test_the_one_column_that_overflows_is_refused():  # a12
    codes = np.zeros((131_072, 3), np.int8)
    codes[:, 1] = -128
    with pytest.raises(ArgumentError, match="all be -128 in column 1"):
        cupyq.pack(codes, np.ones((1, 3), np.float32), scheme="w8a8-int8")
    codes[5, 1] = -127
    cupyq.pack(codes, np.ones((1, 3), np.float32), scheme="w8a8-int8")


@pytest.mark.parametrize(("x_scale", "w_scale"), [(1e-3, 1e-3), (1e3, 1e-9), (1e-9, 1e3)])
def test_float16_result_of_large_sums(x_scale, w_scale):  # a2
    qw = cupyq.pack(np.full((4096, 16), 127, np.int8), np.full((1, 16), w_scale, np.float32), scheme="w8a8-int8")
    codes, scale = np.full((1, 4096), 127, np.int8), np.full(1, x_scale, np.float32)
    run = launch(W8A8Config(8, 8, 1, 2, 2, 128, 3), Problem("w8a8-int8", 1, 16, 4096), codes, qw, x_scale=scale)
    assert (run.out == 66.0625).all()


def compared(run, x, qw, bias=None, **scales):
    dtype = run.out.dtype.name
    want = reference.matmul(x, qw, bias, **scales)
    comparison = reference.compare(run.out, want, reference.bound(x, qw, dtype, bias, **scales))
    assert comparison.ok, comparison


@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_zero_points(split_k, dtype):
    qw, prob = cupyq.quantize(weights(1100, 72), "w8a8-int8"), Problem("w8a8-int8", 40, 72, 1100, dtype=dtype)
    x = np.abs(activations(40, 1100, dtype).astype(np.float32)).astype(DTYPES[dtype])
    codes, x_scale, x_zero = reference.quantize_activations(x, "w8a8-int8", symmetric=False)
    cfg = dataclasses.replace(SMALL, split_k=split_k)
    run = launch(cfg, prob, codes, qw, x_scale=x_scale, x_zero=x_zero, arch="sm_80")
    compared(run, codes, qw, x_scale=x_scale, x_zero=x_zero)


def test_zero_points_past_32_bits():
    # The zero point's share nears the end of int32, and the result lies beyond it.
    k = 131_072
    qw = cupyq.pack(np.full((k, 16), 127, np.int8), np.ones((1, 16), np.float32), scheme="w8a8-int8")
    codes, one = np.full((1, k), 127, np.int8), np.ones(1, np.float32)
    prob = Problem("w8a8-int8", 1, 16, k, dtype="bfloat16")
    cfg = W8A8Config(8, 8, 1, 1, 4, 128, 3)
    run = launch(cfg, prob, codes, qw, x_scale=one, x_zero=np.array([-128], np.int32), arch="sm_80", checks=())
    assert (run.out == np.float32(255 * 127 * k).astype(DTYPES["bfloat16"])).all()


@pytest.mark.parametrize("op", OPS)
def test_one_scale_for_all_tokens(op):
    qw, prob = cupyq.quantize(weights(200, 40), op), Problem(op, 9, 40, 200)
    codes, x_scale = reference.quantize_activations(activations(9, 200, "float16"), op, 0.02)
    compared(launch(SMALL, prob, codes, qw, x_scale=x_scale[:1], arch="sm_89"), codes, qw, x_scale=x_scale)


@pytest.mark.parametrize(
    ("warp_k", "promote_k"), [(64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 256), (128, 512)]
)
@pytest.mark.parametrize("stages", [2, 3])
def test_promoted_sums(warp_k, promote_k, stages):
    cfg = dataclasses.replace(SMALL, warp_k=warp_k, promote_k=promote_k, stages=stages)
    product(17, 72, 1100, "w8a8-fp8", cfg=cfg)


@pytest.mark.parametrize(
    ("m", "n", "k", "cfg"),
    [
        (3, 72, 200, W8A8Config(8, 8, 1, 2, 2, 64, 3)),
        (40, 300, 1100, W8A8Config(32, 16, 2, 2, 1, 128, 3, 2)),
        (130, 136, 512, W8A8Config(128, 64, 2, 4, 1, 128, 3)),
        (40, 136, 1024, W8A8Config(32, 16, 2, 2, 2, 128, 2, 2)),
        (40, 136, 1100, W8A8Config(32, 16, 2, 2, 2, 128, 2, 3)),
        (40, 136, 1100, W8A8Config(32, 16, 2, 2, 1, 64, 2, 3)),
    ],
)
def test_scales_of_blocks(m, n, k, cfg):
    op = "w8a8-fp8-block"
    qw, prob = cupyq.quantize(weights(k, n), op), Problem(op, m, n, k)
    x = activations(m, k, "float16")
    x[:, ::5] *= 100  # blocks differ
    codes, x_scale = reference.quantize_activations(x, op)
    run = launch(cfg, prob, codes, qw, x_scale=x_scale, bias=np.ones(n, np.float16), arch="sm_89")
    compared(run, codes, qw, np.ones(n, np.float16), x_scale=x_scale)


def test_scales_of_blocks_go_from_kernel_to_kernel_uncopied():
    op, m, k = "w8a8-fp8-block", 9, 300
    qw, prob, x = cupyq.quantize(weights(k, 40), op), Problem(op, m, 40, k), activations(m, k, "float16")
    quantized = launch(kernels.quantize_activations.default(prob), prob, x, arch="sm_89")
    run = launch(SMALL, prob, quantized.out, qw, x_scale=quantized.call.x_scale, arch="sm_89")
    assert run.call.args[3].ctypes.data == quantized.call.args[5].ctypes.data
    compared(run, x, qw)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("m", "n", "k", "cfg"),
    [
        (3, 72, 200, W8A8Config(8, 8, 1, 2, 2, 64, 3, fused=True)),
        (17, 40, 1100, W8A8Config(16, 16, 2, 2, 1, 64, 2, 3, fused=True)),
        (35, 72, 515, W8A8Config(16, 16, 2, 2, 1, 64, 3, fused=True)),
    ],
)
def test_fused_quantization_equals_two_launches(op, m, n, k, cfg):
    qw, prob, x = cupyq.quantize(weights(k, n), op), Problem(op, m, n, k), activations(m, k, "float16")
    x[1] = 0
    fused = launch(cfg, prob, x, qw, arch="sm_89")
    codes, x_scale = reference.quantize_activations(x, op)
    two = launch(dataclasses.replace(cfg, fused=False), prob, codes, qw, x_scale=x_scale, arch="sm_89")
    assert (fused.out == two.out).all()
    assert (fused.out[1] == 0).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["scale", "scale zero", "zeros", "factor", "factor zeros", "factor scale zero"])
@pytest.mark.parametrize(
    ("m", "k", "cfg"),
    [
        (3, 200, W8A8Config(8, 8, 1, 2, 2, 64, 3, fused=True)),
        (17, 1101, W8A8Config(16, 16, 2, 2, 1, 64, 2, 3, fused=True)),
        (13, 640, W8A8Config(16, 8, 2, 2, 1, 64, 2, 2, fused=True)),
    ],
)
def test_fused_by_the_rule_of_the_weight(name, dtype, m, k, cfg):
    x = np.abs(activations(m, k, dtype).astype(np.float32)).astype(DTYPES[dtype])
    x[1] = 0
    factor = np.exp2(np.arange(k) % 3).astype(DTYPES[dtype]) if "factor" in name else None
    if "scale" in name:
        rule = cupyq.Activations.covering(x, "w8a8-int8", symmetric="zero" not in name, factor=factor)
    else:
        rule = cupyq.Activations(symmetric="zeros" not in name, factor=factor)
    qw, prob = (
        cupyq.quantize(weights(k, 72), "w8a8-int8", activations=rule),
        Problem("w8a8-int8", m, 72, k, dtype=dtype),
    )
    fused = launch(cfg, prob, x, qw, arch="sm_80")
    compared(fused, x, qw)
    codes, x_scale, x_zero = reference.activation_codes(x, qw)
    two = dataclasses.replace(cfg, fused=False)
    assert (fused.out == launch(two, prob, codes, qw, x_scale=x_scale, x_zero=x_zero, arch="sm_80").out).all()
    assert fused.compiled.spill_bytes == 0


def test_fused_shows_rows_that_are_not_finite():
    x = activations(4, 200, "float16")
    x[0, 3], x[1, 5] = np.nan, np.inf
    for rule in (cupyq.Activations(), cupyq.Activations(symmetric=False)):
        qw = cupyq.quantize(weights(200, 24), "w8a8-int8", activations=rule)
        run = launch(W8A8Config(8, 8, 1, 2, 2, 64, 3, fused=True), Problem("w8a8-int8", 4, 24, 200), x, qw)
        assert not np.isfinite(run.out[:2].astype(np.float32)).any()
        compared(run, x, qw)


def test_fused_on_turing():
    qw, prob = cupyq.quantize(weights(328, 40), "w8a8-int8"), Problem("w8a8-int8", 5, 40, 328)
    x = activations(5, 328, "float16")
    cfg = W8A8Config(8, 8, 1, 2, 2, 64, 2, fused=True)
    compared(launch(cfg, prob, x, qw, arch="sm_75"), x, qw)


@pytest.mark.parametrize("op", OPS)
def test_repeated_and_shuffled_runs_agree_bit_for_bit(op):  # a18, c1
    cfg = dataclasses.replace(SMALL, split_k=3, warps_k=2)
    runs = [product(9, 40, 1000, op, cfg=cfg, seed=seed).out for seed in (None, 1, 2)]
    assert all((run == runs[0]).all() for run in runs)


# --- bars -------------------------------------------------------------------------------------------------------------

LARGE, SQUARE = W8A8Config(128, 64, 4, 2, 1, 128, 3), W8A8Config(64, 32, 2, 2, 1, 128, 3)


@pytest.mark.parametrize(("op", "arch"), [("w8a8-int8", "sm_80"), ("w8a8-fp8", "sm_89")])
@pytest.mark.parametrize(("cfg", "bar"), [(LARGE, 1.6), (SQUARE, 2.5)])
def test_main_loop_is_lean(op, arch, cfg, bar):
    run = product(2 * cfg.block_m, cfg.block_n, 8 * cfg.block_k, op, cfg=cfg, arch=arch, checks=())
    loop = max(run.counters.by_loop(), key=lambda row: row["tensor"])
    assert (loop["instructions"] - loop["tensor"]) / loop["tensor"] <= bar
    machine = sass.main_loop(run.compiled.cubin)
    assert machine.tensor >= 32
    assert machine.overhead <= bar
    assert run.compiled.spill_bytes == 0
    assert not any(run.counters.shared_conflicts.values())
    assert run.counters.global_sectors == run.counters.global_ideal_sectors


@pytest.mark.parametrize(("m", "bar"), [(4096, 1.6), (64, 2.5)])
def test_default_fp8_loop_with_promotion_is_lean(m, bar):
    prob = Problem("w8a8-fp8", m, 4096, 4096)
    cfg = kernels.default(prob, "sm_89")
    compiled = compile_kernel(cfg, prob, "sm_89")
    assert cfg.promote_k == 256
    assert sass.main_loop(compiled.cubin).overhead <= bar
    assert compiled.spill_bytes == 0


def test_default_loop_with_scales_of_blocks_is_lean():
    # Beside each mma 1.0 is the least for promoting four sums every 128 k, without packed fp32 arithmetic.
    prob = Problem("w8a8-fp8-block", 4096, 4096, 4096)
    for device, bar in (("l4", 2.5), ("rtx-5090", 2.25)):
        cfg = kernels.default(prob, device)
        assert (cfg.block_m, cfg.block_n) == (128, 128)
        compiled = compile_kernel(cfg, prob, devices.get(device).arch)
        assert sass.main_loop(compiled.cubin).overhead <= bar
        assert compiled.spill_bytes == 0


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("op", [*OPS, "w8a8-fp8-block"])
def test_default_configs_do_not_spill(arch, op):
    for m in (1, 64, 4096):
        prob = Problem(op, m, 4096, 4096)
        cfg = kernels.default(prob, arch)
        if kernels.check(cfg, prob, arch) is None:
            assert compile_kernel(cfg, prob, arch).spill_bytes == 0, cfg
        else:
            assert (op == "w8a8-int8", arch in ("sm_75", "sm_80")) == (False, True)


@pytest.mark.slow
@pytest.mark.parametrize("op", [*OPS, "w8a8-fp8-block"])
def test_no_default_of_the_catalogue_spills(op):
    found = {}
    for device in (devices.get(name) for name in devices.names()):
        for (k, n), m in itertools.product(((1024, 1024), (4096, 14336), (14336, 4096), (384, 1536)), BANDS):
            for fused in (False, True):
                prob = Problem(op, m, n, k)
                cfg = None if device.refusal else kernels.default(prob, device, fused=fused)
                if cfg is not None and kernels.check(cfg, prob, device) is None:
                    found[kernels.source(cfg, prob), device.arch] = cfg, prob
    for (_, arch), (cfg, prob) in found.items():
        assert compile_kernel(cfg, prob, arch).spill_bytes == 0, f"{cfg} {prob} {arch}"


def test_a_zero_row_gives_zeros_and_leaves_the_others():  # a9
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
