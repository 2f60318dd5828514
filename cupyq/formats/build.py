"""The last steps that all weight-only formats share: order the rows, bring codes into range, pack."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import BFLOAT16, FLOAT16, FLOAT32, Array, first_position, namespace_of
from ..errors import CupyqError, FormatError
from ..weights import QuantizedWeight, pack
from .groups import check_group_size, regroup, row_groups

SCHEMES = {2: "w2a16", 4: "w4a16", 8: "w8a16"}
"""Bits of a code -> scheme, where activations stay in 16 bits."""


def weight_only(
    codes: Array,
    scales: Array,
    zeros: Array | None,
    *,
    bits: int,
    group_size: int | None,
    g_idx: Array | None = None,
    symmetric: bool | None = None,
    scale_dtype: str | np.dtype | None = None,
) -> QuantizedWeight:
    """Pack unpacked tensors of a checkpoint, exactly or not at all.

    Parameters
    ----------
    codes : (K, N) uint8, each below 2**bits, rows in the checkpoint's order
    scales : (groups, N) float16, bfloat16 or float32, of either sign
    zeros : (groups, N) int16 in 0..2**bits, or None for 2**(bits - 1)
    g_idx : (K,) integers, optional
        The row of `scales` of each row of `codes`.
    symmetric : bool, optional
        True demands zeros of 2**(bits - 1), False keeps whatever zeros there are, None keeps them where they differ.
    """
    k = int(codes.shape[0])
    size = check_group_size(group_size, k, scales.shape[0])
    grouping = regroup(row_groups(g_idx, k, size, scales.shape[0]), size)
    middle = 1 << bits - 1
    if zeros is not None and symmetric is not False:
        same = zeros == middle
        if bool(same.all()):
            zeros = None
        elif symmetric:
            at = first_position(~same)
            raise FormatError(
                f"zero points must all be {middle} for a symmetric weight, got {int(zeros[at])} for group {at[0]}, "
                f"feature {at[1]}"
            )
    elif zeros is None and symmetric is False:
        zeros = namespace_of(codes, "codes").full(scales.shape, middle, dtype=np.int16)
    scales = stored_scales(scales, scale_dtype)
    xp = namespace_of(codes, "codes")
    if grouping.order is not None:
        codes = codes[xp.asarray(grouping.order)]
    if not np.array_equal(grouping.source, np.arange(scales.shape[0])):
        source = xp.asarray(grouping.source)
        scales = scales[source]
        zeros = None if zeros is None else zeros[source]
    codes, scales, zeros = _in_range(codes, scales, zeros, bits, grouping.group_size, grouping.source)
    return packed(codes, scales, zeros, scheme=SCHEMES[bits], group_size=grouping.group_size, perm=grouping.order)


def packed(codes: Array, scales: Array, zeros: Array | None = None, *, perm: Any = None, **how: Any) -> QuantizedWeight:
    """Call :func:`cupyq.pack`; what it refuses is a fault of the file."""
    xp = namespace_of(codes, "codes")
    try:
        return pack(codes, scales, zeros, perm=None if perm is None else xp.asarray(perm), **how)
    except FormatError:
        raise
    except CupyqError as error:
        raise FormatError(str(error)) from error


def stored_scales(scales: Array, scale_dtype: str | np.dtype | None) -> Array:
    """Return scales in float16 or bfloat16: as they are, or, of float32, in the first of the two that holds them all.

    With `scale_dtype` they are rounded to it.
    """
    dtype = np.dtype(scales.dtype)
    accepted = {"float16": FLOAT16, "bfloat16": BFLOAT16}
    wanted = None
    if scale_dtype is not None:
        name = scale_dtype if isinstance(scale_dtype, str) else np.dtype(scale_dtype).name
        if name not in accepted:
            raise FormatError(f"scale_dtype must be {' or '.join(map(repr, accepted))}, got {name!r}")
        wanted = accepted[name]
    if dtype not in (FLOAT16, BFLOAT16, FLOAT32):
        raise FormatError(f"scales must be float16, bfloat16 or float32, got {dtype.name}")
    if dtype == wanted or (wanted is None and dtype != FLOAT32):
        return scales
    xp = namespace_of(scales, "scales")
    wide = scales.astype(FLOAT32)
    with np.errstate(over="ignore"):
        if wanted is None:
            for candidate in accepted.values():
                narrow = scales.astype(candidate)
                if bool((narrow.astype(FLOAT32) == wide).all()):
                    return narrow
            raise FormatError(
                "scales are float32 that neither float16 nor bfloat16 holds exactly; "
                "scale_dtype='float16' or 'bfloat16' rounds them"
            )
        narrow = scales.astype(wanted)
    lost = xp.isfinite(wide) & (~xp.isfinite(narrow.astype(FLOAT32)) | ((narrow.astype(FLOAT32) == 0) & (wide != 0)))
    if bool(lost.any()):
        at = first_position(lost)
        raise FormatError(f"scales must fit {wanted}, got {float(wide[at])} for group {at[0]}, feature {at[1]}")
    return narrow


def _in_range(
    codes: Array, scales: Array, zeros: Array | None, bits: int, group_size: int, source: np.ndarray
) -> tuple[Array, Array, Array | None]:
    """Re-express groups whose zero point is one past the codes, or whose scale is negative. Exact.

    ``(q - 2**bits) s = ((q - 1) - (2**bits - 1)) s``, which needs q >= 1, and, with m = 2**bits - 1,
    ``(q - z) s = ((m - q) - (m - z)) (-s)``.
    """
    xp = namespace_of(codes, "codes")
    k = codes.shape[0]
    top = (1 << bits) - 1
    group_of_row = xp.arange(k) // (k if group_size == -1 else group_size)
    past = None if zeros is None else zeros > top
    if past is not None and bool(past.any()):
        rows = past[group_of_row]
        lost = rows & (codes == 0) & (scales != 0)[group_of_row]
        if bool(lost.any()):
            row, feature = first_position(lost)
            group = int(source[row // (k if group_size == -1 else group_size)])
            raise FormatError(
                f"zero points must lie in 0..{top}: that of group {group}, feature {feature} is {top + 1}, and the "
                "group holds code 0, so it cannot be shifted into range"
            )
        codes = codes - (rows & (codes > 0))
        zeros = xp.minimum(zeros, top)
    negative = scales.astype(FLOAT32) < 0
    if bool(negative.any()):
        if zeros is None:
            zeros = xp.full(scales.shape, 1 << bits - 1, dtype=np.int16)
        codes = xp.where(negative[group_of_row], np.uint8(top) - codes, codes)
        zeros = xp.where(negative, top - zeros, zeros)
        scales = scales.copy()
        scales.view(np.uint16)[negative] &= np.uint16(0x7FFF)
    return codes.astype(np.uint8, copy=False), scales, zeros


def expect_matrix(array: Array, name: str, shape: tuple[int, ...], what: str) -> None:
    """Raise `FormatError` unless `array` has this shape; `what` says it in letters."""
    namespace_of(array, name)
    if tuple(array.shape) != shape:
        raise FormatError(f"{name} must have shape {what} = {shape}, got {tuple(array.shape)}")
