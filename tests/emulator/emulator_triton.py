"""Kernels that Triton compiles with no GPU: the oracle the emulator is anchored to."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest

from cupyq import emulator

pytest.importorskip("triton", reason="triton is not installed")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel: PTX, its entry, dynamic shared memory and threads."""

    ptx: str
    entry: str
    shared: int
    threads: int

    def run(self, grid: tuple, args: list, ptx: str | None = None, **options: Any) -> emulator.Result:
        """Launch it; Triton adds two hidden pointers (scratch memory) at the end."""
        return emulator.launch(
            ptx or self.ptx, self.entry, grid, self.threads, [*args, None, None], self.shared, **options
        )


def build(fn: Any, cc: int, signature: dict, constants: dict, aligned: tuple = (), **options: Any) -> Kernel:
    names = list(signature)
    source = ASTSource(
        fn,
        signature=signature,
        constexprs={(names.index(k),): v for k, v in constants.items()},
        attrs={(names.index(k),): [["tt.divisibility", 16]] for k in aligned},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = triton.compile(source, target=GPUTarget("cuda", cc, 32), options=options)
    threads = 32 * compiled.metadata.num_warps * getattr(compiled.metadata, "num_ctas", 1)
    return Kernel(compiled.asm["ptx"], compiled.metadata.name, compiled.metadata.shared, threads)


@triton.jit
def matmul(
    a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACC: tl.constexpr, OUT: tl.constexpr
):
    pm = tl.program_id(0)
    pn = tl.program_id(1)
    rm = pm * BM + tl.arange(0, BM)
    rn = pn * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), ACC)
    for k in range(0, K, BK):
        x = tl.load(a + rm[:, None] * K + (k + rk)[None, :])
        y = tl.load(b + (k + rk)[:, None] * N + rn[None, :])
        acc = tl.dot(x, y, acc, out_dtype=ACC)
    tl.store(c + rm[:, None] * N + rn[None, :], acc.to(OUT))


TYPES = {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32, "i32": tl.int32}


@lru_cache(maxsize=32)
def compile_matmul(cc: int, dtype: str, out: str, bm: int, bn: int, bk: int, stages: int, warps: int = 4) -> Kernel:
    signature = {"a": f"*{dtype}", "b": f"*{dtype}", "c": f"*{out}", "M": "i32", "N": "i32", "K": "i32"}
    signature.update(dict.fromkeys(("BM", "BN", "BK", "ACC", "OUT"), "constexpr"))
    acc = tl.int32 if dtype == "i8" else tl.float32
    constants = {"BM": bm, "BN": bn, "BK": bk, "ACC": acc, "OUT": TYPES[out]}
    return build(matmul, cc, signature, constants, ("a", "b", "c", "N", "K"), num_stages=stages, num_warps=warps)


TYPES["fp8e4nv"] = tl.float8e4nv


@triton.jit
def matmul_descriptors(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, OUT: tl.constexpr):
    pm = tl.program_id(0) * BM
    pn = tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = a.load([pm, k])
        y = b.load([k, pn])
        acc = tl.dot(x, y, acc)
    c.store([pm, pn], acc.to(OUT))


@triton.jit
def matmul_device_descriptors(
    a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, OUT: tl.constexpr
):
    a_map = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    b_map = tl.make_tensor_descriptor(b, [K, N], [N, 1], [BK, BN])
    c_map = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN])
    pm = tl.program_id(0) * BM
    pn = tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = a_map.load([pm, k])
        y = b_map.load([k, pn])
        acc = tl.dot(x, y, acc)
    c_map.store([pm, pn], acc.to(OUT))


@triton.jit
def softmax(x, y, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    value = tl.load(x + row * columns + at, mask=inside, other=-float("inf"))
    value = tl.exp(value - tl.max(value, axis=0))
    tl.store(y + row * columns + at, value / tl.sum(value, axis=0), mask=inside)


@triton.jit
def histogram(x, counts, total, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(x + at, mask=inside, other=0)
    tl.atomic_add(counts + value, 1, mask=inside)
    tl.atomic_add(total, tl.sum(tl.where(inside, value, 0), axis=0))


@lru_cache(maxsize=8)
def compile_descriptors(cc: int, dtype: str, out: str, b: int, stages: int, device: bool = False) -> Kernel:
    if device:
        signature = {"a": f"*{dtype}", "b": f"*{dtype}", "c": f"*{out}"}
        aligned: tuple = ("a", "b", "c", "N", "K")
    else:
        signature = {
            "a": f"tensordesc<{dtype}[{b},{b}]>",
            "b": f"tensordesc<{dtype}[{b},{b}]>",
            "c": f"tensordesc<{out}[{b},{b}]>",
        }
        aligned = ()
    signature.update({"M": "i32", "N": "i32", "K": "i32"})
    signature.update(dict.fromkeys(("BM", "BN", "BK", "OUT"), "constexpr"))
    fn = matmul_device_descriptors if device else matmul_descriptors
    return build(
        fn, cc, signature, {"BM": b, "BN": b, "BK": b, "OUT": TYPES[out]}, aligned, num_stages=stages, num_warps=4
    )


def compile_softmax(cc: int, block: int) -> Kernel:
    return build(
        softmax, cc, {"x": "*fp32", "y": "*fp32", "columns": "i32", "BLOCK": "constexpr"}, {"BLOCK": block}, num_warps=4
    )


def compile_histogram(cc: int) -> Kernel:
    signature = {"x": "*i32", "counts": "*i32", "total": "*i32", "n": "i32", "BLOCK": "constexpr"}
    return build(histogram, cc, signature, {"BLOCK": 256}, num_warps=4)
