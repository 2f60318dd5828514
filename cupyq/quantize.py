"""Float matrix -> codes, scales and zero points, for NumPy and CuPy alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from .activations import DYNAMIC, Activations
from .arrays import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    FLOAT_DTYPES,
    FP8_MAX,
    Array,
    common_namespace,
    first_position,
    float8_decode,
    float8_encode,
    namespace_of,
    on_its_device,
)
from .errors import ArgumentError, DTypeError, ShapeError
from .weights import (
    BLOCK,
    FP8_SCHEMES,
    WEIGHT_ONLY,
    QuantizedWeight,
    check_group_size,
    check_scheme,
    group_count,
    pack,
    symmetric_zero,
)

CLIP_RATIOS = tuple(float(r) for r in np.linspace(1.0, 0.3, 29))
"""Shares of a group's range that ``clip="search"`` tries: 1.0, 0.975, ..., 0.3."""

# Elements of w worked on at once; some ten float arrays of this size are alive while searching.
_BLOCK_ELEMENTS = 1 << 19


@dataclass(frozen=True)
class _Grid:
    """The numbers that codes of a scheme stand for, before scaling.

    Attributes
    ----------
    low, high : float
        Range of ``code - zero`` of a symmetric weight.
    levels : int
        Steps of the asymmetric grid; 0 where the zero point is fixed.
    scale_dtype : dtype
        In which the scales are stored.
    """

    low: float
    high: float
    levels: int
    scale_dtype: np.dtype

    @property
    def tiny(self) -> float:
        """Smallest scale stored for a group with non-zero weights.

        float16 keeps its subnormals everywhere; GPUs flush smaller float32 and bfloat16 values than these to zero.
        """
        return 2.0**-24 if self.scale_dtype == FLOAT16 else 2.0**-126

    @property
    def largest(self) -> float:
        """Largest finite value of `scale_dtype`."""
        if self.scale_dtype == FLOAT16:
            return 65504.0
        return float.fromhex("0x1.FEp+127" if self.scale_dtype == BFLOAT16 else "0x1.FFFFFEp+127")


@on_its_device
def quantize(
    w: Array,
    scheme: str = "w4a16",
    group_size: int | None = 128,
    symmetric: bool = True,
    *,
    clip: str = "none",
    scale_dtype: str | np.dtype | None = None,
    activations: Activations = DYNAMIC,
) -> QuantizedWeight:
    """Quantize a float weight by rounding to nearest.

    Codes are rounded against the scale as it is stored, so they are the best ones for that scale. A group of zeros
    dequantizes to exact zeros.

    Parameters
    ----------
    w : (K, N) float16, bfloat16, float32 or float64; NumPy or CuPy, any strides
        K input features (the reduced axis), N output features. K need not fill its last group.
    scheme : str
        "w4a16" (4-bit codes), "w2a16", "w8a16": for activations in 16 bits. "w8a8-int8", "w8a8-fp8": 8-bit codes with
        one float32 scale an output feature, for activations that are quantized on the fly. "w8a8-fp8-block": one
        float32 scale for 128 k by 128 features, for activations with a scale for every 128 k of a token.
    group_size : int, optional
        Consecutive k that share a scale: 16, 32, 64, 128 or 256, or -1 for the whole column. w8a8 always has one
        scale a column (-1).
    symmetric : bool
        True fixes the zero point in the middle of the codes (8 of 0..15) and takes the smallest scale that clips no
        weight, ``max(max(w) / 7, -min(w) / 8)`` for 4 bits; False stores an integer zero point a group and the scale
        ``(max(w, 0) - min(w, 0)) / 15``. w8a8 is always symmetric.
    clip : str
        "none" covers the whole range of each group. "search" also tries the shares `CLIP_RATIOS` of it and keeps,
        group by group, the one with the least squared error against w: about 30 times slower, never worse.
    scale_dtype : str or dtype, optional
        "float16" (default) or "bfloat16"; w8a8 stores float32.
    activations : Activations
        w8a8: how activations are quantized; by default each token gets a scale when it arrives. With a factor
        (SmoothQuant) w is divided by it here.

    Returns
    -------
    QuantizedWeight
        In the memory of `w`.

    Raises
    ------
    DTypeError, ShapeError, ArgumentError
        `w` is no float matrix, holds NaN or infinity (the message says where), or needs a scale beyond the largest
        of `scale_dtype`; or an option is unknown.
    """
    check_scheme(scheme)
    group_size = check_group_size(group_size, scheme)
    if clip not in ("none", "search"):
        raise ArgumentError(f"clip must be 'none' or 'search', got {clip!r}")
    if not symmetric and scheme not in WEIGHT_ONLY:
        raise ArgumentError(f"symmetric must be True for {scheme}: its codes have no zero points")
    rule = _rule(scheme, bool(symmetric), _scale_dtype(scale_dtype, scheme))
    xp = namespace_of(w, "w")
    if np.dtype(w.dtype) not in FLOAT_DTYPES:
        raise DTypeError(f"w must be {', '.join(d.name for d in FLOAT_DTYPES)}, got {np.dtype(w.dtype).name}")
    if w.ndim != 2 or w.shape[0] == 0:
        raise ShapeError(f"w must have shape (K, N) with K >= 1, got {tuple(w.shape)}")
    k, n = map(int, w.shape)
    if not isinstance(activations, Activations):
        raise ArgumentError(f"activations must be a cupyq.Activations, got {type(activations).__name__}")
    activations.check(scheme, k)
    common_namespace(w=w, factor=activations.factor)
    groups = group_count(k, group_size)
    size = k if group_size == -1 else group_size
    codes = xp.empty((k, n), dtype=np.uint8 if scheme != "w8a8-int8" else np.int8)
    scales = xp.empty((groups, n), dtype=rule.scale_dtype)
    zeros = None if symmetric else xp.empty((groups, n), dtype=np.uint8)
    ratios = CLIP_RATIOS if clip == "search" else (1.0,)
    for columns in _column_blocks(k, n, BLOCK if scheme == "w8a8-fp8-block" else 16):
        block = _smoothed(_finite(w[:, columns], columns.start, xp), activations.factor, xp)
        whole = k // size * size
        parts = [(slice(0, whole), slice(0, whole // size), size)] if whole else []
        if whole < k:  # a last group that K does not fill
            parts.append((slice(whole, k), slice(whole // size, groups), k - whole))
        for rows, grid, depth in parts:
            part = block[rows].reshape(-1, depth, block.shape[1])  # group, k in group, n
            q, s, z = _best(part, rule, scheme, ratios, xp)
            codes[rows, columns] = q.reshape(-1, block.shape[1])
            scales[grid, columns] = s
            if zeros is not None:
                zeros[grid, columns] = z
    return pack(codes, scales, zeros, scheme=scheme, group_size=group_size, activations=activations)


def _rule(scheme: str, symmetric: bool, scale_dtype: np.dtype) -> _Grid:
    if scheme == "w8a8-int8":
        return _Grid(-127, 127, 0, scale_dtype)
    if scheme in FP8_SCHEMES:
        return _Grid(-FP8_MAX, FP8_MAX, 0, scale_dtype)
    middle = symmetric_zero(scheme)
    return _Grid(-middle, middle - 1, 0 if symmetric else 2 * middle - 1, scale_dtype)


def _scale_dtype(given: str | np.dtype | None, scheme: str) -> np.dtype:
    accepted = {"float16": FLOAT16, "bfloat16": BFLOAT16} if scheme in WEIGHT_ONLY else {"float32": FLOAT32}
    if given is None:
        return next(iter(accepted.values()))
    name = given if isinstance(given, str) else np.dtype(given).name
    if name not in accepted:
        raise DTypeError(f"scale_dtype must be {' or '.join(map(repr, accepted))} for {scheme}, got {name!r}")
    return accepted[name]


def _column_blocks(k: int, n: int, of: int) -> Iterator[slice]:
    step = max(1, _BLOCK_ELEMENTS // k // of) * of
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def _finite(block: Array, start: int, xp: ModuleType) -> Array:
    """Return a block of w in float32, or float64 if w is; raise where it is not finite."""
    wide = block.astype(FLOAT64 if np.dtype(block.dtype) == FLOAT64 else FLOAT32)
    bad = ~xp.isfinite(wide)
    if bad.any():
        row, column = first_position(bad)
        raise ArgumentError(f"w must be finite, got {float(wide[row, column])} at {(row, start + column)}")
    return wide


def _smoothed(block: Array, factor: Array | None, xp: ModuleType) -> Array:
    """Return a block of w divided by the factors of its rows."""
    if factor is None:
        return block
    with np.errstate(over="ignore"):
        block = block / factor.astype(block.dtype)[:, None]
    bad = ~xp.isfinite(block)
    if bool(bad.any()):
        row, _ = first_position(bad)
        raise ArgumentError(f"w divided by activations.factor must be finite, it overflows in row {row}")
    return block


def _best(
    part: Array, rule: _Grid, scheme: str, ratios: tuple[float, ...], xp: ModuleType
) -> tuple[Array, Array, Array | None]:
    """Quantize (groups, depth, n) weights with the ratio of least squared error.

    Returns codes (groups, depth, n), scales (groups, n) in their stored dtype, zeros (groups, n) or None.
    """
    top, bottom = part.max(axis=1), part.min(axis=1)
    block = scheme == "w8a8-fp8-block"
    if block:
        top, bottom = _over_blocks(top, xp.max, xp), _over_blocks(bottom, xp.min, xp)
    scale, zero = _scale_and_zero(top, bottom, rule, False, xp)
    codes, values = _codes(part, scale, zero, rule, scheme, xp)
    if len(ratios) == 1:
        return codes, scale, zero
    unit = _wide(scale, part)  # errors are compared in steps of the unclipped scale: their squares stay in range
    target = part / unit[:, None]
    least = _error(values - target, block, xp)
    for ratio in ratios[1:]:
        other_scale, other_zero = _scale_and_zero(top * ratio, bottom * ratio, rule, True, xp)
        other_codes, values = _codes(part, other_scale, other_zero, rule, scheme, xp)
        error = _error(values * (_wide(other_scale, part) / unit)[:, None] - target, block, xp)
        better = error < least
        least = xp.where(better, error, least)
        codes = xp.where(better[:, None], other_codes, codes)
        scale = _where_bits(better, other_scale, scale, xp)
        if zero is not None:
            zero = xp.where(better, other_zero, zero)
    return codes, scale, zero


def _error(difference: Array, block: bool, xp: ModuleType) -> Array:
    """Return the squared error of each group: (groups, n), the same for all features that share a scale."""
    error = xp.square(difference).sum(axis=1)
    return _over_blocks(error, xp.sum, xp) if block else error


def _over_blocks(values: Array, combine: Any, xp: ModuleType) -> Array:
    """Combine (groups, n) values over each 128 features, and give each feature what its block got."""
    out = xp.empty_like(values)
    for start in range(0, values.shape[1], BLOCK):
        columns = slice(start, start + BLOCK)
        out[:, columns] = combine(values[:, columns], axis=1, keepdims=True)
    return out


def _wide(scale: Array, like: Array) -> Array:
    return scale.astype(like.dtype)


def _where_bits(mask: Array, yes: Array, no: Array, xp: ModuleType) -> Array:
    """`xp.where` by bit patterns, which keeps bfloat16 whatever the array module promotes it to."""
    bits = np.uint16 if yes.dtype.itemsize == 2 else np.uint32
    return xp.where(mask, yes.view(bits), no.view(bits)).view(yes.dtype)


def _scale_and_zero(
    top: Array, bottom: Array, rule: _Grid, clipped: bool, xp: ModuleType
) -> tuple[Array, Array | None]:
    """Return the stored scale, and the zero point of an asymmetric group, for weights in [bottom, top]."""
    if rule.levels:
        top, bottom = xp.maximum(top, 0), xp.minimum(bottom, 0)
        wanted = top / rule.levels - bottom / rule.levels  # a difference first could overflow
    else:
        wanted = xp.maximum(top / rule.high, bottom / rule.low)
    empty = (top == 0) & (bottom == 0)
    if (wanted > rule.largest).any():
        raise ArgumentError(
            f"w needs a scale of {float(wanted.max()):.3g}, above the largest {rule.scale_dtype.name} "
            f"({rule.largest:.6g}); divide w by a constant" + _wider(rule)
        )
    scale = xp.maximum(wanted, rule.tiny).astype(rule.scale_dtype)
    if rule.scale_dtype == FLOAT16 and not clipped:
        # Among float16's subnormals the nearest scale can be too small by up to a third: take the next one up where
        # the group would be clipped by more than half a step.
        step = (rule.levels + 0.5) / rule.levels if rule.levels else (rule.high + 0.5) / rule.high
        short = wanted > _wide(scale, wanted) * step
        scale = (scale.view(np.uint16) + short.astype(np.uint16)).view(FLOAT16)
    one = xp.ones_like(wanted).astype(rule.scale_dtype)
    scale = _where_bits(empty, one, scale, xp)  # zeros: any scale will do, and 1 divides safely
    if not rule.levels:
        return scale, None
    zero = xp.clip(xp.rint(-bottom / _wide(scale, bottom)), 0, rule.levels)
    return scale, zero.astype(np.uint8)


def _wider(rule: _Grid) -> str:
    return " or take scale_dtype='bfloat16'" if rule.scale_dtype == FLOAT16 else ""


def _codes(
    part: Array, scale: Array, zero: Array | None, rule: _Grid, scheme: str, xp: ModuleType
) -> tuple[Array, Array]:
    """Return (stored codes, the values ``code - zero`` they stand for) of (groups, depth, n) weights."""
    steps = part / _wide(scale, part)[:, None]
    if scheme in FP8_SCHEMES:
        bits = float8_encode(steps.astype(np.float32))
        return bits, float8_decode(bits)
    steps = xp.rint(steps)
    if zero is not None:
        offset = zero[:, None].astype(part.dtype)
        stored = xp.clip(steps + offset, 0, rule.levels)
        return stored.astype(np.uint8), stored - offset
    steps = xp.clip(steps, rule.low, rule.high)
    if scheme == "w8a8-int8":
        return steps.astype(np.int8), steps
    return (steps + symmetric_zero(scheme)).astype(np.uint8), steps
