"""The dequantizing kernel, run in the emulator: every weight in its place, rounded once."""

from __future__ import annotations

import pytest

import cupyq
from cupyq.kernels import DequantConfig, Problem
from emulated import DTYPES, launch, weights


def check(
    k: int,
    n: int,
    group_size: int,
    symmetric: bool,
    dtype: str,
    cfg: DequantConfig,
    arch: str = "sm_80",
    op: str = "w4a16",
):
    qw = cupyq.quantize(weights(k, n), op, group_size=group_size, symmetric=symmetric)
    run = launch(cfg, Problem(op, 1, n, k, group_size, symmetric, dtype), None, qw, arch=arch)
    want = cupyq.dequantize(qw).astype(DTYPES[dtype])
    assert run.out.tobytes() == (want + 0 * want).tobytes() or (run.out == want).all()
    return run


@pytest.mark.parametrize("group_size", [16, 32, 64, 128, 256, -1])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_group_size_and_type(group_size, symmetric, dtype):
    check(200, 72, group_size, symmetric, dtype, DequantConfig(4, 1))


@pytest.mark.parametrize("cfg", [DequantConfig(w, u) for w in (4, 8, 16) for u in (1, 2, 4)], ids=repr)
def test_every_config(cfg):
    check(320, 136, 64, False, "float16", cfg)


@pytest.mark.parametrize("n", [1, 7, 8, 24, 127, 192])
@pytest.mark.parametrize("k", [1, 16, 63, 65])
def test_ragged_shapes(n, k):
    check(k, n, 16, False, "float16", DequantConfig(4, 2))


@pytest.mark.parametrize("op", ["w2a16", "w8a16"])
@pytest.mark.parametrize("group_size", [16, 128, -1])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_other_widths(op, group_size, dtype):
    check(200, 72, group_size, False, dtype, DequantConfig(4, 2), op=op)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_every_arch(arch):
    assert check(128, 64, 32, True, "float16", DequantConfig(), arch).compiled.spill_bytes == 0


def test_reads_half_a_byte_and_writes_two_bytes_a_weight():
    k, n = 512, 256
    run = check(k, n, 128, True, "float16", DequantConfig())
    scales = (k // 128) * n * 2
    assert run.counters.dram_bytes <= k * n // 2 + 2 * k * n + scales
