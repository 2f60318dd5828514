"""compressed-tensors: (N, K) weights, packed into words ("pack-quantized") or one code a byte, and fp8 by blocks."""

from __future__ import annotations

import numpy as np

from ..activations import Activations
from ..arrays import FLOAT8, FLOAT32, Array, common_namespace, first_position, namespace_of
from ..errors import CupyqError, FormatError
from ..weights import BLOCK, QuantizedWeight
from .build import expect_matrix, packed, stored_scales, weight_only
from .words import check_bits, check_words, unpack_columns, unpack_rows

_BITS = (2, 4, 8)


def from_compressed_tensors(
    weight: Array,
    weight_scale: Array,
    weight_zero_point: Array | None = None,
    weight_g_idx: Array | None = None,
    *,
    weight_shape: tuple[int, int] | Array | None = None,
    bits: int | None = None,
    group_size: int | None = None,
    symmetric: bool | None = None,
    quantized_activations: bool = True,
    input_scale: Array | None = None,
    input_zero_point: Array | None = None,
    symmetric_activations: bool = True,
    scale_dtype: str | np.dtype | None = None,
) -> QuantizedWeight:
    """Convert one layer of a compressed-tensors checkpoint.

    What `weight` holds is told by its dtype:

    ========== =========================== ================================================================
    dtype      layout                      becomes
    ========== =========================== ================================================================
    int32      `weight_packed`, codes      "w2a16", "w4a16", "w8a16", whatever the activations are
    int8       one code each               "w8a8-int8"; "w8a16" where activations are not quantized
    float8     one code each               "w8a8-fp8"; "w8a8-fp8-block" where scales are those of blocks
    ========== =========================== ================================================================

    A packed word holds successive k, the first in its lowest bits, each code plus 2**(bits - 1): the signed codes
    -8..7 are 0..15.

    Arrays are NumPy's, or CuPy's of one device (which has no float8), where the weight then lives too.

    Parameters
    ----------
    weight : (N, ceil(K * bits / 32)) int32, or (N, K) int8 or float8_e4m3fn
    weight_scale : (N, groups), or one value for the whole tensor, float16, bfloat16 or float32
        fp8 by blocks of 128 x 128: (ceil(N/128), ceil(K/128)).
    weight_zero_point : optional
        Signed zero points: (ceil(N * bits / 32), groups) int32, packed along N, or (N, groups) int8.
    weight_g_idx : (K,) integers, optional
        The group of each k. None, or all -1: plain order.
    weight_shape : (N, K), optional
        Needed where K does not fill the last word.
    bits : int, optional
        Of int32 weights: 2, 4 or 8.
    group_size : int, optional
        k of a group, -1 for all; None reads it off the shapes.
    symmetric, scale_dtype
        As for :func:`from_gptq`; 8-bit activations go with float32 scales.
    quantized_activations : bool
        Whether the checkpoint quantizes activations to 8 bits too.
    input_scale : one value, optional
        Their scale, fixed beforehand; without it each token gets its own. Of int32 weights, whose activations stay in
        16 bits, this and the next two are ignored.
    input_zero_point : one value, optional
        int8: the zero point that goes with it.
    symmetric_activations : bool
        int8 without `input_scale`: False gives each token a zero point.

    Returns
    -------
    QuantizedWeight

    Raises
    ------
    FormatError
        Shapes, dtypes or values do not fit each other or the format, or the weight cannot be held exactly.
    """
    common_namespace(weight=weight, weight_scale=weight_scale, weight_zero_point=weight_zero_point)
    dtype = np.dtype(weight.dtype)
    if weight.ndim != 2 or 0 in weight.shape:
        raise FormatError(f"weight must be a matrix, got shape {tuple(weight.shape)}")
    if dtype == FLOAT8:
        if weight_zero_point is not None and bool((weight_zero_point.astype(FLOAT32) != 0).any()):
            raise FormatError("weight_zero_point must be absent or 0 for float8 weights")
        if not quantized_activations:
            raise FormatError("float8 weights must go with float8 activations; cupyq has no scheme with 16-bit ones")
        return _float8(weight, weight_scale, _rule("w8a8-fp8", input_scale, input_zero_point, True))
    n = int(weight.shape[0])
    if dtype == np.int8:
        codes, k, bits = weight, int(weight.shape[1]), 8
    else:
        bits = check_bits(4 if bits is None else bits, _BITS)
        k = int(weight.shape[1]) * (32 // bits)
        if weight_shape is not None:
            n_given, k = (int(v) for v in weight_shape)
            if n_given != n or -(-k * bits // 32) != weight.shape[1]:
                raise FormatError(
                    f"weight_packed must have shape (N, ceil(K * {bits} / 32)) for weight_shape (N, K) = "
                    f"{(n_given, k)}, got {tuple(weight.shape)}"
                )
        codes = unpack_columns(check_words(weight, "weight_packed"), bits, k)
    scales = _by_feature(weight_scale, n)
    zeros = None if weight_zero_point is None else _zero_points(weight_zero_point, bits, n, scales.shape[1])
    if dtype == np.int8 and quantized_activations:
        return _int8(codes, scales, zeros, _rule("w8a8-int8", input_scale, input_zero_point, symmetric_activations))
    if dtype == np.int8:
        codes = codes.view(np.uint8) ^ np.uint8(0x80)  # + 128
    return weight_only(
        codes.T,
        scales.T,
        None if zeros is None else (zeros + np.int16(1 << bits - 1)).T,
        bits=bits,
        group_size=group_size,
        g_idx=weight_g_idx,
        symmetric=symmetric,
        scale_dtype=scale_dtype,
    )


def from_fp8_blocks(weight: Array, weight_scale_inv: Array) -> QuantizedWeight:
    """Convert a layer of an "fp8" checkpoint: (N, K) float8_e4m3fn, a scale for each block of 128 x 128, which
    multiplies codes in spite of its name."""
    if np.dtype(weight.dtype) != FLOAT8 or weight.ndim != 2:
        raise FormatError(
            f"weight must be a float8_e4m3fn matrix, got {np.dtype(weight.dtype).name} of shape {tuple(weight.shape)}"
        )
    blocks = tuple(-(-size // BLOCK) for size in weight.shape)
    expect_matrix(weight_scale_inv, "weight_scale_inv", blocks, f"(ceil(N / {BLOCK}), ceil(K / {BLOCK}))")
    return _blocks(weight, weight_scale_inv)


def _rule(scheme: str, scale: Array | None, zero: Array | None, symmetric: bool) -> Activations:
    """Return how activations are quantized: dynamically, or by one scale and zero point."""
    if scale is None:
        return Activations(symmetric=symmetric)
    fixed: list[float] = []
    for name, value in (("input_scale", scale), ("input_zero_point", zero)):
        if value is not None and value.size != 1:
            raise FormatError(f"{name} must be one value for all activations, got shape {tuple(value.shape)}")
        fixed.append(0.0 if value is None else float(value.astype(FLOAT32).reshape(())))
    try:
        rule = Activations(fixed[0], int(fixed[1]) if fixed[1] else None)
        rule.check(scheme, 1)
    except CupyqError as error:
        raise FormatError(f"input_scale, input_zero_point: {error}") from error
    return rule


def _blocks(weight: Array, scales: Array) -> QuantizedWeight:
    return packed(weight.T, _wide(scales).T, scheme="w8a8-fp8-block", group_size=BLOCK)


def _float8(weight: Array, scales: Array, rule: Activations) -> QuantizedWeight:
    n, k = map(int, weight.shape)
    blocks = (-(-n // BLOCK), -(-k // BLOCK))
    if scales.ndim == 2 and tuple(scales.shape) == blocks and scales.size > 1:
        if rule.scale is not None:
            raise FormatError("input_scale must be absent where scales are those of blocks: so are the activations'")
        return _blocks(weight, scales)
    each = _by_feature(scales, n)
    expect_matrix(each, "weight_scale", (n, 1), "(N, 1)")
    return packed(weight.T, _wide(each).T, scheme="w8a8-fp8", group_size=-1, activations=rule)


def _int8(codes: Array, scales: Array, zeros: Array | None, rule: Activations) -> QuantizedWeight:
    if zeros is not None and bool((zeros != 0).any()):
        at = first_position(zeros != 0)
        raise FormatError(
            f"weight_zero_point must be 0 for int8 weights with int8 activations, got {int(zeros[at])} for feature "
            f"{at[0]}"
        )
    expect_matrix(scales, "weight_scale", (int(codes.shape[0]), 1), "(N, 1)")
    return packed(codes.T, _wide(scales).T, scheme="w8a8-int8", group_size=-1, activations=rule)


def _wide(scales: Array) -> Array:
    if np.dtype(scales.dtype) != FLOAT32:
        scales = stored_scales(scales, None)  # refuses what is no scale at all
    return scales.astype(FLOAT32)


def _by_feature(scales: Array, n: int) -> Array:
    """Return scales as (N, groups); one value stands for all features."""
    xp = namespace_of(scales, "weight_scale")
    if scales.size == 1:
        value = scales.reshape(1, 1)
        return value if n == 1 else xp.repeat(value, n, axis=0)
    if scales.ndim == 1:
        scales = scales[:, None]
    if scales.ndim != 2 or scales.shape[0] != n:
        raise FormatError(
            f"weight_scale must have shape (N, groups) with N={n}, or one value, got {tuple(scales.shape)}"
        )
    return scales


def _zero_points(zeros: Array, bits: int, n: int, groups: int) -> Array:
    """Return signed zero points, (N, groups) int16."""
    dtype = np.dtype(zeros.dtype)
    if dtype == np.int32:
        expect_matrix(zeros, "weight_zero_point", (-(-n * bits // 32), groups), f"(ceil(N * {bits} / 32), groups)")
        unsigned = unpack_rows(check_words(zeros, "weight_zero_point"), bits, n)
        return unsigned.astype(np.int16) - np.int16(1 << bits - 1)
    if dtype != np.int8:
        raise FormatError(f"weight_zero_point must be int32 (packed) or int8, got {dtype.name}")
    if zeros.size == 1:
        zeros = namespace_of(zeros, "weight_zero_point").full((n, groups), zeros.reshape(-1)[0])
    if zeros.ndim == 1:
        zeros = zeros[:, None]
    expect_matrix(zeros, "weight_zero_point", (n, groups), "(N, groups)")
    half = 1 << bits - 1
    wrong = (zeros < -half) | (zeros >= half)
    if bool(wrong.any()):
        at = first_position(wrong)
        raise FormatError(f"weight_zero_point must lie in {-half}..{half - 1}, got {int(zeros[at])} at {at}")
    return zeros.astype(np.int16)
