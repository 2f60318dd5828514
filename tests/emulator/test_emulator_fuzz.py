"""Broken PTX: a clear error, never a hang, never another kind of exception."""

# ruff: noqa: E501 (kernels stay on one line)
from __future__ import annotations

import random
import re

import numpy as np
import pytest
from emulator_cuda import PTX_HEAD, cuda_to_ptx, ptx_kernel

from cupyq import emulator
from cupyq.errors import CupyqError

SOURCE = """extern "C" __global__ void k(const float* x, float* y, int n) {
    __shared__ float tile[64];
    float v = 0;
    for (int i = 0; i < n; i++) {
        tile[threadIdx.x] = x[threadIdx.x] * i;
        __syncthreads();
        v += tile[63 - threadIdx.x] + __shfl_xor_sync(0xffffffffu, v, 1);
        __syncthreads();
    }
    if (v > 3) atomicAdd(y + 1, v);
    asm volatile("{ .reg .pred p; setp.gt.s32 p, %0, 3; @p bra L; L: }" :: "r"(n));
    y[threadIdx.x + 2] = v;
}"""


def attempt(ptx: str) -> str:
    """Run it; says how it ended, which must be one of the known ways."""
    x, y = np.ones(64, np.float32), np.zeros(80, np.float32)
    try:
        emulator.launch(ptx, "k", 1, 64, [x, y, np.int32(3)], max_steps=3000)
    except CupyqError as e:
        return type(e).__name__ if str(e) else "said nothing"
    return "ran"


def test_truncated_text():
    ptx = cuda_to_ptx(SOURCE)
    body = len(ptx.rstrip()) - 1
    for cut in range(0, body, 37):
        assert attempt(ptx[:cut]) == "UnsupportedPTX", cut


def test_mutated_text():
    ptx = cuda_to_ptx(SOURCE)
    rng = random.Random(11)
    ends = set()
    for _ in range(250):
        text = list(ptx)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(ptx.index("{"), len(text))
            text[at] = rng.choice("0123456789abcdefrpu.,;[]{}%@!-+ ")
        ends.add(attempt("".join(text)))
    assert "UnsupportedPTX" in ends


def test_lines_dropped_or_doubled():
    lines = cuda_to_ptx(SOURCE).split("\n")
    rng = random.Random(5)
    for _ in range(80):
        at = rng.randrange(len(lines))
        attempt("\n".join(lines[:at] + lines[at + 1 :]))
        attempt("\n".join(lines[:at] + [lines[at]] * 2 + lines[at + 1 :]))


@pytest.mark.parametrize(
    ("ptx", "words"),
    [
        ("", "not PTX|ends"),
        (PTX_HEAD.format(arch="sm_80"), "no entry"),
        (ptx_kernel("frobnicate.u32 %r1, %r2;", params=0), "frobnicate"),
        (ptx_kernel("add.u32.fancy %r1, %r2, %r3;", params=0), "fancy|type"),
        (ptx_kernel("add.wonder.u32 %r1, %r2, %r3;", params=0), "wonder"),
        (ptx_kernel("add.u32 %r1, %r2;", params=0), "operands"),
        (ptx_kernel("add.u32 %r1, %r2, %r999999;", params=0), "r999999"),
        (ptx_kernel("add.u64 %rd1, %r2, %rd3;", params=0), "32 bits"),
        (ptx_kernel("bra nowhere;", params=0), "nowhere"),
        (ptx_kernel(".reg .b32 %z<99999999999>;", params=0), "registers"),
        (ptx_kernel("mov.u32 %r1, %tid.w;", params=0), "tid.w"),
        (ptx_kernel("ld.global.b128 %rd1, [%rd2];", params=0), "128"),
        (
            ptx_kernel(
                "mma.sync.aligned.m16n8k16.row.row.f32.f16.f16.f32 {%r1,%r2,%r3,%r4},{%r1,%r2,%r3,%r4},{%r1,%r2},{%r1,%r2,%r3,%r4};",
                params=0,
            ),
            "mma",
        ),
        (ptx_kernel("tcgen05.alloc.sync.aligned.b32 [%r1], 32;", params=0), "tcgen05"),
        (ptx_kernel("call foo;", params=0), "foo"),
        (ptx_kernel("{ add.u32 %r1, %r1, 1;", params=0), "ends|declared|outside"),
    ],
)
def test_unknown_things_are_named_at_load(ptx, words):
    with pytest.raises(emulator.UnsupportedPTX) as e:
        emulator.load(ptx, "k")
    assert re.search(words, str(e.value)), str(e.value)


def test_endless_loops_end():
    with pytest.raises(emulator.EmulatorFault) as e:
        emulator.launch(ptx_kernel("L: bra L;", params=0), "k", 1, 32, [], max_steps=1000)
    assert e.value.kind == "limit"
