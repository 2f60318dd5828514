"""Rounding a float matrix to codes: how close, how exact, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupyq
from cupyq import quantize as quantize_function
from cupyq.arrays import BFLOAT16, FLOAT8
from cupyq.errors import ArgumentError, DTypeError, ShapeError
from cupyq.weights import group_count, unpack

SCHEMES = ("w4a16", "w8a8-int8", "w8a8-fp8")
DTYPES = (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64))


def random_weight(k, n, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal((k, n)).astype(dtype)


def grouped(qw, values):
    """Return (groups, n) values repeated over the k of each group."""
    size = qw.k if qw.group_size == -1 else qw.group_size
    return np.repeat(values.astype(np.float64), size, axis=0)[: qw.k]


def largest_error_in_steps(w, qw):
    _, scales, _ = unpack(qw)
    error = np.abs(cupyq.dequantize(qw, "float64") - w.astype(np.float64))
    return (error / grouped(qw, scales)).max()


# --- how close --------------------------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    k=st.integers(1, 300),
    n=st.integers(1, 40),
    group_size=st.sampled_from([16, 32, 64, 128, 256, -1]),
    symmetric=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    scale_dtype=st.sampled_from(["float16", "bfloat16"]),
    exponent=st.integers(-12, 12),
)
def test_w4a16_is_within_half_a_step(seed, k, n, group_size, symmetric, dtype, scale_dtype, exponent):
    w = (random_weight(k, n, seed=seed) * 2.0**exponent).astype(dtype)
    qw = cupyq.quantize(w, "w4a16", group_size, symmetric, scale_dtype=scale_dtype)
    assert (qw.shape, qw.group_size, qw.symmetric, qw.scale_dtype.name) == ((k, n), group_size, symmetric, scale_dtype)
    # A scale rounded down clips the largest weights: by 8 (symmetric) or 15 units of its roundoff at most.
    roundoff = 2.0 ** (-8 if scale_dtype == "bfloat16" else -11)
    assert largest_error_in_steps(w, qw) <= 0.5 + (8 if symmetric else 15.5) * roundoff


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), k=st.integers(1, 300), n=st.integers(1, 40), dtype=st.sampled_from(DTYPES))
def test_int8_is_within_half_a_step(seed, k, n, dtype):
    w = random_weight(k, n, dtype, seed)
    qw = cupyq.quantize(w, "w8a8-int8")
    assert qw.scale_dtype == np.float32
    assert largest_error_in_steps(w, qw) <= 0.5 + 1e-4
    assert np.abs(unpack(qw)[0].astype(int)).max() == 127


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), k=st.integers(1, 300), n=st.integers(1, 40), dtype=st.sampled_from(DTYPES))
def test_fp8_is_within_half_a_unit_in_the_last_place(seed, k, n, dtype):
    w = random_weight(k, n, dtype, seed).astype(np.float64)
    qw = cupyq.quantize(w, "w8a8-fp8")
    codes, scales, _ = unpack(qw)
    assert codes.dtype == FLOAT8
    steps = w / scales.astype(np.float64)
    error = np.abs(codes.astype(np.float64) - steps)
    assert (error <= np.maximum(np.abs(steps) * 2.0**-4, 2.0**-10) * (1 + 1e-6)).all()


@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_are_the_best_for_the_stored_scale(symmetric, scale_dtype):
    w = random_weight(128, 24).astype(np.float64)
    qw = cupyq.quantize(w, "w4a16", 32, symmetric, scale_dtype=scale_dtype)
    codes, scales, zeros = unpack(qw)
    zero = 8 if zeros is None else grouped(qw, zeros)
    candidates = (np.arange(16.0)[:, None, None] - zero) * grouped(qw, scales)
    best = np.abs(candidates - w).min(axis=0)
    assert (np.abs(cupyq.dequantize(qw, "float64") - w) <= best * (1 + 1e-9)).all()
    assert codes.max() <= 15


def test_symmetric_uses_all_sixteen_codes():
    w = np.linspace(-8, 7, 16).reshape(16, 1).astype(np.float32)
    qw = cupyq.quantize(w, group_size=16)
    assert unpack(qw)[1].item() == 1
    assert np.array_equal(cupyq.dequantize(qw), w)


def test_asymmetric_keeps_a_group_of_one_sign():
    w = np.arange(1, 16, dtype=np.float32).reshape(15, 1)
    qw = cupyq.quantize(w, group_size=16, symmetric=False)
    codes, scales, zeros = unpack(qw)
    assert (scales.item(), zeros.item()) == (1, 0)
    assert np.array_equal(cupyq.dequantize(qw), w)
    assert np.array_equal(cupyq.dequantize(cupyq.quantize(-w, group_size=16, symmetric=False)), -w)
    assert codes.max() == 15


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantizing_again_changes_nothing(scheme):
    once = cupyq.dequantize(cupyq.quantize(random_weight(200, 24), scheme))
    again = cupyq.dequantize(cupyq.quantize(once, scheme))
    assert np.allclose(once, again, rtol=2.0**-10, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_views_quantize_like_their_copies(scheme, dtype):
    base = random_weight(96, 80, dtype)
    views = [base[:, :40], base[::2], base.T, base[::-1], np.asfortranarray(base), np.broadcast_to(base[:1], (5, 80))]
    for view in views:
        a, b = cupyq.quantize(view, scheme), cupyq.quantize(np.ascontiguousarray(view), scheme)
        assert a.packed.tobytes() == b.packed.tobytes()
        assert a.scales.tobytes() == b.scales.tobytes()


def test_blocks_of_columns_join_without_a_seam(monkeypatch):
    import sys

    w = random_weight(70, 100)
    whole = [cupyq.quantize(w, s, clip="search") for s in SCHEMES]
    monkeypatch.setattr(sys.modules["cupyq.quantize"], "_BLOCK_ELEMENTS", 1)
    for scheme, want in zip(SCHEMES, whole, strict=True):
        assert cupyq.quantize(w, scheme, clip="search").packed.tobytes() == want.packed.tobytes()


@pytest.mark.parametrize("group_size", [16, 32, 64, 128, 256, -1])
def test_scales_that_double_each_group(group_size):  # a16
    k = 512
    size = k if group_size == -1 else group_size
    steps = np.random.default_rng(2).integers(-8, 8, (k, 24)).astype(np.float64)
    steps[::size] = -8  # so that every group spans its range
    scale = 2.0 ** (np.arange(k) // size - 24)  # 32 groups of 16 just fit between the float16 limits
    w = steps * scale[:, None]
    qw = cupyq.quantize(w, "w4a16", group_size)
    assert np.array_equal(cupyq.dequantize(qw, "float64"), w)
    x = np.random.default_rng(3).standard_normal((5, k)).astype(np.float16)
    want = x.astype(np.float64) @ w
    assert np.allclose(cupyq.reference.matmul(x, qw), want, rtol=1e-12, atol=1e-12 * np.abs(want).max())


# --- small, large, zero, not finite -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_group_of_zeros_is_exactly_zero(scheme, symmetric, dtype):  # a8
    if not symmetric and scheme != "w4a16":
        return
    w = random_weight(64, 24, dtype)
    w[:, 3] = 0
    w[16:32] = 0
    w[32:48] = -0.0
    qw = cupyq.quantize(w, scheme, 16 if scheme == "w4a16" else -1, symmetric, clip="search")
    values = cupyq.dequantize(qw)
    assert np.isfinite(values).all()
    assert (values[:, 3] == 0).all()
    assert (values[16:48] == 0).all()
    assert (unpack(qw)[1].astype(np.float32) > 0).all()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16"])
def test_tiny_weights_stay_finite(scheme, symmetric, scale_dtype):  # a8
    if scheme != "w4a16" and (not symmetric or scale_dtype != "float16"):
        return
    for amplitude in (1e-4, 1e-5, 1e-6, 3e-7, 1e-7, 1e-9, 1e-30, 1e-44):
        w = random_weight(64, 24, np.float64) * amplitude
        qw = cupyq.quantize(w, scheme, 128, symmetric, scale_dtype=scale_dtype if scheme == "w4a16" else None)
        scales = unpack(qw)[1].astype(np.float64)
        assert np.isfinite(scales).all()
        assert (scales > 0).all()
        step = 0.55 if scheme != "w8a8-fp8" else 16
        error = np.abs(cupyq.dequantize(qw, "float64") - w)
        assert (error <= grouped(qw, scales) * step).all(), amplitude


def test_float16_scale_near_its_smallest_step_does_not_clip():
    # 1.4 steps of 2**-24 would round to 1 and lose a quarter of the group's range.
    w = np.full((16, 1), 7 * 1.4 * 2.0**-24)
    qw = cupyq.quantize(w, group_size=16)
    assert unpack(qw)[1].item() == 2 * 2.0**-24
    assert np.abs(cupyq.dequantize(qw, "float64") - w).max() <= 2.0**-24


def test_float16_scale_overflow_is_an_error():
    w = np.full((32, 4), 1e6, np.float32)
    with pytest.raises(ArgumentError, match=r"w needs a scale of 1\.43e\+05, above the largest float16 \(65504\)"):
        cupyq.quantize(w)
    qw = cupyq.quantize(w, scale_dtype="bfloat16")
    assert np.allclose(cupyq.dequantize(qw), 1e6, rtol=0.1)
    with pytest.raises(ArgumentError, match="above the largest float32"):
        cupyq.quantize(np.full((4, 4), 1e300), "w8a8-int8")


def test_largest_floats_do_not_overflow_on_the_way():
    w = np.array([[3e38, -3e38]] * 16, np.float32)
    for symmetric in (True, False):
        values = cupyq.dequantize(cupyq.quantize(w, symmetric=symmetric, scale_dtype="bfloat16", clip="search"))
        assert np.isfinite(values).all()
        assert np.allclose(values, w, rtol=0.1)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_must_be_finite(scheme, bad, dtype):
    w = random_weight(40, 600, dtype)
    w[17, 523] = bad
    with pytest.raises(ArgumentError, match=r"w must be finite, got .* at \(17, 523\)"):
        cupyq.quantize(w, scheme)


def test_fp8_saturates_and_holds_no_nan():
    w = np.array([[448.0], [-448.0], [447.0], [3.3]], np.float64) * (1 + 2.0**-30)
    codes = unpack(cupyq.quantize(w, "w8a8-fp8"))[0].astype(np.float32)
    assert np.abs(codes).max() == 448
    assert np.isfinite(codes).all()


# --- clipping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_search_is_never_worse_in_any_group(scheme, symmetric):
    if not symmetric and scheme != "w4a16":
        return
    w = random_weight(250, 60).astype(np.float64)
    w[::50] *= 4
    plain = cupyq.quantize(w, scheme, 32 if scheme == "w4a16" else -1, symmetric)
    best = cupyq.quantize(w, scheme, 32 if scheme == "w4a16" else -1, symmetric, clip="search")
    size = 32 if scheme == "w4a16" else 250
    edges = np.arange(0, 250, size)

    def errors(qw):
        return np.add.reduceat((cupyq.dequantize(qw, "float64") - w) ** 2, edges, axis=0)

    assert (errors(best) <= errors(plain) * (1 + 1e-12)).all()
    if scheme == "w4a16":
        assert errors(best).sum() < 0.95 * errors(plain).sum()


def test_search_finds_a_clipped_outlier():
    w = np.ones((64, 1))
    w[1::2] = -1
    w[5] = 1.8  # full range: steps of 0.257; leaving the outlier short puts +-1 on the grid
    plain, best = (cupyq.quantize(w, group_size=64, clip=c) for c in ("none", "search"))
    assert unpack(best)[1].item() < unpack(plain)[1].item()


def test_search_does_not_lose_tiny_weights():
    w = random_weight(64, 8) * np.float32(1e-25)
    plain, best = (cupyq.quantize(w, scale_dtype="bfloat16", clip=c) for c in ("none", "search"))
    square = [np.square((cupyq.dequantize(q, "float64") - w) * 1e25).sum() for q in (plain, best)]
    assert square[1] < square[0]


# --- arguments --------------------------------------------------------------------------------------------------------

WRONG = {
    "scheme": ({"scheme": "int4"}, ArgumentError, "scheme must be one of 'w2a16', 'w4a16', .*, got 'int4'"),
    "group_size": ({"group_size": 100}, ArgumentError, "group_size must be one of 16, 32, 64, 128, 256 or -1"),
    "group_size_0": ({"group_size": 0}, ArgumentError, "got 0"),
    "clip": ({"clip": "best"}, ArgumentError, "clip must be 'none' or 'search', got 'best'"),
    "scale_dtype": ({"scale_dtype": "float32"}, DTypeError, "scale_dtype must be 'float16' or 'bfloat16' for w4a16"),
    "w8a8_group": ({"scheme": "w8a8-int8", "group_size": 64}, ArgumentError, "group_size must be -1 for w8a8-int8"),
    "w8a8_zero": ({"scheme": "w8a8-fp8", "symmetric": False}, ArgumentError, "symmetric must be True for w8a8-fp8"),
    "w_int": ({"w": np.ones((4, 4), int)}, DTypeError, "w must be float16, bfloat16, float32, float64, got int64"),
    "w_1d": ({"w": np.ones(4)}, ShapeError, r"w must have shape \(K, N\)"),
    "w_empty": ({"w": np.ones((0, 4))}, ShapeError, "K >= 1"),
    "w_list": ({"w": [[1.0]]}, DTypeError, "w must be a NumPy or CuPy array"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument_is_named(case):
    change, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        cupyq.quantize(**{"w": random_weight(32, 4), **change})


def test_scale_dtype_may_be_a_dtype():
    assert cupyq.quantize(random_weight(32, 4), scale_dtype=BFLOAT16).scale_dtype == BFLOAT16
    assert cupyq.quantize(random_weight(32, 4), scale_dtype=np.float16).scale_dtype == np.float16


def test_groups_of_every_ragged_k():
    for k in (1, 15, 16, 17, 127, 128, 129, 136):
        for group_size in (16, 128, -1):
            assert cupyq.quantize(random_weight(k, 3), group_size=group_size).groups == group_count(k, group_size)


def test_no_output_features():
    assert cupyq.quantize(np.ones((4, 0))).shape == (4, 0)


def test_quantize_is_the_function():
    assert callable(quantize_function)


@pytest.mark.parametrize("scheme", ["w2a16", "w8a16"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("clip", ["none", "search"])
def test_other_bits_are_within_half_a_step(scheme, symmetric, clip):
    w = random_weight(200, 24)
    qw = cupyq.quantize(w, scheme, 64, symmetric, clip=clip)
    codes, _scales, zeros = unpack(qw)
    high = 3 if scheme == "w2a16" else 255
    assert codes.max() == high
    assert zeros is None or 0 < zeros.max() <= high
    if clip == "none":
        assert largest_error_in_steps(w, qw) <= 0.5 + high * 2.0**-11
    else:
        plain = cupyq.quantize(w, scheme, 64, symmetric)
        error, before = (np.square(cupyq.dequantize(q, "float64") - w).sum() for q in (qw, plain))
        assert error <= before
        assert scheme == "w8a16" or error < 0.7 * before


@pytest.mark.parametrize("scheme", ["w2a16", "w8a16"])
def test_other_bits_keep_zeros_and_refuse_nan(scheme):
    w = random_weight(64, 8)
    w[:, 2] = 0
    assert (cupyq.dequantize(cupyq.quantize(w, scheme, symmetric=False))[:, 2] == 0).all()
    w[3, 3] = np.nan
    with pytest.raises(ArgumentError, match=r"w must be finite, got nan at \(3, 3\)"):
        cupyq.quantize(w, scheme)
