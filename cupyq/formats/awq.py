"""AWQ ("GEMM" files): codes and zero points packed along N, even features of a word first."""

from __future__ import annotations

import numpy as np

from ..arrays import Array, common_namespace
from ..errors import FormatError
from ..weights import QuantizedWeight
from .build import expect_matrix, weight_only
from .words import check_bits, check_words, unpack_columns

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Feature, of a word's eight, whose code is at nibble 0, 1, ..., 7."""


def from_awq(
    qweight: Array,
    qzeros: Array,
    scales: Array,
    *,
    bits: int = 4,
    group_size: int | None = None,
    symmetric: bool | None = None,
    scale_dtype: str | np.dtype | None = None,
) -> QuantizedWeight:
    """Convert one layer of an AWQ checkpoint.

    A word holds eight successive features (N) in the order 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits:
    ``0x75316420`` is 0..7.

    Arrays are NumPy's, or CuPy's of one device, where the weight then lives too.

    Parameters
    ----------
    qweight : (K, N / 8) int32
    qzeros : (groups, N / 8) int32
        Zero points as they are, 0..15.
    scales : (groups, N) float16, bfloat16 or float32
    bits : int
        4, all that AWQ has.
    group_size : int, optional
        Rows of a group, -1 for all; None reads it off the shapes.
    symmetric, scale_dtype
        As for :func:`from_gptq`.

    Returns
    -------
    QuantizedWeight
        "w4a16".

    Raises
    ------
    FormatError
        Shapes, dtypes or values do not fit each other or the format, or the weight cannot be held exactly.
    """
    check_bits(bits, (4,))
    common_namespace(qweight=qweight, qzeros=qzeros, scales=scales)
    words, zero_words = check_words(qweight, "qweight"), check_words(qzeros, "qzeros")
    if scales.ndim != 2 or scales.shape[0] == 0:
        raise FormatError(f"scales must have shape (groups, N), got {tuple(scales.shape)}")
    groups, n = map(int, scales.shape)
    if n % 8 or words.shape[1] != n // 8 or words.shape[0] == 0:
        raise FormatError(
            f"qweight must have shape (K, N / 8) with N={n} as in scales, got {tuple(qweight.shape)}"
            + ("; this is the shape of a GPTQ weight (K / 8, N)" if words.shape[1] == n else "")
        )
    expect_matrix(qzeros, "qzeros", (groups, n // 8), "(groups, N / 8)")
    return weight_only(
        unpack_columns(words, bits, n, ORDER),
        scales,
        unpack_columns(zero_words, bits, n, ORDER).astype(np.int16),
        bits=bits,
        group_size=group_size,
        symmetric=symmetric,
        scale_dtype=scale_dtype,
    )
