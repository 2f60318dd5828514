"""Rules for activations: static scales, zero points and SmoothQuant's factors, on the host and through a fake CuPy."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import cupyq
from cupyq import Activations, dispatch, launch, reference
from cupyq.arrays import BFLOAT16
from cupyq.errors import ArgumentError, DTypeError, FormatError, ShapeError
from test_launch import _forget, install

K, N, M = 200, 40, 5


@pytest.fixture
def cupy(monkeypatch, tmp_path):
    """A fake H100 whose launches run in the emulator."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dispatch.UntunedWarning)
        yield install(monkeypatch, tmp_path)
    _forget()


def data(dtype="float16", k=K, n=N, m=M):
    """Weights, and activations that lie mostly above zero, with a few columns a hundred times the others."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((m, k)) + 1.5
    x[:, ::50] *= 100
    w = rng.standard_normal((k, n)).astype(np.float32)
    return x.astype(BFLOAT16 if dtype == "bfloat16" else dtype), w


def rules(x, w):
    """Every kind of rule by a name, for int8."""
    factor = cupyq.smoothing_factor(np.abs(x.astype(np.float32)).max(axis=0), w)
    return {
        "static": Activations.covering(x, "w8a8-int8"),
        "static_zero": Activations.covering(x, "w8a8-int8", symmetric=False),
        "zeros": Activations(symmetric=False),
        "smooth": Activations(factor=factor),
        "smooth_zeros": Activations(symmetric=False, factor=factor),
        "smooth_static": Activations.covering(x, "w8a8-int8", factor=factor),
        "smooth_static_zero": Activations.covering(x, "w8a8-int8", symmetric=False, factor=factor),
    }


def error(x, w, qw):
    """Return the relative error of the product on the host."""
    want = x.astype(np.float64) @ w
    return float(np.linalg.norm(reference.matmul(x, qw) - want) / np.linalg.norm(want))


# --- the rule -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"scale": 0.0}, ArgumentError, "scale must be a positive, finite float32"),
        ({"scale": 1e39}, ArgumentError, "scale must be a positive, finite float32"),
        ({"scale": "big"}, ArgumentError, "got 'big'"),
        ({"zero": 3}, ArgumentError, "needs the scale that goes with it"),
        ({"scale": 1.0, "zero": 128}, ArgumentError, "-128 to 127, got 128"),
        ({"scale": 1.0, "symmetric": False}, ArgumentError, "needs its zero point"),
        ({"factor": np.ones(4, np.float32)}, DTypeError, "float16 or bfloat16, got float32"),
        ({"factor": np.ones((2, 2), np.float16)}, ShapeError, r"shape \(K,\), got \(2, 2\)"),
        ({"factor": np.array([1, 0], np.float16)}, ArgumentError, "positive and finite, got 0.0 at 1"),
        ({"factor": np.array([np.inf, 1], np.float16)}, ArgumentError, "got inf at 0"),
    ],
)
def test_rules_that_make_no_sense(options, kind, message):
    with pytest.raises(kind, match=message):
        Activations(**options)


@pytest.mark.parametrize(
    ("scheme", "rule", "kind", "message"),
    [
        ("w4a16", Activations(scale=1.0), ArgumentError, "those of w4a16 stay in 16 bits"),
        ("w8a8-fp8", Activations(symmetric=False), ArgumentError, "codes of w8a8-fp8 have no zero points"),
        ("w8a8-fp8-block", Activations(scale=1.0), ArgumentError, "a scale for every 128 k"),
        ("w8a8-int8", Activations(factor=np.ones(7, np.float16)), ShapeError, r"\(K,\) = \(8,\), got \(7,\)"),
        ("w8a8-int8", "dynamic", ArgumentError, "must be a cupyq.Activations, got str"),
    ],
)
def test_rules_that_do_not_fit_a_weight(scheme, rule, kind, message):
    w = np.ones((8, 16), np.float32)
    with pytest.raises(kind, match=message):
        cupyq.quantize(w, scheme, activations=rule)
    codes, scales, zeros = cupyq.unpack(cupyq.quantize(w, scheme))
    with pytest.raises(kind, match=message):
        cupyq.pack(codes, scales, zeros, scheme=scheme, activations=rule)


def test_covering_takes_the_whole_sample():
    x = np.array([[-3, 0, 12.7]], np.float32)
    assert Activations.covering(x, "w8a8-int8").scale == np.float32(12.7) / np.float32(127)
    lopsided = Activations.covering(x, "w8a8-int8", symmetric=False)
    assert lopsided.scale == np.float32(12.7) / np.float32(255) + np.float32(3) / np.float32(255)
    assert lopsided.zero == round(-128 + 3 / lopsided.scale)
    assert not lopsided.symmetric
    assert Activations.covering(np.zeros((1, 4), np.float16), "w8a8-fp8").scale == 1
    with pytest.raises(ArgumentError, match="finite"):
        Activations.covering(np.full((1, 4), np.inf, np.float32), "w8a8-int8")


def test_smoothing_factor():
    x, w = data()
    largest = np.abs(x.astype(np.float32)).max(axis=0)
    factor = cupyq.smoothing_factor(largest, w)
    assert np.allclose(factor, np.sqrt(np.abs(w).max(axis=1) / largest), rtol=2**-8)
    assert (factor.astype(BFLOAT16).astype(np.float32) == factor.astype(np.float32)).all()
    largest[3], w[5] = 0, 0
    assert (cupyq.smoothing_factor(largest, w)[[3, 5]] == 1).all()
    assert cupyq.smoothing_factor(largest, w * 1e30, 0.1).max() == 2**15
    with pytest.raises(ArgumentError, match="0 to 1"):
        cupyq.smoothing_factor(largest, w, 2)
    with pytest.raises(ShapeError, match=r"x_largest must have shape \(K,\)"):
        cupyq.smoothing_factor(largest[1:], w)


# --- on the host ----------------------------------------------------------------------------------------------------


def test_each_rule_is_as_exact_as_it_should_be():
    x, w = data()
    plain = error(x, w, cupyq.quantize(w, "w8a8-int8"))
    found = {name: error(x, w, cupyq.quantize(w, "w8a8-int8", activations=r)) for name, r in rules(x, w).items()}
    assert found["zeros"] < 0.8 * plain
    assert found["smooth"] < 0.4 * plain  # the weight's larger error included
    assert found["smooth_zeros"] < found["smooth"]
    assert max(found.values()) < 1.5 * plain


@pytest.mark.parametrize("scheme", ["w8a8-int8", "w8a8-fp8", "w8a8-fp8-block"])
def test_smoothing_cancels_out(scheme):
    # Powers of two divide and multiply exactly: a weight that was smoothed gives what it would have given before.
    x, w = data()
    factor = np.exp2(np.arange(K) % 3).astype(np.float16)
    smoothed = cupyq.quantize(w * factor.astype(np.float32)[:, None], scheme, activations=Activations(factor=factor))
    assert np.array_equal(
        cupyq.unpack(smoothed)[0].view(np.uint8), cupyq.unpack(cupyq.quantize(w, scheme))[0].view(np.uint8)
    )
    narrow = (x.astype(np.float32) / factor).astype(np.float16)
    exact = narrow.astype(np.float32) * factor  # what the kernel sees
    want = reference.matmul(exact, cupyq.quantize(w, scheme))
    assert np.array_equal(reference.matmul(narrow, smoothed), want)
    assert np.array_equal(cupyq.dequantize(smoothed), cupyq.dequantize(cupyq.quantize(w, scheme)) * factor[:, None])


def test_lopsided_product_is_what_its_codes_mean():
    x, w = data()
    qw = cupyq.quantize(w, "w8a8-int8", activations=Activations(symmetric=False))
    codes, scale, zero = cupyq.quantize_activations(x, "w8a8-int8", symmetric=False)
    assert zero.dtype == np.int32
    wcodes, wscales, _ = cupyq.unpack(qw)
    want = (codes.astype(np.float64) - zero[:, None]) * scale[:, None].astype(np.float64)
    want = want @ (wcodes.astype(np.float64) * wscales.astype(np.float64))
    assert np.allclose(reference.matmul(x, qw), want, rtol=1e-12)
    y = cupyq.matmul(x, qw)
    assert np.allclose(y, want, rtol=2e-3)
    assert np.array_equal(cupyq.matmul(codes, qw, x_scale=scale, x_zero=zero), y)
    assert np.array_equal(cupyq.matmul(x, qw, batch_invariant=True), y)
    given = cupyq.matmul(codes, qw, x_scale=scale, x_zero=zero, batch_invariant=True)
    assert np.array_equal(given, y)


def test_zero_points_of_codes_are_checked():
    x, w = data()
    qw = cupyq.quantize(w, "w8a8-int8")
    codes, scale, zero = cupyq.quantize_activations(x, "w8a8-int8", symmetric=False)
    for wrong, kind, message in (
        (zero.astype(np.int8), DTypeError, "x_zero must be int32, got int8"),
        (zero[:2], ShapeError, r"x_zero must have shape \(5,\)"),
    ):
        with pytest.raises(kind, match=message):
            cupyq.matmul(codes, qw, x_scale=scale, x_zero=wrong)
    with pytest.raises(ArgumentError, match="x_zero is given without x_scale"):
        cupyq.matmul(x, qw, x_zero=zero)
    fp8 = cupyq.quantize(w, "w8a8-fp8")
    codes, scale = cupyq.quantize_activations(x, "w8a8-fp8")
    with pytest.raises(ArgumentError, match="x_zero must be None for w8a8-fp8"):
        cupyq.matmul(codes, fp8, x_scale=scale, x_zero=zero)


def test_factor_of_the_other_type():
    x, w = data("bfloat16")
    exact = Activations(factor=np.full(K, 1.5, np.float16))
    assert np.isfinite(cupyq.matmul(x, cupyq.quantize(w, "w8a8-int8", activations=exact)).astype(np.float32)).all()
    fine = Activations(factor=np.full(K, 1 + 2**-10, np.float16))
    with pytest.raises(DTypeError, match="x is bfloat16, in which the weight's float16 factors are not exact"):
        cupyq.matmul(x, cupyq.quantize(w, "w8a8-int8", activations=fine))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_saved_and_loaded(tmp_path, dtype):
    x, w = data(dtype)
    for name, rule in rules(x, w).items():
        if rule.factor is not None:
            rule = Activations(rule.scale, rule.zero, rule.symmetric, rule.factor.astype(x.dtype))
        qw = cupyq.quantize(w, "w8a8-int8", activations=rule)
        qw.save(tmp_path / name)
        again = cupyq.QuantizedWeight.load(tmp_path / name)
        assert (again.activations.scale, again.activations.zero) == (rule.scale, rule.zero)
        assert again.activations.symmetric == rule.symmetric
        if rule.factor is not None:
            assert again.activations.factor.dtype == x.dtype
        assert np.array_equal(cupyq.matmul(x, again), cupyq.matmul(x, qw))
        assert repr(again) == repr(qw)
        assert str(rule) in repr(qw)


def test_file_without_its_factor(tmp_path):
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    x, w = data()
    cupyq.quantize(w, "w8a8-int8", activations=rules(x, w)["smooth"]).save(tmp_path / "layer")
    with safe_open(tmp_path / "layer", framework="np") as file:
        metadata = file.metadata()
    tensors = load_file(tmp_path / "layer")
    del tensors["factor"]
    save_file(tensors, tmp_path / "cut", metadata=metadata)
    with pytest.raises(FormatError, match="factor is missing"):
        cupyq.QuantizedWeight.load(tmp_path / "cut")


# --- through kernels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["static", "static_zero", "zeros", "smooth", "smooth_zeros", "smooth_static", "smooth_static_zero"]
)
def test_product_by_each_rule(cupy, name, dtype):
    x, w = data(dtype)
    qw = cupyq.quantize(w, "w8a8-int8", activations=rules(x, w)[name])
    there = qw.to_cupy()
    assert there.activations.factor is None or type(there.activations.factor).__module__ == "cupy"
    for rows in (x, x[:1], x[::2], np.repeat(x, 8, axis=0)):  # few tokens in one launch, many in two
        y = cupyq.matmul(cupy.asarray(rows), there)
        result = reference.compare(y.get(), reference.matmul(rows, qw), reference.bound(rows, qw, x.dtype))
        assert result.ok, result
    assert np.array_equal(
        cupyq.plan(there, M, x.dtype)(cupy.asarray(x)).get(), cupyq.matmul(cupy.asarray(x), there).get()
    )


@pytest.mark.parametrize("scheme", ["w8a8-fp8", "w8a8-fp8-block"])
def test_smoothed_fp8(cupy, scheme):
    x, w = data()
    factor = rules(x, w)["smooth"].factor
    rule = Activations(factor=factor) if scheme.endswith("block") else Activations.covering(x, scheme, factor=factor)
    qw = cupyq.quantize(w, scheme, activations=rule)
    y = cupyq.matmul(cupy.asarray(x), qw.to_cupy())
    result = reference.compare(y.get(), reference.matmul(x, qw), reference.bound(x, qw, np.float16))
    assert result.ok, result


def test_codes_made_beforehand_pass_by_the_rule(cupy):
    x, w = data()
    qw = cupyq.quantize(w, "w8a8-int8", activations=rules(x, w)["static"])
    there = qw.to_cupy()
    for symmetric in (True, False):
        made = cupyq.quantize_activations(cupy.asarray(x), "w8a8-int8", symmetric=symmetric)
        host = cupyq.quantize_activations(x, "w8a8-int8", symmetric=symmetric)
        assert all(np.array_equal(a.get(), b) for a, b in zip(made, host, strict=True))
        y = cupyq.matmul(made[0], there, x_scale=made[1], x_zero=None if symmetric else made[2])
        want = reference.matmul(host[0], qw, x_scale=host[1], x_zero=None if symmetric else host[2])
        assert np.allclose(y.get(), want, rtol=1e-3, atol=1e-3)


def test_act_order_gathers_the_factors_too(cupy):
    x, w = data()
    codes, scales, _ = cupyq.unpack(cupyq.quantize(w, "w8a8-int8"))
    perm = np.random.default_rng(0).permutation(K)
    qw = cupyq.pack(codes, scales, scheme="w8a8-int8", perm=perm, activations=rules(x, w)["smooth"])
    y = cupyq.matmul(cupy.asarray(x), qw.to_cupy())
    result = reference.compare(y.get(), reference.matmul(x, qw), reference.bound(x, qw, np.float16))
    assert result.ok, result
    codes, scales, _ = cupyq.unpack(cupyq.quantize(w, "w8a8-fp8-block"))
    with pytest.raises(ArgumentError, match="perm must be None for w8a8-fp8-block"):
        cupyq.pack(codes, scales, scheme="w8a8-fp8-block", perm=perm)


def test_rules_where_no_kernel_runs(monkeypatch, tmp_path):
    fake = install(monkeypatch, tmp_path, ("a100-sxm",))
    monkeypatch.setattr(dispatch.kernels, "check", lambda *_: "not today")
    x, w = data()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rule in rules(x, w).values():
            qw = cupyq.quantize(w, "w8a8-int8", activations=rule)
            y = cupyq.matmul(fake.asarray(x), qw.to_cupy())
            assert np.allclose(y.get(), cupyq.matmul(x, qw), rtol=2e-3, atol=1e-2)
    assert fake.launches == []
    _forget()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("w8a8-int8", {"scale": 0.5}),
        ("w8a8-int8", {"scale": 0.5, "zero": -100}),
        ("w8a8-int8", {"symmetric": False}),
        ("w8a8-int8", {"symmetric": False, "factor": True}),
        ("w8a8-fp8", {"scale": 0.5, "factor": True}),
        ("w8a8-fp8-block", {}),
        ("w8a8-fp8-block", {"factor": True}),
    ],
)
@pytest.mark.parametrize("lead", [(), (5,), (2, 3)])
def test_quantize_activations_by_a_kernel(cupy, scheme, options, dtype, lead):
    x = data(dtype, m=6)[0]
    x = x[:5] if lead == (5,) else x[0] if lead == () else x.reshape(2, 3, K)
    factor = rules(*data(dtype))["smooth"].factor.astype(x.dtype) if options.get("factor") else None
    options = {**options, "factor": factor}
    want = cupyq.quantize_activations(x, scheme, **options)
    there = {**options, "factor": None if factor is None else cupy.asarray(factor)}
    made = cupyq.quantize_activations(cupy.asarray(x), scheme, **there)
    assert len(cupy.launches) == 1
    assert len(made) == len(want)
    for got, wanted in zip(made, want, strict=True):
        assert got.shape == wanted.shape
        assert got.get().tobytes() == wanted.tobytes()


def test_block_scales_go_on_without_a_copy(cupy):
    x, w = data()
    qw = cupyq.quantize(w, "w8a8-fp8-block").to_cupy()
    codes, scales = cupyq.quantize_activations(cupy.asarray(x), "w8a8-fp8-block")
    before = launch.kernel_block_scales(launch.Problem("w8a8-fp8-block", M, N, K), scales)
    assert before.data.ptr == scales.data.ptr
    y = cupyq.matmul(codes, qw, x_scale=scales)
    assert np.array_equal(y.get(), cupyq.matmul(cupy.asarray(x), qw).get())
