"""THE packed layout: which bit of which word holds the weight of feature n and input k.

The fragment tables below mirror those of `kernels_cu`; packing and unpacking are transposes of whole arrays that
the tests compare with the tables, element by element.

A *strip* is 16 output features. A *unit* is one strip times 128, 64 or 32 k (codes of 2, 4 or 8 bits): 32 lanes of
four 32-bit words, so that a warp reads a unit with one 16-byte load a lane. Units of a strip lie one after the
other along K::

    packed[strip, unit, lane, word]         uint32

Lane ``l`` holds rows ``g = l // 4`` and ``g + 8`` of the strip and, in groups of columns, those of ``t = l % 4``:
the A operand of ``mma.m16n8k16`` (16-bit activations) or ``mma.m16n8k32`` (8-bit activations), where ``A`` is the
transposed weight (row = output feature, column = k). PTX ISA, "Matrix fragments for mma.m16n8k16 / m16n8k32".

With 16-bit activations, bits of a word, from bit 0, hold (h: row g + 8 h; q: k + 8 q; e: k + e; p: the next k16 tile)

- 4 bits: nibble h + 2 q + 4 e of the k16 tile `word`: ``(word >> 4 r) & 0x000f000f`` is register r = h + 2 q;
- 2 bits: pair h + 2 q + 4 p + 8 e of the k16 tiles 2 `word` + p: ``(word >> (2 r + 8 p)) & 0x00030003``;
- 8 bits: byte 2 h + e of rows q = `word` % 2 of the k16 tile `word` // 2.

With 8-bit activations word r = h + 2 q is register r of the k32 tile, its four k in the order of its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import Array, namespace_of

STRIP = 16
"""Output features of a strip."""
LANES = 32
"""Lanes of a warp; each owns `WORDS` words of a unit."""
WORDS = 4
"""32-bit words a lane owns in a unit: one 16-byte load."""
UNIT_K = {2: 128, 4: 64, 8: 32}
"""k of a unit, by bits of a code."""

# Elements of the transposes' working set: large enough to amortise calls, small enough to stay in a CPU's cache.
_BLOCK_ELEMENTS = 1 << 20


def strips(n: int) -> int:
    """Return how many strips hold `n` output features."""
    return -(-n // STRIP)


def units(k: int, bits: int) -> int:
    """Return how many units hold `k` input features of `bits`-bit codes."""
    return -(-k // UNIT_K[bits])


def packed_shape(k: int, n: int, bits: int) -> tuple[int, int, int, int]:
    """Return the shape (strips, units, 32, 4) of the packed words of a (K, N) weight."""
    return strips(n), units(k, bits), LANES, WORDS


# --- fragment tables: what register r, element e of lane l holds --------------------------------------------------


def fragment16(lane: Array, register: Array, element: Array) -> tuple[Array, Array]:
    """A operand of mma.m16n8k16: (row, k) of `element` (0..1) of `register` (0..3) of `lane` (0..31)."""
    g, t = lane // 4, lane % 4
    return g + 8 * (register & 1), 2 * t + element + 8 * (register >> 1)


def fragment8(lane: Array, register: Array, element: Array) -> tuple[Array, Array]:
    """A operand of mma.m16n8k32: (row, k) of `element` (0..3) of `register` (0..3) of `lane` (0..31)."""
    g, t = lane // 4, lane % 4
    return g + 8 * (register & 1), 4 * t + element + 16 * (register >> 1)


# Weights for 16-bit activations. A unit's k is split, from the slowest, into word (4), p, q, t (4) and e (2); these are
# the sizes of p and q, and how far apart bits of successive h, q, p and e lie in a word.
_SIZES = {2: (2, 2), 4: (1, 2), 8: (1, 1)}
_BITS = {2: (2, 4, 8, 16), 4: (4, 8, 0, 16), 8: (16, 0, 0, 8)}


def position16(k: Array, n: Array, bits: int) -> tuple[Array, Array, Array, Array, Array]:
    """Return (strip, unit, lane, word, bit) of the code of input k, output feature n, for 16-bit activations."""
    p_size, q_size = _SIZES[bits]
    h_bit, q_bit, p_bit, e_bit = _BITS[bits]
    row, unit_k = n % STRIP, k % UNIT_K[bits]
    eighth = unit_k // 8
    lane = 4 * (row % 8) + unit_k % 8 // 2
    bit = h_bit * (row // 8) + q_bit * (eighth % q_size) + p_bit * (eighth // q_size % p_size) + e_bit * (unit_k % 2)
    return n // STRIP, k // UNIT_K[bits], lane, eighth // (q_size * p_size), bit


def position8(k: Array, n: Array) -> tuple[Array, Array, Array, Array, Array]:
    """Return (strip, unit, lane, word, bit) of the 8-bit code of input k, output feature n, for 8-bit activations."""
    row, unit_k = n % STRIP, k % 32
    lane = 4 * (row % 8) + unit_k % 16 // 4
    return n // STRIP, k // 32, lane, row // 8 + 2 * (unit_k // 16), 8 * (unit_k % 4)


def scale_position(n: Array) -> tuple[Array, Array]:
    """Return (strip, position in the strip's 16 scales) of feature n: 2g holds row g, 2g + 1 holds row g + 8."""
    row = n % STRIP
    return n // STRIP, 2 * (row % 8) + row // 8


# --- whole arrays ---------------------------------------------------------------------------------------------------


def strip_blocks(k: int, n: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) strip of pieces of a (K, N) weight small enough to work on at once."""
    count = strips(n)
    step = max(4, _BLOCK_ELEMENTS // (STRIP * max(k, 1)))
    for first in range(0, count, step):
        yield first, min(first + step, count)


def _padded(codes: Array, first: int, last: int, rows: int, pad: int, pad_row: Array | None) -> Array:
    """Return strips `first` to `last` of uint8 `codes` as (rows, 16 * strips), padded."""
    k, n = codes.shape
    part = codes[:, first * STRIP : min(last * STRIP, n)]
    columns = (last - first) * STRIP
    if (rows, columns) == part.shape:
        return part
    xp = namespace_of(codes, "codes")
    block = xp.full((rows, columns), pad, dtype=np.uint8)
    block[:k, : part.shape[1]] = part
    if pad_row is not None and rows > k:
        block[k:, : part.shape[1]] = pad_row[first * STRIP : min(last * STRIP, n)]
    return block


def pack16(codes: Array, bits: int, pad: int, pad_row: Array | None = None) -> Array:
    """Pack codes of weights for 16-bit activations.

    Parameters
    ----------
    codes : (K, N) uint8, each less than 2**bits, any strides
    bits : int
        2, 4 or 8.
    pad : int
        Code written for features from N on and, where `pad_row` is None, for inputs from K on.
    pad_row : (N,) uint8, optional
        Code written for inputs from K on, one for each feature.

    Returns
    -------
    (ceil(N/16), ceil(K/UNIT_K[bits]), 32, 4) uint32
    """
    xp = namespace_of(codes, "codes")
    k, n = codes.shape
    count, depth, _, _ = shape = packed_shape(k, n, bits)
    p_size, q_size = _SIZES[bits]
    h_bit, q_bit, p_bit, e_bit = _BITS[bits]
    out = xp.empty(shape, dtype=np.uint32)
    words = out.reshape(count, depth, 8, 4, WORDS)  # strip, unit, g, t, word
    for first, last in strip_blocks(k, n):
        block = _padded(codes, first, last, depth * UNIT_K[bits], pad, pad_row)
        # k = unit, word, p, q, t, e; n = strip, h (row + 8), g
        block = block.reshape(depth, WORDS, p_size, q_size, 4, 2, last - first, 2, 8)
        word = xp.zeros((depth, WORDS, 4, last - first, 8), dtype=np.uint32)
        for p, q, e in np.ndindex(p_size, q_size, 2):
            low, high = block[:, :, p, q, :, e, :, 0], block[:, :, p, q, :, e, :, 1]
            if h_bit < 8:  # both rows in one byte: half the words to shift
                pair = (low | (high << np.uint8(h_bit))).astype(np.uint32)
            else:
                pair = low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(h_bit))
            word |= pair << np.uint32(q_bit * q + p_bit * p + e_bit * e)
        words[first:last] = word.transpose(3, 0, 4, 2, 1)
    return out


def unpack16(packed: Array, bits: int, k: int, n: int, first: int = 0, last: int | None = None) -> Array:
    """Return the (K, columns) uint8 codes of strips `first` to `last` (all of them by default)."""
    xp = namespace_of(packed, "packed")
    last = strips(n) if last is None else last
    depth = packed.shape[1]
    p_size, q_size = _SIZES[bits]
    h_bit, q_bit, p_bit, e_bit = _BITS[bits]
    mask = np.uint32((1 << bits) - 1)
    columns = min(last * STRIP, n) - first * STRIP
    out = xp.empty((k, max(columns, 0)), dtype=np.uint8)
    for start, stop in strip_blocks(k, columns):
        words = packed[first + start : first + stop].reshape(stop - start, depth, 8, 4, WORDS)
        words = xp.ascontiguousarray(words.transpose(1, 4, 3, 0, 2))  # unit, word, t, strip, g
        block = xp.empty((depth, WORDS, p_size, q_size, 4, 2, stop - start, 2, 8), dtype=np.uint8)
        for p, q, e, h in np.ndindex(p_size, q_size, 2, 2):
            block[:, :, p, q, :, e, :, h] = (words >> np.uint32(h_bit * h + q_bit * q + p_bit * p + e_bit * e)) & mask
        width = min(stop * STRIP, columns) - start * STRIP
        out[:, start * STRIP : start * STRIP + width] = block.reshape(depth * UNIT_K[bits], -1)[:k, :width]
    return out


def pack8(codes: Array) -> Array:
    """Pack 8-bit codes of weights for 8-bit activations, given as uint8 bit patterns; padding is 0.

    Parameters
    ----------
    codes : (K, N) uint8, any strides

    Returns
    -------
    (ceil(N/16), ceil(K/32), 32, 4) uint32
    """
    xp = namespace_of(codes, "codes")
    k, n = codes.shape
    count, depth, _, _ = shape = packed_shape(k, n, 8)
    out = xp.empty(shape, dtype=np.uint32)
    words = out.reshape(count, depth, 8, 4, 2, 2)  # strip, unit, g, t, q, h
    for first, last in strip_blocks(k, n):
        # k = unit, q (k + 16), t, element e; n = strip, h (row + 8), g. The register is h + 2 q, the byte e.
        block = _padded(codes, first, last, depth * 32, 0, None)
        block = block.reshape(depth, 2, 4, 4, last - first, 2, 8)
        word = block[:, :, :, 0].astype(np.uint32)
        for e in (1, 2, 3):
            word |= block[:, :, :, e].astype(np.uint32) << np.uint32(8 * e)
        words[first:last] = word.transpose(3, 0, 5, 2, 1, 4)
    return out


def unpack8(packed: Array, k: int, n: int, first: int = 0, last: int | None = None) -> Array:
    """Return the (K, columns) uint8 bit patterns of strips `first` to `last` (all of them by default)."""
    xp = namespace_of(packed, "packed")
    last = strips(n) if last is None else last
    depth = packed.shape[1]
    columns = min(last * STRIP, n) - first * STRIP
    out = xp.empty((k, max(columns, 0)), dtype=np.uint8)
    for start, stop in strip_blocks(k, columns):
        words = packed[first + start : first + stop].reshape(stop - start, depth, 8, 4, 2, 2)
        words = xp.ascontiguousarray(words.transpose(1, 4, 3, 0, 5, 2))  # unit, q, t, strip, h, g
        block = xp.empty((depth, 2, 4, 4, stop - start, 2, 8), dtype=np.uint8)
        for e in range(4):
            block[:, :, :, e] = (words >> np.uint32(8 * e)) & np.uint32(255)
        width = min(stop * STRIP, columns) - start * STRIP
        out[:, start * STRIP : start * STRIP + width] = block.reshape(depth * 32, -1)[:k, :width]
    return out


def interleave(values: Array) -> Array:
    """Bring (G, N) scales or zeros into strip order: (ceil(N/16), G, 16), padded with 0.

    Position 2g of a strip is feature g and 2g + 1 is feature g + 8, so that a lane reads both of its rows at once.
    """
    xp = namespace_of(values, "values")
    groups, n = values.shape
    count = strips(n)
    out = xp.zeros((count, groups, STRIP), dtype=values.dtype)
    if n != count * STRIP:
        padded = xp.zeros((groups, count * STRIP), dtype=values.dtype)
        padded[:, :n] = values
        values = padded
    out.reshape(count, groups, 8, 2)[...] = values.reshape(groups, count, 2, 8).transpose(1, 0, 3, 2)
    return out


def deinterleave(values: Array, n: int) -> Array:
    """Return the (G, N) array that :func:`interleave` brought into strip order."""
    xp = namespace_of(values, "values")
    count, groups, _ = values.shape
    flat = values.reshape(count, groups, 8, 2).transpose(1, 0, 3, 2).reshape(groups, count * STRIP)
    return xp.ascontiguousarray(flat[:, :n])
