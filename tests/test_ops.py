"""`matmul` and its parts on NumPy arrays: shapes, views, wrong arguments. For CuPy arrays see test_launch, test_gpu."""

from __future__ import annotations

import numpy as np
import pytest

import cupyq
from cupyq import reference
from cupyq.arrays import BFLOAT16
from cupyq.errors import ArgumentError, DTypeError, ShapeError

SCHEMES = ("w4a16", "w2a16", "w8a16", "w8a8-int8", "w8a8-fp8")
DTYPES = (np.dtype(np.float16), BFLOAT16)


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def weight(scheme="w4a16", k=64, n=24, seed=0, **options):
    return cupyq.quantize(np.random.default_rng(seed).standard_normal((k, n)), scheme, **options)


def check(x, qw, y, bias=None):
    limit = reference.bound(x, qw, y.dtype, bias)
    result = reference.compare(y, reference.matmul(x, qw, bias), limit)
    assert result.ok, result


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (0, 3, 64)])
def test_empty_batch_gives_an_empty_result(scheme, shape):  # b1
    qw = weight(scheme)
    for out in (None, np.empty((*shape[:-1], 24), np.float16)):
        y = cupyq.matmul(np.empty(shape, np.float16), qw, out=out)
        assert (y.shape, y.dtype) == ((*shape[:-1], 24), np.float16)
        assert out is None or y is out
    assert cupyq.matmul(np.ones((1, 64), np.float16), qw).shape == (1, 24)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_output_features(scheme):  # b1
    y = cupyq.matmul(np.ones((3, 64), np.float16), weight(scheme, n=0))
    assert y.shape == (3, 0)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("m", [*range(1, 18), 31, 33, 63, 65, 127, 129, 329])
def test_ragged_m(rng, scheme, m):  # b2
    qw = weight(scheme, 136, 40)
    x = rng.standard_normal((m, 136)).astype(np.float16)
    guarded = np.full((m + 4, 40), np.nan, np.float16)
    cupyq.matmul(x, qw, out=guarded[2:-2])
    check(x, qw, guarded[2:-2])
    assert np.isnan(guarded[[0, 1, -2, -1]]).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_leading_axes(rng, scheme):  # b2
    qw = weight(scheme)
    x = rng.standard_normal((2, 4, 64)).astype(np.float16)
    y = cupyq.matmul(x, qw)
    assert y.shape == (2, 4, 24)
    assert np.array_equal(y.reshape(8, 24), cupyq.matmul(x.reshape(8, 64), qw))
    assert np.allclose(cupyq.matmul(x[0, 0], qw).astype(float), y[0, 0].astype(float), rtol=1e-2, atol=1e-2)
    assert cupyq.matmul(x[0, 0], qw).shape == (24,)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("k", [16, 48, 136, 10944])
@pytest.mark.parametrize("n", [1, 7, 8, 24, 64, 72, 127, 192])
def test_ragged_n_and_k(rng, scheme, k, n):  # b3
    qw = weight(scheme, k, n)
    x = rng.standard_normal((3, k)).astype(np.float16)
    check(x, qw, cupyq.matmul(x, qw))


@pytest.mark.parametrize("m", [65_537, 1_048_561])
def test_huge_m(m):  # b4
    qw = weight(k=32, n=8)
    x = np.zeros((m, 32), np.float16)
    x[-1] = np.arange(32)
    y = cupyq.matmul(x, qw)
    assert (y[:-1] == 0).all()
    check(x[-1:], qw, y[-1:])


# --- views ------------------------------------------------------------------------------------------------------------

VIEWS = {
    "columns": lambda a: np.concatenate([a, a], axis=1)[:, : a.shape[1]],
    "every_other_row": lambda a: np.repeat(a, 2, axis=0)[::2],
    "every_other_column": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "transposed": lambda a: np.ascontiguousarray(a.T).T,
    "reversed": lambda a: a[::-1, ::-1].copy()[::-1, ::-1],
    "fortran": np.asfortranarray,
    "misaligned": lambda a: np.concatenate([a.ravel()[:1], a.ravel()])[1:].reshape(a.shape),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_x(rng, scheme, dtype, view):  # b6, b8
    qw = weight(scheme)
    x = rng.standard_normal((6, 64)).astype(dtype)
    seen = VIEWS[view](x)
    assert np.array_equal(seen, x)
    assert np.array_equal(cupyq.matmul(seen, qw), cupyq.matmul(x, qw))


def test_broadcast_x(rng):  # b6
    qw = weight()
    x = rng.standard_normal((1, 64)).astype(np.float16)
    wide = np.broadcast_to(x, (5, 64))
    assert np.array_equal(cupyq.matmul(wide, qw), cupyq.matmul(wide.copy(), qw))


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_out_and_bias(rng, view):  # b6, b8
    qw = weight()
    x, bias = rng.standard_normal((6, 64)).astype(np.float16), rng.standard_normal(24).astype(np.float16)
    want = cupyq.matmul(x, qw, bias)
    out = VIEWS[view](np.full((6, 24), np.nan, np.float16))
    assert cupyq.matmul(x, qw, bias=np.repeat(bias, 3)[::3], out=out) is out
    assert np.array_equal(out, want)


def test_read_only_out_is_an_error():
    out = np.broadcast_to(np.float16(0), (2, 24))
    with pytest.raises(ValueError, match="read-only"):
        cupyq.matmul(np.ones((2, 64), np.float16), weight(), out=out)


def test_out_may_overlap_x(rng):
    qw = weight(k=24, n=24)
    x = rng.standard_normal((4, 24)).astype(np.float16)
    want = cupyq.matmul(x.copy(), qw)
    assert np.array_equal(cupyq.matmul(x, qw, out=x), want)


def test_inputs_are_left_alone(rng):
    qw = weight(symmetric=False)
    x, bias = rng.standard_normal((4, 64)).astype(np.float16), np.ones(24, np.float16)
    before = [a.tobytes() for a in (x, bias, qw.packed, qw.scales, qw.zeros)]
    cupyq.matmul(x, qw, bias)
    assert [a.tobytes() for a in (x, bias, qw.packed, qw.scales, qw.zeros)] == before


# --- dtypes and arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16"])
def test_result_has_the_dtype_of_x(rng, scheme, dtype, scale_dtype):
    qw = weight(scheme, scale_dtype=None if "w8a8" in scheme else scale_dtype)
    x, bias = rng.standard_normal((4, 64)).astype(dtype), rng.standard_normal(24).astype(dtype)
    y = cupyq.matmul(x, qw, bias)
    assert y.dtype == dtype
    check(x, qw, y, bias)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8, np.int32, np.complex64])
def test_other_x_is_an_error_that_names_astype(dtype):
    with pytest.raises(DTypeError, match=r"x must be float16 or bfloat16, got \w+; convert it: x\.astype"):
        cupyq.matmul(np.ones((2, 64), dtype), weight())


X = np.ones((2, 64), np.float16)
WRONG = {
    "k": ((np.ones((2, 63), np.float16),), {}, ShapeError, r"x must have shape \(\.\.\., 64\) .* got \(2, 63\)"),
    "turned": ((np.ones((64, 2), np.float16),), {}, ShapeError, "x must have shape"),
    "scalar": ((np.array(1, np.float16),), {}, ShapeError, "x must have shape"),
    "list": (([[1.0] * 64],), {}, DTypeError, "x must be a NumPy or CuPy array, got builtins.list"),
    "bias_n": ((X,), {"bias": np.ones(23, np.float16)}, ShapeError, r"bias must have shape \(24,\), got \(23,\)"),
    "bias_2d": ((X,), {"bias": np.ones((1, 24), np.float16)}, ShapeError, "bias must have shape"),
    "bias_dtype": ((X,), {"bias": np.ones(24, np.float32)}, DTypeError, "bias must be float16 like the result"),
    "out_shape": ((X,), {"out": np.ones((3, 24), np.float16)}, ShapeError, r"out must have shape \(2, 24\)"),
    "out_dtype": ((X,), {"out": np.ones((2, 24), np.float32)}, DTypeError, "out must be float16 like the result"),
    "dtype": ((X,), {"dtype": "bfloat16"}, DTypeError, "dtype must be x's own, float16"),
    "x_scale": ((X,), {"x_scale": np.ones(2, np.float32)}, ArgumentError, "x_scale must be None for w4a16"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument_is_named(case):
    args, kwargs, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        cupyq.matmul(*args, weight(), **kwargs)


def test_weight_must_be_a_quantized_weight():
    with pytest.raises(ArgumentError, match="qw must be a QuantizedWeight"):
        cupyq.matmul(X, np.ones((64, 24), np.float16))


# --- quantized activations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES[3:])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations_quantized_beforehand(rng, scheme, dtype):
    qw = weight(scheme)
    x = rng.standard_normal((2, 3, 64)).astype(dtype)
    codes, x_scale = cupyq.quantize_activations(x, scheme)
    y = cupyq.matmul(codes, qw, x_scale=x_scale, dtype=dtype)
    assert y.dtype == dtype
    assert np.array_equal(y, cupyq.matmul(x, qw))
    if scheme == "w8a8-fp8":
        assert np.array_equal(y, cupyq.matmul(codes.view(np.uint8), qw, x_scale=x_scale, dtype=dtype))


def test_scales_of_blocks(rng):
    qw = weight("w8a8-fp8-block", 300, 150)
    x = rng.standard_normal((2, 3, 300)).astype(np.float16)
    codes, x_scale = cupyq.quantize_activations(x, "w8a8-fp8-block")
    assert x_scale.shape == (2, 3, 3)
    y = cupyq.matmul(x, qw)
    check(x, qw, y)
    assert np.array_equal(cupyq.matmul(codes, qw, x_scale=x_scale), y)
    with pytest.raises(ShapeError, match=r"x_scale must have shape \(2, 3, 3\), one for 128 k of a row of x"):
        cupyq.matmul(codes, qw, x_scale=x_scale[..., 0])


def test_arguments_of_activations_quantized_beforehand():
    qw = weight("w8a8-int8")
    codes, scale = np.ones((2, 64), np.int8), np.ones(2, np.float32)
    with pytest.raises(DTypeError, match=r"x must hold codes \(int8\) where x_scale is given, got float16"):
        cupyq.matmul(X, qw, x_scale=scale)
    with pytest.raises(ShapeError, match=r"x_scale must have shape \(2,\), one a row of x, got \(3,\)"):
        cupyq.matmul(codes, qw, x_scale=np.ones(3, np.float32))
    with pytest.raises(DTypeError, match="x_scale must be float32, got float64"):
        cupyq.matmul(codes, qw, x_scale=np.ones(2))
    with pytest.raises(DTypeError, match="dtype must be float16 or bfloat16, got float32"):
        cupyq.matmul(codes, qw, x_scale=scale, dtype="float32")
    assert cupyq.matmul(codes, qw, x_scale=scale).dtype == np.float16


@pytest.mark.parametrize("scheme", SCHEMES[3:])
def test_zero_row(rng, scheme):  # a9
    qw = weight(scheme, 256)
    x = rng.standard_normal((4, 256)).astype(np.float16)
    x[2] = 0
    y = cupyq.matmul(x, qw)
    assert (y[2] == 0).all()
    assert np.array_equal(y[[0, 1, 3]], cupyq.matmul(x[[0, 1, 3]], qw))


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_host_plan_is_matmul(rng, scheme, dtype):
    qw = weight(scheme)
    x = rng.standard_normal((2, 3, 64)).astype(BFLOAT16 if dtype == "bfloat16" else dtype)
    bias = np.ones(24, x.dtype)
    plan = cupyq.plan(qw, 6, dtype, bias=bias)
    assert np.array_equal(plan(x), cupyq.matmul(x, qw, bias))
    out = np.empty((2, 3, 24), x.dtype)
    assert plan(x, out=out) is out
    assert repr(plan) == f"<Plan M=6 K=64 N=24 {dtype}: NumPy reference>"


def test_plan_refuses_other_x(rng):
    plan = cupyq.plan(weight(), 4)
    with pytest.raises(ShapeError, match=r"x must have 4 rows, as the plan was made for, got shape \(2, 64\)"):
        plan(X)
    with pytest.raises(DTypeError, match="x must be float16, as the plan was made for, got bfloat16"):
        plan(np.ones((4, 64), BFLOAT16))
    with pytest.raises(ShapeError, match="m is 0"):
        cupyq.plan(weight(), 0)
    with pytest.raises(DTypeError, match="dtype must be float16 or bfloat16"):
        cupyq.plan(weight(), 4, "float32")
    with pytest.raises(ShapeError, match="bias must have shape"):
        cupyq.plan(weight(), 4, bias=np.ones(3, np.float16))


def test_warmup_gives_a_plan_for_each_weight_and_m():
    plans = cupyq.warmup([weight(), weight(n=8)], [1, 16])
    assert [(p.m, repr(p).split(" N=")[1].split()[0]) for p in plans] == [(1, "24"), (16, "24"), (1, "8"), (16, "8")]
    assert [p.m for p in cupyq.warmup(weight(), 3)] == [3]
