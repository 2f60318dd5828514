"""Tensors of GPTQ, AWQ and compressed-tensors layers become the weights that their formats mean."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupyq
from checkpoints import AWQ, BFLOAT16, FLOAT8, dequantized, random_layer, symmetric_zeros, words
from cupyq import FormatError, compiler, devices
from cupyq.formats import from_awq, from_compressed_tensors, from_gptq
from cupyq.formats.compressed_tensors import from_fp8_blocks
from cupyq.kernels import Problem, W4A16Config
from emulated import activations, check_product
from fake_cupy import FakeCuPy

SMALL = W4A16Config(block_m=16, strips=2, warps_n=2, warps_k=2, warp_k=64, stages=3, split_k=1, scale="sums")


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32).view(np.int32)


def gptq(codes, zeros, scales, *, bits=4, version="v1", **options):
    stored = zeros - 1 if version == "v1" else zeros
    return from_gptq(
        words(codes, bits, 0), words(stored, bits, 1), scales, bits=bits, version=version, **options
    )  # fmt: skip


def awq(codes, zeros, scales, **options):
    return from_awq(words(codes, 4, 1, AWQ), words(zeros, 4, 1, AWQ), scales, **options)


def packed_tensors(codes, zeros, scales, *, bits=4, packed_zeros=True, **options):
    """compressed-tensors: transposed, and codes signed with an offset that makes them unsigned again."""
    half = 1 << bits - 1
    zero_points = words(zeros.T, bits, 0) if packed_zeros else (zeros.T - half).astype(np.int8)
    return from_compressed_tensors(
        words(codes.T, bits, 1), scales.T, zero_points, weight_shape=codes.T.shape, bits=bits, **options
    )


def plain_rows(k: int, group_size: int) -> np.ndarray:
    return np.arange(k) // (k if group_size == -1 else group_size)


def assert_is(qw, want: np.ndarray) -> None:
    """The weight is `want` exactly, and its products are those of `want`."""
    np.testing.assert_array_equal(cupyq.dequantize(qw, "float64"), want)
    x = np.random.default_rng(0).standard_normal((3, want.shape[0])).astype(np.float16)
    product = x.astype(np.float64) @ want
    limit = cupyq.reference.bound(x, qw, "float16")
    assert cupyq.reference.compare(cupyq.matmul(x, qw), product, limit).ok


# --- words by hand ----------------------------------------------------------------------------------------------------


def test_gptq_word_holds_rows_in_natural_order():
    qweight = np.repeat(int32(0x76543210)[:, None], 8, axis=1)
    qw = from_gptq(qweight, int32(0x77777777)[:, None], np.ones((1, 8), np.float16))
    np.testing.assert_array_equal(cupyq.unpack(qw)[0], np.repeat(np.arange(8)[:, None], 8, axis=1))
    np.testing.assert_array_equal(cupyq.dequantize(qw)[:, 3], np.arange(8) - 8.0)


def test_gptq_zero_points_lie_along_features_in_natural_order():
    qw = from_gptq(np.zeros((2, 8), np.int32), int32(0x76543210)[:, None], np.ones((1, 8), np.float16), version="v2")
    np.testing.assert_array_equal(cupyq.dequantize(qw)[5], -np.arange(8.0))


def test_awq_word_holds_even_features_first():
    qweight = np.repeat(int32(0x75316420)[:, None], 16, axis=0)
    qw = from_awq(qweight, int32(0x75316420)[:, None], np.ones((1, 8), np.float16))
    codes, _, zeros = cupyq.unpack(qw)
    np.testing.assert_array_equal(codes, np.tile(np.arange(8), (16, 1)))
    np.testing.assert_array_equal(zeros, [range(8)])


def test_compressed_tensors_word_holds_k_in_natural_order_with_an_offset():
    qw = from_compressed_tensors(int32(0x76543210, 0xFEDCBA98).reshape(1, 2), np.ones((1, 1), np.float16))
    np.testing.assert_array_equal(cupyq.dequantize(qw)[:, 0], np.arange(16.0) - 8)


def test_the_top_bit_of_a_word_is_no_sign():
    qweight = np.full((2, 8), -1, np.int32)
    qw = from_gptq(qweight, int32(0x77777777)[:, None], np.ones((1, 8), np.float16))
    assert (cupyq.dequantize(qw) == 7).all()


# --- zero points ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "stored"), [("v1", 7), ("v2", 8)])
def test_code_8_of_a_symmetric_weight_is_zero(version, stored):
    qzeros = words(np.full((1, 8), stored), 4, 1)
    qw = from_gptq(words(np.full((16, 8), 8), 4, 0), qzeros, np.ones((1, 8), np.float16), version=version)
    assert qw.symmetric
    assert (cupyq.dequantize(qw) == 0).all()


@pytest.mark.parametrize("symmetric", [None, True])
@pytest.mark.parametrize(("version", "stored", "other"), [("v1", 8, "v2"), ("v2", 7, "v1")])
def test_a_symmetric_weight_with_the_tag_of_the_other_version_is_refused(version, stored, other, symmetric):
    tensors = words(np.full((16, 8), 8), 4, 0), words(np.full((1, 8), stored), 4, 1), np.ones((1, 8), np.float16)
    with pytest.raises(FormatError, match=f"version='{other}'"):
        from_gptq(*tensors, version=version, symmetric=symmetric)
    assert (cupyq.dequantize(from_gptq(*tensors, version=other)) == 0).all()
    meant = from_gptq(*tensors, version=version, symmetric=False)
    assert (cupyq.dequantize(meant) == (-1 if version == "v1" else 1)).all()


def test_code_0_under_zero_point_15_is_minus_15():
    codes, zeros = np.full((16, 16), 0), np.full((1, 16), 15)
    scales = np.full((1, 16), 0.5, np.float16)
    for qw in (gptq(codes, zeros, scales), awq(codes, zeros, scales), packed_tensors(codes, zeros, scales)):
        assert (cupyq.dequantize(qw) == -7.5).all()


def test_neighbours_of_an_extreme_code_stay_as_they_are():
    codes = np.tile([[15], [0]], (8, 16))
    codes[5, 6] = 3
    scales = np.ones((1, 16), np.float16)
    for make in (gptq, awq, packed_tensors):
        np.testing.assert_array_equal(cupyq.unpack(make(codes, symmetric_zeros(1, 16), scales))[0], codes)


STORED_15 = int32(0x7777777F)[:, None]  # feature 0: a zero point of 0 or of 16


def test_a_stored_15_of_version_1_is_not_guessed():
    tensors = words(np.ones((16, 8), int), 4, 0), STORED_15, np.ones((1, 8), np.float16)
    with pytest.raises(FormatError, match=r"group 0, feature 0.*overflow='wrap'"):
        from_gptq(*tensors)
    assert from_gptq(words(np.full((16, 8), 9), 4, 0), STORED_15, np.ones((1, 8), np.float16), version="v2").zeros.max()


@pytest.mark.parametrize(("overflow", "value"), [("wrap", [1, -7]), ("keep", [-15, -7]), ("carry", [1, -8])])
def test_a_stored_15_of_version_1_as_told(overflow, value):
    """ "carry" adds 0x11111111 to the word, as a tool that took a borrow from feature 1 needs."""
    qw = from_gptq(words(np.ones((16, 8), int), 4, 0), STORED_15, np.ones((1, 8), np.float16), overflow=overflow)
    np.testing.assert_array_equal(cupyq.dequantize(qw)[3, :2], value)
    assert (cupyq.dequantize(qw)[:, 2:] == -7).all()


def test_zero_point_16_cannot_be_kept_where_a_code_is_0():
    codes = np.ones((32, 8), int)
    codes[20, 0] = 0
    qzeros = np.concatenate([int32(0x77777777)[:, None], STORED_15])
    with pytest.raises(FormatError, match="group 1, feature 0 is 16"):
        from_gptq(words(codes, 4, 0), qzeros, np.ones((2, 8), np.float16), group_size=16, overflow="keep")


def test_zero_point_16_is_kept_where_the_scale_is_0():
    codes = words(np.zeros((16, 8), int), 4, 0)
    qw = from_gptq(codes, int32(0xFFFFFFFF)[:, None], np.zeros((1, 8), np.float16), overflow="keep")
    assert (cupyq.dequantize(qw) == 0).all()


def test_zero_points_past_the_codes_of_negative_scales():
    codes, zeros, scales = random_layer(5, 32, 16, 2)
    codes = np.maximum(codes, 1)
    zeros[0, ::2] = 16
    scales[0, ::4] *= -1
    qw = gptq(codes, zeros, scales, overflow="keep")
    assert_is(qw, dequantized(codes, zeros, scales, plain_rows(32, 16)))


def test_symmetric_true_is_a_promise():
    codes, zeros, scales = random_layer(0, 32, 16, 2)
    with pytest.raises(FormatError, match="must all be 8 for a symmetric weight"):
        awq(codes, zeros, scales, symmetric=True)
    assert not awq(codes, symmetric_zeros(2, 16), scales, symmetric=False).symmetric
    assert awq(codes, symmetric_zeros(2, 16), scales).symmetric


# --- whole layers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_size", [16, 32, 64, 128, 256, -1])
@pytest.mark.parametrize("make", [gptq, awq, packed_tensors], ids=lambda f: f.__name__)
def test_each_group_has_its_scale(make, group_size):
    """Scales double from group to group, so that one taken from a neighbour would show."""
    k, n = 512, 24
    groups = 1 if group_size == -1 else k // group_size
    codes, zeros, _ = random_layer(group_size + 2, k, n, groups)
    scales = np.broadcast_to(2.0 ** (np.arange(groups)[:, None] % 8 - 10), (groups, n)).astype(np.float16)
    want = dequantized(codes, zeros, scales, plain_rows(k, group_size))
    for given_size in (group_size, None):  # None is read off the shapes
        qw = make(codes, zeros, scales, group_size=given_size)
        assert (qw.scheme, qw.shape, qw.group_size, qw.perm) == ("w4a16", (k, n), group_size, None)
        assert_is(qw, want)


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize(("bits", "scheme"), [(2, "w2a16"), (4, "w4a16"), (8, "w8a16")])
def test_gptq_bits(bits, scheme, version):
    codes, zeros, scales = random_layer(bits, 64, 32, 2, bits)
    qw = gptq(codes, zeros, scales, bits=bits, version=version)
    assert qw.scheme == scheme
    assert_is(qw, dequantized(codes, zeros, scales, plain_rows(64, 32)))


@pytest.mark.parametrize("packed_zeros", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_compressed_tensors_bits_and_ragged_shapes(bits, packed_zeros):
    codes, zeros, scales = random_layer(bits, 70, 21, 3, bits)
    qw = packed_tensors(codes, zeros, scales, bits=bits, packed_zeros=packed_zeros, group_size=32)
    assert_is(qw, dequantized(codes, zeros, scales, plain_rows(70, 32)))


@pytest.mark.parametrize(("group_size", "becomes"), [(512, 256), (1024, -1), (96, 32), (48, 16), (192, 64), (2048, -1)])
def test_group_sizes_that_cupyq_lacks_become_several_of_one_it_has(group_size, becomes):
    k = 1024 if group_size > 256 else 2 * group_size
    groups = -(-k // group_size)
    codes, zeros, scales = random_layer(1, k, 16, groups)
    qw = awq(codes, zeros, scales, group_size=group_size)
    assert qw.group_size == becomes
    assert_is(qw, dequantized(codes, zeros, scales, plain_rows(k, group_size)))


def test_a_group_of_eight_is_refused():
    codes, zeros, scales = random_layer(1, 64, 16, 8)
    with pytest.raises(FormatError, match="multiple of 16 rows"):
        awq(codes, zeros, scales, group_size=8)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32)])
def test_scales_keep_their_values(dtype):
    codes, zeros, scales = random_layer(1, 32, 16, 2)
    scales = scales.astype(dtype)
    qw = gptq(codes, zeros, scales)
    assert qw.scale_dtype == (np.float16 if dtype == np.float32 else dtype)
    np.testing.assert_array_equal(cupyq.unpack(qw)[1].astype(np.float32), scales.astype(np.float32))


def test_float32_scales_are_rounded_only_when_told():
    codes, zeros, _ = random_layer(1, 32, 16, 1)
    fine = np.full((1, 16), 1 + 2.0**-20, np.float32)
    with pytest.raises(FormatError, match="scale_dtype='float16'"):
        gptq(codes, zeros, fine)
    assert (cupyq.unpack(gptq(codes, zeros, fine, scale_dtype="float16"))[1] == 1).all()
    assert gptq(codes, zeros, np.full((1, 16), 2.0**100, np.float32)).scale_dtype == BFLOAT16
    for value in (2.0**100, 2.0**-100):
        with pytest.raises(FormatError, match="scales must fit float16"):
            gptq(codes, zeros, np.full((1, 16), value, np.float32), scale_dtype="float16")


def test_negative_scales_are_mirrored_exactly():
    codes, zeros, scales = random_layer(4, 64, 16, 2)
    scales[0, ::3] *= -1
    for z in (zeros, symmetric_zeros(2, 16)):
        qw = gptq(codes, z, scales)
        assert float(cupyq.unpack(qw)[1].min()) >= 0
        assert_is(qw, dequantized(codes, z, scales, plain_rows(64, 32)))


def test_a_scale_that_is_no_number_is_refused():
    codes, zeros, scales = random_layer(4, 32, 16, 1)
    scales[0, 5] = np.nan
    with pytest.raises(FormatError, match=r"scales must be finite.*\(0, 5\)"):
        awq(codes, zeros, scales)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_layer_comes_through_every_format(data):
    bits = data.draw(st.sampled_from([2, 4, 8]))
    group_size = data.draw(st.sampled_from([16, 32, 64, -1]))
    k = 8 * data.draw(st.integers(2, 12)) if bits != 2 else 16 * data.draw(st.integers(1, 6))
    n = 16 * data.draw(st.integers(1, 3))
    groups = 1 if group_size == -1 else -(-k // group_size)
    codes, zeros, scales = random_layer(data.draw(st.integers(0, 2**32)), k, n, groups, bits)
    want = dequantized(codes, zeros, scales, plain_rows(k, group_size))
    options = dict(group_size=group_size, symmetric=False)
    made = [
        gptq(codes, zeros, scales, bits=bits, version=data.draw(st.sampled_from(["v1", "v2"])), **options),
        packed_tensors(codes, zeros, scales, bits=bits, packed_zeros=data.draw(st.booleans()), **options),
    ]
    if bits == 4:
        made.append(awq(codes, zeros, scales, **options))
    for qw in made:
        np.testing.assert_array_equal(cupyq.dequantize(qw, "float64"), want)


# --- act order --------------------------------------------------------------------------------------------------------


def shuffled_groups(k: int, group_size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(np.arange(k) // group_size).astype(np.int32)


def test_act_order_brings_groups_together():
    k, n = 64, 24
    codes, zeros, scales = random_layer(7, k, n, 4)
    g_idx = shuffled_groups(k, 16)
    qw = gptq(codes, zeros, scales, g_idx=g_idx, group_size=16)
    assert sorted(qw.perm) == list(range(k))
    np.testing.assert_array_equal(g_idx[qw.perm], np.arange(k) // 16)
    assert_is(qw, dequantized(codes, zeros, scales, g_idx))


def test_act_order_through_the_kernel():
    k, n = 64, 24
    codes, _, scales = random_layer(7, k, n, 4)
    g_idx = shuffled_groups(k, 16)
    x = activations(5, k, "float16")
    for zeros in (symmetric_zeros(4, n), random_layer(8, k, n, 4)[1]):
        qw = gptq(codes, zeros, scales, g_idx=g_idx, group_size=16)
        run = check_product(SMALL, Problem("w4a16", 5, n, k, 16, qw.symmetric), x, qw)
        want = x.astype(np.float64) @ dequantized(codes, zeros, scales, g_idx)
        assert cupyq.reference.compare(run.out, want, cupyq.reference.bound(x, qw, "float16")).ok


@pytest.mark.parametrize(
    "g_idx",
    [None, np.arange(64) // 16, np.full(64, -1), np.zeros(0, int)],
    ids=["missing", "sorted", "all -1", "empty"],
)
def test_plain_order_moves_nothing(g_idx):
    codes, zeros, scales = random_layer(7, 64, 24, 4)
    qw = gptq(codes, zeros, scales, g_idx=g_idx, group_size=16)
    assert qw.perm is None
    assert_is(qw, dequantized(codes, zeros, scales, plain_rows(64, 16)))


def test_act_order_of_one_group_moves_nothing():
    codes, zeros, scales = random_layer(7, 64, 24, 1)
    assert gptq(codes, zeros, scales, g_idx=np.zeros(64, np.int32), group_size=-1).perm is None


@pytest.mark.parametrize("rows", [slice(32, 64), slice(16, 64), slice(0, 48)])
def test_a_slice_of_k_keeps_the_full_scales(rows):
    codes, zeros, scales = random_layer(7, 64, 24, 2)
    g_idx = np.arange(64) // 32
    qw = gptq(codes[rows], zeros, scales, g_idx=g_idx[rows], group_size=32)
    assert qw.perm is None
    assert_is(qw, dequantized(codes, zeros, scales, g_idx)[rows])


@pytest.mark.parametrize("half", [0, 1])
def test_a_slice_of_an_act_order_weight_keeps_the_full_scales(half):
    """Each half holds sixteen rows of every group of 32, so the packed groups have sixteen."""
    rng = np.random.default_rng(half)
    g_idx = np.concatenate([rng.permutation(np.arange(64) // 16) for _ in range(2)])
    codes, zeros, scales = random_layer(7, 128, 24, 4)
    rows = slice(64 * half, 64 * half + 64)
    qw = gptq(codes[rows], zeros, scales, g_idx=g_idx[rows], group_size=32)
    assert qw.group_size == 16
    assert_is(qw, dequantized(codes, zeros, scales, g_idx)[rows])


def test_one_group_may_be_cut_short_wherever_it_is():
    g_idx = np.array([1] * 16 + [0] * 8 + [2] * 16)
    codes, zeros, scales = random_layer(7, 40, 24, 3)
    qw = gptq(codes, zeros, scales, g_idx=g_idx, group_size=16)
    assert_is(qw, dequantized(codes, zeros, scales, g_idx))


def test_groups_that_no_order_can_fill_are_refused():
    codes, zeros, scales = random_layer(7, 32, 24, 3)
    with pytest.raises(FormatError, match="8 rows in group 0 and 8 in group 2"):
        gptq(codes, zeros, scales, g_idx=np.array([0] * 8 + [1] * 16 + [2] * 8), group_size=16)


def test_a_slice_without_its_g_idx_is_refused():
    codes, zeros, scales = random_layer(7, 64, 24, 4)
    with pytest.raises(FormatError, match=r"scales must have 2 rows.*needs its part of g_idx"):
        gptq(codes[:32], zeros, scales, group_size=16)


@pytest.mark.parametrize(
    ("g_idx", "message"),
    [
        (np.r_[np.arange(63) // 16, 4], "0..3, the rows of scales, got 4 for row 63"),
        (np.r_[-1, np.arange(63) // 16], "got -1 for row 0"),
        (np.arange(32) // 16, "must hold 64 integers"),
        (np.arange(64) / 16, "must hold 64 integers"),
    ],
)
def test_a_wrong_g_idx_is_refused(g_idx, message):
    codes, zeros, scales = random_layer(7, 64, 24, 4)
    with pytest.raises(FormatError, match=message):
        gptq(codes, zeros, scales, g_idx=g_idx, group_size=16)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(0, 2**32))
def test_any_act_order_in_whole_groups_is_exact(blocks, seed):
    """Any number of sixteens of each group, in any order."""
    g_idx = np.random.default_rng(seed).permutation(np.repeat(blocks, 16))
    codes, zeros, scales = random_layer(seed, len(g_idx), 16, 6)
    qw = gptq(codes, zeros, scales, g_idx=g_idx, group_size=16, symmetric=False)
    np.testing.assert_array_equal(cupyq.dequantize(qw, "float64"), dequantized(codes, zeros, scales, g_idx))


def test_compressed_tensors_act_order():
    codes, zeros, scales = random_layer(9, 64, 16, 4)
    g_idx = shuffled_groups(64, 16)
    qw = packed_tensors(codes, zeros, scales, weight_g_idx=g_idx, group_size=16)
    assert_is(qw, dequantized(codes, zeros, scales, g_idx))


@pytest.fixture
def cupy(monkeypatch):
    fake = FakeCuPy(("a100-sxm", "h100-sxm"))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    devices._read_live.cache_clear()
    compiler.gpu._load.cache_clear()
    yield fake
    devices._read_live.cache_clear()
    compiler.gpu._load.cache_clear()


@pytest.mark.parametrize("sign", [1, -1])
def test_arrays_on_a_gpu_stay_there(cupy, sign):
    codes, zeros, scales = random_layer(7, 64, 16, 4)
    codes, zeros[0], scales = np.maximum(codes, 1), 16, scales * sign
    g_idx = shuffled_groups(64, 16)
    tensors = words(codes, 4, 0), words(zeros - 1, 4, 1), scales, g_idx
    options = dict(group_size=16, overflow="keep")
    want = from_gptq(*tensors, **options)
    with cupy.cuda.Device(1):
        qw = from_gptq(*map(cupy.array, tensors), **options)
        assert qw.device == 1
        host = qw.to_numpy()
    for name in ("packed", "scales", "zeros", "perm"):
        np.testing.assert_array_equal(getattr(host, name), getattr(want, name))
    np.testing.assert_array_equal(cupyq.dequantize(host, "float64"), dequantized(codes, zeros, scales, g_idx))
    with pytest.raises(cupyq.DeviceMismatch):
        from_gptq(cupy.array(tensors[0]), *tensors[1:], **options)


# --- one code a byte --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(24, 1), (24,), (1,), ()])
def test_int8_by_channel_or_tensor(shape):
    rng = np.random.default_rng(0)
    codes = rng.integers(-128, 128, (24, 40)).astype(np.int8)
    scales = rng.uniform(0.01, 0.1, shape or None)
    scales = np.asarray(scales, np.float32).astype(BFLOAT16).reshape(shape)
    qw = from_compressed_tensors(codes, scales)
    each = np.broadcast_to(scales.astype(np.float64).reshape(-1, 1), (24, 1))
    assert qw.scheme == "w8a8-int8"
    np.testing.assert_array_equal(cupyq.dequantize(qw, "float64"), (codes * each).T)
    sixteen = from_compressed_tensors(codes, scales, quantized_activations=False)
    assert sixteen.scheme == "w8a16"
    assert_is(sixteen, (codes * each).T)


def test_int8_with_zero_points_and_int8_activations_is_refused():
    codes, scales = np.ones((16, 32), np.int8), np.ones((16, 1), np.float32)
    zero_point = np.zeros((16, 1), np.int8)
    assert from_compressed_tensors(codes, scales, zero_point).symmetric
    zero_point[3] = 1
    with pytest.raises(FormatError, match=r"weight_zero_point must be 0 .* got 1 for feature 3"):
        from_compressed_tensors(codes, scales, zero_point)
    sixteen = from_compressed_tensors(codes, scales, zero_point, quantized_activations=False)
    assert (cupyq.dequantize(sixteen) == (np.arange(16) != 3)).all()


def test_float8_by_channel_tensor_and_block():
    rng = np.random.default_rng(0)
    codes = rng.standard_normal((200, 300)).astype(FLOAT8)
    for scales in (rng.uniform(0.1, 1, (200, 1)).astype(np.float32), np.array([0.25], np.float32)):
        qw = from_compressed_tensors(codes, scales)
        assert qw.scheme == "w8a8-fp8"
        np.testing.assert_array_equal(
            cupyq.dequantize(qw, "float64"), (codes.astype(np.float64) * scales.reshape(-1, 1)).T
        )
    blocks = rng.uniform(0.1, 1, (2, 3)).astype(np.float32)
    each = np.repeat(np.repeat(blocks, 128, axis=0)[:200], 128, axis=1)[:, :300]
    for qw in (from_compressed_tensors(codes, blocks), from_fp8_blocks(codes, blocks)):
        assert qw.scheme == "w8a8-fp8-block"
        np.testing.assert_array_equal(cupyq.dequantize(qw, "float64"), (codes.astype(np.float64) * each).T)


def test_float8_with_16_bit_activations_is_refused():
    with pytest.raises(FormatError, match="float8 activations"):
        from_compressed_tensors(np.ones((16, 32), FLOAT8), np.ones((16, 1), np.float32), quantized_activations=False)


def test_scales_of_activations_become_the_rule():
    codes, scales = np.ones((16, 32), np.int8), np.ones((16, 1), np.float32)
    one = np.array([0.25], BFLOAT16)
    rule = from_compressed_tensors(codes, scales, input_scale=one, input_zero_point=np.array([-7], np.int8)).activations
    assert (rule.scale, rule.zero) == (0.25, -7)
    rule = from_compressed_tensors(codes, scales, input_scale=one, input_zero_point=np.zeros(1, np.int8)).activations
    assert (rule.scale, rule.zero, rule.symmetric) == (0.25, None, True)
    assert not from_compressed_tensors(codes, scales, symmetric_activations=False).activations.symmetric
    fp8 = from_compressed_tensors(codes.astype(FLOAT8), scales, input_scale=np.float32(0.5).reshape(()))
    assert fp8.activations.scale == 0.5
    assert from_compressed_tensors(codes, scales, input_scale=one, quantized_activations=False).activations.dynamic


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_scale": np.ones(2, np.float32)}, r"input_scale must be one value .* got shape \(2,\)"),
        ({"input_scale": np.zeros(1, np.float32)}, "input_scale, input_zero_point: scale must be a positive"),
        ({"input_scale": np.ones(1, np.float32), "input_zero_point": np.full(1, 300)}, "-128 to 127, got 300"),
    ],
)
def test_wrong_scales_of_activations(options, message):
    with pytest.raises(FormatError, match=message):
        from_compressed_tensors(np.ones((16, 32), np.int8), np.ones((16, 1), np.float32), **options)
    blocks = np.ones((2, 3), np.float32)
    with pytest.raises(FormatError, match="input_scale"):
        from_compressed_tensors(np.ones((200, 300), FLOAT8), blocks, input_scale=np.ones(1, np.float32))


# --- shapes and dtypes ------------------------------------------------------------------------------------------------


def test_awq_tensors_read_as_gptq_say_so_and_the_other_way_round():
    codes, zeros, scales = random_layer(3, 64, 128, 4)
    with pytest.raises(FormatError, match="shape of an AWQ weight"):
        from_gptq(words(codes, 4, 1, AWQ), words(zeros, 4, 1, AWQ), scales, group_size=16)
    with pytest.raises(FormatError, match="shape of a GPTQ weight"):
        from_awq(words(codes, 4, 0), words(zeros, 4, 1), scales, group_size=16)


def test_the_same_layer_in_both_formats_is_the_same_weight():
    codes, zeros, scales = random_layer(3, 64, 32, 4)
    one, other = gptq(codes, zeros, scales), awq(codes, zeros, scales)
    np.testing.assert_array_equal(one.packed, other.packed)
    np.testing.assert_array_equal(one.zeros, other.zeros)


W, Z, S = words(np.ones((32, 16), int), 4, 0), words(np.full((2, 16), 5), 4, 1), np.ones((2, 16), np.float16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: from_gptq(W.astype(np.int64), Z, S), "qweight must be a matrix of int32 words, got int64"),
        (lambda: from_gptq(W, Z[:1], S), r"qzeros must have shape .* = \(2, 2\), got \(1, 2\)"),
        (lambda: from_gptq(W, Z, S.astype(np.float64)), "scales must be float16, bfloat16 or float32, got float64"),
        (lambda: from_gptq(W, Z, S[0]), r"scales must have shape \(groups, N\), got \(16,\)"),
        (lambda: from_gptq(W, Z, S, bits=3), "bits must be 2 or 4 or 8, got 3"),
        (lambda: from_gptq(W, Z, S, version="v3"), "version must be 'v1' or 'v2'"),
        (lambda: from_gptq(W, Z, S, overflow="?"), "overflow must be 'error'"),
        (lambda: from_gptq(W, Z, S, group_size=0), "group_size must be a positive integer"),
        (lambda: from_gptq(W, Z, S, group_size=-1), "scales must have 1 rows"),
        (lambda: from_gptq(W[:3], Z, np.ones((2, 16), np.float16), group_size=16, scale_dtype="int8"), "scale_dtype"),
        (lambda: from_awq(W, Z, S, bits=8), "bits must be 4, got 8"),
        (lambda: from_compressed_tensors(W.T, S, weight_shape=(16, 33)), r"weight_packed must have shape"),
        (lambda: from_compressed_tensors(W.T, S.T[:5]), r"weight_scale must have shape \(N, groups\) with N=16"),
        (lambda: from_compressed_tensors(S.T, S.T), "weight_packed must be a matrix of int32 words, got float16"),
        (lambda: from_compressed_tensors(W.T, S.T, S.T), "weight_zero_point must be int32"),
        (lambda: from_compressed_tensors(W.T, S.T, np.full((16, 2), 8, np.int8)), r"must lie in -8..7, got 8"),
        (lambda: from_fp8_blocks(np.ones((16, 16), FLOAT8), S), r"weight_scale_inv must have shape"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(call, message):
    with pytest.raises(FormatError, match=message):
        call()
