"""The packing kernel, run in the emulator: equal to the NumPy packer bit for bit, padding included."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import cupyq
from cupyq import compiler, devices, emulator, kernels, layout, packing
from cupyq.errors import CompileError, DTypeError, ShapeError
from cupyq.kernels import PackConfig, Problem
from fake_cupy import FakeCuPy

BITS = {"w2a16": 2, "w4a16": 4, "w8a16": 8, "w8a8-int8": 8, "w8a8-fp8": 8}
OPS = tuple(BITS)
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_120")
GUARD = 64


def codes_of(op: str, k: int, n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << BITS[op], (k, n)).astype(np.uint8)


def expected(op: str, codes: np.ndarray, last_row: np.ndarray | None = None) -> np.ndarray:
    if op.startswith("w8a8"):
        return layout.pack8(codes)
    return layout.pack16(codes, BITS[op], 0 if last_row is not None else 1 << BITS[op] - 1, last_row)


def pack(op, codes, cfg=None, arch="sm_80", seed=None, symmetric=True, **arguments):
    """Pack in the emulator, the words set between guards; return (packed, counters)."""
    k, n = codes.shape
    prob = Problem(op, 1, n, k, symmetric=symmetric)
    cfg = cfg or kernels.pack.default(prob)
    compiled = compiler.compile_kernel(cfg, prob, arch)
    assert compiled.spill_bytes == 0
    shape = layout.packed_shape(k, n, BITS[op])
    whole = np.full(int(np.prod(shape)) + 2 * GUARD, 0xDEADBEEF, np.uint32)
    call = kernels.call(cfg, prob, codes, out=whole[GUARD:-GUARD].reshape(shape), **arguments)
    result = emulator.launch(compiled.ptx, call.entry, call.grid, call.block, call.args, call.shared_bytes, seed=seed)
    assert (whole[:GUARD] == 0xDEADBEEF).all()
    assert (whole[-GUARD:] == 0xDEADBEEF).all()
    return call.out, result.counters


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(256, 128), (200, 72), (1, 1), (63, 17), (65, 131), (129, 260), (640, 144)])
def test_equals_the_numpy_packer(op, shape):
    codes = codes_of(op, *shape)
    packed, _ = pack(op, codes)
    assert np.array_equal(packed, expected(op, codes))


@pytest.mark.parametrize("op", ["w2a16", "w4a16", "w8a16"])
@pytest.mark.parametrize("shape", [(256, 128), (200, 72), (63, 17)])
def test_zero_points_pad_the_last_unit(op, shape):
    codes, last_row = codes_of(op, *shape), codes_of(op, 1, shape[1], 1)[0]
    packed, _ = pack(op, codes, symmetric=False, last_row=last_row)
    assert np.array_equal(packed, expected(op, codes, last_row))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("warps", [1, 2, 4, 8])
def test_every_config(op, warps):
    codes = codes_of(op, 700, 144)
    if kernels.check(PackConfig(warps), Problem(op, 1, 144, 700), "sm_80"):
        pytest.fail("every width is legal on sm_80")
    packed, _ = pack(op, codes, PackConfig(warps))
    assert np.array_equal(packed, expected(op, codes))


@pytest.mark.parametrize("op", OPS)
def test_rows_are_taken_in_the_order_of_perm(op):
    codes, perm = codes_of(op, 200, 48), np.random.default_rng(2).permutation(200).astype(np.int32)
    packed, _ = pack(op, codes, perm=perm)
    assert np.array_equal(packed, expected(op, codes[perm]))


@pytest.mark.parametrize("view", ["columns", "rows", "transposed", "odd start", "stride of 52"])
def test_views(view):
    whole = codes_of("w4a16", 130, 104)
    codes = {
        "columns": whole[:, 16:64],
        "rows": whole[::2, :96],
        "transposed": whole.T[:96, :128],
        "odd start": whole[:, 3:51],
        "stride of 52": whole.reshape(260, 52)[:, 4:36],
    }[view]
    packed, _ = pack("w4a16", codes)
    assert np.array_equal(packed, expected("w4a16", np.ascontiguousarray(codes)))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("op", ["w2a16", "w4a16", "w8a16", "w8a8-int8"])
@pytest.mark.parametrize("n", [96, 36, 33])
def test_every_arch(arch, op, n):
    codes = codes_of(op, 140, n)
    packed, _ = pack(op, codes, arch=arch, seed=1)
    assert np.array_equal(packed, expected(op, codes))


@pytest.mark.parametrize("op", OPS)
def test_reads_a_byte_a_code_and_writes_whole_sectors(op):
    codes = codes_of(op, 512, 256)
    packed, counters = pack(op, codes)
    assert counters.dram_bytes == codes.nbytes + packed.nbytes
    assert counters.global_sectors == counters.global_ideal_sectors
    assert counters.global_requests == {"load": codes.nbytes // 512, "store": packed.nbytes // 512}  # 16 bytes a lane
    assert not counters.shared_conflicts


def test_turing_gives_a_block_64_kib():
    reason = kernels.check(PackConfig(4), Problem("w2a16", 1, 64, 64), "sm_75")
    assert reason == "needs 80.0 KiB of shared memory a block; this device gives 64 KiB"
    assert "one of 1, 2, 4, 8" in kernels.check(PackConfig(3), Problem("w4a16", 1, 64, 64), "sm_80")


def test_wrong_codes_are_refused():
    prob = Problem("w4a16", 1, 32, 64)
    with pytest.raises(ShapeError, match=r"x has shape \(64, 16\); expected \(64, 32\)"):
        kernels.call(PackConfig(), prob, np.zeros((64, 16), np.uint8))
    with pytest.raises(DTypeError, match="x has dtype int8; expected uint8"):
        kernels.call(PackConfig(), prob, np.zeros((64, 32), np.int8))
    with pytest.raises(DTypeError, match="perm has dtype int64"):
        kernels.call(PackConfig(), prob, np.zeros((64, 32), np.uint8), perm=np.arange(64))


def test_a_config_goes_to_a_dict_and_back():
    cfg = PackConfig(2)
    assert kernels.from_dict(kernels.to_dict(cfg)) == cfg
    prob = Problem("w4a16", 1, 64, 64)
    assert list(kernels.helper_configs("pack", prob, "sm_80")) == [PackConfig(w) for w in (1, 2, 4, 8)]


# --- cupyq.pack -------------------------------------------------------------------------------------------------------


@pytest.fixture
def cupy(monkeypatch):
    fake = FakeCuPy(("h100-sxm",))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    devices._read_live.cache_clear()
    compiler.gpu._load.cache_clear()
    yield fake
    devices._read_live.cache_clear()
    compiler.gpu._load.cache_clear()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_cupyq_pack_launches_the_kernel(cupy, op, symmetric):
    if op.startswith("w8a8") and not symmetric:
        pytest.skip("no zero points")
    w = np.random.default_rng(3).standard_normal((200, 72)).astype(np.float32)
    here = cupyq.quantize(w, op, symmetric=symmetric)
    codes, scales, zeros = cupyq.unpack(here)
    there = cupyq.pack(
        cupy.asarray(codes.view(np.uint8) if op == "w8a8-fp8" else codes),
        cupy.asarray(scales),
        None if zeros is None else cupy.asarray(zeros),
        scheme=op,
    )
    assert [launched.entry.startswith("cupyq_pack") for launched in cupy.launches] == [True]
    assert there.packed.get().tobytes() == here.packed.tobytes()


def test_without_a_compiler_the_operations_of_cupy_pack(cupy, monkeypatch):
    def refuse(cfg, prob):
        raise CompileError("no NVRTC")

    monkeypatch.setattr(packing.compiler, "load", refuse)
    codes = codes_of("w4a16", 200, 72)
    packed = cupyq.pack(cupy.asarray(codes), cupy.asarray(np.ones((2, 72), np.float16)), scheme="w4a16").packed
    assert not cupy.launches
    assert np.array_equal(packed.get(), expected("w4a16", codes))


def test_no_output_features(cupy):
    packed = cupyq.pack(
        cupy.asarray(np.zeros((64, 0), np.uint8)), cupy.asarray(np.ones((1, 0), np.float16)), scheme="w4a16"
    ).packed
    assert packed.shape == (0, 1, 32, 4)
    assert not cupy.launches
