"""The kernel that quantizes activations, run in the emulator: bit for bit what the reference says."""

from __future__ import annotations

import numpy as np
import pytest

from cupyq import kernels, reference
from cupyq.errors import ArgumentError, IllegalConfig
from cupyq.kernels import Problem, QuantizeActivationsConfig
from emulated import DTYPES, activations, launch

OPS = ("w8a8-int8", "w8a8-fp8", "w8a8-fp8-block")


def quantized(x, op="w8a8-int8", cfg=None, arch="sm_89", **arguments):
    m, k = x.shape
    prob = Problem(op, m, 16, k, dtype=x.dtype.name)
    return launch(cfg or kernels.quantize_activations.default(prob), prob, x, arch=arch, **arguments)


def assert_equal(run, want, k):
    assert (run.out[:, :k].view(np.uint8) == want[0].view(np.uint8)).all()
    padding = 0 if len(want) == 2 else want[2][:, None]  # whose weights are zero
    assert (run.out[:, k:] == padding).all()


def awkward(m, k, dtype):
    """Rows of normal numbers, but for one of zeros and one a thousand times larger."""
    x = activations(m, k, dtype)
    x[2] = 0
    x[3] = (x[3].astype(np.float32) * 1000).astype(x.dtype)
    return x


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("k", [1, 7, 8, 72, 129, 200, 2000])
def test_codes_and_scales_of_tokens(op, dtype, k):
    x = awkward(5, k, dtype)
    want = reference.quantize_activations(x, op)
    for cfg in (QuantizeActivationsConfig(64, 2), QuantizeActivationsConfig(128, 4)):
        run = quantized(x, op, cfg)
        assert np.array_equal(run.call.x_scale, want[1])
        assert_equal(run, want, k)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("k", [7, 200, 2000])
def test_zero_points(dtype, k):
    x = awkward(5, k, dtype)
    x[0] = np.abs(x[0].astype(np.float32)).astype(x.dtype)  # all on one side
    x[1] = -np.abs(x[1].astype(np.float32)).astype(x.dtype)
    want = reference.quantize_activations(x, "w8a8-int8", symmetric=False)
    run = quantized(x, cfg=QuantizeActivationsConfig(64, 2, zeros=True), arch="sm_80")
    assert np.array_equal(run.call.x_scale, want[1])
    assert np.array_equal(run.call.x_zero, want[2])
    assert_equal(run, want, k)
    back = (want[0].astype(np.float64) - want[2][:, None]) * want[1][:, None]
    assert (np.abs(back - x.astype(np.float64)) <= 0.51 * want[1][:, None]).all()


@pytest.mark.parametrize(("op", "zeros"), [*((op, False) for op in OPS), ("w8a8-int8", True)])
def test_smoothing_factor(op, zeros):
    for dtype, k in (("float16", 72), ("bfloat16", 515)):
        x = awkward(5, k, dtype)
        factor = (np.abs(activations(1, k, dtype, 3)[0].astype(np.float32)) + 0.1).astype(x.dtype)
        want = reference.quantize_activations(x, op, symmetric=not zeros, factor=factor)
        run = quantized(x, op, QuantizeActivationsConfig(64, 2, zeros=zeros, smooth=True), factor=factor)
        assert np.array_equal(run.call.x_scale, want[1])
        assert_equal(run, want, k)


@pytest.mark.parametrize(("op", "zero"), [("w8a8-int8", None), ("w8a8-int8", -100), ("w8a8-fp8", None)])
def test_one_scale_for_all_tokens(op, zero):
    x = awkward(5, 200, "float16")
    want = reference.quantize_activations(x, op, 0.03, zero=zero)
    given = {} if zero is None else {"x_zero": np.array([zero], np.int32)}
    cfg = QuantizeActivationsConfig(64, 2, scales="tensor", zeros=zero is not None)
    run = quantized(x, op, cfg, x_scale=np.array([0.03], np.float32), **given)
    assert run.call.x_scale is None
    assert_equal(run, want, 200)


def test_static_fp8_saturates():  # a11
    x = np.array([[256, 288, 448, 464, 465, 1000, np.inf, -1000, np.nan]], np.float16)
    cfg = QuantizeActivationsConfig(32, 2, scales="tensor")
    run = quantized(x, "w8a8-fp8", cfg, x_scale=np.ones(1, np.float32))
    values = run.out[0, :9].view(reference.FLOAT8).astype(np.float32)
    assert values[:8].tolist() == [256, 288, 448, 448, 448, 448, 448, -448]
    assert run.out[0, 8] & 0x7F == 0x7F


def test_static_int8_saturates():  # a12
    x = np.array([[127.5, -129, 1e10, -1e10, np.inf, -np.inf, np.nan]], np.float32).astype(DTYPES["bfloat16"])
    run = quantized(
        x, cfg=QuantizeActivationsConfig(32, 2, scales="tensor"), x_scale=np.ones(1, np.float32), arch="sm_75"
    )
    assert run.out[0, :7].tolist() == [127, -128, 127, -128, 127, -128, 0]


@pytest.mark.parametrize("op", OPS[:2])
def test_rows_that_are_not_finite_show_in_the_scale(op):
    x = activations(4, 64, "float16")
    x[0, 3], x[1, 5], x[2, 7] = np.nan, np.inf, -np.inf
    run = quantized(x, op)
    want = reference.quantize_activations(x, op)
    scale = run.call.x_scale
    assert np.isnan(scale[0])
    assert np.isinf(scale[1:3]).all()
    assert np.isfinite(scale[3])
    assert (run.out[3].view(np.uint8)[:64] == want[0][3].view(np.uint8)).all()


@pytest.mark.parametrize("op", OPS)
def test_tiny_activations_get_a_normal_scale(op):
    x = np.full((1, 64), np.float32(2.0**-130)).astype(DTYPES["bfloat16"])
    assert quantized(x, op).call.x_scale.min() >= 2.0**-126


def test_quotients_are_rounded_once():
    # Every half step of a scale that is no power of two: where an approximate reciprocal would round the wrong way.
    rng = np.random.default_rng(5)
    x = (rng.integers(-127, 128, (64, 512)) + 0.5).astype(np.float16)
    x[:, 0] = (127 * rng.uniform(0.75, 1, 64)).astype(np.float16)
    for op in OPS[:2]:
        want = reference.quantize_activations(x, op)
        assert_equal(quantized(x, op), want, 512)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("m", "k"), [(8, 4096), (2, 65536)])
def test_three_bytes_an_element_in_16_byte_pieces(op, m, k):
    run = quantized(activations(m, k, "float16"), op)
    scales = 4 * m * (-(-k // 128) if op == "w8a8-fp8-block" else 1)
    bytes_ = run.counters.bytes
    assert bytes_["global load"] == 2 * m * k
    assert bytes_["global store"] == m * k + scales
    assert run.counters.global_sectors["load"] == 2 * m * k // 32
    assert run.compiled.spill_bytes == 0
    assert "ld.global.v4" in run.compiled.ptx.replace(".nc", "")
    assert "st.global.v4" in run.compiled.ptx


def test_views_equal_their_copies():  # b6
    x = activations(6, 200, "float16")
    for view in (x[::2], x[:, ::-1], x.T[:6, :6], np.asfortranarray(x), x[1:, 3:99]):
        assert_equal(
            quantized(view), reference.quantize_activations(np.ascontiguousarray(view), "w8a8-int8"), view.shape[1]
        )


def test_a_million_tokens_go_on_one_axis():  # b4
    launch_ = QuantizeActivationsConfig().launch(Problem("w8a8-int8", 1_048_561, 8, 32))
    assert launch_.grid == (1_048_561, 1, 1)


def test_wrong_combinations_say_why():
    x = activations(2, 64, "float16")
    with pytest.raises(IllegalConfig, match="no zero points"):
        quantized(x, "w8a8-fp8", QuantizeActivationsConfig(64, 2, zeros=True))
    with pytest.raises(IllegalConfig, match="scale for every 128 k"):
        quantized(x, "w8a8-fp8-block", QuantizeActivationsConfig(64, 2, scales="tensor"))
    with pytest.raises(ArgumentError, match="factor is missing"):
        quantized(x, cfg=QuantizeActivationsConfig(64, 2, smooth=True))
    with pytest.raises(ArgumentError, match="x_scale is given"):
        quantized(x, x_scale=np.ones(1, np.float32))
