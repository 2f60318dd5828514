"""GPTQ: codes packed along K in natural order, zero points stored less one (version 1) or as they are (version 2)."""

from __future__ import annotations

import numpy as np

from ..arrays import Array, common_namespace, first_position
from ..errors import FormatError
from ..weights import QuantizedWeight
from .build import expect_matrix, weight_only
from .words import check_bits, check_words, unpack_columns, unpack_rows

VERSIONS = ("v1", "v2")
OVERFLOWS = ("error", "wrap", "keep", "carry")
_BITS = (2, 4, 8)


def from_gptq(
    qweight: Array,
    qzeros: Array,
    scales: Array,
    g_idx: Array | None = None,
    *,
    bits: int = 4,
    version: str = "v1",
    group_size: int | None = None,
    symmetric: bool | None = None,
    overflow: str = "error",
    scale_dtype: str | np.dtype | None = None,
) -> QuantizedWeight:
    """Convert one layer of a GPTQ checkpoint.

    A word of `qweight` holds successive rows (K), one of `qzeros` successive features (N), the first in its lowest
    bits: of four bits, ``0x76543210`` is 0..7.

    Arrays are NumPy's, or CuPy's of one device, where the weight then lives too.

    Parameters
    ----------
    qweight : (K * bits / 32, N) int32
    qzeros : (groups, ceil(N * bits / 32)) int32
        ``zero - 1`` in version 1, ``zero`` in version 2.
    scales : (groups, N) float16, bfloat16 or float32
    g_idx : (K,) integers, optional
        The group of each row. None, or all -1: rows in plain order. A slice of K keeps `scales` and `qzeros` whole and
        takes its part of `g_idx`.
    bits : int
        2, 4 or 8.
    version : str
        "v1" (also written "gptq") or "v2" ("gptq_v2").
    group_size : int, optional
        Rows of a group, -1 for all; None reads it off the shapes. Groups of sizes that cupyq lacks become several of a
        size it has, with equal scales.
    symmetric : bool, optional
        True demands that all zero points are 2**(bits - 1). False keeps zero points whatever they are. None (default)
        drops them where all are 2**(bits - 1).
    overflow : str
        What the largest stored zero point of version 1 (15 of 4 bits) means. Packers store a zero point of 0 as 0 - 1,
        and readers disagree on what comes back, so "error" (default) refuses. "wrap": 0. "keep": 16; such groups are
        shifted by one code where none of their codes is 0, and refused where one is. "carry": one is added to a word
        as a whole, so that a borrow taken from the next feature is paid back.
    scale_dtype : str or dtype, optional
        "float16" or "bfloat16" rounds scales to it. None keeps them, and float32 scales must be exact in one of these.

    Returns
    -------
    QuantizedWeight
        "w2a16", "w4a16" or "w8a16", with `perm` where rows had to move.

    Raises
    ------
    FormatError
        Shapes, dtypes or values do not fit each other or the format; all zero points are those of a symmetric weight
        of the other version; or the weight cannot be held exactly.
    """
    check_bits(bits, _BITS)
    if version not in VERSIONS:
        raise FormatError(f"version must be 'v1' or 'v2', got {version!r}")
    if overflow not in OVERFLOWS:
        raise FormatError(f"overflow must be {', '.join(map(repr, OVERFLOWS))}, got {overflow!r}")
    common_namespace(qweight=qweight, qzeros=qzeros, scales=scales)
    words, zero_words = check_words(qweight, "qweight"), check_words(qzeros, "qzeros")
    if scales.ndim != 2 or scales.shape[0] == 0:
        raise FormatError(f"scales must have shape (groups, N), got {tuple(scales.shape)}")
    groups, n = map(int, scales.shape)
    if words.shape[1] != n or words.shape[0] == 0:
        like_awq = words.shape[1] * 32 == n * bits
        raise FormatError(
            f"qweight must have shape (K * {bits} / 32, N) with N={n} as in scales, got {tuple(qweight.shape)}"
            + ("; this is the shape of an AWQ weight (K, N * bits / 32)" if like_awq else "")
        )
    expect_matrix(qzeros, "qzeros", (groups, -(-n * bits // 32)), f"(groups, ceil(N * {bits} / 32))")
    codes = unpack_rows(words, bits, words.shape[0] * (32 // bits))
    zeros = _zeros(zero_words, bits, n, version, overflow)
    _refuse_other_version(zeros, bits, version, symmetric)
    return weight_only(
        codes,
        scales,
        zeros,
        bits=bits,
        group_size=group_size,
        g_idx=g_idx,
        symmetric=symmetric,
        scale_dtype=scale_dtype,
    )


def _zeros(words: Array, bits: int, n: int, version: str, overflow: str) -> Array:
    """Return zero points, (groups, N) int16 in 0..2**bits."""
    if version == "v2":
        return unpack_columns(words, bits, n).astype(np.int16)
    top = (1 << bits) - 1
    if overflow == "carry":
        ones = np.uint32(0xFFFFFFFF // top)  # a one at each code's lowest bit
        return unpack_columns(words + ones, bits, n).astype(np.int16)
    stored = unpack_columns(words, bits, n)
    full = stored == top
    if overflow == "error" and bool(full.any()):
        group, feature = first_position(full)
        raise FormatError(
            f"qzeros of version 1 hold {top} for group {group}, feature {feature}: a zero point of 0 that wrapped, or "
            f"one of {top + 1}, by the tool that wrote it; say overflow='wrap' (0), 'keep' ({top + 1}) or 'carry' "
            "(one is added to whole words)"
        )
    zeros = stored.astype(np.int16) + np.int16(1)
    if overflow == "wrap":
        zeros[full] = 0
    return zeros


def _refuse_other_version(zeros: Array, bits: int, version: str, symmetric: bool | None) -> None:
    """Raise where every zero point is one off the middle: a symmetric weight with the tag of the other version."""
    middle = 1 << bits - 1
    off = middle + 1 if version == "v1" else middle - 1
    if symmetric is not False and zeros.size and bool((zeros == off).all()):
        other = "v2" if version == "v1" else "v1"
        stored = middle if version == "v1" else middle - 1
        raise FormatError(
            f"qzeros hold {stored} everywhere, as a symmetric weight of version {other[1]} does, but version is "
            f"{version!r}, where it means a zero point of {off}; pass version={other!r}, or symmetric=False "
            f"if {off} is meant"
        )
