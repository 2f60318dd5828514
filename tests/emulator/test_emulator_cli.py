"""The command line, launch arguments, counters, and the errors of both."""

# ruff: noqa: E501 (kernels stay on one line)
from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner
from emulator_cuda import cuda_to_ptx, ptx_kernel

from cupyq import emulator
from cupyq.emulator.__main__ import main
from cupyq.errors import ArgumentError

REVERSE = """extern "C" __global__ void reverse(const float* x, float* y) {
    __shared__ float tile[128];
    tile[threadIdx.x] = x[blockIdx.x * 128 + threadIdx.x];
    %s
    y[blockIdx.x * 128 + threadIdx.x] = tile[127 - threadIdx.x];
}
"""
ARGS = {
    "grid": [2],
    "block": [128],
    "args": [{"dtype": "float32", "shape": [256], "fill": "arange"}, {"dtype": "float32", "shape": [256]}],
}


@pytest.fixture
def files(tmp_path):
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings (NVRTC) is not installed")
    (tmp_path / "good.cu").write_text(REVERSE % "__syncthreads();")
    (tmp_path / "bad.cu").write_text(REVERSE % "")
    spec = json.loads(json.dumps(ARGS))
    spec["args"][1]["save"] = str(tmp_path / "y.npy")
    (tmp_path / "args.json").write_text(json.dumps(spec))
    return tmp_path


def test_a_race_is_found_in_one_command(files):
    result = CliRunner().invoke(main, [str(files / "bad.cu"), "--args", str(files / "args.json")])
    assert result.exit_code == 1
    assert result.output.startswith("race")
    assert "bad.cu:5" in result.output


def test_a_clean_kernel_prints_counters_and_saves(files):
    result = CliRunner().invoke(
        main, [str(files / "good.cu"), "--args", str(files / "args.json"), "--by-line", "--by-source", "--by-loop"]
    )
    assert result.exit_code == 0, result.output
    assert "no fault found" in result.output
    assert "good.cu:5" in result.output
    y = np.load(files / "y.npy")
    assert np.array_equal(y, np.arange(256, dtype=np.float32).reshape(2, 128)[:, ::-1].ravel())


def test_json_counters(files):
    result = CliRunner().invoke(main, [str(files / "good.cu"), "--args", str(files / "args.json"), "--json"])
    out = json.loads(result.output[result.output.index("{") :])
    assert out["launch"] == {"blocks": 2, "warps": 8}
    assert out["global sectors"]["load"] == 32
    assert out["shared wavefronts"] == {"store": 8, "load": 8}


def test_what_cannot_be_run_exits_with_2(tmp_path):
    path = tmp_path / "x.ptx"
    path.write_text("this is not PTX")
    result = CliRunner().invoke(main, [str(path)])
    assert result.exit_code == 2
    assert result.output.strip()


BODY = "mov.u32 %r1, %tid.x; mul.lo.u32 %r2, %r1, {stride}; mov.u32 %r3, tile; add.u32 %r4, %r3, %r2; st.shared.u32 [%r4], %r1; ld.shared.u32 %r5, [%r4];"


@pytest.mark.parametrize(("stride", "ways"), [(4, 1), (8, 2), (16, 4), (128, 32), (132, 1), (0, 1)])
def test_bank_conflicts(stride, ways):
    ptx = ptx_kernel(BODY.format(stride=stride), shared=".shared .align 16 .b8 tile[8192];", params=0)
    counters = emulator.launch(ptx, "k", 3, 32, []).counters
    assert counters.shared_wavefronts == {"store": 3 * ways, "load": 3 * ways}
    assert sum(counters.shared_conflicts.values()) == 2 * 3 * (ways - 1)


@pytest.mark.parametrize(("stride", "sectors"), [(4, 4), (8, 8), (32, 32), (64, 32), (0, 1)])
def test_sectors(stride, sectors):
    ptx = ptx_kernel(
        f"mov.u32 %r1, %tid.x; mad.wide.u32 %rd1, %r1, {stride}, %q0; ld.global.u32 %r2, [%rd1];", params=1
    )
    counters = emulator.launch(ptx, "k", 2, 64, [np.zeros(4096, np.uint32)]).counters
    assert counters.global_requests == {"load": 4}
    assert counters.global_sectors == {"load": 4 * sectors}


def test_instruction_counts():
    ptx = ptx_kernel("mov.u32 %r1, 0; L: add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 10; @%p1 bra L;", params=0)
    counters = emulator.launch(ptx, "k", 5, 96, []).counters
    assert counters.instructions == {"integer": 150, "predicate": 150, "move": 15, "control": 150 + 15}
    assert [row["trips"] for row in counters.by_loop()] == [150]


SIMPLE = ptx_kernel("ld.global.u32 %r1, [%q0];", params=1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"args": []}, "1 parameters"),
        ({"args": [np.int32(1)]}, "4 bytes"),
        ({"args": ["x"]}, "str"),
        ({"block": 2048}, "1024"),
        ({"grid": 0}, "grid"),
        ({"checks": ("speed",)}, "speed"),
        ({"shared_bytes": 1 << 20}, "shared_bytes"),
    ],
)
def test_bad_launches_say_why(change, words):
    launch = {"grid": 1, "block": 32, "args": [np.zeros(4, np.uint32)], **change}
    with pytest.raises(ArgumentError, match=words):
        emulator.launch(SIMPLE, "k", **launch)


def test_read_only_and_overlapping_arrays():
    x = np.arange(64, dtype=np.uint32)
    ptx = ptx_kernel(
        "mov.u32 %r1, %tid.x; mad.wide.u32 %rd1, %r1, 4, %q0; mad.wide.u32 %rd2, %r1, 4, %q1; ld.global.u32 %r2, [%rd1]; add.u32 %r2, %r2, 1; st.global.u32 [%rd2], %r2;"
    )
    emulator.launch(ptx, "k", 1, 32, [x[:32], x[16:48]])
    assert x[47] == 32
    x.flags.writeable = False
    with pytest.raises(emulator.EmulatorFault, match="read-only"):
        emulator.launch(ptx, "k", 1, 32, [x[:32], x[32:]])


def test_device_functions_are_expanded():
    source = """__device__ __noinline__ int f(int x, int n) { int s = 0; for (int i = 0; i < n; i++) s += x * i; return s; }
    extern "C" __global__ void k(int* y, int n) { y[threadIdx.x] = f(threadIdx.x, n) + f(3, threadIdx.x); }"""
    y = np.zeros(32, np.int32)
    emulator.launch(cuda_to_ptx(source), "k", 1, 32, [y, np.int32(5)])
    t = np.arange(32)
    assert np.array_equal(y, t * 10 + 3 * t * (t - 1) // 2)


def test_divergence_counts_what_a_part_of_a_warp_runs():
    # Five lanes of each of two warps take a loop of 3 instructions 4 times; nothing else diverges.
    body = """mov.u32 %r1, %laneid; mov.u32 %r2, 0; setp.ge.u32 %p1, %r1, 5; @%p1 bra OUT;
    IN: add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 4; @%p2 bra IN;
    OUT: mov.u32 %r3, %tid.x; mad.wide.u32 %rd1, %r3, 4, %q0; st.global.u32 [%rd1], %r2;"""
    y = np.zeros(64, np.uint32)
    counters = emulator.launch(ptx_kernel(body, params=1), "k", 1, 64, [y]).counters
    assert y.tolist() == ([4] * 5 + [0] * 27) * 2
    assert counters.divergent == 2 * 3 * 4
    straight = emulator.launch(ptx_kernel(body.replace("@%p1", "@!%p1"), params=1), "k", 1, 5, [y[:5].copy()]).counters
    assert straight.divergent == straight.total_instructions  # a block of 5 threads: 27 lanes were never there
