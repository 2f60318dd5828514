"""Codes out of 32-bit words, which every packed format fills along an axis and in an order of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import Array, namespace_of
from ..errors import FormatError

_WORD_DTYPES = (np.dtype(np.int32), np.dtype(np.uint32))


def check_words(words: Array, name: str) -> Array:
    """Return a matrix of 32-bit words as uint32."""
    namespace_of(words, name)
    dtype = np.dtype(words.dtype)
    if dtype not in _WORD_DTYPES or words.ndim != 2:
        raise FormatError(f"{name} must be a matrix of int32 words, got {dtype.name} of shape {tuple(words.shape)}")
    return words.view(np.uint32)


def check_bits(bits: int, accepted: Sequence[int]) -> int:
    if isinstance(bits, bool) or bits not in accepted:
        raise FormatError(f"bits must be {' or '.join(map(str, accepted))}, got {bits!r}")
    return int(bits)


def unpack_rows(words: Array, bits: int, rows: int) -> Array:
    """Return the (rows, columns) uint8 codes of words that hold 32 / bits successive rows each, from bit 0 on."""
    xp = namespace_of(words, "words")
    each = 32 // bits
    out = xp.empty((words.shape[0], each, words.shape[1]), dtype=np.uint8)
    for i in range(each):
        out[:, i] = (words >> np.uint32(bits * i)) & np.uint32((1 << bits) - 1)
    return out.reshape(-1, words.shape[1])[:rows]


def unpack_columns(words: Array, bits: int, columns: int, order: Sequence[int] | None = None) -> Array:
    """Return the (rows, columns) uint8 codes of words that hold 32 / bits successive columns each.

    The code at place i of a word (from bit 0 on) belongs to column ``order[i]`` of its word's columns; i by default.
    """
    xp = namespace_of(words, "words")
    each = 32 // bits
    out = xp.empty((*words.shape, each), dtype=np.uint8)
    for i in range(each):
        column = i if order is None else order[i]
        out[:, :, column] = (words >> np.uint32(bits * i)) & np.uint32((1 << bits) - 1)
    return out.reshape(words.shape[0], -1)[:, :columns]
