"""One-tile products beside mmasim, which models tensor cores bit by bit. Optional: it needs torch.

The emulator adds exact products in float32 and rounds to nearest; tensor cores align the products of a few k to the
largest exponent, keep some bits beyond float32's and truncate. Both are within the bound below of the exact result, and
so of each other; exact results (small integers) are equal.
"""

from __future__ import annotations

import numpy as np
import pytest
from test_emulator_fragments import TYPES, run_mma

torch = pytest.importorskip("torch", reason="torch is not installed (mmasim needs it)")
nv_ptx = pytest.importorskip("mmasim.nv_ptx.sim", reason="mmasim is not installed")

# architecture, k, type, significant bits that are sure to accumulate: float32's 24; Ada's fp8 keeps 13.
CASES = [
    ("Turing", 8, "f16", 24),
    ("Ampere", 16, "f16", 24),
    ("Ampere", 16, "bf16", 24),
    ("Hopper", 16, "f16", 24),
    ("Ada Lovelace", 32, "e4m3", 13),
    ("Ada Lovelace", 32, "e5m2", 13),
    ("RTX Blackwell", 32, "e4m3", 24),
]


def to_torch(x: np.ndarray) -> torch.Tensor:
    """The same bits as a tensor of the same type."""
    kinds = {
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "float8_e4m3fn": torch.float8_e4m3fn,
        "float8_e5m2": torch.float8_e5m2,
        "float32": torch.float32,
    }
    size = {1: np.uint8, 2: np.int16, 4: np.int32}[x.dtype.itemsize]
    return torch.from_numpy(x.view(size).copy()).view(kinds[x.dtype.name])


def both(arch: str, k: int, t: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(emulator, mmasim) of one instruction."""
    model = nv_ptx.MMA(arch, f"m16n8k{k}.f32.{t}.{t}.f32")
    simulated = model(to_torch(a), to_torch(b), to_torch(c)).numpy()
    return run_mma(16, k, t, "f32", a, b, c), simulated


@pytest.mark.parametrize(("arch", "k", "t", "bits"), CASES)
def test_small_integers_are_equal(arch, k, t, bits, rng):
    a, b = (rng.integers(-4, 5, s).astype(np.float32).astype(TYPES[t]) for s in ((16, k), (k, 8)))
    c = rng.integers(-50, 50, (16, 8)).astype(np.float32)
    emulated, simulated = both(arch, k, t, a, b, c)
    assert np.array_equal(emulated, simulated)


@pytest.mark.parametrize(("arch", "k", "t", "bits"), CASES)
def test_random_values_differ_by_rounding_only(arch, k, t, bits, rng):
    a, b = (rng.standard_normal(s).astype(np.float32).astype(TYPES[t]) for s in ((16, k), (k, 8)))
    c = rng.standard_normal((16, 8)).astype(np.float32)
    emulated, simulated = both(arch, k, t, a, b, c)
    wide = [x.astype(np.float64) for x in (a, b, c)]
    exact = wide[0] @ wide[1] + wide[2]
    size = np.abs(wide[0]) @ np.abs(wide[1]) + np.abs(wide[2])
    assert (np.abs(emulated - exact) <= (k + 1) * 2.0**-24 * size).all()
    assert (np.abs(simulated - exact) <= (k + 1) * 2.0 ** (1 - bits) * size).all()
