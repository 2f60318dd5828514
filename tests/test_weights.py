"""QuantizedWeight, pack and unpack, save and load: exact both ways, and every wrong argument is an error."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupyq
from cupyq import layout
from cupyq.arrays import BFLOAT16, FLOAT8
from cupyq.errors import ArgumentError, DTypeError, FormatError, ShapeError
from cupyq.weights import WEIGHT_ONLY, QuantizedWeight, group_count, pack, unpack

SCHEMES = ("w4a16", "w8a8-int8", "w8a8-fp8")


def parts(seed, scheme, k, n, group_size=128, symmetric=True, scale_dtype=np.float16):
    """Return random (codes, scales, zeros) that `pack` takes."""
    rng = np.random.default_rng(seed)
    if scheme in WEIGHT_ONLY:
        groups, count = group_count(k, group_size), 2 ** WEIGHT_ONLY[scheme]
        codes = rng.integers(0, count, (k, n), dtype=np.uint8)
        scales = rng.random((groups, n)).astype(scale_dtype)
        zeros = None if symmetric else rng.integers(0, count, (groups, n), dtype=np.uint8)
        return codes, scales, zeros
    bits = rng.integers(0, 256, (k, n), dtype=np.uint8)
    scales = rng.random((1, n), dtype=np.float32)
    if scheme == "w8a8-int8":
        return bits.view(np.int8), scales, None
    return np.where(bits & 0x7F == 0x7F, 0, bits).astype(np.uint8).view(FLOAT8), scales, None


def same(a, b):
    return (a is None and b is None) or (a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())


def weight(scheme="w4a16", k=100, n=20, **options):
    group_size = options.get("group_size", 128)
    return pack(*parts(1, scheme, k, n, **options), scheme=scheme, group_size=group_size)


# --- round trips ------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    scheme=st.sampled_from([*WEIGHT_ONLY]),
    k=st.integers(1, 300),
    n=st.integers(1, 70),
    group_size=st.sampled_from([16, 32, 64, 128, 256, -1]),
    symmetric=st.booleans(),
    scale_dtype=st.sampled_from([np.dtype(np.float16), BFLOAT16]),
)
def test_weight_only_round_trip(seed, scheme, k, n, group_size, symmetric, scale_dtype):
    given_parts = parts(seed, scheme, k, n, group_size, symmetric, scale_dtype)
    qw = pack(*given_parts, scheme=scheme, group_size=group_size)
    found = unpack(qw)
    assert all(same(a, b) for a, b in zip(found, given_parts, strict=True))
    again = pack(*found, scheme=scheme, group_size=group_size)
    assert all(same(getattr(again, f), getattr(qw, f)) for f in ("packed", "scales", "zeros", "perm"))


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    k=st.integers(1, 200),
    n=st.integers(1, 70),
    scheme=st.sampled_from(["w8a8-int8", "w8a8-fp8"]),
)
def test_w8a8_round_trip(seed, k, n, scheme):
    given_parts = parts(seed, scheme, k, n)
    qw = pack(*given_parts, scheme=scheme)
    found = unpack(qw)
    assert all(same(a, b) for a, b in zip(found, given_parts, strict=True))
    assert same(pack(*found, scheme=scheme, group_size=-1).packed, qw.packed)


@pytest.mark.parametrize("symmetric", [True, False])
def test_padding_dequantizes_to_zero(symmetric):
    # k beyond K holds the zero point of the last group, features beyond N have scale 0: kernels need no mask for them.
    codes, scales, zeros = parts(3, "w4a16", 70, 20, 32, symmetric)
    qw = pack(codes, scales, zeros, scheme="w4a16", group_size=32)
    padded = layout.unpack16(qw.packed, 4, 128, 32)
    zero_row = np.full(20, 8) if zeros is None else zeros[-1]
    assert (padded[70:, :20] == zero_row).all()
    assert (padded[:, 20:] == (8 if symmetric else 0)).all()
    assert (layout.deinterleave(qw.scales, 32)[:, 20:] == 0).all()
    if zeros is not None:
        assert (layout.deinterleave(qw.zeros, 32)[:, 20:] == 0).all()


def test_bit_patterns_stand_for_float8_codes():
    codes, scales, _ = parts(5, "w8a8-fp8", 40, 20)
    assert same(
        pack(codes.view(np.uint8), scales, scheme="w8a8-fp8").packed, pack(codes, scales, scheme="w8a8-fp8").packed
    )


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint16, np.int64])
def test_codes_of_any_integer_dtype(dtype):
    codes, scales, _ = parts(5, "w4a16", 40, 20)
    assert same(pack(codes.astype(dtype), scales, scheme="w4a16").packed, pack(codes, scales, scheme="w4a16").packed)


def test_views_pack_like_their_copies():
    codes, scales, zeros = parts(6, "w4a16", 64, 32, 16, False)
    want = pack(codes, scales, zeros, scheme="w4a16", group_size=16)
    turned = [np.asfortranarray(a) for a in (codes, scales, zeros)]
    flipped = [a[::-1, ::-1].copy()[::-1, ::-1] for a in (codes, scales, zeros)]
    for views in (turned, flipped):
        got = pack(*views, scheme="w4a16", group_size=16)
        assert all(same(getattr(got, f), getattr(want, f)) for f in ("packed", "scales", "zeros"))


def test_act_order_keeps_codes_in_packed_order():
    codes, scales, _ = parts(8, "w4a16", 48, 20, 16)
    perm = np.random.default_rng(0).permutation(48)
    qw = pack(codes, scales, scheme="w4a16", group_size=16, perm=perm)
    assert qw.perm.dtype == np.int32
    assert np.array_equal(qw.perm, perm)
    assert same(unpack(qw)[0], codes)
    wanted = np.empty((48, 20), np.float32)
    wanted[perm] = (codes.astype(np.float32) - 8) * scales.astype(np.float32).repeat(16, axis=0)
    assert np.array_equal(cupyq.dequantize(qw), wanted)


def test_no_output_features():
    qw = pack(np.zeros((5, 0), np.uint8), np.zeros((1, 0), np.float16), scheme="w4a16")
    assert (qw.shape, qw.nbytes) == ((5, 0), 0)
    assert unpack(qw)[0].shape == (5, 0)


# --- wrong arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [16, -1, 255])
def test_code_out_of_range_is_an_error_not_a_neighbour(bad):  # a7
    codes = np.full((64, 16), 8, np.int16)
    codes[3, 5] = bad
    with pytest.raises(ArgumentError, match=rf"0\.\.15 for w4a16, got {bad} at \(3, 5\)"):
        pack(codes, np.ones((1, 16), np.float16), scheme="w4a16")


def test_code_0_zero_15_is_minus_15_scales():  # a7
    codes = np.zeros((16, 16), np.uint8)
    scales, zeros = np.full((1, 16), 0.5, np.float16), np.full((1, 16), 15)
    qw = pack(codes, scales, zeros, scheme="w4a16", group_size=16)
    assert (cupyq.dequantize(qw) == -7.5).all()


def test_zero_times_scale_is_not_rounded():  # a14
    scale = np.float16(0.1234)
    qw = pack(
        np.full((16, 1), 14), np.full((1, 1), scale, np.float16), np.full((1, 1), 15), scheme="w4a16", group_size=16
    )
    assert (cupyq.dequantize(qw) == -np.float32(scale)).all()
    assert (cupyq.dequantize(qw, "float16") == -scale).all()


def test_int8_code_out_of_range():
    codes = np.array([[127], [128]], np.int32)
    with pytest.raises(ArgumentError, match=r"-128\.\.127 for w8a8-int8, got 128 at \(1, 0\)"):
        pack(codes, np.ones((1, 1), np.float32), scheme="w8a8-int8")
    with pytest.raises(ArgumentError, match="got 200"):
        pack(np.array([[200]], np.uint8), np.ones((1, 1), np.float32), scheme="w8a8-int8")


def test_float8_nan_is_an_error():
    codes = np.zeros((4, 4), np.uint8)
    codes[1, 2] = 0xFF
    with pytest.raises(ArgumentError, match=r"NaN at \(1, 2\)"):
        pack(codes, np.ones((1, 4), np.float32), scheme="w8a8-fp8")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16])
def test_scales_must_be_finite_and_not_negative(bad, dtype):
    scales = np.ones((2, 16), dtype)
    scales[1, 3] = bad
    with pytest.raises(ArgumentError, match=r"scales must be finite and not negative, got .* at \(1, 3\)"):
        pack(np.zeros((32, 16), np.uint8), scales, scheme="w4a16", group_size=16)


@pytest.mark.parametrize(("scheme", "high"), [("w2a16", 3), ("w4a16", 15), ("w8a16", 255)])
def test_codes_and_zeros_out_of_range(scheme, high):
    for bad in (high + 1, -1):
        wrong = np.zeros((1, 4), np.int32)
        wrong[0, 1] = bad
        with pytest.raises(ArgumentError, match=rf"zeros must lie in 0\.\.{high} for {scheme}, got {bad} at \(0, 1\)"):
            pack(np.zeros((16, 4), np.uint8), np.ones((1, 4), np.float16), wrong, scheme=scheme)
        with pytest.raises(ArgumentError, match=rf"codes must lie in 0\.\.{high} for {scheme}, got {bad} at \(0, 1\)"):
            pack(wrong, np.ones((1, 4), np.float16), scheme=scheme)


@pytest.mark.parametrize(("scheme", "middle"), [("w2a16", 2), ("w4a16", 8), ("w8a16", 128)])
def test_symmetric_codes_count_from_their_middle(scheme, middle):
    codes = np.arange(2 * middle).reshape(-1, 1)
    qw = pack(codes, np.full((1, 1), 0.5, np.float16), scheme=scheme, group_size=-1)
    assert np.array_equal(cupyq.dequantize(qw), (codes - middle) * 0.5)


WRONG = {
    "scheme": ({"scheme": "w3a16"}, ArgumentError, "scheme must be one of"),
    "group_size": ({"group_size": 48}, ArgumentError, "group_size must be one of"),
    "group_size_bool": ({"group_size": True}, ArgumentError, "group_size must be an integer"),
    "codes_float": ({"codes": np.zeros((32, 4))}, DTypeError, "codes must have an integer dtype"),
    "codes_1d": ({"codes": np.zeros(32, np.uint8)}, ShapeError, r"codes must have shape \(K, N\)"),
    "codes_empty": ({"codes": np.zeros((0, 4), np.uint8)}, ShapeError, "K >= 1"),
    "codes_list": ({"codes": [[1, 2], [3, 4]]}, DTypeError, "codes must be a NumPy or CuPy array, got builtins.list"),
    "scales_shape": ({"scales": np.ones((1, 4), np.float16)}, ShapeError, r"scales must have shape .* = \(2, 4\)"),
    "scales_dtype": ({"scales": np.ones((2, 4), np.float32)}, DTypeError, "scales must be float16 or bfloat16"),
    "zeros_shape": ({"zeros": np.ones((1, 4), np.uint8)}, ShapeError, r"zeros must have shape \(2, 4\)"),
    "zeros_dtype": ({"zeros": np.ones((2, 4), np.float16)}, DTypeError, "zeros must have an integer dtype"),
    "perm_shape": ({"perm": np.arange(31)}, ShapeError, r"perm must have shape \(32,\)"),
    "perm_twice": ({"perm": np.r_[np.arange(31), 0]}, ArgumentError, "perm must hold each of 0..31 once"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument_is_named(case):
    change, error, message = WRONG[case]
    arguments = {
        "codes": np.zeros((32, 4), np.uint8),
        "scales": np.ones((2, 4), np.float16),
        "scheme": "w4a16",
        "group_size": 16,
        **change,
    }
    with pytest.raises(error, match=message):
        pack(**arguments)


def test_w8a8_has_no_groups_and_no_zeros():
    codes, scales, _ = parts(0, "w8a8-int8", 32, 4)
    with pytest.raises(ArgumentError, match="group_size must be -1 for w8a8-int8"):
        pack(codes, scales, scheme="w8a8-int8", group_size=64)
    with pytest.raises(ArgumentError, match="zeros must be None for w8a8-int8"):
        pack(codes, scales, np.zeros((1, 4), np.uint8), scheme="w8a8-int8")


def test_constructor_checks_its_arrays():
    qw = weight(group_size=32, symmetric=False)
    arguments = {f: getattr(qw, f) for f in QuantizedWeight.__dataclass_fields__}
    with pytest.raises(ShapeError, match="packed must have shape"):
        QuantizedWeight(**{**arguments, "k": 200})
    with pytest.raises(DTypeError, match="packed must be uint32, got int32"):
        QuantizedWeight(**{**arguments, "packed": qw.packed.view(np.int32)})
    with pytest.raises(ArgumentError, match="zeros are None exactly when"):
        QuantizedWeight(**{**arguments, "zeros": None})
    with pytest.raises(ArgumentError, match="packed must be C-contiguous"):
        QuantizedWeight(**{**arguments, "packed": np.asfortranarray(qw.packed)})
    with pytest.raises(ArgumentError, match="k must be at least 1"):
        QuantizedWeight(**{**arguments, "k": 0})


def test_weight_is_frozen():
    qw = weight()
    with pytest.raises(AttributeError):
        qw.k = 3


def test_repr_says_what_it_is():
    qw = weight("w4a16", 256, 32, group_size=128)
    assert repr(qw) == (
        "QuantizedWeight(w4a16, K=256, N=32, group_size=128, symmetric, float16 scales, 0.00422 MB, "
        "4.12 bits a weight, in host memory (NumPy))"
    )
    assert qw.bits_per_weight == 4 + 16 / 128
    assert qw.to_numpy() is qw
    assert "asymmetric" in repr(weight(symmetric=False))


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"scheme": "w4a16"},
        {"scheme": "w4a16", "symmetric": False, "group_size": 32, "scale_dtype": BFLOAT16},
        {"scheme": "w8a8-int8"},
        {"scheme": "w8a8-fp8"},
    ],
)
def test_file_round_trip(tmp_path, options):
    qw = weight(**options)
    path = tmp_path / "a folder, ünïcode" / "layer.safetensors"
    path.parent.mkdir()
    qw.save(path)
    again = QuantizedWeight.load(path)
    for name in QuantizedWeight.__dataclass_fields__:
        a, b = getattr(qw, name), getattr(again, name)
        assert same(a, b) if a is None or isinstance(a, np.ndarray) else (a == b and type(a) is type(b)), name
    assert [p.name for p in path.parent.iterdir()] == ["layer.safetensors"]


def test_file_keeps_act_order(tmp_path):
    codes, scales, _ = parts(8, "w4a16", 48, 20, 16)
    qw = pack(codes, scales, scheme="w4a16", group_size=16, perm=np.arange(48)[::-1])
    qw.save(tmp_path / "layer")
    assert np.array_equal(QuantizedWeight.load(tmp_path / "layer").perm, np.arange(48)[::-1])


def test_truncated_file(tmp_path):
    path = tmp_path / "layer.safetensors"
    weight().save(path)
    data = path.read_bytes()
    for size in (0, 4, 8, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(FormatError, match="no complete safetensors file"):
            QuantizedWeight.load(path)


def test_foreign_files(tmp_path):
    from safetensors.numpy import save_file

    path = tmp_path / "x.safetensors"
    save_file({"weight": np.ones((4, 4), np.float32)}, path)
    with pytest.raises(FormatError, match=r"was not written by QuantizedWeight\.save"):
        QuantizedWeight.load(path)
    path.write_text("SQLite format 3, or anything else that is long enough to look like a header")
    with pytest.raises(FormatError, match="no complete safetensors file"):
        QuantizedWeight.load(path)
    with pytest.raises(FileNotFoundError):
        QuantizedWeight.load(tmp_path / "absent")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "2"}, "packed layout 2; this cupyq reads 1"),
        ({"k": "101000"}, "packed must have shape"),
        ({"k": "many"}, "is damaged"),
        ({"scheme": "w3a16"}, "scheme must be one of"),
        ({"symmetric": "false"}, "zeros are None exactly when"),
        ({"scale_dtype": "float32"}, "the metadata says float32"),
        ({"scheme": None}, "scheme is missing"),
        ({"packed": None}, "packed must be a NumPy or CuPy array"),
        ({"scales": np.full((2, 1, 16), np.nan, np.float16)}, "scales must be finite"),
    ],
)
def test_damaged_file(tmp_path, change, message):
    from safetensors import safe_open
    from safetensors.numpy import save_file

    path = tmp_path / "layer.safetensors"
    weight().save(path)
    with safe_open(path, framework="np") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, value in change.items():
        place = tensors if name in tensors else metadata
        if value is None:
            del place[name]
        else:
            place[name] = value
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(FormatError, match=message):
        QuantizedWeight.load(path)


def test_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "layer.safetensors"
    weight().save(path)
    before = path.read_bytes()

    def full_disk(source, target):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        weight("w8a8-int8").save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["layer.safetensors"]
