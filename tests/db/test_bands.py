"""Bands: every M has exactly one, and its two ends are its own."""

import numpy as np
import pytest

from cupyq import bands
from cupyq.errors import ShapeError


def test_ends_are_the_powers_of_two_and_one_open_band():
    assert bands.ends() == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@pytest.mark.parametrize(
    ("m", "band"),
    [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (16, 16), (17, 32), (8192, 8192), (8193, 16384), (10**9, 16384)],
)
def test_of(m, band):
    assert bands.of(m) == bands.of(np.int64(m)) == band


def test_the_bands_cover_every_m_without_overlap():
    assert [bands.lower_end(end) for end in bands.ends()] == [1, *(end + 1 for end in bands.ends()[:-1])]
    assert all(bands.of(bands.lower_end(end)) == bands.of(end) == end for end in bands.ends())


@pytest.mark.parametrize("m", [0, -1, 2.0, "2", None])
def test_of_refuses_what_is_no_number_of_tokens(m):
    with pytest.raises(ShapeError, match="m is"):
        bands.of(m)


@pytest.mark.parametrize("band", [0, 3, 32768, 1.0])
def test_lower_end_refuses_what_is_no_band(band):
    with pytest.raises(ShapeError, match="band is"):
        bands.lower_end(band)
