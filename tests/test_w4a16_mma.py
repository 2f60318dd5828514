"""The W4A16 kernel, run in the emulator: right within the bound of its dtype and K, on every path and edge."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import cupyq
from cupyq import compiler, devices, kernels
from cupyq.errors import CupyqError, DTypeError, IllegalConfig, ShapeError
from cupyq.kernels import Problem, W4A16Config
from emulated import DTYPES, activations, check_product, launch, weights

SMALL = W4A16Config(block_m=16, strips=2, warps_n=2, warps_k=2, warp_k=64, stages=3, split_k=1, scale="sums")


def product(
    m: int,
    n: int,
    k: int,
    group_size: int = 128,
    symmetric: bool = True,
    dtype: str = "float16",
    cfg: W4A16Config | None = None,
    **options: object,
):
    qw = cupyq.quantize(weights(k, n), "w4a16", group_size=group_size, symmetric=symmetric)
    prob = Problem("w4a16", m, n, k, group_size, symmetric, dtype)
    return check_product(
        cfg or kernels.default(prob, options.get("arch", "sm_80")), prob, activations(m, k, dtype), qw, **options
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [-1, 32, 128])
@pytest.mark.parametrize("m", [1, 3, 8, 17, 64])
def test_default_config_on_ragged_shapes(m, group_size, symmetric, dtype):
    product(m, 72, 200, group_size, symmetric, dtype)


@pytest.mark.parametrize("group_size", [16, 32, 64, 128, 256, -1])
@pytest.mark.parametrize("warp_k", [64, 128])
@pytest.mark.parametrize("scale", ["sums", "weights"])
def test_every_group_size_with_either_place_for_scales(group_size, warp_k, scale):
    cfg = dataclasses.replace(SMALL, warp_k=warp_k, scale=scale)
    product(9, 48, 512, group_size, False, cfg=cfg)


@pytest.mark.parametrize(
    "cfg",
    [
        W4A16Config(8, 1, 1, 2, 64, 2, 1, "sums"),
        W4A16Config(8, 4, 1, 4, 64, 4, 2, "sums"),
        W4A16Config(16, 4, 1, 8, 64, 3, 1, "sums"),
        W4A16Config(32, 2, 4, 1, 128, 5, 3, "sums"),
        W4A16Config(32, 1, 8, 1, 64, 6, 1, "weights"),
        W4A16Config(64, 2, 2, 2, 64, 2, 4, "weights"),
        W4A16Config(128, 1, 2, 2, 64, 3, 1, "weights"),
        W4A16Config(8, 1, 2, 1, 64, 8, 1, "sums"),
    ],
    ids=repr,
)
def test_every_kind_of_tile(cfg):
    product(cfg.block_m + 3, cfg.block_n + 24, 3 * cfg.block_k + 72, 64, cfg=cfg)


@pytest.mark.parametrize("m", [*range(1, 18), 31, 33, 63, 65, 127, 129])
def test_ragged_m(m):
    product(m, 40, 136, 64, cfg=SMALL)


@pytest.mark.parametrize("n", [1, 7, 8, 24, 64, 72, 127, 192])
def test_ragged_n(n):
    product(5, n, 136, 64, False, cfg=SMALL)


@pytest.mark.parametrize("k", [1, 16, 17, 48, 63, 65, 136])
def test_ragged_k(k):
    product(5, 24, k, 16, False, cfg=SMALL)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("m", "scale", "split_k"), [(8, "sums", 1), (16, "sums", 4), (64, "weights", 1)])
def test_as_exact_as_a_16_bit_gemm(m, scale, split_k, symmetric, dtype):
    """At most twice the error of a product of the dequantized weights in 16 bits, accumulated in fp32."""
    n, k = 64, 2048
    cfg = W4A16Config(m, 2, 2, 2, 64, 3, split_k, scale)
    qw = cupyq.quantize(weights(k, n), "w4a16", group_size=128, symmetric=symmetric, scale_dtype=dtype)
    x = activations(m, k, dtype)
    run = launch(cfg, Problem("w4a16", m, n, k, 128, symmetric, dtype, dtype), x, qw, checks=())
    rounded = cupyq.dequantize(qw, dtype).astype(np.float64)
    codes, scales, zeros = cupyq.unpack(qw)
    exact = (
        codes - np.repeat(np.full_like(scales, 8) if zeros is None else zeros, 128, 0).astype(np.float64)
    ) * np.repeat(scales.astype(np.float64), 128, 0)
    mine = run.out.astype(np.float64) - x.astype(np.float64) @ (rounded if scale == "weights" else exact)
    gemm = (x.astype(np.float32) @ rounded.astype(np.float32)).astype(DTYPES[dtype]).astype(np.float64)
    theirs = gemm - x.astype(np.float64) @ rounded
    assert np.abs(mine).max() <= 2 * np.abs(theirs).max()
    assert np.sqrt(np.mean(mine**2)) <= 2 * np.sqrt(np.mean(theirs**2))


@pytest.mark.slow
def test_long_ragged_k():
    product(3, 24, 10944, 128, cfg=SMALL)


@pytest.mark.parametrize("split_k", [1, 2, 3, 4, 6, 8])
def test_split_k_is_exact_and_leaves_its_counters_at_zero(split_k):
    # Partial sums of 2048 and 1 - 2048: only fp32 partials give 1.
    k = 1024
    x = np.zeros((2, k), np.float16)
    x[:, 0], x[:, 1], x[:, k // 2] = 2048, 1, -2048
    qw = cupyq.pack(np.full((k, 24), 9, np.uint8), np.ones((8, 24), np.float16), scheme="w4a16", group_size=128)
    cfg = dataclasses.replace(SMALL, split_k=split_k)
    run = launch(cfg, Problem("w4a16", 2, 24, k), x, qw)
    assert (run.out == 1.0).all()
    if split_k > 1:
        assert not run.call.args[7].any()


@pytest.mark.parametrize("ctas", [1, 2, 3, 5, 7, 12])
def test_stripes_share_the_stages_of_all_tiles(ctas):
    # 2 x 2 tiles of 3 stages: stripes that end inside tiles, cover whole ones, and leave tiles to three CTAs.
    run = product(19, 80, 264, 64, False, cfg=dataclasses.replace(SMALL, ctas=ctas))
    assert run.call.grid == (ctas, 1, 1)
    assert not run.call.args[7].any()


def test_stripes_give_the_same_bits_under_any_schedule():
    qw = cupyq.quantize(weights(264, 80), "w4a16", group_size=64)
    x = activations(19, 264, "float16")
    prob = Problem("w4a16", 19, 80, 264, 64)
    cfg = dataclasses.replace(SMALL, ctas=7)
    assert len({launch(cfg, prob, x, qw, seed=seed).out.tobytes() for seed in range(4)}) == 1


def test_bits_do_not_depend_on_the_schedule():
    k = 768
    qw = cupyq.quantize(weights(k, 40), "w4a16", group_size=64)
    prob = Problem("w4a16", 11, 40, k, 64)
    x = activations(11, k, "float16")
    cfg = dataclasses.replace(SMALL, split_k=3)
    results = {launch(cfg, prob, x, qw, seed=seed).out.tobytes() for seed in range(4)}
    assert len(results) == 1


def test_partial_sums_beyond_fp16_cancel():
    k = 512
    codes = np.full((k, 8), 8 + 7, np.uint8)
    codes[256:] = 8 - 7
    qw = cupyq.pack(codes, np.ones((4, 8), np.float16), scheme="w4a16", group_size=128)
    for scale in ("sums", "weights"):
        run = launch(
            dataclasses.replace(SMALL, scale=scale), Problem("w4a16", 1, 8, k), np.full((1, k), 64, np.float16), qw
        )
        assert (run.out == 0).all()
    qw = cupyq.pack(
        np.full((k, 8), 15, np.uint8), np.full((4, 8), 2.0**-10, np.float16), scheme="w4a16", group_size=128
    )
    run = launch(SMALL, Problem("w4a16", 1, 8, k), np.full((1, k), 64, np.float16), qw)
    assert (run.out == 224.0).all()


def test_zero_points_are_subtracted_before_scaling():
    scale = np.float16(0.1234)
    qw = cupyq.pack(
        np.full((64, 16), 14, np.uint8),
        np.full((1, 16), scale),
        np.full((1, 16), 15, np.uint8),
        scheme="w4a16",
        group_size=64,
    )
    x = np.zeros((1, 64), np.float16)
    x[0, 5] = 1
    for place in ("sums", "weights"):
        run = launch(dataclasses.replace(SMALL, scale=place), Problem("w4a16", 1, 16, 64, 64, False), x, qw)
        assert (run.out == -scale).all()


@pytest.mark.parametrize("zero", [0, 1, 15])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_code_with_extreme_zero_points(zero, dtype):
    codes = np.tile(np.arange(16, dtype=np.uint8)[:, None], (4, 16))
    qw = cupyq.pack(
        codes, np.ones((1, 16), np.float16), np.full((1, 16), zero, np.uint8), scheme="w4a16", group_size=64
    )
    x = np.eye(64, dtype=np.float32).astype(DTYPES[dtype])
    run = launch(SMALL, Problem("w4a16", 64, 16, 64, 64, False, dtype), x, qw)
    assert (run.out.astype(int) == codes.astype(int) - zero).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_identity_activations_return_each_weight_in_its_place(dtype):
    k, n = 192, 40
    qw = cupyq.quantize(weights(k, n), "w4a16", group_size=64)
    run = launch(SMALL, Problem("w4a16", k, n, k, 64, dtype=dtype), np.eye(k).astype(DTYPES[dtype]), qw)
    want = cupyq.dequantize(qw).astype(DTYPES[dtype])
    assert (run.out == want).all()


def test_bias():
    bias = np.linspace(-50, 50, 40).astype(np.float16)
    qw = cupyq.quantize(weights(136, 40), "w4a16", group_size=64)
    for split_k in (1, 2):
        check_product(
            dataclasses.replace(SMALL, split_k=split_k),
            Problem("w4a16", 5, 40, 136, 64),
            activations(5, 136, "float16"),
            qw,
            bias=bias,
        )


def test_bfloat16_scales():
    qw = cupyq.quantize(weights(136, 40), "w4a16", group_size=64, scale_dtype="bfloat16")
    prob = Problem("w4a16", 5, 40, 136, 64, dtype="bfloat16", scale_dtype="bfloat16")
    for scale in ("sums", "weights"):
        check_product(dataclasses.replace(SMALL, scale=scale), prob, activations(5, 136, "bfloat16"), qw)


def test_act_order_gathers_activations():
    k, n = 64, 16
    rng = np.random.default_rng(3)
    perm = rng.permutation(k).astype(np.int32)
    codes = rng.integers(0, 16, (k, n)).astype(np.uint8)
    qw = cupyq.pack(codes, np.ones((4, n), np.float16), scheme="w4a16", group_size=16, perm=perm)
    check_product(SMALL, Problem("w4a16", 3, n, k, 16), activations(3, k, "float16"), qw)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_arch(arch, dtype):
    if arch == "sm_75" and dtype == "bfloat16":
        assert "float16 runs here" in kernels.check(SMALL, Problem("w4a16", 6, 72, 264, dtype=dtype), arch)
        return
    run = product(6, 72, 264, 128, False, dtype, arch=arch)
    assert run.compiled.spill_bytes == 0


def test_views_give_the_result_of_their_copies():
    k, n = 128, 24
    qw = cupyq.quantize(weights(k, n), "w4a16", group_size=64)
    base = activations(12, 2 * k + 8, "float16")
    views = {
        "columns": base[:6, :k],
        "rows": base[::2, :k],
        "reversed": base[5::-1, :k],
        "offset": base[:6, 1 : k + 1],
        "fortran": np.asfortranarray(base[:6, :k]),
        "broadcast": np.broadcast_to(base[:1, :k], (6, k)),
    }
    for name, x in views.items():
        prob = Problem("w4a16", x.shape[0], n, k, 64)
        got = launch(SMALL, prob, x, qw).out
        want = launch(SMALL, prob, x.copy(order="C"), qw).out
        assert (got == want).all(), name


def test_other_rows_do_not_change_a_row():
    qw = cupyq.quantize(weights(128, 24), "w4a16", group_size=64)
    x = activations(12, 128, "float16")
    together = launch(SMALL, Problem("w4a16", 12, 24, 128, 64), x, qw).out
    x[3] = np.nan
    apart = launch(SMALL, Problem("w4a16", 12, 24, 128, 64), x, qw).out
    keep = np.arange(12) != 3
    assert (together[keep] == apart[keep]).all()
    assert np.isnan(apart[3]).all()


def test_a_default_exists_for_every_shape_and_device():
    for name in devices.names():
        device = devices.get(name)
        if device.cc < (8, 0):
            continue
        for m in (1, 16, 100, 4096, 1_048_561):
            for n, k in ((1, 1), (8, 32), (4096, 4096), (28672, 8192)):
                prob = Problem("w4a16", m, n, k)
                assert kernels.check(kernels.default(prob, device), prob, device) is None


@pytest.mark.parametrize(
    ("cfg", "prob", "device", "words"),
    [
        (SMALL, Problem("w8a8-int8", 1, 8, 64), "a100-sxm", "does not compute"),
        (SMALL, Problem("w4a16", 1, 8, 64), "t4", "without cp.async"),
        (SMALL, Problem("w4a16", 1, 8, 64, dtype="bfloat16"), "t4", "bfloat16 needs compute capability 8.0"),
        (dataclasses.replace(SMALL, block_m=24), Problem("w4a16", 1, 8, 64), "a100-sxm", "block_m=24 is not one of"),
        (dataclasses.replace(SMALL, block_m=128, strips=4), Problem("w4a16", 1, 8, 64), "a100-sxm", "registers"),
        (
            dataclasses.replace(SMALL, block_m=64, strips=1, warps_k=8, warp_k=128, warps_n=1, stages=8),
            Problem("w4a16", 1, 8, 64),
            "rtx-3090",
            "shared memory",
        ),
        (dataclasses.replace(SMALL, split_k=4), Problem("w4a16", 1, 8, 256), "a100-sxm", "without work"),
        (dataclasses.replace(SMALL, warps_n=1, warps_k=1), Problem("w4a16", 1, 8, 256), "a100-sxm", "one warp"),
        (dataclasses.replace(SMALL, ctas=3), Problem("w4a16", 1, 8, 256), "a100-sxm", "without work"),
        (dataclasses.replace(SMALL, ctas=2, split_k=2), Problem("w4a16", 1, 8, 256), "a100-sxm", "must be 1"),
        (
            dataclasses.replace(SMALL, scale="weights"),
            Problem("w4a16", 1, 8, 64, dtype="bfloat16"),
            "a100-sxm",
            "scales are float16",
        ),
    ],
)
def test_illegal_configs_say_why(cfg, prob, device, words):
    reason = kernels.check(cfg, prob, device)
    assert reason is not None
    assert words in reason
    if device == "a100-sxm":
        with pytest.raises(IllegalConfig, match=words):
            cupyq.compiler.compile_kernel(cfg, prob, "sm_80")


def test_arguments_that_do_not_fit_are_named():
    qw = cupyq.quantize(weights(64, 16), "w4a16", group_size=64)
    prob = Problem("w4a16", 2, 16, 64, 64)
    x = activations(2, 64, "float16")
    cases = [
        (ShapeError, "x has shape", dict(x=x[:1], qw=qw)),
        (DTypeError, "x has dtype float32", dict(x=x.astype(np.float32), qw=qw)),
        (ShapeError, "bias has shape", dict(x=x, qw=qw, bias=np.zeros(3, np.float16))),
        (ShapeError, "out has shape", dict(x=x, qw=qw, out=np.zeros((2, 15), np.float16))),
        (
            DTypeError,
            "scale_dtype",
            dict(x=x, qw=cupyq.quantize(weights(64, 16), "w4a16", group_size=64, scale_dtype="bfloat16")),
        ),
        (ShapeError, "qw.k=64", dict(x=x, qw=qw, prob=Problem("w4a16", 2, 16, 65, 64))),
        (ShapeError, "m=0", dict(x=x, qw=qw, prob=Problem("w4a16", 0, 16, 64, 64))),
    ]
    for error, words, arguments in cases:
        arguments = {"prob": prob, "bias": None, "out": None, **arguments}
        with pytest.raises(error, match=words) as caught:
            kernels.call(
                SMALL, arguments["prob"], arguments["x"], arguments["qw"], arguments["bias"], out=arguments["out"]
            )
        assert isinstance(caught.value, CupyqError)


# --- 2 and 8 bits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["w2a16", "w8a16"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [-1, 16, 64, 256])
def test_other_widths(op, dtype, symmetric, group_size):
    cfg = dataclasses.replace(SMALL, warp_k=128)
    qw = cupyq.quantize(weights(328, 40), op, group_size=group_size, symmetric=symmetric)
    check_product(cfg, Problem(op, 9, 40, 328, group_size, symmetric, dtype), activations(9, 328, dtype), qw)


@pytest.mark.parametrize(("op", "codes"), [("w2a16", 4), ("w8a16", 256)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_120"])
def test_every_code_of_other_widths_in_its_place(op, codes, dtype, arch):
    if arch == "sm_75" and dtype == "bfloat16":
        return
    k = 256
    zero = codes - 1
    table = ((np.arange(k)[:, None] + np.arange(24)[None, :]) % codes).astype(np.uint8)
    qw = cupyq.pack(table, np.ones((1, 24), np.float16), np.full((1, 24), zero, np.uint8), scheme=op, group_size=-1)
    x = np.eye(k, dtype=np.float32).astype(DTYPES[dtype])
    cfg = dataclasses.replace(SMALL, warp_k=128, stages=2, warps_k=1)
    run = launch(cfg, Problem(op, k, 24, k, -1, False, dtype), x, qw, arch=arch)
    assert (run.out.astype(int) == table.astype(int) - zero).all()


def test_a_unit_of_2_bit_weights_needs_a_long_warp_k():
    assert "less than a unit" in kernels.check(SMALL, Problem("w2a16", 9, 40, 328), "a100-sxm")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t4", "a10", "a100-sxm", "rtx-4090", "h100-sxm", "b200", "rtx-5090"])
def test_no_default_spills(name):
    device = devices.get(name)
    dtypes = ("float16",) if device.cc < (8, 0) else ("float16", "bfloat16")
    for op in ("w2a16", "w4a16", "w8a16"):
        for dtype in dtypes:
            for group_size, symmetric in ((128, True), (32, False)):
                for m in (1, 16, 32, 64, 8192):
                    prob = Problem(op, m, 4096, 4096, group_size, symmetric, dtype)
                    compiled = compiler.compile_kernel(kernels.default(prob, device), prob, device.arch)
                    assert compiled.spill_bytes == 0, compiled
