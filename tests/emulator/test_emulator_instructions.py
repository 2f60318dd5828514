"""Single instructions against plain Python integers, exact fractions, NumPy and ml_dtypes."""

# ruff: noqa: E501 (kernels stay on one line)
from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from emulator_cuda import ptx_kernel

from cupyq import emulator

LOAD = {16: ("ld.global.u16", "%h"), 32: ("ld.global.u32", "%r"), 64: ("ld.global.u64", "%rd")}


def run(text: str, out: type, *inputs: np.ndarray, arch: str = "sm_90a") -> np.ndarray:
    """Run `text` once for each element: operands are A, B, C (registers loaded from the inputs), the result is D."""
    n = len(inputs[0])
    threads = 128
    pad = -n % threads
    inputs = tuple(np.concatenate((x, np.zeros(pad, x.dtype))) for x in inputs)
    body = "mov.u32 %r200, %tid.x;\nmov.u32 %r201, %ctaid.x;\nmad.lo.u32 %r202, %r201, 128, %r200;\n"
    for i, x in enumerate(inputs):
        width = x.itemsize * 8
        load, kind = LOAD[width]
        body += f"mad.wide.u32 %rd{40 + i}, %r202, {x.itemsize}, %q{i + 1};\n{load} {kind}{i + 1}, [%rd{40 + i}];\n"
        text = text.replace("ABC"[i], f"{kind}{i + 1}")
    size = np.dtype(out).itemsize
    store, kind = LOAD[size * 8]
    text = text.replace("D", f"{kind}10")
    body += f"{text}\nmad.wide.u32 %rd50, %r202, {size}, %q0;\n{store.replace('ld', 'st')} [%rd50], {kind}10;\n"
    result = np.zeros(n + pad, out)
    ptx = ptx_kernel(body, params=len(inputs) + 1, arch=arch)
    emulator.launch(ptx, "k", (n + pad) // threads, threads, [result, *inputs])
    return result[:n]


def signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> bits - 1 else x


EDGES32 = [
    0,
    1,
    2,
    3,
    7,
    31,
    32,
    33,
    63,
    64,
    255,
    256,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0x80000001,
    0xFFFFFFFE,
    0xFFFFFFFF,
    0x12345678,
    0xDEADBEEF,
]
M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def prmt(a, b, s):
    both, out = b << 32 | a, 0
    for i in range(4):
        n = s >> 4 * i & 15
        byte = both >> 8 * (n & 7) & 255
        out |= (255 * (byte >> 7) if n & 8 else byte) << 8 * i
    return out


def bfe_s(a, p, n):
    p, n = p & 255, n & 255
    if n == 0:
        return 0
    sign = a >> min(p + n - 1, 31) & 1
    return sum(((a >> p + i & 1) if i < n and p + i < 32 else sign) << i for i in range(32))


def bfi(a, b, p, n):
    for i in range(n & 255):
        at = (p & 255) + i
        if at < 32:
            b = b & ~(1 << at) | (a >> i & 1) << at
    return b


def div_s(a, b):
    q = abs(signed(a, 32)) // abs(signed(b, 32))
    return (-q if (a ^ b) >> 31 else q) & M32


def rem_s(a, b):
    r = abs(signed(a, 32)) % abs(signed(b, 32))
    return (-r if a >> 31 else r) & M32


def lut(a, b, c, table):
    return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32))


TWO = {
    "add.s32 D, A, B;": lambda a, b: (a + b) & M32,
    "add.sat.s32 D, A, B;": lambda a, b: max(min(signed(a, 32) + signed(b, 32), 2**31 - 1), -(2**31)) & M32,
    "sub.u32 D, A, B;": lambda a, b: (a - b) & M32,
    "mul.lo.s32 D, A, B;": lambda a, b: a * b & M32,
    "mul.hi.u32 D, A, B;": lambda a, b: a * b >> 32,
    "mul.hi.s32 D, A, B;": lambda a, b: signed(a, 32) * signed(b, 32) >> 32 & M32,
    "min.s32 D, A, B;": lambda a, b: min(signed(a, 32), signed(b, 32)) & M32,
    "max.u32 D, A, B;": max,
    "shl.b32 D, A, B;": lambda a, b: a << b & M32 if b < 32 else 0,
    "shr.u32 D, A, B;": lambda a, b: a >> b if b < 32 else 0,
    "shr.s32 D, A, B;": lambda a, b: signed(a, 32) >> min(b, 31) & M32,
    "and.b32 D, A, B;": lambda a, b: a & b,
    "xor.b32 D, A, B;": lambda a, b: a ^ b,
    "popc.b32 D, A;": lambda a, b: a.bit_count(),
    "clz.b32 D, A;": lambda a, b: 32 - a.bit_length(),
    "brev.b32 D, A;": lambda a, b: int(f"{a:032b}"[::-1], 2),
    "bfind.u32 D, A;": lambda a, b: (a.bit_length() - 1) & M32,
    "abs.s32 D, A;": lambda a, b: abs(signed(a, 32)) & M32,
    "neg.s32 D, A;": lambda a, b: -a & M32,
    "bfe.u32 D, A, 4, 9;": lambda a, b: a >> 4 & 511,
    "bfe.s32 D, A, 4, 9;": lambda a, b: bfe_s(a, 4, 9),
    "bfe.s32 D, A, 28, 9;": lambda a, b: bfe_s(a, 28, 9),
    "bfe.s32 D, A, B, 8;": lambda a, b: bfe_s(a, b, 8),
    "bfe.u32 D, A, B, 40;": lambda a, b: a >> (b & 255),
    "bfi.b32 D, A, B, 5, 7;": lambda a, b: bfi(a, b, 5, 7),
    "bfi.b32 D, A, 0, B, 40;": lambda a, b: bfi(a, 0, b, 40),
    "prmt.b32 D, A, B, 0x5410;": lambda a, b: prmt(a, b, 0x5410),
    "prmt.b32 D, A, B, 0xb7f2;": lambda a, b: prmt(a, b, 0xB7F2),
    "prmt.b32 D, A, 77, B;": lambda a, b: prmt(a, 77, b),
    "shf.l.wrap.b32 D, A, B, 13;": lambda a, b: (b << 32 | a) << 13 >> 32 & M32,
    "shf.r.clamp.b32 D, A, 5, B;": lambda a, b: (5 << 32 | a) >> min(b, 32) & M32,
    "lop3.b32 D, A, B, 0x64006400, 0xea;": lambda a, b: lut(a, b, 0x64006400, 0xEA),
    "lop3.b32 D, A, B, 0x12345678, 0x96;": lambda a, b: lut(a, b, 0x12345678, 0x96),
    "lop3.b32 D, A, B, A, 0x1b;": lambda a, b: lut(a, b, a, 0x1B),
    "mad.lo.s32 D, A, B, A;": lambda a, b: (a * b + a) & M32,
    "{ .reg .pred p; setp.lt.s32 p, A, B; selp.b32 D, 5, A, p; }": lambda a, b: 5 if signed(a, 32) < signed(b, 32) else a,
    "{ .reg .pred p; setp.hi.u32 p, A, B; @p mov.u32 D, 1; @!p mov.u32 D, 2; }": lambda a, b: 1 if a > b else 2,
    "{ .reg .b16 x, y; mov.b32 {x, y}, A; mov.b32 D, {y, x}; }": lambda a, b: (a << 16 | a >> 16) & M32,
    "{ .reg .s16 x; cvt.s16.s8 x, A; cvt.s32.s16 D, x; }": lambda a, b: signed(a & 255, 8) & M32,
    "cvt.sat.u8.s32 D, A;": lambda a, b: min(max(signed(a, 32), 0), 255),
    "dp4a.s32.s32 D, A, B, A;": lambda a, b: (a + sum(signed(a >> 8 * i & 255, 8) * signed(b >> 8 * i & 255, 8) for i in range(4))) & M32,
    "slct.s32.s32 D, A, 9, B;": lambda a, b: a if signed(b, 32) >= 0 else 9,
}  # fmt: skip


@pytest.mark.parametrize("text", TWO)
def test_integer(text, rng):
    a = np.array(EDGES32 * len(EDGES32) + list(rng.integers(0, 1 << 32, 300)), np.uint32)
    b = np.concatenate(
        (np.repeat(np.array(EDGES32, np.uint32), len(EDGES32)), rng.integers(0, 1 << 32, 300).astype(np.uint32))
    )
    got = run(text, np.uint32, a, b)
    want = [TWO[text](int(x), int(y)) for x, y in zip(a, b, strict=True)]
    assert got.tolist() == want


@pytest.mark.parametrize(("text", "fn"), [("div.s32 D, A, B;", div_s), ("rem.s32 D, A, B;", rem_s), ("div.u32 D, A, B;", lambda a, b: a // b), ("rem.u32 D, A, B;", lambda a, b: a % b)])  # fmt: skip
def test_division(text, fn, rng):
    a = np.array(EDGES32 * len(EDGES32), np.uint32)
    b = np.maximum(np.repeat(np.array(EDGES32, np.uint32), len(EDGES32)), 1)
    assert run(text, np.uint32, a, b).tolist() == [fn(int(x), int(y)) for x, y in zip(a, b, strict=True)]


WIDE = {
    "add.s64 D, A, B;": lambda a, b: (a + b) & M64,
    "mul.lo.u64 D, A, B;": lambda a, b: a * b & M64,
    "mul.hi.u64 D, A, B;": lambda a, b: a * b >> 64,
    "mul.hi.s64 D, A, B;": lambda a, b: signed(a, 64) * signed(b, 64) >> 64 & M64,
    "shr.s64 D, A, 61;": lambda a, b: signed(a, 64) >> 61 & M64,
    "{ .reg .b32 s; cvt.u32.u64 s, B; shl.b64 D, A, s; }": lambda a, b: a << (b & M32) & M64 if b & M32 < 64 else 0,
    "min.s64 D, A, B;": lambda a, b: min(signed(a, 64), signed(b, 64)) & M64,
    "{ .reg .b32 x, y; mov.b64 {x, y}, A; mul.wide.s32 D, x, y; }": lambda a, b: (
        signed(a & M32, 32) * signed(a >> 32, 32) & M64
    ),
    "{ .reg .b32 c; popc.b64 c, A; cvt.u64.u32 D, c; }": lambda a, b: a.bit_count(),
    "{ .reg .b32 c; clz.b64 c, A; cvt.u64.u32 D, c; }": lambda a, b: 64 - a.bit_length(),
    "cvt.s64.s32 D, A;": lambda a, b: signed(a & M32, 32) & M64,
}


@pytest.mark.parametrize("text", WIDE)
def test_integer_64(text, rng):
    edges = [0, 1, 31, 63, 64, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, M64, 0x123456789ABCDEF0]
    a = np.array(edges * len(edges), np.uint64)
    b = np.repeat(np.array(edges, np.uint64), len(edges))
    assert run(text, np.uint64, a, b).tolist() == [WIDE[text](int(x), int(y)) for x, y in zip(a, b, strict=True)]


def floats32(rng, n: int) -> np.ndarray:
    """float32 of every exponent, with the special ones in front."""
    special = np.array(
        [
            0,
            0x80000000,
            1,
            0x80000001,
            0x7FFFFF,
            0x800000,
            0x3F800000,
            0xBF800000,
            0x7F7FFFFF,
            0x7F800000,
            0xFF800000,
            0x7FC00000,
        ],
        np.uint32,
    )
    return np.concatenate((special, rng.integers(0, 1 << 32, n).astype(np.uint32))).view(np.float32)


def same(got: np.ndarray, want: np.ndarray) -> bool:
    nan = np.isnan(want.astype(np.float64))
    return bool(np.all(np.isnan(got.astype(np.float64)) == nan)) and bool(
        np.all((got.view(f"u{got.itemsize}") == want.view(f"u{want.itemsize}"))[~nan])
    )


def test_narrow_floats_convert_exhaustively(rng):
    """Every float16 and bfloat16 to float32; every float16 to e4m3 and e5m2 with saturation."""
    bits = np.arange(65536, dtype=np.uint16)
    assert same(run("cvt.f32.f16 D, A;", np.uint32, bits).view(np.float32), bits.view(np.float16).astype(np.float32))
    assert same(
        run("mov.b16 %h9, 0; mov.b32 D, {%h9, A};", np.uint32, bits).view(np.float32),
        bits.view(ml_dtypes.bfloat16).astype(np.float32),
    )
    x = bits.view(np.float16).astype(np.float32)
    for name, dtype, top in (("e4m3", ml_dtypes.float8_e4m3fn, 448), ("e5m2", ml_dtypes.float8_e5m2, 57344)):
        with np.errstate(invalid="ignore"):
            want = np.clip(x, -top, top).astype(dtype)
        got = run(f"{{ .reg .b32 w; mov.b32 w, {{A, A}}; cvt.rn.satfinite.{name}x2.f16x2 D, w; }}", np.uint16, bits)
        assert same((got & 0xFF).astype(np.uint8).view(dtype), want)
        assert np.array_equal(got >> 8, got & 0xFF)
        pair = run(f"{{ cvt.rn.f16x2.{name}x2 D, A; }}", np.uint32, bits)
        assert same(
            (pair & 0xFFFF).astype(np.uint16).view(np.float16),
            (bits & 0xFF).astype(np.uint8).view(dtype).astype(np.float16),
        )
        assert same(
            (pair >> 16).astype(np.uint16).view(np.float16), (bits >> 8).astype(np.uint8).view(dtype).astype(np.float16)
        )


@pytest.mark.filterwarnings("ignore:overflow")
def test_float32_to_narrow(rng):
    x = floats32(rng, 20000)
    # Values next to midpoints of float16 and bfloat16 are where a wrong rounding shows.
    near = (np.arange(1, 3000, dtype=np.uint32) << 16 | 0x8000) + rng.integers(-1, 2, 2999).astype(np.uint32)
    x = np.concatenate((x, near.view(np.float32), rng.standard_normal(3000).astype(np.float32)))
    bits = x.view(np.uint32)
    assert same(run("cvt.rn.f16.f32 D, A;", np.uint16, bits).view(np.float16), x.astype(np.float16))
    assert same(run("cvt.rn.bf16.f32 D, A;", np.uint16, bits).view(ml_dtypes.bfloat16), x.astype(ml_dtypes.bfloat16))
    pair = run("cvt.rn.f16x2.f32 D, A, B;", np.uint32, bits, bits[::-1].copy())
    assert same((pair >> 16).astype(np.uint16).view(np.float16), x.astype(np.float16)), (
        "the first source goes to the upper half"
    )
    finite = np.isfinite(x)
    rz = run("cvt.rz.f16.f32 D, A;", np.uint16, bits).view(np.float16).astype(np.float64)
    assert np.all(np.abs(rz[finite]) <= np.abs(x[finite].astype(np.float64)))
    up = run("cvt.rp.f32.f64 D, A;", np.uint32, x.astype(np.float64).view(np.uint64)).view(np.float32)
    assert same(up, x)


def test_float_to_integer():
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 3e9, -3e9, 1e20, np.nan, np.inf, -np.inf, -1.0], np.float32)
    bits = x.view(np.uint32)
    assert run("cvt.rni.s32.f32 D, A;", np.int32, bits).tolist() == [
        0,
        2,
        2,
        0,
        -2,
        2**31 - 1,
        -(2**31),
        2**31 - 1,
        0,
        2**31 - 1,
        -(2**31),
        -1,
    ]
    assert run("cvt.rzi.u32.f32 D, A;", np.uint32, bits).tolist() == [0, 1, 2, 0, 0, 3000000000, 0, M32, 0, M32, 0, 0]
    assert run("cvt.rmi.s32.f32 D, A;", np.int32, bits).tolist()[:5] == [0, 1, 2, -1, -2]


def exact_fma(a, b, c, dtype):
    """One rounding of the exact value, by comparing neighbours as fractions."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    guess = dtype(np.float32(float(exact)) if dtype is not np.float32 else float(exact))
    candidates = {float(guess)}
    for direction in (-np.inf, np.inf):
        candidates.add(float(np.nextafter(guess, dtype(direction))))
    best = min(
        (abs(Fraction(v) - exact), int(dtype(v).view(f"u{np.dtype(dtype).itemsize}")) & 1, v)
        for v in candidates
        if np.isfinite(v)
    )
    return best[2]


def test_fma_rounds_once(rng):
    n = 4000
    a = (rng.integers(1, 1 << 24, n) * 2.0 ** rng.integers(-30, -20, n)).astype(np.float32)
    b = (rng.integers(1, 1 << 24, n) * 2.0 ** rng.integers(-30, -20, n)).astype(np.float32)
    c = (a.astype(np.float64) * b * rng.choice([-1, 1, 2.0**-24, 2.0**-25, 2.0**24], n)).astype(np.float32)
    got = run("fma.rn.f32 D, A, B, C;", np.uint32, *(x.view(np.uint32) for x in (a, b, c))).view(np.float32)
    assert got.tolist() == [exact_fma(x, y, z, np.float32) for x, y, z in zip(a, b, c, strict=True)]
    halves = [rng.standard_normal(n).astype(np.float16) * np.float16(2.0**k) for k in (0, 3, -4)]
    got = run("fma.rn.f16 D, A, B, C;", np.uint16, *(x.view(np.uint16) for x in halves)).view(np.float16)
    assert got.astype(float).tolist() == [exact_fma(x, y, z, np.float16) for x, y, z in zip(*halves, strict=True)]


def test_flush_to_zero_and_min_max():
    x = np.array([1e-40, -1e-40, 0.0, -0.0, np.nan, 1.0], np.float32)
    y = np.array([1.0, 1.0, -0.0, 0.0, 2.0, np.nan], np.float32)
    bits = [x.view(np.uint32), y.view(np.uint32)]
    assert run("mul.ftz.f32 D, A, B;", np.uint32, *bits)[:2].tolist() == [0, 0x80000000]
    assert run("mul.f32 D, A, B;", np.uint32, *bits)[:2].tolist() == x[:2].view(np.uint32).tolist()
    assert run("max.f32 D, A, B;", np.uint32, *bits)[2:].tolist() == [0, 0, 0x40000000, 0x3F800000]
    assert run("min.f32 D, A, B;", np.uint32, *bits)[2:4].tolist() == [0x80000000, 0x80000000]
    assert np.isnan(run("max.NaN.f32 D, A, B;", np.uint32, *bits)[4:].view(np.float32)).all()


def test_directed_rounding():
    a, b = np.full(4, 1.0, np.float32), np.array([2.0**-30, -(2.0**-30), 2.0**-30, 2.0**-24], np.float32)
    bits = [a.view(np.uint32), b.view(np.uint32)]
    up, down = np.float32(1) + np.float32(2.0**-23), np.float32(1) - np.float32(2.0**-24)
    assert run("add.rp.f32 D, A, B;", np.uint32, *bits).view(np.float32).tolist() == [up, 1.0, up, up]
    assert run("add.rm.f32 D, A, B;", np.uint32, *bits).view(np.float32).tolist() == [1.0, down, 1.0, 1.0]
    assert run("add.rz.f32 D, A, B;", np.uint32, *bits).view(np.float32).tolist() == [1.0, down, 1.0, 1.0]
