"""What every operation means, in NumPy: the oracle of the tests, and the path that NumPy inputs take.

`matmul` accumulates in float64 and returns float64; `bound` says how far a kernel may be from it, and `compare` holds
a result against both. `product` is the one for users: float32 BLAS on blocks of dequantized weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import layout
from .activations import LARGEST_CODE, SMALLEST_SCALE, check_static_scale, check_zero, lopsided, safe_scale
from .arrays import (
    BFLOAT16,
    FLOAT8,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    Array,
    float8_decode,
    float8_encode,
    is_cupy,
    namespace_of,
)
from .errors import ArgumentError, DTypeError, ShapeError
from .weights import BLOCK, FP8_SCHEMES, QuantizedWeight, codes_of, column_sums, expect_weight, symmetric_zero

# 1024 products of two int8 codes sum to at most 2**24: float32 BLAS is exact on pieces of K this long.
_EXACT_K = 1024

# Output features dequantized at once: large enough for BLAS, small enough not to double the memory of a layer.
_BLOCK_STRIPS = 64

_UNIT_ROUNDOFF = {FLOAT16: 2.0**-11, BFLOAT16: 2.0**-8, FLOAT32: 2.0**-24, FLOAT64: 2.0**-53}
_LEAST_STEP = {FLOAT16: 2.0**-24, BFLOAT16: 2.0**-126, FLOAT32: 2.0**-126, FLOAT64: 0.0}
_LARGEST = {FLOAT16: 65504.0, BFLOAT16: float.fromhex("0x1.FEp127"), FLOAT32: float.fromhex("0x1.FFFFFEp127")}


# --- weights ----------------------------------------------------------------------------------------------------------


def dequantize(qw: QuantizedWeight, dtype: str | np.dtype = "float32") -> Array:
    """Return the weight that `qw` stands for, ``w[k, n] = (code - zero) * scale``.

    Parameters
    ----------
    qw : QuantizedWeight
    dtype : str or dtype
        float16, bfloat16, float32 (exact but for w8a8) or float64 (exact).

    Returns
    -------
    (K, N) of `dtype`, in the memory of `qw`; rows in the order of x's columns (act order is undone), multiplied by the
    factor of `qw.activations`, so that ``x @ w`` is what `qw` stands for
    """
    expect_weight(qw)
    dtype = _float_dtype(dtype)
    xp = namespace_of(qw.packed, "packed")
    wide = FLOAT64 if dtype == FLOAT64 else FLOAT32
    out = xp.empty((qw.k, qw.n), dtype=dtype)
    factor = qw.activations.factor
    if factor is not None:
        factor = (factor if qw.perm is None else factor[qw.perm]).astype(wide)[:, None]
    with np.errstate(over="ignore"):  # a weight beyond float16 is infinity, as on a GPU
        for columns, values in _column_blocks(qw, wide):
            if factor is not None:
                values *= factor
            if qw.perm is None:
                out[:, columns] = values.astype(dtype, copy=False)
            else:
                out[qw.perm, columns] = values.astype(dtype, copy=False)
    return out


def _float_dtype(dtype: str | np.dtype) -> np.dtype:
    found = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    if found not in _UNIT_ROUNDOFF:
        raise DTypeError(f"dtype must be float16, bfloat16, float32 or float64, got {found.name}")
    return found


def _column_blocks(qw: QuantizedWeight, dtype: np.dtype, scaled: bool = True) -> Iterator[tuple[slice, Array]]:
    """Yield (columns, (K, columns) weights of `dtype` in packed row order), a block of strips at a time."""
    count = layout.strips(qw.n)
    for first in range(0, count, _BLOCK_STRIPS):
        last = min(first + _BLOCK_STRIPS, count)
        columns = slice(first * layout.STRIP, min(last * layout.STRIP, qw.n))
        yield columns, _block(qw, first, last, columns.stop - columns.start, dtype, scaled)


def _block(qw: QuantizedWeight, first: int, last: int, columns: int, dtype: np.dtype, scaled: bool) -> Array:
    codes = codes_of(qw, first, last)
    values = float8_decode(codes).astype(dtype, copy=False) if qw.scheme in FP8_SCHEMES else codes.astype(dtype)
    if qw.weight_only and qw.zeros is None:
        values -= dtype.type(symmetric_zero(qw.scheme))
    size = qw.k if qw.group_size == -1 else qw.group_size
    whole = qw.k // size * size
    parts = [(values[:whole].reshape(-1, size, columns), slice(0, whole // size))] if whole else []
    if whole < qw.k:
        parts.append((values[None, whole:], slice(whole // size, qw.groups)))
    zeros = None if qw.zeros is None else layout.deinterleave(qw.zeros[first:last], columns).astype(dtype)
    scales = layout.deinterleave(qw.scales[first:last], columns).astype(dtype)
    for part, groups in parts:  # views of `values`
        if zeros is not None:
            part -= zeros[groups, None]
        if scaled:
            part *= scales[groups, None]
    return values


# --- activations ------------------------------------------------------------------------------------------------------


def quantize_activations(
    x: Array,
    scheme: str,
    scale: float | None = None,
    *,
    zero: int | None = None,
    symmetric: bool = True,
    factor: Array | None = None,
) -> tuple[Array, ...]:
    """Quantize activations to 8 bits, row by row.

    ``x_scale = max|row| / 127`` (int8) or ``/ 448`` (fp8) in float32, and ``code = x / x_scale``, rounded half to even
    and saturated. A row of zeros gets the scale 1. A row that holds NaN or infinity gets that as its scale, so the
    product's row is not finite either; int8 has no NaN and stores 0 for it.

    Asymmetric int8: with top and bottom of a row and 0, ``x_scale = top / 255 - bottom / 255``, ``x_zero = rint(-128 -
    bottom / x_scale)``, ``code = rint(x / x_scale + x_zero)``, and ``x`` is about ``(code - x_zero) * x_scale``.

    Parameters
    ----------
    x : (..., K) float16, bfloat16 or float32; NumPy or CuPy
    scheme : str
        "w8a8-int8", "w8a8-fp8" or "w8a8-fp8-block", which has a scale for every 128 k of a row.
    scale : float, optional
        A scale fixed beforehand, 2**-126 to 2**126, for every row (static quantization); codes saturate at -128..127
        or +-448. Not for "w8a8-fp8-block".
    zero : int, optional
        The zero point, -128..127, that goes with `scale`: int8 only.
    symmetric : bool
        False: int8 codes with a zero point a row.
    factor : (K,) of x's dtype, optional
        Multiplies the columns of x first, exactly (SmoothQuant; its weight is divided by it).

    Returns
    -------
    codes : (..., K) int8 or float8_e4m3fn (on CuPy its bit patterns as uint8)
    x_scale : (...,) float32; "w8a8-fp8-block": (..., ceil(K/128))
    x_zero : (...,) int32
        Only if `zero` is given or `symmetric` is False.
    """
    if scheme not in LARGEST_CODE:
        raise ArgumentError(f"scheme must be {' or '.join(map(repr, LARGEST_CODE))}, got {scheme!r}")
    xp = namespace_of(x, "x")
    if np.dtype(x.dtype) not in (FLOAT16, BFLOAT16, FLOAT32):
        raise DTypeError(f"x must be float16, bfloat16 or float32, got {np.dtype(x.dtype).name}")
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ShapeError(f"x must have shape (..., K) with K >= 1, got {tuple(x.shape)}")
    offset = zero is not None or not symmetric
    if offset and scheme != "w8a8-int8":
        raise ArgumentError(f"{'symmetric=False' if zero is None else 'zero'}: codes of {scheme} have no zero points")
    wide = x.astype(np.float32)
    if factor is not None:
        if tuple(factor.shape) != x.shape[-1:] or np.dtype(factor.dtype) != np.dtype(x.dtype):
            raise ShapeError(
                f"factor must have shape {tuple(x.shape[-1:])} and x's dtype {np.dtype(x.dtype).name}, "
                f"got {tuple(factor.shape)} {np.dtype(factor.dtype).name}"
            )
        with np.errstate(over="ignore"):
            wide = wide * factor.astype(np.float32)
    if np.dtype(x.dtype) != FLOAT16:  # GPUs take subnormal float32 values as zero
        wide = xp.where(xp.abs(wide) < np.float32(SMALLEST_SCALE), np.float32(0), wide)
    x_zero = None
    if scale is not None:
        x_scale, x_zero = _fixed_scale(x, scheme, scale, zero, symmetric, xp)
    elif zero is not None:
        raise ArgumentError("zero: it needs the scale that goes with it")
    elif symmetric:
        largest = _row_maximum(xp.abs(wide), scheme, xp)
        x_scale = safe_scale(largest / np.float32(LARGEST_CODE[scheme]), xp)
    else:
        x_scale, x_zero = lopsided(wide, xp)
    step = xp.repeat(x_scale, BLOCK, axis=-1)[..., : x.shape[-1]] if scheme == "w8a8-fp8-block" else x_scale[..., None]
    with np.errstate(invalid="ignore", over="ignore"):  # inf / inf; x / a static scale
        steps = wide / step
    if scheme in FP8_SCHEMES:
        bits = float8_encode(steps)
        return (bits if is_cupy(bits) else bits.view(FLOAT8)), x_scale
    if x_zero is not None:
        steps = steps + x_zero[..., None].astype(np.float32)
    steps = xp.where(xp.isnan(steps), np.float32(0), steps)
    codes = xp.clip(xp.rint(steps), -128, 127).astype(np.int8)
    return (codes, x_scale) if x_zero is None else (codes, x_scale, x_zero)


def _row_maximum(magnitudes: Array, scheme: str, xp: Any) -> Array:
    """Return the largest magnitude of each row, or of each 128 k of it."""
    if scheme != "w8a8-fp8-block":
        return magnitudes.max(axis=-1)
    k = magnitudes.shape[-1]
    blocks = -(-k // BLOCK)
    padded = xp.zeros((*magnitudes.shape[:-1], blocks * BLOCK), np.float32)
    padded[..., :k] = magnitudes
    return padded.reshape(*magnitudes.shape[:-1], blocks, BLOCK).max(axis=-1)


def _fixed_scale(
    x: Array, scheme: str, scale: float, zero: int | None, symmetric: bool, xp: Any
) -> tuple[Array, Array | None]:
    if scheme == "w8a8-fp8-block":
        raise ArgumentError("scale: w8a8-fp8-block has a scale for every 128 k of a row")
    x_scale = xp.full(x.shape[:-1], check_static_scale(scale), dtype=np.float32)
    if zero is None:
        if not symmetric:
            raise ArgumentError("symmetric=False: a scale fixed beforehand needs its zero point, zero")
        return x_scale, None
    return x_scale, xp.full(x.shape[:-1], check_zero(zero), dtype=np.int32)


def activation_codes(x: Array, qw: QuantizedWeight) -> tuple[Array, Array, Array | None]:
    """Return (codes, x_scale, x_zero or None) of x, quantized by the rule of a w8a8 weight."""
    rule = qw.activations
    made = quantize_activations(
        x, qw.scheme, rule.scale, zero=rule.zero, symmetric=rule.symmetric, factor=rule.factor_as(np.dtype(x.dtype))
    )
    return made if len(made) == 3 else (*made, None)


# --- products ---------------------------------------------------------------------------------------------------------


def _rows(x: np.ndarray, qw: QuantizedWeight) -> np.ndarray:
    """Return x as (M, K), columns in packed order."""
    expect_weight(qw)
    if x.ndim == 0 or x.shape[-1] != qw.k:
        raise ShapeError(f"x must have shape (..., {qw.k}) to match the weight's K, got {tuple(x.shape)}")
    rows = x.reshape(-1, qw.k)
    return rows if qw.perm is None else rows[:, qw.perm]


def matmul(
    x: np.ndarray,
    qw: QuantizedWeight,
    bias: np.ndarray | None = None,
    *,
    x_scale: np.ndarray | None = None,
    x_zero: np.ndarray | None = None,
) -> np.ndarray:
    """Return what ``x @ w + bias`` means, accumulated in float64.

    Parameters
    ----------
    x : (..., K)
        Any float dtype. For w8a8, :func:`quantize_activations` is applied first, by the rule `qw.activations`; or its
        codes, with `x_scale`.
    qw : QuantizedWeight, NumPy
    bias : (N,), optional
    x_scale : (...,) float32, optional
        w8a8: x is quantized already, and these are its scales; "w8a8-fp8-block": (..., ceil(K/128)).
    x_zero : (...,) int32, optional
        w8a8-int8 with `x_scale`: the zero points of x.

    Returns
    -------
    (..., N) float64
    """
    expect_weight(qw)
    if qw.weight_only or qw.scheme == "w8a8-fp8-block":
        wide = x.astype(np.float64) if qw.weight_only else _block_activations(x, qw, x_scale, FLOAT64)
        rows = _rows(wide, qw)
        y = np.empty((rows.shape[0], qw.n))
        with np.errstate(invalid="ignore"):
            for columns, values in _column_blocks(qw, FLOAT64):
                y[:, columns] = rows @ values
    else:
        codes, x_scale, x_zero = activation_codes(x, qw) if x_scale is None else (x, x_scale, x_zero)
        sums = accumulate(codes, qw).reshape(-1, qw.n)
        if x_zero is not None:
            sums = sums - x_zero.reshape(-1, 1).astype(np.int64) * column_sums(qw)
        with np.errstate(invalid="ignore"):  # a row with an infinite scale: 0 * inf is NaN
            y = sums * x_scale.reshape(-1, 1).astype(np.float64)
            y *= layout.deinterleave(qw.scales, qw.n).astype(np.float64)
    if bias is not None:
        y = y + bias.astype(np.float64)
    return y.reshape(*x.shape[:-1], qw.n)


def _block_activations(x: np.ndarray, qw: QuantizedWeight, x_scale: np.ndarray | None, dtype: np.dtype) -> np.ndarray:
    """Return activations with a scale for every 128 k, quantized and scaled back, in `dtype`."""
    codes, x_scale = activation_codes(x, qw)[:2] if x_scale is None else (x, x_scale)
    scales = np.repeat(x_scale.astype(dtype), BLOCK, axis=-1)[..., : qw.k]
    with np.errstate(invalid="ignore", over="ignore"):
        return float8_decode(codes).astype(dtype) * scales


def accumulate(codes: np.ndarray, qw: QuantizedWeight) -> np.ndarray:
    """Return the unscaled sums of products of 8-bit codes: (..., N).

    int8: int64, exact, however long K is. fp8: float64.
    """
    rows = _rows(codes, qw)
    if qw.scheme == "w8a8-int8":
        y = np.zeros((rows.shape[0], qw.n))
        for columns, values in _column_blocks(qw, FLOAT32, scaled=False):
            for start in range(0, qw.k, _EXACT_K):
                piece = slice(start, start + _EXACT_K)
                y[:, columns] += rows[:, piece].astype(np.float32) @ values[piece]
        return y.astype(np.int64).reshape(*codes.shape[:-1], qw.n)
    wide = float8_decode(rows).astype(np.float64)
    y = np.empty((rows.shape[0], qw.n))
    for columns, values in _column_blocks(qw, FLOAT64, scaled=False):
        y[:, columns] = wide @ values
    return y.reshape(*codes.shape[:-1], qw.n)


def product(
    x: np.ndarray,
    qw: QuantizedWeight,
    bias: np.ndarray | None = None,
    *,
    x_scale: np.ndarray | None = None,
    x_zero: np.ndarray | None = None,
    dtype: np.dtype | None = None,
) -> np.ndarray:
    """Return ``x @ w + bias`` in `dtype` (x's own by default), fast: float32 BLAS, a block of features at a time.

    w8a8-int8 sums are exact. Otherwise like :func:`matmul`, whose arguments it shares.
    """
    expect_weight(qw)
    dtype = np.dtype(x.dtype) if dtype is None else dtype
    y: np.ndarray
    if qw.weight_only or qw.scheme == "w8a8-fp8-block":
        if qw.scheme == "w8a8-fp8-block":
            x = _block_activations(x, qw, x_scale, FLOAT32)
        # C order whatever x has: BLAS adds up in another order for another layout, and a view must equal its copy.
        rows = _rows(x, qw).astype(np.float32, order="C")
        y = np.empty((rows.shape[0], qw.n), dtype=np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for columns, values in _column_blocks(qw, FLOAT32):
                np.matmul(rows, values, out=y[:, columns])
    else:
        codes, x_scale, x_zero = activation_codes(x, qw) if x_scale is None else (x, x_scale, x_zero)
        sums = accumulate(codes, qw) if qw.scheme == "w8a8-int8" else _float8_sums(codes, qw)
        if x_zero is not None:
            sums = sums - x_zero[..., None].astype(np.int64) * column_sums(qw)
        with np.errstate(over="ignore", invalid="ignore"):
            y = sums.reshape(-1, qw.n) * x_scale.reshape(-1, 1).astype(np.float64)
            y *= layout.deinterleave(qw.scales, qw.n)
    with np.errstate(over="ignore", invalid="ignore"):
        if bias is not None:
            y += bias.astype(y.dtype)
        return y.astype(dtype).reshape(*x.shape[:-1], qw.n)


def _float8_sums(codes: np.ndarray, qw: QuantizedWeight) -> np.ndarray:
    rows = np.ascontiguousarray(float8_decode(_rows(codes, qw)))
    y = np.empty((rows.shape[0], qw.n), dtype=np.float32)
    for columns, values in _column_blocks(qw, FLOAT32, scaled=False):
        np.matmul(rows, values, out=y[:, columns])
    return y


# --- how far a kernel may be off --------------------------------------------------------------------------------------


def bound(
    x: np.ndarray,
    qw: QuantizedWeight,
    dtype: str | np.dtype,
    bias: np.ndarray | None = None,
    *,
    x_scale: np.ndarray | None = None,
    x_zero: np.ndarray | None = None,
    scaled_weights: bool = False,
    accumulator_bits: int = 24,
    promote_k: int = 128,
    likely: bool = False,
) -> np.ndarray:
    """Return how far a right kernel's result may be from :func:`matmul`, element by element.

    With u = 2**-24 (float32) and A = |x| @ |w|, the terms are:

    - accumulation, ``gamma(K + 16) * A`` with ``gamma(n) = n u / (1 - n u)``: any order of K additions in float32
      (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1; products of 16-bit floats and
      integer codes are exact), and 16 more for scales, splits and warps. Tensor cores that truncate stay within it:
      they round once per 4 to 16 products. int8 sums are exact: ``4 u |y|`` for conversion and scales.
    - weights scaled in 16 bits before the product: ``v A`` with v the unit roundoff of `dtype`, and half of its
      smallest step for each \\|x\\|.
    - fp8 tensor cores that keep fewer bits (about 14 on Hopper and Ada) and hand over to float32 every `promote_k`,
      an instruction for each 32 k: ``ceil(promote_k / 32) * 2**(1 - accumulator_bits) * A``. A model, not a theorem.
    - bias, one float32 addition: ``u (|y| + |bias|)``.
    - rounding of the result to `dtype`: ``v |y|``, at least half of its smallest step.

    Parameters
    ----------
    x, qw, bias, x_scale, x_zero
        As for :func:`matmul`.
    dtype : str or dtype
        float16, bfloat16 or float32: of the result.
    scaled_weights : bool
        The kernel multiplies weights by scales in `dtype`.
    accumulator_bits : int
        Significant bits of fp8 accumulators within `promote_k`: 24, or 14 on GPUs that keep no more.
    promote_k : int
        k summed in an fp8 accumulator of fewer bits before float32 takes over (`W8A8Config.tensor_k` of a config); 0,
        or more than K, is all of K.
    likely : bool
        Replace K in gamma by ``8 sqrt(K)``: what rounding errors of mean zero stay under with overwhelming
        probability (Higham and Mary, 2019). For data of random signs; catches far smaller faults.

    Returns
    -------
    (..., N) float64, positive
    """
    dtype = _float_dtype(dtype)
    y = np.abs(matmul(x, qw, x_scale=x_scale, x_zero=x_zero))
    u, v, step = 2.0**-24, _UNIT_ROUNDOFF[dtype], _LEAST_STEP[dtype]
    if qw.scheme == "w8a8-int8":
        error = 4 * u * y
    else:
        size = _absolute_product(x, qw, x_scale)
        steps = (min(8 * np.sqrt(qw.k), qw.k) if likely else qw.k) + 16
        error = steps * u / (1 - steps * u) * size
        if qw.scheme in FP8_SCHEMES and accumulator_bits < 24:
            summed = min(promote_k, qw.k) if promote_k else qw.k
            error += -(-summed // 32) * 2.0 ** (1 - accumulator_bits) * size
        if scaled_weights:
            reach = np.abs(x.reshape(-1, qw.k).astype(np.float64)).sum(axis=1).reshape(*x.shape[:-1], 1)
            error += v * size + step / 2 * reach
    error += qw.k * 2.0**-126  # each addition may flush a subnormal
    if bias is not None:
        exact = np.abs(matmul(x, qw, bias, x_scale=x_scale, x_zero=x_zero))
        error += u * (y + np.abs(bias.astype(np.float64)) + error)
        y = exact
    return error + np.maximum(v * (y + error), step / 2)


def _absolute_product(x: np.ndarray, qw: QuantizedWeight, x_scale: np.ndarray | None) -> np.ndarray:
    """Return |x| @ |w| in float64, with x as the kernel sees it (quantized, for w8a8)."""
    if qw.weight_only:
        rows = np.abs(_rows(x, qw).astype(np.float64))
    elif qw.scheme == "w8a8-fp8-block":
        rows = np.abs(_rows(_block_activations(x, qw, x_scale, FLOAT64), qw))
    else:
        codes, x_scale = activation_codes(x, qw)[:2] if x_scale is None else (x, x_scale)
        values = float8_decode(codes) if qw.scheme == "w8a8-fp8" else codes
        rows = np.abs(_rows(values.astype(np.float64) * x_scale[..., None].astype(np.float64), qw))
    y = np.empty((rows.shape[0], qw.n))
    for columns, weights in _column_blocks(qw, FLOAT64):
        y[:, columns] = rows @ np.abs(weights)
    return y.reshape(*x.shape[:-1], qw.n)


@dataclass(frozen=True)
class Comparison:
    """How a result stands against the reference and its bound.

    Attributes
    ----------
    worst : float
        Largest ``|got - want| / bound``; infinite where `got` is NaN or an unwarranted infinity. 0 for empty results.
    at : tuple of int
        Where that is.
    got, want, bound : float
        The three values there.
    """

    worst: float
    at: tuple[int, ...]
    got: float
    want: float
    bound: float

    @property
    def ok(self) -> bool:
        """Whether every element lies within its bound."""
        return self.worst <= 1

    def __str__(self) -> str:
        relation = "within" if self.ok else "outside"
        return (
            f"{relation} the bound: at {self.at} got {self.got:.9g}, want {self.want:.9g} +- {self.bound:.3g} "
            f"({self.worst:.3g} of the bound)"
        )


def compare(got: np.ndarray, want: np.ndarray, limit: np.ndarray) -> Comparison:
    """Hold a kernel's result against :func:`matmul` and :func:`bound`.

    An infinity is right where ``|want| + limit`` rounds to one in the dtype of `got`; NaN is right where `want` is NaN.

    Parameters
    ----------
    got : (..., N) float16, bfloat16 or float32
    want, limit : (..., N) float64
    """
    if got.shape != want.shape:
        raise ShapeError(f"got has shape {got.shape}, want has {want.shape}")
    if got.size == 0:
        return Comparison(0.0, (), 0.0, 0.0, 0.0)
    largest = _LARGEST[np.dtype(got.dtype)]
    overflow = largest * (1 + _UNIT_ROUNDOFF[np.dtype(got.dtype)])
    values = got.astype(np.float64)
    with np.errstate(invalid="ignore"):
        ratio = np.abs(values - want) / limit
        infinite = np.isinf(values) & (np.sign(values) == np.sign(want)) & (np.abs(want) + limit >= overflow)
    ratio = np.where(infinite | (np.isnan(values) & np.isnan(want)), 0.0, ratio)
    ratio = np.where(np.isnan(ratio), np.inf, ratio)
    at = tuple(int(i) for i in np.unravel_index(int(ratio.argmax()), ratio.shape))
    return Comparison(float(ratio[at]), at, float(values[at]), float(want[at]), float(limit[at]))
