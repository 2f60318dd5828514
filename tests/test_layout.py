"""The packed layout: fragment tables are bijections, and whole-array packing agrees with them bit by bit."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from cupyq import layout
from cupyq.arrays import FLOAT8, float8_decode, float8_encode


@pytest.fixture
def rng():
    return np.random.default_rng(7)


LANE, REGISTER = np.arange(32), np.arange(4)


@pytest.mark.parametrize(("fragment", "elements", "k"), [(layout.fragment16, 2, 16), (layout.fragment8, 4, 32)])
def test_fragment_is_a_bijection_onto_the_tile(fragment, elements, k):
    lane, register, element = np.meshgrid(LANE, REGISTER, np.arange(elements), indexing="ij")
    row, column = fragment(lane, register, element)
    assert sorted(zip(row.ravel(), column.ravel(), strict=True)) == [(r, c) for r in range(16) for c in range(k)]


def test_fragment16_matches_the_ptx_isa():
    # PTX ISA, mma.m16n8k16 with 16-bit A: row = groupID for a0, a1, a4, a5, else groupID + 8;
    # col = threadID_in_group * 2 + (i & 1) for i < 4, else + 8. Registers hold a(2r), a(2r + 1).
    for lane in range(32):
        for i in range(8):
            row = lane >> 2 if i in (0, 1, 4, 5) else (lane >> 2) + 8
            column = (lane % 4) * 2 + (i & 1) + (0 if i < 4 else 8)
            assert layout.fragment16(lane, i // 2, i % 2) == (row, column)


def test_fragment8_matches_the_ptx_isa():
    # PTX ISA, mma.m16n8k32 with 8-bit A: row = groupID for 0 <= i < 4 and 8 <= i < 12, else groupID + 8;
    # col = threadID_in_group * 4 + (i & 3) for i < 8, else + 16.
    for lane in range(32):
        for i in range(16):
            row = lane >> 2 if i < 4 or 8 <= i < 12 else (lane >> 2) + 8
            column = (lane % 4) * 4 + (i & 3) + (0 if i < 8 else 16)
            assert layout.fragment8(lane, i // 4, i % 4) == (row, column)


def position_of(bits, activation_bits=16):
    """Return the function (k, n) -> place of codes of `bits`."""
    return (lambda k, n: layout.position16(k, n, bits)) if activation_bits == 16 else layout.position8


@pytest.mark.parametrize(("bits", "activation_bits"), [(2, 16), (4, 16), (8, 16), (8, 8)])
def test_position_is_a_bijection_onto_the_bits(bits, activation_bits):
    position, k, n = position_of(bits, activation_bits), 2 * layout.UNIT_K[bits], 48
    rows, columns = np.meshgrid(np.arange(k), np.arange(n), indexing="ij")
    strip, unit, lane, word, bit = position(rows, columns)
    shape = (*layout.packed_shape(k, n, bits), 32 // bits)
    flat = np.ravel_multi_index((strip, unit, lane, word, bit // bits), shape)
    assert np.array_equal(np.sort(flat.ravel()), np.arange(k * n))
    assert (bit % bits == 0).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_position16_agrees_with_the_fragment_table(bits):
    tiles = np.arange(layout.UNIT_K[bits] // 16)
    lane, tile, register, element = np.meshgrid(LANE, tiles, REGISTER, np.arange(2), indexing="ij")
    row, tile_k = layout.fragment16(lane, register, element)
    word, bit = {
        2: (tile // 2, 2 * register + 8 * (tile % 2) + 16 * element),
        4: (tile, 4 * register + 16 * element),
        8: (2 * tile + register // 2, 16 * (register % 2) + 8 * element),
    }[bits]
    found = layout.position16(16 * tile + tile_k, row, bits)
    for got, want in zip(found, (0, 0, lane, word, bit), strict=True):
        assert (got == want).all()


def test_position8_agrees_with_the_fragment_table():
    lane, register, element = np.meshgrid(LANE, REGISTER, np.arange(4), indexing="ij")
    row, unit_k = layout.fragment8(lane, register, element)
    found = layout.position8(unit_k, row)
    for got, want in zip(found, (0, 0, lane, register, 8 * element), strict=True):
        assert (got == want).all()


def test_masks_give_the_codes_of_a_register():
    # What the kernels rely on: one shift and one mask give the two codes of a register, 16 bits apart.
    for bits, mask in ((4, 0x000F000F), (2, 0x00030003)):
        for tile in range(layout.UNIT_K[bits] // 16):
            codes = np.zeros((layout.UNIT_K[bits], 16), np.uint8)
            for register in range(4):
                for element in range(2):
                    row, k = layout.fragment16(0, register, element)
                    codes[16 * tile + k, row] = (2 * register + element) & (2**bits - 1)
            word = int(layout.pack16(codes, bits, 0)[0, 0, 0, tile * bits // 4])
            shift = 8 * (tile % 2) if bits == 2 else 0
            for register in range(4):
                pair = (2 * register & (2**bits - 1)) | (2 * register + 1 & (2**bits - 1)) << 16
                assert word >> shift >> bits * register & mask == pair


SHAPES = [(1, 1), (64, 16), (65, 17), (130, 40), (31, 33), (200, 7)]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_pack16_puts_every_code_where_the_table_says(rng, bits, k, n):
    codes = rng.integers(0, 2**bits, (k, n), dtype=np.uint8)
    pad_row = rng.integers(0, 2**bits, n, dtype=np.uint8)
    packed = layout.pack16(codes, bits, 3, pad_row)
    strips, units = packed.shape[:2]
    full = np.full((units * layout.UNIT_K[bits], strips * 16), 3, dtype=np.uint8)
    full[k:, :n] = pad_row
    full[:k, :n] = codes
    rows, columns = np.meshgrid(np.arange(full.shape[0]), np.arange(strips * 16), indexing="ij")
    strip, unit, lane, word, bit = layout.position16(rows, columns, bits)
    assert np.array_equal(packed[strip, unit, lane, word] >> bit & (2**bits - 1), full)
    assert np.array_equal(layout.unpack16(packed, bits, k, n), codes)


@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_pack8_puts_every_code_where_the_table_says(rng, k, n):
    codes = rng.integers(0, 256, (k, n), dtype=np.uint8)
    packed = layout.pack8(codes)
    strips, units = packed.shape[:2]
    full = np.zeros((units * 32, strips * 16), dtype=np.uint8)
    full[:k, :n] = codes
    rows, columns = np.meshgrid(np.arange(units * 32), np.arange(strips * 16), indexing="ij")
    strip, unit, lane, word, bit = layout.position8(rows, columns)
    assert np.array_equal(packed[strip, unit, lane, word] >> bit & 255, full)
    assert np.array_equal(layout.unpack8(packed, k, n), codes)


def pairs():
    """Yield (pack, unpack) of every kind of code; values 0..3 suit them all."""
    for bits in (2, 4, 8):
        yield functools.partial(layout.pack16, bits=bits, pad=0), functools.partial(layout.unpack16, bits=bits)
    yield layout.pack8, layout.unpack8


@pytest.mark.parametrize(("pack", "unpack"), [*pairs()])
def test_blocks_of_strips_join_without_a_seam(rng, monkeypatch, pack, unpack):
    codes = rng.integers(0, 4, (70, 330), dtype=np.uint8)
    whole = pack(codes)
    monkeypatch.setattr(layout, "_BLOCK_ELEMENTS", 1)
    assert np.array_equal(pack(codes), whole)
    assert np.array_equal(unpack(whole, k=70, n=330), codes)
    assert np.array_equal(unpack(whole, k=70, n=330, first=5, last=9), codes[:, 80:144])
    assert np.array_equal(unpack(whole, k=70, n=330, first=20, last=21), codes[:, 320:])


@pytest.mark.parametrize("order", ["C", "F", "strided", "reversed"])
def test_packing_does_not_mind_strides(rng, order):
    codes = rng.integers(0, 16, (70, 40), dtype=np.uint8)
    views = {
        "C": codes,
        "F": np.asfortranarray(codes),
        "strided": np.repeat(codes, 2, axis=1)[:, ::2],
        "reversed": codes[::-1, ::-1].copy()[::-1, ::-1],
    }
    assert np.array_equal(layout.pack16(views[order], 4, 8), layout.pack16(codes, 4, 8))
    assert np.array_equal(layout.pack8(views[order]), layout.pack8(codes))


@pytest.mark.parametrize("n", [1, 8, 16, 17, 40])
def test_interleaved_scales_sit_where_a_lane_looks(n):
    values = np.arange(3 * n, dtype=np.float16).reshape(3, n)
    stored = layout.interleave(values)
    strip, position = layout.scale_position(np.arange(n))
    assert np.array_equal(stored[strip, :, position].T, values)
    assert stored.sum() == values.sum()  # padding is zero
    assert np.array_equal(layout.deinterleave(stored, n), values)


def test_lane_reads_both_of_its_rows_as_one_word():
    stored = layout.interleave(np.arange(16, dtype=np.uint8)[None])
    assert stored[0, 0].reshape(8, 2).tolist() == [[g, g + 8] for g in range(8)]


def test_float8_encode_equals_ml_dtypes_within_its_range():
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    halves = halves[np.abs(halves) <= 448]
    fine = np.linspace(-448, 448, 100_001, dtype=np.float32)
    small = np.linspace(-(2.0**-5), 2.0**-5, 100_001, dtype=np.float32)
    for values in (halves, fine, small):
        assert np.array_equal(float8_encode(values), values.astype(FLOAT8).view(np.uint8))


def test_float8_ties_go_to_even():
    codes = np.arange(0x7E, dtype=np.uint8)
    values = float8_decode(codes)
    middles = (values[:-1] + values[1:]) / 2
    want = codes[:-1] + codes[:-1] % 2
    assert np.array_equal(float8_encode(middles), want)
    assert np.array_equal(float8_encode(-middles), want | 0x80)


def test_float8_round_trips_every_finite_code():
    codes = np.arange(256, dtype=np.uint8)
    codes = codes[codes & 0x7F != 0x7F]
    assert np.array_equal(float8_encode(float8_decode(codes)), codes)
    assert float8_encode(np.array(3.0, np.float32)).shape == ()
