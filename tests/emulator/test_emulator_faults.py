"""Planted faults: each check has kernels that commit it, caught at the right line, and clean twins that pass."""

# ruff: noqa: E501 (kernels stay on one line)
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from emulator_cuda import cuda_to_ptx

from cupyq import emulator

HEAD = """
__device__ __forceinline__ unsigned at(const void* p) {
    unsigned r; asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(r) : "l"(p)); return r; }
__device__ __forceinline__ void copy16(void* d, const void* s) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at(d)), "l"(s) : "memory"); }
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait0() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ void wait1() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }
__device__ __forceinline__ void init(void* b, int n) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(at(b)), "r"(n) : "memory"); }
__device__ __forceinline__ void arrive(void* b) { asm volatile("{ .reg .b64 s; mbarrier.arrive.shared.b64 s, [%0]; }" :: "r"(at(b)) : "memory"); }
__device__ __forceinline__ void expect(void* b, int n) {
    asm volatile("{ .reg .b64 s; mbarrier.arrive.expect_tx.shared.b64 s, [%0], %1; }" :: "r"(at(b)), "r"(n) : "memory"); }
__device__ __forceinline__ void wait(void* b, int parity) {
    asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @!p bra W; }" :: "r"(at(b)), "r"(parity) : "memory"); }
__device__ __forceinline__ void bulk(void* d, const void* s, int n, void* b) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :: "r"(at(d)), "l"(s), "r"(n), "r"(at(b)) : "memory"); }
__device__ __forceinline__ void bulk_out(void* d, const void* s, int n) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" :: "l"(d), "r"(at(s)), "r"(n) : "memory"); }
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ void proxy() { asm volatile("fence.proxy.async;" ::: "memory"); }
extern "C" __global__ void k(float* a, float* b, int n) {
    int t = threadIdx.x; int bid = blockIdx.x; (void)t; (void)bid;
"""


@dataclass(frozen=True)
class Plant:
    """A kernel's body, what makes it wrong, what makes it right, and where the fault must be seen."""

    name: str
    kind: str
    body: str  # holds FAULT where the two differ
    wrong: str
    right: str
    at: str  # words in the PTX line at fault
    block: int = 64
    grid: int = 1
    n: int = 64
    arch: str = "sm_80"
    seed: int | None = None


PLANTS = [
    # ---- memory
    Plant("read past the end", "memory", "b[t] = a[t + FAULT];", "1", "0", "ld.global"),
    Plant("write past the end", "memory", "b[t + FAULT] = a[t];", "1", "0", "st.global"),
    Plant("read before the start", "memory", "b[t] = a[t - FAULT];", "1", "0", "ld.global"),
    Plant("a far index", "memory", "b[t] = a[t + FAULT];", "1000000", "0", "ld.global"),
    Plant("a guard off by one", "memory", "if (t <= n - FAULT) b[t] = a[t];", "0", "1", "ld.global", block=96),
    Plant("a misaligned vector", "memory", "if (t < 15) { float4 v = *(float4*)(a + 4 * t + FAULT); b[t] = v.x + v.w; }".replace("float4", "F4"), "1", "0", "ld.global.v4"),
    Plant("a null pointer", "memory", "float* p = FAULT; b[t] = p[t];", "(float*)(unsigned long long)(n - 64)", "a", "ld"),
    Plant("shared past the end", "memory", "extern __shared__ float s[]; s[t + FAULT] = a[t]; b[t] = s[t + FAULT];", "65", "0", "st.shared"),
    Plant("misaligned shared", "memory", "extern __shared__ F4 s[]; F4 v = {1, 2, 3, 4}; if (t < 8) *(F4*)((char*)s + 16 * t + FAULT) = v; b[t] = 0;", "4", "0", "st.shared.v4"),
    Plant("cp.async past the end", "memory", "extern __shared__ F4 s[]; if (t < 16) copy16(s + t, a + 4 * t + FAULT); commit(); wait0(); __syncthreads(); b[t] = ((float*)s)[t];", "4", "0", "cp.async"),
    Plant("an atomic past the end", "memory", "atomicAdd(b + t + FAULT, a[t]);", "64", "0", "global.add"),
    # ---- init
    Plant("a shared tile never written", "init", "extern __shared__ float s[]; FAULT s[t] = a[t]; __syncthreads(); b[t] = s[63 - t];", "if (t < 60)", "", "ld.shared"),
    Plant("a local array never written", "init", "volatile float l[4]; FAULT l[n & 3] = a[t]; b[t] = l[n & 3];", "if (t > 2)", "", "ld"),
    Plant("cp.async without a wait", "init", "extern __shared__ F4 s[]; if (t < 16) copy16(s + t, a + 4 * t); commit(); FAULT __syncthreads(); b[t] = ((float*)s)[t];", "", "wait0();", "ld.shared"),
    Plant("cp.async waited for one group too few", "init", "extern __shared__ F4 s[]; if (t < 16) copy16(s + t, a + 4 * t); commit(); commit(); FAULT __syncthreads(); b[t] = ((float*)s)[t];".replace("commit(); commit();", "commit();"), "wait1();", "wait0();", "ld.shared"),
    Plant("cp.async not committed", "init", "extern __shared__ F4 s[]; if (t < 16) copy16(s + t, a + 4 * t); FAULT wait0(); __syncthreads(); b[t] = ((float*)s)[t];", "", "commit();", "ld.shared"),
    Plant("a bulk copy not waited for", "init", "extern __shared__ __align__(128) float s[]; __shared__ unsigned long long bar; if (t == 0) init(&bar, 1); __syncthreads(); if (t == 0) { expect(&bar, 256); bulk(s, a, 256, &bar); } FAULT b[t] = s[t];", "", "wait(&bar, 0);", "ld.shared", arch="sm_90"),
    # ---- race
    Plant("no barrier between write and read", "race", "extern __shared__ float s[]; s[t] = a[t]; FAULT; b[t] = s[63 - t];", "", "__syncthreads()", "ld.shared"),
    Plant("no barrier between read and write", "race", "extern __shared__ float s[]; s[t] = a[t]; __syncthreads(); float v = s[63 - t]; FAULT; s[t] = v; __syncthreads(); b[t] = s[t];", "", "__syncthreads()", "st.shared"),
    Plant("two warps write one word", "race", "extern __shared__ float s[]; s[t & FAULT] = a[t]; __syncthreads(); b[t] = s[t & FAULT];", "31", "63", "st.shared"),
    Plant("a loop without its second barrier", "race", "extern __shared__ float s[]; float v = 0; for (int i = 0; i < 3; i++) { s[t] = a[t] + i; __syncthreads(); v += s[63 - t]; FAULT; } b[t] = v;", "", "__syncthreads()", "st.shared"),
    Plant("cp.async into a tile others still read", "race", "extern __shared__ F4 s[]; if (t < 16) copy16(s + t, a + 4 * t); commit(); wait0(); __syncthreads(); float v = ((float*)s)[63 - t]; FAULT; if (t < 16) copy16(s + t, a); commit(); wait0(); __syncthreads(); b[t] = v + ((float*)s)[t];", "", "__syncthreads()", "cp.async"),
    Plant("cp.async landed, no barrier", "race", "extern __shared__ F4 s[]; if (t < 16) copy16(s + t, a + 4 * t); commit(); wait0(); FAULT; b[t] = ((float*)s)[t];", "", "__syncthreads()", "ld.shared"),
    Plant("two blocks write one place", "race", "b[t + FAULT] = a[t];", "0", "64 * bid", "st.global", grid=2, n=128),
    Plant("two waves of blocks write one place", "race", "if (bid == 0 || bid == 4000) b[t + FAULT] = a[t];", "0", "(bid ? 64 : 0)", "st.global", grid=4001, n=128),
    Plant("a flag without a fence", "race", "__shared__ int last; b[64 + t + 64 * bid] = a[t]; FAULT; __syncthreads(); if (t == 0) last = atomicAdd((int*)b, 1) == 1; __syncthreads(); if (last) { __threadfence(); float v = b[64 + t] + b[128 + t]; b[192 + t] = v; }", "", "__threadfence()", "ld.global", grid=2, n=256),
    Plant("a barrier forgotten before the flag", "race", "__shared__ int last; b[64 + t + 64 * bid] = a[t]; __threadfence(); FAULT; if (t == 0) last = atomicAdd((int*)b, 1) == 1; __syncthreads(); if (last) { __threadfence(); float v = b[64 + t] + b[128 + t]; b[192 + t] = v; }", "", "__syncthreads()", "ld.global", grid=2, n=256),
    Plant("in place over another block's input", "race", "b[t + 64 * bid] = FAULT;", "b[127 - t - 64 * bid]", "b[t + 64 * bid] + 1", "st.global", grid=2, n=128),
    Plant("an mbarrier that not all arrive at", "race", "extern __shared__ float s[]; __shared__ unsigned long long bar; if (t == 0) init(&bar, FAULT); __syncthreads(); s[t] = a[t]; if (t >= 64 - FAULT) arrive(&bar); wait(&bar, 0); b[t] = s[63 - t];", "32", "64", "ld.shared", arch="sm_90"),
    Plant("an mbarrier used before its init is seen", "race", "__shared__ unsigned long long bar; if (t == 0) init(&bar, 64); FAULT; arrive(&bar); wait(&bar, 0); b[t] = a[t];", "", "__syncthreads()", "mbarrier", arch="sm_90"),
    Plant("a bulk store without a proxy fence", "race", "extern __shared__ __align__(128) float s[]; s[t] = a[t]; FAULT; __syncthreads(); if (t == 0) { bulk_out(b, s, 256); bulk_commit(); bulk_wait(); }", "", "proxy()", "cp.async.bulk", arch="sm_90"),
    Plant("a tile overwritten under a bulk store", "race", "extern __shared__ __align__(128) float s[]; s[t] = a[t]; proxy(); __syncthreads(); if (t == 0) { bulk_out(b, s, 256); bulk_commit(); FAULT; } __syncthreads(); s[t] = 0;", "", "bulk_wait()", "st.shared", arch="sm_90"),
    # ---- sync
    Plant("a barrier in half a warp", "sync", "if (t FAULT) __syncthreads(); b[t] = a[t]; __syncthreads();", "% 2", ">= 0", "bar.sync"),
    Plant("warps at different barriers", "sync", "if (t FAULT 32) { __syncthreads(); b[t] = 1; } else { b[t] = a[t]; __syncthreads(); b[t] = 2; }", "<", "< 0 *", "bar"),
    Plant("a shuffle that names absent lanes", "sync", "float v = a[t]; if (t % 32 < FAULT) v = __shfl_xor_sync(0xffffffffu, v, 1); b[t] = v; __syncwarp(); b[t] += 1;", "16", "32", "shfl"),
    Plant("a lane outside its own mask", "sync", "b[t] = __shfl_xor_sync(FAULT, a[t], 1);", "0xffff", "0xffffffffu", "shfl"),
    Plant("an mbarrier never initialized", "sync", "__shared__ unsigned long long bar[2]; if (t == 0) init(bar, 64); __syncthreads(); arrive(bar + FAULT); wait(bar, 0); b[t] = a[t];", "1", "0", "mbarrier", arch="sm_90"),
    # ---- deadlock
    Plant("a lock nobody opens", "deadlock", "if (t == 0) { volatile int* f = (int*)b; while (*f == FAULT); } b[t + 64] = a[t];", "0", "1", "ld.volatile", n=128),
    Plant("a phase that never ends", "deadlock", "__shared__ unsigned long long bar; if (t == 0) init(&bar, FAULT); __syncthreads(); arrive(&bar); wait(&bar, 0); b[t] = a[t];", "65", "64", "mbarrier", arch="sm_90"),
]  # fmt: skip

VECTOR = "struct __align__(16) F4 { float x, y, z, w; };\n"


def run(plant: Plant, text: str, seed: int | None = None):
    source = VECTOR + HEAD + plant.body.replace("FAULT", text) + "\n}\n"
    ptx = cuda_to_ptx(source, plant.arch)
    a = np.arange(64, dtype=np.float32)
    b = np.zeros(plant.n, np.float32)
    emulator.launch(ptx, "k", plant.grid, plant.block, [a, b, np.int32(64)], 256, seed=seed)
    return b


@pytest.mark.parametrize("plant", PLANTS, ids=lambda p: p.name)
def test_planted_fault_is_caught_at_its_line(plant):
    with pytest.raises(emulator.EmulatorFault) as e:
        run(plant, plant.wrong)
    fault = e.value
    assert fault.kind == plant.kind, str(fault)
    assert plant.at in fault.text, str(fault)
    assert fault.thread is not None
    assert str(fault.line) in str(fault)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda p: p.name)
@pytest.mark.parametrize("seed", [None, 5])
def test_the_clean_twin_passes(plant, seed):
    if seed is not None and plant.grid > 100:
        pytest.skip("a shuffled schedule of 4001 blocks takes too long for this suite")
    run(plant, plant.right, seed)
