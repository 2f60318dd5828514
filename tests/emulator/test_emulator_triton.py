"""Anchors: kernels that Triton compiled, whose PTX is right on real cards, against NumPy float64.

The same hands wrote the kernels of this project and the emulator; these did not.
"""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
from emulator_triton import compile_descriptors, compile_histogram, compile_matmul, compile_softmax

from cupyq import emulator

I32, I64 = np.int32, np.int64
MMA = "mma.sync.aligned."
# (compute capability, Triton type, stages, instruction that must be in the PTX)
MATMULS = [
    (75, "fp16", 1, r"fma\.rn\.f32"),
    (80, "fp16", 1, MMA + "m16n8k16.row.col.f32.f16.f16.f32"),
    (80, "fp16", 3, "cp.async.cg"),
    (80, "fp16", 4, "ldmatrix.sync.aligned.m8n8.x4.trans"),
    (80, "bf16", 3, MMA + "m16n8k16.row.col.f32.bf16.bf16.f32"),
    (80, "i8", 3, MMA + r"m16n8k32.row.col(.satfinite)?.s32.s8.s8.s32"),
    (80, "fp32", 3, MMA + "m16n8k8.row.col.f32.tf32.tf32.f32"),
    (89, "fp8e4nv", 3, MMA + "m16n8k32.row.col.f32.e4m3.e4m3.f32"),
    (90, "fp16", 3, r"wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16"),
    (90, "bf16", 1, r"wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"),
    (90, "i8", 3, r"wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8"),
    (90, "fp8e4nv", 3, r"wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3"),
    (90, "fp32", 3, r"wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32"),
    (120, "fp16", 3, MMA + "m16n8k16.row.col.f32.f16.f16.f32"),
    (120, "fp8e4nv", 3, r"m16n8k32.row.col.*f32.e4m3.e4m3.f32"),
]
NUMPY = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "i8": np.int8,
    "fp32": np.float32,
    "fp8e4nv": ml_dtypes.float8_e4m3fn,
}


def inputs(rng, dtype: str, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    kind = NUMPY[dtype]
    if dtype == "i8":
        return rng.integers(-128, 128, (m, k), dtype=np.int8), rng.integers(-128, 128, (k, n), dtype=np.int8)
    return rng.standard_normal((m, k)).astype(kind), rng.standard_normal((k, n)).astype(kind)


def tf32(x: np.ndarray) -> np.ndarray:
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


@pytest.mark.parametrize(("cc", "dtype", "stages", "instruction"), MATMULS)
def test_matmul(cc, dtype, stages, instruction, rng):
    m, n, k = 128, 64, 192
    out = {"i8": "i32", "fp32": "fp32"}.get(dtype, "fp16")
    kernel = compile_matmul(cc, dtype, out, 64, 64, 64, stages)
    assert re.search(instruction, kernel.ptx), instruction
    a, b = inputs(rng, dtype, m, n, k)
    c = np.full((m, n), 99, {"i32": np.int32, "fp32": np.float32, "fp16": np.float16}[out])
    kernel.run((m // 64, n // 64), [a, b, c, I32(m), I32(n), I32(k)])
    if dtype == "i8":
        assert np.array_equal(c, a.astype(np.int64) @ b.astype(np.int64))
        return
    x, y = (tf32(a), tf32(b)) if dtype == "fp32" else (a, b)
    x, y = x.astype(np.float64), y.astype(np.float64)
    # k/8 roundings of the float32 accumulator, then one to the output's type.
    bound = (np.abs(x) @ np.abs(y)) * 2.0**-24 * (k / 8 + 1) + np.abs(x @ y) * (2.0**-11 if out == "fp16" else 0)
    assert np.all(np.abs(c - x @ y) <= bound + 1e-7)


def descriptor(array: np.ndarray, box: int) -> list:
    """What Triton passes for a tensor descriptor: the map, the shape, the strides."""
    rows, columns = array.shape
    return [emulator.TensorMap(array, (box, box), "128B"), I32(rows), I32(columns), I64(columns), I64(1)]


@pytest.mark.parametrize("seed", [None, 3])
def test_tma_and_mbarriers_sm90(seed, rng):
    m, n, k = 128, 64, 256
    kernel = compile_descriptors(90, "fp16", "fp16", 64, 3)
    assert "cp.async.bulk.tensor.2d" in kernel.ptx
    assert "mbarrier.try_wait" in kernel.ptx
    a, b = inputs(rng, "fp16", m, n, k)
    c = np.zeros((m, n), np.float16)
    args = [*descriptor(a, 64), *descriptor(b, 64), *descriptor(c, 64), I32(m), I32(n), I32(k)]
    kernel.run((m // 64, n // 64), args, seed=seed)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    assert np.all(np.abs(c - exact) <= np.abs(exact) * 2.0**-11 + 1e-3)


def test_tma_boxes_that_stick_out_sm90(rng):
    """Sizes no multiple of the box: zero fill on loads, nothing written outside on stores."""
    m, n, k = 72, 40, 88
    kernel = compile_descriptors(90, "fp16", "fp16", 64, 3)
    a, b = inputs(rng, "fp16", m, n, k)
    whole = np.full((m + 8, n), 7, np.float16)
    c = whole[:m]
    args = [*descriptor(a, 64), *descriptor(b, 64), *descriptor(c, 64), I32(m), I32(n), I32(k)]
    kernel.run((2, 1), args)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    assert np.all(np.abs(c - exact) <= np.abs(exact) * 2.0**-11 + 1e-3)
    assert np.all(whole[m:] == 7)


def test_tensor_maps_made_on_the_device_sm90(rng):
    m, n, k = 64, 64, 128
    kernel = compile_descriptors(90, "fp16", "fp16", 64, 3, device=True)
    assert "tensormap.replace" in kernel.ptx
    a, b = inputs(rng, "fp16", m, n, k)
    c = np.zeros((m, n), np.float16)
    scratch = np.zeros(4096, np.uint8)
    emulator.launch(
        kernel.ptx, kernel.entry, 1, kernel.threads, [a, b, c, I32(m), I32(n), I32(k), scratch, None], kernel.shared
    )
    exact = a.astype(np.float64) @ b.astype(np.float64)
    assert np.all(np.abs(c - exact) <= np.abs(exact) * 2.0**-11 + 1e-3)


@pytest.mark.parametrize("cc", [75, 80, 90, 120])
def test_softmax(cc, rng):
    x = rng.standard_normal((5, 700)).astype(np.float32) * 4
    y = np.zeros_like(x)
    compile_softmax(cc, 1024).run((5,), [x, y, I32(700)])
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    # ex2 of an argument up to 45 whose last bits are rounded: 45 * 2**-23 relative, and a few roundings more.
    assert np.allclose(y, e / e.sum(1, keepdims=True), rtol=6e-6, atol=0)


@pytest.mark.parametrize("cc", [80, 90])
def test_atomics(cc, rng):
    x = rng.integers(0, 10, 1000).astype(np.int32)
    counts, total = np.zeros(10, np.int32), np.zeros(1, np.int32)
    compile_histogram(cc).run((4,), [x, counts, total, I32(1000)])
    assert np.array_equal(counts, np.bincount(x, minlength=10))
    assert total[0] == x.sum()


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("cc", [80, 90])
def test_results_do_not_depend_on_the_schedule(cc, seed, rng):
    m, n, k = 64, 64, 128
    kernel = compile_matmul(cc, "fp16", "fp16", 64, 64, 64, 3)
    a, b = inputs(rng, "fp16", m, n, k)
    c, again = np.zeros((m, n), np.float16), np.zeros((m, n), np.float16)
    kernel.run((1, 1), [a, b, c, I32(m), I32(n), I32(k)])
    kernel.run((1, 1), [a, b, again, I32(m), I32(n), I32(k)], seed=seed)
    assert np.array_equal(c, again)


def without(ptx: str, needle: str, which: int = 0) -> str:
    lines = ptx.split("\n")
    at = [i for i, line in enumerate(lines) if needle in line][which]
    lines[at] = ""
    return "\n".join(lines)


def run_broken(kernel, ptx: str):
    a, b, c = (np.zeros((64, 64), np.float16), np.zeros((64, 64), np.float16), np.zeros((64, 64), np.float16))
    with pytest.raises(emulator.EmulatorFault) as e:
        kernel.run((1, 1), [a, b, c, I32(64), I32(64), I32(64)], ptx=ptx)
    return e.value


def test_a_missing_wait_in_real_code_is_found():
    kernel = compile_matmul(80, "fp16", "fp16", 64, 64, 32, 3)
    fault = run_broken(kernel, without(kernel.ptx, "cp.async.wait_group"))
    assert fault.kind == "init"
    assert "ldmatrix" in fault.text


def test_a_missing_barrier_in_real_code_is_found(rng):
    """Each barrier is left out in turn. Some versions of Triton emit one or two that nothing depends on."""
    kernel = compile_matmul(80, "fp16", "fp16", 64, 64, 32, 3)
    lines = kernel.ptx.split("\n")
    barriers = [i for i, line in enumerate(lines) if "bar.sync" in line]
    found = []
    for barrier in barriers:
        a, b, c = (np.zeros((64, 64), np.float16) for _ in range(3))
        ptx = "\n".join("" if i == barrier else line for i, line in enumerate(lines))
        try:
            kernel.run((1, 1), [a, b, c, np.int32(64), np.int32(64), np.int32(64)], ptx=ptx)
        except emulator.EmulatorFault as fault:
            found.append(fault)
    assert len(found) >= len(barriers) - 2
    # Which of the two is met first depends on which warp runs first: bytes in flight, or landed and unordered.
    assert {fault.kind for fault in found} <= {"race", "init"}
    assert any("ldmatrix" in fault.text for fault in found)


def test_a_missing_proxy_fence_in_real_code_is_found():
    kernel = compile_matmul(90, "fp16", "fp16", 64, 64, 32, 3)
    fault = run_broken(kernel, without(kernel.ptx, "fence.proxy.async"))
    assert fault.kind == "race"
    assert "fence.proxy.async" in fault.message
    assert "wgmma" in fault.text
