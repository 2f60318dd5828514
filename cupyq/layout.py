"""THE packed layout: which bit of which word holds the weight of feature n and input k.

The fragment tables below mirror those of `kernels_cu`; packing and unpacking are transposes of whole arrays that
the tests compare with the tables, element by element.

A *strip* is 16 output features. A *unit* is one strip times 64 k (4-bit codes) or 32 k (8-bit codes): 32 lanes of
four 32-bit words, so that a warp reads a unit with one 16-byte load a lane. Units of a strip lie one after the
other along K::

    packed[strip, unit, lane, word]         uint32

Lane ``l`` holds rows ``g = l // 4`` and ``g + 8`` of the strip and, in groups of columns, those of ``t = l % 4``:
the A operand of ``mma.m16n8k16`` (16-bit) and ``mma.m16n8k32`` (8-bit), where ``A`` is the transposed weight
(row = output feature, column = k). PTX ISA, "Matrix fragments for mma.m16n8k16 / m16n8k32".
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
UNIT_K = {4: 64, 8: 32}
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


def nibble_bit(register: Array, element: Array) -> Array:
    """Bit at which a 4-bit word holds `element` of fragment `register`.

    Elements 0 of the four registers fill the low half and elements 1 the high half, so ``(word >> 4*r) & 0x000f000f``
    is the pair of codes of register r, in the order the tensor core wants it.
    """
    return 4 * (register + 4 * element)


def position4(k: Array, n: Array) -> tuple[Array, Array, Array, Array, Array]:
    """Return (strip, unit, lane, word, bit) of the 4-bit code of input k, output feature n."""
    row, tile_k = n % STRIP, k % 16
    register = row // 8 + 2 * (tile_k // 8)
    lane = 4 * (row % 8) + tile_k % 8 // 2
    return n // STRIP, k // 64, lane, k % 64 // 16, nibble_bit(register, tile_k % 2)


def position8(k: Array, n: Array) -> tuple[Array, Array, Array, Array, Array]:
    """Return (strip, unit, lane, word, bit) of the 8-bit code of input k, output feature n."""
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


def pack4(codes: Array, pad: int, pad_row: Array | None = None) -> Array:
    """Pack 4-bit codes.

    Parameters
    ----------
    codes : (K, N) uint8, each 0..15, any strides
    pad : int
        Code written for features from N on and, where `pad_row` is None, for inputs from K on.
    pad_row : (N,) uint8, optional
        Code written for inputs from K on, one for each feature.

    Returns
    -------
    (ceil(N/16), ceil(K/64), 32, 4) uint32
    """
    xp = namespace_of(codes, "codes")
    k, n = codes.shape
    count, depth, _, _ = shape = packed_shape(k, n, 4)
    out = xp.empty(shape, dtype=np.uint32)
    words = out.reshape(count, depth, 8, 4, 4)  # strip, unit, g, t, word
    for first, last in strip_blocks(k, n):
        block = _padded(codes, first, last, depth * 64, pad, pad_row)
        # k = unit, word j, q (k + 8), t, element e; n = strip, h (row + 8), g. The nibble is h + 2 q + 4 e.
        block = block.reshape(depth, 4, 2, 4, 2, last - first, 2, 8)
        byte = block[..., 0, :] | (block[..., 1, :] << np.uint8(4))
        word = byte[:, :, 0, :, 0].astype(np.uint32)
        for q, e in ((1, 0), (0, 1), (1, 1)):
            word |= byte[:, :, q, :, e].astype(np.uint32) << np.uint32(8 * (q + 2 * e))
        words[first:last] = word.transpose(3, 0, 4, 2, 1)
    return out


def unpack4(packed: Array, k: int, n: int, first: int = 0, last: int | None = None) -> Array:
    """Return the (K, columns) uint8 codes of strips `first` to `last` (all of them by default)."""
    xp = namespace_of(packed, "packed")
    last = strips(n) if last is None else last
    depth = packed.shape[1]
    columns = min(last * STRIP, n) - first * STRIP
    out = xp.empty((k, max(columns, 0)), dtype=np.uint8)
    for start, stop in strip_blocks(k, columns):
        words = packed[first + start : first + stop].reshape(stop - start, depth, 8, 4, 4)
        words = xp.ascontiguousarray(words.transpose(1, 4, 3, 0, 2))  # unit, word, t, strip, g
        block = xp.empty((depth, 4, 2, 4, 2, stop - start, 2, 8), dtype=np.uint8)
        for q, e, h in np.ndindex(2, 2, 2):
            block[:, :, q, :, e, :, h] = (words >> np.uint32(4 * (h + 2 * q + 4 * e))) & np.uint32(15)
        width = min(stop * STRIP, columns) - start * STRIP
        out[:, start * STRIP : start * STRIP + width] = block.reshape(depth * 64, -1)[:k, :width]
    return out


def pack8(codes: Array) -> Array:
    """Pack 8-bit codes, given as uint8 bit patterns; padding is 0.

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
