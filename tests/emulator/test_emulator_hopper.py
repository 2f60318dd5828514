"""wgmma descriptors, clusters, mbarriers and bulk copies written by hand in PTX."""

# ruff: noqa: E501 (kernels stay on one line)
from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from emulator_cuda import ptx_kernel

from cupyq import emulator

SPAN = {"none": 16, "32B": 32, "64B": 64, "128B": 128}
FIELD = {"none": 0, "128B": 1, "64B": 2, "32B": 3}
XOR = {"none": 0, "32B": 1, "64B": 3, "128B": 7}


def place(r: int, k: int, size: int, mode: str, transposed: bool, lbo: int, sbo: int) -> int:
    """Byte of element (r, k) of an operand, from the canonical layouts of the ISA (in CuTe's notation: see its comment)."""
    span = SPAN[mode]
    if not transposed:
        byte = k * size
        if mode == "none":  # ((8, n), 2) : ((16 bytes, SBO), LBO)
            at = (r // 8) * sbo + (r % 8) * 16 + (byte // 16) * lbo + byte % 16
        else:  # ((8, n), k) : ((span, SBO), 1)
            at = (r // 8) * sbo + (r % 8) * span + byte
    elif mode == "none":  # ((8, n), (8, k)) : ((1, SBO), (16 bytes, LBO))
        at = (r // 8) * sbo + (r % 8) * size + (k % 8) * 16 + (k // 8) * lbo
    else:  # ((span, n), (8, k)) : ((1, LBO), (span, SBO))
        wide = span // size
        at = (r // wide) * lbo + (r % wide) * size + (k % 8) * span + (k // 8) * sbo
    return at ^ ((at >> 7 & XOR[mode]) << 4)


def fill(matrix: np.ndarray, mode: str, transposed: bool, lbo: int, sbo: int) -> np.ndarray:
    out = np.zeros(8192, np.uint8)
    size = matrix.itemsize
    raw = matrix.view(np.uint8).reshape(*matrix.shape, size)
    for r in range(matrix.shape[0]):
        for k in range(matrix.shape[1]):
            at = place(r, k, size, mode, transposed, lbo, sbo)
            out[at : at + size] = raw[r, k]
    return out


@pytest.mark.parametrize("mode", list(SPAN))
@pytest.mark.parametrize(
    ("t", "transposed"),
    [
        ("f16", (0, 0)),
        ("f16", (1, 0)),
        ("f16", (0, 1)),
        ("bf16", (1, 1)),
        ("e4m3", (0, 0)),
        ("s8", (0, 0)),
        ("tf32", (0, 0)),
    ],
)
@pytest.mark.parametrize("from_registers", [False, True])
def test_wgmma(mode, t, transposed, from_registers, rng):
    if from_registers and (transposed[0] or t in ("tf32", "s8")):
        pytest.skip("A in registers is not transposed; one case of each width is enough")
    dtype = {
        "f16": np.float16,
        "bf16": ml_dtypes.bfloat16,
        "e4m3": ml_dtypes.float8_e4m3fn,
        "s8": np.int8,
        "tf32": np.float32,
    }[t]
    size = np.dtype(dtype).itemsize
    k, n = 32 // size, 64
    a, b = (rng.integers(-4, 5, (rows, k)).astype(np.float32).astype(dtype) for rows in (64, n))

    def offsets(flip: int) -> tuple[int, int]:
        if not flip:
            return (128, 256) if mode == "none" else (0, 8 * SPAN[mode])
        return (1024, 128) if mode == "none" else (SPAN[mode] * 16, SPAN[mode] * 8)

    (la, sa), (lb, sb) = offsets(transposed[0]), offsets(transposed[1])
    whole = np.concatenate((fill(a, mode, bool(transposed[0]), la, sa), fill(b, mode, bool(transposed[1]), lb, sb)))
    acc = "s32" if t == "s8" else "f32"
    regs = ", ".join(f"%r{i}" for i in range(32))
    flips = (
        ", 1, 1" + (f", {transposed[1]}" if from_registers else f", {transposed[0]}, {transposed[1]}")
        if size == 2
        else ", 1, 1"
        if t != "s8"
        else ""
    )
    if from_registers:
        operand = "{%r40, %r41, %r42, %r43}"
    else:
        operand = "%rd20"
    high_a, high_b = ((FIELD[mode] << 62) | (s >> 4) << 32 | (lo >> 4) << 16 for lo, s in ((la, sa), (lb, sb)))
    body = f"""mov.u32 %r200, %tid.x; mov.u32 %r201, tile; mad.lo.u32 %r202, %r200, 16, %r201; mad.wide.u32 %rd1, %r200, 16, %q1; mov.u32 %r203, 0;
    C: ld.global.v4.u32 {{%r210, %r211, %r212, %r213}}, [%rd1]; st.shared.v4.u32 [%r202], {{%r210, %r211, %r212, %r213}};
    add.u32 %r202, %r202, 2048; add.u64 %rd1, %rd1, 2048; add.u32 %r203, %r203, 1; setp.lt.u32 %p1, %r203, 8; @%p1 bra C;
    fence.proxy.async; bar.sync 0;
    mad.wide.u32 %rd2, %r200, 16, %q2; ld.global.v4.u32 {{%r40, %r41, %r42, %r43}}, [%rd2];
    cvt.u64.u32 %rd3, %r201; shr.u64 %rd4, %rd3, 4; or.b64 %rd20, %rd4, {high_a}; add.u64 %rd5, %rd3, 8192; shr.u64 %rd6, %rd5, 4; or.b64 %rd21, %rd6, {high_b};
    setp.ne.u32 %p2, 0, 0; wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n{n}k{k}.{acc}.{t}.{t} {{{regs}}}, {operand}, %rd21, %p2{flips};
    wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; mad.wide.u32 %rd7, %r200, 128, %q0;
    """ + "".join(f"st.global.u32 [%rd7+{4 * i}], %r{i};\n" for i in range(32))
    fragment = np.zeros((128, 16 // size), dtype)
    per = 4 // size
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for i in range(fragment.shape[1]):
            register, e = divmod(i, per)
            row = 16 * warp + lane // 4 + 8 * (register & 1)
            fragment[thread, i] = a[row, (lane % 4) * per + e + (register >> 1) * 4 * per]
    out = np.zeros((128, 32), np.int32 if t == "s8" else np.float32)
    ptx = ptx_kernel(body, params=3, shared=".shared .align 1024 .b8 tile[16384];")
    emulator.launch(ptx, "k", 1, 128, [out, whole, fragment])
    want = a.astype(np.float64) @ b.astype(np.float64).T
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for i in range(32):
            row = 16 * warp + lane // 4 + 8 * (i >> 1 & 1)
            assert out[thread, i] == want[row, 8 * (i // 4) + 2 * (lane % 4) + (i & 1)]


CLUSTER = """mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; mov.u32 %r3, tile; mad.lo.u32 %r4, %r1, 4, %r3; mad.lo.u32 %r5, %r2, 100, %r1; st.shared.u32 [%r4], %r5;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
xor.b32 %r6, %r2, 1; mapa.shared::cluster.u32 %r7, %r4, %r6; ld.shared::cluster.u32 %r8, [%r7];
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
mov.u32 %r9, %ctaid.x; mad.lo.u32 %r10, %r9, 32, %r1; mad.wide.u32 %rd1, %r10, 4, %q0; st.global.u32 [%rd1], %r8;"""


@pytest.mark.parametrize("seed", [None, 1])
def test_distributed_shared_memory(seed):
    y = np.zeros((4, 32), np.uint32)
    ptx = ptx_kernel(CLUSTER, params=1, shared=".shared .align 16 .b8 tile[128];")
    emulator.launch(ptx, "k", 4, 32, [y], cluster=2, seed=seed)
    assert np.array_equal(y, np.arange(32) + 100 * np.array([[1], [0], [1], [0]]))


MULTICAST = """mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; mov.u32 %r3, tile; mov.u32 %r4, bar; setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r2, 0; and.pred %p3, %p1, %p2;
@%p1 mbarrier.init.shared.b64 [%r4], 1; fence.mbarrier_init.release.cluster; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 128; mov.b16 %h1, 3;
@%p3 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r3], [%q1], 128, [%r4], %h1;
W: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r4], 0; @!%p4 bra W;
mad.lo.u32 %r5, %r1, 4, %r3; ld.shared.u32 %r8, [%r5];
mov.u32 %r9, %ctaid.x; mad.lo.u32 %r10, %r9, 32, %r1; mad.wide.u32 %rd1, %r10, 4, %q0; st.global.u32 [%rd1], %r8;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""


def test_multicast():
    x, y = np.arange(32, dtype=np.uint32) * 3, np.zeros((2, 32), np.uint32)
    ptx = ptx_kernel(MULTICAST, params=2, shared=".shared .align 128 .b8 tile[128]; .shared .align 8 .b8 bar[8];")
    emulator.launch(ptx, "k", 2, 32, [y, x], cluster=2)
    assert np.array_equal(y, np.stack([x, x]))


# Each block fills `mine` and sends it to its neighbour's `tile`, whose barrier counts the bytes.
SEND = """mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; mov.u32 %r3, tile; mov.u32 %r4, bar; mov.u32 %r5, mine; setp.eq.u32 %p1, %r1, 0;
mad.lo.u32 %r6, %r1, 4, %r5; mad.lo.u32 %r7, %r2, 100, %r1; st.shared.u32 [%r6], %r7;
@%p1 mbarrier.init.shared.b64 [%r4], 1; fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta; bar.sync 0;
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r4], 128;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
xor.b32 %r8, %r2, 1; mapa.shared::cluster.u32 %r9, %r3, %r8; mapa.shared::cluster.u32 %r10, %r4, %r8;
SENDING
AGAIN: mbarrier.try_wait.parity.shared.b64 %p2, [%r4], 0; @!%p2 bra AGAIN;
mad.lo.u32 %r12, %r1, 4, %r3; ld.shared.u32 %r13, [%r12]; mad.lo.u32 %r14, %r2, 32, %r1; mad.wide.u32 %rd1, %r14, 4, %q0; st.global.u32 [%rd1], %r13;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""
WAITING = "AGAIN: mbarrier.try_wait.parity.shared.b64 %p2, [%r4], 0; @!%p2 bra AGAIN;"
SENDINGS = {
    "st.async": "mad.lo.u32 %r11, %r1, 4, %r9; st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r11], %r7, [%r10];",
    "cp.async.bulk": "@%p1 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r9], [%r5], 128, [%r10];",
}


@pytest.mark.parametrize("how", SENDINGS)
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_blocks_of_a_cluster_send_each_other_shared_memory(how, seed):
    y = np.zeros((2, 32), np.uint32)
    shared = ".shared .align 128 .b8 tile[128]; .shared .align 128 .b8 mine[128]; .shared .align 8 .b8 bar[8];"
    ptx = ptx_kernel(SEND.replace("SENDING", SENDINGS[how]), params=1, shared=shared)
    emulator.launch(ptx, "k", 2, 32, [y], cluster=2, seed=seed)
    assert np.array_equal(y, [np.arange(32) + 100, np.arange(32)])


@pytest.mark.parametrize("how", SENDINGS)
def test_reading_what_a_neighbour_sends_without_waiting_is_a_fault(how):
    ptx = ptx_kernel(
        SEND.replace("SENDING", SENDINGS[how]).replace(WAITING, ""),
        params=1,
        shared=".shared .align 128 .b8 tile[128]; .shared .align 128 .b8 mine[128]; .shared .align 8 .b8 bar[8];",
    )
    with pytest.raises(emulator.EmulatorFault):
        emulator.launch(ptx, "k", 2, 32, [np.zeros((2, 32), np.uint32)], cluster=2)
