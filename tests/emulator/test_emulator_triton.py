"""Anchors: matmuls that Triton compiled, whose PTX is right on real cards, against NumPy float64."""

from __future__ import annotations

import numpy as np
import pytest
from emulator_triton import compile_matmul

from cupyq import emulator


@pytest.mark.parametrize("stages", [1, 3, 4])
def test_fp16_matmul_sm80(stages, rng):
    m, n, k = 128, 64, 160
    kernel = compile_matmul(80, "fp16", "fp16", 64, 64, 32, stages)
    a, b = rng.standard_normal((m, k)).astype(np.float16), rng.standard_normal((k, n)).astype(np.float16)
    c = np.full((m, n), np.nan, np.float16)
    kernel.run((m // 64, n // 64), [a, b, c, np.int32(m), np.int32(n), np.int32(k)])
    exact = a.astype(np.float64) @ b.astype(np.float64)
    # One rounding to float16 of a sum whose error is far smaller.
    assert np.all(np.abs(c - exact) <= np.abs(exact) * 2**-11 + 1e-3)
    assert ("cp.async" in kernel.ptx) == (stages > 1)
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in kernel.ptx


@pytest.mark.parametrize("seed", [1, 2])
def test_results_do_not_depend_on_the_schedule(seed, rng):
    m, n, k = 64, 64, 96
    kernel = compile_matmul(80, "fp16", "fp16", 64, 64, 32, 3)
    a, b = rng.standard_normal((m, k)).astype(np.float16), rng.standard_normal((k, n)).astype(np.float16)
    c, again = np.zeros((m, n), np.float16), np.zeros((m, n), np.float16)
    args = [np.int32(m), np.int32(n), np.int32(k)]
    kernel.run((1, 1), [a, b, c, *args])
    kernel.run((1, 1), [a, b, again, *args], seed=seed)
    assert np.array_equal(c, again)


def test_a_missing_wait_in_real_code_is_found(rng):
    kernel = compile_matmul(80, "fp16", "fp16", 64, 64, 32, 3)
    broken = kernel.ptx.replace("cp.async.wait_group \t2;", "", 1)
    assert broken != kernel.ptx
    a, b, c = (np.zeros((64, 64), np.float16) for _ in range(3))
    with pytest.raises(emulator.EmulatorFault, match="asynchronous copy") as e:
        kernel.run((1, 1), [a, b, c, np.int32(64), np.int32(64), np.int32(64)], ptx=broken)
    assert e.value.kind == "init"
    assert "ldmatrix" in e.value.text


def test_a_missing_barrier_in_real_code_is_found(rng):
    kernel = compile_matmul(80, "fp16", "fp16", 64, 64, 32, 3)
    lines = kernel.ptx.split("\n")
    first = next(i for i, line in enumerate(lines) if "bar.sync" in line)
    lines[first] = ""
    a, b, c = (np.zeros((64, 64), np.float16) for _ in range(3))
    with pytest.raises(emulator.EmulatorFault) as e:
        kernel.run((1, 1), [a, b, c, np.int32(64), np.int32(64), np.int32(64)], ptx="\n".join(lines))
    # Which of the two is met first depends on which warp runs first: bytes in flight, or landed and unordered.
    assert e.value.kind in ("race", "init")
    assert "ldmatrix" in e.value.text
