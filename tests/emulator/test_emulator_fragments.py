"""Fragments of every mma, ldmatrix and stmatrix shape, filled by hand from the tables of the PTX ISA."""

# ruff: noqa: E501 (kernels stay on one line)
from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from emulator_cuda import ptx_kernel

from cupyq import emulator

TYPES = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "s8": np.int8, "u8": np.uint8,
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip
SHAPES = [
    (16, 8, "f16", "f32"), (16, 16, "f16", "f32"), (16, 16, "f16", "f16"), (16, 8, "f16", "f16"), (16, 8, "bf16", "f32"),
    (16, 16, "bf16", "f32"), (16, 4, "tf32", "f32"), (16, 8, "tf32", "f32"), (8, 16, "s8", "s32"), (8, 16, "u8", "s32"),
    (16, 16, "s8", "s32"), (16, 32, "s8", "s32"), (16, 32, "u8", "s32"), (16, 32, "e4m3", "f32"), (16, 32, "e5m2", "f32"),
    (16, 16, "e4m3", "f32"), (16, 32, "e4m3", "f16"),
]  # fmt: skip


def a_place(m: int, t: str, lane: int, i: int) -> tuple[int, int]:
    """(row, column) of element i of a lane's A fragment, as the ISA's figures give it."""
    group, inside = lane >> 2, lane & 3
    if t == "tf32":
        return group + (8 if i in (1, 3) else 0), inside + (4 if i >= 2 else 0)
    if t in ("f16", "bf16"):
        return group + (8 if (i >> 1) & 1 else 0), inside * 2 + (i & 1) + (8 if i >= 4 else 0)
    if m == 8:
        return group, inside * 4 + i
    return group + (8 if (i >> 2) & 1 else 0), inside * 4 + (i & 3) + (16 if i >= 8 else 0)


def b_place(t: str, lane: int, i: int) -> tuple[int, int]:
    group, inside = lane >> 2, lane & 3
    if t == "tf32":
        return inside + 4 * i, group
    if t in ("f16", "bf16"):
        return inside * 2 + (i & 1) + (8 if i >= 2 else 0), group
    return inside * 4 + (i & 3) + (16 if i >= 4 else 0), group


def c_place(lane: int, i: int) -> tuple[int, int]:
    return (lane >> 2) + (8 if i >= 2 else 0), (lane & 3) * 2 + (i & 1)


def run_mma(m: int, k: int, t: str, out: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """D = A B + C of one instruction, from whole matrices to fragments and back."""
    a_frag, b_frag = np.zeros((32, m * k // 32), a.dtype), np.zeros((32, 8 * k // 32), b.dtype)
    c_frag = np.zeros((32, m // 4), c.dtype)
    for lane in range(32):
        for i in range(a_frag.shape[1]):
            a_frag[lane, i] = a[a_place(m, t, lane, i)]
        for i in range(b_frag.shape[1]):
            b_frag[lane, i] = b[b_place(t, lane, i)]
        for i in range(c_frag.shape[1]):
            c_frag[lane, i] = c[c_place(lane, i)]
    words = [x.view(np.uint32).reshape(32, -1).copy() for x in (a_frag, b_frag, c_frag)]
    body, first = "mov.u32 %r200, %tid.x;\n", 1
    names = []
    for q, w in enumerate(words):
        n = w.shape[1]
        body += f"mad.wide.u32 %rd1, %r200, {4 * n}, %q{q + 1};\n"
        regs = [f"%r{first + i}" for i in range(n)]
        first += n
        body += "".join(f"ld.global.u32 {r}, [%rd1+{4 * i}];\n" for i, r in enumerate(regs))
        names.append("{" + ", ".join(regs) + "}")
    kind = f"m{m}n8k{k}"
    body += f"mma.sync.aligned.{kind}.row.col.{out}.{t}.{t}.{out} {names[2]}, {names[0]}, {names[1]}, {names[2]};\n"
    n = words[2].shape[1]
    body += f"mad.wide.u32 %rd1, %r200, {4 * n}, %q0;\n" + "".join(
        f"st.global.u32 [%rd1+{4 * i}], {r};\n" for i, r in enumerate(names[2][1:-1].split(", "))
    )
    result = np.zeros((32, n), np.uint32)
    emulator.launch(ptx_kernel(body, params=4), "k", 1, 32, [result, *words])
    got, d = result.view(c.dtype).reshape(32, -1), np.empty_like(c)
    for lane in range(32):
        for i in range(got.shape[1]):
            d[c_place(lane, i)] = got[lane, i]
    return d


@pytest.mark.parametrize(("m", "k", "t", "out"), SHAPES)
def test_mma(m, k, t, out, rng):
    dtype = TYPES[t]
    low = 0 if t == "u8" else -8
    a, b = (rng.integers(low, 8, s).astype(np.float32).astype(dtype) for s in ((m, k), (k, 8)))
    acc = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[out]
    c = rng.integers(-50, 50, (m, 8)).astype(acc)
    want = a.astype(np.float64) @ b.astype(np.float64) + c.astype(np.float64)
    assert np.array_equal(run_mma(m, k, t, out, a, b, c), want.astype(acc))


@pytest.mark.parametrize("tiles", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix_and_stmatrix(tiles, trans, rng):
    """Row i of tile j is named by lane 8 j + i; lane l gets elements 2 (l % 4), + 1 of row l / 4 (column, with .trans)."""
    source = rng.integers(0, 65536, (32, 8)).astype(np.uint16)
    regs = "{" + ", ".join(f"%r{i + 1}" for i in range(tiles)) + "}"
    shape = f"sync.aligned.m8n8.x{tiles}{trans}.shared.b16"
    body = f"""mov.u32 %r200, %tid.x; shl.b32 %r201, %r200, 4; mov.u32 %r202, tile; add.u32 %r203, %r202, %r201; add.u32 %r204, %r203, 512;
    mad.wide.u32 %rd1, %r200, 16, %q1; ld.global.v4.u32 {{%r20, %r21, %r22, %r23}}, [%rd1]; st.shared.v4.u32 [%r203], {{%r20, %r21, %r22, %r23}};
    st.shared.v4.u32 [%r204], {{0, 0, 0, 0}};
    bar.warp.sync -1; ldmatrix.{shape} {regs}, [%r203]; stmatrix.{shape} [%r204], {regs}; bar.warp.sync -1;
    mad.wide.u32 %rd2, %r200, 16, %q0;
    """
    body += "".join(f"st.global.u32 [%rd2+{4 * i}], %r{i + 1};\n" for i in range(tiles))
    body += "mad.wide.u32 %rd3, %r200, 16, %q2; ld.shared.v4.u32 {%r30, %r31, %r32, %r33}, [%r204]; st.global.v4.u32 [%rd3], {%r30, %r31, %r32, %r33};"
    got, back = np.zeros((32, 4, 2), np.uint16), np.zeros((32, 8), np.uint16)
    emulator.launch(
        ptx_kernel(body, params=3, shared=".shared .align 16 .b8 tile[1024];"), "k", 1, 32, [got, source, back]
    )
    for lane in range(32):
        for j in range(tiles):
            for e in range(2):
                row, column = lane // 4, 2 * (lane % 4) + e
                tile = source[8 * j : 8 * j + 8]
                assert got[lane, j, e] == (tile[column, row] if trans else tile[row, column])
    assert np.array_equal(back[: 8 * tiles], source[: 8 * tiles])
