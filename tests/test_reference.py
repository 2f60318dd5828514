"""The reference against plain NumPy, the error bound against float32 sums, and the faults others have had."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupyq
from cupyq import reference
from cupyq.arrays import BFLOAT16, FLOAT8
from cupyq.errors import ArgumentError, DTypeError, ShapeError
from cupyq.weights import pack, unpack

SCHEMES = ("w4a16", "w8a8-int8", "w8a8-fp8")
W8A8 = SCHEMES[1:]


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def by_hand(qw):
    """Return the float64 weight, spelled out from the definition."""
    codes, scales, zeros = unpack(qw)
    zero = 8 if qw.scheme == "w4a16" else 0
    w = np.empty(qw.shape)
    for row in range(qw.k):
        group = 0 if qw.group_size == -1 else row // qw.group_size
        offset = zero if zeros is None else zeros[group].astype(np.float64)
        w[row] = (codes[row].astype(np.float64) - offset) * scales[group].astype(np.float64)
    if qw.perm is not None:
        w[qw.perm] = w.copy()
    return w


def random_qw(rng, scheme="w4a16", k=100, n=40, **options):
    return cupyq.quantize(rng.standard_normal((k, n)), scheme, **options)


# --- dequantize -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("k", "n"), [(1, 1), (16, 7), (136, 1100), (300, 24)])
def test_dequantize_is_the_definition(rng, scheme, k, n):
    qw = random_qw(rng, scheme, k, n)
    assert np.array_equal(reference.dequantize(qw, "float64"), by_hand(qw))
    for dtype in (np.float16, BFLOAT16, np.float32):
        assert np.array_equal(reference.dequantize(qw, dtype), by_hand(qw).astype(np.float32).astype(dtype))


@pytest.mark.parametrize("group_size", [16, 32, 64, 128, 256, -1])
@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16"])
def test_float32_holds_w4a16_exactly(rng, group_size, scale_dtype):
    qw = random_qw(rng, k=200, group_size=group_size, symmetric=False, scale_dtype=scale_dtype)
    assert np.array_equal(reference.dequantize(qw), by_hand(qw))


def test_dequantize_refuses_other_dtypes(rng):
    with pytest.raises(DTypeError, match="dtype must be float16, bfloat16, float32 or float64, got int8"):
        reference.dequantize(random_qw(rng), np.int8)
    with pytest.raises(ArgumentError, match="qw must be a QuantizedWeight"):
        reference.dequantize(np.ones((3, 3)))


# --- activations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", W8A8)
@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32])
def test_row_scale_is_its_largest_magnitude(rng, scheme, dtype):
    x = rng.standard_normal((2, 4, 96)).astype(dtype)
    codes, scale = reference.quantize_activations(x, scheme)
    assert (codes.shape, scale.shape, scale.dtype) == ((2, 4, 96), (2, 4), np.float32)
    assert codes.dtype == (np.int8 if scheme == "w8a8-int8" else FLOAT8)
    top = 127 if scheme == "w8a8-int8" else 448
    wide = x.astype(np.float32)
    assert np.array_equal(scale, np.abs(wide).max(-1) / np.float32(top))
    assert (np.abs(codes.astype(np.float32)).max(-1) == top).all()
    steps = wide / scale[..., None]
    want = np.rint(steps).astype(np.int8) if scheme == "w8a8-int8" else np.clip(steps, -448, 448).astype(FLOAT8)
    assert np.array_equal(codes.astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("scheme", W8A8)
def test_zero_row_gives_zeros_and_leaves_the_others_alone(rng, scheme):  # a9
    qw = random_qw(rng, scheme, 256, 24)
    x = rng.standard_normal((4, 256)).astype(np.float16)
    x[2] = 0
    _codes, scale = reference.quantize_activations(x, scheme)
    assert scale[2] == 1
    y = reference.product(x, qw)
    assert (y[2] == 0).all()
    others = [0, 1, 3]
    assert np.array_equal(y[others], reference.product(x[others], qw))


@pytest.mark.parametrize("scheme", W8A8)
def test_tiny_rows_stay_finite(scheme):
    for amplitude in (6e-8, 1e-30, 1e-38, 1e-44):
        x = np.full((1, 16), amplitude, np.float32)
        codes, scale = reference.quantize_activations(x, scheme)
        assert scale[0] >= 2.0**-126
        assert np.isfinite(codes.astype(np.float32)).all()


def test_static_fp8_saturates():  # a11
    x = np.array([256, 288, 448, 464, 465, 1000, np.inf, -1000], np.float32)
    codes, scale = reference.quantize_activations(x, "w8a8-fp8", scale=1.0)
    assert codes.astype(np.float32).tolist() == [256, 288, 448, 448, 448, 448, 448, -448]
    assert scale.shape == ()


def test_only_nan_becomes_the_fp8_nan(rng):  # a11
    x = (rng.standard_normal(4096) * 300).astype(np.float32)
    x[:3] = np.nan, np.inf, -np.inf
    bits = reference.quantize_activations(x, "w8a8-fp8", scale=1.0)[0].view(np.uint8)
    assert np.array_equal(bits & 0x7F == 0x7F, np.isnan(x))


def test_static_int8_saturates():  # a12
    x = np.array([127.5, -129, 1e10, -1e10, 0.5, 1.5, -0.5, np.nan], np.float32)
    codes, _ = reference.quantize_activations(x, "w8a8-int8", scale=1.0)
    assert codes.tolist() == [127, -128, 127, -128, 0, 2, 0, 0]


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf, 1e-40])
def test_static_scale_must_be_positive(scale):
    with pytest.raises(ArgumentError, match="scale must be a positive, finite float32"):
        reference.quantize_activations(np.ones((1, 4), np.float16), "w8a8-int8", scale=scale)


@pytest.mark.parametrize("scheme", W8A8)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_stay_so(rng, scheme, bad):
    qw = random_qw(rng, scheme, 64, 24)
    x = rng.standard_normal((3, 64)).astype(np.float16)
    x[1, 5] = bad
    y = reference.product(x, qw)
    assert not np.isfinite(y[1]).any()
    assert np.array_equal(y[[0, 2]], reference.product(x[[0, 2]], qw))


def test_activations_arguments():
    with pytest.raises(
        ArgumentError, match="scheme must be 'w8a8-int8' or 'w8a8-fp8' or 'w8a8-fp8-block', got 'w4a16'"
    ):
        reference.quantize_activations(np.ones((1, 4), np.float16), "w4a16")
    with pytest.raises(DTypeError, match="x must be float16, bfloat16 or float32, got int64"):
        reference.quantize_activations(np.ones((1, 4), int), "w8a8-int8")
    with pytest.raises(ShapeError, match="K >= 1"):
        reference.quantize_activations(np.ones((1, 0), np.float16), "w8a8-int8")
    assert reference.quantize_activations(np.ones((0, 4), np.float16), "w8a8-int8")[0].shape == (0, 4)


# --- products ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    m=st.integers(0, 5),
    k=st.integers(1, 300),
    n=st.integers(0, 60),
    group_size=st.sampled_from([16, 128, -1]),
    symmetric=st.booleans(),
    act_order=st.booleans(),
)
def test_w4a16_matmul_is_the_definition(seed, m, k, n, group_size, symmetric, act_order):
    rng = np.random.default_rng(seed)
    codes, scales, zeros = unpack(cupyq.quantize(rng.standard_normal((k, n)), "w4a16", group_size, symmetric))
    perm = rng.permutation(k) if act_order else None
    qw = pack(codes, scales, zeros, scheme="w4a16", group_size=group_size, perm=perm)
    x = rng.standard_normal((m, k)).astype(np.float16)
    want = x.astype(np.float64) @ by_hand(qw)
    assert np.allclose(reference.matmul(x, qw), want, rtol=1e-12, atol=1e-12)
    bias = rng.standard_normal(n).astype(np.float16)
    assert np.allclose(reference.matmul(x, qw, bias), want + bias, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scheme", W8A8)
def test_w8a8_matmul_is_the_definition(rng, scheme):
    qw = random_qw(rng, scheme, 300, 40)
    codes, scales, _ = unpack(qw)
    x = rng.standard_normal((5, 300)).astype(np.float16)
    x_codes, x_scale = reference.quantize_activations(x, scheme)
    want = (x_codes.astype(np.float64) @ codes.astype(np.float64)) * x_scale[:, None] * scales.astype(np.float64)
    assert np.allclose(reference.matmul(x, qw), want, rtol=1e-13)
    assert np.array_equal(reference.matmul(x, qw), reference.matmul(x_codes, qw, x_scale=x_scale))
    # and it is near what x @ w was before both were quantized
    exact = x.astype(np.float64) @ reference.dequantize(qw, "float64")
    assert np.abs(want - exact).max() < (0.02 if scheme == "w8a8-int8" else 0.1) * np.abs(exact).max()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_product_is_within_the_bound(rng, scheme, dtype, with_bias):
    qw = random_qw(rng, scheme, 1500, 1100)
    x = rng.standard_normal((7, 1500)).astype(dtype)
    bias = rng.standard_normal(1100).astype(dtype) if with_bias else None
    y = reference.product(x, qw, bias)
    assert (y.dtype, y.shape) == (dtype, (7, 1100))
    limit = reference.bound(x, qw, dtype, bias, likely=True)
    result = reference.compare(y, reference.matmul(x, qw, bias), limit)
    assert result.ok, result


def test_int8_sums_are_exact_beyond_float32():  # a12
    k = 2049
    qw = pack(np.full((k, 3), 127), np.ones((1, 3), np.float32), scheme="w8a8-int8")
    sums = reference.accumulate(np.full((2, k), 127, np.int8), qw)
    assert (sums.dtype, sums.tolist()) == (np.int64, [[33_048_321] * 3] * 2)


def test_int8_sums_beyond_32_bits():  # a12
    k = 140_001
    qw = pack(np.full((k, 1), 127), np.ones((1, 1), np.float32), scheme="w8a8-int8")
    assert reference.accumulate(np.full((1, k), 127, np.int8), qw).item() == k * 127 * 127 > 2**31


@pytest.mark.parametrize(
    ("x_scale", "w_scale", "want"), [(1e-3, 1e-3, 66.0625), (1e3, 1e-9, 66.0625), (1e-9, 1e3, 66.0625)]
)
def test_w8a8_scales_do_not_overflow(x_scale, w_scale, want):  # a2
    qw = pack(np.full((4096, 1), 127), np.full((1, 1), w_scale, np.float32), scheme="w8a8-int8")
    codes, scale = np.full((1, 4096), 127, np.int8), np.full(1, x_scale, np.float32)
    assert reference.product(codes, qw, x_scale=scale, dtype=np.dtype(np.float16)).item() == want


def test_w4a16_sums_do_not_overflow_on_the_way():  # a1
    codes = np.full((512, 8), 15)
    codes[256:] = 1
    qw = pack(codes, np.ones((4, 8), np.float16), scheme="w4a16")
    x = np.full((1, 512), 64, np.float16)
    assert (reference.product(x, qw) == 0).all()
    qw = pack(np.full((512, 8), 15), np.full((4, 8), 2.0**-10, np.float16), scheme="w4a16")
    assert (reference.product(x, qw) == 224).all()


def test_cancelling_sum_keeps_the_small_term():  # a18
    k = 256
    x = np.zeros((1, k), np.float16)
    x[0, [0, 1, k // 2]] = 2048, 1, -2048
    qw = pack(np.full((k, 4), 9), np.ones((2, 4), np.float16), scheme="w4a16")
    assert (reference.product(x, qw) == 1).all()


def test_overflow_of_the_result_is_infinity_without_a_warning(recwarn):
    qw = pack(np.full((64, 4), 15), np.full((1, 4), 1000, np.float16), scheme="w4a16")
    assert np.isposinf(reference.product(np.full((1, 64), 1000, np.float16), qw)).all()
    assert not recwarn.list


# --- bound and compare ------------------------------------------------------------------------------------------------


def test_bound_follows_its_formula(rng):
    qw = random_qw(rng, k=96, n=8)
    x = rng.standard_normal((2, 96)).astype(np.float16)
    y, size = reference.matmul(x, qw), np.abs(x.astype(np.float64)) @ np.abs(by_hand(qw))
    u = 2.0**-24
    sums = 112 * u / (1 - 112 * u) * size
    want = sums + np.maximum(2.0**-11 * (np.abs(y) + sums), 2.0**-25)
    assert np.allclose(reference.bound(x, qw, "float16"), want, rtol=1e-9)
    scaled = sums + 2.0**-11 * size + 2.0**-25 * np.abs(x.astype(np.float64)).sum(1, keepdims=True)
    want = scaled + np.maximum(2.0**-11 * (np.abs(y) + scaled), 2.0**-25)
    assert np.allclose(reference.bound(x, qw, "float16", scaled_weights=True), want, rtol=1e-9)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("order", ["forward", "backward", "sorted"])
def test_float32_sums_in_any_order_stay_within_the_bound(rng, scheme, order):
    qw = random_qw(rng, scheme, 1000, 16)
    x = rng.standard_normal((3, 1000)).astype(np.float16)
    if scheme == "w4a16":
        left, right = x.astype(np.float32), reference.dequantize(qw)
        scale = np.float32(1)
    else:
        codes, x_scale = reference.quantize_activations(x, scheme)
        left, right = codes.astype(np.float32), unpack(qw)[0].astype(np.float32)
        scale = x_scale[:, None] * unpack(qw)[1]
    terms = left[:, :, None] * right[None]
    terms = {"forward": terms, "backward": terms[:, ::-1], "sorted": np.sort(terms, axis=1)}[order]
    total = np.zeros((3, 16), np.float32)
    for row in range(1000):
        total += terms[:, row]
    result = reference.compare(total * scale, reference.matmul(x, qw), reference.bound(x, qw, "float32"))
    assert result.ok, result


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16])
def test_weights_rounded_to_16_bits_need_their_own_term(rng, dtype):
    qw = random_qw(rng, k=512, n=32, scale_dtype=dtype)
    x = np.abs(rng.standard_normal((4, 512))).astype(dtype)
    w = reference.dequantize(qw, dtype).astype(np.float32)
    y = (x.astype(np.float32) @ w).astype(np.float32)
    want = reference.matmul(x, qw)
    assert reference.compare(y, want, reference.bound(x, qw, dtype, scaled_weights=True)).ok
    plain = reference.bound(x, qw, np.float32, likely=True)
    assert reference.compare(y, want, plain).worst > 1


def test_bound_catches_one_wrong_code(rng):
    qw = random_qw(rng, k=512, n=32)
    codes, scales, _ = unpack(qw)
    x = rng.standard_normal((4, 512)).astype(np.float16)
    codes[300, 9] ^= 8
    y = reference.product(x, pack(codes, scales, scheme="w4a16"))
    result = reference.compare(y, reference.matmul(x, qw), reference.bound(x, qw, "float16", likely=True))
    assert not result.ok
    assert result.at[1] == 9


def test_compare_reads_nan_and_infinity():
    want, limit = np.array([[1.0, 70000.0, -70000.0, np.nan]]), np.full((1, 4), 0.5)
    good = np.array([[1.0, np.inf, -np.inf, np.nan]], np.float16)
    assert reference.compare(good, want, limit).ok
    for column, bad in enumerate([np.nan, -np.inf, np.nan, 3.0]):
        wrong = good.copy()
        wrong[0, column] = bad
        result = reference.compare(wrong, want, limit)
        assert (result.worst, result.at) == (np.inf, (0, column))
    wrong = np.array([[np.inf, np.inf, -np.inf, np.nan]], np.float16)
    assert reference.compare(wrong, want, limit).at == (0, 0)
    assert "outside the bound: at (0, 0) got inf, want 1 +- 0.5" in str(reference.compare(wrong, want, limit))


def test_compare_of_nothing_is_fine():
    empty = np.zeros((0, 4))
    assert reference.compare(empty.astype(np.float16), empty, empty).ok
    with pytest.raises(ShapeError, match="got has shape"):
        reference.compare(np.zeros((2, 4), np.float16), empty, empty)


def test_reference_checks_k(rng):
    qw = random_qw(rng, k=64)
    for shape in ((3, 65), (64, 1), ()):
        with pytest.raises(ShapeError, match=r"x must have shape \(\.\.\., 64\)"):
            reference.matmul(np.zeros(shape, np.float16), qw)


def test_bound_of_narrow_accumulators_goes_by_what_they_sum():
    rng = np.random.default_rng(0)
    qw = cupyq.quantize(rng.standard_normal((512, 16)).astype(np.float32), "w8a8-fp8")
    x = rng.standard_normal((3, 512)).astype(np.float16)
    full = reference.bound(x, qw, np.float32)
    extra = [
        reference.bound(x, qw, np.float32, accumulator_bits=14, promote_k=k) - full for k in (32, 128, 512, 0, 999)
    ]
    assert np.allclose(extra[1], 4 * extra[0], rtol=1e-4)
    assert np.allclose(extra[2], 16 * extra[0], rtol=1e-4)
    assert np.array_equal(extra[2], extra[3])
    assert np.array_equal(extra[2], extra[4])
